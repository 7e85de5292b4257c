# SPDX-License-Identifier: Apache-2.0
"""Calls of several launches and copies, which a rank's host interrupts, or whose context it fails,
at any moment.

No rank whose ``check()`` passes may have a wrong result, whatever leaves the other rank behind that
moment.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from exploring import explore, first_failure
from kernel_mutants import (
    AnyChange,
    Argument,
    Call,
    Change,
    Inserted,
    Mutant,
    dropped,
    installed,
    no_wait,
)
from tiers import slow_tier

import tdcoll
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.collective import spec_of
from tdcoll.calls.kernel_launch import KernelLaunch
from tdcoll.calls.plan import Plan
from tdcoll.simulator.streams import SimulatedSideStream
from tdcoll.testing import World

from .moments import Happens, OneAtATime, Overwritten, stalls, where
from .operations import BY_COPIES as SPARSE_BY_COPIES
from .operations import SPARSE, Calls, dense, lists_by_copies
from .suite.algorithm_cases import Nodes
from .suite.kinds import CALLER_BUFFER, IN_PLACE, OUT_OF_PLACE, SYMMETRIC, SYMMETRIC_IN_PLACE, Kind

SPECS = {name: spec_of(name) for name in COLLECTIVES}


def by_copies(name: str, kind: Kind, nodes: Nodes = (2,), algorithm: str | Plan = "ce") -> Calls:
    """Calls by copy engines."""
    return Calls(dense(SPECS[name], kind, copies=True), algorithm, (), nodes)


KINDS = [
    by_copies("all_gather", OUT_OF_PLACE),
    by_copies("reduce_scatter", OUT_OF_PLACE),
    by_copies("all_reduce", OUT_OF_PLACE),
    slow_tier(by_copies("all_to_all", OUT_OF_PLACE), id="all_to_all"),
    slow_tier(by_copies("all_reduce", IN_PLACE), id="all_reduce in place"),
    slow_tier(by_copies("all_reduce", OUT_OF_PLACE, (3,)), id="all_reduce 3"),
    by_copies("all_gather", CALLER_BUFFER),
    by_copies("all_reduce", SYMMETRIC_IN_PLACE),
    slow_tier(by_copies("all_reduce", SYMMETRIC), id="all_reduce symmetric"),
    slow_tier(by_copies("all_gather", CALLER_BUFFER, (3,)), id="all_gather caller buffer 3"),
]
"""Calls by copy engines, whose data lands in the inbox or in the caller's memory."""

LISTS = [
    Calls(SPARSE_BY_COPIES, "gather", ()),
    *(slow_tier(Calls(operation, name, ()), id=f"{operation.name} {name}") for operation, name in (
        (SPARSE_BY_COPIES, "owner"), (SPARSE, "gather"), (SPARSE, "owner"),
    )),
]  # fmt: skip
"""Sparse all-reduces."""


def every_moment(case: Happens, **more: Any) -> None:
    """Let it happen to each rank, at each moment."""
    settings = where(case.calls, **more)
    seeds = case.moments(World(seed=0, **settings))
    assert len(seeds) >= 4 * sum(case.calls.nodes), "few moments: the call isn't what it should be"
    explore(case, **settings, seeds=seeds)


LATE = ("its", "others'", "")


@pytest.mark.parametrize("weak", [False, slow_tier(True)], ids=["strong", "weak"])
@pytest.mark.parametrize(
    ("what", "late"),
    [
        ("fails", "its"),
        ("fails", "others'"),
        slow_tier("fails", ""),
        slow_tier("fails early", "its"),
    ],
)
@pytest.mark.parametrize("calls", KINDS, ids=str)
def test_a_context_that_fails_at_any_moment_spoils_no_result_that_passes_a_check(
    calls: Calls, what: str, weak: bool, late: str
) -> None:
    every_moment(Happens(calls, what, late), weak=weak)


@pytest.mark.parametrize("late", ["its", *map(slow_tier, LATE[1:])])
@pytest.mark.parametrize("calls", KINDS, ids=str)
def test_copies_of_an_interrupted_call_are_done_when_its_memory_is_used_again(
    calls: Calls, late: str
) -> None:
    every_moment(Happens(calls, "interrupted", late))


