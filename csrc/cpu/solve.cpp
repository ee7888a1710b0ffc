// SPDX-License-Identifier: Apache-2.0
// Host form of the solver: the same candidates through the same code as the device (core/), spread
// over threads, with the same plan bit for bit.
#include "cpu/solve.h"

#include <algorithm>
#include <mutex>

#include "core/error.h"
#include "core/limits.h"
#include "core/solve_candidate.h"
#include "core/split.h"
#include "core/workload.h"

namespace topoep {
namespace {

void check_counts(const char* op, const Shape& shape, const int32_t* counts) {
    int64_t total = 0;
    for (int64_t i = 0; i < int64_t{shape.num_ranks} * shape.num_experts; ++i) {
        TOPOEP_CHECK(counts[i] >= 0, op, ": counts[", i / shape.num_experts, ", ",
                     i % shape.num_experts, "] is ", counts[i],
                     "; token counts must not be negative");
        total += counts[i];
    }
    TOPOEP_CHECK(total <= kMaxTokens, op, ": counts sum to ", total, " tokens, the limit is ",
                 kMaxTokens, " (kMaxTokens); plan a smaller microbatch");
}

// Row by row, which the memory likes better than sum_node_tokens' pair by pair.
std::vector<int32_t> node_tokens_by_row(const SolveProblem& problem) {
    const Shape& shape = problem.shape;
    const int home_slots = shape.experts_per_rank();
    std::vector<int32_t> node_tokens(static_cast<size_t>(shape.num_nodes) * shape.num_experts, 0);
    for (int p = 0; p < shape.num_ranks; ++p) {
        const int32_t* row =
            problem.counts + int64_t{problem.topology.rank_at[p]} * shape.num_experts;
        int32_t* sums = node_tokens.data() +
                        static_cast<size_t>(problem.topology.node_at[p]) * shape.num_experts;
        for (int q = 0; q < shape.num_ranks; ++q) {
            const int32_t* block = row + problem.topology.rank_at[q] * home_slots;
            for (int i = 0; i < home_slots; ++i) {
                sums[q * home_slots + i] += block[i];
            }
        }
    }
    return node_tokens;
}

struct WorkloadBuffers {
    std::vector<int32_t> total, load, load_before;
    std::vector<uint16_t> order, by_load, node_order;
    std::vector<int64_t> node_out, node_in;
    Workload view;

    WorkloadBuffers(const SolveProblem& problem, const std::vector<int32_t>& node_tokens)
        : total(problem.shape.num_experts),
          load(problem.shape.num_ranks),
          load_before(problem.shape.num_ranks + 1),
          order(problem.shape.num_experts),
          by_load(problem.shape.num_ranks),
          node_order(problem.shape.num_ranks),
          node_out(problem.shape.num_nodes),
          node_in(problem.shape.num_nodes),
          view{total.data(),      order.data(),       load.data(),     by_load.data(),
               node_order.data(), load_before.data(), node_out.data(), node_in.data()} {
        sum_loads(SerialTeam{}, problem.shape, node_tokens.data(), view);
        sort_loads(SerialTeam{}, problem.shape, problem.topology, view);
        for (int n = 0; n < problem.shape.num_nodes; ++n) {
            sum_node_flows(SerialTeam{}, problem.shape, problem.topology, node_tokens.data(), view,
                           n);
        }
    }
};

struct Winner {
    Outcome outcome{};
    Outcome plain{};  // of the empty plan
    int64_t index = -1;
    std::vector<uint16_t> slot_expert;
    std::vector<int32_t> slot_tokens;

