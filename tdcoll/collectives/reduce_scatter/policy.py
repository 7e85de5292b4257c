# SPDX-License-Identifier: Apache-2.0
"""Which reduce-scatter to launch where nothing was measured, and how it is cut: pure, see :mod:`.._host.plan`."""

from __future__ import annotations

from tdcoll.collectives._host.plan import Facts, Plan, needs_reduced_words, needs_stores

__all__ = ["blocks", "default", "needs_symmetric", "reducers"]

_REDUCED_BYTES = 16 << 10
"""Bytes of a chunk that one thread block reduces."""


def needs_symmetric(facts: Facts) -> str | None:
    """Return why parts cannot be loaded where they lie on other ranks, or None if they can."""
    return needs_stores(facts) if facts.symmetric else "needs symmetric=True; got a tensor of any memory on "


def reducers(facts: Facts, plan: Plan) -> int:
    """Return the thread blocks that reduce a chunk."""
    return max(1, min(facts.topology.world_size, plan.chunk // _REDUCED_BYTES))


def blocks(facts: Facts, plan: Plan) -> int:
    """Return the thread blocks of ``direct`` and ``1d``: senders to each other rank, and reducers, for each chunk."""
    return plan.channels * (facts.topology.world_size - 1 + reducers(facts, plan))


def default(facts: Facts) -> str:
    """Return the algorithm that is taken where no table says anything.

    - In one node words where the context has room (not in the simulator, where they cost much more), else loads from
      symmetric memory, else stores.
    - Puts elsewhere.
    """
    if not facts.simulated and needs_reduced_words(facts) is None:
        return "ll"
    if needs_symmetric(facts) is None:
        return "pull"
    return "direct" if needs_stores(facts) is None else "1d"
