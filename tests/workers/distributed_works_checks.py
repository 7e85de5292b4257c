# SPDX-License-Identifier: Apache-2.0
"""Works: those that C++ keeps when Python has dropped them, their values, and timeouts; on every
rank of a job."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from backend_cases import CASES, equal
from backend_job import data, handled, same, sparse, sums
from harness import check, device, everyone, expect, expect_raises, rank, simulated, world
from torch import nn
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

import tdcoll
from tdcoll.calls import implicit
from tdcoll.distributed import Options, explain
from tdcoll.distributed import work as works
from tdcoll.distributed.work import let_go
from tdcoll.spec.constants import MONITOR_TIMEOUT_NS

DDP = nn.parallel.DistributedDataParallel


def as_cpp_keeps(make: Callable[[], Any], waits: bool = False) -> tuple[Any, list[Any]]:
    """Return what C++ keeps of a work that Python has dropped, and the value of the work's future.
    ``waits``: whether Python has waited for it, too."""
    work = make()
    held = work.boxed()
    if waits:
        work.wait()
    del work
    kept = Work.unbox(held)
    # A work without its Python object would wait without an end; with a timeout it says so.
    expect(Work.wait(kept, timedelta(seconds=20)), "C++ waits")
    value = Work.get_future(kept).wait()
    del kept
    return held, value


@check
def works_that_cpp_keeps() -> str:
    """Of every collective, by whoever handles it: C++ waits for them and takes their values."""
    few = dist.new_group(pg_options=Options(max_bytes_per_rank=0))
    made = 0
    for group, case in itertools.product((dist.group.WORLD, few), CASES):
        if case.name == "a message around" or (not simulated() and not case.kind):
            continue
        inputs = {
            r: [
                data(r, torch.Size(shape).numel(), call=place).view(shape)
                for place, shape in enumerate(case.given(r, world()))
            ]
            for r in everyone()
        }
        mine = (
            inputs[rank()] if not case.in_place else [tensor.clone() for tensor in inputs[rank()]]
        )
        outs = (
            mine
            if case.in_place
            else [torch.empty(shape, device=device()) for shape in case.taken(rank(), world())]
        )
        wanted = case.wanted(inputs, rank())
        before = len(works.kept_by_cpp)
        waits = bool(made % 2)
        held, value = as_cpp_keeps(
            lambda c=case, g=group, o=outs, m=mine: c.call(g, o, m, True), waits
        )
        if not simulated():
            torch.cuda.synchronize()
        expect(all(map(equal, outs, wanted)), f"{case.name}: {outs}, and not {wanted}")
        listed = case.name in ("all_gather", "all_gather, uneven")
        expect(
            all(map(equal, list(value[0]) if listed else value, outs)),
            f"{case.name}: the value is {value}",
        )
        del held
        let_go()
        expect(
            len(works.kept_by_cpp) <= before,
            f"{case.name}: {len(works.kept_by_cpp)} works are kept, {before} were",
        )
        made += 1
    rows = sparse(rank())
    held, value = as_cpp_keeps(lambda: dist.all_reduce(rows, async_op=True), waits=True)
    expect(value[0] is rows, f"{value}")
    held, value = as_cpp_keeps(lambda: dist.barrier(async_op=True))
    expect(value == [], f"{value}")
    del held
    own = data(rank(), 4)
    held, value = as_cpp_keeps(lambda: tdcoll.distributed.all_reduce(own, async_op=True))
    same(value[0], sums(4), "an own call")
    del held
    let_go()
    expect(not works.kept_by_cpp, f"{len(works.kept_by_cpp)} works are kept")
    dist.destroy_process_group(few)
    return f"{made} calls"


@check
def works_are_dropped() -> None:
    """What nobody has any more is gone, with its tensors."""
    for _ in range(3):
        tensor = data(rank(), 6)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        living = weakref.ref(work), weakref.ref(tensor)
        del work, tensor
        deadline = time.monotonic() + 5  # the thread that has made the call drops it a moment later
        while any(each() is not None for each in living) and time.monotonic() < deadline:
            time.sleep(0.001)
        expect([each() for each in living] == [None, None], f"{living}")
    expect(not works.kept_by_cpp, f"{works.kept_by_cpp}")


@check
def values_before_the_end() -> None:
    """result() of a call that is not complete is an error, as with gloo, and not an empty list."""
    if not simulated():
        return  # a call on a stream has its tensors at once, as with NCCL
    for group in (dist.group.WORLD, dist.new_group(pg_options=Options(max_bytes_per_rank=0))):
        if rank() == 0:  # the others come later
            tensor = data(0, 5)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            expect_raises(RuntimeError, work.result, "not complete", "wait()")
            dist.distributed_c10d._get_default_store().set("tdcoll asked early", "yes")
        else:
            dist.distributed_c10d._get_default_store().wait(["tdcoll asked early"])
            tensor = data(rank(), 5)
            work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        same(work.result()[0], sums(5), "result")
        dist.barrier()
        if rank() == 0:
            dist.distributed_c10d._get_default_store().delete_key("tdcoll asked early")
        dist.barrier()


# ---------------------------------------------------------------------- timeouts


def calls_of(
    group: Any, rows: int, asynchronous: bool, timeout: timedelta | None = None
) -> list[Any]:
    """Make a call of each kind; return their works."""

    def options(of: Any) -> Any:
        opts = of()
        opts.asyncOp = asynchronous
        if timeout is not None:
            opts.timeout = timeout
        return opts

    small, whole = data(rank(), rows), data(rank(), rows * world())
    return [
        group.allreduce([small.clone()], options(c10d.AllreduceOptions)),
        group.allreduce([small.clone(), small.clone()], options(c10d.AllreduceOptions)),
        group.all_gather_single(whole.clone(), small, options(c10d.AllgatherOptions)),
        group.allgather(
            [list(whole.clone().view(world(), rows))], [small], options(c10d.AllgatherOptions)
        ),
        group.reduce_scatter_single(small.clone(), whole, options(c10d.ReduceScatterOptions)),
        group.all_to_all_single(whole.clone(), whole, [], [], options(c10d.AllToAllOptions)),
        group.allreduce([sparse(rank(), rows=rows + 20)], options(c10d.AllreduceOptions)),
        group.barrier(options(c10d.BarrierOptions)),
    ]


@contextlib.contextmanager
def deadlines_of_calls(group: Any) -> Iterator[list[float]]:
    """Note the deadline, in seconds, that kernels read in each call inside."""
    found: list[float] = []

    def noting(handler: Any) -> Any:
        run = handler.run

        def noted(call: Any) -> Any:
            result = run(call)
            if not simulated():
                torch.cuda.synchronize()
            found.append(handler.used.monitor.words[MONITOR_TIMEOUT_NS.value].item() / 1e9)
            return result

        return noted

    handlers = group.dispatcher.handlers.values()
    for handler in handlers:
        handler.run = noting(handler)
    try:
        yield found
    finally:
        for handler in handlers:
            del handler.run


@check
def timeouts_that_are_set_late() -> None:
    """Of a group and of a call: contexts that exist and later ones, and no other call."""
    smallest, implicit._LEAST_BYTES_PER_RANK = (
        implicit._LEAST_BYTES_PER_RANK,
        1 << 14,
    )  # bytes of the first contexts
    group: Any = dist.new_group(timeout=timedelta(seconds=20), pg_options=Options(blocks=16))
    for work in calls_of(group, 4, False):
        work.wait()
    rows = 4
    for seconds, change in (
        (21, group.set_timeout),
        (22, lambda timeout: c10d._set_pg_timeout(timeout, group)),
    ):
        change(timedelta(seconds=seconds))
        rows *= 60  # which takes larger contexts
        for asynchronous in (False, True):
            for own in (None, timedelta(seconds=33), None):
                with deadlines_of_calls(group) as found:
                    for work in calls_of(group, rows, asynchronous, own):
                        work.wait()
                wanted = float(seconds) if own is None else 33.0
                expect(
                    found and set(found) == {wanted}, f"{seconds} s, {own}, {asynchronous}: {found}"
                )
                expect(
                    own is None or len(found) == 8, f"calls with a timeout of their own: {found}"
                )
    expect(group._timeout == timedelta(seconds=22), "groups that are split off have the timeout")
    counts = [
        handled(kind, group)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
    ]
    expect(min(counts) >= 13, explain(group))
    implicit._LEAST_BYTES_PER_RANK = smallest
    dist.destroy_process_group(group)


@check
def a_timeout_is_that_of_later_calls() -> None:
    """What was issued before it is set has the one before, also if it is made later."""
    if not simulated():
        return  # the order of streams
    group: Any = dist.new_group(timeout=timedelta(seconds=20))
    group.allreduce([data(rank(), 4)]).wait()
    with deadlines_of_calls(group) as found:
        if rank():
            time.sleep(0.3)
        first = dist.all_reduce(data(rank(), 4), group=group, async_op=True)
        group.set_timeout(timedelta(seconds=25))
        second = dist.all_reduce(data(rank(), 4), group=group, async_op=True)
        for work in (first, second):
            work.wait()
    expect(found == [20.0, 25.0], f"{found}")
    dist.destroy_process_group(group)


# ---------------------------------------------------------------------- DDP


@check
def ddp_join_of_uneven_inputs() -> None:
    """DDP hands the work of an all-reduce to C++, and divides by the number of ranks that still
    have inputs."""
    for divides_by_all in (False, True):
        model = DDP(nn.Linear(3, 1).to(device()))
        before = handled("all_reduce")
        with model.join(divide_by_initial_world_size=divides_by_all):
            for step in range(rank() + 1):
                model.zero_grad()
                model(torch.ones(2, 3, device=device())).sum().backward()
                left = world() - step  # ranks that have as many inputs
                share = 2.0 * left / (world() if divides_by_all else left)
                grad = model.module.weight.grad
                expect(
                    torch.allclose(grad, torch.full_like(grad, share)),
                    f"step {step}: {grad}, and not {share}",
                )
        expect(handled("all_reduce") > before, explain())
        del model
        gc.collect()
        let_go()
        expect(not works.kept_by_cpp, f"{len(works.kept_by_cpp)} works are kept")


@check
def ddp_quantisation_hooks() -> None:
    """They index the value of an all-gather into a list: first its only entry, then a rank."""
    for hook in (
        quantization_hooks.quantization_pertensor_hook,
        quantization_hooks.quantization_perchannel_hook,
    ):
        model = nn.Linear(600, 1, bias=False).to(device())
        ddp = DDP(model)
        if simulated():  # PyTorch's quantization of a tensor is on one GPU, and named after it
            ddp.register_comm_hook(dist.group.WORLD, on_cpus(hook))
        else:
            ddp.register_comm_hook(dist.group.WORLD, hook)
        ddp(torch.full((1, 600), 1.0 + rank(), device=device())).sum().backward()
        mean = sum(1.0 + r for r in everyone()) / world()
        expect(
            torch.allclose(model.weight.grad, torch.full_like(model.weight.grad, mean), rtol=0.02),
            f"{hook}",
        )


def on_cpus(hook: Any) -> Any:
    """The hook, whose tensors would go to a GPU of the rank's number."""

    def run(group, bucket):  # DDP looks at annotations
        cuda, torch.Tensor.cuda = torch.Tensor.cuda, lambda tensor, *_: tensor
        try:
            return hook(group, bucket)
        finally:
            torch.Tensor.cuda = cuda

    return run
