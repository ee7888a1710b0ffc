// SPDX-License-Identifier: Apache-2.0
// Where the packed row of an expert's weights lies: at its home rank, and in a spare slot.
#pragma once

#include <cstdint>

#include "core/transfer_arguments.h"
#include "cuda/bulk_copy.cuh"
#include "cuda/compat.cuh"
#include "cuda/packed_copy.cuh"

namespace topoep {

// A range of a packed row.
struct PackedRange {
    int64_t begin;
    int64_t length;
};

__device__ inline ShardCut weight_cut(const ReplicateArguments& arguments) {
    const DataPlaneConfig& config = arguments.plane.config;
    return cut_into_shards(arguments.layout.total(), config.ranks_per_node, config.chunk_bytes,
                           kByteAlignment);
}

// Where the packed position `at` of tensor t of an expert lies in its home rank's weights.
__device__ inline const unsigned char* home_address(const ReplicateArguments& arguments, int expert,
                                                    int home_local, int t, int64_t at) {
    const DataPlaneConfig& config = arguments.plane.config;
    const ExpertLayout& layout = arguments.layout;
    return arguments.home[t * config.ranks_per_node + home_local] +
           expert % config.experts_per_rank() * layout.row_units[t] + (at - layout.begin[t]);
}

__device__ inline unsigned char* spare_address(const ReplicateArguments& arguments, int slot, int t,
                                               int64_t at) {
    const ExpertLayout& layout = arguments.layout;
    return arguments.spare[t] + slot * layout.row_units[t] + (at - layout.begin[t]);
}

// A range of an expert's row -> target. All threads of the block.
__device__ inline void stage_weights(const ReplicateArguments& arguments, int expert,
                                     int home_local, const PackedRange& range,
                                     unsigned char* target, BlockCopier& copier) {
    for_tensor_parts(
        arguments.layout, range.begin, range.length, [&](int t, int64_t from, int64_t to) {
            copier.copy(target + (from - range.begin),
                        home_address(arguments, expert, home_local, t, from), to - from);
        });
}

}  // namespace topoep
