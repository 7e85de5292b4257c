# SPDX-License-Identifier: Apache-2.0
"""Sparse all-reduce, host side: what users call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.calls.operation import Request
from tdcoll.calls.run import make_call
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.collectives.sparse_all_reduce.operation import (
    OF_ROWS,
    OF_TENSORS,
    PADDED,
    SparseOptions,
)

_Tensors = TypeVar("_Tensors", torch.Tensor, Sequence[torch.Tensor])


def sparse_all_reduce(
    tensor: _Tensors,
    op: str | torch.distributed.ReduceOp = "sum",
    *,
    group: runtime.Group = None,
    ctx: SparseContext | None = None,
    algorithm: str = "auto",
    copy: bool = True,
) -> _Tensors:
    """``sparse [num_rows, ...] -> the same shape, coalesced``: rows of all ranks, those with the
    same index reduced.

    Collective over the context's group. Every rank gets the same indices, in ascending order, and
    bitwise the same values, in every run. A row that a rank has several times counts as the sum of
    them, as in any sparse tensor, whatever ``op`` is; ``op`` is then taken over the ranks *that
    have the row*. Sums are in the order of ranks (of nodes, if there are several), in fp32 for fp16
    and bf16, and rounded once per level: repeated rows, node, result. NaN propagates through max
    and min; -0.0 in the result is +0.0.

    The result has no gradient. The call returns when its size is known; the rows may still be on
    their way, in the order of the stream. It cannot be captured in a CUDA graph: see
    :func:`sparse_all_reduce_padded`.

    >>> mine = torch.sparse_coo_tensor([[tdcoll.rank(), 2]], torch.ones(2, 1), (4, 1))
    >>> tdcoll.sparse_all_reduce(mine).to_dense().flatten()  # on 2 ranks
    tensor([1., 1., 2., 0.])
    >>> other = torch.sparse_coo_tensor([[0]], torch.ones(1, 3), (2, 3))
    >>> [one.shape for one in tdcoll.sparse_all_reduce([mine, other])]  # the tables of a model, in one call
    [torch.Size([4, 1]), torch.Size([2, 3])]

    Args:
        tensor: ``torch.sparse_coo`` with one sparse dimension and any dense ones, coalesced or not;
            fp16, bf16, fp32, fp64, int32 or int64; on the context's device. The ranks may bring
            different numbers of rows, also none. Or a list of such tensors, of any numbers of rows
            and shapes of rows, in the same order on all ranks: one call for those of each dtype,
            whose results are those of calls of their own, as a list.
        op: ``"sum"``, ``"mean"`` or ``"avg"`` (each part is divided by the number of ranks, of the
            group and not of the row, before it is added), ``"max"``, ``"min"``, ``"prod"`` or
            ``"product"``, or a ``torch.distributed.ReduceOp``.
        group: as for :func:`tdcoll.all_gather`. The call uses a context of tdcoll's own, which
            grows when needed.
        ctx: a :class:`SparseContext` of yours, instead of ``group``.
        algorithm: ``"owner"`` (one contributor reduces each row), ``"gather"`` (every rank is sent
            everything; for few rows), ``"dense"`` (an all-reduce of the whole table, in its order
            of sums), or ``"auto"``: see :func:`tdcoll.collectives.sparse_all_reduce.policy.choose`.
        copy: give the values memory of their own. False: they may be a view of the context's
            symmetric memory, valid until the next call on the context; reading it later gives rows
            of other calls.

    Raises:
        ContextError: closed, while a CUDA graph is captured, or over the capacity: the message has
            the number that is needed, and all ranks raise before any row is reduced.
        CollectiveTimeout: a wait expired.
        RankMismatchError: ranks pass different shapes, dtypes or operations. (Without ``debug``,
            arguments with which the ranks make other launches, such as another algorithm, may end
            in CollectiveTimeout on some of them.)
        NotInitializedError: before ``tdcoll.initialize()``.
        TypeError, ValueError: an argument is not as described, or (on all ranks) an index of a rank
            is out of range.

    Algorithm: reduction of each row by one of its contributors, chosen by hash; see
    :mod:`tdcoll.collectives.sparse_all_reduce`.
    """
    listed = isinstance(tensor, (list, tuple))
    tensors: tuple[Any, ...] = tuple(tensor) if listed else (tensor,)
    options = SparseOptions(op, algorithm, listed=listed, copy=copy)
    _, results = make_call(OF_TENSORS, Request(tensors, options, group, ctx))
    made: Any = [
        torch.sparse_coo_tensor(ids, values, given.shape, is_coalesced=True, check_invariants=False)
        for (ids, values), given in zip(results, tensors, strict=True)
    ]
    return made if listed else made[0]


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
        indices: int64 ``[n]``, each in ``0..num_rows - 1``; any order, and repeated, unless
            ``coalesced``.
        values: ``[n, ...]``, the rows.
        num_rows: of the table, the same on all ranks.
        op, group, ctx, algorithm, copy: as for :func:`sparse_all_reduce`.
        coalesced: ``indices`` are ascending and all different, which saves sorting them. Checked,
            on all ranks.

    Returns:
        The indices of all ranks, ascending, and their rows.

    Raises:
        As :func:`sparse_all_reduce`.
    """
    options = SparseOptions(op, algorithm, num_rows, coalesced, copy=copy)
    _, ((ids, rows),) = make_call(OF_ROWS, Request((indices, values), options, group, ctx))
    return ids.view(-1), rows


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
    """``[n], [n, ...] -> [max_union_rows], [max_union_rows, ...], [1]``: the form of fixed size,
    for CUDA graphs.

    As :func:`sparse_all_reduce_rows`, with no synchronisation at all: the results have the
    context's capacity. After one eager call with tensors of the same dtype, row shape and about the
    same number of rows (up to 128, up to 1024, or more) it can be captured. Indices and values may
    change from replay to replay, but their number may not.

    What only the lists of all ranks show (too many rows, indices out of range, other arguments on
    other ranks) gives 0 rows, and so does an expired wait; :meth:`SparseContext.check` then raises
    it.

    >>> with tdcoll.SparseContext(max_rows_per_rank=2, max_row_bytes=4) as ctx:
    ...     ids = torch.tensor([tdcoll.rank(), 2])
    ...     padded = tdcoll.sparse_all_reduce_padded(ids, torch.ones(2, 1), 4, ctx=ctx)
    >>> padded.count  # on 2 ranks
    tensor([3])

    Args:
        indices, values, num_rows: as for :func:`sparse_all_reduce_rows`, or lists of them, for
            several tensors.
        ctx: a :class:`SparseContext`. It does not grow here.
        algorithm: ``"owner"``, ``"gather"`` or ``"auto"``, which does not choose ``"dense"`` here.
        Others: as for :func:`sparse_all_reduce_rows`.

    Returns:
        :class:`PaddedRows`, or a list of them if lists are given. The values of one tensor may be a
        view of symmetric memory, valid until the next call on the context.

    Raises:
        As :func:`sparse_all_reduce`; and ContextError for the first call of its kind while a graph
        is captured.
    """
    arguments.instance("ctx", ctx, SparseContext, "a tdcoll.SparseContext")
    listed = isinstance(values, (list, tuple))
    if listed:
        for name, argument in (("indices", indices), ("num_rows", num_rows)):
            if not isinstance(argument, (list, tuple)) or len(argument) != len(values):
                raise ValueError(
                    f"{name} must be a list of {len(values)} like values, got {argument!r}"
                )
    options = SparseOptions(op, algorithm, num_rows, coalesced, listed=listed)
    _, results = make_call(PADDED, Request((indices, values), options, ctx=ctx))
    return results if listed else results[0]
