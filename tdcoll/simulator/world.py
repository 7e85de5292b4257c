# SPDX-License-Identifier: Apache-2.0
"""All PEs of a job in one process: seeded, with exact deadlock reports, for tests.

:meth:`World.run` runs one host function per PE as a separate task. All of tdcoll's host API works
in it unmodified, because :func:`tdcoll.runtime.current` is that of the PE whose task runs. A launch
suspends its host task until its end.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.errors import RankMismatchError, TdcollError
from tdcoll.runtime.control import elsewhere, missing_ranks
from tdcoll.runtime.store import decode, encode
from tdcoll.runtime.topology import nodes_of
from tdcoll.simulator.hosts import HostAccesses
from tdcoll.simulator.interpreter import Installed
from tdcoll.simulator.machine import BARRIERS, Counts, Machine
from tdcoll.simulator.memory import Memory, MemoryView, aligned
from tdcoll.simulator.network import STORES, Network
from tdcoll.simulator.policy import Policy, RandomPolicy
from tdcoll.simulator.races import Races
from tdcoll.simulator.scheduler import Scheduler
from tdcoll.simulator.streams import SimulatedSideStream, Stream, copy, host_of
from tdcoll.simulator.tasks import GridLaunch, Task
from tdcoll.simulator.trace import Trace, slice_of

Result = TypeVar("Result")


class _Control:
    """One PE's control plane: exchanges through the scheduler, so that a missing rank is a
    deadlock."""

    def __init__(self, world: World, pe: int, name: str = "") -> None:
        self._world = world
        self._pe = pe
        self._name = name
        self._count: dict[tuple[int, ...], int] = {}

    def all_gather(
        self, ranks: Sequence[int], tag: str, value: Any, timeout_s: float | None = None
    ) -> list[Any]:
        world = self._world
        group = tuple(ranks)
        number = self._count[group] = self._count.get(group, -1) + 1
        key = ("control", self._name, group, number)
        values = world._exchanges.setdefault(key, {})
        values[self._pe] = encode(tag, value)
        races = world._machine.races
        if races is not None:
            if tag == "barrier" or tag.startswith("free:"):  # which wait for the GPU first
                races.synchronize()
            races.arrive(key)
        world.scheduler.notify(key)

        def missing() -> list[int]:
            return [rank for rank in group if rank not in values]

        if timeout_s is None:
            timeout_s = world.runtimes[self._pe].timeout_s
        world.scheduler.wait(
            lambda: not missing(),
            lambda: f"waits in '{tag}' for rank(s) {missing()}",
            [key],
            int(timeout_s * 1e9),
        )
        if missing():
            raise missing_ranks(self._pe, tag, missing(), timeout_s)
        if races is not None:
            races.depart(key)
        world._exchanges.pop((*key[:-1], number - 2), None)  # all have read it
        answers = [decode(values[rank], f"PE {rank}") for rank in group]
        others = {rank: seen for rank, (seen, _) in zip(group, answers, strict=True) if seen != tag}
        if others:
            raise RankMismatchError(elsewhere(self._pe, tag, others))
        return [answer for _, answer in answers]

    def part(self, name: str) -> _Control:
        """See :meth:`~tdcoll.runtime.control.ControlPlane.part`."""
        return _Control(self._world, self._pe, f"{self._name}{name}/")


class _View(MemoryView):
    """A PE's memory in a world, which has streams, and whose scheduler tells host tasks when a word
    is written."""

    def __init__(self, world: World, pe: int) -> None:
        accessible = tuple(node == world.node_ids[pe] for node in world.node_ids)
        super().__init__(world.memory, pe, accessible)
        self._world = world
        self._side_streams = WeakValueDictionary[int, SimulatedSideStream]()

    def stream_wait(self, stream: int, address: int, bits: int, *args: Any) -> None:
        waits = partial(super().stream_wait, stream, address, bits, *args)

        def wait() -> None:
            waits()
            races = self._world._machine.races
            if races is not None:
                races.acquire(np.array([address], np.uint64), bits // 8)

        self._world._in_order(wait)

    def stream_write(self, stream: int, address: int, bits: int, value: int) -> None:
        writes = partial(super().stream_write, stream, address, bits, value)

        def write() -> None:
            races = self._world._machine.races
            if races is not None:
                with races.stores_in_order("release", system=True):
                    races.storing(None)(np.array([address], np.uint64), bits // 8)
            writes()

        self._world._in_order(write)

    def unlabel(self, offset: int) -> None:
        races = self._world._machine.races
        freed = self._world.memory.allocations[self.pe].at(offset)
        if races is not None and freed is not None:
            races.forget_symmetric(self.base + freed.begin, self.base + freed.end)
        super().unlabel(offset)

    def stream_copy(self, stream: int, dest: int, source: int, nbytes: int) -> None:
        carry_out = partial(copy, self._world._machine, dest, source, nbytes)
        side_stream = self._side_streams.get(stream)
        self._world._in_order(carry_out) if side_stream is None else side_stream.queue(carry_out)

    def side_stream(self) -> SimulatedSideStream:
        streams = self._world._streams
        streams[self.pe] += 1
        side_stream = self._side_streams[streams[self.pe]] = SimulatedSideStream(
            self._world.scheduler, self.pe, streams[self.pe]
        )
        return side_stream

    def wait_on_host(
        self, address: int, ready: Callable[[], bool], describe: Callable[[], str], timeout_s: float
    ) -> bool:
        return self._world.scheduler.wait(ready, describe, [address & ~7], int(timeout_s * 1e9))

    def written_by_host(self, address: int, nbytes: int) -> None:
        self._world.scheduler.notify_words(address, nbytes)
        self._world.scheduler.turn()


class World:
    """A job of ``n_pes`` simulated PEs in this process.

    The same arguments give the same run, to the last step. Memory lives as long as the world, over
    several runs.

    Args:
        n_pes: number of PEs.
        heap_bytes: symmetric heap of each PE, bytes, or a text such as ``"1G"``.
        seed: makes all choices random, and repeatable; if None, the order is fair.
        weak: messages arrive late and in any order that NVSHMEM permits; at once if False.
        ranks_per_node: PEs of each node, or the list of their numbers; if None, all are on one
            node.
        resident: at most so many programs of one launch are in flight, in a GPU's order (x
            fastest); None: all.
        room: at most so many programs of all launches of a PE are in flight, those of the launch
            that came first before those of later ones; None: all. See :meth:`stream`.
        puts: whether NVSHMEM's functions work in kernels. If False, the heap is as one of PyTorch's
            symmetric memory.
        late_data: with ``weak``, bytes without a signal arrive last (:mod:`.policy`); if None, the
            seed decides.
        stragglers: True (the seed picks a PE, or some programs), a PE, or False; if None, the seed
            decides.
        on_timeout: when nothing can run any more but waits with a deadline are left: ``"raise"`` a
            :class:`~tdcoll.testing.Deadlock`, or let them ``"expire"``. After a :meth:`kill` they
            expire. ``"early"``, with a seed: as ``"expire"``, and waits of kernels also expire
            while what they wait for is only late.
        timeout_s: deadline of waits inside kernels and of host-side exchanges, in virtual seconds.
        backend: ``"greenlet"`` or ``"thread"``; if None, greenlets if installed.
        trace: record a timeline; see :attr:`trace`.
        races: raise a :class:`~tdcoll.testing.DataRace` when two accesses to the same bytes, one of
            them a write, have no order (:mod:`.races`), also in a schedule in which the results are right.
        check_overflow: raise if a 32-bit integer overflows in a kernel or ``tl.device_assert``
            fails; twice as slow.
        max_steps: if a run takes more, it ends as a deadlock.
        spin_limit: loads of the same words, while no other task acts, after which a spin loop
            counts as blocked.

    Raises:
        TypeError, ValueError: an argument is not as described, or ``late_data`` or ``stragglers``
            has no seed.

    Attributes:
        n_pes: number of PEs.
        seed: as given.
        runtimes: each PE's :class:`tdcoll.runtime.Runtime`.
        trace: the :class:`~tdcoll.simulator.trace.Trace`, or None.
    """

    def __init__(
        self,
        n_pes: int,
        *,
        heap_bytes: int | str = 4 << 20,
        seed: int | None = None,
        weak: bool = False,
        ranks_per_node: int | Sequence[int] | None = None,
        resident: int | None = None,
        room: int | None = None,
        puts: bool = True,
        late_data: bool | None = None,
        stragglers: bool | int | None = None,
        on_timeout: Literal["raise", "expire", "early"] = "raise",
        timeout_s: float = 30.0,
        backend: str | None = None,
        trace: bool = False,
        races: bool = False,
        check_overflow: bool = False,
        max_steps: int = 10_000_000,
        spin_limit: int = 1000,
    ) -> None:
        arguments.whole("n_pes", n_pes, 1)
        for name, most in (("resident", resident), ("room", room)):
            if most is not None:
                arguments.whole(name, most, 1)
        arguments.seconds("timeout_s", timeout_s)
        if seed is not None:
            arguments.instance("seed", seed, int, "an int or None")
        if stragglers is not None and not isinstance(stragglers, bool):
            arguments.whole("stragglers", stragglers, 0, n_pes - 1)
        for name, habit in (("late_data", late_data), ("stragglers", stragglers)):
            if seed is None and habit is not None and habit is not False:
                raise ValueError(
                    f"{name}={habit} needs a seed, whose random choices it is about; got seed=None"
                )
        if on_timeout not in ("raise", "expire", "early"):
            raise ValueError(f"on_timeout must be 'raise', 'expire' or 'early', got {on_timeout!r}")
        if on_timeout == "early" and seed is None:
            raise ValueError(
                "on_timeout='early' needs a seed, which says when waits expire; got seed=None"
            )
        self.n_pes = n_pes
        self.seed = seed
        self.resident = resident
        self.room = room
        self._weak = weak
        self._policy = (
            Policy()
            if seed is None
            else RandomPolicy(
                seed,
                n_pes,
                late_data=late_data,
                stragglers=stragglers,
                impatient=on_timeout == "early",
            )
        )
        self.node_ids = nodes_of(n_pes, ranks_per_node)

        block = aligned(arguments.byte_count("heap_bytes", heap_bytes))
        buffer = memoryview(mmap.mmap(-1, block * n_pes))  # zeros that cost nothing until touched
        self.memory = Memory(buffer, 0, block, n_pes, puts=puts)
        self.scheduler = self._make_scheduler(
            backend=backend,
            expire=on_timeout != "raise",
            max_steps=max_steps,
            spin_limit=spin_limit,
        )
        self.scheduler.before_turn = self._count_turn
        self.trace = Trace(lambda: self.scheduler.steps) if trace else None
        self._machine = Machine(
            memory=self.memory,
            scheduler=self.scheduler,
            node_ids=self.node_ids,
            launch=self._launch,
            arrivals={barrier: [0] * n_pes for barrier in BARRIERS},
            trace=self.trace,
            check_overflow=check_overflow,
        )
        self._machine.races = self._make_races(reports=races)
        if self._machine.races is not None:
            self._machine.bounds.forget = self._machine.races.forget_ordinary
        self._exchanges: dict[Any, dict[int, bytes]] = {}
        self._dead: set[int] = set()
        self._launches: list[list[GridLaunch]] = []
        self._streams = [0] * n_pes
        self._doomed: dict[int, int] = {}
        self.runtimes = [
            runtime.Runtime(
                rank=pe,
                world_size=n_pes,
                heap=_View(self, pe),
                control=_Control(self, pe),
                node_ids=self.node_ids,
                simulated=True,
                timeout_s=timeout_s,
            )
            for pe in range(n_pes)
        ]

    def run(self, host: Callable[[int], Result]) -> list[Result | None]:
        """Run ``host(pe)`` on every living PE; return the results, None for PEs that were killed.

        Returns when all tasks are done and every message has arrived.

        Raises:
            Deadlock: nothing can run any more. The report names every blocked task and every
                missing signal.
            Exception: any error of a host or a program, with a note that names it.
        """
        results: list[Result | None] = [None] * self.n_pes

        def store_result(pe: int) -> None:
            with self._host_accesses() if by_threads else nullcontext():
                results[pe] = host(pe)

        scheduler = self.scheduler
        by_threads = not scheduler.switches_in_one_thread
        network = self._make_network() if self._weak else None
        scheduler.renew(network)
        self._machine.network = network
        if self._machine.races is not None:
            self._machine.races.begin()
        self._launches = [[] for _ in range(self.n_pes)]
        for pe in sorted(set(range(self.n_pes)) - self._dead):
            scheduler.spawn(f"pe{pe} host", pe, partial(store_result, pe))
        hooks = Installed(self._machine)
        previous = runtime._resolver

        def runtime_of_task() -> runtime.Runtime | None:
            task = scheduler.current
            return self.runtimes[task.pe] if task else None

        runtime.install_resolver(runtime_of_task)
        try:
            with self._host_accesses():
                scheduler.run()
        finally:
            runtime.install_resolver(previous)
            hooks.remove()
        return results

    def _make_scheduler(self, **options: Any) -> Scheduler:
        return Scheduler(self._policy, **options)

    def _make_network(self) -> Network:
        return Network(self._policy, self.scheduler.notify_words, self.scheduler.notify)

    def _make_races(self, *, reports: bool) -> Races | None:
        return Races(self.memory, self.scheduler) if reports else None

    def _host_accesses(self) -> AbstractContextManager[Any]:
        """Show the races what hosts do in this thread."""
        races = self._machine.races
        return nullcontext() if races is None else HostAccesses(self.memory, self.scheduler, races)

    def stream(self) -> Stream:
        """Return a new stream of the calling PE. ``with stream:`` queues launches, copies, waits
        and writes there.

        Call it in a host function. If no stream is entered, each of them is done before it returns.
        ``stream.queue(f)`` runs a host function there, whose launches are done in order.

        Raises:
            TdcollError: called outside of a host function.
        """
        pe = host_of(self.scheduler).pe
        self._streams[pe] += 1
        return Stream(self.scheduler, pe, f"stream {self._streams[pe]}")

    def ignore_order_of(self, tensor: torch.Tensor) -> None:
        """Let :func:`~tdcoll.testing.exhaust` explore no orders of accesses to ``tensor``, because
        its user knows that results don't depend on them. Otherwise this does nothing."""

    def _in_order(self, operation: Callable[[], Any]) -> None:
        """Carry out ``operation`` of the calling host in the stream that it has entered; at once if
        there is none."""
        host = self.scheduler.current
        if host is not None and host.streams:
            host.streams[-1].queue(operation)
        else:
            operation()

    def pause(self, turns: int = 1) -> None:
        """Let other tasks go before the calling host task, ``turns`` times, as if the host were
        slow."""
        for _ in range(turns):
            self.scheduler.turn()

    def kill(self, pe: int, *, after_turns: int = 0) -> None:
        """Kill PE ``pe``: its host task and programs stop where they are, and its messages in
        flight are lost.

        From then on bounded waits that nothing can satisfy expire, for any ``on_timeout``.

        Args:
            pe: the PE. Killing one's own ends the calling task with this call.
            after_turns: let the PE's tasks take so many more turns before.
        """
        self._machine.check_pe(pe)
        if after_turns > 0:
            self._doomed[pe] = after_turns
            return
        self._doomed.pop(pe, None)
        self._dead.add(pe)
        self.scheduler.expire = True
        if self._machine.races is not None:
            self._machine.races.stop()
        if self._machine.network is not None:
            self._machine.network.drop(pe)
        self.scheduler.kill(pe)

    @property
    def counts(self) -> list[Counts]:
        """Return the counts of each PE so far (puts, signals, stores to peers, bytes)."""
        return self._machine.counts

    def describe(self) -> str:
        """Describe this world's schedule for reports, and the waits that ``on_timeout="early"`` has
        let expire."""
        words = [f"seed {self.seed}", "weak" if self._weak else "strong", self._policy.describe()]
        for name in ("resident", "room"):
            most = getattr(self, name)
            if most is not None:
                words.append(f"{name}={most}")
        return ", ".join(words) + (
            f"; gave up early: {'; '.join(self.gave_up)}" if self.gave_up else ""
        )

    @property
    def gave_up(self) -> tuple[str, ...]:
        """Program, step and awaited word of each wait that ``on_timeout="early"`` ended in the
        latest :meth:`run`."""
        return tuple(self.scheduler.gave_up)

    def _count_turn(self, task: Task) -> None:
        if task.pe in self._doomed:
            if self._doomed[task.pe] <= 0:
                self.kill(task.pe)
            else:
                self._doomed[task.pe] -= 1

    def _launch(self, launch: GridLaunch) -> None:
        scheduler = self.scheduler
        host = scheduler.current
        if host is None or host.is_program:
            raise TdcollError(
                f"{launch.kernel} was launched {'outside a host task' if host is None else 'by a kernel'}"
            )
        if host.killed:
            scheduler.turn()  # raises
        self._in_order(partial(self._carry_out, host.pe, launch))

    def _carry_out(self, pe: int, launch: GridLaunch) -> None:
        """Run a launch until all its programs are done, in the calling task."""
        scheduler = self.scheduler
        machine = self._machine
        launches = self._launches[pe]
        if launches:
            launch.first_track = launches[-1].first_track + 1 + launches[-1].total
        if machine.races is not None:
            launch.past = machine.races.fork()
        if launch.total:
            launches.append(launch)
            self._start_programs(pe)
        with slice_of(self.trace, pe, launch.first_track, launch.kernel):
            scheduler.wait(lambda: launch.done == launch.total, launch.describe, [launch])
        for task in launch.tasks:
            if machine.network is not None:
                machine.network.flush_stores(task, kinds=STORES)
        if machine.races is not None:
            machine.races.ended(launch.tasks)

    def _start_programs(self, pe: int) -> None:
        """Start as many programs as fit, in the order in which a GPU does."""
        launches = self._launches[pe]
        running = sum(launch.running for launch in launches)
        for launch in launches:
            while len(launch.tasks) < launch.total and (
                self.resident is None or launch.running < self.resident
            ):
                if self.room is not None and running >= self.room:
                    return
                launch.start(pe, self.scheduler.spawn, self.trace, partial(self._ended, pe, launch))
                running += 1
                if self._machine.races is not None and launch.past is not None:
                    self._machine.races.start(launch.tasks[-1], launch.past)

    def _ended(self, pe: int, launch: GridLaunch) -> None:
        """Take note that one of the launch's programs has ended."""
        if launch.done == launch.total:
            self._launches[pe].remove(launch)
            self.scheduler.notify(launch)
        self._start_programs(pe)
