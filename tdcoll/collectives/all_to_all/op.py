# SPDX-License-Identifier: Apache-2.0
"""All-to-all: what users call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tdcoll import runtime
from tdcoll.collectives._host.call import make
from tdcoll.collectives._host.drop_in import drop_in
from tdcoll.collectives._host.plan import Plan
from tdcoll.collectives.all_to_all.spec import SPEC
from tdcoll.context import CollectiveContext

__all__ = ["all_to_all", "all_to_all_single"]


def all_to_all(
    tensor: torch.Tensor,
    ctx: CollectiveContext | None = None,
    out: torch.Tensor | None = None,
    algorithm: str | Plan = "auto",
) -> torch.Tensor:
    """``[world * n, ...] -> [world * n, ...]``: part r of the result is what rank r has for this rank.

    Collective over ``ctx``'s group; asynchronous on its stream, with no synchronisation, and CUDA-graph safe after one
    eager call of the size. Bytes are moved as they are, so any dtype will do. All parts have one size. A call whose
    parts are larger than ``ctx.max_bytes_per_rank`` (between nodes, than half of it) takes several epochs.

    Differentiable: the gradient is the same all-to-all of the result's, on the same context. All ranks therefore pass a
    tensor that requires grad, or none does, and their backward passes make the same calls in the same order.

    >>> tdcoll.all_to_all(torch.arange(4.0) + 10 * rank, ctx)  # on rank 1 of 2: tensor([ 2.,  3., 12., 13.])

    Args:
        tensor: a part for each rank, contiguous, on the context's device; its first extent is divisible by the number
            of ranks.
        ctx: None: a context of tdcoll's own of all ranks, which is made at the first call and when a larger one comes.
            Making one is collective and synchronises.
        out: where the result goes: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous, same dtype. Made if None.
            Must not overlap ``tensor``. It has no gradient: ``tensor`` must not require grad then, unless under
            ``torch.no_grad()``.
        algorithm: ``"ll"``, ``"direct"``, ``"1d"`` or ``"auto"``, or a :class:`~tdcoll.Plan`.

    Returns:
        ``out``, or a new ordinary tensor.

    Raises:
        ContextError: the context is closed, bound to another stream, or far too small (the message has the number).
        CollectiveTimeout: an earlier wait on the context expired.
        RankMismatchError: (``debug``) ranks differ in size, dtype, algorithm or ``requires_grad``.
        NotInitializedError: (without ``ctx``) before ``tdcoll.initialize()``.
        HeapExhaustedError: (without ``ctx``) the symmetric heap has no room.
        TypeError, ValueError: an argument is not as described.

    Algorithms: every rank sends each part to the rank that it is for (pairwise exchange; Thakur, Rabenseifner and
    Gropp, 2005): small parts with a flag beside every 96 bits (``"ll"``, after NCCL's protocol of that name), larger
    ones by stores with a signal per chunk (``"direct"``), and between nodes by puts (``"1d"``).
    """
    return make(SPEC, tensor, ctx, out, algorithm)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: runtime.Group = None,
    async_op: bool = False,
) -> torch.distributed.Work | None:
    """Drop-in for ``torch.distributed.all_to_all_single`` with equal parts, in the order of the current stream.

    The context is tdcoll's own, see :func:`all_to_all`; ``tdcoll.finalize()`` frees it. Make the first and the largest
    call before capturing a CUDA graph.

    Args:
        output: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous, same dtype as ``input``.
        input: ``[world * n, ...]``, contiguous.
        output_split_sizes, input_split_sizes: None, or ``n`` for each rank.
        group: a ProcessGroup, a sequence of global ranks, or None for all ranks.
        async_op: return a ``torch.distributed.Work``. The call is queued on the current stream in any case; ``wait()``
            makes the stream that is current then wait for it.

    Returns:
        None, or the ``Work``.

    Raises:
        NotInitializedError: before ``tdcoll.initialize()``.
        ValueError: parts have different sizes, for which there is ``torch.distributed.all_to_all_single``.
        BackendTimeout: (``async_op``) a wait expired. ``Work.wait(timeout)`` raises it; in the simulator, the call.
        Others: as :func:`all_to_all`.
    """
    for name, sizes in (("output_split_sizes", output_split_sizes), ("input_split_sizes", input_split_sizes)):
        if sizes and len(set(sizes)) > 1:
            raise ValueError(
                f"{name} must be None or the same for each rank; got {list(sizes)}. Use torch.distributed's "
                "all_to_all_single for parts of different sizes"
            )
    return drop_in(SPEC, output, input, None, group, async_op, ("input", "output"))
