# SPDX-License-Identifier: Apache-2.0
"""A scheduler that takes chosen steps, and notes them as events."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tdcoll.simulator.exhaustive.network import ChosenOrder, RecordedNetwork
from tdcoll.simulator.exhaustive.recorder import Recorder
from tdcoll.simulator.exhaustive.search import Cell, ExecutionEvent
from tdcoll.simulator.network import Network
from tdcoll.simulator.places import kernel_place
from tdcoll.simulator.scheduler import Scheduler
from tdcoll.simulator.tasks import Task


@dataclass(slots=True, eq=False)
class _Spin:
    """The loads of a program since it last did something else.

    Attributes:
        loads: number of the event of each load, by first address and line.
        cells: what it has read.
        stalled: the number of events when it loaded what it had loaded before; None if it hasn't.
    """

    loads: dict[Hashable, int] = field(default_factory=dict)
    cells: set[Cell] = field(default_factory=set)
    stalled: int | None = None


class RecordedScheduler(Scheduler):
    """Takes the steps that a :class:`~.search.Schedule` chooses.

    Args:
        recorder: of the execution.
        limited: not all programs of a launch are in flight, so the next one starts when any ends.
    """

    def __init__(
        self, policy: ChosenOrder, recorder: Recorder, *, limited: bool, **options: Any
    ) -> None:
        super().__init__(policy, **options)
        self.policy: ChosenOrder = policy
        self._recorder = recorder
        self._limited = limited
        self._names: dict[str, int] = {}
        self._woken_by: dict[Task, set[ExecutionEvent]] = {}
        self._notified: dict[Hashable, list[ExecutionEvent]] = {}
        self._spins: dict[Task, _Spin] = {}

    def renew(self, network: Network | None) -> None:
        super().renew(network)
        self._recorder.log.separate()

    def spawn(self, name: str, pe: int, body: Callable[[], None]) -> Task:
        task = super().spawn(name, pe, body)
        number = self._names[name] = self._names.get(name, -1) + 1
        self._recorder.processes[task] = name, number
        self._wake_by_present(task)
        return task

    def notify(self, key: Hashable) -> None:
        present = self._recorder.log.current
        if present is not None and not isinstance(key, int):
            self._notified.setdefault(key, []).append(present)
        super().notify(key)

    def _unblock(self, task: Task) -> None:
        wait = task.wait
        self._wake_by_present(task)
        if wait is not None:
            self._woken_by[task].update(self._contributors(wait.keys))
        super()._unblock(task)

    def _wake_by_present(self, task: Task) -> None:
        present = self._recorder.log.current
        self._woken_by[task] = set() if present is None else {present}

    def _contributors(self, keys: Sequence[Hashable]) -> list[ExecutionEvent]:
        """Return what has contributed to exchanges, launches, streams and barriers."""
        found = []
        for key in keys:
            arrivals = isinstance(key, tuple) and key[0] in ("arrived", "monitor")
            if not isinstance(key, int) and not arrivals:
                found += self._notified.get(key, [])
        return found

    def turn(self) -> None:
        self._spins.pop(self._running(), None)
        super().turn()

    def wait(
        self,
        ready: Callable[[], bool],
        describe: Callable[[], str],
        keys: Sequence[Hashable],
        timeout_ns: int | None = None,
    ) -> bool:
        task = self._running()
        recorder = self._recorder
        recorder.watch(keys)
        self._spins.pop(task, None)
        first = True

        def ready_now() -> bool:
            nonlocal first
            found = ready()
            if self.current is task and first:
                first = False
                if found:
                    self._woken_by[task] = set(self._contributors(keys))
            elif self.current is task and not found:
                self._read_words(task, keys)
            return found

        # If it came, what the wait is for says what has been read.
        return super().wait(ready_now, describe, keys, timeout_ns)

    def _read_words(self, task: Task, keys: Sequence[Hashable]) -> None:
        for key in keys:
            if isinstance(key, int):
                self._recorder.read(key, key + 8, task.pe)

    def poll(self, key: Hashable, describe: Callable[[], str]) -> None:
        task = self._running()
        log = self._recorder.log
        present = log.main
        spin = self._spins.setdefault(task, _Spin())
        if present is not None:
            if present.footprint.writes or any(map(_is_sent, present.footprint.adds)):
                spin = self._spins[task] = _Spin()
            spin.cells |= present.footprint.reads
        load = key, kernel_place()
        since = spin.loads.get(load)
        if since is not None and not self._written_since(spin, since):
            spin.stalled = since
        spin.loads[load] = len(log.events)
        super().poll(key, describe)
        spin.stalled = None

    def _written_since(self, spin: _Spin, since: int) -> bool:
        written = self._recorder.log.written
        return any(written.get(cell, -1) >= since for cell in spin.cells)

    def _is_stalled(self, task: Task) -> bool:
        spin = self._spins.get(task)
        return (
            spin is not None
            and spin.stalled is not None
            and not self._written_since(spin, spin.stalled)
        )

    def _step(self) -> bool:
        network = self.network
        assert network is None or isinstance(network, RecordedNetwork)
        tasks = [task for task in self._ready if not self._is_stalled(task)]
        parts = [] if network is None else network.parts()
        if not tasks and not parts:
            tasks = [task for task in self._ready if task.polls < self.spin_limit]
        if not tasks and not parts:
            return bool(self._live) and self._expire_one()
        schedule = self._recorder.schedule
        processes = [self._recorder.processes[task] for task in tasks]
        place = schedule.choose([*processes, *(process for process, *_ in parts)])
        if place < len(tasks):
            self._run_step(tasks[place])
        else:
            _, self.policy.operation, self.policy.piece = parts[place - len(tasks)]
            self._deliver()
            self.policy.operation = self.policy.piece = None
        schedule.stepped()
        return True

    def _run_step(self, task: Task) -> None:
        self._ready.remove(task)
        recorder = self._recorder
        event = recorder.begin(self._recorder.processes[task])
        event.needs |= self._woken_by.pop(task, set())
        self._resume(task)
        if task.done and task.is_program and self._limited:
            recorder.write_object("room", task.pe)
        recorder.end()


def _is_sent(cell: Cell) -> bool:
    return isinstance(cell, tuple) and cell[0] == "sent"
