// SPDX-License-Identifier: Apache-2.0
// The sizes of one planning problem and the table that says which rank lives on which node.
//
// Positions: the planner numbers ranks node by node ("node-major"), so that a node is a contiguous
// range whatever the table says. Position p holds rank topology.rank_at[p]; a planner expert id is
// position * experts_per_rank + local index. "Lower id wins" in the planner always means this
// order, which is the plain order of ranks and experts whenever the nodes are blocks of consecutive
// ranks.
#pragma once

#include <cstdint>

#include "core/hd.h"

namespace topoep {

struct Shape {
    int num_ranks = 0;
    int num_nodes = 0;
    int num_experts = 0;
    int spare_slots = 0;

    TOPOEP_HD int experts_per_rank() const { return num_experts / num_ranks; }
    TOPOEP_HD int slots_per_rank() const { return experts_per_rank() + spare_slots; }
    TOPOEP_HD int num_physical() const { return num_ranks * slots_per_rank(); }
    TOPOEP_HD int num_spare() const { return num_ranks * spare_slots; }
};

// Read-only tables, all of them inside one int32 array of topology_table_size() entries.
struct TopologyView {
    const int32_t* rank_at = nullptr;      // [num_ranks] position -> rank
    const int32_t* position_of = nullptr;  // [num_ranks] rank -> position
    const int32_t* node_at = nullptr;      // [num_ranks] position -> node, ascending
    const int32_t* node_begin = nullptr;   // [num_nodes + 1] first position of each node

    TOPOEP_HD int node_size(int node) const { return node_begin[node + 1] - node_begin[node]; }
};

TOPOEP_HD int topology_table_size(int num_ranks, int num_nodes) {
    return 3 * num_ranks + num_nodes + 1;
}

TOPOEP_HD int nodes_of_topology_table(int64_t table_size, int num_ranks) {
    return static_cast<int>(table_size) - 3 * num_ranks - 1;
}

TOPOEP_HD TopologyView view_topology_table(const int32_t* table, int num_ranks) {
    return {table, table + num_ranks, table + 2 * num_ranks, table + 3 * num_ranks};
}

}  // namespace topoep
