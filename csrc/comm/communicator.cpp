// SPDX-License-Identifier: Apache-2.0
#include "comm/communicator.h"

#include <exception>

#include "core/error.h"

namespace topoep {

WindowMemory::WindowMemory(const NcclLibrary& library, size_t bytes)
    : library_(library), bytes_(bytes) {
    check_nccl(library, library.MemAlloc(&data_, bytes), "ncclMemAlloc");
}

WindowMemory::~WindowMemory() {
    library_.MemFree(data_);
}

std::unique_ptr<Communicator> Communicator::create(const NcclLibrary& library,
                                                   const ncclUniqueId& id, int num_ranks,
                                                   int rank) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.commName = "topoep";
    ncclComm_t comm = nullptr;
    check_nccl(library, library.CommInitRankConfig(&comm, num_ranks, id, rank, &config),
               "ncclCommInitRankConfig");
    return std::unique_ptr<Communicator>(new Communicator(library, comm, true));
}

std::unique_ptr<Communicator> Communicator::adopt(const NcclLibrary& library, ncclComm_t comm) {
    TOPOEP_CHECK(comm != nullptr,
                 "the process group has no NCCL communicator yet; make it eager "
                 "(init_process_group(device_id=..)) or run one collective first");
    return std::unique_ptr<Communicator>(new Communicator(library, comm, false));
}

Communicator::Communicator(const NcclLibrary& library, ncclComm_t comm, bool owned)
    : library_(library), comm_(comm), owned_(owned) {
    try {
        check(library.CommUserRank(comm, &rank_), "ncclCommUserRank");
        check(library.CommCount(comm, &num_ranks_), "ncclCommCount");
    } catch (...) {
        if (owned) {
            library.CommAbort(comm);
        }
        throw;
    }
}

Communicator::~Communicator() {
    try {
        close(false);
    } catch (const std::exception&) {
        // close() reports; a destructor that runs because of another error must not.
    }
}

std::string Communicator::problem(Reach reach) const {
    ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
    check(library_.CommQueryProperties(comm_, &properties), "ncclCommQueryProperties");
    if (!properties.deviceApiSupport) {
        return "this NCCL communicator has no device API: the GPUs of a node must reach each other "
               "by load and store (NVLink, or PCIe with peer access), with symmetric memory not "
               "switched off (NCCL_CUMEM_ENABLE, NCCL_WIN_ENABLE)";
    }
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 3)
    const ncclGinType_t gin = properties.railedGinType;  // only ranks of one rail are connected
#else
    const ncclGinType_t gin = properties.ginType;
#endif
    if (reach == Reach::kCluster && gin == NCCL_GIN_TYPE_NONE) {
        return "this NCCL communicator cannot put from a kernel to other nodes (GIN): it needs "
               "InfiniBand or RoCE NICs with GPUDirect RDMA, and NCCL_GIN_ENABLE not 0";
    }
    return "";
}

int Communicator::add_window(size_t bytes) {
    auto memory = std::make_shared<WindowMemory>(library_, bytes);
    ncclWindow_t handle = nullptr;
    check(library_.CommWindowRegister(comm_, memory->data(), memory->bytes(), &handle,
                                      NCCL_WIN_COLL_SYMMETRIC),
          "ncclCommWindowRegister");
    // NCCL answers with no window, and no error, where symmetric memory is not supported.
    TOPOEP_CHECK(handle != nullptr,
                 "ncclCommWindowRegister made no symmetric window: the GPUs of this node cannot "
                 "share memory, or NCCL_WIN_ENABLE=0 or NCCL_CUMEM_ENABLE=0 is set");
    windows_.push_back({std::move(memory), handle});
    return static_cast<int>(windows_.size()) - 1;
}

std::vector<void*> Communicator::peer_pointers(int window) const {
    std::vector<void*> pointers(lsa_team().nRanks);
    for (size_t peer = 0; peer < pointers.size(); ++peer) {
        check(library_.GetLsaDevicePointer(handle(window), 0, static_cast<int>(peer),
                                           &pointers[peer]),
              "ncclGetLsaDevicePointer");
    }
    return pointers;
}

const ncclDevComm& Communicator::create_device_comm(const DeviceCommNeeds& needs) {
    TOPOEP_CHECK(device_comm_ == nullptr, "the device communicator exists already");
    ncclDevCommRequirements_t requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    requirements.ginSignalCount = needs.signals;
    requirements.ginCounterCount = needs.counters;
    requirements.ginContextCount = needs.contexts;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 7)
    // Data crosses the network between ranks of one rail only.
    requirements.ginConnectionType =
        needs.signals > 0 ? NCCL_GIN_CONNECTION_RAIL : NCCL_GIN_CONNECTION_NONE;
#else
    requirements.ginForceEnable = needs.signals > 0;
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 3)
    // At most one operation is in flight per signal, so the weaker and cheaper kind will do.
    requirements.ginStrongSignalsRequired = false;
    requirements.ginVaSignalsRequired = false;
