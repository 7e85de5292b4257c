# SPDX-License-Identifier: Apache-2.0
"""The default heuristic for broadcasts if nothing was measured: pure, see
:mod:`tdcoll.calls.plan`."""

from __future__ import annotations

from tdcoll.calls.plan import Facts, Plan, node_default
from tdcoll.calls.words import needs_words


def blocks_of_puts(facts: Facts, plan: Plan) -> int:
    """Return the thread blocks of ``1d``: see its kernel."""
    topology = facts.topology
    local = len(topology.members[topology.node]) - 1 if facts.stores else 0
    remote = topology.world_size - 1 - local
    return plan.chunks * (local + 1 + (remote > 0))


def default(facts: Facts) -> str:
    """Return the algorithm that is taken if no table has an entry: puts if a node has none of its
    own."""
    return node_default(facts, facts.nbytes, needs_words) or "1d"
