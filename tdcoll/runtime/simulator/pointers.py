# SPDX-License-Identifier: Apache-2.0
"""Loads, stores and atomics through pointers, as the machine sees them.

Stores through a peer pointer travel through the network as puts do, element by element at the finest; a
release at system scope makes the program's earlier ones arrive. What is written to the PE's own memory is
visible at once, and atomics take effect at once wherever they go. A program sees its own stores.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.runtime.interpreter as triton_interpreter

from tdcoll.runtime.simulator.memory import NULL_PAGE, read_word
from tdcoll.runtime.simulator.tasks import Task

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

    def before_load(self, addresses: Array, mask: Array, *, polls: bool) -> None:
        """Called before the running program loads; a schedule point if others could have written there.

        Args:
            addresses: of the elements, flat.
            mask: which of them count.
            polls: whether the load asks for memory that others write (volatile, atomic, ``ld``).
        """
        machine, program = self._machine, self._machine.program
        inside = self._symmetric(addresses, mask, "load from")
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
            touched = addresses[inside]  # a program sees its own stores
            network.flush_stores(program, (int(touched.min()), int(touched.max()) + 8))

    def stored(self, addresses: Array, mask: Array) -> None:
        """Called after the running program stored to memory: wakes who waits there. A schedule point."""
        scheduler = self._machine.scheduler
        inside = self._symmetric(addresses, mask, "store to")
        if inside is None:
            scheduler.progress += 1
            return
        touched = addresses[inside]
        first, last = int(touched.min()), int(touched.max())
        scheduler.notify_words(first, last - first + 8)
        scheduler.turn()

    def store_weakly(self, addresses: Array, values: Array, mask: Array) -> Array:
        """Send the elements that lie on other PEs through the network; the mask of those that do not."""
        inside = self._symmetric(addresses, mask, "store to")
        if inside is None or self._machine.network is None:
            return mask
        program = self._machine.program
        pes = np.where(inside, self._pes(addresses), program.pe)
        remote = inside & (pes != program.pe)
        if not remote.any():
            return mask
        for pe in np.unique(pes[remote]).tolist():
            chosen = np.flatnonzero(remote & (pes == pe))
            chosen = chosen[np.argsort(addresses[chosen], kind="stable")]
            places = addresses[chosen]
            gaps = np.flatnonzero(np.diff(places.astype(np.int64)) != values.itemsize) + 1
            for run in np.split(chosen, gaps):  # neighbours travel together
                self._store(program, pe, int(addresses[run[0]]), values[run].tobytes(), values.itemsize)
        return mask & ~remote

    def store_flagged(self, addresses: Array, words: Array, mask: Array) -> None:
        """Store 128-bit words, ``[n, 4]`` uint32, each whole. A schedule point.

        Other processes that read the same memory see a word's upper half after its lower one, if not with it (on x86,
        whose stores arrive in their order).
        """
        for address in addresses[mask & (addresses % np.uint64(16) != 0)].tolist():
            raise ValueError(f"words must be 16-byte aligned, got {address:#x}")
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
        for address, what in ((source, "load from"), (dest, "store to")):
            if address < NULL_PAGE:
                raise self._null_pointer(what)
        machine.scheduler.turn()
        network = machine.network
        if network is not None and network.in_flight(program):
            network.flush_stores(program, (source, source + nbytes))
        if network is not None and memory.owns(dest) and memory.pe_of(dest) != program.pe:
            self._store(program, memory.pe_of(dest), dest, ctypes.string_at(source, nbytes), 1)
        else:
            ctypes.memmove(dest, source, nbytes)
            machine.scheduler.notify_words(dest, nbytes)
        machine.scheduler.turn()

    def before_atomic(self, addresses: Array, mask: Array, *, release: bool, system: bool) -> None:
        """Called before an atomic read-modify-write, which is a schedule point."""
        if release and system:
            self._machine.release()
        self.before_load(addresses, mask, polls=True)

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
            is_flag=len(data) <= max(8, unit),
        )

    def _pes(self, addresses: Array) -> Array:
        """The PE of each symmetric address."""
        memory = self._machine.memory
        return ((addresses - np.uint64(memory.base)) // np.uint64(memory.nbytes)).astype(np.int64)

    def _symmetric(self, addresses: Array, mask: Array, what: str) -> Array | None:
        """Which elements lie in the symmetric heap, or None if none does."""
        if addresses.size and int(addresses.min()) < NULL_PAGE and (mask & (addresses < NULL_PAGE)).any():
            raise self._null_pointer(what)
        memory = self._machine.memory
        inside = mask & ((addresses - np.uint64(memory.base)) < np.uint64(memory.total))
        return inside if inside.any() else None

    def _null_pointer(self, what: str) -> ValueError:
        return ValueError(
            f"{self._machine.program.name} would {what} a null pointer: remote_ptr() gives one for PEs on "
            "other nodes, which only puts and gets reach"
        )
