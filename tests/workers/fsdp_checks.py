# SPDX-License-Identifier: Apache-2.0
"""FSDP2 in symmetric memory, on every rank of a job of backend "tdcoll": ten steps of training must
have the losses of the backend, to the bit, in every form of FSDP2."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from backend_job import same
from harness import check, device, everyone, expect, expect_raises, rank, world
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import tdcoll
from tdcoll import runtime
from tdcoll.base.versions import version_of
from tdcoll.distributed import fsdp

WIDTH = 9
"""Not divisible by any number of ranks that the job has, except 3."""

STEPS = 10


class Block(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self._layers, x, use_reentrant=False)
        return self._layers(x)

    def _layers(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@functools.cache
def whole_mesh() -> DeviceMesh:
    return init_device_mesh(device().type, (world(),))


@functools.cache
def hybrid_mesh(replicas: int) -> DeviceMesh:
    """Each mesh has groups of its own, whose contexts take thread blocks."""
    shape = (replicas, world() // replicas)
    return init_device_mesh(device().type, shape, mesh_dim_names=("replicate", "shard"))


def build(checkpointed: bool = False, blocks: int = 2, **arguments: Any) -> nn.Module:
    """A model that is sharded, by default over all ranks."""
    torch.manual_seed(1)
    model = nn.Sequential(*(Block(checkpointed) for _ in range(blocks)), nn.Linear(WIDTH, 3))
    model.to(device())
    arguments.setdefault("mesh", whole_mesh())
    for block in model[:blocks]:
        fully_shard(block, **arguments)
    fully_shard(model, **arguments)
    return model


def copy_engines() -> str:
    """Their algorithm, where they are supported. By default they have large calls only."""
    return "ce" if tdcoll.topology().n_nodes == 1 else "auto"


def batch(step: int, micro: int = 0) -> torch.Tensor:
    torch.manual_seed(100 * step + 10 * micro + rank())
    return torch.randn(4, WIDTH).to(device())


def loss_of(model: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def train(
    model: nn.Module,
    step_once: Callable[[nn.Module, int], torch.Tensor] | None = None,
    steps: int = STEPS,
) -> list[torch.Tensor]:
    """The loss of each step on this rank, and the weights afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        if step_once is None:
            loss = loss_of(model, batch(step))
            loss.backward()
        else:
            loss = step_once(model, step)
        optimizer.step()
        losses.append(loss.detach())
    # Which shards the parameters again, if they are still gathered.
    weights = [weight.to_local().clone() for weight in model.state_dict().values()]
    return [*losses, *weights]


@functools.cache
def trained_by_backend() -> list[torch.Tensor]:
    """What several checks compare with."""
    return train(build())


def compare(
    make: Callable[[], nn.Module],
    step_once: Callable[[nn.Module, int], torch.Tensor] | None = None,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    **how: Any,
) -> dict[str, int]:
    """Train a model on the backend and in symmetric memory; return how many calls were made there.

    Args:
        prepare: Called for each model behind ``fully_shard`` and, if it is called, ``use``.
        how: Arguments of ``use``.
    """
    if make is build and step_once is None:  # as it is, because settings change no numbers
        wanted = trained_by_backend()
    else:
        wanted = train(prepare(make()), step_once)
    model = make()
    with fsdp.use(model, **how) as communication:
        got = train(prepare(model), step_once)
        communication.check()
        calls = communication.calls
    for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
        same(one, other, f"loss or weight {number}")
    return calls


@check
def fsdp_algorithms() -> None:
    """A step gathers three groups of parameters, and again the two that it has resharded."""
    calls = compare(build)
    expect(calls == {"all_gather": 5 * STEPS, "reduce_scatter": 3 * STEPS}, f"{calls}")
    pairs = [("ce", "ce"), ("loop", "loop"), ("direct", "direct")]
    if tdcoll.topology().n_nodes > 1:
        pairs = [("1d", "1d"), ("2d", "auto")]
    for gather, scatter in pairs:
        compare(build, all_gather=gather, reduce_scatter=scatter)


@check
def fsdp_mixed_precision() -> None:
    half, single = torch.bfloat16, torch.float32
    for param_dtype, reduce_dtype in (
        (half, single),
        (torch.float16, None),  # divided before and behind the sum
        (None, half),
    ):
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        calls = compare(lambda policy=policy: build(mp_policy=policy), all_gather=copy_engines())
        expect(calls["reduce_scatter"] == 3 * STEPS, f"{policy}: {calls}")


