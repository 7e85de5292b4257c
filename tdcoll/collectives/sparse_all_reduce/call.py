# SPDX-License-Identifier: Apache-2.0
"""One sparse all-reduce on one rank: its launches, in the order that the package's docstring draws."""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tdcoll.calls.call import make
from tdcoll.calls.launch import Packed
from tdcoll.calls.launches import outside_of_graphs
from tdcoll.collectives.all_gather.spec import counted_launches, exchange_counted
from tdcoll.collectives.all_reduce.spec import SPEC as ALL_REDUCE
from tdcoll.collectives.index_match.kernels import STATUS_WORDS, UNION
from tdcoll.collectives.index_match.op import CLEAR_BLOCK
from tdcoll.collectives.sparse_all_reduce import (
    kernels_lists,
    kernels_merge,
    kernels_nodes,
    kernels_reduce,
    kernels_tables,
    kernels_values,
)
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.collectives.sparse_all_reduce.explain import explain_rows
from tdcoll.collectives.sparse_all_reduce.policy import NUM_WARPS, choose, tiles
from tdcoll.collectives.sparse_all_reduce.rows import Joined
from tdcoll.primitives.reduce import ACCUMULATORS, OPERATIONS, accumulator, operation_name

__all__ = ["SparseCall"]

_log = logging.getLogger("tdcoll")

NO_ONE_NUMBER = -2
"""In place of the number of rows of a table, of calls with several."""

_IDS_BLOCK, _PLAN_BLOCK = 1024, 256
"""Ids of a program that does nothing else with them, and of one that looks each of them up."""


