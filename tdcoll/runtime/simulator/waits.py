# SPDX-License-Identifier: Apache-2.0
"""How programs wait for signals and for words, and give up when a deadline expires."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import triton.runtime.interpreter as triton_interpreter

from tdcoll.runtime.simulator.machine import Machine
from tdcoll.runtime.simulator.monitor import Monitor
from tdcoll.runtime.simulator.pointers import PointerAccess
from tdcoll.spec import constants as c

__all__ = ["flagged", "holds", "one_of", "signals", "until", "word", "words"]

_COMPARE: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
    ("==", lambda seen, wanted: seen == wanted),
    ("!=", lambda seen, wanted: seen != wanted),
    (">", lambda seen, wanted: seen > wanted),
    ("<=", lambda seen, wanted: seen <= wanted),
    ("<", lambda seen, wanted: seen < wanted),
    (">=", lambda seen, wanted: seen >= wanted),
)
"""Sign and meaning of each ``CMP_*``, by value; of ints, and of arrays element by element."""

_GROWING = (c.CMP_GT.value, c.CMP_GE.value)

Array = np.ndarray[Any, Any]
Threads = Sequence[tuple[int, int]]
"""Peer and index of each thread, for the record of a wait that expires."""


def until(machine: Machine, address: int, compare: int, value: int) -> int:
    """Wait without a deadline until the signal at ``address`` compares true; its value."""
    seen: list[int] = []
    _wait_for_signals(machine, [address], compare, value, take=lambda places, words: seen.extend(words.tolist()))
    return seen[0]


def signals(
    machine: Machine, addresses: Sequence[int], threads: Threads, compare: int, value: int, monitor: Monitor
) -> bool:
    """Wait until every signal compares true with ``value``; False when the monitor's deadline expires."""
    # Each thread polls its own signal, and is content once it has seen the value. Signals that only grow may as well
    # be looked at all together.
    enough = np.all if compare in _GROWING else np.any
    given: dict[str, Any] = {"enough": enough, "monitor": monitor, "threads": threads, "expected": value}
    return not _wait_for_signals(machine, addresses, compare, value, **given).size


def one_of(
    machine: Machine, addresses: Sequence[int], threads: Threads, compare: int, value: int, monitor: Monitor
) -> int:
    """Wait until one of the signals compares true with ``value``.

    Returns:
        The place of the first that does; -1 if the monitor's deadline expires or there are no signals.
    """
    given: dict[str, Any] = {"one": True, "monitor": monitor, "threads": threads, "expected": value}
    left = _wait_for_signals(machine, addresses, compare, value, **given)
    content = np.setdiff1d(np.arange(len(addresses)), left)
    return int(content[0]) if content.size else -1


def _wait_for_signals(machine: Machine, addresses: Sequence[int], compare: int, value: int, **given: Any) -> Array:
    """Wait for signals as :func:`_wait` does, which takes the rest of the arguments."""
    (sign, true), memory = _COMPARE[compare], machine.memory
    what = f"{len(addresses)} signal(s)" if "monitor" in given else memory.describe(addresses[0])
    return _wait(
        machine,
        f"wait {what} {sign} {value}",
        np.array(addresses, np.uint64),
        read=memory.words,
        true=lambda words: true(words, np.uint64(value)),
        missing=lambda address, word: f"{memory.describe(address)} {sign} {value}, is {word}",
        **given,
    )


def holds(machine: Machine, address: int, compare: int, value: int) -> bool:
    """Return whether the signal at ``address`` compares true now. A schedule point, since it may be in a loop."""
    (sign, true), memory = _COMPARE[compare], machine.memory
    machine.scheduler.poll(
        address, lambda: f"asks for {memory.describe(address)} {sign} {value}, is {memory.word(address)}"
    )
    return bool(true(memory.word(address), value))


def word(
    machine: Machine, address: int, kind: Any, compare: int, value: int, thread: tuple[int, int], monitor: Monitor
) -> bool:
    """Wait until the integer at ``address`` compares true with ``value``; return False when a deadline expires.

    Args:
        address: of any memory, on any PE; a multiple of the integer's size.
        kind: the integer's numpy type.
        thread: peer and index, for the record.
    """
    (sign, true), memory, pe = _COMPARE[compare], machine.memory, machine.program.pe
    if address % kind.itemsize:
        raise ValueError(f"word must be a multiple of {kind.itemsize}, got {address:#x}")
    at, everything = np.array([address], np.uint64), np.ones(1, bool)
    PointerAccess(machine).before_load(at, everything, polls=True, symmetric=memory.owns(address))

    def read(addresses: Array) -> Array:
        mask, other = np.ones(addresses.size, bool), np.zeros(addresses.size, kind)
        with machine.unseen.as_seen_by(pe, address, address + kind.itemsize):
            return triton_interpreter._interpreter.load(addresses, mask, other, kind)

    left = _wait(
        machine,
        f"wait {memory.describe(address)} {sign} {value}",
        at,
        read=read,
        true=lambda words: true(words, kind.type(value)),
        missing=lambda place, seen: f"{memory.describe(place)} {sign} {value}, is {seen}",
        monitor=monitor,
        threads=[thread],
        expected=value,
    )
    return not left.size


