// SPDX-License-Identifier: Apache-2.0
#include "bindings/calls.h"

#include <string>

namespace topoep::bindings {
namespace {

std::string shape_of(const Tensor& tensor) {
    std::string text = "[";
    for (int64_t i = 0; i < tensor.dim(); ++i) {
        text += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
    }
    return text + "]";
}

int checked_int(const char* op, const char* name, int64_t value, int64_t low, int64_t high,
                const char* limit) {
    TOPOEP_CHECK(value >= low && value <= high, op, ": ", name, " is ", value, "; expected ", low,
                 " to ", high, " (", limit, ")");
    return static_cast<int>(value);
}

Shape shape_of_plan(const char* op, const Tensor& counts, const Tensor& topology,
                    int64_t spare_slots) {
    Shape shape;
    shape.num_ranks = checked_int(op, "number of ranks", counts.size(0), 1, kMaxRanks, "kMaxRanks");
    shape.num_experts =
        checked_int(op, "number of experts", counts.size(1), 1, kMaxExperts, "kMaxExperts");
    shape.spare_slots =
        checked_int(op, "spare_slots", spare_slots, 0, kMaxSpareSlots, "kMaxSpareSlots");
    TOPOEP_CHECK(shape.num_experts % shape.num_ranks == 0, op, ": ", shape.num_experts,
                 " experts do not divide over ", shape.num_ranks, " ranks");
    shape.num_nodes = nodes_of_topology_table(topology.numel(), shape.num_ranks);
    TOPOEP_CHECK(shape.num_nodes >= 1 && shape.num_nodes <= shape.num_ranks, op,
                 ": the topology table has ", topology.numel(), " entries, which is not that of ",
                 shape.num_ranks, " ranks; take it from Topology.table()");
    return shape;
}

}  // namespace

Tensor new_tensor(const Tensor& like, std::vector<int64_t> sizes, ScalarType dtype) {
    return torch::stable::new_empty(like, sizes, dtype);
}

bool is_int_id(const Tensor& ids) {
    return ids.scalar_type() == ScalarType::Int || ids.scalar_type() == ScalarType::Long;
}

Tensor checked(const char* op, const char* name, const Tensor& tensor, ScalarType dtype, int dims,
               const Tensor& like) {
    TOPOEP_CHECK(tensor.scalar_type() == dtype, op, ": ", name, " has dtype ",
                 torch::headeronly::toString(tensor.scalar_type()), ", expected ",
                 torch::headeronly::toString(dtype));
    TOPOEP_CHECK(tensor.dim() == dims, op, ": ", name, " has shape ", shape_of(tensor),
                 ", expected ", dims, " dimensions");
    TOPOEP_CHECK(tensor.device() == like.device(), op, ": ", name,
                 " is on another device than the other tensors");
    return torch::stable::contiguous(tensor);
}

DType data_type(const char* op, const char* name, const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case ScalarType::Float:
            return DType::kFloat32;
        case ScalarType::Double:
            return DType::kFloat64;
        case ScalarType::Half:
            return DType::kFloat16;
        case ScalarType::BFloat16:
            return DType::kBFloat16;
        default:
            TOPOEP_CHECK(false, op, ": ", name, " has dtype ",
                         torch::headeronly::toString(tensor.scalar_type()),
                         ", expected float32, float64, float16 or bfloat16");
    }
    return DType::kFloat32;
}

namespace {

ScalarType accumulator_type(DType dtype) {
    return dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float;
}

Tensor checked_ids(const char* op, const Tensor& ids) {
    TOPOEP_CHECK(is_int_id(ids), op, ": ids have dtype ",
                 torch::headeronly::toString(ids.scalar_type()), ", expected int32 or int64");
    TOPOEP_CHECK(ids.dim() == 2, op, ": ids have shape ", shape_of(ids),
                 ", expected [tokens, top_k]");
    checked_int(op, "top_k", ids.size(1), 1, kMaxTopK, "kMaxTopK");
    TOPOEP_CHECK(ids.numel() <= kMaxTokens, op, ": ", ids.numel(), " ids, the limit is ",
                 kMaxTokens, " (kMaxTokens)");
    return torch::stable::contiguous(ids);
}

}  // namespace

HistogramCall prepare_histogram(const Tensor& ids, int64_t num_experts) {
    HistogramCall call;
    call.ids = checked_ids("histogram", ids);
    call.num_experts =
        checked_int("histogram", "num_experts", num_experts, 1, kMaxExperts, "kMaxExperts");
    call.counts = new_tensor(ids, {num_experts}, ScalarType::Int);
    call.invalid = new_tensor(ids, {}, ScalarType::Int);
    return call;
}

