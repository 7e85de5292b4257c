# SPDX-License-Identifier: Apache-2.0
"""Collectives in a job of two agents, each of which is a node: the paths between nodes are the ones
taken."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workers"))

from harness import check, expect, run, world

import tdcoll
from tdcoll.calls.plan import Facts
from tdcoll.collectives.all_gather.spec import SPEC as ALL_GATHER
from tdcoll.collectives.all_reduce.spec import SPEC as ALL_REDUCE
from tdcoll.collectives.reduce_scatter.spec import SPEC as REDUCE_SCATTER


@check
def takes_the_paths_between_nodes() -> str:
    topology = tdcoll.topology()
    half = world() // 2
    expect(
        topology.members == (tuple(range(half)), tuple(range(half, world()))), topology.describe()
    )
    facts = Facts(1 << 16, topology, stores=True)
    for spec, algorithm in ((ALL_GATHER, "2d"), (ALL_REDUCE, "2d"), (REDUCE_SCATTER, "1d")):
        chosen = spec.choose(facts).algorithm
        expect(
            chosen == algorithm, f"auto must take {algorithm} here for {spec.name}, not {chosen}"
        )
    return topology.describe()


NAMES = (
    "sizes",
    "many_calls_with_a_straggler",
    "graphs",
    "subgroups",
    "larger_calls_are_several_epochs",
)

if __name__ == "__main__":
    import dense_checks  # noqa: F401
    import drop_ins_checks  # noqa: F401

    run([takes_the_paths_between_nodes.__name__, *NAMES, "the_pool_and_the_drop_ins"])
