# SPDX-License-Identifier: Apache-2.0
"""CollectiveContext: its life, its refusals, and the invariants that its memory shows."""

from __future__ import annotations

import pytest
import torch

import tdcoll
from tdcoll import runtime
from tdcoll.collectives._host.plan import MOST_EPOCHS
from tdcoll.limits import CHANNELS, MAX_PROGRAMS, flagged_bytes
from tdcoll.primitives.group import EPOCH_SHIFT
from tdcoll.runtime.heap import Arena
from tdcoll.runtime.simulator.memory import MemoryView
from tdcoll.testing import Deadlock, World

N = 4


def data(rank: int, call: int, count: int = 16) -> torch.Tensor:
    """``-> [count]`` int32: encodes rank, call and index."""
    return rank * 1_000_000 + call * 1000 + torch.arange(count, dtype=torch.int32)


def gather_and_compare(
    ctx: tdcoll.CollectiveContext, call: int, ranks: list[int] | None = None, algorithm: str = "auto"
) -> None:
    ranks = list(range(ctx.world_size)) if ranks is None else ranks
    got = tdcoll.all_gather(data(ranks[ctx.rank], call), ctx=ctx, algorithm=algorithm)
    assert torch.equal(got, torch.cat([data(rank, call) for rank in ranks]))


def everywhere(host, n_pes: int = N, **options) -> list:
    return World(n_pes, **options).run(host)


# ---------------------------------------------------------------------- life


def test_facts() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1001) as ctx:
            assert (ctx.rank, ctx.world_size, ctx.max_bytes_per_rank) == (pe, N, 1001)
            assert ctx.capacity == 1008  # slots are aligned for 16-byte loads
            assert ctx.inbox.shape == (2, N, 1008)
            assert ctx.signals.shape == (2, CHANNELS, N)
            assert ctx.topology == tdcoll.topology()
            assert ctx.device == tdcoll.device()
            assert not ctx.closed
            assert repr(ctx) == (
                f"<CollectiveContext rank {pe}, 4 rank(s) on 2 node(s) (2 + 2), 1001 bytes per rank, open>"
            )
        assert ctx.closed
        assert repr(ctx).endswith("closed>")

    everywhere(host, ranks_per_node=2)


def test_symmetric_memory_is_taken_and_given_back() -> None:
    def host(pe: int) -> None:
        before = tdcoll.heap_info()
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=4096)
        used = tdcoll.heap_info().used - before.used
        assert used == sum(Arena.padded(tensor.nbytes) for tensor in ctx._symmetric)
        assert used >= ctx.inbox.nbytes + ctx.signals.nbytes == 2 * N * 4096 + 2 * CHANNELS * N * 8
        ctx.close()
        ctx.close()
        assert tdcoll.heap_info() == before

    everywhere(host)


def test_dirty_memory_does_not_look_like_signals() -> None:
    def host(pe: int) -> None:
        junk = tdcoll.empty(1 << 17, torch.int64)
        junk.fill_(1 << 40)
        tdcoll.free(junk)
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
            assert set(ctx.signals.unique().tolist()) <= {0, 1}  # a peer may be in the first call already
            assert not ctx.ready.any()
            for call in range(3):
                gather_and_compare(ctx, call)

    everywhere(host, seed=1, weak=True)


def test_use_after_close() -> None:
    def host(pe: int) -> None:
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64)
        buffer = tdcoll.empty((N, 2), torch.int32)
        ctx.close()
        with pytest.raises(tdcoll.ContextError, match="all_gather: the context is closed"):
            tdcoll.all_gather(data(pe, 0), ctx=ctx)
        with pytest.raises(tdcoll.ContextError, match="all_gather_: the context is closed"):
            tdcoll.all_gather_(buffer, ctx=ctx)

    everywhere(host)


def test_a_call_far_over_the_capacity_is_refused_with_the_number_and_costs_nothing() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=9) as ctx:
            large = torch.zeros(16 * MOST_EPOCHS + 1, dtype=torch.uint8)
            with pytest.raises(
                tdcoll.ContextError, match=r"16385 bytes would .*1024 epochs of 16 .*per_rank=192 or more"
            ):
                tdcoll.all_gather(large, ctx=ctx, algorithm="1d")
            assert int(ctx.control) == 0
            gather_and_compare(ctx, 0, algorithm="1d")
            assert int(ctx.control) >> EPOCH_SHIFT.value == 4, "64 bytes are 4 epochs"

    everywhere(host)


def test_error_in_the_body_does_not_wait_for_the_others() -> None:
    """Only rank 1 leaves by an exception. Closing is collective: it would wait for ranks that never close."""

    def host(pe: int) -> None:
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

    everywhere(host)


