# SPDX-License-Identifier: Apache-2.0
"""The spec of the all-reduce: :data:`SPEC`. Options of a call are its dtype and its operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tdcoll.calls import copies
from tdcoll.calls.collective import CollectiveOperation
from tdcoll.calls.collective_epilogue import EpilogueOperation
from tdcoll.calls.launch_spec import (
    LaunchSpec,
    by_words,
    device_table,
    rail_routes,
    routes_beside_stores,
    tiles,
)
from tdcoll.calls.plan import (
    Facts,
    Plan,
    loop_blocks,
    needs_puts,
    needs_rails,
    needs_stores,
    summing_blocks,
)
from tdcoll.calls.spec import Algorithm, BackendLimits, Collective
from tdcoll.collectives.all_reduce import (
    kernels_direct,
    kernels_loop,
    kernels_nodes,
    kernels_puts,
    kernels_words,
)
from tdcoll.collectives.all_reduce.policy import (
    ONE_SHOT,
    TWO_SHOT,
    cut_parts,
    default,
    epoch_of_parts,
    one_shot_bytes,
    part_bytes,
    parts,
    payload_of_parts,
    piece_bytes,
    pieces,
)
from tdcoll.primitives.group import nodes_of


def _parts(call: LaunchSpec) -> dict[str, Any]:
    facts = call.facts
    algorithm = call.plan.algorithm
    part = part_bytes(facts.nbytes, parts(facts.topology, algorithm))
    piece = piece_bytes(facts, algorithm)
    second = (pieces(facts, algorithm) - 1) * piece
    return {
        **tiles(call),
        "part": part,
        "outbox": piece,
        "second": second,
        "ZERO_COPY": facts.symmetric_result,
    }


def _by_puts(call: LaunchSpec) -> dict[str, Any]:
    ctx = call.ctx
    topology = call.ctx.topology
    routes = (rail_routes if call.plan.algorithm == "2d" else routes_beside_stores)(
        ctx, "all_reduce"
    )
    nodes = device_table(ctx, "all_reduce", "nodes", lambda: nodes_of(topology, ctx.device))
    return {**_parts(call), "routes": routes, "nodes": nodes, "place": topology.place}


def _direct_blocks(facts: Facts, plan: Plan) -> int:
    world = facts.topology.world_size
    return plan.chunks * (world + 1 if facts.symmetric_result else 2 * world - 1)


def _by_parts(
    name: str,
    supports: Callable[[Facts], str | None],
    kernel: Callable[[Facts], Any],
    blocks: Callable[[Facts, Plan], int],
    **more: Any,
) -> Algorithm:
    return Algorithm(
        name,
        supports=supports,
        cut=partial(cut_parts, algorithm=name),
        kernel=kernel,
        blocks=blocks,
        payload=partial(payload_of_parts, algorithm=name),
        epoch=partial(epoch_of_parts, algorithm=name),
        **{"values": _parts, **more},
    )


def _copies(spec: LaunchSpec) -> copies.CopySequence:
    """Two hops, as ``direct``: parts to the first half of the inbox, then sums to the second half,
    or into the result."""
    values = _parts(spec)
    part = values["part"]
    pulled = spec.facts.symmetric_result
    sizes = [
        min(part, max(0, spec.facts.nbytes - rank * part)) for rank in range(spec.ctx.world_size)
    ]
    parts = copies.sums(spec, part, sizes, whole=True, pulled=pulled)
    results = copies.gathered(spec, part, sizes, values["second"], pulled)
    return copies.CopySequence(spec, parts, results)


SPEC = Collective(
    name="all_reduce",
    segments=(1, 1),
    algorithms=(
        by_words(ONE_SHOT, lambda facts: kernels_words.all_reduce_one_shot),
        by_words(TWO_SHOT, lambda facts: kernels_words.all_reduce_two_shot),
        _by_parts(
            "direct", needs_stores, lambda facts: kernels_direct.all_reduce_direct, _direct_blocks
        ),
        _by_parts(
            "loop",
            needs_stores,
            lambda facts: kernels_loop.all_reduce_loop,
            loop_blocks,
            works_with_any_grid=True,
        ),
        _by_parts(
            "ce",
            needs_stores,
            copies.kernel,
            summing_blocks,
            works_with_any_grid=True,
            copies=_copies,
        ),
        _by_parts(
            "1d",
            needs_puts,
            lambda facts: kernels_puts.all_reduce_puts,
            lambda facts, plan: plan.chunks * (2 * facts.topology.world_size - 1),
            values=_by_puts,
        ),
        _by_parts(
            "2d",
            needs_rails,
            lambda facts: kernels_nodes.all_reduce_nodes,
            lambda facts, plan: plan.chunks * (2 * len(facts.topology.members[0]) - 1),
            values=_by_puts,
        ),
    ),
    default=default,
    torch="all_reduce",
    # Three pieces between nodes; and a context on which small calls are one-shot, which sends all
    # data.
    capacity=lambda segment, world: max(
        3 * (segment // world + 16), min(segment, one_shot_bytes(world))
    ),
    adjoint="all_reduce",
    reduces=True,
    backend_limits=BackendLimits(more_ranks=1 << 20),
)

OPERATION = CollectiveOperation(SPEC)
"""Makes the calls."""

WITH_EPILOGUE = EpilogueOperation(OPERATION)
"""Makes the calls with an epilogue."""
