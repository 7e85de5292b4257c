# SPDX-License-Identifier: Apache-2.0
"""What the suite has to know of the broadcast: where it runs, further grids, its mutants."""

from __future__ import annotations

from functools import partial

from kernel_mutants import Argument, Call, Change, dropped, no_wait

from tdcoll.collectives.broadcast.spec import SPEC

from .algorithm_cases import Dense, Grid, job, mutant
from .all_gather import (
    FLAGLESS,
    NO_BYTES,
    ONE_SLOT,
    RELEASED_FIRST,
    SIGNAL_FIRST,
    UNSEEN,
    UNSIGNALLED,
    WAITS_FIRST,
)
from .calls import Calls
from .kinds import IN_PLACE, OTHER, OUT_OF_PLACE

LL = partial(mutant, SPEC, algorithm="ll")
DIRECT = partial(mutant, SPEC, algorithm="direct")
LOOP = partial(mutant, SPEC, algorithm="loop")
PUTS = partial(mutant, SPEC, algorithm="1d", nodes=(2, 2))

WORDS = "broadcast.kernels.broadcast_ll"
LOOPS = "broadcast.kernels.broadcast_loop"
STORE = "broadcast.kernels._store_to"
RECEIVE = "broadcast.kernels._receive"
PUT = "broadcast.kernels.broadcast_puts"
COPY = "exchange.kernels_direct.receive_chunk"

MUTANTS = (
    # ------------------------------------------------------------------ slots
    LL("one slot", ONE_SLOT, FLAGLESS),
    DIRECT("one slot", ONE_SLOT),
    PUTS("one slot", ONE_SLOT),
    # ------------------------------------------------------------------ notices
    LL(
        "nobody waits for the other ranks",
        Change(WORDS, "ll.carry(index, received_bytes)", "index < (received_bytes + 11) // 12"),
        FLAGLESS,
    ),
    LL("no notices", NO_BYTES, FLAGLESS),
    DIRECT("nobody waits for the other ranks", no_wait(RECEIVE, "tdl.wait_signals")),
    DIRECT(
        "the root alone waits for the other ranks",
        Change(RECEIVE, "chunk_index == 0", "(chunk_index == 0) & (g.rank == root)"),
    ),
    DIRECT("no notices", dropped(STORE, "stores.release"), UNSIGNALLED),
    LOOP("nobody waits for the other ranks", no_wait(LOOPS, "tdl.wait_signals")),
    LOOP("no notices", dropped(LOOPS, "stores.release_to_all"), UNSIGNALLED),
    PUTS("nobody waits for the other ranks", no_wait(RECEIVE, "tdl.wait_signals")),
    PUTS("no notices to other nodes", dropped(PUT, "tdl.signal_block"), UNSIGNALLED),
    # ------------------------------------------------------------------ data
    LL("the flags are not looked at", UNSEEN),
    DIRECT("the receiver does not wait", no_wait(COPY)),
    LOOP("the receiver does not wait", no_wait(COPY)),
    PUTS("the receiver does not wait", no_wait(COPY)),
    DIRECT("the first chunk's signal stands for all", Argument(COPY, "row", "chunk_index", "0")),
    DIRECT("the signal goes before the data", RELEASED_FIRST),
    PUTS(
        "signal before data",
        Call(
            "puts.push_remote",
            "tdl.putmem_signal_nbi_block",
            SIGNAL_FIRST + "tdl.putmem_nbi_block({0}, {1}, {2}, {6})",
        ),
    ),
    # ------------------------------------------------------------------ order of thread blocks
    DIRECT(
        "receivers before senders",
        Change(
            "broadcast.kernels.broadcast_direct",
            "tl.program_id(0) % g.world + 1",
            "g.world - tl.program_id(0) % g.world",
        ),
        UNSIGNALLED,
        **WAITS_FIRST,
    ),
    PUTS(
        "receivers before senders",
        Change(
            PUT, "inside % (routes.n_local + 1)", "routes.n_local - inside % (routes.n_local + 1)"
        ),
        UNSIGNALLED,
        **WAITS_FIRST,
    ),
)

AMONG_OTHERS = Calls(
    SPEC,
    ("direct", "ll", "1d", "ll"),
    (OUT_OF_PLACE, OTHER, IN_PLACE, OUT_OF_PLACE, OTHER, OUT_OF_PLACE, OUT_OF_PLACE),
    counts=(50, 50, 0),
)

DENSE = Dense(
    SPEC,
    nodes={
        "ll": ((3,), (4,)),
        "direct": ((3,), (4,)),
        "loop": ((3,), (2,)),
        "1d": ((2, 1), (2, 2), (1, 2, 1), (4,)),
    },
    counts=50,
    grids=(Grid(AMONG_OTHERS, job((3,), seeds=2, stragglers=True)),),
    mutants=MUTANTS,
)