void check_topology(const char* op, const Shape& shape, const TopologyView& topology) {
    bool fits =
        topology.node_begin[0] == 0 && topology.node_begin[shape.num_nodes] == shape.num_ranks;
    for (int n = 0; fits && n < shape.num_nodes; ++n) {
        fits = topology.node_begin[n] < topology.node_begin[n + 1];
        for (int p = topology.node_begin[n]; fits && p < topology.node_begin[n + 1]; ++p) {
            const int rank = topology.rank_at[p];
            fits = rank >= 0 && rank < shape.num_ranks && topology.position_of[rank] == p &&
                   topology.node_at[p] == n;
        }
    }
    TOPOEP_CHECK(fits, op, ": the topology table is not one of ", shape.num_ranks, " ranks on ",
                 shape.num_nodes, " nodes; take it from Topology.table()");
}

namespace {

// [kind, tolerance_ppm, cross_weight], and for kTime the fields of CostModel behind them.
Objective checked_objective(const std::vector<int64_t>& numbers) {
    TOPOEP_CHECK(numbers.size() >= 3, "solve: objective has ", numbers.size(),
                 " numbers, expected at least 3");
    Objective objective{};
    objective.kind = checked_int("solve", "objective kind", numbers[0], kBalance, kTime,
                                 "see Balance, Even, Time");
    objective.tolerance_ppm = numbers[1];
    objective.cross_weight = numbers[2];
    checked_int("solve", "tolerance_ppm", numbers[1], 0, kMaxPartsPerMillion, "1000 x the mean");
    checked_int("solve", "cross_weight", numbers[2], 1, 1024, "copies inside a node");
    const size_t expected = objective.kind == kTime ? 3 + kCostModelFields : 3;
    TOPOEP_CHECK(numbers.size() == expected, "solve: objective has ", numbers.size(),
                 " numbers, expected ", expected);
    if (objective.kind == kTime) {
        for (size_t i = 3; i < numbers.size(); ++i) {
            TOPOEP_CHECK(numbers[i] >= 0 && numbers[i] <= kMaxCost, "solve: objective[", i, "] is ",
                         numbers[i], "; expected 0 to ", kMaxCost, " (kMaxCost)");
        }
        const int64_t* cost = numbers.data() + 3;
        objective.cost = {cost[0], cost[1], cost[2], cost[3], cost[4],  cost[5],
                          cost[6], cost[7], cost[8], cost[9], cost[10], cost[11]};
        TOPOEP_CHECK(objective.cost.interference <= kMaxInterference, "solve: interference is ",
                     objective.cost.interference, "; expected 0 to ", kMaxInterference,
                     " (kMaxInterference)");
    }
    return objective;
}

}  // namespace

SolveCall prepare_solve(const Tensor& counts, const Tensor& topology, int64_t spare_slots,
                        const std::vector<int64_t>& candidates,
                        const std::vector<int64_t>& objective, int64_t rank) {
    SolveCall call;
    call.counts = checked("solve", "counts", counts, ScalarType::Int, 2, counts);
    call.topology = checked("solve", "topology", topology, ScalarType::Int, 1, counts);
    const Shape shape = shape_of_plan("solve", counts, topology, spare_slots);
    checked_int("solve", "rank", rank, -1, shape.num_ranks - 1, "-1 for none");
    TOPOEP_CHECK(!candidates.empty() && unpack_candidate(candidates[0]).rule == kNoCopies,
                 "solve: candidate 0 must be the empty plan");
    checked_int("solve", "number of candidates", static_cast<int64_t>(candidates.size()), 1,
                kMaxCandidates, "kMaxCandidates");
    for (const int64_t packed : candidates) {
        TOPOEP_CHECK(is_valid_candidate(packed), "solve: ", packed,
                     " is not a packed candidate; take it from Candidate.pack()");
    }
    call.problem.objective = checked_objective(objective);

    const int64_t ranks = shape.num_ranks;
    const int64_t width = shape.slots_per_rank();
    call.slot_expert = new_tensor(counts, {ranks, spare_slots}, ScalarType::Int);
    call.slot_source = new_tensor(counts, {ranks, spare_slots}, ScalarType::Int);
    call.slot_tokens = new_tensor(counts, {ranks, spare_slots}, ScalarType::Int);
    call.copy_offsets = new_tensor(counts, {shape.num_experts + 1}, ScalarType::Int);
    call.copy_slots = new_tensor(counts, {ranks * spare_slots}, ScalarType::Int);
    call.send = new_tensor(counts, {rank < 0 ? 0 : ranks * width}, ScalarType::Int);
    call.recv = new_tensor(counts, {rank < 0 ? 0 : ranks, width}, ScalarType::Int);
    call.stats = new_tensor(counts, {kNumStats}, ScalarType::Long);

    call.problem.shape = shape;
    call.problem.topology = view_topology_table(data<int32_t>(call.topology), shape.num_ranks);
    call.problem.counts = data<int32_t>(call.counts);
    call.plan = {data<int32_t>(call.slot_expert), data<int32_t>(call.slot_source),
                 data<int32_t>(call.slot_tokens), data<int32_t>(call.copy_offsets),
                 data<int32_t>(call.copy_slots),  data<int32_t>(call.send),
                 data<int32_t>(call.recv),        data<int64_t>(call.stats),
                 static_cast<int>(rank)};
    return call;
}

