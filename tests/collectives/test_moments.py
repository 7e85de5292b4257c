# SPDX-License-Identifier: Apache-2.0
"""Calls of several launches and copies, which a rank's host interrupts, or whose context it fails, at any moment.

No rank whose ``check()`` passes may have a wrong result, whatever leaves the other rank behind that moment.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_mutants import AnyChange, Argument, Call, Change, Mutant, dropped, installed
from tiers import slow_tier

import tdcoll
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.collective import spec_of
from tdcoll.calls.kernel_launch import KernelLaunch
from tdcoll.calls.monitor import WaitMonitor
from tdcoll.calls.plan import Plan
from tdcoll.simulator.streams import SimulatedSideStream, Stream
from tdcoll.testing import World, explore, first_failure

from .moments import Happens, bring
from .operations import BY_COPIES as SPARSE_BY_COPIES
from .operations import SPARSE, Calls, dense, lists_by_copies
from .suite.algorithm_cases import Nodes, job
from .suite.data import values
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
    slow_tier(by_copies("all_reduce", SYMMETRIC_IN_PLACE, (3,)), id="all_reduce symmetric in place 3"),
]
"""Calls by copy engines, whose data lands in the inbox or in the caller's memory."""

LISTS = [
    Calls(SPARSE_BY_COPIES, "gather", ()),
    *(slow_tier(Calls(operation, name, ()), id=f"{operation.name} {name}") for operation, name in (
        (SPARSE_BY_COPIES, "owner"), (SPARSE, "gather"), (SPARSE, "owner"),
    )),
]  # fmt: skip
"""Sparse all-reduces."""


def where(calls: Calls, **more: Any) -> dict[str, Any]:
    """Arguments of ``explore``."""
    return {**job(calls.nodes), "on_timeout": "expire", "stragglers": False, "weak": False, **more}


def every_moment(case: Happens, **more: Any) -> None:
    """Let it happen to each rank, at each moment."""
    settings = where(case.calls, **more)
    seeds = case.moments(World(seed=0, **settings))
    assert len(seeds) > 4 * sum(case.calls.nodes), "few moments: the call isn't what it should be"
    explore(case, **settings, seeds=seeds)


LATE, WEAK = ("its", "others'", ""), (False, True)


@pytest.mark.parametrize("weak", [False, slow_tier(True)], ids=["strong", "weak"])
@pytest.mark.parametrize(
    ("what", "late"),
    [
        ("fails", "its"),
        ("fails", "others'"),
        slow_tier("fails", ""),
        *(slow_tier("fails early", late) for late in LATE),
    ],
)
@pytest.mark.parametrize("calls", KINDS, ids=str)
def test_a_context_that_fails_at_any_moment_spoils_no_result_that_passes_a_check(
    calls: Calls, what: str, weak: bool, late: str
) -> None:
    every_moment(Happens(calls, what, late), weak=weak)


@pytest.mark.parametrize("weak", [False, slow_tier(True)], ids=["strong", "weak"])
@pytest.mark.parametrize("late", ["its", *map(slow_tier, LATE[1:])])
@pytest.mark.parametrize("calls", KINDS, ids=str)
def test_copies_of_an_interrupted_call_are_done_when_its_memory_is_used_again(
    calls: Calls, weak: bool, late: str
) -> None:
    every_moment(Happens(calls, "interrupted", late), weak=weak)


@pytest.mark.parametrize("weak", [False, slow_tier(True)], ids=["strong", "weak"])
@pytest.mark.parametrize("late", ["", *map(slow_tier, LATE[:2])])
@pytest.mark.parametrize("calls", KINDS, ids=str)
def test_a_rank_that_is_late_at_any_moment_has_no_wrong_result_that_passes_a_check(
    calls: Calls, weak: bool, late: str
) -> None:
    for behind in (True, False):
        every_moment(Happens(calls, "stops", late, behind=behind), weak=weak)


