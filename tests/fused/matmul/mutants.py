# SPDX-License-Identifier: Apache-2.0
"""The matmul kernels with one protection switched off: what the simulator must catch."""

from __future__ import annotations

from typing import Any

import torch
from kernel_mutants import (
    AnyChange,
    Argument,
    Call,
    Change,
    Moved,
    Mutant,
    dropped,
    missing,
    no_wait,
)

from .cases import DEEP, Gather, Matmuls, Reduce, Scatter

WRONG = r"AssertionError: rank \d+, call \d+[\w, ]*: \d+ wrong elements"
UNSIGNALLED = missing("signals")
NOT_ENTERED = missing("ready")
UNHEARD = missing("lamport")
ALONE = {"resident": 1}
EARLY = {"on_timeout": "early"}


def _mutant(
    name: str,
    case: Matmuls,
    *changes: AnyChange,
    expect: str = WRONG,
    n_pes: int = 3,
    **world: Any,
) -> Mutant:
    kind = type(case).__name__.lower()
    where = {"n_pes": n_pes, "heap_bytes": 1 << 21, **world}
    return Mutant(f"matmul {kind}: {name}", changes, expect, case, where, seeds=60)


GATHER = "kernels_gather.all_gather_matmul"
PUSH = "kernels_gather._push"
ROWS = "kernels_gather._wait_for_rows"
KEEP = "kernels_gather._keep"
RELAXED = "tdl.st((tl.cast({0}, tl.int64) + {1}).to(tl.pointer_type(tl.int64)), {2}, 'sys')"
ALIVE = "if alive == 0:\n    return"
ONE_SLOT = Change("primitives.group.slot", "epoch % 2", "epoch * 0")
REVERSED = Change(
    GATHER, "program = tl.program_id(0)", "program = tl.num_programs(0) - 1 - tl.program_id(0)"
)
FEW = {"rows": (4,), "blocks": (2,), "calls": "mmmm"}

GATHERS = (
    _mutant("a tile does not wait for its rows", Gather(**FEW), no_wait(ROWS, "tdl.wait_signals")),
    _mutant(
        "a tile waits for the first of its pieces",
        Gather(**FEW, piece=48),
        Argument(ROWS, "tdl.wait_signals", "count", "1"),
    ),
    _mutant(
        "a tile waits for the pieces in which its rows begin",
        Gather(**FEW, piece=80),
        Change(ROWS, "end_row * row_bytes - 1", "(end_row - 1) * row_bytes"),
    ),
    _mutant(
        "a tile waits for the pieces of another rank",
        Gather(**FEW),
        Change(
            ROWS, "row(g, epoch, begin) + origin", "row(g, epoch, begin) + (origin + 1) % g.world"
        ),
        expect=UNSIGNALLED,
    ),
    _mutant(
        "tiles that span shards wait for one of them",
        Gather(**{**FEW, "rows": (2,)}, whole=True),
        Change(ROWS, "(end - 1) // shape.rows + 1", "first // shape.rows + 1"),
    ),
    _mutant(
        "pieces are announced before they are sent",
        Gather(**FEW),
        Moved(PUSH, "_copy", behind="stores.release"),
    ),
    _mutant(
        "pieces are announced without a release",
        Gather(**FEW),
        Call(PUSH, "stores.release", RELAXED),
    ),
    _mutant(
        "pieces are not announced",
        Gather(**FEW),
        dropped(PUSH, "stores.release"),
        expect=UNSIGNALLED,
    ),
    _mutant("keepers do not wait", Gather(**FEW, keepers=2), no_wait(KEEP)),
    _mutant("one slot", Gather(**{**FEW, "calls": "mmmmmm"}), ONE_SLOT, stragglers=True),
    _mutant("pushers come last", Gather(**FEW), REVERSED, expect=UNSIGNALLED, **ALONE),
    _mutant(
        "scales come after their signal",
        Gather(**FEW, dtype=torch.float8_e4m3fn, scales="row", depth=144, cut=DEEP, piece=240),
        Moved(PUSH, "_copy_scales", behind="stores.release"),
    ),
    _mutant(
        "the scale of a piece's last row is left out",
        Gather(**FEW, dtype=torch.float8_e4m3fn, scales="row", depth=144, cut=DEEP, piece=240),
        Change(
            PUSH, "end = tl.cdiv(offset + size, row_bytes)", "end = (offset + size) // row_bytes"
        ),
    ),
    _mutant(
        "a rank is written to before it has entered",
        Gather(**FEW, symmetric=True),
        no_wait("primitives.stores.may_write"),
        stragglers=True,
    ),
    _mutant(
        "a rank does not say that it has entered",
        Gather(**FEW, symmetric=True),
        dropped(GATHER, "stores.release_to_all"),
        expect=NOT_ENTERED,
    ),
    _mutant(
        "the last thread block says that a rank has entered",
        Gather(**FEW, symmetric=True),
        Change(GATHER, "program == 0", "program == tl.num_programs(0) - 1"),
        expect=NOT_ENTERED,
        **ALONE,
    ),
    _mutant(
        "copies begin before a peer has entered",
        Gather(**FEW, copied=True),
        no_wait("primitives.copies.enter", "tdl.wait_signals"),
        stragglers=True,
    ),
    _mutant(
        "a rank that has given up goes on sending",
        Gather(**FEW, patient=False),
        Change(GATHER, ALIVE, "pass"),
        n_pes=2,
        **EARLY,
    ),
    _mutant(
        "nobody looks who has given up",
        Gather(**FEW, copied=True, patient=False, looks=True),
        dropped(GATHER, "stores.no_peer_expired"),
        n_pes=2,
        **EARLY,
    ),
)

