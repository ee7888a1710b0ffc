// SPDX-License-Identifier: Apache-2.0
#include "cuda/combine.cuh"

#include "cuda/launchers.h"

namespace topoep::cuda {

template <class T>
const char* combine(const T* rows, const int64_t* row_of_pair, const AccumulatorOf<T>* weights,
                    int64_t num_tokens, int top_k, int64_t width, const DeviceLimits& limits, T* y,
                    cudaStream_t stream) {
    return launch_combine(rows, row_of_pair, weights, num_tokens, top_k, width, limits.num_sms, y,
                          stream);
}

template <class T>
const char* combine_backward(const T* grad_y, const T* rows, const int64_t* pair_of_row,
                             const int64_t* row_of_pair, const AccumulatorOf<T>* weights,
                             int64_t num_tokens, int64_t num_rows, int top_k, int64_t width,
                             const DeviceLimits& limits, T* grad_rows,
                             AccumulatorOf<T>* grad_weights, cudaStream_t stream) {
    return launch_combine_backward(grad_y, rows, pair_of_row, row_of_pair, weights, num_tokens,
                                   num_rows, top_k, width, limits.num_sms, grad_rows, grad_weights,
                                   stream);
}

#define TOPOEP_INSTANTIATE(T)                                                                     \
    template const char* combine(const T*, const int64_t*, const AccumulatorOf<T>*, int64_t, int, \
                                 int64_t, const DeviceLimits&, T*, cudaStream_t);                 \
    template const char* combine_backward(                                                        \
        const T*, const T*, const int64_t*, const int64_t*, const AccumulatorOf<T>*, int64_t,     \
        int64_t, int, int64_t, const DeviceLimits&, T*, AccumulatorOf<T>*, cudaStream_t);
TOPOEP_INSTANTIATE(float)
TOPOEP_INSTANTIATE(double)
TOPOEP_INSTANTIATE(Float16)
TOPOEP_INSTANTIATE(BFloat16)
#undef TOPOEP_INSTANTIATE

}  // namespace topoep::cuda
