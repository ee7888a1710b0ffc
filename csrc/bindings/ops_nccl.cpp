// SPDX-License-Identifier: Apache-2.0
// NCCL communicators, by the number that ops name them with, and data planes over them.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "bindings/planes.h"
#include "comm/communicator.h"
#include "comm/nccl_network.h"

namespace topoep::bindings {
namespace {

struct Registry {
    std::mutex mutex;
    std::map<int64_t, std::unique_ptr<Communicator>> comms;
    int64_t next = 1;
};

// Never destroyed: destroying a communicator waits for its peers, and a process that ends without
// close() must not.
Registry& registry() {
    static Registry* const instance = new Registry;
    return *instance;
}

int64_t add(std::unique_ptr<Communicator> comm) {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    all.comms[all.next] = std::move(comm);
    return all.next++;
}

Communicator& comm_at(int64_t number) {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto found = all.comms.find(number);
    TOPOEP_CHECK(found != all.comms.end(), "NCCL communicator ", number,
                 " was closed or never made");
    return *found->second;
}

// The loaded library, if what this library calls of it is there.
const NcclLibrary& usable_library() {
    const NcclLibrary& library = nccl_library();
    const std::string problem = nccl_problem(library, Reach::kNode);
    TOPOEP_CHECK(problem.empty(), problem);
    return library;
}

std::tuple<int64_t, int64_t, std::string> nccl_status(bool across_nodes) {
    const NcclLibrary& library = nccl_library();
    return {library.compiled_version, library.loaded_version,
            nccl_problem(library, across_nodes ? Reach::kCluster : Reach::kNode)};
}

// Writes a new id into uint8 [128] on the CPU.
void nccl_unique_id_(const Tensor& id) {
    ncclUniqueId unique;
    TOPOEP_CHECK(id.numel() == static_cast<int64_t>(sizeof unique), "an NCCL id has ",
                 sizeof unique, " bytes, not ", id.numel());
    const NcclLibrary& library = usable_library();
    check_nccl(library, library.GetUniqueId(&unique), "ncclGetUniqueId");
    std::memcpy(id.data_ptr(), &unique, sizeof unique);
}

int64_t nccl_comm_create(const Tensor& id, int64_t num_ranks, int64_t rank) {
    ncclUniqueId unique;
    TOPOEP_CHECK(id.numel() == static_cast<int64_t>(sizeof unique), "an NCCL id has ",
                 sizeof unique, " bytes, not ", id.numel());
    std::memcpy(&unique, id.data_ptr(), sizeof unique);
    return add(Communicator::create(usable_library(), unique, static_cast<int>(num_ranks),
                                    static_cast<int>(rank)));
}

int64_t nccl_comm_adopt(int64_t pointer) {
    return add(Communicator::adopt(usable_library(), reinterpret_cast<ncclComm_t>(pointer)));
}

// rank_at: the ranks of the group node by node, which is how the communicator must number them.
std::string nccl_comm_problem(int64_t comm_number, std::vector<int64_t> rank_at,
                              int64_t ranks_per_node, int64_t rank) {
    const Communicator& comm = comm_at(comm_number);
    const NodeOrder order{{rank_at.begin(), rank_at.end()}, static_cast<int>(ranks_per_node)};
    const bool several_nodes = static_cast<int64_t>(rank_at.size()) > ranks_per_node;
    const std::string problem = comm.problem(several_nodes ? Reach::kCluster : Reach::kNode);
    return problem.empty() ? team_problem(comm.world_team(), comm.lsa_team(), comm.rail_team(),
                                          static_cast<int>(rank), order)
                           : problem;
}

// The window's number, its memory as uint8 [bytes], and its address at every rank of the node.
std::tuple<int64_t, Tensor, std::vector<int64_t>> nccl_comm_window(int64_t comm_number,
                                                                   int64_t bytes, int64_t device) {
    Communicator& comm = comm_at(comm_number);
    const int window = comm.add_window(static_cast<size_t>(bytes));
    std::vector<int64_t> addresses;
    for (void* pointer : comm.peer_pointers(window)) {
        addresses.push_back(reinterpret_cast<int64_t>(pointer));
    }
    const std::shared_ptr<WindowMemory> memory = comm.memory(window);
    Tensor tensor = torch::stable::from_blob(
        memory->data(), {bytes}, {1},
        torch::stable::Device(torch::headeronly::DeviceType::CUDA,
                              static_cast<torch::stable::DeviceIndex>(device)),
        ScalarType::Byte, [memory](void*) {});
    return {window, tensor, addresses};
}

int64_t nccl_comm_device(int64_t comm_number, int64_t signals, int64_t contexts) {
    DeviceCommNeeds needs;
    needs.signals = static_cast<int>(signals);
    needs.contexts = static_cast<int>(contexts);
    return comm_at(comm_number).create_device_comm(needs).ginContextCount;
}

void nccl_comm_check(int64_t comm_number) {
    comm_at(comm_number).check_async();
}

void nccl_comm_close(int64_t comm_number, bool abort) {
    std::unique_ptr<Communicator> comm;
    {
        Registry& all = registry();
        const std::lock_guard lock(all.mutex);
        const auto found = all.comms.find(comm_number);
        if (found == all.comms.end()) {
            return;
        }
        comm = std::move(found->second);
        all.comms.erase(found);
    }
    comm->close(abort);
}

int64_t plane_over_nccl(const Tensor& topology, const Tensor& windows, const Tensor& state,
                        const Tensor& error, std::vector<int64_t> config_numbers,
                        std::vector<int64_t> roles, int64_t timeout, int64_t comm_number,
                        int64_t window, int64_t contexts) {
    Communicator& comm = comm_at(comm_number);
    const DataPlaneConfig config = checked_plane_config(config_numbers);
    NcclNetwork network{};
    network.comm = comm.device_comm();
    network.window = comm.handle(static_cast<int>(window));
    network.contexts = static_cast<int>(contexts);
    network.position_of =
        view_topology_table(data<const int32_t>(topology), config.num_ranks).position_of;
    auto plane = std::make_unique<PlaneOver<NcclNetwork>>(network);
    fill_plane(*plane, config, {topology, windows, state, error, timeout}, roles);
    return add_plane(std::move(plane));
}

}  // namespace
}  // namespace topoep::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(topoep, library) {
    library.def("nccl_status(bool across_nodes) -> (int compiled, int loaded, str problem)");
    library.def("nccl_unique_id_(Tensor(a!) id) -> ()");
    library.def("nccl_comm_create(Tensor id, int num_ranks, int rank) -> int");
    library.def("nccl_comm_adopt(int pointer) -> int");
    library.def("nccl_comm_problem(int comm, int[] rank_at, int ranks_per_node, int rank) -> str");
    library.def(
        "nccl_comm_window(int comm, int bytes, int device) -> "
        "(int window, Tensor memory, int[] addresses)");
    library.def("nccl_comm_device(int comm, int signals, int contexts) -> int");
    library.def("nccl_comm_check(int comm) -> ()");
    library.def("nccl_comm_close(int comm, bool abort) -> ()");
    library.def(
        "plane_over_nccl(Tensor topology, Tensor windows, Tensor state, Tensor error, "
        "int[] config, int[] roles, int timeout, int comm, int window, int contexts) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(topoep, CompositeExplicitAutograd, library) {
    using namespace topoep::bindings;
    library.impl("nccl_status", TORCH_BOX(&nccl_status));
    library.impl("nccl_unique_id_", TORCH_BOX(&nccl_unique_id_));
    library.impl("nccl_comm_create", TORCH_BOX(&nccl_comm_create));
    library.impl("nccl_comm_adopt", TORCH_BOX(&nccl_comm_adopt));
    library.impl("nccl_comm_problem", TORCH_BOX(&nccl_comm_problem));
    library.impl("nccl_comm_window", TORCH_BOX(&nccl_comm_window));
    library.impl("nccl_comm_device", TORCH_BOX(&nccl_comm_device));
    library.impl("nccl_comm_check", TORCH_BOX(&nccl_comm_check));
    library.impl("nccl_comm_close", TORCH_BOX(&nccl_comm_close));
    library.impl("plane_over_nccl", TORCH_BOX(&plane_over_nccl));
}
