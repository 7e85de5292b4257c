# SPDX-License-Identifier: Apache-2.0
"""Loads, stores and atomics through pointers, as the machine sees them.

Stores through a peer pointer travel through the network as puts do, element by element at the
finest. Those to the PE's own memory do as well until other PEs see them (:mod:`.unseen`). Atomics
take effect at once on every PE.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import triton.runtime.interpreter as triton_interpreter

from tdcoll.simulator.bounds import Origin, origin_of
from tdcoll.simulator.machine import Machine, machine
from tdcoll.simulator.memory import read_word
from tdcoll.simulator.network import STORES, Network
from tdcoll.simulator.places import kernel_place

Array = np.ndarray[Any, Any]

Landed = Callable[[Array, int], None]

_QUIET_LOADS = 64
"""Loads of ordinary memory in a row, until one is a schedule point."""
_interpreter = triton_interpreter._interpreter


class PointerAccess:
    """Loads and stores of kernels on ``machine``."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def check(self, addresses: Array, mask: Array, nbytes: int, origin: Origin, what: str) -> bool:
        """Refuse an access to memory that the program may not reach; return whether it is to
        symmetric memory.

        ``what``, "load from" or "store to", accesses elements of ``nbytes`` bytes at flat
        ``addresses``, where ``mask`` is true, by pointers from ``origin``. Raises ValueError if one
        lies outside.
        """
        if not mask.all():
            addresses = addresses[mask]
        if not addresses.size:
            return False
        machine = self._machine
        first, last = (
            (int(addresses.min()), int(addresses.max()))
            if addresses.size > 1
            else (int(addresses[0]),) * 2
        )
        if machine.bounds.problem(first, last + nbytes, origin, machine.program.pe) is None:
            return machine.memory.owns(first)
        elements = np.unique(addresses).tolist()  # on several PEs, or of several origins, or wrong
        for address in elements:
            self.check_bytes(address, nbytes, origin, what)
        return any(map(machine.memory.owns, elements))

    def check_bytes(self, address: int, nbytes: int, origin: Origin, what: str) -> None:
        """As :meth:`check`, for ``nbytes`` bytes from ``address`` on, at least one."""
        machine = self._machine
        problem = machine.bounds.problem(address, address + nbytes, origin, machine.program.pe)
        if problem is not None:
            raise ValueError(f"{machine.program.name} would {what} {problem}")

    def check_words(self, addresses: Array, mask: Array, origin: Origin, what: str) -> None:
        """As :meth:`check`, for words of 128 bits, which must be aligned."""
        self.check(addresses, mask, 16, origin, what)
        for address in addresses[mask & (addresses % np.uint64(16) != 0)].tolist():
            raise ValueError(f"words must be 16-byte aligned, got {address:#x}")

    def loading(
        self, addresses: Array, mask: Array, nbytes: int, origin: Origin, *, polls: bool
    ) -> AbstractContextManager[None]:
        """:meth:`check` a load, and make it in the context that this returns. See
        :meth:`before_load`."""
        symmetric = self.check(addresses, mask, nbytes, origin, "load from")
        self.before_load(addresses, mask, polls=polls, symmetric=symmetric)
        races = self._machine.races
        if races is not None:
            races.load(addresses[mask], nbytes, origin, relaxed=polls)
        if not symmetric:
            return nullcontext()
        touched = addresses[mask]
        pe = self._machine.program.pe
        begin = int(touched.min())
        end = int(touched.max()) + nbytes
        if not polls and self._machine.memory.owns(begin):
            self._machine.show_load(begin, end)
        if self._machine.network is None:
            return nullcontext()
        return self._machine.unseen.as_seen_by(pe, begin, end)

    def before_load(self, addresses: Array, mask: Array, *, polls: bool, symmetric: bool) -> None:
        """Prepare a load of the running program; a schedule point if others could have written
        there.

        ``polls``: it reads memory that others write (volatile, atomic, ``ld``). ``symmetric``: of
        :meth:`check`.
        """
        machine = self._machine
        program = self._machine.program
        inside = self._symmetric(addresses, mask) if symmetric else None
        if inside is None:
            program.quiet_loads += 1
            if not polls and program.quiet_loads < _QUIET_LOADS:
                return
            first = int(addresses[0]) if addresses.size else 0
        else:
            first = int(addresses[int(inside.argmax())])
        program.quiet_loads = 0
        place = kernel_place()
        describe = machine.memory.describe
        machine.scheduler.poll(
            first,
            lambda: (
                f"spins on {describe(first)}, is {read_word(first & ~7) if first else 0}{place.note()}"
            ),
        )
        if inside is not None and machine.network is not None and program.in_flight:
            remote = addresses[inside & (self._pes(addresses) != program.pe)]
            if remote.size:  # a program sees its own stores
                machine.network.flush_stores(program, (int(remote.min()), int(remote.max()) + 8))

    def stored(self, addresses: Array, mask: Array) -> None:
        """Wake tasks that wait for memory that the running program has stored to. A schedule
        point."""
        scheduler = self._machine.scheduler
        inside = self._symmetric(addresses, mask)
        if inside is None:
            scheduler.progress += 1
            return
        touched = addresses[inside]
        first = int(touched.min())
        last = int(touched.max())
        scheduler.notify_words(first, last - first + 8)
        scheduler.turn()

    def store_weakly(
        self,
        addresses: Array,
        values: Array,
        mask: Array,
        kind: str = "store",
        origin: Origin = None,
    ) -> Array:
        """Send the elements on other PEs through the network; return the mask of those that the
        caller has to store.

        ``kind``: ``"store"`` or ``"descriptor store"``. ``origin``: of the pointers.
        """
        inside = self._symmetric(addresses, mask)
        network = self._machine.network
        landed = self._landed(origin, by_descriptor=kind == "descriptor store")
        if inside is None or network is None:
            landed(addresses[mask], values.itemsize)
            return mask
        program = self._machine.program
        unit = values.itemsize
        pes = np.where(inside, self._pes(addresses), program.pe)
        for pe in np.unique(pes[inside]).tolist():
            chosen = np.flatnonzero(inside & (pes == pe))
            chosen = chosen[np.argsort(addresses[chosen], kind="stable")]
            gaps = np.flatnonzero(np.diff(addresses[chosen].astype(np.int64)) != unit) + 1
            runs = np.split(chosen, gaps)  # neighbours travel together
            if pe == program.pe:
                self._store_here(
                    network, [(int(addresses[run[0]]), unit * run.size) for run in runs], unit, kind
                )
            else:
                for run in runs:
                    self._store(
                        network,
                        pe,
                        int(addresses[run[0]]),
                        values[run].tobytes(),
                        unit,
                        landed,
                        kind,
                    )
        here: Array = mask & (pes == program.pe)
        landed(addresses[here], unit)
        return here

    def in_order(self, order: str, *, system: bool) -> AbstractContextManager[None]:
        """Let the program's stores inside have this order, for :mod:`.races`."""
        races = self._machine.races
        return nullcontext() if races is None else races.stores_in_order(order, system=system)

    def _landed(self, origin: Origin, *, by_descriptor: bool = False) -> Landed:
        """Return what is called with addresses and size of the elements of a store that have
        landed."""
        races = self._machine.races
        return _nothing if races is None else races.storing(origin, by_descriptor=by_descriptor)

    def store_words(self, addresses: Array, words: Array, mask: Array, *, whole: bool) -> None:
        """Store 128-bit words, ``[n, 4]`` uint32: ``whole``, or in parts that arrive one by one. A
        schedule point.

        Other processes see a whole word's upper half after its lower one, or with it (because x86
        orders stores).
        """
        races = self._machine.races
        if races is not None:
            races.apart()
        if not whole:
            places = (addresses[:, None] + np.arange(0, 16, 4, dtype=np.uint64)).reshape(-1)
            wanted = np.repeat(mask, 4)
            values = words.reshape(-1)
            _interpreter.store(places, values, self.store_weakly(places, values, wanted))
            self.stored(places, wanted)
            if races is not None:
                races.apart()
            return
        here = np.flatnonzero(self.store_weakly(addresses, words.view("V16").reshape(-1), mask))
        halves = words.view(np.uint64)[here]
        present = np.ones(here.size, bool)
        for half in (0, 1):
            places = addresses[here] + np.uint64(8 * half)
            _interpreter.store(places, np.ascontiguousarray(halves[:, half]), present)
        self.stored(addresses, mask)
        if races is not None:
            races.apart()

    def copy(self, dest: int, source: int, nbytes: int) -> None:
        """Copy bytes by loads and stores."""
        machine = self._machine
        program = self._machine.program
        network = self._machine.network
        if nbytes < 0:
            raise ValueError(f"nbytes must be at least 0, got {nbytes}")
        if not nbytes:
            return
        self.check_bytes(source, nbytes, origin_of(source), "load from")
        self.check_bytes(dest, nbytes, origin_of(dest), "store to")
        machine.scheduler.turn()
        if network is not None and self._pe_of(source) not in (None, program.pe):
            network.flush_stores(program, (source, source + nbytes))
        if machine.races is not None:
            machine.races.load(np.array([source], np.uint64), nbytes, origin_of(source))
        if machine.memory.owns(source):
            machine.show_load(source, source + nbytes)
        with machine.unseen.as_seen_by(program.pe, source, source + nbytes):
            data = ctypes.string_at(source, nbytes)
        there = self._pe_of(dest)
        landed = self._landed(origin_of(dest))
        if network is not None and there not in (None, program.pe):
            self._store(network, there, dest, data, 1, landed)
        else:
            landed(np.array([dest], np.uint64), nbytes)
            if network is not None and there is not None:
                self._store_here(network, [(dest, nbytes)], 1)
            ctypes.memmove(dest, data, nbytes)
            machine.scheduler.notify_words(dest, nbytes)
        machine.scheduler.turn()

    def _store(
        self,
        network: Network,
        pe: int,
        dest: int,
        data: bytes,
        unit: int,
        landed: Landed,
        kind: str = "store",
    ) -> None:
        machine = self._machine
        program = self._machine.program
        counts = machine.counts[program.pe]
        counts.stores += 1
        counts.store_bytes += len(data)
        pieces = network.cut(dest, data, len(data), unit)

        def move(to: int, piece: bytes, length: int) -> None:
            landed(np.array([to], np.uint64), length)
            machine.unseen.write_from(program.pe, to, piece, length)

        done = machine.span("store", pe, len(data), dest)
        is_flag = kind == "store" and len(data) <= max(8, unit)
        network.issue(program, pe, kind, pieces, done=done, move=move, is_flag=is_flag)

    def _store_here(
        self, network: Network, runs: list[tuple[int, int]], unit: int, kind: str = "store"
    ) -> None:
        """Prepare a store of the program to its own PE's memory; the store lands when it has
        arrived.

        ``runs``: address and length of each stretch of bytes, ascending. ``unit``: bytes of an
        element.
        """
        machine = self._machine
        program = self._machine.program
        if machine.memory.n_pes == 1:
            return
        first = runs[0][0]
        end = runs[-1][0] + runs[-1][1]
        self._show(network, first, end)
        store = machine.unseen.hide(program, runs)
        pieces = [(first, 0, end - first)]

        def reveal(*piece: Any) -> None:
            machine.unseen.reveal(store)

        is_flag = kind == "store" and end - first <= max(8, unit)
        network.issue(program, program.pe, kind, pieces, move=reveal, is_flag=is_flag)

    def _show(self, network: Network, begin: int, end: int) -> None:
        """Let earlier stores of the PE's programs to bytes ``[begin, end)`` arrive."""
        for issuer in self._machine.unseen.issuers(begin, end):
            network.flush_stores(issuer, (begin, end), kinds=STORES)

    @contextmanager
    def atomic(
        self, addresses: Array, mask: Array, nbytes: int, *, symmetric: bool
    ) -> Iterator[None]:
        """Let the caller make an atomic read-modify-write of words of ``nbytes`` inside, after a
        schedule point."""
        self.before_load(addresses, mask, polls=True, symmetric=symmetric)
        with self._changing(self._machine.program.pe, addresses[mask], nbytes):
            yield

    def change_word(self, pe: int, address: int, kind: Any, change: Callable[[Any], Any]) -> Any:
        """Do :func:`replace_word` for ``pe``, with the word as it sees it."""
        with self._changing(pe, np.array([address], np.uint64), kind.itemsize):
            return replace_word(address, kind, change)

    @contextmanager
    def _changing(self, pe: int, addresses: Array, nbytes: int) -> Iterator[None]:
        """Let the memory have ``pe``'s view of these words inside, for its atomics; then wake
        waiting tasks.

        Its own programs' earlier stores to them land before, because all PEs see the same word from
        then on.
        """
        if not addresses.size:
            yield
            return
        network = self._machine.network
        own = addresses[self._pes(addresses) == pe]
        if network is not None and own.size:
            self._show(network, int(own.min()), int(own.max()) + nbytes)
        with self._machine.unseen.as_seen_by(
            pe, int(addresses.min()), int(addresses.max()) + nbytes
        ):
            before = _words(addresses, nbytes)
            yield
            changed = addresses[before != _words(addresses, nbytes)]
        for address in changed.tolist():
            self._machine.scheduler.notify(address & ~7)

    def _pe_of(self, address: int) -> int | None:
        memory = self._machine.memory
        return memory.pe_of(address) if memory.owns(address) else None

    def _pes(self, addresses: Array) -> Array:
        """Return the PE of each symmetric address."""
        memory = self._machine.memory
        return ((addresses - np.uint64(memory.base)) // np.uint64(memory.nbytes)).astype(np.int64)

    def _symmetric(self, addresses: Array, mask: Array) -> Array | None:
        """Return which elements lie in the symmetric heap, or None if none does."""
        memory = self._machine.memory
        inside = mask & ((addresses - np.uint64(memory.base)) < np.uint64(memory.total))
        return inside if inside.any() else None


def _nothing(addresses: Array, nbytes: int) -> None:
    pass


def pointers() -> PointerAccess:
    """Return the loads and stores of the machine that kernels run on."""
    return PointerAccess(machine())


def store_now(addresses: Array, values: Array, mask: Array) -> None:
    """Store the elements of flat blocks where ``mask`` is true, at any addresses."""
    _interpreter.store(addresses, values, mask)


def _words(addresses: Array, nbytes: int) -> Array:
    """Return the words of ``nbytes`` bytes at any addresses, as unsigned integers."""
    kind = np.dtype(f"u{nbytes}")
    return _interpreter.load(
        addresses, np.ones(addresses.size, bool), np.zeros(addresses.size, kind), kind
    )


def replace_word(address: int, kind: Any, change: Callable[[Any], Any]) -> Any:
    """Replace the word of numpy type ``kind`` at any address by ``change(word)``, atomically;
    return the old word."""
    at = np.array([address], np.uint64)
    order = _interpreter.MEM_SEMANTIC.ACQUIRE_RELEASE
    while True:
        old = _interpreter.load(at, np.ones(1, bool), np.zeros(1, kind), kind)
        new = np.asarray(change(old[0])).astype(kind).reshape(1)
        if new[0] == old[0] or _interpreter.atomic_cas(at, old, new, order)[0] == old[0]:
            return old[0]
