# SPDX-License-Identifier: Apache-2.0
"""Triton's pipeliner leaves loads behind the waits that they follow, and pipelines loops that wait by token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tdcoll.spec.functions import FUNCTIONS

DRIVER = Path(__file__).with_name("pipelined_loops.py")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(DRIVER)], capture_output=True, text=True, env=environment, timeout=280)
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_loads_stay_behind_their_waits(report: dict[str, Any]) -> None:
    assert report["problems"] == []
    checked = {tuple(what) for what in report["checked"]}
    assert {
        (wait, form, arch, num_stages)
        for wait in ("plain", "token")
        for arch in (80, 90)
        for num_stages in (1, 2, 3, 4)
        for form in ("load", "descriptor", "stream")
        if form != "stream" or num_stages > 1
    } <= checked
    assert {(name,) for name, function in FUNCTIONS.items() if function.acquires} <= checked


def test_loops_without_the_protection_are_found(report: dict[str, Any]) -> None:
    assert len(report["controls"]) == 12
    for name, problem in report["controls"].items():
        assert problem is not None, name
        assert problem.startswith("TTGIR has ['async', 'for'"), "a load ahead of the loop, before any wait"
