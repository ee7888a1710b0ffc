// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/finalize.h"
#include "core/solve_problem.h"
#include "cpu/parallel.h"

namespace topoep {

// Solves all candidates (packed, see core/policy.h) and writes the plan of the best one. Throws
// Error when a count is negative or the counts sum to more than kMaxTokens.
void solve_cpu(const SolveProblem& problem, const std::vector<int64_t>& candidates,
               const PlanView& plan, const ParallelFor& parallel_for);

// split[r, p] = tokens that source rank r sends to physical expert p under a finished plan.
// `split` must be zero: empty slots are not written.
void split_cpu(const Shape& shape, const TopologyView& topology, const int32_t* counts,
               const int32_t* slot_expert, const int32_t* slot_tokens, int32_t* split);

}  // namespace topoep
