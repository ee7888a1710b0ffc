# SPDX-License-Identifier: Apache-2.0
"""The layer of docs/integration.md runs on four ranks and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from tests.distributed.ranks import run_ranks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "integration.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_page(rank: int) -> str:
    namespace: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for language, code in FENCE.findall(PAGE):
            if language == "python":
                exec(compile(code, "integration.md", "exec"), namespace)
    layer = namespace["layer"]
    assert layer.weight.grad.abs().sum() > 0
    assert layer.router.weight.grad.abs().sum() > 0
    return printed.getvalue()


def test_the_layer_prints_what_the_page_shows():
    fences = FENCE.findall(PAGE)
    last = max(i for i, (language, _) in enumerate(fences) if language == "python")
    language, shown = fences[last + 1]
    assert language == ""
    assert run_ranks(4, run_page)[0] == shown