@pytest.mark.parametrize("what", ["stops", *map(slow_tier, ("fails", "fails early", "interrupted"))])
@pytest.mark.parametrize("calls", LISTS, ids=str)
def test_lists_that_are_exchanged_by_copy_engines(calls: Calls, what: str) -> None:
    with lists_by_copies():
        every_moment(Happens(calls, what, late=""))


STALL = """
if (g.rank == 1) & (epoch == 2):
    while tdl.ld(g.arrived + (2 * g.chunks - 1) * g.world + 1, "sys", "relaxed") == 0:
        pass
"""
"""Until a word of rank 1 is set that no call uses, because a rank doesn't signal to itself."""

OUT = "tdl.copy_block(taken, segment(inbox, g, epoch, frm) + offset, size)"
STALLED = Change("exchange.kernels_direct.exchange_direct", OUT, f"{STALL}\n{OUT}")


def copies_into_an_inbox_that_is_read(world: World) -> None:
    """Rank 1 stalls in its second call, by stores, before it reads its inbox. The third call is by copy engines, and
    has the same slot, because it leaves out an odd epoch. Rank 0 makes it when it has given up."""

    raised: list[tuple[int, int | None, int | None]] = []

    def host(pe: int) -> None:
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64, debug=False)
        checked, unseen = ctx.monitor.valid, memoryview(bytearray(1))
        for call, algorithm in enumerate(("direct", "direct", "ce")):
            x = values(pe, call, 4, torch.float32)
            ctx.monitor.valid = unseen
            got = tdcoll.all_gather(x, ctx=ctx, algorithm=algorithm)
            ctx.monitor.valid = checked
            if pe == 1:
                wanted = torch.cat([values(rank, call, 4, torch.float32) for rank in range(2)])
                try:
                    ctx.check()
                except tdcoll.CollectiveTimeout as error:
                    raised.append((error.rank, error.peer, error.epoch))
                    with pytest.raises(tdcoll.CollectiveTimeout, match=re.escape(str(error))):
                        tdcoll.all_gather(x, ctx=ctx)
                    return
                assert torch.equal(got, wanted), f"call {call}: wrong numbers"
        assert pe == 0
        tdcoll.write_on_stream(tdcoll.peer_tensor(ctx.signals, 1)[1, -1, 1], 1)

    world.run(host)
    assert raised == [(1, 0, 4)]


def test_copies_into_an_inbox_that_another_algorithm_still_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"n_pes": 2, "seeds": 1, "on_timeout": "expire", "stragglers": False, "weak": False}
    with installed([STALLED], tmp_path):
        explore(copies_into_an_inbox_that_is_read, **job)
        monkeypatch.setattr(WaitMonitor, "raise_if_wrong", WaitMonitor.raise_if_expired)
        failure = first_failure(copies_into_an_inbox_that_is_read, **job)
    assert failure is not None
    assert "call 1: wrong numbers" in failure.report


def test_only_streams_that_were_forked_are_joined_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(SimulatedSideStream, "join", lambda self, stream: done.append(("join", self.handle)))
    World(3).run(host)
    assert [what for what, _ in done] == ["fork", "join"]
    assert len({stream for _, stream in done}) == 1