@pytest.mark.parametrize("late", ["", *map(slow_tier, LATE[:2])])
@pytest.mark.parametrize("calls", KINDS, ids=str)
def test_a_rank_that_is_late_at_any_moment_has_no_wrong_result_that_passes_a_check(
    calls: Calls, late: str
) -> None:
    for behind in (True, False):
        every_moment(Happens(calls, "stops", late, behind=behind))


@pytest.mark.parametrize(
    "what", ["stops", *map(slow_tier, ("fails", "fails early", "interrupted"))]
)
@pytest.mark.parametrize("calls", LISTS, ids=str)
def test_lists_that_are_exchanged_by_copy_engines(calls: Calls, what: str) -> None:
    with lists_by_copies():
        every_moment(Happens(calls, what, late=""))


GATHER = by_copies("all_gather", OUT_OF_PLACE)
SCATTER = by_copies("reduce_scatter", OUT_OF_PLACE)
DIRECT = "exchange.kernels_direct.exchange_direct"
TAKEN_OUT = "segment(inbox, g, epoch, src_rank) + offset"
DIRECT_STALLS = stalls(DIRECT, 2, "tdl.copy_block", TAKEN_OUT)
SUM_STALLS = stalls("primitives.copies.sum_copies", 4, "reduce_chunk")
SUMS = Overwritten(SCATTER, ("ce", "ce", "ce"), 6)


def test_copies_into_an_inbox_that_another_algorithm_still_reads(tmp_path: Path) -> None:
    """The third call has the slot of the second, because it leaves out an odd epoch."""
    algorithms = ("direct", "direct", "ce")
    with installed([DIRECT_STALLS], tmp_path):
        explore(Overwritten(GATHER, algorithms, 4, checks=True), **where(GATHER), seeds=1)
        failure = first_failure(Overwritten(GATHER, algorithms, 4), **where(GATHER), seeds=1)
    assert failure is not None
    assert "call 1: 18 wrong numbers" in failure.report


def test_copies_into_an_inbox_that_is_being_summed(tmp_path: Path) -> None:
    with installed([SUM_STALLS], tmp_path):
        explore(SUMS, **where(SCATTER), seeds=1)


