// SPDX-License-Identifier: Apache-2.0
#include "cuda/peer_view.h"

#include "cuda/data_plane_launchers.h"
#include "cuda/network.cuh"

namespace topoep::cuda {
namespace {

PeerMemory network_of(const PeerView& view) {
    PeerMemory network{};
    network.windows = view.windows;
    network.signals = view.signals;
    network.rank = view.rank;
    return network;
}

}  // namespace

const char* exchange_counts(const ExchangeArguments& arguments, const PeerView& view,
                            cudaStream_t stream) {
    return exchange_counts(arguments, network_of(view), stream);
}

const char* replicate(const ReplicateArguments& arguments, const BlockRoles& roles,
                      const PeerView& view, cudaStream_t stream) {
    return replicate(arguments, roles, network_of(view), stream);
}

const char* reduce_grads_across(const ReduceArguments& arguments, const BlockRoles& roles,
                                const PeerView& view, cudaStream_t stream) {
    return reduce_grads_across(arguments, roles, network_of(view), stream);
}

}  // namespace topoep::cuda
