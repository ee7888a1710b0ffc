# SPDX-License-Identifier: Apache-2.0
"""Transport nccl over a data plane on the CPU: everything but the kernels and NCCL itself."""

from __future__ import annotations

import logging
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import topoep
from tests.distributed.fake_plane import FakeConnector
from tests.distributed.ranks import run_ranks
from tests.distributed.test_experts import Setup, build_layers, one_step_of_two_layers, problems_of
from tests.distributed.test_transports import (
    EXPERTS,
    SPARE,
    check_guests,
    expected_sums,
    hot_counts,
    random_grads,
    rank_weights,
)
from topoep.transports import C10dTransport, nccl, plane

ROOT = Path(__file__).resolve().parents[2]
NODES = [0, 0, 1, 1]


def use(connector: FakeConnector) -> FakeConnector:
    """From now on this process connects with this."""
    topoep.transports.NcclConnector = lambda: connector
    return connector


def balancer_over_fake(nodes=NODES, **options):
    connector = use(FakeConnector())
    balancer = topoep.Balancer(
        topoep.Topology(node_of_rank=nodes), EXPERTS, SPARE, group=dist.group.WORLD, **options
    )
    assert balancer.transport.name == "nccl"
    return balancer, connector.planes[0]


# ---- weights and gradients -----------------------------------------------------------------------


def layers_over_fake(rank: int, setup: Setup) -> bytes:
    use(FakeConnector())
    return one_step_of_two_layers(rank, setup)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"chunks": 2, "buffers": 2},
        {"nodes": [0] * 4, "policy": "keep"},
        {"nodes": [0, 1, 0, 1]},
        {"nodes": [1, 0, 0, 1], "chunks": 2},
    ],
    ids=str,
)
def test_layers_give_the_bits_of_transport_c10d(change):
    setup = Setup(NODES, 8, [24, 9, 0, 30], layers=2, microbatches=2, dtype=torch.float32)
    setup = replace(setup, **change)
    expected = run_ranks(4, one_step_of_two_layers, setup)
    assert run_ranks(4, layers_over_fake, setup) == expected


def move_every_dtype(rank: int, shared: bool) -> list[str]:
    balancer, fake = balancer_over_fake()
    weights = rank_weights(rank)
    if shared:
        balancer.share_weights(weights)
    for seed in range(2):
        plan = balancer.plan_from_counts(hot_counts(seed))
        with torch.no_grad():
            check_guests(plan, rank, balancer.replicate(weights, plan))
            for slot in balancer.replicate(weights, plan):
                slot.zero_()
        balancer._pools.clear()
    return fake.calls


def test_weights_of_every_dtype_shared_and_staged():
    for calls in run_ranks(4, move_every_dtype, True):
        assert calls.count("replicate") == 4
        assert [c for c in calls if c.startswith("window")] == ["window 1024"]
        assert calls.count("exchange") == 0
    for calls in run_ranks(4, move_every_dtype, False):
        assert [c for c in calls if c.startswith("window")] == ["window 1024"]
        # Nobody may overwrite what peers still read, nor read what is not there yet.
        at = [i for i, call in enumerate(calls) if call == "replicate"]
        assert [calls[i - 2 : i] for i in at] == [["exchange", "exchange"]] * 4


def share_and_move(rank: int) -> None:
    balancer, fake = balancer_over_fake()
    parameter = torch.nn.Parameter(torch.randn(3, 5))
    before, identity = parameter.detach().clone(), id(parameter)
    balancer.share_weights([parameter])
    assert id(parameter) == identity
    assert parameter.is_leaf
    assert torch.equal(parameter.detach(), before)
    balancer.share_weights([parameter])
    assert sum(call.startswith("window") for call in fake.calls) == 1
    plan = balancer.plan_from_counts(hot_counts(0))
    with torch.no_grad():
        balancer.replicate((parameter,), plan)
        assert fake.calls.count("exchange") == 0
        parameter.data = parameter.data.clone()  # as module.to() does
        balancer.replicate((parameter,), plan)
        assert fake.calls.count("exchange") == 2
        parameter.data += 1
        balancer.share_weights([parameter])
        balancer.replicate((parameter,), plan)
    assert fake.calls.count("exchange") == 2
    assert torch.equal(parameter.detach(), before + 1)


def test_shared_weights_keep_identity_and_a_move_is_noticed():
    run_ranks(4, share_and_move)


