// SPDX-License-Identifier: Apache-2.0
// solve: counts [R, E] -> plan, in one cooperative launch.
//
//   all blocks    node_tokens[n, e] = sum over the ranks of node n of counts[r, e]
//   --- grid barrier ---
//   block c       sort loads; solve candidate c (core/solve_candidate.h); store key and slots
//   --- grid barrier ---
//   all blocks    winner = least (key, index); write slot tables; split the tokens of every copied
//                 expert over its holders, one block an expert (core/finalize.h)
//   last block    where a data plane moves what the plan says: this rank's lists for it
//   out           (cuda/stream_lists.cuh)
//
// Launch shape: one block of 256 threads per candidate, at least kMinBlocks so that the first and
// last phase have hands, at most one per SM so that all are resident. A block whose list of
// candidates is longer than the grid solves several in turn. The state of a candidate lives in
// shared memory (5 KB at R=64, E=256, S=2; 16 KB at R=256, E=512, S=2), or in the workspace where
// that does not fit.
// Determinism: integers only; every reduction carries its id; no order of blocks or lanes shows.
#pragma once

#include <cstdint>

#include "core/finalize.h"
#include "core/limits.h"
#include "core/solve_candidate.h"
#include "core/solve_problem.h"
#include "core/transfer_arguments.h"
#include "core/workload.h"
#include "cuda/compat.cuh"
#include "cuda/stream_lists.cuh"
#include "cuda/team.cuh"

