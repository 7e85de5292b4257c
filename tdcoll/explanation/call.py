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
from tdcoll.calls.launches import facts_of
from tdcoll.calls.plan import Plan
from tdcoll.calls.pool import Prospect, prospect
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

    Local, and it makes no call and no context. Without ``ctx`` it uses the facts of tdcoll's own context of the group,
    or of the one that the first such call would make, assuming that all ranks have the same GPUs.

    >>> print(tdcoll.explain("all_reduce", (4096, 8192), dtype=torch.bfloat16))  # on 8 H200s
    all_reduce of 64 MiB per rank on 8 rank(s) on 1 node(s) (8): two_shot, 171 chunks of 8 KiB, ... (default: ...)

    Args:
        operation: ``"all_gather"``, ``"all_reduce"``, ``"reduce_scatter"`` or ``"all_to_all"``.
        tensor: the tensor of the call, or its shape.
        dtype: of the tensor, if a shape is given.
        group, ctx: as for the call.
        algorithm: as for the call. If it doesn't support the call, the explanation says why.
        in_place: explain :func:`tdcoll.all_gather_`, whose tensor has a segment for each rank.
        symmetric: as for the call.

    Returns:
        An :class:`Explanation`, whose ``str()`` is for people.

    Raises:
        NotInitializedError: before ``tdcoll.initialize()``.
        TypeError, ValueError: the call's arguments are not as described.
    """
    if operation not in COLLECTIVES:
        raise ValueError(f"operation must be one of {', '.join(COLLECTIVES)}; got {operation!r}")
    if ctx is not None and group is not None:
        raise ValueError(f"explain: group must be None with ctx, which has a group already; got {group!r}")
    arguments.instance("algorithm", algorithm, (str, Plan), "a str")
    if not isinstance(tensor, torch.Tensor):
        tensor = torch.empty(arguments.shape("tensor", tensor), dtype=dtype, device="meta")
    spec = spec_of(operation)
    if ctx is not None:
        check_context(ctx)
    if spec.reduces:
        check_dtype("tensor", tensor)
    world = len(runtime.current().ranks_of(group)) if ctx is None else ctx.world_size
    in_buffer, shape = in_place and spec.in_place, tensor.shape
    if not spec.results(shape, world) or (in_buffer and (not shape or shape[0] % world)):
        raise ValueError(f"tensor's first dimension must be divisible by the {world} rank(s); got shape {list(shape)}")
    segment = tensor.nbytes // world if in_buffer else spec.segment_bytes(tensor.nbytes, world)
    context: CollectiveContext | Prospect = prospect(spec, segment, group) if ctx is None else ctx
    reduced = tensor.dtype if spec.reduces else None
    facts = facts_of(context, segment, reduced, in_place=in_buffer, symmetric=symmetric)
    tuning = context.tuning
    return explain_call(spec, facts, algorithm, spec.sections(tuning.sections, tuning.name), tuning.name)
