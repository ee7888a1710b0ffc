// SPDX-License-Identifier: Apache-2.0
// Which experts are relayed inside their home node. A home rank that is read by all holders of a
// hot expert is bounded by its own link: m copies take m times as long as one. A relayed expert
// is read from it once: the row is cut into shards, every other rank of the node fetches one, and
// the holders read the shards there. Then no rank sends or receives more than about a copy.
//
// The predicted time of a node's copies is that of the link with the most to carry, out or in. The
// busiest home rank is relieved of its most copied expert, again and again, until something else
// bounds the time; then what was relayed beyond the best point is dropped. Relays cost a chunk's
// time until the first bytes come through, so they must save the time of a whole copy, or none is
// used.
//
// Integers only; every rank of a node gets the same result.
#pragma once

#include <cstdint>

#include "core/hd.h"
#include "core/limits.h"
#include "core/team.h"

namespace topoep {

// What the ranks of a node read from each other, in shards. A copy has one for each other rank.
struct NodeLinks {
    int num_ranks;
    int32_t* out;  // [num_ranks] read from this rank's memory by others
    int32_t* in;   // [num_ranks] read by this rank from others

    TOPOEP_HD int32_t shards_per_copy() const { return num_ranks - 1; }
};

// An expert with two copies or more in its home node.
struct RelayCandidate {
    int32_t entry;   // of its first copy in the node, in the list of copies: ascending by expert
    int16_t home;    // rank of the node, by local index
    int16_t copies;  // in the node; 0 once it is relayed
};

// The most of values[0 .. count) and the lowest index that has it.
struct Most {
    int32_t value;
    int index;
};

template <class Team>
TOPOEP_TEAM Most most_of(const Team& team, const int32_t* values, int count) {
    uint64_t best = kNothing;
    for (int i = team.lane(); i < count; i += team.size()) {
        best = min64(best, uint64_t{UINT32_MAX - static_cast<uint32_t>(values[i])} << 32 |
                               static_cast<uint32_t>(i));
    }
    best = team.min(best);
    return {static_cast<int32_t>(UINT32_MAX - static_cast<uint32_t>(best >> 32)),
            static_cast<int>(best & UINT32_MAX)};
}

// The candidate at this home with the most copies, on ties the first entry; -1: none is left.
template <class Team>
TOPOEP_TEAM int most_copied(const Team& team, const RelayCandidate* candidates, int count,
                            int home) {
    static_assert(kMaxRanks * kMaxSpareSlots <= 1 << 16, "an entry takes 16 bits of the key");
    uint64_t best = kNothing;
    for (int i = team.lane(); i < count; i += team.size()) {
        const RelayCandidate& candidate = candidates[i];
        if (candidate.home == home && candidate.copies > 0) {
            best = min64(best, static_cast<uint64_t>(kMaxRanks - candidate.copies) << 32 |
                                   static_cast<uint64_t>(candidate.entry) << 16 |
                                   static_cast<uint64_t>(i));
        }
    }
    best = team.min(best);
    return best == kNothing ? -1 : static_cast<int>(best & UINT16_MAX);
}

// Moves the reads of one expert from its home to relays. holder(entry): local index of the rank
// that holds the copy.
template <class Team, class Holder>
TOPOEP_TEAM void relay_expert(const Team& team, const NodeLinks& links,
                              const RelayCandidate& candidate, Holder&& holder) {
    for (int rank = team.lane(); rank < links.num_ranks; rank += team.size()) {
        if (rank == candidate.home) {
            links.out[rank] -= (candidate.copies - 1) * links.shards_per_copy();
        } else {
            links.out[rank] += candidate.copies;
            ++links.in[rank];
        }
    }
    team.sync();
    for (int k = team.lane(); k < candidate.copies; k += team.size()) {
        const int rank = holder(candidate.entry + k);  // has its own shard already
        --links.out[rank];
        --links.in[rank];
    }
    team.sync();
}

// links: without relays; used up. candidates: in any order; used up. chosen: [max_chosen] entries
// of the experts to relay, in the order of choice. Returns how many. Needs team.sync() before.
template <class Team, class Holder>
TOPOEP_TEAM int choose_relays(const Team& team, const NodeLinks& links, RelayCandidate* candidates,
                              int num_candidates, int32_t* chosen, int max_chosen,
                              Holder&& holder) {
    int best = 0;
    int32_t bound = 0;  // the time must get below it
    for (int count = 0;; ++count) {
        const Most out = most_of(team, links.out, links.num_ranks);
        const Most in = most_of(team, links.in, links.num_ranks);
        const int32_t time = max32(out.value, in.value);
        if (count == 0) {
            bound = time - links.shards_per_copy() + 1;
        } else if (time < bound) {
            best = count;
            bound = time;
        }
        const int next = in.value >= out.value || count == max_chosen
                             ? -1
                             : most_copied(team, candidates, num_candidates, out.index);
        if (next < 0) {
            return best;
        }
        const RelayCandidate candidate = candidates[next];
        team.sync();
        if (team.lane() == 0) {
            candidates[next].copies = 0;
            chosen[count] = candidate.entry;
        }
        relay_expert(team, links, candidate, holder);
    }
}

}  // namespace topoep
