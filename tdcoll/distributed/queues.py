# SPDX-License-Identifier: Apache-2.0
"""Queues of calls that have to wait on the host, the threads that make them, and their ``Work``.

A call has to wait on the host when it runs in the simulator, or when the size of its result must be known (the sparse
all-reduce). If such a call is asynchronous, a :class:`Queue` makes it on its own thread. Calls of one queue are made in
the order in which they were issued, which is the same on all ranks. Ranks may issue those of different queues in
different orders, because they do not wait for each other.

Callbacks of futures run on threads that make no calls (:class:`_Callbacks`), because a callback may issue a call and
wait for it. They run right behind their call and before the next one of the queue, as they do on NCCL's futures, and
calls that they issue to that queue are made at once. All ranks therefore make the calls of callbacks in the same order,
too. If a callback waited for a call further back in the queue, it would wait for itself, so the queue continues when
that is known, and after :data:`_CALLBACKS_S` in any case.

All threads end before the interpreter does, because a thread that Python stops inside of C++, where a call waits,
aborts the process. A forked child has none of them, and its outstanding calls fail.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch

from tdcoll.base.errors import TdcollError
from tdcoll.base.torch_internals import never_compiled
from tdcoll.distributed.work import Work, as_backend_error, expired, record_stream, seconds_of

_LAST_S = 3.0
"""The time for outstanding calls when the process ends."""

_CALLBACKS_S = 1.0
"""The longest time that a queue waits for the callbacks of a call before it makes the next one."""

__all__ = ["Queue", "QueuedCall", "TaskWork"]

_log = logging.getLogger("tdcoll")


class QueuedCall:
    """One call that a queue makes.

    Args:
        make: makes the call; its result is that of the work, a list of tensors.
        stream: CUDA stream that it is made on, behind the present work of the calling stream; None without a GPU.
        after: an event to wait for instead.
        give_up: ends the waits of its kernels, so that the call fails soon; from another thread.
    """

    def __init__(
        self,
        make: Callable[[], list[torch.Tensor]],
        stream: Any = None,
        after: Any = None,
        *,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._make: Callable[[], list[torch.Tensor]] | None = make
        self.stream, self.give_up = stream, give_up
        self.event: Any = None
        """Recorded behind the call, on its stream, if it has one."""
        self._before: Any = None
        if stream is not None:
            self._before = after or torch.cuda.current_stream(stream.device).record_event()
        self.done = threading.Event()
        self.result: list[torch.Tensor] = []
        self.error: BaseException | None = None
        self.undelivered: list[BaseException] = []
        """The error, as long as it has not been raised or returned."""
        self._dropped = False
        self._future: Any = None
        self._finishing = threading.Lock()

    @property
    def future(self) -> Any:
        """A ``torch.futures.Future`` of the result."""
        with self._finishing:
            found, late = self._future, self.done.is_set()
            if found is None:
                devices = None if self.stream is None else [self.stream.device]
                self._future = found = torch.futures.Future(devices=devices)
                if late:  # it can't have a callback yet
                    self.tell()
        return found

    def run(self) -> bool:
        """Make the call, by the queue's thread; return whether its future was requested."""
        make, self._make = self._make, None
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
        return self._finish()

    def lose(self) -> None:
        """Let it fail, because it belongs to another process."""
        self._finishing = threading.Lock()
        self.done, self._make = threading.Event(), None
        self.error = TdcollError("the call is outstanding in the parent process, which makes it; a child cannot wait")
        self._finish()

    def _finish(self) -> bool:
        with self._finishing:
            self.done.set()
            asked = self._future is not None
        if self._dropped:
            self._report()
        return asked

    def drop(self) -> None:
        """Log its error, now or when it fails, unless that was raised or returned. Takes no lock, for ``__del__``."""
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

    def tell(self) -> None:
        """Set the future's result, which runs its callbacks."""
        if self.error is not None:
            self._future.set_exception(self.error)
        else:
            with self._on_its_stream():  # where the future records its event
                self._future.set_result(self.result)

    def _on_its_stream(self) -> Any:
        if self.stream is None:
            return nullcontext()
        return torch.cuda.stream(self.stream)  # and its device


