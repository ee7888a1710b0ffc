// SPDX-License-Identifier: Apache-2.0
// How knowledge moves. Each thread knows, by level: of its own past, all; of its block, everything
// before the current epoch; of its warp, the clocks in Warp::known; of the rest, its views. What it
// publishes at a fence is all four together.
#include "ordering.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "scheduler.h"
#include "shadow.h"

namespace emu {
namespace {

// What reading an atomic variable can teach, by the scope that both sides' fences must have.
struct Released {
    ViewPtr device;
    std::vector<std::pair<uint32_t, ViewPtr>> blocks;  // of threads of this block

    ViewPtr* of_block(uint32_t block) {
        for (auto& entry : blocks) {
            if (entry.first == block) {
                return &entry.second;
            }
        }
        return nullptr;
    }
};

std::unordered_map<uintptr_t, Released> released;

ViewPtr join(const ViewPtr& a, const ViewPtr& b) {
    return View::join(a, b, launch_state.threads_per_block);
}

// Ends the thread's current clock, so that a stamp of the new one covers all it did until now and
// nothing that it does later.
Stamp end_clock(Thread& thread) {
    if (++thread.clock > kMaxClock) {
        fail_launch(Kind::kLimit, Place::of(thread.site), {},
                    "too many fences and partial barriers in one thread for the race checker");
    }
    return stamp_of(thread);
}

// Stamps for the thread itself, and for the lanes that it met in __syncwarp since the last barrier
// (the barrier's epoch covers what it met before), in increasing order of thread.
void append_stamps(Thread& thread, std::vector<View::ThreadEntry>& stamps) {
    const Stamp own = end_clock(thread);
    const Warp& warp = *thread.warp;
    if (warp.synced_epoch != thread.block->epoch) {
        stamps.push_back({thread.in_grid, own});
        return;
    }
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
        const uint32_t clock = lane == thread.lane ? thread.clock : warp.known[thread.lane][lane];
        if (clock != 0) {
            stamps.push_back({warp.first_thread + lane, {own.epoch, clock}});
        }
    }
}

// All that happened before this point of the thread.
ViewPtr snapshot(Thread& thread) {
    std::vector<View::ThreadEntry> stamps;
    append_stamps(thread, stamps);
    const Block& block = *thread.block;
    ViewPtr own = std::make_shared<const View>(
        std::vector<View::BlockEntry>{{block.in_grid, block.epoch}}, std::move(stamps));
    return join(join(thread.acquired, block.acquired), own);
}

void release(Thread& thread, Released& variable, bool replaces) {
    // A plain store ends what earlier writers released through this variable: its readers see the
    // store, not them. A read-modify-write passes their release on.
    if (replaces) {
        variable.device = nullptr;
        variable.blocks.clear();
    }
    variable.device = join(variable.device, thread.published_device);
    if (thread.published_block != nullptr) {
        ViewPtr* own_block = variable.of_block(thread.block->in_grid);
        if (own_block == nullptr) {
            variable.blocks.emplace_back(thread.block->in_grid, nullptr);
            own_block = &variable.blocks.back().second;
        }
        *own_block = join(*own_block, thread.published_block);
    }
}

}  // namespace

bool covered_by_views(uint32_t in_grid, Stamp stamp, const Thread& now) {
    if (now.acquired == nullptr && now.block->acquired == nullptr) {
        return false;
    }
    const uint32_t block = in_grid / launch_state.threads_per_block;
    return (now.acquired != nullptr && now.acquired->covers(block, in_grid, stamp)) ||
           (now.block->acquired != nullptr && now.block->acquired->covers(block, in_grid, stamp));
}

void forget_releases() {
    released.clear();
}

