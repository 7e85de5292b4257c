# SPDX-License-Identifier: Apache-2.0
"""WaitMonitor: deadlines of waits in kernels, and the record of the first that expired."""

from __future__ import annotations

import contextlib
import io
import operator

import pytest
import torch
import triton.language as tl
from ranks import on_ranks

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.base.call_log import CallLog
from tdcoll.job import last_words
from tdcoll.runtime import watch
from tdcoll.testing import Deadlock, World


@tdcoll.jit
def wait_once(signals, monitor, ok, at, value, peer, index, COMPARE: tl.constexpr):
    tl.store(ok, tdl.wait_signal(signals + at, COMPARE, value, monitor, peer, index))


@tdcoll.jit
def wait_for_all(signals, monitor, ok, count, skip, value, BLOCK: tl.constexpr):
    tl.store(ok, tdl.wait_signals(signals, count, skip, tdl.CMP_GE, value, monitor, BLOCK))


@tdcoll.jit
def first_in_barrier(counter, monitor, ok):
    if tl.program_id(0) == 0:
        tl.store(ok, tdl.grid_barrier(counter, monitor))


alone = on_ranks(1, on_timeout="expire")


def words() -> tuple[torch.Tensor, torch.Tensor]:
    """Signals, and a word for what a kernel says."""
    signals = tdcoll.zeros(8, torch.int64)
    signals.copy_(torch.tensor([5, 9, 9, 2, 9, 0, 9, 9]))
    return signals, torch.full((1,), 7, dtype=torch.int32)


def caught(monitor: tdcoll.WaitMonitor) -> tdcoll.CollectiveTimeout:
    with pytest.raises(tdcoll.CollectiveTimeout) as raised:
        monitor.check()
    return raised.value


def fields(error: tdcoll.CollectiveTimeout) -> tuple[float, ...]:
    return (
        error.rank,
        error.peer,
        error.signal,
        error.epoch,
        error.expected,
        error.seen,
        error.timeout_s,
    )


COMPARISONS = {
    tdl.CMP_EQ: operator.eq, tdl.CMP_NE: operator.ne, tdl.CMP_GT: operator.gt, tdl.CMP_LE: operator.le,
    tdl.CMP_LT: operator.lt, tdl.CMP_GE: operator.ge,
}  # fmt: skip


@pytest.mark.parametrize("value", [4, 5, 6])
@pytest.mark.parametrize("compare", COMPARISONS)
@alone
def test_comparisons(pe: int, compare: tl.constexpr, value: int) -> None:
    signals, ok = words()
    monitor, satisfied = tdcoll.WaitMonitor(), COMPARISONS[compare](5, value)
    wait_once[(1,)](signals, monitor.words, ok, 0, value, 0, 0, compare)
    assert int(ok) == int(satisfied)
    assert monitor.expired is not satisfied


@alone
def test_record_of_a_single_wait(pe: int) -> None:
    signals, ok = words()
    monitor = tdcoll.WaitMonitor(timeout_s=1.5, rank=6)
    wait_once[(1,)](signals, monitor.words, ok, 3, 11, 4, 17, tdl.CMP_GE)
    assert int(ok) == 0
    assert monitor.expired
    error = caught(monitor)
    assert fields(error) == (6, 4, 17, 11, 11, 2, 1.5)
    assert str(error).startswith(
        "rank 6 waited 1.5 s for peer 4: signal 17 had to reach 11 and is 2. The peer has died"
    )
    assert " timeout " in str(error)
    assert runtime.current().failed


@alone
def test_record_of_a_wait_for_many_names_the_first_that_is_missing(pe: int) -> None:
    signals, ok = words()
    monitor = tdcoll.WaitMonitor()
    wait_for_all[(1,)](signals, monitor.words, ok, 8, 0, 9, 8)  # 0 is too low as well, and skipped
    assert int(ok) == 0
    assert fields(caught(monitor)) == (0, 3, 3, 9, 9, 2, 30.0)


@pytest.mark.parametrize(
    ("count", "skip", "satisfied"), [(3, 0, 1), (3, -1, 0), (5, 0, 0), (0, -1, 1), (1, 0, 1)]
)
@alone
def test_wait_for_many_looks_at_count_and_skip(
    pe: int, count: int, skip: int, satisfied: int
) -> None:
    signals, ok = words()
    monitor = tdcoll.WaitMonitor()
    wait_for_all[(1,)](signals, monitor.words, ok, count, skip, 9, 8)
    assert int(ok) == satisfied


@tdcoll.jit
def wait_for_a_column(signals, monitor, ok, count, value, peer, index, stride, BLOCK: tl.constexpr):
    tl.store(
        ok,
        tdl.wait_signals(
            signals, count, -1, tdl.CMP_GE, value, monitor, BLOCK, peer, index, stride
        ),
    )