@functools.cache
def _parameters(kernel: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a kernel's parameters: those of its arguments, and of its constants, which are in capitals."""
    names = tuple(kernel.arg_names)
    return tuple(name for name in names if not name.isupper()), tuple(name for name in names if name.isupper())


class _Kind:
    """The facts that calls of one kind on a context have in common, which the host need not find out again.

    Attributes:
        too_wide: rows are over the context's bytes. They take part in the exchange, which shows whether all ranks have
            such rows, and move no further.
        lists: int64 ``[world, stride]``: every rank's list.
        seed: of the signature.
        tables, firsts: what kernels know of the tables; id of the first row of each.
        counts: int64, the status, and of several tables where each begins in the union; and the same on the host.
        arguments: of all kernels, by the names of their parameters, as far as they are the same.
    """

    def __init__(self, ctx: SparseContext, rows: Joined, op: str, wanted: str) -> None:
        dtype = rows.dtype
        self.too_wide, self.loaded = rows.row_bytes > ctx.max_row_bytes, False
        self.algorithm = choose(wanted, ctx.capacities, rows.row_bytes)
        if ctx.rank == 0 and _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s", explain_rows(ctx.capacities, rows.n, rows.row_bytes, wanted).line)
        self.lists = ctx.lists(with_rows=self.algorithm == "gather")
        self.seed = zlib.crc32(repr((rows.tables, str(dtype), op, wanted)).encode())
        self.tiles = cut = tiles(rows.elements, dtype.itemsize)
        self.tables, self.firsts, self.counts, self.on_host = _tables(ctx, rows)
        self.arguments = {
            "tables": self.tables,
            "counts": self.counts,
            "memory": ctx.memory,
            "nodes": ctx.nodes,
            "g": ctx.group,
            "num_rows": rows.num_rows if rows.single else NO_ONE_NUMBER,
            "row_elements": rows.elements,
            "REPEATED": not rows.coalesced,
            "OP": OPERATIONS[op],
            "ACC": accumulator(dtype),
            "ALIGNED": rows.row_bytes % 16 == 0,
            "ROWS": cut.rows,
            "WIDE": cut.wide,
            "DEEP": cut.deep,
            "TABLES": triton.next_power_of_2(len(rows.parts)),
            "WAITED": max(8, triton.next_power_of_2(ctx.world_size)),  # most groups share what was compiled
        }


class SparseCall:
    """One sparse all-reduce on one rank.

    Attributes:
        kind: what it shares with other calls.
        algorithm: the one that is taken.
        moves_late: the host must read the counts before rows are moved.
        variant: what Triton specialises kernels on, besides the constants that are parameters.
    """

    def __init__(self, ctx: SparseContext, rows: Joined, op: Any, algorithm: str) -> None:
        self.ctx, self.rows, self.op = ctx, rows, operation_name(op)
        aligned = rows.single or rows.aligned
        key = "sparse", rows.tables, rows.dtype, rows.coalesced, self.op, algorithm, aligned
        self.kind: _Kind = ctx.once(key, lambda: _Kind(ctx, rows, self.op, algorithm))
        self.algorithm = self.kind.algorithm
        self.moves_late = self.kind.too_wide or self.algorithm == "dense"
        ctx.directory.prepare(rows.num_rows)
        like = rows.parts[0].values
        place = like.data_ptr() % 16 if rows.single else aligned
        self.variant = (rows.dtype, rows.elements, rows.single, place, ctx.directory.search)
        # The number of the exchange, too: ranks that look for lists at different places find those of an earlier one.
        self._signature = zlib.crc32(b"%d" % ctx.exchanges, self.kind.seed) >> 1
        self._arguments = {
            **self.kind.arguments,
            "source": like,
            "like": like,
            "order": ctx.no_indices,  # not read where the rows are coalesced; nor is begins
            "begins": ctx.no_indices,
            "n": rows.n,
            "signature": self._signature,
            "index": ctx.directory.index(self.kind.lists),
        }

    # ------------------------------------------------------------------ launches

    def load(self) -> None:
        """Compile and load the kernels of such calls, PyTorch's among them, and launch none that a peer notices.

        CUDA loads a kernel only while none is running, see :meth:`~tdcoll.CollectiveContext.wait_for_loads`.
        """
        if self.kind.loaded:
            return
        launcher = self.ctx.launch
        launcher.only_loads = True
        try:
            self.match()
            if not self.kind.too_wide:  # otherwise they move no further, and there is no memory for them
                self.move()
            if self.algorithm == "dense":
                self._prepare()
        finally:
            launcher.only_loads = False
        self.kind.loaded = True

    def launch(self, kernel: Any, grid: int | tuple[int, int], **more: Any) -> None:
        """Launch ``kernel`` with what this call knows, and ``more``; constants are named in capitals."""
        value_of = {**self._arguments, **more}.__getitem__
        plain, constant = _parameters(kernel)
        self.ctx.launch(
            kernel,
            grid,
            tuple(map(value_of, plain)),
            tuple(map(value_of, constant)),
            variant=self.variant,
            num_warps=NUM_WARPS,
        )

    def workers(self, tasks: int) -> int:
        """Thread blocks for so many tasks."""
        return max(1, min(self.ctx.most_blocks, tasks))

    def match(self) -> None:
        """Own ids to everybody, everybody's ids into the directory; for gather, rows go with them."""
        ctx, rows, lists = self.ctx, self.rows, self.kind.lists
        n, nbytes = rows.n, 8 * lists.shape[1]
        given = rows.parts[0].indices if rows.single else self._join()
        blocks = max(1, -(-n // _IDS_BLOCK))
        with_rows = self.algorithm == "gather" and not self.kind.too_wide
        ids, totals = given, ctx.counters  # which is not looked at
        if not rows.coalesced:
            ids, self._arguments["order"] = torch.sort(given, stable=True)
            self._arguments["begins"] = torch.empty(n + 1, dtype=torch.int64, device=ctx.device)
            totals = torch.empty(blocks, dtype=torch.int32, device=ctx.device)
        target, size, status, progress = ctx.directory.to_clear
        self.launch(
            kernels_lists.pack,
            blocks * (1 if rows.coalesced else 2) + max(1, -(-size // CLEAR_BLOCK)),
            ids=ids, totals=totals, blocks=blocks, row_bytes=rows.row_bytes if with_rows else 0,
            target=target, size=size, status=status, progress=progress, BLOCK=_IDS_BLOCK, CLEAR=CLEAR_BLOCK,
        )  # fmt: skip
        if with_rows:
            self._prepare(behind=True)
        if ctx.launch.only_loads:
            counted_launches(ctx, nbytes)
        else:
            ctx.exchanges += 1
            if ctx.world_size > 1:
                exchange_counted(ctx, lists.data_ptr(), nbytes)
        firsts = None if rows.single else self.kind.firsts
        ctx.directory.build(lists, self._signature, firsts, self.kind.counts, cleared=True)

    def _join(self) -> torch.Tensor:
        """``-> [n]``: the ids of all tables."""
        rows, most = self.rows, kernels_tables.MOST_GIVEN
        ids = torch.empty(rows.n, dtype=torch.int64, device=self.ctx.device)
        for first in range(0, len(rows.parts), most):
            parts = rows.parts[first : first + most]
            given = kernels_tables.given(
                [part.indices.data_ptr() for part in parts],
                [part.values.data_ptr() for part in parts],
                list(rows.begins[first : first + len(parts) + 1]),
            )
            longest = max(part.indices.shape[0] for part in parts)
            self.launch(
                kernels_tables.join,
                (self.workers(-(-longest // _IDS_BLOCK)), len(parts)),
                given=Packed(given), joined=ids, first=first,
                ITEM=rows.dtype.itemsize, COUNT=len(parts), BLOCK=_IDS_BLOCK,
            )  # fmt: skip
        return ids

    def _prepare(self, *, plans: bool = False, behind: bool = False) -> None:
        """Own rows to the stage, or ``behind`` the ids: with ``plans`` those that another rank needs, otherwise all.

        With ``plans``, who reduces which row is found out as well.
        """
        rows, ctx, piece = self.rows, self.ctx, kernels_values.PIECE.value
        kept, combiners = min(rows.n, ctx.max_rows_per_rank), self.workers(rows.n)
        planners = max(1, -(-kept // _PLAN_BLOCK)) if plans else 0
        adders, at_a_time, finishers, partial = 0, 1, 0, rows.parts[0].values  # which is not looked at
        pieces = rows.n // piece + 1
        if has_pieces := not rows.coalesced and rows.n > piece:
            at_a_time, finishers = min(16, pieces), self.workers(pieces)
            adders = at_a_time * min(32, pieces)
            partial = torch.empty(2 * pieces, rows.elements, dtype=ACCUMULATORS[rows.dtype], device=ctx.device)
        self.launch(
            kernels_values.prepare,
            planners + combiners + adders + finishers,
            partial=partial, planners=planners, combiners=combiners, adders=adders, at_a_time=at_a_time,
            PLANS=plans, BEHIND=behind, PIECES=has_pieces, BLOCK=_PLAN_BLOCK,
        )  # fmt: skip

    def move(self) -> torch.Tensor:
        """The rows of the union ``-> [max_union, elements]``, of which the first are theirs."""
        ctx, rows = self.ctx, self.rows
        if self.algorithm != "gather":
            self.reduce()
            return _rows_in(ctx.out, ctx.max_union_rows, rows)
        out = torch.empty((ctx.max_union_rows, rows.elements), dtype=rows.dtype, device=ctx.device)
        if rows.elements:
            self.launch(kernels_merge.merge, self.workers(-(-ctx.max_union_rows // self.kind.tiles.rows)), out=out)
        return out

    def reduce(self) -> None:
        """Rows to those who reduce them, and the sums to all. The same epochs on all ranks, whatever their rows are;
        nothing moves where the lists are not valid."""
        ctx = self.ctx
        n = min(self.rows.n, ctx.max_rows_per_rank)
        self._prepare(plans=True)
        announcers = ctx.world_size - 1
        if ctx.topology.n_nodes == 1:
            self.launch(kernels_reduce.reduce, announcers + self.workers(-(-n // self.kind.tiles.rows)))
            meet = kernels_reduce.meet
        else:
            kernel = kernels_nodes.reduce_nodes_of_single if self.rows.elements == 1 else kernels_nodes.reduce_nodes
            for step in range(ctx.topology.n_nodes):
                self.launch(kernel, announcers + self.workers(n), step=step)
            self.launch(kernels_nodes.forward, announcers + self.workers(ctx.max_union_rows))
            meet = kernels_nodes.meet_nodes
        if ctx.world_size > 1:
            self.launch(meet, ctx.world_size)

    def copy_status(self) -> None:
        """Start copying the status and the counts of the tables to the host."""
        self.kind.on_host.copy_(self.kind.counts, non_blocking=True)
        if (event := self.ctx.status_event) is not None:
            event.record()

    def status(self) -> list[int]:
        """Wait for the status, and for nothing that was launched after :meth:`copy_status`."""
        if (event := self.ctx.status_event) is not None:
            event.synchronize()
        self.ctx.monitor.raise_if_expired()
        words: list[int] = self.kind.on_host.tolist()
        return words

    def bounds(self, status: Sequence[int]) -> list[int]:
        """Return where each table begins in the union, and where the last ends."""
        return [0, status[UNION.value]] if self.rows.single else list(status[STATUS_WORDS.value :])

    def densify(self, union: int) -> torch.Tensor:
        """``-> [union, elements]`` by a dense all-reduce of the whole table.

        Raises:
            HeapExhaustedError: there is no room for its context; on all ranks.
        """
        ctx, rows, reducer = self.ctx, self.rows, self.ctx.for_tables()
        n = min(rows.n, ctx.max_rows_per_rank)
        self._prepare()
        parts, op = _rows_in(ctx.stage, n, rows), self.op
        if op == "mean":  # divided before they are added, as by the other algorithms
            parts, op = parts.to(ACCUMULATORS[rows.dtype]) / ctx.world_size, "sum"
        table = parts.new_full((rows.num_rows + 1, rows.elements), _neutral(op, parts.dtype))
        own = self.kind.lists[ctx.rank]
        begin = kernels_lists.HEADER.value
        # Past the end of the list, what earlier calls have left goes to a row of its own.
        there = torch.arange(n, device=ctx.device) < own[1]
        table.index_copy_(0, own[begin : begin + n].where(there, rows.num_rows), parts)
        table = table[: rows.num_rows]
        make(ALL_REDUCE, table, op=op, out=table, ctx=reducer)
        reduced = table.index_select(0, ctx.directory.union[:union])
        return reduced if reduced.dtype == rows.dtype else reduced.to(rows.dtype).add_(0)  # -0.0 + 0 is +0.0


def _rows_in(memory: torch.Tensor, count: int, like: Joined) -> torch.Tensor:
    """``[count, elements]`` at the beginning of ``memory``."""
    return memory[: count * like.row_bytes].view(like.dtype).view(count, like.elements)


def _tables(ctx: SparseContext, rows: Joined) -> tuple[Packed, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(tables as kernels see them, their first rows, counts, counts on the host)``."""
    if rows.single:
        nothing = kernels_tables.Tables(
            *(ctx.no_indices, ctx.counters, ctx.no_indices), 1, tl.constexpr(True), tl.constexpr(1)
        )  # fmt: skip
        return Packed(nothing), ctx.no_indices, ctx.directory.status, ctx.status_words
    key = "sparse", "tables", rows.tables  # they stay as long as the context, since a graph may refer to them

    def make() -> tuple[torch.Tensor, ...]:
        firsts = torch.tensor(rows.firsts, device=ctx.device)
        widths = torch.tensor([part.elements for part in rows.parts], dtype=torch.int32, device=ctx.device)
        counts = torch.zeros(STATUS_WORDS.value + len(rows.firsts), dtype=torch.int64, device=ctx.device)
        on_host = torch.zeros(counts.shape, dtype=torch.int64, pin_memory=ctx.device.type == "cuda")
        return firsts, widths, torch.zeros_like(firsts), counts, on_host

    if key not in ctx.tables:
        outside_of_graphs(ctx, "sparse_all_reduce_padded")
        ctx.tables[key] = make()
    firsts, widths, sources, counts, on_host = ctx.tables[key]
    single, aligned = tl.constexpr(False), tl.constexpr(rows.aligned)
    tables = kernels_tables.Tables(firsts, widths, sources, len(rows.parts), single, aligned)
    return Packed(tables), firsts, counts, on_host


def _neutral(op: str, dtype: torch.dtype) -> float | int:
    """Return what changes nothing under ``op``."""
    if op not in ("max", "min"):
        return int(op == "prod")
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max
