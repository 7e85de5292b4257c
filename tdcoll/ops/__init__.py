# SPDX-License-Identifier: Apache-2.0
"""tdcoll's collectives as operators of PyTorch's, which ``torch.compile`` traces: ``import
tdcoll.ops``.

``torch.ops.tdcoll.all_gather``, the other dense collectives and ``all_reduce_rms_norm`` are
functional: they return new tensors and write to no argument. The group is a string
(:func:`group_name`). See ``docs/fused.md``.

:func:`fusing` is a backend for ``torch.compile`` which replaces an all-reduce, the addition of a
residual and an RMSNorm by ``all_reduce_rms_norm``, matmuls beside collectives by one operator each,
and leaves the rest to Inductor. :func:`parallelize` does the same with the linear layers of a model
that isn't compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.collective import CollectiveOptions, operation_of, spec_of
from tdcoll.calls.gradient import derivative
from tdcoll.calls.run import run
from tdcoll.fused.op import all_reduce_rms_norm as _all_reduce_rms_norm
from tdcoll.fused.policy import takes
from tdcoll.fused.rms_norm import DTYPES
from tdcoll.ops.fusion_report import FusionReport, LeftAsItIs
from tdcoll.ops.groups import group_name, named_group, topology_of, world_of
from tdcoll.ops.layers import parallelize
from tdcoll.ops.matmuls import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from tdcoll.ops.patterns import fuse_matmuls, seen

__all__ = [
    "all_gather_matmul",
    "all_reduce_rms_norm",
    "fuse",
    "fusing",
    "group_name",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "operators",
    "parallelize",
]


# ---------------------------------------------------------------------- operators


def _operator(name: str) -> Any:
    """Make the operator of a dense collective: its call, the shape of its result, and its
    derivative."""
    operation = operation_of(name)
    spec = operation.spec
    defaults: dict[str, Any] = {}
    schema = "(Tensor x, str group='') -> Tensor"
    if spec.reduces:
        defaults["op"] = "sum"
        schema = "(Tensor x, str op='sum', str group='') -> Tensor"
    elif spec.rooted:
        defaults["root"] = 0
        schema = "(Tensor x, int root=0, str group='') -> Tensor"
    defaults["group"] = ""

    def options_and_group(*args: Any) -> tuple[CollectiveOptions, str]:
        # PyTorch leaves out arguments that equal their defaults
        named = {**defaults, **dict(zip(defaults, args, strict=False))}
        group = named.pop("group")
        return CollectiveOptions(**named), group

    def call(x: torch.Tensor, *args: Any) -> torch.Tensor:
        options, group = options_and_group(*args)
        x = x.detach().contiguous()  # the operator has the derivative
        result: torch.Tensor = run(operation, (x,), options, named_group(group))
        return result

    def shaped(x: torch.Tensor, *args: Any) -> torch.Tensor:
        world = world_of(options_and_group(*args)[1])
        shapes = spec.results(x.shape, world)
        if not shapes:
            raise ValueError(
                f"x's first dimension must be divisible by the {world} rank(s); got {list(x.shape)}"
            )
        return x.new_empty(shapes[0])

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        def call_adjoint(name: str, grad: torch.Tensor, op: str | None) -> torch.Tensor:
            made: torch.Tensor = operators[name](grad, *([op] if op else []), ctx.group)
            return made

        adjoint = spec_of(spec.adjoint)
        topology = topology_of(ctx.group)
        made = derivative(spec, adjoint, grad, ctx.options, topology, call_adjoint)
        return made, *ctx.others

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.options, ctx.group = options_and_group(*inputs[1:])
        ctx.others = (None,) * (len(inputs) - 1)

    made: Any = torch.library.custom_op(f"tdcoll::{name}", call, mutates_args=(), schema=schema)
    made.register_fake(shaped)
    made.register_autograd(backward, setup_context=remember)
    return made


operators = {name: _operator(name) for name in COLLECTIVES}
"""The operators of the dense collectives, by name: ``(x, group="")``, of reductions ``(x, op="sum",
group="")``, of broadcasts ``(x, root=0, group="")``.

