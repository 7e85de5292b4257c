# SPDX-License-Identifier: Apache-2.0
"""All schedules of a case that can differ, by dynamic partial-order reduction.

A *process* is a task or one part of a message; an *event* is one step of a process. Two events are
*dependent* if their order can change what either of them does. Executions that differ only in the
order of independent events are equivalent, and one of each class is enough.

The search runs a case again and again. After each execution it looks for pairs of dependent events
that nothing else orders, and plans an execution with the reverse order: source sets (Abdulla,
Aronis, Jonsson and Sagonas, POPL 2014), which refine Flanagan and Godefroid's persistent sets (POPL
2005). *Sleep sets* (Godefroid 1996) end an execution that can only repeat an earlier one.

A :class:`Footprint` has the memory that an event touches; :mod:`.recorder` fills it. If in
doubt, it calls two events dependent, because that costs executions only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tdcoll.base.errors import TdcollError

Cell = Hashable
"""Something that an event reads or writes.

An int is a byte of symmetric memory, as its owner or as others see it. A tuple that begins with an
int is ordinary memory of that PE, whose addresses are those of one execution only. A tuple that
begins with a text is an object of the machine.
"""


class RedundantExecution(BaseException):
    """Ends an execution that can only repeat an earlier one. No ``Exception``, because no case may
    handle it."""


@dataclass(slots=True)
class Footprint:
    """The cells that an event reads and writes, and those that it changes in a way that commutes
    (``adds``)."""

    reads: set[Cell] = field(default_factory=set)
    writes: set[Cell] = field(default_factory=set)
    adds: set[Cell] = field(default_factory=set)

    def depends_on(self, other: Footprint) -> bool:
        """Return whether the order of two events matters, because one writes the other's cells."""
        return not (
            self.writes.isdisjoint(other.writes)
            and self.writes.isdisjoint(other.reads)
            and self.writes.isdisjoint(other.adds)
            and self.reads.isdisjoint(other.writes)
            and self.reads.isdisjoint(other.adds)
            and self.adds.isdisjoint(other.writes)
            and self.adds.isdisjoint(other.reads)
        )

    def add_portable(self, other: Footprint) -> None:
        """Add what ``other`` has, in cells that mean the same in another execution."""
        self.reads.update(map(_portable, other.reads))
        self.writes.update(map(_portable, other.writes))
        # pages of ordinary memory, whose bytes are among the reads or writes
        self.adds.update(cell for cell in other.adds if not _is_ordinary(cell))


def _is_ordinary(cell: Cell) -> bool:
    return isinstance(cell, tuple) and isinstance(cell[0], int)


def _portable(cell: Cell) -> Cell:
    """Return all ordinary memory of a PE for a part of it."""
    return cell[:1] if isinstance(cell, tuple) and _is_ordinary(cell) else cell


@dataclass(slots=True, eq=False)
class ExecutionEvent:
    """One step of a process.

    Attributes:
        process: what took the step.
        node: which choice of the execution led to it.
        footprint: what it touched.
        conditions: of words that it has waited for, whether the wait would still end there.
        needs: events without which it could not have happened.
        number: its place among the events of the execution; -1 until it has ended.
        past: set of the events that happen before it, and itself: bit k is event k.
    """

    process: Hashable
    node: int
    footprint: Footprint = field(default_factory=Footprint)
    conditions: dict[Cell, Callable[[], bool]] = field(default_factory=dict)
    needs: set[ExecutionEvent] = field(default_factory=set)
    number: int = -1
    past: int = 0


