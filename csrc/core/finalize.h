// SPDX-License-Identifier: Apache-2.0
// Turns the winning candidate into the plan that the outside world sees: slots and sources by rank,
// the list of copies per expert, and exact token quotas of one rank's row and column.
#pragma once

#include "core/candidate.h"
#include "core/objective.h"
#include "core/shape.h"
#include "core/split.h"
#include "core/team.h"

namespace topoep {

enum Stat : int {
    kStatTokens = 0,         // routed (token, expert) pairs of all ranks
    kStatMaxLoadBefore,      // fullest rank without copies
    kStatMaxLoad,            // fullest rank with the plan
    kStatCopies,             // all copies
    kStatCrossCopies,        // distinct (expert, remote node)
    kStatCrossTokensBefore,  // tokens that cross nodes without copies
    kStatCrossTokens,        // .. with the plan
    kStatWinner,             // index of the winning candidate
    kStatCap,                // its cap on rank load
    kStatSteps,              // its dependent steps
    kStatTimeBefore,         // objective kTime: predicted nanoseconds without copies, else 0
    kStatTime,               // .. with the plan
    kNumStats
};

// Output arrays, by rank and expert id of the outside world.
struct PlanView {
    int32_t* slot_expert;   // [R, S] expert or -1
    int32_t* slot_source;   // [R, S] rank to fetch from or -1
    int32_t* slot_tokens;   // [R, S] tokens that the copy serves
    int32_t* copy_offsets;  // [E + 1] copies of expert e: copy_slots[copy_offsets[e] ..)
    int32_t* copy_slots;    // [R * S] physical ids, node-major per expert; -1 beyond the last copy
    int32_t* send;          // [P] tokens that this rank sends to each physical expert
    int32_t* recv;          // [R, H + S] tokens that each rank sends to this rank's slots
    int64_t* stats;         // [kNumStats]
    int rank;               // whose row and column; -1: send and recv are not written
};

// The source of a copy: the home rank, or the first holder in its node when the home is elsewhere.
TOPOEP_HD int copy_source(const Shape& shape, const TopologyView& topology, const SlotsView& slots,
                          int slot) {
    const int expert = slots.expert[slot];
    const int home = expert / shape.experts_per_rank();
    const int node = topology.node_at[slot / shape.spare_slots];
    if (topology.node_at[home] != node) {
        for (int i = topology.node_begin[node] * shape.spare_slots; i < slot; ++i) {
            if (slots.expert[i] == expert) {
                return topology.rank_at[i / shape.spare_slots];
            }
        }
    }
    return topology.rank_at[home];
}

// One thread's share of the slot tables.
TOPOEP_HD void write_slot_tables(const Shape& shape, const TopologyView& topology,
                                 const SlotsView& slots, const PlanView& plan, int first,
                                 int stride) {
    const int spare = shape.spare_slots;
    for (int i = first; i < shape.num_spare(); i += stride) {
        const int out = topology.rank_at[i / spare] * spare + i % spare;
        const bool empty = slots.expert[i] == kNoExpert;
        plan.slot_expert[out] = empty ? -1 : expert_id(shape, topology, slots.expert[i]);
        plan.slot_source[out] = empty ? -1 : copy_source(shape, topology, slots, i);
        plan.slot_tokens[out] = slots.tokens[i];
    }
}

// offsets[e] = number of copies of experts below e (ids of the outside world), e in 0..E.
template <class Team>
TOPOEP_TEAM void count_copies(const Team& team, const Shape& shape, const TopologyView& topology,
                              const SlotsView& slots, int32_t* offsets) {
    for (int e = team.lane(); e <= shape.num_experts; e += team.size()) {
        offsets[e] = 0;
    }
    team.sync();
    for (int i = team.lane(); i < shape.num_spare(); i += team.size()) {
        if (slots.expert[i] != kNoExpert) {
            const int e = expert_id(shape, topology, slots.expert[i]);
            team.add(reinterpret_cast<uint32_t*>(offsets + e), 1u);
        }
    }
    team.sync();
    prefix_sum(team, offsets, offsets, shape.num_experts);
}

// Row and column of plan.rank for everything that no copy touches: experts served at home alone,
// and empty slots. One thread's share.
TOPOEP_HD void write_plain_quotas(const Shape& shape, const TopologyView& topology,
                                  const int32_t* counts, const SlotsView& slots,
                                  const int32_t* offsets, const PlanView& plan, int first,
                                  int stride) {
    const int home_slots = shape.experts_per_rank();
    const int width = shape.slots_per_rank();
    const int spare = shape.spare_slots;
    for (int e = first; e < shape.num_experts; e += stride) {
        if (offsets[e] == offsets[e + 1]) {
            plan.send[e / home_slots * width + e % home_slots] =
                counts[static_cast<int64_t>(plan.rank) * shape.num_experts + e];
        }
    }
    for (int i = first; i < shape.num_spare(); i += stride) {
        if (slots.expert[i] == kNoExpert) {
            plan.send[topology.rank_at[i / spare] * width + home_slots + i % spare] = 0;
        }
    }
    for (int i = first; i < shape.num_ranks * home_slots; i += stride) {
        const int e = plan.rank * home_slots + i % home_slots;
        if (offsets[e] == offsets[e + 1]) {
            plan.recv[i / home_slots * width + i % home_slots] =
                counts[static_cast<int64_t>(i / home_slots) * shape.num_experts + e];
        }
    }
    const int own_slots = topology.position_of[plan.rank] * spare;
    for (int i = first; i < shape.num_spare(); i += stride) {
        if (slots.expert[own_slots + i % spare] == kNoExpert) {
            plan.recv[i / spare * width + home_slots + i % spare] = 0;
        }
    }
}

// Writes the row and the column of plan.rank; see split_expert.
struct RowAndColumn {
    const Shape& shape;
    const TopologyView& topology;
    const PlanView& plan;

