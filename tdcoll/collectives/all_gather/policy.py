# SPDX-License-Identifier: Apache-2.0
"""Which all-gather to launch, and how: the rules of :data:`POLICY`, see :mod:`tdcoll.collectives._host.plan`."""

from __future__ import annotations

from tdcoll.collectives._host import plan as plans
from tdcoll.collectives._host.plan import (
    Facts,
    Plan,
    Policy,
    Rule,
    cut_chunks,
    cut_words,
    needs_puts,
    needs_stores,
    needs_words,
)
from tdcoll.tuning import Entry

__all__ = ["POLICY", "put_chunks"]

LL_RESULT_BYTES = 512 << 10
"""Of all ranks together. Over several nodes LL is taken up to here: beyond, what comes from other nodes and is passed
on with its flags costs more than the crossings that it saves against 2D. By a cost model that is no longer
shipped; not measured. (Against 1D, which puts to more ranks, few bytes are worth it if a put costs its rank more than
0.03 us.)"""


def _needs_even_nodes(facts: Facts) -> str | None:
    if facts.topology.ranks_per_node is None:
        return "needs the same number of ranks on every node; this group has "
    return needs_puts(facts)


def put_chunks(nbytes: int, plan: Plan, channels: int) -> Plan:
    """How LL's puts between nodes are cut: at most ``channels`` chunks, each of whole programs' words."""
    chunk = -(-max(plans.TARGET_CHUNK_BYTES, -(-nbytes // channels)) // plan.chunk) * plan.chunk
    return Plan("2d", max(1, -(-nbytes // chunk)), chunk, plan.num_warps)


def _seed(facts: Facts) -> str:
    """The algorithm that is taken where no table says anything.

    - LL where it can be had, in one node, and over nodes of several ranks each up to :data:`LL_RESULT_BYTES`; never in
      the simulator, which makes about a hundred block operations, some 20 ms, for every program of LL, and one copy for
      a chunk of the others.
    - In one node direct stores for other messages of less than ``LARGE`` bytes, and in place or without puts for all.
    - 2D where there are several nodes of several ranks each, all of one size: a segment then crosses between nodes once
      per node pair.
    - 1D everywhere else.
    - The ring nowhere: it was the fastest where a table says so, and was not measured on more than four GPUs.
    """
    topology, nbytes = facts.topology, facts.nbytes
    one_node, per_node = topology.n_nodes == 1, topology.ranks_per_node
    in_two = not one_node and per_node is not None and per_node > 1
    few = one_node or (in_two and nbytes * topology.world_size <= LL_RESULT_BYTES)
    if few and not facts.simulated and needs_words(facts) is None:
        return "ll"
    if one_node and facts.stores and (facts.in_place or nbytes < plans.LARGE or not facts.puts):
        return "direct"
    return "2d" if in_two else "1d"


def _rule(name: str, admit: object, words: tuple[int, ...] = ()) -> Rule:
    def cut(facts: Facts, entry: Entry) -> Plan:
        if words:
            return cut_words(facts, entry, name)
        # In place in one node nothing is copied out. But the ring forwards chunks.
        large = facts.topology.n_nodes == 1 and facts.in_place and name != "ring"
        return cut_chunks(facts, entry, name, large)

    return Rule(name, admit, cut, words)  # type: ignore[arg-type]


POLICY = Policy(
    "all_gather",
    [
        _rule("ll", needs_words, words=(plans.LL_WORD_BYTES,)),
        _rule("direct", needs_stores),
        _rule("ring", needs_stores),
        _rule("1d", needs_puts),
        _rule("2d", _needs_even_nodes),
    ],
    _seed,
    hand_over=True,
)
"""``"ll"``, ``"direct"``, ``"ring"``, ``"1d"`` and ``"2d"``."""
