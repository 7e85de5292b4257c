# SPDX-License-Identifier: Apache-2.0
"""The spec of the broadcast: :data:`SPEC`. The option of a call is its root."""

from __future__ import annotations

from functools import partial
from typing import Any

import triton

from tdcoll.calls.collective import CollectiveOperation
from tdcoll.calls.launch_spec import LaunchSpec, routes_beside_stores
from tdcoll.calls.plan import (
    Facts,
    cut_chunks,
    cut_loop,
    loop_blocks,
    needs_puts,
    needs_stores,
    per_segment,
)
from tdcoll.calls.spec import Algorithm, BackendLimits, Collective
from tdcoll.calls.words import LL_WORD_BYTES, cut_words, needs_words
from tdcoll.collectives.broadcast import kernels
from tdcoll.collectives.broadcast.policy import blocks_of_puts, default


def _epoch(facts: Facts) -> int:
    return facts.capacity


def _stores(spec: LaunchSpec) -> dict[str, Any]:
    return {"WORLD_POW2": triton.next_power_of_2(spec.ctx.world_size)}


def _loop(spec: LaunchSpec) -> dict[str, Any]:
    # 64 bytes for each thread
    return {**_stores(spec), "WORDS": 16 * 32 * spec.plan.num_warps}


def _puts(spec: LaunchSpec) -> dict[str, Any]:
    return {**_stores(spec), "routes": routes_beside_stores(spec.ctx, "broadcast")}


SPEC = Collective(
    name="broadcast",
    segments=(1, 1),
    algorithms=(
        Algorithm(
            "ll",
            supports=needs_words,
            cut=partial(cut_words, algorithm="ll"),
            kernel=lambda facts: kernels.broadcast_ll,
            blocks=per_segment,
            values=lambda spec: {"BLOCK": spec.plan.chunk // LL_WORD_BYTES},
            words=(LL_WORD_BYTES,),
        ),
        Algorithm(
            "direct",
            supports=needs_stores,
            cut=partial(cut_chunks, algorithm="direct"),
            kernel=lambda facts: kernels.broadcast_direct,
            blocks=per_segment,
            values=_stores,
            epoch=_epoch,
        ),
        Algorithm(
            "loop",
            supports=needs_stores,
            cut=lambda facts, entry: cut_loop(facts, entry, facts.nbytes),
            kernel=lambda facts: kernels.broadcast_loop,
            blocks=loop_blocks,
            values=_loop,
            epoch=_epoch,
            works_with_any_grid=True,
        ),
        Algorithm(
            "1d",
            supports=needs_puts,
            cut=partial(cut_chunks, algorithm="1d"),
            kernel=lambda facts: kernels.broadcast_puts,
            blocks=blocks_of_puts,
            values=_puts,
            epoch=_epoch,
        ),
    ),
    default=default,
    torch="broadcast",
    capacity=lambda segment, world: segment,
    adjoint="all_reduce",
    rooted=True,
    # Not measured: NCCL's root sends large messages once.
    backend_limits=BackendLimits(two_ranks=4 << 20),
)

OPERATION = CollectiveOperation(SPEC)
"""Makes the calls."""