def flat_parameters(rank: int, setup: Setup) -> None:
    """What a wrapper keeps in one flat buffer stays there, and is copied for each transfer."""
    connector = use(FakeConnector())
    (layer,) = build_layers(setup, rank, dist.group.WORLD)
    flat = torch.cat([p.detach().flatten() for p in layer.parameters()])
    start = 0
    for parameter in layer.parameters():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    addresses = [p.data_ptr() for p in layer.parameters()]
    (problem,) = problems_of(setup, rank)
    layer(problem.x, problem.ids, problem.weights).sum().backward()
    assert [p.data_ptr() for p in layer.parameters()] == addresses
    calls = connector.planes[0].calls
    at = calls.index("replicate")
    assert calls[at - 2 : at] == ["exchange", "exchange"]


def test_parameters_in_a_flat_buffer_are_left_there():
    run_ranks(4, flat_parameters, Setup(NODES, 8, [20] * 4, dtype=torch.float32))


def replaced_parameter(rank: int, setup: Setup) -> None:
    connector = use(FakeConnector())
    (layer,) = build_layers(setup, rank, dist.group.WORLD)
    (problem,) = problems_of(setup, rank)
    arguments = problem.x, problem.ids, problem.weights
    before = layer(*arguments).detach()
    layer.down_proj.data = layer.down_proj.data.clone()
    assert torch.equal(layer(*arguments).detach(), before)
    calls = connector.planes[0].calls
    assert calls.count("exchange") == 2, "the counts of two plans, and nothing was staged"
    assert sum(call.startswith("window") for call in calls) == 2


def test_a_parameter_that_was_replaced_is_shared_again():
    run_ranks(4, replaced_parameter, Setup(NODES, 8, [20] * 4, dtype=torch.float32))


def share_other_shapes(rank: int) -> str:
    balancer, _ = balancer_over_fake()
    try:
        balancer.share_weights([torch.randn(3, 5 if rank == 2 else 4)])
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_share_different_tensors_are_told():
    for text in run_ranks(4, share_other_shapes):
        assert "ranks 0 and 2 move different tensors" in text


