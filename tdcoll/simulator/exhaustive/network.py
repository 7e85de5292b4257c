# SPDX-License-Identifier: Apache-2.0
"""A weak network in which each part of a message arrives when it is chosen, as an event."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tdcoll.simulator.exhaustive.recorder import BOTH, OTHERS, Recorder
from tdcoll.simulator.exhaustive.search import ExecutionEvent
from tdcoll.simulator.network import STORES, Network, Piece, Transfer
from tdcoll.simulator.policy import Policy
from tdcoll.simulator.tasks import Task


class ChosenOrder(Policy):
    """The fair policy, except that the scheduler says which message arrives, and which piece of it.

    Args:
        pieces: into how many pieces messages are cut.
    """

    def __init__(self, pieces: int) -> None:
        self._pieces = pieces
        self.operation: Transfer | None = None
        self.piece: Piece | None = None

    def take(self, items: Any) -> Any:
        for wanted in (self.operation, self.piece):
            if wanted is not None and wanted in items:
                items.remove(wanted)
                return wanted
        return super().take(items)

    def cuts(self, units: int) -> list[int]:
        pieces = min(self._pieces, units)
        return [units * place // pieces for place in range(1, pieces)]

    def describe(self) -> str:
        return "chosen order"


@dataclass(slots=True, eq=False)
class _MessageRecord:
    """The place of a message in the order of events.

    Attributes:
        operation: the message.
        process: names the message in every execution.
        issued: the step that sent it.
        pieces: all of its pieces.
        behind: messages that a fence puts before it.
        events: of the parts that have arrived.
        released: it is a store that its program has released to others of the PE.
    """

    operation: Transfer
    process: Hashable
    issued: ExecutionEvent | None
    pieces: list[Piece]
    behind: list[_MessageRecord]
    events: list[ExecutionEvent] = field(default_factory=list)
    released: bool = False


class RecordedNetwork(Network):
    """A network in which a part of a message is an event when it arrives."""

    def __init__(
        self,
        policy: Policy,
        written: Callable[[int, int], None],
        arrived: Callable[[tuple[str, int]], None],
        recorder: Recorder,
    ) -> None:
        super().__init__(policy, written, arrived)
        self._recorder = recorder
        self._records: dict[Transfer, _MessageRecord] = {}
        self._fences: list[tuple[ExecutionEvent | None, list[_MessageRecord]]] = []
        self._awaited: dict[Task, list[_MessageRecord]] = {}

    def parts(self) -> list[tuple[Hashable, Transfer, Piece | None]]:
        """Return what may arrive now: process, message and piece; None for its signal."""
        found: list[tuple[Hashable, Transfer, Piece | None]] = []
        for operation in self.eager:
            if not all(before.operation.arrived for before in self._records[operation].behind):
                continue
            for piece in operation.pieces:
                found.append((self._process(operation, piece), operation, piece))
            if not operation.pieces:
                found.append((self._process(operation, None), operation, None))
        return found

    def _process(self, operation: Transfer, piece: Piece | None) -> Hashable:
        record = self._records[operation]
        return record.process, -1 if piece is None else record.pieces.index(piece)

    def issue(self, issuer: Task, pe: int, kind: str, pieces: Any, **options: Any) -> Transfer:
        operation = super().issue(issuer, pe, kind, pieces, **options)
        recorder = self._recorder
        number = sum(other.issuer is issuer for other in self._records)
        record = _MessageRecord(
            operation,
            (recorder.processes[issuer], number),
            recorder.log.main,
            list(pieces),
            self._fenced_before(operation.link),
        )
        if kind in STORES and pe == issuer.pe:  # earlier ones to the same bytes have landed
            begin = pieces[0][0]
            end = pieces[-1][0] + pieces[-1][2]
            recorder.need(self._arrivals(lambda other: other.link == operation.link, begin, end))
        self._records[operation] = record
        if kind != "copy":
            recorder.add_to("sent", issuer.pe)
        return operation

    def _arrivals(
        self, wanted: Callable[[Transfer], bool], begin: int = 0, end: int = 1 << 64
    ) -> list[ExecutionEvent]:
        """Return the events of messages that have arrived, and of those that fences put before
        them."""
        found: list[ExecutionEvent] = []
        for operation, record in self._records.items():
            inside = not record.pieces or any(
                to < end and begin < to + nbytes for to, _, nbytes in record.pieces
            )
            if inside and wanted(operation):
                for each in (record, *record.behind):
                    found += each.events
        return found

    def _deliver_part(self, operation: Transfer, in_order: bool = False) -> None:
        record = self._records.get(operation)
        recorder = self._recorder
        main = recorder.log.main
        assert record is not None
        piece = self._next_piece(operation, in_order)
        if main is not None and record.issued is main:  # a part of the step that sent it
            if piece is not None:
                self._touch_piece(operation, piece)
            super()._deliver_part(operation, in_order)
            record.events.append(main)
            return
        event = recorder.begin(self._process(operation, piece))
        if record.issued is not None:
            event.needs.add(record.issued)
        for before in record.behind:
            event.needs.update(before.events)
        if piece is None:
            event.needs.update(record.events)
        else:
            self._touch_piece(operation, piece)
        super()._deliver_part(operation, in_order)
        record.events.append(recorder.end())
        if main is not None:
            main.needs.add(event)

    def _next_piece(self, operation: Transfer, in_order: bool) -> Piece | None:
        if not operation.pieces:
            return None
        chosen = getattr(self._policy, "piece", None)
        if in_order or chosen not in operation.pieces:
            return operation.pieces[0]
        found: Piece = chosen
        return found

    def _touch_piece(self, operation: Transfer, piece: Piece) -> None:
        dest, source, nbytes = piece
        pe = operation.issuer.pe
        lands = operation.kind in STORES and operation.link[1] == pe
        views = (OTHERS,) if lands else BOTH
        self._recorder.touch("writes", dest, dest + nbytes, pe, views)
        if isinstance(source, int) and not lands:
            self._recorder.read(source, source + nbytes, pe)

    def fence(self, source_pe: int) -> None:
        # Not as in :class:`Network`: other programs' messages that are sent at the same time have
        # no order with the fence. That leaves more schedules, and spares the orders of the two.
        is_past = self._past()
        earlier = [
            record
            for operation, record in self._records.items()
            if operation.link[0] == source_pe and is_past(record.issued)
        ]
        self._fences.append((self._recorder.log.main, earlier))

    def _fenced_before(self, link: tuple[int, int, bool]) -> list[_MessageRecord]:
        """Return the messages of a link that fences put before what is sent there now."""
        if link[2]:
            return []
        found: dict[_MessageRecord, None] = {}
        is_past = self._past()
        for event, earlier in self._fences:
            if is_past(event):
                found.update((record, None) for record in earlier if record.operation.link == link)
        return list(found)

    def _past(self) -> Callable[[ExecutionEvent | None], bool]:
        """Return what says whether an event happens before the present step, or is the step."""
        log = self._recorder.log
        main = log.main
        past = 0 if main is None else log.past_of(main)
        return lambda event: event is None or event is main or bool(past >> event.number & 1)

    def _flush(self, link: tuple[int, int, bool], wanted: Callable[[Transfer], bool]) -> None:
        chosen: dict[_MessageRecord, None] = {}
        for operation, record in self._records.items():
            if operation.link == link and not operation.arrived and wanted(operation):
                chosen.update(dict.fromkeys((*record.behind, record)))
        super()._flush(link, lambda operation: self._records[operation] in chosen)

    def outstanding(self, issuer: Task) -> list[Transfer]:
        # Of what other programs send at the same time, `quiet` may wait for all or nothing. To wait
        # for nothing leaves more schedules, and spares the others.
        is_past = self._past()

        def before(operation: Transfer) -> bool:
            return operation.issuer is issuer or is_past(self._records[operation].issued)

        of_others = ("put", "get", "signal")
        awaited = []
        for operation, record in self._records.items():
            own = operation.issuer is issuer
            wanted = operation.issuer.pe == issuer.pe and (own or operation.kind in of_others)
            if wanted and before(operation):
                awaited.append(record)
        self._awaited[issuer] = awaited
        return [operation for operation in super().outstanding(issuer) if before(operation)]

    def awaited_by(self, issuer: Task) -> list[ExecutionEvent]:
        """Return what ``quiet`` of ``issuer`` has waited for."""
        return [event for record in self._awaited.pop(issuer, []) for event in record.events]

    def complete_descriptor_stores(self, issuer: Task) -> None:
        super().complete_descriptor_stores(issuer)
        for operation in self._records:
            if operation.issuer is issuer and operation.kind == "descriptor store":
                operation.kind = "store"

    def flush_stores(
        self,
        issuer: Task,
        touching: tuple[int, int] | None = None,
        to: int | None = None,
        kinds: Sequence[str] = ("store",),
    ) -> None:
        super().flush_stores(issuer, touching, to, kinds)

        def wanted(operation: Transfer) -> bool:
            return (
                operation.issuer is issuer
                and operation.kind in kinds
                and to in (None, operation.link[1])
            )

        self._recorder.need(self._arrivals(wanted, *(touching or (0, 1 << 64))))

    def release_stores(self, issuer: Task) -> None:
        super().release_stores(issuer)
        self._recorder.add_to("released", issuer.pe)
        for operation, record in self._records.items():
            if operation.issuer is issuer and operation.kind == "store":
                record.released = True

    def flush_released(self, source_pe: int) -> None:
        self._recorder.read_object("released", source_pe)
        super().flush_released(source_pe)
        self._recorder.need(
            self._arrivals(lambda op: op.issuer.pe == source_pe and self._records[op].released)
        )

    def flush_fenced(self, source_pe: int, pe: int) -> None:
        link = source_pe, pe, False
        fenced = self._fenced_before(link)
        self._flush(link, lambda operation: self._records[operation] in fenced)
        for record in fenced:
            self._recorder.need(record.events)
