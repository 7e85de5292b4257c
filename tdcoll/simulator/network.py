# SPDX-License-Identifier: Apache-2.0
"""The weak network: messages that arrive as late, and in as strange an order, as NVSHMEM and PTX
permit.

Every PE has one *link* to each PE. Messages of its programs (puts, signals, stores through a peer
pointer) wait there as operations, of which the pieces and then the signal arrive
(``docs/simulator.md`` has the rules). A fence, by any program, opens a new *epoch* in each of the
PE's links, and only operations of a link's oldest epoch arrive. Gets, and copies of streams, travel
in separate links, which fences do not order; ``quiet`` does not wait for copies, nor for other
programs' stores. An operation may be *held back* until no task can run but stragglers
(:mod:`.policy`).

Stores through tensor descriptors travel there, too: no fence, release or quiet orders them until
their program has waited for them, which makes stores of them.

Operations outlive the program that issued them, except stores, which are complete when the launch
ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from tdcoll.simulator.policy import Policy
from tdcoll.simulator.tasks import Task

STORES = "store", "descriptor store"
"""Kinds of operations that are complete when their launch ends."""

Piece = tuple[int, "int | bytes", int]
"""Destination address, source address (read on delivery) or captured bytes, byte count."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One message in flight.

    Attributes:
        kind: ``"put"``, ``"get"``, ``"signal"``, ``"store"``, ``"descriptor store"`` or ``"copy"``.
        issuer: program that issued it.
        link: from the program's PE to another, and whether fences do not order it.
        pieces: bytes that have not arrived yet.
        signal: applied after the last piece; None if there is none, or when it has arrived.
        done: called when everything has arrived.
        move: called with destination, source and length of each piece when it arrives.
        late: held back until no task can run but stragglers.
    """

    kind: str
    issuer: Task
    link: tuple[int, int, bool]
    pieces: list[Piece]
    signal: Callable[[], None] | None
    done: Callable[[], None] | None
    move: Callable[[int, Any, int], Any]
    late: bool

    @property
    def arrived(self) -> bool:
        """Whether there is nothing left of it."""
        return not self.pieces and self.signal is None


class Network:
    """Messages in flight, from which ``policy`` chooses the next to arrive.

    ``written`` is called with address and length of bytes that have arrived, and ``arrived`` with
    ``("arrived", PE)`` when an operation of that PE has.
    """

    def __init__(
        self,
        policy: Policy,
        written: Callable[[int, int], None],
        arrived: Callable[[tuple[str, int]], None],
    ) -> None:
        self._policy = policy
        self._written = written
        self._arrived = arrived
        # epochs, the oldest first
        self._links: dict[tuple[int, int, bool], list[list[Transfer]]] = {}
        self.eager: list[Transfer] = []  # may arrive now
        self._late: list[Transfer] = []  # may arrive when no task can run but stragglers
        self._released: dict[Transfer, None] = {}  # stores, to the other programs of their PE

    def issue(
        self,
        issuer: Task,
        pe: int,
        kind: str,
        pieces: Sequence[Piece],
        *,
        signal: Callable[[], None] | None = None,
        done: Callable[[], None] | None = None,
        move: Callable[[int, Any, int], Any] = ctypes.memmove,
        is_flag: bool = False,
    ) -> Transfer:
        """Put a message of ``issuer`` into the link to ``pe``; other arguments as in Transfer."""
        late = self._policy.holds_back(has_signal=signal is not None, is_flag=is_flag)
        link = issuer.pe, pe, kind in ("get", "copy", "descriptor store")
        operation = Transfer(kind, issuer, link, list(pieces), signal, done, move, late)
        issuer.in_flight += 1
        if operation.arrived:  # a put of no bytes
            self._finish(operation)
            return operation
        epochs = self._links.setdefault(link, [[]])
        epochs[-1].append(operation)
        if len(epochs) == 1:
            self._open(operation)
        return operation

    def cut(self, dest: int, source: int | bytes, nbytes: int, unit: int = 1) -> list[Piece]:
        """Return the pieces of a copy, cut at multiples of ``unit`` bytes."""
        cuts = [0, *(unit * at for at in self._policy.cuts(nbytes // unit)), nbytes]
        pieces: list[Piece] = []
        for begin, end in pairwise(cuts):
            if end > begin:
                part = source[begin:end] if isinstance(source, bytes) else source + begin
                pieces.append((dest + begin, part, end - begin))
        return pieces

    def fence(self, source_pe: int) -> None:
        """Deliver later messages of ``source_pe`` to a PE after its earlier ones."""
        for (sender, _, unordered), epochs in self._links.items():
            if sender == source_pe and not unordered and epochs[-1]:
                epochs.append([])

    def outstanding(self, issuer: Task) -> list[Transfer]:
        """Return the operations that must arrive before ``quiet`` returns if ``issuer`` calls it
        now."""
        sent = self._sent_by(issuer.pe)
        of_others = ("put", "get", "signal")
        own = (*of_others, "store", "copy")
        found = []
        for operation in sent:
            kinds = own if operation.issuer is issuer else of_others
            if operation.kind in kinds:
                found.append(operation)
        return found

    def _sent_by(self, source_pe: int) -> Iterator[Transfer]:
        epochs = (epochs for (sender, *_), epochs in self._links.items() if sender == source_pe)
        return chain.from_iterable(chain.from_iterable(epochs))

    def deliver(self) -> bool:
        """Let one piece or one signal of some operation arrive; return False if nothing is in
        flight."""
        queue = self.eager or self._late
        if not queue:
            return False
        operation = self._policy.take(queue)
        self._deliver_part(operation)
        if operation.arrived:
            self._close(operation)
        else:
            queue.append(operation)
        return True

    def complete_descriptor_stores(self, issuer: Task) -> None:
        """Make ordinary stores of the stores through descriptors that ``issuer`` has begun."""
        for operation in self._sent_by(issuer.pe) if issuer.in_flight else ():
            if operation.issuer is issuer and operation.kind == "descriptor store":
                operation.kind = "store"

    def flush_stores(
        self,
        issuer: Task,
        touching: tuple[int, int] | None = None,
        to: int | None = None,
        kinds: Sequence[str] = ("store",),
    ) -> None:
        """Let stores of ``issuer`` arrive now, in the order of issue, behind operations that a
        fence orders first.

        Only those that have yet to write to addresses ``touching``, ``[first, end)``, only those to
        the PE ``to``, and only those of these ``kinds``.
        """

        first, end = touching or (0, 1 << 64)

        def wanted(operation: Transfer) -> bool:
            inside = any(
                dest < end and first < dest + nbytes for dest, _, nbytes in operation.pieces
            )
            return inside and operation.issuer is issuer and operation.kind in kinds

        for link in list(self._links) if issuer.in_flight else ():
            if link[0] == issuer.pe and to in (None, link[1]):
                self._flush(link, wanted)

    def release_stores(self, issuer: Task) -> None:
        """Order the stores of ``issuer`` so far before later operations of its PE's programs that
        have heard of it."""
        if issuer.in_flight:
            stores = (
                op for op in self._sent_by(issuer.pe) if op.issuer is issuer and op.kind == "store"
            )
            self._released.update(dict.fromkeys(stores))

    def flush_released(self, source_pe: int) -> None:
        """Let stores that programs of ``source_pe`` have released to each other arrive now, as in
        :meth:`flush_stores`."""
        for link in {op.link: None for op in self._released if op.issuer.pe == source_pe}:
            self._flush(link, self._released.__contains__)

    def flush_fenced(self, source_pe: int, pe: int) -> None:
        """Deliver now the messages of ``source_pe`` to ``pe`` before its last fence."""
        link = source_pe, pe, False
        fenced = list(chain.from_iterable(self._links.get(link, [])[:-1]))
        self._flush(link, fenced.__contains__)

    def _flush(self, link: tuple[int, int, bool], wanted: Callable[[Transfer], bool]) -> None:
        epochs = self._links.get(link, [])
        last = max((i for i, epoch in enumerate(epochs) if any(map(wanted, epoch))), default=-1)
        chosen = [
            operation
            for i, epoch in enumerate(epochs[: last + 1])
            for operation in epoch
            if i < last or wanted(operation)
        ]
        for operation in chosen:
            self._withdraw(operation)
            while not operation.arrived:
                self._deliver_part(operation, in_order=True)
            self._close(operation)

    def drop(self, source_pe: int) -> None:
        """Drop all messages of ``source_pe`` that have not arrived yet."""
        for operation in list(self._sent_by(source_pe)):
            operation.done = None
            self._withdraw(operation)
            self._close(operation)

    def _deliver_part(self, operation: Transfer, in_order: bool = False) -> None:
        pieces = operation.pieces
        if pieces:
            dest, source, nbytes = (
                pieces.pop(0) if in_order or len(pieces) == 1 else self._policy.take(pieces)
            )
            operation.move(dest, source, nbytes)
            self._written(dest, nbytes)
        elif operation.signal is not None:
            signal = operation.signal
            operation.signal = None
            signal()

    def _open(self, operation: Transfer) -> None:
        (self._late if operation.late else self.eager).append(operation)

    def _withdraw(self, operation: Transfer) -> None:
        queue = self._late if operation.late else self.eager
        if operation in queue:
            queue.remove(operation)

    def _close(self, operation: Transfer) -> None:
        """Remove ``operation``, which has arrived; if it was the last of its epoch, open the next
        one."""
        epochs = self._links[operation.link]
        next(epoch for epoch in epochs if operation in epoch).remove(operation)
        was_oldest = not epochs[0]
        while epochs and not epochs[0]:
            epochs.pop(0)
        if not epochs:
            del self._links[operation.link]
        elif was_oldest:
            for waiting in epochs[0]:
                self._open(waiting)
        self._finish(operation)

    def _finish(self, operation: Transfer) -> None:
        self._released.pop(operation, None)
        operation.issuer.in_flight -= 1
        if operation.done is not None:
            operation.done()
        self._arrived(("arrived", operation.issuer.pe))
