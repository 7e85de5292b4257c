# SPDX-License-Identifier: Apache-2.0
"""The fused kernels with one protection switched off: what the simulator must catch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from kernel_mutants import Change

import tdcoll.fused.op  # noqa: F401, which names the kernels: before one is replaced

MODULES = ("tdcoll.fused.kernels_rows", "tdcoll.fused.kernels")


@dataclass(frozen=True)
class Mutant:
    """The kernels with one protection less.

    Attributes:
        name: what is missing.
        changes: to the kernels, or to device functions that they call.
        expect: regular expression that the failure's report must match: what goes wrong, and not just that it does.
        algorithm: whose kernel shows it.
        case: further arguments of ``Norms``.
        resident, stragglers: as for ``World``.
    """

    name: str
    changes: tuple[Change, ...]
    expect: str
    algorithm: str
    case: tuple[tuple[str, Any], ...] = ()
    resident: int | None = None
    stragglers: bool = False

    @property
    def job(self) -> dict[str, Any]:
        """Return the arguments of ``World``."""
        return {"n_pes": 3, "resident": self.resident, "stragglers": self.stragglers}

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``Norms``."""
        return {"calls": "oooo", "rows": (3,), "blocks": (4,), **dict(self.case)}


WRONG = r"AssertionError: rank \d+, call \d+ \([oi8]\), [\w ,]+: \d+ wrong elements"
MISSING = r"[Dd]eadlock[\s\S]*waits for pe\d+\.lamport\["
KERNELS, ONE, TWO = "fused.kernels", "fused.kernels.norm_rows_one_shot", "fused.kernels.norm_rows_two_stage"
SEND_ONE = "if sends:\n    words.send_to_all(g, inbox, deltas, place, mine, call, inside, True)"
NEW_ONE = "made, mask = _new(g, inbox, place, mine, old, call, inside, DTYPE)"
CLEAR_ONE = "lamport.clear(g, inbox, call, 16 * width * tl.cast(rows, tl.int64), BLOCK)"
CLEAR_TWO = "lamport.clear(g, inbox, call, nbytes, BLOCK)"
SEND_MEASURES = "words.send_to_all(g, inbox, deltas, measures + i * PIECES + piece + lane, measured, call, only, True)"
SECOND = "words.send_to_all(g, inbox, deltas, each * width + place, made, call, mask, True)"
PUBLISHED = "_published(g, inbox, row * PIECES, call, PIECES, ROOM)"
REDUCED = "words.reduce(parts, g.world, DTYPE, tl.float32, SUM, True)"
WAIT = "words.receive(g, inbox, word, mine, call, mask, True)"
NO_WAIT = (
    "(tuple(mine if r == g.rank else lamport.load(lamport.segment(g, inbox, call, r), word, inbox.stride) "
    "for r in range(g.world)), mask)"
)
STORED_EARLY = (
    "if sends:\n"
    "    tdl.store_words(new + at + 16 * tl.cast(word, tl.int64), made[0], made[1], made[2], made[3], mask)\n"
)


def to(where: str, old: str, new: str) -> tuple[Change, ...]:
    """Return one change as the changes of a mutant."""
    return (Change(where, old, new),)


WHOLE = (("blocks", (0,)),)
"""One program for each row."""

