# SPDX-License-Identifier: Apache-2.0
"""NcclNetwork's device functions, run on the CPU: which rank of the communicator they reach."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.emulation.harness import Emulator
from topoep import Topology

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def unit():
    return Emulator([HERE / "network_unit.cpp"], flags=[f"-I{HERE / 'device_api'}"])


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1], [0, 1, 2, 0, 1, 2]])
def test_a_rank_of_the_group_is_found_under_its_number_in_the_communicator(unit, nodes):
    topology = Topology(node_of_rank=nodes)
    position_of = topology.table().numpy()[len(nodes) : 2 * len(nodes)].copy()
    for peer in range(len(nodes)):
        noted = np.zeros((96, 9), np.int64)
        with unit.memory(position_of=position_of, noted=noted):
            unit.call("run_network", position_of, len(nodes), peer, 6, noted)
        assert unit.take_reports() == []
        place = topology.rank_order.index(peer)
        team = len(nodes)
        assert noted[0].tolist() == [1, 2, team, place, 256, 512, 64, 6, 5]
        assert noted[32].tolist() == [2, 2, team, place, 0, 0, 0, 6, 7]
        assert noted[64].tolist() == [3, 2, 0, 0, 0, 0, 0, 6, 64]
        assert noted[65, 0] == 1006
        noted[[0, 32, 64, 65]] = 0
        assert not noted.any(), "one lane of a warp acts for all"
