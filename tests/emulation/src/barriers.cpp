// SPDX-License-Identifier: Apache-2.0
// Barriers of a block, of a part of it (named barriers), and of the whole grid.
#include "barriers.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "options.h"
#include "ordering.h"
#include "scheduler.h"

namespace emu {
namespace {

bool same(const Site& a, const Site& b) {
    return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

void report_divergence(const Thread& a, const Thread& b) {
    report_log.add(Kind::kBarrier, Place::of(a.site), Place::of(b.site),
                   "divergent barrier: " + name_of(a) + " waits at {0}, " + name_of(b) + " at {1}");
}

int vote_result(Vote vote, const Barrier& barrier) {
    switch (vote) {
        case Vote::kAnd:
            return barrier.vote_and;
        case Vote::kOr:
            return barrier.vote_or;
        case Vote::kCount:
            return barrier.vote_count;
        case Vote::kNone:
            break;
    }
    return 0;
}

void reset(Barrier& barrier) {
    barrier.waiting.clear();
    barrier.stamps.clear();
    barrier.view = nullptr;
    barrier.arrived = 0;
    barrier.chain = 0;
    barrier.vote_and = true;
    barrier.vote_or = false;
    barrier.vote_count = 0;
}

bool is_complete(const Block& block, const Barrier& barrier) {
    // A barrier of all threads gets smaller as threads exit, a named one does not.
    const size_t came = barrier.waiting.size() + barrier.arrived;
    const size_t expected =
        barrier.expected != 0 ? static_cast<size_t>(barrier.expected) : block.live;
    return came != 0 && came == expected;
}

void release(Block& block, Barrier& barrier) {
    ++stats.barriers;
    launch_state.polls = 0;
    // The usual barrier raises the epoch, which orders all threads at the cost of one number. A
    // barrier for some threads has to name them.
    const bool whole_block =
        barrier.expected == 0 || barrier.waiting.size() == launch_state.threads_per_block;
    if (whole_block) {
        order_whole_block(block, barrier);
    } else {
        order_part_of_block(barrier);
    }
    const Thread* divergent = nullptr;
    for (Thread* thread : barrier.waiting) {
        if (divergent == nullptr && !same(thread->site, barrier.site)) {
            divergent = thread;
        }
        thread->vote_result = vote_result(thread->vote, barrier);
        thread->chain = barrier.chain + 1;
    }
    // Threads may meet in a named barrier from different lines: producers and consumers do.
    if (divergent != nullptr && barrier.expected == 0) {
        report_divergence(*barrier.waiting.front(), *divergent);
    }
    make_ready(barrier.waiting);
    reset(barrier);
}

// The current thread comes to a barrier. All must agree on how many threads it has (0: all).
Barrier& come_to(int id, int expected, Site site) {
    Thread& thread = *current;
    thread.site = site;
    Barrier& barrier = thread.block->barriers[id];
    if (barrier.waiting.empty() && barrier.arrived == 0) {
        barrier.site = site;
        barrier.expected = expected;
    } else if (barrier.expected != expected) {
        fail_launch(Kind::kBarrier, Place::of(site), Place::of(barrier.site),
                    "barrier " + std::to_string(id) + ": " + name_of(thread) + " expects " +
                        std::to_string(expected) + " threads at {0}, others " +
                        std::to_string(barrier.expected) + " at {1} (0 means all)");
    }
    barrier.chain = std::max(barrier.chain, thread.chain);
    return barrier;
}

Barrier& come_to_named(int id, int num_threads, Site site) {
    constexpr int kWarp = static_cast<int>(kWarpSize);
    if (id < 0 || id >= kNumBarriers || num_threads <= 0 || num_threads % kWarp != 0) {
        fail_launch(Kind::kBarrier, Place::of(site), {},
                    "named barrier " + std::to_string(id) + " of " + std::to_string(num_threads) +
                        " threads at {0}: ids are 0 to 15, and threads come in whole warps");
    }
    Barrier& barrier = come_to(id, num_threads, site);
    order_arrival(*current, barrier);
    return barrier;
}

void wait_at(Barrier& barrier, Vote vote) {
    Thread& thread = *current;
    thread.vote = vote;
    thread.state = ThreadState::kAtBarrier;
    barrier.waiting.push_back(&thread);
    if (is_complete(*thread.block, barrier)) {
        release(*thread.block, barrier);
    }
    suspend();
}

void release_grid() {
    std::vector<Thread*>& waiting = launch_state.at_grid_barrier;
    ++stats.barriers;
    launch_state.polls = 0;
    order_grid();
    uint64_t chain = 0;
    for (const Thread* thread : waiting) {
        chain = std::max(chain, thread->chain);
    }
    for (Thread* thread : waiting) {
        thread->chain = chain + 1;
    }
    make_ready(waiting);
    waiting.clear();
}

}  // namespace

int block_barrier(Vote vote, int predicate, Site site) {
    Barrier& barrier = come_to(0, 0, site);
    barrier.vote_and &= predicate != 0;
    barrier.vote_or |= predicate != 0;
    barrier.vote_count += predicate != 0;
    wait_at(barrier, vote);
    return current->vote_result;
}

void named_barrier(int id, int num_threads, Site site) {
    wait_at(come_to_named(id, num_threads, site), Vote::kNone);
}

void named_barrier_arrive(int id, int num_threads, Site site) {
    Barrier& barrier = come_to_named(id, num_threads, site);
    // Counted, not waiting: only its stamps and its view stay with the barrier.
    ++barrier.arrived;
    if (is_complete(*current->block, barrier)) {
        release(*current->block, barrier);
    }
    spend_fuel();
}

void grid_barrier(Site site) {
    Thread& thread = *current;
    thread.site = site;
    if (!launch_state.request.cooperative) {
        fail_launch(Kind::kBarrier, Place::of(site), {},
                    "grid barrier at {0} in a launch that is not cooperative");
    }
    thread.state = ThreadState::kAtGridBarrier;
    launch_state.at_grid_barrier.push_back(&thread);
    // Every thread of the grid must come: on hardware one that has exited may or may not be missed.
    if (launch_state.at_grid_barrier.size() ==
        size_t{launch_state.num_blocks} * launch_state.threads_per_block) {
        release_grid();
    }
    suspend();
}

void leave_barriers(Block& block) {
    // A thread that has exited counts as arrived at __syncthreads, as on hardware. A named barrier
    // counts threads and waits on.
    Barrier& barrier = block.barriers[0];
    if (barrier.expected == 0 && is_complete(block, barrier)) {
        release(block, barrier);
    }
}

void clear_barriers(Block& block) {
    for (Barrier& barrier : block.barriers) {
        reset(barrier);
    }
}

}  // namespace emu
