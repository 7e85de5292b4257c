# SPDX-License-Identifier: Apache-2.0
"""Streams in a World: a stream's task carries out the operations that a PE's host queues on it, in
order.

The host continues at once. Streams are independent of each other, and of the host, unless one joins
another. Copies travel through the network as copy engines would carry them: late, in pieces, and
read when the bytes leave. The next operation of the stream begins when all of them have arrived.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

from tdcoll.base.errors import TdcollError
from tdcoll.simulator.clocks import NOTHING
from tdcoll.simulator.machine import Machine, machine
from tdcoll.simulator.polling import PollingScheduler
from tdcoll.simulator.scheduler import Scheduler
from tdcoll.simulator.tasks import Task

_ENGINE = -1
"""A view of memory that no PE has: without any store that has not landed yet."""


def host_of(scheduler: Scheduler | PollingScheduler) -> Task:
    """Return the host task that runs."""
    task = scheduler.current
    if task is None or task.is_program:
        raise TdcollError("streams are for host functions of World.run()")
    return task


class Stream:
    """Operations of one PE's host, in order. Inside ``with stream:`` the host queues its launches
    here, and its copies, waits and writes of :mod:`tdcoll.calls.streams`.
    """

    def __init__(self, scheduler: Scheduler, pe: int, name: str) -> None:
        self._scheduler = scheduler
        self._pe = pe
        self._name = name
        self._queue: deque[Callable[[], Any]] = deque()
        self._queued = self._done = 0
        self._pasts: list[Any] = [None]
        """Clocks that happen before all that waits for so many operations (:mod:`.races`)."""

    def queue(self, operation: Callable[[], Any]) -> None:
        """Carry out ``operation`` after all operations queued before. Returns at once."""
        self._queued += 1
        self._queue.append(self._after_now(operation))
        if len(self._queue) == 1:
            task = self._scheduler.spawn(f"pe{self._pe} {self._name}", self._pe, self._run)
            races = machine().races
            if races is not None:
                races.start(task, NOTHING)

    def _after_now(self, operation: Callable[[], Any]) -> Callable[[], Any]:
        """Return an operation that comes behind all that the host has done, for the races."""
        races = machine().races
        if races is None:
            return operation
        past = races.fork()

        def ordered() -> None:
            races.join(past)
            if self._pasts[-1] is not None:
                races.join(self._pasts[-1])
            operation()
            self._pasts.append(races.fork())

        return ordered

    def join(self, other: Stream) -> None:
        """Let later operations wait for those queued on ``other`` so far, as for an event."""
        number = other._queued
        self.queue(lambda: other._wait(number))

    def synchronize(self) -> None:
        """Let the calling host wait until all operations queued so far are done."""
        self._wait(self._queued)

    def __enter__(self) -> Stream:
        host_of(self._scheduler).streams.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        host_of(self._scheduler).streams.pop()

    def _run(self) -> None:
        while self._queue:
            self._queue[0]()
            self._queue.popleft()
            self._done += 1
            self._scheduler.notify(self)

    def _wait(self, number: int) -> None:
        def describe() -> str:
            return f"waits for {self._name}, which has done {self._done} of {number} operations"

        self._scheduler.wait(lambda: self._done >= number, describe, [self])
        races = machine().races
        if races is not None and number:
            races.join(self._pasts[number])


class SimulatedSideStream(Stream):
    """A :class:`~tdcoll.runtime.heap.SideStream`: not entered by the host, but forked from the one
    that is."""

    def __init__(self, scheduler: Scheduler, pe: int, handle: int) -> None:
        super().__init__(scheduler, pe, f"side stream {handle}")
        self.handle = handle

    def fork(self, stream: int) -> None:
        entered = host_of(self._scheduler).streams
        if entered:
            super().join(entered[-1])

    def join(self, stream: Any) -> None:
        entered = host_of(self._scheduler).streams
        if entered:
            entered[-1].join(self)
        else:
            self.synchronize()


def copy(machine: Machine, dest: int, source: int, nbytes: int) -> None:
    """Copy bytes by an engine of the calling host's PE, and wait until they have arrived. Aligned
    words stay whole."""
    memory = machine.memory
    network = machine.network
    scheduler = machine.scheduler
    task = host_of(scheduler)
    races = machine.races
    to = memory.pe_of(dest) if memory.owns(dest) else task.pe
    message = None if races is None else races.message("copies", to)

    def move(to: int, at: int, length: int) -> None:
        if races is not None and message is not None:
            races.moved(message, to, at, length)
        for what, begin in (("read", at), ("write", to)):  # its tensors may be gone by now
            problem = machine.bounds.problem(begin, begin + length, None, task.pe)
            if problem is not None:
                raise ValueError(f"a copy of {task.name} would {what} {problem}")
        with machine.unseen.as_seen_by(_ENGINE, at, at + length):
            data = ctypes.string_at(at, length)
        machine.unseen.write_from(_ENGINE, to, data, length)

    if network is None:
        move(dest, source, nbytes)
        if races is not None and message is not None:
            races.arrived(message)
        scheduler.notify_words(dest, nbytes)
        scheduler.turn()
        return
    unit = next(unit for unit in (8, 4, 1) if dest % unit == nbytes % unit == 0)
    pieces = network.cut(dest, source, nbytes, unit)
    done = machine.span("copy", to, nbytes, dest, source)
    operation = network.issue(task, to, "copy", pieces, done=done, move=move, is_flag=nbytes <= 8)
    what = f"waits for a copy of {nbytes} bytes to {memory.describe(dest)}"
    scheduler.wait(lambda: operation.arrived, lambda: what, [("arrived", task.pe)])
    if races is not None and message is not None:
        races.arrived(message)
