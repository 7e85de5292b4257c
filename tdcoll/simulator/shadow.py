# SPDX-License-Identifier: Apache-2.0
"""Who wrote each byte last, and who has read it since, for :mod:`.races`.

As in FastTrack (Flanagan and Freund, 2009), one access stands for all writes of a byte, because the
others happen before it or were a race already. Strong writes, which are no race with each other, are
an exception: of several without an order only the last one is known, so a race of an access with an
earlier one is missed. Of reads, those stay that do not happen before a later one. Bytes have numbers
of accesses, and of sets of them, in arrays, so a block of elements is looked at at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tdcoll.simulator.clocks import Carried
from tdcoll.simulator.places import Place

Array = np.ndarray[Any, Any]

_BITS = 16
_CHUNK = 1 << _BITS
"""Bytes that have their arrays together."""


@dataclass(slots=True, eq=False)
class Access:
    """An access in the source: of one event, at one line.

    Attributes:
        event: clock of its one event.
        what: for reports, such as ``stores to``.
        name: of the tensor, if it is an ordinary one.
        strong: made by an atomic, a store with an order or a signal: two of those are no race.
        carried: what it tells those who read it.
        message: whether it is a message in flight.
    """

    event: int
    who: str
    what: str
    place: Place
    name: str = ""
    strong: bool = False
    carried: Carried | None = None
    message: bool = False
    number: int = 0


Conflict = tuple[int, int, Access, bool]
"""First byte, end, the earlier access, whether that was a write."""


def runs_of(addresses: Array, unit: int) -> Iterable[tuple[int, int]]:
    """Return begin and end of each stretch of bytes of elements of ``unit`` bytes."""
    count = addresses.size
    if not count:
        return ()
    first = int(addresses[0])
    if count == 1:
        return ((first, first + unit),)
    if int(addresses[-1]) - first == unit * (count - 1) and (np.diff(addresses) == unit).all():
        return ((first, first + unit * count),)
    addresses = np.unique(addresses)
    ends = np.flatnonzero(np.diff(addresses) > unit)
    begins = addresses[np.concatenate(([0], ends + 1))].tolist()
    lasts = addresses[np.concatenate((ends, [addresses.size - 1]))].tolist()
    return zip(begins, (last + unit for last in lasts), strict=True)


class Shadow:
    """The accesses of each byte of one address space."""

    def __init__(self) -> None:
        self._accesses: list[Access] = [None]  # type: ignore[list-item]  # 0: none yet
        self._sets: list[tuple[Access, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {(): 0}
        self._chunks: dict[tuple[int, int], tuple[Array, Array]] = {}

    def add(self, access: Access) -> Access:
        """Give an access its number."""
        access.number = len(self._accesses)
        self._accesses.append(access)
        return access

    def forget(self, space: int, begin: int, end: int) -> None:
        """Forget all accesses of these bytes."""
        for _, writes, reads in self._parts(space, begin, end, present=True):
            writes[:] = 0
            reads[:] = 0

    def last_writes(self, space: int, begin: int, end: int) -> list[Access]:
        """Return the last writes of these bytes."""
        found: dict[int, None] = {}
        for _, writes, _ in self._parts(space, begin, end, present=True):
            found.update(dict.fromkeys(_distinct(writes)))
        return [self._accesses[number] for number in found if number]

    def write(
        self, space: int, begin: int, end: int, access: Access, known: int
    ) -> Conflict | None:
        """Note a write, before which ``known`` happens; return an access with which it is a race."""
        for at, writes, reads in self._parts(space, begin, end):
            for number in _distinct(writes):
                before = self._accesses[number]
                if number and not before.event & known and not (before.strong and access.strong):
                    return *_where(writes, number, at), before, True
            for number in _distinct(reads):
                for before in self._sets[number]:
                    if not before.event & known:
                        return *_where(reads, number, at), before, False
            writes[:] = access.number
            reads[:] = 0
        return None

    def read(
        self, space: int, begin: int, end: int, access: Access, known: int, *, checked: bool = True
    ) -> Conflict | None:
        """Note a read, as :meth:`write`; ``checked`` unless it polled for what it reads."""
        for at, writes, reads in self._parts(space, begin, end):
            for number in _distinct(writes) if checked else ():
                before = self._accesses[number]
                if number and not before.event & known:
                    return *_where(writes, number, at), before, True
            numbers = _distinct(reads)
            for number in numbers:
                made = self._with(number, access, known)
                if len(numbers) == 1:
                    reads[:] = made
                elif made != number:
                    reads[reads == number] = made
        return None

    def _with(self, number: int, access: Access, known: int) -> int:
        """Return the number of a set of reads with one more, without those that happen before it."""
        held = self._sets[number]
        if access in held:
            return number
        kept = (*(one for one in held if not one.event & known), access)
        key = tuple(one.number for one in kept)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self._sets)
            self._sets.append(kept)
        return found

    def _parts(
        self, space: int, begin: int, end: int, *, present: bool = False
    ) -> Iterator[tuple[int, Array, Array]]:
        """Yield first address, writes and reads of the bytes of each chunk; ``present``: of those
        that have had accesses."""
        while begin < end:
            number = begin >> _BITS
            key = space, number
            chunk = self._chunks.get(key)
            if chunk is None and not present:
                chunk = np.zeros(_CHUNK, np.int32), np.zeros(_CHUNK, np.int32)
                self._chunks[key] = chunk
            first = begin & (_CHUNK - 1)
            last = min(end - (number << _BITS), _CHUNK)
            if chunk is not None:
                yield begin, chunk[0][first:last], chunk[1][first:last]
            begin = (number << _BITS) + last


def _distinct(numbers: Array) -> list[int]:
    first = numbers[0]
    if (numbers == first).all():
        return [int(first)]
    found: list[int] = np.unique(numbers).tolist()
    return found


def _where(numbers: Array, number: int, at: int) -> tuple[int, int]:
    """Return begin and end of the first stretch that has ``number``."""
    same = numbers == number
    first = int(same.argmax())
    rest = same[first:]
    length = rest.size if rest.all() else int((~rest).argmax())
    return at + first, at + first + length
