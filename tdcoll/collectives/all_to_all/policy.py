# SPDX-License-Identifier: Apache-2.0
"""The default heuristic for all-to-alls if nothing was measured, and chunks: pure, see
:mod:`tdcoll.calls.plan`."""

from __future__ import annotations

from tdcoll.calls.plan import Facts, Plan, node_default
from tdcoll.calls.words import needs_words


def blocks_of_puts(facts: Facts, plan: Plan) -> int:
    """Return the thread blocks of ``1d``: for each chunk a sender to each other rank, and a
    receiver for each rank."""
    return plan.chunks * (2 * facts.topology.world_size - 1)


def default(facts: Facts) -> str:
    """Return the algorithm that is taken if no table has an entry: puts if a node has none of its
    own."""
    return node_default(facts, 2 * facts.nbytes, needs_words) or "1d"
