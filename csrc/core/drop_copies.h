// SPDX-License-Identifier: Apache-2.0
// Step three of a candidate: remove copies that the others make superfluous. A copy goes when the
// other holders of its expert have room for its tokens below the load the plan has anyway. Copies
// are tested all at once; the one with the fewest tokens (then lower expert, then lower rank) is
// removed, and the test repeats until none can go.
#pragma once

#include "core/candidate.h"

namespace topoep {

template <class Team>
TOPOEP_TEAM int32_t max_load(const Team& team, const Candidate& c) {
    uint64_t best = kNothing;
    for (int p = team.lane(); p < c.shape.num_ranks; p += team.size()) {
        best = min64(best, static_cast<uint64_t>(INT32_MAX - c.load[p]));
    }
    return INT32_MAX - static_cast<int32_t>(team.min(best));
}

TOPOEP_HD int32_t room_below(const Candidate& c, int32_t limit, int p) {
    return max32(limit - c.load[p], 0);
}

// spare[e] = room below `limit` of all holders of e, its home included.
template <class Team>
TOPOEP_TEAM void sum_spare(const Team& team, Candidate& c, int32_t limit) {
    for (int e = team.lane(); e < c.shape.num_experts; e += team.size()) {
        c.spare[e] = static_cast<uint64_t>(room_below(c, limit, c.home_rank(e)));
    }
    team.sync();
    for (int i = team.lane(); i < c.shape.num_spare(); i += team.size()) {
        if (c.slot_expert[i] != kNoExpert) {
            team.add(&c.spare[c.slot_expert[i]],
                     static_cast<uint64_t>(room_below(c, limit, i / c.shape.spare_slots)));
        }
    }
    team.sync();
}

// The slot of the copy to remove next, or -1.
template <class Team>
TOPOEP_TEAM int superfluous_copy(const Team& team, const Candidate& c, int32_t limit) {
    uint64_t best = kNothing;  // tokens 31 bits, expert 12 bits, slot 14 bits
    for (int i = team.lane(); i < c.shape.num_spare(); i += team.size()) {
        const int expert = c.slot_expert[i];
        if (expert == kNoExpert) {
            continue;
        }
        const uint64_t others =
            c.spare[expert] - static_cast<uint64_t>(room_below(c, limit, i / c.shape.spare_slots));
        if (others >= static_cast<uint64_t>(c.slot_tokens[i])) {
            best = min64(best, uint64_t{static_cast<uint32_t>(c.slot_tokens[i])} << 32 |
                                   static_cast<uint64_t>(expert) << 16 | static_cast<uint64_t>(i));
        }
    }
    best = team.min(best);
    return best == kNothing ? -1 : static_cast<int>(best & 0xffff);
}

// The slot after `previous` (in slot order) that holds `expert` on a rank with room, or -1.
template <class Team>
TOPOEP_TEAM int next_holder(const Team& team, const Candidate& c, int32_t limit, int expert,
                            int previous) {
    uint64_t best = kNothing;
    for (int i = previous + 1 + team.lane(); i < c.shape.num_spare(); i += team.size()) {
        if (c.slot_expert[i] == expert && room_below(c, limit, i / c.shape.spare_slots) > 0) {
            best = static_cast<uint64_t>(i);
            break;  // larger i of this lane cannot be the next
        }
    }
    best = team.min(best);
    return best == kNothing ? -1 : static_cast<int>(best);
}

// Empties the slot and gives its tokens to the home rank first, then to the holders in rank order.
template <class Team>
TOPOEP_TEAM void remove_copy(const Team& team, Candidate& c, int32_t limit, int slot) {
    const int expert = c.slot_expert[slot];
    const int32_t removed = c.slot_tokens[slot];
    const int rank = slot / c.shape.spare_slots;
    const int32_t to_home = min32(removed, room_below(c, limit, c.home_rank(expert)));
    int32_t tokens = removed - to_home;
    team.sync();
    if (team.lane() == 0) {
        c.slot_expert[slot] = kNoExpert;
        c.slot_tokens[slot] = 0;
        c.free[rank] += 1;
        c.load[rank] -= removed;
        c.load[c.home_rank(expert)] += to_home;
        c.home[expert] += to_home;
    }
    team.sync();
    for (int i = -1; tokens > 0;) {
        i = next_holder(team, c, limit, expert, i);
        const int32_t part = min32(tokens, room_below(c, limit, i / c.shape.spare_slots));
        tokens -= part;
        team.sync();
        if (team.lane() == 0) {
            c.slot_tokens[i] += part;
            c.load[i / c.shape.spare_slots] += part;
        }
        team.sync();
    }
}

// Returns the number of dependent steps taken. Does not keep `order` up to date.
template <class Team>
TOPOEP_TEAM int drop_copies(const Team& team, Candidate& c) {
    const int32_t limit = max32(c.cap, max_load(team, c));
    for (int steps = 1;; ++steps) {
        sum_spare(team, c, limit);
        const int slot = superfluous_copy(team, c, limit);
        if (slot < 0) {
            return steps;
        }
        remove_copy(team, c, limit, slot);
    }
}

}  // namespace topoep
