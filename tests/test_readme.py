# SPDX-License-Identifier: Apache-2.0
"""The code of the README and the docs runs and prints what they show; the examples run."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

#: Its blocks need ranks; tests/distributed/test_integration_page.py runs them.
ON_RANKS = ROOT / "docs" / "integration.md"


@pytest.mark.parametrize("page", [p for p in PAGES if p != ON_RANKS], ids=lambda page: page.name)
def test_python_blocks_print_what_follows_them(page):
    namespace: dict[str, object] = {}
    fenced = [*FENCE.findall(page.read_text()), ("", "")]
    for (language, code), (next_language, shown) in itertools.pairwise(fenced):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page.name, "exec"), namespace)
        assert bool(printed.getvalue()) == ("print(" in code)
        if printed.getvalue():
            assert (next_language, shown) == ("", printed.getvalue())


@page
def test_every_file_a_page_links_to_exists(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@page
def test_every_test_a_page_names_exists(page):
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
        assert f"def {name}(" in (ROOT / path).read_text(), name


def test_every_field_test_is_listed():
    listed = (ROOT / "docs/field-cases.md").read_text()
    for path in (ROOT / "tests/field").glob("test_*.py"):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE):
            assert name in listed, name


def test_commands_of_the_readme_exist():
    text = "".join(page.read_text() for page in PAGES)
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)):
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
    for part in ("transport nccl", "transport auto"):
        assert part in result.stdout
    missing = re.findall(r"not built|none", result.stdout)
    assert bool(missing) == ("->" in result.stdout), "what is missing comes with a remedy"
