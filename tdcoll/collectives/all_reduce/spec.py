# SPDX-License-Identifier: Apache-2.0
"""The spec of the all-reduce: :data:`SPEC`. Options of a call are its dtype and its operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tdcoll.calls.copies import Copies, Copy, Hop, kernel, summed
from tdcoll.calls.launches import (
    Planned,
    local_peers,
    make_routes,
    of_words,
    on_device,
    routes_beside_stores,
    successors,
    tiles,
)
from tdcoll.calls.plan import (
    LAMPORT_WORD_BYTES,
    LL_WORD_BYTES,
    Facts,
    Plan,
    cut_copies,
    cut_loop,
    loop_blocks,
    per_chunk,
    several_nodes,
    summing_blocks,
)
from tdcoll.calls.spec import Algorithm, Collective
from tdcoll.collectives.all_reduce import kernels_direct, kernels_loop, kernels_nodes, kernels_puts, kernels_words
from tdcoll.collectives.all_reduce.policy import (
    ONE_SHOT,
    TWO_SHOT,
    Words,
    cut_parts,
    default,
    epoch_of_parts,
    needs_direct,
    needs_rails,
    needs_signalled_puts,
    one_shot_bytes,
    part_bytes,
    parts,
    payload_of_parts,
    piece_bytes,
    pieces,
)
from tdcoll.primitives.group import nodes_of
from tdcoll.primitives.puts import Routes
from tdcoll.runtime.topology import Topology

__all__ = ["SPEC"]


def _parts(call: Planned) -> dict[str, Any]:
    facts, algorithm = call.facts, call.plan.algorithm
    part = part_bytes(facts.nbytes, parts(facts.topology, algorithm))
    piece = piece_bytes(facts, algorithm)
    return {**tiles(call), "part": part, "outbox": piece, "second": (pieces(facts, algorithm) - 1) * piece}


def _by_puts(call: Planned) -> dict[str, Any]:
    ctx, topology, algorithm = call.ctx, call.ctx.topology, call.plan.algorithm

    def rails() -> Routes:
        local = local_peers(topology)
        remote = [members[topology.place] for members in topology.members if members[topology.place] != topology.rank]
        return make_routes(ctx, local, remote)

    if algorithm == "2d":
        routes = on_device(ctx, "all_reduce", "rails", rails)
    else:
        routes = routes_beside_stores(ctx, "all_reduce")
    nodes = on_device(ctx, "all_reduce", "nodes", lambda: nodes_of(topology, ctx.device))
    return {**_parts(call), "routes": routes, "nodes": nodes, "place": topology.place}


def _direct_blocks(facts: Facts, plan: Plan) -> int:
    world = facts.topology.world_size
    return plan.chunks * (world + 1 if facts.symmetric else 2 * world - 1)


def _by_words(words: Words, kernel: Callable[[Facts], Any]) -> Algorithm:
    return Algorithm(
        words.name,
        supports=words.supports,
        cut=words.cut,
        kernel=kernel,
        blocks=per_chunk,
        values=of_words,
        words=(LAMPORT_WORD_BYTES, LL_WORD_BYTES),
        payload=words.payload,
        epoch=words.epoch,
    )


def _by_parts(
    name: str,
    supports: Callable[[Facts], str | None],
    kernel: Callable[[Facts], Any],
    blocks: Callable[[Facts, Plan], int],
    values: Callable[[Planned], Mapping[str, Any]],
    differs: Callable[[Topology], bool] = lambda topology: True,
) -> Algorithm:
    return Algorithm(
        name,
        supports=supports,
        cut=partial(cut_parts, algorithm=name),
        kernel=kernel,
        blocks=blocks,
        values=values,
        payload=partial(payload_of_parts, algorithm=name),
        epoch=partial(epoch_of_parts, algorithm=name),
        differs=differs,
    )


def _copies(call: Planned) -> Copies:
    """Two hops, as ``direct``: parts to the first half of the inbox, sums to the second or into the result."""
    ctx, facts = call.ctx, call.facts
    part, second = part_bytes(facts.nbytes, ctx.world_size), (pieces(facts, "ce") - 1) * piece_bytes(facts, "ce")
    peers, sizes = successors(ctx.topology), [min(part, max(0, facts.nbytes - r * part)) for r in range(ctx.world_size)]
    mine, box, size = ctx.rank * part, ctx.rank * ctx.capacity, sizes[ctx.rank]
    direct = facts.symmetric
    first = {peer: Copy(peer * part, box, sizes[peer]) for peer in peers}
    sums = dict.fromkeys(peers, Copy(mine, mine if direct else box + second, size))
    taken = [] if direct else [Copy(peer * ctx.capacity + second, peer * part, sizes[peer]) for peer in peers]
    return Copies(
        call,
        Hop(first, sum=summed(call, size, mine, whole=True)),
        Hop(sums, of_result=True, into_result=direct, taken=taken),
    )


SPEC = Collective(
    name="all_reduce",
    segments=(1, 1),
    algorithms=(
        _by_words(ONE_SHOT, lambda facts: kernels_words.all_reduce_one_shot),
        _by_words(TWO_SHOT, lambda facts: kernels_words.all_reduce_two_shot),
        _by_parts(
            "direct",
            needs_direct,
            lambda facts: kernels_direct.all_reduce_direct,
            _direct_blocks,
            lambda call: {**_parts(call), "ZERO_COPY": call.facts.symmetric},
        ),
        Algorithm(
            "loop",
            supports=needs_direct,
            cut=lambda facts, entry: cut_loop(facts, entry, payload_of_parts(facts, "loop").nbytes, signals=2),
            kernel=lambda facts: kernels_loop.all_reduce_loop,
            blocks=loop_blocks,
            values=lambda call: {**_parts(call), "ZERO_COPY": call.facts.symmetric},
            payload=partial(payload_of_parts, algorithm="loop"),
            epoch=partial(epoch_of_parts, algorithm="loop"),
            any_blocks=True,
        ),
        Algorithm(
            "ce",
            supports=needs_direct,
            cut=lambda facts, entry: cut_copies(facts, entry, payload_of_parts(facts, "ce").nbytes, sums=True),
            kernel=kernel,
            blocks=lambda facts, plan: summing_blocks(facts, payload_of_parts(facts, "ce").nbytes),
            payload=partial(payload_of_parts, algorithm="ce"),
            epoch=partial(epoch_of_parts, algorithm="ce"),
            any_blocks=True,
            copies=_copies,
        ),
        _by_parts(
            "1d",
            needs_signalled_puts,
            lambda facts: kernels_puts.all_reduce_puts,
            lambda facts, plan: plan.chunks * (2 * facts.topology.world_size - 1),
            _by_puts,
        ),
        _by_parts(
            "2d",
            needs_rails,
            lambda facts: kernels_nodes.all_reduce_nodes,
            lambda facts, plan: plan.chunks * (2 * len(facts.topology.members[0]) - 1),
            _by_puts,
            several_nodes,
        ),
    ),
    default=default,
    torch="all_reduce",
    # Three pieces between nodes; and a context on which small calls are one-shot, which sends all data.
    capacity=lambda segment, world: max(3 * (segment // world + 16), min(segment, one_shot_bytes(world))),
    adjoint="all_reduce",
    reduces=True,
    handled_bytes_of_more=1 << 20,
)
