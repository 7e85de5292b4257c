# SPDX-License-Identifier: Apache-2.0
"""The spec of the all-gather: :data:`SPEC`. The only option of a call is whether segments are
counted."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import triton

from tdcoll.calls.call_launches import CallLaunches, launches_by
from tdcoll.calls.collective import CollectiveOperation
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.launch_spec import (
    KernelOptions,
    LaunchSpec,
    device_table,
    local_peers,
    make_routes,
    rail_routes,
    successors,
)
from tdcoll.calls.plan import (
    Facts,
    Landing,
    cut_chunks,
    needs_puts,
    needs_rails,
    needs_stores,
    per_segment,
)
from tdcoll.calls.spec import WORLD, Algorithm, Collective
from tdcoll.collectives.all_gather import kernels_puts, kernels_ring
from tdcoll.collectives.all_gather.policy import blocks_of_puts, default, epoch
from tdcoll.collectives.exchange.spec import algorithms, allow_pdl
from tdcoll.primitives.puts import Routes


def _routes(call: LaunchSpec) -> Routes:
    """Return the ranks that this rank sends to."""
    ctx = call.ctx
    topology = call.ctx.topology
    if call.plan.algorithm == "2d":
        return rail_routes(ctx, "all_gather")
    remote = [rank for rank in successors(topology) if topology.nodes[rank] != topology.node]
    return device_table(
        ctx, "all_gather", "to all", lambda: make_routes(ctx, local_peers(topology), remote)
    )


def _puts(call: LaunchSpec) -> dict[str, Any]:
    block = triton.next_power_of_2(call.ctx.world_size)
    return {"routes": _routes(call), "BLOCK": block, "COUNTED": call.options.device_counted}


SPEC = Collective(
    name="all_gather",
    segments=(1, WORLD),
    algorithms=(
        *algorithms(one_segment=True),
        Algorithm(
            "ring",
            supports=needs_stores,
            cut=partial(cut_chunks, algorithm="ring"),
            kernel=lambda facts: kernels_ring.all_gather_ring,
            blocks=per_segment,
            epoch=epoch,
            allow_pdl=allow_pdl,
            distinct_on=lambda topology: topology.world_size > 2,  # from direct stores
        ),
        Algorithm(
            "1d",
            supports=needs_puts,
            # In place in one node into larger chunks, because nothing is copied out.
            cut=lambda facts, entry: cut_chunks(
                facts, entry, "1d", large=facts.in_place and facts.topology.n_nodes == 1
            ),
            kernel=lambda facts: kernels_puts.all_gather_1d,
            blocks=blocks_of_puts,
            values=_puts,
            epoch=epoch,
        ),
        Algorithm(
            "2d",
            supports=needs_rails,
            cut=partial(cut_chunks, algorithm="2d"),
            kernel=lambda facts: kernels_puts.all_gather_2d,
            blocks=blocks_of_puts,
            values=_puts,
            epoch=epoch,
        ),
    ),
    default=default,
    torch="all_gather_into_tensor",
    capacity=lambda segment, world: segment,
    adjoint="reduce_scatter",
    in_place=True,
)

OPERATION = CollectiveOperation(SPEC)
"""Makes the calls."""


def counted_launches(ctx: CollectiveContext, nbytes: int) -> CallLaunches:
    """Return prepared launches of all-gathers in place whose sizes are counted on the device, for
    other collectives.

    A call, ``launches(stream, segment, 0, segments)``, is one epoch of ``ctx``, which the caller has
    begun. Afterwards every rank has every segment, up to its count. It uses the default heuristic
    without LL, which doesn't support counts.

    Args:
        nbytes: from one segment to the next, a multiple of 16. Segments are in symmetric memory,
            16-byte aligned; this rank's own is filled, and begins with an int64: the bytes that it
            uses, itself included.
    """

    key = ("all_gather", "device counted", nbytes)
    launches: CallLaunches | None = ctx.cache.get(key)
    if launches is None:
        facts = Facts.of(ctx, nbytes, landing=Landing.CALLER_BUFFER)
        plan = SPEC.choose(dataclasses.replace(facts, ll_bytes=-1))
        options = KernelOptions(device_counted=True)
        launches = launches_by(SPEC, ctx, facts, plan, options)
        ctx.remember(key, launches)
    return launches
