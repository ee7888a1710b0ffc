// SPDX-License-Identifier: Apache-2.0
// Entry points through which the tests launch the product's kernels under the emulation. Each does
// what the launcher of its stage in csrc/cuda/*.cu does, with the number of SMs as an argument.
// Whole numbers are long long, as Emulator.call passes them.
#include <algorithm>
#include <cstring>

#include "cuda/combine.cuh"
#include "cuda/expand.cuh"
#include "cuda/histogram.cuh"
#include "cuda/pack.cuh"
#include "cuda/reduce_grads.cuh"
#include "cuda/reroute.cuh"
#include "cuda/solve.cuh"
#include "cuda/split.cuh"

using namespace topoep;
using Int = long long;

namespace {

Shape make_shape(Int ranks, Int nodes, Int experts, Int spare) {
    return {static_cast<int>(ranks), static_cast<int>(nodes), static_cast<int>(experts),
            static_cast<int>(spare)};
}

template <class F>
const char* with_id(Int id_bytes, F&& f) {
    return id_bytes == 4 ? f(int32_t{}) : f(int64_t{});
}

// The dtype by its place in DType.
template <class F>
const char* with_type(Int dtype, F&& f) {
    switch (static_cast<DType>(dtype)) {
        case DType::kFloat32:
            return f(float{});
        case DType::kFloat64:
            return f(double{});
        case DType::kFloat16:
            return f(Float16{});
        case DType::kBFloat16:
            return f(BFloat16{});
    }
    return "no such dtype";
}

// As much of a data plane's config as its lists depend on.
DataPlaneConfig lists_config(const Shape& shape, const TopologyView& topology, int rank) {
    DataPlaneConfig config{};
    config.num_ranks = shape.num_ranks;
    config.num_nodes = shape.num_nodes;
    config.ranks_per_node = shape.num_ranks / shape.num_nodes;
    config.num_experts = shape.num_experts;
    config.spare_slots = shape.spare_slots;
    config.rank = rank;
    const Place place = place_of(topology, rank);
    config.node = place.node;
    config.local = place.local;
    return config;
}

RowParts make_parts(Int count, const int64_t* pointers, const int64_t* row_bytes,
                    int64_t* packed_bytes) {
    RowParts parts{};
    parts.count = static_cast<int>(count);
    *packed_bytes = 0;
    for (int i = 0; i < parts.count; ++i) {
        parts.parts[i] = {reinterpret_cast<unsigned char*>(pointers[i]), row_bytes[i],
                          *packed_bytes};
        *packed_bytes += padded_row_bytes(row_bytes[i]);
    }
    return parts;
}

}  // namespace

