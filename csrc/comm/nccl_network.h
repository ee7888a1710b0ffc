// SPDX-License-Identifier: Apache-2.0
// The network of the data plane over NCCL's device API (GIN); the interface is in
// cuda/network.cuh. Host code fills in the struct and passes it to the launchers by value.
//
// The communicator needs window.num_signals signals, no counters, rail connections, and weak
// signals suffice: never more than one operation is outstanding per signal id, so that nothing
// depends on the order of deliveries.
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include <cstdint>

namespace topoep {

struct NcclNetwork {
    ncclDevComm comm;
    ncclWindow_t window;  // symmetric, over WindowLayout::bytes at its start
    // Signals belong to a context, so both ends must take the same one for the same id: the
    // smallest number of contexts that any rank of the communicator has.
    int contexts;
    // Kernels speak of ranks of the group; the communicator numbers them node by node, so that a
    // node is a run of consecutive ranks whatever the group's order is. Device memory, [R].
    const int32_t* position_of;

#if defined(__CUDACC__) || defined(TOPOEP_EMULATE)
    __device__ void put(int peer, int64_t target, int64_t source, int64_t bytes, uint32_t signal,
                        uint64_t add) const;
    __device__ void signal(int peer, uint32_t signal, uint64_t add) const;
    __device__ uint64_t read(uint32_t signal) const;
#endif
};

}  // namespace topoep
