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

from tdcoll.collectives.all_gather.spec import counted_launches, exchange_counted
from tdcoll.collectives.index_match.kernels import TOTAL, UNION
from tdcoll.collectives.sparse_all_reduce import (
    kernels_lists,
    kernels_merge,
    kernels_nodes,
    kernels_reduce,
    kernels_values,
)
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.collectives.sparse_all_reduce.explain import Capacities, explain_rows
from tdcoll.collectives.sparse_all_reduce.policy import NUM_WARPS, choose, prefers_dense, tiles
from tdcoll.collectives.sparse_all_reduce.rows import Rows
from tdcoll.primitives.reduce import ACCUMULATORS, OPERATIONS, accumulator, operation_name

__all__ = ["Call"]

_log = logging.getLogger("tdcoll")

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
        algorithm: the choice that the context's capacity allows.
        may_be_dense: whether the number of rows may still change that to dense.
        too_wide: rows are over the context's bytes. They take part in the exchange, which shows whether all ranks have
            such rows, and move no further.
        lists: int64 ``[world, stride]``: every rank's list.
        seed: of the signature.
        arguments: of all kernels, by the names of their parameters, as far as they are the same.
    """

    def __init__(self, ctx: SparseContext, rows: Rows, op: str, wanted: str) -> None:
        dtype, dense_allowed = rows.values.dtype, ctx.process_group is not None
        self.too_wide, self.loaded = rows.row_bytes > ctx.max_row_bytes, False
        widest = ctx.max_row_bytes if wanted == "auto" else min(rows.row_bytes, ctx.max_row_bytes)
        self.algorithm = choose(
            wanted,
            topology=ctx.topology,
            max_rows_per_rank=ctx.max_rows_per_rank,
            max_row_bytes=ctx.max_row_bytes,
            segments_fit=ctx.holds_segments(widest),
            dense_allowed=dense_allowed,
            beside_others=ctx.beside_others,
        )
        most = ctx.world_size * min(ctx.max_rows_per_rank, ctx.max_union_rows)
        may_change = wanted == "auto" and self.algorithm == "owner" and dense_allowed
        self.may_be_dense = may_change and prefers_dense(most, rows.num_rows, ctx.topology)
        if ctx.rank == 0 and _log.isEnabledFor(logging.DEBUG):
            n, capacities = rows.indices.shape[0], Capacities.of(ctx)
            _log.debug("%s", explain_rows(capacities, n, rows.row_bytes, rows.num_rows, wanted).line)
        self.lists = ctx.lists(with_rows=self.algorithm == "gather")
        self.seed = zlib.crc32(repr((rows.num_rows, rows.shape, str(dtype), op, wanted, dense_allowed)).encode())
        self.tiles = cut = tiles(rows.elements, dtype.itemsize)
        self.arguments = {
            "memory": ctx.memory,
            "nodes": ctx.nodes,
            "g": ctx.group,
            "num_rows": rows.num_rows,
            "row_elements": rows.elements,
            "row_bytes": rows.row_bytes,
            "REPEATED": not rows.coalesced,
            "OP": OPERATIONS[op],
            "ACC": accumulator(dtype),
            "ALIGNED": rows.row_bytes % 16 == 0,
            "ROWS": cut.rows,
            "WIDE": cut.wide,
            "DEEP": cut.deep,
            "WAITED": max(8, triton.next_power_of_2(ctx.world_size)),  # most groups share what was compiled
        }


class Call:
    """One sparse all-reduce on one rank.

    Attributes:
        kind: what it shares with other calls.
        algorithm: the one that is taken; final once :meth:`settle` has been called, if the call ``decides_late``.
        decides_late: the host must read the counts before rows are moved.
        variant: what Triton specialises kernels on, besides the constants that are parameters.
    """

    def __init__(self, ctx: SparseContext, rows: Rows, op: Any, algorithm: str) -> None:
        self.ctx, self.rows, self.op = ctx, rows, operation_name(op)
        key = "sparse", rows.num_rows, rows.shape, rows.values.dtype, rows.coalesced, self.op, algorithm
        self.kind: _Kind = ctx.once(key, lambda: _Kind(ctx, rows, self.op, algorithm))
        self.algorithm = self.kind.algorithm
        self.decides_late = self.kind.too_wide or self.kind.may_be_dense or self.algorithm == "dense"
        ctx.directory.prepare(rows.num_rows)
        self.variant = (rows.values.dtype, rows.elements, rows.values.data_ptr() % 16, ctx.directory.search)
        # The number of the exchange, too: ranks that look for lists at different places find those of an earlier one.
        self._signature = zlib.crc32(b"%d" % ctx.exchanges, self.kind.seed) >> 1
        self._arguments = {
            **self.kind.arguments,
            "source": rows.values,
            "like": rows.values,
            "order": rows.indices,  # not read where the rows are coalesced; nor is begins
            "begins": rows.indices,
            "n": rows.indices.shape[0],
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
            self.move()
            if self.algorithm == "dense" or self.kind.may_be_dense:
                self._combine(everything=True)
        finally:
            launcher.only_loads = False
        self.kind.loaded = True

    def launch(self, kernel: Any, programs: int | tuple[int, int], **more: Any) -> None:
        """Launch ``kernel`` with what this call knows, and ``more``; constants are named in capitals."""
        value_of = {**self._arguments, **more}.__getitem__
        plain, constant = _parameters(kernel)
        self.ctx.launch(
            kernel,
            programs,
            tuple(map(value_of, plain)),
            tuple(map(value_of, constant)),
            variant=self.variant,
            num_warps=NUM_WARPS,
        )

    def workers(self, tasks: int) -> int:
        """Programs for so many tasks."""
        return max(1, min(self.ctx.most_programs, tasks))

    def match(self) -> None:
        """Own ids to everybody, everybody's ids into the directory; for gather, rows go with them."""
        ctx, rows, lists = self.ctx, self.rows, self.kind.lists
        n, nbytes = rows.indices.shape[0], 8 * lists.shape[1]
        blocks = max(1, -(-n // _IDS_BLOCK))
        with_rows = self.algorithm == "gather" and not self.kind.too_wide
        how = {"row_bytes": rows.row_bytes if with_rows else 0, "BLOCK": _IDS_BLOCK}
        if rows.coalesced:
            self.launch(kernels_lists.copy_list, blocks, ids=rows.indices, **how)
        else:
            ids, self._arguments["order"] = torch.sort(rows.indices, stable=True)
            self._arguments["begins"] = torch.empty(n + 1, dtype=torch.int64, device=ctx.device)
            totals = torch.empty(blocks, dtype=torch.int32, device=ctx.device)
            self.launch(kernels_lists.count_first, blocks, ids=ids, totals=totals, BLOCK=_IDS_BLOCK)
            self.launch(kernels_lists.write_list, blocks, ids=ids, totals=totals, **how)
        if with_rows:
            self._combine(everything=True, behind=True)
        if ctx.launch.only_loads:
            counted_launches(ctx, nbytes)
        else:
            ctx.exchanges += 1
            if ctx.world_size > 1:
                exchange_counted(ctx, lists.data_ptr(), nbytes)
        ctx.directory.build(lists, self._signature)

    def _combine(self, *, everything: bool = False, behind: bool = False) -> None:
        """Own rows, those that another rank needs or ``everything``, to the stage, or ``behind`` the ids."""
        rows, piece = self.rows, kernels_values.PIECE.value
        n = rows.indices.shape[0]
        self.launch(kernels_values.combine, self.workers(n), ALL=everything, BEHIND=behind)
        if rows.coalesced or n <= piece:
            return
        pieces = n // piece + 1
        partial = torch.empty(2 * pieces, rows.elements, dtype=ACCUMULATORS[rows.values.dtype], device=self.ctx.device)
        self.launch(kernels_values.sum_pieces, (min(16, pieces), min(32, pieces)), partial=partial)
        self.launch(kernels_values.sum_partial, self.workers(pieces), partial=partial, BEHIND=behind)

    def move(self) -> torch.Tensor:
        """The rows of the union ``-> [max_union, *shape]``, of which the first are theirs."""
        ctx, rows = self.ctx, self.rows
        if self.algorithm != "gather":
            self.reduce()
            return _rows_in(ctx.out, ctx.max_union_rows, rows)
        out = torch.empty((ctx.max_union_rows, *rows.shape), dtype=rows.values.dtype, device=ctx.device)
        if rows.elements:
            self.launch(kernels_merge.merge, self.workers(-(-ctx.max_union_rows // self.kind.tiles.rows)), out=out)
        return out

    def reduce(self) -> None:
        """Rows to those who reduce them, and the sums to all. The same epochs on all ranks, whatever their rows are;
        nothing moves where the lists are not valid."""
        ctx = self.ctx
        n = min(self.rows.indices.shape[0], ctx.max_rows_per_rank)
        self.launch(kernels_lists.plan, max(1, -(-n // _PLAN_BLOCK)), BLOCK=_PLAN_BLOCK)
        self._combine()
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
        """Start copying the directory's status to the host."""
        self.ctx.status_words.copy_(self.ctx.directory.status, non_blocking=True)
        if (event := self.ctx.status_event) is not None:
            event.record()

    def status(self) -> list[int]:
        """Wait for the status, and for nothing that was launched after :meth:`copy_status`."""
        if (event := self.ctx.status_event) is not None:
            event.synchronize()
        self.ctx.monitor.raise_if_expired()
        words: list[int] = self.ctx.status_words.tolist()
        return words

    # ------------------------------------------------------------------ late decisions

    def settle(self, status: Sequence[int]) -> torch.Tensor:
        """Decide by the counts of this call, and move the rows of the union ``-> [at least union, *shape]``."""
        if self.kind.may_be_dense and prefers_dense(status[TOTAL.value], self.rows.num_rows, self.ctx.topology):
            self.algorithm = "dense"
        return self._densify(status[UNION.value]) if self.algorithm == "dense" else self.move()

    def _densify(self, union: int) -> torch.Tensor:
        """``-> [union, *shape]`` by a dense all-reduce of the whole table, in fp32 for 16-bit types."""
        ctx, rows, dist = self.ctx, self.rows, torch.distributed
        dtype, wide = rows.values.dtype, ACCUMULATORS[rows.values.dtype]
        n = min(rows.indices.shape[0], ctx.max_rows_per_rank)
        self._combine(everything=True)
        parts = _rows_in(ctx.stage, n, rows).view(n, rows.elements).to(wide)
        if self.op == "mean":
            parts = parts / ctx.world_size
        neutral = _neutral(self.op, wide)
        table = torch.full((rows.num_rows + 1, rows.elements), neutral, dtype=wide, device=ctx.device)
        own = self.kind.lists[ctx.rank]
        begin = kernels_lists.HEADER.value
        # Past the end of the list, what earlier calls have left goes to a row of its own.
        there = torch.arange(n, device=ctx.device) < own[1]
        table.index_copy_(0, own[begin : begin + n].where(there, rows.num_rows), parts)
        table = table[: rows.num_rows]
        operation = {"max": "MAX", "min": "MIN", "prod": "PRODUCT"}.get(self.op, "SUM")
        lossy = self.op in ("max", "min") and wide.is_floating_point  # whether they keep NaN is up to the backend
        nan = table.isnan().to(torch.uint8) if lossy else table
        dist.all_reduce(table, getattr(dist.ReduceOp, operation), group=ctx.process_group)
        if lossy:
            dist.all_reduce(nan, dist.ReduceOp.MAX, group=ctx.process_group)
            table.masked_fill_(nan.bool(), float("nan"))
        reduced = table.index_select(0, ctx.directory.union[:union]).to(dtype)
        return reduced.add_(0).view(union, *rows.shape)  # no -0.0, as in the kernels


def _rows_in(memory: torch.Tensor, count: int, like: Rows) -> torch.Tensor:
    """``[count, *shape]`` at the beginning of ``memory``."""
    return memory[: count * like.row_bytes].view(like.values.dtype).view(count, *like.shape)


def _neutral(op: str, dtype: torch.dtype) -> float | int:
    """Return what changes nothing under ``op``."""
    if op not in ("max", "min"):
        return int(op == "prod")
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max