void order_fence(Thread& thread, FenceScope scope) {
    // Acquire: what earlier atomics saw is known from here on. A block fence acquires from threads
    // of its own block only, whatever fence those used.
    thread.acquired = join(thread.acquired, thread.pending_block);
    thread.pending_block = nullptr;
    if (scope == FenceScope::kDevice) {
        thread.acquired = join(thread.acquired, thread.pending_device);
        thread.pending_device = nullptr;
    }
    // Release: later atomics pass on what happened before this point. Taking the view here, and not
    // at the atomic, is what finds a write that comes after the fence meant to publish it.
    thread.published_block = snapshot(thread);
    if (scope == FenceScope::kDevice) {
        thread.published_device = thread.published_block;
    }
}

void order_atomic(Thread& thread, uintptr_t address, AtomicOp op, bool wrote) {
    const bool reads = op != AtomicOp::kStore;
    const bool publishes = wrote && thread.published_block != nullptr;
    if (!publishes && released.empty()) {
        return;  // the common case: counters in kernels without any fence
    }
    auto found = released.find(address);
    if (found != released.end() && reads) {
        Released& variable = found->second;
        thread.pending_device = join(thread.pending_device, variable.device);
        if (const ViewPtr* own_block = variable.of_block(thread.block->in_grid)) {
            thread.pending_block = join(thread.pending_block, *own_block);
        }
    }
    if (publishes || (found != released.end() && op == AtomicOp::kStore)) {
        release(thread, released[address], op == AtomicOp::kStore);
    }
}

void order_warp(Warp& warp, uint32_t lanes) {
    uint32_t latest[kWarpSize] = {};
    ViewPtr acquired;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
        const uint32_t lane = static_cast<uint32_t>(__builtin_ctz(rest));
        for (uint32_t k = 0; k < kWarpSize; ++k) {
            latest[k] = std::max(latest[k], warp.known[lane][k]);
        }
        Thread& thread = *warp.lanes[lane];
        acquired = join(acquired, thread.acquired);
        latest[lane] = std::max(latest[lane], end_clock(thread).clock);
        warp.synced_epoch = thread.block->epoch;
    }
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
        const uint32_t lane = static_cast<uint32_t>(__builtin_ctz(rest));
        std::copy_n(latest, kWarpSize, warp.known[lane]);
        if (acquired != nullptr) {
            warp.lanes[lane]->acquired = acquired;
        }
    }
}

void order_arrival(Thread& thread, Barrier& barrier) {
    append_stamps(thread, barrier.stamps);
    barrier.view = join(barrier.view, thread.acquired);
}

void order_whole_block(Block& block, const Barrier& barrier) {
    ++block.epoch;
    // What one thread learnt from other blocks, all know now. Kept once for the block: most
    // barriers then have nothing to do here.
    for (Thread* thread : barrier.waiting) {
        if (thread->acquired != nullptr) {
            block.acquired = join(block.acquired, thread->acquired);
            thread->acquired = nullptr;
        }
    }
}

void order_part_of_block(const Barrier& barrier) {
    std::vector<View::ThreadEntry> stamps = barrier.stamps;
    std::sort(stamps.begin(), stamps.end(), [](const auto& a, const auto& b) {
        return a.thread != b.thread ? a.thread < b.thread : a.stamp.clock > b.stamp.clock;
    });
    stamps.erase(std::unique(stamps.begin(), stamps.end(),
                             [](const auto& a, const auto& b) { return a.thread == b.thread; }),
                 stamps.end());
    const ViewPtr met = std::make_shared<const View>(std::vector<View::BlockEntry>{}, stamps);
    const ViewPtr view = join(barrier.view, met);
    for (Thread* thread : barrier.waiting) {
        thread->acquired = view;  // it covers what the thread knew, since that went into it
    }
}

void order_grid() {
    // A new era instead of views: nothing recorded so far can race with what follows.
    launch_state.first_serial += launch_state.threads_per_block * launch_state.num_blocks;
    for (Block* block : launch_state.resident) {
        ++block->epoch;
    }
}

}  // namespace emu