class Queue:
    """Makes tasks one after the other, in the order in which they were given, on a thread of its own.

    The thread starts with the first task and ends with :meth:`close`.
    """

    def __init__(self) -> None:
        self._reset()
        _queues.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._tasks: deque[QueuedCall] = deque()
        self._urgent: deque[QueuedCall] = deque()  # issued by callbacks
        self.unfinished = 0  # tasks that are not made yet, or whose callbacks run
        self._thread: threading.Thread | None = None
        self._current: QueuedCall | None = None
        self._closing = self._giving_up = False

    def submit(self, task: QueuedCall) -> QueuedCall:
        """Let the thread make ``task`` after the earlier ones."""
        _at_the_end()
        with self._changed:
            (self._urgent if self.calls_back else self._tasks).append(task)
            self.unfinished += 1
            self._closing = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tdcoll.distributed", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return task

    @property
    def calls_back(self) -> bool:
        """Whether the caller is a callback of one of this queue's calls."""
        return getattr(_here, "queue", None) is self

    def drain(self) -> None:
        """Return when all tasks have succeeded or failed, and their callbacks have run. Return at once if called by
        such a callback or a task."""
        if threading.current_thread() is self._thread or self.calls_back:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self.unfinished)

    def outstanding(self) -> list[QueuedCall]:
        """Return the tasks that are not made yet."""
        with self._changed:
            known = [*self._urgent, *self._tasks, *([self._current] if self._current is not None else ())]
        return [task for task in known if not task.done.is_set()]

    def waits_behind(self, task: QueuedCall) -> bool:
        """Return whether the thread has to make other tasks first."""
        with self._changed:
            return task in self._tasks

    def close(self) -> None:
        """Let the thread end when it has made its tasks."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self, deadline: float) -> bool:
        """Wait for the thread's end until ``deadline``, after :meth:`close`; return whether it has ended."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
            return not thread.is_alive()
        return True

    def give_up(self) -> None:
        """Stop waiting for missing ranks, in this task and in those behind it."""
        self._giving_up, current = True, self._current
        if current is not None:
            current.give_up()

    def lose(self) -> None:
        """Forget the thread and fail the tasks, which are another process's."""
        known = [*self._urgent, *self._tasks, *([self._current] if self._current is not None else ())]
        self._reset()
        for task in known:
            if not task.done.is_set():
                task.lose()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (task := self._next()) is not None:
            self._run_task(task)

    def _next(self) -> QueuedCall | None:
        with self._changed:
            self._changed.wait_for(lambda: self._urgent or self._tasks or self._closing)
            for tasks in (self._urgent, self._tasks):
                if tasks:
                    return tasks.popleft()
            self._thread = None
            return None

    def _run_task(self, task: QueuedCall) -> None:
        before, self._current = self._current, task
        if self._giving_up:
            task.give_up()
        if task.run():
            self._wait_for(_Callbacks.of(task, self))
        self._current = before
        with self._changed:
            self.unfinished -= 1
            self._changed.notify_all()

    def _wait_for(self, callbacks: _Callbacks) -> None:
        """Make the calls that the callbacks of a task issue, until they have run or wait for something else."""
        deadline = time.monotonic() + _CALLBACKS_S
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._urgent or callbacks.over, max(0.0, deadline - time.monotonic())
                )  # fmt: skip
                if not self._urgent:
                    return
                task = self._urgent.popleft()
            self._run_task(task)
            deadline = time.monotonic() + _CALLBACKS_S

    def let_go(self, callbacks: _Callbacks) -> None:
        """Stop waiting for these callbacks."""
        with self._changed:
            callbacks.over = True
            self._changed.notify_all()


_here = threading.local()
"""``queue`` and ``callbacks`` of a thread that runs callbacks."""


class _Callbacks:
    """The callbacks of one task's future, which run on a thread that makes no calls.

    Attributes:
        over: whether the queue need not wait for them any more.
    """

    def __init__(self, task: QueuedCall, queue: Queue) -> None:
        self._task, self._queue, self.over = task, queue, False

    @classmethod
    def of(cls, task: QueuedCall, queue: Queue) -> _Callbacks:
        """Let a thread run them: an idle one, or a new one, because the others may be waiting in callbacks."""
        made = cls(task, queue)
        try:
            work = _idle.pop()
        except IndexError:
            work = SimpleQueue()
            threading.Thread(target=cls._loop, args=(work,), name="tdcoll.callbacks", daemon=True).start()
        work.put(made)
        return made

    @staticmethod
    def _loop(work: SimpleQueue[_Callbacks | None]) -> None:
        while (callbacks := work.get()) is not None:
            callbacks._run()
            queue = callbacks._queue
            _idle.append(work)
            queue.let_go(callbacks)
            del callbacks, queue

    def _run(self) -> None:
        _here.queue, _here.callbacks = self._queue, self
        try:
            self._task.tell()
        finally:
            _here.queue = _here.callbacks = None


_queues: weakref.WeakSet[Queue] = weakref.WeakSet()
_idle: list[SimpleQueue[_Callbacks | None]] = []
"""Queues that the idle threads for callbacks wait for."""
_registered = False


def _at_the_end() -> None:
    """End the threads when the process ends; registered late, because it must run before PyTorch's own end."""
    global _registered
    if not _registered:
        _registered = True
        atexit.register(_end)


def _end() -> None:
    """Let the threads make the remaining calls, because other ranks wait for them; then stop waiting for missing
    ranks."""
    queues = list(_queues)
    for queue in queues:
        queue.close()
    deadline = time.monotonic() + _LAST_S
    late = [queue for queue in queues if not queue.join(deadline)]
    for queue in late:
        queue.give_up()
    deadline = time.monotonic() + _LAST_S
    for queue in late:
        queue.join(deadline)
    while _idle:
        _idle.pop().put(None)


def _in_a_child() -> None:
    _idle.clear()
    for queue in list(_queues):
        queue.lose()


os.register_at_fork(after_in_child=_in_a_child)


@never_compiled
class TaskWork(Work):
    """The work of a call that a queue makes.

    Args:
        task: of the call.
        queue: that makes it.
    """

    def __init__(self, task: QueuedCall, queue: Queue) -> None:
        super().__init__()
        self._task, self._queue = task, queue

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._task.drop()

    def wait(self, timeout: timedelta | None = None) -> bool:
        task, seconds = self._task, seconds_of(timeout)
        if self._queue.calls_back and self._queue.waits_behind(task):
            self._queue.let_go(_here.callbacks)
        if not task.done.wait(seconds):
            assert seconds is not None
            raise expired(seconds)
        if task.error is not None:
            task.undelivered.clear()
            raise task.error
        if task.stream is not None:
            current = torch.cuda.current_stream(task.stream.device)
            current.wait_event(task.event)
            for tensor in task.result:
                record_stream(tensor, current)
        return True

    def is_completed(self) -> bool:
        task = self._task
        return task.done.is_set() and (task.event is None or bool(task.event.query()))

    def exception(self) -> Any:
        self._task.undelivered.clear()
        return self._task.error

    def result(self) -> list[torch.Tensor]:
        return self._task.result

    def get_future(self) -> Any:
        # If an exception is *set*, C++ treats it as a value (DDP's reducer would take it for the gradient); if a
        # callback raises it, it is an error.
        return self._task.future.then(lambda done: done.value())