class Log:
    """The events of one execution and their order."""

    def __init__(self) -> None:
        self.events: list[ExecutionEvent] = []
        self.races: list[tuple[ExecutionEvent, ExecutionEvent]] = []
        """Dependent events that nothing else orders, and whose order could be the reverse."""
        self.written: dict[Cell, int] = {}
        """The number of the last event that wrote to or added to a cell."""
        self.last: dict[Hashable, ExecutionEvent] = {}
        """The last event of each process."""
        self.node = 0
        self._open: list[ExecutionEvent] = []
        self._writers: dict[Cell, int] = {}  # sets of events, as in ExecutionEvent.past
        self._readers: dict[Cell, int] = {}  # since the last write
        self._adders: dict[Cell, int] = {}  # since the last write
        self._waiters: dict[
            Cell, list[ExecutionEvent]
        ] = {}  # that still depend on nothing written since
        self._floor = 0

    @property
    def current(self) -> ExecutionEvent | None:
        """The event that happens now; None between the steps of an execution."""
        return self._open[-1] if self._open else None

    @property
    def main(self) -> ExecutionEvent | None:
        """The step that happens now, inside which messages may arrive."""
        return self._open[0] if self._open else None

    def begin(self, process: Hashable) -> ExecutionEvent:
        """A step of ``process`` begins, perhaps inside another one's."""
        event = ExecutionEvent(process, self.node)
        self._open.append(event)
        return event

    def end(self) -> ExecutionEvent:
        """The present event ends."""
        event = self._open.pop()
        event.number = len(self.events)
        self.events.append(event)
        self._order(event)
        self.last[event.process] = event
        return event

    def separate(self) -> None:
        """Let all events so far happen before all later ones."""
        self._floor = (1 << len(self.events)) - 1

    def past_of(self, event: ExecutionEvent) -> int:
        """Return the set of events that happen before an open event, as far as it has come."""
        past = self._floor
        for each in self._before(event, self._dependent(event)):
            past |= each.past
        return past

    def _order(self, event: ExecutionEvent) -> None:
        """Find what happens before an event, and its races."""
        before = self._before(event, self._dependent(event))
        past = self._floor
        for each in before:
            past |= each.past
        event.past = past | 1 << event.number
        for each, is_required in before.items():
            bit = 1 << each.number
            if not is_required and not any(o.past & bit for o in before if o is not each):
                self.races.append((each, event))
        self._note(event)

    def _before(self, event: ExecutionEvent, dependent: int) -> dict[ExecutionEvent, bool]:
        """Return the events that come before ``event``, and whether it could not be otherwise."""
        before = dict.fromkeys(event.needs, True)
        last = self.last.get(event.process)
        if last is not None:
            before[last] = True
        for each in self._members(dependent & ~self._floor):
            before.setdefault(each, False)
        return before

    def _dependent(self, event: ExecutionEvent) -> int:
        """Return the set of earlier events on which an event depends."""
        touched = event.footprint
        writers = self._writers
        readers = self._readers
        adders = self._adders
        found = 0
        for cell in touched.reads:
            found |= writers.get(cell, 0) | adders.get(cell, 0)
        for cell in touched.adds:
            found |= writers.get(cell, 0) | readers.get(cell, 0)
        for cell in touched.writes:
            found |= writers.get(cell, 0) | readers.get(cell, 0) | adders.get(cell, 0)
            found |= self._spoiled(cell, event)
        return found

    def _note(self, event: ExecutionEvent) -> None:
        """Note what an event touched."""
        own = 1 << event.number
        touched = event.footprint
        for cell in touched.reads:
            self._readers[cell] = self._readers.get(cell, 0) | own
        for cell in touched.adds:
            self._adders[cell] = self._adders.get(cell, 0) | own
            self.written[cell] = event.number
        for cell in event.conditions:
            self._waiters.setdefault(cell, []).append(event)
        for cell in touched.writes:
            self._writers[cell] = own
            self._readers[cell] = 0
            self._adders[cell] = 0
            self.written[cell] = event.number
            spoiled = self._spoiled(cell, event)
            if spoiled:
                waiters = self._waiters[cell]
                self._waiters[cell] = [w for w in waiters if not spoiled >> w.number & 1]

    def _spoiled(self, cell: Cell, event: ExecutionEvent) -> int:
        """Return the set of earlier events whose waits would not end any more."""
        found = 0
        for waiter in self._waiters.get(cell, ()):
            if waiter is not event and not waiter.conditions[cell]():
                found |= 1 << waiter.number
        return found

    def _members(self, clock: int) -> Iterator[ExecutionEvent]:
        while clock:
            lowest = clock & -clock
            yield self.events[lowest.bit_length() - 1]
            clock ^= lowest


@dataclass(slots=True, eq=False)
class _Node:
    """A state in which the search chooses.

    Attributes:
        enabled: processes that can take a step.
        chosen: the one that takes it in the present execution.
        wanted: processes whose step has to be tried here.
        asleep: processes whose step need not be tried here, with what it touches.
        touched: what the present step touched, in portable cells.
    """

    enabled: tuple[Hashable, ...]
    chosen: Hashable
    asleep: dict[Hashable, Footprint]
    wanted: dict[Hashable, None] = field(default_factory=dict)
    touched: Footprint = field(default_factory=Footprint)


