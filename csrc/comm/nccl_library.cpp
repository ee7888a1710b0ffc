// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_library.h"

#include <dlfcn.h>

#include "core/error.h"

namespace topoep {
namespace {

template <class F>
void look_up(void* handle, const char* name, F& function, std::string& missing) {
    function = reinterpret_cast<F>(dlsym(handle, name));
    if (function == nullptr) {
        missing += (missing.empty() ? "" : ", ") + std::string(name);
    }
}

NcclLibrary find_library() {
    NcclLibrary library;
    void* handle = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_NOW);
    if (handle == nullptr) {
        return library;
    }
    const auto get_version =
        reinterpret_cast<decltype(&::ncclGetVersion)>(dlsym(handle, "ncclGetVersion"));
    if (get_version == nullptr || get_version(&library.loaded_version) != ncclSuccess) {
        library.loaded_version = 0;
        return library;
    }
#define TOPOEP_NCCL_LOOK_UP(name) look_up(handle, "nccl" #name, library.name, library.missing);
    TOPOEP_NCCL_FUNCTIONS(TOPOEP_NCCL_LOOK_UP)
#undef TOPOEP_NCCL_LOOK_UP
    look_up(handle, "ncclTeamLsa", library.TeamLsa, library.missing);
    look_up(handle, "ncclTeamRail", library.TeamRail, library.missing);
    return library;
}

}  // namespace

const NcclLibrary& nccl_library() {
    static const NcclLibrary library = find_library();
    return library;
}

std::string nccl_version_text(int version) {
    return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
           std::to_string(version % 100);
}

std::string nccl_problem(const NcclLibrary& library, Reach reach) {
    if (library.loaded_version == 0) {
        return "no libnccl.so.2 is loaded in this process (a CPU build of torch brings none); "
               "install a CUDA build of torch";
    }
    const std::string compiled = nccl_version_text(library.compiled_version);
    const std::string loaded = nccl_version_text(library.loaded_version);
    if (library.loaded_version < NCCL_VERSION(2, 29, 2)) {
        return "NCCL " + loaded + " is loaded, and topoep was compiled with the headers of " +
               compiled + "; its device API is used from 2.29.2 on: use torch 2.12 or newer";
    }
    // Device code of one version works with a newer library, except for GIN.
    const bool fits = reach == Reach::kCluster ? library.loaded_version == library.compiled_version
                                               : library.loaded_version >= library.compiled_version;
    if (!fits) {
        const char* rule = reach == Reach::kCluster
                               ? "transfers between nodes need exactly the version compiled with"
                               : "the headers must not be newer than the library";
        return "topoep was compiled with the headers of NCCL " + compiled + ", but NCCL " + loaded +
               " is loaded, and " + rule + ": reinstall topoep in this environment " +
               "(pip install --no-build-isolation), or point TOPOEP_NCCL_HOME at the headers of " +
               loaded;
    }
    if (!library.missing.empty()) {
        return "the loaded NCCL " + loaded + " lacks " + library.missing +
               " (compiled with the headers of " + compiled +
               "): it was built without its device API; use the NCCL that comes with torch";
    }
    return "";
}

void check_nccl(const NcclLibrary& library, ncclResult_t result, const char* call) {
    if (result == ncclSuccess) {
        return;
    }
    const char* error =
        library.GetErrorString == nullptr ? "error" : library.GetErrorString(result);
    const char* last = library.GetLastError == nullptr ? nullptr : library.GetLastError(nullptr);
    TOPOEP_CHECK(false, call, " failed with '", error, "' (", static_cast<int>(result), ")",
                 last == nullptr || *last == '\0' ? "" : ": ", last == nullptr ? "" : last,
                 "; NCCL_DEBUG=INFO in the environment shows more");
}

}  // namespace topoep
