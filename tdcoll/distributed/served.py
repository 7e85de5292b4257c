# SPDX-License-Identifier: Apache-2.0
"""Contexts of one set of ranks for calls that come through ``torch.distributed``: made when needed, and growing.

What is decided here is decided from sizes that are the same on all ranks, in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tdcoll.collectives._host.checks import lies_elsewhere_in
from tdcoll.collectives._host.collective import UNCHECKED
from tdcoll.collectives._host.pool import Pool
from tdcoll.collectives.all_gather import all_gather
from tdcoll.collectives.all_gather.op import ALL_GATHER
from tdcoll.collectives.sparse_all_reduce import SparseContext, sparse_all_reduce_rows
from tdcoll.collectives.sparse_all_reduce.pool import growing_context
from tdcoll.collectives.sparse_all_reduce.rows import DTYPES
from tdcoll.distributed.work import worker
from tdcoll.errors import HeapExhaustedError
from tdcoll.runtime import Runtime

__all__ = ["Gathers", "SparseSums", "plain"]

_BESIDE_OTHERS = 64
"""Programs of a launch that goes on beside a backward pass, and may wait for ranks whose own is behind: half of the SMs
of an H100 stay free. (With programs on all of them the backward pass stood still for as long.)
"""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, for the results of functional collectives: waited for. PyTorch's dispatcher, which does that
    for its own backends, is not on the way here."""
    if type(tensor) is torch.Tensor:
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


class Gathers(Pool):
    """All-gathers of one set of ranks.

    Args:
        owner: the job.
        ranks: global ranks, in the order of the group.
        max_bytes: a context never holds more per rank.
        timeout_s: deadline of waits, seconds.
    """

    def __init__(self, owner: Runtime, ranks: Sequence[int], *, max_bytes: int, timeout_s: float) -> None:
        # Not early: those of several groups may be in flight together.
        super().__init__(
            owner, ranks, "all_gather", limit=max_bytes, timeout_s=timeout_s, early=False, before=worker.drain
        )

    def __call__(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """``tensor [n, ...] of every rank -> out [world * n, ...]``, on the current stream; after :meth:`prepare`."""
        context = self.context
        assert context is not None
        usable = out.is_contiguous() and not out.is_conj() and not out.is_neg()
        target = out if usable else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        source = tensor.resolve_conj().resolve_neg().contiguous()
        own = context.rank * source.nbytes
        if lies_elsewhere_in(source.data_ptr(), source.nbytes, target.data_ptr(), target.nbytes, own):
            source = source.clone()
        ALL_GATHER.unchecked(source, context, target)
        if target is not out:
            out.copy_(target)

    def at_once(self, out: torch.Tensor, tensor: torch.Tensor) -> bool:
        """As a call like one that was made before, if nothing has to be prepared or copied; whether it was made.

        Tensors of any kind: what is wrong with them, the other way finds and says.
        """
        context = self.context
        return context is not None and ALL_GATHER.at_once(tensor, context, out, UNCHECKED) is not None

    def meet(self) -> None:
        """Hear from every rank, on the current stream; after :meth:`prepare`."""
        context = self.context
        assert context is not None
        all_gather(torch.empty(0, dtype=torch.uint8, device=context.device), context)

    def describe(self) -> str:
        context = self.context
        return "no context yet" if context is None else f"context of {context.max_bytes_per_rank} bytes per rank"


class SparseSums:
    """Sparse all-reduces of one set of ranks, as ``torch.distributed`` means them: the tensor becomes the sum.

    Args:
        owner: the job.
        ranks: global ranks, in the order of the group.
        timeout_s: deadline of waits, seconds.
    """

    def __init__(self, owner: Runtime, ranks: Sequence[int], *, timeout_s: float | None) -> None:
        self._owner, self._ranks, self._timeout_s = owner, tuple(ranks), timeout_s
        self.context: SparseContext | None = None
        self.exhausted = False
        """The symmetric heap has no room for any context, which all ranks have found alike."""

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self._owner.closed

    @staticmethod
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

    @staticmethod
    def refusal(tensor: torch.Tensor, op: str) -> str | None:
        """Why a sparse tensor cannot be summed here, from what is the same on all ranks; None if it can."""
        dtype = tensor.dtype
        if dtype not in DTYPES:
            return f"{dtype} is not among the dtypes of tdcoll's sums"
        if op not in ("sum", "mean"):
            return f"{op} of sparse tensors is not defined by torch.distributed"
        return None

    def prepare(self, tensor: torch.Tensor) -> bool:
        """Have a context; whether there is one. Collective, the first time."""
        if self.context is None and not self.exhausted:
            indices, values = _parts(tensor)
            row_bytes = torch.Size(values.shape[1:]).numel() * values.dtype.itemsize
            try:
                self.open(indices.shape[1], row_bytes)
            except HeapExhaustedError:  # on all ranks
                self.exhausted = True
        return self.context is not None

    def open(self, rows_per_rank: int, row_bytes: int) -> None:
        """Make the context, if there is none, with room for what any rank says here. Collective.

        Raises:
            HeapExhaustedError: on all ranks.
        """
        if self.context is not None:
            return
        worker.drain()
        self.context = growing_context(
            self._owner,
            self._ranks,
            rows_per_rank,
            row_bytes,
            max_programs=_BESIDE_OTHERS,
            timeout_s=self._timeout_s,
        )

    def __call__(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """The sum or mean over the ranks of a COO tensor, coalesced; after :meth:`prepare`.

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
        """Raise what the kernels that are finished have left."""
        if self.context is not None:
            self.context.collective.monitor.raise_if_expired()

    def give_up(self) -> None:
        """End the waits of its kernels; for a process that ends, from any thread."""
        if self.context is not None:
            self.context.collective.monitor.abort()

    def close(self) -> None:
        """Free the context. Collective."""
        worker.drain()
        if self.context is not None:
            self.context.close()
            self.context = None

    def describe(self) -> str:
        context = self.context
        if context is None:
            return "no context yet"
        return f"context of {context.max_rows_per_rank} rows of {context.max_row_bytes} bytes per rank"


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
    """The inverse of :func:`_linear`."""
    columns = []
    for extent in reversed(shape):
        columns.append(linear % extent)
        linear = linear // extent
    return torch.stack(columns[::-1])
