# SPDX-License-Identifier: Apache-2.0
"""What tools see of calls, on every rank of a job: profilers, dispatch modes, hooks, and tensors
without values."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from backend_cases import CASES, Case, Values, equal
from backend_job import data, handled, same, single, sparse, sums
from harness import check, device, everyone, expect, expect_raises, rank, shared, simulated, world
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from tdcoll.distributed import Options, explain

OPERATORS = {
    "all_gather_single": "_allgather_base_",
    "all_gather_single, stacked": "_allgather_base_",
    "all_gather": "allgather_",
    "all_gather, uneven": "allgather_",
    "all_gather, several": "allgather_into_tensor_coalesced_",
    "all_gather, several of one": "_allgather_base_",
    "all_reduce": "allreduce_",
    "all_reduce, 1 together": "allreduce_",
    "all_reduce, 2 together": "allreduce_coalesced_",
    "reduce": "reduce_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "reduce_scatter, 1 together": "_reduce_scatter_base_",
    "reduce_scatter, 2 together": "reduce_scatter_tensor_coalesced_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter, uneven": "reduce_scatter_",
    "all_to_all_single": "alltoall_base_",
    "all_to_all_single, uneven": "alltoall_base_",
    "all_to_all": "alltoall_",
    "all_to_all, uneven": "alltoall_",
    "broadcast": "broadcast_",
    "gather": "gather_",
    "scatter": "scatter_",
}
"""PyTorch's operator of each case."""


class Seen(TorchDispatchMode):
    """Counts PyTorch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            self.counts[function._schema.name.removeprefix("c10d::")] += 1
        return function(*given, **(named or {}))


def tensors_of(case: Case) -> tuple[Values, list[torch.Tensor], list[torch.Tensor]]:
    """Return the inputs of all ranks, and this rank's outputs and inputs."""
    inputs = {
        r: [
            data(r, torch.Size(shape).numel(), call=place).view(shape)
            for place, shape in enumerate(case.given(r, world()))
        ]
        for r in everyone()
    }
    mine = [tensor.clone() for tensor in inputs[rank()]]
    outs = (
        mine
        if case.in_place
        else [torch.empty(shape, device=device()) for shape in case.taken(rank(), world())]
    )
    return inputs, outs, mine


def groups() -> tuple[Any, Any]:
    """Return a group whose calls tdcoll handles, and one whose calls fall back."""
    return dist.group.WORLD, dist.new_group(pg_options=Options(max_bytes_per_rank=0))


@check
def operators_of_calls_are_seen() -> str:
    """By a profiler and by modes, whoever handles a call: once, and tdcoll handles it as it would
    without them."""
    made = 0
    both = groups()
    for group, (name, operator) in itertools.product(both, OPERATORS.items()):
        case = next(case for case in CASES if case.name == name)
        if not simulated() and shared() and not case.kind:
            continue
        before = handled(case.kind, group) if case.kind else 0
        for asynchronous in (False, True):
            inputs, outs, mine = tensors_of(case)
            with Seen() as outer, CommDebugMode() as debug, Seen() as inner:
                work = case.call(group, outs, mine, asynchronous)
                expect(not asynchronous or work.wait(), "the work of the call")
            if not simulated():
                torch.cuda.synchronize()
            expect(all(map(equal, outs, case.wanted(inputs, rank()))), f"{name}: {outs}")
            for seen in (outer.counts, inner.counts):
                expect(seen == {operator: 1}, f"{name}, {asynchronous}: {seen}")
            counts = {
                str(packet).removeprefix("c10d."): n
                for packet, n in debug.get_comm_counts().items()
            }
            expect(counts == {operator: 1}, f"{name}: CommDebugMode has {counts}")
            inputs, outs, mine = tensors_of(case)
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as profile:
                work = case.call(group, outs, mine, asynchronous)
                expect(not asynchronous or work.wait(), "the work of the call")
            if not simulated():
                torch.cuda.synchronize()
            expect(all(map(equal, outs, case.wanted(inputs, rank()))), f"{name}, profiled: {outs}")
            events = [event.name for event in profile.events() if event.name.startswith("c10d::")]
            expect(events == [f"c10d::{operator}"], f"{name}, {asynchronous}: {events}")
            made += 4
        falls_back = group is both[1] or name == "all_to_all_single, uneven"
        if case.kind and not falls_back:
            expect(handled(case.kind, group) == before + 4, explain(group))
    dist.destroy_process_group(both[1])
    return f"{made} calls"


