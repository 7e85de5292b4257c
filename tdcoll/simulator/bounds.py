# SPDX-License-Identifier: Apache-2.0
"""The bytes that a kernel's pointers may reach: those of the tensor that each was derived from.

A pointer, or an integer that was made of one, carries its *origin*: the storage of an ordinary
tensor, or a symmetric allocation, whose copies on all PEs that made it count as one. The
interpreter's handles pass it on (see :mod:`.interpreter`). Views reach the whole storage.

If the origin is not known (an address given as an integer, or loaded from memory, or chosen among
several origins), an access has to lie within one tensor that is alive.
"""

from __future__ import annotations

import gc
import threading
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tdcoll.simulator.memory import NULL_PAGE, Allocation, Memory


@dataclass(slots=True, eq=False)
class Storage:
    """The bytes ``[begin, end)`` of an ordinary tensor's storage; ``name`` is that of the kernel's
    argument."""

    begin: int
    end: int
    name: str


class _Mixed:
    """The origin of a value made of pointers with different origins: any of them is possible."""


MIXED = _Mixed()

Origin = Storage | Allocation | _Mixed | None
"""The origin of a value; None if it comes from no known pointer."""


class Address(int):
    """An address as a number, with its origin."""

    origin: Origin = None


def origin_of(address: int) -> Origin:
    """Return the origin of an :class:`Address`; None for any other number."""
    return getattr(address, "origin", None)


def joined(one: Origin, other: Origin) -> Origin:
    """Return the origin of a value that was made of two."""
    if other is None or one is other:
        return one
    return other if one is None else MIXED


class _Storages:
    """Storages of ordinary tensors by address, for addresses without a tensor.

    It remembers storages whose address was requested. Python's garbage collector knows all the
    others, but is asked only before an access is refused, because that takes milliseconds.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, StorageWeakRef]] = {}  # begin -> end, and whether it lives
        self._begins: list[int] = []  # sorted
        self.forget: Callable[[int, int], None] | None = None
        """Called with the bytes of a storage that was not known."""
        self._most = 1024  # entries before those of dead storages go
        self._lock = threading.RLock()  # threads of the host ask tensors for their addresses

    def remember(self, tensor: torch.Tensor, *, again: bool = False) -> None:
        """Take note that the running program knows an address of ``tensor``; ``again`` if it may
        have been known before."""
        try:
            storage = tensor.untyped_storage()
            begin = storage.data_ptr()
            nbytes = storage.nbytes()
        except Exception:  # a tensor without memory of its own
            return
        if storage.device.type == "cpu" and nbytes:
            with self._lock:
                known = self._seen.get(begin)
                if known is None:
                    insort(self._begins, begin)
                elif known[0] == begin + nbytes and not known[1].expired():
                    return
                self._seen[begin] = begin + nbytes, StorageWeakRef(storage)
                if self.forget is not None and not again:
                    self.forget(begin, begin + nbytes)
                if len(self._begins) > self._most:  # the dead are forgotten
                    self._seen = {
                        begin: entry
                        for begin, entry in self._seen.items()
                        if not entry[1].expired()
                    }
                    self._begins = sorted(self._seen)
                    self._most = max(1024, 2 * len(self._begins))

    def around(self, begin: int, end: int) -> tuple[int, int] | None:
        """Return the live storage that holds bytes ``[begin, end)``, or else one that holds the
        first of them."""
        with self._lock:
            found = self._lookup(begin)
            if found is None or found[1] < end:
                self._look_again()
                found = self._lookup(begin)
            return found

    def _lookup(self, address: int) -> tuple[int, int] | None:
        place = bisect_right(self._begins, address)
        while place:
            place -= 1
            begin = self._begins[place]
            end, life = self._seen[begin]
            if not life.expired():
                return (begin, end) if address < end else None
            del self._seen[begin], self._begins[place]
        return None

    def _look_again(self) -> None:
        self._seen.clear()
        self._begins.clear()
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                self.remember(thing, again=True)


class Bounds:
    """Checks accesses of kernels to ``memory`` and to ordinary tensors."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._storages = _Storages()

    @property
    def forget(self) -> Callable[[int, int], None] | None:
        """The function that gets begin and end of ordinary memory that has another tensor
        than before."""
        return self._storages.forget

    @forget.setter
    def forget(self, called: Callable[[int, int], None]) -> None:
        self._storages.forget = called

    def of_tensor(self, tensor: torch.Tensor, name: str) -> Origin:
        """Return the origin of a kernel's argument ``name``."""
        first = tensor.data_ptr()
        memory = self._memory
        if memory.owns(first):
            return memory.allocations[memory.pe_of(first)].at((first - memory.base) % memory.nbytes)
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        return Storage(begin, begin + storage.nbytes(), name)

    def remember(self, tensor: torch.Tensor, first: int) -> int:
        """Return ``first``, an address of ``tensor``, and note it, because it may reach a kernel as
        a number."""
        if first and not self._memory.owns(first):
            self._storages.remember(tensor)
        return first

    def problem(self, begin: int, end: int, origin: Origin, pe: int) -> str | None:
        """Return why a program of ``pe`` may not access bytes ``[begin, end)`` by a pointer from
        ``origin``, for example ``bytes 320..328 of pe0.a, which has 8 bytes``; None if it may."""
        memory = self._memory
        if begin < NULL_PAGE:
            return "a null pointer: remote_ptr() gives one for PEs on other nodes, which only puts and gets access"
        if type(origin) is Storage:
            return _beyond(begin, end, origin.begin, origin.end, f"`{origin.name}`")
        symmetric = memory.owns(begin)
        if type(origin) is Allocation:
            allocation: Allocation | None = origin
        elif symmetric:
            allocation = memory.allocations[pe].at((begin - memory.base) % memory.nbytes)
        else:
            storage = self._storages.around(begin, end)
            if storage is None:
                return f"address {begin:#x}, where no tensor lives"
            return _beyond(begin, end, *storage, f"a tensor at {storage[0]:#x}")
        if allocation is None:
            return f"{memory.describe(begin)}, where no symmetric tensor lives"
        there = memory.pe_of(begin) if symmetric else pe
        if not allocation.live:
            return f"pe{there}.{allocation.name}, which was freed"
        if there not in allocation.pes:
            return f"pe{there}, which has no part in {allocation.name}: PEs {sorted(allocation.pes)} made it"
        first = begin - memory.block(there)
        return _beyond(
            first,
            first + end - begin,
            allocation.begin,
            allocation.end,
            f"pe{there}.{allocation.name}",
        )


def _beyond(begin: int, end: int, first: int, last: int, name: str) -> str | None:
    if first <= begin and end <= last:
        return None
    return f"bytes {begin - first}..{end - first} of {name}, which has {last - first} bytes"
