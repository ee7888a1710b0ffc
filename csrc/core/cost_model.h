// SPDX-License-Identifier: Apache-2.0
// Predicted time of one MoE layer under a plan, forward and backward, in integer nanoseconds: what
// depends on the plan, so that two plans can be compared. docs/cost-model.md derives the constants.
//
//   compute    the fullest rank: tokens * token + copies it holds * instance
//   transfer   the busiest link for the weights: a rank's in-node link (copies out or in, and its
//              share of sharded network copies), or a node's NICs (pairs out or in)
//   exposed    what of two weight transfers (forward, and again in backward) and of the gradients'
//              way home is longer than what it hides behind
//   hidden     the rest, of which `interference` parts per thousand slow down what runs beside it
//   tokens     four exchanges (dispatch and combine, forward and backward) of the tokens that cross
//              the busiest node's NICs
//
// A node's NICs share its network traffic evenly: tokens because every rank sends its own through
// its own NIC, copies because they are cut into shards, one per NIC.
#pragma once

#include <cstdint>

#include "core/candidate.h"
#include "core/shape.h"
#include "core/team.h"
#include "core/workload.h"

namespace topoep {

struct CostModel {
    int64_t token;       // compute of a routed token, forward and backward
    int64_t instance;    // an expert instance more on a rank, forward and backward
    int64_t copy;        // weights of one expert over one rank's in-node link
    int64_t cross_copy;  // weights of one expert over the network, by all NICs of a node if sharded
    int64_t grad;        // gradients of one expert over one rank's in-node link
    int64_t cross_grad;  // gradients of one expert over the network, likewise
    int64_t network_row;   // a routed token over one NIC, one way
    int64_t hide_forward;  // transfer time hidden per token that home experts compute, forward
    int64_t hide_backward;
    int64_t hide_grads;    // time that the way home of the gradients hides behind
    int64_t interference;  // slow-down by hidden transfers, parts per thousand
    int64_t sharded;       // 1: network copies are cut over the NICs of a node
};

constexpr int kCostModelFields = 12;
constexpr int kTokenExchanges = 4;
constexpr int64_t kLongestTime = int64_t{1} << 61;

// From so many tokens of one node on, sending them costs its NICs more than fetching the expert
// twice and sending its gradients home.
TOPOEP_HD int64_t least_local_tokens(const Shape& shape, const CostModel& cost) {
    const int64_t ranks_per_node = (shape.num_ranks + shape.num_nodes - 1) / shape.num_nodes;
    const int64_t row = kTokenExchanges * cost.network_row;
    if (row == 0) {
        return INT32_MAX;
    }
    return ((2 * cost.cross_copy + cost.cross_grad) * ranks_per_node + row - 1) / row;
}

// The lowest position of the node that holds a copy of the expert; the copy in `slot` is one.
TOPOEP_HD int first_holder(const Candidate& c, int node, int slot) {
    int i = c.topology.node_begin[node] * c.shape.spare_slots;
    while (c.slot_expert[i] != c.slot_expert[slot]) {
        ++i;
    }
    return i / c.shape.spare_slots;
}

// Tokens of the expert that the copies in a node serve.
TOPOEP_HD int64_t node_quota(const Candidate& c, int node, int expert) {
    int64_t sum = 0;
    const int spare = c.shape.spare_slots;
    for (int i = c.topology.node_begin[node] * spare; i < c.topology.node_begin[node + 1] * spare;
         ++i) {
        sum += c.slot_expert[i] == expert ? c.slot_tokens[i] : 0;
    }
    return sum;
}

// Replaces what a node sends and receives of an expert. Differences of unsigned numbers wrap, and
// their sums come out right.
template <class Team>
TOPOEP_TEAM void change_flow(const Team& team, const Traffic& traffic, int node, int64_t need,
                             int64_t quota, int64_t old_out, int64_t old_in) {
    team.add(&traffic.tokens_out[node], static_cast<uint64_t>(max64(need - quota, 0) - old_out));
    team.add(&traffic.tokens_in[node], static_cast<uint64_t>(max64(quota - need, 0) - old_in));
}

// Serving the nearest level first, a node sends out what its holders cannot serve of its own tokens
// and takes in what they can serve beyond them (core/split.h).
template <class Team>
TOPOEP_TEAM void count_traffic(const Team& team, const Candidate& c, const Workload& work,
                               const int32_t* node_tokens) {
    const Shape& shape = c.shape;
    const Traffic& traffic = c.traffic;
    for (int n = team.lane(); n < shape.num_nodes; n += team.size()) {
        traffic.tokens_out[n] = static_cast<uint64_t>(work.node_out[n]);
        traffic.tokens_in[n] = static_cast<uint64_t>(work.node_in[n]);
        traffic.pairs_out[n] = traffic.pairs_in[n] = 0;
    }
    for (int p = team.lane(); p < shape.num_ranks; p += team.size()) {
        traffic.copies_out[p] = traffic.copies_in[p] = 0;
        traffic.exports[p] = traffic.imports[p] = 0;
    }
    team.sync();
    for (int i = team.lane(); i < shape.num_spare(); i += team.size()) {
        const int expert = c.slot_expert[i];
        if (expert == kNoExpert) {
            continue;
        }
        const int rank = i / shape.spare_slots;
        const int node = c.topology.node_at[rank];
        const bool at_home = node == c.home_node(expert);
        const int source = at_home ? c.home_rank(expert) : first_holder(c, node, i);
        if (at_home || source != rank) {
            team.add(&traffic.copies_out[source], 1u);
            team.add(&traffic.copies_in[rank], 1u);
            continue;
        }
        team.add(&traffic.exports[c.home_rank(expert)], 1u);
        team.add(&traffic.imports[rank], 1u);
        team.add(&traffic.pairs_out[c.home_node(expert)], 1u);
        team.add(&traffic.pairs_in[node], 1u);
        const int64_t need = node_tokens[node * shape.num_experts + expert];
        change_flow(team, traffic, node, need, node_quota(c, node, expert), need, 0);
    }
    for (int e = team.lane(); e < shape.num_experts; e += team.size()) {
        if (!c.is_copied(e)) {
            continue;
        }
        const int node = c.home_node(e);
        const int64_t need = node_tokens[node * shape.num_experts + e];
        int64_t elsewhere = 0;
        for (int n = 0; n < shape.num_nodes; ++n) {
            elsewhere += n == node ? 0 : node_tokens[n * shape.num_experts + e];
        }
        change_flow(team, traffic, node, need, c.home[e] + node_quota(c, node, e), 0, elsewhere);
    }
    team.sync();
}

template <class Team>
TOPOEP_TEAM int64_t largest(const Team& team, int64_t value) {
    return INT64_MAX - static_cast<int64_t>(team.min(static_cast<uint64_t>(INT64_MAX - value)));
}

// Time on the busiest link when every copy takes `copy` on an in-node link and `cross` on a NIC.
template <class Team>
TOPOEP_TEAM int64_t busiest_link(const Team& team, const Candidate& c, int64_t copy, int64_t cross,
                                 bool sharded) {
    const Traffic& traffic = c.traffic;
    int64_t time = 0;
    for (int p = team.lane(); p < c.shape.num_ranks; p += team.size()) {
        // A shard stays on the rank that is its NIC's; the others pass over the in-node link.
        const int ranks = c.topology.node_size(c.topology.node_at[p]);
        const int64_t edge = sharded ? copy - copy / ranks : 0;
        time = max64(time, traffic.copies_out[p] * copy + traffic.exports[p] * edge);
        time = max64(time, traffic.copies_in[p] * copy + traffic.imports[p] * edge);
    }
    for (int n = team.lane(); n < c.shape.num_nodes; n += team.size()) {
        const uint32_t pairs =
            traffic.pairs_out[n] > traffic.pairs_in[n] ? traffic.pairs_out[n] : traffic.pairs_in[n];
        time = max64(time, pairs * cross);
    }
    return largest(team, time);
}

template <class Team>
TOPOEP_TEAM int64_t predict_time(const Team& team, const Candidate& c, const Workload& work,
                                 const int32_t* node_tokens, const CostModel& cost) {
    const Traffic& traffic = c.traffic;
    count_traffic(team, c, work, node_tokens);
    int64_t compute = 0;
    int64_t home_rows = INT32_MAX;  // of the rank with guests that has the fewest
    for (int p = team.lane(); p < c.shape.num_ranks; p += team.size()) {
        const int copies = c.copies_on(p);
        compute = max64(compute, c.load[p] * cost.token + copies * cost.instance);
        if (copies > 0) {
            int64_t rows = c.load[p];
            for (int i = p * c.shape.spare_slots; i < (p + 1) * c.shape.spare_slots; ++i) {
                rows -= c.slot_tokens[i];
            }
            home_rows = min64(home_rows, rows);
        }
    }
    compute = largest(team, compute);
    home_rows = static_cast<int64_t>(team.min(static_cast<uint64_t>(home_rows)));
    int64_t tokens = 0;
    for (int n = team.lane(); n < c.shape.num_nodes; n += team.size()) {
        const uint64_t busier = traffic.tokens_out[n] > traffic.tokens_in[n] ? traffic.tokens_out[n]
                                                                             : traffic.tokens_in[n];
        const int64_t rows = static_cast<int64_t>(busier) / c.topology.node_size(n);
        tokens = max64(tokens, rows * cost.network_row * kTokenExchanges);
    }
    tokens = largest(team, tokens);
    const bool sharded = cost.sharded != 0;
    const int64_t weights = busiest_link(team, c, cost.copy, cost.cross_copy, sharded);
    const int64_t grads = busiest_link(team, c, cost.grad, cost.cross_grad, sharded);
    const int64_t exposed = max64(weights - home_rows * cost.hide_forward, 0) +
                            max64(weights - home_rows * cost.hide_backward, 0) +
                            max64(grads - cost.hide_grads, 0);
    const int64_t hidden = 2 * weights + grads - exposed;
    return min64(compute + tokens + exposed + hidden * cost.interference / 1000, kLongestTime);
}

}  // namespace topoep
