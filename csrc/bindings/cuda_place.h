// SPDX-License-Identifier: Apache-2.0
// Where a CUDA op runs: the device of its tensors and torch's current stream on it.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include "bindings/calls.h"
#include "cuda/launchers.h"

namespace topoep::bindings {

// Makes the tensor's device current for as long as it lives.
struct Place {
    explicit Place(const Tensor& tensor);

    int32_t device;
    torch::stable::accelerator::DeviceGuard guard;
    cudaStream_t stream;
    cuda::DeviceLimits limits{};
};

// Throws what a launcher returned, unless that is nullptr.
void check_launch(const char* op, const char* error);

Tensor new_workspace(const Tensor& like, size_t bytes);

}  // namespace topoep::bindings
