# SPDX-License-Identifier: Apache-2.0
"""PTX's memory model as constraints: does a small program have an execution with some outcome?

Sources: the PTX ISA's chapter "Memory Consistency Model", whose sections are named below, and Lustig
et al., "A Formal Analysis of the NVIDIA PTX Memory Consistency Model" (ASPLOS 2019).

An execution says which write each read takes its value from (``rf``), which of two writes to the
same place is the later one (``co``), and how ``fence.sc`` are ordered (``sc``). The solver looks for
one that no axiom forbids. The other relations follow from these three. Where they are variables as
well, only their lower bound is a constraint: for example, a transitive relation has to contain some
edges. That is enough, because more pairs in it only forbid more executions, so the solver has no
use for more pairs than it needs.

Left out: proxies other than the generic one, clusters, asynchronous copies, and mixed sizes. The
axioms say nothing about programs with races of mixed sizes, so a word is either always accessed
as a whole or always in parts here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import z3

SCOPES = ("cta", "gpu", "sys")
READ, WRITE, ATOMIC, REDUCTION = "read", "write", "atomic", "reduction"
FENCE, BARRIER, OTHER = "fence", "barrier", "other"
STRONG = {"relaxed", "acquire", "release", "acq_rel", "sc"}


@dataclass(frozen=True)
class Thread:
    """A thread, its thread block and its GPU."""

    name: str
    block: str
    gpu: str


@dataclass(frozen=True, eq=False)
class Event:
    """An operation of a thread.

    Attributes:
        text: for people, such as ``"st.release.sys [flag], 1"``.
        thread: None for the initial writes.
        place: its place in program order. Operations of one instruction have the same place, and
            nothing orders them among each other.
        kind: READ, WRITE, ATOMIC and REDUCTION (each a read and a write), FENCE, BARRIER or OTHER.
        cells: the names of the cells of memory that it accesses as a whole.
        value: what it writes to each of them.
        order: ``"weak"``, or one of :data:`STRONG`.
        scope: of a strong operation.
        barrier: the number of the barrier that the thread has come to; threads of a block meet at
            those with the same number.
    """

    text: str
    thread: Thread | None
    place: int
    kind: str
    cells: tuple[str, ...] = ()
    value: int = 0
    order: str = "weak"
    scope: str = "sys"
    barrier: int = 0

    @property
    def reads(self) -> bool:
        return self.kind == READ or self.is_atomic

    @property
    def writes(self) -> bool:
        return self.kind == WRITE or self.is_atomic

    @property
    def is_atomic(self) -> bool:
        return self.kind in (ATOMIC, REDUCTION)

    @property
    def accesses(self) -> bool:
        """Whether it is a memory operation."""
        return self.reads or self.writes

    @property
    def strong(self) -> bool:
        return self.order in STRONG

    def includes(self, other: Event) -> bool:
        """Whether its scope includes the thread of another operation."""
        assert self.thread is not None
        assert other.thread is not None
        if self.scope == "cta":
            return self.thread.block == other.thread.block
        return self.scope == "sys" or self.thread.gpu == other.thread.gpu


def before(one: Event, other: Event) -> bool:
    """Program order (8.9.1)."""
    return one.thread is not None and one.thread == other.thread and one.place < other.place


def overlap(one: Event, other: Event) -> bool:
    """Whether two memory operations overlap (8.2.1), here always completely."""
    return bool(set(one.cells) & set(other.cells))


def morally_strong(one: Event, other: Event) -> bool:
    """8.7. The initial writes aren't, since they precede everything in causality order."""
    if one.thread is None or other.thread is None or one is other:
        return False
    if one.accesses and other.accesses and set(one.cells) != set(other.cells):
        return False
    if one.thread == other.thread:
        return True
    return one.strong and other.strong and one.includes(other) and other.includes(one)


def _meet(one: Event, other: Event) -> bool:
    """Whether two threads of a block meet at the same barrier."""
    if one.kind != BARRIER or other.kind != BARRIER or one.barrier != other.barrier:
        return False
    assert one.thread is not None
    assert other.thread is not None
    return one.thread.block == other.thread.block and one.thread != other.thread


Pattern = tuple[Event, Event]


def _releases(event: Event) -> bool:
    return event.order in ("release", "acq_rel", "sc")


def _acquires(event: Event) -> bool:
    return event.order in ("acquire", "acq_rel", "sc")


