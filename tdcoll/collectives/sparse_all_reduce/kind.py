# SPDX-License-Identifier: Apache-2.0
"""The facts that sparse all-reduces of one kind on a context share: :class:`SparseKind`."""

from __future__ import annotations

import logging
import zlib
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tdcoll.calls.call_launches import CallLaunches
from tdcoll.calls.kernel_launch import FlatTuple
from tdcoll.calls.launch_spec import device_table
from tdcoll.collectives.all_gather.spec import counted_launches
from tdcoll.collectives.index_match.kernels import STATUS_WORDS
from tdcoll.collectives.sparse_all_reduce import kernels_tables
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.collectives.sparse_all_reduce.layout import TableLayout
from tdcoll.collectives.sparse_all_reduce.policy import choose, tiles
from tdcoll.collectives.sparse_all_reduce.rows import JoinedRows
from tdcoll.primitives.reduce import OPERATIONS, accumulator

_log = logging.getLogger("tdcoll")

NO_ONE_NUMBER = -2
"""In place of the number of rows of a table, of calls with several."""


class _DeviceTables(NamedTuple):
    """The tables of a call, as kernels and the host read them.

    Attributes:
        firsts, widths, sources: As :class:`~.kernels_tables.Tables` has them.
        counts, on_host: The status, and of several tables where each begins in the union; on the
            device and on the host.
    """

    firsts: torch.Tensor
    widths: torch.Tensor
    sources: torch.Tensor
    counts: torch.Tensor
    on_host: torch.Tensor


class SparseKind:
    """The facts that calls of one kind on a context share.

    Attributes:
        layout: Of the tables.
        too_wide: Rows have more bytes than the context has room for. They move no further than the
            exchange, which tells all ranks.
        algorithm: The one that moves the rows.
        lists: int64 ``[world, stride]``: every rank's list.
        exchange: Launches that bring each rank's list to all; None with one rank.
        union, out: The ids and rows of a result, ``[1, max_union]`` and ``[max_union, elements]``.
        signature: 32 bits of all that the ranks must agree on.
        tiles: Sizes of the parts in which kernels move rows.
        alignment: Elements that a row of every table, and every address of one, is a multiple of.
        on_device: The tables on the device.
        arguments: Of all kernels, by the names of their parameters, as far as they are the same.
    """

    def __init__(
        self, ctx: SparseContext, rows: JoinedRows, op: str, algorithm: str, aligned: bool
    ) -> None:
        dtype = rows.dtype
        layout = TableLayout.of(rows.tables, dtype)
        self.layout = layout
        self.too_wide = layout.row_bytes > ctx.max_row_bytes
        self.algorithm = choose(algorithm, ctx.capacities, layout.row_bytes)
        self._log_choice(ctx, algorithm)
        self.lists = ctx.lists(with_rows=self.algorithm == "gather")
        self.exchange: CallLaunches | None = None
        if ctx.world_size > 1:
            self.exchange = counted_launches(ctx, 8 * self.lists.shape[1])
        agreed = (rows.order, rows.tables, str(dtype), op, algorithm)
        self.signature = zlib.crc32(repr(agreed).encode())
        self.tiles = tiles(layout.elements, dtype.itemsize)
        self.alignment = 16 // dtype.itemsize if aligned and layout.rows_in_16_bytes else 1
        self.union = ctx.directory.union.view(1, -1)
        self.out = ctx.out
        if not self.too_wide:  # Otherwise so many rows have no room there.
            self.out = rows_in(ctx.out, ctx.max_union_rows, layout, dtype)
        self.on_device = self._device_tables(ctx, rows)
        self.arguments = self._kernel_arguments(ctx, rows, op)

    def _log_choice(self, ctx: SparseContext, algorithm: str) -> None:
        if ctx.rank == 0 and not self.too_wide and _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "sparse_all_reduce: %s (%s), rows of %d bytes, context of %d rows of %d bytes per rank",
                self.algorithm,
                algorithm,
                self.layout.row_bytes,
                ctx.max_rows_per_rank,
                ctx.max_row_bytes,
            )

    def _device_tables(self, ctx: SparseContext, rows: JoinedRows) -> _DeviceTables:
        if rows.single:
            unread = ctx.no_indices
            status = ctx.directory.status
            return _DeviceTables(unread, unread, unread, status, ctx.status_words)

        def new_tables() -> _DeviceTables:
            return _new_device_tables(ctx, self.layout)

        # They stay as long as the context, since a graph may refer to them.
        key = ("sparse", "tables", rows.tables)
        made: _DeviceTables = device_table(ctx, "sparse_all_reduce_padded", key, new_tables)
        return made

    def _kernel_arguments(self, ctx: SparseContext, rows: JoinedRows, op: str) -> dict[str, Any]:
        layout = self.layout
        on_device = self.on_device
        single = rows.single
        count = len(layout.shapes)
        tables = kernels_tables.Tables(
            on_device.firsts,
            on_device.widths,
            on_device.sources,
            count,
            tl.constexpr(single),
            tl.constexpr(1 if single else self.alignment),
        )
        return {
            "tables": FlatTuple(tables),
            "counts": on_device.counts,
            "memory": ctx.memory,
            "nodes": ctx.nodes,
            "g": ctx.group,
            "num_rows": layout.num_rows if single else NO_ONE_NUMBER,
            "row_elements": layout.elements,
            # Neither is read where the rows are coalesced.
            "order": ctx.no_indices,
            "begins": ctx.no_indices,
            "OP": OPERATIONS[op],
            "ACC": accumulator(rows.dtype),
            "ALIGNED": layout.row_bytes % 16 == 0,
            "ROWS": self.tiles.rows,
            "WIDE": self.tiles.wide,
            "DEEP": self.tiles.deep,
            "TABLES": triton.next_power_of_2(count),
            "FIRSTS": 0 if single else triton.next_power_of_2(count + 1),
            # At least 8, so that most groups share what was compiled.
            "WORLD_POW2": max(8, triton.next_power_of_2(ctx.world_size)),
        }


def rows_in(
    memory: torch.Tensor, count: int, layout: TableLayout, dtype: torch.dtype
) -> torch.Tensor:
    """``[count, elements]`` at the beginning of ``memory``."""
    return memory[: count * layout.row_bytes].view(dtype).view(count, layout.elements)


def _new_device_tables(ctx: SparseContext, layout: TableLayout) -> _DeviceTables:
    begins = torch.tensor([*layout.firsts, layout.num_rows], device=ctx.device)
    elements = [shape.numel() for shape in layout.shapes]
    widths = torch.tensor(elements, dtype=torch.int32, device=ctx.device)
    words = STATUS_WORDS.value + len(begins)
    counts = torch.zeros(words, dtype=torch.int64, device=ctx.device)
    on_host = torch.zeros(words, dtype=torch.int64, pin_memory=ctx.device.type == "cuda")
    return _DeviceTables(begins, widths, torch.zeros_like(begins), counts, on_host)
