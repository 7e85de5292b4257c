# SPDX-License-Identifier: Apache-2.0
"""Repeated calls take the fast path, and end like first calls whatever has changed since.

Each :class:`Form` is a way to call. A form is called until the fast path knows it. Then one thing
changes, and the call has to end as it does on a context that has never seen such a call: with the
same result, or with the same error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from ranks import on_ranks

import tdcoll
from tdcoll import fused

WORLD = 2
N = 8
FP8 = torch.float8_e4m3fn

Arguments = dict[str, Any]


def mine(*shape: int, turn: int = 0) -> torch.Tensor:
    """Return numbers of this rank and this turn, in ordinary memory."""
    pe = tdcoll.runtime.current().rank
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * pe + 1000 * turn


class Form(NamedTuple):
    """A way to call: the function, and what makes its arguments."""

    call: Callable[..., Any]
    make: Callable[[], Arguments]


def _symmetric(*shape: int) -> torch.Tensor:
    tensor: torch.Tensor = tdcoll.zeros(shape)
    tensor.copy_(mine(*shape))
    return tensor


def _norm(**more: Any) -> Arguments:
    return {"x": mine(2, N), "residual": torch.ones(2, N), "weight": torch.ones(N), **more}


FORMS = {
    "all_gather": Form(tdcoll.all_gather, lambda: {"tensor": mine(N)}),
    "all_gather into out": Form(
        tdcoll.all_gather, lambda: {"tensor": mine(N), "out": torch.empty(WORLD * N)}
    ),
    "all_gather_": Form(tdcoll.all_gather_, lambda: {"tensor": _symmetric(WORLD, N)}),
    "all_gather, symmetric": Form(
        tdcoll.all_gather,
        lambda: {"tensor": mine(N), "out": _symmetric(WORLD, N), "symmetric": True},
    ),
    "reduce_scatter": Form(tdcoll.reduce_scatter, lambda: {"tensor": mine(WORLD, N)}),
    "reduce_scatter into out": Form(
        tdcoll.reduce_scatter, lambda: {"tensor": mine(WORLD, N), "out": torch.empty(N)}
    ),
    "all_reduce": Form(tdcoll.all_reduce, lambda: {"tensor": mine(N)}),
    "all_reduce into out": Form(
        tdcoll.all_reduce, lambda: {"tensor": mine(N), "out": torch.empty(N)}
    ),
    "all_reduce_": Form(tdcoll.all_reduce_, lambda: {"tensor": mine(N)}),
    "all_reduce, symmetric": Form(
        tdcoll.all_reduce, lambda: {"tensor": mine(N), "out": _symmetric(N), "symmetric": True}
    ),
    "norm": Form(fused.all_reduce_rms_norm, _norm),
    "norm, composed": Form(fused.all_reduce_rms_norm, lambda: _norm(algorithm="composed")),
    "norm in place": Form(fused.all_reduce_rms_norm, lambda: _norm(in_place=True, eps=1)),
    "norm in fp8": Form(fused.all_reduce_rms_norm, lambda: _norm(out_dtype=FP8)),
    "norm in fp8 with a scale": Form(
        fused.all_reduce_rms_norm, lambda: _norm(out_dtype=FP8, scale=torch.ones(1))
    ),
}


def _shown(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_shown(one) for one in value]
    return value.dtype, value.shape, value.float().tolist()


def outcome(form: Form, ctx: Any, arguments: Arguments) -> Any:
    """Return the call's result, or its error."""
    try:
        return _shown(form.call(ctx=ctx, **arguments))
    except Exception as error:
        return type(error), str(error)


def _failed(outcome: Any) -> bool:
    return isinstance(outcome, tuple) and isinstance(outcome[0], type)


class Spy:
    """Counts the calls on a context that don't take the fast path."""

    def __init__(self, ctx: Any) -> None:
        self.slow, self._find_obstacle = 0, ctx.find_obstacle
        ctx.find_obstacle = self

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.slow += 1
        return self._find_obstacle(*given, **named)


def context(**options: Any) -> Any:
    return tdcoll.CollectiveContext(max_bytes_per_rank=1024, **options)


def refill(arguments: Arguments, turn: int = 0) -> Arguments:
    """Write this turn's numbers to where the arguments lie, on all ranks; return the arguments."""
    tdcoll.barrier()
    for key in {"tensor", "x"} & set(arguments):
        arguments[key].copy_(mine(*arguments[key].shape, turn=turn))
    if "residual" in arguments:
        arguments["residual"].fill_(1)
    tdcoll.barrier()
    return arguments


@pytest.mark.parametrize("name", FORMS)
@on_ranks(WORLD)
def test_repeated_calls_take_the_fast_path_and_are_right(pe: int, name: str) -> None:
    form = FORMS[name]
    ctx, arguments = context(), form.make()
    spy = Spy(ctx)
    for turn in range(4):
        # closing it would release memory
        expected = outcome(form, context(), refill(arguments, turn))
        assert not _failed(expected)
        assert outcome(form, ctx, refill(arguments, turn)) == expected
    assert spy.slow == 1


# ---------------------------------------------------------------------- what may change

Change = Callable[[Arguments], Arguments]


