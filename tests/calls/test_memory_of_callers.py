# SPDX-License-Identifier: Apache-2.0
"""Memory of callers and of peers: which calls find it checked, tensors of it, and what the host
queues on a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exploring import explore, first_failure
from ranks import on_ranks

import tdcoll
import tdcoll.language as tdl
from tdcoll.testing import World


@on_ranks(4, ranks_per_node=2)
def test_peers_that_have_no_such_memory(pe: int) -> None:
    mine = tdcoll.zeros(8, torch.int32)
    pair = tdcoll.empty(8, torch.int32, group=[0, 1]) if pe < 2 else None
    with pytest.raises(
        ValueError, match="rank must be below 4, the number of ranks of the job; got 4"
    ):
        tdcoll.peer_tensor(mine, 4)
    with pytest.raises(tdcoll.NotSymmetricError, match="tensor must lie in the symmetric heap"):
        tdcoll.peer_tensor(torch.zeros(3), (pe + 1) % 4)
    with pytest.raises(ValueError, match=r"on this node; got \d, on another"):
        tdcoll.peer_tensor(mine, (pe + 2) % 4)
    if pair is not None:
        assert tdcoll.peer_tensor(pair, 1 - pe).shape == (8,)
        with pytest.raises(
            ValueError, match=r"rank must be one of \[0, 1\], which made the tensor together; got 2"
        ):
            tdcoll.peer_tensor(pair, 2)
    with pytest.raises(TypeError, match="tensor must be"):
        tdcoll.peer_tensor([1, 2], 0)  # type: ignore[arg-type]


@tdcoll.jit
def put(buffer, nbytes, peer):
    tdl.putmem_nbi_block(buffer, buffer, nbytes, peer)


def meeting(barrier: Callable[[], None]) -> Any:
    """Puts that have arrived everywhere after a barrier on the stream."""

    def case(world: World) -> None:
        def host(pe: int) -> None:
            buffer = tdcoll.zeros(16, torch.int32)
            for turn in (1, 2):
                if pe == turn - 1:
                    buffer.fill_(turn)
                    put[(1,)](buffer, 64, 1 - pe)
                barrier()
                assert buffer.tolist() == [turn] * 16, f"turn {turn}: got {buffer.tolist()}"
                tdcoll.barrier()

        world.run(host)

    return case


def test_a_barrier_on_the_stream_completes_puts() -> None:
    explore(meeting(tdcoll.barrier_on_stream), n_pes=2, seeds=20)
    failure = first_failure(meeting(tdcoll.barrier), n_pes=2, seeds=10)
    assert failure is not None
    assert "got [" in failure.report


@on_ranks(2, on_timeout="expire")
def test_a_wait_for_a_word_ends_on_the_simulator(pe: int) -> None:
    word = tdcoll.zeros(1, torch.int64)
    if pe == 0:
        with pytest.raises(
            tdcoll.CollectiveTimeout, match=r"wait for pe0.tensor\[0\] >= 3, which is 0"
        ):
            tdcoll.wait_on_stream(word, tdl.CMP_GE, 3)


@on_ranks(1)
def test_wrong_words(pe: int) -> None:
    words = tdcoll.zeros(4, torch.int64)
    for wrong in (words, words[:1].view(torch.int16)[:1], words[:1].float()):
        with pytest.raises(
            ValueError, match="word must be one integer of 32 or 64 bits on cpu, got"
        ):
            tdcoll.write_on_stream(wrong, 1)
    with pytest.raises(ValueError, match=r"compare must be tdl\.CMP_EQ or tdl\.CMP_GE"):
        tdcoll.wait_on_stream(words[0], tdl.CMP_LT, 1)
    with pytest.raises(ValueError, match="value must fit into 32 bits, got 4294967296"):
        tdcoll.write_on_stream(words[:1].view(torch.int32)[:1], 1 << 32)
    with pytest.raises(ValueError, match="value must be at least 0, got -1"):
        tdcoll.write_on_stream(words[0], -1)
    with pytest.raises(ValueError, match="dest must have the 16 bytes of source, got 8"):
        tdcoll.copy_on_stream(words[:1], words[:2])
    with pytest.raises(
        ValueError, match="source must be contiguous and on cpu, got one not contiguous on cpu"
    ):
        tdcoll.copy_on_stream(words[:2], words[::2])


CALLS: dict[str, Callable[[torch.Tensor, tdcoll.CollectiveContext], torch.Tensor]] = {
    "all_gather_": lambda x, ctx: tdcoll.all_gather_(x, ctx=ctx),
    "all_reduce": lambda x, ctx: tdcoll.all_reduce(
        torch.ones_like(x), ctx=ctx, out=x, symmetric=True
    ),
    "all_reduce_": lambda x, ctx: tdcoll.all_reduce_(x, ctx=ctx, symmetric=True),
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
                    assert set(got.flatten().tolist()) == {
                        2.0 if name == "all_reduce" else float(sum(both))
                    }
                assert torch.equal(buffers[1 - number], other)
                tdcoll.barrier()
            if turn == 2:
                tdcoll.free(tdcoll.empty((8,)))
        ctx.check()


@on_ranks(2)
def test_other_shapes_at_the_same_address_are_told_apart(pe: int) -> None:
    raw = tdcoll.zeros(256, torch.uint8)
    with tdcoll.CollectiveContext(max_bytes_per_rank=1024) as ctx:
        for other in (
            raw.view(torch.float32),
            raw[:64].view(torch.float32),
            raw[:128].view(torch.float64),
            raw,
        ):
            other.view(2, -1)[pe].fill_(pe + 1)
            tdcoll.all_gather_(other, ctx=ctx)
            assert other.view(2, -1).double().mean(1).tolist() == [1, 2]
            tdcoll.barrier()
