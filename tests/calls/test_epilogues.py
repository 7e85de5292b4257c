# SPDX-License-Identifier: Apache-2.0
"""Calls of all_reduce and reduce_scatter with an epilogue, as users make them: arguments, errors,
what is remembered of a call, and what ranks compare."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

import tdcoll
from tdcoll.base.errors import RankMismatchError
from tdcoll.calls.collective_epilogue import _WithEpilogue
from tdcoll.calls.kernel_launch import KernelLaunch
from tdcoll.language.jit import typed_fields
from tdcoll.testing import World

NAMES = ("all_reduce", "reduce_scatter")
EACH = pytest.mark.parametrize("name", NAMES)


class Residual(NamedTuple):
    """What :func:`add_residual` adds."""

    base: Any
    stride: tl.int64


class Factor(NamedTuple):
    """What :func:`scale` multiplies by."""

    factor: Any


class OtherFactor(NamedTuple):
    """The same for another function."""

    factor: Any


@triton.jit
def add_residual(sums, rows, columns, inside, extra):
    at = extra.base + rows * extra.stride + columns
    return sums + tl.load(at, mask=inside, other=0.0).to(sums.dtype)


@triton.jit
def scale(sums, rows, columns, inside, extra):
    return sums * extra.factor


@triton.jit
def relu(sums, rows, columns, inside, extra):
    return tl.maximum(sums, 0.0)


@triton.jit
def number(sums, rows, columns, inside, extra):
    """The sum's place in the result."""
    return 100.0 * rows + columns


def plus(amount: int) -> Any:
    """One of several epilogues of one name."""
    if amount == 1:

        @triton.jit
        def add(sums, rows, columns, inside, extra):
            return sums + 1

    else:

        @triton.jit
        def add(sums, rows, columns, inside, extra):
            return sums + 2

    return add


def run(host: Callable[[int], None], n_ranks: int = 2, **more: Any) -> None:
    World(n_ranks, heap_bytes=1 << 20, **more).run(host)


def test_the_example_of_an_activation_and_a_residual() -> None:
    def host(pe: int) -> None:
        x = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0]])
        y = tdcoll.all_reduce(x, epilogue=relu)
        assert torch.equal(y, torch.tensor([[2.0, 0.0, 6.0], [0.0, 10.0, 0.0]]))
        residual = torch.arange(6.0).view(2, 3)
        z = tdcoll.all_reduce(x, "mean", epilogue=add_residual, extra=Residual(residual, 3))
        assert torch.equal(z, x + residual)
        part = tdcoll.reduce_scatter(x, epilogue=add_residual, extra=Residual(residual[pe], 3))
        assert torch.equal(part, (2 * x + residual)[pe : pe + 1])

    run(host)


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), ()),
    ((7,), (7,)),
    ((4, 3), (4, 3)),
    ((2, 3, 5), (6, 5)),
    ((0, 5), (0, 5)),
    ((3, 0), (3, 0)),
]


@pytest.mark.parametrize(("shape", "rows_and_columns"), SHAPES, ids=str)
def test_rows_and_columns_are_those_of_the_last_dimension(
    shape: tuple[int, ...], rows_and_columns: tuple[int, ...]
) -> None:
    columns = rows_and_columns[-1] if rows_and_columns else 1
    rows = rows_and_columns[0] if len(rows_and_columns) == 2 else 1
    wanted = (100.0 * torch.arange(rows)[:, None] + torch.arange(columns)).reshape(shape)

    def host(pe: int) -> None:
        got = tdcoll.all_reduce(torch.zeros(shape), epilogue=number)
        assert torch.equal(got, wanted)
        if shape:
            x = torch.zeros(2 * shape[0], *shape[1:])
            got = tdcoll.reduce_scatter(x, epilogue=number)
            assert torch.equal(got, wanted)

    run(host)


def test_a_result_without_the_first_dimension() -> None:
    """Of a tensor with a row for each rank."""

    def host(pe: int) -> None:
        out = torch.empty(5)
        tdcoll.reduce_scatter(torch.zeros(2, 5), out=out, epilogue=number)
        assert torch.equal(out, torch.arange(5.0))
        scalar = torch.empty(())
        tdcoll.reduce_scatter(torch.zeros(2), out=scalar, epilogue=number)
        assert scalar.item() == 0

    run(host)


