# SPDX-License-Identifier: Apache-2.0
"""Sparse all-reduces of one set of ranks as ``torch.distributed`` means them: for the backend and for DDP's hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tdcoll.collectives._host.pool import give_back_programs, take_programs
from tdcoll.collectives.sparse_all_reduce import SparseContext, sparse_all_reduce_rows
from tdcoll.collectives.sparse_all_reduce.pool import growing_context
from tdcoll.collectives.sparse_all_reduce.rows import DTYPES
from tdcoll.distributed.call import Call
from tdcoll.distributed.handlers import Handler, Lane, Members
from tdcoll.errors import ContextError, HeapExhaustedError
from tdcoll.runtime import Runtime

__all__ = ["SparseAllReduce", "SparseSums", "refuse_wrong"]

_BESIDE_OTHERS = 64
"""Programs of a launch that goes on beside a backward pass, and may wait for ranks whose own is behind: half of the SMs
of an H100 stay free. (With programs on all of them the backward pass stood still for as long.)
"""


def refuse_wrong(tensor: torch.Tensor, op: str) -> None:
    """Raise where no side could give what was asked for.

    ``torch.distributed`` hands over a complex tensor as a real view of it. A view of a dense tensor shares its
    memory; the result for a sparse one has other indices, which the complex tensor would never see.

    Raises:
        TypeError: the tensor is such a view, or the mean is no number of its dtype.
    """
    if tensor.is_inference():  # in inference mode views do not say of what they are
        view = tensor.dense_dim() > 0 and tensor.shape[-1] == 2
    else:
        view = tensor._base is not None and tensor._base.is_complex()
    if view:
        raise TypeError(
            "all_reduce: tensor must not be complex and sparse: torch.distributed hands over its real view, and "
            f"the result would never get to the tensor itself; got {tensor.dtype} of {list(tensor.shape)}. Reduce "
            "torch.view_as_real(tensor).clone() outside of inference mode, and take torch.view_as_complex() of it"
        )
    if op == "mean" and not tensor.dtype.is_floating_point:
        raise TypeError(f"all_reduce: AVG of a sparse tensor needs a floating-point dtype, got {tensor.dtype}")


class SparseSums:
    """Sparse all-reduces of one set of ranks, as ``torch.distributed`` means them: the tensor becomes the sum.

    Args:
        owner: the job.
        ranks: global ranks, in the order of the group.
        lane: what the calls pass.
        timeout_s: deadline of waits, seconds.
        programs: the most programs of a launch.
    """

    def __init__(
        self,
        owner: Runtime,
        ranks: Sequence[int],
        lane: Lane,
        *,
        timeout_s: float | None,
        programs: int = _BESIDE_OTHERS,
    ) -> None:
        self.lane = lane
        self._owner, self._ranks, self._timeout_s, self._wanted = owner, tuple(ranks), timeout_s, programs
        self.context: SparseContext | None = None
        self.problem: str | None = None
        """The reason why there can be no context, the same on all ranks; None while there may be one."""
        self._programs = 0

    @property
    def ended(self) -> bool:
        """Return whether the job has ended."""
        return self._owner.closed

    @staticmethod
    def refusal(tensor: torch.Tensor, op: str) -> str | None:
        """Return why a sparse tensor cannot be summed here, or None if it can, from what is the same on all ranks."""
        dtype = tensor.dtype
        if dtype not in DTYPES:
            return f"{dtype} is not among the dtypes of tdcoll's sums"
        if op not in ("sum", "mean"):
            return f"{op} of sparse tensors is not defined by torch.distributed"
        return None

    def prepare(self, tensor: torch.Tensor) -> bool:
        """Make a context if there is none; return whether there is one. Collective, the first time."""
        if self.context is None and self.problem is None:
            indices, values = _parts(tensor)
            row_bytes = torch.Size(values.shape[1:]).numel() * values.dtype.itemsize
            try:
                self.open(indices.shape[1], row_bytes)
            except HeapExhaustedError:  # on all ranks
                self.problem = "the symmetric heap has no room for it"
            except ContextError as error:  # likewise
                self.problem = str(error)
        return self.context is not None

    def open(self, rows_per_rank: int, row_bytes: int) -> None:
        """Make the context, if there is none, with room for what any rank says here. Collective.

        Raises:
            HeapExhaustedError: on all ranks.
            ContextError: other contexts have left no programs; on all ranks.
        """
        if self.context is not None:
            return
        self.lane.queue.drain()
        owner, ranks = self._owner, self._ranks
        with owner.through(self.lane.control):
            self._programs = programs = take_programs(owner, ranks, self._wanted, "sparse_all_reduce")
            try:
                self.context = growing_context(
                    owner, ranks, rows_per_rank, row_bytes, max_programs=programs, timeout_s=self._timeout_s
                )
            except HeapExhaustedError:
                self._give_back()
                raise

    def __call__(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Return the sum or mean over the ranks of a COO tensor, coalesced. Call it after :meth:`prepare`.

        Several sparse dimensions are one of all their indices.

        Raises:
            HeapExhaustedError: it needs a larger context than the heap has room for; on all ranks.
        """
        assert self.context is not None
        indices, values = _parts(tensor)
        sparse_shape = tensor.shape[: tensor.sparse_dim()]
        coalesced = tensor.is_coalesced()
        num_rows = sparse_shape.numel()
        flat = indices[0] if len(sparse_shape) == 1 else _linear(indices, sparse_shape)
        with self._owner.through(self.lane.control):  # the context may grow
            found, summed = sparse_all_reduce_rows(
                flat.contiguous(), values.contiguous(), num_rows, self.context, op, coalesced=coalesced
            )
        found = found.unsqueeze(0) if len(sparse_shape) == 1 else _separate(found, sparse_shape)
        if tensor.device.type == "cpu":
            self.context.collective.monitor.raise_if_expired()
        return torch.sparse_coo_tensor(
            found,
            summed.view(found.shape[1], *values.shape[1:]),
            tensor.shape,
            is_coalesced=True,
            check_invariants=False,
        )

    def check(self) -> None:
        """Raise the error that finished kernels have left, if any."""
        if self.context is not None:
            self.context.collective.monitor.raise_if_expired()

    def give_up(self) -> None:
        """End the waits of its kernels. A process that ends calls this, from any thread."""
        if self.context is not None:
            self.context.collective.monitor.abort()

    def close(self) -> None:
        """Free the context. Collective."""
        self.lane.queue.drain()
        self.lane.queue.close()
        if self.context is not None:
            self.context.close()
            self.context = None
        self._give_back()

    def _give_back(self) -> None:
        give_back_programs(self._owner, self._programs)
        self._programs = 0

    def describe(self) -> str:
        context = self.context
        if context is None:
            return "no context yet"
        return f"context of {context.max_rows_per_rank} rows of {context.max_row_bytes} bytes per rank"