    bool loses_to(const Outcome& other, int64_t other_index) const {
        return index < 0 || other.key < outcome.key ||
               (other.key == outcome.key && other_index < index);
    }
};

// A plan without copies that reaches what was asked for: no candidate can have a smaller key.
bool is_unbeatable(const SolveProblem& problem, const Outcome& outcome, int64_t total_tokens) {
    if (problem.objective.kind == kTime) {
        return outcome.time == 0;
    }
    const int64_t allowed =
        problem.objective.kind == kBalance ? problem.objective.tolerance_ppm : 0;
    return outcome.copies == 0 &&
           outcome.max_load <= load_within(total_tokens, problem.shape.num_ranks, allowed);
}

// Solves candidates[begin..end) and keeps the best in `winner`.
void solve_range(const SolveProblem& problem, const std::vector<int64_t>& candidates,
                 const Workload& work, const std::vector<int32_t>& node_tokens, int64_t begin,
                 int64_t end, Winner* winner) {
    Candidate candidate{};
    candidate.shape = problem.shape;
    candidate.topology = problem.topology;
    Workload own{};
    std::vector<uint64_t> memory((bind_candidate(problem.shape, nullptr, &candidate, &own) + 7) /
                                 8);
    bind_candidate(problem.shape, memory.data(), &candidate, &own);
    for (int64_t i = begin; i < end; ++i) {
        const Outcome outcome =
            solve_candidate(SerialGroup{}, unpack_candidate(candidates[i]), problem.objective, work,
                            own, node_tokens.data(), candidate);
        if (winner->loses_to(outcome, i)) {
            winner->outcome = outcome;
            winner->index = i;
            store_slots(SerialTeam{}, candidate, winner->slot_expert.data(),
                        winner->slot_tokens.data());
        }
    }
}

Winner find_winner(const SolveProblem& problem, const std::vector<int64_t>& candidates,
                   const Workload& work, const std::vector<int32_t>& node_tokens,
                   const ParallelFor& parallel_for) {
    Winner empty;
    empty.slot_expert.resize(problem.shape.num_spare());
    empty.slot_tokens.resize(problem.shape.num_spare());
    Winner best = empty;
    solve_range(problem, candidates, work, node_tokens, 0, 1, &best);
    best.plain = best.outcome;
    if (is_unbeatable(problem, best.outcome, work.load_before[problem.shape.num_ranks])) {
        return best;
    }
    std::mutex best_mutex;
    parallel_for(static_cast<int64_t>(candidates.size()) - 1, [&](int64_t begin, int64_t end) {
        Winner local = empty;
        solve_range(problem, candidates, work, node_tokens, begin + 1, end + 1, &local);
        const std::lock_guard<std::mutex> lock(best_mutex);
        if (local.index >= 0 && best.loses_to(local.outcome, local.index)) {
            local.plain = best.plain;
            best = std::move(local);
        }
    });
    return best;
}

void finalize_plan(const SolveProblem& problem, const Winner& winner, const Workload& work,
                   const std::vector<int32_t>& node_tokens, const PlanView& plan) {
    const Shape& shape = problem.shape;
    const TopologyView& topology = problem.topology;
    const SlotsView slots{winner.slot_expert.data(), winner.slot_tokens.data()};
    write_slot_tables(shape, topology, slots, plan, 0, 1);
    count_copies(SerialTeam{}, shape, topology, slots, plan.copy_offsets);
    std::fill(plan.copy_slots + plan.copy_offsets[shape.num_experts],
              plan.copy_slots + shape.num_spare(), -1);
    if (plan.rank >= 0) {
        write_plain_quotas(shape, topology, problem.counts, slots, plan.copy_offsets, plan, 0, 1);
    }
    int64_t cross_before = 0;
    int64_t cross_after = 0;
    std::vector<int32_t> memory(expert_split_bytes(shape.num_ranks) / sizeof(int32_t) + 1);
    const ExpertSplit split = bind_expert_split(shape.num_ranks, memory.data());
    for (int e = 0; e < shape.num_experts; ++e) {
        const int64_t plain = plain_cross_tokens(shape, topology, node_tokens.data(), e);
        cross_before += plain;
    }
    for (int pe = 0; pe < shape.num_experts; ++pe) {
        const int e = expert_id(shape, topology, pe);
        const bool copied = plan.copy_offsets[e] < plan.copy_offsets[e + 1];
        cross_after += copied ? finalize_expert(SerialTeam{}, shape, topology, problem.counts,
                                                slots, plan.copy_offsets, e, split, plan)
                              : plain_cross_tokens(shape, topology, node_tokens.data(), pe);
    }
    plan.stats[kStatTokens] = work.load_before[shape.num_ranks];
    plan.stats[kStatMaxLoadBefore] = work.load[work.by_load[shape.num_ranks - 1]];
    plan.stats[kStatMaxLoad] = winner.outcome.max_load;
    plan.stats[kStatCopies] = winner.outcome.copies;
    plan.stats[kStatCrossCopies] = winner.outcome.cross_pairs;
    plan.stats[kStatCrossTokensBefore] = cross_before;
    plan.stats[kStatCrossTokens] = cross_after;
    plan.stats[kStatWinner] = winner.index;
    plan.stats[kStatCap] = winner.outcome.cap;
    plan.stats[kStatSteps] = winner.outcome.steps;
    plan.stats[kStatTimeBefore] = winner.plain.time;
    plan.stats[kStatTime] = winner.outcome.time;
}

}  // namespace

void solve_cpu(const SolveProblem& problem, const std::vector<int64_t>& candidates,
               const PlanView& plan, const ParallelFor& parallel_for) {
    check_counts("solve", problem.shape, problem.counts);
    const std::vector<int32_t> node_tokens = node_tokens_by_row(problem);
    const WorkloadBuffers work(problem, node_tokens);
    const Winner winner = find_winner(problem, candidates, work.view, node_tokens, parallel_for);
    finalize_plan(problem, winner, work.view, node_tokens, plan);
}

void split_cpu(const Shape& shape, const TopologyView& topology, const int32_t* counts,
               const int32_t* slot_expert, const int32_t* slot_tokens, int32_t* split) {
    check_counts("split", shape, counts);
    std::vector<uint16_t> experts(shape.num_spare());
    std::vector<int32_t> tokens(shape.num_spare());
    for (int i = 0; i < shape.num_spare(); ++i) {
        write_planner_slot(shape, topology, slot_expert, slot_tokens, i, experts.data(),
                           tokens.data());
    }
    const SlotsView slots{experts.data(), tokens.data()};
    std::vector<int32_t> memory(expert_split_bytes(shape.num_ranks) / sizeof(int32_t) + 1);
    const ExpertSplit work = bind_expert_split(shape.num_ranks, memory.data());
    // Without a copy everything goes home; that is most experts, and a copy of rows.
    const int home_slots = shape.experts_per_rank();
    const int width = home_slots + shape.spare_slots;
    for (int64_t i = 0; i < int64_t{shape.num_ranks} * shape.num_ranks; ++i) {
        std::copy_n(counts + i * home_slots, home_slots, split + i * width);
    }
    std::vector<char> copied(shape.num_experts, 0);
    for (const uint16_t expert : experts) {
        if (expert != kNoExpert) {
            const int home = topology.rank_at[expert / home_slots];
            copied[home * home_slots + expert % home_slots] = 1;
        }
    }
    for (int e = 0; e < shape.num_experts; ++e) {
        if (!copied[e]) {
            continue;
        }
        load_expert(SerialTeam{}, shape, topology, counts, slots, e, work);
        split_expert(SerialTeam{}, shape, topology, work, FullSplit{shape, topology, split});
    }
}

}  // namespace topoep
