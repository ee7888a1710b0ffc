# SPDX-License-Identifier: Apache-2.0
"""The README's code runs and prints what the README shows; the examples run."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    return FENCE.findall((ROOT / "README.md").read_text())


def test_python_blocks_print_what_follows_them():
    namespace: dict[str, object] = {}
    compared = 0
    fenced = blocks()
    for (language, code), (next_language, shown) in zip(
        fenced, [*fenced[1:], ("", "")], strict=True
    ):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), namespace)
        if printed.getvalue():
            assert next_language == ""
            assert printed.getvalue() == shown
            compared += 1
    assert compared == 2


def test_every_file_the_readme_links_to_exists():
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_commands_of_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", text)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path):
    result = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "imbalance" in result.stdout


def test_doctor_says_what_was_built_and_what_to_do():
    result = subprocess.run(
        [sys.executable, "-m", "topoep", "doctor"], capture_output=True, text=True, check=True
    )
    for part in ("topoep", "torch", "CUDA kernels", "NCCL", "GPU", "transport local", "c10d"):
        assert part in result.stdout
    missing = re.findall(r"not built|none", result.stdout)
    assert bool(missing) == ("->" in result.stdout), "what is missing comes with a remedy"
