// SPDX-License-Identifier: Apache-2.0
#include "cuda/compat.cuh"
#include "cuda/launchers.h"

namespace topoep::cuda {

const char* device_limits(int device, DeviceLimits* limits) {
    int num_sms = 0;
    int shared_bytes = 0;
    cudaError_t error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) {
        error =
            cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    *limits = {num_sms, static_cast<size_t>(shared_bytes)};
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace topoep::cuda
