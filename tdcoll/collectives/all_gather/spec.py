# SPDX-License-Identifier: Apache-2.0
"""The spec of the all-gather: :data:`SPEC`. The only option of a call is whether segments are counted."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import triton

from tdcoll.calls import copies
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.launches import (
    Launches,
    Planned,
    facts_of,
    launches_by,
    local_peers,
    loop_constants,
    make_routes,
    on_device,
    successors,
)
from tdcoll.calls.plan import (
    LL_WORD_BYTES,
    Facts,
    Plan,
    cut_copies,
    cut_loop,
    cut_words,
    loop_blocks,
    needs_puts,
    needs_stores,
    needs_words,
    per_segment,
    several_nodes,
)
from tdcoll.calls.spec import WORLD, Algorithm, Collective
from tdcoll.collectives.all_gather import kernels_puts, kernels_ring
from tdcoll.collectives.all_gather.policy import (
    blocks_of_puts,
    cut_segments,
    default,
    epoch,
    needs_even_nodes,
    put_chunks,
)
from tdcoll.collectives.exchange import kernels_direct, kernels_ll, kernels_loop
from tdcoll.primitives.puts import Routes

__all__ = ["SPEC", "counted_launches"]

_EARLY_BYTES = 2 << 20
"""Larger calls in place are slower with programmatic dependent launch (PDL). On 2 H200s one of 4 MB per rank takes 18.0
us instead of 16.9, and one of 64 MB 202 us instead of 190."""


def _routes(call: Planned) -> Routes:
    """Return the ranks that this rank sends to; for LL, after them, the ranks whose data comes by LL."""
    ctx, topology, algorithm = call.ctx, call.ctx.topology, call.plan.algorithm

    def make() -> Routes:
        if algorithm in ("2d", "ll"):
            nodes = [(topology.node + i) % topology.n_nodes for i in range(1, topology.n_nodes)]
            remote = [topology.members[node][topology.place] for node in nodes]
        else:
            remote = [rank for rank in successors(topology) if topology.nodes[rank] != topology.node]
        flagged = [rank for rank in successors(topology) if rank not in remote] if algorithm == "ll" else []
        return make_routes(ctx, local_peers(topology), remote, flagged)

    return on_device(ctx, "all_gather", ("all_gather", "routes", algorithm), make)


def _puts(call: Planned) -> dict[str, Any]:
    block = triton.next_power_of_2(call.ctx.world_size)
    return {"routes": _routes(call), "BLOCK": block, "COUNTED": bool(call.options)}


def _ll(call: Planned) -> dict[str, Any]:
    block = {"BLOCK": call.plan.chunk // LL_WORD_BYTES, "source_stride": 0}
    if not several_nodes(call.facts.topology):
        return block
    puts = put_chunks(call.facts, call.plan)
    return {**block, "routes": _routes(call), "chunk": puts.chunk, "chunks": puts.chunks}


def _blocks_of_ll(facts: Facts, plan: Plan) -> int:
    return per_segment(facts, plan) + (put_chunks(facts, plan).chunks if several_nodes(facts.topology) else 0)


def _early(facts: Facts) -> bool:
    return not (facts.in_place and facts.nbytes > _EARLY_BYTES)


SPEC = Collective(
    name="all_gather",
    segments=(1, WORLD),
    algorithms=(
        Algorithm(
            "ll",
            supports=needs_words,
            cut=partial(cut_words, algorithm="ll"),
            kernel=lambda facts: (
                kernels_puts.all_gather_ll_2d if several_nodes(facts.topology) else kernels_ll.exchange_ll
            ),
            blocks=_blocks_of_ll,
            values=_ll,
            words=(LL_WORD_BYTES,),
        ),
        Algorithm(
            "direct",
            supports=needs_stores,
            cut=partial(cut_segments, algorithm="direct"),
            kernel=lambda facts: kernels_direct.exchange_direct,
            blocks=per_segment,
            values=lambda call: {"COUNTED": bool(call.options), "source_stride": 0},
            epoch=epoch,
            early=_early,
        ),
        Algorithm(
            "ring",
            supports=needs_stores,
            cut=partial(cut_segments, algorithm="ring"),
            kernel=lambda facts: kernels_ring.all_gather_ring,
            blocks=per_segment,
            epoch=epoch,
            early=_early,
            differs=lambda topology: topology.world_size > 2,  # from direct stores
        ),
        Algorithm(
            "loop",
            supports=needs_stores,
            cut=lambda facts, entry: cut_loop(facts, entry, facts.nbytes),
            kernel=lambda facts: kernels_loop.exchange_loop,
            blocks=loop_blocks,
            values=lambda call: {"source_stride": 0, **loop_constants(call, True)},
            epoch=epoch,
            early=_early,
            any_blocks=True,
        ),
        Algorithm(
            "ce",
            supports=needs_stores,
            cut=lambda facts, entry: cut_copies(facts, entry, facts.nbytes),
            kernel=copies.kernel,
            blocks=lambda facts, plan: 1,
            epoch=epoch,
            copies=lambda call: copies.exchange(call, 0),
        ),
        Algorithm(
            "1d",
            supports=needs_puts,
            cut=partial(cut_segments, algorithm="1d"),
            kernel=lambda facts: kernels_puts.all_gather_1d,
            blocks=blocks_of_puts,
            values=_puts,
            epoch=epoch,
        ),
        Algorithm(
            "2d",
            supports=needs_even_nodes,
            cut=partial(cut_segments, algorithm="2d"),
            kernel=lambda facts: kernels_puts.all_gather_2d,
            blocks=blocks_of_puts,
            values=lambda call: {**_puts(call), "STORES": call.ctx.stores},
            epoch=epoch,
            differs=several_nodes,
        ),
    ),
    default=default,
    torch="all_gather_into_tensor",
    capacity=lambda segment, world: segment,
    adjoint="reduce_scatter",
    in_place=True,
)


def counted_launches(ctx: CollectiveContext, nbytes: int) -> Launches:
    """Return the prepared launches of all-gathers in place of segments whose sizes are counted on the device, for
    collectives built on it.

    A call, ``launches(segment, segments)``, is one epoch of ``ctx``, which the caller has begun. Afterwards every rank
    has every segment, up to its count. It uses the default heuristic without LL, because no table has measured such
    calls, and LL doesn't support counts.

    Args:
        nbytes: from one segment to the next, a multiple of 16. Segments are in symmetric memory, 16-byte aligned; this
            rank's own is filled, and begins with an int64: the bytes that it uses, itself included.
    """

    def make() -> Launches:
        facts = facts_of(ctx, nbytes, in_place=True)
        plan = SPEC.choose(dataclasses.replace(facts, ll_bytes=-1))
        return launches_by(SPEC, ctx, facts, plan, "counted")

    return ctx.once(("all_gather", "counted", nbytes), make)
