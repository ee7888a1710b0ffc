// SPDX-License-Identifier: Apache-2.0
// One candidate from start to key. A Group is what executes a candidate: on the device a thread
// block whose warps are teams, on the host a single thread. It offers
//   all()       the whole group as one team,
//   one(f)      f(team) on one team while the rest of the group waits,
//   each(n, f)  f(team, i) for i in 0..n, spread over teams that do not talk to each other.
#pragma once

#include "core/candidate.h"
#include "core/drop_copies.h"
#include "core/exchange_copies.h"
#include "core/match_transport.h"
#include "core/objective.h"
#include "core/place_local.h"
#include "core/place_nodes.h"
#include "core/refine_node.h"

namespace topoep {

struct SerialGroup {
    SerialTeam all() const { return {}; }
    template <class F>
    void one(F&& f) const {
        f(SerialTeam{});
    }
    template <class F>
    void each(int n, F&& f) const {
        for (int i = 0; i < n; ++i) {
            f(SerialTeam{}, i);
        }
    }
};

template <class Team>
TOPOEP_TEAM void count_steps(const Team& team, uint32_t* counter, int steps) {
    if (team.lane() == 0) {
        team.raise(counter, static_cast<uint32_t>(steps));
    }
}

// `work` is the sorted workload of all candidates; `own` is memory for one in place of the
// candidate, which may be the same.
template <class Group>
TOPOEP_TEAM void make_copies(const Group& group, const Objective& objective, const Workload& work,
                             const Workload& own, const int32_t* node_tokens, int64_t total_tokens,
                             Candidate& c) {
    if (c.policy.transport) {
        const int steps = match_transport(group, total_tokens, c);
        count_steps(group.all(), &c.steps[0], steps);
        sort_loads(group.all(), c.shape, c.topology, own);
    } else {
        if (c.policy.locality) {
            place_local(group, c, node_tokens, least_local_tokens(c.shape, objective.cost), own);
        }
        if (c.policy.node_step) {
            group.one([&](const auto& team) {
                const Workload& sorted = c.policy.locality ? own : work;
                count_steps(team, &c.steps[0], place_nodes(team, sorted, node_tokens, c));
            });
            group.each(c.shape.num_nodes, [&](const auto& team, int n) {
                count_steps(team, &c.steps[1], refine_node(team, c, n));
            });
        }
    }
    group.one([&](const auto& team) { count_steps(team, &c.steps[2], refine_cluster(team, c)); });
    group.one([&](const auto& team) {
        const int32_t allowed = allowed_load(objective, total_tokens, c.shape.num_ranks);
        const int32_t limit = max32(max32(c.cap, allowed), max_load(team, c));
        int steps = drop_copies(team, limit, c);
        if (can_exchange(team, c)) {
            steps += exchange_copies(team, limit, c);
        }
        count_steps(team, &c.steps[3], steps);
    });
}

template <class Group>
TOPOEP_TEAM Outcome solve_candidate(const Group& group, const CandidateSpec& spec,
                                    const Objective& objective, const Workload& work,
                                    const Workload& own, const int32_t* node_tokens, Candidate& c) {
    const int64_t total_tokens = work.load_before[c.shape.num_ranks];
    const int32_t max_load_before = work.load[work.by_load[c.shape.num_ranks - 1]];
    c.policy = spec.policy;
    c.policy.locality &= c.policy.node_step && objective.kind == kTime;
    const int most = c.policy.rank_copies;
    c.usable_slots = most > 0 ? min32(most, c.shape.spare_slots) : c.shape.spare_slots;
    c.cap = candidate_cap(c.shape, c.topology, work, spec);
    // The lanes have read the loads that the steps below change.
    group.all().sync();
    start_candidate(group.all(), work, c);
    if (spec.rule != kNoCopies && c.shape.spare_slots > 0) {
        make_copies(group, objective, work, own, node_tokens, total_tokens, c);
    }
    Outcome outcome =
        evaluate(group.all(), c, objective, work, node_tokens, total_tokens, max_load_before);
    outcome.steps = static_cast<int32_t>(c.steps[0] + c.steps[1] + c.steps[2] + c.steps[3]);
    return outcome;
}

// Writes the slots of a solved candidate, per rank by expert id (empty slots last), so that equal
// plans are equal arrays.
template <class Team>
TOPOEP_TEAM void store_slots(const Team& team, const Candidate& c, uint16_t* slot_expert,
                             int32_t* slot_tokens) {
    const int spare = c.shape.spare_slots;
    for (int p = team.lane(); p < c.shape.num_ranks; p += team.size()) {
        for (int i = 0; i < spare; ++i) {
            const uint16_t expert = c.slot_expert[p * spare + i];
            const int32_t tokens = c.slot_tokens[p * spare + i];
            const int id =
                expert == kNoExpert ? kMaxExperts : expert_id(c.shape, c.topology, expert);
            int place = 0;
            for (int k = 0; k < spare; ++k) {
                const uint16_t other = c.slot_expert[p * spare + k];
                const int other_id =
                    other == kNoExpert ? kMaxExperts : expert_id(c.shape, c.topology, other);
                place += other_id < id || (other_id == id && k < i);
            }
            slot_expert[p * spare + place] = expert;
            slot_tokens[p * spare + place] = tokens;
        }
    }
    team.sync();
}

}  // namespace topoep
