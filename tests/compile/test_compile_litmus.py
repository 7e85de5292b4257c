# SPDX-License-Identifier: Apache-2.0
"""The kernels of the litmus tests compile for GPUs, and the checkers of PTX agree which of them
lacks a barrier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
    missing = found.pop(("message-passing", "no barrier"))
    assert "stores are released without a barrier" in missing[0]
    assert [form for form, problems in found.items() if problems] == []