@check
def fsdp_gradient_accumulation() -> None:
    def accumulated(model: Any, step: int) -> torch.Tensor:
        for micro in range(3):
            last = micro == 2
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last)
            loss = loss_of(model, batch(step, micro))
            loss.backward()
        return loss

    calls = compare(build, accumulated)
    expect(calls["reduce_scatter"] == 3 * STEPS, f"{calls}")
    compare(lambda: build(reshard_after_forward=False), accumulated)


@check
def fsdp_resharding() -> None:
    """Parameters that stay gathered until the backward pass, or are resharded to fewer ranks."""
    calls = compare(lambda: build(reshard_after_forward=False))
    expect(calls["all_gather"] == 3 * STEPS, f"{calls}")
    if world() == 4:
        model = build(reshard_after_forward=2)
        ranks = [group.ranks for group in fsdp.plan(model).groups]
        pair = (0, 1) if rank() < 2 else (2, 3)
        expect(ranks == [(0, 1, 2, 3), pair], f"{ranks}")
        calls = compare(lambda: build(reshard_after_forward=2), all_gather=copy_engines())
        expect(calls["all_gather"] == 6 * STEPS, f"{calls}")  # the root is resharded as well


@check
def fsdp_hybrid_sharding() -> None:
    """Also with gradients that are accumulated before the all-reduce of the replicas."""

    def accumulated(model: Any, step: int) -> torch.Tensor:
        for micro in range(2):
            model.set_requires_all_reduce(micro == 1)
            loss = loss_of(model, batch(step, micro))
            loss.backward()
        return loss

    replicas = 2 if world() == 4 else 1
    compare(lambda: build(mesh=hybrid_mesh(replicas)))
    compare(lambda: build(mesh=hybrid_mesh(replicas)), accumulated)
    calls = compare(lambda: build(mesh=hybrid_mesh(world())))  # each shard has one rank
    expect(calls == {"all_gather": 0, "reduce_scatter": 0}, f"{calls}")


@check
def fsdp_meshes_of_one_rank() -> None:
    alone = [dist.new_group([one]) for one in everyone()][rank()]
    mesh = DeviceMesh.from_group(alone, device().type)
    model = build(mesh=mesh)
    before = tdcoll.heap_info().used
    communication = fsdp.use(model)
    expect(communication.plan.heap_bytes == 0 == tdcoll.heap_info().used - before, "takes memory")
    losses = train(model, steps=2)
    for got, wanted in zip(losses, train(build(mesh=mesh), steps=2), strict=True):
        same(got, wanted, "one rank")
    communication.close()


@check
def fsdp_compiled() -> None:
    def compiled(model: nn.Module) -> nn.Module:
        model.compile(backend="aot_eager")
        return model

    calls = compare(lambda: build(), prepare=compiled)  # compiled on the backend as well
    expect(calls == {"all_gather": 5 * STEPS, "reduce_scatter": 3 * STEPS}, f"{calls}")
    torch._dynamo.reset()


@check
def fsdp_activation_checkpointing() -> None:
    compare(lambda: build(checkpointed=True))