def test_in_place_in_groups_and_into_symmetric_results() -> None:
    def host(pe: int) -> None:
        residual = torch.arange(12.0).view(3, 4)
        more = {"epilogue": add_residual, "extra": Residual(residual, 4)}
        for _ in range(2):
            x = torch.ones(3, 4)
            assert tdcoll.all_reduce_(x, **more) is x
            assert torch.equal(x, 4 + residual)
        symmetric = tdcoll.empty((3, 4), torch.float32)
        for algorithm in ("direct", "loop", "ce"):
            with tdcoll.CollectiveContext() as ctx:
                for _ in range(3):
                    tdcoll.all_reduce(
                        torch.ones(3, 4), out=symmetric, symmetric=True, algorithm=algorithm,
                        ctx=ctx, **more,
                    )  # fmt: skip
                    assert torch.equal(symmetric, 4 + residual)
                    tdcoll.barrier()
        if pe in (1, 3):
            got = tdcoll.all_reduce(torch.ones(3, 4), group=[3, 1], **more)
            assert torch.equal(got, 2 + residual)

    run(host, 4)


def test_a_symmetric_residual_may_be_the_tensor() -> None:
    """What an epilogue reads may overlap whatever no call writes to."""

    def host(pe: int) -> None:
        x = torch.full((2, 8), 3.0)
        got = tdcoll.all_reduce(x, epilogue=add_residual, extra=Residual(x, 8))
        assert (got == 9).all()

    run(host)


# ---------------------------------------------------------------------- what is remembered


def prepared_calls(ctx: Any) -> list[Any]:
    """The calls with an epilogue that a context remembers."""
    return [call for call in ctx.cache.values() if isinstance(call, _WithEpilogue)]


@EACH
def test_functions_of_one_name_are_told_apart(name: str) -> None:
    def host(pe: int) -> None:
        call = getattr(tdcoll, name)
        first = plus(1)
        second = plus(2)
        assert first.__name__ == second.__name__
        with tdcoll.CollectiveContext() as ctx:
            x = torch.ones(4)
            for _ in range(2):
                assert (call(x, ctx=ctx) == 2).all()
                assert (call(x, ctx=ctx, epilogue=first) == 3).all()
                assert (call(x, ctx=ctx, epilogue=second) == 4).all()
            assert len(prepared_calls(ctx)) == 2

    run(host)


@EACH
def test_numbers_and_tensors_of_extra_are_told_apart(name: str) -> None:
    """Numbers by their type and sign; tensors by their dtype and alignment, and not by their
    values or addresses."""

    def host(pe: int) -> None:
        call = getattr(tdcoll, name)
        with tdcoll.CollectiveContext() as ctx:
            x = torch.ones(4)
            for factor in (2, 2.0, 3, 0.0, -0.0, True, 1):
                for kind in (Factor, OtherFactor):
                    for _ in range(2):
                        got = call(x, ctx=ctx, epilogue=scale, extra=kind(factor))
                        assert (got == 2 * factor).all()
                        assert not torch.signbit(got).any()
            assert len(prepared_calls(ctx)) == 14
        with tdcoll.CollectiveContext() as ctx:
            for dtype in (torch.float32, torch.bfloat16):
                for shift in (0, 1, 0, 3, 0):
                    residual = torch.full((7,), 4.0 + shift, dtype=dtype)[shift : shift + 4]
                    extra = Residual(residual, 4)
                    got = call(x, ctx=ctx, epilogue=add_residual, extra=extra)
                    assert (got == 6 + shift).all()
            assert len(prepared_calls(ctx)) == 4

    run(host)


@EACH
def test_rows_of_other_widths_are_other_calls(name: str) -> None:
    def host(pe: int) -> None:
        call = getattr(tdcoll, name)
        with tdcoll.CollectiveContext() as ctx:
            for shape in ((4, 6), (6, 4), (24,), (4, 6)):
                got = call(torch.zeros(shape), ctx=ctx, epilogue=number)
                rows = math.prod(got.shape[:-1])
                wanted = 100.0 * torch.arange(rows)[:, None] + torch.arange(got.shape[-1])
                assert torch.equal(got, wanted.view(got.shape))

    run(host)


def test_kernels_are_the_same_on_all_ranks_whatever_is_aligned() -> None:
    """So that ranks with a budget of thread blocks wait for each other's loads together."""

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_blocks=8) as ctx:

            def variant(dtype: torch.dtype, shift: int, stride: int, **more: Any) -> Any:
                residual = torch.zeros(9, dtype=dtype)[shift : shift + 8]
                extra = Residual(residual, stride)
                before = set(ctx.cache)
                x = torch.ones(8)
                tdcoll.all_reduce(x, ctx=ctx, epilogue=add_residual, extra=extra, **more)
                calls = prepared_calls(ctx)
                assert len(set(ctx.cache) - before) >= 1
                return calls[-1].variant

            for algorithm in ("two_shot", "direct", "ce"):
                usual = variant(torch.float32, 0, 8, algorithm=algorithm)
                assert variant(torch.float32, 1, 8, algorithm=algorithm) == usual
                assert variant(torch.float32, 0, 4, algorithm=algorithm) == usual
                assert variant(torch.bfloat16, 0, 8, algorithm=algorithm) != usual

    run(host)


