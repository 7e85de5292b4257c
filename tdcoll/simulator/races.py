# SPDX-License-Identifier: Apache-2.0
"""Data races, found in any schedule: two accesses to the same bytes, one of them a write, that
nothing orders.

**Happens-before.** The order is that of clocks (:mod:`.clocks`), and these are its edges:

- *Program order* of a task. The threads of a block have an order among each other only by a barrier:
  one that releases alone, or a put, carries what the block did before its last ``syncthreads`` (or
  wait, which ends with one), and what one thread has acquired in a branch on ``tid`` is known to the
  others behind the next one. Accesses of one block are no races of each other.
- *Launches.* The launching stream's past comes before each program, and all that the
  programs have done, but not their puts, before what the stream does next. Both are fences at system
  scope. A host comes before what it queues. Its *own stream* (all launches, copies and
  operators of PyTorch outside of :meth:`.World.stream`) comes before its later exchanges only if it
  has waited for it, by ``tdcoll.barrier()``, ``free`` or by reading a value, although a launch in
  the simulator ends before the host goes on. :meth:`.Stream.join` and ``synchronize`` are edges, as
  events are.
- *Release and acquire*, as PTX has them (Lustig, Sahasrabuddhe and Giroux, ASPLOS 2019). A release
  carries all that its thread knows, at GPU scope for tasks of its own PE only. A relaxed store carries
  what its thread knew at its last fence. A relaxed load makes known what it has seen only at the next
  fence, or at the end of the launch. An atomic passes on what the word carried.
- *Puts*, as NVSHMEM has them. A put is an event of its own: behind what its caller knows, and before
  its own signal, but before nothing that its caller does next. ``fence`` puts the PE's earlier
  messages to each PE before its later ones to that PE; ``quiet`` makes them known to the caller. A
  signal carries its own put and what came before its sender's last fence.
- *Stores through descriptors* come before nothing until the block has called
  ``wait_descriptor_stores``, and then a barrier.
- *Copies* by copy engines are events behind what their stream has done and before what it does next;
  a stream's write of a word, or its copy of one, is a release and its wait an acquire, at system
  scope.
- *Barriers* of all PEs, and exchanges of the hosts.

**Accesses.** Loads, stores and atomics of kernels, transfers and copies, in symmetric
memory and in ordinary memory. Signals, stores with an order and atomics are *strong*: two of them
are never a race, but one of them and an access to data are. Words that carry their own flag, or
announce themselves, are declared by the function that polls them (``wait_flagged``,
``wait_words``): the poll races with no write, but it takes the word, so the next write must have
the order of that. A plain store that a wait sees counts as a relaxed one.

Accesses of hosts to symmetric memory by PyTorch's operators count as well (:mod:`.hosts`), but not
those that leave PyTorch (``numpy()``, ``tolist()``). When a wait has expired or a PE was killed, no
more races are reported in that run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tdcoll.simulator.bounds import Origin, Storage
from tdcoll.simulator.clocks import Actor, Carried, Events, Thread
from tdcoll.simulator.memory import Memory
from tdcoll.simulator.places import kernel_place
from tdcoll.simulator.race_report import BY_DESCRIPTOR, DataRace, described, remedies
from tdcoll.simulator.scheduler import Scheduler
from tdcoll.simulator.shadow import Access, Array, Conflict, Shadow, runs_of
from tdcoll.simulator.tasks import Task

GETS = "gets"
_UNFENCED = -1
"""In the place of a message's PE, if fences do not order it."""
_HEAP = 0
"""The address space of symmetric memory; ordinary memory of PE k is k + 1."""

RELAXED = "relaxed"
RELEASE = "release"
ACQUIRE = "acquire"
BOTH = "acq_rel"


@dataclass(slots=True, eq=False)
class Message:
    """A put, a get or a copy in flight: its event, and what happens before it."""

    event: int
    known: int
    carried: Carried
    writes: Access
    reads: Access


