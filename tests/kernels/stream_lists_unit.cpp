// SPDX-License-Identifier: Apache-2.0
// Entry points for tests/kernels/test_stream_lists.py.
#include "cuda/stream_lists.cuh"

using namespace topoep;
using Int = long long;

extern "C" {

Int lists_size(Int ranks, Int nodes, Int experts, Int spare) {
    DataPlaneConfig config{};
    config.num_ranks = static_cast<int>(ranks);
    config.num_nodes = static_cast<int>(nodes);
    config.num_experts = static_cast<int>(experts);
    config.spare_slots = static_cast<int>(spare);
    return stream_lists_size(config);
}

// starts[i]: where the i-th field of StreamLists begins.
const char* run_stream_lists(Int ranks, Int nodes, Int experts, Int spare, Int rank, Int max_relays,
                             const int32_t* table, const int32_t* slot_expert,
                             const int32_t* copy_offsets, const int32_t* copy_slots, int32_t* lists,
                             int64_t* starts) {
    DataPlaneConfig config{};
    config.num_ranks = static_cast<int>(ranks);
    config.num_nodes = static_cast<int>(nodes);
    config.ranks_per_node = config.num_ranks / config.num_nodes;
    config.num_experts = static_cast<int>(experts);
    config.spare_slots = static_cast<int>(spare);
    config.rank = static_cast<int>(rank);
    config.max_relays = static_cast<int>(max_relays);
    const TopologyView topology = view_topology_table(table, config.num_ranks);
    const Place place = place_of(topology, config.rank);
    config.node = place.node;
    config.local = place.local;
    const StreamLists view = view_stream_lists(lists, config);
    const int32_t* fields[] = {view.pair_index, view.out_order, view.in_order, view.out_begin,
                               view.out_entry,  view.in_begin,  view.in_entry, view.staged,
                               view.guests,     view.relays};
    for (int i = 0; i < 10; ++i) {
        starts[i] = fields[i] - lists;
    }
    return launch_stream_lists(config, topology, {slot_expert, copy_offsets, copy_slots}, lists,
                               nullptr);
}
}
