// SPDX-License-Identifier: Apache-2.0
#include "cuda/reroute.cuh"

#include "cuda/launchers.h"

namespace topoep::cuda {

size_t reroute_workspace(int64_t num_ids, int num_experts, const DeviceLimits& limits) {
    return reroute_shape(num_ids, num_experts, limits.num_sms).workspace_bytes;
}

template <class Id>
const char* reroute(const ReroutePlan& plan, const Id* ids, int64_t num_ids,
                    const DeviceLimits& limits, void* workspace, Id* out, cudaStream_t stream) {
    const RerouteShape shape = reroute_shape(num_ids, plan.num_experts, limits.num_sms);
    return launch_reroute(plan, ids, num_ids, shape, workspace, out, stream);
}

template const char* reroute(const ReroutePlan&, const int32_t*, int64_t, const DeviceLimits&,
                             void*, int32_t*, cudaStream_t);
template const char* reroute(const ReroutePlan&, const int64_t*, int64_t, const DeviceLimits&,
                             void*, int64_t*, cudaStream_t);

}  // namespace topoep::cuda
