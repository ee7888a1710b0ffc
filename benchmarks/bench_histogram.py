# SPDX-License-Identifier: Apache-2.0
"""Time of histogram against a plain pass over the ids (a copy of them).

#wrong counts results that differ from torch.bincount.
"""

from __future__ import annotations

import torch
from common import parse_arguments, report, skewed_ids, time_us

from topoep import ops

CASES = [(8192, 8, 256), (8192, 8, 64), (2048, 8, 256), (32768, 8, 512), (8192, 2, 4096)]


def main() -> None:
    arguments = parse_arguments(__doc__)
    rows = []
    for tokens, top_k, experts in CASES:
        for dtype in (torch.int32, torch.int64):
            ids = skewed_ids(tokens, top_k, experts, seed=1).to(dtype).to(arguments.device)
            copy = torch.empty_like(ids)

            def count(ids=ids, experts=experts):
                return ops.histogram(ids, experts)

            def plain_pass(ids=ids, copy=copy):
                return copy.copy_(ids)

            counts, invalid = count()
            expected = torch.bincount(ids.flatten().long(), minlength=experts)
            op, plain = (time_us(f, arguments.device) for f in (count, plain_pass))
            rows.append(
                {
                    "T": tokens,
                    "K": top_k,
                    "E": experts,
                    "dtype": str(dtype).removeprefix("torch."),
                    "histogram us": op,
                    "copy us": plain,
                    "/ copy": op / plain,
                    "#wrong": int((counts != expected).sum()) + int(invalid != 0),
                }
            )
    report("bench_histogram", arguments, rows)


if __name__ == "__main__":
    main()
