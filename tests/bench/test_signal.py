# SPDX-License-Identifier: Apache-2.0
"""Latency of signals: the kernels, what they count, the measuring path, and that a wrong signal shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tdcoll.testing import World, explore
from tdcoll.tools.bench.rows import Row
from tdcoll.tools.bench.signal import SENDS, Signalling


def simulated(world: World, arguments: str) -> list[Row]:
    options = Signalling.parse(arguments.split())
    return world.run(lambda _: Signalling(options).measure(lambda rows: None))[0]


def key(row: Row) -> tuple[Any, ...]:
    return row.facts["peer_rank"], row.facts["rounds"], row.algorithm


def test_counts() -> None:
    rows = simulated(World(3), "--rounds 2")
    assert {row.check for row in rows} == {"ok"}
    one_way, all_to_all = (("one-way", peer, 2) for peer in (1, 2)), (("all-to-all", None, n) for n in (2, 1))
    assert [(row.facts["pattern"], *key(row)) for row in rows] == [
        (*pattern, send) for pattern in (*one_way, *all_to_all) for send in SENDS
    ]
    counts = {key(row): row.counts for row in rows}
    assert counts[2, 2, "signal_block"]["signals"] == [2, 0, 2]
    assert counts[2, 2, "signal_block"]["waits"] == [2, 0, 2]
    assert counts[2, 2, "st_release"]["signals"] == [0] * 3
    assert counts[None, 2, "signal_block"]["signals"] == [4] * 3
    assert counts[None, 1, "st_release"]["waits"] == [1] * 3


def test_stores_stay_inside_a_node() -> None:
    found = {key(row): row for row in simulated(World(4, ranks_per_node=2), "--rounds 2")}
    assert found[1, 2, "st_release"].facts["same_node"]
    assert not found[2, 2, "signal_block"].facts["same_node"]
    assert [key for key, row in found.items() if row.check != "ok"] == [
        (peer, rounds, "st_release") for peer, rounds in ((2, 2), (3, 2), (None, 2), (None, 1))
    ]
    assert found[2, 2, "st_release"].note == "needs ranks that can store to each other's memory"


@pytest.mark.slow
def test_with_late_deliveries() -> None:
    """With one row of signals the first seed fails: a signal overtakes the one of the round before."""

    def case(world: World) -> None:
        assert {row.check for row in simulated(world, "--rounds 3")} == {"ok"}

    explore(case, n_pes=3, seeds=6)


def test_a_signal_that_is_not_what_it_should_be_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Signalling.launch

    def spoilt(self: Any, *launch: Any) -> None:
        real(self, *launch)
        if self.topology.rank == 1:
            self.signals[1, 0] += 1

    monkeypatch.setattr(Signalling, "launch", spoilt)
    found = {key(row): row for row in simulated(World(2), "--rounds 3")}
    assert found[None, 3, "st_release"].check == "WRONG"
    assert found[None, 3, "st_release"].note == "rank 1: expected signals of 3, got {0: 4}, counted 3"


@pytest.mark.slow
def test_the_measuring_path(clock: Any, measured: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    real = Signalling.launch

    def timed(self: Any, ranks: Sequence[int], rounds: int, direct: bool, all_to_all: bool) -> None:
        real(self, ranks, rounds, direct, all_to_all)
        if self.topology.rank in ranks:
            clock.passes(2.0 + rounds * (1.5 if all_to_all else 3.0))

    monkeypatch.setattr(Signalling, "launch", timed)
    rows = measured(Signalling, "--rounds 2 --iterations 2", 3)
    assert {(row.check, row.launch) for row in rows} == {("ok", "graph")}
    for row in rows:
        rounds = row.facts["rounds"]
        one_way = row.facts["pattern"] == "one-way"
        assert row.median_us == pytest.approx((2 + 2 * 3) / 4 if one_way else 2 / rounds + 1.5)
        assert row.calls == ((2, 3) if rounds == 1 else (1, 2))
