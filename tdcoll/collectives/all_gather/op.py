# SPDX-License-Identifier: Apache-2.0
"""All-gather: the public functions."""

from __future__ import annotations

import torch

from tdcoll import runtime
from tdcoll.calls.collective import CollectiveOptions
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.plan import Plan
from tdcoll.calls.run import run
from tdcoll.collectives.all_gather.spec import OPERATION


def all_gather(
    tensor: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    group: runtime.Group = None,
    ctx: CollectiveContext | None = None,
    algorithm: str | Plan = "auto",
    symmetric: bool = False,
) -> torch.Tensor:
    """``[n, ...] -> [world * n, ...]``: concatenate the tensors of all ranks, in rank order.

    Collective over the group: only its members call. Asynchronous on the current stream, and safe
    in CUDA graphs after one eager call of the size. A call on another stream than the context's
    last call waits for that one. Nothing orders calls on different contexts, and without ``ctx``
    each collective of a group has its own. Any dtype is supported.

    >>> tdcoll.all_gather(torch.tensor([tdcoll.rank()]))  # on 2 ranks
    tensor([0, 1])

    Differentiable: the gradient is the sum of a :func:`tdcoll.reduce_scatter`. All ranks therefore
    pass a tensor that requires grad, or none does, and their backward passes make the same calls in
    the same order.

    Args:
        tensor: contiguous, on ``tdcoll.device()``; of the same size on all ranks.
        out: the result: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous, same dtype. Made
            if None. May hold ``tensor`` as its own segment, and must not overlap it otherwise.
            Because it gets no gradient, ``tensor`` must not require grad, unless under
            ``torch.no_grad()``.
        group: a ProcessGroup, a one-dimensional DeviceMesh, a sequence of global ranks, or None for
            all ranks. The call uses a context of tdcoll's own. To make it, and to enlarge it, is
            collective and synchronises.
        ctx: a context of yours, instead of ``group``.
        algorithm: ``"ll"``, ``"direct"``, ``"loop"`` (any number of thread blocks), ``"ce"`` (copy
            engines), ``"ring"``, ``"1d"``, ``"2d"`` or ``"auto"``, which uses the tuning table,
            size and topology.
        symmetric: ``out`` is symmetric memory that peers may write to, as for :func:`all_gather_`.

    Returns:
        ``out``, or a new ordinary tensor.

    Raises:
        ContextError: the context is closed, the stream of its last call is being captured and this
            call's isn't, or ``max_bytes_per_rank`` is far too small.
        CollectiveTimeout: an earlier wait on the context expired. The call's own timeout is raised
            by the next call, by ``ctx.check()``, :func:`tdcoll.check` or ``finalize()``; until then
            the result is undefined.
        RankMismatchError: (``debug``) ranks differ in size, dtype, operation, algorithm or
            ``requires_grad``.
        NotInitializedError, HeapExhaustedError: (without ``ctx``) before ``tdcoll.initialize()``;
            the heap is full.
        TypeError, ValueError: an argument is not as described.

    Algorithms: one-sided puts, each with a signal (NVSHMEM documentation, *Signaling Operations*),
    or stores with a released flag inside a node; a hierarchical exchange between nodes; LL (after
    NCCL's protocol) for small sizes.
    """
    tensors = (tensor,) if out is None else (tensor, out)
    options = CollectiveOptions(None, algorithm, symmetric)
    return run(OPERATION, tensors, options, group, ctx)


def all_gather_(
    tensor: torch.Tensor,
    *,
    group: runtime.Group = None,
    ctx: CollectiveContext | None = None,
    algorithm: str | Plan = "auto",
) -> torch.Tensor:
    """``[world * n, ...] -> the same``: gather in place, in symmetric memory, without any copy.

    Each rank has filled its own segment, ``tensor.chunk(world)[rank]``. Peers put or store directly
    into the others. Because this rank's earlier work may still read them, a rank is written to only
    after it has entered the call, which costs one hop (about 1 us over NVLink). It pays off for
    messages of megabytes. Small ones use LL, as out of place.

    >>> buffer = tdcoll.empty(2, torch.int64)  # on 2 ranks
    >>> buffer[tdcoll.rank()] = tdcoll.rank()
    >>> tdcoll.all_gather_(buffer)
    tensor([0, 1])

    Args:
        tensor: made by :func:`tdcoll.empty` over the same group, at the same offset on all ranks;
            contiguous; its first dimension is divisible by the number of ranks. After a timeout,
            late peers may still write to it.
        group, ctx, algorithm: as for :func:`all_gather`.

    Returns:
        ``tensor``.

    Raises:
        NotSymmetricError: ``tensor`` is not symmetric memory of the group.
        Others: as for :func:`all_gather`.
    """
    options = CollectiveOptions(None, algorithm, in_place=True)
    return run(OPERATION, (tensor,), options, group, ctx, names=("tensor", "tensor"))
