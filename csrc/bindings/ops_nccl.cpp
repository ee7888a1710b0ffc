// SPDX-License-Identifier: Apache-2.0
// What `python -m topoep doctor` asks about NCCL.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "comm/nccl_library.h"

namespace topoep::bindings {
namespace {

std::tuple<int64_t, int64_t, std::string> nccl_status() {
    const NcclLibrary& library = nccl_library();
    const char* problem = nccl_device_api_problem();
    return {library.compiled_version, library.loaded_version, problem == nullptr ? "" : problem};
}

}  // namespace
}  // namespace topoep::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(topoep, library) {
    library.def("nccl_status() -> (int compiled, int loaded, str problem)");
}

STABLE_TORCH_LIBRARY_IMPL(topoep, CompositeExplicitAutograd, library) {
    library.impl("nccl_status", TORCH_BOX(&topoep::bindings::nccl_status));
}
