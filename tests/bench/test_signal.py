# SPDX-License-Identifier: Apache-2.0
"""Latency of signals: the kernels, what they count, the measuring path, and that a wrong signal shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tdcoll.bench import signal
from tdcoll.bench.rows import SignalRow
from tdcoll.testing import World, explore


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rounds 1", "expected a whole number of at least 2"),
        ("--sends put", "expected some of signal_block, st_release"),
        ("--patterns ring", "expected some of one-way, all-to-all"),
        ("--iterations 1", "expected a whole number of at least 2"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        signal.Signalling.parse(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def simulated(world: World, arguments: str = "--rounds 4") -> list[SignalRow]:
    options = signal.Signalling.parse(arguments.split())
    return world.run(lambda _: signal.Signalling(options).measure(lambda row: None))[0]


def test_counts() -> None:
    rows = simulated(World(4))
    assert {row.check for row in rows} == {"ok"}
    assert [(row.pattern, row.peer_rank, row.rounds, row.algorithm) for row in rows] == [
        *(("one-way", peer, 4, send) for peer in (1, 2, 3) for send in signal.SENDS),
        *(("all-to-all", None, rounds, send) for rounds in (4, 1) for send in signal.SENDS),
    ]
    counts = {(row.peer_rank, row.rounds, row.algorithm): row.counts for row in rows}
    assert counts[2, 4, "signal_block"]["signals"] == [4, 0, 4, 0]
    assert counts[2, 4, "signal_block"]["waits"] == [4, 0, 4, 0]
    assert counts[2, 4, "st_release"]["signals"] == [0] * 4
    assert counts[None, 4, "signal_block"]["signals"] == [12] * 4
    assert counts[None, 1, "st_release"]["waits"] == [1] * 4


def test_stores_stay_inside_a_node() -> None:
    rows = simulated(World(4, ranks_per_node=2), "--rounds 2")
    found = {(row.peer_rank, row.rounds, row.algorithm): row for row in rows}
    assert found[1, 2, "st_release"].check == "ok"
    assert found[1, 2, "st_release"].same_node
    assert not found[2, 2, "signal_block"].same_node
    assert [key for key, row in found.items() if row.check != "ok"] == [
        (peer, rounds, "st_release") for peer, rounds in ((2, 2), (3, 2), (None, 2), (None, 1))
    ]
    assert found[2, 2, "st_release"].note == "needs ranks that can store to each other's memory"
    assert found[3, 2, "signal_block"].check == "ok"


@pytest.mark.slow
def test_with_late_deliveries() -> None:
    """With one row of signals the first seed fails: a signal overtakes the one of the round before."""

    def case(world: World) -> None:
        assert {row.check for row in simulated(world, "--rounds 3")} == {"ok"}

    explore(case, n_pes=3, seeds=6)


def test_a_signal_that_is_not_what_it_should_be_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = signal.Signalling.launch

    def spoilt(self: Any, *launch: Any) -> None:
        real(self, *launch)
        if self.topology.rank == 1:
            self.signals[1, 0] += 1

    monkeypatch.setattr(signal.Signalling, "launch", spoilt)
    row = simulated(World(2), "--rounds 3 --patterns all-to-all --sends st_release")[0]
    assert row.check == "WRONG"
    assert row.note == "rank 1: expected signals of 3, got {0: 4}, counted 3"


@pytest.mark.slow
def test_the_measuring_path(clock: Any, on_gpus: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    real = signal.Signalling.launch

    def timed(self: Any, size: signal.Between, direct: bool) -> None:
        real(self, size, direct)
        if self.takes_part(size):
            clock.passes(2.0 + size.rounds * (3.0 if size.pattern == "one-way" else 1.5))

    monkeypatch.setattr(signal.Signalling, "launch", timed)
    options = signal.Signalling.parse(["--rounds", "2", "--iterations", "2", "--warmup", "1"])
    shown: list[SignalRow] = []
    rows = on_gpus(lambda pe: signal.Signalling(options).measure(shown.append if pe == 0 else lambda row: None), 3)[0]
    assert shown == rows
    assert {row.check for row in rows} == {"ok"}
    assert {row.launch for row in rows} == {"graph"}
    for row in rows:
        if row.pattern == "one-way":
            assert row.median_us == pytest.approx((2 + 2 * 3) / 4)
            assert row.calls == (1, 2)
        else:
            assert row.median_us == pytest.approx(2 / row.rounds + 1.5)
            assert row.calls == ((2, 3) if row.rounds == 1 else (1, 2))
