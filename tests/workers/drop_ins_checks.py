# SPDX-License-Identifier: Apache-2.0
"""Functions with torch.distributed's signatures, and contexts of tdcoll's own, on every rank of a
job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from dense_parts import SPECS, data, reference, right, wanted
from harness import check, device, expect, rank, scaled, simulated, world

import tdcoll
import tdcoll.distributed
from tdcoll.calls.spec import Collective

TORCHS = {
    dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "mean", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "prod",
}  # fmt: skip


def drop_ins() -> Iterator[tuple[Collective, Callable[..., Any]]]:
    """``(spec, function(tensor, out, *more))``; what has no ``out`` works in place."""
    for spec in SPECS:
        if spec.rooted:  # torch.distributed.broadcast is in place, and has no drop-in
            continue
        function = getattr(tdcoll.distributed, spec.torch)

        def call(
            tensor: torch.Tensor, out: torch.Tensor, *more: Any, function=function, **named: Any
        ) -> Any:
            tensors = (
                [out.copy_(tensor)] if function is tdcoll.distributed.all_reduce else [out, tensor]
            )
            return function(*tensors, *more, **named)

        yield spec, call


@check
def the_pool_and_the_drop_ins() -> None:
    """On contexts of tdcoll's own, of all ranks and of halves, which grow; torch's operations."""
    half = list(range(rank() % 2, world(), 2))
    group = [dist.new_group(list(range(first, world(), 2))) for first in range(min(2, world()))][
        rank() % 2
    ]
    for spec, function in drop_ins():
        for call, n in enumerate((10, 5, scaled(400_000, 30_000), 7)):
            every = data(spec, call, n, torch.float32)
            should = wanted(spec, every)
            right(
                getattr(tdcoll, spec.name)(every[rank()]), should, f"{spec.name} without a context"
            )
            out = torch.empty_like(should)
            expect(function(every[rank()], out) is None, "torch's functions return None")
            right(out, should, f"the drop-in of {spec.name}")
        for op, name in TORCHS.items() if spec.reduces else ():
            function(every[rank()], out, op)
            right(out, wanted(spec, every, name), f"the drop-in of {spec.name}, {op}")
        for order, given in ((half, group), (half[::-1], half[::-1])):
            every = data(spec, 2, 40, torch.float32, len(order))
            should = reference(spec, every, tdcoll.topology(given))
            out = torch.empty_like(should)
            function(every[order.index(rank())], out, group=given)
            right(out, should, f"the drop-in of {spec.name} in {order}")


@check
def asynchronous_drop_ins() -> None:
    """Each call is behind what its own stream has; ``wait()`` brings the stream that is current
    then behind it."""
    found = [(spec, function, data(spec, 4, 6, torch.float32)) for spec, function in drop_ins()]
    streams = [None, None] if simulated() else [torch.cuda.Stream(device()) for _ in "ab"]
    for late in [None, *range(world())]:  # the first makes the contexts, which waits for all
        given = [torch.zeros_like(every[0]) for _, _, every in found]
        outs = [torch.zeros_like(wanted(spec, every)) for spec, _, every in found]
        if not simulated():
            torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            if rank() == late and not simulated():
                torch.cuda._sleep(50_000_000)
            works = []
            for (_, function, every), tensor, out in zip(found, given, outs, strict=True):
                works.append(function(tensor.copy_(every[rank()]), out, async_op=True))
            expect(all(isinstance(work, dist.Work) for work in works), "each returns a Work")
            if rank() == late and not simulated():
                expect(
                    not works[-1].is_completed(),
                    "what is on the stream still sleeps, and the call is not complete",
                )
        with torch.cuda.stream(streams[1]):
            for work, out in zip(works, outs, strict=True):
                expect(work.wait(), "wait() says that it is there")
                (result,) = work.get_future().wait()
                expect(result.data_ptr() == out.data_ptr(), "the result of the future")
            copies = [out.clone() for out in outs]
        if not simulated():
            streams[1].synchronize()
        expect(all(work.is_success() for work in works), "they are complete now")
        for (spec, _, every), copy in zip(found, copies, strict=True):
            right(copy, wanted(spec, every), f"{spec.name}, rank {late} late")
