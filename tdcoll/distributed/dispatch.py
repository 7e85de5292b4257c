# SPDX-License-Identifier: Apache-2.0
"""The calls of a process group: makes each with tdcoll's kernels or the fallback backend, as
:mod:`.selection` chooses."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tdcoll
from tdcoll.base import arguments
from tdcoll.base.capture import capturing
from tdcoll.base.errors import CollectiveTimeout, TdcollError
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.implicit import on
from tdcoll.calls.operation import PreparedCall
from tdcoll.calls.run import repeat_call
from tdcoll.distributed.agreement import Agreement
from tdcoll.distributed.call import Call, has_no_values, is_plain, plain
from tdcoll.distributed.fallback import Fallback
from tdcoll.distributed.handlers import Dense, Handler
from tdcoll.distributed.methods import BARRIER, UNSET_TIMEOUT, Method
from tdcoll.distributed.observers import (
    Hooks,
    dispatch_modes,
    inside_operator,
    profiled,
    registers_works,
    watched,
)
from tdcoll.distributed.queues import QueuedCall, TaskWork
from tdcoll.distributed.selection import Selection
from tdcoll.distributed.work import (
    CompletedWork,
    StreamWork,
    backend_errors,
    completed,
    error_of,
    kept_by_cpp,
    let_go,
    record_streams,
)
from tdcoll.runtime import Runtime

_log = logging.getLogger("tdcoll")

_Tensor = torch.Tensor

_MOST_REMEMBERED = 4096
"""Calls of different sizes that a group remembers at a time."""


class _RememberedCall(NamedTuple):
    """A call that a group remembers.

    Attributes:
        count_key: the kind, the implementation that handled it, and the reason: the key of
            ``counts``.
        prepared: repeats such calls; None if the fallback backend makes them.
        context, handler: of the repeated calls.
        fallback: makes them there, see :meth:`~.fallback.Fallback.single`.
    """

    count_key: tuple[str, str, str]
    prepared: PreparedCall | None
    context: CollectiveContext | None
    handler: Dense | None
    fallback: Callable[[torch.Tensor, torch.Tensor, Any], Any] | None = None


class Dispatcher(Selection):
    """Makes the calls of one process group.

    Attributes:
        hooks: called around each call, if there are any (``hooked``).
    """

    def __init__(self, agreed: Agreement, fallback: Fallback) -> None:
        super().__init__(agreed, fallback)
        self.hooked = False
        self.hooks = Hooks()
        self._remembered: dict[Hashable, _RememberedCall] = {}

    def _prepare(self, kind: str, call: Call, asynchronous: bool) -> str | None:
        """Prepare tdcoll for a call, behind the outstanding ones if it needs that; return why it
        can't be handled now, or None if it can; equal on all ranks."""
        handler = self.handlers[kind]
        # else when it is made
        compares_first = len(self.ranks) > 1 and not (asynchronous and self._on_cpu)
        if handler.blocks:
            self._drain()
        elif (
            not asynchronous
            or handler.members.debug is True
            or (handler.members.debug and compares_first)
        ):
            handler.queue.drain()
        with self._waiting(kind, own_timeout(call)):
            if self.compares(kind, call):
                handler.compare(call)
                why = self._unsupported(kind, call)
                if why is not None:
                    return why
            elif compares_first:
                handler.compare_first(call)
            return handler.prepare(call)

    def _drain(self) -> None:
        """Return when no call of any kind is outstanding."""
        for handler in self.handlers.values():
            handler.queue.drain()

    # ------------------------------------------------------------------ calls

    def call(self, call: Call, key: Hashable | None = None, *, refused: str | None = None) -> Any:
        """Make a call, with tdcoll or the fallback backend; return its work.

        Args:
            key: remember the call under this key for :meth:`call_one`; None for calls that aren't
                remembered.
            refused: why tdcoll doesn't handle it; None if it may.
        """
        if self.hooked:
            return self.hooks.around(call, lambda: self._make(call, None, refused))
        return self._make(call, key, refused)

    def _make(self, call: Call, key: Hashable | None, refused: str | None) -> Any:
        kind = call.method.kind
        if kind is None or not (call.inputs or call.method is BARRIER):
            return self.fallback.make(call)
        backend = self.fallback.name(call.device)
        if any(map(has_no_values, call.touched)):
            key = None
            refused = "a tensor without values"
            backend = "no backend"
        asynchronous = call.opts.asyncOp
        obstacle = self._obstacle()
        # In debug mode the ranks compare a call first, because a wrong argument may decide who
        # handles it.
        skip = refused is None and obstacle is None and self.compares(kind, call)
        unsupported = refused or (None if skip else self._unsupported(kind, call))
        why = unsupported or obstacle
        if why is None:
            why = self._prepare(kind, call, asynchronous)
        if why is None:
            self.handlers[kind].check_call(call)
            handle = functools.partial(self.handle, kind, call, asynchronous=asynchronous, key=key)
            return inside_operator(self.fallback.group, call, handle) if watched() else handle()
        self.count(kind, backend, why)
        work = self.fallback.make(call)
        if key is not None and why is unsupported:  # an obstacle may go away
            self._remember(
                key,
                _RememberedCall((kind, backend, why), None, None, None, self.fallback.single(call)),
            )
        return work

    def _remember(self, key: Hashable | None, remembered: _RememberedCall) -> None:
        if key is not None:
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = remembered

    def call_one(
        self,
        method: Method,
        out: torch.Tensor,
        tensor: torch.Tensor,
        op: str | None,
        opts: Any,
        root: int = 0,
    ) -> Any:
        """Make a call of one tensor, by the fast path if a call like it was made before; return its
        work.

        The key decides whether tdcoll may ever handle such calls. If it may, the fast path checks
        the rest again, see :mod:`tdcoll.calls.run`. Shapes are no part of it, because only the
        numbers of elements matter.
        """
        if type(tensor) is not _Tensor or type(out) is not _Tensor:
            in_place = out is tensor
            tensor = plain(tensor)
            out = tensor if in_place else plain(out)
            if has_no_values(tensor) or has_no_values(out):
                return self.call(Call([out], [tensor], op, method=method, opts=opts))
        if kept_by_cpp:
            let_go()
        # as `watched` says, in less time
        if self.hooked or dispatch_modes() or profiled() or registers_works():
            return self.call(Call([out], [tensor], op, method=method, opts=opts))
        try:
            key: Hashable = method, op, root, tensor.device, tensor.dtype, tensor.layout
            key = key, tensor.numel()
            nested = tensor.is_nested
            if out is not tensor:
                key = key, out.dtype, out.layout, out.numel()
                nested = nested or out.is_nested
            remembered = None if nested else self._remembered.get(key)
        except (RuntimeError, TypeError):  # a symbolic number is no key
            key = remembered = None
        if remembered is not None:
            if remembered.prepared is None:
                self.counts[remembered.count_key] += 1
                single = remembered.fallback
                if single is not None and _takes_as_they_are(out, tensor):
                    return single(out, tensor, opts)  # Fallback.make does the same in more time
                return self.fallback.make(Call([out], [tensor], op, method=method, opts=opts))
            own = opts.timeout != UNSET_TIMEOUT
            work = None if own else self._repeat_call(remembered, out, tensor, opts.asyncOp)
            if work is not None:
                self.counts[remembered.count_key] += 1
                return work
        return self.call(Call([out], [tensor], op, method=method, opts=opts), key)

    def _repeat_call(
        self,
        remembered: _RememberedCall,
        out: torch.Tensor,
        tensor: torch.Tensor,
        asynchronous: bool,
    ) -> Any:
        """Repeat an earlier call of a dense kind; return its work, or None if something has changed
        since."""
        job = self.job
        context = remembered.context
        handler = remembered.handler
        prepared = remembered.prepared
        assert context is not None
        assert handler is not None
        assert prepared is not None
        if (
            job is None
            or job.closed
            or self._closed
            or self.coalescing
            or context is not handler.implicit.context
        ):
            return None
        if handler.queue.busy:
            if asynchronous:
                return None
            handler.queue.drain()
        if self._on_cpu:
            if asynchronous:
                return None
            try:
                if repeat_call(context, prepared, (tensor, out)) is None:
                    return None
                handler.check()
            except CollectiveTimeout:
                with backend_errors:  # only here, because entering it for every call takes time
                    raise
        elif asynchronous:
            queue = handler.queue
            device = self.device
            if queue.run_beside(device, repeat_call, context, prepared, (tensor, out)) is None:
                return None
            keep = (out, tensor)
            return StreamWork(
                [out], queue.stream, blocks=False, check=self._check, keep=keep, events=queue.events
            )
        elif repeat_call(context, prepared, (tensor, out)) is None:
            return None
        work = CompletedWork()
        work.tensors = (out,)
        return work

    def handle(
        self, kind: str, call: Call, *, asynchronous: bool, key: Hashable | None = None
    ) -> Any:
        """Make a call with tdcoll, now or by its queue, and count it; return its work."""
        self.count(kind, "tdcoll", "")
        device = self.device
        handler = self.handlers[kind]
        assert device is not None
        with on(device):
            if not asynchronous:
                result = self._run(kind, call, key)
                if handler.blocks and not self._on_cpu:
                    torch.cuda.current_stream(device).synchronize()
                    with backend_errors:
                        self._check()
                return completed(result)
            queue = handler.queue
            if queue.stream is None and not self._on_cpu:
                queue.stream = torch.cuda.Stream(device)
            stream = queue.stream
            waits = self._on_cpu or handler.waits
            if waits or not (capturing(device) or (handler.loaded(call) and not queue.busy)):
                # The host has to wait: for the size of the result, or until all ranks have loaded
                # the kernels.
                if stream is not None:
                    record_streams(call.touched, stream)
                task = QueuedCall(
                    lambda: self._run(kind, call, key), stream, abort=self._abort_calls
                )
                queue.submit(task)
                return TaskWork(task)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                result = self._run(kind, call, key)
            return StreamWork(
                result, stream, blocks=handler.blocks, check=self._check, keep=call.touched
            )

    def _run(self, kind: str, call: Call, key: Hashable | None = None) -> list[torch.Tensor]:
        """Make a call with tdcoll on the current stream, and remember it under ``key``; return its
        result."""
        handler = self.handlers[kind]
        timeout_s = own_timeout(call)
        with self._waiting(kind, timeout_s), torch.no_grad():
            if len(self.ranks) > 1:
                handler.compare_first(call)
            if handler.waits:
                self._check()  # the host waits for the result anyway
            with handler.within(timeout_s):
                result = handler.run(call)
                if self._on_cpu:
                    self._check()  # of all kinds: a barrier has no context of its own
        if call.prepared is not None and isinstance(handler, Dense):
            self._remember(
                key,
                _RememberedCall(
                    (kind, "tdcoll", ""), call.prepared, handler.implicit.context, handler
                ),
            )
        return result

    def _check(self) -> None:
        """Raise the error that finished kernels of this group have left, of any kind of call."""
        for handler in self.handlers.values():
            handler.check()

    def _abort_calls(self) -> None:
        """End the waits of this group's kernels: the process ends."""
        for handler in self.handlers.values():
            handler.abort()

    @contextlib.contextmanager
    def _waiting(self, kind: str, timeout_s: float | None) -> Iterator[None]:
        """Let exchanges inside use the queue's order and the call's or the group's deadline, whose
        error becomes torch's."""
        job = self.job
        assert job is not None
        control = self.handlers[kind].queue.control
        limit_s = self._wait_s if timeout_s is None else timeout_s
        with backend_errors, job.with_control_plane(control, limit_s, self.agreed.agreed_name):
            yield

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of later calls: of waits in kernels, and of exchanges on the host."""
        job = self.job
        if job is None or job.closed or self._closed:
            return
        self._wait_s = min(timeout.total_seconds(), arguments.MOST_SECONDS)
        if self.agreed.default and job.of_backend:
            # of leaving, and of contexts that tdcoll makes for other calls
            job.timeout_s = self._wait_s
        for handler in self.handlers.values():
            if handler.queue.busy:  # behind the calls that were issued before
                handler.queue.submit(QueuedCall(functools.partial(_limited, handler, self._wait_s)))
            else:
                handler.set_timeout(self._wait_s)

    def hook(
        self,
        hooks: dict[int, Callable[[Any], None]],
        number: int,
        hook: Callable[[Any], None] | None,
    ) -> None:
        """Register a hook under a number, or remove it if None is given."""
        if hook is None:
            hooks.pop(number, None)
        else:
            hooks[number] = hook
        self.hooked = bool(self.hooks.before or self.hooks.behind)

    # ------------------------------------------------------------------ the end

    def close(self) -> BaseException | None:
        """Free this group's memory, after an error as far as possible; return a wait's unreported
        error. Collective."""
        if self._closed:
            return None
        self._closed = True
        self._drain()
        let_go()
        expired: BaseException | None = None
        job = self.job
        if job is None or job.closed:
            return None
        if not job.failed:
            if job.device.type == "cuda":
                torch.cuda.synchronize(job.device)
            expired = error_of(self._check)
        try:
            if self._ends(job):
                # frees all memory without closing our contexts; of a failed job it does neither
                tdcoll.finalize()
            elif not job.failed:
                for handler in self.handlers.values():
                    handler.close()
                self.budget.give_back()
        except (TdcollError, dist.DistError) as error:
            _log.warning(
                "backend tdcoll: rank %d left without the others: %s", self.agreed.rank, error
            )
        return expired

    def abort(self) -> None:
        """Stop waiting for other ranks, and forget the job if it ends with this group."""
        self._closed = True
        job = self.job
        if job is not None and not job.closed and self._ends(job):
            job.failed = True
            tdcoll.finalize()

    def _ends(self, job: Runtime) -> bool:
        """Count this group out; return whether a job that the backend has joined ends with it.

        It ends when the default group or the last group of all ranks ends.
        """
        is_whole = self._whole
        self._whole = False
        job.groups -= is_whole
        return is_whole and job.of_backend and (self.agreed.default or not job.groups)


def own_timeout(call: Call) -> float | None:
    """Return the deadline in seconds that a call has of its own; None if it has that of the
    group."""
    timeout = call.opts.timeout
    if timeout == UNSET_TIMEOUT or timeout.total_seconds() <= 0:
        return None
    return min(timeout.total_seconds(), arguments.MOST_SECONDS)


def _limited(handler: Handler, timeout_s: float) -> list[Any]:
    """Change a handler's deadline, as a call of its queue."""
    handler.set_timeout(timeout_s)
    return []


def _takes_as_they_are(out: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether the fallback backend takes both tensors of a call as they are, and PyTorch's
    dispatcher, which may complain about gradients, isn't needed."""
    if tensor.requires_grad or not is_plain(tensor):
        return False
    if out is tensor:
        return True
    if out.requires_grad or not is_plain(out):
        return False
    begin = tensor.data_ptr()
    at = out.data_ptr()
    return begin + tensor.nbytes <= at or at + out.nbytes <= begin
