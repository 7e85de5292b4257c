# SPDX-License-Identifier: Apache-2.0
"""Callers' memory that is not tdcoll's: PyTorch's symmetric memory, played by pieces of the simulated heap.

On each rank the piece begins elsewhere, so that a kernel which took the heap's deltas would miss it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks

import tdcoll
from tdcoll import runtime
from tdcoll.calls import call as calls
from tdcoll.calls import registered
from tdcoll.testing import World

ROOM = 16 << 10
SHIFT = 512


class _Handle:
    def __init__(self, buffer_ptrs: list[int]) -> None:
        self.buffer_ptrs = buffer_ptrs


class _Memory:
    """``_SymmetricMemory`` as far as collectives use it."""

    def __init__(self) -> None:
        self.begins: dict[int, int] = {}
        self.calls = 0
        self.error: Exception | None = None

    def of(self, tensor: torch.Tensor, world: int) -> torch.Tensor:
        """This rank's piece of a symmetric tensor of tdcoll's; the ranks of ``world`` make one each."""
        job = runtime.current()
        self.begins[job.rank] = tensor.data_ptr() + SHIFT * job.rank
        job.exchange(range(world), "pieces")
        return tensor[SHIFT * job.rank :]

    def rendezvous(self, tensor: torch.Tensor, group: str) -> Any:
        if self.error is not None:
            raise self.error
        assert group == "the group"
        self.calls += 1
        inside = any(0 <= tensor.data_ptr() - begin < ROOM for begin in self.begins.values())
        return _Handle([self.begins[r] for r in sorted(self.begins)]) if inside else None


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> _Memory:
    played = _Memory()
    for module in (registered, calls):
        monkeypatch.setattr(module, "lies_in_heap", lambda tensor, ctx: False)
    monkeypatch.setattr(registered, "_symmetric_memory", lambda: played)
    return played


def _in_a_context(memory: _Memory, world: int, call: Any, **options: Any) -> None:
    def host(pe: int) -> None:
        whole = tdcoll.zeros(ROOM + SHIFT * world, torch.uint8)
        with tdcoll.CollectiveContext(max_bytes_per_rank=1024, **options) as ctx:
            ctx.group_name = "the group"
            call(pe, memory.of(whole, world), ctx)

    World(world, heap_bytes=16 << 20, seed=3, weak=True).run(host)


def test_buffers_of_both_kinds_in_turn(memory: _Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one shape and on one context: the addresses of PyTorch's memory are no good for the heap's."""
    in_heap: set[int] = set()
    for module in (registered, calls):
        monkeypatch.setattr(module, "lies_in_heap", lambda tensor, ctx: tensor.data_ptr() in in_heap)

    def call(pe: int, piece: torch.Tensor, ctx: tdcoll.CollectiveContext) -> None:
        heap = tdcoll.zeros(4096, torch.uint8)
        in_heap.add(heap.data_ptr())
        for buffer in (piece[:4096], heap, heap, piece[:4096], heap):
            buffer.view(2, 2048)[pe].fill_(pe + 1)
            tdcoll.all_gather_(buffer, ctx=ctx, algorithm="direct")
            assert buffer.view(2, 2048).float().mean(1).tolist() == [1, 2]
            buffer.zero_()
            tdcoll.barrier()

    _in_a_context(memory, 2, call)


def sums(pe: int, turn: int) -> torch.Tensor:
    return sum(torch.arange(300.0) + 10 * rank + turn for rank in range(3))  # type: ignore[return-value]


def gathered(pe: int, turn: int) -> torch.Tensor:
    return (16.0 * torch.arange(3) + turn)[:, None].expand(3, 100).reshape(-1)


