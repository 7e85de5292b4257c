# SPDX-License-Identifier: Apache-2.0
"""The default heuristic for broadcasts if nothing was measured: pure, see
:mod:`tdcoll.calls.plan`."""

from __future__ import annotations

from tdcoll.calls.plan import Facts, Plan, needs_stores, needs_words


def blocks_of_puts(facts: Facts, plan: Plan) -> int:
    """Return the thread blocks of ``1d``: see its kernel."""
    topology = facts.topology
    local = len(topology.members[topology.node]) - 1 if facts.stores else 0
    remote = topology.world_size - 1 - local
    return plan.chunks * (local + 1 + (remote > 0))


def default(facts: Facts) -> str:
    """Return the algorithm that is taken if no table has an entry: inside a node LL as far as it
    goes, and then direct stores. In the simulator never LL, whose programs take long there."""
    if needs_stores(facts) is not None:
        return "1d"
    return "ll" if needs_words(facts) is None and not facts.simulated else "direct"
