# SPDX-License-Identifier: Apache-2.0
"""The spec of the all-to-all: :data:`SPEC`. Calls have no options."""

from __future__ import annotations

from typing import Any

from tdcoll.calls.algorithms import by_puts
from tdcoll.calls.collective import CollectiveOperation
from tdcoll.calls.launch_spec import LaunchSpec, routes_beside_stores
from tdcoll.calls.plan import half, inbox_epoch
from tdcoll.calls.spec import WORLD, BackendLimits, Collective
from tdcoll.collectives.all_to_all import kernels_puts
from tdcoll.collectives.all_to_all.policy import blocks_of_puts, default
from tdcoll.collectives.exchange.spec import algorithms


def _puts(call: LaunchSpec) -> dict[str, Any]:
    return {
        "routes": routes_beside_stores(call.ctx, "all_to_all"),
        "outbox": half(call.ctx.capacity),
    }


SPEC = Collective(
    name="all_to_all",
    segments=(WORLD, WORLD),
    algorithms=(
        *algorithms(one_segment=False),
        by_puts(lambda facts: kernels_puts.all_to_all_puts, blocks_of_puts, _puts, inbox_epoch),
    ),
    default=default,
    torch="all_to_all_single",
    capacity=lambda segment, world: 2 * segment,  # half is to put from
    adjoint="all_to_all",
    backend_limits=BackendLimits(two_ranks=4 << 20),
)

OPERATION = CollectiveOperation(SPEC)
"""Makes the calls."""
