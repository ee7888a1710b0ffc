// SPDX-License-Identifier: Apache-2.0
// The candidate-independent view of the counts: totals per expert, loads per rank, and both sorted.
// Sorting is by counting (an element's place is the number of elements before it), which needs no
// order of execution and gives the same permutation on any number of threads.
#pragma once

#include <cstdint>

#include "core/shape.h"
#include "core/team.h"

namespace topoep {

struct Workload {
    int32_t* total;        // [E] tokens of each expert, planner order
    uint16_t* order;       // [E] per rank: its experts, most tokens first, then lower id
    int32_t* load;         // [R] tokens of each rank without copies, by position
    uint16_t* by_load;     // [R] positions, least loaded first, then lower position
    uint16_t* node_order;  // [R] the same inside each node
    int32_t* load_before;  // [R + 1] prefix sums of load in by_load order
    int64_t* node_out;     // [N] tokens that leave each node when there are no copies
    int64_t* node_in;      // [N] tokens that it takes in
};

// The rank and expert ids of the outside world behind a planner expert id.
TOPOEP_HD int expert_id(const Shape& shape, const TopologyView& topology, int expert) {
    const int home_slots = shape.experts_per_rank();
    return topology.rank_at[expert / home_slots] * home_slots + expert % home_slots;
}

// node_tokens[n * E + e] = tokens that the ranks of node n route to planner expert e, for every
// (first, first + stride, ..)-th pair. A pair belongs to one thread, so no atomics are needed.
// Returns the sum over this thread's pairs, which does not overflow.
TOPOEP_HD int64_t sum_node_tokens(const Shape& shape, const TopologyView& topology,
                                  const int32_t* counts, int32_t* node_tokens, int first,
                                  int stride) {
    const int num_experts = shape.num_experts;
    int64_t sum_of_pairs = 0;
    for (int pair = first; pair < shape.num_nodes * num_experts; pair += stride) {
        const int node = pair / num_experts;
        const int expert = expert_id(shape, topology, pair % num_experts);
        int64_t sum = 0;
        for (int p = topology.node_begin[node]; p < topology.node_begin[node + 1]; ++p) {
            sum += counts[static_cast<int64_t>(topology.rank_at[p]) * num_experts + expert];
        }
        node_tokens[pair] = static_cast<int32_t>(min64(sum, int64_t{INT32_MAX}));
        sum_of_pairs += sum;
    }
    return sum_of_pairs;
}

template <class Team>
TOPOEP_TEAM void sum_loads(const Team& team, const Shape& shape, const int32_t* node_tokens,
                           const Workload& work) {
    const int num_experts = shape.num_experts;
    for (int e = team.lane(); e < num_experts; e += team.size()) {
        int32_t sum = 0;
        for (int n = 0; n < shape.num_nodes; ++n) {
            sum += node_tokens[n * num_experts + e];
        }
        work.total[e] = sum;
    }
    team.sync();
    const int home_slots = shape.experts_per_rank();
    for (int p = team.lane(); p < shape.num_ranks; p += team.size()) {
        int32_t sum = 0;
        for (int e = p * home_slots; e < (p + 1) * home_slots; ++e) {
            sum += work.total[e];
        }
        work.load[p] = sum;
    }
    team.sync();
}

// Sums node_out and node_in of one node. Needs sum_loads.
template <class Team>
TOPOEP_TEAM void sum_node_flows(const Team& team, const Shape& shape, const TopologyView& topology,
                                const int32_t* node_tokens, const Workload& work, int node) {
    const int home_slots = shape.experts_per_rank();
    int64_t out = 0;
    int64_t in = 0;
    for (int e = team.lane(); e < shape.num_experts; e += team.size()) {
        const int32_t own = node_tokens[node * shape.num_experts + e];
        if (topology.node_at[e / home_slots] == node) {
            in += work.total[e] - own;
        } else {
            out += own;
        }
    }
    out = team.sum(out);
    in = team.sum(in);
    if (team.lane() == 0) {
        work.node_out[node] = out;
        work.node_in[node] = in;
    }
}

// Number of entries of values[first..last) that sort before values[i]; equal ones by lower index.
template <bool kDescending>
TOPOEP_HD int sorted_place(const int32_t* values, int first, int last, int i) {
    int place = 0;
    for (int k = first; k < last; ++k) {
        const bool before = kDescending ? values[k] > values[i] : values[k] < values[i];
        place += before || (values[k] == values[i] && k < i);
    }
    return place;
}

template <class Team>
TOPOEP_TEAM void sort_loads(const Team& team, const Shape& shape, const TopologyView& topology,
                            const Workload& work) {
    const int home_slots = shape.experts_per_rank();
    for (int e = team.lane(); e < shape.num_experts; e += team.size()) {
        const int first = e / home_slots * home_slots;
        const int place = sorted_place<true>(work.total, first, first + home_slots, e);
        work.order[first + place] = static_cast<uint16_t>(e);
    }
    for (int p = team.lane(); p < shape.num_ranks; p += team.size()) {
        const int node = topology.node_at[p];
        const int first = topology.node_begin[node];
        const int place = sorted_place<false>(work.load, first, topology.node_begin[node + 1], p);
        work.node_order[first + place] = static_cast<uint16_t>(p);
        work.by_load[sorted_place<false>(work.load, 0, shape.num_ranks, p)] =
            static_cast<uint16_t>(p);
    }
    team.sync();
    for (int i = team.lane(); i < shape.num_ranks; i += team.size()) {
        work.load_before[i] = work.load[work.by_load[i]];
    }
    team.sync();
    prefix_sum(team, work.load_before, work.load_before, shape.num_ranks);
}

}  // namespace topoep
