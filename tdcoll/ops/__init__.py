# SPDX-License-Identifier: Apache-2.0
"""tdcoll's collectives as operators of PyTorch's, which ``torch.compile`` traces: ``import tdcoll.ops``.

``torch.ops.tdcoll.all_gather``, the other dense collectives and ``all_reduce_rms_norm`` are functional: they return new
tensors and write to no argument. The group is a string (:func:`group_name`). See ``docs/fused.md``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.call import derivative, make, spec_of
from tdcoll.calls.spec import Collective
from tdcoll.fused.op import all_reduce_rms_norm as _all_reduce_rms_norm
from tdcoll.primitives.reduce import operation_name

__all__ = ["all_reduce_rms_norm", "group_name", "operators"]


# ---------------------------------------------------------------------- groups


def group_name(group: runtime.Group = None) -> str:
    """Return the string that names a group in calls of the operators.

    Args:
        group: None: all ranks. For a ProcessGroup, PyTorch's name. For global ranks, these with a comma after each.

    Raises:
        NotInitializedError: (of ranks) before ``tdcoll.initialize()``.
        TypeError, ValueError: it is none of these, or this process is not a member.
    """
    if group is None:
        return ""
    if isinstance(group, dist.ProcessGroup):
        return str(group.group_name)
    return ",".join(map(str, runtime.current().ranks_of(group))) + ","


def _named(name: str) -> runtime.Group:
    """Return the group of a name."""
    arguments.instance("group", name, str, "a str, see tdcoll.ops.group_name")
    if not name:
        return None
    ranks = name.rstrip(",").split(",")
    if name.endswith(",") and all(rank.isdecimal() for rank in ranks):
        return [int(rank) for rank in ranks]
    try:
        found: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        return found
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"group must be what tdcoll.ops.group_name returns; got {name!r}: {error}") from None


def _world(name: str) -> int:
    return len(runtime.current().ranks_of(_named(name)))


# ---------------------------------------------------------------------- operators


def _operator(name: str) -> Any:
    """Make the operator of a dense collective: its call, the shape of its result, and its derivative."""
    spec = spec_of(name)
    options, defaults = ("str op='sum', ", ("sum", "")) if spec.reduces else ("", ("",))

    def op_and_group(*given: str) -> tuple[str | None, str]:
        *op, group = (*given, *defaults[len(given) :])  # PyTorch leaves out arguments that equal their defaults
        return op[0] if op else None, group

    def call(x: torch.Tensor, *given: str) -> torch.Tensor:
        op, group = op_and_group(*given)
        x = x.detach().contiguous()  # the operator has the derivative
        return make(spec, x, op=op, group=_named(group))

    def shaped(x: torch.Tensor, *given: str) -> torch.Tensor:
        world = _world(op_and_group(*given)[1])
        if not (shapes := spec.results(x.shape, world)):
            raise ValueError(f"x's first dimension must be divisible by the {world} rank(s); got {list(x.shape)}")
        return x.new_empty(shapes[0])

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        def adjoint(spec: Collective, grad: torch.Tensor, op: str | None) -> torch.Tensor:
            made: torch.Tensor = operators[spec.name](grad, *([op] if op else []), ctx.group)
            return made

        return derivative(spec, grad, ctx.op, _world(ctx.group), adjoint), *ctx.others

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        op, ctx.group = op_and_group(*inputs[1:])
        ctx.op = operation_name(op)
        ctx.others = (None,) * (len(inputs) - 1)

    schema = f"(Tensor x, {options}str group='') -> Tensor"
    made: Any = torch.library.custom_op(f"tdcoll::{name}", call, mutates_args=(), schema=schema)
    made.register_fake(shaped)
    made.register_autograd(backward, setup_context=remember)
    return made


operators = {name: _operator(name) for name in COLLECTIVES}
"""The operators of the dense collectives, by name: ``(x, group="")``, of reductions ``(x, op="sum", group="")``.

They return the same as the functions of ``tdcoll`` of the same name.
"""


@torch.library.custom_op("tdcoll::all_reduce_rms_norm", mutates_args=())
def all_reduce_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, group: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., hidden] -> (normalized, new residual)``; see :func:`tdcoll.fused.all_reduce_rms_norm`."""
    x, residual, weight = (tensor.detach().contiguous() for tensor in (x, residual, weight))
    normalized, new = _all_reduce_rms_norm(x, residual, weight, eps=eps, group=_named(group))
    return normalized, new


@all_reduce_rms_norm.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, group: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


# ---------------------------------------------------------------------- derivatives


def _remember_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, _, weight, ctx.eps, ctx.group = inputs
    ctx.save_for_backward(output[1], weight)


def _of_norm(ctx: Any, of_normalized: torch.Tensor, of_new: torch.Tensor) -> tuple[Any, ...]:
    new, weight = ctx.saved_tensors
    value, grad = new.float(), of_normalized.float()
    factor = torch.rsqrt(value.square().mean(-1, keepdim=True) + ctx.eps)
    along = grad * weight.float()
    slope = factor * (along - value * factor.square() * (along * value).mean(-1, keepdim=True))
    of_residual = (slope + of_new.float()).to(new.dtype)
    of_weight = (grad * value * factor).reshape(-1, *weight.shape).sum(0).to(weight.dtype)
    return operators["all_reduce"](of_residual, "sum", ctx.group), of_residual, of_weight, None, None


all_reduce_rms_norm.register_autograd(_of_norm, setup_context=_remember_norm)
