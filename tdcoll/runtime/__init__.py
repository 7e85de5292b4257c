# SPDX-License-Identifier: Apache-2.0
"""Joining a job: ranks, nodes, PEs, and the symmetric heap.

:func:`tdcoll.job.lifecycle.initialize` builds one :class:`Runtime` per process and installs it
here; an in-process simulation installs a resolver instead, because every PE has its own runtime.
The rest of tdcoll calls :func:`current`.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch

from tdcoll.base.errors import (
    NotInitializedError,
    NotSymmetricError,
    RankMismatchError,
    TdcollError,
)
from tdcoll.runtime.control import ControlPlane, require_equal
from tdcoll.runtime.heap import Arena, SymmetricHeap, agree
from tdcoll.runtime.store import StoreLost
from tdcoll.runtime.topology import Topology

Group = Any
"""A ``torch.distributed.ProcessGroup``, a one-dimensional ``DeviceMesh``, a sequence of global
ranks, or None for all ranks of the job."""


_PAUSE_S = 0.005


def group_of(group: Group) -> Group:
    """Return the ProcessGroup of a DeviceMesh; anything else as it is."""
    mesh = sys.modules.get("torch.distributed.device_mesh")
    if mesh is None or not isinstance(group, mesh.DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(
            f"group must be a DeviceMesh of one dimension, as mesh[name] is; got one of {list(group.mesh.shape)}"
        )
    if group.get_coordinate() is None:
        raise ValueError(f"group {group.mesh.tolist()} does not contain this process")
    return group.get_group()


@dataclass
class Runtime:
    """A job, seen from one PE.

    Attributes:
        rank: global rank, which is also the PE.
        heap: the transport's symmetric block.
        control: host-side exchanges with other ranks.
        node_ids: for each global rank, a name of its node.
        simulated: True when kernels run in the simulator.
        timeout_s: default deadline of waits inside kernels, seconds.
    """

    rank: int
    world_size: int
    heap: SymmetricHeap
    control: ControlPlane
    node_ids: tuple[object, ...]
    simulated: bool
    timeout_s: float
    arena: Arena = field(init=False)
    contexts: dict[Any, Any] = field(init=False, default_factory=dict)
    """Contexts that tdcoll made for the drop-in calls; closed by ``finalize``."""
    kept_alive: dict[int, Any] = field(init=False, default_factory=dict)
    """Open contexts and monitors, by id, kept until ``finalize`` because kernels and graphs may
    still use them."""
    monitors: WeakValueDictionary[int, Any] = field(init=False, default_factory=WeakValueDictionary)
    """Monitors by the addresses of their words, which bounded waits accept."""
    blocks_taken: int = field(init=False, default=0)
    """Thread blocks that tdcoll's own contexts may have in flight at once, all launches
    together."""
    failed: bool = field(init=False, default=False)
    """A wait has expired: no collective operation is tried any more, because peers may be gone."""
    closed: bool = field(init=False, default=False)
    """``finalize`` has been called, or the process is a forked child of a rank."""
    forked_from: int | None = field(init=False, default=None)
    """Process of the rank that a forked child has inherited the job from; None in the rank
    itself."""
    of_backend: bool = field(init=False, default=False)
    """The torch.distributed backend has joined the job, and leaves it with its default group or the
    last of all."""
    groups: int = field(init=False, default=0)
    """The backend's process groups of all ranks."""
    exchanging: dict[int, tuple[float, str, Sequence[int], float]] = field(
        init=False, default_factory=dict
    )
    """Exchanges that go on, by thread: since when (``time.monotonic``), tag, ranks, deadline in
    seconds."""
    budget_lock: threading.Lock = field(init=False, repr=False, default_factory=threading.Lock)
    """Held when a thread changes ``blocks_taken``; never while it waits for other ranks."""
    _all_ranks: tuple[int, ...] = field(init=False, repr=False, default=())
    _given: threading.local = field(init=False, repr=False, default_factory=threading.local)

    def __post_init__(self) -> None:
        self.arena = Arena(self.heap.nbytes)
        self._all_ranks = tuple(range(self.world_size))

    def living_monitors(self) -> list[Any]:
        """Return the monitors that exist now, from any thread, while others make more."""
        monitors = [reference() for reference in self.monitors.valuerefs()]
        return [monitor for monitor in monitors if monitor is not None]

    @property
    def device(self) -> torch.device:
        """The device of symmetric tensors."""
        return self.heap.device

    @property
    def why_closed(self) -> str:
        """Why a call on a job that is ``closed`` is refused, as text."""
        if self.forked_from is None:
            return "made before tdcoll.finalize(), which has ended that job"
        return (
            f"this process was forked from rank {self.rank} (process {self.forked_from}) and is no rank itself: it "
            "shares that rank's memory and connections. Make the call in the rank; docs/distributed.md#forked-children "
            "says what a child may do"
        )

    # ------------------------------------------------------------------ groups

    def ranks_of(self, group: Group) -> tuple[int, ...]:
        """Return the global ranks of ``group``, in group-rank order.

        Raises:
            TypeError: ``group`` is none of the accepted kinds.
            ValueError: ranks out of range or repeated, or this process is not a member.
        """
        if group is None:
            return self._all_ranks
        group = group_of(group)
        if isinstance(group, torch.distributed.ProcessGroup):
            ranks = tuple(torch.distributed.get_process_group_ranks(group))
        elif isinstance(group, Sequence) and all(hasattr(rank, "__index__") for rank in group):
            ranks = tuple(rank.__index__() for rank in group)
        else:
            raise TypeError(
                "group must be a ProcessGroup that this rank belongs to, a DeviceMesh, a sequence of global ranks, or "
                f"None; got {group!r}"
            )
        if (
            not ranks
            or len(set(ranks)) != len(ranks)
            or not all(0 <= r < self.world_size for r in ranks)
        ):
            raise ValueError(
                f"group must name distinct ranks in 0..{self.world_size - 1}, at least one; got {list(ranks)}"
            )
        if self.rank not in ranks:
            raise ValueError(
                f"group {list(ranks)} does not contain this process, which is rank {self.rank}"
            )
        return ranks

    def topology(self, group: Group = None) -> Topology:
        """Return the topology of ``group``, seen from this rank."""
        ranks = self.ranks_of(group)
        return Topology.of(ranks.index(self.rank), ranks, [self.node_ids[rank] for rank in ranks])

    # ------------------------------------------------------------------ symmetric memory

    def exchange(self, ranks: Sequence[int], tag: str, value: Any = None) -> list[Any]:
        """Return ``value`` of every rank of ``ranks``, over the control plane.

        Raises:
            NotInitializedError: after ``finalize``.
            CollectiveTimeout: a rank does not come, within the job's deadline or that of
                :meth:`through`.
            TdcollError: a wait has expired before.
        """
        if self.closed:
            raise NotInitializedError(f"{tag}: {self.why_closed}")
        if self.failed:
            raise TdcollError(
                f"{tag}: a wait has expired in this process, so other ranks may be gone and nothing collective is "
                "tried any more; end the job"
            )
        given = vars(self._given)
        control = given.get("control", self.control)
        timeout_s = given.get("timeout_s")
        who = given.get("who", "")
        if "during" in given:
            tag = f"{given['during']} ({tag})"
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        self.exchanging[threading.get_ident()] = time.monotonic(), tag, ranks, limit_s
        try:
            return control.all_gather(ranks, f"{tag}{who and f' ({who})'}", value, timeout_s)
        except RankMismatchError:
            raise
        except TdcollError:  # if a rank comes late, the exchange is over: the numbering is lost
            self.failed = True
            raise
        finally:
            self.exchanging.pop(threading.get_ident(), None)

    @contextlib.contextmanager
    def with_control_plane(
        self, control: ControlPlane, timeout_s: float | None = None, who: str = ""
    ) -> Iterator[None]:
        """Let exchanges that this thread makes inside go through ``control``, a part of the job's
        control plane.

        Exchanges of one part have an order, which must be the same on all ranks. If threads
        exchange values beside each other, each needs its own part, because exchanges of different
        parts have no order.

        Args:
            timeout_s: how long they wait, seconds; None for what holds outside, also for ``who``.
            who: part of each exchange's tag. If tags differ, ranks raise
                :class:`RankMismatchError`.
        """
        given = vars(self._given)
        before = dict(vars(self._given))
        given["control"] = control
        if timeout_s is not None:
            given.update(timeout_s=timeout_s, who=who)
        try:
            yield
        finally:
            given.clear()
            given.update(before)

    @contextlib.contextmanager
    def during(self, operation: str) -> Iterator[None]:
        """Let exchanges that this thread makes inside name ``operation``, which the user has called.
        The outermost one counts."""
        given = vars(self._given)
        outermost = "during" not in given
        given.setdefault("during", operation)
        try:
            yield
        finally:
            if outermost:
                del given["during"]

    def agree(self, ranks: Sequence[int], what: str, value: Any) -> None:
        """Raise :class:`RankMismatchError` on every rank of ``ranks`` unless all of them pass the
        same value."""
        require_equal(self.exchange(ranks, what, value), ranks, what)

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, *, group: Group = None, name: str = "tensor"
    ) -> torch.Tensor:
        """``-> [*shape]`` symmetric tensor, uninitialised. Collective over ``group``: see
        :func:`tdcoll.empty`."""
        shape = tuple(shape)
        ranks = self.ranks_of(group)
        nbytes = math.prod(shape) * dtype.itemsize
        offset = self._place(ranks, nbytes, name)
        # it takes no memory in the heap, because PyTorch gives such a tensor no address
        if offset is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        self.heap.label(offset, nbytes, name, dtype.itemsize, ranks)
        return self.heap.view(offset, nbytes).view(dtype).view(shape)

    def _place(self, ranks: Sequence[int], nbytes: int, name: str) -> int | None:
        """Take ``nbytes`` at an offset that is free on all of ``ranks``, and return it; None for no
        bytes. Collective.

        A rank holds the place that it proposes, because another thread may take memory for other
        ranks meanwhile, before this one here and after it on another rank. If all propose the same
        place, all have it; otherwise they move to the lowest place that is free on all, which one
        of them may find taken, and propose again.
        """
        offset = self.arena.hold(nbytes, ranks) if nbytes else None
        try:
            while True:
                answers = self.exchange(
                    ranks, f"allocate {name}", (nbytes, offset, self.arena.free(offset))
                )
                if any(theirs != nbytes for theirs, _, _ in answers):
                    sizes = ", ".join(
                        f"rank {r}: {a[0]}" for r, a in zip(ranks, answers, strict=True)
                    )
                    raise RankMismatchError(
                        f"all ranks must ask for the same number of bytes of {name}; got {sizes}"
                    )
                if nbytes == 0 or (
                    offset is not None and all(theirs == offset for _, theirs, _ in answers)
                ):
                    return offset
                wanted = agree([free for _, _, free in answers], nbytes, self.heap.nbytes)
                moved = self.arena.hold(nbytes, ranks, offset, wanted)
                # if two allocations want each other's places, one of them pauses for longer
                if moved != wanted:
                    time.sleep(random.uniform(0, _PAUSE_S))
                offset = moved
        except BaseException:
            if offset is not None:
                self.arena.release(offset)
            raise

    def release(self, tensor: torch.Tensor) -> None:
        """Free a tensor of :meth:`allocate`. Collective over the ranks that allocated it; waits
        until all are here."""
        if tensor.nbytes == 0:
            return
        offset = self.offset_of(tensor, "tensor")
        owners = self.arena.owners_of(offset)
        if owners is None:
            raise NotSymmetricError(
                f"tensor must be the tensor that tdcoll.empty() returned, not a view into it (offset {offset}) "
                "and not one that is freed already"
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.agree(owners, "free: offset of the tensor", offset)
        self.undo_allocation(tensor)

    def undo_allocation(self, tensor: torch.Tensor) -> None:
        """Undo :meth:`allocate` on this rank alone, if the memory was never used and never will
        be."""
        if tensor.nbytes:
            offset = self.offset_of(tensor, "tensor")
            self.arena.release(offset)
            self.heap.unlabel(offset)

    def offset_of(self, tensor: torch.Tensor, argument: str) -> int:
        """Return the offset of ``tensor``'s first byte in the symmetric heap (0 if it has no
        bytes).

        ``argument`` names the tensor in the error.

        Raises:
            NotSymmetricError: the tensor does not lie in the symmetric heap.
        """
        if tensor.nbytes == 0:
            return 0
        first = tensor.data_ptr()
        if tensor.device != self.device or not (
            self.heap.base <= first <= first + tensor.nbytes <= self.heap.base + self.heap.nbytes
        ):
            raise NotSymmetricError(
                f"{argument} must lie in the symmetric heap (made by tdcoll.empty() on {self.device}); got an "
                f"ordinary tensor of {tensor.nbytes} bytes on {tensor.device}"
            )
        return first - self.heap.base


_runtime: Runtime | None = None
_inherited: Runtime | None = None
"""In a forked child, the runtime of the rank that it was forked from, until the child calls
``finalize``."""
_resolver: Callable[[], Runtime | None] | None = None


def current_or_none() -> Runtime | None:
    """Return the runtime of the calling PE, or None outside a job and in a forked child."""
    return _resolver() if _resolver is not None else _runtime


def inherited() -> Runtime | None:
    """Return the runtime that this forked child has inherited, or None. It has facts, and refuses
    all calls."""
    return _inherited


def current() -> Runtime:
    """Return the runtime of the calling PE; raise ``NotInitializedError`` if there is none."""
    runtime = current_or_none()
    if runtime is None:
        if _inherited is not None:
            raise NotInitializedError(_inherited.why_closed)
        raise NotInitializedError(
            "call tdcoll.initialize() first, on every rank; after tdcoll.finalize() call it again"
        )
    return runtime


def facts() -> Runtime:
    """Return the runtime that has ranks, sizes and the topology, also in a forked child; raise if
    there is none."""
    return _inherited if _inherited is not None else current()


@contextlib.contextmanager
def failing_with_the_store() -> Iterator[None]:
    """Mark this PE's job as failed if the store is lost inside, because leaving must not use the
    store again."""
    try:
        yield
    except StoreLost:
        job = current_or_none()
        if job is not None:
            job.failed = True
        raise


def install(runtime: Runtime | None) -> None:
    """Make ``runtime`` this process's runtime; None removes it. A forked child forgets what it has
    inherited."""
    global _runtime, _inherited
    _runtime = runtime
    _inherited = None


_rank_process = os.getpid()


def _in_child() -> None:
    """Leave the job to the rank: its kernels' signals, its exchanges and its memory are those of
    the parent."""
    global _runtime, _inherited, _rank_process
    parent = _rank_process
    _rank_process = os.getpid()
    if _runtime is not None:
        _inherited = _runtime
        _runtime = None
        _inherited.closed = True
        _inherited.forked_from = parent
        _inherited.heap.abort()


os.register_at_fork(after_in_child=_in_child)


def install_resolver(resolver: Callable[[], Runtime | None] | None) -> None:
    """Let ``resolver`` return the calling PE's runtime, for in-process simulations; None removes
    it."""
    global _resolver
    _resolver = resolver
