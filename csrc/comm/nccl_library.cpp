// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_library.h"

#include <dlfcn.h>
#include <nccl.h>

#include <string>

namespace topoep {
namespace {

NcclLibrary find_library() {
    NcclLibrary library{NCCL_VERSION_CODE, 0, false};
    void* handle = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_NOW);
    if (handle == nullptr) {
        return library;
    }
    using GetVersion = decltype(&::ncclGetVersion);
    const auto get_version = reinterpret_cast<GetVersion>(dlsym(handle, "ncclGetVersion"));
    if (get_version != nullptr) {
        get_version(&library.loaded_version);
    }
    library.has_device_api = dlsym(handle, "ncclDevCommCreate") != nullptr;
    return library;
}

std::string describe_problem(const NcclLibrary& library) {
    if (library.loaded_version == 0) {
        return "no libnccl.so.2 is loaded in this process (a CPU build of torch brings none)";
    }
    if (!library.has_device_api) {
        return "the loaded NCCL has no device API; it needs 2.28 or newer";
    }
    // Device code of one version works with a library of another only from 2.29 on, and then only
    // if the library is the newer of the two.
    const bool same = library.loaded_version == library.compiled_version;
    const bool forward = library.compiled_version >= NCCL_VERSION(2, 29, 0) &&
                         library.loaded_version >= library.compiled_version;
    if (same || forward) {
        return "";
    }
    return "compiled with the headers of NCCL " + std::to_string(library.compiled_version) +
           ", but " + std::to_string(library.loaded_version) +
           " is loaded: rebuild topoep in this environment";
}

}  // namespace

const NcclLibrary& nccl_library() {
    static const NcclLibrary library = find_library();
    return library;
}

const char* nccl_device_api_problem() {
    static const std::string problem = describe_problem(nccl_library());
    return problem.empty() ? nullptr : problem.c_str();
}

}  // namespace topoep
