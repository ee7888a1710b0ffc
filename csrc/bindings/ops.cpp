// SPDX-License-Identifier: Apache-2.0
// Schemas of all ops, and what the library knows about its own build. The implementations are in
// ops_cpu.cpp and ops_cuda.cpp; fakes and gradients are in topoep/ops.py.
#include <torch/csrc/stable/library.h>

#include <string>

#include "build_info.h"  // written by the build: TOPOEP_BUILD_INFO

namespace topoep::bindings {
namespace {

// JSON; read by `python -m topoep doctor`.
std::string build_info() {
    return TOPOEP_BUILD_INFO;
}

}  // namespace
}  // namespace topoep::bindings

STABLE_TORCH_LIBRARY(topoep, library) {
    library.def("histogram(Tensor ids, int num_experts) -> (Tensor counts, Tensor invalid)");
    library.def(
        "solve(Tensor counts, Tensor topology, int spare_slots, int[] candidates, "
        "int[] objective, int rank) -> (Tensor slot_expert, Tensor slot_source, "
        "Tensor slot_tokens, Tensor copy_offsets, Tensor copy_slots, Tensor send, Tensor recv, "
        "Tensor stats)");
    library.def(
        "split(Tensor counts, Tensor topology, Tensor slot_expert, Tensor slot_tokens) -> Tensor");
    library.def(
        "reroute(Tensor ids, Tensor send, Tensor copy_offsets, Tensor copy_slots, "
        "int num_ranks) -> Tensor");
    library.def("expand(Tensor x, Tensor pair_of_row, Tensor row_of_pair) -> Tensor");
    library.def(
        "combine(Tensor rows, Tensor pair_of_row, Tensor row_of_pair, Tensor weights) -> Tensor");
    library.def(
        "combine_backward(Tensor grad_y, Tensor rows, Tensor pair_of_row, Tensor row_of_pair, "
        "Tensor weights) -> (Tensor grad_rows, Tensor grad_weights)");
    library.def("pack_rows(Tensor[] tensors, Tensor index) -> Tensor");
    library.def("unpack_rows_(Tensor(a!)[] tensors, Tensor index, Tensor packed) -> ()");
    library.def("reduce_grads_(Tensor(a!) out, Tensor rows, Tensor offsets, Tensor order) -> ()");
    // Kernels of a data plane (bindings/planes.h), on CUDA only.
    library.def("exchange_counts(Tensor row, int plane, int num_ranks) -> Tensor");
    library.def(
        "solve_for_plane(Tensor counts, Tensor topology, int spare_slots, int[] candidates, "
        "int[] objective, int plane, int size) -> (Tensor slot_expert, Tensor slot_source, "
        "Tensor slot_tokens, Tensor copy_offsets, Tensor copy_slots, Tensor send, Tensor recv, "
        "Tensor stats, Tensor lists)");
    library.def(
        "replicate_(Tensor slot_expert, Tensor copy_offsets, Tensor copy_slots, Tensor lists, "
        "Tensor home, Tensor(a!)[] spare, int plane) -> ()");
    library.def(
        "reduce_across_(Tensor slot_expert, Tensor copy_offsets, Tensor copy_slots, Tensor lists, "
        "Tensor slot_table, Tensor(a!)[] slot_grads, Tensor(b!)[] home_grads, int plane) -> ()");
    library.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(topoep, CompositeExplicitAutograd, library) {
    library.impl("build_info", TORCH_BOX(&topoep::bindings::build_info));
}
