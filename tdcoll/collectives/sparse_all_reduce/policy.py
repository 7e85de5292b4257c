# SPDX-License-Identifier: Apache-2.0
"""How to sum sparse rows: pure functions of facts that are the same on every rank.

Two ranks that choose differently wait for signals that nobody sends. So the choice sees the context's capacities, the
shape of the tensor, the topology, and counts that every rank has read from the same lists; never the rank, its own
number of rows, the clock or the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tdcoll.runtime.topology import Topology

__all__ = ["ALGORITHMS", "EXCHANGE_CHANNELS", "Counts", "Tiles"]
__all__ += ["choose", "dense_us", "may_be_dense", "owner_us", "tiles"]

ALGORITHMS = ("auto", "owner", "gather", "dense")

GATHER_BYTES = 64 << 10
"""Bytes of ids and rows of one rank, at the context's capacity, up to which everybody is sent everything: beyond it
the bytes cost more than the two launches and the crossing that it saves."""

GATHERED_BYTES = 8 << 20
"""The same in one node, in bytes that a rank is sent by all others together: there bytes cost little."""

EXCHANGE_CHANNELS = 32
"""Chunks that an exchange cuts a rank's list of ids into, at most."""

TILE_BYTES = 8 << 10
"""Bytes that a program moves at a time: 32 for each thread of 8 warps."""

PROGRAMS_PER_SM = 4

# An H200 among eight, over NVLink: measured rates of stores into peers' memory and of NCCL's dense all-reduce, and what
# its own memory does. Between nodes a rail of 50 GB/s is assumed.
_STORE_GBPS = 339.0
_NCCL_GBPS = 368.0
_MEMORY_GBPS = 4000.0
_RAIL_GBPS = 50.0
_DENSE_PASSES = 5
"""Times that a dense buffer goes through memory besides: zeroed; rows added, and taken out, read and written each."""


@dataclass(frozen=True)
class Counts:
    """What all ranks know of a call once they have everybody's ids.

    Attributes:
        total: rows that the ranks bring, all together.
        union: different ones among them.
    """

    total: int
    union: int


@dataclass(frozen=True)
class Tiles:
    """How the kernels that move rows cut them.

    Attributes:
        rows, wide: rows, and elements of each, of a tile; powers of two.
        deep: rows of one id that are summed at a time; a power of two.
        num_warps: warps of a program.
    """

    rows: int
    wide: int
    deep: int
    num_warps: int


def tiles(row_elements: int, itemsize: int) -> Tiles:
    """Tiles of :data:`TILE_BYTES` for rows of ``row_elements`` elements of ``itemsize`` bytes."""
    elements = TILE_BYTES // itemsize
    wide = min(elements, 1 << max(0, row_elements - 1).bit_length())
    return Tiles(min(64, elements // wide), wide, min(16, elements // wide * 4), 8)


def owner_us(counts: Counts, row_bytes: int, topology: Topology) -> float:
    """Microseconds that moving the rows takes when one contributor reduces each: bytes over bandwidth."""
    world, nodes = topology.world_size, topology.n_nodes
    per_node = world / nodes
    rows = counts.total - counts.union + counts.union * (world - 1)
    inside = rows / world * row_bytes / _STORE_GBPS / 1e3
    # If every rank has a row with the same probability, a node has it unless none of its ranks does.
    has = min(1.0, counts.total / max(1, counts.union) / world)
    having = max(1.0, nodes * (1 - (1 - has) ** per_node))
    crossings = counts.union * (having - 1 + nodes - 1)
    return inside + crossings / nodes / per_node * row_bytes / _RAIL_GBPS / 1e3


def dense_us(num_rows: int, row_bytes: int, topology: Topology) -> float:
    """Microseconds of a dense all-reduce of the whole table, with what surrounds it."""
    world = topology.world_size
    table = num_rows * row_bytes / 1e3
    rate = _NCCL_GBPS if topology.n_nodes == 1 else min(_NCCL_GBPS, _RAIL_GBPS * world / topology.n_nodes)
    return 2 * (world - 1) / world * table / rate + _DENSE_PASSES * table / _MEMORY_GBPS


def may_be_dense(num_rows: int, row_bytes: int, topology: Topology, max_union_rows: int, allowed: bool) -> bool:
    """Return whether a call could turn out to be better off dense: then the counts are read before rows are moved.

    Args:
        num_rows, row_bytes: of the table.
        topology: the group.
        max_union_rows: the most that the context takes.
        allowed: whether there is a process group to do it with.
    """
    union = min(max_union_rows, num_rows)
    most = Counts(union * topology.world_size, union)  # every rank has all of them
    return allowed and dense_us(num_rows, row_bytes, topology) < owner_us(most, row_bytes, topology)


def choose(
    algorithm: str,
    *,
    num_rows: int,
    row_bytes: int,
    topology: Topology,
    max_rows_per_rank: int,
    max_row_bytes: int,
    segments_fit: bool,
    dense_allowed: bool,
    beside_others: bool = False,
    counts: Counts | None = None,
) -> str:
    """``"owner"``, ``"gather"`` or ``"dense"``; the same on all ranks.

    Args:
        algorithm: what the caller wants, one of :data:`ALGORITHMS`.
        num_rows, row_bytes: of the table.
        topology: the group.
        max_rows_per_rank, max_row_bytes: the context's capacity. It, and not ``row_bytes``, decides about gather: ranks
            that pass rows of different sizes must exchange their lists in one way, in order to find out.
        segments_fit: whether it can hold everybody's rows beside everybody's ids, which gather needs.
        dense_allowed: whether there is a process group for a dense all-reduce.
        beside_others: whether a rank limits its programs: then no rows beyond :data:`GATHER_BYTES` travel in the
            exchange of lists, which has a program for each chunk and rank.
        counts: of this call, if they are known; without them dense is not chosen.

    Raises:
        ValueError: an unknown algorithm, or one that cannot be had.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}")
    if algorithm == "gather" and not segments_fit:
        raise ValueError(
            "algorithm='gather' needs room for the rows of all ranks: max_union_rows of at least "
            f"{topology.world_size} times max_rows_per_rank ({max_rows_per_rank})"
        )
    if algorithm == "dense" and not dense_allowed:
        raise ValueError(
            "algorithm='dense' needs a torch.distributed process group over the context's ranks: make the context with "
            "group=None after init_process_group, or with group=<a ProcessGroup>"
        )
    if algorithm != "auto":
        return algorithm
    others = max(1, topology.world_size - 1)
    cheap = topology.n_nodes == 1 and not beside_others
    few = max(GATHER_BYTES, GATHERED_BYTES // others) if cheap else GATHER_BYTES
    if segments_fit and max_rows_per_rank * (max_row_bytes + 8) <= few:
        return "gather"
    if counts is not None and dense_allowed:
        if dense_us(num_rows, row_bytes, topology) < owner_us(counts, row_bytes, topology):
            return "dense"
    return "owner"
