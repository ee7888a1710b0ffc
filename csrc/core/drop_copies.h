// SPDX-License-Identifier: Apache-2.0
// Step three of a candidate: remove copies that the others make superfluous. The tokens of a copy
// go back to the home rank of its expert, which passes what it has no room for on: to a rank that
// shares an expert with it and has room, or to one that can pass as much on in turn. Copies are
// tested all at once, each for the widest such way; of those whose ways cross the one with the
// fewest tokens goes, all others at the same time, and the test repeats until none can go. (An
// exact search, by maximum flow, removes little more.)
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

// How many tokens a rank can take or give in one piece, and the copy along which; kOwnRoom: none is
// needed. Packed so that more tokens are larger, then own room, then the lower slot.
constexpr int kOwnRoom = -1;

TOPOEP_HD uint64_t pack_reach(int32_t tokens, int slot) {
    return uint64_t{static_cast<uint32_t>(tokens)} << 16 | static_cast<uint64_t>(0xfffe - slot);
}
TOPOEP_HD int32_t reach_tokens(uint64_t reach) {
    return static_cast<int32_t>(reach >> 16);
}
TOPOEP_HD int reach_slot(uint64_t reach) {
    return 0xfffe - static_cast<int>(reach & 0xffff);
}

// Tokens can move both ways along a copy: from its expert's home all but the last, and from the
// copy all that it serves.
TOPOEP_HD int32_t movable(const Candidate& c, int slot, int from) {
    const int expert = c.slot_expert[slot];
    return from == c.home_rank(expert) ? c.home[expert] - 1 : c.slot_tokens[slot];
}

template <class Team, class Room>
TOPOEP_TEAM void raise_reach(const Team& team, const Candidate& c, uint64_t* reach, Room&& room) {
    for (int i = team.lane(); i < c.shape.num_spare(); i += team.size()) {
        const int expert = c.slot_expert[i];
        if (expert != kNoExpert) {
            const int home = c.home_rank(expert);
            const int rank = i / c.shape.spare_slots;
            team.raise(&reach[home], pack_reach(min32(movable(c, i, home), room(rank)), i));
            team.raise(&reach[rank], pack_reach(min32(movable(c, i, rank), room(home)), i));
        }
    }
    team.sync();
}

// reach[p]: what p can take, passing it on once if it has to. far_reach[p]: what p can give to a
// rank that can take it so.
template <class Team>
TOPOEP_TEAM void find_reach(const Team& team, Candidate& c, int32_t limit) {
    for (int p = team.lane(); p < c.shape.num_ranks; p += team.size()) {
        c.reach[p] = pack_reach(room_below(c, limit, p), kOwnRoom);
        c.far_reach[p] = 0;
        c.claim[p] = 0;
    }
    team.sync();
    raise_reach(team, c, c.reach, [&](int p) { return room_below(c, limit, p); });
    raise_reach(team, c, c.far_reach, [&](int p) { return reach_tokens(c.reach[p]); });
}

// Where the tokens of a copy go if it is dropped: to `home`, and `over` of them on along the copy
// `first` to `middle`, and from there along `second` to `end`. -1: there is no such hop.
struct Way {
    bool exists = false;
    int home = -1;
    int32_t over = 0;
    int first = -1;
    int middle = -1;
    int second = -1;
    int end = -1;
};

// Reading `slot_expert` of rank p only.
TOPOEP_HD int other_end(const Candidate& c, int slot, int p) {
    const int rank = slot / c.shape.spare_slots;
    return rank == p ? c.home_rank(c.slot_expert[slot]) : rank;
}

// The way for the tokens of the copy in `slot`. No state of a rank p is looked at unless
// may_read(p).
template <class MayRead>
TOPOEP_HD Way find_way(const Candidate& c, int32_t limit, int slot, MayRead&& may_read) {
    Way way;
    if (!may_read(slot / c.shape.spare_slots) || c.slot_expert[slot] == kNoExpert) {
        return way;
    }
    way.home = c.home_rank(c.slot_expert[slot]);
    if (!may_read(way.home)) {
        return way;
    }
    way.over = c.slot_tokens[slot] - room_below(c, limit, way.home);
    if (way.over <= 0) {
        way.exists = true;
        return way;
    }
    const uint64_t far = c.far_reach[way.home];
    if (reach_tokens(far) < way.over || reach_slot(far) == slot ||
        c.policy.locality) {  // tokens were placed where they come from
        return way;
    }
    way.first = reach_slot(far);
    way.middle = other_end(c, way.first, way.home);
    if (!may_read(way.middle)) {
        return way;
    }
    if (room_below(c, limit, way.middle) < way.over) {
        way.second = reach_slot(c.reach[way.middle]);
        way.end = other_end(c, way.second, way.middle);
        if (way.end == way.home || !may_read(way.end)) {
            return way;
        }
    }
    way.exists = true;
    return way;
}

