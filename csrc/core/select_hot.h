// SPDX-License-Identifier: Apache-2.0
// Which expert does a rank give tokens of? Always the one with the most tokens left at home: the
// fewest copies carry a given excess that way. Each rank's experts are kept sorted, so the answer
// is the head of a list; after a donation one expert moves down that list.
#pragma once

#include "core/candidate.h"

namespace topoep {

// The hottest expert of rank p, or -1. One token always stays at home, so that the home slot of
// every routed expert keeps a gradient and is never empty because of a plan.
TOPOEP_HD int hottest_expert(const Candidate& c, int p) {
    const int expert = c.order[p * c.shape.experts_per_rank()];
    return c.home[expert] > 1 ? expert : -1;
}

// The same among the experts that rank d does not hold yet.
TOPOEP_HD int hottest_expert_not_on(const Candidate& c, int p, int d) {
    const int home_slots = c.shape.experts_per_rank();
    for (int i = p * home_slots; i < (p + 1) * home_slots; ++i) {
        const int expert = c.order[i];
        if (c.home[expert] <= 1) {
            return -1;
        }
        if (!c.holds(d, expert)) {
            return expert;
        }
    }
    return -1;
}

// Moves `expert` to its place in its rank's list after home[expert] changed.
template <class Team>
TOPOEP_TEAM void restore_order(const Team& team, Candidate& c, int expert) {
    const int home_slots = c.shape.experts_per_rank();
    uint16_t* list = c.order + c.home_rank(expert) * home_slots;
    uint32_t places = 0;  // old place in the high half, new place (experts that come before) below
    for (int i = team.lane(); i < home_slots; i += team.size()) {
        const int other = list[i];
        if (other == expert) {
            places += static_cast<uint32_t>(i) << 16;
        } else {
            places += c.home[other] > c.home[expert] ||
                      (c.home[other] == c.home[expert] && other < expert);
        }
    }
    places = team.sum(places);
    const int old_place = static_cast<int>(places >> 16);
    const int new_place = static_cast<int>(places & 0xffff);
    if (old_place == new_place) {
        return;
    }
    // Shift the experts in between by one, a team-wide slice at a time, nearest the gap first.
    const int step = old_place < new_place ? 1 : -1;
    const int distance = (new_place - old_place) * step;
    for (int base = 0; base < distance; base += team.size()) {
        const int i = base + team.lane();
        const uint16_t moved = i < distance ? list[old_place + step * (i + 1)] : kNoExpert;
        team.sync();
        if (i < distance) {
            list[old_place + step * i] = moved;
        }
        team.sync();
    }
    if (team.lane() == 0) {
        list[new_place] = static_cast<uint16_t>(expert);
    }
    team.sync();
}

}  // namespace topoep