SCATTER = "kernels_scatter.matmul_reduce_scatter"
WORK = "kernels_scatter._work"
RELEASE = "kernels_scatter._release"
SUM = "kernels_scatter._sum"
DEFERRED = "_release(deferred, epoch)\ndeferred = tl.cast(0, tl.int64)"
HELD = Change(
    SCATTER, DEFERRED, f"if distance < g.world:\n    {DEFERRED}".replace("\nd", "\n    d")
)
FIRST = (
    Change(SUM, "other == g.rank", "other == 0"),
    Change(
        SUM,
        "return tl.where(g.rank == g.world - 1, accumulate(sums, own, False, SUM), sums)",
        "return sums",
    ),
)
TILES = {"rows": (8,), "blocks": (2,), "calls": "mmmm"}

SCATTERS = (
    _mutant("own tiles do not wait", Scatter(**TILES), no_wait(SCATTER, "tdl.wait_signals")),
    _mutant(
        "own tiles wait for rank 0",
        Scatter(**TILES),
        Argument(SCATTER, "tdl.wait_signals", "g.world", "1"),
    ),
    _mutant(
        "own tiles wait for the first tile",
        Scatter(**TILES),
        Argument(SCATTER, "tdl.wait_signals", "signals", "row(g, epoch, 0)"),
    ),
    _mutant(
        "a signal does not wait for the descriptor's store",
        Scatter(**TILES),
        dropped(RELEASE, "tdl.wait_descriptor_stores"),
    ),
    _mutant(
        "a signal waits for the descriptor's store afterwards",
        Scatter(**TILES),
        Moved(RELEASE, "tdl.wait_descriptor_stores", behind="stores.release"),
    ),
    _mutant("a signal is no release", Scatter(**TILES), Call(RELEASE, "stores.release", RELAXED)),
    _mutant(
        "signals are not released",
        Scatter(**TILES),
        dropped(SCATTER, "_release"),
        expect=UNSIGNALLED,
    ),
    _mutant(
        "only the last signal is released",
        Scatter(**TILES),
        Change(SCATTER, DEFERRED, "pass"),
        expect=UNSIGNALLED,
    ),
    _mutant(
        "own tiles wait before they release", Scatter(**TILES, lags=(0,)), HELD, expect=UNSIGNALLED
    ),
    _mutant("the own part comes first", Scatter(**TILES), *FIRST),
    _mutant(
        "own tiles of the rest are in the first group",
        Scatter(**{**TILES, "blocks": (9,), "rows": (4,)}),
        Change(WORK, "group = groups - 1", "group = tl.cast(0, tl.int32)"),
        expect=UNSIGNALLED,
        **ALONE,
    ),
    _mutant("one slot", Scatter(**{**TILES, "calls": "mmmmmm"}), ONE_SLOT, stragglers=True),
    _mutant(
        "a rank that has given up goes on sending",
        Scatter(**TILES, patient=False),
        Change(SCATTER, ALIVE, "pass"),
        n_pes=2,
        **EARLY,
    ),
)

REDUCE = "kernels_all_reduce.matmul_all_reduce"
WORDS = {"rows": (4,), "blocks": (2,), "calls": "mmmmm"}
NO_WAIT = (
    "(tuple({3} if r == g.rank else lamport.load(lamport.segment({0}, {1}, {4}, r), {2}, {1}.stride) "
    "for r in range(g.world)), {5})"
)

LOST = f"{WRONG}|{UNHEARD}"
TWO = (True,)

REDUCES = (
    *(
        _mutant(
            f"words are not waited for, {what}",
            Reduce(**WORDS, two_shot=shots),
            Call(REDUCE, "words.receive", NO_WAIT),
        )
        for what, shots in (("one-shot", (False,)), ("two-shot", TWO))
    ),
    _mutant(
        "sums of others are not waited for",
        Reduce(**WORDS, two_shot=TWO),
        Call(
            REDUCE,
            "lamport.receive",
            "(*lamport.load(lamport.segment({0}, {1}, {4}, {2}), {3}, {1}.stride), tl.full({3}.shape, 1, tl.int32))",
        ),
    ),
    *(
        _mutant(
            f"nothing is cleared, {what}",
            Reduce(**WORDS, two_shot=shots),
            dropped(REDUCE, "lamport.clear"),
            expect=LOST,
        )
        for what, shots in (("one-shot", (False,)), ("two-shot", TWO))
    ),
    _mutant(
        "only the first half is cleared",
        Reduce(**WORDS, two_shot=TWO),
        Change(REDUCE, "written = 2 * tiles * share", "written = tiles * share"),
        expect=LOST,
    ),
    _mutant(
        "two slots",
        Reduce(**{**WORDS, "calls": "mmmmmmmm"}),
        Change("lamport.slot", "call % 3", "call % 2"),
        expect=LOST,
        stragglers=True,
    ),
    _mutant(
        "sums go to the first half",
        Reduce(**WORDS, two_shot=TWO),
        Change(REDUCE, "tiles * share + spot", "spot"),
        expect=LOST,
    ),
    _mutant(
        "words go to one owner",
        Reduce(**WORDS, two_shot=TWO),
        Change(REDUCE, "g.deltas + word // share", "g.deltas + word * 0"),
        expect=LOST,
    ),
    _mutant(
        "words are not sent", Reduce(**WORDS), dropped(REDUCE, "words.send_to_all"), expect=UNHEARD
    ),
    _mutant(
        "a rank that has given up goes on sending",
        Reduce(**{**WORDS, "calls": "mmmmmmmm"}, patient=False, looks=True, late=(0, 400)),
        Change(REDUCE, ALIVE, "pass"),
        n_pes=2,
        **EARLY,
    ),
)

MUTANTS = (*GATHERS, *SCATTERS, *REDUCES)
