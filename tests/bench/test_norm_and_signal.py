# SPDX-License-Identifier: Apache-2.0
"""Latency of signals, and all-reduce + residual + RMSNorm: what is run and counted, and that a wrong result shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tdcoll.testing import World, explore
from tdcoll.tools.bench import all_reduce_rms_norm as bench
from tdcoll.tools.bench.rows import Row
from tdcoll.tools.bench.signal import SENDS, Signalling


def simulated(world: World, arguments: str) -> list[Row]:
    options = Signalling.parse(arguments.split())
    return world.run(lambda _: Signalling(options).measure(lambda rows: None))[0]


def key(row: Row) -> tuple[Any, ...]:
    return row.facts["peer_rank"], row.algorithm


def test_counts() -> None:
    rows = simulated(World(3), "--rounds 2")
    assert {row.check for row in rows} == {"ok"}
    assert [key(row) for row in rows] == [(peer, send) for peer in (1, 2) for send in SENDS]
    counts = {key(row): row.counts for row in rows}
    assert counts[2, "signal_block"]["signals"] == [2, 0, 2]
    assert counts[2, "signal_block"]["waits"] == [2, 0, 2]
    assert counts[2, "st_release"]["signals"] == [0] * 3


def test_stores_stay_inside_a_node() -> None:
    found = {key(row): row for row in simulated(World(4, ranks_per_node=2), "--rounds 2")}
    assert found[1, "st_release"].facts["same_node"]
    assert not found[2, "signal_block"].facts["same_node"]
    assert [key for key, row in found.items() if row.check != "ok"] == [(2, "st_release"), (3, "st_release")]
    assert found[2, "st_release"].note == "needs ranks that can store to each other's memory"


@pytest.mark.slow
def test_with_late_deliveries() -> None:
    def case(world: World) -> None:
        assert {row.check for row in simulated(world, "--rounds 3")} == {"ok"}

    explore(case, n_pes=3, seeds=6)


def test_a_signal_that_is_not_what_it_should_be_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Signalling.launch

    def spoilt(self: Any, *launch: Any) -> None:
        real(self, *launch)
        if self.topology.rank == 1:
            self.signals[0] += 1

    monkeypatch.setattr(Signalling, "launch", spoilt)
    found = {key(row): row for row in simulated(World(2), "--rounds 3")}
    assert found[1, "st_release"].check == "WRONG"
    assert found[1, "st_release"].note == "rank 1: expected signals of 3, got 4, counted 3"


@pytest.mark.slow
def test_the_measuring_path(clock: Any, measured: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    real = Signalling.launch

    def timed(self: Any, peer: int, direct: bool) -> None:
        real(self, peer, direct)
        if self.topology.rank in (0, peer):
            clock.passes(2.0 + 2 * 3.0)

    monkeypatch.setattr(Signalling, "launch", timed)
    rows = measured(Signalling, "--rounds 2 --iterations 2", 3)
    assert {(row.check, row.launch, row.calls, row.median_us) for row in rows} == {("ok", "graph", (1, 2), 2.0)}


COMMON = "--algorithms auto,composed --peers tdcoll-torch,nccl"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_everything_is_checked_and_peers_say_why_not(dtype: str, rows_of: Callable[..., list[Any]]) -> None:
    rows = rows_of(bench.AllReduceNorm, f"{COMMON} --dtype {dtype}", 2, heap_bytes=1 << 24)
    ours = ("tdcoll auto", "tdcoll composed", "tdcoll-torch")
    assert {(row.facts["rows"], row.label): row.check for row in rows} == {
        **{(rows, label): "ok" for rows in (1, 3) for label in ours},
        **{(rows, "nccl"): "not run" for rows in (1, 3)},
    }
    assert {row.note for row in rows if row.check == "not run"} == {"needs GPUs"}
    assert rows[0].facts == {"rows": 1, "hidden": 64, "dtype": dtype, "took": "one_shot"}
    assert "took" not in rows[1].facts


@pytest.mark.parametrize("mistake", ["the residual", "a rank", "the weight"])
def test_a_wrong_result_is_seen(mistake: str, monkeypatch: Any, rows_of: Any) -> None:
    real = bench.all_reduce_rms_norm

    def careless(x: Any, residual: Any, weight: Any, **named: Any) -> Any:
        out, new = real(x, residual, weight, **named)
        new[-1, 5] += mistake == "the residual"
        out[-1, 5] *= 1.1 if mistake == "the weight" else 1
        return bench._norm(x, residual, weight) if mistake == "a rank" else (out, new)

    monkeypatch.setattr(bench, "all_reduce_rms_norm", careless)
    rows = rows_of(bench.AllReduceNorm, "--rows 2 --algorithms auto", 2, heap_bytes=1 << 24)
    assert [row.check for row in rows] == ["WRONG"]
