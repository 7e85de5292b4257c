# SPDX-License-Identifier: Apache-2.0
""":func:`tdcoll.explain`: how a call would be made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.call import check_context, spec_of
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.explain import Explanation, explain_call
from tdcoll.calls.launches import facts_of, sections_of
from tdcoll.calls.plan import Plan
from tdcoll.calls.pool import pooled
from tdcoll.primitives.reduce import check_dtype

__all__ = ["Explanation", "explain"]


def explain(
    operation: str,
    tensor: torch.Tensor | Sequence[int] | int,
    *,
    dtype: torch.dtype = torch.float32,
    group: runtime.Group = None,
    ctx: CollectiveContext | None = None,
    algorithm: str | Plan = "auto",
    in_place: bool = False,
    symmetric: bool = False,
) -> Explanation:
    """Say how a call would be made, and why: its algorithm, chunks, thread blocks, warps and epochs.

    It launches nothing. Without ``ctx`` it is about tdcoll's own context of the group. If there is none for such a call
    yet, it is made, as by the call itself, so all ranks must be here.

    >>> print(tdcoll.explain("all_reduce", (4096, 8192), dtype=torch.bfloat16))  # on 8 H200s
    all_reduce of 64 MiB per rank on 8 rank(s) on 1 node(s) (8): two_shot, 171 chunks of 8 KiB, ... (default: ...)

    Args:
        operation: ``"all_gather"``, ``"all_reduce"``, ``"reduce_scatter"`` or ``"all_to_all"``.
        tensor: the tensor of the call, or its shape.
        dtype: of the tensor, if a shape is given.
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
    if operation not in COLLECTIVES:
        raise ValueError(f"operation must be one of {', '.join(COLLECTIVES)}; got {operation!r}")
    arguments.instance("algorithm", algorithm, (str, Plan), "a str")
    if not isinstance(tensor, torch.Tensor):
        tensor = torch.empty(arguments.shape("tensor", tensor), dtype=dtype, device="meta")
    spec = spec_of(operation)
    if ctx is None:
        ctx = pooled(spec, tensor, group)
    check_context(ctx)
    if spec.reduces:
        check_dtype("tensor", tensor)
    in_buffer, world, shape = in_place and spec.in_place, ctx.world_size, tensor.shape
    if not spec.results(shape, world) or (in_buffer and (not shape or shape[0] % world)):
        raise ValueError(f"tensor's first dimension must be divisible by the {world} rank(s); got shape {list(shape)}")
    segment = tensor.nbytes // world if in_buffer else spec.segment_bytes(tensor.nbytes, world)
    reduced = tensor.dtype if spec.reduces else None
    facts = facts_of(ctx, segment, reduced, in_place=in_buffer, symmetric=symmetric)
    return explain_call(spec, facts, algorithm, sections_of(spec, ctx), ctx.tuning.name)
