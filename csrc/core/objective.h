// SPDX-License-Identifier: Apache-2.0
// What makes one plan better than another: an integer key, smaller is better. Equal keys go to the
// lower candidate index, so the winner never depends on timing.
#pragma once

#include <cstdint>

#include "core/candidate.h"
#include "core/cost_model.h"
#include "core/drop_copies.h"

namespace topoep {

constexpr int64_t kPartsPerMillion = 1000000;

enum ObjectiveKind : int {
    kBalance = 0,  // fewest weighted copies with max load within the tolerance, else least max load
    kEven = 1,     // least max load, then fewest weighted copies
    kTime = 2,     // least predicted time
};

struct Objective {
    int kind;
    int64_t tolerance_ppm;  // kBalance: allowed max load above the mean, in parts per million
    int64_t cross_weight;   // cost of a copy between nodes, in copies inside a node ("lambda")
    CostModel cost;         // kTime
};

// Largest load within `ppm` of the mean of `tokens` over `ranks`, rounded down so that the promise
// is kept, but never below what any plan can reach.
TOPOEP_HD int32_t load_within(int64_t tokens, int64_t ranks, int64_t ppm) {
    const int64_t mean_up = (tokens + ranks - 1) / ranks;
    const int64_t allowed = tokens * (kPartsPerMillion + ppm) / (ranks * kPartsPerMillion);
    return static_cast<int32_t>(min64(max64(mean_up, allowed), int64_t{INT32_MAX}));
}

// The rank load below which the objective does not ask for less.
TOPOEP_HD int32_t allowed_load(const Objective& objective, int64_t tokens, int64_t ranks) {
    return objective.kind == kBalance ? load_within(tokens, ranks, objective.tolerance_ppm) : 0;
}

// The cap on rank load that a candidate asks for.
TOPOEP_HD int32_t candidate_cap(const Shape& shape, const TopologyView& topology,
                                const Workload& work, const CandidateSpec& spec) {
    const int64_t tokens = work.load_before[shape.num_ranks];
    const int32_t floor = load_within(tokens, shape.num_ranks, 0);
    if (spec.rule == kNoCopies) {
        return floor;
    }
    if (spec.rule == kAboveMean) {
        return load_within(tokens, shape.num_ranks, spec.value);
    }
    if (spec.rule == kAtRankLoad) {
        const int64_t k = min64(spec.value, int64_t{shape.num_ranks});
        return max32(floor, work.load[work.by_load[shape.num_ranks - k]]);
    }
    int32_t cap = floor;
    for (int n = 0; n < shape.num_nodes; ++n) {
        int64_t node_tokens = 0;
        for (int p = topology.node_begin[n]; p < topology.node_begin[n + 1]; ++p) {
            node_tokens += work.load[p];
        }
        cap = max32(cap, load_within(node_tokens, topology.node_size(n), spec.value));
    }
    return cap;
}

// What the key is made of, and what the plan reports about itself.
struct Outcome {
    uint64_t key;
    int32_t max_load;
    int32_t copies;       // all copies
    int32_t cross_pairs;  // distinct (expert, remote node): copies that cross the network
    int32_t cap;
    int64_t time;   // kTime: predicted nanoseconds, else 0
    int32_t steps;  // dependent steps of the candidate, see docs/algorithm.md
};

// True for the first copy of its expert in a node other than the expert's home node: the one that
// crosses the network; the other holders of that node are served from it.
TOPOEP_HD bool crosses_network(const Candidate& c, int slot) {
    const int expert = c.slot_expert[slot];
    const int node = c.topology.node_at[slot / c.shape.spare_slots];
    if (node == c.home_node(expert)) {
        return false;
    }
    for (int i = c.topology.node_begin[node] * c.shape.spare_slots; i < slot; ++i) {
        if (c.slot_expert[i] == expert) {
            return false;
        }
    }
    return true;
}

TOPOEP_HD uint64_t plan_key(const Shape& shape, const Objective& objective, int64_t total_tokens,
                            int32_t max_load_before, const Outcome& outcome) {
    if (objective.kind == kTime) {
        // The empty plan wins over whatever makes the fullest rank fuller.
        return outcome.max_load <= max_load_before ? static_cast<uint64_t>(outcome.time)
                                                   : static_cast<uint64_t>(kLongestTime) + 1;
    }
    // copies <= 1024 * 16, weight <= 1024: below 2^26, so load and copies share one 64-bit key.
    const uint64_t weighted =
        static_cast<uint64_t>(outcome.copies + (objective.cross_weight - 1) * outcome.cross_pairs);
    const uint64_t load = static_cast<uint64_t>(outcome.max_load);
    const bool within = objective.kind == kBalance &&
                        outcome.max_load <= allowed_load(objective, total_tokens, shape.num_ranks);
    constexpr uint64_t kNotWithinBit = uint64_t{1} << 62;
    return within ? weighted << 31 | load : kNotWithinBit | load << 26 | weighted;
}

template <class Team>
TOPOEP_TEAM Outcome evaluate(const Team& team, const Candidate& c, const Objective& objective,
                             const Workload& work, const int32_t* node_tokens, int64_t total_tokens,
                             int32_t max_load_before) {
    uint32_t copies = 0;
    uint32_t pairs = 0;
    for (int i = team.lane(); i < c.shape.num_spare(); i += team.size()) {
        if (c.slot_expert[i] != kNoExpert) {
            copies += 1;
            pairs += crosses_network(c, i);
        }
    }
    Outcome outcome{};
    outcome.max_load = max_load(team, c);
    outcome.copies = static_cast<int32_t>(team.sum(copies));
    outcome.cross_pairs = static_cast<int32_t>(team.sum(pairs));
    outcome.cap = c.cap;
    if (objective.kind == kTime) {
        outcome.time = predict_time(team, c, work, node_tokens, objective.cost);
    }
    outcome.key = plan_key(c.shape, objective, total_tokens, max_load_before, outcome);
    return outcome;
}

}  // namespace topoep
