// SPDX-License-Identifier: Apache-2.0
#include "cuda/histogram.cuh"

#include "cuda/launchers.h"

namespace topoep::cuda {

size_t histogram_workspace(int64_t num_ids, int id_bytes, int num_experts,
                           const DeviceLimits& limits) {
    return histogram_shape(num_ids, id_bytes, num_experts, limits.num_sms).workspace_bytes;
}

template <class Id>
const char* histogram(const Id* ids, int64_t num_ids, int num_experts, const DeviceLimits& limits,
                      void* workspace, int32_t* counts, int32_t* invalid, cudaStream_t stream) {
    const HistogramShape shape = histogram_shape(num_ids, sizeof(Id), num_experts, limits.num_sms);
    return launch_histogram(ids, num_ids, num_experts, shape, workspace, counts, invalid, stream);
}

template const char* histogram(const int32_t*, int64_t, int, const DeviceLimits&, void*, int32_t*,
                               int32_t*, cudaStream_t);
template const char* histogram(const int64_t*, int64_t, int, const DeviceLimits&, void*, int32_t*,
                               int32_t*, cudaStream_t);

}  // namespace topoep::cuda
