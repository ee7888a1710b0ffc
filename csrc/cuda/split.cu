// SPDX-License-Identifier: Apache-2.0
#include "cuda/split.cuh"

#include "cuda/launchers.h"

namespace topoep::cuda {

size_t split_workspace(const Shape& shape) {
    return split_workspace_bytes(shape);
}

const char* split(const Shape& shape, const TopologyView& topology, const int32_t* counts,
                  const int32_t* slot_expert, const int32_t* slot_tokens,
                  const DeviceLimits& limits, void* workspace, int32_t* split,
                  cudaStream_t stream) {
    return launch_split(shape, topology, counts, slot_expert, slot_tokens, limits.num_sms,
                        workspace, split, stream);
}

}  // namespace topoep::cuda
