# SPDX-License-Identifier: Apache-2.0
"""Kernels with one protection left out must be caught; their twins with it must not. A test that
cannot fail..."""

from __future__ import annotations

import re
from typing import Any

import protocols
import pytest
import torch
import triton.language as tl
from cases import (
    FORGETFUL,
    Case,
    case,
    device,
    expect,
    gather,
    gathering,
    segment,
    spinning,
)
from exploring import explore, first_failure
from protocols import Steps
from tiers import seeds

import tdcoll
import tdcoll.language as tdl
from tdcoll.testing import Deadlock, ExplorationFailed

CLEAN = [
    Steps(notify="put_signal"),
    Steps(notify="put_signal_nbi", end="quiet"),
    Steps("nbi put", order="fence", notify="signal", end="quiet"),
    Steps("nbi put", notify="signal_block", end="quiet"),
    Steps("nbi put", order="quiet", notify="store"),
    Steps("copy", notify="release"),
    Steps("copy", notify="signal_block"),
    Steps("store", notify="atomic release"),
    Steps("store", order="fence", notify="signal"),
    Steps("descriptor", order="wait", notify="release"),
    Steps("descriptor", order="wait", notify="atomic release"),
    Steps("descriptor", order="wait", notify="signal_block"),
]
UNORDERED = Steps("nbi put", notify="signal", end="quiet")
CAUGHT = [
    UNORDERED,
    Steps("put", notify="signal"),  # blocking is not delivered
    Steps("put", order="signal first"),
    Steps("put", notify="release"),  # which orders stores, not puts
    Steps("copy", notify="gpu release"),
    Steps("copy", notify="relaxed"),
    Steps("copy", notify="signal"),
    Steps("store", notify="atomic relaxed"),
    Steps("store", notify="signal"),
    Steps("words", notify="signal"),
    Steps("half a store", notify="put_signal"),
    Steps("descriptor", notify="release"),  # which orders stores that are complete
    Steps("descriptor", order="wait", notify="relaxed"),
    Steps("descriptor", order="fence", notify="signal"),
    Steps("descriptor", order="quiet", notify="signal"),
]


def deadlock(case: Case, seeds: int = 1, **options: Any) -> Deadlock:
    """That in which a case of four ends."""
    failure = first_failure(case, n_pes=4, seeds=seeds, **options)
    assert failure is not None
    assert isinstance(failure.error, Deadlock)
    return failure.error


@seeds(10, 30)  # as many as catch the wrong ones
@pytest.mark.parametrize("steps", CLEAN, ids=str)
def test_right_kernels_are_clean(steps: Steps, seeds: range) -> None:
    explore(gather(steps), n_pes=4, seeds=seeds)


@pytest.mark.parametrize("steps", CAUGHT, ids=str)
def test_data_that_no_signal_orders_is_caught(steps: Steps) -> None:
    expect(gather(steps), False, "bytes of rank", n_pes=4, seeds=10)


def test_strong_delivery_hides_a_missing_fence() -> None:
    """Which is why exploration is weak by default."""
    assert first_failure(gather(UNORDERED), n_pes=4, seeds=10, weak=False) is None


@pytest.mark.parametrize(
    ("options", "weak"),
    [
        ({"slots": 1, "signal_slots": 2}, True),
        ({"slots": 1, "signal_slots": 2}, False),  # weak delivery is not needed to see it
        # >= is satisfied by the call after, which says nothing of this call's bytes
        ({"signal_slots": 1}, True),
        # Overwritten before quiet:
        ({"steps": Steps(notify="put_signal_nbi"), "slots": 1, "signal_slots": 2}, True),
    ],
)
def test_too_few_slots_are_caught(options: dict[str, Any], weak: bool) -> None:
    expect(gather(**options, calls=4), False, "bytes of rank", n_pes=4, seeds=40, weak=weak)


def test_equal_wait_is_overtaken() -> None:
    """With one row of signals a fast peer sets e+1 before the slow one has seen e, which then waits
    for ever."""
    explore(gather(calls=4), n_pes=4, seeds=5)
    assert "==" in str(
        deadlock(gather(compare=tdl.CMP_EQ.value, signal_slots=1, calls=4), seeds=60)
    )


def test_deadlocks_name_what_is_missing() -> None:
    error = deadlock(gather(FORGETFUL))
    # row 1 of two rows of four
    assert "pe0 gather(0,0,0) waits for pe0.signals[6] >= 1, is 0" in str(error)
    assert re.search(r"signals\[6\] >= 1, is 0 \(from rank 2; .*protocols\.py:\d+\)", str(error))
    assert "waits for its launch of gather" in str(error)
    assert any(line.pe == 0 and "signals[6]" in line.reason for line in error.blocked)
    explore(spinning(0), n_pes=4, seeds=5)
    spins = "pe0 gather_by_threads(0,0,0) spins on pe0.signals[6], is 0"
    assert re.search(
        re.escape(spins) + r" \(.*protocols\.py:\d+\)", str(deadlock(spinning(1), spin_limit=100))
    )


