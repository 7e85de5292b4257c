# SPDX-License-Identifier: Apache-2.0
"""The least that a collective inside a node can take: what is known of GPUs, measured or given. Pure."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from tdcoll.bench.arithmetic import Floor

__all__ = ["FLOORS", "floor_of", "parse_floor"]

FLOORS = {"NVIDIA H200": Floor(launch_us=0.8, crossing_us=1.0, gbps=390.0)}
"""Of GPUs with NVLink to all others of the node: launch and rate are measured. The rate is the best that was seen, of
copy engines around a ring of 8 (stores to all 7 others at once reached 341). The crossing is about what a store and the
load that sees it take; the signal benchmark measures it."""

PAIR_GBPS = {"NVIDIA H200": 361.0}
"""The rate between two GPUs that have nobody else to send to, both ways at once: the same for stores, bulk copies (TMA)
and copy engines."""


def floor_of(head: dict[str, Any], rows: Sequence[Any], given: Floor | None = None) -> Floor | None:
    """That of these rows: ``given``, or what is known of their GPUs. None between nodes and in the simulator."""
    if not rows or any(row.nodes > 1 or row.launch == "simulator" for row in rows):
        return None
    gpus = set(head["provenance"].get("gpus", []))
    if given is not None or len(gpus) != 1 or (name := gpus.pop()) not in FLOORS:
        return given
    pair = name in PAIR_GBPS and all(row.ranks == 2 for row in rows)
    return dataclasses.replace(FLOORS[name], gbps=PAIR_GBPS[name]) if pair else FLOORS[name]


def parse_floor(text: str) -> Floor:
    """``"0.8,1,341"``: an empty kernel, a crossing (both in microseconds), and the rate in GB/s.

    Raises:
        argparse.ArgumentTypeError: it is not three numbers above 0.
    """
    try:
        launch_us, crossing_us, gbps = map(float, text.split(","))
        if min(launch_us, crossing_us, gbps) > 0:
            return Floor(launch_us, crossing_us, gbps)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected three numbers above 0, such as 0.8,1,341; got {text!r}")
