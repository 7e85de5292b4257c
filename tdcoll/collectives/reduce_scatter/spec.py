# SPDX-License-Identifier: Apache-2.0
"""The spec of the reduce-scatter: :data:`SPEC`. Options of a call are its dtype and its
operation."""

from __future__ import annotations

from functools import partial
from typing import Any

from tdcoll.calls import copies
from tdcoll.calls.algorithms import by_loop, by_puts
from tdcoll.calls.collective import CollectiveOperation
from tdcoll.calls.collective_epilogue import EpilogueOperation
from tdcoll.calls.launch_spec import LaunchSpec, by_words, device_table, routes_beside_stores, tiles
from tdcoll.calls.plan import (
    cut_chunks,
    cut_copies,
    half,
    inbox_epoch,
    needs_stores,
    summing_blocks,
)
from tdcoll.calls.spec import WORLD, Algorithm, BackendLimits, Collective
from tdcoll.collectives.reduce_scatter import (
    kernels_direct,
    kernels_loop,
    kernels_puts,
    kernels_words,
)
from tdcoll.collectives.reduce_scatter.policy import WORDS, blocks, default, reducers
from tdcoll.primitives.group import nodes_of


def _sums(call: LaunchSpec) -> dict[str, Any]:
    return {**tiles(call), "reducers": reducers(call.facts, call.plan)}


def _puts(call: LaunchSpec) -> dict[str, Any]:
    ctx = call.ctx
    nodes = device_table(ctx, "reduce_scatter", "nodes", lambda: nodes_of(ctx.topology, ctx.device))
    return {
        **_sums(call),
        "routes": routes_beside_stores(ctx, "reduce_scatter"),
        "nodes": nodes,
        "outbox": half(ctx.capacity),
    }


def _copies(spec: LaunchSpec) -> copies.CopySequence:
    sizes = [spec.facts.nbytes] * spec.ctx.world_size
    parts = copies.sums(spec, spec.segment_stride, sizes, whole=False)
    return copies.CopySequence(spec, parts)


SPEC = Collective(
    name="reduce_scatter",
    segments=(WORLD, 1),
    algorithms=(
        by_words(WORDS, lambda facts: kernels_words.reduce_scatter_words),
        Algorithm(
            "direct",
            supports=needs_stores,
            cut=partial(cut_chunks, algorithm="direct"),
            kernel=lambda facts: kernels_direct.reduce_scatter_direct,
            blocks=blocks,
            values=_sums,
            epoch=inbox_epoch,
        ),
        by_loop(lambda facts: kernels_loop.reduce_scatter_loop, tiles, inbox_epoch),
        Algorithm(
            "ce",
            supports=needs_stores,
            cut=lambda facts, entry: cut_copies(facts, entry, sums=True),
            kernel=copies.kernel,
            blocks=summing_blocks,
            epoch=inbox_epoch,
            works_with_any_grid=True,
            copies=_copies,
        ),
        by_puts(lambda facts: kernels_puts.reduce_scatter_puts, blocks, _puts, inbox_epoch),
    ),
    default=default,
    torch="reduce_scatter_tensor",
    capacity=lambda segment, world: 2 * segment,  # half is to put from
    adjoint="all_gather",
    reduces=True,
    backend_limits=BackendLimits(more_ranks=1 << 20),
)

OPERATION = CollectiveOperation(SPEC)
"""Makes the calls."""

WITH_EPILOGUE = EpilogueOperation(OPERATION)
"""Makes the calls with an epilogue."""
