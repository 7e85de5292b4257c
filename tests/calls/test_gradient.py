# SPDX-License-Identifier: Apache-2.0
"""Gradients of own calls. Backward passes are made on threads: greenlets share grad mode and the
engine's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch.distributed import ReduceOp

import tdcoll
import tdcoll.distributed
from tdcoll.testing import World

WORLD = 3


everywhere = on_ranks(WORLD, heap_bytes=1 << 25, backend="thread")


def of(rank: int, numel: int, seed: int = 0) -> torch.Tensor:
    """Integers, so that sums are exact."""
    return ((torch.arange(numel) * 5 + 7 * rank + seed) % 11 - 5).float()


Call = Callable[[torch.Tensor, Any], torch.Tensor]
CALLS: dict[str, tuple[Call, int, Callable[[int, list[torch.Tensor]], torch.Tensor]]] = {
    "all_gather": (lambda x, ctx: tdcoll.all_gather(x, ctx=ctx), 6, lambda r, xs: torch.cat(xs)),
    "reduce_scatter": (lambda x, ctx: tdcoll.reduce_scatter(x, ctx=ctx), 18, lambda r, xs: sum(xs)[6 * r : 6 * r + 6]),
    "reduce_scatter, mean": (
        lambda x, ctx: tdcoll.reduce_scatter(x, "mean", ctx=ctx), 18, lambda r, xs: sum(xs)[6 * r : 6 * r + 6] / WORLD,
    ),
    "all_reduce": (lambda x, ctx: tdcoll.all_reduce(x, ctx=ctx), 6, lambda r, xs: sum(xs)),
    "all_reduce, AVG": (
        lambda x, ctx: tdcoll.all_reduce(x, ReduceOp.AVG, ctx=ctx), 6, lambda r, xs: sum(xs) / WORLD,
    ),
    "broadcast": (lambda x, ctx: tdcoll.broadcast(x, 1, ctx=ctx), 6, lambda r, xs: xs[1] + 0 * sum(xs)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "room"),
    [
        *((name, 64) for name in CALLS),
        *((name, None) for name in CALLS),  # on contexts of tdcoll's own
        ("reduce_scatter", 8),  # whose derivative is three all-gathers
        ("reduce_scatter, mean", 16),
    ],
)
@everywhere
def test_as_torch_has_them_of_the_same_arithmetic(pe: int, name: str, room: int | None) -> None:
    """Of the sum over ranks of what each computes; the second and third call take the fast path
    without a gradient."""
    call, numel, whole = CALLS[name]
    theirs = [of(r, numel).requires_grad_() for r in range(WORLD)]
    made = [whole(r, theirs) for r in range(WORLD)]
    sum((made[r].square() * of(r, made[r].numel(), 3)).sum() for r in range(WORLD)).backward()
    ctx = None if room is None else tdcoll.CollectiveContext(max_bytes_per_rank=room)
    for _ in range(3):
        plain = call(of(pe, numel), ctx)
        assert not plain.requires_grad
        x = of(pe, numel).requires_grad_()
        got = call(x, ctx)
        assert torch.equal(got, plain)
        assert got.grad_fn is not None
        (got.square() * of(pe, got.numel(), 3)).sum().backward()
        torch.testing.assert_close(x.grad, theirs[pe].grad)
        with torch.no_grad():
            assert not call(x, ctx).requires_grad
    if ctx is not None:
        ctx.close()


@everywhere
def test_derivatives_of_derivatives(pe: int) -> None:
    theirs = [of(r, 4).requires_grad_() for r in range(WORLD)]
    loss = sum(sum(theirs).pow(3).sum() for _ in range(WORLD))
    first = torch.autograd.grad(loss, theirs, create_graph=True)
    second = torch.autograd.grad(sum(part.square().sum() for part in first), theirs)
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        x = of(pe, 4).requires_grad_()
        (once,) = torch.autograd.grad(
            tdcoll.all_reduce(x, ctx=ctx).pow(3).sum(), x, create_graph=True
        )
        assert torch.equal(once, first[pe])
        (twice,) = torch.autograd.grad(once.square().sum(), x)
        assert torch.equal(twice, second[pe])


@everywhere
def test_shapes_and_results_that_are_changed_in_place(pe: int) -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        x = torch.tensor(2.0 + pe, requires_grad=True)
        got = tdcoll.all_gather(x, ctx=ctx)
        got *= 2.0
        got[pe].backward()  # of one number, so that the gradient of the others is expanded zeros
        assert x.grad is not None
        assert x.grad.tolist() == 2.0
        grid = torch.ones(2 * WORLD, 2, requires_grad=True)
        tdcoll.reduce_scatter(grid * 3, ctx=ctx).sum().backward()
        assert torch.equal(grid.grad, torch.full((2 * WORLD, 2), 3.0))  # type: ignore[arg-type]


def test_a_forward_pass_leaves_the_other_ranks_alone() -> None:
    """Whose host thread blocks are greenlets of the same thread."""
    pytest.importorskip("greenlet")

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
            for call in (tdcoll.all_gather, tdcoll.reduce_scatter, tdcoll.all_reduce):
                assert call(of(pe, 6).requires_grad_(), ctx=ctx).requires_grad
                assert torch.is_grad_enabled()

    World(WORLD, heap_bytes=1 << 24, backend="greenlet", seed=3).run(host)


@everywhere
def test_gradients_of_complex_tensors(pe: int) -> None:
    """Also such as autograd has conjugated lazily."""
    with tdcoll.CollectiveContext(max_bytes_per_rank=1024) as ctx:
        for call, n in ((tdcoll.all_gather, 2), (tdcoll.all_to_all, 2 * WORLD)):
            x = torch.full((n,), 1 + 2j, requires_grad=True)
            (call(x, ctx=ctx).conj() * (3 + 1j)).real.sum().backward()
            each = WORLD if call is tdcoll.all_gather else 1
            assert torch.equal(x.grad, torch.full((n,), each * (3 + 1j)))  # type: ignore[arg-type]


def refusals(x: torch.Tensor, ctx: Any) -> list[Callable[[], object]]:
    n = x.numel()
    return [
        lambda: tdcoll.all_gather(x, ctx=ctx, out=torch.empty(WORLD * n)),
        lambda: tdcoll.reduce_scatter(x, ctx=ctx, out=torch.empty(n // WORLD)),
        lambda: tdcoll.all_reduce(x, ctx=ctx, out=torch.empty(n)),
        lambda: tdcoll.all_reduce_(x, ctx=ctx),
    ]


@everywhere
def test_a_given_result_has_none(pe: int) -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        x = of(pe, 6).requires_grad_()
        for seen in (x.detach(), x):  # the second calls would take the fast path
            for i, call in enumerate(refusals(seen, ctx)):
                if seen is x:
                    with pytest.raises(
                        ValueError, match=r"tensor must not require grad .* tensor\.detach\(\)"
                    ):
                        call()
                    with torch.no_grad():
                        call()
                elif i < 3:
                    call()
        total = sum(of(r, 6) for r in range(WORLD))
        assert torch.equal(x, total)  # by the calls that were not refused


@everywhere
def test_in_debug_mode_it_is_refused_on_all_ranks(pe: int) -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=64, debug=True) as ctx:
        x = of(pe, 6).requires_grad_(pe == 1)
        for call in refusals(x, ctx):
            with pytest.raises(
                ValueError if pe == 1 else tdcoll.RankMismatchError, match="must not require grad"
            ):
                call()


@pytest.mark.parametrize("call", [tdcoll.all_gather, tdcoll.all_reduce, tdcoll.reduce_scatter])
@everywhere
def test_debug_mode_finds_ranks_without_a_backward_pass(pe: int, call: Any) -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=64, debug=True) as ctx:
        with pytest.raises(tdcoll.RankMismatchError, match="differ in requires_grad"):
            call(of(pe, 6).requires_grad_(pe == 1), ctx=ctx)
        call(of(pe, 6).requires_grad_(), ctx=ctx).sum().backward()
        ctx.check()


@everywhere
def test_drop_ins_write_as_torchs_do(pe: int) -> None:
    x = of(pe, 6).requires_grad_()
    out, part = torch.empty(6 * WORLD), torch.empty(2)
    tdcoll.distributed.all_gather_into_tensor(out, x)
    tdcoll.distributed.reduce_scatter_tensor(part, x)
    assert not out.requires_grad
    assert not part.requires_grad
    assert torch.equal(out, torch.cat([of(r, 6) for r in range(WORLD)]))
    tdcoll.distributed.all_reduce(x)
    assert torch.equal(x, sum(of(r, 6) for r in range(WORLD)))


@everywhere
def test_operations_without_a_derivative(pe: int) -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        for call, name in (
            (tdcoll.all_reduce, "all_reduce"),
            (tdcoll.reduce_scatter, "reduce_scatter"),
        ):
            made = call(of(pe, 6).requires_grad_(), "max", ctx=ctx)
            with pytest.raises(
                ValueError,
                match=f"'sum' or 'mean' where .* through tdcoll.{name}; got 'max'. Pass tensor.detach",
            ):
                made.sum().backward()
