# SPDX-License-Identifier: Apache-2.0
"""Calls by copy engines on every rank of a job: the order of copies that they rely on, and what
runs beside them.

The GPU tests also set ``CUDA_DEVICE_MAX_CONNECTIONS=1``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from harness import check, device, expect, neighbour, rank, scaled, shared, simulated, world

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.collective import spec_of

ROUNDS = 16
"""Rounds of the litmus test between two barriers. Each has data and a stamp of its own."""


@tdcoll.jit
def count_old(data, stamps, wrong, n, number, monitor, BLOCK: tl.constexpr):
    """Wait for the stamp of each round, and count the words of its data that are not the round's,
    last words first."""
    for turn in range(16):
        tdl.wait_signal(stamps + turn, tdl.CMP_GE, number, monitor, 0, turn)
        for begin in range(0, n, BLOCK):
            at = n - begin - BLOCK + tl.arange(0, BLOCK)
            old = (tl.load(data + turn * n + at) != number).to(tl.int32)
            tl.store(wrong, tl.load(wrong) + tl.sum(old))
            tdl.syncthreads()


@check
def stamps_follow_data() -> str:
    """The litmus test: a copy of 8 bytes behind a copy on the same stream is not seen before all of
    its data is."""
    heap, done = runtime.current().heap, 0
    monitor, to = tdcoll.WaitMonitor(), neighbour()
    main = torch.cuda.current_stream().cuda_stream if not simulated() else 0
    wrong, side_stream = torch.zeros(1, dtype=torch.int32, device=device()), heap.side_stream()
    for n in scaled((256, 1 << 14, 1 << 19), (256,)):
        data, stamps = tdcoll.zeros((ROUNDS, n), torch.int64), tdcoll.zeros(ROUNDS, torch.int64)
        theirs, theirs_stamps = tdcoll.peer_tensor(data, to), tdcoll.peer_tensor(stamps, to)
        for number in range(1, 1 + scaled(40, 3)):
            source = torch.full((n,), number, dtype=torch.int64, device=device())
            if not simulated() and (number + rank()) % 3 == 0:
                torch.cuda._sleep(100_000)
            tdcoll.barrier()
            side_stream.fork(main)
            for turn in range(ROUNDS):
                heap.stream_copy(
                    side_stream.handle, theirs[turn].data_ptr(), source.data_ptr(), source.nbytes
                )
                heap.stream_copy(
                    side_stream.handle, theirs_stamps[turn].data_ptr(), source.data_ptr(), 8
                )
            count_old[(1,)](
                data, stamps, wrong, n, number, monitor.words, min(n, 2048), num_warps=8
            )
            side_stream.join(main)
            done += ROUNDS
        monitor.check()
        tdcoll.barrier()
        tdcoll.free(stamps)
        tdcoll.free(data)
    expect(int(wrong) == 0, f"{int(wrong)} words were old when their stamp had come")
    return f"{done} copies"


def calls(ctx: tdcoll.CollectiveContext, n: int) -> dict[str, Callable[[], Any]]:
    """A call of every collective by copy engines, of ``n`` fp32 per segment; results are sums of
    ones, or ranks."""
    whole, one = (
        torch.full((world() * n,), float(rank()), device=device()),
        torch.full((n,), 1.0, device=device()),
    )
    made = {
        name: lambda name=name: getattr(tdcoll, name)(
            whole if spec_of(name).scatters else one, ctx=ctx, algorithm="ce"
        )
        for name in COLLECTIVES
        if "ce" in spec_of(name).names
    }
    gathered = tdcoll.zeros(world() * n)
    made["all_gather_"] = lambda: tdcoll.all_gather_(gathered, ctx=ctx, algorithm="ce")
    return made


def events_of(run_it: Callable[[], Any]) -> list[dict[str, Any]]:
    """What a profiler sees on the GPU."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    tdcoll.barrier()
    with torch.profiler.profile(activities=activities) as profile:
        run_it()
        torch.cuda.synchronize()
    tdcoll.barrier()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]


