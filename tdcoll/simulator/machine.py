# SPDX-License-Identifier: Apache-2.0
"""The simulated machine: its memory, network and scheduler together, and which addresses a program
may give it.

What programs do on it is in :mod:`.transfers` (puts, gets, signals, order), :mod:`.pointers`
(loads, stores, atomics) and :mod:`.waits`, which :mod:`tdcoll.simulator.lowering` calls for the
device language and :mod:`.builder` for Triton's operations. The same code serves the in-process
:class:`~.world.World` and one process per rank; they differ in the scheduler, and in that only a
World may have a weak network. Without one everything arrives at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tdcoll.base.errors import NotInitializedError, TdcollError
from tdcoll.simulator.bounds import Bounds, origin_of
from tdcoll.simulator.memory import NULL_PAGE, Memory
from tdcoll.simulator.network import Network
from tdcoll.simulator.places import kernel_place
from tdcoll.simulator.polling import PollingScheduler
from tdcoll.simulator.races import Races
from tdcoll.simulator.scheduler import Scheduler
from tdcoll.simulator.tasks import GridLaunch, Task
from tdcoll.simulator.trace import Trace, slice_of
from tdcoll.simulator.unseen import Unseen

BARRIERS = ("barrier_all", "sync_all")


@dataclass
class Counts:
    """What one PE did since the machine was made. Bytes are payload; a put with a signal counts as
    both."""

    puts: int = 0
    put_bytes: int = 0
    signals: int = 0
    stores: int = 0
    store_bytes: int = 0
    inter_node_bytes: int = 0


class Machine:
    """Memory, network and bookkeeping of a simulated job.

    Args:
        node_ids: name of each PE's node; pointers reach PEs of the same node only.
        arrivals: how often each PE has arrived at each of :data:`BARRIERS`.
        trace: timeline to record, or None.
        check_overflow: integers of 32 bits that overflow are errors, and so are failed
            ``tl.device_assert``.

    Attributes:
        network: weak delivery, or None.
        races: what follows the order of accesses, or None.
        unseen: what other PEs do not see yet of a PE's stores to its own memory.
    """

    def __init__(
        self,
        *,
        memory: Memory,
        scheduler: Scheduler | PollingScheduler,
        node_ids: Sequence[object],
        launch: Callable[[GridLaunch], None],
        arrivals: Mapping[str, MutableSequence[int] | memoryview[int]],
        trace: Trace | None = None,
        check_overflow: bool = False,
    ) -> None:
        self.memory = memory
        self.scheduler = scheduler
        self.trace = trace
        self.node_ids = tuple(node_ids)
        self.launch = launch
        self.arrivals = arrivals
        self.check_overflow = check_overflow
        self.network: Network | None = None
        self.races: Races | None = None
        self.bounds = Bounds(memory)
        self.unseen = Unseen()
        self.counts = [Counts() for _ in self.node_ids]

    @property
    def program(self) -> Task:
        """The running program; ``TdcollError`` if device code runs outside a kernel."""
        task = self.scheduler.current
        if task is None or task.grid_idx is None:
            raise TdcollError(
                "the device language was called on the host: call it inside a @tdcoll.jit kernel"
            )
        return task

    def on(self, pe: int, address: int) -> int:
        """The address of ``pe``'s copy of a symmetric address of the running PE."""
        memory = self.memory
        return address + (pe - memory.pe_of(address)) * memory.nbytes

    def accessible(self, pe: int) -> bool:
        """Return whether the running PE can load from and store to ``pe``'s block."""
        return self.node_ids[pe] == self.node_ids[self.program.pe]

    def check_pe(self, pe: int) -> int:
        """``pe``, if there is such a PE."""
        if not 0 <= pe < self.memory.n_pes:
            raise ValueError(f"pe must be in 0..{self.memory.n_pes - 1}, got {pe}")
        return pe

    def check_symmetric(
        self, address: int, nbytes: int, argument: str, pe: int | None = None
    ) -> None:
        """Refuse bytes that are not the running PE's part of a symmetric tensor, or in which ``pe``
        has no part.

        No bytes may lie anywhere in the running PE's block.
        """
        me = self.program.pe
        memory = self.memory
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
                self._check_bounds(self.on(there, address), nbytes, address, argument)

    def check_signal(self, address: int, argument: str, pe: int | None = None) -> None:
        """As :meth:`check_symmetric`, for an aligned word of 64 bits."""
        if address % 8:
            raise ValueError(
                f"{argument} must be 8-byte aligned (a 64-bit signal), got {address:#x}"
            )
        self.check_symmetric(address, 8, argument, pe)

    def check_local(self, address: int, nbytes: int, argument: str, pe: int) -> None:
        """Refuse bytes, if there are any, that transfers with ``pe`` may not use as their local
        side."""
        me = self.program.pe
        memory = self.memory
        if not nbytes:
            return
        if memory.owns(address):
            if memory.pe_of(address) != me:
                raise ValueError(
                    f"{argument} must be memory of this PE ({me}); got {memory.describe(address)}, memory of PE "
                    f"{memory.pe_of(address)}"
                )
        elif not self.accessible(pe):
            raise ValueError(
                f"{argument} must lie in the symmetric heap when PE {pe} is on another node: the network card reads "
                f"only registered memory; got {address:#x}, which is ordinary memory"
            )
        elif address < NULL_PAGE:
            raise ValueError(f"{argument} must point to memory, got {address:#x}")
        self._check_bounds(address, nbytes, address, argument)

    def _check_bounds(self, begin: int, nbytes: int, address: int, argument: str) -> None:
        """``nbytes`` from ``begin`` on must be where ``argument``, which is ``address``, may
        point."""
        problem = self.bounds.problem(begin, begin + nbytes, origin_of(address), self.program.pe)
        if problem is not None:
            raise ValueError(f"{argument} must stay within one tensor; got {problem}")

    def slice(self, name: str) -> AbstractContextManager[None]:
        """A slice of the running program's row of the timeline, if there is one."""
        program = self.program
        return slice_of(self.trace, program.pe, program.track, name)

    def show_load(self, begin: int, end: int) -> None:
        """Put a load of the running program from symmetric bytes ``[begin, end)`` on the timeline,
        if there is one."""
        if self.trace is not None:
            memory = self.memory
            program = self.program
            whose = f"pe{memory.pe_of(begin)}.{memory.describe_range(begin, end - begin)}"
            place = kernel_place().note().strip(" ()")
            self.trace.load(program.pe, program.track, f"load {whose}", {"at": place})

    def span(
        self, what: str, pe: int, nbytes: int, to: int, source: int = 0
    ) -> Callable[[], None] | None:
        """Begin a transfer of the running task to ``to`` on the timeline, if there is one; the
        result ends it."""
        task = self.scheduler.current
        if self.trace is None or task is None:
            return None
        memory = self.memory
        name = f"{what} {self.memory.describe_range(to, nbytes)} -> pe{pe}"
        details = {
            "bytes": nbytes,
            "to": memory.describe(to),
            "from": memory.describe(source) if source else "",
        }
        return self.trace.transfer(task.pe, task.track, name, details)


_machine: Machine | None = None


def machine() -> Machine:
    """Return the machine that kernels run on."""
    if _machine is None:
        raise NotInitializedError(
            "the device language needs a simulated machine: call tdcoll.initialize(), or run inside "
            "tdcoll.testing.World.run()"
        )
    return _machine


def put(wanted: Machine | None) -> None:
    """Let kernels run on this machine, or on none if it is None; ``TdcollError`` if they run on
    another one."""
    global _machine
    if wanted is not None and _machine is not None:
        raise TdcollError("a simulated machine is active in this process already; only one can be")
    _machine = wanted