@check
def fsdp_clipping_and_evaluation() -> None:
    def clipped(model: nn.Module, step: int) -> torch.Tensor:
        with torch.no_grad():
            found = loss_of(model, batch(step, 1))
        with torch.inference_mode():
            found = found + loss_of(model, batch(step, 2)).item()
        loss = loss_of(model, batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss + found

    compare(build, clipped)


@check
def fsdp_divide_factors() -> None:
    """AVG by a factor of the group's size, and a premultiplied sum by twice that."""

    def divided(factor: float, share: float) -> list[torch.Tensor]:
        def scaled(model: nn.Module, step: int) -> torch.Tensor:
            loss = loss_of(model, batch(step)) * share
            loss.backward()
            return loss / share

        model = build()
        for module in (*model[:2], model):
            module.set_gradient_divide_factor(factor)
        with fsdp.use(model) as communication:
            found = train(model, scaled)
            expect(communication.calls["reduce_scatter"] == 3 * STEPS, f"{communication.calls}")
        return found

    wanted = divided(float(world()), 0.5)
    for got, other in zip(divided(2.0 * world(), 1.0), wanted, strict=True):
        # Divisions by powers of two are exact.
        if world() in (2, 4, 8):
            same(got, other, "premultiplied")
        else:
            torch.testing.assert_close(got, other)


@check
def fsdp_frozen_and_offloaded_parameters() -> None:
    def frozen() -> nn.Module:
        model = build()
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        return model

    calls = compare(frozen)
    expect(calls["reduce_scatter"] == 2 * STEPS, f"{calls}")
    compare(lambda: build(offload_policy=CPUOffloadPolicy(pin_memory=False)))


@check
def fsdp_other_placements_and_groups() -> None:
    """Weights that are cut by columns, reduce-scatters of a group of their own, several gradients
    on their way, and parameters of one module on two meshes; as far as this PyTorch has them."""

    def by_columns(parameter: nn.Parameter) -> Shard | None:
        divisible = parameter.dim() == 2 and parameter.shape[1] % world() == 0
        return Shard(1) if divisible else None

    def apart(model: Any) -> Any:
        model.set_separate_reduce_scatter_group(True)
        model.set_reduce_scatter_max_input_buffers(2)
        return model

    if world() != 4:
        compare(lambda: build(shard_placement_fn=by_columns))
        if hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
            calls = compare(build, prepare=apart)
            expect(calls["reduce_scatter"] == 3 * STEPS, f"{calls}")
        return
    if version_of(torch.__version__) < (2, 13):
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    pairs = common.FSDPMeshInfo(hybrid_mesh(2)["shard"], shard_mesh_dim=0)
    whole = common.FSDPMeshInfo(whole_mesh(), shard_mesh_dim=0)

    def by_mesh(parameter: nn.Parameter) -> Any:
        return common.ShardPlacementResult(None, pairs if parameter.dim() == 1 else whole)

    calls = compare(lambda: build(shard_placement_fn=by_mesh))
    expect(calls["reduce_scatter"] == 6 * STEPS, f"{calls}")


@check
def fsdp_over_tensor_parallelism() -> None:
    if world() != 4:
        return
    mesh = hybrid_mesh(2)  # whose first dimension shards here, and whose second cuts matrices

    def make() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3)).to(device())
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["shard"], plan)
        fully_shard(model, mesh=mesh["replicate"])
        return model

    def same_batch(model: nn.Module, step: int) -> torch.Tensor:
        torch.manual_seed(100 * step + rank() // 2)  # the same on ranks that share matrices
        loss = loss_of(model, torch.randn(4, WIDTH).to(device()))
        loss.backward()
        return loss

    calls = compare(make, same_batch)
    expect(calls == {"all_gather": STEPS, "reduce_scatter": STEPS}, f"{calls}")


@check
def fsdp_state_dicts() -> None:
    """A checkpoint that one model has written goes on in the other, with the same losses."""
    model = build()
    communication = fsdp.use(model)
    train(model, steps=2)
    state = copy.deepcopy(model.state_dict())
    group = dist.new_group(backend="gloo")  # which has every call of objects
    folder = [tempfile.mkdtemp() if rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0, group)
    place = str(Path(folder[0], "checkpoint"))
    dcp.save({"model": state}, checkpoint_id=place, process_group=group)
    wanted = train(model, steps=3)
    communication.close()
    for used in (False, True):
        other = build()
        again = fsdp.use(other) if used else None
        train(other, steps=1)  # so that it differs
        loaded = {"model": other.state_dict()}
        dcp.load(loaded, checkpoint_id=place, process_group=group)
        other.load_state_dict(loaded["model"])
        for got, one in zip(train(other, steps=3), wanted, strict=True):
            same(got, one, f"after loading, used: {used}")
        if again is not None:
            again.close()


@check
def fsdp_prefetching() -> None:
    """Explicit prefetching takes more buffers, which are found or asked for; asynchronous gathers
    are waited for."""

    def ahead(model: nn.Module, modules: int) -> nn.Module:
        for number in range(len(model) - 1):
            following = list(model[number + 1 : number + 1 + modules])[: 2 - number]
            model[number].set_modules_to_forward_prefetch(following)
            model[number].set_modules_to_backward_prefetch(list(model[:number])[-modules:][::-1])
        return model

    def make() -> nn.Module:
        return build(blocks=3)

    calls = compare(lambda: ahead(make(), 1))
    expect(calls["all_gather"] == 7 * STEPS, f"{calls}")
    compare(lambda: ahead(make(), 2))
    calls = compare(lambda: ahead(make(), 2), buffers=2)
    expect(0 < calls["all_gather"] < 7 * STEPS, f"the others through the group: {calls}")

    def in_vain(model: Any) -> Any:
        """FSDP2 prefetches a block for the backward pass that takes no part in it."""
        model[1].register_forward_hook(lambda block, given, out: given[0] + 0 * out.detach())
        return model

    calls = compare(lambda: build(blocks=5), prepare=in_vain)
    expect(calls["all_gather"] > 5 * STEPS, f"{calls}")

    def asynchronous(model: Any) -> Any:
        model._set_unshard_async_op(True)
        return model

    compare(make, prepare=asynchronous)


@check
def fsdp_several_models() -> None:
    """Two at a time, one used and closed before the other; heap and thread blocks come back."""
    job = runtime.current()
    before = tdcoll.heap_info(), job.blocks_taken
    models = build(), build()
    first, second = map(fsdp.use, models)
    plan = fsdp.plan(models[0])
    expect(first.plan == plan, f"{first.plan}")
    taken = tdcoll.heap_info().used - before[0].used
    expect(taken == 2 * plan.heap_bytes, f"{taken} of {2 * plan.heap_bytes}")
    wanted = train(models[0], steps=2)
    first.close()
    first.close()
    for got, one in zip(train(models[1], steps=2), wanted, strict=True):
        same(got, one, "the second model")
    second.close()
    expect((tdcoll.heap_info(), job.blocks_taken) == before, "something is left behind")
    for got, one in zip(train(build(), steps=2), wanted, strict=True):
        same(got, one, "a model without")


@check
def fsdp_wrong_use() -> None:
    model = build()
    with fsdp.use(model):
        expect_raises(ValueError, lambda: fsdp.use(model), "Close what the first call returned")
    inner = build()
    communication = fsdp.use(inner[0])
    expect_raises(ValueError, lambda: fsdp.use(inner), "module '0'")
    communication.close()

    custom = build()
    custom[1].set_custom_all_gather(object())
    expect_raises(ValueError, lambda: fsdp.use(custom), "module '1'", "set_custom_all_gather")
    expect_raises((AssertionError, ValueError), lambda: fully_shard(model, mesh=whole_mesh()))
    expect_raises(ValueError, lambda: fsdp.use(build(), reduce_scatter="ring"), "reduce_scatter")
    expect_raises(ValueError, lambda: fsdp.use(build(), buffers=1), "buffers must be at least 2")
    before = tdcoll.heap_info(), runtime.current().blocks_taken
    other = "2d" if tdcoll.topology().n_nodes == 1 else "ce"
    expect_raises(ValueError, lambda: fsdp.use(build(), all_gather=other), f"all_gather='{other}' ")
    expect((tdcoll.heap_info(), runtime.current().blocks_taken) == before, "something is left")


@check
def fsdp_ranks_that_differ() -> None:
    for name, value in (("buffers", 2 + rank()), ("all_gather", "loop" if rank() else "auto")):
        model = build()
        expect_raises(
            tdcoll.RankMismatchError, lambda m=model, n=name, v=value: fsdp.use(m, **{n: v}), name
        )
    kind = tdcoll.RankMismatchError if rank() else ValueError
    expect_raises(kind, lambda: fsdp.use(build(), buffers=2 if rank() else 1), "buffers must be")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if rank() else torch.float32)
    model = build(mp_policy=policy)
    expect_raises(tdcoll.RankMismatchError, lambda: fsdp.use(model), "module 0", "gathers")
    compare(build)  # nothing is left of those


@check
def fsdp_heap_that_is_too_small() -> None:
    """The error names the size, and nothing of the attempt is left."""
    info = tdcoll.heap_info()
    before = info, runtime.current().blocks_taken
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    width = 1 << 10
    layers = nn.Sequential(nn.Linear(width, info.total // width // 8)).to(device())
    fully_shard(layers, mesh=whole_mesh(), mp_policy=policy)
    plan = fsdp.plan(layers, buffers=4)
    expect(plan.heap_bytes > info.free, f"{plan}")
    enough = -(-(info.used + plan.heap_bytes) >> 20)
    named = f"heap_bytes='{enough}M'"
    expect_raises(tdcoll.HeapExhaustedError, lambda: fsdp.use(layers, buffers=4), named)
    expect((tdcoll.heap_info(), runtime.current().blocks_taken) == before, "something is left")
