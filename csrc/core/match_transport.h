// SPDX-License-Identifier: Apache-2.0
// The second planner: TAOT, topology-aware optimal transport (arXiv 2608.03676, restated in fixed
// point, so that it too is the same on every rank). Excess and room of the ranks are the two sides
// of a balanced transport problem with entropy, whose cost is 1 inside a node and lambda = 3
// between nodes; its solution is a hint. Copies are then matched greedily: in each of S rounds
// every rank proposes to the expert it would like best, by the tokens it could take, by topology
// and by the hint, and every expert accepts the best proposal, until nobody proposes any more.
//
// Beyond the paper: a rank keeps its last slot where the match would waste more room than all ranks
// together can spare, and what is left over goes through the last resort of the other policies
// (refine_node.h), whose sources give more than their excess where that fills a room exactly.
// Without this a few percent of excess find room but no slot.
//
// The Sinkhorn-Knopp iteration has a closed form per node: the kernel exp(-cost / lambda) takes two
// values only, so the scalings of two ranks of one node differ by their supplies alone, and the
// iteration runs on N numbers for each side instead of R.
#pragma once

#include "core/candidate.h"
#include "core/select_hot.h"
#include "core/team.h"

namespace topoep {

constexpr int kFixedBits = 24;  // fractions of this file
constexpr int64_t kOne = int64_t{1} << kFixedBits;
constexpr int64_t kKernelSameNode = 12021399;  // exp(-1 / 3)
constexpr int64_t kKernelOtherNode = 6171992;  // exp(-1)
constexpr int kSinkhornRounds = 50;
constexpr int kScoreBits = 10;

TOPOEP_HD int64_t fixed_product(int64_t a, int64_t b) {
    return a * b >> kFixedBits;
}
TOPOEP_HD int64_t fixed_inverse(int64_t a) {
    return kOne * kOne / max64(a, 1);
}

// Which share of each expert should leave: a rank's excess is carried by its hottest experts, as
// few of them as can. Also the sums per node of excess and room, as shares of all excess and all
// room.
template <class Group>
TOPOEP_TEAM void start_transport(const Group& group, Candidate& c) {
    const auto team = group.all();
    const Transport& t = c.transport;
    const int home_slots = c.shape.experts_per_rank();
    int64_t excess = 0;
    int64_t room = 0;
    for (int p = team.lane(); p < c.shape.num_ranks; p += team.size()) {
        int32_t left = max32(c.load[p] - c.cap, 0);
        excess += left;
        room += max32(c.cap - c.load[p], 0);
        for (int i = p * home_slots; i < (p + 1) * home_slots; ++i) {
            const int expert = c.order[i];
            t.spill[expert] = min32(left, max32(c.home[expert] - 1, 0));
            left -= t.spill[expert];
        }
    }
    excess = max64(team.sum(excess), 1);
    room = max64(team.sum(room), 1);
    for (int n = team.lane(); n < c.shape.num_nodes; n += team.size()) {
        int64_t node_excess = 0;
        int64_t node_room = 0;
        for (int p = c.topology.node_begin[n]; p < c.topology.node_begin[n + 1]; ++p) {
            node_excess += max32(c.load[p] - c.cap, 0);
            node_room += max32(c.cap - c.load[p], 0);
        }
        t.supply[n] = (node_excess << kFixedBits) / excess;
        t.demand[n] = (node_room << kFixedBits) / room;
        t.column[n] = kOne;
    }
    if (team.lane() == 0) {
        t.total_room[0] = room;
    }
    team.sync();
}

// scaling[n] = 1 / (kernel times the scaled sums of the other side), for all nodes. `sums` of a
// node is weight * factor, and the kernel tells only the own node from the others.
template <class Team>
TOPOEP_TEAM void rescale(const Team& team, const Candidate& c, const int64_t* weight,
                         const int64_t* factor, int64_t* scaling) {
    int64_t all = 0;
    for (int n = team.lane(); n < c.shape.num_nodes; n += team.size()) {
        all += fixed_product(weight[n], factor[n]);
    }
    all = team.sum(all);
    for (int n = team.lane(); n < c.shape.num_nodes; n += team.size()) {
        const int64_t own = fixed_product(weight[n], factor[n]);
        scaling[n] = fixed_inverse(fixed_product(kKernelSameNode, own) +
                                   fixed_product(kKernelOtherNode, all - own));
    }
    team.sync();
}

// Afterwards row[n] * kernel * column[m] * demand is the share of the excess of a rank of node n
// that goes to a rank of node m with that demand.
template <class Team>
TOPOEP_TEAM void sinkhorn(const Team& team, const Candidate& c) {
    const Transport& t = c.transport;
    for (int i = 0; i < kSinkhornRounds; ++i) {
        rescale(team, c, t.demand, t.column, t.row);
        rescale(team, c, t.supply, t.row, t.column);
    }
}

// Room that can still be used, less all excess: how much room a match may waste.
template <class Team>
TOPOEP_TEAM int64_t usable_slack(const Team& team, const Candidate& c) {
    int64_t slack = 0;
    for (int p = team.lane(); p < c.shape.num_ranks; p += team.size()) {
        slack += c.room(p) - max32(c.load[p] - c.cap, 0);
    }
    return team.sum(slack);
}

// How much rank p would like a copy of the expert, in tokens with kScoreBits of fraction; -1: not.
TOPOEP_HD int64_t copy_score(const Candidate& c, int64_t mean_per_expert, int64_t slack, int expert,
                             int p) {
    const Transport& t = c.transport;
    const int32_t room = c.room(p);
    const int32_t tokens = min32(t.spill[expert], room);
    const bool wasteful = c.free[p] == 1 && room - tokens > max64(slack, 0);
    if (tokens <= 0 || wasteful || c.home_rank(expert) == p || c.holds(p, expert)) {
        return -1;
    }
    const int from = c.home_node(expert);
    const int to = c.topology.node_at[p];
    const int64_t demand = (int64_t{c.cap - c.load[p]} << kFixedBits) / t.total_room[0];
    const int64_t kernel = from == to ? kKernelSameNode : kKernelOtherNode;
    const int64_t hint =
        fixed_product(fixed_product(fixed_product(t.row[from], kernel), t.column[to]), demand);
    const int64_t nearness = from == to ? mean_per_expert : mean_per_expert / 3;
    return (int64_t{tokens} << kScoreBits) + nearness +
           fixed_product(mean_per_expert, min64(hint, kOne)) / 10;
}

template <class Team>
TOPOEP_TEAM void propose(const Team& team, const Candidate& c, int64_t mean_per_expert,
                         int64_t slack, int p) {
    constexpr int64_t kMaxScore = (int64_t{1} << 45) - 1;
    uint64_t best = kNothing;
    if (!c.transport.matched[p] && c.room(p) > 0) {
        for (int e = team.lane(); e < c.shape.num_experts; e += team.size()) {
            const int64_t score = copy_score(c, mean_per_expert, slack, e, p);
            if (score >= 0) {
                best = min64(best, static_cast<uint64_t>(kMaxScore - score) << 16 |
                                       static_cast<uint64_t>(e));
            }
        }
    }
    best = team.min(best);
    if (team.lane() == 0) {
        c.transport.proposal[p] = best;
    }
}

// Whether the expert that rank p proposes to likes no other proposal better (then lower position).
TOPOEP_HD bool is_accepted(const Candidate& c, int p) {
    const uint64_t own = c.transport.proposal[p];
    if (own == kNothing) {
        return false;
    }
    for (int q = 0; q < c.shape.num_ranks; ++q) {
        const uint64_t other = c.transport.proposal[q];
        if (other != kNothing && (other & 0xffff) == (own & 0xffff) &&
            (other < own || (other == own && q < p))) {
            return false;
        }
    }
    return true;
}

// Returns the number of dependent steps taken.
template <class Group>
TOPOEP_TEAM int match_transport(const Group& group, int64_t total_tokens, Candidate& c) {
    const auto team = group.all();
    const Transport& t = c.transport;
    start_transport(group, c);
    group.one([&](const auto& warp) { sinkhorn(warp, c); });
    const int64_t mean_per_expert = (total_tokens << kScoreBits) / c.shape.num_experts;
    int steps = 0;
    for (int slot = 0; slot < c.shape.spare_slots; ++slot) {
        for (int p = team.lane(); p < c.shape.num_ranks; p += team.size()) {
            t.matched[p] = 0;
        }
        team.sync();
        for (bool proposed = true; proposed; ++steps) {
            const int64_t slack = usable_slack(team, c);
            group.each(c.shape.num_ranks, [&](const auto& warp, int p) {
                propose(warp, c, mean_per_expert, slack, p);
            });
            uint64_t any = kNothing;
            for (int p = team.lane(); p < c.shape.num_ranks; p += team.size()) {
                any = min64(any, t.proposal[p]);
            }
            proposed = team.min(any) != kNothing;
            for (int p = team.lane(); p < c.shape.num_ranks; p += team.size()) {
                if (!is_accepted(c, p)) {
                    continue;
                }
                // Every expert accepts one rank, so only its home rank's load is shared by lanes.
                const int expert = static_cast<int>(t.proposal[p] & 0xffff);
                const int32_t tokens = min32(t.spill[expert], c.cap - c.load[p]);
                open_copy(team, c, expert, p, tokens);
                t.spill[expert] -= tokens;
                t.matched[p] = 1;
                c.home[expert] -= tokens;
                team.add(reinterpret_cast<uint32_t*>(&c.load[c.home_rank(expert)]),
                         0u - static_cast<uint32_t>(tokens));
            }
            team.sync();
        }
    }
    return steps;
}

}  // namespace topoep
