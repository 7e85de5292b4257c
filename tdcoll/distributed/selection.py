# SPDX-License-Identifier: Apache-2.0
"""The choice of who handles a call of a process group, tdcoll's kernels or the fallback backend:
:class:`Selection`.

The choice uses only facts that are the same on all ranks: the kind of call, device type, dtype,
sizes, and what the ranks agreed on when they made the group. If this rank alone knows something
(its input isn't contiguous, or overlaps the output), that costs a copy and never changes the
choice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.budget import Budget
from tdcoll.calls.collective import operation_of
from tdcoll.distributed.agreement import Agreement
from tdcoll.distributed.call import Call
from tdcoll.distributed.fallback import Fallback
from tdcoll.distributed.handlers import Barrier, Dense, GroupInfo, Handler
from tdcoll.distributed.options import KINDS
from tdcoll.distributed.queues import Queue
from tdcoll.distributed.sparse import SparseAllReduce

_log = logging.getLogger("tdcoll")


class Selection:
    """Who handles the calls of one process group.

    Attributes:
        handlers: for each kind of call; empty without a job.
        device: of tdcoll's memory; None if there is no job.
        coalescing: whether calls belong to a block that the fallback backend launches as one.
        counts: calls so far, by kind, implementation, and reason.
    """

    def __init__(self, agreed: Agreement, fallback: Fallback) -> None:
        self.agreed = agreed
        self.fallback = fallback
        self.job = agreed.job
        self.ranks = agreed.ranks
        self._closed = self.coalescing = False
        self.counts: dict[tuple[str, str, str], int] = {}
        self.device: torch.device | None = None
        self.handlers: dict[str, Handler] = {}
        self._on_cpu = self._whole = False
        job = self.job
        if job is not None:
            self.device = job.device
            self._on_cpu = job.device.type == "cpu"
            self._whole = len(self.ranks) == job.world_size
            job.groups += self._whole
            self._wait_s = job.timeout_s if agreed.timeout_s is None else agreed.timeout_s
            members = GroupInfo(job, self.ranks, self._wait_s, agreed.options)
            self.budget = Budget(job, self.ranks, agreed.options.blocks)
            queue = Queue(job.control.part(agreed.token))
            # Debug mode compares the order of all calls.
            of_sparse = Queue(job.control.part(f"{agreed.token}/{SparseAllReduce.kind}"))
            sparse = SparseAllReduce(members, queue if members.debug is True else of_sparse)
            dense = {
                kind: Dense(members, queue, operation_of(kind), self.budget) for kind in COLLECTIVES
            }
            gathers = next(handler for handler in dense.values() if not handler.spec.reduces)
            self.handlers = {**dense, sparse.kind: sparse, Barrier.kind: Barrier(members, gathers)}
        elif agreed.options.kinds and agreed.rank == 0:
            text = "backend tdcoll: %s handles all calls of group %s: %s"
            _log.warning(text, fallback, agreed.name, agreed.reason)

    def handled_by(self, kind: str) -> tuple[str, str]:
        """Return which backend handles calls of a kind now, and its limits or the reason, as
        text."""
        why = self._never(kind) or self._obstacle() or self.handlers[kind].problem
        return (
            ("tdcoll", self.handlers[kind].describe()) if why is None else ("fallback backend", why)
        )

    def describe(self) -> Iterator[str]:
        """Yield lines for people: the backend of each kind of call, the reasons, and the calls so
        far."""
        job = self.job
        if job is not None:
            where = "simulator" if job.simulated else str(self.device)
            yield f"  ranks: {job.topology(self.ranks).describe()}, symmetric memory: {where}"
        yield f"  fallback backend: {self.fallback}"
        for kind in KINDS:
            by, why = self.handled_by(kind)
            yield f"  {kind}: {by}; {why}"
        yield "  everything else: fallback backend, and not counted"
        for (kind, by, why), count in self.counts.items():
            yield f"  calls so far: {count} {kind} by {by}" + (f" ({why})" if why else "")

    def _never(self, kind: str) -> str | None:
        """Return why tdcoll never handles calls of a kind; None if it may."""
        if kind not in self.agreed.kinds:
            return self.agreed.reason or f"configured kinds: {self.agreed.options.handles}"
        return (
            "one rank"
            if len(self.ranks) == 1 and not self.handlers[kind].handles_one_rank
            else None
        )

    def _unsupported(self, kind: str, call: Call) -> str | None:
        """Return why tdcoll never handles such calls; None if it may."""
        why = self._never(kind)
        if why is not None:
            return why
        own = self.device
        device = call.device
        assert own is not None
        if call.inputs and device.type != own.type:
            return f"a {device.type.upper()} tensor, and tdcoll's memory is on {own.type.upper()}"
        if device.type == "cuda" and device != own and call.inputs:
            raise ValueError(
                f"{kind}: the tensor is on {device}, and tdcoll has this rank's memory on {own}; call "
                'torch.cuda.set_device(LOCAL_RANK) before init_process_group("tdcoll")'
            )
        return self.handlers[kind].why_unsupported(call)

    def compares(self, kind: str, call: Call) -> bool:
        """Return whether the ranks compare a call like this one: in debug mode, of a kind that
        tdcoll may handle."""
        handler = self.handlers.get(kind)
        own = self.device
        if (
            handler is None
            or kind not in self.agreed.kinds
            or handler.members.debug is not True
            or own is None
        ):
            return False
        return len(self.ranks) > 1 and (not call.inputs or call.device.type == own.type)

    def _obstacle(self) -> str | None:
        """Return why tdcoll can't handle any call now; None if it can."""
        job = self.job
        if job is None:
            return self.agreed.reason
        if job.closed or self._closed:
            return "tdcoll.finalize() was called" if job.closed else "the group is shut down"
        return "inside a coalescing block of the fallback backend" if self.coalescing else None

    def count(self, kind: str, by: str, why: str) -> None:
        """Count a call; log the first of its kind."""
        key = (kind, by, why)
        count = self.counts.get(key, 0)
        self.counts[key] = count + 1
        if count == 0 and self.agreed.rank == 0:
            _log.info(
                "backend tdcoll: %s handles %s of group %s%s",
                by,
                kind,
                self.agreed.name,
                f" ({why})" if why else "",
            )