def test_grid_that_waits_first_deadlocks_with_one_resident_program() -> None:
    def waiting(number: int) -> Case:
        return gathering(lambda *arguments: protocols.gather_in_order[(4,)](*arguments, number))

    explore(waiting(0), n_pes=4, seeds=10)
    explore(waiting(0), n_pes=4, seeds=10, resident=2)
    assert "0 of 4 programs done, 3 not started for lack of room" in str(
        deadlock(waiting(0), resident=1)
    )
    explore(waiting(3), n_pes=4, seeds=10, resident=1)


def test_failure_says_how_to_see_it_again() -> None:
    wrong = gather(UNORDERED)
    with pytest.raises(
        ExplorationFailed, match=r"replay\(case, \d+, n_pes=4, races=False, resident=4\)"
    ) as raised:
        explore(wrong, n_pes=4, seeds=10, resident=4)
    failure = raised.value.failure
    again = first_failure(wrong, seeds=[failure.seed], **failure.options)
    assert again is not None
    assert again.report == failure.report


@pytest.mark.parametrize("seeds", [0, -1, [], iter(())])
@pytest.mark.parametrize("try_seeds", [explore, first_failure])
def test_seeds_may_be_any_iterable_but_not_none(try_seeds: Any, seeds: Any) -> None:
    seen: list[int | None] = []
    with pytest.raises(
        ValueError, match="seeds must be at least 1, or name at least one seed; got "
    ):
        try_seeds(lambda world: None, n_pes=1, seeds=seeds)
    try_seeds(lambda world: seen.append(world.seed), n_pes=1, seeds=(seed for seed in (3, 1)))
    assert seen == [3, 1]


def controls(clean: list[Steps], caught: list[Steps]) -> pytest.MarkDecorator:
    """Steps with all protections, and steps that lack one."""
    sets = [
        *(pytest.param(steps, True, id=f"{steps}-clean") for steps in clean),
        *(pytest.param(steps, False, id=f"{steps}-caught") for steps in caught),
    ]
    return pytest.mark.parametrize(("steps", "clean"), sets)


@pytest.mark.parametrize("whole", [True, False])
def test_a_flagged_word_in_two_pieces_is_caught(whole: bool) -> None:
    @case
    def sent(pe: int, n: int) -> None:
        words, monitor = tdcoll.zeros((2, 2), torch.int64), tdcoll.WaitMonitor()
        torn = torch.zeros(1, dtype=torch.int32)
        tdcoll.barrier()
        protocols.flagged[(1,)](words, 5, monitor.words, torn, whole)
        tdcoll.barrier()
        assert int(torn) == 0, f"{int(torn)} words came torn"

    expect(sent, whole, "words came torn", n_pes=2, seeds=30)


def broadcast(ack: bool, calls: int = 5) -> Case:
    """Broadcasts through two slots in turn, of which every rank reads every byte."""

    @case
    def run(pe: int, n: int) -> None:
        monitor, buffers = tdcoll.WaitMonitor(), tdcoll.zeros((2, 16), torch.uint8)
        arrived, taken = tdcoll.zeros(2, torch.int64), tdcoll.zeros(n, torch.int64)
        tdcoll.barrier()
        for call in range(1, calls + 1):
            slot, wanted = call % 2, segment(0, call, 16)
            if pe == 0:
                buffers[slot] = wanted
            protocols.broadcast[(1,)](
                buffers[slot], arrived[slot:], taken, 16, call, monitor.words, n, ack
            )
            monitor.check()
            assert torch.equal(buffers[slot], wanted), f"call {call}: wrong bytes of rank 0"

    return run


def test_a_broadcast_without_acknowledgement_is_caught_because_stragglers_lag() -> None:
    """Its root waits for its own puts in each call, which must not give the other ranks time to
    read them."""
    wrong = broadcast(ack=False)
    assert first_failure(wrong, n_pes=4, seeds=10) is not None
    caught = sum(
        first_failure(wrong, n_pes=4, seeds=[seed], stragglers=True) is not None
        for seed in range(20)
    )
    assert caught > 10


@seeds(10, 30)
@pytest.mark.parametrize("stragglers", [None, True])
def test_a_broadcast_with_acknowledgement_is_clean(stragglers: bool | None, seeds: range) -> None:
    explore(broadcast(ack=True), n_pes=4, seeds=seeds, stragglers=stragglers)


