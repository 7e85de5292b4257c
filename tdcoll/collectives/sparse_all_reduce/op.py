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
from tdcoll.arguments import byte_text
from tdcoll.capture import refuse
from tdcoll.collectives._host.launches import outside_of_graphs
from tdcoll.collectives.index_match.kernels import BAD_SIGNATURE, MAX_ROWS, TOTAL, UNION
from tdcoll.collectives.sparse_all_reduce import kernels_merge, kernels_values
from tdcoll.collectives.sparse_all_reduce.call import Call
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.collectives.sparse_all_reduce.pool import default_context
from tdcoll.collectives.sparse_all_reduce.rows import Rows, rows_of_pair, rows_of_tensor
from tdcoll.errors import ContextError, HeapExhaustedError, RankMismatchError
from tdcoll.primitives.reduce import check_operation, operation_name
from tdcoll.ranges import range_of

__all__ = ["PaddedRows", "sparse_all_reduce", "sparse_all_reduce_padded", "sparse_all_reduce_rows"]

_log = logging.getLogger("tdcoll")


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


def _context(
    given: SparseContext | None, group: runtime.Group, operation: str, values: Any, num_rows: Any = None
) -> SparseContext:
    """Return the context of a call whose result has any size: the given one, or tdcoll's own of the group."""
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
    return default_context(group, values, num_rows) if given is None else given


@contextlib.contextmanager
def _calling(
    ctx: SparseContext, operation: str, prepare: Callable[[], Rows], op: Any, algorithm: str, **facts: Any
) -> Iterator[Rows]:
    """The checks of every call, and the call as the body. After an error that ranks do not raise alike, the context
    refuses calls. ``facts``: what more debug mode compares."""

    def checked() -> Rows:
        arguments.instance("algorithm", algorithm, str, "a str")
        rows = prepare()
        check_operation(op, rows.values.dtype)
        begin, end = ctx.area.data_ptr(), ctx.area.data_ptr() + ctx.area.nbytes
        if any(part.numel() and begin <= part.data_ptr() < end for part in (rows.indices, rows.values)):
            raise ValueError(
                f"{operation}: rows that are reduced must not lie in the memory of the context that reduces them, as "
                "results of copy=False do; clone() them"
            )
        if ctx.loads_together:
            Call(ctx, rows, op, algorithm).load()
        return rows

    name = operation_name(op)
    alike = (ContextError, HeapExhaustedError, RankMismatchError, ValueError)  # what the lists of all ranks show
    with ctx.calling(operation, {"op": name, "algorithm": algorithm, **facts}, checked, alike) as rows:
        kind = rows.num_rows, rows.shape, rows.values.dtype, name, algorithm  # the same on all ranks
        ctx.wait_for_loads(operation, kind)
        ctx.noted(operation)
        label = f"tdcoll.{operation}[{algorithm}, rows of {byte_text(rows.row_bytes)}]"
        with ctx.once(("range", operation, *kind), lambda: range_of(label)):
            yield rows


def _facts(name: str, tensor: Any, first: int = 0) -> dict[str, Any]:
    """Return what debug mode compares of a tensor: its shape from the ``first`` dimension on, by ``name``."""
    return {"dtype": getattr(tensor, "dtype", None), name: tuple(getattr(tensor, "shape", ()))[first:]}


