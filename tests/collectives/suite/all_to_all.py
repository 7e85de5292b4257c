# SPDX-License-Identifier: Apache-2.0
"""What the suite has to know of the all-to-all: where it runs, further grids, its mutants."""

from __future__ import annotations

from functools import partial

from kernel_mutants import Argument, Call, Change, at_once, dropped, missing

from tdcoll.collectives.all_to_all.spec import SPEC

from .calls import Calls
from .ways import Dense, job, mutant, mutants_of_copies

LL, DIRECT, PUTS = (partial(mutant, SPEC, algorithm=name) for name in ("ll", "direct", "1d"))
NODES = partial(PUTS, nodes=(2, 2))
WORDS, STORES, ANY = "kernels_ll.exchange_ll", "exchange.kernels_direct.exchange_direct", "all_to_all_puts"
ANY, RECEIVE = f"all_to_all.kernels_puts.{ANY}", "exchange.kernels_direct.receive_chunk"
STAGED, PUT = "puts.put_staged", "tdl.putmem_signal_nbi_block"
WAITS_FIRST = {"world": {"resident": 1}}
UNSIGNALLED = missing("signals")

MUTANTS = (
    # ------------------------------------------------------------------ whose segment is whose
    *(
        each("every rank is sent the first segment", Argument(where, "tl.cast", "to", "0 * to"))
        for each, where in ((LL, WORDS), (DIRECT, STORES), (PUTS, ANY), (NODES, ANY))
    ),
    # ------------------------------------------------------------------ inside a node
    LL("one slot", Change("group.slot", "epoch % 2", "epoch * 0"), missing("flagged")),
    DIRECT("one slot", Change("group.segment", "slot(epoch)", "0")),
    DIRECT("the receiver does not wait", at_once(STORES)),
    DIRECT("forgotten signal", dropped("stores.push", "release"), UNSIGNALLED),
    # ------------------------------------------------------------------ between nodes
    PUTS("one slot", Change("group.segment", "slot(epoch)", "0")),
    PUTS("the receiver does not wait", at_once(RECEIVE)),
    PUTS("the first chunk's signal stands for all", Argument(RECEIVE, "row", "channel", "0")),
    PUTS("the second chunk has the signal of the first", Argument(ANY, "row", "channel", "0"), UNSIGNALLED),
    NODES("nothing in the outbox", dropped(STAGED, "tdl.copy_block")),
    NODES("from the inbox", Change(STAGED, "segment(inbox, g, epoch, to) + outbox", "segment(inbox, g, epoch, to)")),
    NODES(
        "signal before data",
        Call(
            STAGED, PUT, "tdl.signal_block({3}, {4}, {5}, {6})\ntdl.fence()\ntdl.putmem_nbi_block({0}, {1}, {2}, {6})"
        ),
    ),
    NODES("no signal", Call(STAGED, PUT, "tdl.putmem_nbi_block({0}, {1}, {2}, {6})"), UNSIGNALLED),
    PUTS(
        "receivers before senders", Change(ANY, "inside % per_chunk", "per_chunk - 1 - inside % per_chunk"),
        UNSIGNALLED, **WAITS_FIRST,
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
    counts=50,
    grids=((Calls(SPEC, "direct ll 1d ll", "oxooxoo", (50, 50, 0)), job((3,), seeds=2, stragglers=True)),),
    mutants=(*MUTANTS, *mutants_of_copies(SPEC)),
)
