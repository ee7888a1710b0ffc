// SPDX-License-Identifier: Apache-2.0
// PeerMemory (cuda/network.cuh) for callers that nvcc does not compile, and the launchers over it.
#pragma once

#include <cuda_runtime_api.h>

#include "core/transfer_arguments.h"

namespace topoep {

struct PeerView {
    unsigned char* const* windows;       // device memory, [R], by rank
    unsigned long long* const* signals;  // device memory, [R], by rank
    int rank;
};

namespace cuda {

const char* exchange_counts(const ExchangeArguments& arguments, const PeerView& view,
                            cudaStream_t stream);
const char* replicate(const ReplicateArguments& arguments, const BlockRoles& roles,
                      const PeerView& view, cudaStream_t stream);
const char* reduce_grads_across(const ReduceArguments& arguments, const BlockRoles& roles,
                                const PeerView& view, cudaStream_t stream);

}  // namespace cuda
}  // namespace topoep
