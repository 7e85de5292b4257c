# SPDX-License-Identifier: Apache-2.0
"""Deadlines that expire while the peer is only late: a rank that gives up must not spoil the
results of its peers.

The dense collectives are there with every kernel that they have.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exploring import explore
from kernel_mutants import AnyChange, Argument, Call, Change, Mutant, dropped, installed
from tiers import every_eighth, seeds, slow_tier

import tdcoll
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls import plan
from tdcoll.testing import World

from .operations import (
    ALL,
    KNOWN,
    LOST,
    SPARSE,
    Calls,
    Tensors,
    given,
    sparse,
    sparse_wanted,
)
from .suite.algorithm_cases import Nodes, job

EARLY: dict[str, Any] = {"on_timeout": "early"}
PATIENT: dict[str, Any] = {"on_timeout": "expire", "weak": False, "stragglers": False}


class Queued:
    """Launches several calls on every rank, and checks the results of the ranks that no deadline
    has ended.

    Each call has the memory of the one before: results are copied away, and all is written over,
    right after the call, as the next kernels on a stream may do it whether or not a wait has
    expired.

    Args:
        looks: ranks other than the first check every call when it is done, and then use its result.

    Attributes:
        ended: how many ranks ended with right results, and how many gave up.
        early: waits that expired while what they waited for was on its way.
    """

    def __init__(self, calls: Calls, looks: bool = False) -> None:
        self.calls, self.looks = calls, looks
        self.ended: Counter[str] = Counter()
        self.early = 0

    def __call__(self, world: World) -> None:
        ended = world.run(lambda pe: self.host(pe, world))
        self.early += len(world.gave_up)
        for rank, (how, left) in enumerate(ended):
            self.ended[how] += 1
            # one that gave up may still be written to, where the result is symmetric
            if how == "right":
                assert all(bool((tensor == LOST).all()) for tensor in left), (
                    f"rank {rank} is written to after its calls"
                )

    def host(self, pe: int, world: World) -> tuple[str, Tensors]:
        """Run on one rank."""
        calls, operation = self.calls, self.calls.operation
        ctx, monitor = calls.context()
        source, out, memories = operation.memory(ctx)
        looks, looked_at, results = self.looks and pe > 0, monitor.valid, []
        try:
            for call in range(calls.queued):
                monitor.valid = looked_at if looks else memoryview(bytearray(1))
                source.copy_(given(pe, call, source))
                gave_up, sent = looked_at[0], self.sent(world, pe)
                made = operation.call(source, out, ctx, calls.algorithm, call)
                if gave_up and not operation.tells:
                    assert self.sent(world, pe) == sent, (
                        f"rank {pe} has given up, and sends in call {call}"
                    )
                results.append([result.clone() for result in operation.results(made, out)])
                if looks:
                    ctx.check()
                    calls.check(ctx, call, results[-1], source)
                for tensor in memories:
                    tensor.fill_(LOST)
            monitor.valid = looked_at
            ctx.check()
        except tdcoll.CollectiveTimeout:
            return "gave up", memories
        for call, made in enumerate(results):
            calls.check(ctx, call, made, source)
        return "right", memories

    @staticmethod
    def sent(world: World, pe: int) -> tuple[int, ...]:
        """How often a rank has written to others."""
        counts = world.counts[pe]
        return counts.puts, counts.signals, counts.stores


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "TARGET_CHUNK_BYTES", 32)


@seeds(1, 12)
@pytest.mark.parametrize("calls", ALL, ids=str)
def test_every_rank_gives_up_or_has_the_right_result(calls: Calls, seeds: range) -> None:
    case, where = Queued(calls), {**job(calls.nodes), **EARLY}
    explore(case, **where, seeds=seeds)
    for seed in range(1000, 1030):  # until both have happened
        if case.early and len(case.ended) == 2:
            break
        explore(case, **where, seeds=[seed])
    assert case.early > 0
    assert set(case.ended) == {"right", "gave up"}


BY_COPIES = [calls for calls in ALL if calls.algorithm == "ce"]


@seeds(3, 60)
@pytest.mark.parametrize("calls", BY_COPIES, ids=str)
def test_copies_of_a_rank_that_has_given_up_spoil_no_result_that_passes_a_check(
    calls: Calls, seeds: range
) -> None:
    explore(Queued(calls, looks=True), **{**job(calls.nodes), **EARLY}, seeds=seeds)


class Stalled:
    """The last rank stalls before it reads any stage in call ``STALLS``, until rank 0, which has
    given up on it, has launched a further call. Results of the calls before the one that a deadline
    ended are right."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def __call__(self, world: World) -> None:
        world.run(self.host)

    def host(self, pe: int) -> None:
        """Run on one rank."""
        calls, operation, results = self.calls, self.calls.operation, []
        ctx, monitor = calls.context()
        source, out, _ = operation.memory(ctx)
        looked_at, monitor.valid = monitor.valid, memoryview(bytearray(1))
        for call in range(STALLS + 2):
            source.copy_(given(pe, call, source))
            made = operation.call(source, out, ctx, calls.algorithm, call)
            results.append([result.clone() for result in operation.results(made, out)])
            if pe == 0 and call == STALLS + 1:
                last = ctx.world_size - 1
                tdcoll.write_on_stream(tdcoll.peer_tensor(ctx.ready, last)[last], 1)
        monitor.valid = looked_at
        with pytest.raises(tdcoll.CollectiveTimeout) as raised:
            ctx.check()
        for call in range(((raised.value.epoch or 0) - 1) // EPOCHS):
            calls.check(ctx, call, results[call], source)


STALLS, EPOCHS = 2, 2  # a call's exchange and reduce
"""In that call the last of 2 or 3 ranks reduces a row that others bring as well."""

ITEMS = "items = k + tl.arange(0, ROWS)"
STALL = f"""
if (g.rank == g.world - 1) & (epoch == {EPOCHS * STALLS + 2}):
    while tdl.ld(g.entered + g.rank, "sys", "relaxed") == 0:
        pass
"""
"""Until its own word of ``entered``, which the protocol does not use, is set."""
STALLED = Change("kernels_reduce.reduce", ITEMS, f"{STALL}\n{ITEMS}")
SAME_ROWS = dataclasses.replace(
    SPARSE,
    call=lambda source, out, ctx, algorithm, number: sparse(source, out, ctx, algorithm, STALLS),
    wanted=lambda sources, topology, number: sparse_wanted(sources, topology, STALLS),
)
"""The same rows in every call, with other values: lists of an earlier call would have the same
places for them."""


@pytest.mark.parametrize("nodes", [(2,), slow_tier((3,))], ids=str)
def test_launches_after_an_expired_wait_leave_the_stage_alone(nodes: Nodes, tmp_path: Path) -> None:
    case = Stalled(Calls(SAME_ROWS, "owner", (), nodes))
    with installed([STALLED], tmp_path):
        explore(case, **{**job(nodes), **PATIENT}, seeds=2)


FILLED = Change("kernels_values.combine", "still_alive(g.monitor) == 0", "False")
NOT_NUMBERED = Change("kernels_lists.numbered", "number << 32 | signature", "signature")


@pytest.mark.parametrize("change", [FILLED, NOT_NUMBERED], ids=["look", "number"])
def test_a_look_or_the_number_of_lists_is_enough_to_leave_the_stage_alone(
    change: Change, tmp_path: Path
) -> None:
    case = Stalled(Calls(SAME_ROWS, "owner", (), (2,)))
    with installed([change, STALLED], tmp_path):
        explore(case, **{**job((2,)), **PATIENT}, seeds=2)


class Deserted:
    """A rank begins a call when another, by seed, has given up on it; the others give up, too, or
    have right data."""

    def __init__(self, calls: Calls) -> None:
        self.calls, world, first = calls, sum(calls.nodes), calls.nodes[0]
        self.late_ones, self.expired_rank = sorted({1, first if first < world else world - 1}), 0

    def __call__(self, world: World) -> None:
        self.monitors: dict[int, tdcoll.WaitMonitor] = {}
        late = self.late_ones[(world.seed or 0) % len(self.late_ones)]
        world.run(lambda pe: self.host(pe, late, world))

    def host(self, pe: int, late: int, world: World) -> None:
        """Run on one rank."""
        calls = self.calls
        ctx, self.monitors[pe] = calls.context()
        source, out, memories = calls.operation.memory(ctx)
        for call in range(2):
            for tensor in memories:
                tensor.fill_(LOST)
            if call and pe == late:
                world.pause(100)
                monitor = self.monitors[self.expired_rank]
                monitor.abort()
                world.scheduler.notify(("monitor", monitor.words.data_ptr()))
                world.pause(100)
                untouched = all(bool((tensor == LOST).all()) for tensor in memories)
                assert untouched, f"rank {pe} is written to before its call"
            source.copy_(given(pe, call, source))
            made = calls.operation.call(source, out, ctx, calls.algorithm, call)
            if self.monitors[pe].expired or (pe == self.expired_rank and call):
                return
            calls.check(ctx, call, calls.operation.results(made, out), source)


KNOWN["all_reduce 2d 3+3"] = Calls(KNOWN["all_reduce 2d 2+2"].operation, "2d", (), (3, 3))


@pytest.mark.parametrize("calls", KNOWN.values(), ids=str)
def test_a_rank_that_comes_when_another_has_given_up(calls: Calls) -> None:
    case = Deserted(calls)
    explore(case, **{**job(calls.nodes), **PATIENT}, seeds=2 * len(case.late_ones))


# ---------------------------------------------------------------------- negative controls

BY_KERNEL = {
    kernel: calls
    for calls in reversed(ALL)
    for kernel in calls.kernels
    if not calls.operation.tells
}
GO_ON = [
    Mutant(
        f"launches after an expired wait go on: {kernel.removeprefix('tdcoll.')}",
        (Change(kernel, "if alive == 0:\n    return", "pass"),), "gave up early: pe", Queued(calls),
        {**job(calls.nodes), **EARLY}, seeds=30,
    )
    for kernel, calls in BY_KERNEL.items()
]  # fmt: skip
"""A rank that gave up and goes on sending writes over what a late peer has yet to read."""


def _heedless(name: str, calls: str, change: Callable[[str], AnyChange], where: str = "") -> Mutant:
    """Calls, by their name, with a change of the function ``where``, or else of their first
    kernel."""
    shown = KNOWN[calls]
    return Mutant(
        name, (change(where or shown.kernels[0]),), "wrong numbers|is written to", Deserted(shown),
        {**job(shown.nodes), **PATIENT}, seeds=8,
    )  # fmt: skip


def _any(call: str, of: str = "") -> Callable[[str], AnyChange]:
    """Whatever a wait says, the kernel goes on."""
    return lambda where: Call(where, call, "({call} | 1)", of)


def _instead(call: str, old: str, new: str) -> Callable[[str], AnyChange]:
    return lambda where: Argument(where, call, old, new)


def _last_alone(where: str) -> AnyChange:
    """The last wait of several decides."""
    last = "tdl.wait_signal(signals + r, tdl.CMP_GE, epoch, g.monitor, r, first_index + r)"
    return Change(where, f"came & {last}", last)


SUMS = "all_reduce.kernels_words._sum_and_hand_on"
PUSH = "puts.push_remote"
WAIT_FOR = "all_reduce.kernels_nodes._wait_for"
ENTERS = _any("stores.may_write")
ARRIVES = _any("tdl.wait_signals", "arrived")
OF_NODE = _any("_wait_for", "routes.ranks")
OF_RAIL = _any("_wait_for", "rail")
UNMASKED = _instead("words.send_to_all", "summed", "mask")
ANY_ROW = _instead("words.send_to_all", "mask", "there")
HEEDLESS = [
    _heedless("direct writes to who has not entered", "all_gather caller buffer direct 2", ENTERS),
    _heedless("ring writes to who has not entered", "all_gather caller buffer ring 3", ENTERS),
    _heedless("loop writes to who has not entered", "all_gather caller buffer loop 2", ENTERS),
    _heedless("loop sums what has not come", "all_reduce loop 2", ARRIVES),
    _heedless(
        "1d writes to who has not entered",
        "all_gather caller buffer 1d 1+1",
        _any("may_write"),
        PUSH,
    ),
    _heedless("ring passes on what has not come", "all_gather ring 3", _any("tdl.wait_signal")),
    _heedless("2d passes on what has not come", "all_gather 2d 2+2", _any("tdl.wait_signal")),
    _heedless("two-shot sends sums of what has not come", "all_reduce two_shot 2", UNMASKED, SUMS),
    _heedless(
        "two-shot sends sums of what has not come flags",
        "all_reduce two_shot flags 2",
        UNMASKED,
        SUMS,
    ),
    _heedless("direct sums what has not come", "all_reduce direct 2", ARRIVES),
    _heedless("1d sums what has not come", "all_reduce 1d 1+1", _any("tdl.wait_signals")),
    _heedless("2d sums what has not come of the node", "all_reduce 2d 2+2", OF_NODE),
    _heedless("2d sums what has not come of the rail", "all_reduce 2d 2+2", OF_RAIL),
    _heedless("two-shot sends rows of what has not come", "norm two_shot 2", ANY_ROW),
    _heedless("2d sums when the last rank has come", "all_reduce 2d 3+3", _last_alone, WAIT_FOR),
]
"""A late peer would take for right what a rank sends that has given up within the launch.

The other waits of kernels need not be heeded. What a rank that has given up then writes to its own
result counts for nothing, because its host raises. And what launches of a sparse all-reduce on
several nodes send is used behind a later launch of that call, which does not begin on that rank.
(For one node, ``test_moments.py`` has the wait.)"""

SPOILED = [
    Mutant(
        f"{what} of {calls}", (change,), "wrong numbers", Queued(calls, looks=True), {**job(calls.nodes), **EARLY},
        seeds=300, any_seed=True,
    )
    for calls in BY_COPIES
    # test_moments.py has those of calls whose data is pulled, and those of looks: here the ranks'
    # check() finds who has given up, even if no kernel looks.
    if calls.operation.name in COLLECTIVES
    for what, change in (
        ("who gives up does not tell", dropped("primitives.copies.enter", "stores.signal_expired")),
        ("the stamp of who gives up", Change("primitives.copies.enter", "entered != 0", "epoch > 0")),
    )
]  # fmt: skip
"""Copies that are queued run although a wait has expired."""

STAGE = Mutant(
    "a stage is filled after an expired wait, from lists of an earlier call",
    (FILLED, NOT_NUMBERED, STALLED),
    rf"rank 1, call {STALLS}: \d+ wrong numbers",
    Stalled(Calls(SAME_ROWS, "owner", (), (2,))), {**job((2,)), **PATIENT}, seeds=2,
)  # fmt: skip


@pytest.mark.parametrize("mutant", every_eighth([*GO_ON, *HEEDLESS, *SPOILED, STAGE]), ids=str)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    mutant.is_caught(tmp_path)