def reduce_over_fake(rank: int, dtype: torch.dtype):
    balancer, fake = balancer_over_fake()
    for seed in range(2):
        plan = balancer.plan_from_counts(hot_counts(seed))
        slots, homes = random_grads(seed, dtype)
        balancer.reduce_grads(slots[rank], plan, out=homes[rank])
        assert not any(grad.any() for grad in slots[rank]), "slots are zeroed"
    assert sum(call.startswith("window") for call in fake.calls) == 1
    return homes[rank]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_summed_in_the_promised_order(dtype):
    plan = topoep.solve(hot_counts(1), topoep.Topology(node_of_rank=NODES), SPARE)
    slots, homes = random_grads(1, dtype)
    expected = expected_sums(plan, NODES, slots, homes)
    for got, wanted in zip(run_ranks(4, reduce_over_fake, dtype), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def reduce_mixed(rank: int) -> list[str]:
    balancer, fake = balancer_over_fake()
    plan = balancer.plan_from_counts(hot_counts(0))
    grads = tuple(torch.ones(SPARE, 3, dtype=d) for d in (torch.bfloat16, torch.float32))
    homes = tuple(torch.zeros(3, 3, dtype=torch.float32) for _ in range(2))
    balancer.reduce_grads(grads, plan, out=homes)
    copies = [int((plan.slot_expert == e).sum()) for e in range(3 * rank, 3 * rank + 3)]
    for home in homes:
        assert home[:, 0].tolist() == copies
    double = [t.double() for t in grads], [t.double() for t in homes]
    with pytest.raises(TypeError, match=r"does not take float64.*transport='c10d'"):
        balancer.reduce_grads(double[0], plan, out=double[1])
    return fake.calls


def test_tensors_of_different_dtypes_are_reduced_apart():
    for calls in run_ranks(4, reduce_mixed):
        assert calls.count("reduce") == 2


def rows_of_other_ranks(rank: int) -> None:
    balancer, _ = balancer_over_fake()
    plan = balancer.plan_from_counts(hot_counts(0))
    assert torch.equal(plan.lists, plan.slot_expert + 1000)
    assert plan.for_rank(1 - rank % 2).lists is plan.lists, "they are this process's"
    with pytest.raises(RuntimeError, match="not made by the solve of this transport"):
        plane.lists_of(topoep.solve(hot_counts(0), topoep.Topology(node_of_rank=NODES), SPARE))


def test_transfer_lists_come_with_the_plan():
    run_ranks(4, rows_of_other_ranks)


def steady_steps(rank: int) -> list[str]:
    connector = use(FakeConnector())
    setup = Setup(NODES, 8, [24, 9, 0, 30], layers=2, dtype=torch.float32)
    layers = build_layers(setup, rank, dist.group.WORLD)
    (problem,) = problems_of(setup, rank)
    set_up: list[tuple] = []
    original = nccl.NcclTransport._set_up
    nccl.NcclTransport._set_up = lambda *a: (set_up.append(a), original(*a))
    for step in range(3):
        if step == 1:
            assert set_up != []
            connector.planes[0].calls.clear()
            set_up.clear()
        y = problem.x
        for layer in layers:
            y = y + layer(y, problem.ids, problem.weights)
        y.backward(problem.grad_y)
    assert set_up == []
    return connector.planes[0].calls


def test_steps_after_the_first_make_no_memory_and_always_call_alike():
    for calls in run_ranks(4, steady_steps):
        half = len(calls) // 2
        assert calls[:half] == calls[half:]
        assert {"exchange", "solve", "replicate", "reduce"} == set(calls)
        assert calls.count("exchange") == 4, "weights of BalancedExperts are shared, not staged"


def counts_by_all_gather(rank: int) -> list[str]:
    connector = use(FakeConnector())
    balancer = topoep.Balancer(
        topoep.Topology(node_of_rank=NODES), 8, 1, group=dist.group.WORLD, transport="nccl"
    )
    plan = balancer.plan(torch.full((5, 2), rank))
    assert plan.counts.sum(0).tolist() == [10, 10, 10, 10, 0, 0, 0, 0]
    return connector.planes[0].calls


def test_counts_may_be_gathered_by_torch_distributed(monkeypatch):
    assert all("exchange" in calls for calls in run_ranks(4, counts_by_all_gather))
    monkeypatch.setenv("TOPOEP_COUNTS_EXCHANGE", "all_gather")
    assert not any("exchange" in calls for calls in run_ranks(4, counts_by_all_gather))
    monkeypatch.setenv("TOPOEP_COUNTS_EXCHANGE", "pigeon")
    with pytest.raises(AssertionError, match="'pigeon'; expected one of kernel, all_gather"):
        run_ranks(4, counts_by_all_gather)


def tensors_elsewhere(rank: int) -> str:
    balancer, fake = balancer_over_fake()
    fake.device = torch.device("cuda", rank)
    with pytest.raises(ValueError, match=r"topk_ids are on cpu.*use transport='c10d'") as error:
        balancer.plan(torch.zeros(3, 2, dtype=torch.int64))
    return str(error.value)


def test_cpu_tensors_are_refused():
    assert "works on cuda:1" in run_ranks(4, tensors_elsewhere)[1]


# ---- errors of kernels ---------------------------------------------------------------------------


def record(waited: int, kernel: int, source: int = 5, what: int = 7) -> bytes:
    return struct.pack("=6I3Q", waited, kernel, 2, 11, source, what, 9, 4, 17)


def give_up(rank: int, call: str) -> tuple[list[str], list[str]]:
    balancer, fake = balancer_over_fake()
    plan = balancer.plan_from_counts(hot_counts(0))
    fake.record = record(4, 1)
    ids = torch.zeros(4, 2, dtype=torch.int64)
    calls = {
        "plan": lambda: balancer.plan(ids),
        "replicate": lambda: balancer.replicate(rank_weights(rank), plan),
        "reduce": lambda: balancer.reduce_grads(
            (torch.zeros(SPARE, 3),), plan, out=(torch.zeros(3, 3),)
        ),
        "share": lambda: balancer.share_weights([torch.zeros(3, 3)]),
    }
    texts = []
    fake.calls.clear()
    for name in (call, *calls):  # once given up, every later call says the same
        with pytest.raises(RuntimeError) as error:
            calls[name]()
        texts.append(str(error.value))
        fake.record = bytes(48)
    assert not {"exchange", "replicate", "reduce"} & set(fake.calls)
    balancer.close()
    balancer.close()
    with pytest.raises(RuntimeError, match="the balancer was closed"):
        balancer.plan(ids)
    return texts, fake.calls


@pytest.mark.parametrize("call", ["plan", "replicate", "reduce", "share"])
def test_a_wait_that_gave_up_ends_in_an_error_on_the_next_call(call, monkeypatch):
    monkeypatch.setenv("TOPOEP_TIMEOUT_S", "2.5")
    for texts, calls in run_ranks(4, give_up, call):
        assert len(set(texts)) == 1
        assert re.match(
            r"rank 2 gave up in replicate, without progress within TOPOEP_TIMEOUT_S=2\.5: it "
            r"waited for rank 5: a chunk over the network \(ring slot 7, wanted 9, seen 4, launch "
            r"17, block 11\)\. .* make a new Balancer$",
            texts[0],
        )
        assert [c for c in calls if c.startswith("close")] == ["close True"]


def test_every_reason_of_the_kernels_has_words():
    header = (ROOT / "csrc/core/data_plane.h").read_text()

    def enumerators(name: str) -> list[str]:
        body = re.search(rf"enum class {name}[^{{]*{{(.*?)}};", header, re.DOTALL)[1]
        return re.findall(r"\b(k\w+)", re.sub(r"//[^\n]*", "", body))

    assert len(plane._WAITS) == len(enumerators("Waited"))
    assert len(plane._KERNELS) == len(enumerators("Kernel")) - 1  # without kNumKernels
    assert plane.describe_error(bytes(48), 60) is None
    fields = re.search(r"struct ErrorRecord {(.*?)};", header, re.DOTALL)[1]
    assert re.findall(r"uint(\d+)_t \w+;", fields) == ["32"] * 6 + ["64"] * 3
    texts = [plane.describe_error(record(w, 0), 60) for w in range(1, len(plane._WAITS))]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("text", ["", "soon", "0", "-3", "nan", "inf", "1e9"])
def test_timeouts_that_are_none_are_refused(monkeypatch, text):
    monkeypatch.setenv("TOPOEP_TIMEOUT_S", text)
    with pytest.raises(ValueError, match=re.escape(f"TOPOEP_TIMEOUT_S={text!r}; expected")):
        plane.timeout_from_environment()


def test_timeouts(monkeypatch):
    assert plane.timeout_from_environment() == 60
    monkeypatch.setenv("TOPOEP_TIMEOUT_S", "0.5")
    assert plane.timeout_from_environment() == 0.5


# ---- choosing ------------------------------------------------------------------------------------


def choose(rank: int, name: str, before: str, while_connecting: str, odd_rank: int) -> tuple:
    """The transport taken, what the log says, and the error."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, line: logging.LogRecord) -> None:
            lines.append(line.getMessage())

    logger = logging.getLogger("topoep")
    logger.setLevel(logging.INFO)
    logger.addHandler(Keep())
    odd = rank == odd_rank
    use(FakeConnector(before if odd else "", while_connecting if odd else ""))
    try:
        balancer = topoep.Balancer(
            topoep.Topology(node_of_rank=NODES), 8, 1, group=dist.group.WORLD, transport=name
        )
    except Exception as error:
        return "", lines, f"{type(error).__name__}: {error}"
    return balancer.transport.name, lines, ""


def test_auto_takes_nccl_where_it_can():
    for name, lines, _ in run_ranks(4, choose, "auto", "", "", 0):
        assert name == "nccl"
        assert lines == ["transport 'auto' takes 'nccl'"]


@pytest.mark.parametrize("when", ["before", "while_connecting"])
def test_one_rank_that_cannot_is_reason_enough_and_is_named_in_one_line(when):
    reasons = ("no NIC", "") if when == "before" else ("", "no NIC")
    results = run_ranks(4, choose, "auto", *reasons, 2)
    assert [name for name, _, _ in results] == ["c10d"] * 4
    assert [lines for _, lines, _ in results] == [
        ["transport 'auto' takes 'c10d' (gloo) and not 'nccl': rank 2: no NIC"],
        [],
        [],
        [],
    ]
    for _, _, error in run_ranks(4, choose, "nccl", *reasons, 2):
        assert error == "RuntimeError: transport='nccl' cannot be used: rank 2: no NIC"


def balancers_that_cannot_be_made(rank: int) -> list[str]:
    connector = use(FakeConnector())
    with pytest.raises(ValueError, match="disagree on num_experts"):
        topoep.Balancer(
            topoep.Topology(node_of_rank=NODES), 8 if rank else 12, group=dist.group.WORLD
        )
    return connector.planes[0].calls


def test_a_balancer_that_cannot_be_made_leaves_no_communicator_behind():
    assert run_ranks(4, balancers_that_cannot_be_made) == [["close False"]] * 4


def test_a_choice_of_communicator_that_does_not_exist_is_refused_before_connecting(monkeypatch):
    monkeypatch.setattr(nccl, "local_problem", lambda topology: "")
    monkeypatch.setenv("TOPOEP_NCCL_COMM", "theirs")
    problem = nccl.NcclConnector().problem(
        topoep.Topology(node_of_rank=NODES), Backends("cuda:nccl")
    )
    assert problem == "TOPOEP_NCCL_COMM='theirs'; expected own or group"


def test_which_communicator(monkeypatch):
    assert not nccl._use_comm_of_group()
    monkeypatch.setenv("TOPOEP_NCCL_COMM", "group")
    assert nccl._use_comm_of_group()
    monkeypatch.setenv("TOPOEP_NCCL_COMM", "theirs")
    with pytest.raises(RuntimeError, match="'theirs'; expected own or group"):
        nccl._use_comm_of_group()


class Backends:
    """What NcclConnector sees of a group."""

    def __init__(self, config: str) -> None:
        self.backend = config
        self.backends = dict(pair.split(":") for pair in config.split(","))
        self.moves_cuda = C10dTransport.moves_cuda.fget(self)


@pytest.mark.parametrize(
    ("config", "fits"),
    [("cpu:gloo,cuda:nccl", True), ("cuda:nccl", True), ("cpu:gloo,cuda:gloo", False)],
)
def test_groups_without_nccl_are_refused(monkeypatch, config, fits):
    monkeypatch.setattr(nccl, "local_problem", lambda topology: "")
    topology = topoep.Topology(node_of_rank=NODES)
    problem = nccl.NcclConnector().problem(topology, Backends(config))
    expected = f"the backend of the group is '{config}'; CUDA tensors need nccl"
    assert problem == ("" if fits else expected)


def backends_of_group(rank: int) -> dict[str, str]:
    return C10dTransport(topoep.Topology(node_of_rank=[0]), dist.group.WORLD).backends


def test_backends_of_a_real_group():
    (backends,) = run_ranks(1, backends_of_group)
    assert backends["cpu"] == "gloo"


def ask_for_different(rank: int) -> str:
    return choose(rank, ["auto", "auto", "c10d", "auto"][rank], "", "", 0)[2]


def test_ranks_that_ask_for_different_transports_are_told():
    for error in run_ranks(4, ask_for_different):
        assert error == (
            "ValueError: ranks 0 and 2 of the group ask for transport='auto' and 'c10d'; "
            "give every rank the same"
        )


def choose_for_real(rank: int, name: str) -> tuple:
    try:
        balancer = topoep.Balancer(
            topoep.Topology(num_nodes=1, ranks_per_node=2),
            4,
            group=dist.group.WORLD,
            transport=name,
            comm_sms=1 if rank == 1 and name == "auto" else 24,
        )
    except Exception as error:
        return "", str(error)
    return balancer.transport.name, ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_this_machine_says_why_it_has_no_transport_nccl():
    for name, error in run_ranks(2, choose_for_real, "nccl"):
        assert name == ""
        assert re.match(
            "transport='nccl' cannot be used: (topoep was built without|torch finds no GPU)", error
        )


def test_a_setting_that_does_not_fit_is_told_to_all_ranks():
    told, own = (error for _, error in run_ranks(2, choose_for_real, "auto"))
    assert own.startswith("comm_sms=1; expected at least 2: one block that watches")
    assert told == f"{own} (on rank 1 of the group)"


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([0, 0, 1, 1], ""),
        ([0], ""),
        ([0, 1, 1], r"different numbers of ranks \(1 to 2\)"),
        ([0, 1, 0, 1], ""),
    ],
)
def test_topologies_that_the_kernels_cannot_serve(nodes, message):
    problem = nccl.topology_problem(topoep.Topology(node_of_rank=nodes))
    assert re.search(message, problem)
    assert bool(problem) == bool(message)


def test_blocks_are_divided_by_role():
    settings = plane.PlaneSettings()
    assert settings.roles(1) == [0, 23, 512]
    senders, pullers, _ = settings.roles(4)
    assert 1 + senders + pullers == 24
    assert settings.staging_slots % senders == 0
    for sms in range(1, 40):
        try:
            senders, pullers, _ = replace(settings, comm_sms=sms).roles(2)
        except ValueError:
            assert sms < 3
        else:
            assert senders >= 1
            assert pullers >= 1
            assert 1 + senders + pullers == sms


def test_how_weights_are_copied(monkeypatch):
    monkeypatch.delenv("TOPOEP_WEIGHT_COPIES", raising=False)
    assert plane.bulk_piece_bytes_from_environment() == 0
    assert plane.bulk_copies_problem((8, 0)) == ""
    monkeypatch.setenv("TOPOEP_WEIGHT_COPIES", "bulk")
    assert plane.bulk_piece_bytes_from_environment() == 16384
    assert plane.bulk_copies_problem((9, 0)) == plane.bulk_copies_problem((10, 3)) == ""
    assert "compute capability 9.0 or later, this one has 8.9" in plane.bulk_copies_problem((8, 9))
    monkeypatch.setenv("TOPOEP_WEIGHT_COPIES", "tma")
    with pytest.raises(ValueError, match="TOPOEP_WEIGHT_COPIES='tma'; expected loads or bulk"):
        plane.bulk_piece_bytes_from_environment()
