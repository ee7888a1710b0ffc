// SPDX-License-Identifier: Apache-2.0
// A libnccl.so.2 for tests: every function prints its name, and does as little as the caller can
// bear. The environment tells it what to get wrong:
//   FAKE_NCCL_VERSION  what ncclGetVersion answers, default: the version of the headers
//   FAKE_NCCL_FAIL     functions that fail, with commas around each, such as ",ncclMemAlloc,"
//   FAKE_NCCL_HOSTS    the host of each rank of a communicator, such as "0,0,1,1"; default: 4 ranks
//                      on each host
//   FAKE_NCCL_RANKS    ranks of an adopted communicator (default 8)
//   FAKE_NCCL_NO_GIN, FAKE_NCCL_NO_DEVICE_API, FAKE_NCCL_NO_WINDOW   what it does not support
// Compiled with FAKE_NCCL_WITHOUT_DEVICE_API it lacks the functions of the device API.
#include <nccl.h>
#include <nccl_device.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

struct ncclComm {
    int rank;
    int num_ranks;
};

namespace {

int setting(const char* name, int otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::atoi(text);
}

ncclResult_t called(const char* name) {
    std::printf("%s\n", name);
    const char* fail = std::getenv("FAKE_NCCL_FAIL");
    const bool fails =
        fail != nullptr && std::strstr(fail, (std::string(",") + name + ",").c_str()) != nullptr;
    return fails ? ncclSystemError : ncclSuccess;
}

ncclComm& adopted() {
    static ncclComm comm{3, setting("FAKE_NCCL_RANKS", 8)};
    return comm;
}

// NCCL's rule: teams are of one size on all ranks, and of consecutive ranks on one host, so their
// size is the greatest that divides the length of every run of ranks with equal hosts.
[[maybe_unused]] int lsa_size(const ncclComm& comm) {
    const char* text = std::getenv("FAKE_NCCL_HOSTS");
    if (text == nullptr) {
        return 4;
    }
    std::istringstream stream(text);
    std::vector<std::string> hosts;
    for (std::string host; std::getline(stream, host, ',');) {
        hosts.push_back(host);
    }
    int size = 0;
    int run = 0;
    for (int rank = 0; rank < comm.num_ranks; ++rank) {
        ++run;
        if (rank + 1 == comm.num_ranks || hosts.at(rank) != hosts.at(rank + 1)) {
            size = std::gcd(size, run);
            run = 0;
        }
    }
    return size;
}

}  // namespace

extern "C" {

#pragma GCC visibility push(default)

void* fake_nccl_adopted() {
    return &adopted();
}

ncclResult_t ncclGetVersion(int* version) {
    *version = setting("FAKE_NCCL_VERSION", NCCL_VERSION_CODE);
    return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) {
    return "unhandled system error";
}
const char* ncclGetLastError(ncclComm_t) {
    return "the NIC is on fire";
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    std::memset(id, 7, sizeof(*id));
    return called("ncclGetUniqueId");
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
    std::printf("id %d, %d ranks, rank %d, name %s\n", id.internal[0], num_ranks, rank,
                config->commName);
    const ncclResult_t result = called("ncclCommInitRankConfig");
    *comm = result == ncclSuccess ? new ncclComm{rank, num_ranks} : nullptr;
    return result;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    delete comm;
    return called("ncclCommDestroy");
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    delete comm;
    return called("ncclCommAbort");
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
    *error = std::getenv("FAKE_NCCL_ASYNC") == nullptr ? ncclSuccess : ncclRemoteError;
    return called("ncclCommGetAsyncError");
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
    *count = comm->num_ranks;
    return called("ncclCommCount");
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    *rank = comm->rank;
    return called("ncclCommUserRank");
}
ncclResult_t ncclMemAlloc(void** data, size_t bytes) {
    const ncclResult_t result = called("ncclMemAlloc");
    *data = result == ncclSuccess ? std::malloc(bytes) : nullptr;
    return result;
}
ncclResult_t ncclMemFree(void* data) {
    std::free(data);
    return called("ncclMemFree");
}
ncclResult_t ncclCommWindowRegister(ncclComm_t, void* data, size_t, ncclWindow_t* window,
                                    int flags) {
    if (flags != NCCL_WIN_COLL_SYMMETRIC) {
        return ncclInvalidArgument;
    }
    *window =
        std::getenv("FAKE_NCCL_NO_WINDOW") == nullptr ? static_cast<ncclWindow_t>(data) : nullptr;
    return called("ncclCommWindowRegister");
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) {
    return called("ncclCommWindowDeregister");
}

#ifndef FAKE_NCCL_WITHOUT_DEVICE_API
ncclResult_t ncclCommQueryProperties(ncclComm_t, ncclCommProperties_t* properties) {
    properties->deviceApiSupport = std::getenv("FAKE_NCCL_NO_DEVICE_API") == nullptr;
    const bool gin = std::getenv("FAKE_NCCL_NO_GIN") == nullptr;
    properties->ginType = gin ? NCCL_GIN_TYPE_GDAKI : NCCL_GIN_TYPE_NONE;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 3)
    properties->railedGinType = properties->ginType;
#endif
    return called("ncclCommQueryProperties");
}
ncclResult_t ncclDevCommCreate(ncclComm_t, const ncclDevCommRequirements_t* needs,
                               ncclDevComm_t* device_comm) {
    std::printf("%d signals, %d counters, %d contexts\n", needs->ginSignalCount,
                needs->ginCounterCount, needs->ginContextCount);
    std::memset(static_cast<void*>(device_comm), 0, sizeof(*device_comm));
    device_comm->ginContextCount = 2;
    return called("ncclDevCommCreate");
}
ncclResult_t ncclDevCommDestroy(ncclComm_t, const ncclDevComm_t*) {
    return called("ncclDevCommDestroy");
}
ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t window, size_t offset, int peer, void** pointer) {
    *pointer = reinterpret_cast<char*>(window) + offset + (static_cast<size_t>(peer) << 32);
    return called("ncclGetLsaDevicePointer");
}
ncclTeam_t ncclTeamLsa(ncclComm_t comm) {
    const int lsa = lsa_size(*comm);
    return {lsa, comm->rank % lsa, 1};
}
ncclTeam_t ncclTeamRail(ncclComm_t comm) {
    const int lsa = lsa_size(*comm);
    return {comm->num_ranks / lsa, comm->rank / lsa, lsa};
}
#endif

#pragma GCC visibility pop
}