class OneAtATime:
    """Calls of all ranks on a stream, on GPUs that carry out one operation at a time, of any of their streams."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def __call__(self, world: World) -> None:
        busy, real = set[int](), Stream.queue

        def queue(stream: Stream, operation: Callable[[], Any]) -> None:
            def alone() -> None:
                pe = stream._pe
                world.scheduler.wait(lambda: pe not in busy, lambda: "waits for another operation", ["idle"])
                busy.add(pe)
                operation()
                busy.remove(pe)
                world.scheduler.notify("idle")

            joins = "Stream.join" in getattr(operation, "__qualname__", "")
            real(stream, operation if joins else alone)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Stream, "queue", queue)
            world.run(lambda pe: self.host(pe, world))

    def host(self, pe: int, world: World) -> None:
        """Run on one rank."""
        operation, stream = self.calls.operation, world.stream()
        ctx, _ = self.calls.context(debug=False)
        source, out, _ = operation.memory(ctx)
        for call in range(2):
            stream.queue(partial(bring, pe, call, source))
            with stream:
                made = operation.call(source, out, ctx, self.calls.algorithm, call)
        stream.synchronize()
        self.calls.check(ctx, 1, operation.results(made, out), source)


@pytest.mark.parametrize("calls", KINDS, ids=str)
def test_copies_come_before_the_kernel_that_waits_for_those_of_the_peers(calls: Calls) -> None:
    explore(OneAtATime(calls), **job(calls.nodes), weak=False, seeds=3)


def test_a_rank_tells_once_that_it_has_given_up() -> None:
    """Its peers may have left when the next launches run."""
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
    assert [after - before for before, after in pairwise(sent)] == [2, 0, 0]


# ---------------------------------------------------------------------- negative controls

ENGINES, SUM = "calls.copies.CopyEngines", "primitives.copies.sum_copies"
CALL, HEAR = "calls.copies.HopStep.__call__", "primitives.copies.hear"
HELD = "if self._hop.pulled and forked:\n    self._hear(stream)"
HANDLED = f"_join(forked, stream)\n{HELD}\nraise"
STAMPS = "self.stamps.data_ptr()"

IN_TWO = by_copies("all_reduce", OUT_OF_PLACE, algorithm=Plan("ce", 1, 64, 1, 2))
"""All-reduces whose sums have two thread blocks."""

NEVER = "tl.where((g.rank == 0) & (tl.program_id(0) == 1) & (this_epoch(g.control) == 4), 1 << 40, 0)"
EXPIRES = (
    Argument(SUM, "reduce_chunk", "COUNT", "4"),
    Call(SUM, "still_alive", f"(tdl.wait_signal(g.entered, tdl.CMP_GE, {NEVER}, g.monitor, 0, 0) & {{call}})"),
)
"""Each thread block of a sum has something to do. Rank 0's second one gives up in the second call, before it has."""


def _mutant(name: str, changes: AnyChange | tuple[AnyChange, ...], case: Happens, seeds: int = 40) -> Mutant:
    changes = changes if isinstance(changes, tuple) else (changes,)
    return Mutant(f"{name} ({case})", changes, "wrong numbers", case, where(case.calls), seeds=seeds, any_seed=True)


GATHER, PULL = by_copies("all_gather", OUT_OF_PLACE), by_copies("all_gather", CALLER_BUFFER)
LAST_PULL = Happens(PULL, "stops", behind=False)
OWN_LATE = Happens(by_copies("all_reduce", SYMMETRIC), "nothing")
REDUCE = by_copies("all_reduce", OUT_OF_PLACE)
FAILS = Happens(REDUCE, "fails")
MUTANTS = [
    _mutant("a sum that was ended is made", Call(SUM, "still_alive", "1"), Happens(REDUCE, "fails", "others'")),
    _mutant(
        "the sums have the stamp of the parts",
        Change(f"{ENGINES}.queue_stamp", f"{STAMPS} + 8 * hop", STAMPS), FAILS,
    ),
    _mutant(
        "the first thread block that has summed says that all have",
        (*EXPIRES, Call(SUM, "leaves_last", "1")), Happens(IN_TWO, "nothing"), seeds=1,
    ),
    _mutant("an interrupt leaves streams as they are", Change(CALL, HANDLED, "raise"), Happens(GATHER, "interrupted")),
    _mutant("an interrupt frees what peers pull", Change(CALL, HELD, "pass"), Happens(PULL, "interrupted", "others'")),
    _mutant("who gives up does not tell those who pull", dropped(HEAR, "stores.tell_gave_up"), LAST_PULL),
    _mutant("who has pulled does not look", Call(HEAR, "stores.none_gave_up", "1"), LAST_PULL),
    _mutant("sums are pulled whose owner is done", Change(HEAR, "stamp += hop", "pass"), OWN_LATE),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    mutant.is_caught(tmp_path)


def test_no_stamp_says_that_a_sum_is_complete_of_which_a_thread_block_has_given_up(tmp_path: Path) -> None:
    with installed(EXPIRES, tmp_path):
        explore(Happens(IN_TWO, "nothing"), **where(IN_TWO), seeds=1)
