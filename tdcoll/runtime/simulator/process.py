# SPDX-License-Identifier: Apache-2.0
"""One process per rank: the simulator under ``launch.sh`` and torchrun.

The symmetric blocks of all ranks are one sparse file in shared memory that never has a name: rank 0 makes it, and the
others open it through rank 0's descriptor (``/proc/PID/fd``). The kernel therefore frees it with the last process that
maps it, however and whenever a job ends. Host code runs
as ordinary code in each process; a launch runs its programs as tasks (:mod:`.polling`) until all are done.

Messages arrive at once and in order here: delivery is not weakened, schedules are the operating system's, and
a deadlock is found by timeout. For exact reports and adverse orders use :class:`tdcoll.testing.World`.

Layout: one cache line per PE and barrier with the PE's number of arrivals, then the blocks. Every counter has
one writer, a signal is one aligned 8-byte store, and additions use the interpreter's atomic operations, which
are the processor's. On x86 stores are seen in program order, so nothing more is needed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import IO, Any

import numpy as np
import triton.runtime.interpreter as triton_interpreter

from tdcoll import runtime
from tdcoll.errors import HeapExhaustedError, TdcollError
from tdcoll.runtime.control import ControlPlane, require_equal
from tdcoll.runtime.simulator.interpreter import Installed
from tdcoll.runtime.simulator.machine import Machine
from tdcoll.runtime.simulator.memory import Memory, MemoryView, aligned
from tdcoll.runtime.simulator.polling import PollingScheduler
from tdcoll.runtime.simulator.tasks import Task
from tdcoll.runtime.simulator.trace import HOST_TRACK, Trace

__all__ = ["ProcessHeap"]

_SHARED_MEMORY = "/dev/shm"
_LINE_WORDS = 8
_BARRIERS = ("barrier_all", "sync_all")


def _create(nbytes: int) -> IO[bytes]:
    """Make the sparse file, which has no name. Prefers shared memory, which costs no disk."""
    refused = []
    for folder in (_SHARED_MEMORY, tempfile.gettempdir()):
        try:
            room = os.statvfs(folder)
            if room.f_bavail * room.f_frsize < nbytes:
                refused.append(f"{folder} ({room.f_bavail * room.f_frsize} bytes free)")
                continue
            with contextlib.ExitStack() as unless_it_works:
                file = unless_it_works.enter_context(tempfile.TemporaryFile(prefix="tdcoll-heap-", dir=folder))
                os.ftruncate(file.fileno(), nbytes)
                unless_it_works.pop_all()
                return file
        except OSError as error:
            refused.append(f"{folder} ({error.strerror})")
    raise HeapExhaustedError(
        f"the simulated symmetric heap needs {nbytes} bytes of shared memory; there is no room in "
        f"{' or '.join(refused)}. Lower NVSHMEM_SYMMETRIC_SIZE (such as 16M) or initialize(heap_bytes=...)."
    )


def _map(place: Sequence[Any], nbytes: int) -> mmap.mmap:
    """Map the file at ``place``: its path, and the device and inode that it has in rank 0's process."""
    path, *identity = place
    descriptor = os.open(path, os.O_RDWR)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a heap of this user's")
        if [found.st_dev, found.st_ino] != identity:
            raise OSError(f"{path} is another file here; do the ranks have PID namespaces of their own?")
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)


