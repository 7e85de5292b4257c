# SPDX-License-Identifier: Apache-2.0
"""Tasks, and the two ways of switching between them.

Tasks are greenlets if the package is installed. Otherwise they are threads that pass on a baton, so
that only one of them runs at a time: the same schedules, several times slower.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

try:
    import greenlet
except ImportError:  # the threads below do the same, slower
    greenlet = None

from tdcoll.simulator.trace import HOST_TRACK, Trace, slice_of


class TaskKilled(BaseException):
    """Unwinds a task whose PE was killed or whose run has ended. No ``Exception``, because no code
    may handle it."""


@dataclass(slots=True)
class Wait:
    """The condition that a blocked task waits for."""

    ready: Callable[[], bool]
    describe: Callable[[], str]
    keys: Sequence[Hashable]
    deadline_ns: int | None


@dataclass(slots=True, eq=False)
class Task:
    """One thread of control, with its state: the host of a PE, or a program of a kernel, at a place
    in its grid."""

    index: int
    name: str
    pe: int
    body: Callable[[], None]
    slow: bool = False
    grid_idx: tuple[int, int, int] | None = None
    grid_dim: tuple[int, int, int] | None = None
    threads: int = 0  # threads of the block
    track: int = HOST_TRACK  # timeline row
    lane: int | None = None  # the thread that runs, inside `if <test on tid>`
    linked: bool = True  # NVSHMEM would be linked into the kernel on a GPU
    done: bool = False
    killed: bool = False
    expired: bool = False
    error: BaseException | None = None
    wait: Wait | None = None
    handle: Any = None  # the switch's own
    thread: int | None = None  # of the host, that runs it
    streams: list[Any] = field(default_factory=list)  # that a host has entered, by `with stream:`
    records_gradients: bool | None = None  # autograd's mode of a host between its turns
    polls: int = 0
    polled: set[Hashable] = field(default_factory=set)
    progress_seen: int = -1
    spins_on: Callable[[], str] | None = None
    quiet_loads: int = 0
    in_flight: int = 0  # messages that it has sent and that have not arrived

    @property
    def is_program(self) -> bool:
        """True for a program of a kernel, False for a host task."""
        return self.grid_idx is not None

    def run(self) -> None:
        """Run the body; the scheduler looks at ``error`` afterwards."""
        self.thread = threading.get_ident()
        try:
            self.body()
        except TaskKilled:
            pass
        except BaseException as error:  # raised again by Scheduler.run
            self.error = error
        self.done = True


@dataclass(eq=False)
class GridLaunch:
    """One grid on its way.

    Attributes:
        first_track: its row of the timeline; those of its programs follow.
        tasks: programs that have started.
        done: how many of them have ended.
        past: what happens before them, if that is known (:mod:`.races`).
    """

    kernel: str
    program: Callable[[], None]
    grid: tuple[int, int, int]
    threads: int
    first_track: int = HOST_TRACK
    tasks: list[Task] = field(default_factory=list)
    done: int = 0
    past: Any = None

    @property
    def total(self) -> int:
        """Programs of the grid."""
        return math.prod(self.grid)

    @property
    def running(self) -> int:
        """Programs in flight."""
        return len(self.tasks) - self.done

    def start(
        self,
        pe: int,
        spawn: Callable[[str, int, Callable[[], None]], Task],
        trace: Trace | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the next program, x fastest, as a GPU does; ``ended`` is called at its end."""
        number = len(self.tasks)
        rest, x = divmod(number, self.grid[0])
        z, y = divmod(rest, self.grid[1])
        name = f"{self.kernel}({x},{y},{z})"
        track = self.first_track + 1 + number

        def body() -> None:
            with slice_of(trace, pe, track, name):
                self.program()
            self.done += 1
            ended()

        task = spawn(f"pe{pe} {name}", pe, body)
        task.grid_idx = (x, y, z)
        task.grid_dim = self.grid
        task.threads = self.threads
        task.track = track
        self.tasks.append(task)

    def describe(self) -> str:
        waiting = self.total - len(self.tasks)
        rest = f", {waiting} not started for lack of room" if waiting else ""
        return f"waits for its launch of {self.kernel}: {self.done} of {self.total} programs done{rest}"


def count_poll(task: Task, key: Hashable, progress: int) -> int:
    """Note that ``task`` loads the words at ``key``; return how many loads in a row have told it
    nothing new.

    Such loads are of words that it has loaded already, if ``progress``, the number of all writes,
    is as it was.
    """
    if task.progress_seen != progress:
        task.progress_seen = progress
        task.polls = 0
        task.polled.clear()
    if key in task.polled:
        task.polls += 1
    else:
        task.polled.add(key)
        task.polls = 0
    return task.polls


class Greenlets:
    """Tasks as greenlets of the thread that makes this object."""

    def __init__(self) -> None:
        self._main = greenlet.getcurrent()

    def start(self, task: Task) -> None:
        """Prepare a task; it begins with its first :meth:`resume`."""
        # explicit parent: a host task spawns programs
        task.handle = greenlet.greenlet(task.run, self._main)

    def resume(self, task: Task) -> None:
        """Run the task until it suspends or ends; called by the scheduler."""
        if task.grid_idx is not None:
            task.handle.switch()
            return
        # Autograd's mode belongs to the thread, which all tasks share. Hosts change it, as by
        # no_grad().
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(before if task.records_gradients is None else task.records_gradients)
        task.handle.switch()
        task.records_gradients = torch.is_grad_enabled()
        torch.set_grad_enabled(before)

    def suspend(self, task: Task) -> None:
        """Go back to the scheduler; called by the running task. Raises TaskKilled if unwound
        meanwhile."""
        self._main.switch()

    def unwind(self, task: Task) -> None:
        """End a task where it is; called by the scheduler, or by another task."""
        if not task.done and task.handle:  # a greenlet that has not started is False
            task.handle.parent = greenlet.getcurrent()  # come back here when it is dead
            before = torch.is_grad_enabled()
            task.handle.throw(TaskKilled)
            torch.set_grad_enabled(before)
        task.done = True


class _Threads:
    """The same with threads, of which only the one that holds the baton runs."""

    def start(self, task: Task) -> None:
        to_task, to_resumer = task.handle = threading.Semaphore(0), threading.Semaphore(0)

        def run() -> None:
            to_task.acquire()
            if not task.killed:
                task.run()
            task.done = True
            to_resumer.release()

        threading.Thread(target=run, daemon=True, name=task.name).start()

    def resume(self, task: Task) -> None:
        to_task, to_resumer = task.handle
        to_task.release()
        to_resumer.acquire()

    def suspend(self, task: Task) -> None:
        to_task, to_resumer = task.handle
        to_resumer.release()
        to_task.acquire()
        if task.killed:
            raise TaskKilled

    def unwind(self, task: Task) -> None:
        if not task.done:
            task.killed = True
            self.resume(task)


Switch = Greenlets | _Threads


def make_switch(backend: str | None) -> Switch:
    """Return the switch named ``"greenlet"`` or ``"thread"``; if None, greenlets if they are
    installed."""
    kinds = ("thread",) if greenlet is None else ("greenlet", "thread")
    if backend not in (None, *kinds):
        raise ValueError(f"backend must be one of {kinds}, got {backend!r}")
    return _Threads() if (backend or kinds[0]) == "thread" else Greenlets()
