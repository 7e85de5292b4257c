# SPDX-License-Identifier: Apache-2.0
"""Orders of calls on backend "tdcoll": callbacks that make calls, and ranks that do not issue calls
in one order."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from backend_job import by_fallback, data, finish, handled, same, single, sparse, sums
from harness import check, device, everyone, expect, rank, simulated, world
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import tdcoll
from tdcoll.calls import implicit
from tdcoll.distributed import Options, explain


def ended(*futures: object, within_s: float = 20.0) -> None:
    """Fail unless these C++ futures are complete soon, since their own wait has no limit. What
    callbacks have queued on streams of a GPU, which are not the current one, is then done as
    well."""
    deadline = time.monotonic() + within_s
    while not all(future.done() for future in futures):
        expect(time.monotonic() < deadline, f"a callback has not ended in {within_s:g} s")
        time.sleep(0.002)
    if not simulated():
        torch.cuda.synchronize()


# ---------------------------------------------------------------------- callbacks


@check
def callbacks_that_make_calls_and_wait() -> None:
    """Of the same kind, of another, and of another group; by the future and by the work; three
    deep."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    for target in (dist.group.WORLD, group):
        for way in ("future", "work", "synchronous"):
            made: list[torch.Tensor] = []

            def again(done: object, depth: int, target=target, way=way, made=made) -> torch.Tensor:
                tensor = done.value()[0].clone()
                if way == "synchronous":
                    dist.all_reduce(tensor, group=target)
                else:
                    work = dist.all_reduce(tensor, group=target, async_op=True)
                    if way == "work":
                        work.wait()
                    else:
                        work.get_future().wait()
                made.append(tensor)
                other = torch.empty(world() * 4, device=device())
                single(other, data(rank(), 4), group=target, async_op=True).wait()
                made.append(other)
                if depth:
                    future = torch.futures.Future()
                    future.set_result([tensor])
                    again(future, depth - 1)
                return tensor

            tensor = data(rank(), 5)
            future = (
                dist.all_reduce(tensor, async_op=True)
                .get_future()
                .then(lambda done, f=again: f(done, 1))
            )
            ended(future)
            same(made[0], sums(5) * world(), f"{way}: the second sum")
            same(made[2], sums(5) * world() ** 2, f"{way}: the third sum")
            for other in made[1::2]:
                same(
                    other,
                    torch.cat([data(r, 4) for r in everyone()]),
                    f"{way}: gathered in a callback",
                )
    dist.destroy_process_group(group)


@check
def callbacks_come_before_later_calls() -> None:
    """What a callback issues is made before what was issued behind its call: the same order on all
    ranks."""
    for call in range(6):
        first, behind = (
            torch.full((3,), 1.0, device=device()),
            torch.full((4,), 5.0, device=device()),
        )
        second = torch.full((3,), 7.0 + call, device=device())

        def then(done: object, call: int = call, second: torch.Tensor = second) -> torch.Tensor:
            time.sleep(0.02 * ((rank() + call) % 2))
            return dist.all_reduce(second, async_op=True).get_future().wait()[0]

        future = dist.all_reduce(first, async_op=True).get_future().then(then)
        # where the callback is fast, its call comes first in any case
        time.sleep(0.02 * ((rank() + call + 1) % 2))
        work = dist.all_reduce(behind, async_op=True)
        ended(future)
        work.wait()
        expect(first.tolist() == 3 * [1.0 * world()], f"{first}")
        expect(second.tolist() == 3 * [(7.0 + call) * world()], f"{second}")
        expect(behind.tolist() == 4 * [5.0 * world()], f"{behind}")


@check
def ddp_with_power_sgd() -> None:
    """A hook of PyTorch's whose callbacks make calls and wait; with several buckets, whose
    callbacks overlap."""
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4))).to(device())
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    before = handled("all_reduce")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank())).to(device())
    for _ in range(5):
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()
    expect(handled("all_reduce") - before > 10, explain())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    gathered = torch.empty(world() * weights.numel(), device=device())
    single(gathered, weights)
    for theirs in gathered.chunk(world()):
        same(theirs, weights, "weights of all ranks")


# ---------------------------------------------------------------------- different orders


