// SPDX-License-Identifier: Apache-2.0
// Runs the device functions of NcclNetwork over a device API that writes down what it is asked for.
#include "cuda/compat.cuh"
// Kernel headers come first: they say what __device__ means here.
#include "comm/nccl_network.cuh"

using namespace topoep;
using Int = long long;

namespace {

// Warp 0 puts; thread 32 signals; thread 64 reads.
__global__ void network_kernel(NcclNetwork network, int peer, uint32_t signal) {
    if (threadIdx.x < 32) {
        network.put(peer, 256, 512, 64, signal, 5);
    } else if (threadIdx.x == 32) {
        network.signal(peer, signal, 7);
    } else if (threadIdx.x == 64) {
        network.comm.noted[65].kind = static_cast<int64_t>(network.read(signal));
    }
}

}  // namespace

extern "C" {

const char* run_network(const int32_t* position_of, Int num_ranks, Int peer, Int signal,
                        int64_t* noted) {
    NcclNetwork network{};
    network.comm.nRanks = static_cast<int>(num_ranks);
    network.comm.noted = reinterpret_cast<Noted*>(noted);
    network.contexts = 4;
    network.position_of = position_of;
    const LaunchShape shape{dim3(1), dim3(96)};
    return launch(network_kernel, shape, nullptr, network, static_cast<int>(peer),
                  static_cast<uint32_t>(signal));
}
}
