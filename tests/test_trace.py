# SPDX-License-Identifier: Apache-2.0
"""Traces: the file, foreign counts, merging, and the commands."""

from __future__ import annotations

import io
import re
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from topoep import Topology, Trace
from topoep.__main__ import main
from topoep.trace import merge
from topoep.trace_import import read_trace

TOPOLOGY = Topology(2, 2)
NODES = TOPOLOGY.node_of_rank
SHAPE = b"(3, 2, 4, 8), }      "  # in the header of an array


def counts(steps: int = 3, layers: int = 2, ranks: int = 4, experts: int = 8) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 100, (steps, layers, ranks, experts), dtype=np.int32)


def trace(**changes: object) -> Trace:
    arguments = {"counts": counts(), "node_of_rank": NODES, "top_k": 2, "meta": {"a": 1}}
    return Trace(**{**arguments, **changes})


def parts() -> list[Trace]:
    return [trace(counts=counts()[:, :, rank : rank + 1], ranks=(rank,)) for rank in range(4)]


def test_a_file_holds_what_was_saved(tmp_path):
    path = tmp_path / "t.npz"
    trace(steps=(3, 5, 9)).save(path)
    again = Trace.load(path)
    assert np.array_equal(again.counts, counts())
    assert again.counts.dtype == np.int32
    assert (again.node_of_rank, again.top_k, again.meta) == (NODES, 2, {"a": 1})
    assert again.steps == (3, 5, 9)
    assert again.is_whole
    with np.load(path, allow_pickle=False) as file:
        assert set(file) == {"format", "counts", "node_of_rank", "top_k", "meta", "steps"}
    assert list(tmp_path.iterdir()) == [path], "no part of a file is left"


def test_imbalance_is_the_fullest_rank_over_the_mean():
    values = np.zeros((1, 2, 4, 8), dtype=np.int32)
    values[0, 0, :, :] = 5
    values[0, 0, 1, 6] = 5 + 160  # expert 6 lives on rank 3: 40 -> 200, mean 80
    assert trace(counts=values).imbalance().tolist() == [[2.5, 1.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": counts().astype(float)}, "expected integers"),
        ({"counts": counts()[0]}, r"expected \[steps, layers, ranks, E\]"),
        ({"counts": counts(ranks=3)}, "3 source ranks, but node_of_rank and ranks name 4"),
        ({"counts": counts(experts=6)}, "6 experts; expected a multiple of 4 ranks"),
        ({"counts": -counts()}, r"counts\[.*\] is -\d+; expected no negative"),
        ({"counts": np.full((1, 1, 4, 8), 2**27, np.int32)}, "step 0, layer 0 holds at least"),
        ({"counts": np.full((1, 1, 4, 8), 2**63, np.uint64)}, "step 0, layer 0 holds at least"),
        ({"top_k": 9}, "top_k=9; expected 1 to 8"),
        ({"ranks": (0, 1, 2, 2)}, "expected different ones"),
        ({"steps": (0, 0, 1)}, "ascending"),
    ],
)
def test_parts_that_do_not_fit_are_named(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        trace(**changes)


def test_merge_joins_the_steps_that_all_ranks_have():
    given = parts()
    given[1] = Trace(counts()[1:, :, 1:2], NODES, 2, (1,), (1, 2))
    joined = merge(given[::-1])
    assert joined.is_whole
    assert joined.steps == (1, 2)
    assert np.array_equal(joined.counts, counts()[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p[:3], "rank 3 are missing"),
        (lambda p: [*p, p[0]], "rank 0 is in two"),
        (lambda p: [*p[:3], trace(top_k=3)], "top_k is 2 and 3"),
        (lambda p: [], "nothing to merge"),
        (lambda p: [*p[:3], Trace(counts()[:, :, 3:], NODES, 2, (3,), (7, 8, 9))], "no step"),
    ],
)
def test_merge_refuses_what_does_not_belong_together(change, message):
    with pytest.raises(ValueError, match=message):
        merge(change(parts()))


# ---- foreign and damaged files ---------------------------------------------------------------


