# SPDX-License-Identifier: Apache-2.0
"""What the suite has to know of the all-gather: where it runs, further grids, its mutants."""

from __future__ import annotations

from functools import partial

from kernel_mutants import Argument, Call, Change, Moved, dropped, missing, no_wait

from tdcoll.collectives.all_gather.spec import SPEC

from .algorithm_cases import WRONG, Dense, Grid, job, mutant
from .calls import Calls
from .kinds import CALLER_BUFFER, OUT_OF_PLACE, Kinds

ONE_D = partial(mutant, SPEC, algorithm="1d")
ONE_D_NODES = partial(ONE_D, nodes=(2, 2))
TWO_D = partial(ONE_D_NODES, algorithm="2d")
LL = partial(mutant, SPEC, algorithm="ll")
DIRECT = partial(mutant, SPEC, algorithm="direct")
LOOP = partial(mutant, SPEC, algorithm="loop")
RING = partial(mutant, SPEC, algorithm="ring")

WAITS_FIRST = {"world": {"resident": 1}}
"""With one resident block, programs that wait must come after those that they wait for."""

INTO_BUFFERS: dict[str, Kinds] = {"kinds": 4 * (CALLER_BUFFER,)}

PUTS = "all_gather.kernels_puts.all_gather_1d"
RAILS = "all_gather.kernels_puts.all_gather_2d"
RECEIVE = "all_gather.kernels_puts._receive"
TASK = "all_gather.kernels_puts._task"
AROUND = "kernels_ring.all_gather_ring"
LOOPS = "exchange.kernels_loop.exchange_loop"
STORES = "exchange.kernels_direct.exchange_direct"
RECEIVED = "exchange.kernels_direct.receive_chunk"

SIGNAL_FIRST = "tdl.signal_block({3}, {4}, {5}, {6})\ntdl.fence()\n"
LOADED = """
part = {0}.to(tl.pointer_type(tl.int32))
first = tl.load(part, mask={2}, other=0)
second = tl.load(part + 1, mask={2}, other=0)
third = tl.load(part + 2, mask={2}, other=0)
"""
UNSEEN = Call("ll.receive", "tdl.wait_flagged", LOADED + "return first, second, third, {2}")
"""The flags are not looked at."""

ONE_SLOT = Change("group.slot", "epoch % 2", "epoch * 0")
NO_BYTES = Change("ll.carry", "tl.maximum((nbytes + 11) // 12, 1)", "(nbytes + 11) // 12")
READ_LATE = Moved("group.begin_epoch", "tdl.ld", behind="tl.atomic_add")
SHARES = (
    Change("group.begin_epoch", "share = _EPOCH // programs", "share = _EPOCH * (program == 0)"),
    Change("group.begin_epoch", "share = _EPOCH - share * (programs - 1)", "pass"),
)
RELEASED_FIRST = Moved("stores.push", "tdl.copy_block", behind="release")
UNSIGNALLED = missing("signals")
UNRELEASED = missing("signals")
FLAGLESS = missing("flagged")

