# SPDX-License-Identifier: Apache-2.0
"""Explanations of matmuls that communicate, for ``tdcoll.explain`` and the log."""

from __future__ import annotations

from tdcoll.calls.explain import UNSUPPORTED, Explanation
from tdcoll.calls.plan import Facts
from tdcoll.calls.spec import DEFAULT, REQUESTED, TABLE
from tdcoll.fused.matmul.policy import (
    ALGORITHMS,
    COMPOSED,
    REDUCE,
    SCATTER,
    MatmulPlan,
    MatmulShape,
    by_table,
    choose,
    plan_of,
    problem_of,
)


def explain_matmul(
    shape: MatmulShape,
    facts: Facts,
    algorithm: str | MatmulPlan,
    batch_invariant: bool,
    keeps: bool,
) -> Explanation:
    """Explain a call: its bytes are those that a rank sends to another, or of all rows of an
    all-reduce; its chunks are tiles of this rank's result, and in an all-gather pieces of a
    shard."""
    world = facts.topology.world_size
    group = facts.topology.describe()
    nbytes = shape.nbytes if shape.name == REDUCE else shape.nbytes // world
    unsupported: dict[str, str] = {}
    for name in ALGORITHMS[shape.name]:
        problem = problem_of(shape, plan_of(shape, world, name, keeps), facts)
        if problem is not None:
            unsupported[name] = f"{problem}{group}"
    try:
        plan, why = choose(shape, facts, algorithm, batch_invariant, keeps)
    except ValueError as error:
        if algorithm not in ALGORITHMS[shape.name]:
            raise
        return Explanation(
            shape.name,
            nbytes,
            group,
            None,
            reason=UNSUPPORTED,
            why=str(error),
            unsupported=unsupported,
        )
    reason = DEFAULT if algorithm == "auto" else REQUESTED
    if shape.measured is not None and why == by_table(shape.measured):
        reason = TABLE
    if plan.algorithm == COMPOSED:  # its collective has numbers of its own
        return Explanation(
            shape.name, nbytes, group, COMPOSED, reason=reason, why=why, unsupported=unsupported
        )
    chunks = plan.cut.tiles(
        shape.rows // world if shape.name == SCATTER else shape.rows, shape.columns
    )
    chunk_bytes = plan.cut.rows * plan.cut.columns * shape.out_itemsize
    if plan.piece:
        chunks = max(1, -(-nbytes // plan.piece))
        chunk_bytes = plan.piece
    blocks = plan.blocks + plan.pushers + plan.keepers
    return Explanation(
        shape.name, nbytes, group, plan.algorithm, chunks, chunk_bytes, blocks, plan.cut.num_warps, 1,
        reason, why, unsupported,
    )  # fmt: skip
