# SPDX-License-Identifier: Apache-2.0
"""One sparse all-reduce on one rank: its launches, and what the lists of all ranks say."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from tdcoll.collectives.all_gather import counted_launches, exchange_counted
from tdcoll.collectives.index_match import kernels as match
from tdcoll.collectives.sparse_all_reduce import (
    kernels_lists,
    kernels_merge,
    kernels_nodes,
    kernels_reduce,
    kernels_values,
)
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.collectives.sparse_all_reduce.policy import Counts, choose, may_be_dense, tiles
from tdcoll.collectives.sparse_all_reduce.rows import Rows
from tdcoll.errors import ContextError, RankMismatchError
from tdcoll.primitives.reduce import ACCUMULATORS, OPERATIONS, accumulator, operation_name

__all__ = ["Call", "Status"]

_IDS_BLOCK, _PLAN_BLOCK = 1024, 256
"""Ids of a program that does nothing else with them, and of one that looks each of them up."""

_KINDS_KEPT = 256


@functools.cache
def _parameters(kernel: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a kernel's parameters: those of its arguments, and of its constants, which are in capitals."""
    names = tuple(kernel.arg_names)
    return tuple(name for name in names if not name.isupper()), tuple(name for name in names if name.isupper())


class _Kind:
    """What calls of one kind on a context have in common, which the host need not find out again.

    Attributes:
        algorithm, too_wide, tiles, lists: as in :class:`Call`.
        loaded: whether the kernels are.
        arguments: of all kernels, by the names of their parameters, as far as they are the same.
        seed: of the signature.
    """

    def __init__(self, ctx: SparseContext, rows: Rows, op: str, wanted: str, dense_allowed: bool) -> None:
        dtype = rows.values.dtype
        self.too_wide, self.loaded = rows.row_bytes > ctx.max_row_bytes, False
        self.algorithm = _choose(ctx, rows, wanted, dense_allowed, None)
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


def _kind(ctx: SparseContext, rows: Rows, op: str, wanted: str, dense_allowed: bool) -> _Kind:
    """Of such a call; the context forgets them when its memory changes."""
    key = (rows.num_rows, rows.shape, rows.values.dtype, rows.coalesced, op, wanted, dense_allowed)
    if (found := ctx.kinds.get(key)) is None:
        if len(ctx.kinds) >= _KINDS_KEPT:
            ctx.kinds.clear()
        found = ctx.kinds[key] = _Kind(ctx, rows, op, wanted, dense_allowed)
    return found


def _choose(ctx: SparseContext, rows: Rows, wanted: str, dense_allowed: bool, counts: Counts | None) -> str:
    """The algorithm, given the counts of this call if they are known."""
    return choose(
        wanted,
        num_rows=rows.num_rows,
        row_bytes=rows.row_bytes,
        topology=ctx.topology,
        max_rows_per_rank=ctx.max_rows_per_rank,
        max_row_bytes=ctx.max_row_bytes,
        segments_fit=ctx.holds_segments(
            ctx.max_row_bytes if wanted == "auto" else min(rows.row_bytes, ctx.max_row_bytes)
        ),
        dense_allowed=dense_allowed,
        beside_others=ctx.beside_others,
        counts=counts,
    )


