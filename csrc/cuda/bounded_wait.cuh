// SPDX-License-Identifier: Apache-2.0
// Waiting for other ranks, never for ever: every wait has a limit on the time without progress.
// When it passes, the first thread of the rank to notice records who waited for whom and what, and
// from then on no kernel of this rank waits any more.
//
// The emulation's clock counts calls, so limits there are numbers of polls.
#pragma once

#include <cstdint>

#include "core/data_plane.h"
#include "cuda/compat.cuh"
#include "cuda/team.cuh"

namespace topoep {

// Value-coded signals: use u of a slot, u = 0, 1, .., adds 2u + 1, so `uses` uses make uses^2. A
// lost or doubled add gives a value from which no later use reaches its own square: a wait ends
// in an error, and never releases a slot too early, as a plain count would.
enum class SignalState { kEarly, kReached, kImpossible };

TOPOEP_HD uint64_t signal_after(uint64_t uses) {
    return uses * uses;
}
TOPOEP_HD uint64_t signal_step(uint64_t use) {
    return 2 * use + 1;
}
TOPOEP_HD SignalState signal_state(uint64_t value, uint64_t uses) {
    const uint64_t wanted = signal_after(uses);
    return value == wanted  ? SignalState::kReached
           : value < wanted ? SignalState::kEarly
                            : SignalState::kImpossible;
}

// What a thread waits for, as the error record will say.
struct Wanted {
    Waited what_for;
    int from;  // rank
    uint32_t what;
    uint64_t value;
    uint64_t seen;
};

class Waiter {
public:
    __device__ Waiter(const DataPlane& plane, Kernel kernel)
        : plane_(plane),
          header_(static_cast<StateHeader*>(plane.state)),
          kernel_(kernel),
          since_(global_timer()) {}

    __device__ bool failed() const { return load_relaxed(&header_->failed) != 0; }

    __device__ void progress() { since_ = global_timer(); }

    __device__ void fail(const Wanted& wanted) const {
        if (atomicCAS(&header_->failed, 0u, 1u) != 0) {
            return;  // another thread was first
        }
        ErrorRecord& record = *plane_.error;
        record.kernel = static_cast<uint32_t>(kernel_);
        record.rank = static_cast<uint32_t>(plane_.config.rank);
        record.block = blockIdx.x;
        record.from = static_cast<uint32_t>(wanted.from);
        record.what = wanted.what;
        record.wanted = wanted.value;
        record.seen = wanted.seen;
        record.generation = header_->generation[static_cast<int>(kernel_)] + 1;
        __threadfence_system();
        store_relaxed(&record.waited, static_cast<uint32_t>(wanted.what_for));
    }

    // After a poll that found nothing. False: stop waiting.
    __device__ bool keep_waiting(const Wanted& wanted) const {
        if (failed()) {
            return false;
        }
        // What comes over the network gives up first, so that a dead stream is on record before
        // what it brings about.
        const bool network =
            wanted.what_for == Waited::kData || wanted.what_for == Waited::kCountsSignal;
        const uint64_t limit = network ? plane_.timeout / 4 * 3 : plane_.timeout;
        if (global_timer() - since_ > limit) {
            fail(wanted);
            return false;
        }
        __nanosleep(64);
        return true;
    }

    // Polls a flag that only grows.
    __device__ bool until_at_least(const uint64_t* flag, Wanted wanted) const {
        for (;;) {
            wanted.seen = load_relaxed(flag);
            if (wanted.seen >= wanted.value) {
                return true;
            }
            if (!keep_waiting(wanted)) {
                return false;
            }
        }
    }

    // Polls a signal until it has seen `uses` uses, and no more.
    template <class Network>
    __device__ bool until_signal(const Network& network, uint32_t signal, uint64_t uses,
                                 Wanted wanted) const {
        wanted.value = signal_after(uses);
        for (;;) {
            wanted.seen = network.read(signal);
            const SignalState state = signal_state(wanted.seen, uses);
            if (state == SignalState::kReached) {
                return true;
            }
            if (state == SignalState::kImpossible) {
                wanted.what_for = Waited::kImpossibleSignal;
                fail(wanted);
                return false;
            }
            if (!keep_waiting(wanted)) {
                return false;
            }
        }
    }

private:
    const DataPlane& plane_;
    StateHeader* header_;
    Kernel kernel_;
    uint64_t since_;
};

enum class UnitState { kFinished, kWaiting, kReady, kFailed };

constexpr int kNoUnitLeft = -1;
constexpr int kGaveUp = -2;

// Looks over units of work until one can go on, starting behind the last one, so that none starves
// and a slow stream holds up no other. check(unit, &wanted) says how a unit is. Called by the first
// warp; the result is the same in all lanes.
template <class Check>
__device__ int next_unit(Waiter& waiter, int num_units, int last, Check&& check) {
    if (num_units == 0) {
        return kNoUnitLeft;
    }
    const int lane = warp_lane();
    waiter.progress();
    for (;;) {
        bool left = false;
        Wanted wanted{};
        for (int base = 0; base < num_units; base += kWarpSize) {
            const int turn = base + lane;
            const int unit = (last + 1 + turn) % num_units;
            const UnitState state = turn < num_units ? check(unit, &wanted) : UnitState::kFinished;
            if (__any_sync(kFullWarp, state == UnitState::kFailed)) {
                return kGaveUp;
            }
            const unsigned ready = __ballot_sync(kFullWarp, state == UnitState::kReady);
            if (ready != 0) {
                return (last + 1 + base + __ffs(static_cast<int>(ready)) - 1) % num_units;
            }
            left = left || __any_sync(kFullWarp, state == UnitState::kWaiting) != 0;
        }
        if (!left) {
            return kNoUnitLeft;
        }
        const bool waits = wanted.what_for != Waited::kNothing;
        if (__any_sync(kFullWarp, waits && !waiter.keep_waiting(wanted))) {
            return kGaveUp;
        }
    }
}

// The last block of a rank's kernel to come here runs update(thread, num_threads) and counts the
// launch: no block can read a sequence number that another one has moved already.
template <class Update>
__device__ void leave_kernel(const DataPlane& plane, Kernel kernel, int num_blocks,
                             Update&& update) {
    TOPOEP_SHARED(int, is_last, [1]);
    StateHeader* header = static_cast<StateHeader*>(plane.state);
    uint32_t* leaving = header->leaving + static_cast<int>(kernel);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last[0] = atomicAdd(leaving, 1u) == static_cast<unsigned>(num_blocks - 1);
        __threadfence();
    }
    __syncthreads();
    if (is_last[0]) {
        update(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
        if (threadIdx.x == 0) {
            store_relaxed(leaving, 0u);
            ++header->generation[static_cast<int>(kernel)];
        }
    }
}

}  // namespace topoep
