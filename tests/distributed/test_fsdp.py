# SPDX-License-Identifier: Apache-2.0
"""FSDP2 in symmetric memory: its plan, the ring of buffers, and faults. The checks of training are
in ``workers/fsdp_checks.py``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import WORKERS, checks_of, program_of, verdicts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import tdcoll
from tdcoll.base import torch_fsdp
from tdcoll.calls.sharded import GATHER, SCATTER, context_arguments, padded
from tdcoll.distributed import fsdp
from tdcoll.distributed.fsdp_calls import Ring
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
WORLD = 4


@pytest.fixture
def fake_group() -> Iterator[None]:
    """Rank 0 of four, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


def build(**arguments: Any) -> Any:
    """A model of three parameter groups, of sizes that four ranks don't divide."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7)), nn.Linear(7, 9), nn.Linear(9, 2)
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model[:2]:
        fully_shard(layer, mesh=mesh, **arguments)
    fully_shard(model, mesh=mesh, **arguments)
    return model


class Recorder:
    """A collective of FSDP2's that notes how large its memory is."""

    def __init__(self, default: Any) -> None:
        self.default = default
        self.inputs: list[int] = []
        self.outputs: list[int] = []

    def allocate(self, size: Any, **kind: Any) -> torch.Tensor:
        made: torch.Tensor = self.default.allocate(size, **kind)
        return made.zero_()

    def __call__(self, *, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **more: Any):
        self.inputs.append(input_tensor.nbytes)
        self.outputs.append(output_tensor.nbytes)
        return self.default(output_tensor, input_tensor, **more)


HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(param_dtype=HALF),
        MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=SINGLE),
        MixedPrecisionPolicy(reduce_dtype=HALF),
    ],
    ids=["fp32", "bf16", "bf16 and fp32", "fp32 and bf16"],
)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_the_plan_is_what_fsdp_sends(
    fake_group: None, policy: MixedPrecisionPolicy, frozen: bool
) -> None:
    model = build(mp_policy=policy)
    for parameter in model[1].parameters():
        parameter.requires_grad_(not frozen)
    plan = fsdp.plan(model)
    gathers, scatters = map(Recorder, torch_fsdp.default_collectives())
    for module in (*model[:2], model):
        module.set_custom_all_gather(gathers)
        module.set_custom_reduce_scatter(scatters)
    model(torch.ones(3, 5)).float().sum().backward()
    (group,) = plan.groups
    assert (group.ranks, group.modules, group.buffers) == ((0, 1, 2, 3), 3, 2)
    assert len(gathers.outputs) == 5
    assert len(scatters.outputs) == (2 if frozen else 3)
    assert group.gathered_bytes == max(gathers.outputs)
    assert group.scattered_bytes == max(scatters.outputs)
    limits = tdcoll.memory_plan({"model": group.sizes}, world_size=WORLD)
    assert limits.total == plan.heap_bytes
    assert [context.name.split(": ")[1] for context in limits.contexts] == [
        "all-gathers",
        "reduce-scatters",
    ]
    assert limits.contexts[0].buffers == 2 * padded(group.gathered_bytes)


def test_the_plan_says_itself(fake_group: None) -> None:
    plan = fsdp.plan(build(), buffers=5)
    first, second = str(plan).splitlines()
    assert first.startswith("FSDP2 takes ")
    assert second.startswith(
        "3 module(s) over ranks [0, 1, 2, 3]: 5 buffers of 384 B, gradients of 96 B per rank, "
    )


def test_prefetching_takes_buffers(fake_group: None) -> None:
    model = build()
    assert fsdp.plan(model).groups[0].buffers == 2
    model.set_modules_to_forward_prefetch([model[0]])
    assert fsdp.plan(model).groups[0].buffers == 2
    model[1].set_modules_to_backward_prefetch([model[0], model])
    assert fsdp.plan(model).groups[0].buffers == 3


