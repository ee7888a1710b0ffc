// SPDX-License-Identifier: Apache-2.0
// Which rank takes a share? Rooms are filled exactly where possible, because a rank whose last slot
// is taken while it still has room wastes that room for good.
#pragma once

#include "core/candidate.h"
#include "core/select_hot.h"

namespace topoep {

// The ranks [first, last) that one refinement works on: a node, or the whole cluster.
struct Domain {
    int first;
    int last;
    int import_begin;  // index of the node's import list
    int num_imports;
    bool pair_fit;  // quadratic in the number of ranks, so only inside nodes
};

// A share that waits for a rank: an import (tokens of one expert from another node) or the excess
// of a rank (tokens of any of its experts).
struct Item {
    bool is_import;
    int id;  // index into the import list, or the position of the rank
    int32_t tokens;
};

struct Choice {
    int rank;       // position, -1: none
    bool wasteful;  // takes the rank's last slot and leaves room that the domain cannot spare
};

// Marks the nodes where a new copy of `expert` is cheap: the node of `rank`, and nodes that hold
// the expert already.
template <class Team>
TOPOEP_TEAM void mark_near_nodes(const Team& team, Candidate& c, int rank, int expert) {
    team.sync();
    for (int i = team.lane(); i < (c.shape.num_nodes + 31) / 32; i += team.size()) {
        c.near_node[i] = 0;
    }
    team.sync();
    if (team.lane() == 0) {
        const int node = c.topology.node_at[rank];
        team.set_bits(&c.near_node[node / 32], 1u << (node % 32));
    }
    if (expert >= 0 && c.is_copied(expert)) {
        for (int i = team.lane(); i < c.shape.num_spare(); i += team.size()) {
            if (c.slot_expert[i] == expert) {
                const int node = c.topology.node_at[i / c.shape.spare_slots];
                team.set_bits(&c.near_node[node / 32], 1u << (node % 32));
            }
        }
    }
    team.sync();
}

TOPOEP_HD bool is_near(const Candidate& c, int p) {
    const int node = c.topology.node_at[p];
    return c.near_node[node / 32] >> (node % 32) & 1;
}

// May rank p take (part of) the item? `slack` is the room of the domain beyond what its items need.
enum class Fit { kNo, kWasteful, kYes };

TOPOEP_HD Fit fit_of(const Candidate& c, const Item& item, int expert, int64_t slack, int p) {
    const int32_t room = c.room(p);
    if (room == 0 || (item.is_import ? c.holds(p, expert) : p == item.id)) {
        return Fit::kNo;
    }
    const bool wasteful = c.free[p] == 1 && item.tokens < room && room - item.tokens > slack;
    return wasteful ? Fit::kWasteful : Fit::kYes;
}

// Two-room fit: the larger room of the pair of rooms that together hold the item with the least
// room to spare. Only called when no single room of the domain holds it.
template <class Team>
TOPOEP_TEAM int pair_fit_rank(const Team& team, const Candidate& c, const Domain& domain,
                              const Item& item, int expert, int64_t slack, Fit wanted) {
    uint64_t best = kNothing;
    for (int p = domain.first + team.lane(); p < domain.last; p += team.size()) {
        const int64_t room = c.room(p);
        if (2 * room < item.tokens || fit_of(c, item, expert, slack, p) < wanted) {
            continue;  // the larger room of a pair holds at least half
        }
        for (int q = domain.first; q < domain.last; ++q) {
            if (q == p || c.room(q) > room || room + c.room(q) < item.tokens ||
                fit_of(c, item, expert, slack, q) < wanted) {
                continue;
            }
            const uint64_t to_spare = static_cast<uint64_t>(room + c.room(q) - item.tokens);
            best = min64(best, to_spare << 16 | static_cast<uint64_t>(p));
        }
    }
    best = team.min(best);
    return best == kNothing ? -1 : static_cast<int>(best & 0xffff);
}

// Smallest room that holds the whole item; else (policy) two rooms that hold it; else the largest
// room. Ranks that would waste room are taken only when there is no other. With `prefer_near` near
// nodes (mark_near_nodes) come before all others at each of these stages.
template <class Team>
TOPOEP_TEAM Choice choose_rank(const Team& team, const Candidate& c, const Domain& domain,
                               const Item& item, int64_t slack, bool prefer_near) {
    const int expert = item.is_import ? c.import_expert[item.id] : -1;
    constexpr uint64_t kWastefulBit = uint64_t{1} << 63;
    constexpr uint64_t kTooSmallBit = uint64_t{1} << 62;
    constexpr uint64_t kFarBit = uint64_t{1} << 61;
    uint64_t best = kNothing;
    for (int p = domain.first + team.lane(); p < domain.last; p += team.size()) {
        const Fit fit = fit_of(c, item, expert, slack, p);
        if (fit == Fit::kNo) {
            continue;
        }
        const int32_t room = c.room(p);
        uint64_t key = fit == Fit::kWasteful ? kWastefulBit : 0;
        key |= prefer_near && !is_near(c, p) ? kFarBit : 0;
        key |= room >= item.tokens
                   ? uint64_t{static_cast<uint32_t>(room)} << 16
                   : kTooSmallBit | uint64_t{static_cast<uint32_t>(INT32_MAX - room)} << 16;
        best = min64(best, key | static_cast<uint64_t>(p));
    }
    best = team.min(best);
    if (best == kNothing) {
        return {-1, false};
    }
    const bool wasteful = (best & kWastefulBit) != 0;
    if ((best & kTooSmallBit) != 0 && domain.pair_fit) {
        const int p = pair_fit_rank(team, c, domain, item, expert, slack,
                                    wasteful ? Fit::kWasteful : Fit::kYes);
        if (p >= 0) {
            return {p, wasteful};
        }
    }
    return {static_cast<int>(best & 0xffff), wasteful};
}

}  // namespace topoep
