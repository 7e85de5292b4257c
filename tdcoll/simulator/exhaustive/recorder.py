# SPDX-License-Identifier: Apache-2.0
"""Notes the memory that each step of an execution touches, and the steps that it needs, for
:mod:`.search`.

These steps depend on each other:

- **Memory.** Loads, stores, atomics, transfers, copies, signals, and waits for words, by bytes; two
  accesses are dependent if one of them writes. A store of a program to its own PE's memory is one
  write for the PE's programs and another, when it lands, for the other PEs. Accesses to more than
  4,096 bytes count for whole pages of 256.
- **Waits** are steps that are possible when their condition holds. A wait needs the writes that
  make its condition true, so there is no other order of the two. A program that loads the same
  words in the same line as before, none of which has been written since, waits for one of them to
  be written; if nothing else can go on, it goes on all the same.
- **Messages.** Each part of a message is a step of its own, behind the step that sent it and the
  messages that a fence puts before it. ``fence`` and ``quiet`` are about what their program has
  sent, and what others have sent before; not about what others send at the same time, because no
  order of that is certain.
- **Hosts and launches.** If a task waits for an exchange, a launch, a stream or a barrier, it needs
  all steps that have contributed. Hosts touch symmetric memory by PyTorch's operators, which
  :mod:`tdcoll.simulator.hosts` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np

from tdcoll.simulator.exhaustive.search import Cell, ExecutionEvent, Log, Schedule
from tdcoll.simulator.memory import Memory, read_word, write_word
from tdcoll.simulator.shadow import Array
from tdcoll.simulator.tasks import Task

OWNER = 0
OTHERS = 1
BOTH = (OWNER, OTHERS)
"""Views of symmetric memory: that of its own PE's programs, and that of all others."""

_PAGE = 256
_LARGE = 4096


