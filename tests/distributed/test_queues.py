# SPDX-License-Identifier: Apache-2.0
"""Queues of asynchronous calls: orders, callbacks, threads that end, and errors that nobody has asked for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tdcoll.distributed import queues
from tdcoll.distributed.queues import Queue, QueuedCall, TaskWork

PLENTY_S = 20.0


def new_queue() -> Queue:
    """A queue whose calls exchange nothing."""
    return Queue(None)  # type: ignore[arg-type]


def telling(queue: Queue, told: list[Any], what: Any, until: threading.Event | None = None) -> TaskWork:
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
        with pytest.raises(RuntimeError, match="behind its own"):
            later.wait()
        refused.append(threading.current_thread() is queue.thread)

    future = first.get_future().then(then)
    go.set()
    later.wait()
    future.wait()
    assert refused == [True]
    assert told == ["first", "of the callback", "later"]


def test_a_future_that_is_asked_for_late() -> None:
    queue, seen = new_queue(), []
    made = telling(queue, [], "only")
    made.wait()
    made.get_future().then(lambda done: seen.append((done.value()[0].item(), threading.current_thread()))).wait()
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
    assert [(record.name, record.levelname) for record in caplog.records] == [("tdcoll", "ERROR")] * ("dropped" in way)
    assert all("dropped without wait(): ValueError: of the call" in line for line in caplog.messages)
    del future
