// SPDX-License-Identifier: Apache-2.0
#include "bindings/cuda_place.h"

#include <dlfcn.h>

namespace topoep::bindings {
namespace {

// torch's current stream. The stable headers give it only from 2.13 on; the C function behind it is
// in every libtorch_cuda since 2.11, which torch has already loaded.
cudaStream_t current_stream(int32_t device) {
    using GetStream = AOTITorchError (*)(int32_t, void**);
    static const GetStream get_stream = [] {
        void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
        return library == nullptr ? nullptr
                                  : reinterpret_cast<GetStream>(
                                        dlsym(library, "aoti_torch_get_current_cuda_stream"));
    }();
    void* stream = nullptr;
    TOPOEP_CHECK(get_stream != nullptr && get_stream(device, &stream) == AOTI_TORCH_SUCCESS,
                 "cannot get torch's current CUDA stream; this build of torch has no CUDA");
    return static_cast<cudaStream_t>(stream);
}

}  // namespace

Place::Place(const Tensor& tensor)
    : device(tensor.get_device_index()), guard(device), stream(current_stream(device)) {
    const char* error = cuda::device_limits(device, &limits);
    TOPOEP_CHECK(error == nullptr, "cannot ask CUDA device ", device, ": ", error);
}

void check_launch(const char* op, const char* error) {
    TOPOEP_CHECK(error == nullptr, op, ": CUDA reports '", error, "'");
}

Tensor new_workspace(const Tensor& like, size_t bytes) {
    return new_tensor(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
}

}  // namespace topoep::bindings
