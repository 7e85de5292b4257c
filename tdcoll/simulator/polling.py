# SPDX-License-Identifier: Apache-2.0
"""The scheduler of one process among several: other processes write to the memory that its programs
wait on.

Waits poll, because writes of other processes come without notice. In between the process gives up
its core, first for a moment, then for up to a millisecond, so that eight processes can share two
cores. Deadlines are wall time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence

from tdcoll.base.errors import CollectiveTimeout, TdcollError
from tdcoll.simulator.scheduler import SUSPECT_POLLS, raised_by
from tdcoll.simulator.tasks import Switch, Task, Wait, count_poll, make_switch

_YIELDS = 20
_LONGEST_SLEEP_S = 1e-3


class PollingScheduler:
    """Runs the programs of launches in turns. Launches of several threads of the host run beside
    each other.

    Args:
        timeout_s: seconds after which waits without a deadline, and spin loops, raise an error.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_ns = int(timeout_s * 1e9)
        self._spinning_since: dict[Task, int] = {}
        self._switch: Switch  # of the launch whose turn it is
        self._turn = threading.Lock()
        self.current: Task | None = None
        self.progress = 0

    def run(self, tasks: Sequence[Task]) -> None:
        """Run these programs until all are done.

        Raises:
            CollectiveTimeout: a program waits for longer than the timeout; the message names it and
                the awaited word.
            Exception: any error of a program, with a note that names it.
        """
        switch = make_switch(None)
        left = list(tasks)
        idle = 0
        for task in tasks:
            switch.start(task)
        try:
            while left:
                with self._turn:
                    self._switch = switch
                    idle = 0 if self._round(switch, left) else idle + 1
                if idle > _YIELDS:
                    time.sleep(min(2e-5 * (idle - _YIELDS), _LONGEST_SLEEP_S))
                elif idle:
                    os.sched_yield()
        finally:
            with self._turn:
                self._switch = switch
                for task in left:
                    task.killed = True
                    switch.unwind(task)
                for task in tasks:
                    self._spinning_since.pop(task, None)

    def in_a_kernel(self) -> bool:
        """Return whether the caller is a kernel's program, not host code."""
        task = self.current
        return task is not None and task.thread == threading.get_ident()

    def _round(self, switch: Switch, left: list[Task]) -> bool:
        """Resume every task that is left and does not wait; return whether one of them made
        progress."""
        busy = False
        for task in list(left):
            if task.wait is not None and not (task.wait.ready() or self._over(task.wait)):
                continue
            self.current = task
            try:
                switch.resume(task)
            finally:
                self.current = None
            if task.done:
                left.remove(task)
            if task.error is not None:
                raise raised_by(task)
            busy = busy or task.polls < SUSPECT_POLLS
        return busy

    @property
    def now_ns(self) -> int:
        """Return the wall time."""
        return time.monotonic_ns()

    def turn(self) -> None:
        task = self._running()
        task.polls = 0
        self._switch.suspend(task)

    def wait(
        self,
        ready: Callable[[], bool],
        describe: Callable[[], str],
        keys: Sequence[Hashable],
        timeout_ns: int | None = None,
    ) -> bool:
        task = self._running()
        task.polls = 0
        task.wait = Wait(
            ready,
            describe,
            keys,
            self.now_ns + (self._timeout_ns if timeout_ns is None else timeout_ns),
        )
        self._switch.suspend(task)
        came = ready()
        while not came and not self._over(task.wait):
            self._switch.suspend(task)
            came = ready()
        task.wait = None
        if not came and timeout_ns is None:
            raise self._timeout(task, describe)
        return came

    def poll(self, key: Hashable, describe: Callable[[], str]) -> None:
        task = self._running()
        now = self.now_ns
        if count_poll(task, key, self.progress) == 0:
            self._spinning_since[task] = now
        elif now - self._spinning_since[task] > self._timeout_ns:
            raise self._timeout(task, describe)
        self._switch.suspend(task)

    def notify(self, key: Hashable) -> None:
        self.progress += 1

    def notify_words(self, first: int, nbytes: int) -> None:
        self.progress += 1

    def _running(self) -> Task:
        if self.current is None:
            raise TdcollError("this call needs a running program: make it inside a kernel")
        return self.current

    def _over(self, wait: Wait) -> bool:
        return wait.deadline_ns is not None and self.now_ns >= wait.deadline_ns

    def _timeout(self, task: Task, describe: Callable[[], str]) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"in {task.name}, which {describe()}", rank=task.pe, timeout_s=self._timeout_ns / 1e9
        )
