// SPDX-License-Identifier: Apache-2.0
// split: every source rank's quotas, split[R, P], from a finished plan. For inspection and for
// simulated ranks; a rank in training gets its own row and column from solve.
//
//   kernel 1   slots by rank and expert id -> slots by position and planner id
//   kernel 2   one block per expert: core/split.h over all pairs of ranks
// `split` must be zero: empty slots are not written.
#pragma once

#include <cstdint>

#include "core/finalize.h"
#include "core/split.h"
#include "cuda/compat.cuh"
#include "cuda/grid.cuh"
#include "cuda/team.cuh"

namespace topoep {

constexpr int kSplitThreads = 256;
constexpr int kSplitBlocksPerSm = 4;

TOPOEP_HD size_t split_workspace_bytes(const Shape& shape) {
    return static_cast<size_t>(shape.num_spare()) * (sizeof(int32_t) + sizeof(uint16_t));
}

__global__ void __launch_bounds__(kSplitThreads, 1)
    planner_slots_kernel(Shape shape, TopologyView topology, const int32_t* slot_expert,
                         const int32_t* slot_tokens, uint16_t* experts, int32_t* tokens) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < shape.num_spare()) {
        write_planner_slot(shape, topology, slot_expert, slot_tokens, i, experts, tokens);
    }
}

__global__ void __launch_bounds__(kSplitThreads, 1)
    split_kernel(Shape shape, TopologyView topology, const int32_t* counts, SlotsView slots,
                 int32_t* split) {
    TOPOEP_DYNAMIC_SHARED(unsigned char, shared);
    const BlockTeam team;
    const ExpertSplit work = bind_expert_split(shape.num_ranks, shared);
    for (int e = blockIdx.x; e < shape.num_experts; e += gridDim.x) {
        load_expert(team, shape, topology, counts, slots, e, work);
        split_expert(team, shape, topology, work, FullSplit{shape, topology, split});
    }
}

inline const char* launch_split(const Shape& shape, const TopologyView& topology,
                                const int32_t* counts, const int32_t* slot_expert,
                                const int32_t* slot_tokens, int num_sms, void* workspace,
                                int32_t* split, Stream stream) {
    auto* tokens = static_cast<int32_t*>(workspace);
    auto* experts = reinterpret_cast<uint16_t*>(tokens + shape.num_spare());
    const LaunchShape prepare =
        strided_shape(shape.num_spare(), kSplitThreads, kSplitThreads, shape.num_spare());
    const char* error = launch(planner_slots_kernel, prepare, stream, shape, topology, slot_expert,
                               slot_tokens, experts, tokens);
    if (error != nullptr) {
        return error;
    }
    LaunchShape main =
        strided_shape(shape.num_experts, 1, kSplitThreads, int64_t{num_sms} * kSplitBlocksPerSm);
    main.shared_bytes = expert_split_bytes(shape.num_ranks);
    return launch(split_kernel, main, stream, shape, topology, counts, SlotsView{experts, tokens},
                  split);
}

}  // namespace topoep
