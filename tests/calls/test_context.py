# SPDX-License-Identifier: Apache-2.0
"""CollectiveContext: its life, its refusals, and the invariants that its memory shows."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks

import tdcoll
from tdcoll.base.limits import MAX_CHUNKS, flagged_bytes
from tdcoll.primitives.group import EPOCH_SHIFT
from tdcoll.simulator.memory import MemoryView
from tdcoll.testing import Deadlock, World

N = 4


def data(rank: int, call: int, count: int = 16) -> torch.Tensor:
    """``-> [count]`` int32: encodes rank, call and index."""
    return rank * 1_000_000 + call * 1000 + torch.arange(count, dtype=torch.int32)


def gather_and_compare(
    ctx: tdcoll.CollectiveContext,
    call: int,
    ranks: list[int] | None = None,
    algorithm: str = "auto",
) -> None:
    ranks = list(range(ctx.world_size)) if ranks is None else ranks
    got = tdcoll.all_gather(data(ranks[ctx.rank], call), ctx=ctx, algorithm=algorithm)
    assert torch.equal(got, torch.cat([data(rank, call) for rank in ranks]))


# ---------------------------------------------------------------------- life


@on_ranks(N, ranks_per_node=2)
def test_facts(pe: int) -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=1001) as ctx:
        assert (ctx.rank, ctx.world_size, ctx.max_bytes_per_rank) == (pe, N, 1001)
        assert ctx.capacity == 1008  # slots are aligned for 16-byte loads
        assert ctx.inbox.shape == (2, N, 1008)
        assert ctx.signals.shape == (2, MAX_CHUNKS, N)
        assert ctx.topology == tdcoll.topology()
        assert ctx.device == tdcoll.device()
        assert not ctx.closed
        assert repr(ctx) == (
            f"<CollectiveContext rank {pe}, 4 rank(s) on 2 node(s) (2 + 2), 1001 bytes per rank, open>"
        )
    assert ctx.closed
    assert repr(ctx).endswith("closed>")


@on_ranks(N, seed=1, weak=True)
def test_dirty_memory_does_not_look_like_signals(pe: int) -> None:
    junk = tdcoll.empty(1 << 17, torch.int64)
    junk.fill_(1 << 40)
    tdcoll.free(junk)
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        # a peer may be in the first call already
        assert set(ctx.signals.unique().tolist()) <= {0, 1}
        assert not ctx.ready.any()
        for call in range(3):
            gather_and_compare(ctx, call)


@on_ranks(N)
def test_error_in_the_body_does_not_wait_for_the_others(pe: int) -> None:
    """Only rank 1 leaves by an exception. Closing is collective: it would wait for ranks that never
    close."""
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64)
    gather_and_compare(ctx, 0)
    if pe == 1:
        with pytest.raises(KeyError, match="mine"), ctx:
            raise KeyError("mine")
        with pytest.raises(tdcoll.ContextError, match="left by an exception"):
            tdcoll.all_gather(data(pe, 1), ctx=ctx)
    assert not ctx.closed
    ctx.close()
    assert ctx.closed
    assert tdcoll.heap_info().used == 0


def test_close_is_collective() -> None:
    def host(pe: int) -> None:
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64)
        if pe != 1:
            ctx.close()

    with pytest.raises(
        Deadlock,
        match=r"pe0 host waits in 'CollectiveContext.close \(free: offset of the tensor\)' for "
        r"rank\(s\) \[1\]",
    ):
        World(N).run(host)


# ---------------------------------------------------------------------- invariants


@pytest.mark.parametrize(("ranks_per_node", "algorithm"), [(4, "1d"), (2, "1d"), (2, "2d")])
def test_every_call_is_one_epoch_and_slots_alternate(ranks_per_node: int, algorithm: str) -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
            buffer = tdcoll.zeros((N, 16), torch.int32)
            for epoch in range(1, 8):
                other = ctx.inbox[1 - epoch % 2].clone()
                if epoch % 3 == 0:
                    buffer[pe] = data(pe, epoch)
                    tdcoll.all_gather_(buffer, ctx=ctx, algorithm=algorithm)
                elif epoch % 3 == 1:
                    gather_and_compare(ctx, epoch, algorithm=algorithm)
                else:
                    # nothing to send is a call, too
                    tdcoll.all_gather(torch.empty(0), ctx=ctx, algorithm=algorithm)
                # and the count of thread blocks is 0 again
                assert int(ctx.control) == epoch << EPOCH_SHIFT.value
                seen = ctx.signals[epoch % 2].amax(0)
                assert all(int(seen[peer]) == epoch for peer in range(N) if peer != pe)
                tdcoll.barrier()
                assert torch.equal(ctx.inbox[1 - epoch % 2], other)
                assert int(ctx.signals[1 - epoch % 2].max()) <= epoch - 1
                tdcoll.barrier()
            tdcoll.free(buffer)

    World(N, ranks_per_node=ranks_per_node).run(host)


# ---------------------------------------------------------------------- a peer that is gone


def test_timeout_names_group_ranks() -> None:
    """PEs 3 and 1 are ranks 0 and 1 of their group."""
    world = World(N)

    def host(pe: int) -> tdcoll.CollectiveTimeout | None:
        if pe not in (1, 3):
            return None
        ctx = tdcoll.CollectiveContext([3, 1], max_bytes_per_rank=64)
        if pe == 1:
            world.kill(1)
        tdcoll.all_gather(data(0, 0), ctx=ctx)
        with pytest.raises(tdcoll.CollectiveTimeout) as raised:
            ctx.check()
        return raised.value

    error = world.run(host)[3]
    assert error is not None
    assert (error.rank, error.peer) == (0, 1)


# ---------------------------------------------------------------------- chunks


@pytest.mark.parametrize(
    ("ranks_per_node", "algorithms"),
    [(4, ("auto", "ll", "direct", "ring", "1d")), (2, ("auto", "1d", "2d"))],
)
def test_a_context_of_few_chunks(ranks_per_node: int, algorithms: tuple[str, ...]) -> None:
    def host(pe: int) -> None:
        for chunks in (2, 3):
            with tdcoll.CollectiveContext(max_bytes_per_rank=40_000, chunks=chunks) as ctx:
                assert ctx.signals.shape == (2, chunks, N)
                for algorithm in algorithms:
                    data = torch.arange(ctx.ll_bytes // 8 if algorithm == "ll" else 5000) * (pe + 1)
                    got = tdcoll.all_gather(data, ctx=ctx, algorithm=algorithm)
                    assert torch.equal(
                        got, torch.cat([torch.arange(len(data)) * (p + 1) for p in range(N)])
                    )

    World(N, ranks_per_node=ranks_per_node).run(host)


# ---------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("ranks_per_node", "asked", "most"),
    [
        (4, None, 1000),
        (4, 0, 0),
        (4, 5000, 5000),
        (2, None, -1),
        (2, 5000, -1),
    ],
)
def test_room_for_flagged_words(ranks_per_node: int, asked: int | None, most: int) -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1000, flagged_bytes=asked) as ctx:
            assert (ctx.ll_bytes, ctx.stores) == (most, True)
            assert ctx.flagged.shape == (2, N, max(1, -(-most // 12)) if most >= 0 else 0, 2)
            if most >= 0:
                gather_and_compare(ctx, 1, algorithm="ll" if most >= 64 else "auto")

    World(N, ranks_per_node=ranks_per_node).run(host)


def test_flagged_words_for_as_many_bytes_as_limits_say() -> None:
    assert [flagged_bytes(world) for world in (1, 2, 5)] == [1 << 20, 1 << 20, 1 << 18]


def test_ranks_that_cannot_store_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank, it is so for all."""
    blind = lambda view, pe: view.base if view.pe != 2 or pe == 2 else 0  # noqa: E731
    monkeypatch.setattr(MemoryView, "peer_base", blind)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
            assert (ctx.stores, ctx.ll_bytes, ctx.flagged.numel()) == (False, -1, 0)

    World(N).run(host)


@on_ranks(2, heap_bytes=1 << 18)
def test_room_for_words_that_announce_themselves(pe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, room, stride in ((0, 0, 0), (None, 17, 32), (33, 33, 48)):
        with tdcoll.CollectiveContext(max_bytes_per_rank=17, lamport_bytes=asked) as ctx:
            assert ctx.lamport_bytes == room
            assert (ctx.device_lamport.stride if ctx.device_lamport else 0) == stride
    monkeypatch.setattr(MemoryView, "peer_base", lambda view, pe: 0)
    tdcoll.barrier()
    with tdcoll.CollectiveContext(max_bytes_per_rank=16, lamport_bytes=64) as ctx:
        assert (ctx.device_lamport, ctx.lamport_bytes) == (None, 0)