def test_only_streams_that_were_forked_are_joined_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a capture, to join another one would be an error."""
    done: list[tuple[str, int]] = []
    x = torch.ones(4)

    def fork(self: SimulatedSideStream, stream: int) -> None:
        if done:
            raise RuntimeError("the driver refuses")
        done.append(("fork", self.handle))

    def host(pe: int) -> None:
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64, debug=False)
        if pe == 0:
            with pytest.raises(RuntimeError, match="the driver refuses"):
                tdcoll.all_gather(x, ctx=ctx, algorithm="ce")

    monkeypatch.setattr(KernelLaunch, "__call__", lambda *given: None)  # no rank waits for another
    monkeypatch.setattr(SimulatedSideStream, "fork", fork)
    monkeypatch.setattr(
        SimulatedSideStream, "join", lambda self, stream: done.append(("join", self.handle))
    )
    World(3).run(host)
    assert [what for what, _ in done] == ["fork", "join"]
    assert len({stream for _, stream in done}) == 1


@pytest.mark.parametrize("late", [False, True], ids=["", "kernels are late"])
@pytest.mark.parametrize("calls", KINDS, ids=str)
def test_copies_wait_for_no_kernel_but_the_one_that_lets_them_begin(
    calls: Calls, late: bool
) -> None:
    """They come before the kernel that waits for those of the peers, and after that one."""
    case = OneAtATime(calls, late)
    explore(case, **case.where, seeds=3)


def words_of_a_rank_that_has_given_up() -> list[int]:
    """How many words it sends to its two peers in each of three calls."""
    sent: list[int] = []

    def host(pe: int) -> None:
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64, debug=False)
        if pe == 0:
            ctx.monitor.abort()
            for _ in range(4):
                sent.append(world.counts[0].stores)
                tdcoll.all_gather(torch.ones(4), ctx=ctx, algorithm="ce")

    world = World(3, seed=0, weak=True)  # which counts stores to peers
    world.run(host)
    return [after - before for before, after in pairwise(sent)]


def test_a_rank_tells_once_that_it_has_given_up(tmp_path: Path) -> None:
    """Its peers may have left when the next launches run."""
    assert words_of_a_rank_that_has_given_up() == [2, 0, 0]
    with installed([dropped("stores.signal_expired", "tdl.st_release")], tmp_path):
        assert words_of_a_rank_that_has_given_up() == [2, 2, 2]


# ---------------------------------------------------------------------- negative controls

SUM = "primitives.copies.sum_copies"
HEAR = "primitives.copies.wait_arrivals"
HOP = "calls.copies.HopStep.__call__"
STEPS = "calls.copies.CopySequence.__init__"
HELD = "if self._hop.pulled and forked:\n    self._hear(stream)"
HANDLED = f"_join(forked, stream)\n{HELD}\nraise"
STAMPS = "self.stamps.data_ptr()"

IN_TWO = by_copies("all_reduce", OUT_OF_PLACE, algorithm=Plan("ce", 1, 64, 1, 2))
"""All-reduces whose sums have two thread blocks."""

NEVER = (
    "tl.where((g.rank == 0) & (tl.program_id(0) == 1) & (this_epoch(g.control) == 4), 1 << 40, 0)"
)
EXPIRES = (
    Argument(SUM, "reduce_chunk", "TILE", "4"),
    Call(
        SUM,
        "still_alive",
        f"(tdl.wait_signal(g.entered, tdl.CMP_GE, {NEVER}, g.monitor, 0, 0) & {{call}})",
    ),
)
"""Each thread block of a sum has something to do. Rank 0's second one gives up in the second call,
before it has."""


SPOILS = "wrong numbers|has given up, and says that its data is good|is written to after the calls"
"""A result is wrong, or would be if a peer read it at the wrong moment."""

IN_VAIN = "[Dd]eadlock"
"""A wait ends on no rank, or only after a deadline."""


def _mutant(
    name: str, changes: AnyChange | tuple[AnyChange, ...], case: Happens, seeds: int = 80
) -> Mutant:
    if not isinstance(changes, tuple):
        changes = (changes,)
    return Mutant(
        f"{name} ({case})", changes, SPOILS, case, where(case.calls), seeds=seeds, any_seed=True
    )


def _ordered(
    name: str, changes: AnyChange | tuple[AnyChange, ...], case: OneAtATime, expect: str = IN_VAIN
) -> Mutant:
    if not isinstance(changes, tuple):
        changes = (changes,)
    return Mutant(f"{name} ({case})", changes, expect, case, case.where, seeds=3, any_seed=True)


PULL = by_copies("all_gather", CALLER_BUFFER)
PULL_OF_SUMS = by_copies("all_reduce", SYMMETRIC_IN_PLACE)
REDUCE = by_copies("all_reduce", OUT_OF_PLACE)
LATE_TO_GATHER = Happens(GATHER, "stops", "")
LATE_TO_SCATTER = Happens(SCATTER, "stops", "")
LATE_TO_REDUCE = Happens(REDUCE, "stops", "")
LATE_TO_PULL = Happens(PULL, "stops", "", behind=False)
LATE_TO_PULL_SUMS = Happens(PULL_OF_SUMS, "stops", "")
LATE_TO_SPARSE = Happens(Calls(SPARSE, "owner", ()), "stops", "", behind=False)
FAILS = Happens(REDUCE, "fails")
FAILS_OTHERS_LATE = Happens(REDUCE, "fails", "others'")
INTERRUPTED = Happens(GATHER, "interrupted")
INTERRUPTED_OF_THREE = Happens(by_copies("all_gather", OUT_OF_PLACE, (3,)), "interrupted")
INTERRUPTED_PULL = Happens(PULL, "interrupted")
INTERRUPTED_PULL_OTHERS_LATE = Happens(PULL, "interrupted", "others'")
OWN_LATE = Happens(PULL_OF_SUMS, "nothing")

ENTER = "primitives.copies.enter"
LOOK = "primitives.copies.check_peers_alive"
SEND = "calls.copies.HopStep._queue"
SEND_STAMP = "calls.copies.CopyEngines.queue_stamp"
ENTERS = "tdl.wait_signals(g.entered, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2)"
SAYS = "stores.release_to_all(g, g.entered + g.rank, epoch)"
TAKES = """
if hop.copy_out:
    steps.append(LocalCopyStep(engines, LocalMemory.INBOX, hop.copy_out))
