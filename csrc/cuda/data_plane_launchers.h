// SPDX-License-Identifier: Apache-2.0
// The kernels of the data plane as plain functions, like cuda/launchers.h: they return nullptr or
// the CUDA error text, enqueue on `stream`, and neither allocate nor wait. Ranks must launch them
// in the same order.
//
// The network is a template argument. The functions are defined for PeerMemory (cuda/network.cuh)
// in cuda/data_plane.cu, and for NcclNetwork (comm/nccl_network.h) in comm/nccl_data_plane.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "core/transfer_arguments.h"

namespace topoep {
struct PeerMemory;
struct NcclNetwork;
}  // namespace topoep

namespace topoep::cuda {

template <class Network>
const char* exchange_counts(const ExchangeArguments& arguments, const Network& network,
                            cudaStream_t stream);

template <class Network>
const char* replicate(const ReplicateArguments& arguments, const BlockRoles& roles,
                      const Network& network, cudaStream_t stream);

template <class Network>
const char* reduce_grads_across(const ReduceArguments& arguments, const BlockRoles& roles,
                                const Network& network, cudaStream_t stream);

}  // namespace topoep::cuda