SplitCall prepare_split(const Tensor& counts, const Tensor& topology, const Tensor& slot_expert,
                        const Tensor& slot_tokens) {
    SplitCall call;
    call.counts = checked("split", "counts", counts, ScalarType::Int, 2, counts);
    call.topology = checked("split", "topology", topology, ScalarType::Int, 1, counts);
    call.slot_expert = checked("split", "slot_expert", slot_expert, ScalarType::Int, 2, counts);
    call.slot_tokens = checked("split", "slot_tokens", slot_tokens, ScalarType::Int, 2, counts);
    call.shape = shape_of_plan("split", counts, topology, slot_expert.size(1));
    TOPOEP_CHECK(slot_expert.size(0) == counts.size(0) && slot_tokens.size(0) == counts.size(0) &&
                     slot_tokens.size(1) == slot_expert.size(1),
                 "split: slot_expert ", shape_of(slot_expert), " and slot_tokens ",
                 shape_of(slot_tokens), " must be [ranks, spare_slots]");
    call.view = view_topology_table(data<int32_t>(call.topology), call.shape.num_ranks);
    const std::vector<int64_t> sizes{counts.size(0), call.shape.num_physical()};
    call.split = torch::stable::new_zeros(counts, sizes, ScalarType::Int);
    return call;
}

RerouteCall prepare_reroute(const Tensor& ids, const Tensor& send, const Tensor& copy_offsets,
                            const Tensor& copy_slots, int64_t num_ranks) {
    RerouteCall call;
    call.ids = checked_ids("reroute", ids);
    call.send = checked("reroute", "send", send, ScalarType::Int, 1, ids);
    call.copy_offsets = checked("reroute", "copy_offsets", copy_offsets, ScalarType::Int, 1, ids);
    call.copy_slots = checked("reroute", "copy_slots", copy_slots, ScalarType::Int, 1, ids);
    const int64_t num_experts = copy_offsets.numel() - 1;
    TOPOEP_CHECK(num_ranks >= 1 && num_experts >= num_ranks && num_experts % num_ranks == 0 &&
                     send.numel() == num_experts + copy_slots.numel(),
                 "reroute: send has ", send.numel(), " entries, copy_offsets ",
                 copy_offsets.numel(), ", copy_slots ", copy_slots.numel(), ", ranks ", num_ranks,
                 "; they do not belong to one plan (was it solved for a rank?)");
    call.plan = {static_cast<int>(num_ranks),      static_cast<int>(num_experts),
                 static_cast<int>(send.numel()),   data<int32_t>(call.send),
                 data<int32_t>(call.copy_offsets), data<int32_t>(call.copy_slots)};
    call.out = new_tensor(ids, {ids.size(0), ids.size(1)}, ids.scalar_type());
    return call;
}

ExpandCall prepare_expand(const Tensor& x, const Tensor& pair_of_row, const Tensor& row_of_pair) {
    ExpandCall call;
    TOPOEP_CHECK(x.dim() == 2, "expand: x has shape ", shape_of(x), ", expected [tokens, width]");
    call.x = torch::stable::contiguous(x);
    call.pair_of_row = checked("expand", "pair_of_row", pair_of_row, ScalarType::Long, 1, x);
    checked("expand", "row_of_pair", row_of_pair, ScalarType::Long, 2, x);
    TOPOEP_CHECK(row_of_pair.size(0) == x.size(0), "expand: row_of_pair has ", row_of_pair.size(0),
                 " tokens, x has ", x.size(0));
    call.top_k = checked_int("expand", "top_k", row_of_pair.size(1), 1, kMaxTopK, "kMaxTopK");
    call.row_bytes = x.size(1) * static_cast<int64_t>(x.element_size());
    call.num_rows = pair_of_row.numel();
    call.out = new_tensor(x, {call.num_rows, x.size(1)}, x.scalar_type());
    return call;
}

