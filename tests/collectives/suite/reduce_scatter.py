# SPDX-License-Identifier: Apache-2.0
"""What the suite has to know of reduce-scatter: where it runs, further grids, its mutants."""

from __future__ import annotations

from functools import partial

from kernel_mutants import Argument, Call, Change, Moved, dropped, missing, no_wait

from tdcoll.collectives.reduce_scatter.spec import SPEC

from .algorithm_cases import (
    FLAGGED,
    LOOPED,
    WRONG,
    Dense,
    Grid,
    job,
    mutant,
    mutants_of_epilogues,
    mutants_of_loops,
)
from .all_gather import (
    FLAGLESS,
    ONE_SLOT,
    RELEASED_FIRST,
    SIGNAL_FIRST,
    UNSIGNALLED,
    WAITS_FIRST,
)
from .calls import Calls
from .kinds import IN_PLACE, OTHER, OUT_OF_PLACE

DIRECT = partial(mutant, SPEC, algorithm="direct")
LAMPORT = partial(mutant, SPEC, algorithm="ll")
FLAGS = partial(LAMPORT, **FLAGGED)
FEW_BLOCKS = partial(LAMPORT, nodes=(2,), **LOOPED)
PUTS = partial(mutant, SPEC, algorithm="1d", nodes=(2, 2))

STORES = "reduce_scatter.kernels_direct.reduce_scatter_direct"
WORDS = "reduce_scatter.kernels_words.reduce_scatter_words"
SENDS = "reduce_scatter.kernels_puts.reduce_scatter_puts"
PUT = "puts.put_from_outbox"
BACKWARDS = "(tl.num_programs(0) - 1 - tl.program_id(0))"
PUT_LATE = Call(
    PUT,
    "tdl.putmem_signal_nbi_block",
    SIGNAL_FIRST + "tdl.putmem_nbi_block({0}, {1}, {2}, {6})",
)
RECEIVED_FIRST = Moved(WORDS, "words.send_shares", "_sum", "mine = shares[g.world - 1]")

MUTANTS = (
    # ------------------------------------------------------------------ slots and signals
    DIRECT("one slot", ONE_SLOT, WRONG),
    FLAGS("one slot", ONE_SLOT, FLAGLESS),
    PUTS("one slot", ONE_SLOT, WRONG),
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
            STORES,
            "tl.program_id(0) % (senders + reducers)",
            "(senders + reducers - 1) - tl.program_id(0) % (senders + reducers)",
        ),
        UNSIGNALLED,
        **WAITS_FIRST,
    ),
    # ------------------------------------------------------------------ words
    FLAGS(
        "flags: words are received before they are sent",
        RECEIVED_FIRST,
        missing("flagged"),
        **WAITS_FIRST,
    ),
    LAMPORT(
        "lamport: words are received before they are sent",
        RECEIVED_FIRST,
        missing("lamport"),
        **WAITS_FIRST,
    ),
    FEW_BLOCKS(
        "looped: words are received before they are sent",
        RECEIVED_FIRST,
        missing("lamport"),
        **WAITS_FIRST,
    ),
    LAMPORT(
        "nothing is cleared",
        dropped(WORDS, "lamport.clear"),
        kinds=5 * (OUT_OF_PLACE,),
    ),
    FEW_BLOCKS(
        "a program takes its blocks in another order on odd ranks",
        Change(
            WORDS,
            "word = block * BLOCK + tl.arange(0, BLOCK)",
            "word = (block + g.rank % 2 * "
            "(blocks + tl.program_id(0) + tl.num_programs(0) - 1 - 2 * block)) * BLOCK "
            "+ tl.arange(0, BLOCK)",
        ),
        f"{WRONG}|{missing('lamport')}",
        **WAITS_FIRST,
    ),
    # ------------------------------------------------------------------ puts
    PUTS("signal before data", PUT_LATE),
    PUTS(
        "reducers before those that put",
        Change("puts.task", "tl.program_id(0)", BACKWARDS),
        UNSIGNALLED,
        **WAITS_FIRST,
    ),
)

AMONG_OTHERS = Calls(
    SPEC,
    ("direct", "ll", "1d"),
    (
        OUT_OF_PLACE, IN_PLACE, OTHER, OUT_OF_PLACE, OTHER, OUT_OF_PLACE, IN_PLACE, OUT_OF_PLACE,
        OUT_OF_PLACE,
    ),
    counts=(34, 12, 0),
)  # fmt: skip
# Chunks of several tiles, which several thread blocks reduce.
SEVERAL_TILES = Calls(SPEC, ("direct", "1d"), (OUT_OF_PLACE, IN_PLACE), counts=(25_000,), pieces=2)
# Nobody gets ahead by calls of no bytes.
NO_BYTES = Calls(SPEC, ("ll",), 5 * (OUT_OF_PLACE,), counts=(34, 0, 0))
NO_BYTES_WITH_FLAGS = Calls(SPEC, ("ll",), 5 * (OUT_OF_PLACE,), counts=(34, 0), **FLAGGED)

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
        Grid(AMONG_OTHERS, job((3,), seeds=2)),
        Grid(SEVERAL_TILES, job((3,), seeds=1, heap_bytes=8 << 20)),
        Grid(NO_BYTES, job((3,), seeds=1, stragglers=0)),
        Grid(NO_BYTES_WITH_FLAGS, job((3,), seeds=1, stragglers=0)),
    ),
    mutants=(*MUTANTS, *mutants_of_loops(SPEC), *mutants_of_epilogues(SPEC)),
)
