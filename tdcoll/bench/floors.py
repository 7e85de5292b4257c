# SPDX-License-Identifier: Apache-2.0
"""The least that an all-gather inside a node can take: what is known of GPUs, measured or given."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from tdcoll.bench.arithmetic import Floor
from tdcoll.bench.rows import Row

__all__ = ["FLOORS", "floor_of", "given_floor"]

FLOORS = {"NVIDIA H200": Floor(launch_us=0.8, crossing_us=1.0, gbps=341.0)}
"""Of GPUs with NVLink to all others of the node: launch and rate are measured; the crossing is about what a store and
the load that sees it take, and a result of the signal benchmark says it better."""

PAIR_GBPS = {"NVIDIA H200": 361.0}
"""The rate between two GPUs that have nobody else to send to, both ways at once: the same for stores, bulk copies (TMA)
and copy engines."""


def floor_of(head: dict[str, Any], rows: Sequence[Any], floor: Floor | None) -> Floor | None:
    """That of these rows, if there is one: inside a node, of GPUs all of one kind."""
    gpus = set(head["provenance"].get("gpus", []))
    if not all(isinstance(row, Row) and row.nodes == 1 and row.launch != "simulator" for row in rows):
        return None
    if floor is not None or len(gpus) != 1 or (name := gpus.pop()) not in FLOORS:
        return floor
    pair = name in PAIR_GBPS and all(row.ranks == 2 for row in rows)
    return dataclasses.replace(FLOORS[name], gbps=PAIR_GBPS[name]) if pair else FLOORS[name]


def given_floor(options: argparse.Namespace, results: Sequence[tuple[dict[str, Any], list[Any]]]) -> Floor | None:
    """The floor that options and a file of the signal benchmark give; None: that of the GPUs, if it is known.

    Raises:
        ValueError: something is missing.
    """
    crossings = [
        row.median_us
        for head, rows in results
        if head["benchmark"] == "signal"
        for row in rows
        if row.pattern == "one-way" and row.same_node and row.median_us and row.check == "ok"
    ]
    given = {
        "launch_us": options.floor_launch_us,
        "crossing_us": options.floor_crossing_us or min(crossings, default=None),
        "gbps": options.floor_GBps,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    gpus = {gpu for head, _ in results for gpu in head["provenance"].get("gpus", [])}
    usual = FLOORS.get(gpus.pop()) if len(gpus) == 1 else None
    if usual is not None:
        return dataclasses.replace(usual, **given)
    if len(given) == 3:
        return Floor(**given)
    if options.floor_launch_us or options.floor_crossing_us or options.floor_GBps:
        raise ValueError(
            "of these GPUs the floor is not known: give --floor-launch-us, --floor-crossing-us, --floor-GBps"
        )
    return None
