# SPDX-License-Identifier: Apache-2.0
""":func:`tdcoll.explain`: how a call would be made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.arguments import byte_text
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.call import check_context, spec_of
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.explain import UNSUPPORTED, Explanation, explain_call
from tdcoll.calls.launches import facts_of
from tdcoll.calls.plan import Plan
from tdcoll.calls.pool import Prospect, prospect
from tdcoll.calls.spec import DEFAULT, REQUESTED
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.collectives.sparse_all_reduce.policy import ALGORITHMS, FEWEST_ROWS, Capacities, choose
from tdcoll.fused.op import DTYPES
from tdcoll.fused.policy import NAME as FUSED
from tdcoll.fused.policy import NormRows, explain_rows, takes
from tdcoll.primitives.reduce import check_dtype

__all__ = ["Explanation", "explain"]

_SPARSE = "sparse_all_reduce"


def explain(
    operation: str,
    tensor: torch.Tensor | Sequence[torch.Tensor] | Sequence[int] | int,
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
    all_reduce of 64 MiB per rank on 8 rank(s) on 1 node(s): two_shot, 171 chunks of 8 KiB, ... (default: ...)

    Args:
        operation: ``"all_gather"``, ``"all_reduce"``, ``"reduce_scatter"``, ``"all_to_all"``,
            ``"all_reduce_rms_norm"``, whose chunks are pieces of a row (``"composed"``: an all-reduce and a kernel
            more), or ``"sparse_all_reduce"``, whose chunks and thread blocks follow from the ids that ranks exchange.
        tensor: the tensor of the call (``x`` of a fused one), or its shape; of a sparse all-reduce that of the rows of
            this rank, or a list of tensors.
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
    if operation not in (known := (*COLLECTIVES, FUSED, _SPARSE)):
        raise ValueError(f"operation must be one of {', '.join(known)}; got {operation!r}")
    if ctx is not None and group is not None:
        raise ValueError(f"explain: group must be None with ctx, which has a group already; got {group!r}")
    arguments.instance("algorithm", algorithm, (str, Plan), "a str")
    if operation == _SPARSE:
        return _sparse(tensor, dtype, group, ctx, str(algorithm))
    if not isinstance(tensor, torch.Tensor):
        tensor = torch.empty(arguments.shape("tensor", tensor), dtype=dtype, device="meta")
    spec = spec_of("all_reduce" if operation == FUSED else operation)
    if ctx is not None:
        check_context(ctx)
    if spec.reduces:
        check_dtype("tensor", tensor)
    world = len(runtime.current().ranks_of(group)) if ctx is None else ctx.world_size
    in_buffer, shape = in_place and spec.in_place, tensor.shape
    if not spec.results(shape, world) or (in_buffer and (not shape or shape[0] % world)):
        raise ValueError(f"tensor's first dimension must be divisible by the {world} rank(s); got shape {list(shape)}")
    segment = tensor.nbytes // world if in_buffer else spec.segment_bytes(tensor.nbytes, world)
    context: CollectiveContext | Prospect = prospect(spec, segment, group, operation) if ctx is None else ctx
    if operation == FUSED:
        hidden = shape[-1] if shape else 1
        if tensor.dtype not in DTYPES or not takes(hidden, tensor.itemsize):
            raise ValueError(f"tensor must have rows that {FUSED} takes; got {tensor.dtype} of shape {list(shape)}")
        rows = NormRows(tensor.numel() // hidden, hidden, tensor.itemsize)
        return explain_rows(rows, facts_of(context, 0, tensor.dtype), algorithm)
    reduced = tensor.dtype if spec.reduces else None
    facts = facts_of(context, segment, reduced, in_place=in_buffer, symmetric=symmetric)
    tuning = context.tuning
    return explain_call(spec, facts, algorithm, spec.sections(tuning.sections, tuning.name), tuning.name)


def _sparse(given: Any, dtype: torch.dtype, group: runtime.Group, ctx: Any, algorithm: str) -> Explanation:
    """Explain a sparse all-reduce, on its context, that of the group, or the one that the group would get."""
    several = isinstance(given, (list, tuple)) and given and all(isinstance(one, torch.Tensor) for one in given)
    sizes: list[tuple[int, int]] = []
    for one in given if several else [given] * isinstance(given, torch.Tensor):
        if one.layout != torch.sparse_coo:
            raise TypeError(f"tensor must be torch.sparse_coo, or the shape of this rank's rows; got {one.layout}")
        sizes.append((one._nnz(), one.shape[one.sparse_dim() :].numel() * one.element_size()))
    if not sizes:
        shape = (*arguments.shape("tensor", given), 0)
        sizes = [(shape[0], torch.Size(shape[1:-1]).numel() * dtype.itemsize)]
    rows, row_bytes = sum(count for count, _ in sizes), max(nbytes for _, nbytes in sizes)
    if ctx is not None:
        arguments.instance("ctx", ctx, SparseContext, "a tdcoll.SparseContext or None")
    job, ranks = runtime.current(), runtime.current().ranks_of(group)
    context = job.contexts.get(("sparse", ranks)) if ctx is None else ctx
    most = max(FEWEST_ROWS, rows)
    new = Capacities(job.topology(ranks), most, row_bytes, len(ranks) * most, True)
    capacities: Capacities = new if context is None else context.capacities
    unsupported = {}
    for name in (algorithm, *ALGORITHMS[1:]):
        try:
            choose(name, capacities, row_bytes)
        except ValueError as error:
            if name not in ALGORITHMS:
                raise
            unsupported[name] = str(error)
    told = _SPARSE, rows * row_bytes, capacities.topology.describe()
    if algorithm in unsupported:
        why = unsupported[algorithm]
        return Explanation(*told, None, reason=UNSUPPORTED, why=why, unsupported=unsupported)
    taken, why = choose(algorithm, capacities, row_bytes), ""
    if algorithm == "auto":
        widest = byte_text(capacities.max_row_bytes)
        few = " and has max_blocks" if capacities.beside_others else ""
        why = f"the context holds {capacities.max_rows_per_rank} rows of {widest} per rank{few}; dense was never faster"
    return Explanation(*told, taken, reason=REQUESTED if not why else DEFAULT, why=why, unsupported=unsupported)
