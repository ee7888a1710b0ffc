// SPDX-License-Identifier: Apache-2.0
// CUDA implementations of the ops. Loads into a CPU build of torch too, where nothing ever
// dispatches to it.
#include "bindings/calls.h"
#include "bindings/cuda_place.h"
#include "cuda/launchers.h"

namespace topoep::bindings {
namespace {

std::tuple<Tensor, Tensor> histogram(const Tensor& ids, int64_t num_experts) {
    HistogramCall call = prepare_histogram(ids, num_experts);
    const Place place(ids);
    const auto run = [&](auto id) {
        using Id = decltype(id);
        const Tensor workspace =
            new_workspace(ids, cuda::histogram_workspace(call.ids.numel(), sizeof(Id),
                                                         call.num_experts, place.limits));
        check_launch("histogram",
                     cuda::histogram(data<const Id>(call.ids), call.ids.numel(), call.num_experts,
                                     place.limits, workspace.data_ptr(), data<int32_t>(call.counts),
                                     data<int32_t>(call.invalid), place.stream));
    };
    ids.scalar_type() == ScalarType::Int ? run(int32_t{}) : run(int64_t{});
    return {call.counts, call.invalid};
}

SolveCall::Outputs solve(const Tensor& counts, const Tensor& topology, int64_t spare_slots,
                         std::vector<int64_t> candidates, std::vector<int64_t> objective,
                         int64_t rank) {
    SolveCall call = prepare_solve(counts, topology, spare_slots, candidates, objective, rank);
    const Place place(counts);
    const Tensor workspace = new_workspace(
        counts, cuda::solve_workspace(call.problem.shape, static_cast<int>(candidates.size()),
                                      place.limits));
    check_launch("solve", cuda::solve(call.problem, candidates, place.limits, workspace.data_ptr(),
                                      call.plan, {}, place.stream));
    return call.outputs();
}

Tensor split(const Tensor& counts, const Tensor& topology, const Tensor& slot_expert,
             const Tensor& slot_tokens) {
    SplitCall call = prepare_split(counts, topology, slot_expert, slot_tokens);
    const Place place(counts);
    const Tensor workspace = new_workspace(counts, cuda::split_workspace(call.shape));
    check_launch(
        "split",
        cuda::split(call.shape, call.view, data<int32_t>(call.counts),
                    data<int32_t>(call.slot_expert), data<int32_t>(call.slot_tokens), place.limits,
                    workspace.data_ptr(), data<int32_t>(call.split), place.stream));
    return call.split;
}

Tensor reroute(const Tensor& ids, const Tensor& send, const Tensor& copy_offsets,
               const Tensor& copy_slots, int64_t num_ranks) {
    RerouteCall call = prepare_reroute(ids, send, copy_offsets, copy_slots, num_ranks);
    const Place place(ids);
    const Tensor workspace = new_workspace(
        ids, cuda::reroute_workspace(call.ids.numel(), call.plan.num_experts, place.limits));
    const auto run = [&](auto id) {
        using Id = decltype(id);
        check_launch("reroute", cuda::reroute(call.plan, data<const Id>(call.ids), call.ids.numel(),
                                              place.limits, workspace.data_ptr(),
                                              data<Id>(call.out), place.stream));
    };
    ids.scalar_type() == ScalarType::Int ? run(int32_t{}) : run(int64_t{});
    return call.out;
}

Tensor expand(const Tensor& x, const Tensor& pair_of_row, const Tensor& row_of_pair) {
    ExpandCall call = prepare_expand(x, pair_of_row, row_of_pair);
    const Place place(x);
    check_launch(
        "expand",
        cuda::expand(call.x.data_ptr(), call.row_bytes, data<const int64_t>(call.pair_of_row),
                     call.num_rows, call.top_k, place.limits, call.out.data_ptr(), place.stream));
    return call.out;
}

Tensor combine(const Tensor& rows, const Tensor& pair_of_row, const Tensor& row_of_pair,
               const Tensor& weights) {
    const CombineCall call = prepare_combine("combine", rows, pair_of_row, row_of_pair, weights);
    const Place place(rows);
    Tensor y = new_tensor(rows, {call.num_tokens, call.width}, rows.scalar_type());
    with_type(call.dtype, [&](auto value) {
        using T = decltype(value);
        check_launch("combine",
                     cuda::combine(data<const T>(call.rows), data<const int64_t>(call.row_of_pair),
                                   data<const AccumulatorOf<T>>(call.weights), call.num_tokens,
                                   call.top_k, call.width, place.limits, data<T>(y), place.stream));
    });
    return y;
}

std::tuple<Tensor, Tensor> combine_backward(const Tensor& grad_y, const Tensor& rows,
                                            const Tensor& pair_of_row, const Tensor& row_of_pair,
                                            const Tensor& weights) {
    const CombineCall call =
        prepare_combine("combine_backward", rows, pair_of_row, row_of_pair, weights);
    const Tensor grad = checked("combine_backward", "grad_y", grad_y, rows.scalar_type(), 2, rows);
    const Place place(rows);
    Tensor grad_rows = new_tensor(rows, {call.num_rows, call.width}, rows.scalar_type());
    Tensor grad_weights = new_tensor(weights, {call.num_tokens, call.top_k}, weights.scalar_type());
    with_type(call.dtype, [&](auto value) {
        using T = decltype(value);
        using Sum = AccumulatorOf<T>;
        check_launch("combine_backward",
                     cuda::combine_backward(
                         data<const T>(grad), data<const T>(call.rows),
                         data<const int64_t>(call.pair_of_row),
                         data<const int64_t>(call.row_of_pair), data<const Sum>(call.weights),
                         call.num_tokens, call.num_rows, call.top_k, call.width, place.limits,
                         data<T>(grad_rows), data<Sum>(grad_weights), place.stream));
    });
    return {grad_rows, grad_weights};
}

Tensor pack_rows(std::vector<Tensor> tensors, const Tensor& index) {
    const PackCall call = prepare_pack("pack_rows", tensors, index);
    const Place place(tensors[0]);
    Tensor packed = new_tensor(tensors[0], {index.numel(), call.packed_bytes}, ScalarType::Byte);
    check_launch("pack_rows",
                 cuda::pack_rows(call.parts, data<const int64_t>(call.index), index.numel(),
                                 call.packed_bytes, place.limits, packed.data_ptr(), place.stream));
    return packed;
}

void unpack_rows_(std::vector<Tensor> tensors, const Tensor& index, const Tensor& packed) {
    const PackCall call = prepare_pack("unpack_rows_", tensors, index);
    const Tensor bytes = checked_packed(call, packed);
    const Place place(tensors[0]);
    check_launch("unpack_rows_", cuda::unpack_rows(call.parts, data<const int64_t>(call.index),
                                                   index.numel(), call.packed_bytes, place.limits,
                                                   bytes.data_ptr(), place.stream));
}

void reduce_grads_(const Tensor& out, const Tensor& rows, const Tensor& offsets,
                   const Tensor& order) {
    const ReduceCall call = prepare_reduce(out, rows, offsets, order);
    const Place place(out);
    with_type(call.dtype, [&](auto value) {
        using T = decltype(value);
        check_launch(
            "reduce_grads_",
            cuda::reduce_grads(data<T>(call.out), data<const AccumulatorOf<T>>(call.rows),
                               data<const int64_t>(call.offsets), data<const int64_t>(call.order),
                               call.num_segments, call.width, place.limits, place.stream));
    });
}

}  // namespace
}  // namespace topoep::bindings

STABLE_TORCH_LIBRARY_IMPL(topoep, CUDA, library) {
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