def test_counts_of_others_come_in(tmp_path):
    values = counts()
    np.save(tmp_path / "four.npy", values)
    np.save(tmp_path / "three.npy", values[:, 0].astype(np.int64))
    np.save(tmp_path / "two.npy", values[0, 0])
    np.savez(tmp_path / "own.npz", counts=values[:, 0])
    text = "step,layer,rank,expert,tokens\n"
    for index, value in np.ndenumerate(values):
        text += f"{index[0]}, {index[1]},{index[2]},{index[3]},{value}\n"
    (tmp_path / "all.csv").write_text(text)
    for name, expected in {
        "four.npy": values,
        "three.npy": values[:, :1],
        "two.npy": values[:1, :1],
        "own.npz": values[:, :1],
        "all.csv": values,
    }.items():
        found = read_trace(tmp_path / name, 2, TOPOLOGY)
        assert np.array_equal(found.counts, expected), name
    with pytest.raises(ValueError, match="--top-k and --nodes"):
        read_trace(tmp_path / "four.npy")


def test_csv_leaves_out_zeros(tmp_path):
    (tmp_path / "a.csv").write_text("step,layer,rank,expert,tokens\n0,0,1,2,7\n\n")
    found = read_trace(tmp_path / "a.csv", 1, TOPOLOGY)
    assert found.counts.shape == (1, 1, 4, 4)
    assert found.counts[0, 0, 1, 2] == found.counts.sum() == 7


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("rank,tokens", "line 1: 'rank,tokens'; expected step,layer,rank,expert,tokens"),
        ("step,layer,rank,expert,tokens", "no line after the header"),
        ("step,layer,rank,expert,tokens\n0,0,0,0,1\n0,0,0,1,x", "line 3: tokens is 'x'"),
        ("step,layer,rank,expert,tokens\n0,0,0,-1,1", "line 2: expert is '-1'"),
        ("step,layer,rank,expert,tokens\n0,0,0,1", "line 2: 4 fields"),
        ("step,layer,rank,expert,tokens\n0,0,0,99999,1", "line 2: expert is '99999'"),
        ("step,layer,rank,expert,tokens\n0,0,0,1,1\n0,0,0,1,2", "expert 1 is on two lines"),
        ("step,layer,rank,expert,tokens\n0,4095,1023,4095,1", "take more than"),
        ("step,layer,rank,expert,tokens\n0,0,7,0,1", "8 source ranks, but"),
    ],
)
def test_malformed_csv_names_the_row(tmp_path, lines, message):
    (tmp_path / "bad.csv").write_text(lines)
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path / "bad.csv", 1, TOPOLOGY)


def rewrite(path, name: str, data: bytes) -> None:
    """Replaces one array of a trace."""
    with zipfile.ZipFile(path) as archive:
        members = {info: archive.read(info) for info in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, data if member == f"{name}.npy" else content)


def npy(value: object, **options: object) -> bytes:
    file = io.BytesIO()
    np.save(file, value, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("counts", npy(np.array([[1]])), "'counts' has shape"),
        ("counts", npy(np.array([None]), allow_pickle=True), "Python objects"),
        ("counts", npy(counts())[:-4], "the file holds"),
        (
            "counts",
            npy(counts()).replace(b"(3, 2, 4, 8), }      ", b"(99999,9999,4,8), }  "),
            "the limit",
        ),
        ("counts", b"no array at all", "magic"),
        ("format", npy(np.int32(2)), "format 2"),
        ("meta", npy(np.str_("[1]")), "no JSON object"),
        ("meta", npy(np.str_("{")), "t.npz: "),
        ("meta", npy(np.str_("x" * 2**19)), "something else belongs there"),
        ("top_k", npy(np.int32(0)), "top_k=0"),
    ],
)
def test_damaged_traces_are_refused_before_memory_is_taken(tmp_path, name, data, message):
    path = tmp_path / "t.npz"
    trace().save(path)
    rewrite(path, name, data)
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK nonsense")
    (tmp_path / "a.txt").write_text("")
    np.savez(tmp_path / "b.npz", other=1)
    with pytest.raises(ValueError, match=r"no \.npz file"):
        read_trace(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"expected \.npz, \.npy or \.csv"):
        read_trace(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="an array 'counts'"):
        read_trace(tmp_path / "b.npz")


# ---- the commands ----------------------------------------------------------------------------


