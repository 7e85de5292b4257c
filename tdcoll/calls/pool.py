# SPDX-License-Identifier: Apache-2.0
"""Contexts that tdcoll makes by itself when they are needed, and replaces when larger calls come.

All decisions depend on sizes that are the same on all ranks, in the order of the calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tdcoll import runtime
from tdcoll.base.capture import refuse
from tdcoll.base.errors import ContextError, HeapExhaustedError
from tdcoll.base.limits import MAX_BLOCKS, MAX_CHUNKS
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.preconditions import Debug, Lane
from tdcoll.calls.sizes import ContextSizes, context_sizes
from tdcoll.calls.spec import Collective
from tdcoll.calls.tuning import Table, given
from tdcoll.job.cuda import multiprocessors
from tdcoll.runtime import Runtime
from tdcoll.runtime.topology import Topology

_SMALLEST = 1 << 20

_SIMULATED_MULTIPROCESSORS = 132
"""Multiprocessors of a simulated GPU. An H100 has as many."""


def on(device: torch.device) -> Any:
    """Return a context manager that makes ``device`` the current one, if it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _room(device: torch.device) -> int:
    """Return how many thread blocks of :data:`~tdcoll.base.limits.SHARED_WARPS` warps fit on this process's GPU."""
    return 2 * (multiprocessors(device) if device.type == "cuda" else _SIMULATED_MULTIPROCESSORS)


