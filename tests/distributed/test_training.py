# SPDX-License-Identifier: Apache-2.0
"""The script that compares training steps on two backends: its verdicts, and its workloads on the simulator."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "training.py"
_spec = importlib.util.spec_from_file_location("training", SCRIPT)
training: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(training)


def runs(medians: list[float], losses: list[list[float]]) -> list[dict[str, Any]]:
    return [
        {"workloads": {"x": {"median_ms": median, "losses": loss}}}
        for median, loss in zip(medians, losses, strict=True)
    ]


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [([9.0, 9.1, 9.2], "faster"), ([9.9, 10.1, 10.0], "level"), ([10.4, 11, 12], "level"), ([10.6, 11, 12], "slower")],
)
def test_verdicts(ours: list[float], verdict: str) -> None:
    row = training.compare("x", runs([10.5, 9.5, 10.0], 3 * [[1.0, 2.0]]), runs(ours, 3 * [[1.0, 2.0]]))
    assert row["verdict"] == verdict
    assert row["ratio"] == pytest.approx(sorted(ours)[1] / 10.0)
    assert (row["losses_differ_by"], row["tdcoll"]["losses_repeat"]) == (0.0, True)


def test_losses_that_differ_are_told() -> None:
    row = training.compare("x", runs([1, 1], 2 * [[1.0, 2.0]]), runs([1, 1], [[1.0, 2.5], [1.0, 2.0]]))
    assert row["losses_differ_by"] == 0.25
    assert not row["tdcoll"]["losses_repeat"]
    assert row["baseline"]["losses_repeat"]


@pytest.mark.slow
def test_workloads_have_the_same_losses_on_both_backends(tmp_path: Path) -> None:
    names = [name for name in training.WORKLOADS if "1024" not in name]
    file = tmp_path / "training.json"
    command = [sys.executable, str(SCRIPT), "--repeats", "2", "--steps", "2", "--warm-up", "1", "--json", str(file)]
    done = subprocess.run(
        [*command, "--small", "--workloads", ",".join(names)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [row["workload"] for row in found["rows"]] == names
    for row in found["rows"]:
        assert row["tdcoll"]["losses_repeat"], row
        assert row["losses_differ_by"] < 1e-5, row
    ours = next(run for run in found["runs"] if run["backend"] == "tdcoll")["explain"]
    for kind in ("all_gather", "all_reduce", "reduce_scatter", "sparse_all_reduce"):
        assert f" {kind} by tdcoll" in ours, ours
