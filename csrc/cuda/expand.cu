// SPDX-License-Identifier: Apache-2.0
#include "cuda/expand.cuh"

#include "cuda/launchers.h"

namespace topoep::cuda {

const char* expand(const void* x, int64_t row_bytes, const int64_t* pair_of_row, int64_t num_rows,
                   int top_k, const DeviceLimits& limits, void* out, cudaStream_t stream) {
    return launch_expand(x, row_bytes, pair_of_row, num_rows, top_k, limits.num_sms, out, stream);
}

}  // namespace topoep::cuda
