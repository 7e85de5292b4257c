# SPDX-License-Identifier: Apache-2.0
"""The default heuristic for all-gathers if nothing was measured, and chunks: pure, see :mod:`tdcoll.calls.plan`."""

from __future__ import annotations

from tdcoll.calls import plan as plans
from tdcoll.calls.plan import Facts, Plan, cut_chunks, needs_puts, needs_words
from tdcoll.calls.tuning import Entry

__all__ = ["LL_RESULT_BYTES", "blocks_of_puts", "cut_segments", "default", "epoch", "needs_even_nodes", "put_chunks"]

LL_RESULT_BYTES = 512 << 10
"""Bytes of all ranks together. Over several nodes LL is taken up to here: beyond, forwarding data with its flags inside
a node costs more than the hops that LL saves against 2D. By a cost model that is no longer shipped; not measured.
(Against 1D, which puts to more ranks, LL pays off for few bytes if a put costs its rank more than 0.03 us.)"""


def needs_even_nodes(facts: Facts) -> str | None:
    """Return why a call cannot use rails, or None if it can."""
    if facts.topology.ranks_per_node is None:
        return "needs the same number of ranks on every node; this group has "
    return needs_puts(facts)


def epoch(facts: Facts) -> int:
    """Return the bytes of a segment in each epoch: the inbox's capacity, or all of it if the call is in place."""
    return facts.nbytes if facts.in_place else facts.capacity


def cut_segments(facts: Facts, entry: Entry, algorithm: str) -> Plan:
    """Cut segments into chunks; in place in one node into larger ones, because nothing is copied out. (But the ring
    forwards chunks.)"""
    large = facts.topology.n_nodes == 1 and facts.in_place and algorithm != "ring"
    return cut_chunks(facts, entry, algorithm, large)


def put_chunks(facts: Facts, plan: Plan) -> Plan:
    """Return how LL's puts between nodes are cut: chunks of whole thread blocks' words, as many as there are signals
    for."""
    nbytes, chunks = facts.nbytes, facts.chunks
    chunk = -(-max(plans.TARGET_CHUNK_BYTES, -(-nbytes // chunks)) // plan.chunk) * plan.chunk
    return Plan("2d", max(1, -(-nbytes // chunk)), chunk, plan.num_warps)


def blocks_of_puts(facts: Facts, plan: Plan) -> int:
    """Return the thread blocks of ``1d`` and ``2d``: see their kernels."""
    topology = facts.topology
    world, local = topology.world_size, len(topology.members[topology.node]) - 1
    remote, pushes = world - 1 - local, local
    if plan.algorithm == "2d":
        remote = topology.n_nodes - 1
        pushes += local * remote
    if facts.in_place:
        return plan.chunks * (pushes + remote + 1) + 1
    return plan.chunks * (pushes + (remote > 0) + world)


def default(facts: Facts) -> str:
    """Return the algorithm that is taken if no table has an entry.

    - LL if it is supported, in one node, and over nodes of several ranks each up to :data:`LL_RESULT_BYTES`; never in
      the simulator, because that makes about a hundred block operations, some 20 ms, for every program of LL, and one
      copy for a chunk of the others.
    - In one node direct stores for other messages of less than ``LARGE`` bytes, and for all if in place or without
      puts.
    - Before all of these, if the context has a budget of thread blocks: loops from :data:`LOOPS_FROM` bytes, for which
      few blocks suffice, and in place with 2 ranks copy engines from ``LARGE`` bytes, which need none. Loops in place
      of direct stores for fewer bytes, too.
    - 2D if there are several nodes of several ranks each, all of one size, because a segment then crosses between nodes
      once per node pair.
    - 1D everywhere else.
    - The ring never, because it was not measured on more than four GPUs. If it was the fastest, a table selects it.
    """
    topology, nbytes = facts.topology, facts.nbytes
    one_node, per_node = topology.n_nodes == 1, topology.ranks_per_node
    in_two = not one_node and per_node is not None and per_node > 1
    few = one_node or (in_two and nbytes * topology.world_size <= LL_RESULT_BYTES)
    if plans.prefers_loops(facts, nbytes):
        return "ce" if facts.in_place and nbytes >= plans.LARGE and topology.world_size == 2 else "loop"
    if few and not facts.simulated and needs_words(facts) is None:
        return "ll"
    if plans.shares_gpu(facts) and plans.needs_stores(facts) is None:
        return "loop"
    if one_node and facts.stores and (facts.in_place or nbytes < plans.LARGE or not facts.puts):
        return "direct"
    return "2d" if in_two else "1d"
