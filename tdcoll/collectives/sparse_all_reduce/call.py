# SPDX-License-Identifier: Apache-2.0
"""One sparse all-reduce on one rank: its launches, in the order that the package's docstring draws."""

from __future__ import annotations

import functools
import logging
import operator
import zlib
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
import triton
import triton.language as tl

from tdcoll.calls.call_launches import launches_of
from tdcoll.calls.collective import CollectiveOptions
from tdcoll.calls.kernel_launch import FlatTuple
from tdcoll.calls.launch_spec import KernelOptions, device_table
from tdcoll.calls.plan import Facts
from tdcoll.calls.run import run
from tdcoll.collectives.all_gather.spec import counted_launches
from tdcoll.collectives.all_reduce.spec import OPERATION as ALL_REDUCE
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
from tdcoll.collectives.sparse_all_reduce.policy import NUM_WARPS, REGISTERS, choose, tiles
from tdcoll.collectives.sparse_all_reduce.rows import Joined
from tdcoll.primitives.reduce import ACCUMULATORS, OPERATIONS, accumulator

_log = logging.getLogger("tdcoll")

NO_ONE_NUMBER = -2
"""In place of the number of rows of a table, of calls with several."""

_IDS_BLOCK, _PLAN_BLOCK, _PLACED_BLOCK = 1024, 256, 32
"""Ids of a program that does nothing else with them (so many are sorted by *pack*, more by PyTorch), of one that looks
each of them up, and of one that compares each with all."""


_parameters_of: dict[int, tuple[Any, list[str], list[str]]] = {}
"""By the kernel's ``id``, since Triton takes long to find its hash: the kernel, lest another gets its id, and names."""


def _parameters(kernel: Any) -> tuple[list[str], list[str]]:
    """Names of a kernel's parameters: those of its arguments, and of its constants, which are in capitals."""
    found = _parameters_of.get(id(kernel))
    if found is None:
        names = kernel.arg_names
        found = kernel, [name for name in names if not name.isupper()], [name for name in names if name.isupper()]
        _parameters_of[id(kernel)] = found
    return found[1:]


class _Kind:
    """The facts that calls of one kind on a context have in common, which the host need not find out again.

    Attributes:
        num_rows: of all tables.
        elements, row_bytes: of the widest row, the distance from one row to the next where they are reduced.
        too_wide: rows are over the context's bytes. They move no further than the exchange, which tells all ranks.
        lists: int64 ``[world, stride]``: every rank's list.
        union, out: the ids and rows of a result, ``[1, max_union]`` and ``[max_union, elements]``.
        signature: what the ranks must agree on, 32 bits.
        widths: tables with one shape of rows, which follow each other: ``(first, last, elements, shape)``.
        firsts: id of the first row of each table.
        ids_type: of the ids that are sorted: of several tables 32 bits if all rows fit, which takes half as long.
        counts, on_host: the status, and of several tables where each begins in the union; on the device and the host.
        arguments: of all kernels, by the names of their parameters, as far as they are the same.
    """

    def __init__(self, ctx: SparseContext, rows: Joined, op: str, wanted: str, aligned: bool) -> None:
        dtype, single = rows.dtype, rows.single
        shapes = [shape for _, shape in rows.tables]
        ends = list(accumulate([count for count, _ in rows.tables]))
        self.firsts, self.num_rows = [0, *ends[:-1]], ends[-1]
        self.ids_type = torch.int64 if single or self.num_rows > 1 << 31 else torch.int32
        self.elements = max(shape.numel() for shape in shapes)
        self.row_bytes = self.elements * dtype.itemsize
        self.widths, first = [], 0
        for shape, same in groupby(shapes):
            last = first + len(list(same))
            self.widths.append((first, last, shape.numel(), shape))
            first = last
        self.too_wide = self.row_bytes > ctx.max_row_bytes
        self.algorithm = choose(wanted, ctx.capacities, self.row_bytes)
        if ctx.rank == 0 and not self.too_wide and _log.isEnabledFor(logging.DEBUG):
            how = self.algorithm, wanted, self.row_bytes, ctx.max_rows_per_rank, ctx.max_row_bytes
            _log.debug("sparse_all_reduce: %s (%s), rows of %d bytes, context of %d rows of %d bytes per rank", *how)
        self.lists = ctx.lists(with_rows=self.algorithm == "gather")
        self.exchange = counted_launches(ctx, 8 * self.lists.shape[1]) if ctx.world_size > 1 else None
        self.signature = zlib.crc32(repr((rows.order, rows.tables, str(dtype), op, wanted)).encode())
        self.tiles = cut = tiles(self.elements, dtype.itemsize)
        in_16_bytes = all(shape.numel() * dtype.itemsize % 16 == 0 for shape in shapes)
        self.aligned = 16 // dtype.itemsize if aligned and in_16_bytes else 1
        self.union = ctx.directory.union.view(1, -1)
        self.out = ctx.out if self.too_wide else _rows_in(ctx.out, ctx.max_union_rows, self, dtype)
        if single:
            widths = sources = self.device_firsts = ctx.no_indices  # which are not looked at
            self.counts, self.on_host = ctx.directory.status, ctx.status_words
        else:
            # They stay as long as the context, since a graph may refer to them.
            key = "sparse", "tables", rows.tables
            tensors = device_table(
                ctx, "sparse_all_reduce_padded", key, lambda: _tables(ctx, self.firsts, ends, shapes)
            )
            self.device_firsts, widths, sources, self.counts, self.on_host = tensors
        aligned = tl.constexpr(1 if single else self.aligned)
        tables = kernels_tables.Tables(self.device_firsts, widths, sources, len(shapes), tl.constexpr(single), aligned)
        self.arguments = {
            "tables": FlatTuple(tables),
            "counts": self.counts,
            "memory": ctx.memory,
            "nodes": ctx.nodes,
            "g": ctx.group,
            "num_rows": self.num_rows if single else NO_ONE_NUMBER,
            "row_elements": self.elements,
            "order": ctx.no_indices,  # not read where the rows are coalesced; nor is begins
            "begins": ctx.no_indices,
            "OP": OPERATIONS[op],
            "ACC": accumulator(dtype),
            "ALIGNED": self.row_bytes % 16 == 0,
            "ROWS": cut.rows,
            "WIDE": cut.wide,
            "DEEP": cut.deep,
            "TABLES": triton.next_power_of_2(len(shapes)),
            "FIRSTS": 0 if single else triton.next_power_of_2(len(shapes) + 1),
            "WAITED": max(8, triton.next_power_of_2(ctx.world_size)),  # most groups share what was compiled
        }


