// SPDX-License-Identifier: Apache-2.0
// Runs one scenario of csrc/comm over the libnccl.so.2 given as the first argument ("": none), and
// prints what happens. Errors are printed, not thrown.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "comm/communicator.h"
#include "core/error.h"

namespace {

using topoep::Communicator;
using topoep::Reach;

ncclComm_t adopted_comm(void* fake) {
    using Get = void* (*)();
    return static_cast<ncclComm_t>(reinterpret_cast<Get>(dlsym(fake, "fake_nccl_adopted"))());
}

// A whole life: communicator, two windows, device communicator; a tensor keeps one window's memory.
void run(const topoep::NcclLibrary& library, bool abort) {
    ncclUniqueId id;
    topoep::check_nccl(library, library.GetUniqueId(&id), "ncclGetUniqueId");
    const auto comm = Communicator::create(library, id, 8, 5);
    std::printf("problem: %s\n", comm->problem(Reach::kCluster).c_str());
    const int first = comm->add_window(256);
    const int second = comm->add_window(512);
    std::memset(comm->memory(second)->data(), 1, comm->memory(second)->bytes());
    std::printf("%zu peers\n", comm->peer_pointers(first).size());
    const auto& device_comm = comm->create_device_comm({16, 2, 4});
    std::printf("%u contexts\n", device_comm.ginContextCount);
    comm->check_async();
    const auto tensor = comm->memory(first);
    comm->close(abort);
    comm->close(abort);  // does nothing
    std::printf("closed\n");
}

void describe_teams(const topoep::NcclLibrary& library, ncclComm_t handle, int ranks_per_node) {
    const auto comm = Communicator::adopt(library, handle);
    const std::string problem =
        topoep::team_problem(comm->lsa_team(), comm->rail_team(), comm->rank(),
                             comm->num_ranks() / ranks_per_node, ranks_per_node);
    std::printf("teams: %s\n", problem.c_str());
}

}  // namespace

int main(int, char** arguments) {
    const std::string path = arguments[1];
    const std::string scenario = arguments[2];
    void* fake = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
    const topoep::NcclLibrary& library = topoep::nccl_library();
    try {
        if (scenario == "problem") {
            std::printf("node: %s\n", topoep::nccl_problem(library, Reach::kNode).c_str());
            std::printf("cluster: %s\n", topoep::nccl_problem(library, Reach::kCluster).c_str());
        } else if (scenario == "teams") {
            describe_teams(library, adopted_comm(fake), std::stoi(arguments[3]));
        } else if (scenario == "adopt_nothing") {
            Communicator::adopt(library, nullptr);
        } else {
            run(library, scenario == "abort");
        }
    } catch (const topoep::Error& error) {
        std::printf("error: %s\n", error.what());
    }
    return 0;
}
