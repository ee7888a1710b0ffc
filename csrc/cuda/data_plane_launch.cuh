// SPDX-License-Identifier: Apache-2.0
// The launchers of data_plane_launchers.h, to be instantiated for one network.
#pragma once

#include "cuda/data_plane_launchers.h"
#include "cuda/exchange_counts.cuh"
#include "cuda/reduce_grads_across.cuh"
#include "cuda/replicate.cuh"

namespace topoep::cuda {

template <class Network>
const char* exchange_counts(const ExchangeArguments& arguments, const Network& network,
                            cudaStream_t stream) {
    return launch_exchange_counts(arguments, network, stream);
}

template <class Network>
const char* replicate(const ReplicateArguments& arguments, const BlockRoles& roles,
                      const Network& network, cudaStream_t stream) {
    return launch_replicate(arguments, roles, network, stream);
}

template <class Network>
const char* reduce_grads_across(const ReduceArguments& arguments, const BlockRoles& roles,
                                const Network& network, cudaStream_t stream) {
    return launch_reduce_grads_across(arguments, roles, network, stream);
}

}  // namespace topoep::cuda

#define TOPOEP_INSTANTIATE_DATA_PLANE(Network)                                                    \
    namespace topoep::cuda {                                                                      \
    template const char* exchange_counts(const ExchangeArguments&, const Network&, cudaStream_t); \
    template const char* replicate(const ReplicateArguments&, const BlockRoles&, const Network&,  \
                                   cudaStream_t);                                                 \
    template const char* reduce_grads_across(const ReduceArguments&, const BlockRoles&,           \
                                             const Network&, cudaStream_t);                       \
    }
