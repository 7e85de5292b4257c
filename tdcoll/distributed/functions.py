# SPDX-License-Identifier: Apache-2.0
"""Functions with torch.distributed's signatures, in the order of the current stream.

Each uses a context that tdcoll makes for the group at the first call and replaces when a larger
message comes. Make the first and the largest call before you capture a CUDA graph, because making a
context is collective and synchronises.

All take ``group``, which is a ProcessGroup, a one-dimensional DeviceMesh, a sequence of global
ranks, or None for all ranks, and ``async_op``. With ``async_op=True`` they return a
``torch.distributed.Work``, otherwise None. The call is queued on the current stream in any case;
``wait()`` makes the stream that is current then wait for it. A wait that has expired is raised as
:class:`~tdcoll.distributed.BackendTimeout` by ``Work.wait(timeout)``, and in the simulator by the
call. Other errors are those of the function of :mod:`tdcoll` that has the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp, Work

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.calls.collective import CollectiveOptions, operation_of
from tdcoll.calls.operation import Request
from tdcoll.calls.run import run
from tdcoll.distributed.call import plain
from tdcoll.distributed.work import StreamWork, backend_errors, completed


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: runtime.Group = None,
    async_op: bool = False,
) -> Work | None:
    """Gather ``input_tensor`` of all ranks into ``output_tensor``; see :func:`tdcoll.all_gather`.

    >>> tdcoll.distributed.all_gather_into_tensor(gathered, x)

    Args:
        output_tensor: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous, same dtype as
            ``input_tensor``.
        input_tensor: ``[n, ...]``, contiguous.
        group: a ProcessGroup, a one-dimensional DeviceMesh, a sequence of global ranks, or None for
            all ranks.
        async_op: return a ``torch.distributed.Work``, whose ``wait()`` makes the current stream
            wait.
    """
    names = ("input_tensor", "output_tensor")
    return _call("all_gather", output_tensor, input_tensor, None, group, async_op, names)


def all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: runtime.Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce ``tensor``, which is contiguous, over all ranks, in place; see
    :func:`tdcoll.all_reduce_`.

    >>> tdcoll.distributed.all_reduce(x, torch.distributed.ReduceOp.AVG)

    ``op`` is ``ReduceOp.SUM``, ``AVG``, ``MAX``, ``MIN`` or ``PRODUCT``; or its name, ``"sum"`` for
    instance.
    """
    return _call("all_reduce", tensor, tensor, op, group, async_op, ("tensor", "tensor"))


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: runtime.Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce ``input`` over all ranks, and put this rank's segment into ``output``; see
    :func:`tdcoll.reduce_scatter`.

    >>> tdcoll.distributed.reduce_scatter_tensor(mine, whole)

    Args:
        output: ``[n, ...]``, contiguous, same dtype as ``input``.
        input: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous.
        op: as for :func:`all_reduce`.
        group, async_op: as for :func:`all_gather_into_tensor`.
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
    """Send segment r of ``input`` to rank r, with segments of one size; see
    :func:`tdcoll.all_to_all`.

    >>> tdcoll.distributed.all_to_all_single(received, x)

    Args:
        output: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous, same dtype as ``input``.
        input: ``[world * n, ...]``, contiguous.
        output_split_sizes, input_split_sizes: None, or an int for each rank, all the same, which
            add up to the first dimension of the tensor.
        group, async_op: as for :func:`all_gather_into_tensor`.
    """
    for name, sizes, tensor in (
        ("output", output_split_sizes, output),
        ("input", input_split_sizes, input),
    ):
        if not sizes:
            continue
        arguments.tensor(name, tensor)
        world = len(runtime.current().ranks_of(group))
        rows = [*tensor.shape, 1][0]
        if [*sizes] != world * [rows // world]:
            raise ValueError(
                f"{name}_split_sizes must be None or {world} equal sizes, which add up to dimension 0 of {name}; got "
                f"{[*sizes]}. Use torch.distributed's all_to_all_single for segments of different sizes"
            )
    return _call("all_to_all", output, input, None, group, async_op, ("input", "output"))


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
    output = plain(output)
    input = plain(input)
    operation = operation_of(name)
    # Detached, because autograd doesn't see a kernel's stores.
    request = Request((input.detach(), output.detach()), CollectiveOptions(op), group, names=names)
    ctx = operation.own_context(request)
    run(operation, request.tensors, request.options, ctx=ctx, names=names)
    if not async_op:
        return None
    check = ctx.monitor.raise_if_expired
    if ctx.device.type == "cpu":
        with backend_errors:
            check()
        return completed([output], asynchronous=True)
    return StreamWork([output], torch.cuda.current_stream(ctx.device), blocks=False, check=check)
