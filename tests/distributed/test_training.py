# SPDX-License-Identifier: Apache-2.0
"""The script that compares training steps on two backends: pairs, turns, and its workloads in the simulator."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "training.py"
_spec = importlib.util.spec_from_file_location("training", SCRIPT)
training: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(training)


def steps(ms: list[float], losses: list[float]) -> dict[str, list[float]]:
    return {"ms": ms, "losses": losses}


def test_pairs_are_compared() -> None:
    row = training.compare(steps([9.0, 20.0, 11.0], [1.0, 2.5]), steps([10.0, 10.0, 10.0], [1.0, 2.0]))
    assert (row["tdcoll_ms"], row["baseline_ms"], row["losses_differ_by"]) == (11.0, 10.0, 0.25)
    assert row["ratio"] == pytest.approx(1.1)
    assert row["ratio_lower_quartile"] == pytest.approx(0.9)
    assert row["ratio_upper_quartile"] == pytest.approx(2.0)


def test_steps_take_turns(one_rank: None) -> None:
    taken: list[str] = []
    ways = {way: lambda way=way: taken.append(way) or torch.tensor(float(len(taken))) for way in ("a", "b", "c")}
    found = training.in_turns(ways, warm_up=1, steps=2)
    assert "".join(taken) == "abccbaabc"
    assert found["a"]["losses"] == [1.0, 6.0, 7.0]
    assert [len(one["ms"]) for one in found.values()] == [2, 2, 2]


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
def test_workloads_have_the_same_losses_on_both_backends(tmp_path: Path, launch: Launch) -> None:
    file = tmp_path / "training.json"
    done = launch("--simulate", "--nproc", "2", str(SCRIPT), "--steps", "2", "--warm-up", "1", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [row["workload"] for row in found["rows"]] == list(training.WORKLOADS)
    for row in found["rows"]:
        assert row["losses_differ_by"] < 1e-5, row
        assert row["losses_repeat"] == {"baseline": True, "tdcoll": True}, row
        assert ("alone_ms" in row) == row["workload"].startswith(("ddp", "dlrm"))
    for kind in ("all_gather", "all_reduce", "reduce_scatter"):  # the hook's calls are its own
        assert f" {kind} by tdcoll" in found["explain"], found["explain"]
