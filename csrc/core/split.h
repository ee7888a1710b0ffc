// SPDX-License-Identifier: Apache-2.0
// Who sends how many tokens where. The tokens of one expert are split over its holders level by
// level: a rank's own tokens stay on it, then tokens stay in their node, then the rest crosses the
// network. Inside a level, sources and holders are laid end to end on two number lines in rank
// order and each overlap is one transfer: exact integers that meet every holder's quota. For a
// tree-shaped network, serving the nearest level first moves the fewest tokens across nodes that
// the quotas allow (tests/test_split.py compares with the linear program).
#pragma once

#include "core/candidate.h"
#include "core/shape.h"
#include "core/team.h"

namespace topoep {

// A solved candidate: [R * S] by position, planner expert ids.
struct SlotsView {
    const uint16_t* expert;
    const int32_t* tokens;
};

// Entry i of a SlotsView, from the slot tables of a finished plan.
TOPOEP_HD void write_planner_slot(const Shape& shape, const TopologyView& topology,
                                  const int32_t* slot_expert, const int32_t* slot_tokens, int i,
                                  uint16_t* experts, int32_t* tokens) {
    const int spare = shape.spare_slots;
    const int home_slots = shape.experts_per_rank();
    const int in = topology.rank_at[i / spare] * spare + i % spare;
    const int id = slot_expert[in];
    experts[i] = id < 0 ? kNoExpert
                        : static_cast<uint16_t>(topology.position_of[id / home_slots] * home_slots +
                                                id % home_slots);
    tokens[i] = id < 0 ? 0 : slot_tokens[in];
}

// Work arrays for one expert, by position.
struct ExpertSplit {
    int32_t* need;         // [R] tokens of the source that no holder serves yet
    int32_t* room;         // [R] quota of the holder that is not used yet
    int32_t* need_before;  // [R + 1] prefix sums
    int32_t* room_before;  // [R + 1]
    int16_t* slot;         // [R] local slot in which the rank holds the expert, -1: it does not
};

TOPOEP_HD size_t expert_split_bytes(int num_ranks) {
    return (4 * sizeof(int32_t) + sizeof(int16_t)) * (static_cast<size_t>(num_ranks) + 1);
}

TOPOEP_HD ExpertSplit bind_expert_split(int num_ranks, void* base) {
    int32_t* words = static_cast<int32_t*>(base);
    const int n = num_ranks + 1;
    return {words, words + n, words + 2 * n, words + 3 * n,
            reinterpret_cast<int16_t*>(words + 4 * n)};
}

enum Level : int { kOwnRank = 0, kOwnNode = 1, kOtherNode = 2 };
constexpr int kNumLevels = 3;

TOPOEP_HD int level_between(const TopologyView& topology, int source, int holder) {
    if (source == holder) {
        return kOwnRank;
    }
    return topology.node_at[source] == topology.node_at[holder] ? kOwnNode : kOtherNode;
}

template <class Team>
TOPOEP_TEAM void load_expert(const Team& team, const Shape& shape, const TopologyView& topology,
                             const int32_t* counts, const SlotsView& slots, int expert_id,
                             const ExpertSplit& split) {
    const int home_slots = shape.experts_per_rank();
    const int spare = shape.spare_slots;
    const int home = topology.position_of[expert_id / home_slots];
    const int expert = home * home_slots + expert_id % home_slots;
    int64_t home_quota = 0;
    for (int p = team.lane(); p < shape.num_ranks; p += team.size()) {
        split.need[p] =
            counts[static_cast<int64_t>(topology.rank_at[p]) * shape.num_experts + expert_id];
        split.room[p] = 0;
        split.slot[p] = -1;
        for (int i = 0; i < spare; ++i) {
            if (slots.expert[p * spare + i] == expert) {
                split.room[p] = slots.tokens[p * spare + i];
                split.slot[p] = static_cast<int16_t>(home_slots + i);
            }
        }
        home_quota += split.need[p] - split.room[p];
    }
    home_quota = team.sum(home_quota);
    team.sync();
    if (team.lane() == 0) {
        split.room[home] = static_cast<int32_t>(home_quota);
        split.slot[home] = static_cast<int16_t>(expert_id % home_slots);
    }
    team.sync();
}

// Length of the overlap of [a, a + a_length) and [b, b + b_length).
TOPOEP_HD int32_t overlap(int32_t a, int32_t a_length, int32_t b, int32_t b_length) {
    const int64_t begin = a > b ? a : b;
    const int64_t end = min64(int64_t{a} + a_length, int64_t{b} + b_length);
    return end > begin ? static_cast<int32_t>(end - begin) : 0;
}

// Tokens that go from `source` to `holder`, once the prefix sums of their level stand.
TOPOEP_HD int32_t tokens_between(const TopologyView& topology, const ExpertSplit& split, int level,
                                 int source, int holder) {
    if (level == kOwnRank) {
        return min32(split.need[source], split.room[holder]);
    }
    const int line = level == kOwnNode ? topology.node_begin[topology.node_at[source]] : 0;
    return overlap(split.need_before[source] - split.need_before[line], split.need[source],
                   split.room_before[holder] - split.room_before[line], split.room[holder]);
}

// Takes what the level served off the open needs and rooms.
template <class Team>
TOPOEP_TEAM void settle_level(const Team& team, const Shape& shape, const TopologyView& topology,
                              const ExpertSplit& split, int level) {
    for (int p = team.lane(); p < shape.num_ranks; p += team.size()) {
        int32_t served = min32(split.need[p], split.room[p]);
        int32_t used = served;
        if (level == kOwnNode) {
            const int node = topology.node_at[p];
            const int begin = topology.node_begin[node];
            const int end = topology.node_begin[node + 1];
            served = overlap(split.need_before[p] - split.need_before[begin], split.need[p], 0,
                             split.room_before[end] - split.room_before[begin]);
            used = overlap(split.room_before[p] - split.room_before[begin], split.room[p], 0,
                           split.need_before[end] - split.need_before[begin]);
        }
        split.need[p] -= served;
        split.room[p] -= used;
    }
    team.sync();
}

// Calls write(source, holder, slot, tokens), by position, once for every pair of the sink's sources
// and holders. Returns the tokens of the expert that cross nodes. A sink has
// for_pairs(team, split, f), which spreads f(source, holder) over the lanes.
template <class Team, class Sink>
TOPOEP_TEAM int64_t split_expert(const Team& team, const Shape& shape, const TopologyView& topology,
                                 const ExpertSplit& split, const Sink& sink) {
    for (int level = 0; level < kNumLevels; ++level) {
        if (level != kOwnRank) {
            prefix_sum(team, split.need, split.need_before, shape.num_ranks);
            prefix_sum(team, split.room, split.room_before, shape.num_ranks);
        }
        sink.for_pairs(team, split, [&](int source, int holder) {
            if (split.slot[holder] >= 0 && level_between(topology, source, holder) == level) {
                sink.write(source, holder, split.slot[holder],
                           tokens_between(topology, split, level, source, holder));
            }
        });
        team.sync();
        if (level != kOtherNode) {
            settle_level(team, shape, topology, split, level);
        }
    }
    return split.need_before[shape.num_ranks];
}

}  // namespace topoep
