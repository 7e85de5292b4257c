# SPDX-License-Identifier: Apache-2.0
"""Loads, stores and atomics through pointers, as the machine sees them.

Stores through a peer pointer travel through the network as puts do, element by element at the finest; a
release at system scope makes the program's earlier ones arrive. Stores to the PE's own memory are seen by its
own programs at once, and land when they have travelled as well (:mod:`.unseen`): until then other PEs do not see
them, and what those write to the same bytes is lost. Atomics take effect at once wherever they go. A program sees
its own stores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.runtime.interpreter as triton_interpreter

from tdcoll.runtime.simulator.extents import Origin, origin_of
from tdcoll.runtime.simulator.memory import read_word
from tdcoll.runtime.simulator.tasks import Task
from tdcoll.runtime.simulator.unseen import Unseen

if TYPE_CHECKING:
    from tdcoll.runtime.simulator.machine import Machine

__all__ = ["PointerAccess"]

Array = np.ndarray[Any, Any]

QUIET_LOADS = 64
"""Loads of ordinary memory in a row after which one is a schedule point after all."""


class PointerAccess:
    """What loads and stores of kernels do on ``machine``."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.unseen = Unseen()

    def check(self, addresses: Array, mask: Array, nbytes: int, origin: Origin, what: str) -> bool:
        """Refuse an access to memory that the program may not reach; whether it goes to symmetric memory.

        Args:
            addresses: of the elements, flat.
            mask: which of them count.
            nbytes: of each.
            origin: of the pointers.
            what: ``"load from"`` or ``"store to"``.

        Raises:
            ValueError: an element lies outside.
        """
        if not mask.all():
            addresses = addresses[mask]
        if not addresses.size:
            return False
        machine = self._machine
        first, last = (int(addresses.min()), int(addresses.max())) if addresses.size > 1 else (int(addresses[0]),) * 2
        extents, memory, pe = machine.extents, machine.memory, machine.program.pe
        if extents.holds(first, last + nbytes, origin, pe):
            return memory.owns(first)
        symmetric = False
        for address in np.unique(addresses).tolist():  # on several PEs, or of several origins, or wrong
            self.check_bytes(address, nbytes, origin, what)
            symmetric = symmetric or memory.owns(address)
        return symmetric

    def check_bytes(self, address: int, nbytes: int, origin: Origin, what: str) -> None:
        """As :meth:`check`, for ``nbytes`` bytes from ``address`` on, at least one."""
        machine = self._machine
        end, pe = address + nbytes, machine.program.pe
        if not machine.extents.holds(address, end, origin, pe):
            problem = machine.extents.problem(address, end, origin, pe)
            raise ValueError(f"{machine.program.name} would {what} {problem}")

    def before_load(self, addresses: Array, mask: Array, *, polls: bool, symmetric: bool) -> None:
        """Called before the running program loads; a schedule point if others could have written there.

        Args:
            addresses: of the elements, flat.
            mask: which of them count.
            polls: whether the load asks for memory that others write (volatile, atomic, ``ld``).
            symmetric: what :meth:`check` said.
        """
        machine, program = self._machine, self._machine.program
        inside = self._symmetric(addresses, mask) if symmetric else None
        if inside is None:
            program.quiet_loads += 1
            if not polls and program.quiet_loads < QUIET_LOADS:
                return
            first = int(addresses[0]) if addresses.size else 0
        else:
            first = int(addresses[int(inside.argmax())])
        program.quiet_loads = 0
        memory, network = machine.memory, machine.network
        machine.scheduler.poll(
            first, lambda: f"spins on {memory.describe(first)}, is {read_word(first & ~7) if first else 0}"
        )
        if inside is not None and network is not None and network.in_flight(program):
            remote = addresses[inside & (self._pes(addresses) != program.pe)]
            if remote.size:  # a program sees its own stores
                network.flush_stores(program, (int(remote.min()), int(remote.max()) + 8))

    def as_seen(self, begin: int, end: int) -> AbstractContextManager[None]:
        """Meanwhile the bytes ``[begin, end)`` are what the running program sees of them."""
        return self.unseen.as_seen_by(self._machine.program.pe, begin, end)

    def stored(self, addresses: Array, mask: Array) -> None:
        """Called after the running program stored to memory: wakes who waits there. A schedule point."""
        scheduler = self._machine.scheduler
        inside = self._symmetric(addresses, mask)
        if inside is None:
            scheduler.progress += 1
            return
        touched = addresses[inside]
        first, last = int(touched.min()), int(touched.max())
        scheduler.notify_words(first, last - first + 8)
        scheduler.turn()

    def store_weakly(self, addresses: Array, values: Array, mask: Array) -> Array:
        """Send the elements that lie on other PEs through the network; the mask of those that do not, which the caller
        stores, and which other PEs see later."""
        inside = self._symmetric(addresses, mask)
        if inside is None or self._machine.network is None:
            return mask
        program = self._machine.program
        pes = np.where(inside, self._pes(addresses), program.pe)
        for pe in np.unique(pes[inside]).tolist():
            chosen = np.flatnonzero(inside & (pes == pe))
            chosen = chosen[np.argsort(addresses[chosen], kind="stable")]
            places = addresses[chosen]
            gaps = np.flatnonzero(np.diff(places.astype(np.int64)) != values.itemsize) + 1
            runs = np.split(chosen, gaps)
            if pe == program.pe:
                unit = values.itemsize
                self._store_here(program, [(int(addresses[run[0]]), unit * run.size) for run in runs], unit)
                continue
            for run in runs:  # neighbours travel together
                self._store(program, pe, int(addresses[run[0]]), values[run].tobytes(), values.itemsize)
        return mask & (pes == program.pe)

    def store_words(self, addresses: Array, words: Array, mask: Array) -> None:
        """Store 128-bit words, ``[n, 4]`` uint32, whose parts may arrive one by one. A schedule point."""
        self._check_words(addresses, mask)
        places = (addresses[:, None] + np.arange(0, 16, 4, dtype=np.uint64)).reshape(-1)
        wanted, values = np.repeat(mask, 4), np.ascontiguousarray(words).reshape(-1)
        here = self.store_weakly(places, values, wanted)
        triton_interpreter._interpreter.store(places, values, here)
        self.stored(places, wanted)

    def change_word(self, pe: int, address: int, kind: Any, change: Callable[[Any], Any]) -> Any:
        """``pe`` replaces the word of numpy type ``kind`` at ``address`` by ``change(word)``, atomically.

        Returns:
            The old word.
        """
        atomics = triton_interpreter._interpreter
        at, order = np.array([address], np.uint64), atomics.MEM_SEMANTIC.ACQUIRE_RELEASE
        with self._changing(pe, at, kind.itemsize):
            while True:
                old = atomics.load(at, np.ones(1, bool), np.zeros(1, kind), kind)
                new = np.array([change(old[0])]).astype(kind)
                if new[0] == old[0]:
                    return old[0]
                if atomics.atomic_cas(at, old, new, order)[0] == old[0]:
                    self._machine.scheduler.notify(address & ~7)
                    return old[0]

    def _check_words(self, addresses: Array, mask: Array) -> None:
        for address in addresses[mask & (addresses % np.uint64(16) != 0)].tolist():
            raise ValueError(f"words must be 16-byte aligned, got {address:#x}")

    def store_flagged(self, addresses: Array, words: Array, mask: Array) -> None:
        """Store 128-bit words, ``[n, 4]`` uint32, each whole. A schedule point.

        Other processes that read the same memory see a word's upper half after its lower one, if not with it (on x86,
        whose stores arrive in their order).
        """
        self._check_words(addresses, mask)
        whole = np.ascontiguousarray(words).view("V16").reshape(-1)
        here = np.flatnonzero(self.store_weakly(addresses, whole, mask))
        halves, present = words.view(np.uint64)[here], np.ones(here.size, bool)
        for half in (0, 1):
            places = addresses[here] + np.uint64(8 * half)
            triton_interpreter._interpreter.store(places, np.ascontiguousarray(halves[:, half]), present)
        self.stored(addresses, mask)

    def copy(self, dest: int, source: int, nbytes: int) -> None:
        """Copy bytes by loads and stores."""
        machine, program, memory = self._machine, self._machine.program, self._machine.memory
        if nbytes < 0:
            raise ValueError(f"nbytes must be at least 0, got {nbytes}")
        if not nbytes:
            return
        self.check_bytes(source, nbytes, origin_of(source), "load from")
        self.check_bytes(dest, nbytes, origin_of(dest), "store to")
        machine.scheduler.turn()
        network = machine.network
        if network is not None and network.in_flight(program) and memory.owns(source):
            if memory.pe_of(source) != program.pe:
                network.flush_stores(program, (source, source + nbytes))
        with self.as_seen(source, source + nbytes):
            data = ctypes.string_at(source, nbytes)
        if network is not None and memory.owns(dest) and memory.pe_of(dest) != program.pe:
            self._store(program, memory.pe_of(dest), dest, data, 1)
        else:
            if network is not None and memory.owns(dest):
                self._store_here(program, [(dest, nbytes)], 1)
            ctypes.memmove(dest, data, nbytes)
            machine.scheduler.notify_words(dest, nbytes)
        machine.scheduler.turn()

    def atomic(self, addresses: Array, mask: Array, *, symmetric: bool) -> AbstractContextManager[None]:
        """Make an atomic read-modify-write in the context that this returns. A schedule point."""
        self.before_load(addresses, mask, polls=True, symmetric=symmetric)
        return self._changing(self._machine.program.pe, addresses[mask], 8) if symmetric else nullcontext()

    def _changing(self, pe: int, addresses: Array, nbytes: int) -> AbstractContextManager[None]:
        """Meanwhile the memory has what ``pe`` sees of these words, which it changes by atomics.

        Its own programs' earlier stores to them land before, since what others see of a word is the word from then on.
        """
        own = addresses[self._pes(addresses) == pe]
        if own.size and self._machine.network is not None:
            self._show(int(own.min()), int(own.max()) + nbytes)
        return self.unseen.as_seen_by(pe, int(addresses.min()), int(addresses.max()) + nbytes)

    def after_atomic(self, addresses: Array, mask: Array, *, changed: bool) -> None:
        """Called after an atomic; ``changed`` says whether memory did."""
        if changed:
            for address in addresses[mask].tolist():
                self._machine.scheduler.notify(address & ~7)

    def _store(self, program: Task, pe: int, dest: int, data: bytes, unit: int) -> None:
        machine, network = self._machine, self._machine.network
        assert network is not None
        counts = machine.counts[program.pe]
        counts.stores += 1
        counts.store_bytes += len(data)
        network.issue(
            program,
            pe,
            "store",
            network.cut(dest, data, len(data), unit),
            source_pe=program.pe,
            done=machine.span(program, "store", pe, len(data)),
            move=partial(self.unseen.write_from, program.pe),
            is_flag=len(data) <= max(8, unit),
        )

    def _store_here(self, program: Task, runs: list[tuple[int, int]], unit: int) -> None:
        """The program is about to store to its own PE's memory; the store lands when it has arrived.

        Args:
            runs: address and length of each stretch of bytes, ascending.
            unit: bytes of an element.
        """
        network = self._machine.network
        assert network is not None
        if self._machine.n_pes == 1:
            return
        first, end = runs[0][0], runs[-1][0] + runs[-1][1]
        self._show(first, end)
        store = self.unseen.hide(program, runs)
        network.issue(
            program,
            program.pe,
            "store",
            [(first, 0, end - first)],
            source_pe=program.pe,
            is_flag=end - first <= max(8, unit),
            move=lambda *piece: self.unseen.reveal(store),
        )

    def _show(self, begin: int, end: int) -> None:
        """Earlier stores of the PE's programs to bytes ``[begin, end)`` arrive."""
        for issuer in self.unseen.issuers(begin, end):
            assert self._machine.network is not None
            self._machine.network.flush_stores(issuer, (begin, end))

    def _pes(self, addresses: Array) -> Array:
        """The PE of each symmetric address."""
        memory = self._machine.memory
        return ((addresses - np.uint64(memory.base)) // np.uint64(memory.nbytes)).astype(np.int64)

    def _symmetric(self, addresses: Array, mask: Array) -> Array | None:
        """Return which elements lie in the symmetric heap, or None if none does."""
        memory = self._machine.memory
        inside = mask & ((addresses - np.uint64(memory.base)) < np.uint64(memory.total))
        return inside if inside.any() else None
