// SPDX-License-Identifier: Apache-2.0
#include "cuda/stream_lists.cuh"

#include "cuda/data_plane_launchers.h"

namespace topoep::cuda {

const char* stream_lists(const DataPlaneConfig& config, const TopologyView& topology,
                         const PlanCopies& copies, int32_t* lists, cudaStream_t stream) {
    return launch_stream_lists(config, topology, copies, lists, stream);
}

}  // namespace topoep::cuda