@check
def asynchronous_calls_in_different_orders() -> None:
    """Groups, and dense and sparse calls, that ranks issue in different orders once they have
    contexts."""
    few = Options(blocks=8)
    groups = [dist.new_group(timeout=timedelta(seconds=20), pg_options=few) for _ in range(2)]
    began = time.monotonic()
    for call in range(4):
        # the largest needs no larger context
        tensors = [data(rank(), 100 + 400 * call) for _ in groups]
        outs = [torch.empty(world() * 8, device=device()) for _ in groups]
        rows = [sparse(rank()) for _ in groups]
        issue = []
        for group, tensor, out, row in zip(groups, tensors, outs, rows, strict=True):
            # in this order
            dense = partial(dist.all_reduce, tensor), partial(single, out, data(rank(), 8))
            for calls in (dense, [partial(dist.all_reduce, row)]):
                issue.append([partial(call, group=group, async_op=True) for call in calls])
        turned = (rank() * 3 + call) % len(issue) if call else 0  # the first makes contexts at once
        works = [make() for calls in issue[turned:] + issue[:turned] for make in calls]
        for work in works[::-1] if rank() else works:
            work.wait()
        for tensor, out, row in zip(tensors, outs, rows, strict=True):
            same(tensor, sums(tensor.numel()), "sum")
            same(out, torch.cat([data(r, 8) for r in everyone()]), "gathered")
            same(row.to_dense(), sum(sparse(r).to_dense() for r in everyone()), "sparse sum")
    expect(time.monotonic() - began < 15, "no call waits for a deadline")
    for group in groups:
        for kind in ("all_reduce", "all_gather", "sparse_all_reduce"):
            expect(handled(kind, group) == 4, explain(group))
        dist.destroy_process_group(group)


@check
def barriers_are_behind_all_calls() -> None:
    """Of every kind of the group, as gloo's barrier is: what was issued before it is complete."""
    for asynchronous in (False, True):
        time.sleep(0.05 * rank())
        rows = sparse(rank())
        works = [
            dist.all_reduce(data(rank(), 2000), async_op=True),
            dist.all_reduce(rows, async_op=True),
            single(torch.empty(world() * 8, device=device()), data(rank(), 8), async_op=True),
        ]
        finish(dist.barrier(async_op=asynchronous))
        if device().type == "cpu":
            expect(
                all(work.is_completed() for work in works),
                f"{[work.is_completed() for work in works]}",
            )
        for work in works:
            work.wait()


@check
def threads_with_a_group_each() -> None:
    """Four, whose first calls meet in any order, and which grow their contexts beside each other;
    not so on GPUs."""
    few = Options(blocks=8)
    groups = [dist.new_group(timeout=timedelta(seconds=20), pg_options=few) for _ in range(4)]
    before = tdcoll.heap_info().used

    def calls(number: int) -> None:
        # A new thread is on GPU 0, so the stream names its device.
        with torch.cuda.stream(torch.cuda.Stream(device()) if device().type == "cuda" else None):
            calls_on_its_stream(number)

    def calls_on_its_stream(number: int) -> None:
        group = groups[number]
        for call in range(3):
            time.sleep(0.003 * ((call + number * 3 + rank() * 2) % 4))
            tensor = torch.full(
                (300_000 if call == 2 else 50,), 10.0 * number + rank(), device=device()
            )
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
            same(tensor, torch.full_like(tensor, 10.0 * number + world() - 1), f"thread {number}")
            rows = sparse(rank())
            work = dist.all_reduce(rows, group=group, async_op=True)
            out = torch.empty(world() * 8, device=device())
            single(out, data(rank(), 8), group=group)
            work.wait()
            same(rows.to_dense(), sum(sparse(r).to_dense() for r in everyone()), f"thread {number}")

    # what is loaded for the first time waits for kernels that wait for another rank
    if device().type == "cuda":
        for number in range(4):
            calls(number)
    with ThreadPoolExecutor() as pool:
        order = range(4) if rank() else reversed(range(4))
        for done in [pool.submit(calls, number) for number in order]:
            done.result()
    for group in groups:
        dist.destroy_process_group(group)
    expect(tdcoll.heap_info().used == before, f"{tdcoll.heap_info()} after, {before} before")


