# SPDX-License-Identifier: Apache-2.0
"""Functions with torch.distributed's signatures, in the order of the current stream.

Each uses a context that tdcoll makes for the group at the first call and replaces when a larger message comes. Make the
first and the largest call before you capture a CUDA graph, because making a context is collective and synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp, Work

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.calls.call import make, spec_of
from tdcoll.calls.pool import pooled
from tdcoll.distributed.call import plain
from tdcoll.distributed.work import StreamWork, backend_errors, completed

__all__ = ["all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor"]


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: runtime.Group = None, async_op: bool = False
) -> Work | None:
    """Gather ``input_tensor`` of all ranks into ``output_tensor``; see :func:`tdcoll.all_gather`.

    >>> tdcoll.distributed.all_gather_into_tensor(gathered, x)

    Args:
        output_tensor: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous, same dtype as ``input_tensor``.
        input_tensor: ``[n, ...]``, contiguous.
        group: a ProcessGroup, a one-dimensional DeviceMesh, a sequence of global ranks, or None for all ranks.
        async_op: return a ``torch.distributed.Work``. The call is queued on the current stream in any case; ``wait()``
            makes the stream that is current then wait for it.

    Returns:
        None, or the ``Work``.

    Raises:
        NotInitializedError: before ``tdcoll.initialize()``.
        BackendTimeout: (``async_op``) a wait expired. ``Work.wait(timeout)`` raises it; in the simulator, the call.
        Others: as :func:`tdcoll.all_gather`.
    """
    names = ("input_tensor", "output_tensor")
    return _call("all_gather", output_tensor, input_tensor, None, group, async_op, names)


def all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: runtime.Group = None, async_op: bool = False
) -> Work | None:
    """Reduce ``tensor`` over all ranks, in place; see :func:`tdcoll.all_reduce_`.

    >>> tdcoll.distributed.all_reduce(x, torch.distributed.ReduceOp.AVG)

    Args:
        tensor: contiguous, as for :func:`tdcoll.all_reduce`.
        op: ``ReduceOp.SUM``, ``AVG``, ``MAX``, ``MIN`` or ``PRODUCT``; or its name, ``"sum"`` for instance.
        group, async_op: as for :func:`all_gather_into_tensor`.

    Returns:
        None, or the ``Work``.

    Raises:
        ValueError: ``op`` is another one, or not of this dtype.
        Others: as :func:`all_gather_into_tensor` and :func:`tdcoll.all_reduce`.
    """
    return _call("all_reduce", tensor, tensor, op, group, async_op, ("tensor", "tensor"))


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: runtime.Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce ``input`` over all ranks, and put this rank's segment into ``output``; see :func:`tdcoll.reduce_scatter`.

    >>> tdcoll.distributed.reduce_scatter_tensor(mine, whole)

    Args:
        output: ``[n, ...]``, contiguous, same dtype as ``input``.
        input: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous.
        op: as for :func:`all_reduce`.
        group, async_op: as for :func:`all_gather_into_tensor`.

    Returns:
        None, or the ``Work``.

    Raises:
        Errors as :func:`all_reduce` and :func:`tdcoll.reduce_scatter`.
    """
    return _call("reduce_scatter", output, input, op, group, async_op, ("input", "output"))


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: runtime.Group = None,
    async_op: bool = False,
) -> Work | None:
    """Send segment r of ``input`` to rank r, with segments of one size; see :func:`tdcoll.all_to_all`.

    >>> tdcoll.distributed.all_to_all_single(received, x)

    Args:
        output: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous, same dtype as ``input``.
        input: ``[world * n, ...]``, contiguous.
        output_split_sizes, input_split_sizes: None, or an int for each rank, all the same, which add up to the first
            dimension of the tensor.
        group, async_op: as for :func:`all_gather_into_tensor`.

    Returns:
        None, or the ``Work``.

    Raises:
        ValueError: wrong split sizes, or segments of different sizes; use ``torch.distributed.all_to_all_single``
            for those.
        Others: as :func:`all_gather_into_tensor` and :func:`tdcoll.all_to_all`.
    """
    _check_splits("output_split_sizes", output_split_sizes, "output", output, group)
    _check_splits("input_split_sizes", input_split_sizes, "input", input, group)
    return _call("all_to_all", output, input, None, group, async_op, ("input", "output"))


def _check_splits(
    name: str, sizes: Sequence[int] | None, argument: str, tensor: torch.Tensor, group: runtime.Group
) -> None:
    """Raise unless split sizes are None, or the same for each rank and, added up, the tensor's first dimension."""
    if not sizes:
        return
    arguments.tensor(argument, tensor)
    world, rows = len(runtime.current().ranks_of(group)), tensor.shape[0] if tensor.dim() else 1
    if len(sizes) != world:
        raise ValueError(f"{name} must have {world} sizes, one per rank; got {list(sizes)}")
    if len(set(sizes)) > 1:
        raise ValueError(
            f"{name} must be None or the same for each rank; got {list(sizes)}. Use torch.distributed's "
            "all_to_all_single for segments of different sizes"
        )
    if sum(sizes) != rows:
        raise ValueError(f"{name} must add up to dimension 0 of {argument}, {rows}; got {list(sizes)}")


def _call(
    name: str,
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any,
    group: runtime.Group,
    async_op: bool,
    names: tuple[str, str],
) -> Work | None:
    """Make a call of the collective ``name``; ``names`` are the caller's, of input and output."""
    for argument, tensor in zip(names, (input, output), strict=True):
        arguments.tensor(argument, tensor)
    output, input = plain(output), plain(input)
    spec = spec_of(name)
    ctx = pooled(spec, input, group)
    # Detached, because autograd doesn't see a kernel's stores.
    make(spec, input.detach(), op=op, out=output.detach(), ctx=ctx, names=names)
    if not async_op:
        return None
    check = ctx.monitor.raise_if_expired
    if ctx.device.type == "cpu":
        with backend_errors:
            check()
        return completed([output])
    return StreamWork([output], torch.cuda.current_stream(ctx.device), blocks=False, check=check)
