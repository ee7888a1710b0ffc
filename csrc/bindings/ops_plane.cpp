// SPDX-License-Identifier: Apache-2.0
// Ops that enqueue the kernels of a data plane, and those that make one over memory that a single
// GPU can address (simulated ranks). ops_nccl.cpp makes them over NCCL.
#include <string>
#include <tuple>

#include "bindings/cuda_place.h"
#include "bindings/planes.h"

namespace topoep::bindings {
namespace {

PlanCopies copies_of(const DataPlaneConfig& config, const Tensor& slot_expert,
                     const Tensor& copy_offsets, const Tensor& copy_slots) {
    const auto check = [](const char* name, const Tensor& tensor, int64_t expected) {
        TOPOEP_CHECK(tensor.scalar_type() == ScalarType::Int && tensor.is_contiguous() &&
                         tensor.numel() == expected,
                     name, " does not belong to a plan for this data plane; expected contiguous ",
                     "int32 with ", expected, " elements");
    };
    check("slot_expert", slot_expert, config.num_spare());
    check("copy_offsets", copy_offsets, config.num_experts + 1);
    check("copy_slots", copy_slots, config.num_spare());
    return {data<const int32_t>(slot_expert), data<const int32_t>(copy_offsets),
            data<const int32_t>(copy_slots)};
}

StreamLists lists_of(const DataPlaneConfig& config, const Tensor& lists) {
    TOPOEP_CHECK(
        lists.scalar_type() == ScalarType::Int && lists.numel() == stream_lists_size(config),
        "lists has ", lists.numel(), " elements; take it from solve_for_plane()");
    return view_stream_lists(data<int32_t>(lists), config);
}

// Checks a table of addresses, int64 [T, G].
void check_table(const char* name, const Tensor& table, size_t num_tensors, int local_ranks) {
    TOPOEP_CHECK(table.scalar_type() == ScalarType::Long && table.is_contiguous() &&
                     table.numel() == static_cast<int64_t>(num_tensors) * local_ranks,
                 name, " is not an int64 table of ", num_tensors, " x ", local_ranks, " addresses");
}

// Checks contiguous [rows, ...] tensors and returns the elements of a row of each.
std::vector<int64_t> checked_rows(const char* name, const std::vector<Tensor>& tensors, int rows) {
    TOPOEP_CHECK(!tensors.empty() && tensors.size() <= kMaxRowParts, name, " has ", tensors.size(),
                 " tensors; expected 1 to ", kMaxRowParts, " (kMaxRowParts)");
    std::vector<int64_t> units;
    for (const Tensor& tensor : tensors) {
        TOPOEP_CHECK(tensor.dim() >= 1 && tensor.size(0) == rows && tensor.is_contiguous(), name,
                     " holds a tensor that is not contiguous with ", rows, " rows");
        units.push_back(tensor.numel() / rows);
    }
    return units;
}

Tensor exchange_counts(const Tensor& row, int64_t plane_number, int64_t num_ranks) {
    const Plane& plane = plane_at(plane_number);
    const DataPlaneConfig& config = plane.shared.config;
    TOPOEP_CHECK(num_ranks == config.num_ranks, "exchange_counts: the data plane has ",
                 config.num_ranks, " ranks, not ", num_ranks);
    const Tensor counts = checked("exchange_counts", "row", row, ScalarType::Int, 1, row);
    TOPOEP_CHECK(counts.numel() == config.num_experts, "exchange_counts: row has ", counts.numel(),
                 " counts; expected ", config.num_experts);
    const Place place(counts);
    Tensor all = new_tensor(counts, {config.num_ranks, config.num_experts}, ScalarType::Int);
    check_launch("exchange_counts",
                 plane.exchange({plane.shared, data<const int32_t>(counts), data<int32_t>(all)},
                                place.stream));
    return all;
}

// The outputs of solve for the plane's rank, and what the plane's kernels need of the plan.
using PlanAndLists =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

PlanAndLists solve_for_plane(const Tensor& counts, const Tensor& topology, int64_t spare_slots,
                             std::vector<int64_t> candidates, std::vector<int64_t> objective,
                             int64_t plane_number, int64_t size) {
    const DataPlaneConfig& config = plane_at(plane_number).shared.config;
    SolveCall call =
        prepare_solve(counts, topology, spare_slots, candidates, objective, config.rank);
    const Shape& shape = call.problem.shape;
    TOPOEP_CHECK(shape.num_ranks == config.num_ranks && shape.num_nodes == config.num_nodes &&
                     shape.num_experts == config.num_experts &&
                     shape.spare_slots == config.spare_slots,
                 "solve_for_plane: a plan for ", shape.num_ranks, " ranks on ", shape.num_nodes,
                 " nodes, ", shape.num_experts, " experts and ", shape.spare_slots,
                 " spare slots does not fit a data plane for ", config.num_ranks, ", ",
                 config.num_nodes, ", ", config.num_experts, " and ", config.spare_slots);
    TOPOEP_CHECK(size == stream_lists_size(config), "solve_for_plane: size is ", size,
                 "; expected ", stream_lists_size(config));
    const Place place(counts);
    Tensor lists = new_tensor(counts, {size}, ScalarType::Int);
    const Tensor workspace = new_workspace(
        counts, cuda::solve_workspace(shape, static_cast<int>(candidates.size()), place.limits));
    check_launch(
        "solve_for_plane",
        cuda::solve(call.problem, candidates, place.limits, workspace.data_ptr(), call.plan,
                    {config, view_stream_lists(data<int32_t>(lists), config)}, place.stream));
    return std::tuple_cat(call.outputs(), std::make_tuple(lists));
}

void replicate_(const Tensor& slot_expert, const Tensor& copy_offsets, const Tensor& copy_slots,
                const Tensor& lists, const Tensor& home, std::vector<Tensor> spare,
                int64_t plane_number) {
    const Plane& plane = plane_at(plane_number);
    const DataPlaneConfig& config = plane.shared.config;
    std::vector<int64_t> units = checked_rows("replicate_: spare", spare, config.spare_slots);
    check_table("replicate_: home", home, spare.size(), config.ranks_per_node);
    ReplicateArguments arguments{plane.shared,
                                 copies_of(config, slot_expert, copy_offsets, copy_slots),
                                 lists_of(config, lists),
                                 {},
                                 data<const unsigned char* const>(home),
                                 {}};
    for (size_t t = 0; t < spare.size(); ++t) {
        units[t] *= spare[t].element_size();
        arguments.spare[t] = data<unsigned char>(spare[t]);
    }
    arguments.layout =
        make_expert_layout(static_cast<int>(spare.size()), units.data(), kByteAlignment);
    const Place place(slot_expert);
    check_launch("replicate_", plane.replicate(arguments, place.stream));
}

DType grad_type(const char* name, const std::vector<Tensor>& tensors) {
    const ScalarType type = tensors[0].scalar_type();
    TOPOEP_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, name,
                 ": gradients must be float32 or bfloat16");
    for (const Tensor& tensor : tensors) {
        TOPOEP_CHECK(tensor.scalar_type() == type, name, ": all tensors must have one dtype");
    }
    return type == ScalarType::Float ? DType::kFloat32 : DType::kBFloat16;
}

void reduce_across_(const Tensor& slot_expert, const Tensor& copy_offsets, const Tensor& copy_slots,
                    const Tensor& lists, const Tensor& slot_table, std::vector<Tensor> slot_grads,
                    std::vector<Tensor> home_grads, int64_t plane_number) {
    const Plane& plane = plane_at(plane_number);
    const DataPlaneConfig& config = plane.shared.config;
    const std::vector<int64_t> units =
        checked_rows("reduce_across_: slot_grads", slot_grads, config.spare_slots);
    TOPOEP_CHECK(
        checked_rows("reduce_across_: home_grads", home_grads, config.experts_per_rank()) == units,
        "reduce_across_: slot_grads and home_grads belong to experts of different shapes");
    check_table("reduce_across_: slot_table", slot_table, slot_grads.size(), config.ranks_per_node);
    ReduceArguments arguments{
        plane.shared,
        copies_of(config, slot_expert, copy_offsets, copy_slots),
        lists_of(config, lists),
        make_expert_layout(static_cast<int>(units.size()), units.data(), kElementAlignment),
        data<void* const>(slot_table),
        {},
        grad_type("reduce_across_: slot_grads", slot_grads),
        grad_type("reduce_across_: home_grads", home_grads)};
    for (size_t t = 0; t < home_grads.size(); ++t) {
        arguments.home_grads[t] = home_grads[t].data_ptr();
    }
    const Place place(slot_expert);
    check_launch("reduce_across_", plane.reduce(arguments, place.stream));
}

// Sizes that a plane of this config needs: bytes of window, state and error record, signals, and
// entries of the stream lists.
std::vector<int64_t> plane_sizes(std::vector<int64_t> numbers) {
    const DataPlaneConfig config = checked_plane_config(numbers);
    const WindowLayout window = make_window_layout(config);
    return {window.bytes, state_bytes(config), static_cast<int64_t>(sizeof(ErrorRecord)),
            window.num_signals, stream_lists_size(config)};
}

int64_t plane_over_memory(const Tensor& topology, const Tensor& windows, const Tensor& state,
                          const Tensor& error, const Tensor& all_windows, const Tensor& all_signals,
                          std::vector<int64_t> config_numbers, std::vector<int64_t> roles,
                          int64_t timeout) {
    const DataPlaneConfig config = checked_plane_config(config_numbers);
    PeerView network{};
    network.rank = config.rank;
    if (config.num_nodes > 1) {  // otherwise nothing crosses a network
        TOPOEP_CHECK(
            all_windows.numel() == config.num_ranks && all_signals.numel() == config.num_ranks,
            "expected the addresses of ", config.num_ranks, " windows and signals");
        network.windows = data<unsigned char* const>(all_windows);
        network.signals = data<unsigned long long* const>(all_signals);
    }
    auto plane = std::make_unique<PlaneOver<PeerView>>(network);
    fill_plane(*plane, config, {topology, windows, state, error, timeout}, roles);
    plane->kept.push_back(all_windows);
    plane->kept.push_back(all_signals);
    return add_plane(std::move(plane));
}

void plane_close(int64_t number) {
    remove_plane(number);
}

}  // namespace
}  // namespace topoep::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(topoep, library) {
    library.def("plane_sizes(int[] config) -> int[]");
    library.def(
        "plane_over_memory(Tensor topology, Tensor windows, Tensor state, Tensor error, "
        "Tensor all_windows, Tensor all_signals, int[] config, int[] roles, int timeout) -> int");
    library.def("plane_close(int plane) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(topoep, CompositeExplicitAutograd, library) {
    using namespace topoep::bindings;
    library.impl("plane_sizes", TORCH_BOX(&plane_sizes));
    library.impl("plane_over_memory", TORCH_BOX(&plane_over_memory));
    library.impl("plane_close", TORCH_BOX(&plane_close));
}

STABLE_TORCH_LIBRARY_IMPL(topoep, CUDA, library) {
    using namespace topoep::bindings;
    library.impl("exchange_counts", TORCH_BOX(&exchange_counts));
    library.impl("solve_for_plane", TORCH_BOX(&solve_for_plane));
    library.impl("replicate_", TORCH_BOX(&replicate_));
    library.impl("reduce_across_", TORCH_BOX(&reduce_across_));
}
