# SPDX-License-Identifier: Apache-2.0
"""Words of other PEs, waits for words, barriers of a grid, work on streams: checks for every rank
of a job."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import triton.language as tl
from harness import (
    check,
    device,
    expect,
    expect_raises,
    neighbour,
    rank,
    scaled,
    simulated,
    symmetric,
    world,
)

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "language"))
import kernels_of_words as kernels


def predecessor() -> int:
    return (rank() - 1) % world()


def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in ordinary memory of this rank."""
    return torch.zeros(count, dtype=dtype, device=device())


def one_node() -> bool:
    return tdcoll.topology().n_nodes == 1


@check
def values_of_one_word() -> None:
    words, floats = symmetric(1, torch.int64), symmetric(1, torch.float64)
    arrived, monitor = symmetric(1, torch.int64), tdcoll.WaitMonitor()
    out, out_floats = zeros(1, torch.int64), zeros(1, torch.float64)
    kernels.values[(1,)](words, floats, out, out_floats, arrived, monitor.words)
    monitor.check()
    expect(
        (words.item(), floats.item()) == ((predecessor() + 1) * 10**10, predecessor() + 0.25),
        f"{words}, {floats}",
    )
    expect(
        (out.item(), out_floats.item()) == ((rank() + 1) * 10**10, rank() + 0.25),
        f"{out}, {out_floats}",
    )


@check
def atomics_on_one_pe() -> None:
    rounds = scaled(50, 3, shared_gpus=5)
    narrow, wide = symmetric(3, torch.int32), symmetric(2, torch.int64)
    old, monitor = zeros(rounds + 3, torch.int64), tdcoll.WaitMonitor()
    kernels.atomics[(1,)](narrow, wide, old, narrow, monitor.words, rounds)
    kept = runtime.current().control.all_gather(
        range(world()), "what was there before", old.tolist()
    )
    counted = sorted(value for one in kept for value in one[:rounds])
    expect(counted == list(range(world() * rounds)), f"counts: {counted[:10]}")
    expect(
        len({one[rounds] for one in kept}) == world(),
        f"holders of the lock: {[one[rounds] for one in kept]}",
    )
    expect(
        len({one[rounds + 1] for one in kept}) == world(),
        f"swaps: {[one[rounds + 1] for one in kept]}",
    )
    expect(
        {one[rounds + 2] for one in kept} == {world() * rounds << 33},
        f"sums: {[one[-1] for one in kept]}",
    )


@check
def atomics_by_the_thread() -> None:
    counter, turns = zeros(1, torch.int64), zeros(8, torch.int32)
    kernels.count_by_threads[(3,)](counter, turns, False)
    expect(
        (counter.item(), turns.tolist()) == (30, [1, 2, 3, 4, 5, 0, 0, 0]), f"{counter}, {turns}"
    )


@check
def counted_puts() -> None:
    if world() < 2:
        return
    for _ in range(scaled(200, 2, shared_gpus=3)):
        buffer, counter = symmetric(16, torch.int32), symmetric(1, torch.int32)
        if rank() == 1:
            buffer.copy_(torch.arange(16) + 7)
        out, monitor = zeros(16, torch.int32), tdcoll.WaitMonitor()
        if rank() < 2:
            kernels.put_then_count[(1,)](buffer, counter, out, monitor.words, True)
        monitor.check()
        expect(rank() or out.tolist() == list(range(7, 23)), str(out))
        tdcoll.barrier()


@check
def waits_for_words() -> str | None:
    if not one_node():
        return "pointers reach one node"
    for send in (True, False):
        narrow, wide = symmetric(1, torch.int32), symmetric(1, torch.int64)
        ok, monitor = zeros(2, torch.int32), tdcoll.WaitMonitor(timeout_s=30 if send else 0.5)
        kernels.wait_here_and_there[(1,)](narrow, wide, ok, monitor.words, send)
        expect(ok.tolist() == [send, send], f"send {send}: {ok}")
        if not send:
            error = expect_raises(
                tdcoll.CollectiveTimeout, monitor.check, f"peer {neighbour()}: signal 7"
            )
            told = error.expected, error.seen  # type: ignore[attr-defined]
            expect(told == (-4, 0), str(told))
            runtime.current().failed = False  # nothing else is broken
        tdcoll.barrier()
    return None


@check
def asking() -> None:
    if world() < 2:
        return
    signals, out = symmetric(2, torch.int64), zeros(2, torch.int64)
    signals[1] = 77 if rank() == 1 else 0
    tdcoll.barrier()
    if rank() < 2:
        kernels.ask[(1,)](signals, out, 1)
    expect(rank() or out.tolist() == [0, 77], str(out))
    tdcoll.barrier()


@check
def programs_of_a_grid_meet() -> None:
    counter, monitor = zeros(1, torch.int64), tdcoll.WaitMonitor()
    most = (
        torch.cuda.get_device_properties(device()).multi_processor_count if not simulated() else 4
    )
    n, width = 16 if not simulated() else 3, 256
    for _ in range(scaled(20, 1, shared_gpus=2)):
        for size in (most, 3, most):
            cells, sums = zeros(n * width, torch.int32), zeros(n * width, torch.int32)
            options = {} if simulated() else {"launch_cooperative_grid": True}
            kernels.rounds[(size,)](cells, sums, counter, monitor.words, n, True, width, **options)
            monitor.check()
            wanted = torch.tensor(
                [sum(range(i + 1, size + i + 1)) for i in range(n)], dtype=torch.int32
            )
            expect(
                torch.equal(sums.view(n, width)[:, :size].cpu(), wanted[:, None].expand(n, size)),
                f"{size} programs",
            )


