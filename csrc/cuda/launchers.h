// SPDX-License-Identifier: Apache-2.0
// The kernels as plain functions, for callers that nvcc does not compile. Each .cu file defines
// those of one stage. All return nullptr or the CUDA error text, enqueue on `stream`, and neither
// allocate nor wait; workspaces are the caller's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/finalize.h"
#include "core/numeric.h"
#include "core/reroute_plan.h"
#include "core/row_parts.h"
#include "core/solve_problem.h"
#include "core/transfer_arguments.h"

namespace topoep::cuda {

struct DeviceLimits {
    int num_sms;
    size_t max_shared_bytes;  // per block, with opt-in
};
const char* device_limits(int device, DeviceLimits* limits);

size_t histogram_workspace(int64_t num_ids, int id_bytes, int num_experts,
                           const DeviceLimits& limits);
template <class Id>
const char* histogram(const Id* ids, int64_t num_ids, int num_experts, const DeviceLimits& limits,
                      void* workspace, int32_t* counts, int32_t* invalid, cudaStream_t stream);

size_t solve_workspace(const Shape& shape, int num_candidates, const DeviceLimits& limits);
const char* solve(const SolveProblem& problem, const std::vector<int64_t>& candidates,
                  const DeviceLimits& limits, void* workspace, const PlanView& plan,
                  const ListsArguments& wanted, cudaStream_t stream);

size_t split_workspace(const Shape& shape);
const char* split(const Shape& shape, const TopologyView& topology, const int32_t* counts,
                  const int32_t* slot_expert, const int32_t* slot_tokens,
                  const DeviceLimits& limits, void* workspace, int32_t* split, cudaStream_t stream);

size_t reroute_workspace(int64_t num_ids, int num_experts, const DeviceLimits& limits);
template <class Id>
const char* reroute(const ReroutePlan& plan, const Id* ids, int64_t num_ids,
                    const DeviceLimits& limits, void* workspace, Id* out, cudaStream_t stream);

const char* expand(const void* x, int64_t row_bytes, const int64_t* pair_of_row, int64_t num_rows,
                   int top_k, const DeviceLimits& limits, void* out, cudaStream_t stream);

template <class T>
const char* combine(const T* rows, const int64_t* row_of_pair, const AccumulatorOf<T>* weights,
                    int64_t num_tokens, int top_k, int64_t width, const DeviceLimits& limits, T* y,
                    cudaStream_t stream);
template <class T>
const char* combine_backward(const T* grad_y, const T* rows, const int64_t* pair_of_row,
                             const int64_t* row_of_pair, const AccumulatorOf<T>* weights,
                             int64_t num_tokens, int64_t num_rows, int top_k, int64_t width,
                             const DeviceLimits& limits, T* grad_rows,
                             AccumulatorOf<T>* grad_weights, cudaStream_t stream);

const char* pack_rows(const std::vector<RowPart>& parts, const int64_t* index, int64_t num_rows,
                      int64_t packed_bytes, const DeviceLimits& limits, void* packed,
                      cudaStream_t stream);
const char* unpack_rows(const std::vector<RowPart>& parts, const int64_t* index, int64_t num_rows,
                        int64_t packed_bytes, const DeviceLimits& limits, const void* packed,
                        cudaStream_t stream);

template <class T>
const char* reduce_grads(T* out, const AccumulatorOf<T>* rows, const int64_t* offsets,
                         const int64_t* order, int64_t num_segments, int64_t width,
                         const DeviceLimits& limits, cudaStream_t stream);

}  // namespace topoep::cuda
