// SPDX-License-Identifier: Apache-2.0
// CPU implementations of the ops.
#include "bindings/calls.h"

#include <algorithm>

#include "cpu/histogram.h"
#include "cpu/reroute.h"
#include "cpu/rows.h"
#include "cpu/solve.h"

namespace topoep::bindings {
namespace {

// Indices from outside must not reach memory unchecked; on the CPU looking costs next to nothing.
template <class T>
void check_values(const char* op, const char* name, const Tensor& tensor, int64_t low,
                  int64_t high) {
    const T* values = data<const T>(tensor);
    for (int64_t i = 0; i < tensor.numel(); ++i) {
        TOPOEP_CHECK(values[i] >= low && values[i] < high, op, ": ", name, "[", i, "] is ",
                     values[i], ", expected ", low, " to ", high - 1);
    }
}

std::tuple<Tensor, Tensor> histogram(const Tensor& ids, int64_t num_experts) {
    HistogramCall call = prepare_histogram(ids, num_experts);
    const auto run = [&](auto id) {
        using Id = decltype(id);
        histogram_cpu(data<const Id>(call.ids), call.ids.numel(), call.num_experts,
                      data<int32_t>(call.counts), data<int32_t>(call.invalid));
    };
    ids.scalar_type() == ScalarType::Int ? run(int32_t{}) : run(int64_t{});
    return {call.counts, call.invalid};
}

SolveCall::Outputs solve(const Tensor& counts, const Tensor& topology, int64_t spare_slots,
                         std::vector<int64_t> candidates, std::vector<int64_t> objective,
                         int64_t rank) {
    SolveCall call = prepare_solve(counts, topology, spare_slots, candidates, objective, rank);
    check_topology("solve", call.problem.shape, call.problem.topology);
    // A candidate takes tens of microseconds, about what it costs to wake a thread.
    constexpr int64_t kCandidatesPerThread = 8;
    solve_cpu(call.problem, candidates, call.plan, [](int64_t count, const auto& body) {
        torch::stable::parallel_for(0, count, kCandidatesPerThread, body);
    });
    return call.outputs();
}

Tensor split(const Tensor& counts, const Tensor& topology, const Tensor& slot_expert,
             const Tensor& slot_tokens) {
    SplitCall call = prepare_split(counts, topology, slot_expert, slot_tokens);
    check_topology("split", call.shape, call.view);
    check_values<int32_t>("split", "slot_expert", call.slot_expert, -1, call.shape.num_experts);
    check_values<int32_t>("split", "slot_tokens", call.slot_tokens, 0, kMaxTokens + 1);
    split_cpu(call.shape, call.view, data<int32_t>(call.counts), data<int32_t>(call.slot_expert),
              data<int32_t>(call.slot_tokens), data<int32_t>(call.split));
    return call.split;
}

Tensor reroute(const Tensor& ids, const Tensor& send, const Tensor& copy_offsets,
               const Tensor& copy_slots, int64_t num_ranks) {
    RerouteCall call = prepare_reroute(ids, send, copy_offsets, copy_slots, num_ranks);
    check_values<int32_t>("reroute", "copy_slots", call.copy_slots, -1, send.numel());
    const int32_t* slots = call.plan.copy_slots;
    const int64_t num_copies = std::find(slots, slots + copy_slots.numel(), -1) - slots;
    check_values<int32_t>("reroute", "copy_offsets", call.copy_offsets, 0, num_copies + 1);
    const auto run = [&](auto id) {
        using Id = decltype(id);
        reroute_cpu(call.plan, data<const Id>(call.ids), call.ids.numel(), data<Id>(call.out));
    };
    ids.scalar_type() == ScalarType::Int ? run(int32_t{}) : run(int64_t{});
    return call.out;
}

Tensor expand(const Tensor& x, const Tensor& pair_of_row, const Tensor& row_of_pair) {
    ExpandCall call = prepare_expand(x, pair_of_row, row_of_pair);
    check_values<int64_t>("expand", "pair_of_row", call.pair_of_row, -1, row_of_pair.numel());
    expand_cpu(call.x.data_ptr(), call.row_bytes, data<const int64_t>(call.pair_of_row),
               call.num_rows, call.top_k, call.out.data_ptr());
    return call.out;
}

CombineCall checked_combine(const char* op, const Tensor& rows, const Tensor& pair_of_row,
                            const Tensor& row_of_pair, const Tensor& weights) {
    CombineCall call = prepare_combine(op, rows, pair_of_row, row_of_pair, weights);
    check_values<int64_t>(op, "pair_of_row", call.pair_of_row, -1, row_of_pair.numel());
    check_values<int64_t>(op, "row_of_pair", call.row_of_pair, -1, call.num_rows);
    return call;
}

Tensor combine(const Tensor& rows, const Tensor& pair_of_row, const Tensor& row_of_pair,
               const Tensor& weights) {
    CombineCall call = checked_combine("combine", rows, pair_of_row, row_of_pair, weights);
    Tensor y = new_tensor(rows, {call.num_tokens, call.width}, rows.scalar_type());
    with_type(call.dtype, [&](auto value) {
        using T = decltype(value);
        combine_cpu(data<const T>(call.rows), data<const int64_t>(call.row_of_pair),
                    data<const AccumulatorOf<T>>(call.weights), call.num_tokens, call.top_k,
                    call.width, data<T>(y));
    });
    return y;
}

std::tuple<Tensor, Tensor> combine_backward(const Tensor& grad_y, const Tensor& rows,
                                            const Tensor& pair_of_row, const Tensor& row_of_pair,
                                            const Tensor& weights) {
    CombineCall call = checked_combine("combine_backward", rows, pair_of_row, row_of_pair, weights);
    const Tensor grad = checked("combine_backward", "grad_y", grad_y, rows.scalar_type(), 2, rows);
    Tensor grad_rows = new_tensor(rows, {call.num_rows, call.width}, rows.scalar_type());
    Tensor grad_weights = new_tensor(weights, {call.num_tokens, call.top_k}, weights.scalar_type());
    with_type(call.dtype, [&](auto value) {
        using T = decltype(value);
        using Sum = AccumulatorOf<T>;
        combine_backward_cpu(
            data<const T>(grad), data<const T>(call.rows), data<const int64_t>(call.pair_of_row),
            data<const int64_t>(call.row_of_pair), data<const Sum>(call.weights), call.num_tokens,
            call.num_rows, call.top_k, call.width, data<T>(grad_rows), data<Sum>(grad_weights));
    });
    return {grad_rows, grad_weights};
}

void check_pack_index(const char* op, const PackCall& call) {
    for (const Tensor& tensor : call.tensors) {
        check_values<int64_t>(op, "index", call.index, 0, tensor.size(0));
    }
}

Tensor pack_rows(std::vector<Tensor> tensors, const Tensor& index) {
    const PackCall call = prepare_pack("pack_rows", tensors, index);
    check_pack_index("pack_rows", call);
    Tensor packed = new_tensor(tensors[0], {index.numel(), call.packed_bytes}, ScalarType::Byte);
    pack_rows_cpu(call.parts, data<const int64_t>(call.index), index.numel(), packed.data_ptr());
    return packed;
}

void unpack_rows_(std::vector<Tensor> tensors, const Tensor& index, const Tensor& packed) {
    const PackCall call = prepare_pack("unpack_rows_", tensors, index);
    check_pack_index("unpack_rows_", call);
    const Tensor bytes = checked_packed(call, packed);
    unpack_rows_cpu(call.parts, data<const int64_t>(call.index), index.numel(), bytes.data_ptr());
}

void reduce_grads_(const Tensor& out, const Tensor& rows, const Tensor& offsets,
                   const Tensor& order) {
    const ReduceCall call = prepare_reduce(out, rows, offsets, order);
    check_values<int64_t>("reduce_grads_", "offsets", call.offsets, 0, order.numel() + 1);
    check_values<int64_t>("reduce_grads_", "order", call.order, 0, rows.size(0));
    with_type(call.dtype, [&](auto value) {
        using T = decltype(value);
        reduce_grads_cpu(data<T>(call.out), data<const AccumulatorOf<T>>(call.rows),
                         data<const int64_t>(call.offsets), data<const int64_t>(call.order),
                         call.num_segments, call.width);
    });
}

}  // namespace
}  // namespace topoep::bindings

STABLE_TORCH_LIBRARY_IMPL(topoep, CPU, library) {
    using namespace topoep::bindings;
    library.impl("histogram", TORCH_BOX(&histogram));
    library.impl("solve", TORCH_BOX(&solve));
    library.impl("split", TORCH_BOX(&split));
    library.impl("reroute", TORCH_BOX(&reroute));
    library.impl("expand", TORCH_BOX(&expand));
    library.impl("combine", TORCH_BOX(&combine));
    library.impl("combine_backward", TORCH_BOX(&combine_backward));
    library.impl("pack_rows", TORCH_BOX(&pack_rows));
    library.impl("unpack_rows_", TORCH_BOX(&unpack_rows_));
    library.impl("reduce_grads_", TORCH_BOX(&reduce_grads_));
}
