# SPDX-License-Identifier: Apache-2.0
"""How to sum sparse rows: pure functions of facts that are the same on every rank.

Two ranks that choose differently wait for signals that no rank sends. So the choice sees the context's capacities, the
shape of the tensor, the topology, and counts that every rank has read from the same lists; never the rank, its own
number of rows, the clock or the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tdcoll.runtime.topology import Topology

__all__ = ["ALGORITHMS", "EXCHANGE_CHANNELS", "Tiles", "choose", "prefers_dense", "tiles"]

ALGORITHMS = ("auto", "owner", "gather", "dense")

GATHER_BYTES = 64 << 10
"""Bytes of ids and rows of one rank, at the context's capacity, up to which every rank is sent everything: beyond it
the bytes cost more than the two launches and the hop that it saves."""

GATHERED_BYTES = 8 << 20
"""The same in one node, in bytes that a rank is sent by all others together: there bytes cost little."""

EXCHANGE_CHANNELS = 32
"""Chunks that an exchange cuts a rank's list of ids into, at most."""

NUM_WARPS, PROGRAMS_PER_SM = 8, 4

TILE_BYTES = 8 << 10
"""Bytes that a program moves at a time: 32 for each thread."""


class Tiles(NamedTuple):
    """How the kernels that move rows cut them: tiles of ``rows`` rows and ``wide`` elements of each, and ``deep`` rows
    of one id that are summed at a time. Powers of two."""

    rows: int
    wide: int
    deep: int


def tiles(row_elements: int, itemsize: int) -> Tiles:
    """Tiles of :data:`TILE_BYTES` for rows of ``row_elements`` elements of ``itemsize`` bytes. They are two elements
    wide at least, because Triton 3.6 can't compile ``kernels_reduce.reduce`` for tiles of one."""
    elements = TILE_BYTES // itemsize
    wide = min(elements, 1 << max(1, (row_elements - 1).bit_length()))
    return Tiles(min(64, elements // wide), wide, min(16, elements // wide * 4))


def prefers_dense(rows: int, num_rows: int, topology: Topology) -> bool:
    """Return whether ``"auto"`` takes ``"dense"`` rather than ``"owner"`` for so many ``rows`` of all ranks together.

    Dense moves 2 (W - 1) rows for each row of the table, and owner at most as many: (c - 1) + (W - 1) for each that c
    of W ranks have. The ids have been exchanged and matched when the counts are known, whatever is taken.

    Inside a node, dense gains nothing. On H200s owner moves 295 to 328 GB/s per rank, all its launches included
    (docs/results/sparse-2xH200.json and sparse-4xH200.json, CUDA graphs), and an all-reduce of 256 MiB 339 GB/s
    (all-reduce-2xH200.json). That saves dense at most 0.44 ms for each GB that a rank sends, or 0.88 ms for each GB of
    the table. But dense also fills the table, copies this rank's rows into it, and the result out of it: 5 bytes of
    local memory for each byte of the table, which take 1.04 ms for a GB at the 4.8 TB/s of an H200.

    From one node to another, owner puts rows one by one, and a dense all-reduce sends large messages. There, dense is
    taken if the ranks bring more than half of the table each, on average, because it then moves less than twice as many
    bytes. This was not measured.

    Args:
        rows: different rows of each rank, added up.
        num_rows: of the table.
        topology: the group.
    """
    return topology.n_nodes > 1 and 2 * rows > topology.world_size * num_rows


def choose(
    algorithm: str,
    *,
    topology: Topology,
    max_rows_per_rank: int,
    max_row_bytes: int,
    segments_fit: bool,
    beside_others: bool = False,
) -> str:
    """``"owner"``, ``"gather"`` or ``"dense"``; the same on all ranks.

    ``"auto"`` never becomes ``"dense"`` here: that depends on the number of rows (:func:`prefers_dense`).

    Args:
        algorithm: what the caller wants, one of :data:`ALGORITHMS`.
        topology: the group.
        max_rows_per_rank, max_row_bytes: the context's capacity. It decides about gather, and not the size of the rows:
            ranks that pass rows of different sizes must exchange their lists in one way, in order to find out.
        segments_fit: whether it can hold everybody's rows beside everybody's ids, which gather needs.
        beside_others: whether a rank limits its programs: then no rows beyond :data:`GATHER_BYTES` travel in the
            exchange of lists, which has a program for each chunk and rank.

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
    if algorithm != "auto":
        return algorithm
    cheap = topology.n_nodes == 1 and not beside_others
    few = max(GATHER_BYTES, GATHERED_BYTES // max(1, topology.world_size - 1)) if cheap else GATHER_BYTES
    return "gather" if segments_fit and max_rows_per_rank * (max_row_bytes + 8) <= few else "owner"