@check
def words_of_128_bits() -> None:
    source, dest = torch.arange(256, dtype=torch.int32, device=device()), zeros(256, torch.int32)
    kernels.move_words[(1,)](source, dest, 40, 64)
    wanted = source.view(64, 4).flip(1).clone()
    wanted[40:] = 0
    expect(torch.equal(dest.view(64, 4), wanted), str(dest))


@check
def peers_tensors() -> str | None:
    if not one_node():
        return "pointers reach one node"
    mine = symmetric((4, 6), torch.int32)
    numbers = torch.arange(24, dtype=torch.int32, device=device()).view(4, 6)
    mine.copy_(numbers + 100 * rank())
    tdcoll.barrier()
    for peer in range(world()):
        theirs = tdcoll.peer_tensor(mine, peer)
        expect(theirs.device == device(), str(theirs.device))
        expect(torch.equal(theirs, numbers + 100 * peer), f"of rank {peer}: {theirs}")
        expect(
            torch.equal(tdcoll.peer_tensor(mine[1:3, ::2].t(), peer), theirs[1:3, ::2].t()),
            f"strided, {peer}",
        )
    tdcoll.barrier()
    tdcoll.peer_tensor(mine, neighbour())[3, 5] = -rank()
    tdcoll.barrier()
    expect(mine[3, 5].item() == -predecessor(), str(mine))
    return None


@check
def streams_of_ranks() -> str | None:
    """Copies, words and waits on a stream of their own; the copies are too long to have come by
    chance."""
    if not one_node():
        return "pointers reach one node"
    count = scaled(1 << 24, 64, shared_gpus=1 << 20)
    stream = None if simulated() else torch.cuda.Stream()
    for dtype in (torch.int32, torch.int64):
        data, words = symmetric(count, torch.float32), symmetric(2, dtype)
        for turn in (1, 2, 3):
            source = torch.full((count,), 10.0 * turn + rank(), device=device())
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            tdcoll.copy_on_stream(tdcoll.peer_tensor(data, neighbour()), source, stream)
            tdcoll.write_on_stream(tdcoll.peer_tensor(words[:1], neighbour()), turn, stream)
            tdcoll.wait_on_stream(words[0], tdl.CMP_GE if turn < 3 else tdl.CMP_EQ, turn, stream)
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
            expect(
                bool((data == 10.0 * turn + predecessor()).all()),
                f"{dtype}, turn {turn}: {data[:4]}",
            )
            tdcoll.barrier()
    return None


@tdcoll.jit
def put(dest, source, nbytes, peer):
    tdl.putmem_nbi_block(dest, source, nbytes, peer)


@check
def barriers_on_streams() -> None:
    count = scaled(1 << 20, 16, shared_gpus=1 << 12)
    buffer = symmetric(2 * count, torch.int32).view(2, count)
    for turn in range(1, scaled(20, 2, shared_gpus=3) + 1):
        buffer[0].fill_(turn + rank())
        put[(1,)](buffer[1], buffer[0], 4 * count, neighbour())
        tdcoll.barrier_on_stream()
        expect(bool((buffer[1] == turn + predecessor()).all()), f"turn {turn}: {buffer[1][:4]}")
        tdcoll.barrier_on_stream()


@tdcoll.jit
def swap(buffer, arrived, control, monitor, out, n, BLOCK: tl.constexpr):
    """Give every other rank a number that holds the call, which the kernel counts itself."""
    epoch, alive = tdcoll.begin_epoch(control, monitor)
    me = tdl.my_pe()
    slot = (epoch % 2) * n
    if alive != 0:
        if tl.program_id(0) < n:
            tl.store(buffer + 2 * n + slot + tl.program_id(0), me + 100 * epoch)
            tdl.syncthreads()
            tdl.putmem_signal_block(
                *(buffer + slot + me, buffer + 2 * n + slot + tl.program_id(0), 8),
                *(arrived + slot + me, epoch, tdl.SIGNAL_SET, tl.program_id(0)),
            )
        else:
            tdl.wait_signals(arrived + slot, n, -1, tdl.CMP_GE, epoch, monitor, BLOCK)
            index = tl.arange(0, BLOCK)
            tl.store(out + index, tl.load(buffer + slot + index, mask=index < n), mask=index < n)


@check
def epochs_of_own_kernels() -> None:
    """A kernel of the user's is right in replays of a CUDA graph, with odd and even numbers of
    calls in it."""
    n, block = world(), 1 << (world() - 1).bit_length()
    buffer, arrived = symmetric(4 * n, torch.int64), symmetric(2 * n, torch.int64)
    control, monitor, out = zeros(1, torch.int64), tdcoll.WaitMonitor(), zeros(n, torch.int64)

    def call() -> None:
        swap[(n + 1,)](buffer, arrived, control, monitor.words, out, n, block)

    def right(epoch: int) -> None:
        monitor.check()
        expect(out.tolist() == [peer + 100 * epoch for peer in range(n)], f"call {epoch}: {out}")

    for epoch in (1, 2, 3):
        call()
        right(epoch)
    done = 3
    for calls in (1, 2, 3) if not simulated() else ():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        for _ in range(3):
            graph.replay()
            done += calls
            right(done)
        del graph
    tdcoll.barrier()