class Typed(NamedTuple):
    """Numbers, of which one has a type of its own."""

    factor: Any
    shift: Any
    plain: Any


Typed.__annotations__["shift"] = tl.int32  # as without annotations from the future


def test_contexts_with_a_budget_have_one_kernel_for_all_numbers() -> None:
    """Launches get them with a type that Triton doesn't specialise on; booleans, floats and numbers
    with a type of their own stay as they are. ``compile/compiling_epilogues.py`` counts kernels."""

    @triton.jit
    def shifted(sums, rows, columns, inside, extra):
        return sums * extra.factor + extra.shift + extra.plain

    seen: list[dict[str, Any]] = []

    def note(
        launch: KernelLaunch, kernel: Any, blocks: Any, arguments: Any, *rest: Any, **more: Any
    ) -> None:
        extra = arguments.get("extra")
        if extra is not None:
            seen.append(typed_fields(type(extra)))
        real(launch, kernel, blocks, arguments, *rest, **more)

    def host(pe: int) -> None:
        for max_blocks in (None, 8):
            with tdcoll.CollectiveContext(max_blocks=max_blocks) as ctx:
                for number in (1, 16, 3):
                    extra = Typed(number, 2, True)
                    got = tdcoll.all_reduce(torch.ones(4), epilogue=shifted, extra=extra, ctx=ctx)
                    assert (got == number + 3).all()
                got = tdcoll.all_reduce(
                    torch.ones(4), epilogue=shifted, extra=Typed(0.5, 2, 1), ctx=ctx
                )
                assert (got == 3.5).all()

    real = KernelLaunch.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelLaunch, "__init__", note)
        run(host, 1)
    own = {"shift": tl.int32}
    usual = [own] * 4
    assert seen == [*usual, *[{**own, "factor": tl.int64}] * 3, {**own, "plain": tl.int64}]


# ---------------------------------------------------------------------- errors

X = torch.ones(4, 8)
WRONG: list[Any] = [
    ({"epilogue": abs}, TypeError, "epilogue must be a function of triton.jit or None; got <built"),
    ({"epilogue": None}, TypeError, "extra must be a NamedTuple for an epilogue, or None; got Res"),
    ({"extra": (X, 8)}, TypeError, "extra must be a NamedTuple for an epilogue, or None; got"),
    (
        {"tensor": torch.nested.nested_tensor([torch.ones(8), torch.ones(4)])},
        ValueError,
        "tensor must be an ordinary tensor; got a nested one",
    ),
    ({"extra": Residual([X], 8)}, TypeError, r"extra\.base must be a tensor, a number, a tl"),
    ({"extra": 3}, TypeError, "extra must be a NamedTuple for an epilogue, or None; got 3"),
    (
        {"extra": Residual(X.to(torch.complex64), 8)},
        TypeError,
        r"extra\.base must be of a dtype that Triton has; got torch.complex64",
    ),
    (
        {"epilogue": triton.autotune([triton.Config({})], [])(add_residual)},
        TypeError,
        "epilogue must be a function of triton.jit or None; got <triton",
    ),
    ({"extra": Residual(X.T, 8)}, ValueError, r"extra\.base must be contiguous"),
    ({"extra": Residual(X.to("meta"), 8)}, ValueError, r"extra\.base must be on cpu"),
    (
        {"extra": Residual(X.clone().requires_grad_(), 8)},
        ValueError,
        r"extra\.base must not require grad, since a call with an epilogue has no derivative",
    ),
    (
        {"tensor": X.clone().requires_grad_()},
        ValueError,
        r"tensor must not require grad, since a call with an epilogue has no derivative; pass "
        r"tensor\.detach\(\)",
    ),
    ({"out": "extra"}, ValueError, r"out must not overlap extra\.base"),
    ({"tensor": X.to(torch.int16)}, TypeError, "tensor must be of float16"),
    ({"op": "xor"}, ValueError, "op must be one of sum"),
    ({"algorithm": "ring"}, ValueError, "algorithm must be one of auto"),
    ({"algorithm": 3}, TypeError, "algorithm must be a str, got 3"),
    ({"ctx": 3}, TypeError, "ctx must be a tdcoll.CollectiveContext"),
]


