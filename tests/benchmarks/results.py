# SPDX-License-Identifier: Apache-2.0
"""Synthetic results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tdcoll.tools.measure.results import Row, save

H200 = "NVIDIA H200"

FACTS: dict[str, Any] = {
    "tdcoll": "0.1.0",
    "commit": 10 * "0123",
    "dirty": True,
    "torch": "9.9.0",
    "triton": "8.8.0",
    "nvshmem": "7.7.7",
    "nccl": "6.6.6",
    "cuda": "5.5",
    "driver": "444.4",
    "environment": {},
}


def head(benchmark: str = "all_gather", gpu: str = "NVIDIA Test", **facts: Any) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "command": f"bash launch.sh --nproc 8 -m tdcoll bench {benchmark} -e 4K",
        "started": "2031-02-03T04:05:06+00:00",
        "provenance": {**FACTS, "gpus": [gpu] * 8, **facts},
    }


def row_of(algorithm: str, median_us: float | None, facts: dict[str, Any], **more: Any) -> Row:
    fields: dict[str, Any] = {
        "ranks": 8,
        "nodes": 1,
        "peer": False,
        "launch": "graph",
        "check": "ok",
    }
    return Row(algorithm=algorithm, median_us=median_us, facts=facts, **{**fields, **more})


def row(
    size: int,
    algorithm: str,
    median_us: float | None,
    *,
    operation: str = "all_gather",
    op: str | None = None,
    facts: dict[str, Any] | None = None,
    **more: Any,
) -> Row:
    """Return a row of a dense collective."""
    known = {"bytes_per_rank": size, "operation": operation, "dtype": "bfloat16", "op": op}
    return row_of(algorithm, median_us, {**known, **(facts or {})}, **more)


def peer(size: int, algorithm: str, median_us: float | None, **more: Any) -> Row:
    """Return a row of a baseline."""
    return row(size, algorithm, median_us, peer=True, **more)


def example() -> list[Row]:
    return [
        row(1024, "auto", 4.0),
        row(1024, "in-place", 18.0),
        peer(1024, "nccl", 16.0),
        row(1024, "1d", 9.0),
        row(4096, "auto", 40.0),
        row(4096, "in-place", 30.0),
        peer(4096, "nccl", 35.0),
        row(4096, "1d", 9.0),
    ]


def sparse(
    rows: int,
    algorithm: str,
    median_us: float | None,
    *,
    copy: bool | None = True,
    dtype: str = "float32",
    **more: Any,
) -> Row:
    """Return a row of a sparse all-reduce."""
    facts = {
        "rows": rows,
        "dim": 512,
        "num_rows": 5_000_000,
        "distribution": "uniform",
        "bytes_per_rank": 14080.0 * rows,
        "floor_us": 14080.0 * rows / 390e3,
        "form": "coo",
        "copy": copy,
        "dtype": dtype,
    }
    return row_of(algorithm, median_us, facts, launch="eager", **more)


def sparse_peer(rows: int, algorithm: str, median_us: float | None, **more: Any) -> Row:
    return sparse(rows, algorithm, median_us, copy=None, peer=True, **more)


def sparse_example() -> list[Row]:
    return [
        sparse(1000, "owner", 200.0),
        sparse(1000, "owner", 150.0, copy=False),
        sparse(1000, "auto", 180.0, note="took gather"),
        sparse_peer(1000, "published", 900.0),
        sparse_peer(1000, "allgather", 160.0),
        sparse(50_000, "owner", 4000.0),
        sparse(50_000, "auto", 4100.0, note="took owner"),
        sparse_peer(50_000, "published", 9000.0),
        sparse_peer(50_000, "allgather", 8000.0),
        sparse_peer(50_000, "dense", None, check="not run", note="too large"),
    ]


def blocks_example() -> list[Row]:
    def used(size: int, name: str, us: float, sms: int, **facts: Any) -> Row:
        return row(size, name, us, facts={"sms": sms, **facts})

    return [
        used(1024, "loop 16 blocks", 5.0, 16),
        used(1024, "loop 8 blocks", 10.0, 8),
        used(1024, "loop", 7.0, 12),
        used(1024, "auto", 3.0, 128, took="ll"),
        used(1024, "ll", 3.0, 128),
        used(1024, "ce", 9.0, 1),
        peer(1024, "nccl", 6.0),
        used(4096, "loop 8 blocks", 20.0, 8),
    ]


def write(path: Path, rows: list[Row], head: dict[str, Any]) -> Path:
    save(path, head, rows)
    return path
