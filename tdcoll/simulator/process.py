# SPDX-License-Identifier: Apache-2.0
"""One process per rank: the simulator under ``launch.sh`` and torchrun.

The symmetric blocks of all ranks are one sparse file in memory that never has a name: rank 0 makes
it, and the others open it through rank 0's descriptor (``/proc/PID/fd``). The kernel therefore
frees it with the last process that maps it, even if a job crashes. A launch runs its programs as
tasks (:mod:`.polling`) until all are done.

Messages arrive at once and in order here: delivery is not weakened, schedules are the operating
system's, and a deadlock is found by timeout. If you need exact reports or adverse orders, use
:class:`tdcoll.testing.World`.

Layout: one cache line per PE with how often it has arrived at each barrier, then the blocks. Every
counter has one writer, a signal is one aligned 8-byte store, and additions use the interpreter's
atomic operations, which are the processor's. Nothing more is needed, because on x86 stores are seen
in program order.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from tdcoll import runtime
from tdcoll.base.errors import HeapExhaustedError, TdcollError
from tdcoll.runtime.control import ControlPlane, require_equal
from tdcoll.simulator.interpreter import Installed
from tdcoll.simulator.machine import BARRIERS, Machine
from tdcoll.simulator.memory import Memory, MemoryView, aligned
from tdcoll.simulator.polling import PollingScheduler
from tdcoll.simulator.tasks import GridLaunch, Task

_LINE_WORDS = 8


class ProcessHeap(MemoryView):
    """This process's view of the shared symmetric heap, and the machine that runs its kernels.
    Collective.

    From construction to :meth:`close` every interpreted kernel of the process runs on it.

    Args:
        timeout_s: seconds until waits without a deadline raise.
        puts: whether NVSHMEM's functions work in kernels.
    """

    def __init__(
        self,
        *,
        pe: int,
        n_pes: int,
        nbytes: int,
        control: ControlPlane,
        timeout_s: float,
        puts: bool = True,
    ) -> None:
        everyone = range(n_pes)
        what = "the size of the symmetric heap"
        require_equal(control.all_gather(everyone, what, nbytes), everyone, what)
        block = aligned(nbytes)
        header = -(-8 * _LINE_WORDS * n_pes // mmap.PAGESIZE) * mmap.PAGESIZE
        total = header + block * n_pes
        buffer = _share(pe, everyone, total, control)
        whole = memoryview(buffer)
        memory = Memory(whole, header, block, n_pes, one_view=True, puts=puts)
        super().__init__(memory, pe, (True,) * n_pes)
        self._everyone = everyone
        self._control = control
        lines = whole[:header].cast("Q")
        self._scheduler = PollingScheduler(timeout_s)
        self.machine = Machine(
            memory=memory,
            scheduler=self._scheduler,
            node_ids=(0,) * n_pes,
            launch=self._launch,
            arrivals={
                barrier: lines[place::_LINE_WORDS][:n_pes] for place, barrier in enumerate(BARRIERS)
            },
        )
        self._hooks = Installed(self.machine)

    def close(self) -> None:
        """Remove the hooks. Collective. The memory goes with the last tensor that views it.
        Idempotent."""
        if not self._hooks.installed:
            return
        try:
            self._control.all_gather(self._everyone, "close the symmetric heap", None)
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove the hooks. Idempotent."""
        self._hooks.remove()

    def _launch(self, launch: GridLaunch) -> None:
        machine = self.machine
        pe = self.pe
        if self._scheduler.in_a_kernel():
            raise TdcollError(f"{launch.kernel} was launched by a kernel")
        job = runtime.current_or_none()
        if job is not None:  # emulated nodes are known once the job is
            machine.node_ids = job.node_ids
        while len(launch.tasks) < launch.total:
            launch.start(pe, partial(Task, 0))
        self._scheduler.run(launch.tasks)


def _share(pe: int, everyone: Sequence[int], nbytes: int, control: ControlPlane) -> mmap.mmap:
    """Return the same ``nbytes`` zeros in every process."""
    memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    if nbytes > memory:
        raise HeapExhaustedError(
            f"the simulated symmetric heap needs {nbytes} bytes of shared memory, and this host has {memory}. Lower "
            "NVSHMEM_SYMMETRIC_SIZE (such as 16M) or initialize(heap_bytes=...)."
        )
    file = os.memfd_create("tdcoll-heap") if pe == 0 else None
    try:
        place = buffer = problem = None
        if file is not None:
            os.ftruncate(file, nbytes)
            found = os.fstat(file)
            place = f"/proc/{os.getpid()}/fd/{file}", found.st_dev, found.st_ino
        place_of_0 = control.all_gather(everyone, "create the symmetric heap", place)[0]
        try:
            buffer = _map(place_of_0, nbytes)
        except OSError as error:
            problem = str(error)
        problems = control.all_gather(everyone, "map the symmetric heap", problem)
    finally:
        if file is not None:
            os.close(file)
    failures = [f"PE {other}: {what}" for other, what in enumerate(problems) if what is not None]
    if failures or buffer is None:
        raise TdcollError(
            "the simulated symmetric heap is shared memory of one host, and some ranks could not map it: "
            + "; ".join(failures)
        )
    return buffer


def _map(place: Sequence[Any], nbytes: int) -> mmap.mmap:
    """Map the file at ``place``: its path, and the device and inode that it has in rank 0's
    process."""
    path, *identity = place
    with open(path, "r+b") as file:
        found = os.fstat(file.fileno())
        if [found.st_dev, found.st_ino] != identity:
            raise OSError(
                f"{path} is another file here; do the ranks have PID namespaces of their own?"
            )
        return mmap.mmap(file.fileno(), nbytes)
