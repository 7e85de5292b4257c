# SPDX-License-Identifier: Apache-2.0
"""How programs wait for signals and for flagged words, and give up when a deadline expires."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.runtime.interpreter as triton_interpreter

from tdcoll.runtime.simulator.monitor import Monitor
from tdcoll.spec import constants as c

if TYPE_CHECKING:
    from tdcoll.runtime.simulator.machine import Machine

__all__ = ["COMPARE", "Waits"]

COMPARE: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
    ("==", lambda seen, wanted: seen == wanted),
    ("!=", lambda seen, wanted: seen != wanted),
    (">", lambda seen, wanted: seen > wanted),
    ("<=", lambda seen, wanted: seen <= wanted),
    ("<", lambda seen, wanted: seen < wanted),
    (">=", lambda seen, wanted: seen >= wanted),
)
"""Sign and meaning of each ``CMP_*``, by value; of ints, and of arrays element by element."""

_GROWING = (c.CMP_GT.value, c.CMP_GE.value)
_FLAG_SHIFT = np.uint64(32)

_interpreter = triton_interpreter._interpreter

Array = np.ndarray[Any, Any]


class Waits:
    """The waits of programs on ``machine``."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def until(self, address: int, compare: int, value: int) -> int:
        """Wait without a deadline until the signal at ``address`` compares true; its value."""
        machine, (_, true) = self._machine, COMPARE[compare]
        memory, scheduler = machine.memory, machine.scheduler
        seen = 0

        def ready() -> bool:
            nonlocal seen
            seen = memory.word(address)
            return true(seen, value)

        machine.counts[machine.program.pe].waits += 1
        what = f"{memory.describe(address)} {COMPARE[compare][0]} {value}"
        machine.timed(
            f"wait {what}",
            lambda: scheduler.wait(ready, lambda: f"waits for {what}, is {memory.word(address)}", [address]),
        )
        return seen

    def all(self, signals: Sequence[tuple[int, int, int]], compare: int, value: int, monitor: Monitor) -> bool:
        """Wait until every signal compares true with ``value``; False when the monitor's deadline expires.

        Args:
            signals: address, peer and index of each; the latter two for the record.
        """
        sign, true = COMPARE[compare]
        return self._wait_for(
            np.array([address for address, _, _ in signals], np.uint64),
            [(peer, index) for _, peer, index in signals],
            lambda words: true(words, np.uint64(value)),
            monitor,
            # Each thread polls its own signal, and is content once it has seen the value. Signals that only grow
            # may as well be looked at all together.
            enough=np.all if compare in _GROWING else np.any,
            what=lambda address, word: f"{self._machine.memory.describe(address)} {sign} {value}, is {word}",
            name=f"wait {len(signals)} signal(s) {sign} {value}",
            expected=value,
        )

    def holds(self, address: int, compare: int, value: int) -> bool:
        """Return whether the signal at ``address`` compares true now. A schedule point, since it may be in a loop."""
        machine, (sign, true) = self._machine, COMPARE[compare]
        what = f"{machine.memory.describe(address)} {sign} {value}"
        machine.scheduler.poll(address, lambda: f"asks for {what}, is {machine.memory.word(address)}")
        return bool(true(machine.memory.word(address), value))

    def word(
        self, address: int, kind: Any, compare: int, value: int, thread: tuple[int, int], monitor: Monitor
    ) -> bool:
        """Wait until the integer at ``address`` compares true with ``value``; return False when a deadline expires.

        Args:
            address: of any memory, on any PE; a multiple of the integer's size.
            kind: the integer's numpy type.
            thread: peer and index, for the record.
        """
        machine, (sign, true) = self._machine, COMPARE[compare]
        pe, unseen = machine.program.pe, machine.pointers.unseen
        if address % kind.itemsize:
            raise ValueError(f"word must be a multiple of {kind.itemsize}, got {address:#x}")
        at, everything = np.array([address], np.uint64), np.ones(1, bool)
        machine.pointers.before_load(at, everything, polls=True, symmetric=machine.memory.owns(address))

        def read(addresses: Array) -> Array:
            places = np.full(addresses.size, address, np.uint64)
            with unseen.as_seen_by(pe, address, address + kind.itemsize):
                return _interpreter.load(places, np.ones(places.size, bool), np.zeros(places.size, kind), kind)

        return self._wait_for(
            at,
            [thread],
            lambda words: true(words, kind.type(value)),
            monitor,
            enough=np.all if compare in _GROWING else np.any,
            what=lambda place, seen: f"{machine.memory.describe(place)} {sign} {value}, is {seen}",
            name=f"wait {machine.memory.describe(address)} {sign} {value}",
            expected=value,
            read=read,
        )

    def any(self, signals: Sequence[tuple[int, int]], compare: int, value: int, monitor: Monitor) -> int:
        """Wait until one of the signals compares true with ``value``.

        Args:
            signals: address and index of each.

        Returns:
            The index of the first that does; -1 if the monitor's deadline expires or there are no signals.
        """
        if not signals:
            return -1
        machine, (sign, true) = self._machine, COMPARE[compare]
        memory, scheduler = machine.memory, machine.scheduler

        def found() -> int:
            return next((index for address, index in signals if true(memory.word(address), value)), -1)

        def describe() -> str:
            seen = (f"{memory.describe(address)} is {memory.word(address)}" for address, _ in signals)
            return f"waits for one {sign} {value}: {', '.join(seen)}"

        def wait() -> int:
            keys: list[Hashable] = [address for address, _ in signals]
            keys.append(("monitor", monitor.address))
            scheduler.wait(lambda: found() >= 0 or monitor.aborted, describe, keys, monitor.timeout_ns)
            return found()

        machine.counts[machine.program.pe].waits += 1
        index = int(machine.timed(f"wait for one of {len(signals)} signal(s) {sign} {value}", wait))
        if index < 0:
            address, first = signals[0]
            monitor.give_up(first, first, value, memory.word(address), value)
            scheduler.notify(("monitor", monitor.address))
        return index

    def flagged(
        self, words: Array, threads: Sequence[tuple[int, int]], flag: int, monitor: Monitor
    ) -> tuple[Array, Array]:
        """Wait until the last 32 of the 128 bits of every word are ``flag``, or the monitor's deadline expires.

        Args:
            words: ``[n]`` uint64, addresses.
            threads: peer and index of each, for the record.

        Returns:
            ``[n, 2]`` uint64, the halves of each word that had the flag, and ``[n]``, which had.
        """
        memory = self._machine.memory
        seen, arrived = np.zeros((words.size, 2), np.uint64), np.zeros(words.size, bool)

        def take(places: Array, halves: Array) -> None:
            # The flag is in the upper half, which is written last (PointerAccess.store_flagged), and so read first.
            seen[places, 1], seen[places, 0], arrived[places] = halves, memory.words(words[places]), True

        self._wait_for(
            words,
            threads,
            lambda halves: halves >> _FLAG_SHIFT == flag,
            monitor,
            enough=np.all,
            what=lambda address, half: f"{memory.describe(address)} flagged {flag}, is {half >> 32}",
            name=f"wait {words.size} word(s) flagged {flag}",
            expected=flag,
            nbytes=16,
            read=lambda addresses: memory.words(addresses + np.uint64(8)),
            shift=32,
            take=take,
        )
        return seen, arrived

    def words(
        self, words: Array, threads: Sequence[tuple[int, int]], absent: int, call: int, monitor: Monitor
    ) -> tuple[Array, Array]:
        """Wait until none of the four 32-bit parts of every word is ``absent``, or the monitor's deadline expires.

        Arguments and results as for :meth:`flagged`; ``call`` is for the record.
        """
        memory = self._machine.memory
        seen, arrived = np.zeros((words.size, 2), np.uint64), np.zeros(words.size, bool)

        def halves(addresses: Array) -> Array:
            return np.stack((memory.words(addresses), memory.words(addresses + np.uint64(8))), axis=-1)

        def parts_there(addresses: Array) -> Array:
            return np.count_nonzero(halves(addresses).view(np.uint32) != absent, axis=-1).astype(np.uint64)

        def take(places: Array, _: Array) -> None:
            seen[places], arrived[places] = halves(words[places]), True  # what has come stays

        self._wait_for(
            words,
            threads,
            lambda there: there == 4,
            monitor,
            enough=np.all,
            what=lambda address, there: f"{memory.describe(address)}, of which {there} of 4 parts are there",
            name=f"wait {words.size} word(s) of call {call}",
            expected=4,
            epoch=call,
            nbytes=16,
            read=parts_there,
            take=take,
        )
        return seen, arrived

    def _wait_for(
        self,
        words: Array,
        threads: Sequence[tuple[int, int]],
        true: Callable[[Array], Array],
        monitor: Monitor,
        *,
        enough: Callable[[Array], Any],
        what: Callable[[int, int], str],
        name: str,
        expected: int,
        epoch: int | None = None,
        nbytes: int = 8,
        read: Callable[[Array], Array] | None = None,
        shift: int = 0,
        take: Callable[[Array, Array], None] = lambda places, seen: None,
    ) -> bool:
        """Every element is a thread that polls its own word until ``true``, and then takes it: ``take`` is called with
        the places of such threads and what they saw. ``read`` gives what they see; the words, if None. A thread
        looks at ``nbytes`` from its word on."""
        machine = self._machine
        scheduler, read = machine.scheduler, read or machine.memory.words
        machine.counts[machine.program.pe].waits += 1
        left = np.arange(words.size)

        def look() -> None:
            nonlocal left
            seen = read(words[left])
            satisfied = true(seen)
            take(left[satisfied], seen[satisfied])
            left = left[~satisfied]

        def describe() -> str:
            seen = read(words[left])
            missing = np.flatnonzero(~true(seen))
            return "waits for " + ", ".join(what(int(words[left[i]]), int(seen[i])) for i in missing)

        def worth_a_look() -> bool:
            return bool(enough(true(read(words[left])))) or monitor.aborted

        def wait() -> bool:
            deadline_ns = scheduler.now_ns + monitor.timeout_ns
            while True:
                places = words[left].tolist()
                keys: list[Hashable] = [(place & ~7) + half for place in places for half in range(0, nbytes, 8)]
                keys.append(("monitor", monitor.address))
                in_time = scheduler.wait(worth_a_look, describe, keys, deadline_ns - scheduler.now_ns)
                look()
                if not left.size:
                    return True
                if monitor.aborted or not in_time:
                    return False

        satisfied = not words.size or machine.timed(name, wait)
        if not satisfied:
            peer, index = threads[left[0]]
            seen = int(read(words[left[:1]])[0]) >> shift
            monitor.give_up(peer, index, expected, seen, expected if epoch is None else epoch)
            scheduler.notify(("monitor", monitor.address))
        return satisfied
