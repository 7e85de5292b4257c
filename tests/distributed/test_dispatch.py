# SPDX-License-Identifier: Apache-2.0
"""Who handles a call, and the fast path of repeated calls; with stand-ins for handlers and for a
GPU."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tdcoll import runtime
from tdcoll.distributed import Options
from tdcoll.distributed.call import Call
from tdcoll.distributed.dispatch import Dispatcher
from tdcoll.distributed.fallback import Fallback
from tdcoll.distributed.methods import ALL_GATHER_SINGLE, UNSET_TIMEOUT
from tdcoll.distributed.queues import Queue, QueuedCall, TaskWork
from tdcoll.testing import World


@pytest.fixture
def cuda(monkeypatch) -> Any:
    """In the place of a GPU, whose stream 7 is the current one; ``told`` are launches and streams
    that become current.

    tests/workers/distributed_groups_checks.py shows the order of streams on GPUs."""
    gpu = SimpleNamespace(told=[], current=7, device=0, capturing=False, error=None)
    queue = Queue(None)  # type: ignore[arg-type]
    queue.stream = SimpleNamespace(
        stream_id=5, device_index=0, device_type=1, device=torch.device("cuda", 0)
    )

    def launch() -> str:
        gpu.told.append("launch")
        if gpu.error is not None:
            raise gpu.error
        return "launched"

    event = SimpleNamespace(record=lambda stream: None, wait=lambda stream: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: gpu.device, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentStream", lambda index: (gpu.current, index, 1), raising=False
    )
    monkeypatch.setattr(
        torch._C, "_cuda_setStream", lambda number, *of: gpu.told.append(number), raising=False
    )
    monkeypatch.setattr("tdcoll.distributed.queues.new_event", lambda: event)
    monkeypatch.setattr(torch.cuda, "Stream", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    monkeypatch.setattr("tdcoll.distributed.work._current", None)
    gpu.call = lambda: queue.run_beside(torch.device("cuda", 0), launch)
    return gpu


def test_nothing_runs_beside_another_device_or_a_capture(cuda) -> None:
    """From another device, since setting a stream sets the device, and where a graph is
    captured."""
    for cuda.device, cuda.capturing in ((1, False), (0, True)):
        assert cuda.call() is None
        assert cuda.told == []
    cuda.current = 0  # the default stream cannot be captured: nobody asks
    assert cuda.call() == "launched"
    assert "launch" in cuda.told


@pytest.mark.parametrize("error", [None, RuntimeError("of the driver")])
def test_what_runs_beside_leaves_the_current_stream(error: Exception | None, cuda) -> None:
    cuda.error = error
    with (
        contextlib.nullcontext()
        if error is None
        else pytest.raises(RuntimeError, match="of the driver")
    ):
        assert cuda.call() == "launched"
    assert cuda.told == [5, "launch", 7]


# ---------------------------------------------------------------------- repeated calls on CPUs

KIND = "all_gather"


def new_group() -> Dispatcher:
    """A group of all ranks of a world, whose fallback backend makes no call."""
    job = runtime.current()
    agreed: Any = SimpleNamespace(
        kinds=Options().kinds,
        reason=None,
        job=job,
        rank=job.rank,
        ranks=tuple(range(job.world_size)),
        name="0",
        agreed_name="0",
        token="a token",
        options=Options(),
        timeout_s=None,
        default=True,
    )
    backends = SimpleNamespace(_get_backend=lambda device: None)
    group = Dispatcher(agreed, Fallback(backends, {"cpu": "gloo"}))
    group.fallback.make = lambda call: "fell back"  # type: ignore[method-assign]
    return group


class Gathers:
    """All-gathers of one rank.

    Attributes:
        prepared: how many of them were not repeated by the fast path.
        out: the last one's result, or zeros if it made none.
    """

    def __init__(self, group: Dispatcher) -> None:
        self.group = group
        self.prepared = 0
        handler = group.handlers[KIND]
        prepare = handler.prepare

        def counted(call: Call) -> str | None:
            self.prepared += 1
            return prepare(call)

        handler.prepare = counted  # type: ignore[method-assign]

    def call(self, n: int = 4, asynchronous: bool = False) -> Any:
        rank = runtime.current().rank
        self.out = torch.zeros(2 * n)
        options = SimpleNamespace(asyncOp=asynchronous, timeout=UNSET_TIMEOUT)
        tensor = torch.full((n,), 1.0 + rank)
        return self.group.call_one(ALL_GATHER_SINGLE, self.out, tensor, None, options)

    def made(self, n: int = 4) -> bool:
        """Whether the last call, of ``n`` elements, has its result."""
        return self.out.tolist() == n * [1.0] + n * [2.0]


@on_ranks(2)
def test_a_repeated_call_takes_the_fast_path(pe: int) -> None:
    gathers = Gathers(new_group())
    for _ in range(3):
        assert gathers.call().is_completed()
        assert gathers.made()
    assert gathers.prepared == 1
    assert gathers.group.counts == {(KIND, "tdcoll", ""): 3}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("what", ["job closed", "group closed", "group aborted", "coalescing"])
@on_ranks(2)
def test_no_fast_path_when_something_is_in_the_way(pe: int, what: str, asynchronous: bool) -> None:
    gathers = Gathers(new_group())
    gathers.call()
    if what == "job closed":
        runtime.current().closed = True
        reason = "tdcoll.finalize() was called"
    elif what == "group closed":
        gathers.group.close()
        reason = "the group is shut down"
    elif what == "group aborted":
        gathers.group.abort()
        reason = "the group is shut down"
    else:
        gathers.group.coalescing = True
        reason = "inside a coalescing block of the fallback backend"
    assert gathers.call(asynchronous=asynchronous) == "fell back"
    assert not gathers.out.any()
    assert gathers.group.counts == {(KIND, "tdcoll", ""): 1, (KIND, "gloo", reason): 1}


@pytest.mark.parametrize("captured", [False, True])
@on_ranks(2, heap_bytes=64 << 20)
def test_a_call_whose_context_was_replaced_is_prepared_again(pe: int, captured: bool) -> None:
    """Also if the old context stays, because a graph uses it."""
    gathers = Gathers(new_group())
    gathers.call()
    implicit = gathers.group.handlers[KIND].implicit
    first = implicit.context
    first.captured = captured
    larger = first.max_bytes_per_rank // 4 + 1
    gathers.call(larger)
    assert gathers.made(larger)
    assert implicit.context is not first
    for _ in range(2):
        gathers.call()
        assert gathers.made()
    assert gathers.prepared == 3


@on_ranks(2)
def test_a_repeated_call_on_cpus_comes_after_the_queues_calls(pe: int) -> None:
    gathers = Gathers(new_group())
    gathers.call()
    found: list[bool] = []

    def look() -> list[torch.Tensor]:
        time.sleep(0.1)
        found.append(bool(gathers.out.any()))
        return []

    gathers.group.handlers[KIND].queue.submit(QueuedCall(look))
    gathers.call()
    assert found == [False], "the repeated call began before the queue's"
    assert gathers.made()
    assert gathers.prepared == 1


@pytest.mark.parametrize("busy", [False, True])
def test_an_asynchronous_call_on_cpus_is_left_to_the_queue(busy: bool, monkeypatch) -> None:
    """Also one that was made before."""
    submitted: list[QueuedCall] = []
    monkeypatch.setattr(Queue, "submit", lambda queue, task: submitted.append(task))

    def host(pe: int) -> None:
        gathers = Gathers(new_group())
        gathers.call()
        gathers.group.handlers[KIND].queue.busy = busy
        assert isinstance(gathers.call(asynchronous=True), TaskWork)
        assert not gathers.out.any()

    World(2).run(host)
    assert len(submitted) == 2


# ---------------------------------------------------------------------- calls that fell back


def dispatcher_that_asks(monkeypatch: Any, asked: list[Any], now: list[str | None]) -> Dispatcher:
    """A group whose tdcoll never handles what is large, a product or of fp64, and says ``now`` when
    it is prepared."""
    kinds = "all_gather", "all_reduce"
    agreed: Any = SimpleNamespace(
        kinds=kinds, reason="", job=None, rank=0, ranks=(0, 1), name="0", options=Options()
    )
    nccl = SimpleNamespace(_allgather_base=lambda out, tensor, opts: "fell back")
    group = SimpleNamespace(_get_backend=lambda device: nccl)
    dispatcher = Dispatcher(agreed, Fallback(group, {"cpu": "nccl"}))
    monkeypatch.setattr(dispatcher.fallback, "make", lambda call: "fell back")

    def never(kind: str, call: Call) -> str | None:
        tensor, out = call.inputs[0], call.outs[0]
        asked.append((tuple(tensor.shape), tuple(out.shape), call.op))
        if any(part.layout != torch.strided for part in (tensor, out)):
            return "not strided"
        if (
            call.op == "prod"
            or torch.float64 in (tensor.dtype, out.dtype)
            or "meta" in (tensor.device.type,)
        ):
            return "never"
        return "too large" if max(tensor.shape[0], out.shape[0]) > 8 else None

    monkeypatch.setattr(dispatcher, "_unsupported", never)
    service = SimpleNamespace(check_call=lambda call: None, members=SimpleNamespace(debug=False))
    dispatcher.handlers = dict.fromkeys(agreed.kinds, service)  # type: ignore[arg-type]
    monkeypatch.setattr(dispatcher, "_obstacle", lambda: None)
    monkeypatch.setattr(dispatcher, "_prepare", lambda kind, call, asynchronous: now.pop(0))
    monkeypatch.setattr(dispatcher, "handle", lambda kind, call, **how: "handled")
    return dispatcher


def call_one(
    dispatcher: Dispatcher, tensor: torch.Tensor, out: torch.Tensor, op: str | None = None
) -> Any:
    return dispatcher.call_one(
        ALL_GATHER_SINGLE, out, tensor, op, SimpleNamespace(asyncOp=False, timeout=UNSET_TIMEOUT)
    )


def test_a_call_like_one_that_fell_back_falls_back_by_the_fast_path(monkeypatch) -> None:
    asked: list[Any] = []
    dispatcher = dispatcher_that_asks(monkeypatch, asked, [])
    assert [call_one(dispatcher, torch.empty(8), torch.empty(16)) for _ in range(3)] == [
        "fell back"
    ] * 3
    assert asked == [((8,), (16,), None)]
    assert dispatcher.counts == {("all_gather", "nccl", "too large"): 3}


@pytest.mark.parametrize(
    ("wrong", "op"),
    [
        (lambda: (torch.empty(4), torch.empty(16)), None),
        (lambda: (torch.empty(16), torch.empty(8)), None),
        (lambda: (torch.empty(4, dtype=torch.float64), torch.empty(8)), None),
        (lambda: (torch.empty(4), torch.empty(8, dtype=torch.float64)), None),
        (lambda: (torch.empty(4, device="meta"), torch.empty(8)), None),
        (lambda: (torch.empty(4).to_sparse(), torch.empty(8)), None),
        (lambda: (torch.empty(4), torch.empty(8).to_sparse()), None),
        (lambda: (torch.empty(4), torch.empty(8)), "prod"),
    ],
)
def test_a_call_that_is_never_served_says_nothing_of_another(
    wrong: Any, op: str | None, monkeypatch
) -> None:
    """On one rank it may have been a mistake, which the other ranks have not made."""
    dispatcher = dispatcher_that_asks(monkeypatch, [], [None])
    assert call_one(dispatcher, *wrong(), op) == "fell back"
    assert call_one(dispatcher, torch.empty(4), torch.empty(8)) == "handled"


def test_what_is_in_the_way_for_now_is_not_remembered(monkeypatch) -> None:
    now: list[str | None] = ["inside of a coalescing block", None]
    dispatcher = dispatcher_that_asks(monkeypatch, [], now)
    assert [call_one(dispatcher, torch.empty(4), torch.empty(8)) for _ in range(2)] == [
        "fell back",
        "handled",
    ]
    assert now == []


def test_shapes_that_cannot_be_remembered(monkeypatch) -> None:
    """A nested tensor has none, and a symbolic number, of a tensor without values, is no key of a
    dictionary."""
    dispatcher = dispatcher_that_asks(monkeypatch, [], [])
    monkeypatch.setattr(dispatcher, "_unsupported", lambda kind, call: "never")
    symbolic = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(
        torch.empty(5, 7), static_shapes=False
    )
    for tensor in (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), symbolic):
        assert [call_one(dispatcher, tensor, tensor) for _ in range(2)] == ["fell back"] * 2
    without = ("all_gather", "no backend", "a tensor without values")
    assert dispatcher.counts == {("all_gather", "nccl", "never"): 2, without: 2}


def test_few_calls_are_remembered(monkeypatch) -> None:
    asked: list[Any] = []
    dispatcher = dispatcher_that_asks(monkeypatch, asked, [])
    monkeypatch.setattr("tdcoll.distributed.dispatch._MOST_REMEMBERED", 2)
    for n in (9, 10, 9, 10, 11, 9):  # 11 makes it forget the others
        call_one(dispatcher, torch.empty(n), torch.empty(n))
    assert [shape for (shape,), *_ in asked] == [9, 10, 11, 9]