class Call:
    """One sparse all-reduce on one rank: its launches, in the order that the package's docstring draws.

    Attributes:
        algorithm: the choice that the context's capacity and the shape allow; see :attr:`decides_late`.
        too_wide: rows are over the context's bytes. They take part in the exchange, which shows whether all ranks have
            such rows, and move no further.
        tiles: how kernels that move rows cut them.
        lists: int64 ``[world, stride]``: every rank's list.
        directory: of the lists of all ranks, after :meth:`match`.
    """

    def __init__(self, ctx: SparseContext, rows: Rows, op: Any, algorithm: str) -> None:
        op = operation_name(op)
        self.ctx, self.rows, self.op, self.wanted = ctx, rows, op, algorithm
        self._dense_allowed = _process_group(ctx) is not None
        self._kind = kind = _kind(ctx, rows, op, algorithm, self._dense_allowed)
        self.algorithm, self.too_wide, self.tiles, self.lists = kind.algorithm, kind.too_wide, kind.tiles, kind.lists
        self.directory = directory = ctx.directory(rows.num_rows)
        # The number of the exchange, too: ranks that look for lists at different places find those of an earlier one.
        self._signature = zlib.crc32(b"%d" % ctx.exchanges, kind.seed) >> 1
        self._arguments = {
            **kind.arguments,
            "source": rows.values,
            "like": rows.values,
            "order": rows.indices,  # not read where the rows are coalesced; nor is begins
            "begins": rows.indices,
            "n": rows.indices.shape[0],
            "signature": self._signature,
            "index": ctx.index(rows.num_rows, with_rows=kind.algorithm == "gather"),
        }
        self.variant = (rows.values.dtype, rows.elements, rows.values.data_ptr() % 16, directory.search)
        """What Triton specialises kernels on, besides the constants that are parameters."""

    def choose(self, counts: Counts | None) -> str:
        """The algorithm, given the counts of this call if they are known."""
        return _choose(self.ctx, self.rows, self.wanted, self._dense_allowed, counts)

    @property
    def decides_late(self) -> bool:
        """Whether the algorithm depends on the counts, which the host must read first."""
        ctx, rows = self.ctx, self.rows
        if self.wanted == "auto" and self.algorithm == "owner":
            table = (rows.num_rows, rows.row_bytes, ctx.topology)
            return self.too_wide or may_be_dense(*table, ctx.max_union_rows, self._dense_allowed)
        return self.too_wide or self.algorithm == "dense"

    # ------------------------------------------------------------------ launches

    def load(self) -> None:
        """Compile and load the kernels of such calls, PyTorch's among them, and launch none that a peer notices.

        CUDA loads a kernel only while none is running, see :meth:`~tdcoll.CollectiveContext.wait_for_loads`.
        """
        if self._kind.loaded:
            return
        launcher = self.ctx.launch
        launcher.only_loads = True
        try:
            self.match()
            if self.algorithm == "gather":
                self._merge()
            else:
                self.reduce()
            if self.algorithm == "dense":
                self._combine(self.ctx.stage_address, everything=True)
        finally:
            launcher.only_loads = False
        self._kind.loaded = True

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
            num_warps=self.tiles.num_warps,
        )

    def workers(self, tasks: int) -> int:
        """Programs for so many tasks."""
        return max(1, min(self.ctx.most_programs, tasks))

    def match(self) -> None:
        """Own ids to everybody, everybody's ids into the directory; for gather, rows go with them."""
        ctx, rows, known = self.ctx, self.rows, self._arguments
        n = rows.indices.shape[0]
        blocks = max(1, -(-n // _IDS_BLOCK))
        with_rows = self.algorithm == "gather" and not self.too_wide
        row_bytes = rows.row_bytes if with_rows else 0
        if rows.coalesced:
            self.launch(kernels_lists.copy_list, blocks, ids=rows.indices, row_bytes=row_bytes, BLOCK=_IDS_BLOCK)
        else:
            ids, known["order"] = torch.sort(rows.indices, stable=True)
            known["begins"] = torch.empty(n + 1, dtype=torch.int64, device=ctx.device)
            totals = torch.empty(blocks, dtype=torch.int32, device=ctx.device)
            self.launch(kernels_lists.count_first, blocks, ids=ids, totals=totals, BLOCK=_IDS_BLOCK)
            self.launch(kernels_lists.write_list, blocks, ids=ids, totals=totals, row_bytes=row_bytes, BLOCK=_IDS_BLOCK)
        if with_rows:
            self._combine(0, everything=True)
        nbytes = 8 * self.lists.shape[1]
        if ctx.launch.only_loads:
            counted_launches(ctx.collective, nbytes)
        else:
            ctx.exchanges += 1
            if ctx.world_size > 1:
                exchange_counted(ctx.collective, self.lists.data_ptr(), nbytes)
        self.directory.build(self.lists, self._signature, rows.num_rows)

    def _combine(self, target: int, everything: bool) -> None:
        rows, piece = self.rows, kernels_values.PIECE.value
        n = rows.indices.shape[0]
        self.launch(kernels_values.combine, self.workers(n), target=target, ALL=everything)
        if rows.coalesced or n <= piece:
            return
        pieces = n // piece + 1
        partial = torch.empty(
            (2 * pieces, rows.elements), dtype=ACCUMULATORS[rows.values.dtype], device=self.ctx.device
        )
        self.launch(kernels_values.sum_pieces, (min(16, pieces), min(32, pieces)), partial=partial)
        self.launch(kernels_values.sum_partial, self.workers(pieces), target=target, partial=partial)

    def move(self, algorithm: str) -> torch.Tensor:
        """The rows of the union ``-> [max_union, *shape]``, of which the first are theirs."""
        if algorithm == "gather":
            return self._merge()
        self.reduce()
        return self.ctx.out(self.ctx.max_union_rows, self.rows.shape, self.rows.values.dtype)

    def reduce(self) -> None:
        """Rows to those who reduce them, and the sums to all. The same epochs on all ranks, whatever their rows are;
        nothing moves where the lists are not valid."""
        ctx = self.ctx
        n = min(self.rows.indices.shape[0], ctx.max_rows_per_rank)
        self.launch(kernels_lists.plan, max(1, -(-n // _PLAN_BLOCK)), BLOCK=_PLAN_BLOCK)
        self._combine(ctx.stage_address, everything=False)
        announcers = ctx.world_size - 1
        if ctx.topology.n_nodes == 1:
            self.launch(kernels_reduce.reduce, announcers + self.workers(-(-n // self.tiles.rows)))
            meet = kernels_reduce.meet
        else:
            kernel = kernels_nodes.reduce_nodes_of_single if self.rows.elements == 1 else kernels_nodes.reduce_nodes
            for step in range(ctx.topology.n_nodes):
                self.launch(kernel, announcers + self.workers(n), step=step)
            self.launch(kernels_nodes.forward, announcers + self.workers(ctx.max_union_rows))
            meet = kernels_nodes.meet_nodes
        if ctx.world_size > 1:
            self.launch(meet, ctx.world_size)

    def _merge(self) -> torch.Tensor:
        ctx, rows = self.ctx, self.rows
        out = torch.empty((ctx.max_union_rows, *rows.shape), dtype=rows.values.dtype, device=ctx.device)
        if rows.elements:
            self.launch(kernels_merge.merge, self.workers(-(-ctx.max_union_rows // self.tiles.rows)), out=out)
        return out

    def status(self) -> Callable[[], Status]:
        """Start copying the status to the host; what waits for it, and for nothing that is launched later."""
        ctx = self.ctx
        words = ctx.status_words
        words[:8].copy_(self.directory.status, non_blocking=True)
        if self.decides_late:  # how many rows this rank brings after duplicates are summed: for the dense way
            words[8:].copy_(self.lists[ctx.rank, 1:2], non_blocking=True)
        event = ctx.status_event
        if event is not None:
            event.record()

        def wait() -> Status:
            if event is not None:
                event.synchronize()
            ctx.collective.monitor.raise_if_expired()
            return Status(words.tolist())

        return wait

    def densify(self, union: int, own: int) -> torch.Tensor:
        """``-> [union, *shape]`` by a dense all-reduce of the whole table, in fp32 for 16-bit types."""
        ctx, rows = self.ctx, self.rows
        dtype = rows.values.dtype
        wide = ACCUMULATORS[dtype]
        self._combine(ctx.stage_address, everything=True)
        parts = ctx.stage(own, (rows.elements,), dtype).to(wide)
        if self.op == "mean":
            parts = parts / self.ctx.world_size
        table = torch.full((rows.num_rows, rows.elements), _neutral(self.op, wide), dtype=wide, device=ctx.device)
        begin = kernels_lists.HEADER.value
        table.index_copy_(0, self.lists[ctx.rank, begin : begin + own], parts)
        dist, group = torch.distributed, _process_group(ctx)
        operation = {"max": "MAX", "min": "MIN", "prod": "PRODUCT"}.get(self.op, "SUM")
        lossy = self.op in ("max", "min") and wide.is_floating_point  # whether they keep NaN is up to the backend
        nan = table.isnan().to(torch.uint8) if lossy else table
        dist.all_reduce(table, getattr(dist.ReduceOp, operation), group=group)
        if lossy:
            dist.all_reduce(nan, dist.ReduceOp.MAX, group=group)
            table.masked_fill_(nan.bool(), float("nan"))
        reduced = table.index_select(0, self.directory.union[:union]).to(dtype)
        return reduced.add_(0).view(union, *rows.shape)  # no -0.0, as in the kernels


def _neutral(op: str, dtype: torch.dtype) -> float | int:
    if op in ("sum", "mean"):
        return 0
    if op == "prod":
        return 1
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


def _process_group(ctx: SparseContext) -> Any:
    """torch.distributed's group of the context's ranks, or None if there is none that tdcoll knows of."""
    if ctx.process_group is not None:
        return ctx.process_group
    dist = torch.distributed
    if ctx.everybody and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return None


@dataclass(frozen=True)
class Status:
    """The words of a directory's status, on the host."""

    words: list[int]

    def __getitem__(self, word: Any) -> int:
        return self.words[word.value]

    @property
    def counts(self) -> Counts:
        return Counts(self[match.TOTAL], self[match.UNION])

    def over(self, ctx: SparseContext) -> bool:
        """More rows than the context has room for."""
        return self[match.MAX_ROWS] > ctx.max_rows_per_rank or self[match.UNION] > ctx.max_union_rows

    def raise_if_wrong(self, operation: str, ctx: SparseContext, num_rows: int) -> None:
        """The same error on all ranks, since all have read the same lists."""
        if self[match.BAD_SIGNATURE]:
            raise RankMismatchError(
                f"{operation}: ranks pass different shapes, dtypes, operations or algorithms (rank "
                f"{self[match.BAD_SIGNATURE] - 1} differs from rank {ctx.rank}); TDCOLL_DEBUG=1 says which"
            )
        if self[match.BAD_ORDER]:
            raise ValueError(
                f"{operation}: indices of rank {self[match.BAD_ORDER] - 1} are said to be coalesced, and are not "
                "ascending or not different"
            )
        if self[match.BAD_RANGE]:
            raise ValueError(
                f"{operation}: indices of rank {self[match.BAD_RANGE] - 1} must be in 0..{num_rows - 1}, the rows of "
                "the tensor"
            )

    def raise_if_over(self, operation: str, ctx: SparseContext) -> None:
        if self[match.MAX_ROWS] > ctx.max_rows_per_rank:
            raise ContextError(
                f"{operation}: a rank brings {self[match.MAX_ROWS]} different rows, over the context's capacity of "
                f"{ctx.max_rows_per_rank}; make it with max_rows_per_rank={self[match.MAX_ROWS]} or more, or grow=True"
            )
        if self[match.UNION] > ctx.max_union_rows:
            raise ContextError(
                f"{operation}: the ranks bring {self[match.UNION]} different rows together, over the context's "
                f"capacity of {ctx.max_union_rows}; make it with max_union_rows={self[match.UNION]} or more, or "
                "grow=True"
            )
