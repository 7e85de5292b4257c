# SPDX-License-Identifier: Apache-2.0
"""The thread that makes calls which have to wait on the host, and their ``Work``.

A call has to wait on the host when it runs in the simulator, or when the size of its result must be known (the sparse
all-reduce). Where such a call is asynchronous, it is made by :data:`worker`, one thread for the process, in the order
in which the calls were issued: that order is the same on all ranks that take part, so the calls meet.

Everything that exchanges values over the control plane outside of that thread first lets it finish (``worker.drain``).
The thread ends before the interpreter does: a thread that Python stops inside of C++, where a call waits, aborts the
process.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from tdcoll.work import Work, as_backend_error, expired, never_compiled, record_stream, seconds_of

_LAST_S = 3.0
"""How long the calls that are outstanding may take when the process ends."""

__all__ = ["Task", "TaskWork", "worker"]


class Task:
    """One call that the worker makes.

    Args:
        make: makes the call; its result is that of the work, a list of tensors.
        stream: CUDA stream that it is made on, behind what the calling stream has now; None without a GPU.
        after: an event to be made behind instead.
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
        """Recorded behind the call, on its stream; when it is there."""
        self._before: Any = None
        if stream is not None:
            self._before = after or torch.cuda.current_stream(stream.device).record_event()
        self.done = threading.Event()
        self.result: list[torch.Tensor] = []
        self.error: BaseException | None = None
        devices = None if stream is None else [stream.device]
        self.future: Any = torch.futures.Future(devices=devices)

    def run(self) -> None:
        """Make the call; by the worker."""
        make, self._make = self._make, None
        assert make is not None
        try:
            if self.stream is None:
                self.result = make()
            else:
                with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
                    self.stream.wait_event(self._before)
                    self.result = make()
                    self.event = self.stream.record_event()
                    self.future.set_result(self.result)
        except BaseException as error:
            self.error = as_backend_error(error)
        self.done.set()
        if self.error is not None:
            self.future.set_exception(self.error)
        elif self.stream is None:
            self.future.set_result(self.result)


class _Worker:
    """Makes tasks one after the other, in the order in which they were given."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Task | None = None
        self._current: Task | None = None
        self._ending = False

    def submit(self, task: Task) -> Task:
        """Let the thread make ``task`` when it has made those before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tdcoll.distributed", daemon=True)
            self._thread.start()
            atexit.register(self._end, self._thread)
        self._last = task
        self._tasks.put(task)
        return task

    def drain(self) -> None:
        """Return when all tasks so far are made, well or not. Nothing to do for the thread itself."""
        last = self._last
        if last is not None and threading.current_thread() is not self._thread:
            last.done.wait()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._current = task
            if self._ending:
                task.give_up()
            task.run()

    def _end(self, thread: threading.Thread) -> None:
        """Let the thread make what is left, for ranks that wait for it; then no longer wait for those that do not come.

        By Python, when the process ends.
        """
        self._tasks.put(None)
        thread.join(_LAST_S)
        if thread.is_alive():
            self._ending = True
            if self._current is not None:
                self._current.give_up()
            thread.join(_LAST_S)


worker = _Worker()
"""One for the process: calls of different groups that share ranks must keep their order too."""


@never_compiled
class TaskWork(Work):
    """The work of a call that the worker makes."""

    def __init__(self, task: Task) -> None:
        super().__init__([])
        self._task = task

    def wait(self, timeout: timedelta | None = None) -> bool:
        task, seconds = self._task, seconds_of(timeout)
        if not task.done.wait(seconds):
            assert seconds is not None
            raise expired(seconds)
        if task.error is not None:
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
        return self._task.error

    def result(self) -> list[torch.Tensor]:
        return self._task.result

    def get_future(self) -> Any:
        # An exception that is *set* is a value to C++ (DDP's reducer would take it for the gradient); one that a
        # callback raises is an error.
        return self._task.future.then(lambda done: done.value())
