// SPDX-License-Identifier: Apache-2.0
// Grids of kernels whose blocks stride over their items.
#pragma once

#include <cstdint>

#include "cuda/compat.cuh"

namespace topoep {

// Enough blocks for the items, at least one, at most max_blocks.
inline LaunchShape strided_shape(int64_t num_items, int64_t items_per_block, int num_threads,
                                 int64_t max_blocks) {
    const int64_t wanted = (num_items + items_per_block - 1) / items_per_block;
    const int64_t blocks = wanted < max_blocks ? wanted : max_blocks;
    LaunchShape shape{};
    shape.grid = dim3(static_cast<unsigned>(blocks > 1 ? blocks : 1));
    shape.block = dim3(static_cast<unsigned>(num_threads));
    return shape;
}

}  // namespace topoep
