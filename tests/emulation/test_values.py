# SPDX-License-Identifier: Apache-2.0
"""What the functions of CUDA return, by the test's own idea of them."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import Emulator


def test_values_of_warp_collectives(checked: Emulator, rng: np.random.Generator) -> None:
    checked.configure(preempt=3)
    values = rng.integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32)
    rows = np.zeros((16, 32), np.uint32)
    with checked.memory(values=values), checked.memory(initialised=False, rows=rows):
        checked.call("selftest_warp_values", values, rows)
    assert checked.take_reports() == []

    lane = np.arange(32)
    signed = values.view(np.int32)
    bits = (1 << lane.astype(np.uint64)).astype(np.uint64)

    def ballot(predicate: np.ndarray) -> int:
        return int(bits[predicate.astype(bool)].sum())

    low = values & 3
    odd_parity = np.bitwise_xor.reduce(values)
    expected = [
        values[lane // 8 * 8 + 5],
        values[np.where(lane % 16 >= 3, lane - 3, lane)],
        values[np.where(lane % 16 + 3 < 16, lane + 3, lane)],
        values[lane ^ 6],
        ballot(values & 1),
        1,
        0,
        [ballot(low == own) for own in low],
        0xFFFFFFFF + 1 & 0xFFFFFFFF,
        0,
        int(values.sum(dtype=np.uint64)) & 0xFFFFFFFF,
        values.min(),
        signed.min().view(np.uint32),
        signed.max().view(np.uint32),
        np.bitwise_and.reduce(values) ^ np.bitwise_or.reduce(values) ^ odd_parity,
        np.where(lane < 16, ballot(values & 2) & 0xFFFF, ballot(values & 2) & 0xFFFF0000),
    ]
    for row, wanted in enumerate(expected):
        np.testing.assert_array_equal(rows[row], np.broadcast_to(wanted, 32), err_msg=f"row {row}")


@pytest.mark.parametrize("values", [[1, 0, 3] * 20, [1, 2] * 32, [1, -1, 0, 5] * 8])
def test_values_of_block_votes(checked: Emulator, values: list[int]) -> None:
    checked.configure()
    votes = np.array(values, np.int32)
    out = np.zeros((3, votes.size), np.int32)
    with checked.memory(votes=votes), checked.memory(initialised=False, out=out):
        checked.call("selftest_block_votes", votes, out, votes.size)
    assert checked.take_reports() == []
    assert (out[0] == (votes > 0).sum()).all()
    assert (out[1] == (votes >= 0).all()).all()
    assert (out[2] == (votes < 0).any()).all()


def test_values_of_atomics(checked: Emulator) -> None:
    dtype = np.dtype(
        [
            *[(name, np.uint32) for name in ("add", "sub", "min", "max", "and_", "or_", "xor")],
            *[(name, np.uint32) for name in ("exchanged", "up", "down", "cas")],
            ("signed_min", np.int32),
            ("signed_max", np.int32),
            ("wide_add", np.uint64),
            ("wide_cas", np.uint64),
            ("float_add", np.float32),
            ("double_add", np.float64),
        ],
        align=True,
    )
    cells = np.zeros(1, dtype)
    cells["sub"], cells["min"], cells["and_"] = 1000, 1 << 31, 0xFFFF
    checked.configure(preempt=3, resident=4)
    with checked.memory(cells=cells):
        checked.call("selftest_atomic_values", cells)
    assert checked.take_reports() == []
    n = 4 * 64
    assert cells[0].item() == (
        sum(range(n)),
        1000 - 2 * n,
        7,
        n + 6,
        0xFF00,
        0xFFFF,
        int(np.bitwise_xor.reduce(np.arange(n))),
        77,
        n % 10,
        -n % 10,
        3 * n,
        5 - (n - 1),
        0,
        n << 33,
        1 << 40,
        n / 2,
        n / 4,
    )


def test_values_of_intrinsics(checked: Emulator) -> None:
    a, b = 0x80C12F04, 0x00034567
    checked.configure()
    out = np.zeros(20, np.uint32)
    with checked.memory(initialised=False, out=out):
        checked.call("selftest_intrinsic_values", a, b, out)
    assert checked.take_reports() == []
    signed_a = a - (1 << 32)
    wide = b << 32 | a
    source = wide.to_bytes(8, "little")
    permuted = bytes([source[12 & 7] >> 7 and 0xFF, source[3], source[15 & 7] >> 7 and 0xFF])
    expected = [
        bin(a).count("1"),
        bin(wide).count("1"),
        32 - a.bit_length(),
        32,
        64 - b.bit_length(),
        (a & -a).bit_length(),
        0,
        (a & -a).bit_length() + 32,
        int(f"{a:032b}"[::-1], 2),
        a * b >> 32,
        signed_a * b >> 32,
        (a << 32) * (b << 16) >> 64,
        wide << 5 >> 32,
        wide >> 5,
        int.from_bytes(bytes(source[i] for i in (0, 4, 1, 5)), "little"),
        int.from_bytes(permuted + bytes([0xFF if source[0] & 0x80 else 0]), "little"),
        int(np.float32(4.0).view(np.uint32)),
        min(a, b),
        max(a, b),
        bin(a).count("1"),
    ]
    np.testing.assert_array_equal(out, [value & 0xFFFFFFFF for value in expected])


def test_shared_variables_have_no_more_alignment_than_promised(checked: Emulator) -> None:
    checked.configure()
    out = np.zeros(3, np.uint32)
    with checked.memory(initialised=False, out=out):
        checked.call("selftest_shared_alignment", out, 64, 1)
    assert out.tolist() == [128, 1, 16]
    assert checked.take_reports() == []
