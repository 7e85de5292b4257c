# SPDX-License-Identifier: Apache-2.0
"""The default heuristic for all-to-alls if nothing was measured, and chunks: pure, see :mod:`tdcoll.calls.plan`."""

from __future__ import annotations

from tdcoll.calls.plan import Facts, Plan, needs_stores, needs_words, prefers_loops, shares_gpu

__all__ = ["blocks_of_puts", "default", "needs_words_of_a_node"]


def needs_words_of_a_node(facts: Facts) -> str | None:
    """Return why a call can't use LL, or None if it can. Between nodes the puts, not the hops, are the latency."""
    return needs_stores(facts) or needs_words(facts)


def blocks_of_puts(facts: Facts, plan: Plan) -> int:
    """Return the thread blocks of ``1d``: for each chunk a sender to each other rank, and a receiver for each rank."""
    return plan.chunks * (2 * facts.topology.world_size - 1)


def default(facts: Facts) -> str:
    """Return the algorithm that is taken if no table says anything.

    - In one node loops if the context has a budget of thread blocks, but for few bytes; otherwise LL if the context has
      memory for it (not in the simulator, where it costs much more), else stores.
    - Puts elsewhere.
    """
    if prefers_loops(facts, 2 * facts.nbytes):
        return "loop"
    if not facts.simulated and needs_words_of_a_node(facts) is None:
        return "ll"
    if shares_gpu(facts) and needs_stores(facts) is None:
        return "loop"
    return "direct" if needs_stores(facts) is None else "1d"
