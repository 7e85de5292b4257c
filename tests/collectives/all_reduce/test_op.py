# SPDX-License-Identifier: Apache-2.0
"""All-reduce as users call it: bits that depend on nothing but the values, the drop-ins, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

import tdcoll
import tdcoll.distributed
from tdcoll.collectives._host.plan import Plan
from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.primitives.reduce import OPERATIONS_OF, TORCH_OPERATIONS
from tdcoll.testing import World

from ..reduce_scatter.cases import same_bits, values

FP8 = torch.float8_e5m2
M = 1 << 20
ANY = st.sampled_from(["auto", "one_shot", "two_shot", "direct", "1d"])


@settings(max_examples=20, deadline=None)
@given(
    algorithm=ANY,
    world=st.integers(1, 4),
    kind=st.sampled_from([(dtype, op) for dtype, ops in OPERATIONS_OF.items() if dtype.itemsize <= 4 for op in ops]),
    rows=st.integers(1, 5),
    width=st.integers(1, 20),
    row=st.integers(0, 4),
    words=st.sampled_from([0, 64, 4096]),
    flags=st.sampled_from([0, 4096]),
    seed=st.integers(0, 9),
)
def test_a_row_has_the_bits_that_it_has_alone(
    algorithm: str, world: int, kind: Any, rows: int, width: int, row: int, words: int, flags: int, seed: int
) -> None:
    """Of a batch of any size, by any algorithm, in one epoch or several, with chunks cut anyhow, on every rank."""
    (dtype, op), row = kind, row % rows
    if algorithm == "one_shot" or (algorithm == "two_shot" and not (words and dtype.is_floating_point)):
        flags = 4096  # which take a call that cannot be several epochs
    batches = [values(pe, seed, rows * width, dtype).view(rows, width) for pe in range(world)]
    wanted = reduce_parts(batches, [0] * world, op)
    reached = []

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=96, flagged_bytes=flags, lamport_bytes=words) as ctx:
            whole = tdcoll.all_reduce(batches[pe], ctx, op=op, algorithm=algorithm)
            alone = tdcoll.all_reduce(batches[pe][row].clone(), ctx, op=op)
            ctx.check()
            assert same_bits(whole, wanted) == same_bits(alone, wanted[row]) == 0
            reached.append(pe)

    World(world, seed=seed, heap_bytes=M).run(host)
    assert len(reached) == world


def test_bad_arguments_are_named() -> None:
    def host(pe: int) -> None:
        x = torch.zeros(8)
        call, by_hand = tdcoll.all_reduce, Plan("direct", 4, 128, 1)
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
            for kind, message, arguments in (
                (TypeError, r"tensor must be a torch\.Tensor", ([1.0], ctx)),
                (TypeError, r"ctx must be a .*CollectiveContext.*got 3", (x, 3)),
                (TypeError, "tensor must be of float16, .*float8_e5m2; got torch.int16", (x.to(torch.int16), ctx)),
                (ValueError, "op must be one of max, min for torch.int8; got 'sum'", (x.to(torch.int8), ctx)),
                (ValueError, "one of sum, mean, max, min for torch.float8_e5m2", (x.to(FP8), ctx, None, "prod")),
                (ValueError, "tensor must be contiguous", (x.view(2, 4).T, ctx)),
                (ValueError, "op must be one of sum, mean, max, min, prod; got 'avg'", (x, ctx, None, "avg")),
                (ValueError, "sum, max, min, prod for torch.int32; got 'mean'", (x.int(), ctx, None, "mean")),
                (ValueError, "op must be one of SUM, AVG, MAX, MIN, PRODUCT; got BAND", (x, ctx, None, ReduceOp.BAND)),
                (TypeError, r"out must be a torch\.Tensor", (x, ctx, 3)),
                (ValueError, r"out must be torch.float32 of shape \[8\]; got torch.float32 of \[4\]", (x, ctx, x[:4])),
                (ValueError, r"out must be torch.float32 of shape \[8\]; got torch.float64", (x, ctx, x.double())),
                (ValueError, "out must be contiguous", (x[:4], ctx, torch.zeros(8)[::2])),
                (ValueError, r"out must not overlap tensor, except to be tensor; .* byte 4 of", (x[:-1], ctx, x[1:])),
                (ValueError, "algorithm must be one of auto, one_shot", (x, ctx, None, "sum", "ring")),
                (TypeError, "algorithm must be a str or a Plan", (x, ctx, None, "sum", 3)),
                (ValueError, "'one_shot' needs elements of at most 4", (x.double(), ctx, None, "sum", "one_shot")),
                (ValueError, "no Plan for a call of several epochs", (torch.zeros(99), ctx, None, "sum", by_hand)),
                (tdcoll.ContextError, r"epochs of 64 bytes. .*max_bytes_per_rank=\d+ or", (torch.zeros(1 << 15), ctx)),
            ):  # fmt: skip
                with pytest.raises(kind, match=message):
                    call(*arguments)
            for kind, message, arguments in (
                (ValueError, "op must be one of sum, mean, max, min, prod; got 'SUM'", (x, "SUM")),
                (TypeError, r"tensor must be a torch\.Tensor", (3,)),
                (ValueError, "op must be one of SUM, AVG, MAX, MIN, PRODUCT; got BXOR", (x, ReduceOp.BXOR)),
                (ValueError, r"SUM, MAX, MIN, PRODUCT for torch\.int32; got AVG", (x.int(), ReduceOp(ReduceOp.AVG))),
                (ValueError, r"op must be one of MAX, MIN for torch\.uint8; got SUM", (x.byte(),)),
                (TypeError, r"tensor must be of float16, .*; got torch\.bool", (x.bool(),)),
            ):
                with pytest.raises(kind, match=message):
                    tdcoll.distributed.all_reduce(*arguments)
            assert tdcoll.all_reduce_(x + pe, ctx).tolist() == [1.0] * 8
            ctx.check()
        with pytest.raises(tdcoll.ContextError, match="closed"):
            call(x, ctx)

    World(2).run(host)


@pytest.mark.parametrize("op", TORCH_OPERATIONS)
def test_operations_of_torch_are_the_named_ones(op: Any) -> None:
    """The ranks may spell them differently, also where debug mode compares the arguments."""
    name = TORCH_OPERATIONS[op]

    def host(pe: int) -> None:
        x = torch.tensor([3.0, -2.0, 0.5]) * (pe + 1)
        with tdcoll.CollectiveContext(max_bytes_per_rank=256, debug=True) as ctx:
            whole, part = tdcoll.all_reduce(x, ctx, op=name), tdcoll.reduce_scatter(torch.cat([x, x]), ctx, op=name)
            for spelled in (op, ReduceOp(op), name):
                mixed: Any = spelled if pe else name
                for _ in "ab":  # the second call takes the short way
                    assert torch.equal(tdcoll.all_reduce(x, ctx, op=mixed), whole)
                    assert torch.equal(tdcoll.all_reduce_(x.clone(), ctx, op=mixed), whole)
                    assert torch.equal(tdcoll.reduce_scatter(torch.cat([x, x]), ctx, op=mixed), part)
                mine = x.clone()
                assert tdcoll.distributed.all_reduce(mine, mixed) is None
                assert torch.equal(mine, whole)
            other: Any = "min" if pe else ReduceOp.MAX
            with pytest.raises(tdcoll.RankMismatchError, match="op"):
                tdcoll.all_reduce(x, ctx, op=other)

    World(2).run(host)


def test_asynchronous_drop_ins_return_a_work() -> None:
    def host(pe: int) -> None:
        world = 3
        x, out, part = torch.full((2,), pe + 1.0), torch.zeros(2 * world), torch.zeros(2)
        for call, result, wanted in (
            (lambda: tdcoll.distributed.all_reduce(x, async_op=True), x, [6.0, 6.0]),
            (lambda: tdcoll.all_gather_into_tensor(out, x + pe, async_op=True), out, [6.0, 6, 7, 7, 8, 8]),
            (lambda: tdcoll.reduce_scatter_tensor(part, out, "max", async_op=True), part, [6.0 + pe] * 2),
        ):
            work = call()
            assert isinstance(work, torch.distributed.Work)
            assert work.wait() is True
            assert work.is_completed()
            assert work.is_success()
            assert result.tolist() == wanted
            assert [given.data_ptr() for given in work.get_future().wait()] == [result.data_ptr()]

    World(3).run(host)


def test_an_asynchronous_drop_in_without_its_peer_says_so() -> None:
    told = {}

    def host(pe: int) -> None:
        x = torch.ones(2)
        tdcoll.distributed.all_reduce(x)
        if pe == 1:
            world.kill(pe)
        with pytest.raises(tdcoll.distributed.BackendTimeout) as raised:
            tdcoll.distributed.all_reduce(x, async_op=True)
        told[pe] = (raised.value.rank, raised.value.peer)

    world = World(2)
    world.run(host)
    assert told == {0: (0, 1)}


def test_symmetric_results_are_as_they_should_be_on_all_ranks() -> None:
    def host(pe: int) -> None:
        x, call, here = torch.ones(64), tdcoll.all_reduce, tdcoll.empty((128,))
        with tdcoll.CollectiveContext(max_bytes_per_rank=256, debug=True) as ctx:
            for kind, message, out in (
                (ValueError, r"out must be given with symmetric=True: one that tdcoll\.empty\(\) has made", None),
                (tdcoll.NotSymmetricError, "out must .*symmetric", torch.empty(64)),
                (ValueError, r"out must be torch.float32 of shape \[64\]", here),
            ):
                with pytest.raises(kind, match=message):
                    call(x, ctx, out, symmetric=True)
            with pytest.raises(TypeError, match="symmetric must be a bool, got 1"):
                call(x, ctx, here[:64], symmetric=1)
            with pytest.raises(tdcoll.RankMismatchError, match="differ in offset in the symmetric heap"):
                call(x, ctx, here[64 * pe :][:64], symmetric=True)
            with pytest.raises(tdcoll.RankMismatchError, match="differ in"):
                call(x, ctx, here[:64], symmetric=pe == 0)
            for algorithm in ("auto", "direct", "one_shot", "1d"):
                got = call(x + pe, ctx, here[:64], algorithm=algorithm, symmetric=True)
                assert got.tolist() == [3.0] * 64
            assert tdcoll.all_reduce_(here[:0], ctx, symmetric=True).shape == (0,)
            ctx.check()
        alone = tdcoll.empty((64,), group=[pe])
        alone_is_wrong = pytest.raises(tdcoll.NotSymmetricError, match=r"out must be made by .* belongs to ranks \[")
        with tdcoll.CollectiveContext(max_bytes_per_rank=256) as ctx, alone_is_wrong:
            call(x, ctx, alone, symmetric=True)

    World(2).run(host)


@settings(max_examples=12, deadline=None)
@given(
    world=st.integers(1, 4),
    kind=st.sampled_from([(dtype, op) for dtype, ops in OPERATIONS_OF.items() for op in ops]),
    count=st.integers(0, 200),
    offset=st.integers(0, 5),
    most=st.sampled_from([48, 256, 4096]),
    in_place=st.booleans(),
    seed=st.integers(0, 9),
)
def test_symmetric_results_have_the_same_bits(
    world: int, kind: Any, count: int, offset: int, most: int, in_place: bool, seed: int
) -> None:
    """Of any dtype, size and alignment, in one epoch or several."""
    (dtype, op), reached = kind, []
    given_ = [values(pe, seed, count, dtype) for pe in range(world)]
    wanted = reduce_parts(given_, [0] * world, op)

    def host(pe: int) -> None:
        out = tdcoll.empty((offset + count,), dtype)[offset:]
        with tdcoll.CollectiveContext(max_bytes_per_rank=most) as ctx:
            for _ in range(2):
                tensor = out.copy_(given_[pe]) if in_place else given_[pe]
                tdcoll.all_reduce(tensor, ctx, out, op, "direct", symmetric=True)
                assert same_bits(out.clone(), wanted) == 0
            ctx.check()
        reached.append(pe)

    World(world, seed=seed, weak=True, heap_bytes=M).run(host)
    assert len(reached) == world


def test_debug_mode_compares_arguments() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=64, debug=True) as ctx:
            for bad in ({"op": "sum" if pe else "max"}, {"algorithm": "1d" if pe else "direct"}):
                with pytest.raises(tdcoll.RankMismatchError, match="all_reduce arguments"):
                    tdcoll.all_reduce(torch.ones(3), ctx, **bad)
            with pytest.raises(tdcoll.RankMismatchError, match="differ in bytes"):
                tdcoll.all_reduce(torch.ones(3 + pe), ctx)
            assert tdcoll.all_reduce(torch.ones(3), ctx).tolist() == [2.0] * 3

    World(2).run(host)
