# SPDX-License-Identifier: Apache-2.0
"""The two sides that serve the calls of a process group: tdcoll's kernels and the inner group.

Which one serves a call is decided from facts that are the same on all ranks: the kind, the device type, the dtype, the
sizes, and what the group has agreed on when it was made. What is only known on one rank (an input that is not
contiguous, one that overlaps the output) never decides; it costs a copy.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tdcoll
from tdcoll.capture import capturing
from tdcoll.collectives._host.call import Ready, again, spec_of
from tdcoll.context import CollectiveContext
from tdcoll.distributed.agreement import Agreement
from tdcoll.distributed.call import Call, is_plain
from tdcoll.distributed.fallback import Fallback, Make
from tdcoll.distributed.options import Options
from tdcoll.distributed.service import Barrier, Dense, Service, Setting
from tdcoll.distributed.sparse import SparseAllReduce
from tdcoll.distributed.work import Task, TaskWork
from tdcoll.errors import TdcollError
from tdcoll.limits import COLLECTIVES
from tdcoll.runtime import Runtime
from tdcoll.work import CompletedWork, StreamWork, backend_errors, completed, current_stream, error_of, record_stream

__all__ = ["Sides"]

_log = logging.getLogger("tdcoll")

_MOST_KNOWN = 4096
"""Calls of different sizes that a group remembers at a time."""


class _Known(NamedTuple):
    """What a group remembers of a call that it has made.

    Attributes:
        counted: the kind, the side that served it, and why that side: the key of ``counts``.
        ready: makes calls like it again; None if the inner group does.
        context: of ``ready``.
    """

    counted: tuple[str, str, str]
    ready: Ready | None
    context: CollectiveContext | None


class Sides:
    """Which side serves a call of one group; calls to either.

    Args:
        job: None if tdcoll serves nothing.
        agreed: which kinds tdcoll serves.
        options: of the group.
        name: of the group.
        rank: in the group.
        members: its global ranks.
        fallback: makes the calls that tdcoll does not.
        timeout_s: deadline of waits in kernels; None: that of the job.
        default: whether it is the default group.

    Attributes:
        job, agreed, options, members, fallback: as given.
        services: what tdcoll serves the calls with, by kind; empty without a job.
        device: that tdcoll's memory is on; None without a job.
        coalescing: whether calls belong to a block that the inner group launches as one.
        counts: calls so far, by kind, side, and why that side.
    """

    def __init__(
        self,
        job: Runtime | None,
        agreed: Agreement,
        options: Options,
        *,
        name: str,
        rank: int,
        members: Sequence[int],
        fallback: Fallback,
        timeout_s: float | None,
        default: bool = False,
    ) -> None:
        self._default = default
        self.job, self.agreed, self.options, self._name = job, agreed, options, name
        self._rank, self.members, self.fallback = rank, members, fallback
        self._closed = False
        self.coalescing = False
        self.counts: dict[tuple[str, str, str], int] = {}
        self._known: dict[Hashable, _Known] = {}
        self.device: torch.device | None = None
        self.services: dict[str, Service] = {}
        self._on_cpu = self._whole = False
        if job is not None:
            self.device = job.device
            self._on_cpu = job.device.type == "cpu"
            self._whole = len(members) == job.world_size
            job.groups += self._whole
            self._wait_s = job.timeout_s if timeout_s is None else timeout_s
            setting = Setting(
                job,
                members,
                timeout_s=self._wait_s,
                programs=options.programs,
                limits=options.limits(),
                token=agreed.token,
            )
            self.services = _make_services(setting)
        elif options.kinds and rank == 0:
            _log.warning("backend tdcoll: group %s is served by %s alone: %s", name, fallback, agreed.reason)

    # ------------------------------------------------------------------ which side

    def _never(self, kind: str, call: Call) -> str | None:
        """Return why tdcoll does not serve such calls, whenever they come; None if it may."""
        if kind not in self.agreed.kinds:
            return self.agreed.reason or "told not to serve it"
        own, device = self.device, call.device
        assert own is not None
        if call.inputs and device.type != own.type:
            return f"a {device.type.upper()} tensor, and tdcoll's memory is on {own.type.upper()}"
        if device.type == "cuda" and device != own and call.inputs:
            raise ValueError(
                f"{kind}: the tensor is on {device}, and tdcoll has this rank's memory on {own}; call "
                'torch.cuda.set_device(LOCAL_RANK) before init_process_group("tdcoll")'
            )
        service = self.services[kind]
        if len(self.members) == 1 and not service.alone:
            return "one rank"
        return service.refuse(call)

    def compares(self, kind: str, call: Call) -> bool:
        """Return whether the ranks compare a call like this one: in debug mode, of a kind that tdcoll may serve."""
        service, own = self.services.get(kind), self.device
        if service is None or kind not in self.agreed.kinds or not service.setting.debug or own is None:
            return False
        return len(self.members) > 1 and (not call.inputs or call.device.type == own.type)

    def _standing(self) -> str | None:
        """Return why no call at all can be served now; None if calls can."""
        job = self.job
        if job is None:
            return self.agreed.reason
        if job.closed or self._closed:
            return "tdcoll.finalize() was called" if job.closed else "the group is shut down"
        return "inside of a coalescing block of the inner group" if self.coalescing else None

    def _prepare(self, kind: str, call: Call) -> str | None:
        """Prepare tdcoll for a call; return why it cannot be served now, or None if it can. The same on all ranks."""
        service = self.services[kind]
        with self._waiting(kind):
            if self.compares(kind, call):
                service.compare(call)
                if (never := self._never(kind, call)) is not None:
                    return never
            return service.prepare(call)

    def say(self, kind: str, side: str, why: str) -> None:
        """Count a call; log the first of its kind."""
        key = (kind, side, why)
        count = self.counts.get(key, 0)
        self.counts[key] = count + 1
        if count == 0 and self._rank == 0:
            _log.info("backend tdcoll: %s of group %s is served by %s%s", kind, self._name, side,
                      f" ({why})" if why else "")  # fmt: skip

    # ------------------------------------------------------------------ tdcoll

    def call(
        self,
        kind: str,
        call: Call,
        asynchronous: bool,
        inner: Make,
        like: Hashable | None = None,
        *,
        refused: str | None = None,
        how: str = "",
    ) -> Any:
        """Have a call made by the side that serves it, tdcoll or the inner group; return its work.

        Args:
            inner: makes the call by the fallback backend.
            like: what the next call like it is known by, to :meth:`call_one`; None if it is not to be known.
            refused: why tdcoll does not serve it; None if it may.
            how: the inner group makes it, in words for people.
        """
        standing = self._standing()
        # In debug mode the ranks compare a call before they ask who serves it, since a wrong one may decide that.
        never = refused if refused or (self.compares(kind, call) and not standing) else self._never(kind, call)
        why = never or standing
        if why is None:
            service = self.services[kind]
            queue = service.lane.queue
            in_turn = asynchronous or queue.calls_back
            if self._on_cpu and in_turn:
                if not service.setting.debug:
                    service.check_call(call)
                before = self._outstanding() if service.blocks else []
                make = lambda: self._make_in_turn(kind, call, inner, like, how, before)  # noqa: E731
                task = Task(make, give_up=self._give_up)
                work: Any = TaskWork(queue.submit(task), queue)
                if not asynchronous:
                    work.wait()
                return work
            if not in_turn or service.waits or service.setting.debug:
                queue.drain()
            if service.blocks:
                _wait_for(self._outstanding())
            why = self._prepare(kind, call)
        if why is None:
            service.check_call(call)
            return self.serve(kind, call, asynchronous=asynchronous, like=like)
        backend = self.fallback.name(call.device)
        self.say(kind, backend, how + why)
        if why is never:  # an obstacle may go away
            self._remember(like, _Known((kind, backend, why), None, None))
        return self.fallback.make(call, asynchronous, inner)

    def _remember(self, like: Hashable | None, known: _Known) -> None:
        if like is not None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[like] = known

    def _outstanding(self) -> list[Task]:
        """Return the calls of all kinds that are not made yet."""
        return [task for service in self.services.values() for task in service.lane.queue.outstanding()]

    def _make_in_turn(
        self,
        kind: str,
        call: Call,
        inner: Make,
        like: Hashable | None,
        how: str,
        before: Sequence[Task],
    ) -> list[torch.Tensor]:
        """Make a call when its queue comes to it and other tasks are done, by the side that serves it; return its
        result.

        The inner group has had later calls by then, in an order of its own, which may not be the same on all ranks. If
        tdcoll cannot serve this one, an inner group of the kind's own makes it.
        """
        _wait_for(before)
        why = self._standing() or self._prepare(kind, call)
        if why is None:
            self.say(kind, "tdcoll", "")
            return self._run(kind, call, like)
        self.say(kind, self.fallback.name(call.device), how + why)
        self.fallback.make(call, False, inner, beside=kind).wait()
        return call.results

    def call_one(
        self,
        kind: str,
        out: torch.Tensor,
        tensor: torch.Tensor,
        op: str | None,
        asynchronous: bool,
        inner: Make,
    ) -> Any:
        """Have a call of one tensor made, by the fast path if one like it was made before; return its work.

        What a call is known by decides whether tdcoll may ever serve it. If it may, the rest is checked again, see
        :mod:`tdcoll.collectives._host.call`.
        """
        try:
            like: Hashable = kind, op, tensor.device, tensor.dtype, tensor.layout, tensor.shape
            if out is not tensor:
                like = like, out.dtype, out.layout, out.shape
            known = self._known.get(like)
        except (RuntimeError, TypeError):  # a nested tensor has no shape, and a symbolic one is no key
            like = known = None
        if known is not None:
            if known.ready is None:
                self.counts[known.counted] += 1
                call = Call([out], [tensor], op)
                if tensor.is_cuda and is_plain(tensor) and is_plain(out):
                    return inner(self.fallback.group, call)  # what follows does, too, in more time
                return self.fallback.make(call, asynchronous, inner)
            work = self._again(known, out, tensor, asynchronous)
            if work is not None:
                self.counts[known.counted] += 1
                return work
        return self.call(kind, Call([out], [tensor], op), asynchronous, inner, like)

    def _again(self, known: _Known, out: torch.Tensor, tensor: torch.Tensor, asynchronous: bool) -> Any:
        """Make a call like an earlier one of a dense kind; return its work, None if something is not as it was."""
        job, context, ready = self.job, known.context, known.ready
        assert context is not None
        assert ready is not None
        service: Any = self.services[known.counted[0]]
        if job is None or job.closed or self._closed or self.coalescing or context is not service.pool.context:
            return None
        queue = service.lane.queue
        if queue.unfinished:
            if asynchronous or queue.calls_back:
                return None
            queue.drain()
        if self._on_cpu:
            if asynchronous:
                return None
            with backend_errors:
                if again(context, ready, tensor, out) is None:
                    return None
                service.check()
        elif asynchronous:
            return self._again_beside(service, context, ready, out, tensor)
        elif again(context, ready, tensor, out) is None:
            return None
        work = CompletedWork()
        work.tensors = (out,)
        return work

    def _again_beside(
        self, service: Dense, context: CollectiveContext, ready: Ready, out: torch.Tensor, tensor: torch.Tensor
    ) -> Any:
        """Make it on the service's own stream, behind what is on the current one."""
        stream, device = service.stream, self.device
        if stream is None or device is None or torch._C._cuda_getDevice() != device.index:
            return None
        current = current_stream(device.index)
        if current.stream_id and capturing(device):  # the default stream, 0, cannot be captured
            return None
        if service.before is None:
            service.before = torch.cuda.Event()
        service.before.record(current)
        service.before.wait(stream)
        # What torch.cuda.stream() does, at a third of its price, on the device that is current.
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)
        try:
            made = again(context, ready, tensor, out)
        finally:
            torch._C._cuda_setStream(current.stream_id, current.device_index, current.device_type)
        if made is None:
            return None
        keep = (out, tensor)
        return StreamWork([out], stream, blocks=False, check=self._check, keep=keep, events=service.events)

    def serve(self, kind: str, call: Call, *, asynchronous: bool, like: Hashable | None = None) -> Any:
        """Make a call with tdcoll, now or by its queue, and count it; return its work."""
        self.say(kind, "tdcoll", "")
        device, service = self.device, self.services[kind]
        assert device is not None

        if self._on_cpu:
            return completed(self._run(kind, call, like))
        with torch.cuda.device(device):
            if not asynchronous:
                result = self._run(kind, call, like)
                if service.blocks:
                    torch.cuda.current_stream(device).synchronize()
                    with backend_errors:
                        self._check()
                return completed(result)
            if service.stream is None:
                service.stream = torch.cuda.Stream(device)
            stream, queue = service.stream, service.lane.queue
            if service.waits or not (capturing(device) or (service.loaded(call) and not queue.unfinished)):
                # The host has to wait: for the size of the result, or until all ranks have loaded the kernels.
                for tensor in call.touched:
                    record_stream(tensor, stream)
                task = Task(lambda: self._run(kind, call, like), stream, give_up=self._give_up)
                return TaskWork(queue.submit(task), queue)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                result = self._run(kind, call, like)
            return StreamWork(result, stream, blocks=service.blocks, check=self._check, keep=call.touched)

    def _run(self, kind: str, call: Call, like: Hashable | None = None) -> list[torch.Tensor]:
        """Make a call with tdcoll on the current stream; return its result. The next one is known by ``like``."""
        service = self.services[kind]
        with self._waiting(kind), torch.no_grad():
            result = service.run(call)
            if self._on_cpu:
                self._check()  # of all kinds: a barrier has no context of its own
        if call.ready is not None and isinstance(service, Dense):
            self._remember(like, _Known((kind, "tdcoll", ""), call.ready, service.pool.context))
        return result

    def _check(self) -> None:
        """Raise the error that finished kernels of this group have left, of any kind of call."""
        for service in self.services.values():
            service.check()

    def _give_up(self) -> None:
        """End the waits of this group's kernels: the process ends."""
        for service in self.services.values():
            service.give_up()

    def check(self) -> None:
        """Raise the error that finished kernels of this group have left, as ``torch.distributed`` wants it."""
        with backend_errors:
            self._check()

    @contextlib.contextmanager
    def _waiting(self, kind: str) -> Iterator[None]:
        """Have exchanges on the host go by this kind's numbers and the group's deadline; turn errors of deadlines into
        torch.distributed's."""
        job = self.job
        assert job is not None
        control = self.services[kind].lane.control
        with backend_errors, job.within(self._wait_s, self.agreed.name), job.through(control):
            yield

    # ------------------------------------------------------------------ the end

    def close(self) -> BaseException | None:
        """Free what tdcoll holds for this group. Collective.

        Returns:
            The error of a wait that has expired and of which nobody has heard, or None.
        """
        if self._closed:
            return None
        self._closed = True
        for service in self.services.values():
            service.lane.queue.drain()
        self._close_queues()
        expired = self._expired()
        self._leave()
        return expired

    def _close_queues(self) -> None:
        """Let the threads of asynchronous calls end when they have made them."""
        for service in self.services.values():
            service.lane.queue.close()

    def abort(self) -> None:
        """Wait for nobody any more, and forget the job if it ends with this group."""
        self._closed = True
        self._close_queues()
        job = self.job
        if job is not None and not job.closed and self._ends(job):
            job.failed = True
            tdcoll.finalize()

    def _ends(self, job: Runtime) -> bool:
        """Count this group out; return whether a job that the backend has joined ends with it.

        It does with the default group, and with the last group of all ranks.
        """
        counted, self._whole = self._whole, False
        job.groups -= counted
        return counted and job.of_backend and (self._default or not job.groups)

    def _expired(self) -> BaseException | None:
        """Wait for the GPU; return the error of an expired wait of which nobody has heard, or None."""
        job = self.job
        if job is None or job.closed or job.failed:
            return None
        if job.device.type == "cuda":
            torch.cuda.synchronize(job.device)
        return error_of(self._check)

    def _leave(self) -> None:
        """Free what tdcoll holds for this group. Collective; after an error, what is left of it."""
        job = self.job
        if job is None or job.closed:
            return
        try:
            if self._ends(job):
                tdcoll.finalize()  # closes no contexts of ours, and frees all memory; of a failed job it does neither
            elif not job.failed:
                for service in self.services.values():
                    service.close()
        except (TdcollError, dist.DistError) as error:
            _log.warning("backend tdcoll: rank %d left without the others: %s", self._rank, error)


def _make_services(setting: Setting) -> dict[str, Service]:
    """Make a service of each kind for one group."""
    services = setting.services
    services.update({name: Dense(setting, spec_of(name)) for name in COLLECTIVES})
    services.update({kind.kind: kind(setting) for kind in (SparseAllReduce, Barrier)})
    return services


def _wait_for(tasks: Sequence[Task]) -> None:
    for task in tasks:
        task.done.wait()