namespace topoep {

constexpr int kSolveThreads = 256;
constexpr int kMinSolveBlocks = 32;

// Travels as a kernel argument.
struct CandidateList {
    int count;
    int64_t packed[kMaxCandidates];
};

// Memory that lives as long as the launch.
struct SolveWorkspace {
    int64_t* block_tokens;  // [blocks] routed tokens that the block summed
    Outcome* outcomes;      // [candidates]
    int32_t* node_tokens;   // [N, E] planner order
    int32_t* slot_tokens;   // [candidates, R * S]
    uint16_t* slot_expert;  // [candidates, R * S]
    uint32_t* finalized;    // [1] blocks that have written their part of the plan
    unsigned char* states;  // [blocks, state_bytes], nullptr: in shared memory
    size_t state_bytes;
};

struct SolveShape {
    LaunchShape launch;
    size_t state_bytes;
    bool state_in_shared;
    size_t workspace_bytes;
};

TOPOEP_HD SolveWorkspace bind_solve_workspace(const Shape& shape, int num_candidates,
                                              int num_blocks, size_t state_bytes,
                                              bool state_in_shared, void* base, size_t* used) {
    Arena arena(base);
    SolveWorkspace workspace{};
    workspace.block_tokens = arena.take<int64_t>(num_blocks);
    workspace.outcomes = arena.take<Outcome>(num_candidates);
    workspace.node_tokens = arena.take<int32_t>(shape.num_nodes * shape.num_experts);
    workspace.slot_tokens = arena.take<int32_t>(num_candidates * shape.num_spare());
    workspace.finalized = arena.take<uint32_t>(1);
    workspace.slot_expert = arena.take<uint16_t>(num_candidates * shape.num_spare());
    if (!state_in_shared) {
        arena.take<uint64_t>(0);  // alignment
        workspace.states = arena.take<unsigned char>(static_cast<int>(num_blocks * state_bytes));
    }
    workspace.state_bytes = state_bytes;
    *used = arena.used();
    return workspace;
}

inline SolveShape solve_shape(const Shape& shape, int num_candidates, int num_sms,
                              size_t max_shared_bytes) {
    Candidate candidate{};
    Workload work{};
    SolveShape result{};
    const size_t state = bind_candidate(shape, nullptr, &candidate, &work);
    result.state_bytes = (state + 15) / 16 * 16;
    result.state_in_shared = result.state_bytes <= max_shared_bytes;
    const int wanted = num_candidates > kMinSolveBlocks ? num_candidates : kMinSolveBlocks;
    const int num_blocks = wanted < num_sms ? wanted : num_sms;
    const size_t finalize = (static_cast<size_t>(shape.num_experts) + 1) * sizeof(int32_t) +
                            expert_split_bytes(shape.num_ranks);
    const size_t lists = stream_lists_shared_bytes(shape.num_nodes);
    const size_t last = finalize > lists ? finalize : lists;
    const size_t in_shared = result.state_in_shared ? result.state_bytes : 0;
    result.launch.grid = dim3(num_blocks);
    result.launch.block = dim3(kSolveThreads);
    result.launch.shared_bytes = in_shared > last ? in_shared : last;
    result.launch.cooperative = true;
    bind_solve_workspace(shape, num_candidates, num_blocks, result.state_bytes,
                         result.state_in_shared, nullptr, &result.workspace_bytes);
    return result;
}

__device__ inline void solve_candidates(const SolveProblem& problem,
                                        const CandidateList& candidates,
                                        const SolveWorkspace& workspace, bool too_many_tokens,
                                        void* state) {
    const BlockGroup group;
    const Shape& shape = problem.shape;
    Candidate candidate{};
    Workload work{};
    candidate.shape = shape;
    candidate.topology = problem.topology;
    bind_candidate(shape, state, &candidate, &work);
    for (int i = blockIdx.x; i < candidates.count; i += gridDim.x) {
        sum_loads(group.all(), shape, workspace.node_tokens, work);
        sort_loads(group.all(), shape, problem.topology, work);
        if (problem.objective.kind == kTime) {
            group.each(shape.num_nodes, [&](const auto& team, int n) {
                sum_node_flows(team, shape, problem.topology, workspace.node_tokens, work, n);
            });
        }
        CandidateSpec spec = unpack_candidate(candidates.packed[i]);
        if (too_many_tokens) {
            spec.rule = kNoCopies;  // sums of int32 cannot be trusted: leave everything at home
        }
        const Outcome outcome = solve_candidate(group, spec, problem.objective, work, work,
                                                workspace.node_tokens, candidate);
        const int64_t first = int64_t{i} * shape.num_spare();
        store_slots(group.all(), candidate, workspace.slot_expert + first,
                    workspace.slot_tokens + first);
        if (threadIdx.x == 0) {
            workspace.outcomes[i] = outcome;
        }
        __syncthreads();
    }
}

__device__ inline int find_winner(const CandidateList& candidates, const Outcome* outcomes) {
    const BlockTeam team;
    uint64_t best = kNothing;
    for (int i = team.lane(); i < candidates.count; i += team.size()) {
        best = min64(best, outcomes[i].key);
    }
    best = team.min(best);
    uint64_t index = kNothing;
    for (int i = team.lane(); i < candidates.count; i += team.size()) {
        if (outcomes[i].key == best) {
            index = min64(index, static_cast<uint64_t>(i));
        }
    }
    return static_cast<int>(team.min(index));
}

__device__ inline void write_stats(const Outcome& plain, const Outcome& winner, int index,
                                   int64_t tokens, int64_t* stats) {
    stats[kStatTokens] = tokens;
    stats[kStatMaxLoadBefore] = plain.max_load;
    stats[kStatMaxLoad] = winner.max_load;
    stats[kStatCopies] = winner.copies;
    stats[kStatCrossCopies] = winner.cross_pairs;
    stats[kStatWinner] = index;
    stats[kStatCap] = winner.cap;
    stats[kStatSteps] = winner.steps;
    stats[kStatTimeBefore] = plain.time;
    stats[kStatTime] = winner.time;
}

__device__ inline void finalize_plan(const SolveProblem& problem, const CandidateList& candidates,
                                     const SolveWorkspace& workspace, const PlanView& plan,
                                     int64_t tokens, int32_t* shared) {
    const BlockTeam team;
    const Shape& shape = problem.shape;
    const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const int stride = static_cast<int>(gridDim.x * blockDim.x);
    const int winner = find_winner(candidates, workspace.outcomes);
    const int64_t slots_begin = int64_t{winner} * shape.num_spare();
    const SlotsView slots{workspace.slot_expert + slots_begin, workspace.slot_tokens + slots_begin};
    int32_t* offsets = shared;
    const ExpertSplit split = bind_expert_split(shape.num_ranks, shared + shape.num_experts + 1);

    write_slot_tables(shape, problem.topology, slots, plan, first, stride);
    count_copies(team, shape, problem.topology, slots, offsets);
    for (int i = first; i <= shape.num_experts; i += stride) {
        plan.copy_offsets[i] = offsets[i];
    }
    for (int i = first; i < shape.num_spare(); i += stride) {
        if (i >= offsets[shape.num_experts]) {
            plan.copy_slots[i] = -1;
        }
    }
    if (plan.rank >= 0) {
        write_plain_quotas(shape, problem.topology, problem.counts, slots, offsets, plan, first,
                           stride);
    }
    int64_t cross_before = 0;
    int64_t cross_after = 0;
    for (int expert = first; expert < shape.num_experts; expert += stride) {
        const int id = expert_id(shape, problem.topology, expert);
        const int64_t plain =
            plain_cross_tokens(shape, problem.topology, workspace.node_tokens, expert);
        cross_before += plain;
        cross_after += offsets[id] == offsets[id + 1] ? plain : 0;
    }
    cross_before = team.sum(cross_before);
    cross_after = team.sum(cross_after);
    for (int id = blockIdx.x; id < shape.num_experts; id += gridDim.x) {
        if (offsets[id] < offsets[id + 1]) {
            cross_after += finalize_expert(team, shape, problem.topology, problem.counts, slots,
                                           offsets, id, split, plan);
        }
    }
    if (threadIdx.x == 0) {
        auto* stats = reinterpret_cast<uint64_t*>(plan.stats);
        team.add(&stats[kStatCrossTokensBefore], static_cast<uint64_t>(cross_before));
        team.add(&stats[kStatCrossTokens], static_cast<uint64_t>(cross_after));
        if (blockIdx.x == 0) {
            write_stats(workspace.outcomes[0], workspace.outcomes[winner], winner, tokens,
                        plan.stats);
        }
    }
}

// Whether all other blocks have written their part of the plan, which this one may then read. One
// block of the launch gets true.
__device__ inline bool is_last_to_finalize(const SolveWorkspace& workspace) {
    TOPOEP_SHARED(int, is_last, [1]);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last[0] = atomicAdd(workspace.finalized, 1u) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    return is_last[0] != 0;
}

__global__ void __launch_bounds__(kSolveThreads, 1)
    solve_kernel(SolveProblem problem, CandidateList candidates, SolveWorkspace workspace,
                 PlanView plan, ListsArguments wanted) {
    TOPOEP_DYNAMIC_SHARED(unsigned char, shared);
    const BlockTeam team;
    const int64_t block_tokens = team.sum(
        sum_node_tokens(problem.shape, problem.topology, problem.counts, workspace.node_tokens,
                        static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x),
                        static_cast<int>(gridDim.x * blockDim.x)));
    if (threadIdx.x == 0) {
        workspace.block_tokens[blockIdx.x] = block_tokens;
        if (blockIdx.x == 0) {
            plan.stats[kStatCrossTokensBefore] = 0;
            plan.stats[kStatCrossTokens] = 0;
            *workspace.finalized = 0;
        }
    }
    grid_sync();

