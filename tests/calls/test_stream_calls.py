# SPDX-License-Identifier: Apache-2.0
"""Peers' memory as tensors, and what the host queues on a stream, on the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks

import tdcoll
import tdcoll.language as tdl
from tdcoll.testing import World, explore, first_failure


@on_ranks(4, ranks_per_node=2)
def test_peers_that_have_no_such_memory(pe: int) -> None:
    mine = tdcoll.zeros(8, torch.int32)
    pair = tdcoll.empty(8, torch.int32, group=[0, 1]) if pe < 2 else None
    with pytest.raises(ValueError, match="rank must be below 4, the number of ranks of the job; got 4"):
        tdcoll.peer_tensor(mine, 4)
    with pytest.raises(tdcoll.NotSymmetricError, match="tensor must lie in the symmetric heap"):
        tdcoll.peer_tensor(torch.zeros(3), (pe + 1) % 4)
    with pytest.raises(ValueError, match=r"on this node; got \d, on another"):
        tdcoll.peer_tensor(mine, (pe + 2) % 4)
    if pair is not None:
        assert tdcoll.peer_tensor(pair, 1 - pe).shape == (8,)
        with pytest.raises(ValueError, match=r"rank must be one of \[0, 1\], which made the tensor together; got 2"):
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
        with pytest.raises(tdcoll.CollectiveTimeout, match=r"wait for pe0.tensor\[0\] >= 3, which is 0"):
            tdcoll.wait_on_stream(word, tdl.CMP_GE, 3)


@on_ranks(1)
def test_wrong_words(pe: int) -> None:
    words = tdcoll.zeros(4, torch.int64)
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
