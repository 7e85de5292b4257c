# SPDX-License-Identifier: Apache-2.0
"""Queues of asynchronous calls, and lists of sparse tensors: how many one call takes, and one at a
time."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll import runtime
from tdcoll.distributed import Options, queues, sparse
from tdcoll.distributed.call import Call
from tdcoll.distributed.handlers import GroupInfo
from tdcoll.distributed.queues import Queue, QueuedCall, TaskWork
from tdcoll.distributed.sparse import SparseAllReduce
from tdcoll.distributed.work import record_streams
from tdcoll.testing import World

PLENTY_S = 20.0


def new_queue() -> Queue:
    """A queue whose calls exchange nothing."""
    return Queue(None)  # type: ignore[arg-type]


def telling(
    queue: Queue, told: list[Any], what: Any, until: threading.Event | None = None
) -> TaskWork:
    """A call that says so when it is made."""

    def make() -> list[torch.Tensor]:
        assert until is None or until.wait(PLENTY_S)
        told.append(what)
        return [torch.tensor(float(len(told)))]

    call = QueuedCall(make)
    work = TaskWork(call)
    queue.submit(call)
    return work


def test_queues_do_not_wait_for_each_other() -> None:
    one, other, go, told = new_queue(), new_queue(), threading.Event(), []
    first = telling(one, told, "first", go)
    telling(other, told, "other").wait()
    assert not first.is_completed()
    go.set()
    one.drain()
    assert told == ["other", "first"]


def test_the_thread_ends_and_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "_IDLE_S", 0.01)
    queue, told = new_queue(), []
    for turn in range(2):
        go = threading.Event()
        telling(queue, told, turn, go)
        thread = queue.thread
        go.set()
        queue.drain()
        assert thread is not None
        thread.join(PLENTY_S)
        assert not thread.is_alive()
    assert told == [0, 1]


def test_calls_of_callbacks_come_first_and_cannot_wait_for_later_ones() -> None:
    queue, told, go, refused = new_queue(), [], threading.Event(), []
    first, later = telling(queue, told, "first", go), telling(queue, told, "later")

    def then(done: Any) -> None:
        telling(queue, told, "of the callback").wait()
        with pytest.raises(RuntimeError, match="when the callback has ended"):
            later.wait()
        refused.append(threading.current_thread() is queue.thread)

    future = first.get_future().then(then)
    go.set()
    later.wait()
    future.wait()
    assert refused == [True]
    assert told == ["first", "of the callback", "later"]


def test_callbacks_that_wait_for_each_other_end() -> None:
    """The second of them raises, and its queue goes on with what the first waits for."""
    queues, go, ended = [new_queue() for _ in range(2)], threading.Event(), list[str]()
    works = [telling(queue, [], "call", go) for queue in queues]
    both = threading.Barrier(2, timeout=PLENTY_S)

    def waits_for(other: Queue) -> Any:
        def then(done: Any) -> None:
            both.wait()
            try:
                ended.append("waited" if telling(other, [], "of a callback").wait() else "")
            except RuntimeError as error:
                ended.append(str(error))

        return then

    futures = [
        work.get_future().then(waits_for(other))
        for work, other in zip(works, reversed(queues), strict=True)
    ]
    go.set()
    for future in futures:
        future.wait()
    assert sorted(ended) == [
        "a callback cannot wait for a call that is made when the callback has ended",
        "waited",
    ]


def test_a_queue_goes_on_when_a_future_cannot_be_set(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    queue, go, told = new_queue(), threading.Event(), list[Any]()
    first = telling(queue, told, "first", go)
    assert first.get_future() is not None
    monkeypatch.setattr(QueuedCall, "_tell", lambda call: 1 / 0)
    go.set()
    telling(queue, told, "second").wait(timedelta(seconds=PLENTY_S))
    queue.drain()
    assert told == ["first", "second"]
    assert "ZeroDivisionError" in caplog.text


def test_a_future_that_is_asked_for_late() -> None:
    queue, seen = new_queue(), []
    made = telling(queue, [], "only")
    made.wait()
    made.get_future().then(
        lambda done: seen.append((done.value()[0].item(), threading.current_thread()))
    ).wait()
    assert seen == [(1.0, threading.current_thread())]


@pytest.mark.parametrize("way", ["dropped early", "dropped late", "wait", "exception", "future"])
def test_an_undelivered_error_is_logged_once(way: str, caplog) -> None:
    queue, go = new_queue(), threading.Event()

    def fail() -> list[torch.Tensor]:
        assert go.wait(PLENTY_S)
        raise ValueError("of the call")

    call = QueuedCall(fail)
    work = TaskWork(call)
    queue.submit(call)
    future = work.get_future().then(lambda done: done.value()) if way == "future" else None
    if way == "dropped early":
        del work
    go.set()
    queue.drain()
    if way == "wait":
        with pytest.raises(ValueError, match="of the call"):
            work.wait()
    if way == "exception":
        assert isinstance(work.exception(), ValueError)
    assert len(caplog.records) == (way == "dropped early")
    if way != "dropped early":
        del work
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("tdcoll", "ERROR")
    ] * ("dropped" in way)
    assert all(
        "dropped without wait(): ValueError: of the call" in line for line in caplog.messages
    )
    del future


ROWS, WIDTH = 256, 64


def handler() -> SparseAllReduce:
    job = runtime.current()
    members = GroupInfo(job, tuple(range(job.world_size)), job.timeout_s, Options())
    return SparseAllReduce(members, Queue(job.control.part("sparse")))


def table(rank: int, rows: int = ROWS, few: int | None = None) -> torch.Tensor:
    """A gradient of ``rows`` rows, or of a ``few`` of them, that the other rank has not."""
    count = rows if few is None else few
    ids = torch.arange(count)[None] * 2 + rank
    values = torch.full((count, WIDTH), 1.0 + rank)
    return torch.sparse_coo_tensor(ids, values, (2 * rows, WIDTH), check_invariants=False)


def test_the_first_context_has_the_capacity_for_the_largest_tensor() -> None:
    def host(pe: int) -> None:
        sums, given = handler(), [table(pe, rows) for rows in (300, 400, 200)]
        assert sums.prepare(Call(given, given, "sum")) is None
        assert sums.context is not None
        assert sums.context.max_rows_per_rank == 400
        sums.close()

    World(2).run(host)


def test_a_list_for_which_the_heap_has_no_room_takes_several_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks split alike, also if one has few rows, and later lists begin with as many tensors
    as have fitted."""
    taken: dict[int, list[int]] = {0: [], 1: []}
    reduce = sparse.sparse_all_reduce

    def counted(
        tensors: list[torch.Tensor], op: str, *, ctx: tdcoll.SparseContext
    ) -> list[torch.Tensor]:
        taken[ctx.rank].append(len(tensors))
        return reduce(tensors, op, ctx=ctx)

    monkeypatch.setattr(sparse, "sparse_all_reduce", counted)

    def host(pe: int) -> None:
        sums = handler()
        every = [table(0), table(1, ROWS, few=8)]
        given, wanted = [every[pe]] * 5, (every[0] + every[1]).to_dense()
        assert sums.prepare(Call(given, given, "sum")) is None
        for _ in range(2):
            made = sums.reduce(given, "sum")
            assert len(made) == 5
            assert all(torch.equal(one.to_dense(), wanted) for one in made)
        with pytest.raises(tdcoll.HeapExhaustedError, match="NVSHMEM_SYMMETRIC_SIZE"):
            sums.reduce([table(pe, 3000)], "sum")
        assert torch.equal(sums.reduce([every[pe]], "sum")[0].to_dense(), wanted)
        sums.close()

    one = tdcoll.memory_plan(
        {"one": {"max_rows_per_rank": ROWS, "max_row_bytes": 4 * WIDTH}}, world_size=2
    )
    World(2, heap_bytes=3 * one.total).run(host)
    assert taken[0] == taken[1] == [5, 2, 2, 1, 2, 2, 1, 1, 1]


def test_one_thread_at_a_time_uses_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2)
    met: list[bool] = []

    def reduce(tensors: list[torch.Tensor], op: str, **more: Any) -> list[torch.Tensor]:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(1)
            met.append(True)
        return tensors

    monkeypatch.setattr(sparse, "sparse_all_reduce", reduce)
    job: Any = SimpleNamespace(
        with_control_plane=lambda control: contextlib.nullcontext(), simulated=False, rank=0
    )
    queue = Queue(SimpleNamespace())  # type: ignore[arg-type]
    sums = SparseAllReduce(GroupInfo(job, (0,), 1.0, Options()), queue)
    sums.context = SimpleNamespace(device=torch.device("meta"))  # type: ignore[assignment]
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(sums.reduce([table(0)], "sum")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert not met


def test_the_allocator_is_told_of_each_allocation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, rows, noted = torch.arange(6)[None], torch.ones(6, WIDTH), list[torch.Tensor]()
    parts = [
        torch.sparse_coo_tensor(i, v, (6, WIDTH), check_invariants=False)
        for i, v in zip(ids.split([2, 4], 1), rows.split([2, 4]), strict=True)
    ]
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: noted.append(tensor))
    record_streams([*parts, torch.ones(3)], None)
    assert len(noted) == 3