def test_wrong_models_are_named(fake_group: None) -> None:
    with pytest.raises(TypeError, match=r"^model must be a torch\.nn\.Module, got 3"):
        fsdp.plan(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^model must be one that .*; got Linear without any"):
        fsdp.plan(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"^buffers must be at least 2, got 1"):
        fsdp.plan(build(), buffers=1)
    with pytest.raises(tdcoll.NotInitializedError):
        fsdp.use(build())


def test_a_model_on_another_device_is_named(fake_group: None) -> None:
    groups = torch_fsdp.parameter_groups(build())
    assert fsdp._problem(groups, torch.device("cpu"), 2, "auto", "auto") is None
    problem = fsdp._problem(groups, torch.device("cuda", 1), 2, "auto", "auto")
    assert str(problem) == (
        "model must be sharded on cuda:1, where tdcoll's symmetric memory is; got module '(root)' "
        "on cpu"
    )


def test_this_pytorch_has_the_internals(fake_group: None) -> None:
    model = build()
    groups = torch_fsdp.parameter_groups(model)
    assert [group.name for group in groups] == ["(root)", "0", "1"]
    for group in groups:
        assert group.has_own_collectives
        gather, scatter = group.collectives
        group.collectives = "other", scatter
        assert not group.has_own_collectives
        group.collectives = gather, scatter
        assert group.has_own_collectives
        assert group.gather_group is group.scatter_group is group.gather_groups[0]


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"gathered_bytes": 8, "buffers": 1}, r"contexts\['m'\]\['buffers'\] must be at least 2"),
        ({"gathered_bytes": -1}, r"contexts\['m'\]\['gathered_bytes'\] must be at least 0"),
        ({"gathered_bytes": 8, "chunks": 2}, r"contexts\['m'\] must have no sizes but gathered"),
    ],
)
def test_wrong_sizes_of_a_plan(limits: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        tdcoll.memory_plan({"m": limits}, world_size=2)


def test_large_calls_take_copy_engines() -> None:
    node = Topology.of(0, range(4), [0] * 4)
    nodes = Topology.of(0, range(4), [0, 0, 1, 1])
    for policy in (GATHER, SCATTER):
        least = policy.copies_from
        assert policy.algorithm(least, node, True) == "ce"
        assert policy.algorithm(least - 1, node, True) == "auto"
        assert policy.algorithm(least, node, False) == "auto"
        assert policy.algorithm(least, nodes, True) == "auto"


# ---------------------------------------------------------------------- the ring


def ring_of(buffers: int = 2, numel: int = 8, algorithm: str = "ce") -> Ring:
    """A ring for results of up to ``numel`` float32. Collective."""
    nbytes = padded(4 * numel)
    arguments = context_arguments(GATHER, nbytes)
    ctx = tdcoll.CollectiveContext(max_blocks=16, **arguments)
    return Ring(ctx, tdcoll.empty((buffers, nbytes), torch.uint8), algorithm)


def gather(ring: Ring, call: int, numel: int = 8) -> torch.Tensor:
    """Gather ``numel`` numbers that say who has sent them, and in which call."""
    out = ring.allocate(numel, torch.float32)
    rank, world = tdcoll.rank(), tdcoll.world_size()
    own = out.view(world, -1)[rank]
    own.copy_(100 * call + 10 * rank + torch.arange(len(own)))
    ring.gather(out, False)
    return out


def is_right(got: torch.Tensor, call: int) -> None:
    """Fail unless this is what two ranks gather in a call."""
    own = torch.arange(len(got) // 2)
    assert got.tolist() == [*(100 * call + own).tolist(), *(100 * call + 10 + own).tolist()]


@pytest.mark.parametrize("algorithm", ["ce", "loop", "auto"])
def test_buffers_take_turns_whatever_the_sizes(algorithm: str) -> None:
    def host(pe: int) -> None:
        ring = ring_of(algorithm=algorithm)
        # In a list, because the frame's variables are copied when an assertion is counted.
        held: list[torch.Tensor] = []
        places = []
        for call, numel in enumerate((8, 4, 8, 2, 4, 8)):
            held.append(gather(ring, call, numel))
            places.append(held[-1].data_ptr())
            assert ring.calls == call + 1
            if call:  # FSDP2 holds the last result while it gathers the next
                is_right(held.pop(0), call - 1)
        is_right(held.pop(), 5)
        assert len(set(places)) == 2
        assert places[::2] == places[:1] * 3

    World(2).run(host)


def test_memory_that_is_held_is_not_handed_out() -> None:
    """Nor is a view of it. Without the check, the next call overwrites it."""

    def host(pe: int) -> None:
        ring = ring_of()
        held = gather(ring, 0).view(2, 4)[1:]
        gather(ring, 1)
        assert ring.allocate(8, torch.float32) is None
        assert held[0, 0] == 10
        ring._buffers[0].storage = None  # the protection
        gather(ring, 2)
        assert held[0, 0] == 210

    World(2).run(host)


def test_a_call_through_the_group_takes_the_turn_of_a_buffer_that_is_held(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """So the others are used on. A warning says it once, on each rank."""

    def host(pe: int) -> None:
        ring = ring_of()
        held = [gather(ring, 0)]
        is_right(gather(ring, 1), 1)
        for call in (2, 4):
            assert ring.allocate(8, torch.float32) is None
            assert not ring.owns(torch.empty(8))
            ring.skip()
            is_right(gather(ring, call), call)
        is_right(held.pop(), 0)
        is_right(gather(ring, 5), 5)
        assert (ring.calls, ring.turns) == (5, 7)

    World(2).run(host)
    lines = [line for line in caplog.messages if "holds what was gathered" in line]
    assert len(lines) == 2
    assert "buffers=3)" in lines[0]


def test_an_allocation_without_a_call_takes_no_turn() -> None:
    """On one rank only: its copy has failed. The next call is in one buffer on both."""

    def host(pe: int) -> None:
        ring = ring_of()
        gather(ring, 0)
        if pe == 1:
            ring.allocate(4, torch.float32)
        is_right(gather(ring, 1), 1)

    World(2).run(host)


def test_the_ring_takes_no_other_memory() -> None:
    def host(pe: int) -> None:
        ring = ring_of()
        assert ring.takes(512)
        assert not ring.takes(513)
        with pytest.raises(tdcoll.ContextError, match=r"output_tensor must be the memory"):
            ring.gather(torch.empty(8), False)
        rings.append(ring)

    rings: list[Ring] = []
    World(2).run(host)
    rings[0].ctx.job.closed = True
    with pytest.raises(tdcoll.NotInitializedError, match="all-gather of FSDP2: "):
        rings[0].allocate(8, torch.float32)


def test_streams_are_ordered(monkeypatch) -> None:
    """The stream that gets a buffer waits for the call that has used it, and for the stream that
    had it."""

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: Any) -> None:
            said.append((self.name, "event", event))

        def wait_stream(self, other: Any) -> None:
            said.append((self.name, "stream", other.name))

    said: list[Any] = []
    device = SimpleNamespace(type="cuda")
    job = SimpleNamespace(closed=False)
    buffers = torch.zeros((2, 512), dtype=torch.uint8)
    ring = Ring(SimpleNamespace(device=device, job=job), buffers, "auto")  # type: ignore[arg-type]
    make = torch._C._construct_storage_from_data_pointer
    cpu = torch.device("cpu")
    monkeypatch.setattr(
        torch._C, "_construct_storage_from_data_pointer", lambda a, _, n: make(a, cpu, n)
    )
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: torch.zeros(size, dtype=dtype))
    current = Stream("copy-in")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    ring.allocate(8, torch.float32)
    assert said == []
    current = Stream("prefetch")  # that call has failed, and another stream makes it
    ring.allocate(8, torch.float32)
    assert said == [("prefetch", "stream", "copy-in")]
    said.clear()
    current = Stream("copy-in")
    ring._buffers[0].stream = current
    ring._buffers[0].gathered = "behind call 0"
    ring.allocate(8, torch.float32)
    assert said == [("copy-in", "event", "behind call 0")]
    said.clear()
    current = Stream("compute")
    ring.allocate(8, torch.float32)
    assert said == [("compute", "event", "behind call 0"), ("compute", "stream", "copy-in")]


# ---------------------------------------------------------------------- jobs


@pytest.mark.slow
def test_training_on_four_ranks(launch: Launch) -> None:
    """What two ranks can't show: two replicas of two shards, resharding to two ranks, and several
    meshes."""
    names = (
        "fsdp_resharding",
        "fsdp_hybrid_sharding",
        "fsdp_other_placements_and_groups",
        "fsdp_over_tensor_parallelism",
    )
    assert set(names) <= set(checks_of("fsdp"))
    heap = {"NVSHMEM_SYMMETRIC_SIZE": "256M"}
    done = launch("--simulate", "--nproc", "4", *program_of("fsdp"), *names, timeout=280, env=heap)
    assert list(verdicts(done)) == [*names]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["skip", "memory", "exception", "interrupt"])
def test_a_fault_ends_in_an_error_that_names_the_rank(launch: Launch, kind: str) -> None:
    script = str(WORKERS / "fsdp_faults.py")
    done = launch("--simulate", "--nproc", "2", script, kind, env={"TDCOLL_DEBUG": "0"})
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {line["rank"]: line["error"] for line in lines}
    assert found[0].startswith("CollectiveTimeout: rank 0 waited 3 s for peer 1: "), done.stderr
    own = {
        "skip": "none",
        "memory": "OutOfMemoryError: CUDA out of memory, on purpose",
        "exception": "ValueError: on purpose",
        "interrupt": "KeyboardInterrupt: on purpose",
    }
    assert found[1] == own[kind]
