// SPDX-License-Identifier: Apache-2.0
// What the CPU and CUDA implementations of an op have in common: input checks, output allocation
// and the torch-free argument structs. Everything here works through libtorch's stable ABI, so that
// one build of the library serves every torch from 2.11 on.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "core/finalize.h"
#include "core/limits.h"
#include "core/numeric.h"
#include "core/reroute_plan.h"
#include "core/row_parts.h"
#include "core/solve_problem.h"

namespace topoep::bindings {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor new_tensor(const Tensor& like, std::vector<int64_t> sizes, ScalarType dtype);
bool is_int_id(const Tensor& ids);  // int32 or int64

// Checks that a tensor has this dtype, this many dimensions and the device of `like`, and returns
// it contiguous.
Tensor checked(const char* op, const char* name, const Tensor& tensor, ScalarType dtype, int dims,
               const Tensor& like);

struct HistogramCall {
    Tensor ids;
    int num_experts;
    Tensor counts;   // int32 [E]
    Tensor invalid;  // int32 []
};
HistogramCall prepare_histogram(const Tensor& ids, int64_t num_experts);

struct SolveCall {
    Tensor counts, topology;
    Tensor slot_expert, slot_source, slot_tokens, copy_offsets, copy_slots, send, recv, stats;
    SolveProblem problem;
    PlanView plan;

    using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
    Outputs outputs() const {
        return {slot_expert, slot_source, slot_tokens, copy_offsets, copy_slots, send, recv, stats};
    }
};
// objective = [kind, tolerance in parts per million, weight of a copy between nodes].
// Reads the table, so only for the CPU: ranks, positions and nodes are those of a topology.
void check_topology(const char* op, const Shape& shape, const TopologyView& topology);

SolveCall prepare_solve(const Tensor& counts, const Tensor& topology, int64_t spare_slots,
                        const std::vector<int64_t>& candidates,
                        const std::vector<int64_t>& objective, int64_t rank);

struct SplitCall {
    Tensor counts, topology, slot_expert, slot_tokens;
    Shape shape;
    TopologyView view;
    Tensor split;  // int32 [R, P]
};
SplitCall prepare_split(const Tensor& counts, const Tensor& topology, const Tensor& slot_expert,
                        const Tensor& slot_tokens);

struct RerouteCall {
    Tensor ids, send, copy_offsets, copy_slots;
    ReroutePlan plan;
    Tensor out;  // like ids
};
RerouteCall prepare_reroute(const Tensor& ids, const Tensor& send, const Tensor& copy_offsets,
                            const Tensor& copy_slots, int64_t num_ranks);

struct ExpandCall {
    Tensor x, pair_of_row;
    int64_t row_bytes, num_rows;
    int top_k;
    Tensor out;  // [T * K, D]
};
ExpandCall prepare_expand(const Tensor& x, const Tensor& pair_of_row, const Tensor& row_of_pair);

// combine and its backward.
struct CombineCall {
    Tensor rows, pair_of_row, row_of_pair, weights;
    DType dtype;
    int64_t num_tokens, num_rows, width;
    int top_k;
};
CombineCall prepare_combine(const char* op, const Tensor& rows, const Tensor& pair_of_row,
                            const Tensor& row_of_pair, const Tensor& weights);

struct PackCall {
    std::vector<Tensor> tensors;
    Tensor index;
    std::vector<RowPart> parts;
    int64_t packed_bytes;  // of one row
};
PackCall prepare_pack(const char* op, const std::vector<Tensor>& tensors, const Tensor& index);
// The packed rows that unpack_rows_ reads, checked against the call.
Tensor checked_packed(const PackCall& call, const Tensor& packed);

struct ReduceCall {
    Tensor out, rows, offsets, order;
    DType dtype;
    int64_t num_segments, width;
};
ReduceCall prepare_reduce(const Tensor& out, const Tensor& rows, const Tensor& offsets,
                          const Tensor& order);

DType data_type(const char* op, const char* name, const Tensor& tensor);

// Calls f with a value of the C++ type behind the dtype.
template <class F>
void with_type(DType dtype, F&& f) {
    switch (dtype) {
        case DType::kFloat32:
            return f(float{});
        case DType::kFloat64:
            return f(double{});
        case DType::kFloat16:
            return f(Float16{});
        case DType::kBFloat16:
            return f(BFloat16{});
    }
}

// The data of a tensor whose dtype prepare_*() has checked; typed access of the stable ABI does not
// know the 16-bit types of core/numeric.h.
template <class T>
T* data(const Tensor& tensor) {
    return static_cast<T*>(tensor.data_ptr());
}

}  // namespace topoep::bindings
