# SPDX-License-Identifier: Apache-2.0
"""The forms of the sparse all-reduce as operations, which :func:`tdcoll.calls.run.make_call`
makes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.arguments import byte_text
from tdcoll.base.capture import refuse
from tdcoll.base.errors import ContextError, HeapExhaustedError, RankMismatchError
from tdcoll.base.ranges import range_of
from tdcoll.calls.implicit import on
from tdcoll.calls.launch_spec import device_table
from tdcoll.calls.operation import Bound, Operation, PreparedCall, Request
from tdcoll.collectives.index_match.kernels import BAD_SIGNATURE, MAX_ROWS, UNION
from tdcoll.collectives.sparse_all_reduce.call import SparseCall
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.collectives.sparse_all_reduce.loads import load, wait_for_loads
from tdcoll.collectives.sparse_all_reduce.policy import FEWEST_ROWS
from tdcoll.collectives.sparse_all_reduce.rows import (
    JoinedRows,
    Rows,
    joined,
    rows_of_pair,
    rows_of_tensor,
)
from tdcoll.primitives.reduce import check_operation, operation_name


@dataclass(frozen=True)
class PaddedRows:
    """What :func:`sparse_all_reduce_padded` returns.

    Attributes:
        indices: int64 ``[max_union_rows]``: the rows' ids, ascending, then zeros.
        values: ``[max_union_rows, ...]``: the rows, then zeros, which add nothing to row 0.
        count: int64 ``[1]`` on the device: how many rows there are.
    """

    indices: torch.Tensor
    values: torch.Tensor
    count: torch.Tensor


class SparseOptions(NamedTuple):
    """Arguments of the public functions beside tensors, as the caller passed them.

    Attributes:
        num_rows: Of the table, or of each table; None if the tensors say it.
        coalesced: Whether ids are ascending and different; None if the tensors say it.
        listed: Whether the caller passed lists of tensors.
        copy: Whether results have memory of their own.
    """

    op: Any
    algorithm: Any
    num_rows: Any = None
    coalesced: Any = None
    listed: bool = False
    copy: bool = True


class _SparseOperation(Operation):
    """A form of the sparse all-reduce. The numbers of rows change from call to call, so each call
    is checked, and the context remembers only what calls of one kind share
    (:class:`~.call.SparseCall`)."""

    padded = False
    """Whether results have a fixed size."""

    errors_alike = (ContextError, HeapExhaustedError, RankMismatchError, ValueError)
    """The lists of all ranks show what is wrong, after the same launches."""

    def key(self, tensors: tuple[Any, ...], options: Any, ctx: Any) -> None:
        return None

    def own_context(self, request: Request) -> SparseContext:
        """Return tdcoll's own context, which grows and follows the stream until ``finalize``."""
        job = runtime.current()
        self._refuse_capture(job.device)
        key = ("sparse", job.ranks_of(request.group))
        if key not in job.contexts:
            with on(job.device):  # the first call makes it as large as it needs
                job.contexts[key] = SparseContext(
                    key[1], max_rows_per_rank=FEWEST_ROWS, max_row_bytes=0, grow=True
                )
        context: SparseContext = job.contexts[key]
        return context

    def check_context(self, ctx: Any) -> None:
        arguments.instance("ctx", ctx, SparseContext, "a tdcoll.SparseContext or None")
        self._refuse_capture(ctx.device)

    def _refuse_capture(self, device: torch.device) -> None:
        refuse(
            device,
            self.name,
            "the size of the result must be known on the host, which a CUDA graph cannot wait for; "
            "use sparse_all_reduce_padded",
        )

    def agreement(self, request: Request, ctx: Any) -> dict[str, Any]:
        options: SparseOptions = request.options
        facts = {"op": operation_name(options.op), "algorithm": options.algorithm}
        return {**facts, **self._shapes(request)}

    @abstractmethod
    def _shapes(self, request: Request) -> dict[str, Any]:
        """Return dtypes and shapes, for debug mode."""

    def check(self, request: Request, ctx: Any) -> None:
        options: SparseOptions = request.options
        arguments.instance("algorithm", options.algorithm, str, "a str")
        arguments.instance("copy", options.copy, bool, "a bool")
        if options.coalesced is not None:
            arguments.instance("coalesced", options.coalesced, bool, "a bool")

    @abstractmethod
    def rows(self, request: Request, ctx: SparseContext) -> list[Rows]:
        """Return the rows of each tensor, checked."""

    @abstractmethod
    def reduce(self, call: SparseCall, more: bool, copy: bool) -> Sequence[Any]:
        """Make one call, of the tensors of one dtype, and return the result of each.

        Args:
            more: Whether another call follows, which reuses the context's memory.
            copy: Whether results have memory of their own.
        """

    def prepare(self, request: Request, ctx: Any) -> PreparedCall:
        options: SparseOptions = request.options
        calls = joined(self.rows(request, ctx))
        for rows in calls:
            check_operation(options.op, rows.dtype)
            self._check_memory(rows, ctx)
        return _PreparedSparse(self, ctx, calls, options)

    def _check_memory(self, rows: JoinedRows, ctx: SparseContext) -> None:
        begin = ctx.area.data_ptr()
        end = begin + ctx.area.nbytes
        if rows.n and any(begin <= address < end for address in (*rows.ids, *rows.values)):
            raise ValueError(
                f"{self.name}: rows that are reduced must not lie in the memory of the context that "
                "reduces them, as results of copy=False do; clone() them"
            )