@pytest.mark.parametrize(
    ("begin", "count", "value", "missing"),
    [
        (0, 4, 5, None),  # 5, 9, 9, 9
        (0, 4, 6, (10, 5)),
        (1, 1, 6, None),  # 9, 2, 0, 9
        (1, 4, 6, (11, 2)),
    ],
)
@alone
def test_wait_for_a_column_of_signals_of_one_peer(
    pe: int, begin: int, count: int, value: int, missing: tuple[int, int] | None
) -> None:
    signals, ok = words()
    monitor = tdcoll.WaitMonitor()
    wait_for_a_column[(1,)](signals[begin:], monitor.words, ok, count, value, 4, 10, 2, 4)
    assert int(ok) == (missing is None)
    if missing is not None:
        index, seen = missing
        assert fields(caught(monitor)) == (0, 4, index, value, value, seen, 30.0)


def test_second_wait_returns_immediately_and_keeps_the_first_record() -> None:
    world = World(1, on_timeout="expire")

    def host(pe: int) -> None:
        signals, ok = tdcoll.zeros(8, torch.int64), torch.zeros(1, dtype=torch.int32)
        signals[0] = 5
        monitor = tdcoll.WaitMonitor()
        wait_once[(1,)](signals, monitor.words, ok, 5, 1, 2, 2, tdl.CMP_GE)
        first = caught(monitor)
        steps = world.scheduler.steps
        for at, value in ((3, 77), (5, 1)):
            ok.fill_(7)
            wait_once[(1,)](signals, monitor.words, ok, at, value, 1, 1, tdl.CMP_GE)
            assert int(ok) == 0
        assert world.scheduler.steps - steps < 20, (
            "a wait after an expired one must not wait for its own deadline"
        )
        assert fields(caught(monitor)) == fields(first)

        other = tdcoll.WaitMonitor()  # what has expired is the monitor, not the job's waits
        wait_once[(1,)](signals, other.words, ok, 0, 5, 1, 1, tdl.CMP_GE)
        assert int(ok) == 1
        other.check()

    world.run(host)


@alone
def test_an_expired_wait_has_left_a_notice_of_each_missing_peer(pe: int) -> None:
    signals, ok = words()
    monitor = tdcoll.WaitMonitor()
    assert list(monitor.waits()) == []
    signals[:3] = torch.tensor([2, 5, 3])
    wait_for_all[(1,)](signals, monitor.words, ok, 3, 7, 4, 4)
    assert int(ok) == 0
    waits = [(wait.peer, wait.epoch, wait.lamport) for wait in monitor.waits()]
    assert waits == [(0, 4, False), (2, 4, False)]
    assert all(
        wait.waited_s == pytest.approx(monitor.timeout_s, abs=0.01) for wait in monitor.waits()
    )
    error = caught(monitor)
    assert (error.peer, error.others) == (0, (2,))
    assert "and is 2. It was also waiting for peer 2. The peer has died" in str(error)


@alone
def test_an_error_that_nobody_raises_is_printed_at_exit_and_found_by_check(pe: int) -> None:
    signals, ok = words()
    tdcoll.check()
    kept = [tdcoll.WaitMonitor() for _ in range(2)]
    wait_once[(1,)](signals, kept[1], ok, 0, 99, 3, 0, tdl.CMP_GE)
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        last_words._report()
        last_words._report()  # it has been told
    assert (
        told.getvalue().count(
            "nothing has raised this error: CollectiveTimeout: rank 0 waited 30 s for peer 3"
        )
        == 1
    )
    with pytest.raises(tdcoll.CollectiveTimeout, match="for peer 3: signal 0 had to reach 99"):
        tdcoll.check()


@alone
def test_a_peer_that_has_given_up_is_named_without_an_epoch(pe: int) -> None:
    signals, ok = words()
    monitor = tdcoll.WaitMonitor()
    signals[0] = tdl.EXPIRED.value + 3
    wait_once[(1,)](signals, monitor, ok, 0, tdl.EXPIRED.value, 1, 0, tdl.CMP_LT)
    assert int(ok) == 0
    waits = list(monitor.waits())
    assert [(wait.peer, wait.epoch, wait.lamport) for wait in waits] == [(1, None, False)]
    assert watch._described(monitor, waits) == "a kernel has waited 30 s: rank 1 has given up"
    monitor.calls = CallLog((4, 6), "7")
    assert (
        watch._described(monitor, waits)
        == "a kernel of group 7 has waited 30 s: rank 6 has given up"
    )
    assert caught(monitor).epoch == 3


@alone
def test_a_report_has_no_epoch_of_a_kernel_without_a_context(pe: int) -> None:
    signals, ok = words()
    monitor, asked = tdcoll.WaitMonitor(), object.__new__(watch._Watch)
    wait_once[(1,)](signals, monitor, ok, 0, 3 << 20, 1, 0, tdl.CMP_GE)
    asked.job = monitor.job
    what = f"a kernel has waited 30 s for rank 1, whose signal has to reach {3 << 20}"
    assert asked._report()["lines"][:2] == [what, "a wait has expired"]