// The right to change a rank goes to the copy with the fewest tokens (all from 2^18 - 2 on count as
// equal), then the lower slot. 0: nobody's.
constexpr int kSlotBits = 14;
static_assert(kMaxRanks * kMaxSpareSlots <= 1 << kSlotBits, "a claim holds any slot");

TOPOEP_HD uint32_t pack_claim(int32_t tokens, int slot) {
    constexpr int32_t kMost = (1 << (32 - kSlotBits)) - 2;
    return ~(static_cast<uint32_t>(min32(tokens, kMost)) << kSlotBits |
             static_cast<uint32_t>(slot));
}
TOPOEP_HD int claim_slot(uint32_t claim) {
    return static_cast<int>(~claim & ((1u << kSlotBits) - 1));
}

// Claims the ranks that dropping each copy would change; returns whether any can be dropped.
template <class Team>
TOPOEP_TEAM bool claim_ranks(const Team& team, Candidate& c, int32_t limit) {
    uint64_t found = kNothing;
    for (int i = team.lane(); i < c.shape.num_spare(); i += team.size()) {
        const Way way = find_way(c, limit, i, [](int) { return true; });
        if (way.exists) {
            const uint32_t claim = pack_claim(c.slot_tokens[i], i);
            team.raise(&c.claim[i / c.shape.spare_slots], claim);
            team.raise(&c.claim[way.home], claim);
            if (way.first >= 0) {
                team.raise(&c.claim[way.middle], claim);
            }
            if (way.second >= 0) {
                team.raise(&c.claim[way.end], claim);
            }
            found = 0;
        }
    }
    found = team.min(found);
    team.sync();
    return found != kNothing;
}

TOPOEP_HD void close_copy(Candidate& c, int slot) {
    c.slot_expert[slot] = kNoExpert;
    c.slot_tokens[slot] = 0;
    c.free[slot / c.shape.spare_slots] += 1;
}

// A copy that has nothing left to serve is closed too.
TOPOEP_HD void move_along(Candidate& c, int slot, int from, int to, int32_t tokens) {
    const int expert = c.slot_expert[slot];
    const int32_t to_copy = c.home_rank(expert) == from ? tokens : -tokens;
    c.home[expert] -= to_copy;
    c.slot_tokens[slot] += to_copy;
    c.load[from] -= tokens;
    c.load[to] += tokens;
    if (c.slot_tokens[slot] == 0) {
        close_copy(c, slot);
    }
}

// Drops every copy that holds the claim of all ranks of its way. Such ways have no rank in common,
// so lanes that change ranks and lanes that look for their way do not meet.
template <class Team>
TOPOEP_TEAM void drop_claimed(const Team& team, Candidate& c, int32_t limit) {
    for (int i = team.lane(); i < c.shape.num_spare(); i += team.size()) {
        const Way way = find_way(
            c, limit, i, [&](int p) { return c.claim[p] != 0 && claim_slot(c.claim[p]) == i; });
        if (!way.exists) {
            continue;
        }
        move_along(c, i, i / c.shape.spare_slots, way.home, c.slot_tokens[i]);
        if (way.first >= 0) {
            move_along(c, way.first, way.home, way.middle, way.over);
        }
        if (way.second >= 0) {
            move_along(c, way.second, way.middle, way.end, way.over);
        }
    }
    team.sync();
}

// Returns the number of dependent steps taken. Does not keep `order` up to date.
template <class Team>
TOPOEP_TEAM int drop_copies(const Team& team, int32_t limit, Candidate& c) {
    for (int steps = 1;; ++steps) {
        find_reach(team, c, limit);
        if (!claim_ranks(team, c, limit)) {
            return steps;
        }
        drop_claimed(team, c, limit);
    }
}

}  // namespace topoep
