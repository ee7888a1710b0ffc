// SPDX-License-Identifier: Apache-2.0
// The network of the data plane, as a type: kernels are templates on it.
//
//   put(peer, target, source, bytes, signal, add)   all lanes of one warp call it with the same
//       arguments. Copies bytes at offset `source` of this rank's window to offset `target` of the
//       window of rank `peer`, then adds `add` to `signal` of that rank. Returns before it is done.
//       Before the call the block has written the bytes and met in __syncthreads(), and lane 0 has
//       passed __threadfence_system(). Offsets and bytes are multiples of 16.
//   signal(peer, signal, add)   one thread, after __threadfence_system(): adds without moving
//   bytes. read(signal)                one thread: the value of an own signal. A
//   __threadfence_system()
//       after it makes visible what the sender did before the add.
//
// put and signal reach ranks of the same rail only, and never more than one operation per signal
// is under way: a network may deliver in any order.
//
// PeerMemory is the network of ranks whose memory this GPU can address: simulated ranks in one GPU,
// and any job of a single node, where it is never called. comm/nccl_network.h is NCCL's.
#pragma once

#include <cstdint>

#include "cuda/compat.cuh"
#include "cuda/copy.cuh"
#include "cuda/team.cuh"

namespace topoep {

struct PeerMemory {
    unsigned char* const* windows;       // device memory, [R], by rank
    unsigned long long* const* signals;  // device memory, [R]: [num_signals] each, zero at first
    int rank;

    __device__ void put(int peer, int64_t target, int64_t source, int64_t bytes, uint32_t signal_id,
                        uint64_t add) const {
        __syncwarp();
        copy_bytes(windows[peer] + target, windows[rank] + source, bytes, warp_lane(), kWarpSize);
        __syncwarp();
        if (warp_lane() == 0) {
            __threadfence_system();
            signal(peer, signal_id, add);
        }
    }
    __device__ void signal(int peer, uint32_t signal_id, uint64_t add) const {
        atomicAdd_system(signals[peer] + signal_id, static_cast<unsigned long long>(add));
    }
    __device__ uint64_t read(uint32_t signal_id) const {
        return load_relaxed(signals[rank] + signal_id);
    }
};

}  // namespace topoep
