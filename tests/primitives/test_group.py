# SPDX-License-Identifier: Apache-2.0
"""Programs of a launch that meet: what one has stored before is seen by whom another one tells
behind that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exploring import explore, first_failure
from kernel_mutants import Change, installed

import tdcoll
from tdcoll.testing import World

from . import group_kernels

KERNELS = "primitives.group_kernels"


class Handed:
    """``group_kernels.hand_on``, of either kind."""

    def __init__(self, leaves: bool) -> None:
        self.leaves = leaves

    def __call__(self, world: World) -> None:
        def host(pe: int) -> None:
            mine, told = tdcoll.zeros(1, torch.int64), tdcoll.zeros(1, torch.int64)
            word, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
            monitor = tdcoll.WaitMonitor()
            group_kernels.hand_on[(2,)](mine, word, told, out, monitor, self.leaves)
            monitor.check()
            assert pe == 0 or int(out) == 7, "PE 1 does not see what program 0 has stored"

        world.run(host)


def relaxed(where: str, sem: str) -> Change:
    """The program that is done orders nothing."""
    return Change(
        where,
        f"tl.atomic_add(word, 1, sem='{sem}', scope='gpu')",
        "tl.atomic_add(word, 1, sem='relaxed')",
    )


@pytest.mark.parametrize(
    ("leaves", "change"),
    [
        (False, relaxed("group.signal_done", "release")),
        (True, relaxed("group.leaves_last", "acq_rel")),
    ],
)
def test_what_a_program_has_stored_goes_before_what_another_one_tells(
    leaves: bool, change: Change, tmp_path: Path
) -> None:
    explore(Handed(leaves), n_pes=2, seeds=30)
    with installed([change], tmp_path, [KERNELS]):
        failure = first_failure(Handed(leaves), n_pes=2, seeds=200)
    assert failure is not None
    assert "does not see" in failure.report
