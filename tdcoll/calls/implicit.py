# SPDX-License-Identifier: Apache-2.0
"""Contexts that tdcoll makes when they are needed, and replaces when larger calls come.

All decisions depend on sizes that are the same on all ranks, in the order of the calls.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tdcoll import runtime
from tdcoll.base.capture import refuse
from tdcoll.base.errors import ContextError, HeapExhaustedError
from tdcoll.base.limits import MAX_BLOCKS, MAX_CHUNKS
from tdcoll.calls.budget import Budget
from tdcoll.calls.checks import Debug
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.sizes import ContextSizes, context_sizes
from tdcoll.calls.spec import Collective
from tdcoll.calls.tensors import strided_bytes
from tdcoll.calls.tuning import Table, source
from tdcoll.runtime import Runtime
from tdcoll.runtime.topology import Topology

_log = logging.getLogger("tdcoll")

_LEAST_BYTES_PER_RANK = 1 << 20

_HEAP_IS_FULL = "the symmetric heap has no room for it"


def on(device: torch.device) -> Any:
    """Return a context manager that makes ``device`` the current one, if it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _generous_size(old: CollectiveContext | None, nbytes: int) -> int:
    """Return the bytes per rank of a context that is made for ``nbytes``, with room for larger
    calls."""
    doubled = 0 if old is None else 2 * old.max_bytes_per_rank
    return max(_LEAST_BYTES_PER_RANK, nbytes, doubled)


def warn_of_full_heap(
    job: Runtime, ranks: Sequence[int], operation: str, nbytes: int, error: HeapExhaustedError
) -> None:
    """Log on the first of ``ranks`` why calls of an operation go to the fallback backend from now
    on."""
    if job.rank == ranks[0]:
        _log.warning(
            "%s: calls of %d bytes per rank or more are left to the fallback backend: %s",
            operation,
            nbytes,
            error,
        )