"""
LOOKS = """
if hops[-1].copy_out:
    steps.append(_signal_kernel(kernels.check_peers_alive, group))
"""
HEARS = "self._hear(stream)"
JOINS = f"_join(forked, stream)\n{HEARS}"
NO_PEER_EXPIRED = "stores.no_peer_expired(g, WORLD_POW2) != 0"
GOES_ON = "({call} | 1)"
"""Whatever the wait says."""

MUTANTS = [
    # ------------------------------------------------------------------ enter, and what it says
    _mutant("who gives up does not tell", dropped(ENTER, "stores.signal_expired"), LATE_TO_GATHER),
    _mutant(
        "the stamp of who gives up is good",
        Inserted(ENTER, "stores.signal_expired", "tl.store(stamps, epoch)"), LATE_TO_GATHER,
    ),
    _mutant(
        "the stamp is good before all have entered",
        Inserted(ENTER, "tdl.wait_signals", "tl.store(stamps, epoch)"), LATE_TO_GATHER,
    ),
    _mutant(
        "who has given up enters",
        Change(ENTER, f"if entered != 0:\n    {SAYS}\n    entered = {ENTERS}", f"{SAYS}\nentered = {ENTERS}"),
        LATE_TO_GATHER,
    ),
    _mutant("a call goes on for whom not all have entered", Call(ENTER, "tdl.wait_signals", GOES_ON), LATE_TO_GATHER),
    _mutant(
        "who gives up tells an epoch only",
        Argument("stores.signal_expired", "release_to_all", "epoch + tdl.EXPIRED", "epoch"), LATE_TO_GATHER,
    ),
    # ------------------------------------------------------------------ looks
    _mutant("nobody looks behind a copy", Call(LOOK, "stores.no_peer_expired", "1"), LATE_TO_GATHER),
    _mutant("look is not launched", Change(STEPS, LOOKS, "pass"), LATE_TO_GATHER),
    _mutant(
        "look comes before the data is taken",
        (Change(STEPS, LOOKS, "pass"), Change(STEPS, TAKES, f"{LOOKS}\n{TAKES}")), LATE_TO_GATHER,
    ),
    _mutant(
        "a look is for a word that nobody writes",
        Argument("stores.no_peer_expired", "tdl.wait_signals", "tdl.EXPIRED", "2 * tdl.EXPIRED"), LATE_TO_GATHER,
    ),
    _mutant("nobody looks behind a sum", Call(SUM, "stores.no_peer_expired", "1"), LATE_TO_SCATTER),
    Mutant(
        "a sum looks before its data is read",
        (
            Change(SUM, NO_PEER_EXPIRED, "looked != 0"),
            SUM_STALLS,
            Inserted(SUM, "tl.program_id", "looked = stores.no_peer_expired(g, WORLD_POW2)"),
        ),
        r"call 1: \d+ wrong numbers", SUMS, where(SCATTER), seeds=1,
    ),
    _mutant("who has pulled does not look", Call(HEAR, "stores.no_peer_expired", "1"), LATE_TO_PULL),
    _mutant("who gives up does not tell those who pull", dropped(HEAR, "stores.signal_expired"), LATE_TO_PULL),
    # ------------------------------------------------------------------ sums, and what they say
    _mutant("a sum that was ended is made", Call(SUM, "still_alive", "1"), FAILS_OTHERS_LATE),
    _mutant("the sums have the stamp of the parts", Change(SEND_STAMP, f"{STAMPS} + 8 * hop", STAMPS), FAILS),
    _mutant(
        "the first thread block that has summed says that all have",
        (*EXPIRES, Call(SUM, "leaves_last", "1")), Happens(IN_TWO, "nothing"), seeds=1,
    ),
    _mutant(
        "the stamp of sums is good though a peer has given up",
        Change(SUM, NO_PEER_EXPIRED, "stores.no_peer_expired(g, WORLD_POW2) >= 0"), LATE_TO_REDUCE,
    ),
    _mutant("sums are pulled before they are there", no_wait(SUM, "tdl.wait_signals"), LATE_TO_PULL_SUMS),
    _mutant("sums are pulled that have not come", Call(SUM, "tdl.wait_signals", GOES_ON), LATE_TO_PULL_SUMS),
    _mutant(
        "the stamp of pulled sums is good before all sums are there",
        Inserted(SUM, "stores.release_to_all", "tl.store(stamps + 1, epoch + 1)"), LATE_TO_PULL_SUMS,
    ),
    _mutant("sums are pulled whose owner is done", Change(HEAR, "stamp += hop", "pass"), OWN_LATE),
    _ordered("no sum is said to be there", dropped(SUM, "stores.release_to_all"), OneAtATime(PULL_OF_SUMS)),
    _ordered(
        "sums that were pulled have the stamp of those to be pulled",
        Change(SUM, "tl.store(stamps + 1, epoch + 1)", "tl.store(stamps + 1, epoch)"), OneAtATime(PULL_OF_SUMS),
    ),
    _ordered("thread blocks of the last sum count", dropped(ENTER, "tl.store", "summed"), OneAtATime(REDUCE)),
    # ------------------------------------------------------------------ streams
    _ordered(
        "copies are not behind enter",
        Change(SEND, "side_stream.fork(stream)", "pass"), OneAtATime(GATHER, late=True), "wrong numbers",
    ),
    _ordered(
        "copies are not before hear", Change(HOP, JOINS, f"{HEARS}\n_join(forked, stream)"), OneAtATime(GATHER),
    ),
    _ordered("copies are not joined", Change(HOP, JOINS, HEARS), OneAtATime(PULL)),
    _mutant("an interrupt leaves streams as they are", Change(HOP, HANDLED, "raise"), INTERRUPTED),
    _mutant(
        "an interrupt joins one of two streams",
        Change(HOP, HANDLED, HANDLED.replace("forked, stream", "forked[:1], stream")), INTERRUPTED_OF_THREE,
    ),
    _mutant("an interrupt joins no stream of pulls", Change(HOP, HANDLED, f"{HELD}\nraise"), INTERRUPTED_PULL),
    _mutant("an interrupt frees what peers pull", Change(HOP, HELD, "pass"), INTERRUPTED_PULL_OTHERS_LATE),
    # ------------------------------------------------------------------ sparse all-reduces
    _mutant(
        "a sparse sum reads parts that have not come",
        Call("kernels_reduce.reduce", "tdl.wait_signals", GOES_ON), LATE_TO_SPARSE,
    ),
]  # fmt: skip
"""The first tier catches each of them at a place where it runs the real kernels as well.

Two changes to a call by copies are none, because they are harmless: ``wait_arrivals`` and
``check_peers_alive`` may ask whether a wait has expired (:mod:`tdcoll.primitives.copies` says why
they need not), and after an interrupt ``wait_arrivals`` may come before the joins, because that
call has no result."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    mutant.is_caught(tmp_path)


def test_no_stamp_says_that_a_sum_is_complete_of_which_a_thread_block_has_given_up(
    tmp_path: Path,
) -> None:
    with installed(EXPIRES, tmp_path):
        explore(Happens(IN_TWO, "nothing"), **where(IN_TWO), seeds=1)


@pytest.mark.parametrize(
    "case", [LATE_TO_SPARSE, INTERRUPTED_PULL_OTHERS_LATE, INTERRUPTED_OF_THREE, OWN_LATE], ids=str
)
def test_real_kernels_pass_where_mutants_are_caught(case: Happens) -> None:
    """At the places that no other test of the first tier has."""
    if case.what == "nothing":
        explore(case, **where(case.calls), seeds=6)
    else:
        every_moment(case)
