# SPDX-License-Identifier: Apache-2.0
"""Clocks: what happens before a point of a program, for :mod:`.races`.

An *event* is a stretch of one thread of control that no release, fence or barrier interrupts, or one
message in flight. A *clock* is a set of events, an ``int`` with one bit for each. Fidge (1988) and
Mattern (1989) write such a set as a vector, one count for each thread of control. Here every put is
one more, because its bytes land in no order with what its program does next, so the vectors would be
as long and mostly zero. Union and membership are single operations of Python's integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tdcoll.simulator.tasks import Task

NO_BARRIER = (
    "syncthreads() between these accesses of the block and the release by one of its threads"
)
NARROW = 'scope "sys" for both the release and the acquire: "gpu" orders nothing for another PE'
NO_RELEASE = "a fence() (a quiet(), a release) between that access and the signal"
NO_ACQUIRE = 'an acquire: the load that saw the signal is relaxed (ld_acquire(..., "sys"), a wait, or a fence)'
DESCRIPTOR = (
    "wait_descriptor_stores() and then syncthreads(): stores through descriptors are asynchronous"
)
LANE = "syncthreads() behind the wait: only the thread that waited has the order"


NOTHING_LOST: Mapping[str, int] = MappingProxyType({})


class Events:
    """Gives out events."""

    def __init__(self) -> None:
        self.count = 0

    def new(self) -> int:
        """Return a clock of one new event."""
        self.count += 1
        return 1 << self.count


@dataclass(slots=True, frozen=True)
class Carried:
    """The clocks that a written word gives to those who read it.

    Attributes:
        pe: of the writer.
        local: clock for an acquire on the same PE.
        system: clock for an acquire on another.
        lost: clocks that the word would have carried, by what is missing.
    """

    pe: int
    local: int
    system: int
    lost: Mapping[str, int]

    def seen_from(self, pe: int, *, system: bool) -> int:
        """Return the clock that an acquire load on ``pe`` gets, at ``system`` scope or the GPU's."""
        if pe == self.pe:
            return self.local
        return self.system if system else 0

    def joined(self, other: Carried) -> Carried:
        """Return what a word tells whose value was made of two, by atomics or several additions."""
        same = self.pe == other.pe
        lost = dict(self.lost)
        for reason, clock in other.lost.items():
            lost[reason] = lost.get(reason, 0) | clock
        return Carried(
            other.pe,
            other.local | (self.local if same else self.system),
            other.system | self.system,
            lost,
        )


@dataclass(slots=True, eq=False)
class Thread:
    """The order that one thread of a block, or a block as a whole, has.

    Attributes:
        known: clock of what happens before its next access, its own earlier ones included.
        fenced: what was known at its last fence. A relaxed store behind it carries that.
        ordered: messages to each PE that a fence puts before its next ones there.
        pending: what relaxed loads have seen. A fence, or the end of the launch, makes it known.
        event: the present event, or 0 if no access has begun one.
        accesses: those of the present event, by what and where they are.
    """

    known: int
    fenced: int
    ordered: dict[int, int] = field(default_factory=dict)
    pending: int = 0
    event: int = 0
    accesses: dict[Any, Any] = field(default_factory=dict)

    def take_fences_of(self, other: Thread) -> None:
        """Let a fence of ``other`` count as one of this."""
        self.fenced |= other.fenced
        for pe, clock in other.ordered.items():
            self.ordered[pe] = self.ordered.get(pe, 0) | clock


NOTHING = Carried(0, 0, 0, NOTHING_LOST)


