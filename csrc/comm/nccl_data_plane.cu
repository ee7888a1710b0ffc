// SPDX-License-Identifier: Apache-2.0
// The data plane over NCCL's device API.
#include "comm/nccl_network.cuh"
#include "cuda/data_plane_launch.cuh"

TOPOEP_INSTANTIATE_DATA_PLANE(NcclNetwork)
