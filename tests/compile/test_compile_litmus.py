# SPDX-License-Identifier: Apache-2.0
"""The kernels of the litmus tests compile for GPUs, and the checkers of PTX, with its memory model,
agree which of them lacks a barrier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.litmus import TESTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_litmus_kernels_compile_and_only_the_planted_one_lacks_a_barrier() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compiling_litmus.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    forms = []
    for name, test in TESTS.items():
        if test.pattern is None:
            forms.append((name, ""))
        else:
            forms += [(name, form.fault) for form in test.forms]
    found = dict(zip(forms, json.loads(done.stdout), strict=True))
    shipped = found["message-passing", ""]["patterns"]
    missing = found.pop(("message-passing", "no barrier"))
    assert "stores are released without a barrier" in missing["problems"][0]
    assert [form for form, entry in found.items() if entry["problems"]] == []
    assert stale(shipped, shipped) is None
    assert stale(missing["patterns"], shipped) is not None


def stale(sent: dict[str, list[list[str]]], received: dict[str, list[list[str]]]) -> Any:
    """Return an execution in which a signal is seen without its data, by the weakest patterns; None
    if there is none."""
    communication = pytest.importorskip("memory_model.communication")
    writer = communication.weakest(sent["stores released"])[0]
    reader = communication.weakest(received["loads after a wait"])[0]
    return communication.signal_after_data(writer, reader)
