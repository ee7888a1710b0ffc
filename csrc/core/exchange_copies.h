// SPDX-License-Identifier: Apache-2.0
// Last step of a candidate with at least as many copies as ranks. Copies are then links of a graph
// of ranks that has cycles: tokens of one copy can take the place of another's all around a cycle,
// and loads stay as they are. So every copy in turn, the smallest first, is emptied as far as
// others can take over what it serves: along the shortest path from its expert's home to a rank
// with room, or to its own rank, whose load its tokens leave behind (augmenting paths, as in
// maximum flow). What did not empty a copy is not undone: the room has only moved to another rank.
#pragma once

#include "core/candidate.h"
#include "core/drop_copies.h"

namespace topoep {

constexpr int kMaxHops = 4;    // of a path; longer ones are rare, and each hop costs a search
constexpr int kMaxPieces = 8;  // in which the tokens of a copy may leave

// The copy whose turn is next, or -1: the one that had the fewest tokens, then the lower slot.
template <class Team>
TOPOEP_TEAM int next_to_empty(const Team& team, const Candidate& c) {
    uint64_t best = kNothing;
    for (int i = team.lane(); i < c.shape.num_spare(); i += team.size()) {
        if (c.turn[i] >= 0 && c.slot_expert[i] != kNoExpert) {
            best = min64(
                best, uint64_t{static_cast<uint32_t>(c.turn[i])} << 16 | static_cast<uint64_t>(i));
        }
    }
    best = team.min(best);
    return best == kNothing ? -1 : static_cast<int>(best & 0xffff);
}

// How a search reached a rank, packed so that a lower slot is larger; 0: not at all.
TOPOEP_HD uint32_t pack_arrival(int slot) {
    return 0xffffu - static_cast<uint32_t>(slot);
}
TOPOEP_HD int arrival_slot(uint32_t arrival) {
    return 0xffff - static_cast<int>(arrival);
}

// Looks one hop further from the ranks of the search. A rank that is reached for the first time
// gets its arrival; returns the least such rank that is `own` or has room, or -1.
template <class Team>
TOPOEP_TEAM int widen_search(const Team& team, Candidate& c, int32_t limit, int emptied, int own) {
    for (int i = team.lane(); i < c.shape.num_spare(); i += team.size()) {
        const int expert = c.slot_expert[i];
        if (expert == kNoExpert || i == emptied) {
            continue;
        }
        const int home = c.home_rank(expert);
        const int rank = i / c.shape.spare_slots;
        if (c.arrival[home] != 0 && c.home[expert] > 1) {
            team.raise(&c.fresh[rank], pack_arrival(i));
        }
        if (c.arrival[rank] != 0) {
            team.raise(&c.fresh[home], pack_arrival(i));
        }
    }
    team.sync();
    uint64_t best = kNothing;
    for (int p = team.lane(); p < c.shape.num_ranks; p += team.size()) {
        if (c.arrival[p] == 0 && c.fresh[p] != 0) {
            c.arrival[p] = c.fresh[p];
            if (p == own || c.load[p] < limit) {
                best = min64(best, static_cast<uint64_t>(p));
            }
        }
    }
    best = team.min(best);
    team.sync();
    return best == kNothing ? -1 : static_cast<int>(best);
}

// The rank at the end of the shortest path for tokens of the copy in slot `emptied`, or -1. The
// arrivals of its ranks lead back to the home.
template <class Team>
TOPOEP_TEAM int find_taker(const Team& team, Candidate& c, int32_t limit, int emptied, int home) {
    if (c.load[home] < limit) {
        return home;
    }
    for (int p = team.lane(); p < c.shape.num_ranks; p += team.size()) {
        c.arrival[p] = p == home ? UINT32_MAX : 0;
        c.fresh[p] = 0;
    }
    team.sync();
    int taker = -1;
    for (int hops = 0; hops < kMaxHops && taker < 0; ++hops) {
        taker = widen_search(team, c, limit, emptied, emptied / c.shape.spare_slots);
    }
    return taker;
}

// What can move along the path to `taker` at once.
TOPOEP_HD int32_t path_tokens(const Candidate& c, int32_t limit, int emptied, int home, int taker) {
    int32_t tokens = c.slot_tokens[emptied];
    if (taker != emptied / c.shape.spare_slots) {
        tokens = min32(tokens, limit - c.load[taker]);
    }
    for (int p = taker; p != home;) {
        const int slot = arrival_slot(c.arrival[p]);
        const int from = other_end(c, slot, p);
        tokens = min32(tokens, movable(c, slot, from));
        p = from;
    }
    return tokens;
}

// One lane.
TOPOEP_HD void move_path(Candidate& c, int emptied, int home, int taker, int32_t tokens) {
    for (int p = taker; p != home;) {
        const int slot = arrival_slot(c.arrival[p]);
        const int from = other_end(c, slot, p);
        move_along(c, slot, from, p, tokens);
        p = from;
    }
    move_along(c, emptied, emptied / c.shape.spare_slots, home, tokens);
}

// Returns the number of dependent steps taken: copies that were looked at, and pieces that moved.
template <class Team>
TOPOEP_TEAM int exchange_copies(const Team& team, int32_t limit, Candidate& c) {
    for (int i = team.lane(); i < c.shape.num_spare(); i += team.size()) {
        c.turn[i] = c.slot_expert[i] == kNoExpert ? -1 : c.slot_tokens[i];
    }
    team.sync();
    int steps = 0;
    for (int slot; (slot = next_to_empty(team, c)) >= 0; ++steps) {
        const int home = c.home_rank(c.slot_expert[slot]);
        for (int piece = 0; piece < kMaxPieces && c.slot_expert[slot] != kNoExpert;
             ++piece, ++steps) {
            const int taker = find_taker(team, c, limit, slot, home);
            if (taker < 0) {
                break;
            }
            const int32_t tokens = path_tokens(c, limit, slot, home, taker);
            team.sync();
            if (team.lane() == 0) {
                move_path(c, slot, home, taker, tokens);
            }
            team.sync();
        }
        if (team.lane() == 0) {
            c.turn[slot] = -1;
        }
        team.sync();
    }
    return steps;
}

// A graph with fewer links than ranks need not have a cycle. Copies for locality stay as they are.
template <class Team>
TOPOEP_TEAM bool can_exchange(const Team& team, const Candidate& c) {
    uint32_t copies = 0;
    for (int p = team.lane(); p < c.shape.num_ranks; p += team.size()) {
        copies += static_cast<uint32_t>(c.copies_on(p));
    }
    return !c.policy.locality && team.sum(copies) >= static_cast<uint32_t>(c.shape.num_ranks);
}

}  // namespace topoep
