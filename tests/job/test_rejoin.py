# SPDX-License-Identifier: Apache-2.0
"""Joining again after leaving, in jobs of several processes: see rejoin_job.py, which runs on GPUs as well.

Two rounds of each kind; `REJOIN_ROUNDS=50 bash launch.sh tests tests/job/test_rejoin.py` runs more of them.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rejoin_job import LIVES, spawn

JOB = str(Path(__file__).with_name("rejoin_job.py"))
ROUNDS = int(os.environ.get("REJOIN_ROUNDS", "2"))
RANKS = 2
TIMEOUT_S = 120 + 20 * ROUNDS
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def lived(printed: str) -> list[tuple[str, int]]:
    lines = [json.loads(line) for line in printed.splitlines()]
    return [(line["life"], line["rounds"]) for line in lines]


GPU = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")]


@pytest.mark.parametrize(
    "where",
    [pytest.param(["--simulate"], id="simulator", marks=pytest.mark.slow), pytest.param([], id="gpus", marks=GPU)],
)
def test_under_torchrun(launch: Callable[..., subprocess.CompletedProcess[str]], where: list[str]) -> None:
    """Its store outlives all generations."""
    lives = [life for life in LIVES if life != "expired"]  # takes seconds, and needs no store in particular
    done = launch(*where, "--nproc", str(RANKS), JOB, "--rounds", str(ROUNDS), *lives, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lived(done.stdout) == [(life, ROUNDS) for life in lives]


@pytest.mark.slow
def test_without_a_launcher(capfd: pytest.CaptureFixture[str]) -> None:
    """The store is in the process of rank 0, which does not always leave last."""
    status = spawn(RANKS, ["--rounds", str(ROUNDS)])
    printed = capfd.readouterr()
    assert status == 0, printed.out + printed.err
    assert lived(printed.out) == [(life, ROUNDS) for life in LIVES]