def test_close_is_collective() -> None:
    def host(pe: int) -> None:
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64)
        if pe != 1:
            ctx.close()

    with pytest.raises(Deadlock, match=r"pe0 host waits in 'free: offset of the tensor' for rank\(s\) \[1\]"):
        everywhere(host)


@pytest.mark.parametrize(
    ("capacity", "error", "text"),
    [
        (-1, ValueError, "max_bytes_per_rank must be at least 0, got -1"),
        (1.5, TypeError, r"max_bytes_per_rank must be an int, got 1\.5"),
        ("1M", TypeError, "max_bytes_per_rank must be an int, got '1M'"),
        (True, TypeError, "max_bytes_per_rank must be an int, got True"),
    ],
)
def test_capacity_that_is_none(capacity: object, error: type[Exception], text: str) -> None:
    def host(pe: int) -> None:
        before = tdcoll.heap_info()
        with pytest.raises(error, match=text):
            tdcoll.CollectiveContext(max_bytes_per_rank=capacity)
        assert tdcoll.heap_info() == before

    everywhere(host, 1)


def test_capacity_is_checked_across_ranks_and_against_the_heap() -> None:
    def host(pe: int) -> None:
        before = tdcoll.heap_info()
        with pytest.raises(tdcoll.RankMismatchError, match=r"differ in max_bytes_per_rank \(rank 0.*rank 3: 67\)$"):
            tdcoll.CollectiveContext(max_bytes_per_rank=64 + pe)
        with pytest.raises(tdcoll.HeapExhaustedError, match="NVSHMEM_SYMMETRIC_SIZE"):
            tdcoll.CollectiveContext(max_bytes_per_rank=before.total)
        assert tdcoll.heap_info() == before

    everywhere(host)


def test_capacity_of_nothing() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=0) as ctx:
            assert tdcoll.all_gather(torch.empty(0, 3), ctx=ctx).shape == (0, 3)
            assert int(ctx.control) >> EPOCH_SHIFT.value == 1
            gather_and_compare(ctx, 0)  # in epochs of 16 bytes, the least that there is

    everywhere(host)


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
                    tdcoll.all_gather(torch.empty(0), ctx=ctx, algorithm=algorithm)  # nothing to send is a call, too
                assert int(ctx.control) == epoch << EPOCH_SHIFT.value  # and the count of programs is 0 again
                seen = ctx.signals[epoch % 2].amax(0)
                assert all(int(seen[peer]) == epoch for peer in range(N) if peer != pe)
                tdcoll.barrier()
                assert torch.equal(ctx.inbox[1 - epoch % 2], other)
                assert int(ctx.signals[1 - epoch % 2].max()) <= epoch - 1
                tdcoll.barrier()
            tdcoll.free(buffer)

    everywhere(host, ranks_per_node=ranks_per_node)


def test_fast_rank_is_at_most_one_call_ahead() -> None:
    """What double buffering rests on: no signal of epoch e + 2 while a rank is in e."""

    def host(pe: int) -> int:
        ahead = 0
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
            for call in range(6):
                epoch = int(ctx.control) >> EPOCH_SHIFT.value
                ahead = max(ahead, int(ctx.signals.max()) - epoch)
                gather_and_compare(ctx, call, algorithm="1d")
                if pe == 2:
                    world.pause(200)
        return ahead

    world = World(N, seed=3, weak=True)
    results = world.run(host)
    assert max(results) == 1


def test_several_contexts_have_epochs_of_their_own() -> None:
    def host(pe: int) -> None:
        contexts = [tdcoll.CollectiveContext(max_bytes_per_rank=64 << i) for i in range(3)]
        calls = [0, 0, 0]
        for turn in range(9):
            i = (turn * turn) % 3
            gather_and_compare(contexts[i], turn)
            calls[i] += 1
            assert [int(ctx.control) >> EPOCH_SHIFT.value for ctx in contexts] == calls
        contexts[1].close()
        gather_and_compare(contexts[2], 10)
        contexts[2].close()
        contexts[0].close()
        assert tdcoll.heap_info().used == 0

    everywhere(host, seed=5, weak=True)


def test_subgroup_while_the_others_do_something_else() -> None:
    def host(pe: int) -> None:
        everybody = tdcoll.CollectiveContext(max_bytes_per_rank=64)
        if pe in (1, 3):
            order = [3, 1]
            with tdcoll.CollectiveContext(order, max_bytes_per_rank=64) as ctx:
                assert ctx.rank == order.index(pe)
                for call in range(4):
                    gather_and_compare(ctx, call, order)
        elif pe == 0:
            tensor = tdcoll.empty(100, group=[0])
            with tdcoll.CollectiveContext([0], max_bytes_per_rank=64) as ctx:
                gather_and_compare(ctx, 0, [0])
            tdcoll.free(tensor)
        gather_and_compare(everybody, 7)
        everybody.close()
        assert tdcoll.heap_info().used == 0

    everywhere(host, seed=2, weak=True, ranks_per_node=2)


