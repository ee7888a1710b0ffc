// SPDX-License-Identifier: Apache-2.0
// Step two of a candidate: lay the imports of a node and the excess of its full ranks onto the
// ranks with room. Nodes are independent of each other here. The same routine, run over all ranks
// of the cluster, is the last resort for what did not fit (and, alone, the flat policies).
//
// Two ideas keep the number of copies low although a rank has few slots:
// - over-donation: a source whose excess would take a rank's last slot and waste the rest of its
//   room gives more than its excess and fills the room exactly; it then has room itself, which
//   another source fills (the alias method of Walker and Vose, with ranks for columns);
// - over-fill, the twin for imports: an import that fits no room well goes whole onto a rank that
// it
//   pushes over the cap, and that rank becomes a source.
#pragma once

#include "core/candidate.h"
#include "core/choose_rank.h"
#include "core/select_hot.h"

namespace topoep {

template <class Team>
TOPOEP_TEAM Item next_item(const Team& team, const Candidate& c, const Domain& domain) {
    const int order = c.policy.item_order;
    const uint64_t import_class = order == kSourcesFirst ? 1 : 0;
    const uint64_t source_class = order == kImportsFirst ? 1 : 0;
    uint64_t best = kNothing;
    for (int i = team.lane(); i < domain.num_imports; i += team.size()) {
        const int32_t tokens = c.import_tokens[domain.import_begin + i];
        if (tokens > 0) {  // negative: no rank could take it, it goes home
            best = min64(best, import_class << 63 |
                                   uint64_t{static_cast<uint32_t>(INT32_MAX - tokens)} << 32 |
                                   static_cast<uint64_t>(i));
        }
    }
    constexpr uint64_t kSourceBit = uint64_t{1} << 31;  // equal amounts: imports first
    for (int p = domain.first + team.lane(); p < domain.last; p += team.size()) {
        if (c.excess[p] > 0) {
            best = min64(best, source_class << 63 |
                                   uint64_t{static_cast<uint32_t>(INT32_MAX - c.excess[p])} << 32 |
                                   kSourceBit | static_cast<uint64_t>(p));
        }
    }
    best = team.min(best);
    if (best == kNothing) {
        return {false, -1, 0};
    }
    const int32_t tokens = INT32_MAX - static_cast<int32_t>(best >> 32 & 0x7fffffff);
    const int id = static_cast<int>(best & 0x7fffffff);
    if ((best & kSourceBit) != 0) {
        return {false, id, tokens};
    }
    return {true, domain.import_begin + id, tokens};
}

// Room of the domain minus what its items need: how much room may be wasted.
template <class Team>
TOPOEP_TEAM int64_t domain_slack(const Team& team, const Candidate& c, const Domain& domain) {
    int64_t slack = 0;
    for (int p = domain.first + team.lane(); p < domain.last; p += team.size()) {
        slack += c.room(p) - c.excess[p];
    }
    for (int i = team.lane(); i < domain.num_imports; i += team.size()) {
        slack -= c.import_tokens[domain.import_begin + i];
    }
    return team.sum(slack);
}

// The least loaded rank that the whole import pushes over the cap and that can give that excess
// away with one expert, or -1.
template <class Team>
TOPOEP_TEAM int over_fill_rank(const Team& team, const Candidate& c, const Domain& domain,
                               const Item& item) {
    const int expert = c.import_expert[item.id];
    uint64_t best = kNothing;
    for (int p = domain.first + team.lane(); p < domain.last; p += team.size()) {
        const int64_t excess = int64_t{c.load[p]} + item.tokens - c.cap;
        if (c.free[p] == 0 || excess <= 0 || c.holds(p, expert)) {
            continue;
        }
        const int hottest = hottest_expert(c, p);
        if (hottest >= 0 && c.home[hottest] - 1 >= excess) {
            best = min64(
                best, uint64_t{static_cast<uint32_t>(c.load[p])} << 16 | static_cast<uint64_t>(p));
        }
    }
    best = team.min(best);
    return best == kNothing ? -1 : static_cast<int>(best & 0xffff);
}

// Room that rank p has left but can never use, once its last slot is taken.
TOPOEP_HD int64_t wasted_room(const Candidate& c, int p) {
    return c.free[p] == 0 ? max32(c.cap - c.load[p], 0) : 0;
}

template <class Team>
TOPOEP_TEAM void place_import(const Team& team, Candidate& c, const Domain& domain,
                              const Item& item, int64_t* slack) {
    const Choice choice = choose_rank(team, c, domain, item, *slack, false);
    const bool fits_badly = choice.rank < 0 || choice.wasteful;
    const int crowded = fits_badly ? over_fill_rank(team, c, domain, item) : -1;
    const int target = crowded >= 0 ? crowded : choice.rank;
    const int32_t tokens =
        crowded >= 0 || target < 0 ? item.tokens : min32(item.tokens, c.room(target));
    team.sync();
    if (team.lane() == 0) {
        if (target < 0) {
            c.import_tokens[item.id] = -item.tokens;
        } else {
            open_copy(team, c, c.import_expert[item.id], target, tokens);
            c.import_tokens[item.id] -= tokens;
            if (crowded >= 0) {
                c.excess[target] = c.load[target] - c.cap;
            }
        }
    }
    team.sync();
    if (target >= 0 && crowded < 0) {
        *slack -= wasted_room(c, target);
    }
}

template <class Team>
TOPOEP_TEAM void place_excess(const Team& team, Candidate& c, const Domain& domain,
                              const Item& item, int64_t* slack, bool prefer_near) {
    if (prefer_near) {
        mark_near_nodes(team, c, item.id, hottest_expert(c, item.id));
    }
    const Choice choice = choose_rank(team, c, domain, item, *slack, prefer_near);
    const int expert = choice.rank < 0 ? -1 : hottest_expert_not_on(c, item.id, choice.rank);
    int32_t tokens = 0;
    if (expert >= 0) {
        const int32_t room = c.room(choice.rank);
        const bool over_donate = choice.wasteful && c.free[item.id] > 0;
        tokens = over_donate ? room : min32(item.tokens, room);
        tokens = min32(tokens, c.home[expert] - 1);
    }
    team.sync();
    if (team.lane() == 0) {
        if (expert < 0) {
            c.excess[item.id] = 0;  // nothing to give or nowhere to go
        } else {
            leave_home(c, expert, tokens);
            open_copy(team, c, expert, choice.rank, tokens);
            c.excess[item.id] = max32(item.tokens - tokens, 0);
        }
    }
    team.sync();
    if (expert >= 0) {
        *slack -= wasted_room(c, choice.rank);
        restore_order(team, c, expert);
    }
}

template <class Team>
TOPOEP_TEAM void send_unplaced_home(const Team& team, Candidate& c, int node) {
    const int begin = c.topology.node_begin[node] * c.shape.spare_slots;
    for (int i = begin; i < begin + c.num_imports[node]; ++i) {
        const int32_t tokens = -c.import_tokens[i];
        if (tokens > 0) {
            const int expert = c.import_expert[i];
            team.sync();
            if (team.lane() == 0) {
                leave_home(c, expert, -tokens);
            }
            team.sync();
            restore_order(team, c, expert);
        }
    }
}

// Returns the number of dependent steps taken.
template <class Team>
TOPOEP_TEAM int refine(const Team& team, Candidate& c, const Domain& domain, bool prefer_near) {
    for (int p = domain.first + team.lane(); p < domain.last; p += team.size()) {
        c.excess[p] = max32(c.load[p] - c.cap, 0);
    }
    team.sync();
    int64_t slack = domain_slack(team, c, domain);
    int steps = 0;
    for (;; ++steps) {
        const Item item = next_item(team, c, domain);
        if (item.id < 0) {
            return steps;
        }
        if (item.is_import) {
            place_import(team, c, domain, item, &slack);
        } else {
            place_excess(team, c, domain, item, &slack, prefer_near);
        }
    }
}

template <class Team>
TOPOEP_TEAM int refine_node(const Team& team, Candidate& c, int node) {
    const int first = c.topology.node_begin[node];
    const Domain domain = {first, c.topology.node_begin[node + 1], first * c.shape.spare_slots,
                           c.num_imports[node], c.policy.pair_fit != 0};
    return refine(team, c, domain, false);
}

// Unplaced imports of a node change the load and the expert order of ranks in other nodes, so they
// go home only when all nodes are done.
template <class Team>
TOPOEP_TEAM int refine_cluster(const Team& team, Candidate& c) {
    for (int n = 0; c.policy.node_step && n < c.shape.num_nodes; ++n) {
        send_unplaced_home(team, c, n);
    }
    const Domain cluster = {0, c.shape.num_ranks, 0, 0, false};
    return refine(team, c, cluster, c.policy.near_first);
}

}  // namespace topoep
