// SPDX-License-Identifier: Apache-2.0
// expand: out[i] = x[pair_of_row[i] / K], zeros for -1. Rows are bytes, so any dtype is moved.
//
// Launch shape: a warp per row, 8 warps a block, as many blocks as there are rows up to 16 per SM.
#pragma once

#include <cstdint>

#include "cuda/compat.cuh"
#include "cuda/copy.cuh"
#include "cuda/grid.cuh"
#include "cuda/team.cuh"

namespace topoep {

constexpr int kExpandThreads = 256;
constexpr int kExpandBlocksPerSm = 16;

__global__ void __launch_bounds__(kExpandThreads, 1)
    expand_kernel(const unsigned char* x, int64_t row_bytes, const int64_t* pair_of_row,
                  int64_t num_rows, int top_k, unsigned char* out) {
    const int64_t num_warps = int64_t{gridDim.x} * (kExpandThreads / kWarpSize);
    for (int64_t row = int64_t{blockIdx.x} * (kExpandThreads / kWarpSize) + warp_index();
         row < num_rows; row += num_warps) {
        const int64_t pair = pair_of_row[row];
        unsigned char* target = out + row * row_bytes;
        if (pair < 0) {
            clear_bytes(target, row_bytes, warp_lane(), kWarpSize);
        } else {
            copy_bytes(target, x + pair / top_k * row_bytes, row_bytes, warp_lane(), kWarpSize);
        }
    }
}

inline const char* launch_expand(const void* x, int64_t row_bytes, const int64_t* pair_of_row,
                                 int64_t num_rows, int top_k, int num_sms, void* out,
                                 Stream stream) {
    const LaunchShape shape = strided_shape(num_rows, kExpandThreads / kWarpSize, kExpandThreads,
                                            int64_t{num_sms} * kExpandBlocksPerSm);
    return launch(expand_kernel, shape, stream, static_cast<const unsigned char*>(x), row_bytes,
                  pair_of_row, num_rows, top_k, static_cast<unsigned char*>(out));
}

}  // namespace topoep
