# SPDX-License-Identifier: Apache-2.0
"""Cooperative tasks and the scheduler that decides, step by step, who goes next.

A *task* is the host program of one PE or one program of a kernel launch. Exactly one task runs at a
time. It gives up control only at *schedule points* (:meth:`Scheduler.turn`, :meth:`Scheduler.wait`,
:meth:`Scheduler.poll`), so everything between two points is atomic and a run is a function of its
seed.

One *step* is one resumed task or one delivered message. A straggler's turn comes when no other task
can run and no message is in flight, and now and then before. Steps take no time: the virtual clock
stands still while anything can happen at all, and jumps to the earliest deadline when nothing can.
A wait therefore expires only when it could never have ended otherwise; unless the policy is
*impatient*, which lets waits of kernels expire at any time.

Tasks are greenlets or threads (:mod:`.tasks`); both give the same schedule for the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from tdcoll.base.errors import TdcollError
from tdcoll.simulator.network import Network
from tdcoll.simulator.places import place_of
from tdcoll.simulator.policy import Policy
from tdcoll.simulator.tasks import Greenlets, Task, TaskKilled, Wait, count_poll, make_switch

SUSPECT_POLLS = 3
"""So many fruitless polls in a row make a task a suspected spinner: messages go first."""


@dataclass(frozen=True)
class Blocked:
    """One line of a deadlock report.

    Attributes:
        task: name of the task, such as ``pe3 all_gather_1d(3,0,0)``.
        reason: what it waits for, such as ``waits for pe3.signals[0] >= 2, is 1``.
    """

    task: str
    pe: int
    reason: str

    def __str__(self) -> str:
        return f"{self.task} {self.reason}"


class Deadlock(TdcollError):
    """No task can run, no message is in flight, and tasks are left that wait.

    Attributes:
        blocked: every task that waits, with every signal that it misses.
    """

    def __init__(self, headline: str, blocked: Sequence[Blocked]) -> None:
        self.blocked = tuple(blocked)
        super().__init__("\n  ".join([headline, *map(str, blocked)]))


class Scheduler:
    """Runs tasks until all are done. Its tasks belong to the thread that made it, or called
    :meth:`renew`.

    Args:
        policy: chooses the next task and the moment of a delivery.
        backend: ``"greenlet"`` or ``"thread"``.
        expire: waits with a deadline expire when nothing can run; otherwise :class:`Deadlock` is
            raised.
        max_steps: a run that takes more raises :class:`Deadlock`: it does not end.
        spin_limit: fruitless loads of the same words after which a spinning program counts as
            blocked.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        backend: str | None = None,
        expire: bool = False,
        max_steps: int = 10_000_000,
        spin_limit: int = 1000,
    ) -> None:
        self.policy = policy
        self.expire = expire
        self.backend = backend
        self.max_steps = max_steps
        self.spin_limit = spin_limit
        self.current: Task | None = None
        self.network: Network | None = None
        self.before_turn: Callable[[Task], None] | None = None
        """Called with each task before it runs on; may kill it."""
        self.steps = 0
        self.now_ns = 0
        """Virtual time."""
        self.gave_up: list[str] = []
        """The waits that an impatient policy has let expire since the latest :meth:`renew`."""
        self.progress = 0
        """Counts everything that may end somebody's spinning: writes, deliveries, tasks that
        end."""
        self.fingerprint = 0
        """Equal for two runs that took the same schedule."""
        self._spawned = 0
        self._ready: list[Task] = []
        self._slow: list[Task] = []
        self._live: dict[Task, None] = {}
        self._waiters: dict[Hashable, list[Task]] = {}
        self._switch = make_switch(backend)

    @property
    def switches_in_one_thread(self) -> bool:
        """Whether all tasks share one thread of the system."""
        return isinstance(self._switch, Greenlets)

    def renew(self, network: Network | None) -> None:
        """Begin another run, for tasks of the calling thread, with ``network`` for their
        messages."""
        self._switch = make_switch(self.backend)
        self.network = network
        self._spawned = 0
        self.gave_up = []

    def spawn(self, name: str, pe: int, body: Callable[[], None]) -> Task:
        """A new task, ready to run."""
        task = Task(self._spawned, name, pe, body, self.policy.is_slow(pe))
        self._spawned += 1
        self._switch.start(task)
        self._live[task] = None
        self._enqueue(task)
        return task

    def notify(self, key: Hashable) -> None:
        """Something changed under ``key``: tasks that wait on it and are satisfied become ready."""
        self._wake([key])

    def notify_words(self, first: int, nbytes: int) -> None:
        """Bytes ``[first, first + nbytes)`` changed: :meth:`notify` for each 8-byte word of
        them."""
        waiters = self._waiters
        begin = first & ~7
        end = first + nbytes
        if (end - begin) >> 3 <= len(waiters):
            keys: list[Hashable] = [key for key in range(begin, end, 8) if key in waiters]
        else:
            keys = [key for key in waiters if isinstance(key, int) and begin <= key < end]
        self._wake(keys)

    def _wake(self, keys: Sequence[Hashable]) -> None:
        """Each task that waits on one of ``keys`` is asked once, however many of its words have
        changed."""
        self.progress += 1
        waiting = dict.fromkeys(task for key in keys for task in self._waiters.get(key, ()))
        for task in [task for task in waiting if task.wait is not None and task.wait.ready()]:
            self._unblock(task)

    def kill(self, pe: int) -> None:
        """End the tasks of ``pe`` where they are. If the running task is among them, it ends with
        this call."""
        tasks = [task for task in self._live if task.pe == pe]
        for task in tasks:
            task.killed = True
            if task is not self.current:
                self._unwind(task)
        if self.current in tasks:
            raise TaskKilled

    def turn(self) -> None:
        """A schedule point: others may go first."""
        self._switch.suspend(self._running())

    def wait(
        self,
        ready: Callable[[], bool],
        describe: Callable[[], str],
        keys: Sequence[Hashable],
        timeout_ns: int | None = None,
    ) -> bool:
        """Suspend until ``ready()``, which is asked again whenever :meth:`notify` gets one of
        ``keys``.

        The answer counts when the task runs on, not when it was woken: a value that came and went
        in between was never seen, as by a polling thread. Returns False if the deadline, in virtual
        time, has expired.
        """
        task = self._running()
        if ready():
            self._switch.suspend(task)
            return True
        wait = Wait(ready, describe, keys, None if timeout_ns is None else self.now_ns + timeout_ns)
        task.expired = False
        while True:
            task.wait = wait
            for key in keys:
                self._waiters.setdefault(key, []).append(task)
            self._switch.suspend(task)
            if ready():
                self.progress += 1
                return True
            if task.expired:
                return False

    def poll(self, key: Hashable, describe: Callable[[], str]) -> None:
        """A schedule point before a load that may be part of a spin loop over words such as
        ``key``."""
        task = self._running()
        count_poll(task, key, self.progress)
        task.spins_on = describe
        self._switch.suspend(task)

    def run(self) -> None:
        """Run until every task is done and every message is delivered.

        Raises:
            Deadlock: tasks are left that can never run again.
            BaseException: whatever a task raised, with a note that names the task.
        """
        most = self.steps + self.max_steps
        try:
            while self._step():
                self.steps += 1
                if self.steps > most:
                    raise Deadlock(
                        f"no end after {self.max_steps} steps; still at work:", self._report()
                    )
        finally:
            for task in list(self._live):
                task.killed = True
                self._unwind(task)
            self.current = None

    def _step(self) -> bool:
        """One resumed task or one delivered message; False when all is done."""
        if self.policy.expires_now():
            waits = [item for item in self._deadlines() if item[0].is_program]
            if waits:
                task, wait, deadline = self.policy.take(waits)  # although it might be satisfied yet
                self.gave_up.append(f"{task.name} at step {self.steps}, which {wait.describe()}")
                self._let_expire(task, deadline)
        if self._ready or self._slow:
            if self.network is not None and self.network.eager and self.policy.deliver_now():
                self._deliver()
                return True
            straggler = bool(self._slow) and self.policy.slow_now()
            if not self._ready and not straggler and self._deliver():
                # else a fast task that waits for a message would give stragglers its turn
                return True
            task = self.policy.take(self._slow if straggler or not self._ready else self._ready)
            if task.polls >= SUSPECT_POLLS and self._only_spinners(task, SUSPECT_POLLS):
                if self._deliver() or (
                    self._only_spinners(task, self.spin_limit) and self._expire_one()
                ):
                    self._enqueue(task)
                    return True
            self._resume(task)
            return True
        return self._deliver() or (bool(self._live) and self._expire_one())

    def _resume(self, task: Task) -> None:
        if self.before_turn is not None:
            self.before_turn(task)
            if task.done:
                return
        self.fingerprint = (self.fingerprint * 1_000_003 + task.index + 1) & 0xFFFF_FFFF_FFFF
        self.current = task
        self._switch.resume(task)
        self.current = None
        if task.done:
            self.progress += 1
            self._live.pop(task, None)
            if task.error is not None:
                raise raised_by(task)
        elif task.wait is None:
            self._enqueue(task)

    def _deliver(self) -> bool:
        if self.network is None or not self.network.deliver():
            return False
        self.progress += 1
        self.fingerprint = (self.fingerprint * 1_000_003) & 0xFFFF_FFFF_FFFF
        return True

    def _expire_one(self) -> bool:
        """Let the wait with the earliest deadline expire; of several, the one that began first."""
        waits = self._deadlines() if self.expire else []
        if not waits:
            report = self._report()
            raise Deadlock(f"deadlock, {len(report)} task(s) blocked:", report)
        task, _, deadline = min(waits, key=lambda item: (item[2], item[0].index))
        self._let_expire(task, deadline)
        return True

    def _deadlines(self) -> list[tuple[Task, Wait, int]]:
        return [
            (task, task.wait, task.wait.deadline_ns)
            for task in self._live
            if task.wait is not None and task.wait.deadline_ns is not None
        ]

    def _let_expire(self, task: Task, deadline_ns: int) -> None:
        self.now_ns = max(self.now_ns, deadline_ns)
        task.expired = True
        self._unblock(task)

    def _running(self) -> Task:
        task = self.current
        if task is None:
            raise TdcollError(
                "this call needs a running task: make it inside the host function of World.run()"
            )
        if task.killed:
            raise TaskKilled
        return task

    def _enqueue(self, task: Task) -> None:
        (self._slow if task.slow else self._ready).append(task)

    def _unblock(self, task: Task) -> None:
        self._forget_wait(task)
        self._enqueue(task)

    def _forget_wait(self, task: Task) -> None:
        if task.wait is not None:
            for key in task.wait.keys:
                waiters = self._waiters[key]
                waiters.remove(task)
                if not waiters:
                    del self._waiters[key]
            task.wait = None

    def _unwind(self, task: Task) -> None:
        """End a killed task where it is; its ``finally`` clauses run, and find that they cannot
        wait."""
        self._forget_wait(task)
        self._live.pop(task, None)
        for queue in (self._ready, self._slow):
            if task in queue:
                queue.remove(task)
        running = self.current
        self.current = task
        try:
            self._switch.unwind(task)
        finally:
            self.current = running

    def _only_spinners(self, picked: Task, polls: int) -> bool:
        progress = self.progress
        return all(
            task.polls >= polls and task.progress_seen == progress
            for task in (picked, *self._ready, *self._slow)
        )

    def _report(self) -> list[Blocked]:
        def reason(task: Task) -> str:
            if task.wait is not None:
                return task.wait.describe()
            return task.spins_on() if task.polls and task.spins_on is not None else "runs"

        tasks = sorted(self._live, key=lambda task: (not task.is_program, task.pe))
        return [Blocked(task.name, task.pe, reason(task)) for task in tasks]


def raised_by(task: Task) -> BaseException:
    """Return a task's error with a note that names the task and, of a thread block, the line of the
    kernel."""
    assert task.error is not None
    note = f"raised by {task.name}{place_of(task.error).note() if task.is_program else ''}"
    notes = task.error.__dict__.setdefault("__notes__", [])
    if note not in notes:
        notes.append(note)
    return task.error
