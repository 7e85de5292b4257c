# SPDX-License-Identifier: Apache-2.0
"""The fused kernels with one protection switched off: what the simulator must catch."""

from __future__ import annotations

from functools import partial
from typing import Any

from kernel_mutants import AnyChange, Argument, Call, Change, Inserted, Moved, Mutant, dropped, missing

from .cases import Norms


def _mutant(
    algorithm: str, name: str, changes: AnyChange | tuple[AnyChange, ...], expect: str = "", *,
    world: dict[str, Any] | None = None, **case: Any,
) -> Mutant:  # fmt: skip
    changes = changes if isinstance(changes, tuple) else (changes,)
    shown = Norms(algorithm, **{"calls": "oooo", "rows": (3,), "blocks": (4,), "hidden": 40, **case})
    where = {"n_pes": 3, "heap_bytes": 1 << 20, **(world or {})}
    return Mutant(f"fused {algorithm}: {name}", changes, expect or WRONG, shown, where, seeds=60)


WRONG = r"AssertionError: rank \d+, call \d+ \([oi8]\), [\w ,]+: \d+ wrong elements"
UNHEARD = missing("lamport")
LOST = f"{WRONG}|{UNHEARD}"
ONE, TWO = (partial(_mutant, name) for name in ("one_shot", "two_shot"))
BY_ONE, BY_TWO, NEW, FLAG = (
    f"fused.kernels.{name}" for name in ("norm_rows_one_shot", "norm_rows_two_shot", "_new", "_flag")
)
WHOLE = {"blocks": (0,)}
"""One program for each row."""

WAITS_FIRST = {"world": {"resident": 1}}
NO_WAIT = (
    "(tuple(mine if r == g.rank else lamport.load(lamport.segment({0}, {1}, {4}, r), {2}, {1}.stride) "
    "for r in range(g.world)), {5})"
)
STORED_EARLY = """
if sends:
    tdl.store_words(new + at + 16 * tl.cast(word, tl.int64), made[0], made[1], made[2], made[3], mask)
"""

MUTANTS = (
    ONE("nothing is cleared", dropped(BY_ONE, "lamport.clear"), LOST, calls="ooooo", **WHOLE),
    TWO("nothing is cleared", dropped(BY_TWO, "lamport.clear"), LOST, calls="ooooo", **WHOLE),
    ONE(
        "two slots", Change("lamport.slot", "call % 3", "call % 2"), LOST,
        calls="oooooooo", rows=(1,), world={"stragglers": True}, **WHOLE,
    ),
    TWO(
        "only the first part is cleared",
        Argument(BY_TWO, "lamport.clear", "nbytes", "16 * width * tl.cast(each, tl.int64)"), calls="ooooo", **WHOLE,
    ),
    TWO(
        "the measures are not cleared",
        Argument(BY_TWO, "lamport.clear", "nbytes", "16 * tl.cast(measures, tl.int64)"), calls="ooooo",
    ),
    *(each("words are not waited for", Call(NEW, "words.receive", NO_WAIT)) for each in (ONE, TWO)),
    *(
        each(
            "measures of the last call in the slot will do",
            Change(FLAG, "call & 0x7FFFFFFF", "call * 0 + 1"), calls="oooooooo",
        )
        for each in (ONE, TWO)
    ),
    ONE(
        "the first programs store a residual that others still read",
        Inserted(BY_ONE, "_new", STORED_EARLY, behind=True), calls="iiii", **WAITS_FIRST,
    ),
    ONE(
        "programs that store come before those that publish",
        (
            Change(BY_ONE, "stores = program % (2 * PIECES) >= PIECES", "stores = program % (2 * PIECES) < PIECES"),
            Change(BY_ONE, "sends = program % (2 * PIECES) < PIECES", "sends = program % (2 * PIECES) >= PIECES"),
        ),
        UNHEARD, **WAITS_FIRST,
    ),
    ONE(
        "words are received before they are sent", Moved(BY_ONE, "words.send_to_all", behind="_new"), UNHEARD,
        **WHOLE, **WAITS_FIRST,
    ),
    TWO(
        "programs that store come before those that reduce",
        Change(BY_TWO, "tl.program_id(0)", "tl.num_programs(0) - 1 - tl.program_id(0)"), UNHEARD, **WAITS_FIRST,
    ),
)  # fmt: skip