    template <class Team, class F>
    TOPOEP_TEAM void for_pairs(const Team& team, const ExpertSplit&, F&& f) const {
        if (plan.rank < 0) {
            return;
        }
        const int self = topology.position_of[plan.rank];
        for (int p = team.lane(); p < shape.num_ranks; p += team.size()) {
            f(self, p);
            if (p != self) {
                f(p, self);
            }
        }
    }
    TOPOEP_HD void write(int source, int holder, int slot, int32_t tokens) const {
        const int width = shape.slots_per_rank();
        if (topology.rank_at[source] == plan.rank) {
            plan.send[topology.rank_at[holder] * width + slot] = tokens;
        }
        if (topology.rank_at[holder] == plan.rank) {
            plan.recv[topology.rank_at[source] * width + slot] = tokens;
        }
    }
};

// Every rank's row: split[R, P].
struct FullSplit {
    const Shape& shape;
    const TopologyView& topology;
    int32_t* split;

    template <class Team, class F>
    TOPOEP_TEAM void for_pairs(const Team& team, const ExpertSplit& expert, F&& f) const {
        for (int holder = 0; holder < shape.num_ranks; ++holder) {
            if (expert.slot[holder] >= 0) {
                for (int p = team.lane(); p < shape.num_ranks; p += team.size()) {
                    f(p, holder);
                }
            }
        }
    }
    TOPOEP_HD void write(int source, int holder, int slot, int32_t tokens) const {
        const int64_t row = int64_t{topology.rank_at[source]} * shape.num_physical();
        split[row + topology.rank_at[holder] * shape.slots_per_rank() + slot] = tokens;
    }
};

// The list of copies of one expert, in node-major order. Needs load_expert.
template <class Team>
TOPOEP_TEAM void write_copy_list(const Team& team, const Shape& shape, const TopologyView& topology,
                                 const ExpertSplit& split, int32_t first, const PlanView& plan) {
    int32_t found = 0;
    for (int base = 0; base < shape.num_ranks; base += team.size()) {
        const int p = base + team.lane();
        const bool is_copy = p < shape.num_ranks && split.slot[p] >= shape.experts_per_rank();
        int32_t total = 0;
        const int32_t before = team.exclusive_sum(is_copy ? 1 : 0, &total);
        if (is_copy) {
            plan.copy_slots[first + found + before] =
                topology.rank_at[p] * shape.slots_per_rank() + split.slot[p];
        }
        found += total;
    }
}

// Everything of the plan that concerns one copied expert. Returns its tokens that cross nodes.
template <class Team>
TOPOEP_TEAM int64_t finalize_expert(const Team& team, const Shape& shape,
                                    const TopologyView& topology, const int32_t* counts,
                                    const SlotsView& slots, const int32_t* offsets, int expert_id,
                                    const ExpertSplit& split, const PlanView& plan) {
    load_expert(team, shape, topology, counts, slots, expert_id, split);
    write_copy_list(team, shape, topology, split, offsets[expert_id], plan);
    return split_expert(team, shape, topology, split, RowAndColumn{shape, topology, plan});
}

// Tokens of an expert that leave their node when it is served at home alone.
TOPOEP_HD int64_t plain_cross_tokens(const Shape& shape, const TopologyView& topology,
                                     const int32_t* node_tokens, int expert) {
    int64_t sum = 0;
    const int home_node = topology.node_at[expert / shape.experts_per_rank()];
    for (int n = 0; n < shape.num_nodes; ++n) {
        sum += n == home_node ? 0 : node_tokens[n * shape.num_experts + expert];
    }
    return sum;
}

}  // namespace topoep
