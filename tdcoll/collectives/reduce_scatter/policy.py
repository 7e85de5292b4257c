# SPDX-License-Identifier: Apache-2.0
"""The default heuristic for reduce-scatters if nothing was measured, and chunks: pure, see
:mod:`tdcoll.calls.plan`."""

from __future__ import annotations

from tdcoll.calls.plan import Facts, Plan, node_default
from tdcoll.calls.words import Words

WORDS = Words("ll", 1)

_REDUCED_BYTES = 16 << 10
"""Bytes of a chunk that one thread block reduces."""


def reducers(facts: Facts, plan: Plan) -> int:
    """Return the thread blocks that reduce a chunk."""
    return max(1, min(facts.topology.world_size, plan.chunk // _REDUCED_BYTES))


def blocks(facts: Facts, plan: Plan) -> int:
    """Return the thread blocks of ``direct`` and ``1d``: senders to each other rank, and reducers,
    for each chunk."""
    return plan.chunks * (facts.topology.world_size - 1 + reducers(facts, plan))


def default(facts: Facts) -> str:
    """Return the default algorithm: in one node that of :func:`~tdcoll.calls.plan.node_default`,
    otherwise puts."""
    return node_default(facts, 2 * facts.nbytes, WORDS.supports) or "1d"