@EACH
@pytest.mark.parametrize(("change", "kind", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_arguments(
    name: str, change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    def host(pe: int) -> None:
        call = getattr(tdcoll, name)
        with tdcoll.CollectiveContext() as ctx:
            residual = torch.zeros(4, 8)
            good = {
                "tensor": X, "epilogue": add_residual, "extra": Residual(residual, 8), "ctx": ctx,
            }  # fmt: skip
            wrong = {**good, **change}
            if wrong.get("out") == "extra":
                wrong["out"] = residual if name == "all_reduce" else residual[1:3]
            for _ in range(2):  # also when a call like it was made before
                with pytest.raises(kind, match=message):
                    call(**wrong)
                call(**good)
            ctx.check()

    run(host)


def test_an_overlap_and_a_gradient_that_come_later() -> None:
    """The fast path looks, too."""

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(debug=False) as ctx:
            residual = torch.zeros(4, 8)
            leaf = torch.zeros(4, 8, requires_grad=True)

            def call(out: torch.Tensor, read: torch.Tensor, x: torch.Tensor = X) -> None:
                extra = Residual(read, 8)
                tdcoll.all_reduce(x, out=out, epilogue=add_residual, extra=extra, ctx=ctx)

            for _ in range(2):
                call(torch.empty(4, 8), residual)
                with pytest.raises(ValueError, match=r"out must not overlap extra\.base"):
                    call(residual, residual)
                with pytest.raises(ValueError, match=r"extra\.base must not require grad"):
                    call(torch.empty(4, 8), leaf)
                with pytest.raises(ValueError, match="tensor must not require grad"):
                    call(torch.empty(4, 8), residual, leaf)
                with torch.no_grad():
                    call(torch.empty(4, 8), leaf, leaf)

    run(host)


@EACH
def test_ranks_that_disagree(name: str) -> None:
    def host(pe: int) -> None:
        call = getattr(tdcoll, name)
        with tdcoll.CollectiveContext(debug=True) as ctx:

            def disagree(of_first: dict[str, Any], of_second: dict[str, Any], *said: str) -> None:
                arguments = {"tensor": X, **(of_second if pe else of_first)}
                for one in said:
                    with pytest.raises(RankMismatchError, match=f"epilogue.*{one}"):
                        call(ctx=ctx, **arguments)

            disagree({"epilogue": relu}, {}, r"relu \(\w{8}\) for rows of 8", "None")
            disagree({}, {"epilogue": relu}, r"relu \(\w{8}\) for rows of 8", "None")
            disagree({"epilogue": plus(1)}, {"epilogue": plus(2)}, r"add \(\w{8}\)")
            by_two = {"epilogue": scale, "extra": Factor(2)}
            of_float = {"epilogue": scale, "extra": Factor(2.0)}
            disagree(by_two, of_float, "Factor, int", "Factor, float")
            disagree(by_two, {"epilogue": scale, "extra": OtherFactor(2)}, "OtherFactor, int")
            disagree({"epilogue": relu}, {"epilogue": relu, "tensor": X.view(8, 4)}, "rows of 4")
            by_rank = {"epilogue": scale, "extra": Factor(3 + pe)}
            if name == "all_reduce":
                disagree(by_rank, by_rank, "factor=3", "factor=4")
            else:  # whose results differ between ranks
                call(X, ctx=ctx, **by_rank)
            call(X, ctx=ctx, epilogue=relu)

    run(host)


def test_an_explicit_algorithm_that_does_not_support_a_call() -> None:
    """As without an epilogue: every algorithm has it."""

    def host(pe: int) -> None:
        with pytest.raises(ValueError, match="algorithm='2d' needs"):
            tdcoll.all_reduce(X, epilogue=relu, algorithm="2d")

    run(host)


class Choice(NamedTuple):
    """What :func:`choose` chooses by: a constant."""

    n: Any


@triton.jit
def choose(sums, rows, columns, inside, extra):
    if extra.n == 1:
        result = sums * 10
    else:
        result = sums
    return result


def test_constants_of_one_text_are_told_apart() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(debug=False) as ctx:
            for n, factor in ((1, 10), ("1", 1), (1, 10), (True, 10), ("1", 1)):
                extra = Choice(tl.constexpr(n))
                got = tdcoll.all_reduce(torch.ones(4), epilogue=choose, extra=extra, ctx=ctx)
                assert (got == 2 * factor).all(), (n, got)

    run(host)


@pytest.mark.parametrize("wrong", [Residual([X], 8), 3, (X, 8)], ids=str)
@EACH
def test_a_wrong_tuple_of_one_rank_is_no_wait_of_the_others(name: str, wrong: Any) -> None:
    """Ranks compare before one refuses."""

    def host(pe: int) -> None:
        call = getattr(tdcoll, name)
        with tdcoll.CollectiveContext(debug=True) as ctx:
            extra = wrong if pe == 1 else Residual(torch.zeros(4, 8), 8)
            with pytest.raises((TypeError, RankMismatchError), match="extra"):
                call(X, epilogue=add_residual, extra=extra, ctx=ctx)
            call(X, epilogue=add_residual, extra=Residual(torch.zeros(4, 8), 8), ctx=ctx)
            ctx.check()

    run(host)
