# SPDX-License-Identifier: Apache-2.0
"""Facts about a sparse all-reduce before the ranks have exchanged their ids."""

from __future__ import annotations

from dataclasses import dataclass

from tdcoll.arguments import byte_text
from tdcoll.collectives._host.explain import UNSUPPORTED, Explanation
from tdcoll.collectives._host.spec import DEFAULT, REQUESTED
from tdcoll.collectives.sparse_all_reduce.context import SparseContext, segment_fits
from tdcoll.collectives.sparse_all_reduce.policy import ALGORITHMS, choose, prefers_dense
from tdcoll.runtime.topology import Topology

__all__ = ["Capacities", "explain_rows"]

_NAME = "sparse_all_reduce"


@dataclass(frozen=True)
class Capacities:
    """Those of a :class:`SparseContext`, and what else the choice looks at."""

    topology: Topology
    max_rows_per_rank: int
    max_row_bytes: int
    max_union_rows: int
    grow: bool
    dense_allowed: bool
    beside_others: bool = False

    @classmethod
    def of(cls, ctx: SparseContext) -> Capacities:
        """Return those of a context."""
        rows, row_bytes, union = ctx.max_rows_per_rank, ctx.max_row_bytes, ctx.max_union_rows
        dense = ctx.process_group is not None
        return cls(ctx.topology, rows, row_bytes, union, ctx.grow, dense, ctx.beside_others)


def explain_rows(
    capacities: Capacities, rows: int, row_bytes: int, num_rows: int | None = None, algorithm: str = "auto"
) -> Explanation:
    """Explain a call.

    Args:
        capacities: of the context.
        rows, row_bytes: that this rank brings.
        num_rows: of the table; None: not known.

    Raises:
        ValueError: an unknown algorithm.
    """
    topology, most = capacities.topology, capacities.max_rows_per_rank
    world, widest = topology.world_size, capacities.max_row_bytes
    union = capacities.max_union_rows

    def chosen(wanted: str) -> str:
        considered = widest if wanted == "auto" else min(row_bytes, widest)
        return choose(
            wanted,
            topology=topology,
            max_rows_per_rank=most,
            max_row_bytes=widest,
            segments_fit=segment_fits(world, most, widest, union, considered),
            dense_allowed=capacities.dense_allowed,
            beside_others=capacities.beside_others,
        )

    unsupported = {}
    for name in ALGORITHMS[1:]:
        try:
            chosen(name)
        except ValueError as error:
            unsupported[name] = str(error)
    group, nbytes = topology.describe(), rows * row_bytes
    if algorithm in unsupported:
        why = unsupported[algorithm]
        return Explanation(_NAME, nbytes, group, None, reason=UNSUPPORTED, why=why, unsupported=unsupported)
    taken = chosen(algorithm)
    capacity = f"{most} rows of {byte_text(widest)} per rank, {union} together"
    notes = ["the number of different rows, and thus of launches' thread blocks, is known after the exchange of ids"]
    if rows > most or row_bytes > widest:
        grows = "the context grows first" if capacities.grow else "if that many are different, the call is refused"
        notes.append(f"{rows} rows of {byte_text(row_bytes)} exceed the context's capacity of {capacity}: {grows}")
    dense = algorithm == "auto" and taken == "owner" and capacities.dense_allowed
    if dense and (num_rows is None or prefers_dense(world * min(most, union), num_rows, topology)):
        if topology.n_nodes > 1:
            notes.append("dense instead if the ranks bring more than half of the table each, on average")
    why = f"by the capacity of the context, {capacity}" if algorithm == "auto" else ""
    reason = DEFAULT if algorithm == "auto" else REQUESTED
    return Explanation(_NAME, nbytes, group, taken, reason=reason, why=why, unsupported=unsupported, notes=notes)