class Schedule:
    """Chooses as a failure's ``schedule`` says, for a replay.

    Args:
        choices: place of the chosen process among the enabled ones, by step; the first one where
            nothing is given.

    Attributes:
        log: of the present execution.
        watched: symmetric words that programs have waited for in any execution, as offsets.
    """

    def __init__(self, choices: Mapping[int, int]) -> None:
        self.log = Log()
        self.watched: dict[int, None] = {}
        self._choices = choices

    def choose(self, enabled: Sequence[Hashable]) -> int:
        """Return the place of the process that takes the next step."""
        place = self._choices.get(self.log.node, 0)
        if place >= len(enabled):
            raise _diverged(self.log.node)
        return place

    def stepped(self) -> None:
        """Called when the chosen step is over."""
        self.log.node += 1


class Search(Schedule):
    """Chooses so that one execution of each class is run, over all executions.

    Run the case, call :meth:`advance`, and repeat while that returns True.
    """

    def __init__(self) -> None:
        super().__init__({})
        self._nodes: list[_Node] = []

    def choose(self, enabled: Sequence[Hashable]) -> int:
        depth = self.log.node
        if depth == len(self._nodes):
            asleep = self._asleep()
            awake = [process for process in enabled if process not in asleep]
            if not awake:
                raise RedundantExecution
            node = _Node(tuple(enabled), awake[0], asleep)
            node.wanted[node.chosen] = None
            self._nodes.append(node)
        chosen = self._nodes[depth].chosen
        if chosen not in enabled:
            raise _diverged(depth)
        return enabled.index(chosen)

    def stepped(self) -> None:
        depth = self.log.node
        super().stepped()
        node = self._nodes[depth]
        node.touched = Footprint()
        for event in reversed(self.log.events):
            if event.node != depth:
                break
            node.touched.add_portable(event.footprint)
            node.touched.reads.update(event.conditions)
            if event.process in node.asleep:
                raise RedundantExecution  # a message has arrived inside the step

    def _asleep(self) -> dict[Hashable, Footprint]:
        """Return the processes that are still asleep behind the last step. A process wakes up if
        the step depends on it."""
        if not self._nodes:
            return {}
        last = self._nodes[-1]
        return {
            process: footprint
            for process, footprint in last.asleep.items()
            if process != last.chosen and not footprint.depends_on(last.touched)
        }

    @property
    def choices(self) -> dict[int, int]:
        """The present execution's schedule, as :class:`Schedule` takes it."""
        found = {}
        for depth, node in enumerate(self._nodes):
            place = node.enabled.index(node.chosen)
            if place:
                found[depth] = place
        return found

    def advance(self) -> bool:
        """Prepare the next execution; return False if there is none."""
        if self.log.node < len(self._nodes):
            raise _diverged(self.log.node)
        for race in self.log.races:
            self._plan(*race)
        self.log = Log()
        while self._nodes:
            node = self._nodes[-1]
            node.asleep[node.chosen] = node.touched
            left = [process for process in node.wanted if process not in node.asleep]
            if left:
                node.chosen = left[0]
                return True
            self._nodes.pop()
        return False

    def _plan(self, first: ExecutionEvent, second: ExecutionEvent) -> None:
        """Plan an execution in which ``second`` comes before ``first``."""
        if first.node >= len(self._nodes):
            return
        bit = 1 << first.number
        between = self.log.events[first.number + 1 : second.number]
        # If `first` is put off, all that isn't behind it can happen instead, and then `second`.
        instead = [event for event in between if not event.past & bit]
        instead.append(second)
        clock = 0
        for event in instead:
            clock |= 1 << event.number
        initials = {
            event.process: None
            for event in instead
            if not event.past & clock & ~(1 << event.number)
        }
        node = self._nodes[first.node]
        if not initials.keys().isdisjoint(node.wanted):
            return
        possible = [process for process in node.enabled if process in initials]
        node.wanted.update(dict.fromkeys(possible[:1] or node.enabled))


def _diverged(step: int) -> TdcollError:
    return TdcollError(
        f"the case took another course before step {step} than in the execution that it repeats. "
        "A case must do the same whenever its schedule is the same: no clocks, no random numbers "
        "without a seed, nothing that an earlier execution has left behind"
    )
