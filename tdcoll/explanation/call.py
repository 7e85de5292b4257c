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
from tdcoll.calls.collective import CollectiveOptions, check_dense_context, operation_of
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.explain import UNSUPPORTED, Explanation
from tdcoll.calls.implicit import PlannedContext, planned_context
from tdcoll.calls.operation import Request
from tdcoll.calls.plan import Plan
from tdcoll.calls.spec import DEFAULT, REQUESTED
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.collectives.sparse_all_reduce.policy import ALGORITHMS, FEWEST_ROWS, Capacities, choose
from tdcoll.fused.matmul.operation import OPERATIONS as MATMULS
from tdcoll.fused.matmul.operation import MatmulOperation, MatmulOptions, check_operands
from tdcoll.fused.policy import NAME as FUSED
from tdcoll.fused.policy import takes
from tdcoll.fused.rms_norm import DTYPES, NormOptions
from tdcoll.fused.rms_norm import OPERATION as NORM
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
    weight: torch.Tensor | Sequence[int] | None = None,
    depth_first: bool = False,
    batch_invariant: bool = False,
) -> Explanation:
    """Say how a call would be made, and why: its algorithm, chunks, thread blocks, warps and
    epochs.

    Local, and it makes no call and no context. Without ``ctx`` it uses the facts of tdcoll's own
    context of the group, or of the one that the first such call would make, assuming that all ranks
    have the same GPUs.

    >>> print(tdcoll.explain("all_reduce", (4096, 8192), dtype=torch.bfloat16))  # on 8 H200s
    all_reduce of 64 MiB per rank on 8 rank(s) on 1 node(s): two_shot, 171 chunks of 8 KiB, ... (default: ...)

    Args:
        operation: ``"all_gather"``, ``"all_reduce"``, ``"reduce_scatter"``, ``"all_to_all"``,
            ``"broadcast"``,
            ``"all_reduce_rms_norm"``, whose chunks are pieces of a row (``"composed"``: an
            all-reduce and a kernel more), ``"all_gather_matmul"``,
            ``"matmul_reduce_scatter"`` or ``"matmul_all_reduce"``, whose chunks are tiles or pieces
            of a shard, or ``"sparse_all_reduce"``, whose chunks and thread blocks follow from the
            ids that ranks exchange.
        tensor: the tensor of the call (``x`` of a fused one), or its shape; of a sparse all-reduce
            that of the rows of this rank, or a list of tensors.
        dtype: of the tensor, if a shape is given.
        group, ctx: as for the call.
        algorithm: as for the call. If it doesn't support the call, the explanation says why.
        in_place: explain :func:`tdcoll.all_gather_`, whose tensor has a segment for each rank.
        symmetric: as for the call.
        weight: of a matmul: the weight, or its shape.
        depth_first, batch_invariant: of a matmul, as for the call.

    Returns:
        An :class:`Explanation`, whose ``str()`` is for people.

    Raises:
        NotInitializedError: before ``tdcoll.initialize()``.
        TypeError, ValueError: the call's arguments are not as described.
    """
    operations = (*COLLECTIVES, FUSED, *MATMULS, _SPARSE)
    if operation not in operations:
        raise ValueError(f"operation must be one of {', '.join(operations)}; got {operation!r}")
    if ctx is not None and group is not None:
        raise ValueError(
            f"explain: group must be None with ctx, which has a group already; got {group!r}"
        )
    arguments.instance("algorithm", algorithm, (str, Plan), "a str")
    if weight is not None and operation not in MATMULS:
        raise ValueError(f"weight must be None to explain {operation}, which has none")
    if operation == _SPARSE:
        return _sparse(tensor, dtype, group, ctx, str(algorithm))
    if not isinstance(tensor, torch.Tensor):
        tensor = torch.empty(arguments.shape("tensor", tensor), dtype=dtype, device="meta")
    if ctx is not None:
        check_dense_context(ctx)
    if operation in MATMULS:
        options = MatmulOptions(
            depth_first=depth_first, batch_invariant=batch_invariant, algorithm=algorithm
        )
        return _matmul(MATMULS[operation], tensor, weight, options, group, ctx)
    if operation == FUSED:
        return _norm(tensor, group, ctx, algorithm)
    return _dense(operation, tensor, group, ctx, algorithm, in_place, symmetric)