def release_patterns(events: Sequence[Event]) -> list[Pattern]:
    """8.8: ``(first operation, write)`` of each release pattern."""
    found = [(one, one) for one in events if one.writes and _releases(one)]
    for first, write in itertools.permutations(events, 2):
        if write.writes and write.strong and _releases(first) and before(first, write):
            if first.kind == FENCE or (first.accesses and first.cells == write.cells):
                found.append((first, write))
    return found


def acquire_patterns(events: Sequence[Event]) -> list[Pattern]:
    """8.8: ``(read, last operation)`` of each acquire pattern, of which the read of a reduction is
    none."""
    reads = [one for one in events if one.reads and one.kind != REDUCTION]
    found = [(one, one) for one in reads if _acquires(one)]
    for read, last in itertools.product(reads, events):
        if read.strong and _acquires(last) and before(read, last):
            if last.kind == FENCE or (last.accesses and last.cells == read.cells):
                found.append((read, last))
    return found


@dataclass
class Program:
    """A program, of which executions are looked for.

    Attributes:
        events: of all threads.
        synchronizes: pairs of operations that synchronize by other means, such as the end of a
            launch and the start of the next one.
        depends: pairs ``(read, write)``: what is written follows from what is read.
    """

    events: list[Event]
    synchronizes: list[tuple[Event, Event]] = field(default_factory=list)
    depends: list[tuple[Event, Event]] = field(default_factory=list)

    @cached_property
    def initial(self) -> dict[str, Event]:
        """The initial write of each cell, of 0 (8.2.6)."""
        cells = sorted({cell for event in self.events for cell in event.cells})
        return {cell: Event(f"initially 0 [{cell}]", None, 0, WRITE, (cell,)) for cell in cells}


@dataclass(frozen=True)
class Execution:
    """An execution that the model allows: the write that each read takes each cell from."""

    program: Program
    sources: dict[tuple[Event, str], Event]

    def __str__(self) -> str:
        lines = []
        threads = dict.fromkeys(event.thread for event in self.program.events)
        for thread in threads:
            assert thread is not None
            lines.append(f"{thread.name} (block {thread.block}, GPU {thread.gpu})")
            for event in self.program.events:
                if event.thread != thread:
                    continue
                lines.append(f"    {event.text}")
                for cell in event.cells:
                    if event.reads:
                        source = self.sources[event, cell]
                        where = f" of {source.thread.name}" if source.thread else ""
                        lines.append(f"        reads {source.value} from {source.text}{where}")
        return "\n".join(lines)


Truth = Any
"""A bool, or a formula of the solver's."""

Relation = dict[tuple[Event, Event], z3.BoolRef]
"""The pairs that it may have, and whether it has them."""


def _all(*conditions: Truth) -> Truth:
    """Return the conjunction; a bool where that is known."""
    open_ones = [one for one in conditions if one is not True]
    if any(one is False for one in open_ones):
        return False
    return z3.And(*open_ones) if open_ones else True


def _any(*conditions: Truth) -> Truth:
    """Return the disjunction; a bool where that is known."""
    open_ones = [one for one in conditions if one is not False]
    if any(one is True for one in open_ones):
        return True
    return z3.Or(*open_ones) if open_ones else False