# ---------------------------------------------------------------------- debug mode


def test_debug_mode_raises_on_all_ranks_and_the_context_lives_on() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=64, debug=True) as ctx:
            odd = pe == 2
            for tensor, algorithm, differ in (
                (torch.zeros(5 if odd else 4), "1d", "bytes (rank 0: 16, rank 1: 16, rank 2: 20, rank 3: 16)"),
                (torch.zeros(4, dtype=torch.float32 if odd else torch.int32), "1d", "dtype (rank 0: torch.int32, "),
                (torch.zeros(4), "2d" if odd else "1d", "algorithm (rank 0: 1d, rank 1: 1d, rank 2: 2d, rank 3: 1d)"),
            ):
                with pytest.raises(tdcoll.RankMismatchError) as raised:
                    tdcoll.all_gather(tensor, ctx=ctx, algorithm=algorithm)
                text = "all_gather arguments must be the same on all ranks; they differ in "
                assert str(raised.value).startswith(text + differ)
                assert str(raised.value).count("rank 3") == 1, "it names one field"
            assert int(ctx.control) == 0
            gather_and_compare(ctx, 1)

    everywhere(host, ranks_per_node=2)


@pytest.mark.parametrize(("value", "wanted"), [("0", False), ("1", True), ("yes", True)])
def test_debug_variable(monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool) -> None:
    monkeypatch.setenv("TDCOLL_DEBUG", value)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=16) as ctx:
            assert ctx.debug is wanted
        with tdcoll.CollectiveContext(max_bytes_per_rank=16, debug=not wanted) as ctx:
            assert ctx.debug is not wanted

    everywhere(host, 1)


# ---------------------------------------------------------------------- a peer that is gone


def test_failed_context_refuses_every_call_and_closes_alone() -> None:
    world = World(3, seed=4, weak=True)

    def host(pe: int) -> tdcoll.CollectiveTimeout:
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64, timeout_s=5)
        for call in range(4):
            gather_and_compare(ctx, call)
        ctx.check()
        if pe == 1:
            world.kill(1)
        tdcoll.all_gather(data(pe, 4), ctx=ctx)
        with pytest.raises(tdcoll.CollectiveTimeout) as raised:
            ctx.check()
        assert repr(ctx).endswith("failed>")
        for _ in range(2):
            with pytest.raises(tdcoll.CollectiveTimeout) as again:
                tdcoll.all_gather(data(pe, 5), ctx=ctx)
            assert str(again.value) == str(raised.value)
        used = tdcoll.heap_info().used
        ctx.close()  # without the others
        assert ctx.closed
        assert tdcoll.heap_info().used == used, "a message may still come: the memory stays taken"
        assert runtime.current().failed
        with pytest.raises(tdcoll.ContextError, match="closed"):
            tdcoll.all_gather(data(pe, 6), ctx=ctx)
        return raised.value

    first, dead, last = world.run(host)
    assert dead is None
    for rank, error in ((0, first), (2, last)):
        assert (error.rank, error.peer, error.epoch, error.expected, error.seen) == (rank, 1, 5, 5, 3)
        assert error.timeout_s == 5.0


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


# ---------------------------------------------------------------------- channels


