// SPDX-License-Identifier: Apache-2.0
// As much of NCCL's device API as comm/nccl_network.cuh calls: it writes down what it is asked for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda {
enum thread_scope { thread_scope_system };
enum memory_order { memory_order_acquire };
}  // namespace cuda

// One operation: {kind, context, team's ranks, peer, target, source, bytes, signal, add}.
struct Noted {
    int64_t kind, context, team, peer, target, source, bytes, signal, add;
};

struct ncclDevComm {
    int nRanks;
    Noted* noted;  // one per thread of the block, zero at first
};
struct ncclTeam {
    int nRanks;
};
inline ncclTeam ncclTeamWorld(const ncclDevComm& comm) {
    return {comm.nRanks};
}

using ncclGinSignal_t = uint32_t;
struct ncclGin_WeakSignalAdd {
    uint32_t signal;
    uint64_t value;
};
struct ncclGin_None {};
struct ncclCoopThread {};

struct ncclGin {
    const ncclDevComm& comm;
    int context;

    Noted& next() const { return comm.noted[threadIdx.x]; }
    void put(ncclTeam team, int peer, ncclWindow_t, size_t target, ncclWindow_t, size_t source,
             size_t bytes, ncclGin_WeakSignalAdd action, ncclGin_None, ncclCoopThread, ncclGin_None,
             cuda::thread_scope, cuda::thread_scope) const {
        next() = {1,
                  context,
                  team.nRanks,
                  peer,
                  static_cast<int64_t>(target),
                  static_cast<int64_t>(source),
                  static_cast<int64_t>(bytes),
                  action.signal,
                  static_cast<int64_t>(action.value)};
    }
    void signal(ncclTeam team, int peer, ncclGin_WeakSignalAdd action, ncclCoopThread, ncclGin_None,
                cuda::thread_scope, cuda::thread_scope) const {
        next() = {2,
                  context,
                  team.nRanks,
                  peer,
                  0,
                  0,
                  0,
                  action.signal,
                  static_cast<int64_t>(action.value)};
    }
    uint64_t readSignal(ncclGinSignal_t signal, uint32_t bits, cuda::memory_order) const {
        next() = {3, context, 0, 0, 0, 0, 0, signal, bits};
        return 1000 + signal;
    }
};
