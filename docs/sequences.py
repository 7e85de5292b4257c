# SPDX-License-Identifier: Apache-2.0
"""Run the protocols in the simulator, and turn its traces into the events that ``docs/figures.py``
draws.

To add a figure, add an entry to :data:`PROTOCOLS`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tutorials")]

import torch  # noqa: E402

import tdcoll  # noqa: E402
from tdcoll.testing import World  # noqa: E402


@dataclass(frozen=True)
class Event:
    """Something that a figure shows.

    Attributes:
        kind: "call", "wait" or "read" (of a slot), all of one rank, or "data" or "signal", from a
            rank to another.
        call: number of the call, or of the item of a queue, from 1.
        rank: the rank, or the sender.
        begin: scheduler step; of a message: when it is sent.
        end: scheduler step; of a message: when its last byte arrives.
        to: the receiver of a message.
        slot: where in the receiver's memory data lands: 0 for the lowest address, and so on.
        tensor: name of the tensor in which a message lands.
    """

    kind: str
    call: int
    rank: int
    begin: float
    end: float
    to: int = -1
    slot: int = -1
    tensor: str = ""

    def __str__(self) -> str:
        to = f" -> rank {self.to}" if self.to >= 0 else ""
        return f"{self.kind} {self.call}: rank {self.rank}{to}" + (
            f", slot {self.slot}" if self.slot >= 0 else ""
        )


@dataclass(frozen=True)
class Protocol:
    """A figure.

    Attributes:
        title: stands above it.
        case: runs the protocol in a world.
        memory: name of the symmetric tensor that has the slots.
        label: returns the text at the arrow of a message.
        reason: why rank 0 may use a slot again, in three numbered steps.
        world: arguments of :class:`tdcoll.testing.World`.
        lanes: headings of the ranks.
        rows: rank to the number of the thread block that is shown, of one launch whose waits begin
            items; if empty, a call is a launch, and all of its thread blocks are shown.
        pieces: whether colours are those of the ranks whose data it is. Otherwise they are those of
            the slots.
        cleared: whether a slot is cleared in the call after it was read.
        launches: of a call.
    """

    title: str
    case: Callable[[World], None]
    memory: str
    label: Callable[[Event], str]
    reason: str
    world: dict[str, Any]
    lanes: Sequence[str] = ("rank 0", "rank 1, which is slow")
    rows: dict[int, int] = field(default_factory=dict)
    pieces: bool = False
    cleared: bool = False
    launches: int = 1


# ---------------------------------------------------------------------- the protocols


def tutorial(name: str) -> ModuleType:
    """Import a tutorial."""
    spec = importlib.util.spec_from_file_location(
        name.replace("-", "_"), ROOT / f"tutorials/{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    # Triton looks the module up
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def two_slots(world: World, **changes: Any) -> None:
    """Three calls of tutorial 02. Rank 1 reads each result until the next message of rank 0 is
    there."""
    module = tutorial("02-all-gather")

    def host(pe: int) -> None:
        gather = module.MyAllGather(8, torch.int32, **changes)
        for call in range(1, 4):
            result = gather(module.make(pe, call, 8, "cpu"))
            with world.trace.slice(pe, 0, "read"):
                world.pause(40 * pe * (call < 3))
                result.sum()

    world.run(host)


def all_gather_matmul(world: World) -> None:
    """Three calls of the kernel of tutorial 06, of two pieces each, with a sender and a worker."""
    module = tutorial("06-all-gather-matmul")

    def host(pe: int) -> None:
        kernel = module.MyAllGatherMatmul(32, 16, 16, (16, 16, 16), blocks=2, senders=1)
        source = tdcoll.zeros((32, 16), torch.bfloat16, name="source")
        weight = torch.zeros((16, 16), dtype=torch.bfloat16)
        for _ in range(3):
            kernel(source, weight)
        kernel.monitor.check()

    world.run(host)


def queue(world: World) -> None:
    """Four items through two slots, by the kernel of tutorial 01."""
    module = tutorial("01-notify-and-wait")

    def host(pe: int) -> None:
        slots, outbox = (
            tdcoll.empty((2, 8), torch.int64, name="slots"),
            tdcoll.empty(8, torch.int64, name="outbox"),
        )
        arrived, credits = (
            tdcoll.zeros(2, torch.int64),
            tdcoll.zeros(1, torch.int64, name="credits"),
        )
        received, monitor = torch.zeros((4, 8), dtype=torch.int64), tdcoll.WaitMonitor()
        constants = {
            "WORDS": 8,
            "SLOTS": 2,
            "SIGNALS": 2,
            "AT_LEAST": True,
            "AHEAD": 2,
            "BLOCKING": True,
        }
        module.queue[(2,)](
            slots, outbox, received, arrived, credits, monitor.words, 0, 4, **constants
        )
        monitor.check()

    world.run(host)


def collective(function: str, algorithm: str, calls: int) -> Callable[[World], None]:
    """Return a case of one of tdcoll's collectives."""

    def case(world: World) -> None:
        def host(pe: int) -> None:
            with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 10) as ctx:
                for call in range(calls):
                    getattr(tdcoll, function)(
                        torch.full((8,), float(pe + call)), ctx=ctx, algorithm=algorithm
                    )
                    ctx.check()

        world.run(host)

    return case