class _Search:
    """The relations of an execution, and their constraints."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.solver = z3.Solver()
        self.events = [*program.initial.values(), *program.events]
        self.reads = [event for event in self.events if event.reads]
        self.writes = [event for event in self.events if event.writes]
        self.rf = {
            (write, read, cell): z3.Bool(f"rf {place}")
            for place, (write, read, cell) in enumerate(self._sources())
        }
        self.co = self._relation("co", self._overlapping_writes())
        fences = [one for one in self.events if one.kind == FENCE and one.order == "sc"]
        pairs = itertools.permutations(fences, 2)
        self.sc = self._relation("sc", [pair for pair in pairs if morally_strong(*pair)])
        self._choose()
        self.obs = self._observation()
        self._static = self._static_order()
        self._synchronizes = self._synchronization()
        self._chains = self._closure("chain", list(self._synchronizes), self._continues)
        self._axioms()

    def _sources(self) -> Iterator[tuple[Event, Event, str]]:
        for read in self.reads:
            for cell in read.cells:
                for write in self.writes:
                    if cell in write.cells and write is not read:
                        yield write, read, cell

    def _overlapping_writes(self) -> list[tuple[Event, Event]]:
        pairs = itertools.permutations(self.writes, 2)
        return [(one, other) for one, other in pairs if overlap(one, other)]

    def _relation(self, name: str, pairs: Iterable[tuple[Event, Event]]) -> Relation:
        """Return a relation that has only pairs of these, which the solver chooses."""
        return {pair: z3.Bool(f"{name} {place}") for place, pair in enumerate(pairs)}

    def _require(self, condition: Truth, consequence: Truth) -> None:
        """Add: if the condition holds, so does the consequence."""
        if condition is False or consequence is True:
            return
        self.solver.add(z3.Implies(condition, consequence))

    def _closure(
        self, name: str, nodes: Sequence[Any], edge: Callable[[Any, Any], Truth]
    ) -> dict[tuple[Any, Any], z3.BoolRef]:
        """Return a transitive relation of these nodes that contains the edges."""
        pairs = list(itertools.product(nodes, repeat=2))
        found = {pair: z3.Bool(f"{name} {place}") for place, pair in enumerate(pairs)}
        for one, other in pairs:
            self._require(edge(one, other), found[one, other])
        for one, two, three in itertools.product(nodes, repeat=3):
            self._require(_all(found[one, two], found[two, three]), found[one, three])
        return found

    def _forbid_cycles(
        self, name: str, events: Sequence[Event], edge: Callable[[Event, Event], Truth]
    ) -> None:
        closure = self._closure(name, events, edge)
        for event in events:
            self.solver.add(z3.Not(closure[event, event]))

    def reads_from(self, write: Event, read: Event) -> Truth:
        """Return whether a read takes any cell from a write."""
        return _any(*(self.rf.get((write, read, cell), False) for cell in read.cells))

    # ------------------------------------------------------------------ what is chosen

    def _choose(self) -> None:
        add = self.solver.add
        for read in self.reads:
            for cell in read.cells:
                sources = [
                    source for (_, by, at), source in self.rf.items() if by is read and at == cell
                ]
                add(z3.PbEq([(source, 1) for source in sources], 1))
        for (one, other), is_earlier in self.co.items():
            add(z3.Not(z3.And(is_earlier, self.co[other, one])))
            if one.thread is None and other.thread is not None:
                add(is_earlier)
            if morally_strong(one, other):  # 8.9.6
                add(z3.Or(is_earlier, self.co[other, one]))
            for third in self.writes:
                if (other, third) in self.co and (one, third) in self.co:
                    both = z3.And(is_earlier, self.co[other, third])
                    add(z3.Implies(both, self.co[one, third]))
        for (one, other), is_earlier in self.sc.items():  # 8.9.3
            add(is_earlier != self.sc[other, one])
            for third, _ in self.sc:
                if (other, third) in self.sc and (one, third) in self.sc:
                    both = z3.And(is_earlier, self.sc[other, third])
                    add(z3.Implies(both, self.sc[one, third]))

    # ------------------------------------------------------------------ what follows

    def _observation(self) -> Relation:
        """Return the observation order (8.9.2)."""
        pairs = itertools.product(self.writes, self.reads)
        found = self._relation("obs", [pair for pair in pairs if overlap(*pair)])
        for (write, read), sees in found.items():
            if morally_strong(write, read):
                self._require(self.reads_from(write, read), sees)
            for atomic in self.events:
                if atomic.is_atomic and (write, atomic) in found and (atomic, read) in found:
                    self._require(_all(found[write, atomic], found[atomic, read]), sees)
        return found

    def _static_order(self) -> set[tuple[Event, Event]]:
        """Return the part of base causality order (8.9.5) that is the same in all executions:
        program order, barriers (8.9.4), initial writes, and what the program says."""
        found = set(self.program.synchronizes)
        for one, other in itertools.permutations(self.events, 2):
            is_initial = one.thread is None and other.thread is not None
            if is_initial or before(one, other) or _meet(one, other):
                found.add((one, other))
        for middle, one, other in itertools.product(self.events, repeat=3):  # Warshall
            if (one, middle) in found and (middle, other) in found:
                found.add((one, other))
        return found

    def _synchronization(self) -> dict[tuple[Event, Event], Truth]:
        """Return which operations synchronize (8.9.4), besides barriers."""
        found: dict[tuple[Event, Event], Truth] = dict(self.sc)
        for (first, write), (read, last) in itertools.product(
            release_patterns(self.events), acquire_patterns(self.events)
        ):
            if morally_strong(first, last) and (write, read) in self.obs:
                known = found.get((first, last), False)
                found[first, last] = _any(known, self.obs[write, read])
        return found

    def _continues(self, one: tuple[Event, Event], other: tuple[Event, Event]) -> Truth:
        """Return whether a pair that synchronizes leads to another one, or is that one."""
        if one == other:
            return self._synchronizes[one]
        if one[1] is other[0] or (one[1], other[0]) in self._static:
            return _all(self._synchronizes[one], self._synchronizes[other])
        return False

    def base(self, one: Event, other: Event) -> Truth:
        """Return base causality order (8.9.5)."""
        if (one, other) in self._static:
            return True
        chains = [
            chain
            for ((first, _), (_, last)), chain in self._chains.items()
            if (one is first or (one, first) in self._static)
            and (last is other or (last, other) in self._static)
        ]
        return _any(*chains)

    def cause(self, one: Event, other: Event) -> Truth:
        """Return causality order (8.9.5) of two overlapping operations."""
        through = [
            _all(self.obs.get((one, middle), False), self.base(middle, other))
            for middle in self.reads
            if overlap(middle, other)
        ]
        return _any(self.base(one, other), *through)

    def follows(self, read: Event, write: Event) -> Truth:
        """Return communication order from a read to a write (8.9.7), often called from-read."""
        return _any(
            *(
                _all(self.reads_from(other, read), self.co[other, write])
                for other in self.writes
                if (other, write) in self.co and overlap(other, read)
            )
        )

    # ------------------------------------------------------------------ axioms

    def _axioms(self) -> None:
        for (one, other), is_earlier in self.co.items():  # 8.10.1
            self._require(self.cause(one, other), is_earlier)
        for (one, other), is_earlier in self.sc.items():  # 8.10.2
            self._require(self.base(one, other), is_earlier)
        self._atomicity()
        accesses = [event for event in self.program.events if event.accesses]
        # Without a dependency or an atomic, nothing leads from a read to a write.
        if self.program.depends or any(event.is_atomic for event in accesses):
            self._forbid_cycles("flow", accesses, self._flow)  # 8.10.4
        for cells in sorted({event.cells for event in accesses}):  # 8.10.5
            at_location = [event for event in accesses if event.cells == cells]
            self._forbid_cycles(f"location {cells}", at_location, self._at_location)
        for (write, read, _), source in self.rf.items():  # 8.10.6
            self._require(self.cause(read, write), z3.Not(source))
            for later in self.writes:
                if (write, later) in self.co and overlap(later, read):
                    passed = _all(self.cause(later, read), self.co[write, later])
                    self._require(passed, z3.Not(source))

    def _atomicity(self) -> None:
        """8.10.3."""
        for read, write in itertools.product(self.reads, self.writes):
            if not (overlap(read, write) and morally_strong(read, write)):
                continue
            earlier = self.follows(read, write)
            self._require(_all(self.reads_from(write, read), earlier), False)
            if read.is_atomic:
                self._require(_all(earlier, self.co[write, read]), False)

    def _flow(self, one: Event, other: Event) -> Truth:
        """Return whether a value goes from one operation to another."""
        if (one, other) in self.program.depends:
            return True
        return self.reads_from(one, other)

    def _at_location(self, one: Event, other: Event) -> Truth:
        """Return program order, or morally strong communication (8.9.7), at one location."""
        if before(one, other):
            return True
        if not morally_strong(one, other):
            return False
        seen = self.reads_from(one, other) if one.writes and other.reads else False
        follows = self.follows(one, other) if one.reads and other.writes else False
        return _any(seen, self.co.get((one, other), False), follows)


Outcome = dict[tuple[Event, str], int]
"""The value that reads take from cells."""


def execution(program: Program, outcome: Outcome) -> Execution | None:
    """Return an execution with this outcome; None if the model forbids it.

    Raises:
        ValueError: no write of the program can give a read its value, so the question is wrong.
    """
    search = _Search(program)
    for (read, cell), value in outcome.items():
        sources = [
            source
            for (write, reader, at), source in search.rf.items()
            if reader is read and at == cell and write.value == value
        ]
        if not sources:
            raise ValueError(f"{read.text}: no write of {value} to {cell}")
        search.solver.add(z3.Or(*sources))
    verdict = search.solver.check()
    if verdict == z3.unsat:
        return None
    assert verdict == z3.sat, search.solver.reason_unknown()
    model = search.solver.model()
    sources = {
        (read, cell): write
        for (write, read, cell), source in search.rf.items()
        if z3.is_true(model.eval(source, model_completion=True))
    }
    return Execution(program, sources)
