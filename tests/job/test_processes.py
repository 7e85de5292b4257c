# SPDX-License-Identifier: Apache-2.0
"""Joining again after leaving, and a seeded matrix of faults: see rejoin_job.py and fault_job.py.

Two rounds of each life; `REJOIN_ROUNDS=50 bash launch.sh tests tests/job/test_processes.py` runs
more of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import fault_job
import pytest
import torch
from processes import python
from rejoin_job import LIVES, spawn

JOB = str(Path(__file__).with_name("rejoin_job.py"))
ROUNDS = int(os.environ.get("REJOIN_ROUNDS", "2"))
RANKS = 2
TIMEOUT_S = 120 + 20 * ROUNDS
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def lived(printed: str) -> list[tuple[str, int]]:
    lines = [json.loads(line) for line in printed.splitlines()]
    return [(line["life"], line["rounds"]) for line in lines]


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs"),
]


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(["--simulate"], id="simulator", marks=pytest.mark.slow),
        pytest.param([], id="gpus", marks=GPU),
    ],
)
def test_under_torchrun(
    launch: Callable[..., subprocess.CompletedProcess[str]], where: list[str]
) -> None:
    """Its store outlives all generations."""
    # takes seconds, and needs no store in particular
    lives = [life for life in LIVES if life != "expired"]
    done = launch(
        *where, "--nproc", str(RANKS), JOB, "--rounds", str(ROUNDS), *lives, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert lived(done.stdout) == [(life, ROUNDS) for life in lives]


@pytest.mark.slow
def test_without_a_launcher(capfd: pytest.CaptureFixture[str]) -> None:
    """The store is in the process of rank 0, which does not always leave last."""
    status = spawn(RANKS, ["--rounds", str(ROUNDS)])
    printed = capfd.readouterr()
    assert status == 0, printed.out + printed.err
    assert lived(printed.out) == [(life, ROUNDS) for life in LIVES]


FAULTS = Path(__file__).with_name("fault_job.py")
SEED, CASES = 0, 20


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_survivor_ends_and_says_who_is_missing() -> None:
    done = python(str(FAULTS), "--seed", str(SEED), "--cases", str(CASES), timeout=200)
    assert done.returncode == 0, done.stderr
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(verdicts) == CASES
    phases, faults, victims, stores = map(
        set, zip(*(verdict["case"] for verdict in verdicts), strict=True)
    )
    assert (phases, faults) == ({*fault_job.PHASES}, {*fault_job.FAULTS}), (
        "the sample leaves something out"
    )
    assert (victims, stores) == ({0, 1, 2, fault_job.STORE}, {"inside", "outside"}), (
        "the sample leaves something out"
    )
    for verdict in verdicts:
        victim = verdict["case"][2]
        assert verdict["fault"] is not None, verdict
        named = re.compile(rf"(rank\(s\) \[|peer(\(s\))? )([\d, ]*\b){victim}\b|the store")
        assert len(verdict["survivors"]) == fault_job.RANKS - (victim != fault_job.STORE)
        for survivor in verdict["survivors"].values():
            assert "no end" not in survivor, verdict
            assert survivor["ended"] - verdict["fault"] < fault_job.MOST_S, verdict
            assert survivor["told"], verdict
            assert all(named.search(message) for _, message in survivor["told"]), verdict
