# SPDX-License-Identifier: Apache-2.0
"""How the algorithms of reduce-scatter are launched."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

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
from tdcoll.collectives.reduce_scatter import kernels_direct, kernels_pull, kernels_puts, kernels_words
from tdcoll.collectives.reduce_scatter.policy import POLICY
from tdcoll.context import CollectiveContext
from tdcoll.primitives.group import Window, nodes_of
from tdcoll.primitives.puts import Routes

__all__ = ["REDUCE_SCATTER"]

_REDUCED_BYTES = 16 << 10
"""Bytes of a chunk that one program reduces."""


def _reducers(call: Planned) -> int:
    return max(1, min(call.ctx.world_size, call.plan.chunk // _REDUCED_BYTES))


def _sums(call: Planned) -> dict[str, Any]:
    return {**tiles(call), "reducers": _reducers(call)}


def _routes(ctx: CollectiveContext) -> Routes:
    local = local_peers(ctx.topology) if ctx.stores else []
    return make_routes(ctx, local, [rank for rank in successors(ctx.topology) if rank not in local])


def _tables(call: Planned) -> dict[str, Any]:
    def make() -> dict[str, Any]:
        return {"routes": _routes(call.ctx), "nodes": nodes_of(call.ctx.topology, call.ctx.device)}

    made: dict[str, Any] = on_device(call.ctx, POLICY.operation, "reduce_scatter", make)
    return made


def _shapes(shape: torch.Size, world: int) -> tuple[torch.Size, ...]:
    if not shape or shape[0] % world:
        return ()
    part = torch.Size((shape[0] // world, *shape[1:]))
    return (part, shape[1:]) if shape[0] == world else (part,)


def _half(ctx: CollectiveContext) -> int:
    """Bytes of the inbox, and of the outbox, of a segment where a rank has to put."""
    return ctx.capacity // 32 * 16


def _room(ctx: CollectiveContext, facts: Facts, algorithm: str) -> int:
    if algorithm == "pull":  # which stages nothing
        return max(1, facts.nbytes)
    room = ctx.capacity if needs_stores(facts) is None else _half(ctx)
    return room // 128 * 128 or room // 16 * 16


REDUCE_SCATTER = Collective(
    POLICY,
    {
        "ll": Algorithm(
            kernel=lambda call: kernels_words.reduce_scatter_words,
            programs=programs_of_words,
            values=of_words,
        ),
        "direct": Algorithm(
            kernel=lambda call: kernels_direct.reduce_scatter_direct,
            programs=lambda call: call.plan.channels * (call.ctx.world_size - 1 + _reducers(call)),
            values=_sums,
        ),
        "pull": Algorithm(
            kernel=lambda call: kernels_pull.reduce_scatter_pull,
            programs=lambda call: call.plan.channels + 1,
            values=lambda call: {**tiles(call), "window": Window(0, 0, call.deltas, tl.constexpr(1))},
        ),
        "1d": Algorithm(
            kernel=lambda call: kernels_puts.reduce_scatter_puts,
            programs=lambda call: call.plan.channels * (call.ctx.world_size - 1 + _reducers(call)),
            values=lambda call: {**_sums(call), **_tables(call), "outbox": _half(call.ctx)},
        ),
    },
    shapes=_shapes,
    layout="scatter",
    room=_room,
)
"""The host side. Options of a call are its dtype and its operation."""
