# SPDX-License-Identifier: Apache-2.0
"""Operators of matmuls that communicate, with derivatives: the backward pass of one is another.

With ``y = all_gather(x) @ weight.T`` the gradient of ``x`` is ``reduce_scatter(grad @ weight)``,
and the other way round. The gradient of a weight needs the gathered matrix: of ``x``, which the
forward pass keeps or the backward pass gathers again, or of the gradient, which the backward pass
gathers anyway. If the result has a dtype of its own, its gradient is first cast to that of ``x``.

Gradients are those of the sum of all ranks' losses. A bias is this rank's own, and so is its
gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from tdcoll.fused.matmul import op
from tdcoll.fused.matmul.operation import FP8, columns_of, result_dtype
from tdcoll.ops.groups import named_group, world_of


def _plain(*tensors: torch.Tensor | None) -> list[Any]:
    """Return tensors that kernels can take. The operator has the derivative."""
    return [None if tensor is None else tensor.detach().contiguous() for tensor in tensors]


@torch.library.custom_op("tdcoll::all_gather_matmul", mutates_args=())
def all_gather_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    depth_first: bool = False,
    keep_gathered: bool = False,
    group: str = "",
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[n, ..., depth], [columns, depth] -> ([world * n, ..., columns], gathered x)``.

    See :func:`tdcoll.fused.all_gather_matmul`.

    Args:
        keep_gathered: return the gathered ``x``, which the backward pass then uses. Otherwise the
            second result is empty, and the backward pass gathers again if the weight requires grad.
        x_scale, weight_scale, out_dtype: as for that function. There is no derivative with respect
            to operands of fp8 and their scales.
    """
    x, weight, bias, x_scale, weight_scale = _plain(x, weight, bias, x_scale, weight_scale)
    made = op.all_gather_matmul(
        x,
        weight,
        bias=bias,
        depth_first=depth_first,
        gathered=keep_gathered,
        x_scale=x_scale,
        weight_scale=weight_scale,
        out_dtype=out_dtype,
        group=named_group(group),
    )
    if keep_gathered:
        result, gathered = made
        return result, gathered
    return made, x.new_empty(0)


