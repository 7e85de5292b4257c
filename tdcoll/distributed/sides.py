# SPDX-License-Identifier: Apache-2.0
"""The two sides that serve the calls of a process group: tdcoll's kernels and the inner group.

Which one serves a call is decided from facts that are the same on all ranks: the kind, the device type, the dtype, the
sizes, and what the group has agreed on when it was made. What is only known on one rank (an input that is not
contiguous, one that overlaps the output) never decides; it costs a copy.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import tdcoll
from tdcoll.capture import capturing
from tdcoll.distributed.agreement import Agreement
from tdcoll.distributed.inner import NamedWork, RollCall, may_be_a_peers
from tdcoll.distributed.options import SERVES, Options
from tdcoll.distributed.service import Call, Dense, Service, Setting
from tdcoll.distributed.services import KINDS, make_services
from tdcoll.distributed.work import Task, TaskWork, worker
from tdcoll.errors import TdcollError
from tdcoll.runtime import Runtime
from tdcoll.work import CompletedWork, StreamWork, backend_errors, current_stream, error_of, record_stream

__all__ = ["Sides"]

_log = logging.getLogger("tdcoll")

_MOST_KNOWN = 4096
"""Calls of different sizes that a group remembers at a time."""


class Sides:
    """Which side serves a call of one group; calls to either.

    Args:
        job: None if tdcoll serves nothing.
        agreed: which kinds tdcoll serves.
        options: of the group.
        name: of the group.
        rank: in the group.
        members: its global ranks.
        inner: name of the inner group's backend for each type of device.
        roll_call: who is still there when a call of the inner group has failed.
        timeout_s: deadline of waits in kernels; None: that of the job.
        default: whether it is the default group.

    Attributes:
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
        inner: dict[str, str],
        roll_call: RollCall,
        timeout_s: float | None,
        default: bool = False,
    ) -> None:
        self._default = default
        self._job, self._agreed, self._options, self._name = job, agreed, options, name
        self._rank, self._members, self._inner, self._roll_call = rank, members, inner, roll_call
        self._worker_stream: Any = None
        self._closed = False
        self.coalescing = False
        self.counts: dict[tuple[str, str, str], int] = {}
        self._known: dict[Hashable, tuple[str, str, str]] = {}  # what calls like earlier ones are counted as
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
                limits=options.limits(len(members), job.heap.nbytes),
            )
            self.services = make_services(setting)
        elif options.kinds and rank == 0:
            _log.warning("backend tdcoll: group %s is served by %s alone: %s", name, self._inner_names(), agreed.reason)

    # ------------------------------------------------------------------ which side

    def refusal(self, kind: str, call: Call) -> str | None:
        """Prepare tdcoll for a call; return why it does not serve it, or None if it does. The same on all ranks."""
        return self._never(kind, call) or self._obstacle(kind, call)

    def _never(self, kind: str, call: Call) -> str | None:
        """Return why tdcoll does not serve such calls, whenever they come; None if it may."""
        if kind not in self._agreed.kinds:
            return self._agreed.reason or "told not to serve it"
        job, own, device = self._job, self.device, call.device
        assert job is not None
        assert own is not None
        if device.type != own.type:
            return f"a {device.type.upper()} tensor, and tdcoll's memory is on {own.type.upper()}"
        if device.type == "cuda" and device != own:
            raise ValueError(
                f"{kind}: the tensor is on {device}, and tdcoll has this rank's memory on {own}; call "
                'torch.cuda.set_device(LOCAL_RANK) before init_process_group("tdcoll")'
            )
        service = self.services[kind]
        if len(self._members) == 1 and not service.alone:
            return "one rank"
        return service.refuse(call)

    def _obstacle(self, kind: str, call: Call) -> str | None:
        """Prepare tdcoll for a call; return why it cannot be served now, or None if it can. The same on all ranks."""
        job = self._job
        assert job is not None
        if job.closed or self._closed:
            return "tdcoll.finalize() was called" if job.closed else "the group is shut down"
        if self.coalescing:
            return "inside of a coalescing block of the inner group"
        with self._waiting():
            return self.services[kind].prepare(call)

    def say(self, kind: str, side: str, why: str) -> None:
        """Count a call; log the first of its kind."""
        key = (kind, side, why)
        count = self.counts.get(key, 0)
        self.counts[key] = count + 1
        if count == 0 and self._rank == 0:
            _log.info("backend tdcoll: %s of group %s is served by %s%s", kind, self._name, side,
                      f" ({why})" if why else "")  # fmt: skip

    # ------------------------------------------------------------------ the inner group

    def inner_name(self, device: torch.device) -> str:
        """The backend that has this device's calls in the inner group."""
        return self._inner.get(device.type, device.type)

    def _inner_names(self) -> str:
        return " and ".join(f"{name} ({device})" for device, name in self._inner.items())

    def to_inner(self, kind: str, device: torch.device, why: str) -> None:
        """Count a call that the inner group serves."""
        self.say(kind, self.inner_name(device), why)

    def call_inner(self, operation: str, device: torch.device, call: Callable[[], Any]) -> Any:
        """Return the inner group's work; on CPUs one whose failure names who is gone."""
        if device.type != "cpu":
            return call()
        try:
            return NamedWork(call(), operation, self._roll_call)
        except RuntimeError as error:
            if isinstance(error, (ValueError, TdcollError)) or not may_be_a_peers(error):
                raise
            raise self._roll_call.name(operation, error) from error

    # ------------------------------------------------------------------ tdcoll

    def call(
        self, kind: str, call: Call, asynchronous: bool, inner: Callable[[], Any], like: Hashable | None = None
    ) -> Any:
        """Have a call made by the side that serves it, tdcoll or ``inner``; return its work.

        Args:
            like: what the next call like it is known by, to :meth:`call_one`; None if it is not to be known.
        """
        never = self._never(kind, call)
        why = never or self._obstacle(kind, call)
        if why is None:
            work = self.serve(kind, call, asynchronous=asynchronous)
        else:
            self.to_inner(kind, call.device, why)
            work = self.call_inner(kind, call.device, inner)
        if like is not None and why is never:  # an obstacle may go away
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[like] = (kind, "tdcoll" if why is None else self.inner_name(call.device), why or "")
        return work

    def call_one(
        self,
        kind: str,
        out: torch.Tensor,
        tensor: torch.Tensor,
        op: str | None,
        asynchronous: bool,
        inner: Callable[[], Any],
    ) -> Any:
        """Have a call of one tensor made, the short way if one like it was made before; return its work.

        What a call is known by decides whether tdcoll may ever serve it. Where it may, the rest is checked again:
        :meth:`~tdcoll.collectives._host.collective.Collective.at_once`.
        """
        try:
            like: Hashable = kind, op, tensor.device, tensor.dtype, tensor.layout, tensor.shape
            if out is not tensor:
                like = like, out.dtype, out.layout, out.shape
            known = self._known.get(like)
        except (RuntimeError, TypeError):  # a nested tensor has no shape, and a symbolic one is no key
            like = known = None
        if known is not None:
            if known[1] != "tdcoll":
                self.counts[known] += 1
                return inner() if tensor.is_cuda else self.call_inner(kind, tensor.device, inner)  # one call less
            work = self._at_once(kind, out, tensor, op, asynchronous)
            if work is not None:
                self.counts[known] += 1
                return work
        return self.call(kind, Call([out], [tensor], op), asynchronous, inner, like)

    def _at_once(self, kind: str, out: torch.Tensor, tensor: torch.Tensor, op: str | None, asynchronous: bool) -> Any:
        """Serve a call of a :class:`Dense` kind that is like an earlier one; return its work, None if it cannot be."""
        job = self._job
        if job is None or job.closed or self._closed or self.coalescing:
            return None
        service: Any = self.services[kind]
        if asynchronous:
            return None if self._on_cpu else self._at_once_beside(service, out, tensor, op)
        if not self._on_cpu:
            return CompletedWork([out]) if service.at_once(out, tensor, op) else None
        worker.drain()
        with backend_errors:
            if not service.at_once(out, tensor, op):
                return None
            service.check()
        return CompletedWork([out])

    def _at_once_beside(self, service: Dense, out: torch.Tensor, tensor: torch.Tensor, op: str | None) -> Any:
        """Serve it on the service's own stream, behind what is on the current one."""
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
            made = service.at_once(out, tensor, op)
        finally:
            torch._C._cuda_setStream(current.stream_id, current.device_index, current.device_type)
        if not made:
            return None
        keep = (out, tensor)
        return StreamWork([out], stream, blocks=False, check=self._check, keep=keep, events=service.events)

    def serve(self, kind: str, call: Call, *, asynchronous: bool) -> Any:
        """Make a call with tdcoll, now or by the worker, and count it; return its work."""
        self.say(kind, "tdcoll", "")
        device, service = self.device, self.services[kind]
        assert device is not None

        def make() -> list[torch.Tensor]:
            with self._waiting(), torch.no_grad():
                result = service.run(call)
                if self._on_cpu:
                    self._check()  # of all kinds: a barrier has no context of its own
                return result

        if self._on_cpu:
            if asynchronous:
                return TaskWork(worker.submit(Task(make, give_up=self._give_up)))
            worker.drain()
            return CompletedWork(make())
        with torch.cuda.device(device):
            if not asynchronous:
                if service.waits:
                    worker.drain()
                result = make()
                if service.blocks:
                    torch.cuda.current_stream(device).synchronize()
                    with backend_errors:
                        self._check()
                return CompletedWork(result)
            if service.waits:
                stream = self._worker_stream = self._worker_stream or torch.cuda.Stream(device)
                for tensor in call.touched:
                    record_stream(tensor, stream)
                return TaskWork(worker.submit(Task(make, stream, give_up=self._give_up)))
            if service.stream is None:
                service.stream = torch.cuda.Stream(device)
            stream = service.stream
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                result = make()
            return StreamWork(result, stream, blocks=service.blocks, check=self._check, keep=call.touched)

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
    def _waiting(self) -> Iterator[None]:
        """Apply this group's deadline to exchanges on the host; turn errors of deadlines into torch.distributed's."""
        assert self._job is not None
        with backend_errors, self._job.within(self._wait_s, self._agreed.name):
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
        worker.drain()
        expired = self._expired()
        self._leave()
        return expired

    def abort(self) -> None:
        """Wait for nobody any more, and forget the job if it ends with this group."""
        self._closed = True
        job = self._job
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
        job = self._job
        if job is None or job.closed or job.failed:
            return None
        if job.device.type == "cuda":
            torch.cuda.synchronize(job.device)
        return error_of(self._check)

    def _leave(self) -> None:
        """Free what tdcoll holds for this group. Collective; after an error, what is left of it."""
        job = self._job
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

    # ------------------------------------------------------------------ words

    def describe(self) -> Iterator[str]:
        """Yield lines for people: what serves which calls, and why; calls so far."""
        agreed, job = self._agreed, self._job
        if job is not None:
            where = "simulator" if job.simulated else str(self.device)
            yield f"  ranks: {job.topology(self._members).describe()}, symmetric memory: {where}"
        yield f"  inner group: {self._inner_names()}"
        for kind in KINDS:
            if kind in agreed.kinds:
                yield f"  {kind}: tdcoll; {self.services[kind].describe()}"
            else:
                told = self._options.serves or os.environ.get(SERVES)
                yield f"  {kind}: inner group; {agreed.reason or f'told to serve {told}'}"
        yield "  everything else: inner group"
        for (kind, side, why), count in self.counts.items():
            yield f"  calls so far: {count} {kind} by {side}" + (f" ({why})" if why else "")
