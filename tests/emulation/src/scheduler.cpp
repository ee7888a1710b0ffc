// SPDX-License-Identifier: Apache-2.0
// One host thread runs everything. A thread that waits switches straight to the next one that is
// ready; the host's own stack runs only before the first and after the last.
#include "scheduler.h"

#include <algorithm>
#include <climits>
#include <utility>

#include "fiber.h"
#include "options.h"
#include "random.h"

namespace emu {

int fuel = INT_MAX;

namespace {

Random choices;
void* host_stack_pointer = nullptr;

// Ready threads are ready[first_ready ..]; the part before is spent and trimmed now and then.
std::vector<Thread*> ready;
size_t first_ready = 0;

// Anything from 1 to twice the period: a fixed number would fall on the same line of a loop again
// and again.
void refuel() {
    const uint32_t period = static_cast<uint32_t>(options.preempt);
    fuel = period == 0 ? INT_MAX : static_cast<int>(1 + choices.below(2 * period));
}

Thread* take_ready() {
    if (first_ready == ready.size()) {
        ready.clear();
        first_ready = 0;
        return nullptr;
    }
    // The other orders were made when the threads became ready.
    if (options.order == Order::kRandom) {
        const uint32_t count = static_cast<uint32_t>(ready.size() - first_ready);
        std::swap(ready[first_ready], ready[first_ready + choices.below(count)]);
    }
    Thread* thread = ready[first_ready++];
    constexpr size_t kTrim = 4096;
    if (first_ready > kTrim && first_ready * 2 > ready.size()) {
        ready.erase(ready.begin(), ready.begin() + static_cast<std::ptrdiff_t>(first_ready));
        first_ready = 0;
    }
    return thread;
}

// Continues `next`, or the host when it is nullptr.
void switch_to(Thread* next) {
    Thread* from = current;
    current = next;
    ++stats.switches;
    ++launch_state.switches;
    emu_switch_stack(from != nullptr ? &from->stack_pointer : &host_stack_pointer,
                     next != nullptr ? next->stack_pointer : host_stack_pointer);
}

// Whole warps in random order, their lanes in order: the schedule that is nearest to hardware.
void push_warps_shuffled(const std::vector<Thread*>& threads) {
    static std::vector<Warp*> warps;
    warps.clear();
    for (Thread* thread : threads) {
        if (thread->warp->woken == 0) {
            warps.push_back(thread->warp);
        }
        thread->warp->woken |= 1u << thread->lane;
    }
    for (size_t i = warps.size(); i > 1; --i) {
        std::swap(warps[i - 1], warps[choices.below(static_cast<uint32_t>(i))]);
    }
    for (Warp* warp : warps) {
        for (; warp->woken != 0; warp->woken &= warp->woken - 1) {
            ready.push_back(warp->lanes[__builtin_ctz(warp->woken)]);
        }
    }
}

}  // namespace

void reset_schedule() {
    choices = Random(options.seed);
    ready.clear();
    first_ready = 0;
    refuel();
}

uint32_t schedule_choice(uint32_t limit) {
    return choices.below(limit);
}

void make_ready(const std::vector<Thread*>& threads) {
    for (Thread* thread : threads) {
        thread->state = ThreadState::kReady;
    }
    if (options.order == Order::kWarpRandom) {
        push_warps_shuffled(threads);
    } else if (options.order == Order::kReverse) {
        ready.insert(ready.end(), threads.rbegin(), threads.rend());
    } else {
        ready.insert(ready.end(), threads.begin(), threads.end());
    }
}

void run_ready_threads() {
    if (Thread* next = take_ready()) {
        switch_to(next);
    }
    current = nullptr;
}

void suspend() {
    // Loops that wait in barriers do not poll, and are caught here.
    if (options.max_switches != 0 && launch_state.switches > options.max_switches) {
        fail_launch(Kind::kLivelock, Place::of(current->site), {},
                    "livelock: the launch passed " + std::to_string(options.max_switches) +
                        " switches; " + name_of(*current) + " was last seen in {0}");
    }
    Thread* next = take_ready();
    if (next != current) {  // the last to come to a barrier may be the first to leave it
        switch_to(next);
    }
}

void give_way() {
    if (first_ready == ready.size()) {
        return;
    }
    ready.push_back(current);
    suspend();
}

void yield() {
    give_way();
}

void preempt() {
    refuel();
    give_way();
}

void fail_launch(Kind kind, const Place& first, const Place& second, std::string message) {
    report_log.add(kind, first, second, std::move(message));
    launch_state.failure = "the kernel failed; see the reports";
    switch_to(nullptr);
    __builtin_unreachable();
}

void count_poll(uintptr_t code) {
    // A spin loop has no other reason to let anybody run. Not at each poll, since most loads of
    // flags find what they look for.
    constexpr uint64_t kPollsBetweenSwitches = 64;
    if (++launch_state.polls % kPollsBetweenSwitches == 0) {
        give_way();
    }
    if (launch_state.polls <= options.max_polls) {
        return;
    }
    // The cause is mostly somewhere else: say what everybody waits for.
    std::string message = "livelock: " + std::to_string(options.max_polls) +
                          " polls without progress; " + name_of(*current) + " polls at {0}";
    for (const Block* block : launch_state.resident) {
        for (const Barrier& barrier : block->barriers) {
            if (!barrier.waiting.empty()) {
                message += "; block " + std::to_string(block->in_grid) + ": " +
                           std::to_string(barrier.waiting.size()) + " threads wait at " +
                           text_of(barrier.site);
            }
        }
    }
    if (launch_state.resident.size() < launch_state.num_blocks) {
        message += "; only " + std::to_string(launch_state.resident.size()) + " of " +
                   std::to_string(launch_state.num_blocks) +
                   " blocks are resident (option `resident`)";
    }
    fail_launch(Kind::kLivelock, Place::of(code), {}, std::move(message));
}

}  // namespace emu
