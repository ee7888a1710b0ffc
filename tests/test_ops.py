# SPDX-License-Identifier: Apache-2.0
"""The ops behave as torch expects of ops: opcheck, fakes, compile, gradients."""

from __future__ import annotations

import functools

import pytest
import torch

import topoep
from topoep import ops
from topoep.portfolio import default_candidates

TOPOLOGY = topoep.Topology(node_of_rank=[0, 1, 0, 1])


def make_plan() -> topoep.Plan:
    counts = torch.tensor(
        [[90, 3, 5, 1, 2, 8, 0, 4], [70, 1, 9, 9, 1, 1, 1, 1]] * 2, dtype=torch.int32
    )
    return topoep.solve(counts, TOPOLOGY, 2, rank=1)


def make_maps() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 3 tokens x 2, one pair without a row and one row without a pair."""
    return torch.tensor([3, 0, -1, 5, 1, 2]), torch.tensor([[1, 4], [5, 0], [-1, 3]])


def cases() -> dict[str, tuple]:
    plan = make_plan()
    pair_of_row, row_of_pair = make_maps()
    ids = torch.tensor([[0, 2], [0, 7], [-1, 0], [3, 9]])
    rows = torch.randn(6, 5, requires_grad=True)
    weights = torch.rand(3, 2, requires_grad=True)
    packed_candidates = [c.pack() for c in default_candidates(topoep.Balance())[:5]]
    tensors = [torch.randn(4, 3), torch.randn(4, 2, 2).to(torch.bfloat16)]
    index = torch.tensor([2, 0])
    return {
        "histogram": (ids, 8),
        "solve": (
            plan.counts, TOPOLOGY.table(), 2, packed_candidates, topoep.Balance().to_ints(), 2,
        ),
        "split": (plan.counts, TOPOLOGY.table(), plan.slot_expert, plan.slot_tokens),
        "reroute": (ids, plan.send, plan.copy_offsets, plan.copy_slots, 4),
        "expand": (torch.randn(3, 5, requires_grad=True), pair_of_row, row_of_pair),
        "combine": (rows, pair_of_row, row_of_pair, weights),
        "combine_backward": (
            torch.randn(3, 5), rows.detach(), pair_of_row, row_of_pair, weights.detach(),
        ),
        "pack_rows": (tensors, index),
        "unpack_rows_": (tensors, index, ops.pack_rows(tensors, index)),
        "reduce_grads_": (
            torch.randn(2, 5), torch.randn(3, 5), torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1]),
        ),
    }  # fmt: skip


CASES = cases()


def test_every_op_has_a_case():
    registered = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("topoep::")
    }
    # What makes data planes, and doctor's questions, are no ops on data.
    administrative = {name for name in registered if name.startswith(("plane_", "nccl_"))}
    assert registered - administrative - {"build_info"} - ON_CUDA_ONLY == set(CASES)


# They move data between GPUs: tests/gpu runs them.
ON_CUDA_ONLY = {"exchange_counts", "solve_for_plane", "replicate_", "reduce_across_"}


def test_fakes_of_ops_that_need_a_gpu():
    """torch.compile and graph capture see shapes, and that nothing depends on values."""
    meta = functools.partial(torch.empty, device="meta")
    row = meta(8, dtype=torch.int32)
    counts = ops.exchange_counts(row, 1, 4)
    assert (counts.shape, counts.dtype, counts.device.type) == ((4, 8), torch.int32, "meta")
    tables = meta(4, 2, dtype=torch.int32), meta(9, dtype=torch.int32), meta(8, dtype=torch.int32)
    topology = meta(3 * 4 + 3, dtype=torch.int32)
    *plan, lists = ops.solve_for_plane(counts, topology, 2, [0], [0, 0, 3], 1, 77)
    assert (lists.shape, lists.dtype) == ((77,), torch.int32)
    alone = ops.solve(counts, topology, 2, [0], [0, 0, 3], 1)
    assert [(t.shape, t.dtype) for t in plan] == [(t.shape, t.dtype) for t in alone]
    table = meta(1, 2, dtype=torch.int64)
    assert ops.replicate_(*tables, lists, table, [meta(2, 3)], 1) is None
    assert ops.reduce_across_(*tables, lists, table, [meta(2, 3)], [meta(2, 3)], 1) is None
    for name in ON_CUDA_ONLY:
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"topoep::{name}", "CPU")


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.topoep, name).default, CASES[name])


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("_")])
def test_compiled_with_a_full_graph(name):
    op = getattr(torch.ops.topoep, name)
    eager = op(*CASES[name])
    compiled = torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")(*CASES[name])
    as_tuple = lambda value: value if isinstance(value, tuple) else (value,)  # noqa: E731
    for a, b in zip(as_tuple(eager), as_tuple(compiled), strict=True):
        assert torch.equal(a, b)


def test_planning_and_rerouting_compile_into_one_graph():
    topology = TOPOLOGY.table()
    candidates = [c.pack() for c in default_candidates(topoep.Balance())[:5]]
    objective = topoep.Balance().to_ints()

    def step(ids: torch.Tensor) -> torch.Tensor:
        counts, _ = ops.histogram(ids, 8)
        gathered = torch.stack([counts, counts * 2, counts, counts])
        tables = ops.solve(gathered, topology, 2, candidates, objective, 1)
        return ops.reroute(ids, tables[5], tables[3], tables[4], 4)

    ids = torch.randint(0, 4, (40, 2))
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(ids), step(ids))


def test_expand_and_combine_have_right_gradients():
    pair_of_row, row_of_pair = make_maps()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)

    def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = ops.expand(x, pair_of_row, row_of_pair).sin()
        return ops.combine(rows, pair_of_row, row_of_pair, weights)

    assert torch.autograd.gradcheck(layer, (x, weights))


def test_non_contiguous_inputs_give_the_values_of_contiguous_ones():
    ids = torch.randint(0, 8, (20, 6))
    for view in (ids[:, ::2], ids.t()[:3].t(), ids[::3, 1:4]):
        assert not view.is_contiguous()
        for a, b in zip(ops.histogram(view, 8), ops.histogram(view.contiguous(), 8), strict=True):
            assert torch.equal(a, b)
    plan = make_plan()
    arguments = (plan.send, plan.copy_offsets, plan.copy_slots, 4)
    view = ids[:, ::2]
    assert torch.equal(ops.reroute(view, *arguments), ops.reroute(view.contiguous(), *arguments))
    x = torch.randn(5, 3).t()
    pair_of_row, row_of_pair = make_maps()
    assert torch.equal(
        ops.expand(x, pair_of_row, row_of_pair),
        ops.expand(x.contiguous(), pair_of_row, row_of_pair),
    )


@pytest.mark.parametrize("bad", [-2, 6])
def test_indices_out_of_range_are_refused_on_the_cpu(bad):
    pair_of_row, row_of_pair = make_maps()
    broken = pair_of_row.clone()
    broken[1] = bad
    with pytest.raises(RuntimeError, match=rf"pair_of_row\[1\] is {bad}, expected -1 to 5"):
        ops.expand(torch.randn(3, 5), broken, row_of_pair)


def test_output_shapes_depend_on_sizes_only():
    shapes = set()
    for seed in range(5):
        counts = torch.randint(0, 10 ** (seed + 1), (4, 8), dtype=torch.int32)
        plan = topoep.solve(counts, TOPOLOGY, 2, rank=0)
        shapes.add(tuple(tuple(t.shape) for t in vars(plan).values() if torch.is_tensor(t)))
    assert len(shapes) == 1
