# SPDX-License-Identifier: Apache-2.0
"""The fused kernels with one protection switched off: what the simulator must catch."""

from __future__ import annotations

from functools import partial
from typing import Any

from kernel_mutants import (
    AnyChange,
    Argument,
    Call,
    Change,
    Inserted,
    Moved,
    Mutant,
    dropped,
    missing,
)

from .cases import IN_PLACE, OUT_OF_PLACE, Norms


def _mutant(
    algorithm: str, name: str, changes: AnyChange | tuple[AnyChange, ...], expect: str = "", *,
    world: dict[str, Any] | None = None, **case: Any,
) -> Mutant:  # fmt: skip
    if not isinstance(changes, tuple):
        changes = (changes,)
    usual: dict[str, Any] = {
        "kinds": 4 * (OUT_OF_PLACE,),
        "rows": (3,),
        "blocks": (4,),
        "hidden": 40,
    }
    shown = Norms((algorithm,), **{**usual, **case})
    where = {"n_pes": 3, "heap_bytes": 1 << 20, **(world or {})}
    return Mutant(f"fused {algorithm}: {name}", changes, expect or WRONG, shown, where, seeds=60)


WRONG = r"AssertionError: rank \d+, call \d+ \([\w -]+\), [\w ,]+: \d+ wrong elements"
UNHEARD = missing("lamport")
LOST = f"{WRONG}|{UNHEARD}"
ONE = partial(_mutant, "one_shot")
TWO = partial(_mutant, "two_shot")
BY_ONE = "fused.kernels.norm_rows_one_shot"
BY_TWO = "fused.kernels.norm_rows_two_shot"
NEW = "fused.kernels._new"
FLAG = "fused.kernels._flag"
WHOLE = {"blocks": (0,)}
"""One program for each row."""

WAITS_FIRST = {"world": {"resident": 1}}
NO_WAIT = (
    "(tuple(mine if r == g.rank else lamport.load(lamport.segment({0}, {1}, {4}, r), {2}, {1}.stride) "
    "for r in range(g.world)), {5})"
)
ONE_FLAG = Change(FLAG, "call & 0x7FFFFFFF", "call * 0 + 1")
FIRST_HALF = "program % (2 * PIECES) < PIECES"
SECOND_HALF = "program % (2 * PIECES) >= PIECES"
STORED_EARLY = """
if sends:
    tdl.store_words(new + at + 16 * tl.cast(word, tl.int64), made[0], made[1], made[2], made[3], mask)
"""

FIVE_CALLS: dict[str, Any] = {"kinds": 5 * (OUT_OF_PLACE,)}
EIGHT_CALLS: dict[str, Any] = {"kinds": 8 * (OUT_OF_PLACE,)}

MUTANTS = (
    ONE("nothing is cleared", dropped(BY_ONE, "lamport.clear"), LOST, **FIVE_CALLS, **WHOLE),
    TWO("nothing is cleared", dropped(BY_TWO, "lamport.clear"), LOST, **FIVE_CALLS, **WHOLE),
    ONE(
        "two slots",
        Change("lamport.slot", "call % 3", "call % 2"),
        LOST,
        rows=(1,),
        world={"stragglers": True},
        **EIGHT_CALLS,
        **WHOLE,
    ),
    TWO(
        "only the first part is cleared",
        Argument(BY_TWO, "lamport.clear", "nbytes", "16 * width * tl.cast(each, tl.int64)"),
        **FIVE_CALLS,
        **WHOLE,
    ),
    TWO(
        "the measures are not cleared",
        Argument(BY_TWO, "lamport.clear", "nbytes", "16 * tl.cast(measures, tl.int64)"),
        **FIVE_CALLS,
    ),
    ONE("words are not waited for", Call(NEW, "words.receive", NO_WAIT)),
    TWO("words are not waited for", Call(NEW, "words.receive", NO_WAIT)),
    ONE("measures of the last call in the slot will do", ONE_FLAG, **EIGHT_CALLS),
    TWO("measures of the last call in the slot will do", ONE_FLAG, **EIGHT_CALLS),
    ONE(
        "the first programs store a residual that others still read",
        Inserted(BY_ONE, "_new", STORED_EARLY, behind=True),
        kinds=4 * (IN_PLACE,),
        **WAITS_FIRST,
    ),
    ONE(
        "programs that store come before those that publish",
        (
            Change(BY_ONE, f"stores = {SECOND_HALF}", f"stores = {FIRST_HALF}"),
            Change(BY_ONE, f"sends = {FIRST_HALF}", f"sends = {SECOND_HALF}"),
        ),
        UNHEARD,
        **WAITS_FIRST,
    ),
    ONE(
        "words are received before they are sent",
        Moved(BY_ONE, "words.send_to_all", behind="_new"),
        UNHEARD,
        **WHOLE,
        **WAITS_FIRST,
    ),
    TWO(
        "programs that store come before those that reduce",
        Change(BY_TWO, "tl.program_id(0)", "tl.num_programs(0) - 1 - tl.program_id(0)"),
        UNHEARD,
        **WAITS_FIRST,
    ),
)
