# SPDX-License-Identifier: Apache-2.0
"""How programs wait for signals and for words, and give up when a deadline expires.

The waits return ``[n]`` values that were seen, and ``[n]`` bool, whether they are what was waited
for: not all, if the monitor's deadline has expired. Each value has a thread, given by its peer and
index, for the record of such a wait.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne
from typing import Any

import numpy as np
import triton.runtime.interpreter as triton_interpreter

from tdcoll import runtime
from tdcoll.simulator.machine import Machine
from tdcoll.simulator.memory import read_word, signed, write_word
from tdcoll.simulator.places import kernel_place
from tdcoll.simulator.pointers import PointerAccess
from tdcoll.spec import constants as c
from tdcoll.spec.functions import not_a_monitor

_SIGNS = ("==", "!=", ">", "<=", "<", ">=")
_MEANINGS = (eq, ne, gt, le, lt, ge)
_COMPARE = tuple(zip(_SIGNS, _MEANINGS, strict=True))
"""Sign and meaning of each ``CMP_*``, by value."""

_GROWING = (c.CMP_GT.value, c.CMP_GE.value)

Array = np.ndarray[Any, Any]
Threads = Sequence[tuple[int, int]]


@dataclass
class Monitor:
    """A kernel's view of the words that bounded waits share with the host; see
    :mod:`tdcoll.calls.monitor`."""

    address: int

    def __post_init__(self) -> None:
        if self.address not in runtime.current().monitors:
            raise ValueError(not_a_monitor(self.address))

    @property
    def aborted(self) -> bool:
        """Whether some wait of this monitor has expired."""
        return read_word(self.address + 8 * c.MONITOR_ABORTED.value) != 0

    @property
    def timeout_ns(self) -> int:
        """Deadline of each wait."""
        return read_word(self.address + 8 * c.MONITOR_TIMEOUT_NS.value)

    def notice(self, peer: int, epoch: int, lamport: bool, waited_ns: int) -> None:
        """Leave a notice of a wait that goes on."""
        place = peer % c.NOTICES.value + lamport * c.NOTICES.value
        at = (
            read_word(self.address + 8 * c.MONITOR_RECORD.value)
            + 8 * c.RECORD_NOTICES.value
            + 16 * place
        )
        write_word(at, waited_ns >> c.NOTICE_SHIFT.value | (peer & 0xFFFF_FFFF) << 32)
        write_word(at + 8, epoch)

    def expire(self, peer: int, signal: int, expected: int, seen: int, epoch: int) -> None:
        """Set the aborted word and write the record, unless another wait did so first."""
        if self.aborted:
            return
        write_word(self.address + 8 * c.MONITOR_ABORTED.value, 1)
        record = read_word(self.address + 8 * c.MONITOR_RECORD.value)
        for place, value in (
            (c.RECORD_RANK, read_word(self.address + 8 * c.MONITOR_RANK.value)),
            (c.RECORD_PEER, peer),
            (c.RECORD_SIGNAL, signal),
            (c.RECORD_EPOCH, epoch),
            (c.RECORD_EXPECTED, expected),
            (c.RECORD_SEEN, seen),
            (c.RECORD_VALID, 1),
        ):
            write_word(record + 8 * place.value, value)


def signals(
    machine: Machine,
    addresses: Sequence[int],
    compare: int,
    value: int,
    *,
    threads: Threads = (),
    monitor: Monitor | None = None,
) -> tuple[Array, Array]:
    """Wait until all signals compare true with ``value``. Without ``monitor``, wait for ever."""
    sign, true = _COMPARE[compare]
    found = _wait(
        machine,
        np.array(addresses, np.uint64),
        f"{sign} {signed(value)}",
        read=machine.memory.words,
        true=lambda seen: true(seen, np.uint64(value)),
        number=lambda seen: signed(int(seen)),
        # Each thread polls its own signal until it has seen the value. Signals that only grow are
        # polled together.
        enough=np.all if compare in _GROWING else np.any,
        monitor=monitor,
        threads=threads,
        expected=value,
    )
    if monitor is not None:
        _barrier(machine)
    return found


def _barrier(machine: Machine) -> None:
    """A wait with a deadline ends with a barrier of the block."""
    if machine.races is not None:
        machine.races.barrier()


def word(
    machine: Machine, address: int, kind: Any, compare: int, value: int, **wait_options: Any
) -> tuple[Array, Array]:
    """Wait until an integer of the numpy type ``kind``, which may lie in any memory, compares true
    with ``value``."""
    (sign, true), pe, nbytes = _COMPARE[compare], machine.program.pe, kind.itemsize
    if address % nbytes:
        raise ValueError(f"word must be a multiple of {nbytes}, got {address:#x}")
    at = np.array([address], np.uint64)
    symmetric = machine.memory.owns(address)
    PointerAccess(machine).before_load(at, np.ones(1, bool), polls=True, symmetric=symmetric)

    def read(addresses: Array) -> Array:
        with machine.unseen.as_seen_by(pe, address, address + nbytes):
            return triton_interpreter._interpreter.load(
                addresses, np.ones(1, bool), np.zeros(1, kind), kind
            )

    found = _wait(
        machine,
        at,
        f"{sign} {value}",
        read=read,
        true=lambda seen: true(seen, kind.type(value)),
        expected=value,
        nbytes=nbytes,
        **wait_options,
    )
    _barrier(machine)
    return found


def holds(machine: Machine, address: int, compare: int, value: int) -> bool:
    """Return whether the signal at ``address`` compares true now. A schedule point, because it may
    be in a loop."""
    (sign, true), memory, place = _COMPARE[compare], machine.memory, kernel_place()
    machine.scheduler.poll(
        address,
        lambda: (
            f"asks for {memory.describe(address)} {sign} {signed(value)}, "
            f"is {signed(read_word(address))}{place.note()}"
        ),
    )
    if machine.races is not None:
        machine.races.acquire(np.array([address], np.uint64), 8)
        machine.races.barrier()
    return bool(true(read_word(address), value))


def flagged(
    machine: Machine, addresses: Array, flag: int, **wait_options: Any
) -> tuple[Array, Array]:
    """Wait until the last of the four 32-bit parts of every word is ``flag``. The values are ``[n,
    4]`` uint32."""
    return _wait(
        machine,
        addresses,
        f"flagged {flag}",
        read=lambda addresses: _parts(machine, addresses),
        true=lambda parts: parts[:, 3] == flag,
        number=lambda parts: int(parts[3]),
        nbytes=16,
        takes=True,
        expected=flag,
        **wait_options,
    )


def words(
    machine: Machine, addresses: Array, absent: int, call: int, **wait_options: Any
) -> tuple[Array, Array]:
    """Wait until no 32-bit part of a word is ``absent``. Values are ``[n, 4]`` uint32; ``call`` is
    for the record."""
    return _wait(
        machine,
        addresses,
        f"with 4 parts of call {call}",
        read=lambda addresses: _parts(machine, addresses),
        true=lambda parts: (parts != absent).all(axis=1),
        number=lambda parts: int(np.count_nonzero(parts != absent)),
        nbytes=16,
        takes=True,
        expected=4,
        epoch=call,
        **wait_options,
    )


def _parts(machine: Machine, addresses: Array) -> Array:
    """``[n, 4]`` uint32: 128-bit words."""
    # A flag is in the upper half, which is written last (PointerAccess.store_words), and so read
    # first.
    upper = machine.memory.words(addresses + np.uint64(8))
    return np.stack((machine.memory.words(addresses), upper), axis=-1).view(np.uint32)


def _wait(
    machine: Machine,
    addresses: Array,
    condition: str,
    *,
    read: Callable[[Array], Array],
    true: Callable[[Array], Array],
    number: Callable[[Any], int] = int,
    enough: Callable[[Array], Any] = np.all,
    nbytes: int = 8,
    takes: bool = False,
    monitor: Monitor | None,
    threads: Threads,
    expected: int,
    epoch: int | None = None,
) -> tuple[Array, Array]:
    """A thread polls ``nbytes`` bytes at each address until what it reads is ``true``.

    Words that it ``takes`` are data themselves, and order nothing else. Threads look again when
    ``enough`` of them would be content. In reports stands ``condition``, and in them and in the
    record the ``number`` that is made of what a thread sees.
    """
    scheduler = machine.scheduler
    describe = machine.memory.describe
    n = addresses.size
    place = kernel_place()
    if not n:
        return np.zeros(0, np.uint64), np.zeros(0, bool)
    seen = read(addresses)
    content = np.zeros(n, bool)
    left = np.arange(n)

    def over() -> bool:
        return monitor is not None and monitor.aborted

    begin_ns = last_ns = scheduler.now_ns

    def leave_notices(monitor: Monitor) -> None:
        nonlocal last_ns
        now_ns = scheduler.now_ns
        if now_ns - last_ns >= c.NOTICE_EVERY.value << c.NOTICE_SHIFT.value:
            last_ns = now_ns
            for i in left[~true(read(addresses[left]))].tolist():
                number = expected if epoch is None else epoch
                monitor.notice(threads[i][0], number, epoch is not None, now_ns - begin_ns)

    def ready() -> bool:
        if enough(true(read(addresses[left]))):
            return True
        if monitor is not None:
            leave_notices(monitor)
        return over()

    def missing() -> str:
        now = read(addresses[left])
        absent = [(left[i], number(now[i])) for i in np.flatnonzero(~true(now))]
        values = [f"{describe(int(addresses[i]))} {condition}, is {value}" for i, value in absent]
        peers = sorted({threads[i][0] for i, _ in absent if threads and threads[i][0] >= 0})
        whom = f"from rank {', '.join(map(str, peers))}" if peers else ""
        return f"waits for {', '.join(values)}{place.note(whom)}"

    deadline_ns = None if monitor is None else begin_ns + monitor.timeout_ns
    in_time = True
    with machine.slice(
        f"wait {describe(int(addresses[0]))}{f' and {n - 1} more' if n > 1 else ''} {condition}"
    ):
        while left.size and in_time:
            keys: list[Hashable] = [
                (at & ~7) + i for at in addresses[left].tolist() for i in range(0, nbytes, 8)
            ]
            if monitor is not None:
                keys.append(("monitor", monitor.address))
            timeout_ns = None if deadline_ns is None else deadline_ns - scheduler.now_ns
            in_time = scheduler.wait(ready, missing, keys, timeout_ns) and not over()
            seen[left] = read(addresses[left])
            content[left] = true(seen[left])
            if machine.races is not None:
                whole = n == 1 or enough is np.all
                machine.races.waited(
                    addresses[left],
                    nbytes,
                    lambda at: true(read(at)),
                    whole=whole,
                    tells=takes or monitor is None,
                )
                learn = machine.races.take if takes else machine.races.acquire
                learn(addresses[left[content[left]]], nbytes)
            left = np.flatnonzero(~content)
    if left.size and machine.races is not None:
        machine.races.stop()
    if monitor is not None and left.size:
        peer, index = threads[left[0]]
        monitor.expire(
            peer, index, expected, number(seen[left[0]]), expected if epoch is None else epoch
        )
        scheduler.notify(("monitor", monitor.address))
    return seen, content
