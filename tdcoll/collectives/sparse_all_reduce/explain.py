# SPDX-License-Identifier: Apache-2.0
"""How a sparse all-reduce is made, before the ranks have exchanged their ids: for the log."""

from __future__ import annotations

from tdcoll.base.arguments import byte_text
from tdcoll.calls.explain import Explanation
from tdcoll.calls.spec import DEFAULT, REQUESTED
from tdcoll.collectives.sparse_all_reduce.policy import Capacities, choose

__all__ = ["explain_rows"]


def explain_rows(capacities: Capacities, rows: int, row_bytes: int, algorithm: str = "auto") -> Explanation:
    """Explain a call to which this rank brings so many rows, of so many bytes.

    Raises:
        ValueError: an unknown algorithm, or one that doesn't support the call.
    """
    topology, most, widest, union, *_ = capacities
    reason, why = REQUESTED, ""
    if algorithm == "auto":
        reason = DEFAULT
        why = f"by the capacity of the context, {most} rows of {byte_text(widest)} per rank, {union} together"
    taken = choose(algorithm, capacities, row_bytes)
    return Explanation("sparse_all_reduce", rows * row_bytes, topology.describe(), taken, reason=reason, why=why)