def flagged(machine: Machine, addresses: Array, threads: Threads, flag: int, monitor: Monitor) -> tuple[Array, Array]:
    """Wait until the last 32 of the 128 bits of every word are ``flag``, or the monitor's deadline expires.

    Args:
        addresses: ``[n]`` uint64, of the words.

    Returns:
        ``[n, 4]`` uint32, the parts of each word that had the flag, and ``[n]``, which had.
    """
    return _wait_for_words(
        machine,
        f"wait {addresses.size} word(s) flagged {flag}",
        addresses,
        true=lambda parts: parts[:, 3] == flag,
        shown=lambda parts: int(parts[3]),
        missing=lambda address, seen: f"{machine.memory.describe(address)} flagged {flag}, is {seen}",
        monitor=monitor,
        threads=threads,
        expected=flag,
    )


def words(
    machine: Machine, addresses: Array, threads: Threads, absent: int, call: int, monitor: Monitor
) -> tuple[Array, Array]:
    """Wait until none of the four 32-bit parts of every word is ``absent``, or the monitor's deadline expires.

    Arguments and results as for :func:`flagged`; ``call`` is for the record.
    """
    return _wait_for_words(
        machine,
        f"wait {addresses.size} word(s) of call {call}",
        addresses,
        true=lambda parts: (parts != absent).all(axis=1),
        shown=lambda parts: int(np.count_nonzero(parts != absent)),
        missing=lambda address, seen: f"{machine.memory.describe(address)}, of which {seen} of 4 parts are there",
        monitor=monitor,
        threads=threads,
        expected=4,
        epoch=call,
    )


def _wait_for_words(machine: Machine, name: str, addresses: Array, **given: Any) -> tuple[Array, Array]:
    memory = machine.memory
    seen, arrived = np.zeros((addresses.size, 4), np.uint32), np.zeros(addresses.size, bool)

    def read(addresses: Array) -> Array:
        # A flag is in the upper half, which is written last (PointerAccess.store_words), and so read first.
        upper = memory.words(addresses + np.uint64(8))
        return np.stack((memory.words(addresses), upper), axis=-1).view(np.uint32)

    def take(places: Array, parts: Array) -> None:
        seen[places], arrived[places] = parts, True  # what has come stays

    _wait(machine, name, addresses, read=read, take=take, nbytes=16, **given)
    return seen, arrived


def _wait(
    machine: Machine,
    name: str,
    addresses: Array,
    *,
    read: Callable[[Array], Array],
    true: Callable[[Array], Array],
    missing: Callable[[int, int], str],
    shown: Callable[[Any], int] = int,
    take: Callable[[Array, Array], None] = lambda places, seen: None,
    enough: Callable[[Array], Any] = np.all,
    one: bool = False,
    nbytes: int = 8,
    monitor: Monitor | None = None,
    threads: Threads = (),
    expected: int = 0,
    epoch: int | None = None,
) -> Array:
    """Threads poll a word each, ``nbytes`` bytes at its address, until what they ``read`` is ``true``, or until the
    deadline of ``monitor`` expires. They look again when ``enough`` of them would be content; ``one`` is enough to end.

    ``take`` gets the places of threads that are content and what they saw. ``shown`` makes a number of that, from which
    ``missing`` says what is missing at an address, and which the record has if the wait expires.

    Returns:
        The places of the threads that are not content.
    """
    scheduler, left = machine.scheduler, np.arange(addresses.size)
    machine.counts[machine.program.pe].waits += 1

    def aborted() -> bool:
        return monitor is not None and monitor.aborted

    def ready() -> bool:
        return bool((np.any if one else enough)(true(read(addresses[left])))) or aborted()

    def describe() -> str:
        seen = read(addresses[left])
        absent = [missing(int(addresses[left[i]]), shown(seen[i])) for i in np.flatnonzero(~true(seen))]
        return f"waits for {'one of ' if one else ''}{', '.join(absent)}"

    deadline_ns = None if monitor is None else scheduler.now_ns + monitor.timeout_ns
    with machine.slice(name):
        while left.size:
            keys: list[Hashable] = [(at & ~7) + i for at in addresses[left].tolist() for i in range(0, nbytes, 8)]
            if monitor is not None:
                keys.append(("monitor", monitor.address))
            in_time = scheduler.wait(
                ready, describe, keys, None if deadline_ns is None else deadline_ns - scheduler.now_ns
            )
            seen = read(addresses[left])
            content = true(seen)
            take(left[content], seen[content])
            left = left[~content]
            if (one and content.any()) or aborted() or not in_time:
                break
    if left.size and monitor is not None and not (one and left.size < addresses.size):
        peer, index = threads[left[0]]
        last = shown(read(addresses[left[:1]])[0])
        monitor.give_up(peer, index, expected, last, expected if epoch is None else epoch)
        scheduler.notify(("monitor", monitor.address))
    return left
