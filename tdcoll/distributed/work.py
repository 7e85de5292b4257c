# SPDX-License-Identifier: Apache-2.0
"""``Work`` of calls that tdcoll serves, and the thread that makes those which have to wait on the host.

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
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tdcoll.capture import capturing
from tdcoll.errors import CollectiveTimeout

_LAST_S = 3.0
"""How long the calls that are outstanding may take when the process ends."""

__all__ = [
    "BackendTimeout",
    "CompletedWork",
    "StreamWork",
    "Task",
    "TaskWork",
    "as_backend_error",
    "backend_errors",
    "worker",
]


class BackendTimeout(CollectiveTimeout, dist.DistBackendError):
    """:class:`tdcoll.CollectiveTimeout`, as ``torch.distributed`` wants it: also a ``DistBackendError``."""


def as_backend_error(error: BaseException) -> BaseException:
    """A :class:`~tdcoll.CollectiveTimeout` as :class:`BackendTimeout`; any other as it is."""
    if not isinstance(error, CollectiveTimeout) or isinstance(error, BackendTimeout):
        return error
    raised = BackendTimeout.__new__(BackendTimeout)
    raised.args, raised.__dict__ = error.args, dict(error.__dict__)
    raised.__cause__ = error
    return raised


class _BackendErrors:
    """``with backend_errors:`` raises :class:`BackendTimeout` for a :class:`~tdcoll.CollectiveTimeout` inside."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and (raised := as_backend_error(error)) is not error:
            raise raised from error


backend_errors = _BackendErrors()


def _seconds(timeout: timedelta | None) -> float | None:
    """Seconds of a ``Work.wait`` timeout; None where it means no limit."""
    seconds = timeout.total_seconds() if timeout is not None else 0.0
    return seconds if seconds > 0 else None


def _expired(seconds: float) -> BackendTimeout:
    rank = dist.get_rank() if dist.is_initialized() else None
    return BackendTimeout("in Work.wait for a call that is not complete", rank=rank, timeout_s=seconds)


# ---------------------------------------------------------------------- the thread


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


# ---------------------------------------------------------------------- what callers get


class _Work(dist.Work):
    """What ``torch.distributed.Work`` documents, for calls that have results on one device."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._result

    def source_rank(self) -> int:
        raise RuntimeError("source_rank() is for receives from any rank")

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


class CompletedWork(_Work):
    """Of a synchronous call: nothing is left to wait for but the current stream."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        device = self._result[0].device if self._result else torch.device("cpu")
        future: Any = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        future.set_result(self._result)
        return future


class StreamWork(_Work):
    """Of a call that is queued on a CUDA stream: ``wait()`` makes the current stream wait for it.

    Args:
        result: tensors that the call writes.
        stream: on which it is queued, last.
        blocks: ``wait()`` blocks the host as well, as a barrier's does.
        check: raises what is known to have gone wrong.
        keep: tensors that the call reads and writes: kept until ``wait()``, so that their memory is not used anew.
    """

    def __init__(
        self,
        result: list[torch.Tensor],
        stream: Any,
        *,
        blocks: bool,
        check: Callable[[], None],
        keep: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(result)
        self._stream, self._blocks, self._check = stream, blocks, check
        self._keep: Sequence[torch.Tensor] = keep
        self._event = stream.record_event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if (seconds := _seconds(timeout)) is not None:
            deadline = time.monotonic() + seconds
            while not self._event.query():
                if time.monotonic() > deadline:
                    self._raise_wrong()
                    raise _expired(seconds)
                time.sleep(0.0002)
        torch.cuda.current_stream(self._stream.device).wait_event(self._event)
        if self._blocks:
            self._event.synchronize()
        if self._blocks or seconds is not None:
            self._raise_wrong()
        self._keep = ()
        return True

    def __del__(self) -> None:
        # Nobody has waited: the allocator has to, as it does for tensors that another stream uses.
        if self._keep and not sys.is_finalizing() and not capturing(self._stream.device):
            for tensor in self._keep:
                record_stream(tensor, self._stream)

    def _raise_wrong(self) -> None:
        with backend_errors:
            self._check()

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def exception(self) -> Any:
        try:
            self._check()
        except CollectiveTimeout as error:
            return as_backend_error(error)
        return None

    def get_future(self) -> Any:
        future: Any = torch.futures.Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):  # its event is recorded there
            future.set_result(self._result)
        return future


class TaskWork(_Work):
    """Of a call that the worker makes."""

    def __init__(self, task: Task) -> None:
        super().__init__([])
        self._task = task

    def wait(self, timeout: timedelta | None = None) -> bool:
        task, seconds = self._task, _seconds(timeout)
        if not task.done.wait(seconds):
            assert seconds is not None
            raise _expired(seconds)
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


def record_stream(tensor: torch.Tensor, stream: Any) -> None:
    """Tell the allocator that ``stream`` uses ``tensor``, dense or sparse."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.detach()
        tensor._indices().record_stream(stream)
        tensor._values().record_stream(stream)
    else:
        tensor.record_stream(stream)