    int64_t tokens = 0;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
        tokens += workspace.block_tokens[i];
    }
    tokens = team.sum(tokens);
    void* state = workspace.states == nullptr
                      ? shared
                      : workspace.states + blockIdx.x * workspace.state_bytes;
    solve_candidates(problem, candidates, workspace, tokens > kMaxTokens, state);
    grid_sync();

    auto* numbers = reinterpret_cast<int32_t*>(shared);
    finalize_plan(problem, candidates, workspace, plan, tokens, numbers);
    if (wanted.lists.pair_index != nullptr && is_last_to_finalize(workspace)) {
        stream_lists_block(wanted.config, problem.topology,
                           {plan.slot_expert, plan.copy_offsets, plan.copy_slots}, wanted.lists,
                           numbers);
    }
}

// Launches the solve. `workspace` has solve_shape(..).workspace_bytes bytes, aligned to 16.
inline const char* launch_solve(const SolveProblem& problem, const CandidateList& candidates,
                                const SolveShape& shape, void* workspace, const PlanView& plan,
                                const ListsArguments& wanted, Stream stream) {
    size_t used = 0;
    const SolveWorkspace bound =
        bind_solve_workspace(problem.shape, candidates.count, static_cast<int>(shape.launch.grid.x),
                             shape.state_bytes, shape.state_in_shared, workspace, &used);
    return launch(solve_kernel, shape.launch, stream, problem, candidates, bound, plan, wanted);
}

}  // namespace topoep
