// SPDX-License-Identifier: Apache-2.0
// reroute: ids [T, K] -> physical ids, quotas filled in token order, in one cooperative launch.
//
//   warp w     takes the w-th run of consecutive ids; rank[i] = how many equal ids precede id i in
//              the run (match_any, 32 ids a step), row[w, e] = ids of expert e in the run
//   block      row[w, e] = ids of e in the block's lower warps; block_counts[b, e] = ids of e in b
//   --- grid barrier ---
//   block      row[w, e] += ids of e in lower blocks
//   warp w     out[i] = holder of the (row[w, e] + rank[i])-th token of e (core/reroute_plan.h)
//
// The rank of an id waits in out[i] over the barrier, so a run may be of any length.
// Launch shape: 8 warps (4 for E > 2048), 256 ids per warp, at most one block per SM. Shared
// memory: one int32 per warp and expert, at most 64 KB. Workspace: one int32 per block and expert.
// Determinism: the ordinal of a token is a property of the ids, not of the schedule; no atomics.
#pragma once

#include <cstdint>

#include "core/reroute_plan.h"
#include "cuda/compat.cuh"
#include "cuda/grid.cuh"
#include "cuda/team.cuh"

namespace topoep {

constexpr int kRerouteWarps = 8;
constexpr int kRerouteWarpsManyExperts = 4;
constexpr int kManyExperts = 2048;
constexpr int kRerouteIdsPerWarp = 256;

struct RerouteShape {
    LaunchShape launch;
    int64_t ids_per_warp;
    size_t workspace_bytes;
};

inline RerouteShape reroute_shape(int64_t num_ids, int num_experts, int num_sms) {
    const int warps = num_experts > kManyExperts ? kRerouteWarpsManyExperts : kRerouteWarps;
    RerouteShape shape{};
    shape.launch =
        strided_shape(num_ids, int64_t{warps} * kRerouteIdsPerWarp, warps * kWarpSize, num_sms);
    shape.launch.shared_bytes = sizeof(int32_t) * warps * num_experts;
    shape.launch.cooperative = true;
    const int64_t num_blocks = shape.launch.grid.x;
    const int64_t num_warps = num_blocks * warps;
    const int64_t even_share = (num_ids + num_warps - 1) / num_warps;
    shape.ids_per_warp = (even_share + kWarpSize - 1) / kWarpSize * kWarpSize;
    shape.workspace_bytes = sizeof(int32_t) * num_blocks * num_experts;
    return shape;
}

// The ids of one warp: consecutive, and looked at 32 at a time in order.
template <class Id>
struct WarpRun {
    const Id* ids;
    int64_t begin;
    int64_t end;
    int num_experts;

    // The expert of id i, or -1 for lanes beyond the run and ids that are not rerouted.
    __device__ int expert(int64_t i) const {
        const int64_t id = i < end ? static_cast<int64_t>(ids[i]) : -1;
        return id >= 0 && id < num_experts ? static_cast<int>(id) : -1;
    }
};

template <class Id>
__device__ void rank_in_run(const WarpRun<Id>& run, int32_t* row, Id* out) {
    const unsigned lower_lanes = (1u << warp_lane()) - 1;
    for (int64_t base = run.begin; base < run.end; base += kWarpSize) {
        const int64_t i = base + warp_lane();
        const int expert = run.expert(i);
        const unsigned peers = __match_any_sync(kFullWarp, expert);
        const int rank = __popc(peers & lower_lanes);
        const int32_t before = expert >= 0 ? row[expert] : 0;
        __syncwarp();
        if (expert >= 0) {
            out[i] = static_cast<Id>(before + rank);
            if (rank == 0) {
                row[expert] = before + __popc(peers);
            }
        }
        __syncwarp();
    }
}

template <class Id>
__device__ void write_physical(const WarpRun<Id>& run, const int32_t* row, const ReroutePlan& plan,
                               Id* out) {
    for (int64_t i = run.begin + warp_lane(); i < run.end; i += kWarpSize) {
        const int expert = run.expert(i);
        out[i] = expert < 0 ? run.ids[i]
                            : static_cast<Id>(plan.physical_expert(
                                  expert, row[expert] + static_cast<int32_t>(out[i])));
    }
}

template <class Id>
__global__ void __launch_bounds__(kRerouteWarps* kWarpSize, 1)
    reroute_kernel(ReroutePlan plan, const Id* ids, int64_t num_ids, int64_t ids_per_warp,
                   int32_t* block_counts, Id* out) {
    TOPOEP_DYNAMIC_SHARED(int32_t, rows);
    const int num_experts = plan.num_experts;
    const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
    for (int i = threadIdx.x; i < num_warps * num_experts; i += blockDim.x) {
        rows[i] = 0;
    }
    __syncthreads();
    const int64_t warp = int64_t{blockIdx.x} * num_warps + warp_index();
    const int64_t begin = min64(warp * ids_per_warp, num_ids);
    const WarpRun<Id> run{ids, begin, min64(begin + ids_per_warp, num_ids), num_experts};
    int32_t* row = rows + warp_index() * num_experts;
    rank_in_run(run, row, out);
    __syncthreads();
    for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
        int32_t sum = 0;
        for (int w = 0; w < num_warps; ++w) {
            const int32_t own = rows[w * num_experts + e];
            rows[w * num_experts + e] = sum;
            sum += own;
        }
        block_counts[int64_t{blockIdx.x} * num_experts + e] = sum;
    }
    grid_sync();
    for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
        int32_t before = 0;
        for (unsigned block = 0; block < blockIdx.x; ++block) {
            before += block_counts[int64_t{block} * num_experts + e];
        }
        for (int w = 0; w < num_warps; ++w) {
            rows[w * num_experts + e] += before;
        }
    }
    __syncthreads();
    write_physical(run, row, plan, out);
}

template <class Id>
const char* launch_reroute(const ReroutePlan& plan, const Id* ids, int64_t num_ids,
                           const RerouteShape& shape, void* workspace, Id* out, Stream stream) {
    return launch(reroute_kernel<Id>, shape.launch, stream, plan, ids, num_ids, shape.ids_per_warp,
                  static_cast<int32_t*>(workspace), out);
}

}  // namespace topoep
