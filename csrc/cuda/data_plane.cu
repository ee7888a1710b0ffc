// SPDX-License-Identifier: Apache-2.0
// The data plane over peer memory: one node, or simulated ranks in one GPU.
#include "cuda/data_plane_launch.cuh"

TOPOEP_INSTANTIATE_DATA_PLANE(PeerMemory)