class SparseAllReduce(Handler):
    """All-reduces of one COO tensor, which becomes the sum or the mean."""

    kind = "sparse_all_reduce"
    alone = True
    waits = True

    def __init__(self, members: Members, lane: Lane) -> None:
        super().__init__(members, lane)
        self.sums = SparseSums(
            members.job, members.ranks, lane, timeout_s=members.timeout_s, programs=members.options.programs
        )

    def refuse(self, call: Call) -> str | None:
        if (why := SparseSums.refusal(call.inputs[0], str(call.op))) is not None:
            return why
        if len(call.inputs) != 1 or not call.inputs[0].sparse_dim():
            return "not one tensor with sparse dimensions"
        return None

    def check_call(self, call: Call) -> None:
        """Do nothing: there is one tensor, which becomes the result."""

    def facts(self, call: Call) -> dict[str, Any]:
        return {**super().facts(call), "shapes": [tuple(tensor.shape) for tensor in call.inputs]}

    def prepare(self, call: Call) -> str | None:
        return None if self.sums.prepare(call.inputs[0]) else self.sums.problem

    def run(self, call: Call) -> list[torch.Tensor]:
        tensor = call.inputs[0]
        tensor.data = self.sums(tensor, str(call.op))
        return [tensor]

    def describe(self) -> str:
        return f"sum and mean, {self.sums.describe()}"

    def check(self) -> None:
        self.sums.check()

    def give_up(self) -> None:
        self.sums.give_up()

    def close(self) -> None:
        self.sums.close()


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``indices [sparse dims, n], values [n, ...]`` of a tensor that may not be coalesced."""
    tensor = tensor.detach()
    return tensor._indices(), tensor._values()


def _linear(indices: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """``[dims, n] -> [n]``: the place in the flattened shape."""
    linear = indices.new_zeros(indices.shape[1])
    for extent, index in zip(shape, indices, strict=True):
        linear = linear * extent + index
    return linear


def _separate(linear: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """``[n] -> [dims, n]``: the inverse of :func:`_linear`."""
    columns = []
    for extent in reversed(shape):
        columns.append(linear % extent)
        linear = linear // extent
    return torch.stack(columns[::-1])
