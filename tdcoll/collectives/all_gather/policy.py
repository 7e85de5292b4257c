# SPDX-License-Identifier: Apache-2.0
"""Which all-gather to launch, and how: pure functions of facts that are the same on every rank.

Two ranks that choose differently wait for signals that nobody sends. So nothing here may look at the rank, the clock,
the device or an environment variable: only at the operation's size, the topology's shape and the caller's wish.
"""

from __future__ import annotations

from dataclasses import dataclass

from tdcoll.context import CHANNELS
from tdcoll.runtime.topology import Topology

__all__ = ["ALGORITHMS", "Plan", "choose"]

ALGORITHMS = ("auto", "ll", "1d", "2d")

CHUNK_ALIGNMENT = 128
"""Bytes. Chunks start at multiples of it, so that full 128-byte lines travel."""

TARGET_CHUNK_BYTES = 8 << 10
"""Chunks of about this size keep one block's copy short beside the crossing."""

MANY_WARPS_FROM = 128 << 10
"""Bytes. Larger chunks are copied by 16 warps, smaller ones by 8."""

LL_BLOCKS = (256, 1024)
"""32-bit words that one LL program moves: the first that holds the message, or the last."""


@dataclass(frozen=True)
class Plan:
    """How one all-gather is launched.

    Attributes:
        algorithm: ``"ll"``, ``"1d"`` or ``"2d"``.
        channels: chunks that each segment is cut into.
        chunk: bytes of a chunk; the last may be shorter.
        num_warps: warps of each program.
    """

    algorithm: str
    channels: int
    chunk: int
    num_warps: int


def choose(nbytes: int, topology: Topology, algorithm: str = "auto", *, ll_bytes: int = -1) -> Plan:
    """The plan for ``nbytes`` per rank over ``topology``; the same on all of its ranks.

    ``"auto"`` takes LL where it can, 2D where there are several nodes of several ranks each, all of one size (a segment
    then crosses between nodes once per node pair), and 1D everywhere else.

    Args:
        nbytes: bytes per rank.
        topology: the group.
        algorithm: one of :data:`ALGORITHMS`.
        ll_bytes: the most that the context can send by LL, -1 if its ranks cannot store to each other's memory.

    Raises:
        ValueError: an unknown algorithm, 2D over nodes of different sizes, LL between nodes or beyond ``ll_bytes``.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}")
    per_node = topology.ranks_per_node
    if algorithm == "2d" and per_node is None:
        raise ValueError(
            "algorithm='2d' needs the same number of ranks on every node; this group has "
            f"{topology.describe()}. Use algorithm='1d' or 'auto'."
        )
    if algorithm == "ll" and (topology.n_nodes > 1 or nbytes > ll_bytes):
        limit = f"at most {ll_bytes} bytes per rank" if ll_bytes >= 0 else "ranks that can store to each other's memory"
        raise ValueError(
            f"algorithm='ll' needs one node and {limit}; got {nbytes} bytes on {topology.describe()}. Use '1d' or "
            "'auto'."
        )
    if algorithm == "auto":
        if topology.n_nodes == 1 and nbytes <= ll_bytes:
            algorithm = "ll"
        else:
            algorithm = "2d" if topology.n_nodes > 1 and per_node is not None and per_node > 1 else "1d"
    if algorithm == "ll":
        words = max(1, -(-nbytes // 4))
        block = next((size for size in LL_BLOCKS if words <= size), LL_BLOCKS[-1])
        return Plan("ll", -(-words // block), 4 * block, block // 128)
    channels = min(CHANNELS, max(1, -(-nbytes // TARGET_CHUNK_BYTES)))
    chunk = -(-nbytes // channels)
    chunk = max(1, -(-chunk // CHUNK_ALIGNMENT)) * CHUNK_ALIGNMENT
    channels = max(1, -(-nbytes // chunk))
    return Plan(algorithm, channels, chunk, 16 if chunk >= MANY_WARPS_FROM else 8)