PROTOCOLS = {
    "two-slots": Protocol(
        "Two slots: an all-gather of puts with signals",
        two_slots,
        "slots",
        lambda event: f"data, then signal = {(event.call + 1) // 2}",
        "Rank 1 has read call 1 (1), and its message of call 2 shows that (2), so call 3 may use slot 1 again (3).",
        {"n_pes": 2, "seed": 4},
    ),
    "credits": Protocol(
        "Credits: a queue with two slots",
        queue,
        "slots",
        lambda event: f"item {event.call}, then its signal" if event.kind == "data" else "credit",
        "Rank 1 has read item 1 (1) and returns a credit (2), so item 3 may use slot 0 again (3).",
        {"n_pes": 2, "seed": 5, "stragglers": False},
        lanes=("rank 0, the producer", "rank 1, the consumer"),
        rows={0: 0, 1: 1},
    ),
    "ll": Protocol(
        "LL: every 128-bit word has the epoch as its flag",
        collective("all_gather", "ll", 3),
        "flagged",
        lambda event: f"words with flag {event.call}",
        "Rank 1 has read call 1 (1), and its words of call 2 show that (2), so call 3 may use slot 1 again (3).",
        {"n_pes": 2, "seed": 1, "stragglers": 1},
    ),
    "lamport": Protocol(
        "Lamport: three slots, each cleared in the call after its own",
        collective("all_reduce", "one_shot", 4),
        "lamport",
        lambda event: f"words of call {event.call}",
        "Rank 1 has cleared slot 1 (1), and its words of call 3 show that (2), so call 4 may use slot 1 again (3).",
        {"n_pes": 2, "seed": 1, "stragglers": 1},
        cleared=True,
    ),
    "ce": Protocol(
        "Copy engines: data and then the epoch are copied when all ranks have entered the call",
        collective("all_gather", "ce", 2),
        "inbox",
        lambda event: (
            "data"
            if event.slot >= 0
            else f"{'entered' if event.tensor == 'ready' else 'arrived'} = {2 * event.call}"
        ),
        "Rank 1 has read call 1 (1) and then enters call 2 (2), so rank 0 may copy to the slot again (3).",
        {"n_pes": 2, "seed": 1, "stragglers": 1},
        launches=3,
    ),
    "all-gather-matmul": Protocol(
        "All-gather + matmul: pieces travel while own rows are multiplied",
        all_gather_matmul,
        "inbox",
        lambda event: f"piece {event.slot % 2}",
        "",
        {"n_pes": 2, "seed": 1, "stragglers": False},
        lanes=("rank 0", "rank 1"),
    ),
    "2d": Protocol(
        "2D all-gather: a put along the rail, then stores inside the node",
        collective("all_gather", "2d", 1),
        "inbox",
        lambda event: (
            "" if event.slot else "put + signal" if abs(event.rank - event.to) > 1 else "store"
        ),
        "",
        {"n_pes": 4, "seed": 5, "ranks_per_node": 2},
        lanes=("node 0: rank 0", "node 0: rank 1", "node 1: rank 2", "node 1: rank 3"),
        pieces=True,
    ),
}

# ---------------------------------------------------------------------- from the trace to events


def events(protocol: Protocol, case: Callable[[World], None] | None = None) -> list[Event]:
    """Run a protocol, or another ``case`` of it, and return what the figure shows, in the order of
    time."""
    world = World(weak=True, trace=True, late_data=False, **protocol.world)
    (case or protocol.case)(world)
    trace = [one for one in json.loads(world.trace.to_json())["traceEvents"] if one["ph"] != "M"]
    found: list[Event] = []
    spans = [one for one in trace if one["ph"] == "X"]
    credits = [
        one["ts"]
        for one in trace
        if one["ph"] == "i" and re.match(r"pe0\.credits.* \+= 1", one["name"])
    ]
    for rank in range(world.n_pes):
        mine = sorted(
            (one for one in spans if one["pid"] == rank), key=lambda one: (one["ts"], -one["dur"])
        )
        if protocol.rows:
            found += _items(
                rank, [one for one in mine if one["tid"] == protocol.rows[rank] + 1], rank * credits
            )
        else:
            found += _calls(rank, mine, protocol.launches)
    return sorted(
        [*found, *_messages(protocol, trace, found)],
        key=lambda event: (event.begin, event.rank, event.kind),
    )