class _PreparedSparse(PreparedCall):
    """The calls of one request: one for the tensors of each dtype."""

    complex = False

    def __init__(
        self,
        operation: _SparseOperation,
        ctx: SparseContext,
        calls: list[JoinedRows],
        options: SparseOptions,
    ) -> None:
        self.record = operation.name  # its epochs are unknown
        self.launch = self._launch
        self._operation = operation
        self._ctx = ctx
        self._calls = calls
        self._algorithm = options.algorithm
        self._copy = options.copy
        self._op = operation_name(options.op)
        tables = [(rows.tables, rows.dtype) for rows in calls]
        self._kind = (*tables, self._op, self._algorithm)
        self.variant = None  # The ranks wait for loads before each of the calls.
        if ctx.loads_together:
            for rows in calls:
                load(ctx, operation.name, rows, self._op, self._algorithm, operation.padded)

    def _call_of(self, rows: JoinedRows) -> SparseCall:
        return SparseCall(self._ctx, rows, self._op, self._algorithm)

    def _wait_for_loads(self, rows: JoinedRows) -> None:
        operation = self._operation
        wait_for_loads(self._ctx, operation.name, rows, self._op, self._algorithm, operation.padded)

    def bind(self, *tensors: Any) -> Bound:
        results: list[Any] = [None] * sum(len(rows.order) for rows in self._calls)
        return results, (results,)

    def _launch(self, stream: int, results: list[Any]) -> None:
        """Make the calls, and put the result of each tensor to its place."""
        key = ("range", self._operation.name, *self._kind)
        with self._ctx.cached(key, self._range):
            for number, rows in enumerate(self._calls, 1):
                self._wait_for_loads(rows)
                more = number < len(self._calls)
                made = self._operation.reduce(self._call_of(rows), more, self._copy)
                for place, result in zip(rows.order, made, strict=True):
                    results[place] = result

    def _range(self) -> AbstractContextManager[None]:
        row_bytes = 0
        for rows in self._calls:
            widest = max(shape.numel() for _, shape in rows.tables)
            row_bytes += widest * rows.dtype.itemsize
        name = f"tdcoll.{self._operation.name}"
        return range_of(f"{name}[{self._algorithm}, rows of {byte_text(row_bytes)}]")


def _shape_facts(name: str, tensors: Any, first: int = 0) -> dict[str, Any]:
    """Return dtypes, and by ``name`` the shapes from dimension ``first`` on, for debug mode."""

    def shape(tensor: Any) -> tuple[int, ...]:
        return tuple(getattr(tensor, "shape", ()))[first:]

    if isinstance(tensors, (list, tuple)):
        dtypes = [getattr(tensor, "dtype", None) for tensor in tensors]
        return {"dtype": dtypes, name: list(map(shape, tensors))}
    return {"dtype": getattr(tensors, "dtype", None), name: shape(tensors)}


