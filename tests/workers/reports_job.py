# SPDX-License-Identifier: Apache-2.0
"""Small programs after public reports of bugs in other backends and libraries, each of which must
be right here.

Each function is named after what was reported, and its docstring says where.
"""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import (
    all_gather,
    all_reduce,
    all_to_all_single,
    reduce_scatter,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

REPORTS: list[Callable[[int, int], None]] = []


def report(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Register a program of ``(rank, world)``."""
    REPORTS.append(function)
    return function


def expect(got: Any, wanted: Any) -> None:
    for value in (got, wanted):
        assert not isinstance(value, DTensor)
    got, wanted = (
        value.tolist() if isinstance(value, torch.Tensor) else value for value in (got, wanted)
    )
    assert got == wanted, f"got {got}, expected {wanted}"


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# ---------------------------------------------------------------------- calls


@report
def one_tensor_as_every_output(rank: int, world: int) -> None:
    """pytorch/pytorch#18689: a list that has one tensor several times must not hang."""
    out = torch.full((5,), -1.0)
    dist.all_gather([out] * world, torch.full((5,), float(rank)))
    assert out.unique().tolist() in [[float(r)] for r in range(world)]


@report
def objects_from_a_thread(rank: int, world: int) -> None:
    """pytorch/pytorch#115861"""

    def gathered() -> list[Any]:
        found: list[Any] = [None] * world
        dist.gather_object(("rank", rank), found if rank == 0 else None)
        return found

    with ThreadPoolExecutor(1) as executor:
        for found in (gathered(), executor.submit(gathered).result(30)):
            expect(found, [("rank", r) for r in range(world)] if rank == 0 else [None] * world)


@report
def objects_of_any_size(rank: int, world: int) -> None:
    """pytorch/pytorch#145965, pytorch/pytorch#75619: sizes below and above what one call handles,
    also of nothing."""
    for size in (0, 10, 100_000, 3_000_000):
        found: list[Any] = [None] * world
        dist.all_gather_object(
            found, {"rank": rank, "bytes": b"y" * (size * rank), "texts": ["text"] * (size // 100)}
        )
        for r, each in enumerate(found):
            expect(
                (each["rank"], len(each["bytes"]), len(each["texts"])), (r, size * r, size // 100)
            )
    received: list[Any] = [None]
    dist.scatter_object_list(received, list(range(world)) if rank == 0 else None, src=0)
    expect(received, [rank])


@report
def parts_in_lists(rank: int, world: int) -> None:
    """facebookresearch/fairscale#904: reduce_scatter with lists, also of a tensor's rows."""
    out = torch.zeros(3)
    dist.reduce_scatter(out, [torch.full((3,), rank + 10.0 * r) for r in range(world)])
    expect(out, [world * (world - 1) / 2 + 10.0 * world * rank] * 3)
    dist.reduce_scatter(out, list(torch.arange(3.0 * world).view(world, 3)))
    expect(out, world * (torch.arange(3.0) + 3 * rank))


@report
def nothing_to_gather(rank: int, world: int) -> None:
    """huggingface/trl#1342: empty tensors."""
    out = torch.empty(0, 3)
    dist.all_gather_into_tensor(out, torch.empty(0, 3))
    dist.all_gather([torch.empty(0) for _ in range(world)], torch.empty(0))
    dist.all_reduce(torch.empty(0))
    dist.barrier()


@report
def what_was_logged_stays(rank: int, world: int) -> None:
    """Lightning-AI/pytorch-lightning#5759: a sum of a detached copy must not change the loss."""
    loss = torch.tensor(1.0, requires_grad=True)
    copied = loss.clone().detach()
    dist.all_reduce(copied)
    expect([loss.item(), copied.item()], [1.0, float(world)])


# ---------------------------------------------------------------------- groups


@report
def groups_that_only_members_make(rank: int, world: int) -> None:
    """pytorch/pytorch#81291: use_local_synchronization, and two orders of the same ranks."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    ones = torch.ones(3)
    dist.all_reduce(ones, group=alone)
    expect(ones, [1.0] * 3)
    if rank < 2:
        for ranks in ([0, 1], [1, 0]):
            pair = dist.new_group(ranks, use_local_synchronization=True)
            mine = torch.full((3,), rank + 1.0)
            dist.all_reduce(mine, group=pair)
            expect(mine, [3.0] * 3)
    dist.barrier()


@report
def groups_that_ranks_name_differently(rank: int, world: int) -> None:
    """pytorch/pytorch#130102: one new_group for two sets of ranks."""
    if world == 4:
        pair = dist.new_group([0, 3] if rank in (0, 3) else [1, 2])
        dist.barrier(pair)
        mine = torch.full((3,), float(rank))
        dist.all_reduce(mine, group=pair)
        expect(mine, [3.0] * 3)


@report
def checkpoints_beside_barriers(rank: int, world: int) -> None:
    """KempnerInstitute/KempnerForge#104: the thread of async_save has a group of its own."""
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    group = dist.new_group(backend="gloo")
    for step in range(3):
        state = {"weight": torch.full((4,), float(step))}
        saved: Any = checkpoint.async_save(
            state, checkpoint_id=f"{folders[0]}/{step}", process_group=group
        )
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
            dist.barrier()
        saved.result(60)
    found = {"weight": torch.zeros(4)}
    checkpoint.load(found, checkpoint_id=f"{folders[0]}/2")
    expect(found["weight"], [2.0] * 4)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folders[0])


# ---------------------------------------------------------------------- DDP and optimizers


@report
def a_hook_with_then_in_several_steps(rank: int, world: int) -> None:
    """pytorch/pytorch#43307: with accumulation, and with gradients that are views of buckets."""

    def hook(_, bucket):  # DDP compares annotations, which are strings here
        work: Any = dist.all_reduce(bucket.buffer() / world, async_op=True)
        return work.get_future().then(lambda done: 10 * done.value()[0])

    def gradients(hooked: bool, view: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        model = DistributedDataParallel(inner, bucket_cap_mb=0.0001, gradient_as_bucket_view=view)  # type: ignore[arg-type]
        if hooked:
            model.register_comm_hook(None, hook)
        found = []
        for step in range(3):
            model.zero_grad(set_to_none=False)
            with model.no_sync():
                model(torch.full((2, 8), rank + step + 1.0)).sum().backward()
            model(torch.full((2, 8), rank + step + 2.0)).sum().backward()
            found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        return found

    for view in (False, True):
        for ours, plain in zip(gradients(True, view), gradients(False, view), strict=True):
            torch.testing.assert_close(ours, 10 * plain)


@report
def another_group_for_a_wrapper(rank: int, world: int) -> None:
    """pytorch/pytorch#114194"""
    model = DistributedDataParallel(nn.Linear(4, 2))
    mine = torch.full((2, 4), rank + 1.0)
    model(mine).sum().backward()
    before = model.module.weight.grad.clone()
    model._update_process_group(dist.new_group(list(range(world))))
    model.zero_grad()
    model(mine).sum().backward()
    expect(model.module.weight.grad, before)


@report
def an_optimizer_in_parts(rank: int, world: int) -> None:
    """pytorch/pytorch#60284"""

    def trained(make: Callable[[Any], Any]) -> torch.Tensor:
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)]))
        optimizer = make(model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            (model(torch.full((2, 6), rank + step + 1.0)) ** 2).sum().backward()
            optimizer.step()
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.consolidate_state_dict(to=0)
            assert rank or len(optimizer.state_dict()["state"]) == 10
        return flat(model)

    divided = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam, lr=0.1)
    torch.testing.assert_close(
        trained(divided), trained(functools.partial(torch.optim.Adam, lr=0.1))
    )


# ---------------------------------------------------------------------- gradients


@report
def gradients_of_gathered_tensors(rank: int, world: int) -> None:
    """pytorch/pytorch#120386: of a transposed one, whose gradient has strides."""
    x = (torch.arange(12.0).view(3, 4) + rank).requires_grad_()
    sum(((r + 1) * out**2).sum() for r, out in enumerate(all_gather(x.t()))).backward()  # type: ignore[union-attr]
    expect(x.grad, 2 * world * (rank + 1) * x.detach())
    x = torch.ones(4 * world, requires_grad=True)
    (all_to_all_single(torch.empty(4 * world), x) * (rank + 1)).sum().backward()
    expect(x.grad, torch.arange(1.0, world + 1).repeat_interleave(4))
    parts = [torch.full((3,), rank + 1.0, requires_grad=True) for _ in range(world)]
    (reduce_scatter(torch.empty(3), parts) * (rank + 1)).sum().backward()
    expect([part.grad[0].item() for part in parts], [r + 1.0 for r in range(world)])  # type: ignore[index]


@report
def gradients_of_sums(rank: int, world: int) -> None:
    """pytorch/pytorch#58005"""
    x = torch.full((2,), rank + 1.0, requires_grad=True)
    (all_reduce(x * 2) * (rank + 1)).sum().backward()
    expect(x.grad, [world * (world + 1.0)] * 2)


@report
def gradients_of_distributed_tensors(rank: int, world: int) -> None:
    """pytorch/pytorch#153016: two ways to gather."""
    mesh = init_device_mesh("cpu", (world,))
    for way in ("DTensor", "functional"):
        x = torch.full((2, 3), rank + 1.0, requires_grad=True)
        if way == "DTensor":
            whole = DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
            out = whole.to_local(grad_placements=[Partial()])
        else:
            out = functional.all_gather_tensor_autograd(x, 0, mesh)
        (out * (1 + rank)).sum().backward()
        expect(x.grad, torch.full((2, 3), world * (world + 1) / 2))


# ---------------------------------------------------------------------- DTensor and compiled code


@report
def means_of_uneven_shards(rank: int, world: int) -> None:
    """pytorch/pytorch#162692"""
    mesh, whole = init_device_mesh("cpu", (world,)), torch.arange(4.0 * (world + 1)).view(-1, 4)
    for given in (whole, whole[:1]):
        expect(
            distribute_tensor(given, mesh, [Shard(0)]).mean().full_tensor().item(),
            given.mean().item(),
        )  # type: ignore[attr-defined]


@report
def every_kind_of_partial(rank: int, world: int) -> None:
    """pytorch/pytorch#172041"""
    mesh = init_device_mesh("cpu", (world,))
    for op, wanted in (
        ("sum", world * (world + 1) / 2),
        ("avg", (world + 1) / 2),
        ("max", world),
        ("min", 1),
    ):
        given = DTensor.from_local(torch.full((2 * world,), rank + 1.0), mesh, [Partial(op)])
        expect(given.full_tensor().unique(), [wanted])
        expect(given.redistribute(mesh, [Shard(0)]).to_local().unique(), [wanted])


@report
def the_same_bits_over_two_dimensions(rank: int, world: int) -> None:
    """pytorch/pytorch#171916"""
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        generator = torch.Generator().manual_seed(rank)
        given = DTensor.from_local(
            1e3 * torch.randn(1000, generator=generator), mesh, [Partial(), Partial()]
        )
        outs = [torch.empty(1000) for _ in range(world)]
        dist.all_gather(outs, given.full_tensor())
        assert all(torch.equal(out, outs[0]) for out in outs)


@report
def buffers_in_compiled_code(rank: int, world: int) -> None:
    """pytorch/pytorch#108780, pytorch/pytorch#108811, pytorch/pytorch#121311"""

    @torch.library.custom_op("tdcoll_reports::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def function(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(twice(x @ x), "sum", dist.group.WORLD)
        kept = torch.relu(x)
        gathered = functional.all_gather_tensor(total @ x, 0, dist.group.WORLD)
        return gathered + (kept @ kept).sum() + total.sum()

    x = torch.arange(16.0).view(4, 4) * (rank + 1)
    torch._dynamo.reset()
    expect(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("tdcoll", timeout=timedelta(seconds=60))
    for each in REPORTS:
        if len(sys.argv) == 1 or each.__name__ in sys.argv[1:]:
            each(dist.get_rank(), dist.get_world_size())
            sys.stdout.write(f"{each.__name__}: done\n")
            sys.stdout.flush()
    dist.destroy_process_group()
