# SPDX-License-Identifier: Apache-2.0
"""Plans are those of the release before: the promise that resuming a training run relies on."""

from __future__ import annotations

from tests import golden


def test_plans_are_those_of_the_last_release():
    kept, now = golden.kept(), golden.digests()
    changed = [
        f"{case}, {planner}"
        for case in now
        for planner in now[case]
        if kept.get(case, {}).get(planner) != now[case][planner]
    ]
    assert not changed, (
        f"{len(changed)} plans changed: {changed[:5]}. If that is meant, say so in CHANGELOG.md "
        "and run python -m tests.golden"
    )
    assert kept.keys() == now.keys()


def test_the_kept_plans_have_copies_and_differ_between_planners():
    with_copies = [case for case, plans in golden.kept().items() if len(set(plans.values())) > 1]
    assert len(with_copies) > len(golden.kept()) / 2