class ProcessHeap(MemoryView):
    """This process's view of the shared symmetric heap, and the machine that runs its kernels. Collective.

    From construction to :meth:`close` every interpreted kernel of the process runs on it.

    Args:
        pe: this process's PE.
        n_pes: number of PEs, all on this host.
        nbytes: size of each PE's block.
        control: exchanges with the other PEs.
        timeout_s: when to give up waits that have no deadline of their own.
        puts: whether NVSHMEM's functions work in kernels.
    """

    def __init__(
        self, *, pe: int, n_pes: int, nbytes: int, control: ControlPlane, timeout_s: float, puts: bool = True
    ) -> None:
        everyone = range(n_pes)
        what = "the size of the symmetric heap"
        require_equal(control.all_gather(everyone, what, nbytes), everyone, what)
        block = aligned(nbytes)
        header = -(-8 * _LINE_WORDS * n_pes * len(_BARRIERS) // mmap.PAGESIZE) * mmap.PAGESIZE
        total = header + block * n_pes
        buffer = _share(pe, everyone, total, control)
        whole = memoryview(buffer)
        memory = Memory(whole, header, block, n_pes, one_view=True, puts=puts)
        super().__init__(memory, pe, (True,) * n_pes)
        self._everyone, self._control = everyone, control
        self._arrivals = whole[:header].cast("Q")
        self._scheduler = PollingScheduler(timeout_s)
        self._machine = Machine(
            memory=memory,
            scheduler=self._scheduler,
            node_ids=(0,) * n_pes,
            launch=self._launch,
            barrier=self._barrier,
            atomic_add=_atomic_add,
        )
        self._hooks: Installed | None = Installed(self._machine)

    def close(self) -> None:
        """Remove the hooks. Collective. The memory goes with the last tensor that views it. Idempotent."""
        if self._hooks is None:
            return
        try:
            self._control.all_gather(self._everyone, "close the symmetric heap", None)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Remove the hooks. Idempotent."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    @property
    def trace(self) -> Trace | None:
        """The timeline being recorded, or None. Set it to begin or end recording."""
        return self._machine.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._machine.trace = trace

    def _launch(self, kernel: str, program: Callable[[], None], grid: tuple[int, int, int], threads: int) -> None:
        machine, pe, trace = self._machine, self.pe, self._machine.trace
        if self._scheduler.in_a_kernel():
            raise TdcollError(f"{kernel} was launched by a kernel")
        job = runtime.current_or_none()
        if job is not None:  # emulated nodes are known once the job is
            machine.node_ids = job.node_ids
        machine.counts[pe].launches += 1

        def body(name: str, track: int) -> Callable[[], None]:
            def run() -> None:
                assert trace is not None
                with trace.slice(pe, track, name):
                    program()

            return program if trace is None else run

        tasks = []
        for number in range(grid[0] * grid[1] * grid[2]):  # x fastest, as a GPU starts them
            rest, x = divmod(number, grid[0])
            z, y = divmod(rest, grid[1])
            name, track = f"{kernel}({x},{y},{z})", HOST_TRACK + 1 + number
            task = Task(number, f"pe{pe} {name}", pe, body(name, track), slow=False)
            task.grid_idx, task.grid_dim, task.threads, task.track = (x, y, z), grid, threads, track
            tasks.append(task)
        with nullcontext() if trace is None else trace.slice(pe, HOST_TRACK, kernel):
            self._scheduler.run(tasks)

    def _barrier(self, name: str) -> None:
        row = _BARRIERS.index(name) * self.n_pes
        words = [(row + pe) * _LINE_WORDS for pe in range(self.n_pes)]
        arrivals = self._arrivals
        arrivals[words[self.pe]] += 1
        generation = arrivals[words[self.pe]]

        def missing() -> list[str]:
            return [f"pe{pe}" for pe, word in enumerate(words) if arrivals[word] < generation]

        self._scheduler.wait(
            lambda: not missing(),
            lambda: f"waits in {name} number {generation} for {', '.join(missing())}",
            [],
        )


def _share(pe: int, everyone: Sequence[int], nbytes: int, control: ControlPlane) -> mmap.mmap:
    """The same ``nbytes`` zeros in every process."""
    place: tuple[str, int, int] | None = None
    problem: str | None = None
    with contextlib.ExitStack() as stack:
        if pe == 0:
            try:
                file = stack.enter_context(_create(nbytes))
                found = os.fstat(file.fileno())
                place = (f"/proc/{os.getpid()}/fd/{file.fileno()}", found.st_dev, found.st_ino)
            except HeapExhaustedError as error:
                problem = str(error)
        place_of_0, problem = control.all_gather(everyone, "create the symmetric heap", (place, problem))[0]
        if problem is not None:
            raise HeapExhaustedError(problem)
        buffer = None
        try:
            buffer = _map(place_of_0, nbytes)
        except OSError as error:
            problem = str(error)
        failures = [
            f"PE {other}: {what}"
            for other, what in enumerate(control.all_gather(everyone, "map the symmetric heap", problem))
            if what is not None
        ]
    if failures or buffer is None:
        raise TdcollError(
            "the simulated symmetric heap is shared memory of one host, and some ranks could not map it: "
            + "; ".join(failures)
        )
    return buffer


def _atomic_add(address: int, value: int) -> None:
    interpreter = triton_interpreter._interpreter
    interpreter.atomic_rmw(
        interpreter.RMW_OP.ADD,
        np.array([address], np.uint64),
        np.array([value], np.uint64),
        np.array([True]),
        interpreter.MEM_SEMANTIC.ACQUIRE_RELEASE,
    )