def _dense(
    operation: str,
    tensor: torch.Tensor,
    group: runtime.Group,
    ctx: CollectiveContext | None,
    algorithm: str | Plan,
    in_place: bool,
    symmetric: bool,
) -> Explanation:
    """Explain a dense collective by the operation that makes its calls."""
    collective = operation_of(operation)
    spec = collective.spec
    if spec.reduces:
        check_dtype("tensor", tensor)
    in_place = in_place and spec.in_place
    world = len(runtime.current().ranks_of(group)) if ctx is None else ctx.world_size
    shape = tensor.shape
    if not spec.results(shape, world) or (in_place and (not shape or shape[0] % world)):
        raise ValueError(
            f"tensor's first dimension must be divisible by the {world} rank(s); got shape {list(shape)}"
        )
    options = CollectiveOptions("sum", algorithm, symmetric, in_place)
    context: CollectiveContext | PlannedContext | None = ctx
    if context is None:
        # As `implicit_context` does, which doesn't know whether a call is in place.
        segment = spec.segment_bytes(tensor.nbytes, world)
        context = planned_context(spec, segment, group, operation)
    return collective.explain(Request((tensor,), options), context)


def _matmul(
    operation: MatmulOperation,
    x: torch.Tensor,
    weight: torch.Tensor | Sequence[int] | None,
    options: MatmulOptions,
    group: runtime.Group,
    ctx: CollectiveContext | None,
) -> Explanation:
    """Explain a matmul that communicates by the operation that makes its calls."""
    if not isinstance(weight, torch.Tensor):
        several = isinstance(weight, (list, tuple)) and any(
            isinstance(one, torch.Tensor) for one in weight
        )
        if weight is None or several:
            got = "several tensors; pass the shape of all of them together" if several else "None"
            raise TypeError(
                f"weight must be a tensor or a shape to explain {operation.name}; got {got}"
            )
        weight = torch.empty(arguments.shape("weight", weight), dtype=x.dtype, device="meta")
    request = Request((x, weight), options, group)
    check_operands(request)
    context: CollectiveContext | PlannedContext | None = ctx
    if context is None:
        context = operation.planned_context(request)
    return operation.explain(request, context)


def _norm(
    x: torch.Tensor, group: runtime.Group, ctx: CollectiveContext | None, algorithm: str | Plan
) -> Explanation:
    """Explain an all-reduce with residual and RMSNorm."""
    hidden = x.shape[-1] if x.dim() else 1
    if x.dtype not in DTYPES or not takes(hidden, x.itemsize):
        raise ValueError(
            f"tensor must have rows that {FUSED} takes; got {x.dtype} of shape {list(x.shape)}"
        )
    context: CollectiveContext | PlannedContext | None = ctx
    if context is None:
        context = planned_context(NORM.collective, x.nbytes, group, FUSED)
    options = NormOptions(1e-6, False, None, algorithm)
    return NORM.explain(Request((x,), options), context)


def _sparse(
    tensor_or_shape: Any, dtype: torch.dtype, group: runtime.Group, ctx: Any, algorithm: str
) -> Explanation:
    """Explain a sparse all-reduce, on its context, that of the group, or the one that the group
    would get."""
    tensors: list[torch.Tensor] = []
    if isinstance(tensor_or_shape, torch.Tensor):
        tensors = [tensor_or_shape]
    elif isinstance(tensor_or_shape, (list, tuple)) and all(
        isinstance(one, torch.Tensor) for one in tensor_or_shape
    ):
        tensors = list(tensor_or_shape)
    sizes: list[tuple[int, int]] = []
    for one in tensors:
        if one.layout != torch.sparse_coo:
            raise TypeError(
                f"tensor must be torch.sparse_coo, or the shape of this rank's rows; got {one.layout}"
            )
        sizes.append((one._nnz(), one.shape[one.sparse_dim() :].numel() * one.element_size()))
    if not sizes:
        shape = (*arguments.shape("tensor", tensor_or_shape), 0)
        sizes = [(shape[0], torch.Size(shape[1:-1]).numel() * dtype.itemsize)]
    rows = sum(count for count, _ in sizes)
    row_bytes = max(nbytes for _, nbytes in sizes)
    if ctx is not None:
        arguments.instance("ctx", ctx, SparseContext, "a tdcoll.SparseContext or None")
    job = runtime.current()
    ranks = runtime.current().ranks_of(group)
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
    taken = choose(algorithm, capacities, row_bytes)
    why = ""
    if algorithm == "auto":
        widest = byte_text(capacities.max_row_bytes)
        few = " and has max_blocks" if capacities.beside_others else ""
        why = f"the context holds {capacities.max_rows_per_rank} rows of {widest} per rank{few}; dense was never faster"
    return Explanation(
        *told, taken, reason=REQUESTED if not why else DEFAULT, why=why, unsupported=unsupported
    )
