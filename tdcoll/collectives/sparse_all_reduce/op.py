# SPDX-License-Identifier: Apache-2.0
"""Sparse all-reduce, host side: what users call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.arguments import byte_text
from tdcoll.base.capture import refuse
from tdcoll.base.errors import ContextError, HeapExhaustedError, RankMismatchError
from tdcoll.base.ranges import range_of
from tdcoll.calls.launches import on_device
from tdcoll.calls.pool import on
from tdcoll.collectives.index_match.kernels import BAD_SIGNATURE, MAX_ROWS, UNION
from tdcoll.collectives.sparse_all_reduce.call import SparseCall
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.collectives.sparse_all_reduce.loads import load, wait_for_loads
from tdcoll.collectives.sparse_all_reduce.policy import FEWEST_ROWS
from tdcoll.collectives.sparse_all_reduce.rows import Joined, Rows, joined, rows_of_pair, rows_of_tensor
from tdcoll.primitives.reduce import check_operation, operation_name

_Tensors = TypeVar("_Tensors", torch.Tensor, Sequence[torch.Tensor])


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


def _context(given: SparseContext | None, group: runtime.Group, operation: str) -> SparseContext:
    """Return the given context, or tdcoll's own of the group, which grows and follows the stream until ``finalize``."""
    if given is not None:
        if group is not None:
            raise ValueError(f"{operation}: group must be None with ctx, which has a group already; got {group!r}")
        arguments.instance("ctx", given, SparseContext, "a tdcoll.SparseContext or None")
    refuse(
        runtime.current().device if given is None else given.device,
        operation,
        "the size of the result must be known on the host, which a CUDA graph cannot wait for; use "
        "sparse_all_reduce_padded",
    )
    if given is not None:
        return given
    owner = runtime.current()
    key = ("sparse", owner.ranks_of(group))
    if key not in owner.contexts:
        with on(owner.device):  # the first call makes it as large as it needs
            owner.contexts[key] = SparseContext(key[1], max_rows_per_rank=FEWEST_ROWS, max_row_bytes=0, grow=True)
    found: SparseContext = owner.contexts[key]
    return found


def _reduce(
    ctx: SparseContext,
    operation: str,
    prepare: Callable[[], list[Rows]],
    op: Any,
    algorithm: str,
    run: Callable[..., Sequence[Any]],
    facts: Callable[[], dict[str, Any]],
    padded: bool = False,
) -> list[Any]:
    """Check a call, make it, and return the result of each tensor, in the order in which they were given.

    After an error that ranks do not raise alike, the context refuses calls.

    Args:
        run: makes the call of one dtype: :func:`_run`, or with ``padded`` :func:`_run_padded`.
    """
    name = operation_name(op)

    def checked() -> list[Joined]:
        arguments.instance("algorithm", algorithm, str, "a str")
        given = prepare()
        calls = joined(given)
        for rows in calls:
            check_operation(op, rows.dtype)
            begin, end = ctx.area.data_ptr(), ctx.area.data_ptr() + ctx.area.nbytes
            if rows.n and any(begin <= address < end for address in (*rows.ids, *rows.values)):
                raise ValueError(
                    f"{operation}: rows that are reduced must not lie in the memory of the context that reduces them, "
                    "as results of copy=False do; clone() them"
                )
            if ctx.loads_together:
                load(ctx, operation, rows, name, algorithm, padded)
        return calls

    compared = {"op": name, "algorithm": algorithm, **facts()} if ctx.debug else {}
    alike = (ContextError, HeapExhaustedError, RankMismatchError, ValueError)  # which the lists of all ranks show
    with ctx.calling(operation, compared, checked, alike) as calls:
        kind = *((rows.tables, rows.dtype) for rows in calls), name, algorithm  # the same on all ranks
        ctx.noted(operation)

        def span() -> AbstractContextManager[None]:
            widest = sum(max(shape.numel() for _, shape in rows.tables) * rows.dtype.itemsize for rows in calls)
            return range_of(f"tdcoll.{operation}[{algorithm}, rows of {byte_text(widest)}]")

        made: dict[int, Any] = {}
        with ctx.once(("range", operation, *kind), span):
            for number, rows in enumerate(calls, 1):
                wait_for_loads(ctx, operation, rows, name, algorithm, padded)
                results = run(ctx, operation, rows, name, algorithm, number < len(calls))
                made.update(zip(rows.order, results, strict=True))
    return [made[place] for place in range(len(made))]


