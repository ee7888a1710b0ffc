// SPDX-License-Identifier: Apache-2.0
// NcclNetwork's device functions. Kernels are compiled for them in nccl_data_plane.cu.
#pragma once

#include "comm/nccl_network.h"
#include "cuda/compat.cuh"
#include "cuda/team.cuh"

namespace topoep {

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 3)
using NcclSignalAdd = ncclGin_WeakSignalAdd;
#else
using NcclSignalAdd = ncclGin_SignalAdd;
#endif

constexpr uint32_t kSignalBits = 64;

__device__ inline ncclGin gin_of(const NcclNetwork& network, uint32_t signal) {
    return ncclGin{network.comm,
                   static_cast<int>(signal % static_cast<unsigned>(network.contexts))};
}

// The caller has fenced at system scope, so that NCCL need not do it again: given = required.
__device__ inline void NcclNetwork::put(int peer, int64_t target, int64_t source, int64_t bytes,
                                        uint32_t signal, uint64_t add) const {
    if (warp_lane() == 0) {
        gin_of(*this, signal)
            .put(ncclTeamWorld(comm), position_of[peer], window, static_cast<size_t>(target),
                 window, static_cast<size_t>(source), static_cast<size_t>(bytes),
                 NcclSignalAdd{signal, add}, ncclGin_None{}, ncclCoopThread{}, ncclGin_None{},
                 ::cuda::thread_scope_system, ::cuda::thread_scope_system);
    }
}

__device__ inline void NcclNetwork::signal(int peer, uint32_t signal, uint64_t add) const {
    gin_of(*this, signal)
        .signal(ncclTeamWorld(comm), position_of[peer], NcclSignalAdd{signal, add},
                ncclCoopThread{}, ncclGin_None{}, ::cuda::thread_scope_system,
                ::cuda::thread_scope_system);
}

__device__ inline uint64_t NcclNetwork::read(uint32_t signal) const {
    return gin_of(*this, signal)
        .readSignal(static_cast<ncclGinSignal_t>(signal), kSignalBits,
                    ::cuda::memory_order_acquire);
}

}  // namespace topoep
