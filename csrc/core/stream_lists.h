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

namespace topoep {

// The tables of a plan (core/finalize.h, PlanView) that say where copies are.
struct PlanCopies {
    const int32_t* slot_expert;   // [R, S]
    const int32_t* copy_offsets;  // [E + 1]
    const int32_t* copy_slots;    // [R * S]
};

// Of one rank; device memory, int32, stream_lists_size() entries in all.
struct StreamLists {
    int32_t* pair_index;  // [R * S] of a leading entry: its pair's index in its stream, when this
                          // node is one end of it; else -1
    int32_t* out_begin;   // [N + 1] pairs that leave this node: stream to node n is
    int32_t* out_entry;   //   out_entry[out_begin[n] .. out_begin[n + 1]), leading entries
    int32_t* in_begin;    // [N + 1] pairs that this node imports, by home node m
    int32_t* in_entry;    //   leading entries
    int32_t* staged;      // [0] how many, then the experts of this node with copies in other
                          //   nodes, ascending: what this node's ranks send
    int32_t* guests;      // [0] how many of this rank's slots have their expert from another node,
                          //   then slot, home node, pair index of each, by (home node, index)
};

TOPOEP_HD int64_t stream_lists_size(const DataPlaneConfig& config) {
    const int64_t entries = config.num_spare();
    const int64_t nodes = config.num_nodes + 1;
    return 3 * entries + 2 * nodes + 1 + config.num_experts + 1 + 3 * config.spare_slots;
}

TOPOEP_HD StreamLists view_stream_lists(int32_t* memory, const DataPlaneConfig& config) {
    StreamLists lists{};
    lists.pair_index = memory;
    lists.out_begin = lists.pair_index + config.num_spare();
    lists.out_entry = lists.out_begin + config.num_nodes + 1;
    lists.in_begin = lists.out_entry + config.num_spare();
    lists.in_entry = lists.in_begin + config.num_nodes + 1;
    lists.staged = lists.in_entry + config.num_spare();
    lists.guests = lists.staged + 1 + config.num_experts;
    return lists;
}

}  // namespace topoep
