// SPDX-License-Identifier: Apache-2.0
// The network of the data plane, as a type: kernels are templates on it.
//
//   put(peer, target, source, bytes, signal, add)   all threads of the block call it with the same
//       arguments. Copies bytes of this rank's window to the window of rank `peer`, then adds `add`
//       to `signal` of that rank. Returns before it is done. The bytes were written by this block
//       and __syncthreads() lies between. Both offsets are multiples of 16.
//   signal(peer, signal, add)                       one thread; adds without moving bytes. Orders
//       what this thread has read and written before it.
//   read(signal)                                    one thread; the value of an own signal. A
//       __threadfence_system() after it makes visible what the sender did before the add.
//
// put and signal reach ranks of the same rail only. Values of signals are coded (see
// signal_state): use u of a slot adds 2u + 1.
//
// PeerMemory is the network of ranks whose memory this GPU can address: simulated ranks in one GPU,
// and any job of a single node, where it is never called. comm/nccl_network.h is NCCL's.
#pragma once

#include <cstdint>

#include "cuda/compat.cuh"

namespace topoep {

struct PeerMemory {
    unsigned char* const* windows;       // device memory, [R], by rank
    unsigned long long* const* signals;  // device memory, [R]: [num_signals] each, zero at first
    int rank;
};

}  // namespace topoep
