# SPDX-License-Identifier: Apache-2.0
"""Litmus tests: shipped patterns show no weak outcome, planted faults do in the simulator, and a
weak outcome of a shipped pattern is an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiers import slow_tier

from benchmarks import tables
from benchmarks.litmus import PLANTED, RELIED, TESTS, Litmus
from benchmarks.registry import load_result
from tdcoll.testing import World
from tdcoll.tools.measure.results import Row

SEEN_IN_THE_SIMULATOR = {
    ("flagged-words", "two 64-bit words"),
    ("lamport-words", "one part polled"),
    ("message-passing", "relaxed release"),
    ("put-with-signal", "signal ahead"),
}
"""Planted faults that the simulator's weak memory shows. To it, a block is one thread, an acquire
isn't needed to see data that was released, and copies of one rank end in order."""


def rows_of(world: World, arguments: str) -> list[Row]:
    options = Litmus.parse(arguments.split())
    return world.run(lambda _: Litmus(options).measure(lambda rows: None))[0]


def seen(rows: list[Row]) -> set[tuple[str, str]]:
    return {(row.facts["test"], row.algorithm) for row in rows if row.facts["weak"] > 0}


@pytest.mark.parametrize("ranks", [2, slow_tier(1), slow_tier(4)])
def test_every_form_is_played_or_says_why_not(ranks: int) -> None:
    rows = rows_of(World(ranks), "--rounds 2")
    assert [row.algorithm for row in rows] == [
        form.name for test in TESTS.values() for form in test.forms
    ]
    assert {row.check for row in rows if row.facts["group"] == RELIED} == {"ok", "not run"}
    left_out = {row.facts["test"] for row in rows if row.check == "not run"}
    without = {"copy-stamp", "store-buffering", "two-signals"}
    assert left_out == (without | {"put-with-signal"} if ranks == 1 else without)
    played = {row.facts["test"]: row.facts for row in rows if row.check == "ok"}
    assert played["message-passing"]["instances"] == 2 * 8 * 2  # rounds, lanes, directions
    assert played["handing-on"]["sides_on"] == {1: "one GPU", 2: "2 ranks", 4: "3 ranks"}[ranks]


def test_a_fault_is_seen_and_in_a_shipped_pattern_it_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped, planted = TESTS["flagged-words"].forms
    forms = (shipped, planted, planted._replace(group=RELIED))
    monkeypatch.setitem(TESTS, "flagged-words", replace(TESTS["flagged-words"], forms=forms))
    rows = rows_of(World(2, seed=1), "--rounds 3 --tests flagged-words")
    assert [row.check for row in rows] == ["ok", "ok", "WRONG"]
    assert [row.facts["weak"] > 0 for row in rows] == [False, True, True]
    assert rows[1].note == "seen"
    assert "weak outcomes, the first in round 1" in (rows[2].note or "")


@pytest.mark.slow
def test_planted_faults_are_seen_under_late_delivery_and_nothing_else() -> None:
    found: set[tuple[str, str]] = set()
    names = ",".join(name for name in TESTS if name != "copy-stamp")
    for seed in (0, 2):
        rows = rows_of(World(4, weak=True, seed=seed), f"--rounds 6 --tests {names}")
        assert all(row.check != "WRONG" for row in rows)
        found |= seen(rows)
    allowed = {("store-buffering", "relaxed")}
    assert found - allowed == SEEN_IN_THE_SIMULATOR
    planted = {
        (name, form.name)
        for name, test in TESTS.items()
        for form in test.forms
        if form.group == PLANTED
    }
    assert planted > SEEN_IN_THE_SIMULATOR


@pytest.mark.slow
def test_the_command_writes_a_file(launch: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "litmus.json"
    words = ["-m", "tdcoll", "bench", "litmus", "--tests", "message-passing", "--rounds", "2"]
    done = launch("--simulate", "--nproc", "2", *words, "--seconds", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    head, rows = load_result(file)
    assert head["benchmark"] == "litmus"
    assert head["provenance"]["simulated"] is True
    assert len(rows) == len(TESTS["message-passing"].forms)
    assert all(row.facts["rounds"] >= 4 for row in rows), "a second launch within a second"
    assert json.loads(file.read_text())["rows"][0]["group"] == RELIED


def test_a_report_of_litmus_tests_has_no_times_to_show() -> None:
    rows = rows_of(World(1), "--rounds 1 --tests handing-on")
    for row in rows:
        row.launch = "eager"
    with pytest.raises(ValueError, match="expected rows with times, got those of litmus"):
        tables.markdown({"benchmark": "litmus"}, rows)
