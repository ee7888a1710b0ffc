// SPDX-License-Identifier: Apache-2.0
// Runs a grid: admits blocks, gives every thread a fiber, and says why they do not all end.
//
// Blocks run in waves: as many as may be resident start together, and the next ones start when all
// of these have ended. Hardware refills sooner, but promises no more than this.
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "access.h"
#include "barriers.h"
#include "fiber.h"
#include "options.h"
#include "ordering.h"
#include "scheduler.h"
#include "shadow.h"
#include "shared_memory.h"
#include "warp_collectives.h"

namespace emu {

Launch launch_state;
Thread* current = nullptr;

namespace {

// Kept from launch to launch: a test makes thousands of small launches.
std::vector<std::unique_ptr<Thread>> thread_pool;
std::vector<std::unique_ptr<Block>> block_pool;

uint3 unflatten(uint32_t linear, const dim3& shape) {
    return {linear % shape.x, linear / shape.x % shape.y, linear / shape.x / shape.y};
}

uint64_t volume(const dim3& shape) {
    return uint64_t{shape.x} * shape.y * shape.z;
}

void exit_thread(Thread& thread) {
    Block& block = *thread.block;
    thread.state = ThreadState::kExited;
    --block.live;
    launch_state.polls = 0;
    launch_state.chain = std::max(launch_state.chain, thread.chain);
    leave_barriers(block);
    leave_collectives(thread);
}

// The bottom of every fiber.
void thread_main() {
    const LaunchRequest& request = launch_state.request;
    request.invoke(request.call);
    exit_thread(*current);
    suspend();  // for good: nobody makes an exited thread ready
    __builtin_unreachable();
}

void start_thread(Thread& thread, size_t stack_index, Block& block, uint32_t in_block) {
    thread = Thread();
    thread.block = &block;
    thread.warp = &block.warps[in_block / kWarpSize];
    thread.index = unflatten(in_block, launch_state.request.block);
    thread.in_block = in_block;
    thread.in_grid = block.first_thread + in_block;
    thread.lane = in_block % kWarpSize;
    thread.warp->lanes[thread.lane] = &thread;
    thread.warp->present |= 1u << thread.lane;

    char* stack = stacks.stack(stack_index);
    thread.stack_begin = reinterpret_cast<uintptr_t>(stack);
    // Staggered by lane: equal offsets in their pages would make all stacks share cache sets.
    constexpr size_t kStagger = 192;
    thread.stack_pointer =
        prepare_stack(stack + options.stack_bytes - thread.lane * kStagger, thread_main);
}

// The block's threads run on the stacks from first_stack on.
void start_block(Block& block, uint32_t index, size_t first_stack) {
    const uint32_t num_threads = launch_state.threads_per_block;
    block.in_grid = index;
    block.index = unflatten(index, launch_state.request.grid);
    block.first_thread = index * num_threads;
    block.live = num_threads;
    block.epoch = 1;
    block.acquired = nullptr;
    clear_barriers(block);
    block.warps.assign((num_threads + kWarpSize - 1) / kWarpSize, Warp{});
    for (size_t i = 0; i < block.warps.size(); ++i) {
        block.warps[i].first_thread = block.first_thread + static_cast<uint32_t>(i) * kWarpSize;
    }
    block.threads.clear();
    for (uint32_t i = 0; i < num_threads; ++i) {
        Thread& thread = *thread_pool[first_stack + i];
        start_thread(thread, first_stack + i, block, i);
        block.threads.push_back(&thread);
    }
    shared_memory.poison(block);
}

std::vector<uint32_t> block_order() {
    std::vector<uint32_t> order(launch_state.num_blocks);
    for (uint32_t i = 0; i < order.size(); ++i) {
        order[i] = i;
    }
    // Several resident blocks start in index order, as on hardware: code that looks back at lower
    // blocks may rely on it.
    if (options.resident > 1 || launch_state.request.cooperative) {
        return order;
    }
    if (options.order == Order::kReverse) {
        std::reverse(order.begin(), order.end());
    } else if (options.order != Order::kInOrder) {
        for (uint32_t i = launch_state.num_blocks; i > 1; --i) {
            std::swap(order[i - 1], order[schedule_choice(i)]);
        }
    }
    return order;
}

const char* state_name(ThreadState state) {
    switch (state) {
        case ThreadState::kAtBarrier:
            return "barrier";
        case ThreadState::kAtCollective:
            return "warp collective";
        default:
            return "grid barrier";
    }
}

void report_deadlock(const Block& block) {
    // Grouped by place: what differs from thread to thread is where each of them waits.
    std::map<std::string, int> waiting;
    const Thread* first = nullptr;
    for (const Thread* thread : block.threads) {
        if (thread->state != ThreadState::kExited) {
            ++waiting[std::string(state_name(thread->state)) + " at " + text_of(thread->site)];
            first = first == nullptr ? thread : first;
        }
    }
    std::string message = "deadlock in block " + std::to_string(block.in_grid) + ":";
    for (const auto& entry : waiting) {
        message += " " + std::to_string(entry.second) + " threads wait in " + entry.first + ";";
    }
    message += " " + std::to_string(block.threads.size() - block.live) + " have exited";
    report_log.add(Kind::kDeadlock, Place::of(first->site), {}, message);
    launch_state.failure = "deadlock; see the reports";
}

// Runs these blocks, interleaved, to their end.
void run_wave(const uint32_t* indices, size_t count) {
    launch_state.resident.clear();
    launch_state.at_grid_barrier.clear();
    std::vector<Thread*> all;
    for (size_t i = 0; i < count; ++i) {
        Block& block = *block_pool[i];
        start_block(block, indices[i], i * launch_state.threads_per_block);
        launch_state.resident.push_back(&block);
        all.insert(all.end(), block.threads.begin(), block.threads.end());
    }
    make_ready(all);
    run_ready_threads();
    // No thread is ready, but some are left: they wait for one another. One block says enough.
    for (const Block* block : launch_state.resident) {
        if (launch_state.failure == nullptr && block->live != 0) {
            report_deadlock(*block);
        }
    }
}

const char* refuse(const LaunchRequest& request) {
    if (current != nullptr) {
        return "a kernel cannot launch kernels in the emulation";
    }
    const uint64_t threads = volume(request.block);
    const uint64_t blocks = volume(request.grid);
    if (threads == 0 || threads > kMaxThreadsPerBlock || blocks == 0 || blocks >= 1u << 31) {
        return "invalid configuration argument";
    }
    if (request.shared_bytes > options.max_shared_bytes) {
        return "invalid argument";  // CUDA's words, when the opt-in asks for too much
    }
    return threads * blocks >= 1u << 31 ? "more threads than the emulation can number" : nullptr;
}

bool reserve_pools(size_t num_blocks) {
    const size_t num_threads = num_blocks * launch_state.threads_per_block;
    if (!stacks.reserve(num_threads, options.stack_bytes)) {
        return false;
    }
    while (thread_pool.size() < num_threads) {
        thread_pool.push_back(std::make_unique<Thread>());
    }
    while (block_pool.size() < num_blocks) {
        auto block = std::make_unique<Block>();
        block->shared = SharedMemory::make_arena();
        if (block->shared == nullptr) {
            return false;
        }
        block_pool.push_back(std::move(block));
    }
    return true;
}

void begin_launch(const LaunchRequest& request) {
    Launch& launch = launch_state;
    // Serial numbers go on after those of the launch before, and start over when they run out.
    const uint32_t used = launch.threads_per_block * launch.num_blocks;
    const uint32_t needed = static_cast<uint32_t>(volume(request.block) * volume(request.grid));
    if (launch.first_serial + used > UINT32_MAX / 2 - needed) {
        shadow.forget_all_accesses();
        launch.first_serial = 1;
    } else {
        launch.first_serial += used;
    }
    ++launch.number;
    launch.request = request;
    launch.threads_per_block = static_cast<uint32_t>(volume(request.block));
    launch.num_blocks = static_cast<uint32_t>(volume(request.grid));
    launch.polls = launch.switches = launch.chain = 0;
    launch.failure = nullptr;
    reset_schedule();
    reset_history_checks();
    forget_releases();
    shared_memory.reset(request.shared_bytes);
}

}  // namespace

const char* run(const LaunchRequest& request) {
    if (const char* reason = refuse(request)) {
        return reason;
    }
    begin_launch(request);
    const size_t num_blocks = launch_state.num_blocks;
    const size_t at_once =
        request.cooperative
            ? num_blocks
            : std::min(num_blocks, static_cast<size_t>(std::max(options.resident, 1)));
    if (!reserve_pools(at_once)) {
        return "more resident threads than this machine has memory mappings for";
    }
    const std::vector<uint32_t> order = block_order();
    for (size_t i = 0; i < num_blocks && launch_state.failure == nullptr; i += at_once) {
        run_wave(&order[i], std::min(at_once, num_blocks - i));
    }
    stats.chain += launch_state.chain;
    launch_state.resident.clear();
    return launch_state.failure;
}

uint3 thread_index() {
    return current->index;
}
uint3 block_index() {
    return current->block->index;
}
dim3 block_shape() {
    return launch_state.request.block;
}
dim3 grid_shape() {
    return launch_state.request.grid;
}

void trap(Site site) {
    fail_launch(Kind::kTrap, Place::of(site), {}, "__trap at {0} by " + name_of(*current));
}

}  // namespace emu
