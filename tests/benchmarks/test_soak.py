# SPDX-License-Identifier: Apache-2.0
"""Soak runs: the seed decides the sequence, right results pass, and a wrong one is named by seed,
step and call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exploring import first_failure
from kernel_mutants import Change, installed

import tdcoll
from benchmarks import soak, soak_calls
from benchmarks.registry import load_result
from benchmarks.soak import Soak
from tdcoll import runtime
from tdcoll.base.limits import COLLECTIVES
from tdcoll.testing import World
from tdcoll.tools.measure.results import Row


def options_of(arguments: str) -> SimpleNamespace:
    return Soak.parse(f"--seconds 1000 {arguments}".split())


def soaked(world: World, arguments: str) -> list[Row]:
    options = options_of(arguments)
    return world.run(lambda _: Soak(options).measure(lambda rows: None))[0]


def calls_of(arguments: str) -> list[list[str]]:
    """Return the calls that each of two ranks makes."""
    made: list[list[str]] = [[], []]

    class Listed(Soak):
        def _make(self, call: Any, stream: Any) -> None:
            made[self.ranks.topology.rank].append(call.text)

    options = options_of(arguments)
    World(2).run(lambda _: Listed(options).measure(lambda rows: None))
    return made


def test_the_seed_decides_the_sequence_of_all_ranks() -> None:
    first, other = calls_of("--steps 15 --seed 4")
    assert first == other
    assert len(first) >= 15
    assert first != calls_of("--steps 15 --seed 5")[0]


def test_right_results_pass() -> None:
    rows = soaked(World(2), "--steps 20 --seed 1")
    assert {row.check for row in rows} == {"ok"}
    total, *kinds = rows
    assert total.facts["kind"] == "all"
    assert total.facts["steps"] >= 20
    assert total.facts["eager"] == sum(row.facts["eager"] for row in kinds) >= 20


def test_the_first_wrong_result_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = tdcoll.broadcast

    def spoilt(*args: Any, **more: Any) -> torch.Tensor:
        result = real(*args, **more)
        if runtime.current().rank == 1 and result.numel() > 0:
            result[0] += 1
        return result

    monkeypatch.setattr(tdcoll, "broadcast", spoilt)
    total, *_ = soaked(World(2), "--steps 200 --seed 1")
    assert total.check == "WRONG"
    note = total.note or ""
    assert note.startswith("seed 1, step ")
    assert ": broadcast(" in note
    assert note.endswith(": 1 wrong elements on rank 1")
    assert total.facts["steps"] < 200
    assert f"soak: rank 0: {note}" in capsys.readouterr().err


def test_a_wrong_replay_of_a_graph_that_was_given_up_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first replay of all is wrong, and no eager call is made."""
    spoilt: list[int] = []

    class Replays(Soak):
        def _play_together(self) -> None:
            self._graph_step(self.together[0])

        _play_alone = _play_together

        def _make(self, call: Any, stream: Any) -> None:
            pass

    def count_wrong(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        spoilt.append(len(spoilt))
        return torch.tensor(5 if len(spoilt) == 1 else 0)

    monkeypatch.setattr(soak, "_MOST_GRAPHS", 1)
    monkeypatch.setattr(soak, "PHASES_OF_A_LOOK", 1000)
    monkeypatch.setattr(soak_calls, "count_wrong", count_wrong)
    options = options_of("--steps 12 --seed 1")
    total, *_ = World(1).run(lambda _: Replays(options).measure(lambda rows: None))[0]
    assert len(spoilt) > 12
    assert total.check == "WRONG"
    assert ": replay of " in (total.note or "")
    assert "5 wrong elements" in (total.note or "")


def test_an_error_says_where_it_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any, **more: Any) -> torch.Tensor:
        raise RuntimeError("broken")

    monkeypatch.setattr(tdcoll, "all_to_all", broken)
    with pytest.raises(RuntimeError, match="broken"):
        soaked(World(2), "--steps 200 --seed 1")
    assert "soak: rank 0: seed 1, step " in capsys.readouterr().err


@pytest.mark.slow
def test_a_kernel_with_one_slot_is_found(tmp_path: Path) -> None:
    """The same seeds pass with the shipped kernels."""

    def case(world: World) -> None:
        assert soaked(world, "--steps 60 --seed 2")[0].check == "ok"

    assert first_failure(case, n_pes=2, seeds=2) is None
    with installed([Change("group.slot", "epoch % 2", "epoch * 0")], tmp_path):
        assert first_failure(case, n_pes=2, seeds=2) is not None


@pytest.mark.slow
def test_a_job(launch: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    words = ["-m", "tdcoll", "bench", "soak", "--seconds", "10", "--json", str(file)]
    done = launch("--simulate", "--nproc", "2", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    head, rows = load_result(file)
    assert head["benchmark"] == "soak"
    operations = {row.facts["kind"].split()[0] for row in rows}
    others = {"all_reduce_rms_norm", "sparse_all_reduce", "torch.distributed", "all"}
    assert operations >= {*COLLECTIVES, *others}
    assert rows[0].facts["replayed"] > 0