def _run(
    operation: str, ctx: SparseContext, rows: Rows, op: Any, algorithm: str, copy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(indices [U], values [U, *shape])``."""
    while True:
        call = Call(ctx, rows, op, algorithm)
        call.match()
        call.copy_status()
        whole = None if call.decides_late else call.move()
        status = call.status()
        if whole is None and status[BAD_SIGNATURE.value] and call.algorithm != "gather":
            call.reduce()  # moves nothing: a rank that passes something else may have launched this already
        ctx.raise_if_wrong(operation, status, rows.num_rows)
        most, union = status[MAX_ROWS.value], status[UNION.value]
        error = ctx.excess(operation, most, rows.row_bytes, union)
        if error is None:
            break
        if not ctx.grow:
            raise error
        ctx.enlarge(most, rows.row_bytes, union)
    whole = call.settle(status) if whole is None else whole
    if call.algorithm != ctx.last_algorithm:
        ctx.last_algorithm = call.algorithm
        if ctx.rank == 0:
            _log.info(
                "%s: algorithm %s for %d rows of all ranks, %d of them different, on %s",
                operation, call.algorithm, status[TOTAL.value], union, ctx.topology.describe(),
            )  # fmt: skip
    values = whole[:union]
    if copy and (call.algorithm == "owner" or 2 * values.nbytes < whole.nbytes):  # nor is much more kept alive
        values = values.clone()
    return ctx.directory.union[:union].clone(), values


# ---------------------------------------------------------------------- public


def sparse_all_reduce(
    tensor: torch.Tensor,
    op: str | torch.distributed.ReduceOp = "sum",
    *,
    group: runtime.Group = None,
    ctx: SparseContext | None = None,
    algorithm: str = "auto",
    copy: bool = True,
) -> torch.Tensor:
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

    Args:
        tensor: ``torch.sparse_coo`` with one sparse dimension and any dense ones, coalesced or not; fp16, bf16, fp32,
            fp64, int32 or int64; on the context's device. The ranks may bring different numbers of rows, also none.
        op: ``"sum"``, ``"mean"`` or ``"avg"`` (each part is divided by the number of ranks, of the group and not of the
            row, before it is added), ``"max"``, ``"min"``, ``"prod"`` or ``"product"``, or a
            ``torch.distributed.ReduceOp``.
        group: as for :func:`tdcoll.all_gather`. The call uses a context of tdcoll's own, which grows when needed.
        ctx: a :class:`SparseContext` of yours, instead of ``group``.
        algorithm: ``"owner"`` (one contributor reduces each row), ``"gather"`` (every rank is sent everything; for few
            rows), ``"dense"`` (through torch.distributed's all-reduce; the sum is in the order that it takes), or
            ``"auto"``: see :func:`tdcoll.collectives.sparse_all_reduce.policy.choose`.
        copy: give the values memory of their own. False: they may be a view of the context's symmetric memory, valid
            until the next call on the context; reading it later gives rows of other calls.

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
    name = "sparse_all_reduce"
    context = _context(ctx, group, name, tensor)

    facts = _facts("shape", tensor)
    with _calling(context, name, lambda: rows_of_tensor(tensor, context.device), op, algorithm, **facts) as rows:
        indices, values = _run(name, context, rows, op, algorithm, copy)
    shape = rows.num_rows, *rows.shape
    return torch.sparse_coo_tensor(indices.unsqueeze(0), values, shape, is_coalesced=True, check_invariants=False)


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
    context = _context(ctx, group, name, values, num_rows)

    def prepare() -> Rows:
        return rows_of_pair(indices, values, num_rows, coalesced, context.device)

    facts = _facts("row_shape", values, 1) | {"num_rows": num_rows}
    with _calling(context, name, prepare, op, algorithm, **facts) as rows:
        return _run(name, context, rows, op, algorithm, copy)


def sparse_all_reduce_padded(
    indices: torch.Tensor,
    values: torch.Tensor,
    num_rows: int,
    op: str | torch.distributed.ReduceOp = "sum",
    *,
    ctx: SparseContext,
    coalesced: bool = False,
    algorithm: str = "auto",
) -> PaddedRows:
    """``[n], [n, ...] -> [max_union_rows], [max_union_rows, ...], [1]``: the form of fixed size, for CUDA graphs.

    As :func:`sparse_all_reduce_rows`, with no synchronisation at all: the results have the context's capacity. After
    one eager call with tensors of the same dtype and row shape it can be captured; indices and values may change from
    replay to replay, their number not.

    What only the lists of all ranks show (too many rows, indices out of range, other arguments on other ranks) gives 0
    rows on every rank, and so does a wait that has expired on the rank where it has; :meth:`SparseContext.check` then
    raises it.

    >>> with tdcoll.SparseContext(max_rows_per_rank=2, max_row_bytes=4) as ctx:
    ...     ids = torch.tensor([tdcoll.rank(), 2])
    ...     padded = tdcoll.sparse_all_reduce_padded(ids, torch.ones(2, 1), 4, ctx=ctx)
    >>> padded.count  # on 2 ranks
    tensor([3])

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

    def prepare() -> Rows:
        rows = rows_of_pair(indices, values, num_rows, coalesced, ctx.device)
        if algorithm == "dense":
            raise ValueError("algorithm must be 'owner', 'gather' or 'auto' in sparse_all_reduce_padded; got 'dense'")
        if error := ctx.excess(name, row_bytes=rows.row_bytes):
            raise error
        return rows

    facts = _facts("row_shape", values, 1) | {"num_rows": num_rows}
    with _calling(ctx, name, prepare, op, algorithm, **facts) as rows:
        call = Call(ctx, rows, op, algorithm)
        pieces = not coalesced and rows.indices.shape[0] > kernels_values.PIECE.value
        kernels = name, call.variant, call.op, call.algorithm, coalesced, pieces
        if kernels not in ctx.tables:
            outside_of_graphs(ctx, name)
            ctx.tables[kernels] = True
        union = torch.empty(ctx.max_union_rows, dtype=torch.int64, device=ctx.device)
        count = torch.empty(1, dtype=torch.int64, device=ctx.device)
        call.match()
        padded = call.move()
        programs = call.workers(-(-ctx.max_union_rows // call.kind.tiles.rows))
        call.launch(kernels_merge.pad, programs, indices=union, values=padded, count=count, remembered=ctx.remembered)
    return PaddedRows(union, padded, count)
