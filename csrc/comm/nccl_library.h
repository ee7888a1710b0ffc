// SPDX-License-Identifier: Apache-2.0
// The NCCL that torch has loaded into this process. It is never linked and never loaded a second
// time: two copies of NCCL in one process do not know of each other's communicators.
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include <string>

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 29, 2)
#error "topoep needs the headers of NCCL 2.29.2 or newer (host-side peer pointers, team queries)"
#endif

namespace topoep {

// Every NCCL function that topoep calls, by the name that follows "nccl" there.
#define TOPOEP_NCCL_FUNCTIONS(X) \
    X(GetUniqueId)               \
    X(CommInitRankConfig)        \
    X(CommDestroy)               \
    X(CommAbort)                 \
    X(CommGetAsyncError)         \
    X(CommCount)                 \
    X(CommUserRank)              \
    X(CommQueryProperties)       \
    X(CommWindowRegister)        \
    X(CommWindowDeregister)      \
    X(MemAlloc)                  \
    X(MemFree)                   \
    X(GetErrorString)            \
    X(GetLastError)              \
    X(DevCommCreate)             \
    X(DevCommDestroy)            \
    X(GetLsaDevicePointer)

struct NcclLibrary {
    int compiled_version = NCCL_VERSION_CODE;  // of the headers, such as 23007 for 2.30.7
    int loaded_version = 0;                    // of libnccl.so.2 in this process, 0: none is loaded
    std::string missing;  // the functions that the loaded library lacks, ", " between them

#define TOPOEP_NCCL_POINTER(name) decltype(&::nccl##name) name = nullptr;
    TOPOEP_NCCL_FUNCTIONS(TOPOEP_NCCL_POINTER)
#undef TOPOEP_NCCL_POINTER
    // Overloaded in the headers: these are the forms that take a communicator.
    ncclTeam_t (*TeamLsa)(ncclComm_t) = nullptr;
    ncclTeam_t (*TeamRail)(ncclComm_t) = nullptr;
};

// Looked up at the first call, which must come after torch was imported.
const NcclLibrary& nccl_library();

// How far device code must reach. The put/signal part of NCCL's device API (GIN) is tied to the
// exact version; loads and stores inside a node are not.
enum class Reach { kNode, kCluster };

// Why kernels compiled here cannot use the device API of the loaded NCCL, in words that name both
// versions and the fix; empty: they can.
std::string nccl_problem(const NcclLibrary& library, Reach reach);

// 23007 -> "2.30.7".
std::string nccl_version_text(int version);

// Throws topoep::Error unless the call succeeded: what was called, NCCL's error and its last words.
void check_nccl(const NcclLibrary& library, ncclResult_t result, const char* call);

}  // namespace topoep