MUTANTS = (
    # ------------------------------------------------------------------ slots and signals
    ONE_D("one slot", ONE_SLOT),
    ONE_D("one row of signals", Change("group.row", "slot(epoch)", "0")),
    ONE_D(
        "no fence between data and signal",  # which signal_block has
        Call(
            "puts.push",
            "tdl.putmem_signal_block",
            "tdl.putmem_block({0}, {1}, {2}, {6})\ntdl.signal_op({3}, {4}, {5}, {6})",
        ),
    ),
    ONE_D("the receiver does not wait", no_wait(RECEIVED)),
    ONE_D(
        "the receiver waits for the first chunk only",
        Argument(RECEIVED, "row", "chunk_index", "0"),
    ),
    ONE_D(
        "receivers before senders",
        Change(TASK, "inside % per_chunk", "per_chunk - 1 - inside % per_chunk"),
        UNSIGNALLED,
        **WAITS_FIRST,
    ),
    # ------------------------------------------------------------------ the epoch
    ONE_D("the epoch is read after it was added to", READ_LATE, f"{WRONG}|{UNSIGNALLED}"),
    ONE_D("the epoch is raised by the first program", SHARES, f"{WRONG}|{UNSIGNALLED}"),
    ONE_D("the epoch is not raised", dropped("group.begin_epoch", "tl.atomic_add")),
    # ------------------------------------------------------------------ between nodes
    ONE_D_NODES(
        "remote: signal before data",
        Call(
            "puts.push_remote",
            "tdl.putmem_signal_nbi_block",
            SIGNAL_FIRST + "tdl.putmem_nbi_block({0}, {1}, {2}, {6})",
        ),
    ),
    TWO_D("2d: the forwarder does not wait", no_wait(RAILS, of="signals + origin")),
    TWO_D("2d: inside the node the signal goes before the data", RELEASED_FIRST),
    # ------------------------------------------------------------------ in place
    *(
        algorithm(
            "in place: a rank is written to before it has entered",
            no_wait("stores.may_write"),
            **INTO_BUFFERS,
        )
        for algorithm in (ONE_D, DIRECT, RING)
    ),
    TWO_D(
        "in place: a rank of this node is written to before it has entered",
        Call(RAILS, "stores.may_write", "1"),
        **INTO_BUFFERS,
    ),
    TWO_D(
        "in place: a rank of another node is written to before it has entered",
        Call("puts.push_remote", "may_write", "1"),
        **INTO_BUFFERS,
    ),
    ONE_D(
        "in place: the receiver waits for chunk 0 only",
        Argument(RECEIVE, "row", "chunk_index", "0"),
        **INTO_BUFFERS,
    ),
    TWO_D(
        "in place: the caller's segment is still being read",
        dropped("puts.push_remote", "tdl.quiet"),
        **INTO_BUFFERS,
    ),
    # ------------------------------------------------------------------ LL
    LL("one slot", ONE_SLOT, FLAGLESS),
    LL("the flags are not looked at", UNSEEN),
    LL(
        "an epoch has the flag of words that were never written",
        Change("ll.flag", "tl.maximum(epoch.to(tl.uint32), 1)", "epoch.to(tl.uint32)"),
        first=(1 << 32) - 1,
    ),
    LL(
        "the first flag stands for all words",
        Call(
            "ll.receive",
            "tdl.wait_flagged",
            "first, second, third, arrived = "
            "tdl.wait_flagged({0}, {1}, {2} & (word == 0), {3}, {4})\n"
            + LOADED
            + "return first, second, third, arrived",
        ),
    ),
    LL(
        "a call of no bytes hears from nobody",
        NO_BYTES,
        FLAGLESS,
        kinds=7 * (OUT_OF_PLACE,),
        counts=(50, 0),
    ),
    LL("the epoch is read after it was added to", READ_LATE, f"{WRONG}|{FLAGLESS}"),
    # ------------------------------------------------------------------ direct stores
    DIRECT("one slot", Change("group.segment", "slot(epoch)", "0")),
    DIRECT("the receiver does not wait", no_wait(STORES)),
    DIRECT(
        "the signal does not order the data",
        Call("stores.release", "tdl.st_release", "tdl.st({0}, {1}, {2})"),
    ),
    DIRECT(
        "the signal orders the data for this GPU only",
        Argument("stores.release", "tdl.st_release", "'sys'", "'gpu'"),
    ),
    # ------------------------------------------------------------------ loops
    LOOP("one slot", Change("group.segment", "slot(epoch)", "0")),
    LOOP("the receiver does not wait", no_wait(LOOPS)),
    LOOP(
        "the signal does not order the data",
        Call("stores.release_to_all", "tdl.st_release", "tdl.st({0}, {1}, {2})"),
    ),
    LOOP(
        "the second chunk has the signal of the first",
        Argument(LOOPS, "row", "sent", "0"),
        UNRELEASED,
    ),
    LOOP(
        "in place: a rank is written to before it has entered",
        no_wait("stores.may_write"),
        **INTO_BUFFERS,
    ),
    LOOP("in place: nobody waits for what arrives", no_wait(LOOPS), **INTO_BUFFERS),
    LOOP(
        "in place: the last block says that the rank has entered",
        Change(LOOPS, "tl.program_id(0) == 0", "tl.program_id(0) == blocks - 1"),
        missing("ready"),
        **INTO_BUFFERS,
        **WAITS_FIRST,
    ),
    # ------------------------------------------------------------------ the ring
    RING("one slot", Change("group.segment", "slot(epoch)", "0")),
    RING("passed on before it is there", no_wait(AROUND)),
    RING(
        "the first chunk's signal stands for all",
        Argument(AROUND, "row", "chunk_index", "0"),
    ),
    RING("signal before data", RELEASED_FIRST),
    RING(
        "those that wait come first",
        Change(
            AROUND,
            "step = tl.program_id(0) % g.world",
            "step = g.world - 1 - tl.program_id(0) % g.world",
        ),
        UNRELEASED,
        kinds=(OUT_OF_PLACE, CALLER_BUFFER, OUT_OF_PLACE, OUT_OF_PLACE),
        **WAITS_FIRST,
    ),
    RING(
        "in place: nobody waits for the last hop",
        Argument(AROUND, "tdl.wait_signal", "epoch", "epoch * (step < g.world - 1)"),
        **INTO_BUFFERS,
    ),
)