def _reduce_unpadded(
    operation: _SparseOperation, call: SparseCall, more: bool, copy: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ``(indices [1, U], values [U, *shape])`` of each tensor; see :meth:`.reduce`."""
    ctx = call.ctx
    while True:
        call.match()
        call.kind.on_device.on_host.copy_(call.kind.on_device.counts, non_blocking=True)
        if ctx.status_event is not None:
            # PyTorch takes long to find the current stream.
            ctx.status_event.record(ctx.order.stream)
        whole = None if call.moves_late else call.move()
        status = call.status()
        wrong_arguments = status[BAD_SIGNATURE.value]
        if whole is None and wrong_arguments and call.algorithm != "gather":
            # Moves nothing. A rank that passes something else may have launched this already.
            call.reduce()
        num_rows = call.kind.layout.num_rows if call.rows.single else None
        ctx.raise_if_wrong(operation.name, status, num_rows)
        most_rows = status[MAX_ROWS.value]
        union = status[UNION.value]
        row_bytes = call.kind.layout.row_bytes
        error = ctx.excess(operation.name, most_rows, row_bytes, union)
        if error is None:
            break
        if not ctx.grow:
            raise error
        ctx.enlarge(most_rows, row_bytes, union)
        wait_for_loads(ctx, operation.name, call.rows, call.op, call.wanted, operation.padded)
        call = call.again()
    if whole is None:
        whole = call.densify(union)
    ctx.last_algorithm = call.algorithm
    in_shared_memory = call.algorithm == "owner"
    # A view would keep much more memory alive than it needs.
    mostly_unused = 2 * union < len(whole)
    copies = (copy or more) and (in_shared_memory or mostly_unused)
    return call.results(whole, status, copies)


class _OfTensors(_SparseOperation):
    """:func:`sparse_all_reduce`. Requests have the sparse tensors."""

    name = "sparse_all_reduce"

    def _shapes(self, request: Request) -> dict[str, Any]:
        tensors: Any = request.tensors if request.options.listed else request.tensors[0]
        return _shape_facts("shape", tensors)

    def rows(self, request: Request, ctx: SparseContext) -> list[Rows]:
        if not request.options.listed:
            return [rows_of_tensor(request.tensors[0], ctx.device, "tensor")]
        return [
            rows_of_tensor(tensor, ctx.device, f"tensor[{i}]")
            for i, tensor in enumerate(request.tensors)
        ]

    def reduce(self, call: SparseCall, more: bool, copy: bool) -> Sequence[Any]:
        return _reduce_unpadded(self, call, more, copy)


class _OfRows(_SparseOperation):
    """:func:`sparse_all_reduce_rows`. Requests have ``(indices, values)``."""

    name = "sparse_all_reduce_rows"

    def _shapes(self, request: Request) -> dict[str, Any]:
        facts = _shape_facts("row_shape", request.tensors[1], 1)
        return {**facts, "num_rows": request.options.num_rows}

    def rows(self, request: Request, ctx: SparseContext) -> list[Rows]:
        indices, values = request.tensors
        options = request.options
        return [rows_of_pair(indices, values, options.num_rows, options.coalesced, ctx.device)]

    def reduce(self, call: SparseCall, more: bool, copy: bool) -> Sequence[Any]:
        return _reduce_unpadded(self, call, more, copy)


class _Padded(_SparseOperation):
    """:func:`sparse_all_reduce_padded`. Requests have ``(indices, values)``, or lists of them."""

    name = "sparse_all_reduce_padded"
    padded = True

    def check_context(self, ctx: Any) -> None:
        arguments.instance("ctx", ctx, SparseContext, "a tdcoll.SparseContext")

    def _shapes(self, request: Request) -> dict[str, Any]:
        facts = _shape_facts("row_shape", request.tensors[1], 1)
        return {**facts, "num_rows": request.options.num_rows}

    def rows(self, request: Request, ctx: SparseContext) -> list[Rows]:
        indices, values = request.tensors
        options: SparseOptions = request.options
        triples = [(indices, values, options.num_rows)]
        places = [""]
        if options.listed:
            triples = list(zip(indices, values, options.num_rows, strict=True))
            places = [f"[{i}]" for i in range(len(triples))]
        parts = [
            rows_of_pair(ids, rows, num_rows, options.coalesced, ctx.device, place)
            for (ids, rows, num_rows), place in zip(triples, places, strict=True)
        ]
        if options.algorithm == "dense":
            raise ValueError(
                "algorithm must be 'owner', 'gather' or 'auto' in sparse_all_reduce_padded; got 'dense'"
            )
        row_bytes = [part.table[1].numel() * part.values.dtype.itemsize for part in parts]
        error = ctx.excess(self.name, row_bytes=max(row_bytes, default=0))
        if error is not None:
            raise error
        return parts

    def reduce(self, call: SparseCall, more: bool, copy: bool) -> Sequence[Any]:
        """Return :class:`PaddedRows` of each tensor."""
        ctx = call.ctx
        rows = call.rows
        tables = len(rows.parts)
        most = ctx.max_union_rows
        form = (call.variant, call.op, call.algorithm, rows.coalesced, call.places, call.pieces)
        device_table(ctx, self.name, (self.name, *form, tables), lambda: True)
        call.match()
        ids, counts, padded = call.pad(call.move())
        if more and rows.single:
            padded = padded.clone()
        sizes = [most * shape.numel() for _, shape in rows.tables]
        values = padded.view(-1).split(sizes)
        return [
            PaddedRows(own, part.view(most, *shape), count)
            for own, part, count, (_, shape) in zip(ids, values, counts, rows.tables, strict=True)
        ]


OF_TENSORS = _OfTensors()
OF_ROWS = _OfRows()
PADDED = _Padded()
