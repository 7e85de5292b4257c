# SPDX-License-Identifier: Apache-2.0
"""Queues of calls that have to wait on the host, the threads that make them, and their ``Work``.

A call has to wait on the host when it runs in the simulator, or when the size of its result must be
known (the sparse all-reduce). If such a call is asynchronous, a :class:`Queue` makes it on its own
thread. Calls of one queue are made in the order in which they were issued, which is the same on all
ranks. Ranks may issue those of different queues in different orders, because they do not wait for
each other.

Callbacks of futures run on the queue's thread, right behind their call and before the next one of
the queue, as they do on NCCL's futures. A callback may issue calls and wait for them, because calls
that it issues to that queue are made at once. All ranks therefore make the calls of callbacks in
the same order, too, if each callback is attached before the next call of its kind is issued.

All calls end before the interpreter does, because a thread that Python stops inside of C++, where a
call waits, aborts the process. A forked child has none of the threads: calls that are outstanding
when the process is forked have failed there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch

from tdcoll.base.capture import capturing
from tdcoll.base.errors import NotInitializedError
from tdcoll.base.torch_internals import never_compiled
from tdcoll.distributed.work import (
    AsynchronousWork,
    as_backend_error,
    current_stream,
    expired,
    new_event,
    not_complete,
    record_streams,
    seconds_of,
)
from tdcoll.runtime.control import ControlPlane

_LAST_S = 3.0
"""The time for outstanding calls when the process ends."""

_IDLE_S = 10.0
"""How long a thread waits for another call, because starting one takes longer than waking it."""

_log = logging.getLogger("tdcoll")


class QueuedCall:
    """One call that a queue makes.

    Args:
        make: makes the call; its result is that of the work, a list of tensors.
        stream: CUDA stream that it is made on, behind the present work of the calling stream; None
            without a GPU.
        abort: ends the waits of its kernels, so that the call fails soon; from another thread.

    Attributes:
        queue: that makes it; None if the caller does.
        event: recorded behind the call, on its stream, if it has one.
        undelivered: the error, as long as it has not been raised or returned.
    """

    queue: Queue | None = None
    event: Any = None
    error: BaseException | None = None

    def __init__(
        self,
        make: Callable[[], list[Any]],
        stream: Any = None,
        *,
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        self._make: Callable[[], list[Any]] | None = make
        self.stream = stream
        self.abort = abort
        self._before = (
            None if stream is None else torch.cuda.current_stream(stream.device).record_event()
        )
        self.done = threading.Event()
        self.result: list[Any] = []
        self.undelivered: list[BaseException] = []
        self._dropped = False
        self._future: Any = None
        self._finishing = threading.Lock()

    @property
    def future(self) -> Any:
        """A ``torch.futures.Future`` of the result."""
        with self._finishing:
            found = self._future
            late = self.done.is_set()
            if found is None:
                devices = None if self.stream is None else [self.stream.device]
                self._future = found = torch.futures.Future(devices=devices)
                if late:  # it can't have a callback yet
                    self._tell()
        return found

    def run(self) -> None:
        """Make the call, and then run the callbacks of its future."""
        make = self._make
        self._make = None
        assert make is not None
        try:
            with self._on_its_stream():
                if self.stream is not None:
                    self.stream.wait_event(self._before)
                self.result = make()
                if self.stream is not None:
                    self.event = self.stream.record_event()
        except BaseException as error:
            self.error = as_backend_error(error)
            self.undelivered.append(self.error)
        with self._finishing:
            self.done.set()
            asked = self._future is not None
        if self._dropped:
            self._report()
        if asked:
            self._tell()

    def drop(self) -> None:
        """Log its error, now or when it fails, unless that was raised or returned. Takes no lock,
        for ``__del__``."""
        self._dropped = True
        if self.done.is_set():
            self._report()

    def _report(self) -> None:
        try:
            error = self.undelivered.pop()
        except IndexError:
            return
        if self._future is None:
            _log.error(
                "backend tdcoll: an asynchronous call failed, and its Work was dropped without wait(): %s: %s",
                type(error).__name__,
                error,
            )

    def _tell(self) -> None:
        """Set the future's result, which runs its callbacks."""
        if self.error is not None:
            self._future.set_exception(self.error)
        else:
            with self._on_its_stream():  # where the future records its event
                self._future.set_result(self.result)

    def _on_its_stream(self) -> Any:
        # and its device
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class Queue:
    """Makes calls that use one context, on a thread of its own, which ends when there was no call
    for a while.

    Attributes:
        control: numbers the exchanges of these calls.
        busy: whether calls are outstanding, or callbacks run.
        stream: CUDA stream of asynchronous calls; made with the first.
        before: event that the stream waits for before each call.
        events: free events, which works take and give back.
    """

    def __init__(self, control: ControlPlane) -> None:
        self.control = control
        self.busy = False
        self.stream: Any = None
        self.before: Any = None
        self.events: list[Any] = []
        self.thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._tasks: deque[QueuedCall] = deque()
        self._current: QueuedCall | None = None
        self._aborting = False
        _queues.add(self)

    def submit(self, task: QueuedCall) -> None:
        """Let the thread make ``task`` after the earlier ones; at once if it is a callback that
        asks."""
        if self.calls_back:
            task.run()
            return
        _end_the_calls_at_exit()
        task.queue = self
        with self._changed:
            self._tasks.append(task)
            self.busy = True
            self._changed.notify_all()
            if self.thread is None:
                self.thread = threading.Thread(
                    target=self._run, name="tdcoll.distributed", daemon=True
                )
                self.thread.start()

    @property
    def calls_back(self) -> bool:
        """Whether the caller is a callback of one of this queue's calls."""
        return threading.current_thread() is self.thread

    def fail(self, why: str) -> None:
        """Let all tasks fail, in a process without the queue's thread. Locks may be held by threads
        that are gone."""
        for task in (self._current, *self._tasks):
            if task is not None and not task.done.is_set():
                task.error = NotInitializedError(f"asynchronous call: {why}")
                task.done = threading.Event()
                task.done.set()
        self._changed = threading.Condition()
        self._tasks.clear()
        self.busy = False
        self.thread = None

    def drain(self, at_most_s: float | None = None) -> None:
        """Return when all tasks have succeeded or failed, and their callbacks have run; at once in
        such a callback."""
        if not self.calls_back:
            with self._changed:
                self._changed.wait_for(lambda: not self.busy, at_most_s)

    def run_beside(
        self, device: torch.device | None, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Call a function with the queue's own stream as the current one, behind the work of the
        current stream.

        Returns:
            What the function returns; None, without a call of it, if there is no such stream yet,
            if another device is the current one, because setting a stream sets the device, or if
            the current stream is captured.
        """
        stream = self.stream
        if stream is None or device is None or torch._C._cuda_getDevice() != device.index:
            return None
        current = current_stream(device.index)
        if current.stream_id and capturing(device):  # the default stream, 0, cannot be captured
            return None
        if self.before is None:
            self.before = new_event()
        self.before.record(current)
        self.before.wait(stream)
        # torch.cuda.stream() does the same in three times the time.
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)
        try:
            return function(*arguments)
        finally:
            torch._C._cuda_setStream(current.stream_id, current.device_index, current.device_type)

    def abort(self) -> None:
        """Stop waiting for missing ranks, in this task and in those behind it."""
        self._aborting = True
        current = self._current
        if current is not None:
            current.abort()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._current = None
                if not self._tasks:
                    self.busy = False
                    self._changed.notify_all()
                    if not self._changed.wait_for(lambda: self._tasks, _IDLE_S):
                        self.thread = None
                        return
                self._current = self._tasks.popleft()
            if self._aborting:
                self._current.abort()
            try:
                self._current.run()
            except (
                BaseException
            ):  # the thread has to go on: of a future that can't be set, for example
                _log.error(
                    "backend tdcoll: what comes behind an asynchronous call has failed",
                    exc_info=True,
                )


_queues: weakref.WeakSet[Queue] = weakref.WeakSet()


def _in_child() -> None:
    """Let calls fail that the parent's threads go on to make, because a child that waits for one
    would never end."""
    for queue in _queues:
        queue.fail(
            "this process was forked while the call was outstanding, and the parent makes it"
        )
    _queues.clear()


os.register_at_fork(after_in_child=_in_child)

_waiting: dict[Queue, Queue] = {}
"""Queues whose callback waits for a call of another one."""
_waiting_lock = threading.Lock()


@contextlib.contextmanager
def _waits_of_callback(task: QueuedCall) -> Iterator[None]:
    """The body waits for a task. Raise RuntimeError if a callback does so whose end is what the
    task waits for."""
    mine = next((queue for queue in list(_queues) if queue.calls_back), None)
    if mine is None or task.queue is None or task.done.is_set():
        yield
        return
    with _waiting_lock:
        behind: Queue | None = task.queue
        while behind is not None and behind is not mine:
            behind = _waiting.get(behind)
        if behind is mine:
            raise RuntimeError(
                "a callback cannot wait for a call that is made when the callback has ended"
            )
        _waiting[mine] = task.queue
    try:
        yield
    finally:
        _waiting.pop(mine, None)


@functools.cache
def _end_the_calls_at_exit() -> None:
    """At the process's end, make remaining calls, then give up. Registered late, to run before
    PyTorch's own end."""

    def end() -> None:
        for given_up in (False, True):
            queues = list(_queues)
            deadline = time.monotonic() + _LAST_S
            for queue in queues if given_up else ():
                queue.abort()
            for queue in queues:
                queue.drain(max(0.0, deadline - time.monotonic()))

    atexit.register(end)


@never_compiled
class TaskWork(AsynchronousWork):
    """The work of a call that a queue makes."""

    def __init__(self, task: QueuedCall) -> None:
        super().__init__()
        self._task = task

    def _drop(self) -> None:
        self._task.drop()

    def wait(self, timeout: timedelta | None = None) -> bool:
        task = self._task
        seconds = seconds_of(timeout)
        with _waits_of_callback(task):
            if not task.done.wait(seconds):
                assert seconds is not None
                raise expired(seconds)
        if task.error is not None:
            task.undelivered.clear()
            raise task.error
        if task.stream is not None:
            current = current_stream(task.stream.device.index)
            current.wait_event(task.event)
            record_streams(task.result, current)
        return True

    def is_completed(self) -> bool:
        task = self._task
        return task.done.is_set() and (task.event is None or bool(task.event.query()))

    def exception(self) -> Any:
        self._task.undelivered.clear()
        return self._task.error

    def result(self) -> list[Any]:
        if not self._task.done.is_set():
            raise not_complete()
        return self._task.result

    def get_future(self) -> Any:
        # If an exception is *set*, C++ treats it as a value (DDP's reducer would take it for the
        # gradient); if a callback raises it, it is an error.
        return self._task.future.then(lambda done: done.value())
