# SPDX-License-Identifier: Apache-2.0
"""Sparse all-reduce, host side: what users call."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tdcoll import arguments, runtime
from tdcoll.capture import refuse
from tdcoll.collectives.index_match import kernels as match
from tdcoll.collectives.sparse_all_reduce import kernels_merge, kernels_values
from tdcoll.collectives.sparse_all_reduce.borrowed import lend
from tdcoll.collectives.sparse_all_reduce.call import Call, Status
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.collectives.sparse_all_reduce.pool import growing_context
from tdcoll.collectives.sparse_all_reduce.rows import Rows, rows_of_pair, rows_of_tensor
from tdcoll.errors import ContextError, HeapExhaustedError, RankMismatchError
from tdcoll.primitives.reduce import check_operation, operation_name

__all__ = ["PaddedRows", "sparse_all_reduce", "sparse_all_reduce_padded", "sparse_all_reduce_rows"]

_log = logging.getLogger("tdcoll")


@dataclass(frozen=True)
class PaddedRows:
    """What :func:`sparse_all_reduce_padded` returns.

    Attributes:
        indices: int64 ``[max_union_rows]``: the rows' ids, ascending, then zeros.
        values: ``[max_union_rows, ...]``: the rows, then zeros.
        count: int64 ``[1]`` on the device: how many rows there are.
    """

    indices: torch.Tensor
    values: torch.Tensor
    count: torch.Tensor


def _context(given: SparseContext | None) -> SparseContext | None:
    if given is not None:
        arguments.instance("ctx", given, SparseContext, "a tdcoll.SparseContext or None")
    return given


def _default_context(values: Any, num_rows: Any) -> SparseContext:
    """tdcoll's own context of all ranks: it grows, follows the stream, and lives until ``finalize``."""
    owner = runtime.current()
    key = ("sparse", owner.ranks_of(None))
    found = owner.contexts.get(key)
    if found is None:
        n, row_bytes = 0, 0
        if isinstance(values, torch.Tensor) and values.layout == torch.strided and values.dim():
            n, row_bytes = values.shape[0], torch.Size(values.shape[1:]).numel() * values.dtype.itemsize
        n = min(n, num_rows) if isinstance(num_rows, int) else n  # repeated rows count once
        found = owner.contexts[key] = growing_context(owner, key[1], n, row_bytes)
    return found


def _refuse_capture(ctx: SparseContext | None, operation: str) -> None:
    refuse(
        runtime.current().device if ctx is None else ctx.device,
        operation,
        "the size of the result must be known on the host, which a CUDA graph cannot wait for; use "
        "sparse_all_reduce_padded",
    )


@contextlib.contextmanager
def _calling(
    ctx: SparseContext, operation: str, prepare: Callable[[], Rows], op: Any, algorithm: str, facts: dict[str, Any]
) -> Iterator[Rows]:
    """The checks of every call, and the call as the body. After an error that ranks do not raise alike, the context
    refuses calls."""

    def checked() -> Rows:
        rows = prepare()
        check_operation(op, rows.values.dtype)
        for part in (rows.indices, rows.values):
            if _is_view(ctx, part):
                raise ValueError(
                    f"{operation}: rows that are reduced must not lie in the memory of the context that reduces them, "
                    "as results of copy=False do; clone() them"
                )
        if ctx.collective.loads_together:
            Call(ctx, rows, op, algorithm).load()
        return rows

    agree = {"op": operation_name(op), "algorithm": algorithm, **facts}
    alike = (ContextError, HeapExhaustedError, RankMismatchError, ValueError)  # what the lists of all ranks show
    with ctx.collective.calling(operation, agree, checked, alike) as rows:
        kind = rows.num_rows, rows.shape, rows.values.dtype, agree["op"], algorithm  # the same on all ranks
        ctx.collective.wait_for_loads(operation, kind)
        ctx.calls += 1
        yield rows


def _facts(tensor: Any, **more: Any) -> dict[str, Any]:
    """Return what debug mode compares of a tensor: its dtype, and what more is named, shapes as tuples."""
    shapes = {name: tuple(value) if isinstance(value, torch.Size) else value for name, value in more.items()}
    return {"dtype": getattr(tensor, "dtype", None), **shapes}


