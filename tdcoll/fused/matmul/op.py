# SPDX-License-Identifier: Apache-2.0
"""Matmuls that communicate: the public functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tdcoll import runtime
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.epilogues import split_extra
from tdcoll.calls.run import run
from tdcoll.fused.matmul.operation import OPERATIONS, MatmulOptions
from tdcoll.fused.matmul.policy import GATHER, REDUCE, SCATTER, MatmulPlan

Weights = torch.Tensor | Sequence[torch.Tensor]


def all_gather_matmul(
    x: torch.Tensor,
    weight: Weights,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    depth_first: bool = False,
    gathered: bool = False,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    epilogue: Callable[..., Any] | None = None,
    extra: Any = None,
    batch_invariant: bool = False,
    group: runtime.Group = None,
    ctx: CollectiveContext | None = None,
    algorithm: str | MatmulPlan = "auto",
) -> Any:
    """``[n, ..., depth], [columns, depth] -> [world * n, ..., columns]``: ``linear(all_gather(x),
    weight, bias)``.

    Collective, asynchronous and CUDA-graph safe as :func:`tdcoll.all_gather`; one kernel inside a
    node, which multiplies rows as they arrive.

    >>> y = tdcoll.fused.all_gather_matmul(torch.ones(1, 16), torch.ones(8, 16))
    >>> y[0, 0]
    tensor(16.)

    Because it has no derivative, tensors must not require grad, unless under ``torch.no_grad()``.
    The operator ``torch.ops.tdcoll.all_gather_matmul`` has one (:mod:`tdcoll.ops`).

    **Bits.** Every element is one sum over the depth, in fp32 and in one order, to which the bias
    is added; the epilogue gets that, and its result is rounded once. A row therefore has the same
    bits whatever rows are beside it. The exception is ``"composed"`` by cuBLAS, which splits the
    depth of few rows; ``batch_invariant=True`` excludes it. If cuBLAS doesn't split the depth, the
    bits are those of ``torch.mm``.

    Args:
        x: this rank's rows: contiguous, on the context's device, of bf16, fp16, fp32,
            ``float8_e4m3fn`` or ``float8_e5m2``. All ranks have the same number of rows; pad
            shorter shards. ``depth * x.element_size()`` is a multiple of 16. fp32 is multiplied in
            TF32 only if ``torch.backends.cuda.matmul.allow_tf32``.
        weight: this rank's columns, contiguous, of the dtype of ``x``. Several weights share ``x``,
            as those of Q, K and V do; they are concatenated by a copy, unless they are neighbours
            in memory, as ``split`` returns them.
        bias: ``[columns]`` of the result's dtype.
        out: where to put the result; it must not overlap another argument. None: a new tensor.
        depth_first: ``weight`` is ``[depth, columns]``, as in ``x @ weight``.
        gathered: also return the gathered ``x``.
        x_scale, weight_scale: of fp8 operands, which need both: fp32, with one element, or one for
            each row of ``x`` and one for each column. As for ``torch._scaled_mm``, the product is
            multiplied by them.
        out_dtype: bf16, fp16 or fp32. None: the dtype of ``x``, or bf16 for fp8.
        epilogue: a function of ``triton.jit`` from sums to results
            (:mod:`tdcoll.primitives.epilogue`).
        extra: for the epilogue: a NamedTuple of tensors and numbers, or None.
        batch_invariant: exclude cuBLAS, see above.
        group, ctx: as for :func:`tdcoll.all_gather`.
        algorithm: ``"fused"``, ``"copied"`` (copy engines send, for large shards), ``"composed"``
            (an all-gather and a matmul) or ``"auto"``, which is ``"composed"`` for few rows, on
            several nodes, before Hopper, and if the context is too small.

    Returns:
        The result; with ``gathered=True`` ``(result, gathered x)``. With several weights the result
        is a tuple of views of one tensor.

    Raises:
        RankMismatchError: (``debug``) ranks pass different shapes, dtypes or algorithms.
        Others: as :func:`tdcoll.all_gather`.

    Algorithm: multiplying tiles while rows arrive is known from asynchronous tensor parallelism
    (PyTorch, quack, Triton-distributed); one stock Triton kernel that pushes, waits per tile and
    keeps one order of sums is tdcoll's.
    """
    named = {"bias": bias, "x_scale": x_scale, "weight_scale": weight_scale, "out": out}
    joined, widths = _joined(weight, depth_first)
    options = MatmulOptions(
        (), depth_first, gathered, out_dtype, batch_invariant, epilogue, extra, algorithm
    )
    made = _run(GATHER, x, joined, named, options, group, ctx)
    if widths is None:
        return made
    result = made[0] if gathered else made
    parts = result.split(widths, -1)
    return (parts, made[1]) if gathered else parts


def matmul_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    depth_first: bool = False,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    epilogue: Callable[..., Any] | None = None,
    extra: Any = None,
    batch_invariant: bool = False,
    group: runtime.Group = None,
    ctx: CollectiveContext | None = None,
    algorithm: str | MatmulPlan = "auto",
) -> torch.Tensor:
    """``[world * n, ..., depth], [columns, depth] -> [n, ..., columns]``:
    ``reduce_scatter(linear(x, weight)) + bias``.

    Collective, asynchronous and CUDA-graph safe as :func:`tdcoll.reduce_scatter`; one kernel inside
    a node, which sends a tile when it is computed.

    >>> y = tdcoll.fused.matmul_reduce_scatter(torch.ones(2, 16), torch.ones(8, 16))
    >>> y.shape[1]
    8

    **Bits.** Each rank's product is rounded to the result's dtype. The sum is in rank order, in
    fp32, with the bias last; the epilogue gets it, and its result is rounded once. (Between nodes:
    :func:`tdcoll.reduce_scatter`.) The product has the bits that :func:`all_gather_matmul`
    describes.

    Args:
        x: contiguous, with as many rows in the first dimension as all ranks' results have together;
            else as for :func:`all_gather_matmul`.
        weight: ``[columns, depth]``, contiguous, of the dtype of ``x``; this rank's part of the
            depth.
        bias: ``[columns]`` of the result's dtype, the same on all ranks: it is added once.
        Others: as for :func:`all_gather_matmul`. ``"composed"`` is a matmul and a reduce-scatter.

    Raises:
        RankMismatchError: (``debug``) ranks pass different shapes, dtypes or algorithms.
        Others: as :func:`tdcoll.reduce_scatter`.

    Algorithm: see :mod:`tdcoll.fused.matmul.kernels_scatter`, which is tdcoll's.
    """
    named = {"bias": bias, "x_scale": x_scale, "weight_scale": weight_scale, "out": out}
    options = MatmulOptions(
        (), depth_first, False, out_dtype, batch_invariant, epilogue, extra, algorithm
    )
    made: torch.Tensor = _run(SCATTER, x, weight, named, options, group, ctx)
    return made


def matmul_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    depth_first: bool = False,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    epilogue: Callable[..., Any] | None = None,
    extra: Any = None,
    batch_invariant: bool = False,
    group: runtime.Group = None,
    ctx: CollectiveContext | None = None,
    algorithm: str | MatmulPlan = "auto",
) -> torch.Tensor:
    """``[n, ..., depth], [columns, depth] -> [n, ..., columns]``: ``all_reduce(linear(x, weight)) +
    bias``.

    Collective, asynchronous and CUDA-graph safe as :func:`tdcoll.all_reduce`; one kernel inside a
    node, for a decoder's few rows.

    >>> y = tdcoll.fused.matmul_all_reduce(torch.ones(2, 16), torch.ones(8, 16))
    >>> y.shape
    torch.Size([2, 8])

    **Bits.** As for :func:`matmul_reduce_scatter`; the same on all ranks.

    Args:
        x: contiguous; else as for :func:`all_gather_matmul`.
        weight: ``[columns, depth]``, contiguous, of the dtype of ``x``; this rank's part of the
            depth.
        bias: ``[columns]`` of the result's dtype, the same on all ranks: it is added once.
        extra: for the epilogue, with the same values on all ranks.
        algorithm: ``"one_shot"``, ``"two_shot"``, ``"composed"`` (a matmul and an all-reduce) or
            ``"auto"``.
        Others: as for :func:`all_gather_matmul`.

    Raises:
        RankMismatchError: (``debug``) ranks pass different shapes, dtypes or algorithms.
        Others: as :func:`tdcoll.all_reduce`.

    Algorithms: one-shot and two-shot all-reduces by the Lamport protocol are TensorRT-LLM's;
    sending tiles from a matmul's registers, and the order of the sums, are tdcoll's.
    """
    named = {"bias": bias, "x_scale": x_scale, "weight_scale": weight_scale, "out": out}
    options = MatmulOptions(
        (), depth_first, False, out_dtype, batch_invariant, epilogue, extra, algorithm
    )
    made: torch.Tensor = _run(REDUCE, x, weight, named, options, group, ctx)
    return made


def _run(
    name: str,
    x: Any,
    weight: Any,
    named: dict[str, Any],
    options: MatmulOptions,
    group: runtime.Group,
    ctx: Any,
) -> Any:
    """Make a call.

    Args:
        named: further tensors, by name, and None for those that the caller has left out.
        options: without names.
    """
    tensors = {"x": x, "weight": weight}
    tensors |= {key: tensor for key, tensor in named.items() if tensor is not None}
    extra, read = split_extra(options.extra)
    tensors |= read
    options = options._replace(names=tuple(tensors), extra=extra)
    return run(OPERATIONS[name], tuple(tensors.values()), options, group, ctx)


def _joined(weight: Any, depth_first: bool) -> tuple[Any, list[int] | None]:
    """Return one weight and the columns of each if there are several, otherwise the weight and
    None."""
    if isinstance(weight, torch.Tensor) or not isinstance(weight, (list, tuple)) or not weight:
        return weight, None
    weights = list(weight)
    dimension = 1 if depth_first else 0
    for one in weights:
        if not isinstance(one, torch.Tensor) or one.dim() != 2:
            raise TypeError(
                f"weight must be a tensor of 2 dimensions or a sequence of such tensors; got {one!r}"
            )
    first = weights[0]
    for place, one in enumerate(weights):
        if one.dtype != first.dtype or one.shape[1 - dimension] != first.shape[1 - dimension]:
            raise ValueError(
                f"weight[{place}] must have the dtype and depth of weight[0], {first.dtype} of shape "
                f"{list(first.shape)}; got {one.dtype} of shape {list(one.shape)}"
            )
    widths = [one.shape[dimension] for one in weights]
    if torch.is_grad_enabled() and any(one.requires_grad for one in weights):
        return torch.cat(weights, dimension), widths  # which the checks refuse, as one weight
    end = first.data_ptr()
    for one in weights:
        if (
            depth_first
            or not one.is_contiguous()
            or one.data_ptr() != end
            or one.shape[1:] != first.shape[1:]
        ):
            return torch.cat(weights, dimension), widths
        end += one.nbytes
    if first.untyped_storage().data_ptr() != weights[-1].untyped_storage().data_ptr():
        return torch.cat(weights, dimension), widths
    return first.detach().as_strided(
        (sum(widths), first.shape[1]), first.stride(), first.storage_offset()
    ), widths
