# SPDX-License-Identifier: Apache-2.0
"""Queues of asynchronous calls: orders, callbacks, threads that end, and forked children."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from tdcoll.base.errors import TdcollError
from tdcoll.distributed.queues import Queue, QueuedCall, TaskWork

PLENTY_S = 20.0


def telling(queue: Queue, told: list[Any], what: Any, until: threading.Event | None = None) -> TaskWork:
    """A call that says so when it is made."""

    def make() -> list[torch.Tensor]:
        assert until is None or until.wait(PLENTY_S)
        told.append(what)
        return [torch.tensor(float(len(told)))]

    return TaskWork(queue.submit(QueuedCall(make)), queue)


def ended(future: Any) -> bool:
    """Whether a C++ future is complete soon."""
    deadline = time.monotonic() + PLENTY_S
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(future.done())


def test_queues_do_not_wait_for_each_other() -> None:
    one, other, go, told = Queue(), Queue(), threading.Event(), []
    first = telling(one, told, "first", go)
    telling(other, told, "other").wait()
    assert not first.is_completed()
    go.set()
    one.drain()
    assert told == ["other", "first"]


def test_the_thread_ends_and_begins_again() -> None:
    queue, told = Queue(), []
    for turn in range(2):
        telling(queue, told, turn)
        thread = queue._thread
        queue.close()
        assert queue.join(time.monotonic() + PLENTY_S)
        assert thread is not None
        assert told[-1] == turn
        thread.join(PLENTY_S)
        assert not thread.is_alive()
    assert told == [0, 1]


def test_callbacks_of_two_queues_that_wait_for_each_others_calls() -> None:
    queues, told, go, futures = (Queue(), Queue()), [], threading.Event(), []
    for queue, other in (queues, queues[::-1]):
        first = telling(queue, told, "first", go)
        futures.append(first.get_future().then(lambda done, other=other: telling(other, told, "second").wait()))
    go.set()
    assert all(ended(future) for future in futures)
    assert sorted(told) == ["first", "first", "second", "second"]


def test_a_future_that_is_asked_for_late() -> None:
    queue, seen = Queue(), []
    made = telling(queue, [], "only")
    made.wait()
    made.get_future().then(lambda done: seen.append((done.value()[0].item(), threading.current_thread()))).wait()
    assert seen == [(1.0, threading.current_thread())]


@pytest.mark.parametrize("way", ["dropped early", "dropped late", "wait", "exception", "future"])
def test_an_undelivered_error_is_logged_once(way: str, caplog) -> None:
    queue, go = Queue(), threading.Event()

    def fail() -> list[torch.Tensor]:
        assert go.wait(PLENTY_S)
        raise ValueError("of the call")

    work = TaskWork(queue.submit(QueuedCall(fail)), queue)
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
    queue.close()


def test_a_forked_child_finds_outstanding_calls_failed() -> None:
    queue, told, go = Queue(), [], threading.Event()
    running, waiting = telling(queue, told, "running", go), telling(queue, told, "waiting")
    while queue._current is None:
        time.sleep(0.001)
    child = os.fork()
    if not child:
        signal.alarm(10)  # ends it if it hangs
        failed = 0
        try:
            queue.drain()
            for call in (running, waiting):
                try:
                    call.wait()
                except TdcollError as error:
                    failed += "parent process" in str(error)
            again: list[str] = []
            telling(queue, again, "the child's own").wait()
            failed += again == ["the child's own"]
        finally:
            os._exit(failed)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    go.set()
    queue.drain()
    assert told == ["running", "waiting"]
    assert waiting.wait()