They return the same as the functions of ``tdcoll`` of the same name.
"""


@torch.library.custom_op("tdcoll::all_reduce_rms_norm", mutates_args=())
def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    group: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., hidden] -> (normalized, new residual)``; see
    :func:`tdcoll.fused.all_reduce_rms_norm`."""
    x, residual, weight = (tensor.detach().contiguous() for tensor in (x, residual, weight))
    normalized, new = _all_reduce_rms_norm(x, residual, weight, eps=eps, group=named_group(group))
    return normalized, new


@all_reduce_rms_norm.register_fake
def _(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    group: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


# ---------------------------------------------------------------------- derivatives


def _remember_norm(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    _, _, weight, ctx.eps, ctx.group = inputs
    ctx.save_for_backward(output[1], weight)


def _of_norm(ctx: Any, of_normalized: torch.Tensor, of_new: torch.Tensor) -> tuple[Any, ...]:
    new, weight = ctx.saved_tensors
    value = new.float()
    grad = of_normalized.float()
    factor = torch.rsqrt(value.square().mean(-1, keepdim=True) + ctx.eps)
    along = grad * weight.float()
    slope = factor * (along - value * factor.square() * (along * value).mean(-1, keepdim=True))
    of_residual = (slope + of_new.float()).to(new.dtype)
    of_weight = (grad * value * factor).reshape(-1, *weight.shape).sum(0).to(weight.dtype)
    return (
        operators["all_reduce"](of_residual, "sum", ctx.group),
        of_residual,
        of_weight,
        None,
        None,
    )


all_reduce_rms_norm.register_autograd(_of_norm, setup_context=_remember_norm)


# ---------------------------------------------------------------------- a pass

_REDUCES = (torch.ops.tdcoll.all_reduce, torch.ops.tdcoll.all_reduce.default)
_ADDS = (operator.add, operator.iadd, torch.add, torch.ops.aten.add.Tensor)
_NORMS = (torch.nn.functional.rms_norm, torch.rms_norm, torch.ops.aten.rms_norm.default)


def fuse(module: fx.GraphModule) -> fx.GraphModule:
    """Replace ``rms_norm(all_reduce(x) + residual)`` by ``all_reduce_rms_norm`` wherever a graph
    has it, and matmuls beside collectives by :mod:`tdcoll.ops.matmuls`, as
    :mod:`tdcoll.ops.patterns` describes.

    The norm is over the last dimension, with a weight of the dtype of ``x``; residual and ``x``
    have one shape and dtype; the sum of the ranks is used for nothing else. (The sum with the
    residual may be.) Nothing else is computed between the three, because it might write in place;
    ``total += residual`` is fused, ``residual += total`` is not. As for the operator, the residual
    has to be the same on all ranks. The new residual keeps its bits; the norm is rounded once.

    Logs at level INFO what was replaced, and which of these patterns were left, with the reason.

    Args:
        module: as ``torch.compile`` gives it to a backend; it is changed.

    Returns:
        ``module``.
    """
    graph = module.graph
    report = FusionReport()
    _fuse_norms(graph, report)
    fuse_matmuls(graph, report)  # behind the norms, which save more
    report.log()
    graph.lint()
    module.recompile()
    return module


def _fuse_norms(graph: fx.Graph, report: FusionReport) -> None:
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    for norm in nodes:
        with report.looking_for("rms_norm(all_reduce + residual)", norm):
            found = _found(norm)
            if found is None:
                continue
            add, reduce, residual, weight, eps = found
            between = [node for node in nodes[place[reduce] + 1 : place[norm]] if node is not add]
            # The inputs of the three move to the place of the addition.
            if place.get(weight, len(nodes)) > place[add]:
                raise LeftAsItIs("the weight is computed behind the addition")
            if any(node.op.startswith("call") for node in between):
                raise LeftAsItIs("something else is computed between the all-reduce and the norm")
            x = reduce.args[0]
            group = reduce.args[2] if len(reduce.args) > 2 else ""
            with graph.inserting_before(add):
                target = torch.ops.tdcoll.all_reduce_rms_norm.default
                both = graph.call_function(target, (x, residual, weight, eps, group))
                normalized, new = (graph.call_function(operator.getitem, (both, i)) for i in (0, 1))
            for old, made in ((norm, normalized), (add, new)):
                made.meta = dict(old.meta)
                old.replace_all_uses_with(made)
            for old in (norm, add, reduce):
                graph.erase_node(old)
            report.fused["all_reduce_rms_norm"] += 1


def _argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _found(norm: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node, float] | None:
    """Return ``(add, all-reduce, residual, weight, eps)`` of a norm that can be fused; None of any
    other node.

    Raises:
        LeftAsItIs: It is the norm of an all-reduce and a residual, and can't be fused.
    """
    if norm.op != "call_function" or norm.target not in _NORMS:
        return None
    add, shape, weight = (
        _argument(norm, i, name) for i, name in enumerate(("input", "normalized_shape", "weight"))
    )
    if not isinstance(add, fx.Node) or add.op != "call_function" or add.target not in _ADDS:
        return None
    addends = [node for node in add.args if isinstance(node, fx.Node)]
    reduces = [node for node in addends if node.op == "call_function" and node.target in _REDUCES]
    if not reduces:
        return None
    if len(add.args) != 2 or len(addends) != 2 or addends[0] is addends[1]:
        raise LeftAsItIs("the residual is no other tensor")
    if add.kwargs.get("alpha", 1) != 1 or "out" in add.kwargs:
        raise LeftAsItIs("the addition has alpha or out")
    free = [reduce for reduce in reduces if len(reduce.users) == 1]
    if not free:
        raise LeftAsItIs("the sum of the ranks has another use")
    reduce = free[0]
    if reduce.kwargs or reduce.args[1:2] not in ((), ("sum",)):
        raise LeftAsItIs("the all-reduce is no sum, or has arguments by keyword")
    # the old residual becomes the new one
    if add.target is operator.iadd and add.args[0] is not reduce:
        raise LeftAsItIs("the addition writes over the residual")
    residual = addends[1] if addends[0] is reduce else addends[0]
    _check_norm(seen(reduce), seen(residual), seen(weight), shape)
    eps = _argument(norm, 3, "eps")
    return (
        add,
        reduce,
        residual,
        weight,
        torch.finfo(torch.float32).eps if eps is None else float(eps),
    )


def _check_norm(
    summed: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    shape: Sequence[int],
) -> None:
    """Raise unless the operator takes the tensors of a norm over ``shape``."""
    if weight is None:
        raise LeftAsItIs("the norm has no weight")
    if summed is None or residual is None:
        raise LeftAsItIs("the graph has no example of the norm's operands")
    hidden = summed.shape[-1]
    if len(shape) != 1 or hidden != shape[0]:
        raise LeftAsItIs(f"the norm is over {list(shape)}, and not over the last dimension")
    if summed.shape != residual.shape:
        raise LeftAsItIs(f"shapes are {list(summed.shape)} and {list(residual.shape)}")
    if not summed.dtype == residual.dtype == weight.dtype:
        raise LeftAsItIs(f"dtypes are {summed.dtype}, {residual.dtype} and {weight.dtype}")
    takes_rows = isinstance(hidden, int) and takes(hidden, summed.dtype.itemsize)
    if summed.dtype not in DTYPES or not takes_rows:
        raise LeftAsItIs(f"kernels take no rows of {hidden} elements of {summed.dtype}")


def _fuse_behind_autograd(graph: fx.Graph) -> None:
    report = FusionReport()
    fuse_matmuls(graph, report, functional=True)
    report.log()


def fusing(
    module: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile by Inductor after :func:`fuse`: a backend, for ``torch.compile(model,
    backend=tdcoll.ops.fusing)``.

    Args:
        mode, options: those of ``torch.compile``.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    # Collectives of DTensor only appear behind Dynamo, and those of the backward pass as well.
    patches.setdefault("post_grad_custom_pre_pass", _fuse_behind_autograd)
    compiled: Any = compile_fx(fuse(module), list(inputs), config_patches=patches)
    return compiled
