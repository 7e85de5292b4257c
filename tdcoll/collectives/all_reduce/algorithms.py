# SPDX-License-Identifier: Apache-2.0
"""How the algorithms of all-reduce are launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from tdcoll.collectives._host.algorithm import (
    Algorithm,
    Planned,
    arithmetic,
    local_peers,
    make_routes,
    on_device,
    successors,
)
from tdcoll.collectives._host.collective import Collective
from tdcoll.collectives._host.plan import Facts, needs_stores
from tdcoll.collectives.all_reduce import kernels_direct, kernels_puts, kernels_words
from tdcoll.collectives.all_reduce.policy import LAMPORT_WORD_BYTES, POLICY, by_lamport, part_bytes
from tdcoll.context import CollectiveContext
from tdcoll.primitives.group import nodes_of

__all__ = ["ALL_REDUCE"]


def _piece(ctx: CollectiveContext, pieces: int) -> int:
    """Bytes of a segment's inbox, and of what comes after it."""
    return ctx.capacity // (16 * pieces) * 16


def _room(ctx: CollectiveContext, facts: Facts) -> int:
    return facts.topology.world_size * _piece(ctx, 2 if needs_stores(facts) is None else 3)


def _words(shots: int) -> Callable[[Planned], dict[str, Any]]:
    def values(call: Planned) -> dict[str, Any]:
        lamport = by_lamport(call.facts, shots)
        width = LAMPORT_WORD_BYTES if lamport else 12
        inbox = call.ctx.device_lamport if lamport else call.words
        return {**arithmetic(call), "inbox": inbox, "LAMPORT": lamport, "BLOCK": call.plan.chunk // width}

    return values


def _parts(call: Planned) -> dict[str, Any]:
    per_tile = 16 * 32 * call.plan.num_warps // call.options[0].itemsize  # 16 bytes for each thread
    waited = triton.next_power_of_2(call.ctx.world_size)
    part = part_bytes(call.facts.nbytes, call.ctx.world_size)
    second = _piece(call.ctx, 2)
    return {**arithmetic(call), "part": part, "second": second, "COUNT": per_tile, "WAITED": waited}


def _by_puts(call: Planned) -> dict[str, Any]:
    ctx = call.ctx

    def make() -> dict[str, Any]:
        local = local_peers(ctx.topology) if ctx.stores else []
        remote = [rank for rank in successors(ctx.topology) if rank not in local]
        return {"routes": make_routes(ctx, local, remote), "nodes": nodes_of(ctx.topology, ctx.device)}

    tables = on_device(ctx, POLICY.operation, "all_reduce", make)
    # On one node that stores nothing is put, and the outbox is not used: two pieces are enough.
    pieces = 2 if needs_stores(call.facts) is None else 3
    outbox, second = _piece(ctx, pieces), (pieces - 1) * _piece(ctx, pieces)
    return {**_parts(call), **tables, "outbox": outbox, "second": second}


ALL_REDUCE = Collective(
    POLICY,
    {
        "one_shot": Algorithm(
            kernel=lambda call: kernels_words.all_reduce_one_shot,
            programs=lambda call: call.plan.channels,
            values=_words(1),
        ),
        "two_shot": Algorithm(
            kernel=lambda call: kernels_words.all_reduce_two_shot,
            programs=lambda call: call.plan.channels,
            values=_words(2),
        ),
        "direct": Algorithm(
            kernel=lambda call: kernels_direct.all_reduce_direct,
            programs=lambda call: call.plan.channels * (2 * call.ctx.world_size - 1),
            values=_parts,
        ),
        "1d": Algorithm(
            kernel=lambda call: kernels_puts.all_reduce_puts,
            programs=lambda call: call.plan.channels * (2 * call.ctx.world_size - 1),
            values=_by_puts,
        ),
    },
    shapes=lambda shape, world: (torch.Size(shape),),
    layout="same",
    room=_room,
)
"""The host side. Options of a call are its dtype and its operation."""
