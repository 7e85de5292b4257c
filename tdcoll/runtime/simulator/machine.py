# SPDX-License-Identifier: Apache-2.0
"""The simulated machine as kernels see it: what each operation of the device language does to memory.

:mod:`tdcoll.language.simulator` turns a kernel's arguments into numbers and calls this;
:mod:`tdcoll.runtime.simulator.builder` calls it for Triton's own loads, stores and atomics. The same code
serves the in-process :class:`~tdcoll.runtime.simulator.world.World` and one process per rank; they differ in
the scheduler, and in that only a World may have a weak network. Without one everything arrives at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from tdcoll.errors import TdcollError
from tdcoll.runtime.simulator.extents import Extents, origin_of
from tdcoll.runtime.simulator.memory import NULL_PAGE, Memory
from tdcoll.runtime.simulator.network import Network
from tdcoll.runtime.simulator.pointers import PointerAccess
from tdcoll.runtime.simulator.tasks import Task
from tdcoll.runtime.simulator.trace import Trace
from tdcoll.runtime.simulator.waits import Waits
from tdcoll.spec import constants as c

__all__ = ["Counts", "Machine", "TaskScheduler"]

_SIGNAL_ADD = c.SIGNAL_ADD.value


class TaskScheduler(Protocol):
    """The part of a scheduler that operations need; see :class:`.scheduler.Scheduler`."""

    current: Task | None
    progress: int
    steps: int

    @property
    def now_ns(self) -> int: ...

    def turn(self) -> None: ...

    def wait(
        self,
        ready: Callable[[], bool],
        describe: Callable[[], str],
        keys: Sequence[Hashable],
        timeout_ns: int | None = None,
    ) -> bool: ...

    def poll(self, key: Hashable, describe: Callable[[], str]) -> None: ...

    def notify(self, key: Hashable) -> None: ...

    def notify_words(self, first: int, nbytes: int) -> None: ...


@dataclass
class Counts:
    """What one PE did since the machine was made. Bytes are payload; a put with a signal counts as both."""

    launches: int = 0
    puts: int = 0
    put_bytes: int = 0
    gets: int = 0
    get_bytes: int = 0
    signals: int = 0
    waits: int = 0
    stores: int = 0
    store_bytes: int = 0
    inter_node_puts: int = 0
    inter_node_bytes: int = 0


class Machine:
    """Memory, network and bookkeeping of a simulated job.

    Args:
        memory: the symmetric blocks.
        scheduler: runs the tasks.
        node_ids: name of each PE's node; pointers reach PEs of the same node only.
        network: weak delivery, or None.
        trace: timeline to record, or None.
        atomic_add: adds to a 64-bit word, atomically between processes where there are several.
        launch: runs a kernel: name, program, grid, threads per block.
        barrier: waits for all PEs at the barrier of that name.
        check_overflow: integers of 32 bits that overflow are errors, and so are failed ``tl.device_assert``.
    """

    def __init__(
        self,
        *,
        memory: Memory,
        scheduler: TaskScheduler,
        node_ids: Sequence[object],
        launch: Callable[[str, Callable[[], None], tuple[int, int, int], int], None],
        barrier: Callable[[str], None],
        atomic_add: Callable[[int, int], None],
        network: Network | None = None,
        trace: Trace | None = None,
        check_overflow: bool = False,
    ) -> None:
        self.memory, self.scheduler, self.network, self.trace = memory, scheduler, network, trace
        self.node_ids = tuple(node_ids)
        self.launch, self._arrive, self._atomic_add = launch, barrier, atomic_add
        self.check_overflow = check_overflow
        self.extents = Extents(memory)
        self.pointers, self.waits = PointerAccess(self), Waits(self)
        self.counts = [Counts() for _ in self.node_ids]

    @property
    def n_pes(self) -> int:
        """Number of PEs of the job."""
        return self.memory.n_pes

    @property
    def program(self) -> Task:
        """The running program.

        Raises:
            TdcollError: device code runs outside a kernel.
        """
        task = self.scheduler.current
        if task is None or not task.is_program:
            raise TdcollError("the device language was called on the host: call it inside a @tdcoll.jit kernel")
        return task

    # ------------------------------------------------------------------ addresses

    def check_pe(self, pe: int) -> int:
        """``pe``, if there is such a PE."""
        if not 0 <= pe < self.n_pes:
            raise ValueError(f"pe must be in 0..{self.n_pes - 1}, got {pe}")
        return pe

    def check_symmetric(self, address: int, nbytes: int, argument: str, pe: int | None = None) -> int:
        """``address``, if these bytes are the running PE's part of a symmetric tensor, and ``pe`` has a part as well.

        No bytes may lie anywhere in the running PE's block.
        """
        me, memory = self.program.pe, self.memory
        if nbytes < 0:
            raise ValueError(f"bytes must be at least 0, got {nbytes}")
        if not memory.owns(address):
            raise ValueError(
                f"{argument} must lie in the symmetric heap (memory from tdcoll.empty()); got {address:#x}, "
                "which is ordinary memory"
            )
        if memory.pe_of(address) != me:
            raise ValueError(
                f"{argument} must be a symmetric address of this PE ({me}), which stands for the same place on every "
                f"PE; got {memory.describe(address)}, an address of PE {memory.pe_of(address)} (remote_ptr() gives "
                "those; puts want the local one)"
            )
        if nbytes:
            for there in (me,) if pe is None else (me, pe):
                self._check_extent(self.on(there, address), nbytes, address, argument)
        return address

    def _check_extent(self, begin: int, nbytes: int, address: int, argument: str) -> None:
        """``nbytes`` from ``begin`` on must be where ``argument``, which is ``address``, may point."""
        origin, me = origin_of(address), self.program.pe
        if not self.extents.holds(begin, begin + nbytes, origin, me):
            problem = self.extents.problem(begin, begin + nbytes, origin, me)
            raise ValueError(f"{argument} must stay within one tensor; got {problem}")

    def check_signal(self, address: int, argument: str, pe: int | None = None) -> int:
        """``address``, if it is that of a 64-bit word of a symmetric tensor, in which ``pe`` has a part as well."""
        if address % 8:
            raise ValueError(f"{argument} must be 8-byte aligned (a 64-bit signal), got {address:#x}")
        return self.check_symmetric(address, 8, argument, pe)

    def check_flagged(self, address: int) -> int:
        """``address``, if it is that of a 128-bit word in the running PE's symmetric block."""
        if address % 16:
            raise ValueError(f"words must be 16-byte aligned, got {address:#x}")
        return self.check_symmetric(address, 16, "words")

    def check_local(self, address: int, nbytes: int, argument: str, pe: int) -> int:
        """``address``, if this PE's transfers of ``nbytes`` bytes, at least one, with ``pe`` may use it as their local
        side."""
        me, memory = self.program.pe, self.memory
        if memory.owns(address):
            if memory.pe_of(address) != me:
                raise ValueError(
                    f"{argument} must be memory of this PE ({me}); got {memory.describe(address)}, memory "
                    "of PE "
                    f"{memory.pe_of(address)}"
                )
        elif self.node_ids[pe] != self.node_ids[me]:
            raise ValueError(
                f"{argument} must lie in the symmetric heap when PE {pe} is on another node: the network "
                "card reads "
                f"only registered memory; got {address:#x}, which is ordinary memory"
            )
        elif address < NULL_PAGE:
            raise ValueError(f"{argument} must point to memory, got {address:#x}")
        self._check_extent(address, nbytes, address, argument)
        return address

    def on(self, pe: int, address: int) -> int:
        """The address of ``pe``'s copy of a symmetric address of the running PE."""
        memory = self.memory
        return address + (pe - memory.pe_of(address)) * memory.nbytes

    def reachable(self, pe: int) -> bool:
        """Return whether the running PE can load from and store to ``pe``'s block."""
        return self.node_ids[pe] == self.node_ids[self.program.pe]

    # ------------------------------------------------------------------ puts, gets, signals

    def put(
        self,
        dest: int,
        source: int,
        nbytes: int,
        pe: int,
        *,
        nbi: bool,
        signal: tuple[int, int, int] | None = None,
    ) -> None:
        """Copy to ``pe``, then update the signal ``(address, value, operation)`` there."""
        program, remote = self.program, self.on(pe, dest) if nbytes else 0
        self._count_put(program.pe, pe, nbytes)
        update = None if signal is None else self._update(program, pe, *signal)
        network = self.network
        what = "put" if signal is None else "put+signal"
        done = self.span(program, what, pe, nbytes)
        if network is not None:
            payload: int | bytes = source if nbi else ctypes.string_at(source, nbytes)
            pieces = network.cut(remote, payload, nbytes)
            move = partial(self.pointers.unseen.write_from, program.pe)
            network.issue(program, pe, "put", pieces, source_pe=program.pe, signal=update, done=done, move=move)
        else:
            if nbytes:
                ctypes.memmove(remote, source, nbytes)
                self.scheduler.notify_words(remote, nbytes)
            if update is not None:
                self.scheduler.turn()
                update()
            if done is not None:
                done()
        self.scheduler.turn()

    def put_word(self, dest: int, data: bytes, pe: int) -> None:
        """Put the bytes of one word to ``pe``, captured now."""
        program, remote = self.program, self.on(pe, dest)
        self._count_put(program.pe, pe, len(data))
        if self.network is not None:
            move = partial(self.pointers.unseen.write_from, program.pe)
            pieces = [(remote, data, len(data))]
            self.network.issue(program, pe, "put", pieces, source_pe=program.pe, is_flag=True, move=move)
        else:
            ctypes.memmove(remote, data, len(data))
            self.scheduler.notify_words(remote, len(data))
        self.scheduler.turn()

    def atomic(self, address: int, kind: Any, pe: int, change: Callable[[Any], Any], *, fetches: bool) -> Any:
        """Replace a word of ``pe`` by ``change(word)``, atomically.

        Args:
            address: of the word here, a multiple of its size.
            kind: its numpy type.
            fetches: make the change at once, and return the old word. Else it travels as a signal does.

        Returns:
            The old word, or None if it is not fetched.
        """
        program, network, remote, before = self.program, self.network, self.on(pe, address), None

        def update() -> None:
            nonlocal before
            before = self.pointers.change_word(program.pe, remote, kind, change)

        if fetches:
            if network is not None:
                network.flush_fenced(program.pe, pe)
            update()
            self.scheduler.poll(remote, lambda: f"asks for {self.memory.describe(remote)}")  # maybe in a loop
            return before
        if network is None:
            update()
        else:
            network.issue(program, pe, "signal", [], source_pe=program.pe, signal=update, is_flag=True)
        self.scheduler.turn()
        return None

    def get(self, dest: int, source: int, nbytes: int, pe: int, *, nbi: bool) -> None:
        """Copy from ``pe``. Returns when the bytes are here, or at once if ``nbi``."""
        program, remote = self.program, self.on(pe, source) if nbytes else 0
        counts = self.counts[program.pe]
        counts.gets += 1
        counts.get_bytes += nbytes
        network, scheduler = self.network, self.scheduler
        done = self.span(program, "get", pe, nbytes)
        if network is None:
            scheduler.turn()
            if nbytes:
                ctypes.memmove(dest, remote, nbytes)
                scheduler.notify_words(dest, nbytes)
            if done is not None:
                done()
            return

        key = object()

        def finished() -> None:
            scheduler.notify(key)
            if done is not None:
                done()

        def fetch(to: int, source: int, length: int) -> None:
            with self.pointers.unseen.as_seen_by(program.pe, source, source + length):
                data = ctypes.string_at(source, length)
            ctypes.memmove(to, data, length)

        pieces = network.cut(dest, remote, nbytes)
        operation = network.issue(program, pe, "get", pieces, source_pe=program.pe, done=finished, move=fetch)
        if nbi:
            scheduler.turn()
        else:
            scheduler.wait(lambda: operation.arrived, lambda: f"waits for a get of {nbytes} bytes from pe{pe}", [key])

    def signal(self, address: int, value: int, operation: int, pe: int) -> None:
        """Update a signal of ``pe``."""
        program = self.program
        update = self._update(program, pe, address, value, operation)
        if self.network is not None:
            self.network.issue(program, pe, "signal", [], source_pe=program.pe, signal=update)
        else:
            update()
        self.scheduler.turn()

    def _update(self, program: Task, pe: int, address: int, value: int, operation: int) -> Callable[[], None]:
        """The update of ``pe``'s signal, to be made when it arrives."""
        memory, remote, scheduler = self.memory, self.on(pe, address), self.scheduler
        self.counts[program.pe].signals += 1

        def update() -> None:
            with self.pointers.unseen.as_seen_by(program.pe, remote, remote + 8):
                if operation == _SIGNAL_ADD:
                    self._atomic_add(remote, value)
                else:
                    memory.set_word(remote, value)
            scheduler.notify(remote)
            if self.trace is not None:
                sign = "+=" if operation == _SIGNAL_ADD else "="
                self.trace.instant(pe, f"{memory.describe(remote)} {sign} {value}", {"from": program.name})

        return update

    def _count_put(self, me: int, pe: int, nbytes: int) -> None:
        counts = self.counts[me]
        counts.puts += 1
        counts.put_bytes += nbytes
        if self.node_ids[pe] != self.node_ids[me]:
            counts.inter_node_puts += 1
            counts.inter_node_bytes += nbytes

    def span(self, program: Task, what: str, pe: int, nbytes: int) -> Callable[[], None] | None:
        """Begin a transfer on the timeline, if there is one; the result ends it."""
        if self.trace is None:
            return None
        return self.trace.transfer(program.pe, program.track, f"{what} to pe{pe}", {"bytes": nbytes})

    # ------------------------------------------------------------------ order

    def fence(self) -> None:
        """Order what the PE sends to each PE, before and after."""
        if self.network is not None:
            # NVSHMEM's fence is a membar as well: other PEs see what this one has stored to its own memory.
            self.network.flush_stores(self.program, to=self.program.pe)
            self.network.flush_released(self.program.pe)
            self.network.fence(self.program.pe)

    def quiet(self) -> None:
        """Wait until what the PE has sent so far has arrived, but for the stores of other programs."""
        program, network = self.program, self.network
        if network is None:
            self.scheduler.turn()
            return
        network.flush_released(program.pe)
        sent = network.outstanding(program, program.pe)
        self.scheduler.wait(
            lambda: all(operation.arrived for operation in sent),
            lambda: f"waits in quiet for {sum(not operation.arrived for operation in sent)} operation(s)",
            [("arrived", program.pe)],
        )

    def release(self, *, system: bool = True) -> None:
        """Order the running program's earlier stores before what follows; says nothing of its puts.

        With them come the stores that other programs of the PE have released: whoever acquired them passes that on.

        Args:
            system: for all PEs; else for the programs of this one.
        """
        if self.network is None:
            return
        if system:
            self.network.flush_stores(self.program)
            self.network.flush_released(self.program.pe)
        else:
            self.network.release_stores(self.program)

    def barrier(self, name: str) -> None:
        """Wait for every PE; ``barrier_all`` completes what the PE has sent first."""
        if name == "barrier_all":
            self.quiet()
        self.timed(name, lambda: self._arrive(name))

    def timed(self, name: str, wait: Callable[[], Any]) -> Any:
        """``wait()``, as a slice of the running program's track on the timeline, if there is one."""
        if self.trace is None:
            return wait()
        program = self.program
        with self.trace.slice(program.pe, program.track, name):
            return wait()