class Budget:
    """Thread blocks for contexts whose launches may be in flight beside those of other contexts.

    The thread blocks of all budgets fit on the GPU together, for the reason that ``docs/architecture.md`` has. Contexts
    that share a budget share a lane: their launches come one after the other, in the same order on all ranks.

    Args:
        wanted: how many thread blocks to reserve.

    Attributes:
        blocks: the number of thread blocks reserved, the same on all ranks; 0 before :meth:`take`.
        lane: of the contexts; made with the first.
    """

    def __init__(self, owner: Runtime, ranks: Sequence[int], wanted: int) -> None:
        self._owner, self._ranks, self._wanted = owner, ranks, wanted
        self.blocks = 0
        self.lane: Lane | None = None

    def take(self, operation: str) -> None:
        """Reserve the thread blocks, unless that is done. Collective.

        It takes at most a third of those that are left, because later budgets need some, but at least as many as a
        chunk needs.

        Raises:
            ContextError: on some rank fewer are left than one chunk needs. If so, all ranks raise it.
        """
        if self.blocks:
            return
        owner, least, taken = self._owner, 2 * len(self._ranks) + 2, 0
        with owner.accounts:  # a thread that makes another context must not offer the same
            free = _room(owner.device) - owner.blocks_taken
            offer = 0 if free < least else max(least, min(self._wanted, free // 3))
            owner.blocks_taken += offer
        try:
            answers = owner.exchange(self._ranks, f"thread blocks of a context for {operation}", (offer, free))
            taken = min(theirs for theirs, _ in answers)
        finally:
            with owner.accounts:
                owner.blocks_taken -= offer - taken
        if not taken:
            ranks, left = len(self._ranks), min(theirs for _, theirs in answers)
            raise ContextError(
                f"a context of {ranks} ranks needs {least} thread blocks, and other contexts have left {left}"
            )
        self.blocks = taken

    def give_back(self) -> None:
        """Give the thread blocks back, on this rank, when all contexts are closed."""
        with self._owner.accounts:
            self._owner.blocks_taken -= self.blocks
        self.blocks = 0


def _generous(old: CollectiveContext | None, nbytes: int) -> int:
    """Return the bytes per rank of a context that is made for ``nbytes``: it holds twice what the old one does."""
    return max(_SMALLEST, nbytes, 2 * old.max_bytes_per_rank if old is not None else 0)


class Pool:
    """The context for one kind of call of one set of ranks, and outgrown ones that graphs still use.

    Args:
        limit: the most bytes per rank of a context; if None, the heap is the limit.
        timeout_s: deadline of waits, seconds; that of the job if None.
        budget: thread blocks of launches, and the lane, which other pools may share; its owner gives it back. If None,
            there is no limit, and launches must not be in flight beside those of other contexts.

    Attributes:
        context: for the next call; None as long as there was none.
        limit: as given; less when the heap has been full.
        problem: why the last :meth:`prepare` had no context; None if it had.
    """

    def __init__(
        self,
        owner: Runtime,
        ranks: Sequence[int],
        operation: str,
        *,
        limit: int | None = None,
        timeout_s: float | None = None,
        lamport_bytes: int | None = 0,
        budget: Budget | None = None,
        debug: Debug | None = None,
    ) -> None:
        self._owner, self._ranks, self._operation, self._timeout_s = owner, tuple(ranks), operation, timeout_s
        self._lamport_bytes = lamport_bytes
        self._budget, self._without_room = budget, False
        self._debug, self._call = debug, dict[str, Any]()
        self.limit = limit
        self.problem: str | None = None
        self.context: CollectiveContext | None = None
        self._kept: list[CollectiveContext] = []

    def holds(self, nbytes: int) -> bool:
        """Return whether there is a context for ``nbytes`` per rank."""
        return self.context is not None and nbytes <= self.context.max_bytes_per_rank

    def prepare(self, nbytes: int, call: Mapping[str, Any] | None = None) -> bool:
        """Make a context for ``nbytes`` per rank if needed; return whether there is one. Collective when it is made.

        ``call`` has the call's arguments that must be the same on all ranks, by name. The ranks compare them when they
        make a context, because they exchange its arguments anyway. Without ``limit`` and ``budget`` it returns true
        or raises.

        Raises:
            ContextError: it has to be made, and a CUDA graph is being captured.
            HeapExhaustedError: the heap is too small, and no limit was given. On all ranks; the context is as it was.
        """
        if self.holds(nbytes):
            return True
        if not self._without_room:
            too_large = self.limit is not None and nbytes > self.limit
            self.problem = "the symmetric heap has no room for it" if too_large else None
        if self.problem is not None:
            return False
        refuse(
            self._owner.device,
            self._operation,
            f"{nbytes} bytes per rank need a larger context, which cannot be made while a CUDA graph is captured; make "
            "one call of this size before",
        )
        self._call = {"operation": self._operation, **(call or {})}
        return self._make(nbytes)

    def _make(self, nbytes: int) -> bool:
        """Make a context for ``nbytes`` per rank; return False if the heap is too small for it."""
        if self._budget is not None:
            try:
                self._budget.take(self._operation)
            except ContextError as error:  # on all ranks
                self.problem, self._without_room = str(error), True
                return False
        try:
            self.context = self._larger(self.context, nbytes)
        except HeapExhaustedError:
            if self.limit is None:
                raise
            self.limit = nbytes - 1
            self.problem = "the symmetric heap has no room for it"
            return False
        return True

    def _larger(self, old: CollectiveContext | None, nbytes: int) -> CollectiveContext:
        """Make a context for ``nbytes`` or, if the heap has room, for twice the old capacity. It replaces the old one,
        unless a graph may use that."""
        size = old.max_bytes_per_rank if old is not None else 0
        generous = _generous(old, nbytes)
        if self.limit is not None:
            generous = max(nbytes, min(self.limit, generous))
        captured = old is not None and any(
            self._owner.exchange(self._ranks, f"{self._operation}: captured", old.captured)
        )
        if old is not None and not captured:
            old.close()
            self.context = None
        try:
            made = self._first_that_fits(generous, nbytes)
        except HeapExhaustedError:
            if old is not None and not captured:
                self.context = self._first_that_fits(size, size)
            raise
        if captured:
            self._kept.append(old)  # type: ignore[arg-type]
        return made

    def _first_that_fits(self, size: int, least: int) -> CollectiveContext:
        """Make a context for ``size`` bytes per rank or, if the heap is too small, for ``least``."""
        budget = self._budget
        try:
            with on(self._owner.device):
                made = CollectiveContext(
                    self._ranks,
                    max_bytes_per_rank=size,
                    lamport_bytes=self._lamport_bytes,
                    max_blocks=None if budget is None else budget.blocks,
                    timeout_s=self._timeout_s,
                    debug=self._debug,
                    _call=self._call,
                    _lane=None if budget is None else budget.lane,
                )
            if budget is not None:
                budget.lane = made.lane
            return made
        except HeapExhaustedError:  # on all ranks
            if size == least:
                raise
        return self._first_that_fits(least, least)

    def _all(self) -> Iterator[CollectiveContext]:
        yield from self._kept
        if self.context is not None:
            yield self.context

    @property
    def outgrown(self) -> bool:
        """Whether there are contexts that captured graphs may still use, beside :attr:`context`."""
        return bool(self._kept)

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of the waits of later calls."""
        self._timeout_s = timeout_s
        for context in self._all():
            context.set_timeout(timeout_s)

    def check(self) -> None:
        """Raise the errors of finished kernels, also of graphs that use an outgrown context."""
        for context in self._all():
            context.monitor.raise_if_expired()

    def give_up(self) -> None:
        """End the waits of its kernels when the process ends; from any thread."""
        for context in self._all():
            context.monitor.abort()

    def close(self) -> None:
        """Free the contexts. Collective."""
        for context in list(self._all()):
            context.close()
        self._kept, self.context = [], None


def pooled(
    spec: Collective, tensor: torch.Tensor, group: runtime.Group, operation: str = "", **given: Any
) -> CollectiveContext:
    """Return tdcoll's own context of a group for calls of a collective with such a tensor.

    Collective when it is made or grows.

    Args:
        operation: the name of the calls in messages, if it is not the collective's; they have a context of their own.
        given: more arguments that must be the same on all ranks; compared when the context is made or grows.

    Raises:
        NotInitializedError: before ``tdcoll.initialize()``.
        ContextError: it has to be made, and a CUDA graph is being captured.
        HeapExhaustedError: the heap is too small. On all ranks.
    """
    owner = runtime.current()
    ranks = owner.ranks_of(group)
    name = operation or spec.name
    pool: Pool | None = owner.contexts.get((name, ranks))
    if pool is None:
        pool = Pool(owner, ranks, name, lamport_bytes=spec.lamport_bytes)
        owner.contexts[name, ranks] = pool
    segment = spec.segment_bytes(strided_bytes(tensor), len(ranks))
    nbytes = spec.inbox(segment, len(ranks), owner.heap.nbytes)
    if not pool.holds(nbytes):
        facts = {"bytes": strided_bytes(tensor), "dtype": getattr(tensor, "dtype", None), **given}
        pool.prepare(nbytes, facts)
    assert pool.context is not None
    if pool.outgrown:
        pool.check()  # no one else looks at contexts that only captured graphs still use
    return pool.context


@dataclass(frozen=True)
class Prospect:
    """The facts of a context of tdcoll's own that isn't there yet, by the names that a context has for them."""

    job: Runtime
    topology: Topology
    capacity: int
    ll_bytes: int
    lamport_bytes: int
    stores: bool
    tuning: Table
    chunks: int = MAX_CHUNKS
    max_blocks: int = MAX_BLOCKS


def prospect(spec: Collective, segment: int, group: runtime.Group, operation: str = "") -> CollectiveContext | Prospect:
    """Return the context of :func:`pooled` for segments of so many bytes, or the facts of what it would make. Local."""
    job = runtime.current()
    ranks = job.ranks_of(group)
    nbytes = spec.inbox(segment, len(ranks), job.heap.nbytes)
    pool: Pool | None = job.contexts.get((operation or spec.name, ranks))
    if pool is not None and pool.holds(nbytes):
        assert pool.context is not None
        return pool.context
    topology, old = job.topology(ranks), None if pool is None else pool.context
    stores = all(job.heap.peer_base(topology.pes[rank]) for rank in topology.members[topology.node])
    sizes = sizes_for(spec, nbytes, topology, job.heap.nbytes, job.arena.info.free, old, stores)
    table = given.read(None).of(given.architectures(job.device), topology.ranks_per_node, topology.n_nodes)
    return Prospect(job, topology, sizes.capacity, sizes.ll_bytes, sizes.lamport_bytes, stores, table)


def sizes_for(
    spec: Collective,
    nbytes: int,
    topology: Topology,
    heap_bytes: int,
    free: int,
    old: CollectiveContext | None = None,
    stores: bool = True,
) -> ContextSizes:
    """Return the sizes of the context that :func:`pooled` makes for ``nbytes`` per rank.

    Args:
        heap_bytes, free: bytes of the symmetric heap, and those that are free. If no size fits, the last is returned.
        old: the context that the calls have outgrown.
        stores: whether the ranks of each node can store to each other's memory.
    """
    for size in dict.fromkeys((_generous(old, nbytes), nbytes)):
        sizes = context_sizes(
            topology, heap_bytes, stores=stores, free=free, max_bytes_per_rank=size, lamport_bytes=spec.lamport_bytes
        )
        if sizes.heap_bytes <= free:
            break
    return sizes


def strided_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor; 0 if it is no tensor, or has no strides."""
    return tensor.nbytes if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided else 0
