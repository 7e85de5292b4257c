# SPDX-License-Identifier: Apache-2.0
"""Peers' memory as tensors, and what the host queues on a stream, on the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl

import tdcoll
import tdcoll.language as tdl
from tdcoll.testing import World, explore, first_failure


def on_all(n_pes: int, host: Callable[[int], None], **world: Any) -> None:
    World(n_pes, **world).run(host)


def made(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return tdcoll.zeros(shape, dtype)


def test_peers_memory_is_a_tensor() -> None:
    def host(pe: int) -> None:
        mine = made((4, 6), torch.int32)
        mine.copy_(torch.arange(24).view(4, 6) + 100 * pe)
        tdcoll.barrier()
        for peer in range(3):
            theirs = tdcoll.peer_tensor(mine, peer)
            assert torch.equal(theirs, torch.arange(24, dtype=torch.int32).view(4, 6) + 100 * peer)
            part = tdcoll.peer_tensor(mine[1:3, ::2].t(), peer)
            assert torch.equal(part, theirs[1:3, ::2].t())
        tdcoll.barrier()
        tdcoll.peer_tensor(mine, (pe + 1) % 3)[3, 5] = -pe
        tdcoll.barrier()
        assert mine[3, 5].item() == -((pe - 1) % 3)
        assert tdcoll.peer_tensor(mine, pe) is mine

    on_all(3, host)


def test_peers_that_have_no_such_memory() -> None:
    def host(pe: int) -> None:
        mine = made(8, torch.int32)
        pair = tdcoll.empty(8, torch.int32, group=[0, 1]) if pe < 2 else None
        with pytest.raises(ValueError, match="rank must be below 4, the number of ranks of the job; got 4"):
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

    on_all(4, host, ranks_per_node=2)


@tdcoll.jit
def double(theirs, n, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(theirs + index, 2 * tl.load(theirs + index, mask=index < n), mask=index < n)


@tdcoll.jit
def put(buffer, nbytes, peer):
    tdl.putmem_nbi_block(buffer, buffer, nbytes, peer)


def test_kernels_take_peers_tensors() -> None:
    def host(pe: int) -> None:
        mine = made(8, torch.int32)
        mine.fill_(pe + 1)
        tdcoll.barrier()
        double[(1,)](tdcoll.peer_tensor(mine, 1 - pe), 8, 8)
        tdcoll.barrier()
        assert mine.tolist() == [2 * (pe + 1)] * 8

    on_all(2, host)


def meeting(barrier: Callable[[], None]) -> Any:
    """Puts that have arrived everywhere after a barrier on the stream."""

    def case(world: World) -> None:
        def host(pe: int) -> None:
            buffer = made(16, torch.int32)
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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_words_and_copies_in_the_order_of_a_stream(dtype: torch.dtype) -> None:
    def host(pe: int) -> None:
        data, words = made((2, 32), torch.float32), made(2, dtype)
        peer = 1 - pe
        for turn in (1, 2, 3):
            source = torch.full((32,), 10.0 * turn + pe)
            tdcoll.copy_on_stream(tdcoll.peer_tensor(data[pe], peer), source)
            tdcoll.write_on_stream(tdcoll.peer_tensor(words[pe], peer), turn)
            tdcoll.wait_on_stream(words[peer], tdl.CMP_GE if turn < 3 else tdl.CMP_EQ, turn)
            assert data[peer].tolist() == [10.0 * turn + peer] * 32
            tdcoll.barrier()

    on_all(2, host)


def test_a_wait_for_a_word_ends_on_the_simulator() -> None:
    def host(pe: int) -> None:
        word = made(1, torch.int64)
        if pe == 0:
            with pytest.raises(tdcoll.CollectiveTimeout, match=r"wait for pe0.tensor\[0\] >= 3, which is 0"):
                tdcoll.wait_on_stream(word, tdl.CMP_GE, 3)

    on_all(2, host, on_timeout="expire")


def test_wrong_words() -> None:
    def host(pe: int) -> None:
        words = made(4, torch.int64)
        for wrong in (words, words[:1].view(torch.int16)[:1], words[:1].float()):
            with pytest.raises(ValueError, match="word must be one integer of 32 or 64 bits on cpu, got"):
                tdcoll.write_on_stream(wrong, 1)
        with pytest.raises(ValueError, match=r"compare must be tdl\.CMP_EQ or tdl\.CMP_GE"):
            tdcoll.wait_on_stream(words[0], tdl.CMP_LT, 1)
        with pytest.raises(ValueError, match="value must fit into 32 bits, got 4294967296"):
            tdcoll.write_on_stream(words[:1].view(torch.int32)[:1], 1 << 32)
        with pytest.raises(ValueError, match="value must be at least 0, got -1"):
            tdcoll.write_on_stream(words[0], -1)
        with pytest.raises(ValueError, match="dest must have the 16 bytes of source, got 8"):
            tdcoll.copy_on_stream(words[:1], words[:2])
        with pytest.raises(ValueError, match="source must be contiguous and on cpu, got one not contiguous on cpu"):
            tdcoll.copy_on_stream(words[:2], words[::2])

    on_all(1, host)


@tdcoll.jit
def swap(buffer, arrived, control, monitor, out):
    """Two ranks pass each other a number, in a kernel that is told nothing of the call's number by the host."""
    epoch, alive = tdcoll.begin_epoch(control, monitor)
    me = tdl.my_pe()
    n = tdl.n_pes()
    slot = epoch % 2
    if alive != 0:
        if tl.program_id(0) == 0:
            tl.store(buffer + 2 + slot, me + 100 * epoch)
            tdl.syncthreads()
            tdl.putmem_signal_block(
                buffer + slot, buffer + 2 + slot, 8, arrived + slot, epoch, tdl.SIGNAL_SET, (me + 1) % n
            )
        else:
            tdl.wait_signal(arrived + slot, tdl.CMP_GE, epoch, monitor, (me + n - 1) % n, slot)
            tl.store(out, tl.load(buffer + slot))


def test_kernels_count_their_calls_on_the_device() -> None:
    def case(world: World) -> None:
        def host(pe: int) -> None:
            buffer, arrived = made(4, torch.int64), made(2, torch.int64)
            control, monitor = torch.zeros(1, dtype=torch.int64), tdcoll.WaitMonitor()
            out = torch.zeros(1, dtype=torch.int64)
            for call in range(1, 6):  # as a graph's replays: with the same arguments
                swap[(2,)](buffer, arrived, control, monitor.words, out)
                assert out.item() == (pe - 1) % world.n_pes + 100 * call

        world.run(host)

    explore(case, n_pes=2, seeds=20)
