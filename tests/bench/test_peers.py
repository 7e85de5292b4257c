# SPDX-License-Identifier: Apache-2.0
"""Peers with stand-ins for their libraries: what they call, on which stream, and that their results are checked."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll import runtime
from tdcoll.bench import all_gather, dense, engine, peers
from tdcoll.bench.all_gather import AllGather
from tdcoll.bench.data import Buffers
from tdcoll.bench.engine import Subject
from tdcoll.errors import HeapExhaustedError
from tdcoll.testing import World

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def makes(nbytes: int, world: int, sets: int = 2) -> Callable[..., Buffers]:
    """What the benchmark gives to a peer."""

    def make(allocate: Any, separate: bool = False) -> Buffers:
        rank = runtime.current().rank
        return Buffers(nbytes, world, rank, sets, torch.uint8, CPU, allocate=allocate, separate=separate)

    return make


def checked(subject: Subject, rounds: int = 2) -> None:
    """Calls, and what came out of them."""
    everybody = runtime.current()
    subject.begin(5)
    for _ in range(rounds):
        subject.before(range(subject.inputs))
        everybody.control.all_gather(range(everybody.world_size), "turn", None)
        results = [subject.call(i) for i in range(subject.inputs)]
        assert [subject.errors(i, result) for i, result in enumerate(results)] == [(0, "")] * subject.inputs


def gathered(mine: bytes) -> bytes:
    owner = runtime.current()
    return b"".join(owner.control.all_gather(range(owner.world_size), "gather", mine))


@pytest.mark.parametrize("name", [name for name in peers.ALL_GATHERS if "nccl" not in name])
def test_without_gpus_they_say_why(name: str) -> None:
    with pytest.raises(RuntimeError, match="needs GPUs"):
        peers.ALL_GATHERS[name](makes(8, 1), CPU)


# ---------------------------------------------------------------------- NVSHMEM's fcollect


@pytest.fixture
def fake_nvshmem(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """``nvshmem`` with a collective that works in a World; its calls."""
    calls: list[tuple[Any, ...]] = []
    bindings = ModuleType("nvshmem.bindings.nvshmem")

    def of(width: int) -> Callable[..., None]:
        def fcollect(team: int, dest: int, source: int, count: int, stream: int) -> None:
            calls.append((team, width, count, stream))
            found = gathered(ctypes.string_at(source, width * count))
            ctypes.memmove(dest, found, len(found))

        return fcollect

    for width in (1, 2, 4, 8):
        setattr(bindings, f"int{8 * width}_fcollect_on_stream", of(width))
    bindings.Team_id = SimpleNamespace(TEAM_WORLD=0)  # type: ignore[attr-defined]
    package, inner = ModuleType("nvshmem"), ModuleType("nvshmem.bindings")
    package.bindings, inner.nvshmem = inner, bindings  # type: ignore[attr-defined]
    for module in (package, inner, bindings):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return calls


@pytest.mark.parametrize(("nbytes", "width"), [(1024, 8), (12, 4), (6, 2), (5, 1)])
def test_fcollect(nbytes: int, width: int, fake_nvshmem: list[tuple[Any, ...]]) -> None:
    def host(pe: int) -> None:
        subject = peers.ALL_GATHERS["fcollect"](makes(nbytes, 3), CUDA)
        owner = runtime.current()
        for tensor in (*subject.data.inputs, *subject.data.results):
            owner.offset_of(tensor, "a buffer")  # symmetric
        checked(subject)
        subject.close()
        assert tdcoll.heap_info().used == 0

    World(3).run(host)
    assert set(fake_nvshmem) == {(0, width, nbytes // width, 77)}
    assert len(fake_nvshmem) == 3 * 2 * 2


def test_fcollect_without_room_gives_back_what_it_took(fake_nvshmem: list[tuple[Any, ...]]) -> None:
    def host(pe: int) -> None:
        with pytest.raises(HeapExhaustedError):
            peers.ALL_GATHERS["fcollect"](makes(1 << 18, 3), CUDA)
        assert tdcoll.heap_info().used == 0

    World(3, heap_bytes=1_700_000).run(host)  # room for the results, and not for the inputs


def test_the_heap_has_room_for_fcollect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "INTERPRETED", False)
    need = [
        AllGather.heap_bytes(AllGather.parse(["-b", "1M", "-e", "1M", "--algorithms", "1d", "--peers", name]), 4)
        for name in ("nccl", "fcollect")
    ]
    assert need[1] == need[0] + 21 * (5 << 20)


@pytest.mark.parametrize(
    ("given", "wanted", "found"),
    [("nccl,fcollect", None, "0"), ("fcollect", "", "0"), ("fcollect", "1", "1"), ("nccl", None, None)],
)
def test_nvshmem_keeps_its_nccl_for_fcollect(
    monkeypatch: pytest.MonkeyPatch, given: str, wanted: str | None, found: str | None
) -> None:
    """When NVSHMEM starts, which is in ``case.run``; the variables of that moment are in the file."""
    monkeypatch.setenv("NVSHMEM_DISABLE_NCCL", wanted or "")
    if wanted is None:
        monkeypatch.delenv("NVSHMEM_DISABLE_NCCL")
    seen: list[str | None] = []

    def run(*arguments: Any, **options: Any) -> int:
        seen.append(os.environ.get("NVSHMEM_DISABLE_NCCL"))
        return 0

    monkeypatch.setattr(all_gather, "INTERPRETED", False)
    monkeypatch.setattr(all_gather.case, "run", run)
    assert all_gather.main(["-b", "1K", "-e", "1K", "--peers", given]) == 0
    assert seen == [found]


# ---------------------------------------------------------------------- torch's symmetric memory


class FakeStream:
    """A stream of which the test knows whether it is through."""

    def __init__(self) -> None:
        self.busy = False

    def query(self) -> bool:
        return not self.busy


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch's symmetric memory in a World."""
    stream = FakeStream()
    world = SimpleNamespace(group_name="0")
    said: list[str] = []

    class Handle:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.offset = runtime.current().offset_of(tensor, "an input")

        def get_buffer(self, rank: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
            base = worlds[0].runtimes[rank].heap.view(self.offset, int(shape[0]) * dtype.itemsize)
            return base.view(dtype).view(shape)

        def barrier(self, channel: int) -> None:
            said.append("barrier")
            gathered(b"")

    worlds: list[World] = []
    symmetric = SimpleNamespace(
        empty=lambda nbytes, dtype, device: tdcoll.empty(nbytes, dtype),
        rendezvous=lambda tensor, group: Handle(tensor),
        _get_backend_stream=lambda: stream,
    )

    def low_contention(tensor: torch.Tensor, group: str) -> torch.Tensor:
        assert group == "0"
        found = gathered(bytes(tensor.view(torch.uint8).tolist()))
        return torch.frombuffer(bytearray(found), dtype=tensor.dtype)

    def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
        stream.busy = False
        return tensor

    @contextlib.contextmanager
    def on(given: Any) -> Iterator[None]:
        stream.busy = True
        yield

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None: ...

    monkeypatch.setattr(peers, "symmetric_memory", lambda device: symmetric)
    monkeypatch.setattr(peers, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=world)))
    monkeypatch.setattr(torch.ops.symm_mem, "_low_contention_all_gather", low_contention, raising=False)
    monkeypatch.setattr(torch.ops._c10d_functional, "wait_tensor", wait_tensor, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(peers, "pause", lambda us: None)
    return SimpleNamespace(stream=stream, worlds=worlds, said=said)


@pytest.mark.parametrize("name", ["torch-symm", "torch-symm-cat"])
def test_torchs_all_gathers(name: str, fake_torch: SimpleNamespace) -> None:
    fake_torch.worlds.append(World(3))
    fake_torch.worlds[0].run(lambda pe: checked(peers.ALL_GATHERS[name](makes(20, 3), CUDA)))
    assert ("barrier" in fake_torch.said) == (name == "torch-symm-cat")


def test_a_stream_that_is_not_waited_for_cannot_be_timed(fake_torch: SimpleNamespace) -> None:
    peers.require_joined(lambda i: torch.ops._c10d_functional.wait_tensor(None), fake_torch.stream)
    with pytest.raises(RuntimeError, match="goes on when the stream that it is timed on is through"):
        peers.require_joined(lambda i: None, fake_torch.stream)


# ---------------------------------------------------------------------- results that a peer makes itself


@pytest.mark.parametrize("stale", [False, True])
def test_results_of_the_last_launch_are_checked(
    stale: bool, clock: Any, on_gpus: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs of an even and of an odd number of calls have results of their own, made when they are captured."""

    def make(make_buffers: Any, device: torch.device, _: object) -> Subject:
        buffers = make_buffers(None)
        places: dict[Any, torch.Tensor] = {}

        def call(i: int) -> torch.Tensor:
            clock.passes(5.0)
            found = torch.frombuffer(
                bytearray(gathered(bytes(buffers.inputs[i].view(torch.uint8).tolist()))), dtype=torch.uint8
            )
            key = (graph.get(runtime.current().rank), i)
            if key in places and not stale:
                places[key].copy_(found)
            return places.setdefault(key, found).view(torch.float32)

        return peers.subject_of(buffers, call)

    graph: dict[int, int] = {}

    def capture(call: Callable[[int], object], calls: int) -> Any:
        def replay() -> None:
            graph[runtime.current().rank] = calls
            for position in range(calls):
                call(position)

        replay()
        return engine.Launch(replay, calls)

    monkeypatch.setattr(engine, "capture", capture)
    monkeypatch.setitem(peers.ALL_GATHERS, "nccl", make)
    options = AllGather.parse(["-b", "64", "-e", "64", "--algorithms=", "--iterations", "4", "--warmup", "1"])
    rows = on_gpus(lambda pe: AllGather(options).measure(lambda row: None), 2)[0]
    assert [(row.algorithm, row.check) for row in rows] == [("nccl", "WRONG" if stale else "ok")]
    assert rows[0].median_us == pytest.approx(5.0)
