# SPDX-License-Identifier: Apache-2.0
"""One MoE layer on a real cluster, with every transport that can be used there.

    torchrun --nnodes 2 --nproc-per-node 8 ... benchmarks/bench_cluster.py
    torchrun --nproc-per-node 2 benchmarks/bench_cluster.py        also without GPUs, over gloo

Compares, for the same routed tokens, the layer without copies (``spare_slots=0``) and with them
over transport c10d and transport nccl: a whole step of forward and backward, and the plan and the
transfer of weights alone. NCCL needs a GPU per rank. ``#wrong`` counts elements of this rank's
output that differ from the layer without copies by more than rounding, summed over the ranks; for
nccl also those that differ from c10d by a bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import topoep  # noqa: E402

RESULTS = HERE / "results" / "bench_cluster.json"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, what in (
        ("experts", 256, "E"),
        ("hidden", 7168, "D"),
        ("intermediate", 2048, "I"),
        ("tokens", 4096, "tokens per rank"),
        ("top-k", 8, "K"),
        ("spare-slots", 2, "S"),
        ("chunks", 2, "num_chunks of the layer"),
        ("comm-sms", 24, "SMs that a transfer takes, transport nccl"),
        ("steps", 20, "timed steps"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} ({default})")
    parser.add_argument("--skew", type=float, default=1.0, help="sigma of expert popularity (1.0)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write the results")
    parsed = parser.parse_args(arguments)
    for name, value in vars(parsed).items():
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: expected at least 1")
    return parsed


class Setting:
    """This process's rank, device and tokens."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.cuda = torch.cuda.is_available()
        if self.cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device_id = torch.device("cuda", torch.cuda.current_device()) if self.cuda else None
        dist.init_process_group("nccl" if self.cuda else "gloo", device_id=device_id)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = device_id or torch.device("cpu")
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.topology = topoep.Topology.from_group(dist.group.WORLD)
        popularity = torch.randn(chosen.experts, generator=torch.Generator().manual_seed(0))
        popularity = popularity.mul(chosen.skew).exp()
        generator = torch.Generator().manual_seed(1 + self.rank)
        noise = torch.rand(chosen.tokens, chosen.experts, generator=generator).log().neg()
        ids = (noise / popularity).topk(min(chosen.top_k, chosen.experts), largest=False).indices
        self.ids = ids.to(self.device)
        self.x = torch.randn(chosen.tokens, chosen.hidden, generator=generator).to(
            self.device, self.dtype
        )
        self.weights = torch.full(ids.shape, 1 / ids.shape[1], device=self.device)

    def layer(self, transport: str, spare_slots: int) -> topoep.BalancedExperts:
        """The same weights every time."""
        chosen = self.chosen
        balancer = topoep.Balancer(
            self.topology,
            chosen.experts,
            spare_slots,
            group=dist.group.WORLD,
            transport=transport,
            comm_sms=chosen.comm_sms,
        )
        torch.manual_seed(0)
        home = balancer.config.experts_per_rank
        return topoep.BalancedExperts(
            chosen.experts,
            chosen.hidden,
            chosen.intermediate,
            balancer=balancer,
            num_chunks=min(chosen.chunks, home),
            dtype=self.dtype,
            device=self.device,
        )

    def time_ms(self, call: Callable[[], object]) -> float:
        """Mean of the steps, on the slowest rank."""
        for _ in range(2):
            call()
        self.synchronise()
        begin = time.perf_counter()
        for _ in range(self.chosen.steps):
            call()
        self.synchronise()
        took = torch.tensor(time.perf_counter() - begin, device=self.device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took) * 1e3 / self.chosen.steps

    def synchronise(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier()

    def total(self, count: Tensor) -> int:
        """The sum over the ranks."""
        count = count.to(self.device)
        dist.all_reduce(count)
        return int(count)


def measure(
    setting: Setting, name: str, layer: topoep.BalancedExperts, against: dict[str, Tensor]
) -> dict[str, object]:
    """One row; ``against``: outputs of other transports, to which this one's is added."""
    x = setting.x.clone().requires_grad_()

    def step() -> Tensor:
        layer.zero_grad(set_to_none=True)
        y = layer(x, setting.ids, setting.weights)
        y.sum().backward()
        return y

    y = step().detach().float()
    wrong = torch.zeros((), dtype=torch.int64)
    if "no copies" in against:
        tolerance = 2e-2 if setting.dtype == torch.bfloat16 else 1e-4
        limit = tolerance * against["no copies"].abs().mean()
        wrong += int(((y - against["no copies"]).abs() > limit).sum())
    if "c10d" in against and name == "nccl":
        wrong += int((y != against["c10d"]).sum())
    against[name] = y
    balancer = layer.balancer
    plan = balancer.plan(setting.ids)
    stats = {key: float(value) for key, value in plan.stats().items()}
    weights = tuple(p.detach() for p in layer.parameters())

    def transfer() -> None:
        # Another plan each time, so that the slots never hold its copies already.
        balancer.replicate(weights, balancer.plan(setting.ids))

    with torch.no_grad():
        plan_ms = setting.time_ms(lambda: balancer.plan(setting.ids))
        transfer_ms = setting.time_ms(transfer) - plan_ms
    return {
        "transport": name,
        "step_ms": setting.time_ms(step),
        "plan_ms": plan_ms,
        "replicate_ms": max(transfer_ms, 0.0),
        "imbalance": round(stats["imbalance"], 3),
        "copies": int(stats["copies"]),
        "cross_node_tokens": int(stats["cross_node_tokens"]),
        "#wrong": setting.total(wrong),
    }


def compare(setting: Setting) -> int:
    """Measures and writes what can be used here; returns how many rows have wrong results."""
    spare_slots = setting.chosen.spare_slots
    rows, left_out = [], []
    outputs: dict[str, Tensor] = {}
    for name, transport, spare in (
        ("no copies", "c10d", 0),
        ("c10d", "c10d", spare_slots),
        ("nccl", "nccl", spare_slots),
    ):
        try:
            layer = setting.layer(transport, spare)
        except RuntimeError as error:  # the same on all ranks
            left_out.append(str(error))
            continue
        rows.append(measure(setting, name, layer, outputs))
        layer.balancer.close()
    if setting.rank == 0:
        write(setting, rows, left_out)
    return sum(bool(row["#wrong"]) for row in rows)


def main() -> int:
    chosen = parse_arguments()
    torch.set_num_threads(1)
    wrong = compare(Setting(chosen))
    gc.collect()  # layers that still hold the group would keep its threads until Python has ended
    dist.barrier()
    dist.destroy_process_group()
    return int(wrong > 0)


def write(setting: Setting, rows: list[dict[str, object]], left_out: list[str]) -> None:
    place = f"{setting.topology.num_nodes} nodes, {setting.world} ranks"
    place += f" ({torch.cuda.get_device_name() if setting.cuda else 'CPU, gloo'})"
    columns = list(rows[0])
    cells = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in r.values()] for r in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    print(f"bench_cluster on {place}, torch {torch.__version__}, topoep {topoep.__version__}")
    for line in [columns, *cells]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    for text in left_out:
        print(f"left out: {text}")
    arguments = {k: v for k, v in vars(setting.chosen).items() if k != "json"}
    content = {
        "benchmark": "bench_cluster",
        "machine": place,
        "torch": torch.__version__,
        "topoep": topoep.__version__,
        "arguments": arguments,
        "rows": rows,
        "left_out": left_out,
    }
    target: Path = setting.chosen.json
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