@check
def what_cannot_be_served_in_turn() -> None:
    """Asynchronous calls fall back if the heap has no room for a context. One rank warns of it, once
    for each kind of call."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tdcoll").addHandler(handler)
    taken = []
    while (free := tdcoll.heap_info().largest_free) > 1 << 16:
        taken.append(tdcoll.empty(free, torch.uint8))
    group = dist.new_group(timeout=timedelta(seconds=20))
    for _ in range(2):
        tensor, out = data(rank(), 60_000), torch.empty(world() * 60_000, device=device())
        strided = torch.stack([data(rank(), 50_000)] * 2, 1)[:, 0]
        reductions = [
            partial(dist.all_reduce, each, group=group, async_op=True) for each in (tensor, strided)
        ]
        gathers = [partial(single, out, data(rank(), 60_000), group=group, async_op=True)]
        works = [make() for make in reductions + gathers]
        first = data(1, 7) if rank() == 1 else torch.empty(7, device=device())
        dist.broadcast(first, 1, group=group)  # of the fallback backend, in between
        for work in works:
            work.wait()
        same(first, data(1, 7), "broadcast")
        same(tensor, sums(60_000), "sum")
        same(strided.contiguous(), sums(50_000), "sum of a column")
        same(out, torch.cat([data(r, 60_000) for r in everyone()]), "gathered")
    for kind, count in (("all_reduce", 4), ("all_gather", 2)):
        expect(
            by_fallback(kind, group) == {"the symmetric heap has no room for it": count},
            explain(group),
        )
    logging.getLogger("tdcoll").removeHandler(handler)
    kinds = ("all_reduce", "all_gather", "broadcast") if rank() == 0 else ()
    expect(len(warnings) == len(kinds), f"{warnings}")
    for warning, kind in zip(warnings, kinds, strict=True):
        expect(warning.startswith(f"{kind}: calls of "), warning)
        expect("Raise NVSHMEM_SYMMETRIC_SIZE (to " in warning, warning)
    for tensor in taken:
        tdcoll.free(tensor)
    dist.destroy_process_group(group)


@check
def contexts_that_grow_beside_allocations() -> None:
    """A sparse call grows its context on a thread while this one allocates, and makes and grows a
    pool of tdcoll's own: before the thread exchanges anything on one rank, and behind that on
    another."""
    group = dist.new_group(
        timeout=timedelta(seconds=20), pg_options=Options(handles="sparse_all_reduce", blocks=8)
    )

    def ones(rows: int) -> torch.Tensor:
        indices = (torch.arange(rows, device=device()) + rank() * rows)[None]
        return torch.sparse_coo_tensor(indices, torch.ones(rows, 4, device=device()), (9000, 4))

    dist.all_reduce(ones(2), group=group)
    smallest, implicit._LEAST_BYTES_PER_RANK = (
        implicit._LEAST_BYTES_PER_RANK,
        1 << 14,
    )  # bytes of the pool's first context
    for n in (1, 5_001):  # CUDA loads no kernel of PyTorch's while another waits for a rank
        reduced = torch.ones(n, device=device())
        tdcoll.distributed.all_reduce(reduced)
        expect(bool((reduced == world()).all()), f"{reduced}")
    expect(not torch.zeros(1000, dtype=torch.int32, device=device()).fill_(0).any(), "zeros")
    for step in range(2):
        rows = 300 << step
        tensor = ones(rows)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        time.sleep(0.3 * ((step + rank()) % 2))
        mine = tdcoll.zeros(1000 << step, torch.int32, name=f"beside {step}")
        expect(not mine.any(), "its memory is nobody else's")
        mine.fill_(7)
        reduced = torch.ones(12_000 * step + 1, device=device())
        tdcoll.distributed.all_reduce(reduced[:1])
        tdcoll.distributed.all_reduce(reduced)
        expect(bool((reduced[1:] == world()).all()) and reduced[0] == world() ** 2, f"{reduced}")
        work.wait()
        expect(tensor._nnz() == rows * world() and bool((tensor._values() == 1).all()), f"{tensor}")
        expect(bool((mine == 7).all()), "memory that was not given away")
        tdcoll.free(mine)
    implicit._LEAST_BYTES_PER_RANK = smallest
    dist.destroy_process_group(group)