def test_merge_info_and_plot(tmp_path, capsys):
    files = []
    for rank, part in enumerate(parts()):
        files.append(str(tmp_path / f"rank{rank}.npz"))
        part.save(files[-1])
    whole = str(tmp_path / "whole.npz")
    assert main(["trace", "merge", *files, "-o", whole]) == 0
    assert np.array_equal(Trace.load(whole).counts, counts())
    assert main(["trace", "info", files[0]]) == 0
    assert "1 of them in this file" in capsys.readouterr().out
    assert main(["trace", "info", whole]) == 0
    shown = capsys.readouterr().out
    assert f"{trace().imbalance()[:, 1].mean():.3f}" in shown
    pictures = [str(tmp_path / name) for name in ("a.png", "a.svg")]
    assert main(["trace", "plot", whole, "-o", *pictures]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["info", "{t}/none.npz"], 2, r"none\.npz: No such file.*; expected a trace.*\.csv"),
        (["info", "{t}"], 2, r"unknown kind of file; expected \.npz"),
        (["info", "{t}/folder.npz"], 2, r"Is a directory; expected a trace"),
        (["info", "{t}/text.npz"], 2, r"text\.npz: no \.npz file"),
        (["plot", "{t}/none.csv", "-o", "{t}/a.png"], 2, r"none\.csv: No such file"),
        (["merge", "{t}/none.npy", "-o", "{t}/a.npz"], 2, r"none\.npy: No such file"),
        (["merge", "{t}/whole.npz", "-o", "{t}/none/a.npz"], 1, r"a\.npz\..*: No such file"),
        (["plot", "{t}/part.npz", "-o", "{t}/a.png"], 1, "1 of 4 ranks; join"),
        (["plot", "{t}/whole.npz", "-o", "{t}/a.pdf"], 1, r"\.png or \.svg"),
        (["plot", "{t}/whole.npz", "-o", "{t}/a.png", "--layer", "2"], 1, "the trace has 0 to 1"),
        (["merge", "{t}/whole.npz", "-o", "{t}/a.txt"], 1, r"an \.npz file"),
        (["merge", "{t}/n.npy", "-o", "{t}/a.npz", "--top-k", "2", "--nodes", "4"], 1, "4x8"),
        (["merge", "{t}/n.npy", "-o", "{t}/a.npz", "--top-k", "2", "--nodes", "3x3"], 2, "9"),
    ],
)
def test_commands_say_what_is_wrong(tmp_path, capsys, arguments, code, message):
    parts()[0].save(tmp_path / "part.npz")
    trace().save(tmp_path / "whole.npz")
    np.save(tmp_path / "n.npy", counts())
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "text.npz").write_text("no zip")
    assert main(["trace", *(a.format(t=tmp_path) for a in arguments)]) == code
    error = capsys.readouterr().err
    assert error.startswith("topoep trace: ")
    assert "Errno" not in error
    assert error.count("\n") == 1
    assert re.search(message, error)


# ---- damaged and hostile files -------------------------------------------------------------------


def error_of(path: Path) -> str:
    """The text of the ValueError with which reading ends; empty if it does not."""
    try:
        read_trace(path, 2, Topology(2, 2))
    except ValueError as error:
        return str(error)
    return ""


def test_no_damaged_file_ends_in_another_error(tmp_path):
    """A byte changed anywhere: the trace, or an error that names the file."""
    path = tmp_path / "whole.npz"
    Trace(np.arange(64, dtype=np.int32).reshape(2, 1, 4, 8), (0, 0, 1, 1), 2).save(path)
    whole = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(600):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), int(rng.integers(1, 4))):
            damaged[place] = int(rng.integers(256))
        broken = tmp_path / "broken.npz"
        broken.write_bytes(damaged)
        with suppress(OSError):  # a position before the beginning of the file
            refused += "broken.npz" in error_of(broken)
    assert refused > 100


def test_steps_of_a_csv_keep_their_numbers(tmp_path):
    path = tmp_path / "late.csv"
    path.write_text("\ufeffstep,layer,rank,expert,tokens\n99999998,0,0,0,4\n7,0,1,1,2\n")
    trace = read_trace(path, 1, Topology(1, 2))
    assert trace.steps == (7, 99999998)
    assert trace.counts.shape == (2, 1, 2, 2)


def test_traces_of_different_runs_are_not_merged():
    def part(rank: int, **meta: object) -> Trace:
        return Trace(np.ones((1, 1, 1, 2), dtype=np.int32), (0, 0), 1, (rank,), meta=meta)

    assert merge([part(0, layers=["a"]), part(1, layers=["a"])]).is_whole
    with pytest.raises(ValueError, match=r"different runs\? layers"):
        merge([part(0, layers=["a"]), part(1, layers=["b"])])
    with pytest.raises(ValueError, match=r"different runs\? every"):
        merge([part(0, every=1), part(1, every=2)])