class Actor(Thread):
    """A task: a host, a stream, or a block, whose threads may act for themselves.

    Attributes:
        barred: what each of the block's threads knows: all that the block knew at its last barrier,
            and what all have acquired since.
        own: its own events.
        sent: its messages.
        asynchronous: its stores through descriptors that it has not waited for.
        order: of its present store, and whether that is at system scope.
        lanes: threads that have acted for themselves since the last barrier.
        lost: what the words that it acquired did not carry, by what is missing.
    """

    __slots__ = ("asynchronous", "barred", "lanes", "lost", "order", "own", "sent", "task")

    def __init__(self, task: Task, clock: int, lost: Mapping[str, int] = NOTHING_LOST) -> None:
        super().__init__(clock, clock)
        self.task = task
        self.barred = clock
        self.own = 0
        self.sent = 0
        self.asynchronous = 0
        self.order = "", True
        self.lanes: dict[int, Thread] = {}
        self.lost = dict(lost)

    def thread(self) -> Thread:
        """Return what acts now: a thread inside a branch on ``tid``, otherwise the whole block."""
        lane = self.task.lane
        if lane is None or lane < 0:
            return self
        found = self.lanes.get(lane)
        if found is None:
            found = self.lanes[lane] = Thread(self.barred, self.fenced, dict(self.ordered))
            found.pending = self.pending
        return found

    def event_of(self, thread: Thread, events: Events) -> int:
        """Return the present event of ``thread``."""
        if not thread.event:
            thread.event = events.new()
            thread.accesses.clear()
            thread.known |= thread.event
            self.own |= thread.event
        return thread.event

    def released(self, thread: Thread) -> int:
        """Return what ``thread`` may release. Of a block, no thread has the order of what others have
        done since the last barrier."""
        return self.barred if thread is self and self.task.is_program else thread.known

    def learn(self, thread: Thread, clock: int) -> None:
        """Let all that ``clock`` has happen before what ``thread`` does next."""
        thread.known |= clock
        if thread is self:
            self.barred |= clock

    def barrier(self) -> None:
        """All threads get the order of each, because a barrier releases and acquires for all."""
        for lane in self.lanes.values():
            self.known |= lane.known
            self.pending |= lane.pending
            self.take_fences_of(lane)
        self.lanes.clear()
        self.barred = self.known
        self.event = 0

    def fence(self, thread: Thread) -> None:
        """A fence at system scope, by ``thread``."""
        self.learn(thread, thread.pending)
        thread.pending = 0
        thread.fenced |= self.released(thread)
        thread.event = 0

    def release(self, thread: Thread, *, system: bool) -> Carried:
        """Return what a release carries, for other PEs only if it is at ``system`` scope."""
        clock = self.released(thread)
        everything = self.known | self.own
        lost = {NO_BARRIER: everything & ~clock}
        if not system:
            lost[NARROW] = clock & ~thread.fenced
        thread.event = 0
        return Carried(self.task.pe, clock, clock if system else thread.fenced, lost)

    def relaxed(self, thread: Thread) -> Carried:
        """Return what a relaxed store carries: the last fence, because the store itself orders
        nothing."""
        lost = {NO_RELEASE: (self.known | self.own) & ~thread.fenced}
        return Carried(self.task.pe, thread.fenced, thread.fenced, lost)

    def acquire(self, thread: Thread, carried: Carried, *, system: bool = True) -> None:
        """An acquire load has read a word that carries this."""
        clock = carried.seen_from(self.task.pe, system=system)
        self.learn(thread, clock)
        self._lose(carried)
        if carried.system & ~clock:
            self.lost[NARROW] = self.lost.get(NARROW, 0) | carried.system & ~clock

    def see(self, thread: Thread, carried: Carried) -> None:
        """A relaxed load has read a word that carries this, known only when a fence follows."""
        thread.pending |= carried.seen_from(self.task.pe, system=True)
        self._lose(carried)

    def _lose(self, carried: Carried) -> None:
        for reason, clock in carried.lost.items():
            self.lost[reason] = self.lost.get(reason, 0) | clock

    def end(self) -> Carried:
        """Return what happens before all that follows the task's end."""
        self.barrier()
        self.known |= self.pending | self.asynchronous
        return Carried(self.task.pe, self.known, self.known, self.lost)