class Races:
    """Follows the order of one run, and raises :class:`DataRace`."""

    def __init__(self, memory: Memory, scheduler: Scheduler) -> None:
        self._memory = memory
        self._scheduler = scheduler
        self._events = Events()  # of all runs, because streams may outlive one
        self.begin()

    def begin(self) -> None:
        """Begin another run, when all earlier ones are over."""
        self._shadow = Shadow()
        self._actors: dict[Task, Actor] = {}  # of programs and streams
        n_pes = self._memory.n_pes
        own_streams = (Task(-1, f"pe{pe} host", pe, lambda: None) for pe in range(n_pes))
        self._own_streams = [Actor(stream, 0) for stream in own_streams]
        self._hosts = [0] * n_pes
        """Clocks that happen before the next exchange of each host."""
        self._sent: list[list[tuple[int, int, int]]] = [[] for _ in range(n_pes)]
        self._meetings: dict[Hashable, int] = {}
        self._stopped = False

    def stop(self) -> None:
        """Report nothing more in this run: a wait has expired, or a PE has died, so that its results
        are of no use and it has the order of nothing that it waited for."""
        self._stopped = True

    # ------------------------------------------------------------------ tasks

    @property
    def _actor(self) -> Actor:
        """Return what acts now: a program, a stream, or for a host its own stream."""
        task = self._scheduler.current
        assert task is not None
        found = self._actors.get(task)
        if found is None:
            found = self._own_streams[task.pe]
            found.learn(found, self._hosts[task.pe])
        return found

    def synchronize(self) -> None:
        """Called when the running host has waited for its own stream."""
        stream = self._actor
        self._hosts[stream.task.pe] |= stream.known

    def _now(self) -> tuple[Actor, Thread]:
        actor = self._actor
        return actor, actor.thread()

    def fork(self) -> Carried:
        """Return what happens before a task that the running one starts, or an operation that it
        queues."""
        actor = self._actor
        actor.event = 0
        return Carried(actor.task.pe, actor.known, actor.known, dict(actor.lost))

    def start(self, task: Task, past: Carried) -> None:
        """A program or a stream begins behind ``past``."""
        self._actors[task] = Actor(task, past.local, past.lost)

    def ended(self, tasks: Sequence[Task]) -> None:
        """Called when the running task has waited for the end of these programs."""
        for task in tasks:
            actor = self._actors.pop(task, None)
            if actor is not None:  # not killed before it began
                self.join(actor.end())

    def join(self, past: Carried) -> None:
        """Let ``past`` happen before what the running task does next."""
        actor, thread = self._now()
        actor.acquire(thread, past)

    def arrive(self, key: Hashable) -> None:
        """The running program or host arrives at a meeting of several."""
        actor, thread = self._now()
        if actor.task.is_program:
            clock = actor.released(thread)
            thread.event = 0
        else:
            clock = self._hosts[actor.task.pe]
        self._meetings[key] = self._meetings.get(key, 0) | clock

    def depart(self, key: Hashable) -> None:
        """It leaves the meeting when all have arrived."""
        actor, thread = self._now()
        if actor.task.is_program:
            actor.learn(thread, self._meetings[key])
        else:
            self._hosts[actor.task.pe] |= self._meetings[key]

    # ------------------------------------------------------------------ order

    def barrier(self) -> None:
        """Called when the block's threads have met in a barrier."""
        actor, thread = self._now()
        if thread is actor:
            actor.barrier()

    def fence(self) -> None:
        """NVSHMEM's fence, at system scope, also of the PE's messages."""
        actor, thread = self._now()
        known = actor.known | actor.own if thread is actor else thread.known
        for event, pe, message in self._sent[actor.task.pe]:
            if event & known:
                thread.ordered[pe] = thread.ordered.get(pe, 0) | message
        actor.fence(thread)

    def quiet(self) -> None:
        """Called when all earlier messages of the PE have arrived."""
        actor, thread = self._now()
        known = actor.known | actor.own if thread is actor else thread.known
        for event, _, message in self._sent[actor.task.pe]:
            if event & known:
                actor.learn(thread, message)
        actor.fence(thread)

    def complete_descriptor_stores(self) -> None:
        """Called when the running program's stores by descriptors are complete."""
        actor, thread = self._now()
        thread.known |= actor.asynchronous
        actor.asynchronous = 0

    def acquire(self, addresses: Array, nbytes: int, *, system: bool = True) -> None:
        """An acquire load has read these words."""
        actor, thread = self._now()
        for before in self._written(addresses, nbytes):
            if before.carried is not None:
                actor.acquire(thread, before.carried, system=system)

    def take(self, addresses: Array, nbytes: int) -> None:
        """Called when a poll has seen words that announce themselves, and takes them."""
        actor, thread = self._now()
        for before in self._written(addresses, nbytes):
            actor.learn(thread, before.event)
            if before.carried is not None:
                actor.see(thread, before.carried)
        access = self._access(actor, thread, "polls and takes it", None)
        for begin, end in runs_of(addresses, nbytes):
            self._shadow.read(
                self._space(begin), begin, end, access, thread.known | actor.own, checked=False
            )

    def waited(
        self,
        addresses: Array,
        nbytes: int,
        true: Callable[[Array], Array],
        *,
        whole: bool,
        tells: bool,
    ) -> None:
        """Called when a wait has looked at words; for :mod:`.exhaustive`.

        Args:
            true: what the words are waited to be.
            whole: all of them are waited for together.
            tells: the program gets their values, and not only whether they are ``true``.
        """

    def _written(self, addresses: Array, nbytes: int) -> list[Access]:
        found: dict[Access, None] = {}
        for begin, end in runs_of(addresses, nbytes):
            found.update(dict.fromkeys(self._shadow.last_writes(self._space(begin), begin, end)))
        return list(found)

    # ------------------------------------------------------------------ accesses of kernels

    def load(self, addresses: Array, nbytes: int, origin: Origin, *, relaxed: bool = False) -> None:
        """The running program loads elements of ``nbytes`` bytes; ``relaxed`` if it looks for what
        others write."""
        actor, thread = self._now()
        if relaxed:
            for before in self._written(addresses, nbytes):
                if before.carried is not None:
                    actor.see(thread, before.carried)
            return
        access = self._access(actor, thread, "loads it", origin)
        known = thread.known | actor.own
        for begin, end in runs_of(addresses, nbytes):
            self._note(
                self._shadow.read(self._space(begin), begin, end, access, known), access, actor
            )

    @contextmanager
    def stores_in_order(self, order: str, *, system: bool) -> Iterator[None]:
        """The running program's stores inside are relaxed, or releases, at ``system`` scope or the
        GPU's."""
        actor = self._actor
        actor.order = order, system
        try:
            yield
        finally:
            actor.order = "", True

    def storing(
        self, origin: Origin, *, by_descriptor: bool = False
    ) -> Callable[[Array, int], None]:
        """Return what notes the parts of a store of the running program when they land."""
        actor, thread = self._now()
        order, system = actor.order
        known = thread.known | actor.own
        if by_descriptor:
            event = self._events.new()
            actor.own |= event
            actor.asynchronous |= event
            who = actor.task.name
            access = self._shadow.add(Access(event, who, BY_DESCRIPTOR, kernel_place()))
            known |= event
        else:
            access = self._access(actor, thread, "stores to it", origin, order, system)
        if order == RELEASE:
            thread.event = 0

        def land(addresses: Array, nbytes: int) -> None:
            for begin, end in runs_of(addresses, nbytes):
                self._note(
                    self._shadow.write(self._space(begin, actor), begin, end, access, known),
                    access,
                    actor,
                )

        return land

    def of_host(self, addresses: Array, nbytes: int, name: str, *, writes: bool) -> None:
        """The running host reads or ``writes`` these elements, by PyTorch's operator ``name``."""
        actor, thread = self._now()
        what = f"{'writes' if writes else 'reads'} it by `{name}`"
        access = self._access(actor, thread, what, None)
        known = thread.known | actor.own
        note = self._shadow.write if writes else self._shadow.read
        for begin, end in runs_of(addresses, nbytes):
            self._note(note(_HEAP, begin, end, access, known), access, actor)

    def apart(self) -> None:
        """Let the program's accesses before and behind this be different events, of which a reader
        may know one."""
        self._now()[1].event = 0

    def change(
        self, addresses: Array, nbytes: int, origin: Origin, order: str, system: bool
    ) -> None:
        """The running program changes words by an atomic."""
        actor, thread = self._now()
        known = thread.known | actor.own
        access = self._access(actor, thread, "changes it by an atomic", origin, order, system, True)
        assert access.carried is not None
        for before in self._written(addresses, nbytes):
            if before.carried is not None:
                access.carried = before.carried.joined(access.carried)
                if order in (ACQUIRE, BOTH):
                    actor.acquire(thread, before.carried, system=system)
                else:
                    actor.see(thread, before.carried)
        for begin, end in runs_of(addresses, nbytes):
            self._note(
                self._shadow.write(self._space(begin), begin, end, access, known), access, actor
            )
        thread.event = 0

    def _access(
        self,
        actor: Actor,
        thread: Thread,
        what: str,
        origin: Origin,
        order: str = "",
        system: bool = True,
        atomic: bool = False,
    ) -> Access:
        """Return an access of the running task."""
        event = actor.event_of(thread, self._events)
        name = origin.name if isinstance(origin, Storage) else ""
        place = kernel_place()
        key = what, place, name, order
        found = None if atomic else thread.accesses.get(key)
        if found is None:
            strong = atomic or bool(order)
            carried = None
            if order in (RELEASE, BOTH):
                carried = actor.release(thread, system=system)
            elif what != "loads it":
                carried = actor.relaxed(thread)
            found = self._shadow.add(
                Access(event, actor.task.name, what, place, name, strong, carried)
            )
            if order not in (RELEASE, BOTH):
                thread.accesses[key] = found
        return found

    # ------------------------------------------------------------------ messages

    def message(self, what: str, pe: int, *, read: tuple[int, int] | None = None) -> Message:
        """A put, a get, a signal or a copy of the running task, named ``what``, leaves for ``pe``.

        ``read``: address and length of what it reads before the call returns.
        """
        actor, thread = self._now()
        event = actor.event_of(thread, self._events)
        known = actor.released(thread)
        if read is not None and read[1]:
            access = self._access(actor, thread, f"{what} from it", None)
            begin, end = read[0], read[0] + read[1]
            self._note(
                self._shadow.read(self._space(begin), begin, end, access, known), access, actor
            )
        own = self._events.new()
        behind = thread.ordered.get(pe, 0)
        carried = actor.relaxed(thread).joined(
            Carried(actor.task.pe, own | behind, own | behind, {})
        )
        lost = {
            reason: (clock | actor.sent) & ~carried.system for reason, clock in carried.lost.items()
        }
        carried = Carried(carried.pe, carried.local, carried.system, lost)
        actor.sent |= own
        thread.event = 0
        if actor.task.is_program:
            fenced = _UNFENCED if what == GETS else pe
            self._sent[actor.task.pe].append((event, fenced, own))
        place = kernel_place()
        told = (
            None if actor.task.is_program else Carried(actor.task.pe, known | own, known | own, {})
        )
        writes, reads = (
            self._shadow.add(
                Access(own, actor.task.name, f"{what} {way} it", place, carried=told, message=True)
            )
            for way in ("to", "from")
        )
        return Message(own, known | behind | own, carried, writes, reads)

    def moved(self, message: Message, dest: int, source: int | bytes, nbytes: int) -> None:
        """Bytes of a message move; ``source`` is an address if they are read now."""
        if isinstance(source, int):
            self._note(
                self._shadow.read(
                    self._of_message(message, source), source, source + nbytes, message.reads,
                    message.known,
                ),
                message.reads,
            )  # fmt: skip
        self._note(
            self._shadow.write(
                self._of_message(message, dest), dest, dest + nbytes, message.writes, message.known
            ),
            message.writes,
        )

    def signalled(self, message: Message, address: int, *, adds: bool) -> None:
        """Called when the signal of a message arrives."""
        carried = message.carried
        space = self._of_message(message, address)
        if adds:
            for before in self._shadow.last_writes(space, address, address + 8):
                if before.carried is not None:
                    carried = before.carried.joined(carried)
        place = message.writes.place
        access = self._shadow.add(
            Access(
                message.event,
                message.writes.who,
                "sets it as a signal",
                place,
                "",
                True,
                carried,
                True,
            )
        )
        self._note(self._shadow.write(space, address, address + 8, access, message.known), access)

    def arrived(self, message: Message) -> None:
        """Called when the running task knows that a message has arrived."""
        actor, thread = self._now()
        actor.learn(thread, message.event)

    def forget_symmetric(self, begin: int, end: int) -> None:
        """Called when symmetric bytes ``[begin, end)`` are freed."""
        self._shadow.forget(_HEAP, begin, end)

    def forget_ordinary(self, begin: int, end: int) -> None:
        """Called when ordinary bytes ``[begin, end)`` belong to another tensor than before."""
        for pe in range(self._memory.n_pes):
            self._shadow.forget(pe + 1, begin, end)

    # ------------------------------------------------------------------ reports

    def _space(self, address: int, actor: Actor | None = None) -> int:
        if self._memory.owns(address):
            return _HEAP
        return (actor or self._actor).task.pe + 1

    def _of_message(self, message: Message, address: int) -> int:
        return _HEAP if self._memory.owns(address) else message.carried.pe + 1

    def _note(self, conflict: Conflict | None, access: Access, actor: Actor | None = None) -> None:
        if conflict is None or self._stopped:
            return
        begin, end, before, written = conflict
        if self._memory.owns(begin):
            pe = self._memory.pe_of(begin)
            bytes = f"pe{pe}.{self._memory.describe_range(begin, end - begin)}"
        else:
            name = access.name or before.name
            bytes = (
                f"{end - begin} bytes of `{name}`" if name else f"{end - begin} bytes at {begin:#x}"
            )
        raise DataRace(
            bytes,
            (described(before), described(access)),
            remedies(before, access, written, actor),
        )
