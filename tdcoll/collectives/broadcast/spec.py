# SPDX-License-Identifier: Apache-2.0
"""The spec of the broadcast: :data:`SPEC`. The option of a call is its root."""

from __future__ import annotations

from functools import partial
from typing import Any

import triton

from tdcoll.calls.algorithms import by_ll, by_loop, by_puts, loop_words
from tdcoll.calls.collective import CollectiveOperation
from tdcoll.calls.launch_spec import LaunchSpec, routes_beside_stores
from tdcoll.calls.plan import (
    Facts,
    cut_chunks,
    needs_stores,
    per_segment,
)
from tdcoll.calls.spec import Algorithm, BackendLimits, Collective
from tdcoll.collectives.broadcast import kernels
from tdcoll.collectives.broadcast.policy import blocks_of_puts, default


def _epoch(facts: Facts) -> int:
    return facts.capacity


def _stores(spec: LaunchSpec) -> dict[str, Any]:
    return {"WORLD_POW2": triton.next_power_of_2(spec.ctx.world_size)}


def _loop(spec: LaunchSpec) -> dict[str, Any]:
    return {**_stores(spec), "WORDS": loop_words(spec)}


def _puts(spec: LaunchSpec) -> dict[str, Any]:
    return {**_stores(spec), "routes": routes_beside_stores(spec.ctx, "broadcast")}


SPEC = Collective(
    name="broadcast",
    segments=(1, 1),
    algorithms=(
        by_ll(lambda facts: kernels.broadcast_ll),
        Algorithm(
            "direct",
            supports=needs_stores,
            cut=partial(cut_chunks, algorithm="direct"),
            kernel=lambda facts: kernels.broadcast_direct,
            blocks=per_segment,
            values=_stores,
            epoch=_epoch,
        ),
        by_loop(lambda facts: kernels.broadcast_loop, _loop, _epoch),
        by_puts(lambda facts: kernels.broadcast_puts, blocks_of_puts, _puts, _epoch),
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
