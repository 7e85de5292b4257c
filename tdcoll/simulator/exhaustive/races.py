# SPDX-License-Identifier: Apache-2.0
"""A detector of races that also notes what the present event touches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tdcoll.simulator.bounds import Origin
from tdcoll.simulator.clocks import Carried
from tdcoll.simulator.exhaustive.network import RecordedNetwork
from tdcoll.simulator.exhaustive.recorder import BOTH, OTHERS, Recorder
from tdcoll.simulator.exhaustive.search import ExecutionEvent
from tdcoll.simulator.memory import Memory
from tdcoll.simulator.races import Message, Races
from tdcoll.simulator.scheduler import Scheduler
from tdcoll.simulator.shadow import Array, runs_of
from tdcoll.simulator.tasks import Task


class RecordedRaces(Races):
    """Races whose accesses a recorder notes.

    Args:
        reports: whether races are errors. If not, only accesses are noted.
    """

    def __init__(
        self, memory: Memory, scheduler: Scheduler, recorder: Recorder, *, reports: bool
    ) -> None:
        self._recorder = recorder
        self._reports = reports
        self._moves: dict[Message, list[ExecutionEvent]] = {}
        self._forks: dict[int, tuple[Carried, ExecutionEvent | None]] = {}
        super().__init__(memory, scheduler)

    def begin(self) -> None:
        super().begin()
        if not self._reports:
            self.stop()

    def _read(self, addresses: Array, nbytes: int) -> None:
        pe = self._actor.task.pe
        for begin, end in runs_of(addresses, nbytes):
            self._recorder.read(begin, end, pe)

    def _write(self, addresses: Array, nbytes: int, pe: int, *, lands: bool = False) -> None:
        """Note writes. If a write ``lands`` later for other PEs, only its own PE sees it now."""
        for begin, end in runs_of(addresses, nbytes):
            views = self._recorder.view_of(begin, pe) if lands else BOTH
            if views == (OTHERS,):
                views = BOTH
            self._recorder.touch("writes", begin, end, pe, views)

    def load(self, addresses: Array, nbytes: int, origin: Origin, *, relaxed: bool = False) -> None:
        self._read(addresses, nbytes)
        super().load(addresses, nbytes, origin, relaxed=relaxed)

    def acquire(self, addresses: Array, nbytes: int, *, system: bool = True) -> None:
        self._read(addresses, nbytes)
        super().acquire(addresses, nbytes, system=system)

    def take(self, addresses: Array, nbytes: int) -> None:
        self._read(addresses, nbytes)
        super().take(addresses, nbytes)

    def waited(
        self,
        addresses: Array,
        nbytes: int,
        true: Callable[[Array], Array],
        *,
        whole: bool,
        tells: bool,
    ) -> None:
        came = whole and bool(true(addresses).all())
        if came:
            self._recorder.waited(addresses, nbytes, true)
        if came and not tells:
            pe = self._actor.task.pe
            self._recorder.depend_on_condition(
                addresses, nbytes, pe, lambda: bool(true(addresses).all())
            )
        else:
            self._read(addresses, nbytes)

    def storing(
        self, origin: Origin, *, by_descriptor: bool = False
    ) -> Callable[[Array, int], None]:
        pe = self._actor.task.pe
        lands = self._scheduler.network is not None
        land = super().storing(origin, by_descriptor=by_descriptor)

        def noted(addresses: Array, nbytes: int) -> None:
            self._write(addresses, nbytes, pe, lands=lands)
            land(addresses, nbytes)

        return noted

    def of_host(self, addresses: Array, nbytes: int, name: str, *, writes: bool) -> None:
        if writes:
            self._write(addresses, nbytes, self._actor.task.pe)
        else:
            self._read(addresses, nbytes)
        super().of_host(addresses, nbytes, name, writes=writes)

    def change(
        self, addresses: Array, nbytes: int, origin: Origin, order: str, system: bool
    ) -> None:
        self._read(addresses, nbytes)
        self._write(addresses, nbytes, self._actor.task.pe)
        super().change(addresses, nbytes, origin, order, system)

    def message(self, what: str, pe: int, *, read: tuple[int, int] | None = None) -> Message:
        if read is not None:
            self._recorder.read(read[0], read[0] + read[1], self._actor.task.pe)
        return super().message(what, pe, read=read)

    def moved(self, message: Message, dest: int, source: int | bytes, nbytes: int) -> None:
        present = self._recorder.log.current
        if present is not None:
            self._moves.setdefault(message, []).append(present)
        if self._scheduler.network is None:
            self._recorder.touch("writes", dest, dest + nbytes, message.carried.pe)
            if isinstance(source, int):
                self._recorder.read(source, source + nbytes, message.carried.pe)
        super().moved(message, dest, source, nbytes)

    def signalled(self, message: Message, address: int, *, adds: bool) -> None:
        self._recorder.touch("writes", address, address + 8, message.carried.pe)
        super().signalled(message, address, adds=adds)

    def arrived(self, message: Message) -> None:
        self._recorder.need(self._moves.get(message, []))
        super().arrived(message)

    def quiet(self) -> None:
        network = self._scheduler.network
        task = self._scheduler.current
        if isinstance(network, RecordedNetwork) and task is not None:
            self._recorder.need(network.awaited_by(task))
        super().quiet()

    def ended(self, tasks: Sequence[Task]) -> None:
        self._recorder.need_all_of(tasks)
        super().ended(tasks)

    def fork(self) -> Carried:
        past = super().fork()
        self._forks[id(past)] = past, self._recorder.log.main  # kept, so that no other has its id
        return past

    def join(self, past: Carried) -> None:
        found = self._forks.get(id(past))
        if found is not None and found[1] is not None:
            self._recorder.need([found[1]])
        super().join(past)
