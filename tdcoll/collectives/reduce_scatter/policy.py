# SPDX-License-Identifier: Apache-2.0
"""The default heuristic for reduce-scatters if nothing was measured, and chunks: pure, see :mod:`tdcoll.calls.plan`."""

from __future__ import annotations

from tdcoll.calls.plan import Facts, Plan, needs_reduced_words, needs_stores, prefers_loops, shares_gpu

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
    return plan.chunks * (facts.topology.world_size - 1 + reducers(facts, plan))


def default(facts: Facts) -> str:
    """Return the algorithm that is taken if no table has an entry.

    - In one node Lamport or LL if the context has memory for them (not in the simulator, because they cost much more
      there), otherwise loads if the input is symmetric memory, otherwise stores.
    - If the context has a budget of thread blocks, loops in place of Lamport, LL and stores, but for few bytes.
    - Puts elsewhere.
    """
    loops = prefers_loops(facts, 2 * facts.nbytes)
    if not facts.simulated and not loops and needs_reduced_words(facts) is None:
        return "ll"
    if needs_symmetric(facts) is None:
        return "pull"
    if shares_gpu(facts) and needs_stores(facts) is None:
        return "loop"
    return "direct" if needs_stores(facts) is None else "1d"
