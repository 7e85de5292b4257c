# SPDX-License-Identifier: Apache-2.0
"""The benchmark of signals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.signals import SENDS, SignalBenchmark
from tdcoll.testing import World, explore
from tdcoll.tools.measure.results import Row


def simulated(world: World, arguments: str) -> dict[tuple[int, str], Row]:
    """Return the rows by the other rank and the way to send."""
    options = SignalBenchmark.parse(arguments.split())
    rows = world.run(lambda _: SignalBenchmark(options).measure(lambda rows: None))[0]
    return {(row.facts["peer_rank"], row.algorithm): row for row in rows}


def test_signals_between_all_pairs() -> None:
    rows = simulated(World(3), "--rounds 2")
    assert {row.check for row in rows.values()} == {"ok"}
    assert list(rows) == [(peer, send) for peer in (1, 2) for send in SENDS]


def test_stores_stay_inside_a_node() -> None:
    rows = simulated(World(4, ranks_per_node=2), "--rounds 2")
    assert rows[1, "st_release"].facts["same_node"]
    assert not rows[2, "signal_block"].facts["same_node"]
    failed = [key for key, row in rows.items() if row.check != "ok"]
    assert failed == [(2, "st_release"), (3, "st_release")]
    note = "needs ranks that can store to each other's memory"
    assert rows[2, "st_release"].note == note


@pytest.mark.slow
def test_with_late_deliveries() -> None:
    def case(world: World) -> None:
        assert {row.check for row in simulated(world, "--rounds 3").values()} == {"ok"}

    explore(case, n_pes=3, seeds=6)


def test_a_signal_that_is_not_what_it_should_be_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SignalBenchmark.launch

    def spoilt(self: SignalBenchmark, peer: int, stores: bool) -> None:
        real(self, peer, stores)
        if self.ranks.topology.rank == 1:
            self.signals[0] += 1

    monkeypatch.setattr(SignalBenchmark, "launch", spoilt)
    row = simulated(World(2), "--rounds 3")[1, "st_release"]
    assert row.check == "WRONG"
    assert row.note == "rank 1: expected signals of 3, got 4, counted 3"


@pytest.mark.slow
def test_the_measuring_path(
    clock: Any, measured: Callable[..., list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SignalBenchmark.launch

    def timed(self: SignalBenchmark, peer: int, stores: bool) -> None:
        real(self, peer, stores)
        if self.ranks.topology.rank in (0, peer):
            clock.passes(8.0)

    monkeypatch.setattr(SignalBenchmark, "launch", timed)
    rows = measured(SignalBenchmark, "--rounds 2 --iterations 2", 3)
    # 2 rounds, there and back
    assert {(row.check, row.launch, row.median_us) for row in rows} == {("ok", "graph", 2.0)}
    assert {row.calls for row in rows} == {(1, 2)}