_FORMS = (False, False, False), (True, True, False), (True, True, True), (True, False, True)
"""Of a call: repeated, places, pieces. A rank's next call of the same kind may have any of these."""


class SparseCall:
    """One sparse all-reduce on one rank.

    Attributes:
        kind: what it shares with other calls.
        repeated: ids may be there several times, in any order.
        places: *pack* sorts them, because they are few.
        pieces: rows of one id may be too many for one program.
        moves_late: the host must read the counts before rows are moved.
        variant: what Triton specialises kernels on, besides the constants that are parameters.

    Args:
        aligned: whether the values of all tensors begin at multiples of 16 bytes. None: look.
    """

    def __init__(
        self, ctx: SparseContext, rows: Joined, op: str, algorithm: str, aligned: bool | None = None
    ) -> None:
        self.ctx = ctx
        self.rows = rows
        self.op = op
        self.wanted = algorithm
        if aligned is None:
            aligned = functools.reduce(operator.or_, rows.values) % 16 == 0
        self.repeated = not rows.coalesced
        self.places = self.repeated and rows.n <= _IDS_BLOCK
        self.pieces = self.repeated and rows.n > kernels_values.PIECE.value
        key = "sparse", rows.order, rows.tables, rows.dtype, op, algorithm, rows.single or aligned
        self.kind = kind = ctx.cached(key, lambda: _Kind(ctx, rows, op, algorithm, aligned))
        self.algorithm = kind.algorithm
        self.moves_late = kind.too_wide or self.algorithm == "dense"
        ctx.directory.prepare(kind.num_rows)
        alignment = aligned if rows.single else kind.aligned
        self.variant = rows.dtype, kind.elements, rows.single, alignment, ctx.directory.search, kind.ids_type
        like = rows.parts[0].values
        self._arguments = {
            **kind.arguments,
            "source": like,
            "like": like,
            "n": rows.n,
            "signature": kind.signature,
            "index": ctx.directory.index(kind.lists),
            "builders": ctx.directory.builders + (not rows.single),
            "REPEATED": self.repeated,
        }

    def again(self) -> SparseCall:
        """Return the same call on the context as it is now, after it has grown."""
        return SparseCall(self.ctx, self.rows, self.op, self.wanted)

    # ------------------------------------------------------------------ launches

    def load_forms(self, aligned: bool, padded: bool) -> None:
        """Compile and load the kernels of calls of any form, whose values are at such an address."""
        launcher = self.ctx.launch
        room = torch.empty(self.kind.elements + 16, dtype=self.rows.dtype, device=self.ctx.device)
        self._arguments["source"] = self._arguments["like"] = room if aligned else room[1:]
        launcher.only_loads = True
        try:
            for form in _FORMS:
                self.repeated, self.places, self.pieces = form
                self._arguments["REPEATED"] = self.repeated
                self.match()
                if not self.kind.too_wide:  # otherwise they move no further, and there is no memory for them
                    out = self.move()
                    if padded:
                        self.pad(out)
        finally:
            launcher.only_loads = False

    def launch(self, kernel: Any, grid: int | tuple[int, int], maxnreg: int | None = None, **more: Any) -> None:
        """Launch ``kernel`` with what this call knows, and ``more``; constants are named in capitals."""
        value_of = {**self._arguments, **more}.__getitem__
        plain, constant = _parameters(kernel)
        arguments, constants = tuple(map(value_of, plain)), tuple(map(value_of, constant))
        self.ctx.launch(
            kernel, grid, arguments, constants, variant=self.variant, num_warps=NUM_WARPS, maxnreg=maxnreg
        )  # fmt: skip

    def workers(self, tasks: int) -> int:
        """Thread blocks for so many tasks."""
        return max(1, min(self.ctx.most_blocks, tasks))

    def match(self) -> None:
        """Own ids to everybody, everybody's ids into the directory, and own rows to where they are read."""
        ctx, rows, kind = self.ctx, self.rows, self.kind
        unsorted = ids = rows.parts[0].indices if rows.single else self._join()
        before, totals, blocks = 0, ctx.counters, max(1, -(-rows.n // _IDS_BLOCK))  # not all of which are looked at
        with_rows = self.algorithm == "gather" and not kind.too_wide
        if self.repeated:
            self._arguments["begins"] = ctx.scratch("begins", rows.n + 1, torch.int64)
            if self.places:
                ids, order = (ctx.scratch(name, _IDS_BLOCK, torch.int64) for name in ("sorted ids", "order"))
                before = max(1, -(-rows.n // _PLACED_BLOCK))
            else:
                ids, order = torch.sort(ids, stable=True)
                before, totals = blocks, ctx.scratch("totals", blocks, torch.int32)
            self._arguments["order"] = order
        combiners, more = self._combining(with_rows)
        self.launch(
            kernels_values.pack,
            before + blocks + ctx.directory.wipers + combiners,
            REGISTERS,
            unsorted=unsorted, ids=ids, totals=totals, before=before, blocks=blocks, wipers=ctx.directory.wipers,
            row_bytes=kind.row_bytes if with_rows else 0,
            PLACED=_PLACED_BLOCK if self.places else 0, BEHIND=with_rows, BLOCK=_IDS_BLOCK, CLEAR=CLEAR_BLOCK, **more,
        )  # fmt: skip
        if kind.exchange is not None and not ctx.launch.only_loads:
            address = kind.lists.data_ptr()
            stride = 8 * kind.lists.shape[1]
            kind.exchange(address + ctx.rank * stride, 0, address)
        if self.algorithm == "gather":
            most, builders = ctx.max_union_rows, self._arguments["builders"]
            if ctx.launch.only_loads or not with_rows:
                most = 0
            self._merged = torch.empty((most, kind.elements), dtype=rows.dtype, device=ctx.device)
            mergers = min(ctx.most_blocks, -(-most // kind.tiles.rows))
            self.launch(kernels_merge.merge, builders + mergers, REGISTERS, out=self._merged)
        else:
            self._prepare()

    def _join(self) -> torch.Tensor:
        """``-> [n]``: the ids of all tables."""
        rows, most = self.rows, kernels_tables.MOST_GIVEN
        ids = self.ctx.scratch("ids", rows.n, self.kind.ids_type)[: rows.n]
        for first in range(0, len(rows.parts), most):
            last = min(first + most, len(rows.parts))
            begins = rows.begins[first : last + 1]
            longest = max(map(operator.sub, begins[1:], begins))
            given = kernels_tables.given(rows.ids[first:last], rows.values[first:last], begins)
            self.launch(
                kernels_tables.join,
                (self.workers(-(-longest // _IDS_BLOCK)), last - first),
                given=FlatTuple(given, list(given)), joined=ids, first=first,
                ITEM=rows.dtype.itemsize, COUNT=last - first, BLOCK=_IDS_BLOCK,
            )  # fmt: skip
        return ids

    def _prepare(self) -> None:
        """The directory, who reduces which row, and own rows to the stage, for dense all of them, otherwise those that
        another rank needs."""
        builders, plans = self._arguments["builders"], self.algorithm == "owner"
        kept = min(self.rows.n, self.ctx.max_rows_per_rank)
        planners = max(1, -(-kept // _PLAN_BLOCK)) if plans and not self.kind.too_wide else 0
        combiners, more = self._combining(not self.kind.too_wide)
        self.launch(
            kernels_values.prepare,
            builders + planners + combiners,
            REGISTERS,
            builders=builders, planners=planners, PLANS=plans, BLOCK=_PLAN_BLOCK, **more,
        )  # fmt: skip

    def _combining(self, wanted: bool) -> tuple[int, dict[str, Any]]:
        """Thread blocks of ``kernels_values.combine_all``, and arguments of the launch that has them."""
        combiners, adders, at_a_time, finishers = self.workers(self.rows.n) if wanted else 0, 0, 1, 0
        partial = self._arguments["source"]  # which is not looked at
        if has_pieces := wanted and self.pieces:
            pieces = self.rows.n // kernels_values.PIECE.value + 1
            at_a_time, finishers = min(16, pieces), self.workers(pieces)
            adders = at_a_time * min(32, pieces)
            partial = self.ctx.scratch("partial", 2 * pieces * self.kind.elements, ACCUMULATORS[self.rows.dtype])
        more = {"combiners": combiners, "adders": adders, "at_a_time": at_a_time, "partial": partial}
        return combiners + adders + finishers, more | {"PIECES": has_pieces}

    def move(self) -> torch.Tensor:
        """The rows of the union ``-> [max_union, elements]``, of which the first are theirs."""
        if self.algorithm == "gather":
            return self._merged
        self.reduce()
        return self.kind.out

    def reduce(self) -> None:
        """Rows to those who reduce them, and the sums to all. The same epochs on all ranks, whatever their rows are;
        nothing moves where the lists are not valid."""
        ctx, announcers = self.ctx, self.ctx.world_size - 1
        n = min(self.rows.n, ctx.max_rows_per_rank)
        if ctx.topology.n_nodes == 1:
            self.launch(kernels_reduce.reduce, announcers + self.workers(-(-n // self.kind.tiles.rows)))
            return
        kernel = kernels_nodes.reduce_nodes_of_single if self.kind.elements == 1 else kernels_nodes.reduce_nodes
        for step in range(ctx.topology.n_nodes):
            self.launch(kernel, announcers + self.workers(n), step=step)
        self.launch(kernels_nodes.forward, announcers + self.workers(ctx.max_union_rows))
        self.launch(kernels_nodes.meet_nodes, ctx.world_size)

    def pad(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The form of fixed size: ``(indices [tables, max_union], count [tables, 1], values)``. The values of each
        tensor have ``max_union`` rows of its own width, one tensor behind the other.

        Args:
            out: what :meth:`move` returned.
        """
        ctx, rows = self.ctx, self.rows
        tables, most = len(rows.parts), 0 if ctx.launch.only_loads else ctx.max_union_rows
        ids = torch.empty(tables, most, dtype=torch.int64, device=ctx.device)
        counts = torch.empty(tables, 1, dtype=torch.int64, device=ctx.device)
        values = out
        if not rows.single:
            size = most * sum(shape.numel() for _, shape in rows.tables)
            values = torch.empty(size, dtype=rows.dtype, device=ctx.device)
        self.launch(
            kernels_merge.pad,
            (self.workers(-(-most // self.kind.tiles.rows)), tables),
            indices=ids, values=values, count=counts, out=out, remembered=ctx.remembered,
        )  # fmt: skip
        return ids, counts, values

    def status(self) -> list[int]:
        """Wait for the copy of the status and the counts of the tables, and for nothing that was launched after it."""
        if (event := self.ctx.status_event) is not None:
            event.synchronize()
        self.ctx.monitor.raise_if_expired()
        words: list[int] = self.kind.on_host.tolist()
        return words

    # ------------------------------------------------------------------ results

    def densify(self, union: int) -> torch.Tensor:
        """``-> [union, elements]`` by a dense all-reduce of the whole table."""
        ctx, kind, begin = self.ctx, self.kind, kernels_lists.HEADER.value
        n = min(self.rows.n, ctx.max_rows_per_rank)
        own = kind.lists[ctx.rank]
        parts = _rows_in(ctx.stage, n, kind, self.rows.dtype)
        table = self._in_table(parts, own[begin : begin + n], own[1], kind.num_rows)
        _, op = self._table_options()
        run(ALL_REDUCE, (table, table), CollectiveOptions(op), ctx=ctx.for_tables())
        return self._out_of_table(table, ctx.directory.union[:union])

    def _table_options(self) -> tuple[torch.dtype, str]:
        """Return dtype and operation of the all-reduce of a table: parts of a mean are divided before they are added,
        as by the other algorithms."""
        dtype = self.rows.dtype
        return (ACCUMULATORS[dtype], "sum") if self.op == "mean" else (dtype, self.op)

    def _in_table(self, parts: torch.Tensor, ids: torch.Tensor, count: torch.Tensor, num_rows: int) -> torch.Tensor:
        """``[n, elements], [n] -> [num_rows, elements]``: the first ``count`` rows at their places in a table."""
        dtype, op = self._table_options()
        if self.op == "mean":
            parts = parts.to(dtype) / self.ctx.world_size
        table = parts.new_full((num_rows + 1, self.kind.elements), _neutral(op, dtype))
        # Past the end of the list, what earlier calls have left goes to a row of its own.
        there = torch.arange(len(ids), device=ids.device) < count
        table.index_copy_(0, ids.where(there, num_rows), parts)
        return table[:num_rows]

    def _out_of_table(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """``[num_rows, elements], [union] -> [union, elements]``: these rows, in the dtype of the call."""
        reduced, dtype = table.index_select(0, ids), self.rows.dtype
        return reduced if reduced.dtype == dtype else reduced.to(dtype).add_(0)  # -0.0 + 0 is +0.0

    def load_dense(self, numbers: Sequence[int]) -> None:
        """Load PyTorch's kernels of :meth:`densify` for these numbers of rows, and its all-reduce's. Collective."""
        ctx, kind = self.ctx, self.kind
        for n in numbers:
            ids = torch.zeros(n, dtype=torch.int64, device=ctx.device)
            parts = torch.zeros((n, kind.elements), dtype=self.rows.dtype, device=ctx.device)
            self._out_of_table(self._in_table(parts, ids, ids[0], n), ids)
        dtype, op = self._table_options()
        reducer = ctx.for_tables()
        facts = Facts.of(reducer, kind.num_rows * kind.elements * dtype.itemsize, dtype)
        launches = launches_of(ALL_REDUCE.spec, reducer, facts, options=KernelOptions(dtype, op))
        reducer.wait_for_loads(ALL_REDUCE.name, launches.variant)

    def results(
        self, whole: torch.Tensor, status: Sequence[int], copies: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``(indices [1, n], values [n, *shape])`` of each tensor, by a few operations for each shape of rows.

        Args:
            whole: ``[at least union, elements]``: all rows of the union, in memory that the next call uses if
                ``copies``.
        """
        kind, union = self.kind, status[UNION.value]
        # Where each table begins in the union, and where the last ends.
        bounds = [0, union] if self.rows.single else status[STATUS_WORDS.value :]
        sizes = list(map(operator.sub, bounds[1:], bounds))
        ids: tuple[torch.Tensor, ...] = (kind.union[:, :union].clone(),)
        if not self.rows.single:
            ids = ids[0].split(sizes, 1)
            torch._foreach_sub_(ids, kind.firsts)
        values: list[torch.Tensor] = []
        for first, last, elements, shape in kind.widths:
            begin, end = bounds[first], bounds[last]
            rows = whole[begin:end] if elements == kind.elements else whole[begin:end, :elements]
            if copies:
                rows = rows.clone(memory_format=torch.contiguous_format)
            if len(shape) != 1:
                rows = rows.view(end - begin, *shape)
            values += rows.split(sizes[first:last]) if last - first > 1 else (rows,)
        return list(zip(ids, values, strict=True))


def _rows_in(memory: torch.Tensor, count: int, kind: _Kind, dtype: torch.dtype) -> torch.Tensor:
    """``[count, elements]`` at the beginning of ``memory``."""
    return memory[: count * kind.row_bytes].view(dtype).view(count, kind.elements)


def _tables(ctx: SparseContext, firsts: list[int], ends: list[int], shapes: list[torch.Size]) -> Any:
    """``(firsts, widths, sources)`` of :class:`~.kernels_tables.Tables`, and counts on the device and the host."""
    begins = torch.tensor([*firsts, ends[-1]], device=ctx.device)
    widths = torch.tensor([shape.numel() for shape in shapes], dtype=torch.int32, device=ctx.device)
    counts = torch.zeros(STATUS_WORDS.value + len(begins), dtype=torch.int64, device=ctx.device)
    on_host = torch.zeros(counts.shape, dtype=torch.int64, pin_memory=ctx.device.type == "cuda")
    return begins, widths, torch.zeros_like(begins), counts, on_host


def _neutral(op: str, dtype: torch.dtype) -> float | int:
    """Return what changes nothing under ``op``."""
    if op not in ("max", "min"):
        return int(op == "prod")
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max
