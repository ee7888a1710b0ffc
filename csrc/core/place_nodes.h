// SPDX-License-Identifier: Apache-2.0
// Step one of a candidate: move load between nodes, on paper. A node with more load than its ranks
// may keep exports shares of its hot experts; a node with room imports them. Each share is one
// (expert, node) pair and costs one copy over the network, whoever then serves it inside the node;
// refine_node.h lays the imports onto ranks.
#pragma once

#include "core/candidate.h"
#include "core/select_hot.h"

namespace topoep {

// The smallest room that may be used: filling a small room costs a copy like a large one, so the
// smallest rooms of the cluster stay empty as long as the others hold all excess.
template <class Team>
TOPOEP_TEAM int32_t smallest_useful_room(const Team& team, const Candidate& c, const Workload& work,
                                         int64_t total_excess) {
    if (c.policy.threshold == kUseAllRooms) {
        return 0;
    }
    const int64_t wanted =
        c.policy.threshold == kRoomsForExcess ? total_excess : total_excess + total_excess / 8;
    // The k least loaded ranks are the k largest rooms; together they hold k * cap - their load.
    uint64_t enough = kNothing;
    for (int k = team.lane() + 1; k <= c.shape.num_ranks; k += team.size()) {
        const int32_t load = work.load[work.by_load[k - 1]];
        if (load >= c.cap || int64_t{k} * c.cap - work.load_before[k] >= wanted) {
            enough = static_cast<uint64_t>(k);
            break;  // larger k of this lane cannot be the smallest
        }
    }
    enough = team.min(enough);
    if (enough == kNothing) {
        return 0;
    }
    return max32(c.cap - work.load[work.by_load[enough - 1]], 0);
}

// Tokens that node n can take in from other nodes, besides those it takes in already; negative:
// what it must give away.
TOPOEP_HD int64_t node_room(const Candidate& c, const Workload& work, int32_t smallest, int n) {
    const int begin = c.topology.node_begin[n];
    const int end = c.topology.node_begin[n + 1];
    int64_t own_excess = 0;
    int64_t all_rooms = 0;
    for (int p = begin; p < end; ++p) {
        own_excess += max32(c.load[p] - c.cap, 0);
        all_rooms += max32(c.cap - c.load[p], 0);
    }
    int64_t usable = 0;
    for (int i = begin; i < end; ++i) {  // largest room first
        const int32_t room = max32(c.cap - c.load[work.node_order[i]], 0);
        const bool covers_own = all_rooms >= own_excess && usable < own_excess;
        if (room >= smallest || covers_own) {
            usable += room;
        }
    }
    for (int i = begin * c.shape.spare_slots, k = 0; k < c.num_imports[n]; ++k) {
        usable -= c.import_tokens[i + k];
    }
    return usable - own_excess;
}

struct Export {
    int rank;  // position of the rank that gives, -1: the node has nothing to give
    int expert;
    int32_t tokens;
    int32_t least;  // without rounding up
};

// Which rank of node n exports, and how much of its hottest expert. Cover-fit takes the smallest
// excess that covers the node's surplus, so that one export is enough and little is left over;
// rounding up lets that rank give its whole excess: what exceeds the node's surplus makes room for
// its neighbours, whose excess then moves by cheap in-node copies instead of pairs of their own.
template <class Team>
TOPOEP_TEAM Export choose_export(const Team& team, const Candidate& c, int n) {
    const int64_t surplus = -c.node_room[n];
    uint64_t best = kNothing;
    for (int p = c.topology.node_begin[n] + team.lane(); p < c.topology.node_begin[n + 1];
         p += team.size()) {
        const int expert = hottest_expert(c, p);
        if (expert < 0) {
            continue;
        }
        const int32_t excess = c.load[p] - c.cap;
        const int32_t amount = min32(excess, c.home[expert] - 1);
        uint64_t rank_class = 0;
        uint32_t value = UINT32_MAX - static_cast<uint32_t>(c.home[expert]);
        if (c.policy.exporter == kCoverFit) {
            if (excess <= 0) {
                rank_class = 2;  // not over the cap: nearest to it first
                value = static_cast<uint32_t>(-int64_t{excess});
            } else if (amount >= surplus) {
                value = static_cast<uint32_t>(amount);
            } else {
                rank_class = 1;
                value = UINT32_MAX - static_cast<uint32_t>(amount);
            }
        }
        best = min64(best, rank_class << 62 | uint64_t{value} << 16 | static_cast<uint64_t>(p));
    }
    best = team.min(best);
    if (best == kNothing) {
        return {-1, -1, 0, 0};
    }
    const int p = static_cast<int>(best & 0xffff);
    const int expert = hottest_expert(c, p);
    const int32_t limit = c.home[expert] - 1;
    const int32_t excess = c.load[p] - c.cap;
    const int32_t least = static_cast<int32_t>(min64(surplus, int64_t{limit}));
    const bool round_up = c.policy.round_up && excess > 0;
    return {p, expert, round_up ? min32(max32(least, excess), limit) : least, least};
}

TOPOEP_HD bool can_import(const Candidate& c, int n, int exporter) {
    return n != exporter && c.node_room[n] > 0 &&
           c.num_imports[n] < c.topology.node_size(n) * c.usable_slots;
}

// The node with the smallest room that holds all of `tokens`, or -1.
template <class Team>
TOPOEP_TEAM int best_fit_node(const Team& team, const Candidate& c, int exporter, int32_t tokens) {
    uint64_t best = kNothing;
    for (int n = team.lane(); n < c.shape.num_nodes; n += team.size()) {
        if (can_import(c, n, exporter) && c.node_room[n] >= tokens) {
            best = min64(best, static_cast<uint64_t>(c.node_room[n]) << 10 | n);
        }
    }
    best = team.min(best);
    return best == kNothing ? -1 : static_cast<int>(best & 0x3ff);
}

template <class Team>
TOPOEP_TEAM int largest_room_node(const Team& team, const Candidate& c, int exporter) {
    constexpr int64_t kMaxNodeRoom = int64_t{1} << 50;
    uint64_t best = kNothing;
    for (int n = team.lane(); n < c.shape.num_nodes; n += team.size()) {
        if (can_import(c, n, exporter)) {
            best = min64(best, static_cast<uint64_t>(kMaxNodeRoom - c.node_room[n]) << 10 | n);
        }
    }
    best = team.min(best);
    return best == kNothing ? -1 : static_cast<int>(best & 0x3ff);
}

// The node where most of the expert's own tokens would no longer cross the network, or -1.
template <class Team>
TOPOEP_TEAM int affinity_node(const Team& team, const Candidate& c, const int32_t* node_tokens,
                              const Export& share, int exporter) {
    uint64_t best = kNothing;
    for (int n = team.lane(); n < c.shape.num_nodes; n += team.size()) {
        if (!can_import(c, n, exporter) ||
            (c.policy.affinity == kAffinityIfFits && c.node_room[n] < share.tokens)) {
            continue;
        }
        const int32_t fits = static_cast<int32_t>(min64(int64_t{share.tokens}, c.node_room[n]));
        const int32_t from_node = node_tokens[n * c.shape.num_experts + share.expert];
        const uint32_t saved = static_cast<uint32_t>(min32(fits, from_node));
        const uint64_t room = static_cast<uint64_t>(min64(c.node_room[n], (int64_t{1} << 22) - 1));
        best = min64(
            best, uint64_t{UINT32_MAX / 2 - saved} << 32 | room << 10 | static_cast<uint64_t>(n));
    }
    best = team.min(best);
    return best == kNothing ? -1 : static_cast<int>(best & 0x3ff);
}

template <class Team>
TOPOEP_TEAM int choose_node(const Team& team, const Candidate& c, const int32_t* node_tokens,
                            const Export& share, int exporter) {
    if (c.policy.affinity != kIgnoreOrigin) {
        const int node = affinity_node(team, c, node_tokens, share, exporter);
        if (node >= 0) {
            return node;
        }
    }
    int node = best_fit_node(team, c, exporter, share.tokens);
    if (node < 0 && share.least < share.tokens) {
        node = best_fit_node(team, c, exporter, share.least);
    }
    return node >= 0 ? node : largest_room_node(team, c, exporter);
}

// The room of the rank that the next import of a node will mostly go to: the least loaded for the
// first, and so on. More would be cut up inside the node, while here it stays home.
TOPOEP_HD int32_t room_for_next(const Candidate& c, const Workload& work, int n) {
    const int next = c.topology.node_begin[n] + c.num_imports[n];
    const int32_t room =
        next < c.topology.node_begin[n + 1] ? c.cap - c.load[work.node_order[next]] : 0;
    return room > 0 ? room : INT32_MAX;
}

// Appends the share to the importer's list. One lane.
TOPOEP_HD void record_import(Candidate& c, int importer, int exporter, int expert, int32_t tokens) {
    const int i = c.topology.node_begin[importer] * c.shape.spare_slots + c.num_imports[importer];
    c.import_expert[i] = static_cast<uint16_t>(expert);
    c.import_tokens[i] = tokens;
    c.num_imports[importer] += 1;
    leave_home(c, expert, tokens);
    c.node_room[exporter] += tokens;
    c.node_room[importer] -= tokens;
}

// Returns the number of dependent steps taken.
template <class Team>
TOPOEP_TEAM int place_nodes(const Team& team, const Workload& work, const int32_t* node_tokens,
                            Candidate& c) {
    int64_t excess = 0;
    for (int p = team.lane(); p < c.shape.num_ranks; p += team.size()) {
        excess += max32(c.load[p] - c.cap, 0);
    }
    excess = team.sum(excess);
    const int32_t smallest = smallest_useful_room(team, c, work, excess);
    for (int n = team.lane(); n < c.shape.num_nodes; n += team.size()) {
        c.node_room[n] = node_room(c, work, smallest, n);
    }
    int steps = 0;
    for (;; ++steps) {
        team.sync();
        constexpr int64_t kMaxSurplus = int64_t{1} << 50;
        uint64_t worst = kNothing;
        for (int n = team.lane(); n < c.shape.num_nodes; n += team.size()) {
            if (c.node_room[n] < 0) {
                worst = min64(worst, static_cast<uint64_t>(kMaxSurplus + c.node_room[n]) << 10 | n);
            }
        }
        worst = team.min(worst);
        if (worst == kNothing) {
            return steps;
        }
        const int exporter = static_cast<int>(worst & 0x3ff);
        const Export share = choose_export(team, c, exporter);
        const int importer =
            share.rank < 0 ? -1 : choose_node(team, c, node_tokens, share, exporter);
        team.sync();
        if (importer < 0) {
            if (team.lane() == 0) {
                c.node_room[exporter] = 0;  // nothing to give or nowhere to go: leave it be
            }
            continue;
        }
        const int32_t most = c.policy.whole_rooms ? room_for_next(c, work, importer) : INT32_MAX;
        const int32_t tokens =
            static_cast<int32_t>(min64(int64_t{min32(share.tokens, most)}, c.node_room[importer]));
        team.sync();
        if (team.lane() == 0) {
            record_import(c, importer, exporter, share.expert, tokens);
        }
        team.sync();
        restore_order(team, c, share.expert);
    }
}

}  // namespace topoep