#endif
    auto device_comm = std::make_unique<ncclDevComm>();
    check(library_.DevCommCreate(comm_, &requirements, device_comm.get()), "ncclDevCommCreate");
    device_comm_ = std::move(device_comm);
    return *device_comm_;
}

const ncclDevComm& Communicator::device_comm() const {
    TOPOEP_CHECK(device_comm_ != nullptr, "the device communicator was not made yet");
    return *device_comm_;
}

void Communicator::check_async() const {
    TOPOEP_CHECK(comm_ != nullptr, "the communicator was closed");
    ncclResult_t error = ncclSuccess;
    check(library_.CommGetAsyncError(comm_, &error), "ncclCommGetAsyncError");
    check(error, "an earlier NCCL operation");
}

void Communicator::close(bool abort) {
    if (comm_ == nullptr) {
        return;
    }
    std::exception_ptr first;
    const auto attempt = [&](ncclResult_t result, const char* call) {
        try {
            check(result, call);
        } catch (const Error&) {
            first = first == nullptr ? std::current_exception() : first;
        }
    };
    if (device_comm_ != nullptr) {
        attempt(library_.DevCommDestroy(comm_, device_comm_.get()), "ncclDevCommDestroy");
        device_comm_.reset();
    }
    while (!windows_.empty()) {
        attempt(library_.CommWindowDeregister(comm_, windows_.back().handle),
                "ncclCommWindowDeregister");
        windows_.pop_back();
    }
    if (owned_) {
        attempt(abort ? library_.CommAbort(comm_) : library_.CommDestroy(comm_),
                abort ? "ncclCommAbort" : "ncclCommDestroy");
    }
    comm_ = nullptr;
    if (first != nullptr) {
        std::rethrow_exception(first);
    }
}

namespace {

// "2 ranks (0, 2)": the first ranks of a team, as the group numbers them.
std::string describe_team(ncclTeam_t world, ncclTeam_t team, const NodeOrder& order) {
    constexpr int kShown = 8;
    std::string text = std::to_string(team.nRanks) + (team.nRanks == 1 ? " rank (" : " ranks (");
    const int first = world.rank - team.rank * team.stride;
    for (int i = 0; i < team.nRanks && i < kShown; ++i) {
        const int place = first + i * team.stride;
        const bool known = place >= 0 && place < static_cast<int>(order.rank_at.size());
        text += (i == 0 ? "" : ", ") + (known ? std::to_string(order.rank_at[place]) : "?");
    }
    return text + (team.nRanks > kShown ? ", ..)" : ")");
}

}  // namespace

std::string team_problem(ncclTeam_t world, ncclTeam_t lsa, ncclTeam_t rail, int rank,
                         const NodeOrder& order) {
    const std::string self = std::to_string(rank);
    const int num_ranks = static_cast<int>(order.rank_at.size());
    const int size = order.ranks_per_node;
    if (world.nRanks != num_ranks) {
        return "the communicator has " + std::to_string(world.nRanks) + " ranks, the topology " +
               std::to_string(num_ranks) + "; make the topology from the group (from_group)";
    }
    if (order.rank_at[world.rank] != rank) {
        return "the communicator numbers rank " + self + " of the group " +
               std::to_string(world.rank) + ", where node by node rank " +
               std::to_string(order.rank_at[world.rank]) +
               " would be: NCCL joins consecutive ranks only. Unset TOPOEP_NCCL_COMM, so that a "
               "communicator in the order of the nodes is made";
    }
    const ncclTeam_t node{size, world.rank % size, 1};
    const ncclTeam_t nodes{num_ranks / size, world.rank / size, size};
    const auto differs = [](ncclTeam_t a, ncclTeam_t b) {
        return a.nRanks != b.nRanks || a.rank != b.rank || (a.nRanks > 1 && a.stride != b.stride);
    };
    if (differs(lsa, node)) {
        const char* reason =
            lsa.nRanks > size
                ? "they are one NVLink domain; give all its processes the same TOPOEP_NODE, or "
                  "describe it with Topology(node_of_rank=..)"
                : "some GPUs of a node cannot reach each other (nvidia-smi topo -p2p r), or the "
                  "node table is not that of the machines (expected: Topology.from_group)";
        return "the topology's node of rank " + self + " has " + describe_team(world, node, order) +
               ", but on this machine NCCL joins " + describe_team(world, lsa, order) +
               " by load and store: " + reason;
    }
    if (differs(rail, nodes)) {
        return "the topology connects rank " + self + " over the network with " +
               describe_team(world, nodes, order) + ", but NCCL's rail has " +
               describe_team(world, rail, order) + "; expected nodes of equal size, those of " +
               "Topology.from_group";
    }
    return "";
}

}  // namespace topoep