MUTANTS = [
    *(
        Mutant(
            f"{name}: nothing is cleared",
            to(where, clear, "pass"),
            f"{WRONG}|{MISSING}",
            name,
            (("calls", "ooooo"), *WHOLE),
        )
        for name, where, clear in (("one_shot", ONE, CLEAR_ONE), ("two_stage", TWO, CLEAR_TWO))
    ),
    Mutant(
        "one-shot: two slots",
        to("lamport.slot", "call % 3", "call % 2"),
        f"{WRONG}|{MISSING}",
        "one_shot",
        (("calls", "oooooooo"), ("rows", (1,)), *WHOLE),
        stragglers=True,
    ),
    Mutant(
        "two-stage: only the first part is cleared",
        to(TWO, CLEAR_TWO, CLEAR_TWO.replace("nbytes", "16 * width * tl.cast(each, tl.int64)")),
        WRONG,
        "two_stage",
        (("calls", "ooooo"), *WHOLE),
    ),
    Mutant(
        "two-stage: the measures are not cleared",
        to(TWO, CLEAR_TWO, CLEAR_TWO.replace("nbytes", "16 * tl.cast(measures, tl.int64)")),
        WRONG,
        "two_stage",
        (("calls", "ooooo"),),
    ),
    *(
        Mutant(f"{name}: words are not waited for", to(f"{KERNELS}._new", WAIT, NO_WAIT), WRONG, name)
        for name in ("one_shot", "two_stage")
    ),
    *(
        Mutant(
            f"{name}: the sum begins with the own rank",
            to(f"{KERNELS}._new", REDUCED, REDUCED.replace("parts", "parts[g.rank :] + parts[: g.rank]")),
            WRONG,
            name,
            (("dtype", torch.float32),),
        )
        for name in ("one_shot", "two_stage")
    ),
    Mutant("two-stage: no measures are sent", to(TWO, SEND_MEASURES, "pass"), MISSING, "two_stage"),
    Mutant("two-stage: no rows are gathered", to(TWO, SECOND, "pass"), MISSING, "two_stage"),
    Mutant(
        "two-stage: rows are gathered where parts came",
        to(TWO, "each * width + place", "place"),
        f"{WRONG}|{MISSING}",
        "two_stage",
        WHOLE,
    ),
    Mutant(
        "one-shot: measures of the last call in the slot will do",
        to(f"{KERNELS}._flag", "call & 0x7FFFFFFF", "call * 0 + 1"),
        WRONG,
        "one_shot",
        (("calls", "oooooooo"),),
    ),
    Mutant(
        "two-stage: measures of the last call in the slot will do",
        to(f"{KERNELS}._flag", "call & 0x7FFFFFFF", "call * 0 + 1"),
        WRONG,
        "two_stage",
        (("calls", "oooooooo"),),
    ),
    Mutant(
        "one-shot: the measures of a piece are those of the row",
        to(ONE, PUBLISHED, PUBLISHED.replace("PIECES, ROOM", "1, ROOM")),
        WRONG,
        "one_shot",
    ),
    Mutant(
        "one-shot: the first programs store a residual that others still read",
        to(ONE, NEW_ONE, f"{NEW_ONE}\n{STORED_EARLY}"),
        WRONG,
        "one_shot",
        (("calls", "iiii"),),
        resident=1,
    ),
    Mutant(
        "one-shot: programs that store come before those that publish",
        (
            *to(ONE, "stores = program % (2 * PIECES) >= PIECES", "stores = program % (2 * PIECES) < PIECES"),
            *to(ONE, "sends = program % (2 * PIECES) < PIECES", "sends = program % (2 * PIECES) >= PIECES"),
        ),
        MISSING,
        "one_shot",
        resident=1,
    ),
    Mutant(
        "one-shot: words are received before they are sent",
        (*to(ONE, SEND_ONE, "pass"), *to(ONE, NEW_ONE, f"{NEW_ONE}\n{SEND_ONE}")),
        MISSING,
        "one_shot",
        WHOLE,
        resident=1,
    ),
    Mutant(
        "two-stage: programs that store come before those that reduce",
        to(TWO, "tl.program_id(0)", "tl.num_programs(0) - 1 - tl.program_id(0)"),
        MISSING,
        "two_stage",
        resident=1,
    ),
    Mutant(
        "two-stage: squares are added from the last word on",
        to(
            "fused.kernels_rows.tree",
            "tl.sum(tl.reshape(values, [values.shape[0] // 2, 2]), 1)",
            "tl.sum(tl.reshape(values, [2, values.shape[0] // 2]), 0)",
        ),
        WRONG,
        "two_stage",
        (("blocks", (0,)), ("hidden", 512), ("dtype", torch.float32)),
    ),
]