@check
def other_calls_are_seen() -> None:
    """Sparse ones, barriers, and functional collectives, whose own operator is seen as well."""
    before = handled("sparse_all_reduce"), handled("barrier"), handled("all_reduce")
    with Seen() as seen:
        rows = sparse(rank())
        dist.all_reduce(rows)
        dist.barrier()
        total = functional.all_reduce(data(rank(), 4), "sum", dist.group.WORLD).wait()
    same(rows.to_dense(), sum(sparse(r).to_dense() for r in everyone()), "sparse")
    same(total, sums(4), "functional")
    expect(seen.counts == {"allreduce_": 1, "barrier": 1}, f"{seen.counts}")
    now = handled("sparse_all_reduce"), handled("barrier"), handled("all_reduce")
    expect([b - a for a, b in zip(before, now, strict=True)] == [1, 1, 1], explain())


@check
def modes_see_errors_and_may_keep_a_call() -> None:
    class Keeps(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, given: Any = (), named: Any = None
        ) -> Any:
            return (
                (given[0], c10d.FakeWork().boxed())
                if function.namespace == "c10d"
                else function(*given)
            )

    tensor, before = data(rank(), 4), handled("all_reduce")
    with Keeps():
        dist.all_reduce(tensor)
    same(tensor, data(rank(), 4), "a call that a mode has kept")
    expect(handled("all_reduce") == before, explain())
    handler = dist.group.WORLD.dispatcher.handlers["all_reduce"]

    def fails(call: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    handler.run = fails
    try:
        with Seen():
            expect_raises(ZeroDivisionError, lambda: dist.all_reduce(data(rank(), 4)), "on purpose")
    finally:
        del handler.run
    dist.all_reduce(tensor)
    same(tensor, sums(4), "after an error")


@check
def works_that_pytorch_registers() -> None:
    """In a block in which PyTorch keeps the work of each call by its tensor, wait_tensor waits for
    it."""
    before = c10d._get_work_registry_size()
    with functional.allow_inflight_collective_as_graph_input_ctx():
        tensor = data(rank(), 6)
        work = dist.all_reduce(tensor, async_op=True)
        expect(c10d._get_work_registry_size() == before + 1, "the work is not registered")
        del work
        same(torch.ops._c10d_functional.wait_tensor(tensor), sums(6), "waited for by its tensor")
    expect(c10d._get_work_registry_size() == before, "the work is still registered")


@check
def tensors_without_values() -> None:
    """Meta tensors, and fake ones inside and outside of their mode: nothing is done, as by gloo."""
    both, mode = groups(), FakeTensorMode()
    for group, case in itertools.product(both, CASES):
        if case.name == "a message around" or (not simulated() and not case.kind):
            continue
        before = handled(case.kind, group) if case.kind else 0
        for asynchronous in (False, True):
            _, outs, mine = tensors_of(case)
            for make in (lambda tensor: tensor.to("meta"), mode.from_tensor):
                made = [make(tensor) for tensor in outs]
                given = made if case.in_place else [make(tensor) for tensor in mine]
                for inside in (True, False):
                    if inside and given and given[0].device.type != "meta":
                        with mode:
                            work = case.call(group, made, given, asynchronous)
                    else:
                        work = case.call(group, made, given, asynchronous)
                    expect(work is None or work.wait(), f"{case.name}")
        expect(not case.kind or handled(case.kind, group) == before, explain(group))
    for _ in range(2):  # real ones, of the same sizes, behind fake ones
        out = torch.empty(world() * 3, device=device())
        single(out, data(rank(), 3))
        same(
            out, torch.cat([data(r, 3) for r in everyone()]), "a call behind those of fake tensors"
        )
        with mode:
            single(torch.empty(world() * 3, device=device()), torch.empty(3, device=device()))
    dist.destroy_process_group(both[1])


@check
def calls_are_traced() -> None:
    """By make_fx: the graph has PyTorch's operators, as those of another backend's groups."""

    def traced(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        dist.all_reduce(doubled)
        out = torch.empty(4 * world(), device=device())
        single(out, doubled)
        return out

    for kind in ("fake", "real"):
        graph = make_fx(traced, tracing_mode=kind)(data(rank(), 4)).graph
        targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        operators = [target for target in targets if target.startswith("c10d")]
        expect(
            operators == ["c10d.allreduce_.default", "c10d._allgather_base_.default"],
            f"{kind}: {targets}",
        )


@check
def hooks_are_called() -> None:
    """Before and behind each call of the group, in the order of the calls, with its tensors and its
    work."""
    both = groups()
    for group in both:
        heard: list[tuple[str, Any]] = []
        group.register_pre_hook(3, lambda told, heard=heard: heard.append(("before", told)))
        group.register_post_hook(4, lambda told, heard=heard: heard.append(("behind", told)))
        for case in CASES:
            if case.name == "a message around" or (not simulated() and shared() and not case.kind):
                continue
            inputs, outs, mine = tensors_of(case)
            work = case.call(group, outs, mine, True)
            (first, before), (second, behind) = heard
            expect((first, second) == ("before", "behind"), f"{case.name}: {heard}")
            expect(
                before.op_id == behind.op_id and before.name == behind.name, f"{case.name}: {heard}"
            )
            expect(
                before.async_op and behind.async_op and behind.work is work, f"{case.name}: {heard}"
            )
            expect(len(before.input_tensors) == len(mine), f"{case.name}: {before}")
            expect(
                len(before.output_tensors) == (0 if case.in_place else len(outs)),
                f"{case.name}: {before}",
            )
            work.wait()
            if not simulated():
                torch.cuda.synchronize()
            expect(all(map(equal, outs, case.wanted(inputs, rank()))), f"{case.name}: {outs}")
            heard.clear()
        dist.barrier(group)
        dist.broadcast(data(rank(), 2), group=group, group_src=world() - 1)
        names = [str(told.name).rpartition(".")[2] for _, told in heard]
        expect(names == ["BARRIER", "BARRIER", "BROADCAST", "BROADCAST"], f"{names}")
        expect(
            heard[2][1].root == world() - 1 and heard[2][1].op_id > heard[0][1].op_id, f"{heard}"
        )
        heard.clear()
        group.unregister_pre_hook(3)
        group.unregister_post_hook(4)
        dist.barrier(group)
        expect(not heard, f"hooks that are gone: {heard}")
    dist.destroy_process_group(both[1])


@check
def gathers_into_one_tensor_of_a_rank() -> None:
    """gather_single of PyTorch 2.14, of whatever layout."""
    for shape in ((2 * world(), 3), (world(), 2, 3)):
        out = torch.zeros(*shape, 2, device=device())[..., 0]
        given = data(rank(), 6).view(2, 3)
        dist.group.WORLD.gather_single(
            out if rank() == 0 else torch.empty(0), given, c10d.GatherOptions()
        ).wait()
        wanted = torch.cat([data(r, 6).view(2, 3) for r in everyone()]).view(shape)
        same(
            out.contiguous(),
            wanted if rank() == 0 else torch.zeros(shape, device=device()),
            f"{shape}",
        )
