# SPDX-License-Identifier: Apache-2.0
"""A seeded matrix of faults: see fault_job.py, which runs more of them by hand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fault_job
import pytest

JOB = Path(__file__).with_name("fault_job.py")
SEED, CASES = 0, 20


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_survivor_ends_and_says_who_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, str(JOB), "--seed", str(SEED), "--cases", str(CASES)],
        capture_output=True, text=True, timeout=200, check=False, env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(verdicts) == CASES
    phases, faults, victims, stores = map(set, zip(*(verdict["case"] for verdict in verdicts), strict=True))
    assert (phases, faults) == ({*fault_job.PHASES}, {*fault_job.FAULTS}), "the sample leaves something out"
    assert (victims, stores) == ({0, 1, 2, fault_job.STORE}, {"inside", "outside"}), "the sample leaves something out"
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
