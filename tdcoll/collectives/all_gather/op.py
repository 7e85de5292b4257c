# SPDX-License-Identifier: Apache-2.0
"""All-gather: what users call."""

from __future__ import annotations

import torch

from tdcoll import runtime
from tdcoll.collectives._host.call import make
from tdcoll.collectives._host.drop_in import drop_in
from tdcoll.collectives._host.plan import Plan
from tdcoll.collectives.all_gather.spec import SPEC
from tdcoll.context import CollectiveContext

__all__ = ["all_gather", "all_gather_in_place", "all_gather_into_tensor"]


def all_gather(
    tensor: torch.Tensor,
    ctx: CollectiveContext | None = None,
    out: torch.Tensor | None = None,
    algorithm: str | Plan = "auto",
) -> torch.Tensor:
    """``[n, ...] -> [world * n, ...]``: the tensors of all ranks, concatenated in rank order.

    Collective over ``ctx``'s group; asynchronous on its stream, with no synchronisation, and CUDA-graph safe after one
    eager call of the size. Bytes are moved as they are, so any dtype will do; each rank gives the same number.

    Differentiable: the gradient is :func:`tdcoll.reduce_scatter`'s sum on the same context. All ranks therefore pass a
    tensor that requires grad, or none does, and their backward passes make the same calls in the same order.

    Args:
        tensor: this rank's contribution, contiguous, on the context's device; of any size.
        ctx: None: a context of tdcoll's own of all ranks, which is made at the first call and when a larger one comes.
            Making one is collective and synchronises.
        out: where the result goes: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous, same dtype. Made if None.
            May hold ``tensor`` as its own segment, and must not overlap it otherwise.
            It has no gradient: ``tensor`` must not require grad then, unless under ``torch.no_grad()``.
        algorithm: ``"ll"``, ``"direct"``, ``"ring"``, ``"1d"``, ``"2d"`` or ``"auto"``, which chooses by the context's
            tuning table, size and topology (see :mod:`tdcoll.collectives._host.plan`). A
            :class:`~tdcoll.Plan` fixes chunks and warps as well.

    Returns:
        ``out``, or a new ordinary tensor.

    Raises:
        ContextError: the context is closed, bound to another stream, or far too small (the message has the number).
        CollectiveTimeout: an earlier wait on the context expired.
        RankMismatchError: (``debug``) ranks differ in size, dtype, operation, algorithm or ``requires_grad``.
        NotInitializedError: (without ``ctx``) before ``tdcoll.initialize()``.
        HeapExhaustedError: (without ``ctx``) the symmetric heap has no room.
        TypeError, ValueError: an argument is not as described.

    Algorithms: direct all-gather by one-sided puts, each with a signal of its own (NVSHMEM documentation, *Signaling
    Operations*), or by stores and a released flag inside a node; the 2D form is the usual hierarchical exchange by
    rails; LL puts a flag beside every 96 bits (after NCCL's protocol of that name); the ring passes on by stores.
    """
    return make(SPEC, tensor, ctx, out, algorithm)


def all_gather_in_place(buffer: torch.Tensor, ctx: CollectiveContext, algorithm: str | Plan = "auto") -> torch.Tensor:
    """``[world * n, ...] -> the same``, without a copy: ``buffer`` is symmetric, each rank has filled its own segment.

    Peers put or store straight into ``buffer``. What they overwrite there may still be read by this rank's earlier
    work, so a rank first says that it has entered the call, and is not written to before: one more crossing (about 1 us
    over NVLink), and no staging, no copy and no limit by ``ctx.max_bytes_per_rank``. It pays for messages of megabytes.
    Small ones go by LL through the context's own memory, as out of place.

    Args:
        buffer: made by :func:`tdcoll.empty` over the context's group, at the same offset on all ranks, or, in one node,
            PyTorch's symmetric memory (``torch.distributed._symmetric_memory``) of its ProcessGroup; contiguous; its
            first extent is divisible by the number of ranks. Rank r's segment is ``buffer.chunk(world)[r]``. After a
            timeout, peers that are only late may still write to it.
        algorithm: as for :func:`all_gather`.

    Returns:
        ``buffer``.

    Raises:
        NotSymmetricError: ``buffer`` is not symmetric memory of the context's group.
        ContextError, CollectiveTimeout, RankMismatchError, TypeError, ValueError: as for :func:`all_gather`.
    """
    return make(SPEC, buffer, ctx, None, algorithm, in_place=True, names=("buffer", "buffer"))


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: runtime.Group = None,
    async_op: bool = False,
) -> torch.distributed.Work | None:
    """Drop-in for ``torch.distributed.all_gather_into_tensor``, in the order of the current stream.

    Uses a context that tdcoll makes for the group at the first call and replaces by a larger one when a larger message
    comes; ``tdcoll.finalize()`` frees what is left. Making one is collective and synchronises, so make the first and
    the largest call before capturing a CUDA graph.

    Args:
        output_tensor: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous, same dtype as ``input_tensor``.
        input_tensor: ``[n, ...]``, contiguous.
        group: a ProcessGroup, a sequence of global ranks, or None for all ranks.
        async_op: return a ``torch.distributed.Work``. The call is queued on the current stream in any case; ``wait()``
            makes the stream that is current then wait for it.

    Returns:
        None, or the ``Work``.

    Raises:
        NotInitializedError: before ``tdcoll.initialize()``.
        BackendTimeout: (``async_op``) a wait expired. ``Work.wait(timeout)`` raises it; in the simulator, the call.
        Others: as :func:`all_gather`.
    """
    return drop_in(SPEC, output_tensor, input_tensor, None, group, async_op, ("input_tensor", "output_tensor"))