@check(gpu_only=True)
def data_moves_by_memcpy() -> str:
    """Eagerly and in a replay: kernels are signal kernels of one thread block, and sums; and, where
    data is taken out of an inbox on the same GPU, the driver's own, which it prefers for that in
    graphs."""
    n, seen = 1 << 20, []
    with tdcoll.CollectiveContext(max_bytes_per_rank=4 * n) as ctx:
        for name, call in calls(ctx, n).items():
            call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            graph.replay()
            blocks = tdcoll.explain(name.strip("_"), world() * n, ctx=ctx, algorithm="ce").blocks
            for how, run_it in (("eager", call), ("replay", graph.replay)):
                events = events_of(run_it)
                kernels = [event for event in events if event["cat"] == "kernel"]
                copies = [event for event in events if event["cat"] == "gpu_memcpy"]
                of_driver = [kernel for kernel in kernels if kernel["name"].startswith("memcpy")]
                # Ranks that share a GPU copy everything on it.
                if how == "replay" and (
                    shared() or name in ("all_gather", "all_to_all", "all_reduce")
                ):
                    kernels = [kernel for kernel in kernels if kernel not in of_driver]
                for kernel in kernels:
                    grid, known = (
                        kernel["args"]["grid"][0],
                        kernel["name"].split("(")[0].removeprefix("tdcoll_"),
                    )
                    most = blocks if known == "sum_copies" else 1
                    expect(
                        known in ("enter", "wait_arrivals", "check_peers_alive", "sum_copies"),
                        f"{how} {name} runs {kernel['name']}",
                    )
                    expect(grid <= most, f"{how} {name}: {known} has {grid} thread blocks")
                moved = sum(event["args"].get("bytes", 0) for event in copies)
                if how == "replay" and shared():
                    # A profiler doesn't know how many bytes the driver's kernels move.
                    expect(copies or of_driver, f"{how} {name} copies nothing")
                else:
                    expect(
                        moved >= 4 * n * (world() - 1) // world(),
                        f"{how} {name} copies {moved} bytes",
                    )
                seen.append(len(kernels))
        ctx.check()
    return f"{min(seen)} to {max(seen)} kernels a call"


@check(gpu_only=True)
def beside_matmuls() -> None:
    """Right results while matmuls on another stream fill the GPU, replayed and eager, with ranks
    that come late."""
    n = 1 << 18
    a = torch.randn(8192, 8192, device=device(), dtype=torch.bfloat16)
    beside, out = torch.cuda.Stream(), torch.empty_like(a)
    with tdcoll.CollectiveContext(max_bytes_per_rank=4 * n) as ctx:
        for name, call in calls(ctx, n).items():
            first = call().clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept = call()
            for turn in range(10):
                with torch.cuda.stream(beside):
                    torch.mm(a, a, out=out)
                if (turn + rank()) % 3 == 0:
                    torch.cuda._sleep(300_000)
                graph.replay()
                expect(bool((kept == first).all()), f"{name}, replay {turn}")
                expect(bool((call() == first).all()), f"{name}, call {turn}")
        ctx.check()


@check
def matmuls_wait_for_copies() -> str:
    """All-gathers + matmuls whose shards copy engines send, eager and replayed, with other data in
    each call and ranks that come late."""
    rows, depth, columns = scaled((2048, 2048, 1024), (66, 16, 16))

    def whole(key: int, *shape: int) -> torch.Tensor:
        numbers = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(key))
        return numbers.to(device(), torch.bfloat16)

    weight = whole(rank(), columns, depth)
    x = whole(0, rows, depth)
    n_calls = scaled(40, 2, shared_gpus=8)
    with tdcoll.CollectiveContext(max_bytes_per_rank=rows * (2 * depth + 4)) as ctx:

        def call() -> torch.Tensor:
            return tdcoll.fused.all_gather_matmul(x, weight, ctx=ctx, algorithm="copied")

        call()
        graph = None
        captured: list[torch.Tensor] = []
        if not simulated():
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = [call(), call()]
        for number in range(n_calls):
            every = [whole(100 * number + one, rows, depth) for one in range(world())]
            wanted = (torch.cat(every).float() @ weight.float().t()).bfloat16()
            x.copy_(every[rank()])
            if not simulated() and (number + rank()) % 3 == 0:
                torch.cuda._sleep(300_000)
            expect(torch.equal(call(), wanted), f"call {number}")
            if graph is not None:
                graph.replay()
                right = all(torch.equal(made, wanted) for made in captured)
                expect(right, f"replay {number}")
        ctx.check()
    return f"{n_calls} calls"
