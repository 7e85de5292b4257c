# SPDX-License-Identifier: Apache-2.0
"""How to sum sparse rows: pure functions of the context's capacities and the topology, which all
ranks share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tdcoll.collectives.index_match.policy import HEADER_WORDS

if TYPE_CHECKING:
    from tdcoll.runtime.topology import Topology

ALGORITHMS = ("auto", "owner", "gather", "dense")

GATHER_BYTES = 64 << 10
"""Bytes of ids and rows of one rank, at the context's capacity, up to which every rank is sent
everything: beyond it the bytes cost more than the two hops that it saves."""

GATHERED_BYTES = 8 << 20
"""The same in one node, in bytes that a rank is sent by all others together: there bytes cost
little."""

EXCHANGE_CHUNKS = 32
"""Chunks that an exchange cuts a rank's list of ids into, at most."""

FEWEST_ROWS = 256
"""Rows per rank of the smallest context that tdcoll makes by itself."""

NUM_WARPS = 8
BLOCKS_PER_SM = 4

REGISTERS = 65536 // (32 * NUM_WARPS * BLOCKS_PER_SM)
"""Of a thread of *pack*, *prepare* and *merge*: room for so many blocks. ptxas itself takes fewer,
and spills some."""

TILE_BYTES = 8 << 10
"""Bytes that a program moves at a time: 32 for each thread."""


def _up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


class Tiles(NamedTuple):
    """How kernels cut rows: tiles of ``rows`` by ``wide`` elements, ``deep`` rows of an id at a
    time; powers of two."""

    rows: int
    wide: int
    deep: int


def tiles(row_elements: int, itemsize: int) -> Tiles:
    """Tiles of :data:`TILE_BYTES` for rows of ``row_elements`` elements of ``itemsize`` bytes. They
    are two elements wide at least, because Triton 3.6 can't compile ``kernels_reduce.reduce`` for
    tiles of one."""
    elements = TILE_BYTES // itemsize
    wide = min(elements, 1 << max(1, (row_elements - 1).bit_length()))
    return Tiles(min(64, elements // wide), wide, min(16, elements // wide * 4))


class Capacities(NamedTuple):
    """The capacities of a context, and what follows from them; the same on every rank.

    Attributes:
        max_rows_per_rank, max_row_bytes, max_union_rows, grow: as for ``SparseContext``.
        beside_others: whether a rank limits its thread blocks: then no rows beyond
            :data:`GATHER_BYTES` travel in the exchange of lists, which has a thread block for each
            chunk and rank.
    """

    topology: Topology
    max_rows_per_rank: int
    max_row_bytes: int
    max_union_rows: int
    grow: bool
    beside_others: bool = False

    @property
    def list_bytes(self) -> int:
        """Bytes of one rank's list of ids with its header."""
        return _up(8 * (HEADER_WORDS + self.max_rows_per_rank))

    def segment_bytes(self, row_bytes: int) -> int:
        """Bytes of one rank's list followed by its rows."""
        return _up(self.list_bytes + self.max_rows_per_rank * row_bytes)

    @property
    def areas(self) -> tuple[int, int, int]:
        """Bytes of lists, out and stage. ``out`` has a few more, for the padding of segments in its
        place."""
        world = self.topology.world_size
        out, stage = (
            _up(rows * self.max_row_bytes) for rows in (self.max_union_rows, self.max_rows_per_rank)
        )
        return world * self.list_bytes, out + 16 * world, stage

    @property
    def segment_stride(self) -> int:
        """Bytes from one list that its rows follow to the next, in lists and out."""
        lists, out, _ = self.areas
        most = (lists + out) // self.topology.world_size // 16 * 16
        return min(most, self.segment_bytes(self.max_row_bytes))

    def enlarged(self, rows: int, row_bytes: int, union: int, quarters: int) -> Capacities:
        """Return capacities for a call, with ``quarters`` quarters of the rows that it needs.

        Args:
            rows, row_bytes: that one rank brings.
            union: that all ranks bring together. Not known, and not looked at, where ``rows`` are
                over the capacity: the lists were cut off.
            quarters: at least 4.
        """
        world = self.topology.world_size
        most = self.max_rows_per_rank
        room = self.max_union_rows
        if rows > most:
            most = rows * quarters // 4
            room = world * most if room >= world * self.max_rows_per_rank else room
        elif union > room:
            room = min(world * most, union * quarters // 4)
        widest = max(row_bytes, self.max_row_bytes)
        return self._replace(max_rows_per_rank=most, max_row_bytes=widest, max_union_rows=room)


def choose(algorithm: str, capacities: Capacities, row_bytes: int) -> str:
    """``"owner"``, ``"gather"`` or ``"dense"``; the same on all ranks.

    Args:
        algorithm: what the caller wants, one of :data:`ALGORITHMS`. ``"auto"`` doesn't become
            ``"dense"``.
        capacities: of the context. They decide about ``"gather"``, and not the size of the rows:
            ranks that pass rows of different sizes must exchange their lists in one way, in order
            to find out.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}")
    topology = capacities.topology
    most = capacities.max_rows_per_rank
    widest = capacities.max_row_bytes
    travel = widest if algorithm == "auto" else min(row_bytes, widest)
    fit = capacities.segment_bytes(travel) <= capacities.segment_stride
    if algorithm == "gather" and not fit:
        raise ValueError(
            "algorithm='gather' needs room for the rows of all ranks: max_union_rows of at least "
            f"{topology.world_size} times max_rows_per_rank ({most})"
        )
    if algorithm != "auto":
        return algorithm
    cheap = topology.n_nodes == 1 and not capacities.beside_others
    few = (
        max(GATHER_BYTES, GATHERED_BYTES // max(1, topology.world_size - 1))
        if cheap
        else GATHER_BYTES
    )
    return "gather" if fit and most * (widest + 8) <= few else "owner"