@alone
def test_a_barrier_of_a_grid_is_named_without_an_epoch(pe: int) -> None:
    monitor, (_, ok) = tdcoll.WaitMonitor(rank=5), words()
    first_in_barrier[(2,)](torch.zeros(1, dtype=torch.int64), monitor, ok)
    assert int(ok) == 0
    waits = list(monitor.waits())
    assert [(wait.peer, wait.epoch) for wait in waits] == [(None, None)]
    assert watch._described(monitor, waits) == "a kernel has waited 30 s in a barrier of its grid"
    error = caught(monitor)
    assert fields(error) == (5, 5, None, None, None, None, 30.0)
    assert str(error).startswith(
        "rank 5 waited 30 s in grid_barrier for other thread blocks of its launch: they don't"
    )


@alone
def test_a_wait_that_ends_in_time_leaves_no_notice(pe: int) -> None:
    signals, ok = words()
    monitor = tdcoll.WaitMonitor()
    signals[0] = 4
    wait_once[(1,)](signals, monitor.words, ok, 0, 4, 1, 0, tdl.CMP_GE)
    assert int(ok) == 1
    assert list(monitor.waits()) == []


def test_a_notice_without_a_successor_is_of_a_wait_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("tdcoll.calls.monitor.time.monotonic", lambda: now[0])

    def host(pe: int) -> None:
        monitor = tdcoll.WaitMonitor()

        def leave(place: int, waited: int, peer: int) -> None:
            at = tdl.RECORD_NOTICES.value + 2 * place
            monitor._host[at : at + 2] = waited + (peer << 32), 7

        def peers() -> list[int | None]:
            return [wait.peer for wait in monitor.waits()]

        leave(1, 64, 1)
        assert list(monitor.waits()) == [(1, 7, False, pytest.approx(64 * 2**21 / 1e9))]
        now[0] += 0.5
        leave(3, 64, 19)
        leave(15 + 16, 64, -1)
        assert peers() == [1, 19, None]
        now[0] += 0.5
        assert peers() == [19, None], "that of rank 1 is a second old"
        leave(1, 128, 17)
        assert peers() == [17, 19, None], "another wait took the place"

    World(1).run(host)


@on_ranks(2, timeout_s=12.5)
def test_defaults(pe: int) -> None:
    monitor = tdcoll.WaitMonitor()
    assert monitor.timeout_s == 12.5
    words = monitor.words.tolist()
    assert words[tdl.MONITOR_TIMEOUT_NS.value] == 12_500_000_000
    assert words[tdl.MONITOR_RANK.value] == pe
    assert words[tdl.MONITOR_ABORTED.value] == 0
    assert monitor.words.dtype is torch.int64
    assert len(words) == tdl.MONITOR_WORDS.value
    with tdcoll.CollectiveContext([1, 0], max_bytes_per_rank=16, timeout_s=3) as ctx:
        assert ctx.monitor.timeout_s == 3.0
        assert ctx.monitor.words[tdl.MONITOR_RANK.value] == 1 - pe  # the group rank


def test_text_of_the_error_where_the_peer_had_given_up() -> None:
    error = tdcoll.CollectiveTimeout(rank=2, peer=1, epoch=8, timeout_s=30.0)
    assert str(error).startswith(
        "rank 2 waited 30 s for peer 1, which had itself given up in epoch 8"
    )
    assert " timeout " in str(error)


@tdcoll.jit
def wait_untold(signals, monitor, came):
    tl.store(came, tdl.wait_signal(signals, tdl.CMP_GE, 3, monitor))
    tl.store(came + 1, tdl.wait_word(signals + 1, tdl.CMP_GE, 3, monitor))
    token = tdl.wait_token(signals + 1, tdl.CMP_GE, 3, monitor=monitor)
    tl.store(came + 2, token)


@on_ranks(1, on_timeout="expire")
def test_a_kernel_takes_the_monitor_itself_and_waits_need_not_be_told(pe: int) -> None:
    signals, came = tdcoll.zeros(2, torch.int64), torch.full((3,), -1, dtype=torch.int32)
    for by_name in (False, True):
        monitor = tdcoll.WaitMonitor(timeout_s=1)
        signals[0] = 3
        if by_name:
            wait_untold[(1,)](signals, came=came, monitor=monitor)
        else:
            wait_untold[(1,)](signals, monitor, came)
        assert came.tolist() == [1, 0, 0]
        text = f"^rank {pe} waited 1 s for a peer: a signal had to reach 3 and is 0. "
        with pytest.raises(tdcoll.CollectiveTimeout, match=text) as raised:
            monitor.check()
        assert (raised.value.peer, raised.value.signal, raised.value.expected) == (None, None, 3)


def test_a_report_does_not_name_a_peer_that_was_not_told() -> None:
    def host(pe: int) -> None:
        signals, came = (
            tdcoll.zeros(2, torch.int64, name="flags"),
            torch.zeros(3, dtype=torch.int32),
        )
        wait_untold[(1,)](signals, tdcoll.WaitMonitor(), came)

    line = wait_untold.fn.__code__.co_firstlineno + 2
    with pytest.raises(
        Deadlock, match=rf"waits for pe0\.flags\[0\] >= 3, is 0 \([^;]*test_monitor\.py:{line}\)"
    ):
        World(1).run(host)
