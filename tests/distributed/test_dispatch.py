# SPDX-License-Identifier: Apache-2.0
"""Who handles a call, and the fast path of repeated calls; with stand-ins for handlers and for a GPU."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tdcoll.distributed import Options, fallback
from tdcoll.distributed.call import Call
from tdcoll.distributed.dispatch import Dispatcher, _Known
from tdcoll.distributed.fallback import Fallback


@pytest.fixture
def cuda(monkeypatch) -> Any:
    """In the place of a GPU, whose stream 7 is the current one; ``told`` are launches and streams that become current.

    tests/workers/distributed_groups_checks.py shows the order of streams on GPUs."""
    gpu = SimpleNamespace(told=[], current=7, device=0, capturing=False, error=None)
    stream = SimpleNamespace(stream_id=5, device_index=0, device_type=1, device=torch.device("cuda", 0))

    def again(context: Any, ready: Any, tensor: torch.Tensor, out: torch.Tensor) -> None:
        gpu.told.append("launch")
        if gpu.error is not None:
            raise gpu.error

    event = SimpleNamespace(record=lambda stream: None, wait=lambda stream: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: gpu.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: (gpu.current, index, 1), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", lambda number, *of: gpu.told.append(number), raising=False)
    for module in ("dispatch", "work"):
        monkeypatch.setattr(f"tdcoll.distributed.{module}.new_event", lambda: event)
    monkeypatch.setattr(torch.cuda, "Stream", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    monkeypatch.setattr("tdcoll.distributed.work._current", None)
    monkeypatch.setattr("tdcoll.distributed.dispatch.again", again)
    dispatcher = Dispatcher.__new__(Dispatcher)
    dispatcher.device = torch.device("cuda", 0)
    handler: Any = SimpleNamespace(queue=SimpleNamespace(stream=stream, before=None, events=[]))
    gpu.call = lambda: dispatcher._again_beside(handler, None, None, torch.empty(1), torch.empty(1))  # type: ignore[arg-type]
    return gpu


def test_the_fast_path_is_not_taken(cuda) -> None:
    """From another device, since setting a stream sets the device, and where a graph is captured."""
    for cuda.device, cuda.capturing in ((1, False), (0, True)):
        assert cuda.call() is None
        assert cuda.told == []
    cuda.current = 0  # the default stream cannot be captured: nobody asks
    assert cuda.call() is None
    assert "launch" in cuda.told


@pytest.mark.parametrize("error", [None, RuntimeError("of the driver")])
def test_the_fast_path_leaves_the_current_stream(error: Exception | None, cuda) -> None:
    cuda.error = error
    with contextlib.nullcontext() if error is None else pytest.raises(RuntimeError, match="of the driver"):
        assert cuda.call() is None
    assert cuda.told == [5, "launch", 7]


def group_that_knows_a_call(monkeypatch: Any, told: list[str]) -> tuple[Dispatcher, Any]:
    """A group on CPUs, and what it knows of a call."""

    def again(context: Any, ready: Any, tensor: torch.Tensor, out: torch.Tensor) -> Any:
        told.append("launch")
        return out

    monkeypatch.setattr("tdcoll.distributed.dispatch.again", again)
    dispatcher, context = Dispatcher.__new__(Dispatcher), object()
    queue, pool = SimpleNamespace(drain=lambda: told.append("drain"), busy=False), SimpleNamespace(context=context)
    service: Any = SimpleNamespace(check=lambda: told.append("check"), queue=queue, pool=pool)
    dispatcher.job = SimpleNamespace(closed=False)  # type: ignore[assignment]
    dispatcher._closed, dispatcher.coalescing, dispatcher._on_cpu = False, False, True
    dispatcher.handlers = {"all_gather": service}
    return dispatcher, _Known(("all_gather", "tdcoll", ""), object(), context)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["no job", "job closed", "closed", "coalescing", "a larger context"])
def test_no_fast_path_when_something_is_in_the_way(what: str, monkeypatch) -> None:
    dispatcher, known = group_that_knows_a_call(monkeypatch, told := [])
    if what == "no job":
        dispatcher.job = None
    elif what == "job closed":
        dispatcher.job.closed = True
    elif what == "a larger context":
        dispatcher.handlers["all_gather"].pool.context = object()
    dispatcher._closed, dispatcher.coalescing = what == "closed", what == "coalescing"
    for asynchronous in (False, True):
        assert dispatcher._again(known, torch.empty(1), torch.empty(1), asynchronous) is None
    assert told == []


def test_the_fast_path_on_cpus_comes_after_the_queues_calls(monkeypatch) -> None:
    dispatcher, known = group_that_knows_a_call(monkeypatch, told := [])
    queue = dispatcher.handlers["all_gather"].queue
    for queue.busy, expected in ((False, ["launch", "check"]), (True, ["drain", "launch", "check"])):
        assert dispatcher._again(known, torch.empty(1), torch.empty(1), False).is_completed()
        assert told == expected
        told.clear()
    assert dispatcher._again(known, torch.empty(1), torch.empty(1), True) is None
    assert told == []


def dispatcher_that_asks(monkeypatch: Any, asked: list[Any], now: list[str | None]) -> Dispatcher:
    """A group whose tdcoll never handles what is large, a product or of fp64, and says ``now`` when it is prepared."""
    kinds = "all_gather", "all_reduce"
    agreed: Any = SimpleNamespace(kinds=kinds, reason="", job=None, rank=0, ranks=(0, 1), name="0", options=Options())
    gloo = SimpleNamespace(_allgather_base=lambda out, tensor, opts: "fell back")
    group = SimpleNamespace(_get_backend=lambda device: gloo)
    dispatcher = Dispatcher(agreed, Fallback(group, {"cpu": "gloo"}))

    def never(kind: str, call: Call) -> str | None:
        tensor, out = call.inputs[0], call.outs[0]
        asked.append((tuple(tensor.shape), tuple(out.shape), call.op))
        if any(part.layout != torch.strided for part in (tensor, out)):
            return "not strided"
        if call.op == "prod" or torch.float64 in (tensor.dtype, out.dtype) or "meta" in (tensor.device.type,):
            return "never"
        return "too large" if max(tensor.shape[0], out.shape[0]) > 8 else None

    monkeypatch.setattr(dispatcher, "_unsupported", never)
    service = SimpleNamespace(check_call=lambda call: None, members=SimpleNamespace(debug=False))
    dispatcher.handlers = dict.fromkeys(agreed.kinds, service)  # type: ignore[arg-type]
    monkeypatch.setattr(dispatcher, "_obstacle", lambda: None)
    monkeypatch.setattr(dispatcher, "_prepare", lambda kind, call, asynchronous: now.pop(0))
    monkeypatch.setattr(dispatcher, "handle", lambda kind, call, **how: "handled")
    return dispatcher


def call_one(dispatcher: Dispatcher, tensor: torch.Tensor, out: torch.Tensor, op: str | None = None) -> Any:
    return dispatcher.call_one("all_gather", out, tensor, op, SimpleNamespace(asyncOp=False), lambda *_: "fell back")


def test_a_call_like_one_that_fell_back_falls_back_by_the_fast_path(monkeypatch) -> None:
    asked: list[Any] = []
    dispatcher = dispatcher_that_asks(monkeypatch, asked, [])
    assert [call_one(dispatcher, torch.empty(8), torch.empty(16)) for _ in range(3)] == ["fell back"] * 3
    assert asked == [((8,), (16,), None)]
    assert dispatcher.counts == {("all_gather", "gloo", "too large"): 3}


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
def test_a_call_that_is_never_served_says_nothing_of_another(wrong: Any, op: str | None, monkeypatch) -> None:
    """On one rank it may have been a mistake, which the other ranks have not made."""
    dispatcher = dispatcher_that_asks(monkeypatch, [], [None])
    assert call_one(dispatcher, *wrong(), op) == "fell back"
    assert call_one(dispatcher, torch.empty(4), torch.empty(8)) == "handled"


def test_what_is_in_the_way_for_now_is_not_remembered(monkeypatch) -> None:
    now: list[str | None] = ["inside of a coalescing block", None]
    dispatcher = dispatcher_that_asks(monkeypatch, [], now)
    assert [call_one(dispatcher, torch.empty(4), torch.empty(8)) for _ in range(2)] == ["fell back", "handled"]
    assert now == []


def test_shapes_that_cannot_be_remembered(monkeypatch) -> None:
    """A nested tensor has none, and a symbolic number is no key of a dictionary."""
    dispatcher = dispatcher_that_asks(monkeypatch, [], [])
    monkeypatch.setattr(dispatcher, "_unsupported", lambda kind, call: "never")
    symbolic = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(5, 7), static_shapes=False)
    for tensor in (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), symbolic):
        assert [call_one(dispatcher, tensor, tensor) for _ in range(2)] == ["fell back"] * 2
    assert dispatcher.counts == {("all_gather", "gloo", "never"): 4}


def test_few_calls_are_remembered(monkeypatch) -> None:
    asked: list[Any] = []
    dispatcher = dispatcher_that_asks(monkeypatch, asked, [])
    monkeypatch.setattr("tdcoll.distributed.dispatch._MOST_KNOWN", 2)
    for n in (9, 10, 9, 10, 11, 9):  # 11 makes it forget the others
        call_one(dispatcher, torch.empty(n), torch.empty(n))
    assert [shape for (shape,), *_ in asked] == [9, 10, 11, 9]


def test_a_parents_options_do_not_say_where_nccl_splits(monkeypatch) -> None:
    """torch.distributed.split_group passes them, and the parent may itself have been split off another group."""

    class Nccl:
        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            self.options = options

        def _set_sequence_number_for_group(self) -> None:
            pass

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    given = SimpleNamespace(split_from="the default group's communicator", is_high_priority_stream=True)
    made = fallback._nccl(dist.HashStore(), 0, 1, timedelta(seconds=5), "child", [0], given, False)
    assert made.options.split_from is None
    assert made.options.is_high_priority_stream
    assert given.split_from is not None
