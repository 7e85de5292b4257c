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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import tdcoll
from tdcoll.capture import capturing
from tdcoll.distributed.agreement import Agreement
from tdcoll.distributed.inner import NamedWork, RollCall, may_be_a_peers
from tdcoll.distributed.options import KINDS, SERVES, Options
from tdcoll.distributed.served import Gathers, SparseSums
from tdcoll.distributed.work import (
    CompletedWork,
    StreamWork,
    Task,
    TaskWork,
    as_backend_error,
    backend_errors,
    record_stream,
    worker,
)
from tdcoll.errors import CollectiveTimeout, TdcollError
from tdcoll.runtime import Runtime

__all__ = ["Sides"]

_log = logging.getLogger("tdcoll")

_GATHERED = ("all_gather", "tdcoll", "")
"""As which calls that tdcoll served are counted."""


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

    Attributes:
        gathers, sums: what tdcoll serves the calls with, if there is a job.
        device: that tdcoll's memory is on; None without a job.
        coalescing: whether calls belong to a block that the inner group launches as one.
        counts: calls so far, by kind, side, and why that side.
    """

    gathers: Gathers
    sums: SparseSums

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
    ) -> None:
        self._job, self._agreed, self._options, self._name = job, agreed, options, name
        self._rank, self._members, self._inner, self._roll_call = rank, members, inner, roll_call
        self._streams: dict[str, Any] = {}
        self._closed = False
        self.coalescing = False
        self.counts: dict[tuple[str, str, str], int] = {}
        self.device: torch.device | None = None
        self._on_cpu = False
        if job is not None:
            self.device = job.device
            self._on_cpu = job.device.type == "cpu"
            self._wait_s = job.timeout_s if timeout_s is None else timeout_s
            # At most a quarter of the heap for a context's two slots.
            room = min(options.max_bytes_per_rank, job.heap.nbytes // (8 * len(members)))
            self.gathers = Gathers(job, members, max_bytes=room, timeout_s=self._wait_s)
            self.sums = SparseSums(job, members, timeout_s=self._wait_s)
        elif options.kinds and rank == 0:
            _log.warning("backend tdcoll: group %s is served by %s alone: %s", name, self._inner_names(), agreed.reason)

    # ------------------------------------------------------------------ which side

    def refusal(self, kind: str, device: torch.device, *others: Callable[[], str | None]) -> str | None:
        """Why tdcoll does not serve this call; None if it does. The same on all ranks.

        ``others``: reasons of the call's own, looked for in this order where there is none of the group's.
        """
        if kind not in self._agreed.kinds:
            return self._agreed.reason or "told not to serve it"
        job, own = self._job, self.device
        assert job is not None
        assert own is not None
        if device.type != own.type:
            return f"a {device.type.upper()} tensor, and tdcoll's memory is on {own.type.upper()}"
        if device.type == "cuda" and device != own:
            raise ValueError(
                f"{kind}: the tensor is on {device}, and tdcoll has this rank's memory on {own}; call "
                'torch.cuda.set_device(LOCAL_RANK) before init_process_group("tdcoll")'
            )
        if job.closed or self._closed:
            return "tdcoll.finalize() was called" if job.closed else "the group is shut down"
        if self.coalescing:
            return "inside of a coalescing block of the inner group"
        return next((why for look in others if (why := look()) is not None), None)

    def alone(self) -> str | None:
        """A reason for :meth:`refusal`: there is nobody to talk to."""
        return "one rank" if len(self._members) == 1 else None

    def unprepared(self, prepare: Callable[[Any], bool], what: Any, why: Callable[[], str]) -> str | None:
        """A reason for :meth:`refusal`: ``why``, if ``prepare(what)`` of :attr:`gathers` or :attr:`sums` fails."""
        with self._waiting():
            return None if prepare(what) else why()

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
        """The inner group's work; on CPUs one whose failure names who is gone."""
        if device.type != "cpu":
            return call()
        try:
            return NamedWork(call(), operation, self._roll_call)
        except RuntimeError as error:
            if isinstance(error, (ValueError, TdcollError)) or not may_be_a_peers(error):
                raise
            raise self._roll_call.name(operation, error) from error

    # ------------------------------------------------------------------ tdcoll

    def gather_at_once(self, output: torch.Tensor, input: torch.Tensor) -> bool:
        """The short way of a synchronous all-gather like one that was made before: whether it was taken."""
        served, job = self.counts.get(_GATHERED), self._job
        if not served or job is None or job.closed or self._closed or self.coalescing:
            return False
        if self._on_cpu:
            worker.drain()
        with backend_errors:
            if not self.gathers.at_once(output, input):
                return False
            if self._on_cpu:
                self.gathers.check()
        self.counts[_GATHERED] = served + 1
        return True

    def serve(
        self,
        kind: str,
        make: Callable[[], list[torch.Tensor]],
        touched: list[torch.Tensor],
        *,
        asynchronous: bool,
        waits: bool = False,
        blocks: bool = False,
    ) -> Any:
        """Make a call with tdcoll, now or by the worker, and count it. Its work.

        Args:
            kind: as what it is counted.
            make: makes it on the current stream; its result is the work's.
            touched: tensors that it reads and writes.
            asynchronous: whether the caller goes on before it is complete.
            waits: whether it waits on the host.
            blocks: whether ``wait()`` of its work waits on the host too.
        """
        self.say(kind, "tdcoll", "")
        device = self.device
        assert device is not None

        def call() -> list[torch.Tensor]:
            with self._waiting():
                result = make()
                if self._on_cpu:
                    self.gathers.check()
                return result

        if self._on_cpu:
            if asynchronous:
                return TaskWork(worker.submit(Task(call, give_up=self._give_up)))
            worker.drain()
            return CompletedWork(call())
        with torch.cuda.device(device):
            if not asynchronous:
                if waits:
                    worker.drain()
                result = call()
                if blocks:
                    torch.cuda.current_stream(device).synchronize()
                    with backend_errors:
                        self._check()
                return CompletedWork(result)
            stream = self._internal_stream("worker" if waits else "main")
            if not capturing(device):
                for tensor in touched:
                    record_stream(tensor, stream)
            if waits:
                return TaskWork(worker.submit(Task(call, stream, give_up=self._give_up)))
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                result = call()
            return StreamWork(result, stream, blocks=blocks, check=self._check, keep=touched)

    def _internal_stream(self, of: str) -> Any:
        """The stream of what the main thread launches, and that of the worker's tasks. Not one for both: the order in
        which two threads get to it differs from rank to rank, and calls of two ranks would wait behind each other."""
        if of not in self._streams:
            self._streams[of] = torch.cuda.Stream(self.device)
        return self._streams[of]

    def _check(self) -> None:
        """Raise what finished kernels of this group have left, of any kind of call."""
        self.gathers.check()
        self.sums.check()

    def _give_up(self) -> None:
        """End the waits of this group's kernels: the process ends."""
        self.gathers.give_up()
        self.sums.give_up()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Inside, exchanges on the host have this group's deadline, and errors of deadlines are torch.distributed's."""
        assert self._job is not None
        with backend_errors, self._job.within(self._wait_s):
            yield

    # ------------------------------------------------------------------ the end

    def close(self) -> BaseException | None:
        """Free what tdcoll holds for this group: collective. A wait that has expired and of which nobody has heard."""
        if self._closed:
            return None
        self._closed = True
        worker.drain()
        expired = self._expired()
        self._leave()
        return expired

    def abort(self) -> None:
        """Wait for nobody any more, and forget the job if this group has joined it."""
        self._closed = True
        job = self._job
        if job is not None and not job.closed and self._agreed.owns_job:
            job.failed = True
            tdcoll.finalize()

    def _expired(self) -> BaseException | None:
        """A wait that has expired and of which nobody has heard; waits for the GPU."""
        job = self._job
        if job is None or job.closed or job.failed:
            return None
        if job.device.type == "cuda":
            torch.cuda.synchronize(job.device)
        try:
            self._check()
        except CollectiveTimeout as error:
            return as_backend_error(error)
        return None

    def _leave(self) -> None:
        """Free what tdcoll holds for this group. Collective; after an error, what is left of it."""
        job = self._job
        if job is None or job.closed:
            return
        try:
            if self._agreed.owns_job:
                tdcoll.finalize()  # closes no contexts of ours, and frees all memory; of a failed job it does neither
            elif not job.failed:
                self.gathers.close()
                self.sums.close()
        except (TdcollError, dist.DistError) as error:
            _log.warning("backend tdcoll: rank %d left without the others: %s", self._rank, error)

    # ------------------------------------------------------------------ words

    def describe(self) -> Iterator[str]:
        """Lines for people: what serves which calls, and why; calls so far."""
        agreed, job = self._agreed, self._job
        if job is not None:
            where = "simulator" if job.simulated else str(self.device)
            yield f"  ranks: {job.topology(self._members).describe()}, symmetric memory: {where}"
        yield f"  inner group: {self._inner_names()}"
        for kind in KINDS:
            if kind in agreed.kinds:
                detail = {
                    "all_gather": f"up to {self.gathers.limit} bytes per rank, {self.gathers.describe()}",
                    "sparse_all_reduce": f"sum and mean, {self.sums.describe()}",
                    "barrier": "",
                }[kind]
                yield f"  {kind}: tdcoll" + (f"; {detail}" if detail else "")
            else:
                told = self._options.serves or os.environ.get(SERVES)
                yield f"  {kind}: inner group; {agreed.reason or f'told to serve {told}'}"
        yield "  everything else: inner group"
        for (kind, side, why), count in self.counts.items():
            yield f"  calls so far: {count} {kind} by {side}" + (f" ({why})" if why else "")
