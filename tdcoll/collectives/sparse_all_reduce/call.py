# SPDX-License-Identifier: Apache-2.0
"""One sparse all-reduce on one rank: its launches, in the order that the package's docstring
draws."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tdcoll.calls.call_launches import launches_of
from tdcoll.calls.collective import CollectiveOptions
from tdcoll.calls.kernel_launch import FlatTuple
from tdcoll.calls.launch_spec import KernelOptions
from tdcoll.calls.plan import Facts
from tdcoll.calls.run import run
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
from tdcoll.collectives.sparse_all_reduce.kind import SparseKind, rows_in
from tdcoll.collectives.sparse_all_reduce.policy import NUM_WARPS, REGISTERS
from tdcoll.collectives.sparse_all_reduce.rows import JoinedRows
from tdcoll.primitives.reduce import ACCUMULATORS

_IDS_BLOCK = 1024
_PLAN_BLOCK = 256
_PLACED_BLOCK = 32
"""Ids of a program that does nothing else with them (so many are sorted by *pack*, more by
PyTorch), of one that looks each of them up, and of one that compares each with all."""


_parameters_of: dict[int, tuple[Any, list[str], list[str]]] = {}
"""By the kernel's ``id``, since Triton takes long to find its hash: the kernel, lest another gets
its id, and names."""


def _parameters(kernel: Any) -> tuple[list[str], list[str]]:
    """Names of a kernel's parameters: those of its arguments, and of its constants, which are in
    capitals."""
    found = _parameters_of.get(id(kernel))
    if found is None:
        names = kernel.arg_names
        found = (
            kernel,
            [name for name in names if not name.isupper()],
            [name for name in names if name.isupper()],
        )
        _parameters_of[id(kernel)] = found
    return found[1:]


class _CombiningBlocks(NamedTuple):
    """Thread blocks of ``kernels_values.combine_all``.

    Attributes:
        combiners: They add the rows of one id, unless they are too many for one program.
        adders: They add pieces of such rows, each ``at_a_time`` pieces in turn.
        finishers: They add the sums of pieces.
    """

    combiners: int
    adders: int
    at_a_time: int
    finishers: int

    @property
    def total(self) -> int:
        return self.combiners + self.adders + self.finishers


_NO_COMBINING = _CombiningBlocks(combiners=0, adders=0, at_a_time=1, finishers=0)


_FORMS = (False, False, False), (True, True, False), (True, True, True), (True, False, True)
"""Of a call: repeated, places, pieces. A rank's next call of the same kind may have any of
these."""


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
        self,
        ctx: SparseContext,
        rows: JoinedRows,
        op: str,
        algorithm: str,
        aligned: bool | None = None,
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
        self.kind = kind = ctx.cached(key, lambda: SparseKind(ctx, rows, op, algorithm, aligned))
        self.algorithm = kind.algorithm
        self.moves_late = kind.too_wide or self.algorithm == "dense"
        ctx.directory.prepare(kind.layout.num_rows)
        alignment = aligned if rows.single else kind.alignment
        self.variant = (
            rows.dtype,
            kind.layout.elements,
            rows.single,
            alignment,
            ctx.directory.search,
            kind.layout.ids_type,
        )
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
        """Compile and load the kernels of calls of any form, whose values are at such an
        address."""
        launcher = self.ctx.launch
        room = torch.empty(
            self.kind.layout.elements + 16, dtype=self.rows.dtype, device=self.ctx.device
        )
        self._arguments["source"] = self._arguments["like"] = room if aligned else room[1:]
        launcher.only_loads = True
        try:
            for form in _FORMS:
                self.repeated, self.places, self.pieces = form
                self._arguments["REPEATED"] = self.repeated
                self.match()
                # otherwise they move no further, and there is no memory for them
                if not self.kind.too_wide:
                    out = self.move()
                    if padded:
                        self.pad(out)
        finally:
            launcher.only_loads = False

    def launch(
        self, kernel: Any, grid: int | tuple[int, int], maxnreg: int | None = None, **more: Any
    ) -> None:
        """Launch ``kernel`` with what this call knows, and ``more``; constants are named in
        capitals."""
        value_of = {**self._arguments, **more}.__getitem__
        plain, constant = _parameters(kernel)
        arguments = tuple(map(value_of, plain))
        constants = tuple(map(value_of, constant))
        self.ctx.launch(
            kernel, grid, arguments, constants, variant=self.variant, num_warps=NUM_WARPS, maxnreg=maxnreg
        )  # fmt: skip

    def workers(self, tasks: int) -> int:
        """Thread blocks for so many tasks."""
        return max(1, min(self.ctx.most_blocks, tasks))

    def match(self) -> None:
        """Own ids to everybody, everybody's ids into the directory, and own rows to where they are
        read."""
        ctx = self.ctx
        rows = self.rows
        kind = self.kind
        unsorted = ids = rows.parts[0].indices if rows.single else self._join()
        # not all of which are looked at
        before = 0
        totals = ctx.counters
        blocks = max(1, -(-rows.n // _IDS_BLOCK))
        with_rows = self.algorithm == "gather" and not kind.too_wide
        if self.repeated:
            self._arguments["begins"] = ctx.scratch("begins", rows.n + 1, torch.int64)
            if self.places:
                ids, order = (
                    ctx.scratch(name, _IDS_BLOCK, torch.int64) for name in ("sorted ids", "order")
                )
                before = max(1, -(-rows.n // _PLACED_BLOCK))
            else:
                ids, order = torch.sort(ids, stable=True)
                before = blocks
                totals = ctx.scratch("totals", blocks, torch.int32)
            self._arguments["order"] = order
        combining = self._combining_blocks(with_rows)
        self.launch(
            kernels_values.pack,
            before + blocks + ctx.directory.clearers + combining.total,
            REGISTERS,
            unsorted=unsorted, ids=ids, totals=totals, before=before, blocks=blocks, clearers=ctx.directory.clearers,
            row_bytes=kind.layout.row_bytes if with_rows else 0,
            SORT_BLOCK=_PLACED_BLOCK if self.places else 0, BEHIND=with_rows, BLOCK=_IDS_BLOCK, CLEAR=CLEAR_BLOCK,
            **self._combining_arguments(combining),
        )  # fmt: skip
        if kind.exchange is not None and not ctx.launch.only_loads:
            address = kind.lists.data_ptr()
            stride = 8 * kind.lists.shape[1]
            stream = ctx.current_stream()
            kind.exchange(stream, address + ctx.rank * stride, 0, address)
        if self.algorithm == "gather":
            most = ctx.max_union_rows
            builders = self._arguments["builders"]
            if ctx.launch.only_loads or not with_rows:
                most = 0
            self._merged = torch.empty(
                (most, kind.layout.elements), dtype=rows.dtype, device=ctx.device
            )
            mergers = min(ctx.most_blocks, -(-most // kind.tiles.rows))
            self.launch(kernels_merge.merge, builders + mergers, REGISTERS, out=self._merged)
        else:
            self._prepare()

    def _join(self) -> torch.Tensor:
        """``-> [n]``: the ids of all tables."""
        rows = self.rows
        most = kernels_tables.MOST_GIVEN
        ids = self.ctx.scratch("ids", rows.n, self.kind.layout.ids_type)[: rows.n]
        for first in range(0, len(rows.parts), most):
            last = min(first + most, len(rows.parts))
            begins = rows.begins[first : last + 1]
            longest = max(map(operator.sub, begins[1:], begins))
            given = kernels_tables.given(rows.ids[first:last], rows.values[first:last], begins)
            self.launch(
                kernels_tables.join,
                (self.workers(-(-longest // _IDS_BLOCK)), last - first),
                given=FlatTuple(given, list(given)), joined=ids, first=first,
                ITEM=rows.dtype.itemsize, TENSORS=last - first, BLOCK=_IDS_BLOCK,
            )  # fmt: skip
        return ids

    def _prepare(self) -> None:
        """The directory, who reduces which row, and own rows to the stage, for dense all of them,
        otherwise those that another rank needs."""
        builders = self._arguments["builders"]
        plans = self.algorithm == "owner"
        kept = min(self.rows.n, self.ctx.max_rows_per_rank)
        planners = max(1, -(-kept // _PLAN_BLOCK)) if plans and not self.kind.too_wide else 0
        combining = self._combining_blocks(not self.kind.too_wide)
        self.launch(
            kernels_values.prepare,
            builders + planners + combining.total,
            REGISTERS,
            builders=builders, planners=planners, PLANS=plans, BLOCK=_PLAN_BLOCK,
            **self._combining_arguments(combining),
        )  # fmt: skip

    def _combining_blocks(self, wanted: bool) -> _CombiningBlocks:
        """Return the thread blocks that a launch has for ``kernels_values.combine_all``."""
        if not wanted:
            return _NO_COMBINING
        combiners = self.workers(self.rows.n)
        if not self.pieces:
            return _NO_COMBINING._replace(combiners=combiners)
        pieces = self._most_pieces
        at_a_time = min(16, pieces)
        return _CombiningBlocks(
            combiners, at_a_time * min(32, pieces), at_a_time, self.workers(pieces)
        )

    @property
    def _most_pieces(self) -> int:
        return self.rows.n // kernels_values.PIECE.value + 1

    def _combining_arguments(self, blocks: _CombiningBlocks) -> dict[str, Any]:
        """Return the arguments of the launch that has such thread blocks."""
        partial = self._arguments["source"]  # It isn't read without adders.
        if blocks.adders:
            size = 2 * self._most_pieces * self.kind.layout.elements
            partial = self.ctx.scratch("partial", size, ACCUMULATORS[self.rows.dtype])
        return {
            "combiners": blocks.combiners,
            "adders": blocks.adders,
            "at_a_time": blocks.at_a_time,
            "partial": partial,
            "PIECES": blocks.adders > 0,
        }

    def move(self) -> torch.Tensor:
        """The rows of the union ``-> [max_union, elements]``, of which the first are theirs."""
        if self.algorithm == "gather":
            return self._merged
        self.reduce()
        return self.kind.out

    def reduce(self) -> None:
        """Rows to those who reduce them, and the sums to all. The same epochs on all ranks,
        whatever their rows are; nothing moves where the lists are not valid."""
        ctx = self.ctx
        announcers = self.ctx.world_size - 1
        n = min(self.rows.n, ctx.max_rows_per_rank)
        if ctx.topology.n_nodes == 1:
            self.launch(
                kernels_reduce.reduce, announcers + self.workers(-(-n // self.kind.tiles.rows))
            )
            return
        kernel = (
            kernels_nodes.reduce_nodes_of_single
            if self.kind.layout.elements == 1
            else kernels_nodes.reduce_nodes
        )
        for step in range(ctx.topology.n_nodes):
            self.launch(kernel, announcers + self.workers(n), step=step)
        self.launch(kernels_nodes.forward, announcers + self.workers(ctx.max_union_rows))
        self.launch(kernels_nodes.meet_nodes, ctx.world_size)

    def pad(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The form of fixed size: ``(indices [tables, max_union], count [tables, 1], values)``. The
        values of each tensor have ``max_union`` rows of its own width, one tensor behind the other.

        Args:
            out: what :meth:`move` returned.
        """
        ctx = self.ctx
        rows = self.rows
        tables = len(rows.parts)
        most = 0 if ctx.launch.only_loads else ctx.max_union_rows
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
        """Wait for the copy of the status and the counts of the tables, and for nothing that was
        launched after it."""
        event = self.ctx.status_event
        if event is not None:
            event.synchronize()
        self.ctx.monitor.raise_if_expired()
        words: list[int] = self.kind.on_device.on_host.tolist()
        return words

    # ------------------------------------------------------------------ results

    def densify(self, union: int) -> torch.Tensor:
        """``-> [union, elements]`` by a dense all-reduce of the whole table."""
        ctx = self.ctx
        kind = self.kind
        begin = kernels_lists.HEADER.value
        n = min(self.rows.n, ctx.max_rows_per_rank)
        own = kind.lists[ctx.rank]
        parts = rows_in(ctx.stage, n, kind.layout, self.rows.dtype)
        table = self._in_table(parts, own[begin : begin + n], own[1], kind.layout.num_rows)
        _, op = self._table_options()
        run(ALL_REDUCE, (table, table), CollectiveOptions(op), ctx=ctx.for_tables())
        return self._out_of_table(table, ctx.directory.union[:union])

    def _table_options(self) -> tuple[torch.dtype, str]:
        """Return dtype and operation of the all-reduce of a table: parts of a mean are divided
        before they are added, as by the other algorithms."""
        dtype = self.rows.dtype
        return (ACCUMULATORS[dtype], "sum") if self.op == "mean" else (dtype, self.op)

    def _in_table(
        self, parts: torch.Tensor, ids: torch.Tensor, count: torch.Tensor, num_rows: int
    ) -> torch.Tensor:
        """``[n, elements], [n] -> [num_rows, elements]``: the first ``count`` rows at their places
        in a table."""
        dtype, op = self._table_options()
        if self.op == "mean":
            parts = parts.to(dtype) / self.ctx.world_size
        table = parts.new_full((num_rows + 1, self.kind.layout.elements), _neutral(op, dtype))
        # Past the end of the list, what earlier calls have left goes to a row of its own.
        there = torch.arange(len(ids), device=ids.device) < count
        table.index_copy_(0, ids.where(there, num_rows), parts)
        return table[:num_rows]

    def _out_of_table(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """``[num_rows, elements], [union] -> [union, elements]``: these rows, in the dtype of the
        call."""
        reduced = table.index_select(0, ids)
        dtype = self.rows.dtype
        return reduced if reduced.dtype == dtype else reduced.to(dtype).add_(0)  # -0.0 + 0 is +0.0

    def load_dense(self, numbers: Sequence[int]) -> None:
        """Load PyTorch's kernels of :meth:`densify` for these numbers of rows, and its
        all-reduce's. Collective."""
        ctx = self.ctx
        kind = self.kind
        for n in numbers:
            ids = torch.zeros(n, dtype=torch.int64, device=ctx.device)
            parts = torch.zeros((n, kind.layout.elements), dtype=self.rows.dtype, device=ctx.device)
            self._out_of_table(self._in_table(parts, ids, ids[0], n), ids)
        dtype, op = self._table_options()
        reducer = ctx.for_tables()
        facts = Facts.of(
            reducer, kind.layout.num_rows * kind.layout.elements * dtype.itemsize, dtype
        )
        launches = launches_of(ALL_REDUCE.spec, reducer, facts, options=KernelOptions(dtype, op))
        reducer.wait_for_loads(ALL_REDUCE.name, launches.variant)

    def results(
        self, whole: torch.Tensor, status: Sequence[int], copies: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``(indices [1, n], values [n, *shape])`` of each tensor, by a few operations for each
        shape of rows.

        Args:
            whole: ``[at least union, elements]``: all rows of the union, in memory that the next
                call uses if ``copies``.
        """
        kind = self.kind
        union = status[UNION.value]
        # Where each table begins in the union, and where the last ends.
        bounds = [0, union] if self.rows.single else status[STATUS_WORDS.value :]
        sizes = list(map(operator.sub, bounds[1:], bounds))
        ids: tuple[torch.Tensor, ...] = (kind.union[:, :union].clone(),)
        if not self.rows.single:
            ids = ids[0].split(sizes, 1)
            torch._foreach_sub_(ids, kind.layout.firsts)
        values: list[torch.Tensor] = []
        for first, last, elements, shape in kind.layout.widths:
            begin = bounds[first]
            end = bounds[last]
            rows = (
                whole[begin:end]
                if elements == kind.layout.elements
                else whole[begin:end, :elements]
            )
            if copies:
                rows = rows.clone(memory_format=torch.contiguous_format)
            if len(shape) != 1:
                rows = rows.view(end - begin, *shape)
            values += rows.split(sizes[first:last]) if last - first > 1 else (rows,)
        return list(zip(ids, values, strict=True))


def _neutral(op: str, dtype: torch.dtype) -> float | int:
    """Return what changes nothing under ``op``."""
    if op not in ("max", "min"):
        return int(op == "prod")
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max
