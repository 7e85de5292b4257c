# SPDX-License-Identifier: Apache-2.0
"""Sparse all-reduces of one set of ranks as ``torch.distributed`` means them: for the backend and
for DDP's hook."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import torch

from tdcoll.base.errors import ContextError, HeapExhaustedError
from tdcoll.calls.budget import Budget
from tdcoll.calls.implicit import on, warn_of_full_heap
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.collectives.sparse_all_reduce.op import sparse_all_reduce
from tdcoll.collectives.sparse_all_reduce.policy import FEWEST_ROWS
from tdcoll.collectives.sparse_all_reduce.rows import DTYPES
from tdcoll.distributed import methods
from tdcoll.distributed.call import Call
from tdcoll.distributed.fallback import sparse_sum_by_gather
from tdcoll.distributed.handlers import GroupInfo, Handler
from tdcoll.distributed.queues import Queue
from tdcoll.distributed.work import completed


def refuse_wrong(tensor: torch.Tensor, op: str) -> None:
    """Raise if neither tdcoll nor the fallback backend supports the request.

    ``torch.distributed`` passes a complex tensor as its real view. A view of a dense tensor shares
    its memory; the result for a sparse one has other indices, which the complex tensor would never
    see.

    Raises:
        TypeError: the tensor is such a view, or the mean is no number of its dtype.
    """
    if tensor.is_inference():  # in inference mode views do not say of what they are
        view = tensor.dense_dim() > 0 and tensor.shape[-1] == 2
    else:
        view = tensor._base is not None and tensor._base.is_complex()
    if view:
        raise TypeError(
            "all_reduce: tensor must not be complex and sparse: torch.distributed passes its real view, and "
            f"the result would never get to the tensor itself; got {tensor.dtype} of {list(tensor.shape)}. Reduce "
            "torch.view_as_real(tensor).clone() outside of inference mode, and take torch.view_as_complex() of it"
        )
    if op == "mean" and not tensor.dtype.is_floating_point:
        raise TypeError(
            f"all_reduce: AVG of a sparse tensor needs a floating-point dtype, got {tensor.dtype}"
        )


def _start_by_gather(group: Any, outs: methods.Tensors, inputs: methods.Tensors, opts: Any) -> Any:
    """Neither gloo, which has no means, nor NCCL has all of them: all rows go to all ranks."""
    op = methods.reduction_of(opts)
    tensor = outs[0]
    if op not in ("sum", "mean"):
        return group.allreduce([tensor], opts)
    tensor.data = sparse_sum_by_gather(group, tensor, op)
    return completed([tensor])


SPARSE_ALL_REDUCE = dataclasses.replace(
    methods.ALL_REDUCE,
    start=_start_by_gather,
    operator=methods.ALL_REDUCE.start,
    kind="sparse_all_reduce",
    reduces=False,  # gloo and NCCL get dense tensors that are only moved
)
"""The method of a call whose tensor is sparse."""


class SparseAllReduce(Handler):
    """All-reduces of COO tensors, each of which becomes the sum or the mean.

    Attributes:
        context: for the calls, which it has room for or grows for; None as long as there was none.
    """

    kind = "sparse_all_reduce"
    handles_one_rank = True
    waits = True

    def __init__(self, members: GroupInfo, queue: Queue) -> None:
        super().__init__(members, queue)
        self.context: SparseContext | None = None
        self._budget = Budget(members.job, members.ranks, members.options.blocks)
        self._in_use = threading.RLock()
        """Held by the thread that makes or uses the context, and never while it waits for the
        queue."""
        self._most: int | None = None
        """Tensors of one call, if the heap had no room for a longer list; the same on all ranks."""

    def why_unsupported(self, call: Call) -> str | None:
        for tensor in call.inputs:
            if tensor.dtype not in DTYPES:
                return f"{tensor.dtype} is not among the dtypes of tdcoll's sums"
            if tensor.sparse_dim() != 1:
                return f"{tensor.sparse_dim()} sparse dimensions"
        if call.op not in ("sum", "mean"):
            return f"{call.op} of sparse tensors is not defined by torch.distributed"
        return None

    def facts(self, call: Call) -> dict[str, Any]:
        return {**super().facts(call), "shapes": [tuple(tensor.shape) for tensor in call.inputs]}

    def prepare(self, call: Call) -> str | None:
        if self.context is None and self.problem is None:
            rows = [tensor.detach()._values() for tensor in call.inputs]
            widest = max(values.shape[1:].numel() * values.dtype.itemsize for values in rows)
            most = max(values.shape[0] for values in rows)
            try:
                # it grows if the heap has room for all
                self.open(most, widest)
            except HeapExhaustedError as error:  # on all ranks
                members = self.members
                warn_of_full_heap(
                    members.job, members.ranks, "sparse all_reduce", most * widest, error
                )
                self.problem = "the symmetric heap has no room for it"
            except ContextError as error:  # likewise
                self.problem = str(error)
        return self.problem

    def open(self, rows_per_rank: int, row_bytes: int) -> None:
        """Make the context, if there is none, with room for what any rank says here. Collective.

        If the heap has no room for so many rows, it begins with fewer, since they may not all be
        different.

        Raises:
            HeapExhaustedError: on all ranks.
            ContextError: other contexts have left no thread blocks; on all ranks.
        """
        if self.context is None:
            self.queue.drain()
        job = self.members.job
        ranks = self.members.ranks
        with self._in_use, job.with_control_plane(self.queue.control):
            if self.context is not None:
                return
            self._budget.take(self.kind)
            asked = job.exchange(
                ranks, "sparse all-reduce: rows, row bytes", (rows_per_rank, row_bytes)
            )
            most = max(n for n, _ in asked)
            widest = max(nbytes for _, nbytes in asked)
            options = {
                "max_blocks": self._budget.blocks,
                "timeout_s": self.members.timeout_s,
                "max_row_bytes": widest,
            }
            options |= {"debug": self.members.debug, "grow": True}
            for rows in (max(FEWEST_ROWS, most), FEWEST_ROWS):
                try:
                    with on(job.device):
                        self.context = SparseContext(ranks, max_rows_per_rank=rows, **options)
                    return
                except HeapExhaustedError:  # on all ranks alike
                    if rows == FEWEST_ROWS:
                        self._budget.give_back()
                        raise

    def run(self, call: Call) -> list[Any]:
        for tensor, result in zip(call.inputs, self.reduce(call.inputs, str(call.op)), strict=True):
            tensor.data = result
        return list(call.inputs)

    def reduce(self, tensors: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        """Return the sum or mean over the ranks of each COO tensor, coalesced. After
        :meth:`prepare`.

        One call reduces all tensors, or half as many until the heap has room for its context. Later
        calls take no more.

        Raises:
            HeapExhaustedError: one tensor needs a larger context than the heap has room for; on all
                ranks.
        """
        made: list[torch.Tensor] = []
        with (
            self._in_use,
            self.members.job.with_control_plane(self.queue.control),
        ):  # the context may grow
            assert self.context is not None
            while len(made) < len(tensors):
                some = list(tensors[len(made) :][: self._most])
                try:
                    made += sparse_all_reduce(some, op, ctx=self.context)
                except HeapExhaustedError:  # on all ranks, because they allocate together
                    if len(some) == 1:
                        raise
                    self._most = len(some) // 2
            if self.context.device.type == "cpu":
                self.context.monitor.raise_if_expired()
        return made

    def describe(self) -> str:
        context = self.context
        if context is None:
            return "sum and mean, no context yet"
        return f"sum and mean, context of {context.max_rows_per_rank} rows of {context.max_row_bytes} bytes per rank"

    def set_timeout(self, timeout_s: float) -> None:
        self.members.timeout_s = timeout_s
        if self.context is not None:
            self.context.set_timeout(timeout_s)

    @property
    def used(self) -> SparseContext | None:
        return self.context

    def check(self) -> None:
        if self.context is not None:
            self.context.monitor.raise_if_expired()

    def abort(self) -> None:
        if self.context is not None:
            self.context.monitor.abort()

    def close(self) -> None:
        self.queue.drain()
        with self._in_use:
            if self.context is not None:
                self.context.close()
                self.context = None
        self._budget.give_back()
