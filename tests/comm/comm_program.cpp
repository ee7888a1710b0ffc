// SPDX-License-Identifier: Apache-2.0
// Runs one scenario of csrc/comm over the libnccl.so.2 given as the first argument ("": none), and
// prints what happens. Errors are printed, not thrown.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

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

std::vector<int> numbers(const std::string& text) {
    std::istringstream stream(text);
    std::vector<int> result;
    for (std::string word; std::getline(stream, word, ',');) {
        result.push_back(std::stoi(word));
    }
    return result;
}

// What rank `rank` of the group says of NCCL's teams.
void describe_teams(const Communicator& comm, int rank, const topoep::NodeOrder& order) {
    const std::string problem =
        topoep::team_problem(comm.world_team(), comm.lsa_team(), comm.rail_team(), rank, order);
    std::printf("teams: %s\n", problem.c_str());
}

// A communicator numbered as the order says.
void describe_teams_of_own(const topoep::NcclLibrary& library, int rank,
                           const topoep::NodeOrder& order) {
    ncclUniqueId id;
    topoep::check_nccl(library, library.GetUniqueId(&id), "ncclGetUniqueId");
    const auto at = std::find(order.rank_at.begin(), order.rank_at.end(), rank);
    const auto comm = Communicator::create(library, id, static_cast<int>(order.rank_at.size()),
                                           static_cast<int>(at - order.rank_at.begin()));
    describe_teams(*comm, rank, order);
    comm->close(false);
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
            const topoep::NodeOrder order{numbers(arguments[4]), std::stoi(arguments[5])};
            describe_teams_of_own(library, std::stoi(arguments[3]), order);
        } else if (scenario == "adopted_teams") {
            const topoep::NodeOrder order{numbers(arguments[4]), std::stoi(arguments[5])};
            describe_teams(*Communicator::adopt(library, adopted_comm(fake)),
                           std::stoi(arguments[3]), order);
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
