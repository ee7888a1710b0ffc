// SPDX-License-Identifier: Apache-2.0
// The data planes of this process, by the number that ops name them with: one per transport, or one
// per simulated rank. A plane holds what all its launches have in common.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "bindings/calls.h"
#include "core/transfer_arguments.h"
#include "cuda/data_plane_launchers.h"
#include "cuda/peer_view.h"  // its launchers, before the template that calls them

namespace topoep::bindings {

class Plane {
public:
    virtual ~Plane() = default;
    virtual const char* exchange(const ExchangeArguments& arguments, cudaStream_t stream) const = 0;
    virtual const char* replicate(const ReplicateArguments& arguments,
                                  cudaStream_t stream) const = 0;
    virtual const char* reduce(const ReduceArguments& arguments, cudaStream_t stream) const = 0;

    DataPlane shared;
    BlockRoles roles;
    std::vector<Tensor> kept;  // memory that `shared` and the network point to
};

template <class Network>
class PlaneOver final : public Plane {
public:
    explicit PlaneOver(const Network& network) : network_(network) {}
    const char* exchange(const ExchangeArguments& arguments, cudaStream_t stream) const override {
        return cuda::exchange_counts(arguments, network_, stream);
    }
    const char* replicate(const ReplicateArguments& arguments, cudaStream_t stream) const override {
        return cuda::replicate(arguments, roles, network_, stream);
    }
    const char* reduce(const ReduceArguments& arguments, cudaStream_t stream) const override {
        return cuda::reduce_grads_across(arguments, roles, network_, stream);
    }

private:
    Network network_;
};

// [R, N, G, E, S, rank, node, local, chunk bytes, tile bytes, ring slots, staging slots, workers,
// max relays, bulk piece bytes].
DataPlaneConfig checked_plane_config(const std::vector<int64_t>& numbers);

// What planes of every network are made from.
struct PlaneMemory {
    Tensor topology;  // int32, from Topology.table()
    Tensor windows;   // int64 [G], addresses
    Tensor state;     // uint8 [state_bytes()], zero
    Tensor error;     // uint8 [sizeof(ErrorRecord)] in pinned host memory, zero
    int64_t timeout;  // nanoseconds
};
// roles: [senders, pullers, threads].
void fill_plane(Plane& plane, const DataPlaneConfig& config, const PlaneMemory& memory,
                const std::vector<int64_t>& roles);

int64_t add_plane(std::unique_ptr<Plane> plane);
const Plane& plane_at(int64_t number);
void remove_plane(int64_t number);

}  // namespace topoep::bindings
