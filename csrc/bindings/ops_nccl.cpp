// SPDX-License-Identifier: Apache-2.0
// What `python -m topoep doctor` asks about NCCL.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "comm/nccl_library.h"

namespace topoep::bindings {
namespace {

std::tuple<int64_t, int64_t, std::string> nccl_status(bool across_nodes) {
    const NcclLibrary& library = nccl_library();
    return {library.compiled_version, library.loaded_version,
            nccl_problem(library, across_nodes ? Reach::kCluster : Reach::kNode)};
}

}  // namespace
}  // namespace topoep::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(topoep, library) {
    library.def("nccl_status(bool across_nodes) -> (int compiled, int loaded, str problem)");
}

STABLE_TORCH_LIBRARY_IMPL(topoep, CompositeExplicitAutograd, library) {
    library.impl("nccl_status", TORCH_BOX(&topoep::bindings::nccl_status));
}