INTO: dict[str, tuple[Callable[..., torch.Tensor], Callable[[int, int], torch.Tensor]]] = {
    "all_reduce_": (
        lambda x, ctx: tdcoll.all_reduce_(x, ctx=ctx, algorithm="direct", symmetric=True), sums,
    ),
    "all_reduce": (
        lambda x, ctx: tdcoll.all_reduce(x.clone(), ctx=ctx, out=x, algorithm="direct", symmetric=True), sums,
    ),
    "reduce_scatter": (
        lambda x, ctx: tdcoll.reduce_scatter(x, ctx=ctx, algorithm="pull", symmetric=True),
        lambda pe, turn: sums(pe, turn).view(3, 100)[pe],
    ),
    **{
        f"all_gather_ {algorithm}": (
            lambda x, ctx, algorithm=algorithm: tdcoll.all_gather_(x, ctx=ctx, algorithm=algorithm), gathered,
        )
        for algorithm in ("auto", "direct", "ring")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", INTO)
def test_peers_access_it(memory: _Memory, name: str) -> None:
    """And PyTorch is asked anew in each call."""
    make, wanted = INTO[name]

    def call(pe: int, piece: torch.Tensor, ctx: tdcoll.CollectiveContext) -> None:
        buffer = piece[: 4 * 300].view(torch.float32)
        for turn in range(3):
            before = memory.calls
            if "gather" in name:
                buffer.view(3, 100)[pe].fill_(16 * pe + turn)
            else:
                buffer.copy_(torch.arange(300) + 10 * pe + turn)
            assert torch.equal(make(buffer, ctx), wanted(pe, turn))
            assert memory.calls > before
            tdcoll.barrier()
        assert len([key for key in ctx.tables if "PyTorch" in str(key)]) == 1

    _in_a_context(memory, 3, call)


def test_a_closed_context_keeps_none_of_it(memory: _Memory) -> None:
    kept: dict[int, weakref.ref[Any]] = {}

    def host(pe: int) -> None:
        whole = tdcoll.zeros(ROOM + 2 * SHIFT, torch.uint8)
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=1024)
        ctx.group_name = "the group"
        tdcoll.all_gather_(memory.of(whole, 2)[:4096], ctx=ctx)
        (handle,) = (made[1] for key, made in ctx.tables.items() if "PyTorch" in str(key))
        kept[pe] = weakref.ref(handle)
        del handle
        assert kept[pe]() is not None
        ctx.close()
        assert kept[pe]() is None

    World(2, heap_bytes=16 << 20).run(host)


def test_puts_do_not_access_it(memory: _Memory) -> None:
    def call(pe: int, piece: torch.Tensor, ctx: tdcoll.CollectiveContext) -> None:
        with pytest.raises(ValueError, match="needs NVSHMEM's puts, which memory of PyTorch's does not have"):
            tdcoll.all_gather_(piece[:4096], ctx=ctx, algorithm="1d")
        with pytest.raises(ValueError, match="algorithm='1d' needs"):
            tdcoll.all_reduce_(piece[:4096].view(torch.float32), ctx=ctx, algorithm="1d", symmetric=True)

    _in_a_context(memory, 2, call)


def test_what_is_neither_is_refused(memory: _Memory) -> None:
    def call(pe: int, piece: torch.Tensor, ctx: tdcoll.CollectiveContext) -> None:
        usual = torch.zeros(64)
        with pytest.raises(tdcoll.NotSymmetricError, match=r"tensor must be made by tdcoll\.empty.*it is neither"):
            tdcoll.all_reduce_(usual, ctx=ctx, symmetric=True)
        ctx.group_name = None
        with pytest.raises(tdcoll.NotSymmetricError, match=r"made with its ProcessGroup.*for ranks \[0, 1\]"):
            tdcoll.all_gather_(piece[:4096], ctx=ctx)
        ctx.group_name = "the group"
        runtime.current().exchange(range(2), "what PyTorch says is over")
        memory.error = RuntimeError("no such group")
        with pytest.raises(tdcoll.NotSymmetricError, match="PyTorch says: no such group"):
            tdcoll.reduce_scatter(usual, ctx=ctx, symmetric=True)

    _in_a_context(memory, 2, call)


def test_memory_that_a_rank_lacks_is_refused(memory: _Memory) -> None:
    def call(pe: int, piece: torch.Tensor, ctx: tdcoll.CollectiveContext) -> None:
        memory.begins[2] = 0
        runtime.current().exchange(range(2), "a third rank has none")
        with pytest.raises(tdcoll.NotSymmetricError, match=r"tensor is memory that ranks \[2\] lack"):
            tdcoll.all_gather_(piece[:4096], ctx=ctx)

    _in_a_context(memory, 2, call)


def test_the_ranks_compare_whose_memory_it_is(memory: _Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(pe: int, piece: torch.Tensor, ctx: tdcoll.CollectiveContext) -> None:
        out = piece[:256].view(torch.float32)
        tdcoll.all_reduce_(out, ctx=ctx, symmetric=True)
        runtime.current().exchange(range(2), "both have called")
        monkeypatch.setattr("tdcoll.calls.call.place_of", lambda tensor, ctx: ctx.rank)
        with pytest.raises(tdcoll.RankMismatchError, match="offset in the symmetric heap"):
            tdcoll.all_reduce_(out, ctx=ctx, symmetric=True)

    _in_a_context(memory, 2, call, debug=True)


CALLS: dict[str, Callable[[torch.Tensor, tdcoll.CollectiveContext], torch.Tensor]] = {
    "all_gather_": lambda x, ctx: tdcoll.all_gather_(x, ctx=ctx),
    "all_reduce": lambda x, ctx: tdcoll.all_reduce(torch.ones_like(x), ctx=ctx, out=x, symmetric=True),
    "all_reduce_": lambda x, ctx: tdcoll.all_reduce_(x, ctx=ctx, symmetric=True),
    "reduce_scatter": lambda x, ctx: tdcoll.reduce_scatter(x, ctx=ctx, symmetric=True),
}


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_memory_that_was_released_is_no_longer_known(pe: int, name: str) -> None:
    """Nor is what now lies at its address."""
    call = CALLS[name]
    x, other = tdcoll.zeros((2, 64)), tdcoll.zeros((2, 64))
    with tdcoll.CollectiveContext(max_bytes_per_rank=1024) as ctx:
        for _ in range(2):
            call(x, ctx)
        tdcoll.free(x)
        call(other, ctx)  # which is found right again, and only that
        with pytest.raises(tdcoll.NotSymmetricError, match="it is not allocated"):
            call(x, ctx)
        alone = tdcoll.empty((2, 64), group=[pe])
        assert alone.data_ptr() == x.data_ptr()
        with pytest.raises(tdcoll.NotSymmetricError, match="belongs to ranks"):
            call(x, ctx)
        ctx.check()


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_buffers_in_turn_are_told_apart(pe: int, name: str) -> None:
    """Of one shape, on one context; also where memory is released in between."""
    call = CALLS[name]
    buffers = [tdcoll.zeros((2, 64)) for _ in range(2)]
    with tdcoll.CollectiveContext(max_bytes_per_rank=1024) as ctx:
        for turn in range(6):
            for number, x in enumerate(buffers):
                x.fill_(10 * turn + 4 * number + pe + 1)
                other = buffers[1 - number].clone()
                got = call(x, ctx)
                both = {10 * turn + 4 * number + q + 1 for q in range(2)}
                if name == "all_gather_":
                    assert [set(row.tolist()) for row in got] == [{value} for value in sorted(both)]
                else:
                    assert set(got.flatten().tolist()) == {2.0 if name == "all_reduce" else float(sum(both))}
                assert torch.equal(buffers[1 - number], other)
                tdcoll.barrier()
            if turn == 2:
                tdcoll.free(tdcoll.empty((8,)))
        ctx.check()


@on_ranks(2)
def test_other_shapes_at_the_same_address_are_told_apart(pe: int) -> None:
    raw = tdcoll.zeros(256, torch.uint8)
    with tdcoll.CollectiveContext(max_bytes_per_rank=1024) as ctx:
        for other in (raw.view(torch.float32), raw[:64].view(torch.float32), raw[:128].view(torch.float64), raw):
            other.view(2, -1)[pe].fill_(pe + 1)
            tdcoll.all_gather_(other, ctx=ctx)
            assert other.view(2, -1).double().mean(1).tolist() == [1, 2]
            tdcoll.barrier()