extern "C" {

Int histogram_workspace(Int num_ids, Int id_bytes, Int experts, Int sms) {
    return histogram_shape(num_ids, static_cast<int>(id_bytes), static_cast<int>(experts),
                           static_cast<int>(sms))
        .workspace_bytes;
}

const char* run_histogram(const void* ids, Int num_ids, Int id_bytes, Int experts, Int sms,
                          void* workspace, int32_t* counts, int32_t* invalid) {
    const HistogramShape shape = histogram_shape(num_ids, static_cast<int>(id_bytes),
                                                 static_cast<int>(experts), static_cast<int>(sms));
    return with_id(id_bytes, [&](auto id) {
        return launch_histogram(static_cast<const decltype(id)*>(ids), num_ids,
                                static_cast<int>(experts), shape, workspace, counts, invalid,
                                nullptr);
    });
}

Int solve_workspace(Int ranks, Int nodes, Int experts, Int spare, Int candidates, Int sms,
                    Int max_shared) {
    return solve_shape(make_shape(ranks, nodes, experts, spare), static_cast<int>(candidates),
                       static_cast<int>(sms), max_shared)
        .workspace_bytes;
}

const char* run_solve(const int32_t* counts, const int32_t* table, Int ranks, Int nodes,
                      Int experts, Int spare, const int64_t* candidates, Int num_candidates,
                      const int64_t* objective, Int rank, Int sms, Int max_shared, void* workspace,
                      int32_t* slot_expert, int32_t* slot_source, int32_t* slot_tokens,
                      int32_t* copy_offsets, int32_t* copy_slots, int32_t* send, int32_t* recv,
                      int64_t* stats, int32_t* lists) {
    SolveProblem problem{};
    problem.shape = make_shape(ranks, nodes, experts, spare);
    problem.topology = view_topology_table(table, static_cast<int>(ranks));
    problem.counts = counts;
    problem.objective = {static_cast<int>(objective[0]), objective[1], objective[2], {}};
    if (problem.objective.kind == kTime) {
        static_assert(sizeof(CostModel) == kCostModelFields * sizeof(int64_t), "only int64 fields");
        std::memcpy(&problem.objective.cost, objective + 3, sizeof(CostModel));
    }
    CandidateList list{};
    list.count = static_cast<int>(num_candidates);
    std::copy(candidates, candidates + num_candidates, list.packed);
    const PlanView plan{slot_expert, slot_source, slot_tokens, copy_offsets,          copy_slots,
                        send,        recv,        stats,       static_cast<int>(rank)};
    const SolveShape shape =
        solve_shape(problem.shape, list.count, static_cast<int>(sms), max_shared);
    ListsArguments wanted{};
    if (lists != nullptr) {
        wanted.config = lists_config(problem.shape, problem.topology, static_cast<int>(rank));
        wanted.lists = view_stream_lists(lists, wanted.config);
    }
    return launch_solve(problem, list, shape, workspace, plan, wanted, nullptr);
}

Int lists_size(Int ranks, Int nodes, Int experts, Int spare) {
    DataPlaneConfig config{};
    config.num_ranks = static_cast<int>(ranks);
    config.num_nodes = static_cast<int>(nodes);
    config.num_experts = static_cast<int>(experts);
    config.spare_slots = static_cast<int>(spare);
    return stream_lists_size(config);
}

Int split_workspace(Int ranks, Int nodes, Int experts, Int spare) {
    return split_workspace_bytes(make_shape(ranks, nodes, experts, spare));
}

const char* run_split(const int32_t* counts, const int32_t* table, Int ranks, Int nodes,
                      Int experts, Int spare, const int32_t* slot_expert,
                      const int32_t* slot_tokens, Int sms, void* workspace, int32_t* split) {
    return launch_split(make_shape(ranks, nodes, experts, spare),
                        view_topology_table(table, static_cast<int>(ranks)), counts, slot_expert,
                        slot_tokens, static_cast<int>(sms), workspace, split, nullptr);
}

Int reroute_workspace(Int num_ids, Int experts, Int sms) {
    return reroute_shape(num_ids, static_cast<int>(experts), static_cast<int>(sms)).workspace_bytes;
}

const char* run_reroute(const void* ids, Int num_ids, Int id_bytes, const int32_t* send,
                        Int num_physical, const int32_t* copy_offsets, Int experts,
                        const int32_t* copy_slots, Int ranks, Int sms, void* workspace, void* out) {
    const ReroutePlan plan{static_cast<int>(ranks),
                           static_cast<int>(experts),
                           static_cast<int>(num_physical),
                           send,
                           copy_offsets,
                           copy_slots};
    const RerouteShape shape =
        reroute_shape(num_ids, static_cast<int>(experts), static_cast<int>(sms));
    return with_id(id_bytes, [&](auto id) {
        using Id = decltype(id);
        return launch_reroute(plan, static_cast<const Id*>(ids), num_ids, shape, workspace,
                              static_cast<Id*>(out), nullptr);
    });
}

const char* run_expand(const void* x, Int row_bytes, const int64_t* pair_of_row, Int num_rows,
                       Int top_k, Int sms, void* out) {
    return launch_expand(x, row_bytes, pair_of_row, num_rows, static_cast<int>(top_k),
                         static_cast<int>(sms), out, nullptr);
}

const char* run_combine(Int dtype, const void* rows, const int64_t* row_of_pair,
                        const void* weights, Int num_tokens, Int top_k, Int width, Int sms,
                        void* y) {
    return with_type(dtype, [&](auto value) {
        using T = decltype(value);
        return launch_combine(static_cast<const T*>(rows), row_of_pair,
                              static_cast<const AccumulatorOf<T>*>(weights), num_tokens,
                              static_cast<int>(top_k), width, static_cast<int>(sms),
                              static_cast<T*>(y), nullptr);
    });
}

const char* run_combine_backward(Int dtype, const void* grad_y, const void* rows,
                                 const int64_t* pair_of_row, const int64_t* row_of_pair,
                                 const void* weights, Int num_tokens, Int num_rows, Int top_k,
                                 Int width, Int sms, void* grad_rows, void* grad_weights) {
    return with_type(dtype, [&](auto value) {
        using T = decltype(value);
        using Sum = AccumulatorOf<T>;
        return launch_combine_backward(static_cast<const T*>(grad_y), static_cast<const T*>(rows),
                                       pair_of_row, row_of_pair, static_cast<const Sum*>(weights),
                                       num_tokens, num_rows, static_cast<int>(top_k), width,
                                       static_cast<int>(sms), static_cast<T*>(grad_rows),
                                       static_cast<Sum*>(grad_weights), nullptr);
    });
}

const char* run_pack(Int count, const int64_t* pointers, const int64_t* row_bytes,
                     const int64_t* index, Int num_rows, Int sms, void* packed) {
    int64_t packed_bytes = 0;
    const RowParts parts = make_parts(count, pointers, row_bytes, &packed_bytes);
    return launch_pack<PackDirection::kPack>(parts, index, num_rows, packed_bytes,
                                             static_cast<int>(sms), packed, nullptr);
}

const char* run_unpack(Int count, const int64_t* pointers, const int64_t* row_bytes,
                       const int64_t* index, Int num_rows, Int sms, void* packed) {
    int64_t packed_bytes = 0;
    const RowParts parts = make_parts(count, pointers, row_bytes, &packed_bytes);
    return launch_pack<PackDirection::kUnpack>(parts, index, num_rows, packed_bytes,
                                               static_cast<int>(sms), packed, nullptr);
}

const char* run_reduce_grads(Int dtype, void* out, const void* rows, const int64_t* offsets,
                             const int64_t* order, Int num_segments, Int width, Int sms) {
    return with_type(dtype, [&](auto value) {
        using T = decltype(value);
        return launch_reduce_grads(static_cast<T*>(out), static_cast<const AccumulatorOf<T>*>(rows),
                                   offsets, order, num_segments, width, static_cast<int>(sms),
                                   nullptr);
    });
}
}