def _calls(rank: int, spans: Sequence[dict[str, Any]], launches: int) -> list[Event]:
    """Return the calls of a rank, of so many launches each, its waits for other ranks and the
    host's reads."""
    ends = {id(one): one["ts"] + one["dur"] for one in spans}
    launched = [one for one in spans if one["tid"] == 0 and one["name"] != "read"]
    found = []
    for number, first in enumerate(launched[::launches], 1):
        its = launched[(number - 1) * launches :][:launches]
        found.append(Event("call", number, rank, first["ts"], ends[id(its[-1])]))
        for launch in its:
            begin, end = launch["ts"], ends[id(launch)]
            waits = [
                one
                for one in spans
                if re.match(r"wait (?!.*expired_epochs)", one["name"]) and begin <= one["ts"] <= end
            ]
            if waits:
                found.append(
                    Event("wait", number, rank, waits[0]["ts"], max(ends[id(one)] for one in waits))
                )
    reads = [one for one in spans if one["tid"] == 0 and one["name"] == "read"]
    found += [
        Event("read", number, rank, one["ts"], ends[id(one)]) for number, one in enumerate(reads, 1)
    ]
    return found


def _items(rank: int, spans: Sequence[dict[str, Any]], credits: Sequence[float]) -> list[Event]:
    """Return the items of a thread block, each of which begins with a wait.

    A consumer then reads and sends a credit. The trace has only the arrival of ``credits``, so a
    read ends there at the latest.
    """
    (program, *waits) = spans
    begins = [one["ts"] for one in waits] + [program["ts"] + program["dur"]]
    found = []
    for number, one in enumerate(waits, 1):
        awake = one["ts"] + one["dur"]
        found.append(Event("call", number, rank, begins[number - 1], begins[number]))
        found.append(Event("wait", number, rank, one["ts"], awake))
        if credits:
            read = min(begins[number], credits[number - 1])
            found.append(Event("read", number, rank, awake, read))
            found.append(Event("signal", number, rank, read, credits[number - 1], 0))
    return found


def _messages(
    protocol: Protocol, trace: Sequence[dict[str, Any]], calls: Sequence[Event]
) -> list[Event]:
    """Return data and signals between ranks, and copies out of slots. The calls say to which of
    them each belongs."""

    def call_of(rank: int, time: float) -> int:
        return max(
            event.call
            for event in calls
            if (event.kind, event.rank) == ("call", rank) and event.begin <= time
        )

    begun: dict[str, Any] = {}
    # tensor, sender, receiver, offset, begin, end
    sent: list[tuple[str, int, int, int, float, float]] = []
    made = []
    for one in trace:
        if one["ph"] == "b":
            begun[one["id"]] = one
        elif one["ph"] == "e":
            first, rank = begun.pop(one["id"]), one["pid"]
            found = re.fullmatch(r"pe(\d+)\.(\w+)\[(\d+).*", first["args"]["to"])
            stays = not found or int(found[1]) == rank
            if stays and first["args"].get("from", "").startswith(f"pe{rank}.{protocol.memory}["):
                made.append(Event("read", call_of(rank, first["ts"]), rank, first["ts"], one["ts"]))
            if found and not stays and protocol.rows.get(rank) in (None, one["tid"] - 1):
                sent.append((found[2], rank, int(found[1]), int(found[3]), first["ts"], one["ts"]))
    for tensor, rank, to, offset, begin, end in sent:
        kind = "data" if tensor == protocol.memory else "signal"
        offsets = sorted({at for its, src_rank, there, at, *_ in sent if (its, there) == (protocol.memory, to) and
                          (protocol.pieces or src_rank == rank)})  # fmt: skip
        slot = offsets.index(offset) if kind == "data" else -1
        if protocol.pieces and slot >= to:
            slot += 1  # its own piece doesn't travel
        made.append(Event(kind, call_of(rank, begin), rank, begin, end, to, slot, tensor))
    return made


def summary(found: Sequence[Event]) -> list[str]:
    """Return the events as text without their times, sorted: this is the same if only the schedule
    differs."""
    return sorted(map(str, found))


def held(protocol: Protocol, found: Sequence[Event], data: Event) -> tuple[float, float, float]:
    """Return when data arrives, when its receiver has read it, and when its slot is free.

    It was read at the end of the receiver's read or call, and its slot is free then, or when it has
    been cleared.
    """
    ends = {(event.kind, event.call): event.end for event in found if event.rank == data.to}
    read = ends.get(("read", data.call), ends["call", data.call])
    return data.end, read, ends.get(("call", data.call + 1), read) if protocol.cleared else read


def overwritten(protocol: Protocol, found: Sequence[Event]) -> list[Event]:
    """Return the data that is sent to a slot before the slot is free."""
    sent = [event for event in found if event.kind == "data"]
    pairs = [(one, two) for i, two in enumerate(sent) for one in sent[:i]]
    same = [
        (one, two)
        for one, two in pairs
        if (one.rank, one.to, one.slot) == (two.rank, two.to, two.slot)
    ]
    return [later for earlier, later in same if later.begin < held(protocol, found, earlier)[2]]


def reason(protocol: Protocol, found: Sequence[Event]) -> tuple[Event, Event, Event]:
    """Return the first data of rank 0 whose slot is used again, the first message that its receiver
    sends when the slot is free, and the data that replaces it."""
    sent = [event for event in found if event.kind == "data" and event.rank == 0]
    earlier, later = next(
        (one, two) for i, two in enumerate(sent) for one in sent[:i] if one.slot == two.slot
    )
    free = held(protocol, found, earlier)[2]
    return earlier, next(event for event in found if event.to == 0 and event.begin >= free), later
