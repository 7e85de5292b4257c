# SPDX-License-Identifier: Apache-2.0
"""Facts about a sparse all-reduce before the ranks have exchanged their ids."""

from __future__ import annotations

from tdcoll.base.arguments import byte_text
from tdcoll.calls.explain import UNSUPPORTED, Explanation
from tdcoll.calls.spec import DEFAULT, REQUESTED
from tdcoll.collectives.sparse_all_reduce.policy import ALGORITHMS, Capacities, choose

__all__ = ["explain_rows"]

_NAME = "sparse_all_reduce"


def explain_rows(capacities: Capacities, rows: int, row_bytes: int, algorithm: str = "auto") -> Explanation:
    """Explain a call.

    Args:
        capacities: of the context.
        rows, row_bytes: that this rank brings.

    Raises:
        ValueError: an unknown algorithm.
    """
    topology, most, widest, union, grow, _ = capacities
    unsupported = {}
    for name in ALGORITHMS[1:]:
        try:
            choose(name, capacities, row_bytes)
        except ValueError as error:
            unsupported[name] = str(error)
    group, nbytes = topology.describe(), rows * row_bytes
    if algorithm in unsupported:
        why = unsupported[algorithm]
        return Explanation(_NAME, nbytes, group, None, reason=UNSUPPORTED, why=why, unsupported=unsupported)
    taken = choose(algorithm, capacities, row_bytes)
    capacity = f"{most} rows of {byte_text(widest)} per rank, {union} together"
    notes = ["the number of different rows, and thus of launches' thread blocks, is known after the exchange of ids"]
    if rows > most or row_bytes > widest:
        grows = "the context grows first" if grow else "if that many are different, the call is refused"
        notes.append(f"{rows} rows of {byte_text(row_bytes)} exceed the context's capacity of {capacity}: {grows}")
    why = f"by the capacity of the context, {capacity}" if algorithm == "auto" else ""
    reason = DEFAULT if algorithm == "auto" else REQUESTED
    return Explanation(_NAME, nbytes, group, taken, reason=reason, why=why, unsupported=unsupported, notes=notes)