CombineCall prepare_combine(const char* op, const Tensor& rows, const Tensor& pair_of_row,
                            const Tensor& row_of_pair, const Tensor& weights) {
    CombineCall call;
    call.dtype = data_type(op, "rows", rows);
    call.rows = checked(op, "rows", rows, rows.scalar_type(), 2, rows);
    call.pair_of_row = checked(op, "pair_of_row", pair_of_row, ScalarType::Long, 1, rows);
    call.row_of_pair = checked(op, "row_of_pair", row_of_pair, ScalarType::Long, 2, rows);
    call.weights = checked(op, "weights", weights, accumulator_type(call.dtype), 2, rows);
    TOPOEP_CHECK(pair_of_row.numel() == rows.size(0), op, ": pair_of_row has ", pair_of_row.numel(),
                 " entries for ", rows.size(0), " rows");
    TOPOEP_CHECK(weights.size(0) == row_of_pair.size(0) && weights.size(1) == row_of_pair.size(1),
                 op, ": weights ", shape_of(weights), " and row_of_pair ", shape_of(row_of_pair),
                 " must have the same shape [tokens, top_k]");
    call.num_tokens = row_of_pair.size(0);
    call.top_k = checked_int(op, "top_k", row_of_pair.size(1), 1, kMaxTopK, "kMaxTopK");
    call.num_rows = rows.size(0);
    call.width = rows.size(1);
    return call;
}

PackCall prepare_pack(const char* op, const std::vector<Tensor>& tensors, const Tensor& index) {
    PackCall call;
    checked_int(op, "number of tensors", static_cast<int64_t>(tensors.size()), 1, kMaxRowParts,
                "kMaxRowParts");
    call.index = checked(op, "index", index, ScalarType::Long, 1, tensors[0]);
    int64_t offset = 0;
    for (const Tensor& tensor : tensors) {
        TOPOEP_CHECK(tensor.dim() >= 1 && tensor.is_contiguous(), op, ": a tensor of shape ",
                     shape_of(tensor),
                     " is not contiguous with experts in dimension 0; call .contiguous() first");
        TOPOEP_CHECK(tensor.device() == tensors[0].device(), op,
                     ": the tensors are on different devices");
        const int64_t row_bytes =
            tensor.size(0) == 0
                ? 0
                : tensor.numel() / tensor.size(0) * static_cast<int64_t>(tensor.element_size());
        call.parts.push_back({data<unsigned char>(tensor), row_bytes, offset});
        offset += padded_row_bytes(row_bytes);
    }
    call.tensors = tensors;
    call.packed_bytes = offset;
    return call;
}

Tensor checked_packed(const PackCall& call, const Tensor& packed) {
    TOPOEP_CHECK(packed.dim() == 2 && packed.size(0) == call.index.numel() &&
                     packed.size(1) == call.packed_bytes,
                 "unpack_rows_: packed has shape ", shape_of(packed), ", expected [",
                 call.index.numel(), ", ", call.packed_bytes, "]");
    return checked("unpack_rows_", "packed", packed, ScalarType::Byte, 2, call.tensors[0]);
}

ReduceCall prepare_reduce(const Tensor& out, const Tensor& rows, const Tensor& offsets,
                          const Tensor& order) {
    ReduceCall call;
    call.dtype = data_type("reduce_grads_", "out", out);
    TOPOEP_CHECK(out.dim() == 2 && out.is_contiguous(),
                 "reduce_grads_: out must be a contiguous [experts, elements] tensor, got ",
                 shape_of(out));
    call.out = out;
    call.rows = checked("reduce_grads_", "rows", rows, accumulator_type(call.dtype), 2, out);
    call.offsets = checked("reduce_grads_", "offsets", offsets, ScalarType::Long, 1, out);
    call.order = checked("reduce_grads_", "order", order, ScalarType::Long, 1, out);
    TOPOEP_CHECK(rows.size(1) == out.size(1) && offsets.numel() == out.size(0) + 1,
                 "reduce_grads_: out ", shape_of(out), ", rows ", shape_of(rows), " and offsets ",
                 shape_of(offsets), " do not fit together");
    call.num_segments = out.size(0);
    call.width = out.size(1);
    return call;
}

}  // namespace topoep::bindings