def _reduction(function: Any, scatters: bool) -> Any:
    """Make the operator of a matmul and a reduction, and the shape of its result.

    Args:
        function: Of :mod:`tdcoll.fused.matmul.op`, which has the operator's name.
        scatters: Whether a rank gets its share of the rows only.
    """

    def call(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        depth_first: bool = False,
        group: str = "",
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        x, weight, bias, x_scale, weight_scale = _plain(x, weight, bias, x_scale, weight_scale)
        made: torch.Tensor = function(
            x,
            weight,
            bias=bias,
            depth_first=depth_first,
            x_scale=x_scale,
            weight_scale=weight_scale,
            out_dtype=out_dtype,
            group=named_group(group),
        )
        return made

    def shaped(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        depth_first: bool = False,
        group: str = "",
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        first = x.shape[0]
        if scatters:
            first = first // world_of(group)
        sizes = (first, *x.shape[1:-1], columns_of(weight, depth_first))
        return x.new_empty(sizes, dtype=result_dtype(x, out_dtype))

    call.__doc__ = f"See :func:`tdcoll.fused.{function.__name__}`."
    operator = torch.library.custom_op(f"tdcoll::{function.__name__}", mutates_args=())(call)
    operator.register_fake(shaped)
    return operator


matmul_reduce_scatter = _reduction(op.matmul_reduce_scatter, scatters=True)
"""``[world * n, ..., depth], [columns, depth] -> [n, ..., columns]``."""

matmul_all_reduce = _reduction(op.matmul_all_reduce, scatters=False)
"""``[n, ..., depth], [columns, depth] -> [n, ..., columns]``."""


# ---------------------------------------------------------------------- shapes


@all_gather_matmul.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    depth_first: bool = False,
    keep_gathered: bool = False,
    group: str = "",
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    first = x.shape[0] * world_of(group)
    sizes = (first, *x.shape[1:-1], columns_of(weight, depth_first))
    result = x.new_empty(sizes, dtype=result_dtype(x, out_dtype))
    return result, x.new_empty((first, *x.shape[1:]) if keep_gathered else (0,))


# ---------------------------------------------------------------------- derivatives


def can_multiply(itemsize: int, depth: int, columns: int, depth_first: bool) -> bool:
    """Return whether the kernels take operands of these sizes: rows of multiples of 16 bytes."""
    return depth * itemsize % 16 == 0 and (not depth_first or columns * itemsize % 16 == 0)


def _takes(grad: torch.Tensor, weight: torch.Tensor, depth_first: bool) -> bool:
    return can_multiply(grad.itemsize, grad.shape[-1], columns_of(weight, depth_first), depth_first)


def _times_weight(grad: torch.Tensor, weight: torch.Tensor, depth_first: bool) -> torch.Tensor:
    """Return the product of a gradient of results with the weight of the forward pass."""
    return torch.matmul(grad, weight.t() if depth_first else weight)


def _of_weight(grad: torch.Tensor, x: torch.Tensor, depth_first: bool) -> torch.Tensor:
    """Return the gradient of a weight, from the gradient of ``x @ weight.T`` and ``x``, both of all
    rows."""
    left = grad.reshape(-1, grad.shape[-1])
    right = x.reshape(-1, x.shape[-1])
    return right.t() @ left if depth_first else left.t() @ right


def _of_bias(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
    # Without a bias, PyTorch may leave the argument out.
    if not ctx.biased or not ctx.needs_input_grad[2]:
        return None
    return grad.reshape(-1, grad.shape[-1]).sum(0)


def _check_differentiable(ctx: Any, x: torch.Tensor, first_scale: int) -> None:
    """Raise ``ValueError`` if a gradient is asked for that operands of fp8 don't have.

    Args:
        first_scale: The place of ``x_scale`` among the arguments; ``weight_scale`` follows.
    """
    places = {"x": 0, "weight": 1, "x_scale": first_scale, "weight_scale": first_scale + 1}
    for name, place in places.items():
        if x.dtype in FP8 and ctx.needs_input_grad[place]:
            raise ValueError(
                f"{name} must not require grad with operands of fp8, which have no derivative; pass "
                f"{name}.detach()"
            )


def _remember_gather(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    x, weight, bias, ctx.depth_first, ctx.kept, ctx.group, *_ = inputs
    _check_differentiable(ctx, x, 6)
    ctx.biased = bias is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if ctx.kept else x, weight)


def _of_gather(
    ctx: Any, grad: torch.Tensor | None, of_gathered: torch.Tensor | None
) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    of_x: torch.Tensor | None = None
    of_weight: torch.Tensor | None = None
    of_bias: torch.Tensor | None = None
    if grad is not None:
        of_bias = _of_bias(ctx, grad)
        grad = grad.to(weight.dtype)
        back = not ctx.depth_first
        if ctx.needs_input_grad[0] and _takes(grad, weight, back):
            of_x = torch.ops.tdcoll.matmul_reduce_scatter(grad, weight, None, back, ctx.group)
        elif ctx.needs_input_grad[0]:
            product = _times_weight(grad, weight, ctx.depth_first)
            of_x = torch.ops.tdcoll.reduce_scatter(product, "sum", ctx.group)
        if ctx.needs_input_grad[1]:
            gathered = x if ctx.kept else torch.ops.tdcoll.all_gather(x, ctx.group)
            of_weight = _of_weight(grad, gathered, ctx.depth_first)
    if ctx.kept and of_gathered is not None and ctx.needs_input_grad[0]:
        more = torch.ops.tdcoll.reduce_scatter(of_gathered, "sum", ctx.group)
        of_x = more if of_x is None else of_x + more
    return of_x, of_weight, of_bias, *[None] * 6


def _remember_scatter(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, ctx.depth_first, ctx.group, *_ = inputs
    _check_differentiable(ctx, x, 5)
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight)


def _of_scatter(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    of_bias = _of_bias(ctx, grad)
    if x.dtype in FP8:  # only the bias has a gradient
        return None, None, of_bias, *[None] * 5
    grad = grad.to(weight.dtype)
    back = not ctx.depth_first
    if _takes(grad, weight, back):
        of_x, gathered = torch.ops.tdcoll.all_gather_matmul(
            grad, weight, None, back, ctx.needs_input_grad[1], ctx.group
        )
    else:
        gathered = torch.ops.tdcoll.all_gather(grad, ctx.group)
        of_x = _times_weight(gathered, weight, ctx.depth_first)
    of_weight = _of_weight(gathered, x, ctx.depth_first) if ctx.needs_input_grad[1] else None
    return of_x, of_weight, of_bias, *[None] * 5


def _of_reduce(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    of_bias = _of_bias(ctx, grad)
    if x.dtype in FP8:  # only the bias has a gradient
        return None, None, of_bias, *[None] * 5
    grad = grad.to(weight.dtype)
    summed = torch.ops.tdcoll.all_reduce(grad, "sum", ctx.group)
    of_x = _times_weight(summed, weight, ctx.depth_first) if ctx.needs_input_grad[0] else None
    of_weight = _of_weight(summed, x, ctx.depth_first) if ctx.needs_input_grad[1] else None
    return of_x, of_weight, of_bias, *[None] * 5


all_gather_matmul.register_autograd(_of_gather, setup_context=_remember_gather)
matmul_reduce_scatter.register_autograd(_of_scatter, setup_context=_remember_scatter)
matmul_all_reduce.register_autograd(_of_reduce, setup_context=_remember_scatter)
