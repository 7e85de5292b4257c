# SPDX-License-Identifier: Apache-2.0
"""Process groups of backend "tdcoll", on every rank of a job: what they have, and how their calls
run beside others.

They have options, contexts and an fallback backend. Their calls run as works, on streams and in
CUDA graphs.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from backend_job import (
    SINGLE_SCATTER,
    by_fallback,
    data,
    dense_sum,
    handled,
    same,
    single,
    sparse,
    sums,
)
from harness import check, device, everyone, expect, expect_raises, rank, shared, world
from torch.distributed import batch_isend_irecv  # before there is a group of tdcoll's
from torch.distributed.device_mesh import DeviceMesh

import tdcoll
from tdcoll import runtime
from tdcoll.distributed import Options, TdcollProcessGroup, explain

LINES: list[str] = []


class Remember(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LINES.append(record.getMessage())


# ---------------------------------------------------------------------- works, groups


@check
def works() -> None:
    tensor = data(rank(), 3)
    out = torch.empty(world() * 3, device=device())
    if rank() == 0:
        time.sleep(0.3)
    work = single(out, tensor, async_op=True)
    then = work.get_future().then(lambda done: done.value()[0].sum())
    expect(work.wait() is True, "wait returns True")
    wanted = torch.cat([data(r, 3) for r in everyone()])
    same(work.result()[0], wanted, "result")
    same(then.wait(), wanted.sum(), "a future's callback")
    if device().type == "cuda":
        torch.cuda.synchronize()
    expect(work.is_completed() and work.is_success() and work.exception() is None, "complete")

    # Asynchronous: what is issued in between is not held up, or this would never end. (The first
    # message between two ranks is sent before: for that NCCL makes a communicator, which waits for
    # all that the GPU is doing.)
    # gloo, which then handles CUDA tensors, cannot send them
    where = torch.device("cpu") if shared() else device()
    peer_out = torch.empty(1, device=where)
    if rank() == 0:
        dist.send(torch.ones(1, device=where), 1)
    elif rank() == 1:
        dist.recv(peer_out, 0)
    if device().type == "cuda":
        torch.cuda.synchronize()
    if rank() == 0:
        work = single(out, tensor, async_op=True)
        dist.send(torch.ones(1, device=where), 1)
        work.wait()
    else:
        if rank() == 1:
            dist.recv(peer_out, 0)
        single(out, tensor)
    same(out, wanted, "around a send")

    if device().type == "cpu":
        if rank() == 0:
            time.sleep(0.5)
        late = dist.barrier(async_op=True)
        if rank() != 0:
            expect(not late.is_completed(), "a barrier before all ranks are there is not complete")
            expect_raises(
                dist.DistBackendError, lambda: late.wait(timedelta(milliseconds=20)), "0.02 s"
            )
        late.wait()


@check
def subgroups() -> str | None:
    last = world() - 1
    pair = dist.new_group([0, last])
    if rank() in (0, last):
        out = torch.empty(8, device=device())
        single(out, data(rank(), 4), group=pair)
        same(out, torch.cat([data(0, 4), data(last, 4)]), "pair")
        tensor = sparse(rank())
        dist.all_reduce(tensor, group=pair)
        same(tensor.to_dense(), sparse(0).to_dense() + sparse(last).to_dense(), "sparse in a pair")
        dist.barrier(pair)
        expect(handled("all_gather", pair) == handled("barrier", pair) == 1, explain(pair))
        dist.destroy_process_group(pair)
    mixed = dist.new_group(
        backend=f"cpu:gloo,{device().type}:tdcoll" if device().type == "cuda" else "cpu:tdcoll"
    )
    expect(isinstance(mixed, TdcollProcessGroup), f"{mixed}")
    single(torch.empty(world(), device=device()), data(rank(), 1), group=mixed)
    expect(handled("all_gather", mixed) == 1, explain(mixed))
    dist.destroy_process_group(mixed)
    alone = dist.new_group([rank()], use_local_synchronization=True)
    mine = sparse(rank())
    dist.all_reduce(mine, group=alone)
    same(mine.to_dense(), sparse(rank()).to_dense(), "alone")
    reverse = dist.group.WORLD.split_group(list(everyone())[::-1], group_name="reverse")
    gathered = torch.empty(world(), device=device())
    reverse.all_gather_single(gathered, data(rank(), 1)).wait()
    same(gathered, torch.cat([data(r, 1) for r in reversed(everyone())]), "split, in another order")
    expect(
        dist.group.WORLD.split_group([(rank() + 1) % world()], group_name=f"not {rank()}") is None,
        "not in it",
    )
    reverse.shutdown()
    if shared():
        return "without DeviceMesh, which deals out the GPUs of a host to as many ranks"

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(device().type, (world(),))
    before = handled("all_gather")
    whole = DTensor.from_local(data(rank(), 4), mesh, [Shard(0)]).full_tensor()
    same(whole, torch.cat([data(r, 4) for r in everyone()]), "DTensor on a DeviceMesh")
    expect(handled("all_gather") > before, "a mesh of all ranks uses the default group")
    return None


@check
def order_of_ranks() -> None:
    """A list keeps its order; PyTorch sorts the ranks of a new group."""
    turned = list(everyone())[::-1]
    own, new = data(rank(), 2), dist.new_group(turned)
    same(tdcoll.all_gather(own, group=turned), torch.cat([data(r, 2) for r in turned]), "a list")
    same(
        tdcoll.all_gather(own, group=new),
        torch.cat([data(r, 2) for r in everyone()]),
        "a new group",
    )
    out = torch.empty(2 * world(), device=device())
    single(out, own, group=new)
    same(out, torch.cat([data(r, 2) for r in everyone()]), "the backend's")
    dist.destroy_process_group(new)
    if not shared():
        mesh = DeviceMesh(device().type, turned)
        same(
            tdcoll.all_gather(own, group=mesh),
            torch.cat([data(r, 2) for r in everyone()]),
            "a mesh",
        )


@check
def a_first_call_that_waits_holds_up_no_other_thread() -> None:
    """Rank 0 waits in a group's first call until the others have made calls of another group, with
    rank 0's thread."""
    one, other = (dist.new_group(everyone(), timeout=timedelta(seconds=20)) for _ in range(2))
    smaller, tensor = (torch.ones(n, device=device()) for n in (8, 9))
    dist.all_reduce(tensor, group=other)
    dist.barrier(group=other)  # which has made a context, too

    def first_call() -> None:
        dist.all_reduce(torch.ones(8, device=device()), group=one)

    def calls_of_the_other() -> None:
        dist.all_reduce(smaller, group=other)  # of a new shape, for which the context has room
        dist.barrier(group=other)

    with ThreadPoolExecutor() as pool:
        waits = pool.submit(first_call) if rank() == 0 else None
        time.sleep(0.3)
        calls_of_the_other()
        if waits is None:
            first_call()
        else:
            waits.result()
    same(smaller, torch.full_like(smaller, world()), "a call of the other group")
    for group in (one, other):
        dist.destroy_process_group(group)


