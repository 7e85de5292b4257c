# SPDX-License-Identifier: Apache-2.0
"""Matmuls that communicate with ranks that die, come late or disagree, and with memory that calls
can't take or that moves between calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from exploring import explore
from tiers import seeds

import tdcoll
from tdcoll.base.errors import RankMismatchError
from tdcoll.fused.matmul.policy import ALGORITHMS, GATHER, NAMES, SCATTER
from tdcoll.testing import World

from .calls import Call, Calls, calls_by
from .cases import Residual, add_residual, negate

HEAP = 1 << 22
WAYS = [(name, algorithm) for name, algorithms in ALGORITHMS.items() for algorithm in algorithms]
EACH_WAY = pytest.mark.parametrize(("name", "algorithm"), WAYS)
EACH = pytest.mark.parametrize("name", NAMES)


# ---------------------------------------------------------------------- ranks that don't come


@EACH_WAY
def test_a_killed_peer_is_named(name: str, algorithm: str) -> None:
    calls = calls_by(name, algorithm)
    errors: dict[int, tdcoll.CollectiveTimeout] = {}

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(**dict(calls.context)) as ctx:
            calls.call(0, pe, 3, ctx)
            if pe == 1:
                world.kill(pe)
            calls.call(1, pe, 3, ctx)
            with pytest.raises(tdcoll.CollectiveTimeout) as raised:
                ctx.check()
            errors[pe] = raised.value
            with pytest.raises(tdcoll.CollectiveTimeout):  # instead of a launch that can't end
                calls.call(2, pe, 3, ctx)
            ctx.close()

    world = World(3, heap_bytes=HEAP)
    world.run(host)
    assert sorted(errors) == [0, 2]
    assert all(f"rank {pe} waited" in str(error) for pe, error in errors.items())
    assert 1 in {error.peer for error in errors.values()}


@dataclass(frozen=True)
class Late(Calls):
    """Calls of which a rank gives up some, or has the right results of all.

    Attributes:
        ended: How many ranks ended in which way.
    """

    ended: Counter[str] = field(default_factory=Counter)

    def host(self, world: Any, pe: int) -> None:
        # Never closed: closing is collective, and a rank that has given up doesn't come to it.
        ctx = tdcoll.CollectiveContext(**dict(self.context))
        made = []
        try:
            for number in range(self.count):
                for _ in range(self.late[pe % len(self.late)]):
                    world.pause()
                made.append(self.call(number, pe, ctx.world_size, ctx))
            ctx.check()
        except tdcoll.CollectiveTimeout as error:
            # Tiles that span shards of an all-gather also wait for what this rank itself pushes.
            may_be_own = self.name == GATHER
            names_both = error.rank == pe and error.peer is not None
            names_both &= may_be_own or error.peer != pe
            self.ended["gave up" if names_both else str(error)] += 1
            return
        self.ended["right"] += 1
        for number, call in enumerate(made):
            self.compare(number, pe, ctx.world_size, call)


@EACH_WAY
@seeds(4, 40)
def test_ranks_give_up_on_a_late_one_or_have_the_right_results(
    name: str, algorithm: str, seeds: range
) -> None:
    plain = calls_by(name, algorithm, count=3)
    late = Late(**{one: getattr(plain, one) for one in plain.__dataclass_fields__})
    late = replace(late, late=(0, 40, 0))
    world: dict[str, Any] = {"n_pes": 3, "heap_bytes": HEAP, "on_timeout": "early"}
    explore(late, seeds=seeds, **world)
    for seed in range(1000, 1030):  # until both have happened
        if len(late.ended) == 2:
            break
        explore(late, seeds=[seed], **world)
    assert set(late.ended) == {"right", "gave up"}


# ---------------------------------------------------------------------- memory


def moved(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """Return a copy that begins this many elements behind an aligned address."""
    room = torch.empty(tensor.numel() + elements, dtype=tensor.dtype)
    copy = room[elements:].view(tensor.shape)
    copy.copy_(tensor)
    assert copy.data_ptr() % 16 == elements * tensor.itemsize % 16
    return copy


@dataclass(frozen=True)
class Moved(Calls):
    """Calls whose tensors lie elsewhere on each rank and in each call."""

    def call(self, number: int, rank: int, n_ranks: int, ctx: Any) -> Call:
        x, weight, _ = self.operands(number, rank, n_ranks)
        rows = self.tall(number, n_ranks)
        if self.name == SCATTER:
            rows = self.rows[number % len(self.rows)]
        shifts = [(rank + number) % 3, rank % 2, (rank + 2 * number) % 3, number % 2, rank]
        residual = moved(torch.arange(1.0 * rows * self.columns).view(rows, -1) % 5, shifts[0])
        residual = moved(residual.to(self.dtype), shifts[0])
        bias = moved((torch.arange(1.0 * self.columns) % 7).to(self.dtype), shifts[1])
        out = moved(torch.zeros(rows, self.columns, dtype=self.dtype), shifts[2])
        more = {"bias": bias, "epilogue": add_residual, "extra": Residual(residual, self.columns)}
        result = getattr(tdcoll.fused, self.name)(
            moved(x, shifts[3]),
            moved(weight, shifts[4]),
            out=out,
            algorithm=self.algorithms[0],
            ctx=ctx,
            **more,
        )
        assert result is out
        return Call(x, weight, more, result)

    def compare(self, number: int, rank: int, n_ranks: int, call: Call) -> None:
        plain = replace(self, biased=False, residual=False)
        bias = call.more["bias"].float()
        residual = call.more["extra"].base.float()
        assert call.result.dtype is torch.float32
        # Whole numbers are exact: without bias and residual the result is that of a plain call.
        bare = (call.result - residual) / 2 - bias
        super(Moved, plain).compare(number, rank, n_ranks, Call(call.x, call.weight, {}, bare))


@EACH_WAY
def test_addresses_differ_between_ranks_and_calls(name: str, algorithm: str) -> None:
    plain = calls_by(name, algorithm, count=4, dtype=torch.float32)
    calls = Moved(**{one: getattr(plain, one) for one in plain.__dataclass_fields__})
    explore(calls, n_pes=3, seeds=2, heap_bytes=HEAP)


X = torch.ones(4, 32)
WEIGHT = torch.ones(32, 32)


@EACH
@pytest.mark.parametrize("other", ["x", "weight", "bias", "extra.base"])
@pytest.mark.parametrize("elements", [0, 4])
def test_a_result_must_not_overlap_any_argument(name: str, other: str, elements: int) -> None:
    """In whole or in part, at the first call and when such a call was made before."""
    call = getattr(tdcoll.fused, name)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 14, debug=False) as ctx:
            room = torch.ones(2048)
            given = {
                "x": X,
                "weight": WEIGHT,
                "bias": torch.ones(32),
                "extra.base": torch.ones(4, 32),
            }
            given[other] = room[: given[other].numel()].view(given[other].shape)

            def make(out: torch.Tensor) -> Any:
                extra = Residual(given["extra.base"], 32)
                x, weight, bias = (given[one] for one in ("x", "weight", "bias"))
                more = {"epilogue": add_residual, "extra": extra, "bias": bias}
                return call(x, weight, out=out, ctx=ctx, **more)

            last = given[other].numel() - 4
            places = {0: 0, 4: last}
            overlapping = room[places[elements] :][:128].view(4, 32)
            apart = room[1024 + 128 :][:128].view(4, 32)
            for _ in range(2):
                with pytest.raises(ValueError, match=f"^out must not overlap {other}"):
                    make(overlapping)
                assert (make(apart) == 2 * (32 + 1) + 1).all()
            ctx.check()

    World(1, heap_bytes=1 << 23).run(host)


WRONG_MEMORY = [
    ({"weight": torch.ones(32, 64)[:, ::2]}, ValueError, "weight must be contiguous; got shape"),
    ({"weight": torch.ones(32, 32).t()}, ValueError, "weight must be contiguous; got shape"),
    (
        {"weight": torch.ones(32, 32).t(), "depth_first": True},
        ValueError,
        "weight must be contiguous; got shape",
    ),
    ({"weight": torch.ones(32, 32, device="meta")}, ValueError, "weight must be on cpu"),
    ({"bias": torch.ones(64)[::2]}, ValueError, "bias must be contiguous"),
    ({"base": torch.ones(4, 64)[:, ::2]}, ValueError, "extra.base must be contiguous"),
    ({"base": torch.ones(4, 32, device="meta")}, ValueError, "extra.base must be on cpu"),
    ({"base": torch.ones(4, 32).to_sparse()}, ValueError, "extra.base must be a dense tensor"),
    (
        {"base": torch.ones(4, 32, dtype=torch.complex64)},
        TypeError,
        "extra.base must be of a dtype that Triton has; got torch.complex64",
    ),
    ({"base": torch.ones(4, 32).requires_grad_()}, ValueError, "extra.base must not require grad"),
]


@EACH
@pytest.mark.parametrize(("change", "kind", "message"), WRONG_MEMORY)
def test_memory_that_calls_cannot_take(
    name: str, change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    """At the first call and when one like it was made before; the context stays usable."""
    call = getattr(tdcoll.fused, name)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 14, debug=False) as ctx:

            def make(**changed: Any) -> Any:
                given = {"weight": WEIGHT, "base": torch.ones(4, 32), **changed}
                extra = Residual(given.pop("base"), 32)
                weight = given.pop("weight")
                return call(X, weight, ctx=ctx, epilogue=add_residual, extra=extra, **given)

            for _ in range(2):
                with pytest.raises(kind, match=f"^{message}"):
                    make(**change)
                assert (make() == 2 * 32 + 1).all()
            ctx.check()

    World(1, heap_bytes=1 << 23).run(host)


@pytest.mark.parametrize(("name", "algorithm"), [way for way in WAYS if way[0] != GATHER])
def test_no_sum_of_an_epilogue_is_minus_zero(name: str, algorithm: str) -> None:
    """As for all reductions. An all-gather adds nothing over ranks, and leaves it to the
    epilogue."""
    call = getattr(tdcoll.fused, name)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 14, debug=False) as ctx:
            x, weight = torch.zeros(8, 32), torch.zeros(128, 32)
            made = call(x, weight, ctx=ctx, epilogue=negate, algorithm=algorithm)
            ctx.check()
            assert not made.signbit().any()

    World(2, heap_bytes=1 << 23).run(host)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, torch.bool])
@EACH
def test_epilogues_read_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """Each has a kernel of its own, so that none reads another one's bits."""
    call = getattr(tdcoll.fused, name)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 14, debug=False) as ctx:
            for of in (torch.float32, dtype, torch.float32, dtype):
                extra = Residual(torch.ones(4, 32, dtype=of), 32)
                made = call(X, WEIGHT, ctx=ctx, epilogue=add_residual, extra=extra)
                assert (made == 2 * 32 + 1).all()
            ctx.check()

    World(1, heap_bytes=1 << 23).run(host)


