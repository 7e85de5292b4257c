# SPDX-License-Identifier: Apache-2.0
"""All-gather in a job of two agents, each of which is a node: the 2D path is the one taken."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workers"))

import all_gather_checks  # noqa: F401
from harness import check, expect, run, world

import tdcoll
from tdcoll.collectives._host.plan import Facts
from tdcoll.collectives.all_gather.policy import POLICY


@check
def takes_2d() -> str:
    topology = tdcoll.topology()
    half = world() // 2
    expect(topology.members == (tuple(range(half)), tuple(range(half, world()))), topology.describe())
    expect(POLICY.choose(Facts(1 << 16, topology)).algorithm == "2d", "auto must take 2D here")
    return topology.describe()


if __name__ == "__main__":
    run(["takes_2d", "sizes", "in_place", "many_calls_with_a_straggler", "subgroups", "drop_in", "graphs"])
