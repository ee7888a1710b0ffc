// SPDX-License-Identifier: Apache-2.0
#include "cuda/solve.cuh"

#include <algorithm>

#include "cuda/launchers.h"

namespace topoep::cuda {
namespace {

SolveShape shape_on_device(const Shape& shape, int num_candidates, const DeviceLimits& limits) {
    // The kernel's own static shared memory comes out of the same budget.
    constexpr size_t kStaticSharedBytes = 2048;
    return solve_shape(shape, num_candidates, limits.num_sms,
                       limits.max_shared_bytes - kStaticSharedBytes);
}

}  // namespace

size_t solve_workspace(const Shape& shape, int num_candidates, const DeviceLimits& limits) {
    return shape_on_device(shape, num_candidates, limits).workspace_bytes;
}

const char* solve(const SolveProblem& problem, const std::vector<int64_t>& candidates,
                  const DeviceLimits& limits, void* workspace, const PlanView& plan,
                  const ListsArguments& wanted, cudaStream_t stream) {
    CandidateList list{};
    list.count = static_cast<int>(candidates.size());
    std::copy(candidates.begin(), candidates.end(), list.packed);
    return launch_solve(problem, list, shape_on_device(problem.shape, list.count, limits),
                        workspace, plan, wanted, stream);
}

}  // namespace topoep::cuda
