// SPDX-License-Identifier: Apache-2.0
#include "cuda/reduce_grads.cuh"

#include "cuda/launchers.h"

namespace topoep::cuda {

template <class T>
const char* reduce_grads(T* out, const AccumulatorOf<T>* rows, const int64_t* offsets,
                         const int64_t* order, int64_t num_segments, int64_t width,
                         const DeviceLimits& limits, cudaStream_t stream) {
    return launch_reduce_grads(out, rows, offsets, order, num_segments, width, limits.num_sms,
                               stream);
}

#define TOPOEP_INSTANTIATE(T)                                                                      \
    template const char* reduce_grads(T*, const AccumulatorOf<T>*, const int64_t*, const int64_t*, \
                                      int64_t, int64_t, const DeviceLimits&, cudaStream_t);
TOPOEP_INSTANTIATE(float)
TOPOEP_INSTANTIATE(double)
TOPOEP_INSTANTIATE(Float16)
TOPOEP_INSTANTIATE(BFloat16)
#undef TOPOEP_INSTANTIATE

}  // namespace topoep::cuda