# ---------------------------------------------------------------------- ranks that disagree

DIFFERENT = {
    "depth of both": {"x": torch.ones(4, 16), "weight": torch.ones(32, 16)},
    "columns": {"weight": torch.ones(24, 32)},
    "dtype": {"x": X.bfloat16(), "weight": WEIGHT.bfloat16()},
    "depth_first": {"depth_first": True},
    "out_dtype": {"out_dtype": torch.float16},
    "batch_invariant": {"batch_invariant": True},
    "bias": {"bias": torch.ones(32)},
    "algorithm": {"algorithm": "composed"},
    "epilogue": {"epilogue": add_residual, "extra": Residual(torch.ones(8, 32), 32)},
}


@EACH
@pytest.mark.parametrize("debug", [True, "first"])
@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT)
def test_ranks_that_differ_are_told_so(name: str, change: dict[str, Any], debug: Any) -> None:
    """On every rank, before anything is launched; the next call is right."""
    call = getattr(tdcoll.fused, name)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 14, debug=debug) as ctx:
            usual: dict[str, Any] = {"x": X, "weight": WEIGHT}
            with pytest.raises(RankMismatchError):
                call(**{**usual, **(change if pe == 1 else {})}, ctx=ctx)
            first = 8 if name == GATHER else 2 if name == SCATTER else 4
            made = call(**usual, ctx=ctx)
            assert made.shape == (first, 32)
            assert (made == 32 * (1 if name == GATHER else 2)).all()
            ctx.check()

    World(2, heap_bytes=1 << 23).run(host)
