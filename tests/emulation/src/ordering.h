// SPDX-License-Identifier: Apache-2.0
// Happens-before: which accesses of other threads are ordered before what a thread does now.
//
// Order comes from barriers, from __syncwarp, and from the pattern
//     write, fence, atomic ... atomic that reads it, fence, read
// and from nothing else: not from atomics alone, nor from shuffles, nor from the schedule. Values
// are always sequentially consistent here, so these rules are the only way to see a missing fence.
#pragma once

#include <cstdint>

#include "state.h"

namespace emu {

inline Stamp stamp_of(const Thread& thread) {
    return {thread.block->epoch, thread.clock};
}

// Whether an access by the thread `in_grid` with this stamp is known through views.
bool covered_by_views(uint32_t in_grid, Stamp stamp, const Thread& now);

// Whether an access by the thread `in_grid` with this stamp is ordered before what `now` does.
inline bool happened_before(uint32_t in_grid, Stamp stamp, const Thread& now) {
    if (in_grid == now.in_grid) {
        return true;
    }
    if (in_grid - now.block->first_thread < launch_state.threads_per_block) {
        if (stamp.epoch < now.block->epoch) {
            return true;
        }
        const uint32_t lane = in_grid - now.warp->first_thread;
        if (lane < kWarpSize && stamp.clock < now.warp->known[now.lane][lane]) {
            return true;
        }
    }
    return covered_by_views(in_grid, stamp, now);
}

// Forgets what atomics of earlier launches released.
void forget_releases();

void order_fence(Thread& thread, FenceScope scope);
void order_atomic(Thread& thread, uintptr_t address, AtomicOp op, bool wrote);

// The given lanes met in __syncwarp.
void order_warp(Warp& warp, uint32_t lanes);

// A thread came to a barrier; all of the block were released by one; some threads were.
void order_arrival(Thread& thread, Barrier& barrier);
void order_whole_block(Block& block, const Barrier& barrier);
void order_part_of_block(const Barrier& barrier);
// All threads of all blocks met.
void order_grid();

}  // namespace emu
