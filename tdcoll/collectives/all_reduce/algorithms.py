# SPDX-License-Identifier: Apache-2.0
"""How the algorithms of all-reduce are launched."""

from __future__ import annotations

from typing import Any

import torch

from tdcoll.collectives._host.algorithm import (
    Algorithm,
    Planned,
    local_peers,
    make_routes,
    of_words,
    on_device,
    programs_of_words,
    successors,
    tiles,
)
from tdcoll.collectives._host.collective import Collective
from tdcoll.collectives._host.plan import Facts, needs_stores
from tdcoll.collectives.all_reduce import kernels_direct, kernels_nodes, kernels_puts, kernels_words
from tdcoll.collectives.all_reduce.policy import POLICY, part_bytes, parts
from tdcoll.context import CollectiveContext
from tdcoll.primitives.group import nodes_of

__all__ = ["ALL_REDUCE"]


def _pieces(facts: Facts, algorithm: str) -> int:
    """Into how many pieces a segment is cut. The last is for what has been summed, the first for what has not."""
    if algorithm == "2d":  # a node's sum travels in the accumulator's type
        return 1 + max(1, 4 // facts.itemsize)
    if needs_stores(facts) is not None:  # an outbox between the two, where a rank has to put
        return 3
    return 1 if algorithm == "direct" and facts.symmetric else 2


def _piece(ctx: CollectiveContext, facts: Facts, algorithm: str) -> int:
    """Bytes of a piece."""
    return ctx.capacity // (16 * _pieces(facts, algorithm)) * 16


def _room(ctx: CollectiveContext, facts: Facts, algorithm: str) -> int:
    return parts(facts.topology, algorithm) * _piece(ctx, facts, algorithm)


def _parts(call: Planned) -> dict[str, Any]:
    facts, algorithm = call.facts, call.plan.algorithm
    part = part_bytes(facts.nbytes, parts(facts.topology, algorithm))
    piece = _piece(call.ctx, facts, algorithm)
    second = (_pieces(facts, algorithm) - 1) * piece
    return {**tiles(call), "part": part, "outbox": piece, "second": second}


def _programs_of_direct(call: Planned) -> int:
    world = call.ctx.world_size
    return call.plan.channels * (world + 1 if call.facts.symmetric else 2 * world - 1)


def _by_puts(call: Planned) -> dict[str, Any]:
    ctx = call.ctx

    topology, algorithm = ctx.topology, call.plan.algorithm

    def make() -> dict[str, Any]:
        local = local_peers(topology) if ctx.stores else []
        remote = [rank for rank in successors(topology) if rank not in local]
        if algorithm == "2d":
            remote = [members[topology.place] for members in topology.members if members[topology.place] in remote]
        return {"routes": make_routes(ctx, local, remote), "nodes": nodes_of(topology, ctx.device)}

    tables = on_device(ctx, POLICY.operation, (POLICY.operation, algorithm), make)
    return {**_parts(call), **tables, "place": topology.place}


ALL_REDUCE = Collective(
    POLICY,
    {
        "one_shot": Algorithm(
            kernel=lambda call: kernels_words.all_reduce_one_shot,
            programs=programs_of_words,
            values=of_words,
        ),
        "two_shot": Algorithm(
            kernel=lambda call: kernels_words.all_reduce_two_shot,
            programs=programs_of_words,
            values=of_words,
        ),
        "direct": Algorithm(
            kernel=lambda call: kernels_direct.all_reduce_direct,
            programs=_programs_of_direct,
            values=lambda call: {**_parts(call), "STRAIGHT": call.facts.symmetric},
        ),
        "1d": Algorithm(
            kernel=lambda call: kernels_puts.all_reduce_puts,
            programs=lambda call: call.plan.channels * (2 * call.ctx.world_size - 1),
            values=_by_puts,
        ),
        "2d": Algorithm(
            kernel=lambda call: kernels_nodes.all_reduce_nodes,
            programs=lambda call: call.plan.channels * (2 * len(call.ctx.topology.members[0]) - 1),
            values=_by_puts,
        ),
    },
    shapes=lambda shape, world: (torch.Size(shape),),
    layout="same",
    room=_room,
)
"""The host side. Options of a call are its dtype and its operation."""
