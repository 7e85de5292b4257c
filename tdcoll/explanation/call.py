# SPDX-License-Identifier: Apache-2.0
""":func:`tdcoll.explain`: how a call would be made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.call import check_context, spec_of
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.explain import Explanation, explain_call
from tdcoll.calls.launches import facts_of
from tdcoll.calls.plan import Plan
from tdcoll.calls.pool import Prospect, prospect
from tdcoll.fused import policy as fused
from tdcoll.fused.op import DTYPES as ROWS_OF
from tdcoll.primitives.reduce import ACCUMULATORS, check_operation

__all__ = ["Explanation", "explain"]

_OPERATIONS = (*COLLECTIVES, fused.NAME)


def explain(
    operation: str,
    tensor: torch.Tensor | Sequence[int] | int,
    *,
    op: str | torch.distributed.ReduceOp = "sum",
    dtype: torch.dtype | None = None,
    group: runtime.Group = None,
    ctx: CollectiveContext | None = None,
    algorithm: str | Plan = "auto",
    in_place: bool = False,
    symmetric: bool = False,
) -> Explanation:
    """Say how a call would be made, and why: its algorithm, chunks, thread blocks, warps and epochs.

    Local, and it makes no call and no context. Without ``ctx`` it uses the facts of tdcoll's own context of the group,
    or of the one that the first such call would make, assuming that all ranks have the same GPUs.

    >>> print(tdcoll.explain("all_reduce", (4096, 8192), dtype=torch.bfloat16))  # on 8 H200s
    all_reduce of 64 MiB per rank on 8 rank(s) on 1 node(s) (8): two_shot, 171 chunks of 8 KiB, ... (default: ...)

    Args:
        operation: ``"all_gather"``, ``"all_reduce"``, ``"reduce_scatter"``, ``"all_to_all"`` or
            ``"all_reduce_rms_norm"``.
        tensor: the tensor of the call, or its shape.
        op: of a reduction.
        dtype: of the tensor, if a shape is given. Default: fp32.
        group, ctx: as for the call.
        algorithm: as for the call. If it doesn't support the call, the explanation says why.
        in_place: explain :func:`tdcoll.all_gather_`, whose tensor has a segment for each rank. An all-reduce in place
            takes the same algorithm as any other.
        symmetric: as for the call.

    Returns:
        An :class:`Explanation`, whose ``str()`` is for people.

    Raises:
        NotInitializedError: before ``tdcoll.initialize()``.
        TypeError, ValueError: the call's arguments are not as described.
    """
    if operation not in _OPERATIONS:
        raise ValueError(f"operation must be one of {', '.join(_OPERATIONS)}; got {operation!r}")
    if ctx is not None and group is not None:
        raise ValueError(f"explain: group must be None with ctx, which has a group already; got {group!r}")
    arguments.instance("algorithm", algorithm, (str, Plan), "a str or a Plan")
    for name, flag in (("in_place", in_place), ("symmetric", symmetric)):
        arguments.instance(name, flag, bool, "a bool")
    if isinstance(tensor, torch.Tensor):
        if dtype not in (None, tensor.dtype):
            raise ValueError(f"dtype must be None with a tensor, which is of {tensor.dtype}; got {dtype}")
        shape, dtype = tuple(tensor.shape), tensor.dtype
    else:
        arguments.instance("dtype", dtype, (torch.dtype, type(None)), "a torch.dtype or None")
        shape, dtype = arguments.shape("tensor", tensor), dtype or torch.float32
    if ctx is not None:
        check_context(ctx)
    if operation == fused.NAME:
        return _fused(shape, dtype, group, ctx, algorithm)
    spec = spec_of(operation)
    in_buffer = in_place and spec.in_place
    if in_place and not (spec.in_place or spec.segments == (1, 1)):
        raise ValueError(f"in_place must be False: there is no tdcoll.{operation}_")
    if spec.reduces:
        _check_dtype(dtype, tuple(ACCUMULATORS))
        check_operation(op, dtype)
    world = len(runtime.current().ranks_of(group)) if ctx is None else ctx.world_size
    if not spec.results(shape, world) or (in_buffer and (not shape or shape[0] % world)):
        raise ValueError(f"tensor's first dimension must be divisible by the {world} rank(s); got shape {list(shape)}")
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    segment = nbytes // world if in_buffer else spec.segment_bytes(nbytes, world)
    context: CollectiveContext | Prospect = prospect(spec, segment, group) if ctx is None else ctx
    facts = facts_of(context, segment, dtype if spec.reduces else None, in_place=in_buffer, symmetric=symmetric)
    tuning = context.tuning
    return explain_call(spec, facts, algorithm, spec.sections(tuning.sections, tuning.name), tuning.name)


def _fused(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    group: runtime.Group,
    ctx: CollectiveContext | None,
    algorithm: str | Plan,
) -> Explanation:
    _check_dtype(dtype, ROWS_OF)
    hidden = shape[-1] if shape else 0
    if not fused.takes(hidden, dtype.itemsize):
        raise ValueError(
            f"tensor must have rows of at most {fused.MOST_HIDDEN} elements, a multiple of {16 // dtype.itemsize} of "
            f"{dtype}; got shape {list(shape)}"
        )
    elements = torch.Size(shape).numel()
    context: Any = ctx
    if ctx is None:
        context = prospect(spec_of("all_reduce"), elements * dtype.itemsize, group, fused.NAME)
    rows = fused.NormRows(elements // hidden, hidden, dtype.itemsize)
    return fused.explain_rows(rows, facts_of(context, 0, dtype), algorithm)


def _check_dtype(dtype: torch.dtype, allowed: Sequence[torch.dtype]) -> None:
    if dtype not in allowed:
        raise TypeError(f"dtype must be one of {', '.join(map(str, allowed))}; got {dtype}")
