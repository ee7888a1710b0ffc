# SPDX-License-Identifier: Apache-2.0
"""Time of reroute against plain passes over the ids: a copy, and a static map (one look-up each).

#wrong counts physical experts that do not receive exactly their quota.
"""

from __future__ import annotations

import torch
from common import lognormal_counts, parse_arguments, report, skewed_ids, time_us

import topoep
from topoep import ops

CASES = [(8192, 8, 64, 256), (8192, 8, 8, 64), (2048, 8, 64, 256), (32768, 8, 64, 512)]


def main() -> None:
    arguments = parse_arguments(__doc__)
    rows = []
    for tokens, top_k, ranks, experts in CASES:
        topology = topoep.Topology(num_nodes=max(ranks // 8, 1), ranks_per_node=min(ranks, 8))
        for dtype in (torch.int32, torch.int64):
            ids = skewed_ids(tokens, top_k, experts, seed=1).to(dtype)
            counts = lognormal_counts(ranks, experts, seed=1)
            counts[0] = ops.histogram(ids, experts)[0]
            ids, counts = ids.to(arguments.device), counts.to(arguments.device)
            plan = topoep.solve(counts, topology, 2, rank=0)
            copy = torch.empty_like(ids)
            quotas = plan.send

            def reroute(ids=ids, plan=plan, ranks=ranks):
                return ops.reroute(ids, plan.send, plan.copy_offsets, plan.copy_slots, ranks)

            def plain_pass(ids=ids, copy=copy):
                return copy.copy_(ids)

            def static_map(ids=ids, table=plan.copy_offsets):
                return table.index_select(0, ids.flatten())

            received = torch.bincount(reroute().flatten().long(), minlength=len(quotas))
            op, plain, look_up = (
                time_us(f, arguments.device) for f in (reroute, plain_pass, static_map)
            )
            rows.append(
                {
                    "T": tokens,
                    "K": top_k,
                    "R": ranks,
                    "E": experts,
                    "dtype": str(dtype).removeprefix("torch."),
                    "copies": int(plan.stats()["copies"]),
                    "reroute us": op,
                    "copy us": plain,
                    "static map us": look_up,
                    "/ copy": op / plain,
                    "#wrong": int((received != quotas).sum()),
                }
            )
    report("bench_reroute", arguments, rows)


if __name__ == "__main__":
    main()
