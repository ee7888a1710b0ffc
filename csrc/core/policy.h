// SPDX-License-Identifier: Apache-2.0
// One candidate of the portfolio: a rule that gives the cap on rank load, and the knobs of the
// heuristic that tries to reach it. Packed into one int64, so that a list of candidates crosses
// Python, the op schema and a kernel argument as plain integers (topoep/portfolio.py packs them).
#pragma once

#include <cstdint>

#include "core/hd.h"
#include "core/limits.h"

namespace topoep {

enum CapRule : int {
    kNoCopies = 0,    // the empty plan; candidate 0 of every list
    kAboveMean = 1,   // value = parts per million above the mean rank load
    kAboveNode = 2,   // the same above the fullest node's mean: no cross-node copy is needed there
    kAtRankLoad = 3,  // value = k: the k-th largest rank load, so k - 1 ranks give tokens away
};

enum RoomThreshold : int { kUseAllRooms = 0, kRoomsForExcess = 1, kRoomsWithMargin = 2 };
enum Exporter : int { kHottestExpert = 0, kCoverFit = 1 };
enum ItemOrder : int { kLargestFirst = 0, kImportsFirst = 1, kSourcesFirst = 2 };
enum Affinity : int { kIgnoreOrigin = 0, kAffinityIfFits = 1, kAffinityAlways = 2 };

struct Policy {
    int node_step;   // 1: nodes first, then ranks inside each node; 0: one flat step over all ranks
    int near_first;  // flat and last-resort steps prefer the source's node and nodes that hold a
                     // copy
    int threshold;   // RoomThreshold: leave the smallest rooms of the cluster empty
    int exporter;    // Exporter: which rank of a full node gives its tokens to another node
    int round_up;    // export at least the whole excess of that rank
    int item_order;  // ItemOrder inside a node
    int pair_fit;    // fill two rooms exactly where no single room is large enough
    int affinity;    // Affinity: prefer nodes that many of the expert's tokens come from
    int locality;    // first import experts whose tokens cost more to send than their weights
    int whole_rooms;  // imports are no larger than the room of the rank they will go to
    int rank_copies;  // most copies on a rank, 0: as many as it has slots
    int transport;    // 1: match_transport.h instead of the steps over nodes and inside them
};

struct CandidateSpec {
    int rule;
    int64_t value;
    Policy policy;
};

TOPOEP_HD CandidateSpec unpack_candidate(int64_t packed) {
    const int bits = static_cast<int>(packed & 0xffff);
    CandidateSpec spec;
    spec.rule = static_cast<int>(packed >> 56 & 0xff);
    spec.value = packed >> 16 & 0xffffffffff;
    spec.policy.node_step = bits & 1;
    spec.policy.near_first = bits >> 1 & 1;
    spec.policy.threshold = bits >> 2 & 3;
    spec.policy.exporter = bits >> 4 & 1;
    spec.policy.round_up = bits >> 5 & 1;
    spec.policy.item_order = bits >> 6 & 3;
    spec.policy.pair_fit = bits >> 8 & 1;
    spec.policy.affinity = bits >> 9 & 3;
    spec.policy.locality = bits >> 11 & 1;
    spec.policy.transport = bits >> 12 & 1;
    spec.policy.whole_rooms = bits >> 13 & 1;
    spec.policy.rank_copies = bits >> 14 & 3;
    return spec;
}

// Whether unpack_candidate gives a rule and knobs that exist.
TOPOEP_HD bool is_valid_candidate(int64_t packed) {
    const CandidateSpec spec = unpack_candidate(packed);
    const int64_t limit = spec.rule == kAtRankLoad ? kMaxRanks : kMaxPartsPerMillion;
    return packed >= 0 && spec.rule <= kAtRankLoad && spec.value <= limit &&
           (spec.rule != kAtRankLoad || spec.value >= 1) &&
           spec.policy.threshold <= kRoomsWithMargin && spec.policy.item_order <= kSourcesFirst &&
           spec.policy.affinity <= kAffinityAlways;
}

}  // namespace topoep
