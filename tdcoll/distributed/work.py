# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed.Work`` of calls that are complete when they return, or queued on a CUDA
stream; their errors."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tdcoll.base.capture import capturing
from tdcoll.base.errors import CollectiveTimeout, restored
from tdcoll.base.torch_internals import counts_references, never_compiled, references


class BackendTimeout(CollectiveTimeout, dist.DistBackendError):
    """:class:`tdcoll.CollectiveTimeout`, as ``torch.distributed`` wants it: also a
    ``DistBackendError``."""


def as_backend_error(error: BaseException) -> BaseException:
    """Return a :class:`~tdcoll.CollectiveTimeout` as :class:`BackendTimeout`; any other error as it
    is."""
    if not isinstance(error, CollectiveTimeout) or isinstance(error, BackendTimeout):
        return error
    raised = restored(BackendTimeout, error.args, error.__dict__)
    raised.__cause__ = error
    return raised


class _BackendErrors:
    """``with backend_errors:`` raises :class:`BackendTimeout` for a
    :class:`~tdcoll.CollectiveTimeout` inside."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        raised = as_backend_error(error)
        if raised is not error:
            raise raised from error


backend_errors = _BackendErrors()


def seconds_of(timeout: timedelta | None) -> float | None:
    """Return the seconds of a ``Work.wait`` timeout; None if it means no limit."""
    seconds = timeout.total_seconds() if timeout is not None else 0.0
    return seconds if seconds > 0 else None


def expired(seconds: float) -> BackendTimeout:
    rank = dist.get_rank() if dist.is_initialized() else None
    return BackendTimeout(
        "in Work.wait for a call that is not complete", rank=rank, timeout_s=seconds
    )


def error_of(check: Callable[[], None]) -> BaseException | None:
    """Return the error that ``check`` raises of a wait that has expired; None if it raises none."""
    try:
        check()
    except CollectiveTimeout as error:
        return as_backend_error(error)
    return None


def error_of_fallback(work: Any) -> Exception | None:
    """Return the error of a complete work of the fallback backend; None if it has none or isn't
    complete.

    Neither ``work.exception()`` nor ``work.is_success()`` is asked. The first raises TypeError in
    PyTorch 2.11, because its result has no Python type there, and the second isn't implemented by
    NCCL. A complete work's ``wait()`` doesn't block.
    """
    if not work.is_completed():
        return None
    try:
        work.wait()
    except Exception as error:
        return error
    return None


@never_compiled
class Work(dist.Work):
    """The methods that ``torch.distributed.Work`` documents, for calls that write ``tensors`` on
    one device."""

    tensors: Sequence[torch.Tensor] = ()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        return None

    def result(self) -> list[torch.Tensor]:
        return list(self.tensors)

    def source_rank(self) -> int:
        raise RuntimeError("source_rank() is for receives from any rank")

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


kept_by_cpp: list[AsynchronousWork] = []
"""Works that C++ has and Python doesn't."""


@never_compiled
class AsynchronousWork(Work):
    """A work that C++ may keep, whose Python object therefore lives as long as C++ has it.

    C++ calls a work's methods through that object. If nobody in Python refers to it any more, it
    stays in :data:`kept_by_cpp`, until C++ has let go as well; the next work that is dropped finds
    out.
    """

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        if kept_by_cpp:
            let_go()
        if counts_references() and references(self) > 1:
            kept_by_cpp.append(self)
        else:
            self._drop()

    def _drop(self) -> None:
        """Clean up, when neither Python nor C++ has the work."""


def let_go() -> None:
    """Drop the works that C++ doesn't have any more."""
    for work in list(kept_by_cpp):
        if references(work) == 1:
            with contextlib.suppress(ValueError):  # another thread has done it
                kept_by_cpp.remove(work)
                work._drop()