@check
def batched_messages() -> None:
    """To both neighbors in a ring at once, of a size that NCCL does not buffer."""
    if shared():  # by gloo
        for call in (dist.send, dist.recv):
            message = torch.ones(1, device=device())
            expect_raises(
                ValueError,
                lambda call=call, t=message: call(t, (rank() + 1) % world()),
                "must be on the CPU",
            )
        return
    n = 4 << 20 if device().type == "cuda" else 1 << 10
    left, right = (rank() - 1) % world(), (rank() + 1) % world()
    # gloo sends nothing to itself
    for call in range(2 if world() > 1 or device().type == "cuda" else 0):
        sent = [
            torch.full((n,), 10.0 * rank() + direction + 100 * call, device=device())
            for direction in (0, 1)
        ]
        got = [torch.empty(n, device=device()) for _ in sent]
        operations = [
            dist.P2POp(dist.isend, sent[0], left),
            dist.P2POp(dist.isend, sent[1], right),
            dist.P2POp(dist.irecv, got[0], right),
            dist.P2POp(dist.irecv, got[1], left),
        ]
        works = batch_isend_irecv(operations)
        for work in works:
            work.wait()
        expect(len(works) == (1 if device().type == "cuda" else 4), f"{len(works)} works")
        for direction, peer in enumerate((right, left)):
            same(
                got[direction],
                torch.full_like(got[direction], 10.0 * peer + direction + 100 * call),
                f"from rank {peer}",
            )

    @torch.compile(backend="eager")
    def passed_on(tensor: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(tensor)
        around = [dist.P2POp(dist.isend, tensor, right), dist.P2POp(dist.irecv, found, left)]
        for work in batch_isend_irecv(around):
            work.wait()
        return found + 1

    if world() > 1:
        same(passed_on(data(rank(), 8)), data(left, 8) + 1, "in a compiled function")
    expect_raises(ValueError, lambda: batch_isend_irecv(["a message"]), "P2POp")


@check
def options_and_words() -> None:
    before = len(LINES)
    group = dist.new_group(pg_options=Options(handles="none"))
    out = torch.empty(world() * 2, device=device())
    for _ in range(3):
        single(out, data(rank(), 2), group=group)
        tensor = sparse(rank())
        dist.all_reduce(tensor, group=group)
    same(out, torch.cat([data(r, 2) for r in everyone()]), "inner all_gather")
    same(tensor.to_dense(), dense_sum(), "inner sparse all_reduce")
    mean = sparse(rank())
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    expect(torch.allclose(mean.to_dense() * world(), dense_sum()), "inner sparse average")
    dist.barrier(group)
    expect(
        not any(handled(kind, group) for kind in ("all_gather", "sparse_all_reduce", "barrier")),
        explain(group),
    )
    text = explain(group)
    for kind in ("all_gather", "sparse_all_reduce", "barrier"):
        expect(f"  {kind}: fallback backend; configured to handle nothing" in text, text)
    if rank() == 0:
        lines = [line for line in LINES[before:] if f"of group {group.group_name} " in line]
        by = [
            line
            for line in lines
            if "tdcoll: gloo handles " in line or "tdcoll: nccl handles " in line
        ]
        expect(by == lines and len(lines) == 3, f"one line per kind: {lines}")
    some = dist.new_group(pg_options=Options(handles="barrier"))
    single(out, data(rank(), 2), group=some)
    dist.barrier(some)
    expect((handled("all_gather", some), handled("barrier", some)) == (0, 1), explain(some))
    deadline = dist.BarrierOptions()  # dist.barrier(timeout=...) of newer PyTorch
    deadline.timeout = timedelta(seconds=20)
    some.barrier(deadline).wait()
    expect(handled("barrier", some) == 2, explain(some))
    dist.destroy_process_group(some)
    expect(
        "  all_gather: tdcoll" in explain() and "  everything else: fallback backend" in explain(),
        explain(),
    )
    plain = dist.new_group(backend="gloo")
    expect("tdcoll handles none" in explain(plain), explain(plain))
    expect_raises(
        tdcoll.RankMismatchError,
        lambda: dist.new_group(pg_options=Options(handles="all" if rank() else "none")),
        "they differ in handles (rank 0: (), rank 1: (",
    )
    expect_raises(
        tdcoll.RankMismatchError,
        lambda: dist.new_group(pg_options=Options(heap_bytes=(8 + rank()) << 20)),
        "heap_bytes",
    )


# ---------------------------------------------------------------------- contexts


@check
def blocks_of_all_contexts_fit() -> None:
    """A group for whose contexts nothing is left is handled by the fallback backend; what is closed
    is free again."""
    job, groups = runtime.current(), []
    before = job.blocks_taken
    while not groups or handled("all_gather", groups[-1]):
        groups.append(dist.new_group())
        out = torch.empty(world(), device=device())
        single(out, data(rank(), 1), group=groups[-1])
        same(out, torch.cat([data(r, 1) for r in everyone()]), f"group {len(groups)}")
        expect(len(groups) < 100, "there is no end of thread blocks")
    expect(len(groups) > 1, "no group found any")
    expect(
        any("other contexts have left" in why for why in by_fallback("all_gather", groups[-1])),
        explain(groups[-1]),
    )
    for group in groups:
        dist.destroy_process_group(group)
    expect(job.blocks_taken == before, f"{job.blocks_taken} are taken, {before} were")


# ---------------------------------------------------------------------- GPUs


@check(gpu_only=True)
def streams() -> None:
    """A call waits for the current stream, and wait() makes the current stream wait for it."""
    side_stream = torch.cuda.Stream()
    n = 1 << 16
    before = [handled(kind) for kind in ("all_gather", "all_reduce", "reduce_scatter")]
    for stream in (torch.cuda.current_stream(), side_stream):
        with torch.cuda.stream(stream):
            # the second asynchronous one goes the short way
            for asynchronous in (False, True, True):
                tensor = torch.zeros(n, device=device())
                out, part = (
                    torch.empty(world() * n, device=device()),
                    torch.empty(n, device=device()),
                )
                whole = torch.zeros(world() * n, device=device())
                torch.cuda._sleep(20_000_000)
                tensor.fill_(rank() + 1)
                whole.fill_(rank() + 1)
                works = [
                    single(out, tensor, async_op=asynchronous),
                    SINGLE_SCATTER(part, whole, async_op=asynchronous),
                    dist.all_reduce(whole, async_op=asynchronous) if not asynchronous else None,
                ]
                expect(
                    torch.cuda.current_stream() == stream,
                    "the caller's stream is the current one again",
                )
                if asynchronous:
                    works[1].wait()
                    works[2] = dist.all_reduce(whole, async_op=True)
                    works[0].wait(), works[2].wait()
                total = sum(r + 1 for r in everyone())
                expect(int(out.double().sum()) == total * n, f"all_gather, {asynchronous}")
                expect(bool((part == total).all()), f"reduce_scatter, {asynchronous}")
                expect(bool((whole == total).all()), f"all_reduce, {asynchronous}")
    torch.cuda.synchronize()
    now = [handled(kind) for kind in ("all_gather", "all_reduce", "reduce_scatter")]
    expect([b - a for a, b in zip(before, now, strict=True)] == [6, 6, 6], explain())


@check(gpu_only=True)
def groups_together() -> None:
    """All-gathers and all-reduces of one group, and reduce-scatters of another, on three streams.
    Ranks begin those of the two groups in different orders, beside matmuls that fill the GPU: they
    end, and are right."""
    n, calls, other = 1 << 18, 40, dist.new_group(pg_options=Options(blocks=16))
    gathering, reducing, scattering = (torch.cuda.Stream() for _ in range(3))
    own = [data(rank(), n, call=call) for call in range(2)]
    whole = [data(rank(), world() * n, call=call) for call in range(2)]
    outs = [torch.empty(world() * n, device=device()) for _ in range(2)]
    parts = [torch.empty(n, device=device()) for _ in range(2)]
    maxima = [tensor.clone() for tensor in own]  # which later all-reduces leave as they are
    matrix = torch.randn(2048, 2048, device=device())
    single(outs[0], own[0])  # first calls make contexts, in one order
    dist.all_reduce(maxima[0], dist.ReduceOp.MAX)
    SINGLE_SCATTER(parts[0], whole[0], group=other)
    # a first launch may wait until the GPU is idle: not among the calls
    matrix = (matrix @ matrix).clamp(-1, 1)
    torch.cuda.synchronize()
    for call in range(calls):

        def gather(call: int = call) -> None:
            with torch.cuda.stream(gathering):
                single(outs[call % 2], own[call % 2])
            with torch.cuda.stream(reducing):
                dist.all_reduce(maxima[call % 2], dist.ReduceOp.MAX)

        def scatter(call: int = call) -> None:
            with torch.cuda.stream(scattering):
                SINGLE_SCATTER(parts[call % 2], whole[call % 2], group=other)

        for make in (gather, scatter) if (rank() + call) % 2 else (scatter, gather):
            make()
            matrix = (matrix @ matrix).clamp(-1, 1)
    torch.cuda.synchronize()
    for call in range(2):
        same(outs[call], torch.cat([data(r, n, call=call) for r in everyone()]), f"gathered {call}")
        same(parts[call], sums(world() * n, call).view(world(), n)[rank()], f"scattered {call}")
        largest = torch.stack([data(r, n, call=call) for r in everyone()]).amax(0)
        same(maxima[call], largest, f"maxima {call}")
    dist.destroy_process_group(other)


@check(gpu_only=True)
def works_that_nobody_waits_for() -> None:
    """Their tensors are not used anew before the call has read them."""
    wanted = sum(r + 1 for r in everyone())
    results = []
    for _ in range(20):
        tensor = torch.full((1 << 20,), float(rank() + 1), device=device())
        work = dist.all_reduce(tensor, async_op=True)
        results.append((work.get_future(), tensor))
        gone = torch.full((1 << 20,), float(rank() + 1), device=device())
        dist.all_reduce(gone, async_op=True)
        del work, gone
        torch.full((1 << 20,), -5.0, device=device())  # would take its memory
    for future, tensor in results:
        future.wait()
        expect(bool((tensor == wanted).all()), f"{tensor[:4]}")


@check(gpu_only=True)
def graphs() -> None:
    tensor, out = torch.empty(256, device=device()), torch.empty(world() * 256, device=device())
    whole, part = torch.empty(world() * 256, device=device()), torch.empty(256, device=device())
    reduced_ = torch.empty(256, device=device())

    def calls() -> None:
        single(out, tensor)
        SINGLE_SCATTER(part, whole)
        reduced_.copy_(tensor)
        dist.all_reduce(reduced_)

    tensor.zero_(), whole.zero_()
    calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            calls()
    for call in range(5):
        tensor.copy_(data(rank(), 256, call=call))
        whole.copy_(data(rank(), world() * 256, call=call))
        graph.replay()
        same(out, torch.cat([data(r, 256, call=call) for r in everyone()]), f"replay {call}")
        same(
            part, sums(world() * 256, call).view(world(), 256)[rank()], f"scattered, replay {call}"
        )
        same(reduced_, sums(256, call), f"reduced, replay {call}")


def again() -> None:
    """Everything can be left, and joined once more."""
    dist.destroy_process_group()
    dist.init_process_group(
        "tdcoll", timeout=timedelta(seconds=60), pg_options=Options(heap_bytes=32 << 20)
    )
    out = torch.empty(world(), device=device())
    single(out, data(rank(), 1))
    same(out, torch.cat([data(r, 1) for r in everyone()]), "after joining again")
    expect(tdcoll.heap_info().total == 32 << 20, "heap_bytes")
    dist.destroy_process_group()
    expect(not tdcoll.is_initialized(), "destroy_process_group leaves the job")
