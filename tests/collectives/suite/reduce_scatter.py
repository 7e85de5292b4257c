# SPDX-License-Identifier: Apache-2.0
"""What the suite has to know of reduce-scatter: where it runs, further grids, its mutants."""

from __future__ import annotations

from functools import partial

from kernel_mutants import Argument, Call, Change, Moved, dropped, missing, no_wait

from tdcoll.collectives.reduce_scatter.spec import SPEC

from .all_gather import FLAGLESS, ONE_SLOT, RELEASED_FIRST, SIGNAL_FIRST, UNSIGNALLED, WAITS_FIRST
from .calls import Calls
from .ways import FLAGS, LOOPED, WRONG, Dense, job, mutant, mutants_of_loops

M = partial(mutant, SPEC)
DIRECT, LAMPORT = partial(M, algorithm="direct"), partial(M, algorithm="ll")
FLAGGED, LOOP = partial(LAMPORT, **FLAGS), partial(LAMPORT, nodes=(2,), **LOOPED)
PUTS = partial(M, algorithm="1d", nodes=(2, 2))

STORES, WORDS, SENDS = (
    f"reduce_scatter.kernels_{name}"
    for name in ("direct.reduce_scatter_direct", "words.reduce_scatter_words", "puts.reduce_scatter_puts")
)
PUT = "puts.put_from_outbox"
BACKWARDS = "(tl.num_programs(0) - 1 - tl.program_id(0))"
PUT_LATE = Call(PUT, "tdl.putmem_signal_nbi_block", SIGNAL_FIRST + "tdl.putmem_nbi_block({0}, {1}, {2}, {6})")
OWN_SHARE = "mine = shares[g.world - 1]"

MUTANTS = (
    # ------------------------------------------------------------------ slots and signals
    *(each("one slot", ONE_SLOT, expect) for each, expect in ((DIRECT, WRONG), (FLAGGED, FLAGLESS), (PUTS, WRONG))),
    # By stores one row would do: a release comes after all that earlier launches have stored.
    PUTS("one row of signals", Change("group.row", "slot(epoch)", "0")),
    DIRECT("the reducer does not wait", no_wait(STORES, "tdl.wait_signals")),
    PUTS("the reducer does not wait", no_wait(SENDS, "tdl.wait_signals")),
    DIRECT(
        "the reducer waits for the first chunk only",
        Argument(STORES, "tdl.wait_signals", "signals", "row(g, epoch, 0)"),
    ),
    DIRECT("the signal goes before the data", RELEASED_FIRST),
    DIRECT(
        "reducers before senders",
        Change(
            STORES, "tl.program_id(0) % (senders + reducers)",
            "(senders + reducers - 1) - tl.program_id(0) % (senders + reducers)",
        ),
        UNSIGNALLED, **WAITS_FIRST,
    ),
    # ------------------------------------------------------------------ words
    *(
        each(
            f"{name}: words are received before they are sent",
            Moved(WORDS, "words.send_shares", "_sum", OWN_SHARE),
            missing(memory), **WAITS_FIRST,
        )
        for each, name, memory in (
            (FLAGGED, "flags", "flagged"), (LAMPORT, "lamport", "lamport"), (LOOP, "looped", "lamport"),
        )
    ),
    LAMPORT("nothing is cleared", dropped(WORDS, "lamport.clear"), calls="ooooo"),
    LOOP(
        "a program takes its blocks in another order on odd ranks",
        Change(
            WORDS, "word = block * BLOCK + tl.arange(0, BLOCK)",
            "word = (block + g.rank % 2 * (blocks + tl.program_id(0) + tl.num_programs(0) - 1 - 2 * block)) * BLOCK "
            "+ tl.arange(0, BLOCK)",
        ),
        f"{WRONG}|{missing('lamport')}", **WAITS_FIRST,
    ),
    # ------------------------------------------------------------------ puts
    PUTS("signal before data", PUT_LATE),
    PUTS(
        "reducers before those that put", Change("puts.task", "tl.program_id(0)", BACKWARDS), UNSIGNALLED,
        **WAITS_FIRST,
    ),
)  # fmt: skip

DENSE = Dense(
    SPEC,
    nodes={
        "ll": ((3,), (4,)),
        "direct": ((3,), (4,)),
        "loop": ((3,), (2,)),
        "ce": ((3,), (4,)),
        "1d": ((2, 1), (2, 2), (1, 2, 1), (4,)),
    },
    counts=34,
    grids=(
        (Calls(SPEC, "direct ll 1d", "oixoxoioo", (34, 12, 0)), job((3,), seeds=2)),
        # Chunks of several tiles, which several thread blocks reduce.
        (Calls(SPEC, "direct 1d", "oi", (25_000,), pieces=2), job((3,), seeds=1, heap_bytes=8 << 20)),
        # Nobody gets ahead by calls of no bytes.
        (Calls(SPEC, "ll", "ooooo", (34, 0, 0)), job((3,), seeds=1, stragglers=0)),
        (Calls(SPEC, "ll", "ooooo", (34, 0), **FLAGS), job((3,), seeds=1, stragglers=0)),
    ),
    mutants=(*MUTANTS, *mutants_of_loops(SPEC)),
)