def _run(
    operation: str, ctx: SparseContext, rows: Rows, op: Any, algorithm: str, copy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(indices [U], values [U, *shape])``."""
    while True:
        call = Call(ctx, rows, op, algorithm)
        call.match()
        chosen = call.algorithm
        wait = call.status()
        values = None
        if not call.decides_late:
            values = call.move(chosen)
        status = wait()
        if values is None and status[match.BAD_SIGNATURE] and chosen != "gather":
            call.reduce()  # moves nothing: a rank that passes something else may have launched this already
        status.raise_if_wrong(operation, ctx, rows.num_rows)
        if not (status.over(ctx) or call.too_wide):
            break
        if not ctx.grow:
            status.raise_if_over(operation, ctx)
            _raise_too_wide(operation, ctx, rows)
        _enlarge(ctx, status, rows)
    union = status[match.UNION]
    if values is None:
        chosen = call.choose(status.counts)
        values = call.densify(union, status.words[8]) if chosen == "dense" else call.move(chosen)
    _say(ctx, operation, chosen, status)
    whole, values = values, values[:union]
    if copy and (chosen == "owner" or 2 * values.nbytes < whole.nbytes):  # nor is much more than the result kept alive
        values = values.clone()
    return call.directory.union[:union].clone(), values


def _lend(ctx: SparseContext, operation: str, view: torch.Tensor) -> torch.Tensor:
    """A result that is a view; in debug mode one that raises when it is used too late."""
    if not ctx.debug or not _is_view(ctx, view):
        return view
    call = ctx.calls

    def problem() -> str | None:
        if ctx.closed or ctx.calls != call:
            after = "its context was closed" if ctx.closed else "the next call on its context was made"
            return (
                f"{operation}: a result of copy=False was used after {after}, when its memory was no longer its own; "
                "use it before, or copy=True"
            )
        return None

    return lend(view, problem)


def _is_view(ctx: SparseContext, tensor: torch.Tensor) -> bool:
    values = tensor._values() if tensor.layout == torch.sparse_coo else tensor
    begin = ctx.area.data_ptr()
    return bool(values.numel()) and begin <= values.data_ptr() < begin + ctx.area.nbytes


def _raise_too_wide(operation: str, ctx: SparseContext, rows: Rows) -> None:
    raise ContextError(
        f"{operation}: rows of {rows.row_bytes} bytes are over the context's capacity of {ctx.max_row_bytes}; make it "
        f"with max_row_bytes={rows.row_bytes} or more, or grow=True"
    )


def _enlarge(ctx: SparseContext, status: Status, rows: Rows) -> None:
    """Room for a call that was over the capacity, and a quarter more of what was too small if the heap has it."""
    for quarters in (5, 4):
        most, union = ctx.max_rows_per_rank, ctx.max_union_rows
        if status[match.MAX_ROWS] > most:  # then the union is not known yet: the lists were cut off
            all_fit = union >= ctx.world_size * most
            most = status[match.MAX_ROWS] * quarters // 4
            union = ctx.world_size * most if all_fit else union
        elif status[match.UNION] > union:
            union = min(ctx.world_size * most, status[match.UNION] * quarters // 4)
        try:
            ctx.enlarge(most, rows.row_bytes, union)
        except HeapExhaustedError:  # on all ranks alike
            if quarters == 4:
                raise
        else:
            return


def _say(ctx: SparseContext, operation: str, chosen: str, status: Status) -> None:
    """Log what was chosen, when it is not what the last call chose."""
    if chosen != ctx.last_algorithm:
        ctx.last_algorithm = chosen
        if ctx.rank == 0:
            _log.info(
                "%s: algorithm %s for %d rows of all ranks, %d of them different, on %s",
                operation, chosen, status[match.TOTAL], status[match.UNION], ctx.topology.describe(),
            )  # fmt: skip


# ---------------------------------------------------------------------- public


def sparse_all_reduce(
    tensor: torch.Tensor,
    ctx: SparseContext | None = None,
    op: str | torch.distributed.ReduceOp = "sum",
    *,
    algorithm: str = "auto",
    copy: bool = True,
) -> torch.Tensor:
    """``sparse [num_rows, ...] -> the same shape, coalesced``: rows of all ranks, those with the same index reduced.

    Collective over the context's group. Every rank gets the same indices, in ascending order, and bitwise the same
    values, in every run. A row that a rank has several times counts as the sum of them, as in any sparse tensor,
    whatever ``op`` is; ``op`` is then taken over the ranks *that have the row*. Sums are in the order of ranks (of
    nodes, if there are several), in fp32 for fp16 and bf16, and rounded once per level: repeated rows, node, result.
    NaN propagates through max and min; -0.0 in the result is +0.0.

    The call returns when the size of the result is known; the rows may still be on their way, in the order of the
    stream. It cannot be captured in a CUDA graph: see :func:`sparse_all_reduce_padded`.

    Args:
        tensor: ``torch.sparse_coo`` with one sparse dimension and any dense ones, coalesced or not; fp16, bf16, fp32,
            fp64, int32 or int64; on the context's device. The ranks may bring different numbers of rows, also none.
        ctx: a :class:`SparseContext`, or None for tdcoll's own of all ranks, which grows as needed.
        op: ``"sum"``, ``"mean"`` (each part is divided by the number of ranks, of the group and not of the row, before
            it is added), ``"max"``, ``"min"`` or ``"prod"``. Or the same as ``torch.distributed.ReduceOp``.
        algorithm: ``"owner"`` (one contributor reduces each row), ``"gather"`` (every rank is sent everything; for few
            rows), ``"dense"`` (through torch.distributed's all-reduce; the sum is in the order that it takes), or
            ``"auto"``: see :func:`tdcoll.collectives.sparse_all_reduce.policy.choose`.
        copy: give the values memory of their own. False: they may be a view of the context's symmetric memory, valid
            until the next call on the context; reading it later gives rows of other calls, and in debug mode raises.

    Raises:
        ContextError: closed, on another stream, or over the capacity: the message has the number that is needed, and
            all ranks raise before any row is reduced. While a CUDA graph is captured.
        CollectiveTimeout: a wait expired.
        RankMismatchError: ranks pass different shapes, dtypes or operations. (Without ``debug``, arguments with which
            the ranks make other launches, such as another algorithm, may end in CollectiveTimeout on some of them.)
        NotInitializedError: before ``tdcoll.initialize()``.
        TypeError, ValueError: an argument is not as described, or (on all ranks) an index of a rank is out of range.

    Algorithm: reduction of each row by one of its contributors, chosen by hash; see
    :mod:`tdcoll.collectives.sparse_all_reduce`.
    """
    ctx = _context(ctx)
    _refuse_capture(ctx, "sparse_all_reduce")
    if ctx is None:
        is_sparse = isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_coo
        ctx = _default_context(*((tensor.detach()._values(), tensor.shape[0]) if is_sparse else (None, None)))
    facts = _facts(tensor, shape=getattr(tensor, "shape", ()))
    held = ctx
    with _calling(ctx, "sparse_all_reduce", lambda: rows_of_tensor(tensor, held.device), op, algorithm, facts) as rows:
        indices, values = _run("sparse_all_reduce", ctx, rows, op, algorithm, copy)
    made = torch.sparse_coo_tensor(
        indices.unsqueeze(0), values, (rows.num_rows, *rows.shape), is_coalesced=True, check_invariants=False
    )
    return _lend(ctx, "sparse_all_reduce", made)


def sparse_all_reduce_rows(
    indices: torch.Tensor,
    values: torch.Tensor,
    num_rows: int,
    ctx: SparseContext | None = None,
    op: str | torch.distributed.ReduceOp = "sum",
    *,
    coalesced: bool = False,
    algorithm: str = "auto",
    copy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[n], [n, ...] -> [U], [U, ...]``: :func:`sparse_all_reduce` on indices and rows.

    Args:
        indices: int64 ``[n]``, each in ``0..num_rows - 1``; any order, and repeated, unless ``coalesced``.
        values: ``[n, ...]``, the rows.
        num_rows: of the table, the same on all ranks.
        ctx, op, algorithm, copy: as for :func:`sparse_all_reduce`.
        coalesced: ``indices`` are ascending and all different, which saves sorting them. Checked, on all ranks.

    Returns:
        The indices of all ranks, ascending, and their rows.

    Raises:
        As :func:`sparse_all_reduce`.
    """
    name = "sparse_all_reduce_rows"
    ctx = _context(ctx)
    _refuse_capture(ctx, name)
    if ctx is None:
        ctx = _default_context(values, num_rows)
    facts = _facts(values, row_shape=getattr(values, "shape", ())[1:], num_rows=num_rows)
    held = ctx

    def prepare() -> Rows:
        return rows_of_pair(indices, values, num_rows, coalesced, held.device)

    with _calling(ctx, name, prepare, op, algorithm, facts) as rows:
        found, reduced = _run(name, ctx, rows, op, algorithm, copy)
    return found, _lend(ctx, name, reduced)


def sparse_all_reduce_padded(
    indices: torch.Tensor,
    values: torch.Tensor,
    num_rows: int,
    ctx: SparseContext,
    op: str | torch.distributed.ReduceOp = "sum",
    *,
    coalesced: bool = False,
    algorithm: str = "auto",
) -> PaddedRows:
    """``[n], [n, ...] -> [max_union_rows], [max_union_rows, ...], [1]``: the form of fixed size, for CUDA graphs.

    As :func:`sparse_all_reduce_rows`, with no synchronisation at all: the results have the context's capacity, with
    zeros after the last row (index 0 and values 0, which add nothing), and the number of rows stays on the device.
    After one eager call with tensors of the same dtype and row shape it can be captured; indices and values may
    change from replay to replay, their number not.

    What only the lists of all ranks show (too many rows, indices out of range, other arguments on other ranks) gives 0
    rows on every rank, and so does a wait that has expired on the rank where it has; :meth:`SparseContext.check` then
    raises it.

    Args:
        ctx: a :class:`SparseContext`. It does not grow here.
        algorithm: ``"owner"``, ``"gather"`` or ``"auto"``, which does not choose ``"dense"`` here.
        Others: as for :func:`sparse_all_reduce_rows`.

    Returns:
        :class:`PaddedRows`. The values may be a view of symmetric memory, valid until the next call on the context.

    Raises:
        As :func:`sparse_all_reduce`; and ContextError for the first call of its kind while a graph is captured.
    """
    name = "sparse_all_reduce_padded"
    arguments.instance("ctx", ctx, SparseContext, "a tdcoll.SparseContext")
    facts = _facts(values, row_shape=getattr(values, "shape", ())[1:], num_rows=num_rows)

    def prepare() -> Rows:
        rows = rows_of_pair(indices, values, num_rows, coalesced, ctx.device)
        if algorithm == "dense":
            raise ValueError("algorithm must be 'owner', 'gather' or 'auto' in sparse_all_reduce_padded; got 'dense'")
        if rows.row_bytes > ctx.max_row_bytes:
            _raise_too_wide(name, ctx, rows)
        return rows

    with _calling(ctx, name, prepare, op, algorithm, facts) as rows:
        call = Call(ctx, rows, op, algorithm)
        pieces = not coalesced and rows.indices.shape[0] > kernels_values.PIECE.value
        ctx.allow_capture((name, call.variant, call.op, call.algorithm, call.directory.search, coalesced, pieces), name)
        union = torch.empty(ctx.max_union_rows, dtype=torch.int64, device=ctx.device)
        count = torch.empty(1, dtype=torch.int64, device=ctx.device)
        call.match()
        padded = call.move(call.algorithm)
        programs = call.workers(-(-ctx.max_union_rows // call.tiles.rows))
        call.launch(kernels_merge.pad, programs, indices=union, values=padded, count=count, remembered=ctx.remembered)
        ctx.explain = lambda: _explain(ctx, name)
    return PaddedRows(union, _lend(ctx, name, padded), count)


def _explain(ctx: SparseContext, operation: str) -> None:
    """Raise what the first call of fixed size that could not be done has left, and forget it."""
    words = ctx.remembered.tolist()
    if words[-1]:
        ctx.remembered.zero_()
        status = Status(words)
        status.raise_if_wrong(operation, ctx, words[-1] - 1)
        status.raise_if_over(operation, ctx)