# On one context: who hears from whom differs from call to call, in place and not; LL waits for
# nobody to enter.
RING_AMONG_OTHERS = Calls(
    SPEC,
    ("ring", "direct", "1d", "ring", "ring"),
    (
        OUT_OF_PLACE, CALLER_BUFFER, OUT_OF_PLACE, CALLER_BUFFER, CALLER_BUFFER, CALLER_BUFFER,
        CALLER_BUFFER, OUT_OF_PLACE, OUT_OF_PLACE, OUT_OF_PLACE, CALLER_BUFFER,
    ),
    counts=(50, 50, 0),
)  # fmt: skip
LL_AMONG_OTHERS = Calls(
    SPEC,
    ("ll", "direct", "1d", "ll", "ring"),
    (
        CALLER_BUFFER, CALLER_BUFFER, OUT_OF_PLACE, CALLER_BUFFER, CALLER_BUFFER, CALLER_BUFFER,
        CALLER_BUFFER, OUT_OF_PLACE, OUT_OF_PLACE, CALLER_BUFFER,
    ),
    counts=(50, 50, 0),
)  # fmt: skip
RAILS_AND_PUTS = Calls(
    SPEC,
    ("2d", "1d"),
    (
        CALLER_BUFFER, CALLER_BUFFER, OUT_OF_PLACE, CALLER_BUFFER, CALLER_BUFFER, CALLER_BUFFER,
        OUT_OF_PLACE, CALLER_BUFFER, OUT_OF_PLACE,
    ),
    counts=(50, 50, 0),
)  # fmt: skip

DENSE = Dense(
    SPEC,
    nodes={
        "ll": ((3,), (4,)),
        "direct": ((3,),),
        "loop": ((3,), (2,)),
        "ce": ((3,), (2,)),
        "ring": ((3,), (4,)),
        "1d": ((2, 1), (3,), (2, 2)),
        "2d": ((2, 2), (2, 2, 2), (3, 3)),
    },
    counts=50,
    relays={"ring": 1, "2d": 2},
    grids=(
        Grid(RING_AMONG_OTHERS, job((3,), seeds=2, stragglers=True)),
        Grid(LL_AMONG_OTHERS, job((3,), seeds=2, stragglers=True)),
        Grid(RAILS_AND_PUTS, job((2, 2), seeds=2, stragglers=True)),
    ),
    mutants=MUTANTS,
)