@never_compiled
class CompletedWork(Work):
    """The work of a synchronous call: ``wait()`` waits only for the current stream. See
    :func:`completed`."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        device = self.tensors[0].device if self.tensors else torch.device("cpu")
        future: Any = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        future.set_result(self.result())
        return future


class CompletedAsynchronousWork(AsynchronousWork, CompletedWork):
    """The work of an asynchronous call that is complete when it returns."""


def completed(tensors: Sequence[Any], asynchronous: bool = False) -> CompletedWork:
    """Return the work of a call that has written these tensors."""
    work = CompletedAsynchronousWork() if asynchronous else CompletedWork()
    work.tensors = tensors
    return work


def new_event() -> Any:
    """Return an event as C++ has it, whose methods want a stream: ``torch.cuda.Event`` finds one,
    in twice the time."""
    base: Any = torch.cuda.Event.__base__
    return base()


@never_compiled
class StreamWork(AsynchronousWork):
    """The work of a call that is queued on a CUDA stream: ``wait()`` makes the current stream wait
    for it.

    Args:
        stream: on which it is queued, last.
        blocks: ``wait()`` blocks the host as well, as a barrier's does.
        keep: tensors of the call, if it is on another stream: kept until ``wait()``, because the
            call uses them.
        events: free events, of which the work takes one and gives it back, because making an event
            takes microseconds.
    """

    def __init__(
        self,
        result: list[torch.Tensor],
        stream: Any,
        *,
        blocks: bool,
        check: Callable[[], None],
        keep: Sequence[torch.Tensor] = (),
        events: list[Any] | None = None,
    ) -> None:
        super().__init__()
        self.tensors = result
        self._stream = stream
        self._blocks = blocks
        self._check = check
        self._keep: Sequence[torch.Tensor] = keep
        self._events = events
        try:
            self._event: Any = events.pop() if events else new_event()
        except IndexError:  # another thread has taken the last
            self._event = new_event()
        self._event.record(stream)

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = None if timeout is None else seconds_of(timeout)
        if seconds is not None:
            deadline = time.monotonic() + seconds
            while not self._event.query():
                if time.monotonic() > deadline:
                    self._raise_wrong()
                    raise expired(seconds)
                time.sleep(0.0002)
        self._event.wait(current_stream(self._stream.device_index))
        if self._blocks:
            self._event.synchronize()
        if self._blocks or seconds is not None:
            self._raise_wrong()
        self._keep = ()
        return True

    def _drop(self) -> None:
        # Because no one has waited, the allocator has to, as it does for tensors that another
        # stream uses.
        if self._keep and not capturing(self._stream.device):
            record_streams(self._keep, self._stream)
        if self._events is not None:
            self._events.append(self._event)

    def _raise_wrong(self) -> None:
        with backend_errors:
            self._check()

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def exception(self) -> Any:
        return error_of(self._check)

    def get_future(self) -> Any:
        future: Any = torch.futures.Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):  # its event is recorded there
            future.set_result(self.result())
        return future


@never_compiled
class FallbackWork(AsynchronousWork):
    """The work of a call of the fallback backend whose results have to be written, or have another
    form, when the backend has made it: by the first that waits.

    Args:
        works: of the backend; the call is complete when all of them are.
        finish: writes the results; None if the backend does.
        result: the value of the work and of its future.
        copies_to: the GPU, if the works are gloo's, which copy to it on streams of their own; else
            None.
    """

    def __init__(
        self,
        works: Sequence[Any],
        finish: Callable[[], None] | None,
        result: list[Any],
        copies_to: torch.device | None,
    ) -> None:
        super().__init__()
        self._copies_to = copies_to
        self._works = list(works)
        self._finish = finish
        self._result = result
        self._finishing = threading.Lock()
        self._complete = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            if seconds_of(timeout) is None:
                work.wait()
            else:
                work.wait(timeout)
        self._write()
        return True

    def _write(self) -> None:
        """Write the results, once. The works are complete, or the current stream waits for them."""
        with self._finishing:
            finish = self._finish
            self._finish = None
            if finish is not None:
                finish()
            self._complete = True

    def is_completed(self) -> bool:
        if not self._complete and all(work.is_completed() for work in self._works):
            with contextlib.suppress(Exception):  # whoever waits gets it
                self.wait()
            return True
        return self._complete

    def exception(self) -> Any:
        return next(filter(None, map(error_of_fallback, self._works)), None)

    def result(self) -> list[Any]:
        if not self.is_completed():
            raise not_complete()
        return self._result

    def source_rank(self) -> int:
        found: int = self._works[0]._source_rank()
        return found

    _source_rank = source_rank

    def get_future(self) -> Any:
        futures = [work.get_future() for work in self._works]
        together = torch.futures.collect_all(futures)

        def value(done: Any) -> list[Any]:
            for each in done.value():
                each.value()  # which raises the error of a call that has failed
            if self._copies_to is None:
                self._write()
                return self._result
            # The future of a work of gloo's is complete when a copy has been queued, and the
            # thread that waits for this one's may have any current stream.
            for work in self._works:
                work.synchronize()  # wait() would wait for this thread, which gloo calls before
            self._write()
            torch.cuda.current_stream(self._copies_to).synchronize()
            return self._result

        # An error that a callback raises is one for C++ as well, and one that is set is a value.
        return together.then(value)


def not_complete() -> RuntimeError:
    return RuntimeError("result() of a call that is not complete: call wait() first")


_current: Any = None
"""The last current stream."""


def current_stream(index: int) -> Any:
    """Return ``torch.cuda.current_stream(index)``, in a fifth of its time if it is the same as the
    last."""
    global _current
    stream, (name, device, kind) = _current, torch._C._cuda_getCurrentStream(index)
    if stream is None or stream.stream_id != name or stream.device_index != device:
        _current = stream = torch.cuda.Stream(stream_id=name, device_index=device, device_type=kind)
    return stream


def record_streams(tensors: Sequence[torch.Tensor], stream: Any) -> None:
    """Tell the allocator that ``stream`` uses these tensors, once for each allocation that they are
    parts of."""
    allocations: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        parts = (
            (tensor._indices(), tensor._values())
            if tensor.layout is torch.sparse_coo
            else (tensor,)
        )
        for part in parts:
            allocations[part.untyped_storage().data_ptr()] = part
    for part in allocations.values():
        part.record_stream(stream)