@pytest.mark.parametrize("get", [False, True])
@controls(
    [
        Steps(notify="release"),
        Steps(notify="signal_block"),
        Steps("copy", notify="signal_block"),
        Steps(order="fence", notify="signal"),
        Steps(order="quiet", notify="signal"),
    ],
    [
        Steps(notify="signal"),
        Steps("copy", notify="signal"),
        Steps(notify="relaxed"),
        Steps(notify="gpu release"),
        Steps(notify="put_signal"),
    ],
)
def test_own_stores_that_peers_read(steps: Steps, clean: bool, get: bool) -> None:
    """A signal, of a call or of a put, says nothing of what its sender has stored to its own
    memory."""

    @case
    def pulled(pe: int, n: int) -> None:
        mine, signals = (tdcoll.zeros((3, k), torch.int64) for k in (9, n))
        monitor = tdcoll.WaitMonitor()
        for call in range(3):
            words = torch.arange(8) + 10 * torch.arange(n)[:, None] + 100 * (call + 1)
            out = torch.zeros(n, 8, dtype=torch.int64)
            given = mine[call], words[pe], out, signals[call], monitor.words, n
            protocols.pull_stored[(1,)](*given, steps, get)
            monitor.check()
            assert torch.equal(out, words), (
                f"call {call}: {out.tolist()} should be {words.tolist()}"
            )

    expect(pulled, clean, "should be", n_pes=3, seeds=6 if clean else 5)


@pytest.mark.parametrize("reply", ["store", "put", "atomic", "signal"])
@controls(
    [
        Steps(notify="release"),
        Steps(order="fence", notify="relaxed"),
        Steps(order="quiet", notify="relaxed"),
        Steps(notify="signal_block"),
    ],
    [
        Steps(notify="relaxed"),
        Steps(notify="gpu release"),
        Steps(notify="signal"),
        Steps(notify="put_signal"),
    ],
)
def test_own_stores_that_land_before_a_peer_is_told(steps: Steps, clean: bool, reply: str) -> None:
    """Nothing orders a store to the own memory before a later message to a peer, nor before what
    the peer writes."""

    @case
    def cleared(pe: int, n: int) -> None:
        box, told, answered = (
            tdcoll.zeros(4, torch.int64, name=name) for name in ("box", "told", "answered")
        )
        monitor = tdcoll.WaitMonitor()
        box[:2] = 3
        tdcoll.barrier()
        protocols.clear_and_notify[(1,)](box, told, answered, monitor.words, steps, reply)
        monitor.check()
        tdcoll.barrier()
        assert pe or box[:2].tolist() == [7, 7], f"{box[:2].tolist()} should be 7, 7"

    expect(cleared, clean, "should be 7, 7", n_pes=2, seeds=15)


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@controls(
    [
        Steps(count="acq_rel", order="fence", notify="signal"),
        Steps(count="acq_rel", order="quiet", notify="signal"),
        Steps(count="acq_rel", notify="release"),
        Steps(count="acq_rel", notify="signal_block"),
    ],
    [Steps(count="relaxed", notify="release"), Steps(count="acq_rel", notify="signal")],
)
def test_a_release_carries_what_other_programs_have_released_to_this_one(
    steps: Steps,
    clean: bool,
    push: bool,
) -> None:
    """Order is cumulative: a release on the GPU, seen by a program that releases to the system."""

    @case
    def told(pe: int, n: int) -> None:
        mine, counter, signals = (tdcoll.zeros(4, torch.int64) for _ in range(3))
        monitor, out = tdcoll.WaitMonitor(), torch.zeros(4, dtype=torch.int64)
        protocols.last_one_notifies[(4,)](mine, counter, signals, out, monitor.words, push, steps)
        monitor.check()
        assert pe == 0 or (out == 7).all(), f"{out.tolist()} should be all 7"

    expect(told, clean, "should be all 7", n_pes=2, seeds=15)


def test_a_word_never_goes_back() -> None:
    """Stores to the own memory come late to other PEs, but one after another; and none after an
    atomic."""
    seen = set()

    @case
    def watched(pe: int, n: int) -> None:
        word, out = tdcoll.zeros(1, torch.int64, name="word"), torch.zeros(16, dtype=torch.int64)
        protocols.count_up_and_watch[(1,)](word, out)
        values = out.tolist()
        assert values == sorted(values), f"saw {values}"
        seen.update(values)

    explore(watched, n_pes=2, seeds=20)
    assert seen == {0, 1, 2, 3, 4, 8}


def test_stores_of_a_launch_are_seen_after_it() -> None:
    """Without a fence: the end of a kernel is one."""

    @case
    def launched(pe: int, n: int) -> None:
        words, out = tdcoll.zeros(8, torch.int64, name="words"), torch.zeros(8, dtype=torch.int64)
        device(lambda words: tl.store(words, 5), words)
        tdcoll.barrier()
        device(lambda words, out: tl.store(out, tl.load(tdl.remote_ptr(words, 1))), words, out)
        assert out[0] == 5

    explore(launched, n_pes=2, seeds=20)