def _facts(name: str, tensors: Any, first: int = 0, **more: Any) -> dict[str, Any]:
    """Return the facts that debug mode compares: shapes from the ``first`` dimension on, by ``name``, and ``more``."""

    def shape(tensor: Any) -> tuple[int, ...]:
        return tuple(getattr(tensor, "shape", ()))[first:]

    if isinstance(tensors, (list, tuple)):
        return {"dtype": [getattr(one, "dtype", None) for one in tensors], name: list(map(shape, tensors)), **more}
    return {"dtype": getattr(tensors, "dtype", None), name: shape(tensors), **more}


def _run(
    ctx: SparseContext, operation: str, rows: Joined, op: str, algorithm: str, more: bool, *, copy: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``(indices [1, U], values [U, *shape])`` of each tensor. ``more``: the next call reuses the context's memory."""
    while True:
        call = SparseCall(ctx, rows, op, algorithm)
        call.match()
        call.kind.on_host.copy_(call.kind.counts, non_blocking=True)
        if ctx.status_event is not None:
            ctx.status_event.record(ctx.lane.stream)  # PyTorch takes long to find the current one
        whole = None if call.moves_late else call.move()
        status = call.status()
        if whole is None and status[BAD_SIGNATURE.value] and call.algorithm != "gather":
            call.reduce()  # moves nothing: a rank that passes something else may have launched this already
        ctx.raise_if_wrong(operation, status, call.kind.num_rows if rows.single else None)
        most, union, row_bytes = status[MAX_ROWS.value], status[UNION.value], call.kind.row_bytes
        error = ctx.excess(operation, most, row_bytes, union)
        if error is None:
            break
        if not ctx.grow:
            raise error
        ctx.enlarge(most, row_bytes, union)
        wait_for_loads(ctx, operation, rows, op, algorithm, padded=False)
    whole = call.densify(union) if whole is None else whole
    ctx.last_algorithm = call.algorithm
    copies = (copy or more) and (call.algorithm == "owner" or 2 * union < len(whole))  # nor is much more kept alive
    return call.results(whole, status, copies)


# ---------------------------------------------------------------------- public


def sparse_all_reduce(
    tensor: _Tensors,
    op: str | torch.distributed.ReduceOp = "sum",
    *,
    group: runtime.Group = None,
    ctx: SparseContext | None = None,
    algorithm: str = "auto",
    copy: bool = True,
) -> _Tensors:
    """``sparse [num_rows, ...] -> the same shape, coalesced``: rows of all ranks, those with the same index reduced.

    Collective over the context's group. Every rank gets the same indices, in ascending order, and bitwise the same
    values, in every run. A row that a rank has several times counts as the sum of them, as in any sparse tensor,
    whatever ``op`` is; ``op`` is then taken over the ranks *that have the row*. Sums are in the order of ranks (of
    nodes, if there are several), in fp32 for fp16 and bf16, and rounded once per level: repeated rows, node, result.
    NaN propagates through max and min; -0.0 in the result is +0.0.

    The result has no gradient. The call returns when its size is known; the rows may still be on their way, in the
    order of the stream. It cannot be captured in a CUDA graph: see :func:`sparse_all_reduce_padded`.

    >>> mine = torch.sparse_coo_tensor([[tdcoll.rank(), 2]], torch.ones(2, 1), (4, 1))
    >>> tdcoll.sparse_all_reduce(mine).to_dense().flatten()  # on 2 ranks
    tensor([1., 1., 2., 0.])
    >>> other = torch.sparse_coo_tensor([[0]], torch.ones(1, 3), (2, 3))
    >>> [one.shape for one in tdcoll.sparse_all_reduce([mine, other])]  # the tables of a model, in one call
    [torch.Size([4, 1]), torch.Size([2, 3])]

    Args:
        tensor: ``torch.sparse_coo`` with one sparse dimension and any dense ones, coalesced or not; fp16, bf16, fp32,
            fp64, int32 or int64; on the context's device. The ranks may bring different numbers of rows, also none.
            Or a list of such tensors, of any numbers of rows and shapes of rows, in the same order on all ranks: one
            call for those of each dtype, whose results are those of calls of their own, as a list.
        op: ``"sum"``, ``"mean"`` or ``"avg"`` (each part is divided by the number of ranks, of the group and not of the
            row, before it is added), ``"max"``, ``"min"``, ``"prod"`` or ``"product"``, or a
            ``torch.distributed.ReduceOp``.
        group: as for :func:`tdcoll.all_gather`. The call uses a context of tdcoll's own, which grows when needed.
        ctx: a :class:`SparseContext` of yours, instead of ``group``.
        algorithm: ``"owner"`` (one contributor reduces each row), ``"gather"`` (every rank is sent everything; for few
            rows), ``"dense"`` (an all-reduce of the whole table, in its order of sums), or ``"auto"``: see
            :func:`tdcoll.collectives.sparse_all_reduce.policy.choose`.
        copy: give the values memory of their own. False: they may be a view of the context's symmetric memory, valid
            until the next call on the context; reading it later gives rows of other calls.

    Raises:
        ContextError: closed, while a CUDA graph is captured, or over the capacity: the message has the number that
            is needed, and all ranks raise before any row is reduced.
        CollectiveTimeout: a wait expired.
        RankMismatchError: ranks pass different shapes, dtypes or operations. (Without ``debug``, arguments with which
            the ranks make other launches, such as another algorithm, may end in CollectiveTimeout on some of them.)
        NotInitializedError: before ``tdcoll.initialize()``.
        TypeError, ValueError: an argument is not as described, or (on all ranks) an index of a rank is out of range.

    Algorithm: reduction of each row by one of its contributors, chosen by hash; see
    :mod:`tdcoll.collectives.sparse_all_reduce`.
    """
    name = "sparse_all_reduce"
    several = isinstance(tensor, (list, tuple))
    given: list[Any] = list(tensor) if several else [tensor]
    context = _context(ctx, group, name)

    def prepare() -> list[Rows]:
        names = [f"tensor[{i}]" for i in range(len(given))] if several else ["tensor"]
        return [rows_of_tensor(one, context.device, called) for one, called in zip(given, names, strict=True)]

    run = partial(_run, copy=copy)
    results = _reduce(context, name, prepare, op, algorithm, run, partial(_facts, "shape", tensor))
    made: Any = [
        torch.sparse_coo_tensor(ids, values, one.shape, is_coalesced=True, check_invariants=False)
        for (ids, values), one in zip(results, given, strict=True)
    ]
    return made if several else made[0]


def sparse_all_reduce_rows(
    indices: torch.Tensor,
    values: torch.Tensor,
    num_rows: int,
    op: str | torch.distributed.ReduceOp = "sum",
    *,
    group: runtime.Group = None,
    ctx: SparseContext | None = None,
    coalesced: bool = False,
    algorithm: str = "auto",
    copy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[n], [n, ...] -> [U], [U, ...]``: :func:`sparse_all_reduce` on indices and rows.

    >>> ids, rows = tdcoll.sparse_all_reduce_rows(torch.tensor([tdcoll.rank(), 2]), torch.ones(2, 1), num_rows=4)
    >>> ids  # on 2 ranks
    tensor([0, 1, 2])

    Args:
        indices: int64 ``[n]``, each in ``0..num_rows - 1``; any order, and repeated, unless ``coalesced``.
        values: ``[n, ...]``, the rows.
        num_rows: of the table, the same on all ranks.
        op, group, ctx, algorithm, copy: as for :func:`sparse_all_reduce`.
        coalesced: ``indices`` are ascending and all different, which saves sorting them. Checked, on all ranks.

    Returns:
        The indices of all ranks, ascending, and their rows.

    Raises:
        As :func:`sparse_all_reduce`.
    """
    name = "sparse_all_reduce_rows"
    context = _context(ctx, group, name)

    def prepare() -> list[Rows]:
        return [rows_of_pair(indices, values, num_rows, coalesced, context.device)]

    run, facts = partial(_run, copy=copy), partial(_facts, "row_shape", values, 1, num_rows=num_rows)
    ((found, rows),) = _reduce(context, name, prepare, op, algorithm, run, facts)
    return found.view(-1), rows


def sparse_all_reduce_padded(
    indices: torch.Tensor | Sequence[torch.Tensor],
    values: torch.Tensor | Sequence[torch.Tensor],
    num_rows: int | Sequence[int],
    op: str | torch.distributed.ReduceOp = "sum",
    *,
    ctx: SparseContext,
    coalesced: bool = False,
    algorithm: str = "auto",
) -> Any:
    """``[n], [n, ...] -> [max_union_rows], [max_union_rows, ...], [1]``: the form of fixed size, for CUDA graphs.

    As :func:`sparse_all_reduce_rows`, with no synchronisation at all: the results have the context's capacity. After
    one eager call with tensors of the same dtype, row shape and about the same number of rows (up to 128, up to 1024,
    or more) it can be captured. Indices and values may change from replay to replay, but their number may not.

    What only the lists of all ranks show (too many rows, indices out of range, other arguments on other ranks) gives 0
    rows, and so does an expired wait; :meth:`SparseContext.check` then raises it.

    >>> with tdcoll.SparseContext(max_rows_per_rank=2, max_row_bytes=4) as ctx:
    ...     ids = torch.tensor([tdcoll.rank(), 2])
    ...     padded = tdcoll.sparse_all_reduce_padded(ids, torch.ones(2, 1), 4, ctx=ctx)
    >>> padded.count  # on 2 ranks
    tensor([3])

    Args:
        indices, values, num_rows: as for :func:`sparse_all_reduce_rows`, or lists of them, for several tensors.
        ctx: a :class:`SparseContext`. It does not grow here.
        algorithm: ``"owner"``, ``"gather"`` or ``"auto"``, which does not choose ``"dense"`` here.
        Others: as for :func:`sparse_all_reduce_rows`.

    Returns:
        :class:`PaddedRows`, or a list of them if lists are given. The values of one tensor may be a view of symmetric
        memory, valid until the next call on the context.

    Raises:
        As :func:`sparse_all_reduce`; and ContextError for the first call of its kind while a graph is captured.
    """
    name = "sparse_all_reduce_padded"
    arguments.instance("ctx", ctx, SparseContext, "a tdcoll.SparseContext")

    several = isinstance(values, (list, tuple))
    given: list[tuple[Any, ...]] = [(indices, values, num_rows)]
    if several:
        for called, argument in (("indices", indices), ("num_rows", num_rows)):
            if not isinstance(argument, (list, tuple)) or len(argument) != len(values):
                raise ValueError(f"{called} must be a list of {len(values)} like values, got {argument!r}")
        given = list(zip(indices, values, num_rows, strict=True))  # type: ignore[arg-type]

    def prepare() -> list[Rows]:
        places = [f"[{i}]" if several else "" for i in range(len(given))]
        parts = [
            rows_of_pair(ids, rows, count, coalesced, ctx.device, place)
            for (ids, rows, count), place in zip(given, places, strict=True)
        ]
        if algorithm == "dense":
            raise ValueError("algorithm must be 'owner', 'gather' or 'auto' in sparse_all_reduce_padded; got 'dense'")
        widest = max((part.table[1].numel() * part.values.dtype.itemsize for part in parts), default=0)
        if error := ctx.excess(name, row_bytes=widest):
            raise error
        return parts

    facts = partial(_facts, "row_shape", values, 1, num_rows=num_rows)
    results = _reduce(ctx, name, prepare, op, algorithm, _run_padded, facts, padded=True)
    return results if several else results[0]


def _run_padded(
    ctx: SparseContext, operation: str, rows: Joined, op: str, algorithm: str, more: bool
) -> list[PaddedRows]:
    """The padded results of each tensor; ``more`` as for :func:`_run`."""
    call, tables, most = SparseCall(ctx, rows, op, algorithm), len(rows.parts), ctx.max_union_rows
    kernels = operation, call.variant, op, call.algorithm, rows.coalesced, call.places, call.pieces, tables
    on_device(ctx, operation, kernels, lambda: True)
    call.match()
    ids, counts, padded = call.pad(call.move())
    if more and rows.single:
        padded = padded.clone()
    values = padded.view(-1).split([most * shape.numel() for _, shape in rows.tables])
    return [
        PaddedRows(own, part.view(most, *shape), count)
        for own, part, count, (_, shape) in zip(ids, values, counts, rows.tables, strict=True)
    ]