def of(key: str, change: Callable[[torch.Tensor], Any]) -> Change:
    """Return a change of one argument."""

    def changed(arguments: Arguments) -> Arguments:
        return {**arguments, key: change(arguments[key])}

    return changed


def _requiring(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_()


def _around(key: str, other: str) -> Change:
    """``key`` lies in the same memory as ``other``, 4 bytes further."""

    def changed(arguments: Arguments) -> Arguments:
        whole = torch.zeros(4 * WORLD * N)
        first, second = arguments[other], arguments[key]
        lower, upper = whole[: first.numel()], whole[1 : 1 + second.numel()]
        lower.copy_(first.reshape(-1))
        return {**arguments, other: lower.view(first.shape), key: upper.view(second.shape)}

    return changed


TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "strided": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "negative": lambda tensor: torch._neg_view(-tensor),
    "sparse": lambda tensor: tensor.to_sparse(),
    "elsewhere": lambda tensor: tensor.to("meta"),
    "of another dtype": lambda tensor: tensor.double(),
    "of another shape": lambda tensor: tensor[..., : N // 2].contiguous(),
    "nested": lambda tensor: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "no tensor": lambda tensor: tensor.tolist(),
    "unaligned": lambda tensor: torch.cat([torch.zeros(1), tensor.reshape(-1)])[1:].view(
        tensor.shape
    ),
}

OTHERS: dict[str, dict[str, Any]] = {
    "unknown algorithm": {"algorithm": "fast"},
    "no algorithm": {"algorithm": ["direct"]},
    "another algorithm": {"algorithm": "direct"},
}
REDUCED: dict[str, dict[str, Any]] = {
    "unknown operation": {"op": "median"},
    "no operation": {"op": ["sum"]},
    "an operation's number": {"op": 0},
    "another operation": {"op": "max"},
    "torch's operation": {"op": torch.distributed.ReduceOp.MAX},
}
SYMMETRIC: dict[str, dict[str, Any]] = {
    "symmetric, a number": {"symmetric": 1},
    "not symmetric, a number": {"symmetric": 0},
}
FUSED: dict[str, dict[str, Any]] = {
    "eps, a bool": {"eps": True},
    "eps, a text": {"eps": "1e-6"},
    "another eps": {"eps": 1e-3},
    "in place, a number": {"in_place": 1},
    "out of place, a number": {"in_place": 0},
    "unknown dtype": {"out_dtype": torch.float16},
    "no dtype": {"out_dtype": "fp8"},
    "a scale": {"scale": torch.ones(1)},
    "a scale of two": {"scale": torch.ones(2)},
    "a scale, a number": {"scale": 1.0},
}


def changes_of(name: str) -> dict[str, Change]:
    """Return what may change in a form, by name."""
    keys: tuple[str, ...] = ("tensor",)
    if "norm" in name:
        keys = ("x", "residual", "weight", *(["scale"] if "scale" in name else []))
    elif "into out" in name or name in ("all_reduce, symmetric", "all_gather, symmetric"):
        keys = ("tensor", "out")
    changes: dict[str, Change] = {
        f"{key} {how}": of(key, change) for key in keys for how, change in TENSORS.items()
    }
    others = dict(OTHERS)
    if "norm" in name:
        others |= FUSED
        changes["residual overlaps x"] = _around("residual", "x")
    elif "reduce" in name:
        others |= REDUCED if "scatter" in name else REDUCED | SYMMETRIC
    if "into out" in name:
        changes["out overlaps tensor"] = _around("out", "tensor")
    if name != "all_gather_":
        changes |= {f"{key} requires grad": of(key, _requiring) for key in keys}
    return changes | {
        how: functools.partial(lambda new, given: {**given, **new}, new)
        for how, new in others.items()
    }


@pytest.mark.parametrize("name", FORMS)
@on_ranks(WORLD, backend="thread")  # greenlets share grad mode
def test_a_repeated_call_ends_like_a_first_one_whatever_has_changed(pe: int, name: str) -> None:
    """One context knows the call that is changed, and makes it again after each call that is made;
    the other is new."""
    form, changes = FORMS[name], changes_of(name)
    assert len(changes) > 10
    ctx, arguments, expected = context(), form.make(), None
    spy = Spy(ctx)
    outcome(form, ctx, refill(arguments))
    for how, change in changes.items():
        if not _failed(expected):
            spy.slow = 0
            outcome(form, ctx, refill(arguments))
            assert spy.slow == 0, f"before {how}"
        expected = outcome(form, context(), change(refill(arguments)))
        assert outcome(form, ctx, change(refill(arguments))) == expected, how


@pytest.mark.parametrize("name", FORMS)
@on_ranks(WORLD)
def test_a_context_that_must_not_be_used_any_more_refuses_repeated_calls(
    pe: int, name: str
) -> None:
    form = FORMS[name]
    for close in (lambda ctx: ctx.close(), lambda ctx: ctx.refuse("a test has used it up")):
        ctx, arguments = context(), form.make()
        for _ in range(2):
            outcome(form, ctx, refill(arguments))
        close(ctx)
        kind, said = outcome(form, ctx, arguments)
        assert kind is tdcoll.ContextError
        assert "the context is closed" in said or "a test has used it up" in said
        ctx.close()
