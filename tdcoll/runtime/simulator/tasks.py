# SPDX-License-Identifier: Apache-2.0
"""Tasks, and the two ways of switching between them.

Greenlets where the package is installed. Otherwise threads that hand on a baton, so that still only one of
them runs at a time: the same schedules, several times slower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

try:
    import greenlet
except ImportError:  # the threads below do the same, slower
    greenlet = None

__all__ = ["Switch", "Task", "TaskKilled", "Wait", "count_poll", "make_switch"]


class TaskKilled(BaseException):
    """Unwinds a task whose PE was killed or whose run has ended. Not an ``Exception``: nobody handles it."""


class Wait:
    """What a blocked task waits for."""

    __slots__ = ("deadline_ns", "describe", "keys", "ready")

    def __init__(
        self,
        ready: Callable[[], bool],
        describe: Callable[[], str],
        keys: Sequence[Hashable],
        deadline_ns: int | None,
    ) -> None:
        self.ready, self.describe, self.keys, self.deadline_ns = ready, describe, keys, deadline_ns


class Task:
    """One thread of control. The simulator's other parts keep their per-program state here, too."""

    __slots__ = (
        "body",
        "done",
        "error",
        "expired",
        "grid_dim",
        "grid_idx",
        "handle",
        "index",
        "killed",
        "lane",
        "linked",
        "name",
        "pe",
        "polled",
        "polls",
        "progress_seen",
        "quiet_loads",
        "slow",
        "spins_on",
        "thread",
        "threads",
        "track",
        "wait",
    )

    def __init__(self, index: int, name: str, pe: int, body: Callable[[], None], slow: bool) -> None:
        self.index, self.name, self.pe, self.body, self.slow = index, name, pe, body, slow
        self.done = self.killed = self.expired = False
        self.error: BaseException | None = None
        self.wait: Wait | None = None
        self.handle: Any = None  # the backend's own
        self.thread: int | None = None  # of the host, that runs it
        # a kernel's program
        self.grid_idx: tuple[int, int, int] | None = None
        self.grid_dim: tuple[int, int, int] | None = None
        self.threads = 0  # threads of the block
        self.lane: int | None = None  # the thread that runs, inside `if <test on tid>`
        self.linked = True  # NVSHMEM would be linked into the kernel on a GPU
        self.track = 0  # timeline row
        # spinning
        self.polls = 0
        self.polled: set[Hashable] = set()
        self.progress_seen = -1
        self.spins_on: Callable[[], str] | None = None
        self.quiet_loads = 0

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


def count_poll(task: Task, key: Hashable, progress: int) -> int:
    """Note that ``task`` loads the words at ``key``; how many loads in a row have told it nothing new.

    That is, loads of words that it has loaded already, with nobody having written anything since
    (``progress`` is the number of writes so far).
    """
    if task.progress_seen != progress:
        task.progress_seen, task.polls = progress, 0
        task.polled.clear()
    if key in task.polled:
        task.polls += 1
    else:
        task.polled.add(key)
        task.polls = 0
    return task.polls


class Switch(Protocol):
    """Starts, resumes and suspends tasks."""

    def start(self, task: Task) -> None:
        """Prepare a task; it begins with its first :meth:`resume`."""
        ...

    def resume(self, task: Task) -> None:
        """Called by the scheduler: run the task until it suspends or ends."""
        ...

    def suspend(self, task: Task) -> None:
        """Called by the running task: back to the scheduler. Raises TaskKilled if unwound meanwhile."""
        ...

    def unwind(self, task: Task) -> None:
        """Called by the scheduler, or by another task: end a task where it is."""
        ...


class _Greenlets:
    """Tasks as greenlets of the thread that calls :meth:`Scheduler.run`."""

    def __init__(self) -> None:
        self._main = greenlet.getcurrent()

    def start(self, task: Task) -> None:
        task.handle = greenlet.greenlet(task.run, self._main)  # explicit parent: a host task spawns programs

    def resume(self, task: Task) -> None:
        task.handle.switch()

    def suspend(self, task: Task) -> None:
        self._main.switch()

    def unwind(self, task: Task) -> None:
        if not task.done and task.handle:  # a greenlet that has not started is False
            task.handle.parent = greenlet.getcurrent()  # come back here when it is dead
            task.handle.throw(TaskKilled)
        task.done = True


class _Baton:
    """What a task's thread and whoever resumes it hand to and fro."""

    def __init__(self) -> None:
        self.to_task, self.to_resumer = threading.Semaphore(0), threading.Semaphore(0)


class _Threads:
    """Tasks as threads, of which only the one that holds the baton runs."""

    def start(self, task: Task) -> None:
        baton = task.handle = _Baton()

        def run() -> None:
            baton.to_task.acquire()
            if not task.killed:
                task.run()
            task.done = True
            baton.to_resumer.release()

        threading.Thread(target=run, daemon=True, name=task.name).start()

    def resume(self, task: Task) -> None:
        task.handle.to_task.release()
        task.handle.to_resumer.acquire()

    def suspend(self, task: Task) -> None:
        task.handle.to_resumer.release()
        task.handle.to_task.acquire()
        if task.killed:
            raise TaskKilled

    def unwind(self, task: Task) -> None:
        if not task.done:
            task.killed = True
            self.resume(task)


def make_switch(backend: str | None) -> Switch:
    """The switch named ``"greenlet"`` or ``"thread"``; None takes greenlets where they are installed."""
    kinds: dict[str, Callable[[], Switch]] = {"thread": _Threads}
    if greenlet is not None:
        kinds["greenlet"] = _Greenlets
    name = backend or ("thread" if greenlet is None else "greenlet")
    if name not in kinds:
        raise ValueError(f"backend must be one of {sorted(kinds)}, got {backend!r}")
    return kinds[name]()
