# SPDX-License-Identifier: Apache-2.0
"""The default heuristic for all-gathers if nothing was measured, and chunks: pure, see
:mod:`tdcoll.calls.plan`."""

from __future__ import annotations

from tdcoll.calls import plan as plans
from tdcoll.calls.plan import Facts, Plan
from tdcoll.calls.words import needs_words


def epoch(facts: Facts) -> int:
    """Return the bytes of a segment in each epoch: the inbox's capacity, or all of it if the call
    is in place."""
    return facts.nbytes if facts.in_place else facts.capacity


def blocks_of_puts(facts: Facts, plan: Plan) -> int:
    """Return the thread blocks of ``1d`` and ``2d``: see their kernels."""
    topology = facts.topology
    world = topology.world_size
    local = len(topology.members[topology.node]) - 1
    remote = world - 1 - local
    pushes = local
    if plan.algorithm == "2d":
        remote = topology.n_nodes - 1
        pushes += local * remote
    if facts.in_place:
        return plan.chunks * (pushes + remote + 1) + 1
    return plan.chunks * (pushes + (remote > 0) + world)


def default(facts: Facts) -> str:
    """Return the algorithm that is taken if no table has an entry.

    - In one node that of :func:`~tdcoll.calls.plan.node_default`, with two exceptions from
      ``LARGE`` bytes: copy engines in place with 2 ranks if the context has a small budget; and 1D
      out of place if it has none.
    - 2D if there are several nodes of several ranks each, all of one size: a segment crosses once
      per node pair.
    - 1D everywhere else.
    - The ring never, because it was not measured on more than four GPUs. If it was the fastest, a
      table selects it.
    """
    large = facts.nbytes >= plans.LARGE
    if (
        large
        and facts.in_place
        and facts.topology.world_size == 2
        and plans.prefers_loops(facts, facts.nbytes)
    ):
        return "ce"
    chosen = plans.node_default(facts, facts.nbytes, needs_words)
    if chosen == "direct" and large and not facts.in_place and facts.puts:
        return "1d"
    return chosen or ("2d" if plans.needs_rails(facts) is None else "1d")