class ImplicitContext:
    """The context for one kind of call of one set of ranks.

    Calls may outgrow it. It is then replaced, but kept as long as graphs may use it.

    Args:
        operation: The name of the calls in messages.
        limit: The most bytes per rank of a context. None: the heap is the limit.
        timeout_s: Deadline of waits, seconds. None: the job's.
        lamport_bytes, chunks: As for :class:`~tdcoll.CollectiveContext`.
        budget: Thread blocks and order of launches, which other contexts may share; its owner gives
            the thread blocks back. None: no limit, and launches must not be in flight beside those
            of other contexts.

    Attributes:
        context: For the next call; None if none was made.
        limit: As passed; less if the heap has been full.
        outgrown: Whether captured graphs may still use contexts other than ``context``.
        problem: Why the last :meth:`prepare` had no context; None if it had.
    """

    def __init__(
        self,
        job: Runtime,
        ranks: Sequence[int],
        operation: str,
        *,
        limit: int | None = None,
        timeout_s: float | None = None,
        lamport_bytes: int | None = 0,
        budget: Budget | None = None,
        debug: Debug | None = None,
        chunks: int = MAX_CHUNKS,
    ) -> None:
        self.limit = limit
        self.outgrown = False
        self.problem: str | None = None
        self.context: CollectiveContext | None = None
        self._job = job
        self._ranks = tuple(ranks)
        self._operation = operation
        self._timeout_s = timeout_s
        self._lamport_bytes = lamport_bytes
        self._budget = budget
        self._budget_is_spent = False
        self._debug = debug
        self._chunks = chunks
        self._call: dict[str, Any] = {}
        self._in_graphs: list[CollectiveContext] = []
        self._has_warned = False

    def holds(self, nbytes: int) -> bool:
        """Return whether there is a context for ``nbytes`` per rank."""
        return self.context is not None and nbytes <= self.context.max_bytes_per_rank

    def prepare(self, nbytes: int, call: Mapping[str, Any] | None = None) -> bool:
        """Make a context for ``nbytes`` per rank if needed; return whether there is one.

        Collective when it is made. Without ``limit`` and ``budget`` it returns True or raises.

        Args:
            call: The call's arguments that must be the same on all ranks, by name. The ranks
                compare them when they make a context, because they exchange its arguments anyway.

        Raises:
            ContextError: It has to be made, and a CUDA graph is being captured.
            HeapExhaustedError: The heap is too small, and there is no ``limit``. Raised on all
                ranks; the context is as it was.
        """
        if self.holds(nbytes):
            return True
        if not self._budget_is_spent:
            too_large = self.limit is not None and nbytes > self.limit
            self.problem = _HEAP_IS_FULL if too_large else None
        if self.problem is not None:
            return False
        refuse(
            self._job.device,
            self._operation,
            f"{nbytes} bytes per rank need a larger context, which cannot be made while a CUDA "
            "graph is captured; make one call of this size before",
        )
        self._call = {"operation": self._operation, **(call or {})}
        return self._make(nbytes)

    def _make(self, nbytes: int) -> bool:
        """Make a context for ``nbytes`` per rank; return False if the heap is too small for it."""
        if self._budget is not None:
            try:
                self._budget.take(self._operation)
            except ContextError as error:  # on all ranks
                self.problem = str(error)
                self._budget_is_spent = True
                return False
        try:
            self.context = self._larger(self.context, nbytes)
        except HeapExhaustedError as error:
            if self.limit is None:
                raise
            if not self._has_warned:
                warn_of_full_heap(self._job, self._ranks, self._operation, nbytes, error)
            self._has_warned = True
            self.limit = nbytes - 1
            self.problem = _HEAP_IS_FULL
            return False
        return True

    def _larger(self, old: CollectiveContext | None, nbytes: int) -> CollectiveContext:
        """Make a context for ``nbytes`` or, if the heap has room, for twice the old capacity.

        It replaces the old one, unless a graph may use that.
        """
        generous = _generous_size(old, nbytes)
        if self.limit is not None:
            generous = max(nbytes, min(self.limit, generous))
        if old is None:
            return self._first_that_fits(generous, nbytes)
        answers = self._job.exchange(self._ranks, f"{self._operation}: captured", old.captured)
        if any(answers):
            made = self._first_that_fits(generous, nbytes)
            self._in_graphs.append(old)
            self.outgrown = True
            return made
        old.close()
        self.context = None
        try:
            return self._first_that_fits(generous, nbytes)
        except HeapExhaustedError:
            size = old.max_bytes_per_rank
            self.context = self._first_that_fits(size, size)
            raise

    def _first_that_fits(self, size: int, least: int) -> CollectiveContext:
        """Make a context for ``size`` bytes per rank or, if the heap is too small, for
        ``least``."""
        try:
            return self._new_context(size)
        except HeapExhaustedError:  # on all ranks
            if size == least:
                raise
        return self._new_context(least)

    def _new_context(self, size: int) -> CollectiveContext:
        budget = self._budget
        with on(self._job.device):
            made = CollectiveContext(
                self._ranks,
                max_bytes_per_rank=size,
                chunks=self._chunks,
                lamport_bytes=self._lamport_bytes,
                max_blocks=None if budget is None else budget.blocks,
                timeout_s=self._timeout_s,
                debug=self._debug,
                _call=self._call,
                _order=None if budget is None else budget.order,
            )
        if budget is not None:
            budget.order = made.order
        return made

    def _all(self) -> Iterator[CollectiveContext]:
        yield from self._in_graphs
        if self.context is not None:
            yield self.context

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of the waits of later calls."""
        self._timeout_s = timeout_s
        for context in self._all():
            context.set_timeout(timeout_s)

    def check(self) -> None:
        """Raise the errors of finished kernels, also of graphs that use an outgrown context."""
        for context in self._all():
            context.monitor.raise_if_expired()

    def abort(self) -> None:
        """End the waits of its kernels, because the process ends; from any thread."""
        for context in self._all():
            context.monitor.abort()

    def close(self) -> None:
        """Free the contexts. Collective."""
        for context in list(self._all()):
            context.close()
        self._in_graphs = []
        self.outgrown = False
        self.context = None


class ContextSize(NamedTuple):
    """The size of a context whose calls aren't those of a collective.

    Attributes:
        inbox_bytes: The ``max_bytes_per_rank`` that the call needs.
        chunks: As for :class:`~tdcoll.CollectiveContext`.
    """

    inbox_bytes: int
    chunks: int


def implicit_context(
    spec: Collective,
    tensor: torch.Tensor,
    group: runtime.Group,
    operation: str,
    call: Mapping[str, Any] | None = None,
    size: ContextSize | None = None,
) -> CollectiveContext:
    """Return tdcoll's own context of a group for calls of a collective with such a tensor.

    Collective when it is made or grows.

    Args:
        operation: The name of the calls. Each name has a context of its own.
        call: More arguments that must be the same on all ranks; compared when the context is made
            or grows.
        size: Of the context. None: as the collective needs it for the tensor.

    Raises:
        NotInitializedError: Before ``tdcoll.initialize()``.
        ContextError: It has to be made, and a CUDA graph is being captured.
        HeapExhaustedError: The heap is too small. Raised on all ranks.
    """
    job = runtime.current()
    ranks = job.ranks_of(group)
    own: ImplicitContext | None = job.contexts.get((operation, ranks))
    if own is None:
        chunks = MAX_CHUNKS if size is None else size.chunks
        own = ImplicitContext(
            job, ranks, operation, lamport_bytes=spec.lamport_bytes, chunks=chunks
        )
        job.contexts[operation, ranks] = own
    segment = spec.segment_bytes(strided_bytes(tensor), len(ranks))
    nbytes = spec.inbox(segment, len(ranks), job.heap.nbytes) if size is None else size.inbox_bytes
    if not own.holds(nbytes):
        facts = {"bytes": strided_bytes(tensor), "dtype": getattr(tensor, "dtype", None)}
        own.prepare(nbytes, {**facts, **(call or {})})
    assert own.context is not None
    if own.outgrown:
        own.check()  # no one else looks at contexts that only captured graphs still use
    return own.context


@dataclass(frozen=True)
class PlannedContext:
    """The facts of a context that tdcoll would make, by the names that a context has for them."""

    job: Runtime
    topology: Topology
    capacity: int
    ll_bytes: int
    lamport_bytes: int
    stores: bool
    tuning: Table
    chunks: int = MAX_CHUNKS
    max_blocks: int = MAX_BLOCKS

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.topology.world_size


def planned_context(
    spec: Collective,
    segment: int,
    group: runtime.Group,
    operation: str,
    size: ContextSize | None = None,
) -> CollectiveContext | PlannedContext:
    """Return the context of :func:`implicit_context` for segments of so many bytes, or its plan.
    Local."""
    job = runtime.current()
    ranks = job.ranks_of(group)
    nbytes = spec.inbox(segment, len(ranks), job.heap.nbytes) if size is None else size.inbox_bytes
    chunks = MAX_CHUNKS if size is None else size.chunks
    own: ImplicitContext | None = job.contexts.get((operation, ranks))
    if own is not None and own.holds(nbytes):
        assert own.context is not None
        return own.context
    topology = job.topology(ranks)
    old = None if own is None else own.context
    stores = all(job.heap.peer_base(topology.pes[rank]) for rank in topology.members[topology.node])
    sizes = sizes_for(
        spec, nbytes, topology, job.heap.nbytes, job.arena.info.free, old, stores, chunks
    )
    architectures = source.architectures(job.device)
    table = source.read(None).of(architectures, topology.ranks_per_node, topology.n_nodes)
    return PlannedContext(
        job, topology, sizes.capacity, sizes.ll_bytes, sizes.lamport_bytes, stores, table, chunks
    )


def sizes_for(
    spec: Collective,
    nbytes: int,
    topology: Topology,
    heap_bytes: int,
    free: int,
    old: CollectiveContext | None = None,
    stores: bool = True,
    chunks: int = MAX_CHUNKS,
) -> ContextSizes:
    """Return the sizes of the context that :func:`implicit_context` makes for ``nbytes`` per rank.

    Args:
        heap_bytes, free: Bytes of the symmetric heap, and those that are free. If no size fits, the
            last is returned.
        old: The context that the calls have outgrown.
        stores: Whether the ranks of each node can store to each other's memory.
    """
    for size in dict.fromkeys((_generous_size(old, nbytes), nbytes)):
        sizes = context_sizes(
            topology,
            heap_bytes,
            stores=stores,
            free=free,
            max_bytes_per_rank=size,
            chunks=chunks,
            lamport_bytes=spec.lamport_bytes,
        )
        if sizes.heap_bytes <= free:
            break
    return sizes