def test_channels_are_a_number_of_chunks_that_ranks_agree_on() -> None:
    def host(pe: int) -> None:
        for wrong, error in ((0, ValueError), (CHANNELS + 1, ValueError), (True, TypeError), ("4", TypeError)):
            with pytest.raises(error, match=r"^channels must be"):
                tdcoll.CollectiveContext(max_bytes_per_rank=64, channels=wrong)  # type: ignore[arg-type]
        with pytest.raises(tdcoll.RankMismatchError, match=r"channels \(rank 0: 4, .*rank 3: 8\)$"):
            tdcoll.CollectiveContext(max_bytes_per_rank=64, channels=8 if pe == 3 else 4)
        for channels in (1, 3):
            with tdcoll.CollectiveContext(max_bytes_per_rank=40_000, channels=channels) as ctx:
                assert ctx.signals.shape == (2, channels, N)
                data = torch.arange(10_000) * (pe + 1)
                for algorithm in ("auto", "ll", "direct", "ring", "1d", "2d"):
                    small = data[: ctx.ll_bytes // 8] if algorithm == "ll" else data[:5000]
                    got = tdcoll.all_gather(small, ctx=ctx, algorithm=algorithm)
                    assert torch.equal(got, torch.cat([torch.arange(len(small)) * (p + 1) for p in range(N)]))

    everywhere(host)


# ---------------------------------------------------------------------- sizes


def test_sizes_that_are_none() -> None:
    def host(pe: int) -> None:
        before = tdcoll.heap_info()
        for name, wrong, error, text in (
            ("flagged_bytes", -1, ValueError, "flagged_bytes must be at least 0, got -1"),
            ("max_programs", MAX_PROGRAMS + 1, ValueError, f"max_programs must be 1 to {MAX_PROGRAMS}, got"),
            ("max_programs", "8", TypeError, "max_programs must be an int, got '8'"),
        ):
            with pytest.raises(error, match=text):
                tdcoll.CollectiveContext(max_bytes_per_rank=64, **{name: wrong})  # type: ignore[arg-type]
        for name, usual in (("flagged_bytes", 64), ("max_programs", 132)):
            with pytest.raises(tdcoll.RankMismatchError, match=rf"differ in {name} \(.*rank 3: {usual + 1}\)$"):
                tdcoll.CollectiveContext(max_bytes_per_rank=64, **{name: usual + (pe == 3)})
        assert tdcoll.heap_info() == before

    everywhere(host)


@pytest.mark.parametrize(
    ("ranks_per_node", "asked", "most"),
    [(4, None, 1000), (4, 0, 0), (4, 5000, 5000), (2, None, 1000), ([3, 1], None, -1), ([3, 1], 64, -1)],
)
def test_room_for_flagged_words(ranks_per_node: int | list[int], asked: int | None, most: int) -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1000, flagged_bytes=asked) as ctx:
            assert (ctx.ll_bytes, ctx.stores) == (most, True)
            assert ctx.flagged.shape == (2, N, max(1, -(-most // 12)) if most >= 0 else 0, 2)
            if most >= 0:
                gather_and_compare(ctx, 1, algorithm="ll" if most >= 64 else "auto")

    everywhere(host, ranks_per_node=ranks_per_node)


def test_flagged_words_for_as_many_bytes_as_limits_say() -> None:
    assert [flagged_bytes(world, 1) for world in (1, 2, 5)] == [1 << 20, 1 << 20, 1 << 18]
    assert flagged_bytes(8, 2) == flagged_bytes(64, 8) == 16 << 10

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=20 << 10, channels=1) as ctx:
            assert ctx.ll_bytes == flagged_bytes(N, 2)

    everywhere(host, ranks_per_node=2)


def test_ranks_that_cannot_store_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank, it is so for all."""
    blind = lambda view, pe: view.base if view.pe != 2 or pe == 2 else 0  # noqa: E731
    monkeypatch.setattr(MemoryView, "peer_base", blind)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
            assert (ctx.stores, ctx.ll_bytes, ctx.flagged.numel()) == (False, -1, 0)

    everywhere(host)


def test_room_for_words_that_announce_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    def host(pe: int) -> None:
        for asked, room, stride in ((0, 0, 0), (None, 17, 32), (33, 33, 48)):
            with tdcoll.CollectiveContext(max_bytes_per_rank=17, lamport_bytes=asked) as ctx:
                assert ctx.lamport_bytes == room
                assert (ctx.device_lamport.stride if ctx.device_lamport else 0) == stride
        with pytest.raises(ValueError, match="lamport_bytes must be at least 0, got -1"):
            tdcoll.CollectiveContext(max_bytes_per_rank=16, lamport_bytes=-1)
        with pytest.raises(tdcoll.RankMismatchError, match=r"differ in lamport_bytes \(rank 0: 0, rank 1: 1\)$"):
            tdcoll.CollectiveContext(max_bytes_per_rank=16, lamport_bytes=pe)
        monkeypatch.setattr(MemoryView, "peer_base", lambda view, pe: 0)
        tdcoll.barrier()
        with tdcoll.CollectiveContext(max_bytes_per_rank=16, lamport_bytes=64) as ctx:
            assert (ctx.device_lamport, ctx.lamport_bytes) == (None, 0)

    World(2, heap_bytes=1 << 18).run(host)


def test_program_budget() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=64, max_programs=132) as ctx:
            assert ctx.max_programs == 132
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
            assert ctx.max_programs == MAX_PROGRAMS

    everywhere(host, 1)


def test_a_context_of_few_channels_over_nodes() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=40_000, channels=1) as ctx:
            for algorithm in ("ll", "1d", "2d"):
                data = torch.arange(ctx.ll_bytes // 8) * (pe + 1)
                got = tdcoll.all_gather(data, ctx=ctx, algorithm=algorithm)
                assert torch.equal(got, torch.cat([torch.arange(len(data)) * (p + 1) for p in range(N)]))

    everywhere(host, ranks_per_node=2)