class Recorder:
    """Notes accesses of the present event."""

    def __init__(self, schedule: Schedule, memory: Memory) -> None:
        self.schedule = schedule
        self.memory = memory
        self._addresses: Array = np.zeros(0, np.uint64)  # of the watched words
        self._values: Array = np.zeros(0, np.uint64)
        self._words: dict[int, tuple[ExecutionEvent | None, int]] = {}
        """Last writer of a watched word that has changed, and its value before."""
        self.processes: dict[Task, Hashable] = {}
        """Names of tasks, the same in every execution."""
        self._ignored: list[tuple[int, int]] = []

    @property
    def log(self) -> Log:
        return self.schedule.log

    def ignore(self, begin: int, nbytes: int) -> None:
        """Take accesses inside ``nbytes`` bytes for independent, because the user says so."""
        self._ignored.append((begin, begin + nbytes))

    def begin(self, process: Hashable) -> ExecutionEvent:
        """A step begins; see :meth:`.Log.begin`."""
        self._look()
        return self.log.begin(process)

    def end(self) -> ExecutionEvent:
        """A step ends."""
        self._look()
        return self.log.end()

    def touch(self, cells: str, begin: int, end: int, pe: int, views: Sequence[int] = BOTH) -> None:
        """Note that bytes ``[begin, end)`` are touched for ``pe``; ``cells``: ``"reads"`` or
        ``"writes"``."""
        event = self.log.current
        if event is None or begin == end:
            return
        if any(first <= begin and end <= last for first, last in self._ignored):
            return
        symmetric = self.memory.owns(begin)
        first = begin
        if symmetric:
            first -= self.memory.base
        last = first + end - begin
        kept: set[Cell] = getattr(event.footprint, cells)
        pages = range(first // _PAGE, (last - 1) // _PAGE + 1)
        large = last - first > _LARGE
        by_page = kept if large else event.footprint.adds
        if symmetric:
            by_page.update(("page", page, view) for page in pages for view in views)
            if not large:
                found = {2 * place + view for place in range(first, last) for view in views}
                kept.update(found - event.conditions.keys() if cells == "reads" else found)
        else:
            by_page.update((pe, "page", page) for page in pages)
            if not large:
                kept.update((pe, place) for place in range(first, last))

    def view_of(self, address: int, pe: int) -> tuple[int, ...]:
        """Return the view that programs of ``pe`` have of an address."""
        if self.memory.owns(address) and self.memory.pe_of(address) != pe:
            return (OTHERS,)
        return (OWNER,)

    def read(self, begin: int, end: int, pe: int) -> None:
        """A program of ``pe`` reads these bytes."""
        self.touch("reads", begin, end, pe, self.view_of(begin, pe))

    def read_object(self, *cell: Hashable) -> None:
        """An object of the machine is read."""
        if self.log.current is not None:
            self.log.current.footprint.reads.add(cell)

    def add_to(self, *cell: Hashable) -> None:
        """An object of the machine changes in a way that commutes."""
        if self.log.current is not None:
            self.log.current.footprint.adds.add(cell)

    def write_object(self, *cell: Hashable) -> None:
        """An object of the machine is written."""
        if self.log.current is not None:
            self.log.current.footprint.writes.add(cell)

    def need(self, events: Iterable[ExecutionEvent]) -> None:
        """The present event could not happen without ``events``."""
        present = self.log.current
        if present is not None:
            present.needs.update(event for event in events if event.number >= 0)

    def need_all_of(self, tasks: Iterable[Task]) -> None:
        """The present event could not happen before these tasks have ended."""
        last = self.log.last
        self.need(last[self.processes[task]] for task in tasks if self.processes[task] in last)

    # ------------------------------------------------------------------ words that are waited for

    def watch(self, keys: Sequence[Hashable]) -> None:
        """Follow the words with these addresses from now on, because a program waits for them."""
        for key in keys:
            if isinstance(key, int) and self.memory.owns(key):
                self.schedule.watched[key - self.memory.base] = None

    def _look(self) -> None:
        """Find the watched words that have changed."""
        present = self.log.current
        watched = self.schedule.watched
        known = self._addresses.size
        if known < len(watched):
            more = np.array([*watched][known:], np.uint64) + np.uint64(self.memory.base)
            self._addresses = np.concatenate((self._addresses, more))
            self._values = np.concatenate((self._values, self.memory.words(more)))
        if not known:
            return
        now = self.memory.words(self._addresses)
        for place in np.flatnonzero(now != self._values).tolist():
            address = int(self._addresses[place])
            self._words[address] = present, int(self._values[place])
        self._values = now

    def depend_on_condition(
        self, addresses: Array, nbytes: int, pe: int, holds: Callable[[], bool]
    ) -> None:
        """The present event depends on later writes to these words only if ``holds`` is false
        behind them."""
        event = self.log.current
        if event is None:
            return
        for address in addresses.tolist():
            (view,) = self.view_of(address, pe)
            if self.memory.owns(address):
                first = address - self.memory.base
                cells = range(2 * first + view, 2 * (first + nbytes) + view, 2)
                event.conditions.update(dict.fromkeys(cells, holds))
            else:
                self.read(address, address + nbytes, pe)

    def waited(self, addresses: Array, nbytes: int, true: Callable[[Array], Array]) -> None:
        """The present event has waited until all these words were ``true``: it needs the writes
        without which one would not be."""
        self._look()
        needed = []
        for address in addresses.tolist():
            words = self._known_words(address, nbytes)
            for writer in {writer for writer, _ in words.values() if writer is not None}:
                if not self._true_without(writer, words, address, true):
                    needed.append(writer)
        self.need(needed)

    def _known_words(
        self, address: int, nbytes: int
    ) -> dict[int, tuple[ExecutionEvent | None, int]]:
        """Return last writer and earlier value of the words that hold ``nbytes`` at an address."""
        found = {}
        for word in range(address & ~7, address + nbytes, 8):
            known = self._words.get(word)
            if known is not None:
                found[word] = known
        return found

    def _true_without(
        self,
        writer: ExecutionEvent,
        words: dict[int, tuple[ExecutionEvent | None, int]],
        address: int,
        true: Callable[[Array], Array],
    ) -> bool:
        present = {word: read_word(word) for word in words}
        for word, (by, before) in words.items():
            if by is writer:
                write_word(word, before)
        try:
            return bool(true(np.array([address], np.uint64)).all())
        finally:
            for word, value in present.items():
                write_word(word, value)
