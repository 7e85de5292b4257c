# SPDX-License-Identifier: Apache-2.0
"""What the suite has to know of the all-to-all: where it runs, further grids, its mutants."""

from __future__ import annotations

from functools import partial

from kernel_mutants import Argument, Change, missing, no_wait

from tdcoll.collectives.all_to_all.spec import SPEC

from .algorithm_cases import Dense, Grid, job, mutant, mutants_of_copies
from .all_gather import WAITS_FIRST
from .calls import Calls
from .kinds import OTHER, OUT_OF_PLACE
from .reduce_scatter import PUT_LATE

PUTS = partial(mutant, SPEC, algorithm="1d")
RECEIVE = "exchange.kernels_direct.receive_chunk"
UNSIGNALLED = missing("signals")

MUTANTS = (  # inside a node the kernels are the all-gather's
    PUTS("one slot", Change("group.segment", "slot(epoch)", "0")),
    PUTS("the receiver does not wait", no_wait(RECEIVE)),
    PUTS(
        "the first chunk's signal stands for all",
        Argument(RECEIVE, "row", "chunk_index", "0"),
    ),
    PUTS("signal before data", PUT_LATE, nodes=(2, 2)),
    PUTS(
        "receivers before senders",
        Change("puts.task", "inside % per_chunk", "per_chunk - 1 - inside % per_chunk"),
        UNSIGNALLED,
        **WAITS_FIRST,
    ),
)

AMONG_OTHERS = Calls(
    SPEC,
    ("direct", "ll", "1d", "ll"),
    (OUT_OF_PLACE, OTHER, OUT_OF_PLACE, OUT_OF_PLACE, OTHER, OUT_OF_PLACE, OUT_OF_PLACE),
    counts=(50, 50, 0),
)

DENSE = Dense(
    SPEC,
    nodes={
        "ll": ((3,), (4,)),
        "direct": ((3,), (4,)),
        "loop": ((3,), (2,)),
        "ce": ((3,), (4,)),
        "1d": ((2, 1), (2, 2), (1, 2, 1), (4,)),
    },
    counts=50,
    grids=(Grid(AMONG_OTHERS, job((3,), seeds=2, stragglers=True)),),
    mutants=(*MUTANTS, *mutants_of_copies(SPEC)),
)
