// SPDX-License-Identifier: Apache-2.0
// Who sends, lands, gathers and sums what: lists that every rank derives from the plan, in the same
// order everywhere. They index the plan's own list of copies, so nothing is stored twice.
//
// An entry is a place in plan.copy_slots. Per expert the entries go node by node, so the copies of
// an expert in one node are consecutive; the first of them, when the node is not the expert's home
// node, leads the pair (expert, node). Each pair crosses the network once. The pairs of a stream
// m -> n, in order of their entries (ascending expert), have the indices 0, 1, ..
#pragma once

#include <cstdint>

#include "core/data_plane.h"
#include "core/hd.h"
#include "core/relays.h"

namespace topoep {

// The tables of a plan (core/finalize.h, PlanView) that say where copies are.
struct PlanCopies {
    const int32_t* slot_expert;   // [R, S]
    const int32_t* copy_offsets;  // [E + 1]
    const int32_t* copy_slots;    // [R * S]
};

// Where a rank is: its node, and its index among the ranks of the node.
struct Place {
    int node;
    int local;
};

TOPOEP_HD Place place_of(const TopologyView& topology, int rank) {
    const int position = topology.position_of[rank];
    const int node = topology.node_at[position];
    return {node, position - topology.node_begin[node]};
}

TOPOEP_HD int rank_of(const TopologyView& topology, int node, int local) {
    return topology.rank_at[topology.node_begin[node] + local];
}

// One entry of the list of copies.
struct Copy {
    int expert;
    int rank;
    int slot;  // spare slot of the rank
    int node;
    int local;
};

TOPOEP_HD Copy load_copy(const DataPlaneConfig& config, const TopologyView& topology,
                         const PlanCopies& copies, int entry) {
    const int physical = copies.copy_slots[entry];
    const int rank = physical / config.slots_per_rank();
    const int slot = physical % config.slots_per_rank() - config.experts_per_rank();
    const Place place = place_of(topology, rank);
    return {copies.slot_expert[rank * config.spare_slots + slot], rank, slot, place.node,
            place.local};
}

TOPOEP_HD int home_rank(const DataPlaneConfig& config, int expert) {
    return expert / config.experts_per_rank();
}

// Of one rank; device memory, int32, stream_lists_size() entries in all.
struct StreamLists {
    int32_t* pair_index;  // [R * S] of a leading entry: its pair's index in its stream, when this
                          // node is one end of it; else -1
    int32_t* out_order;   // [R * S] leading entries of the pairs that leave this node, ascending
    int32_t* in_order;    // [R * S] .. of the pairs that this node imports
    int32_t* out_begin;   // [N + 1] pairs that leave this node: stream to node n is
    int32_t* out_entry;   //   out_entry[out_begin[n] .. out_begin[n + 1]), leading entries
    int32_t* in_begin;    // [N + 1] pairs that this node imports, by home node m
    int32_t* in_entry;    //   leading entries
    int32_t* staged;      // [0] how many, then the experts of this node with copies in other
                          //   nodes, ascending: what this node's ranks send
    int32_t* guests;      // [0] how many of this rank's slots come in chunks, from another node or
                          //   relayed in this one, then slot, home node, index of each (of the
                          //   pair, or in `relays`), by (home node, index)
    int32_t* relays;      // [0] how many experts this node relays, then the entry of the first copy
                          //   in this node of each, ascending (core/relays.h)
    int32_t* relay_links;              // [2, R] scratch of the choice: NodeLinks
    RelayCandidate* relay_candidates;  // likewise
};

TOPOEP_HD int64_t stream_lists_size(const DataPlaneConfig& config) {
    const int64_t entries = config.num_spare();
    const int64_t nodes = config.num_nodes + 1;
    // A relay candidate has two copies or more, and takes two words.
    return 6 * entries + 2 * nodes + 1 + config.num_experts + 1 + 3 * config.spare_slots + 1 +
           kMaxRelays + 2 * config.num_ranks;
}

TOPOEP_HD StreamLists view_stream_lists(int32_t* memory, const DataPlaneConfig& config) {
    StreamLists lists{};
    lists.pair_index = memory;
    lists.out_order = lists.pair_index + config.num_spare();
    lists.in_order = lists.out_order + config.num_spare();
    lists.out_begin = lists.in_order + config.num_spare();
    lists.out_entry = lists.out_begin + config.num_nodes + 1;
    lists.in_begin = lists.out_entry + config.num_spare();
    lists.in_entry = lists.in_begin + config.num_nodes + 1;
    lists.staged = lists.in_entry + config.num_spare();
    lists.guests = lists.staged + 1 + config.num_experts;
    lists.relays = lists.guests + 1 + 3 * config.spare_slots;
    lists.relay_links = lists.relays + 1 + kMaxRelays;
    lists.relay_candidates =
        reinterpret_cast<RelayCandidate*>(lists.relay_links + 2 * config.num_ranks);
    return lists;
}

}  // namespace topoep
