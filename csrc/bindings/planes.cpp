// SPDX-License-Identifier: Apache-2.0
#include "bindings/planes.h"

#include <map>
#include <mutex>

namespace topoep::bindings {
namespace {

constexpr size_t kConfigNumbers = 15;
constexpr int kMaxTransferThreads = 512;  // the launch bound of the kernels (cuda/replicate.cuh)

struct Registry {
    std::mutex mutex;
    std::map<int64_t, std::unique_ptr<Plane>> planes;
    int64_t next = 1;
};

// Never destroyed: at process exit the driver may be gone before the planes' memory is.
Registry& registry() {
    static Registry* const instance = new Registry;
    return *instance;
}

}  // namespace

DataPlaneConfig checked_plane_config(const std::vector<int64_t>& numbers) {
    TOPOEP_CHECK(numbers.size() == kConfigNumbers, "a data plane is described by ", kConfigNumbers,
                 " numbers, not ", numbers.size());
    const auto number = [&](size_t i) { return static_cast<int>(numbers[i]); };
    DataPlaneConfig config;
    config.num_ranks = number(0);
    config.num_nodes = number(1);
    config.ranks_per_node = number(2);
    config.num_experts = number(3);
    config.spare_slots = number(4);
    config.rank = number(5);
    config.node = number(6);
    config.local = number(7);
    config.chunk_bytes = numbers[8];
    config.tile_bytes = numbers[9];
    config.ring_slots = number(10);
    config.staging_slots = number(11);
    config.workers = number(12);
    config.max_relays = number(13);
    config.bulk_piece_bytes = number(14);
    TOPOEP_CHECK(config.num_nodes >= 1 && config.ranks_per_node >= 1 &&
                     config.num_ranks == config.num_nodes * config.ranks_per_node &&
                     config.num_ranks <= kMaxRanks,
                 config.num_ranks, " ranks on ", config.num_nodes, " nodes of ",
                 config.ranks_per_node, "; a data plane needs nodes of equal size");
    TOPOEP_CHECK(config.num_experts >= 1 && config.num_experts <= kMaxExperts &&
                     config.num_experts % config.num_ranks == 0 && config.spare_slots >= 0 &&
                     config.spare_slots <= kMaxSpareSlots,
                 config.num_experts, " experts and ", config.spare_slots,
                 " spare slots do not fit ", config.num_ranks, " ranks");
    TOPOEP_CHECK(config.rank >= 0 && config.rank < config.num_ranks && config.node >= 0 &&
                     config.node < config.num_nodes && config.local >= 0 &&
                     config.local < config.ranks_per_node,
                 "rank ", config.rank, ", place ", config.local, " of node ", config.node,
                 ", is out of range");
    TOPOEP_CHECK(config.chunk_bytes > 0 && config.chunk_bytes % 128 == 0 && config.tile_bytes > 0 &&
                     config.tile_bytes % 128 == 0,
                 "chunks of ", config.chunk_bytes, " and tiles of ", config.tile_bytes,
                 " bytes; expected positive multiples of 128");
    TOPOEP_CHECK(config.ring_slots >= 1 && config.staging_slots >= 1 && config.workers >= 1,
                 "rings of ", config.ring_slots, " slots, ", config.staging_slots,
                 " staging slots and ", config.workers, " workers; expected at least 1 of each");
    TOPOEP_CHECK(config.max_relays >= 0 && config.max_relays <= kMaxRelays, config.max_relays,
                 " relayed experts of a node; expected 0 to ", kMaxRelays, " (kMaxRelays)");
    TOPOEP_CHECK(config.bulk_piece_bytes >= 0 && config.bulk_piece_bytes <= kMaxBulkPieceBytes &&
                     config.bulk_piece_bytes % 128 == 0,
                 "pieces of bulk copies of ", config.bulk_piece_bytes,
                 " bytes; expected a multiple of 128, at most ", kMaxBulkPieceBytes,
                 ", or 0 for none (kMaxBulkPieceBytes)");
    return config;
}

void fill_plane(Plane& plane, const DataPlaneConfig& config, const PlaneMemory& memory,
                const std::vector<int64_t>& roles) {
    const auto check_size = [](const char* name, const Tensor& tensor, int64_t expected) {
        TOPOEP_CHECK(tensor.numel() == expected && tensor.is_contiguous(), name, " has ",
                     tensor.numel(), " elements; expected ", expected, ", contiguous");
    };
    check_size("topology", memory.topology,
               topology_table_size(config.num_ranks, config.num_nodes));
    check_size("windows", memory.windows, config.ranks_per_node);
    check_size("state", memory.state, state_bytes(config));
    check_size("error", memory.error, sizeof(ErrorRecord));
    TOPOEP_CHECK(memory.timeout > 0, "a timeout of ", memory.timeout, " ns; expected more than 0");
    TOPOEP_CHECK(roles.size() == 3, "block roles are senders, pullers and threads");
    plane.roles = {static_cast<int>(roles[0]), static_cast<int>(roles[1]),
                   static_cast<int>(roles[2])};
    TOPOEP_CHECK(plane.roles.pullers >= 1 && plane.roles.threads >= 32 &&
                     plane.roles.threads <= kMaxTransferThreads && plane.roles.threads % 32 == 0 &&
                     plane.roles.senders >= (config.num_nodes > 1 ? 1 : 0) &&
                     (plane.roles.senders == 0 || config.staging_slots % plane.roles.senders == 0),
                 plane.roles.senders, " senders, ", plane.roles.pullers, " pullers of ",
                 plane.roles.threads, " threads do not fit ", config.num_nodes, " nodes and ",
                 config.staging_slots, " staging slots");
    plane.shared.config = config;
    plane.shared.window = make_window_layout(config);
    plane.shared.topology =
        view_topology_table(data<const int32_t>(memory.topology), config.num_ranks);
    plane.shared.windows = data<unsigned char* const>(memory.windows);
    plane.shared.state = memory.state.data_ptr();
    plane.shared.error = data<ErrorRecord>(memory.error);
    plane.shared.timeout = static_cast<uint64_t>(memory.timeout);
    plane.kept = {memory.topology, memory.windows, memory.state, memory.error};
}

int64_t add_plane(std::unique_ptr<Plane> plane) {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    all.planes[all.next] = std::move(plane);
    return all.next++;
}

const Plane& plane_at(int64_t number) {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto found = all.planes.find(number);
    TOPOEP_CHECK(found != all.planes.end(), "data plane ", number, " was closed or never made");
    return *found->second;
}

void remove_plane(int64_t number) {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    all.planes.erase(number);
}

}  // namespace topoep::bindings
