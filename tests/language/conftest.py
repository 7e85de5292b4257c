# SPDX-License-Identifier: Apache-2.0
"""One process that compiles, for all the tests of what the language and `tdcoll.jit` do there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("compiled_process.py")


@pytest.fixture(scope="session")
def compiled() -> dict[str, Any]:
    """What `compiled_process.py` reports: a process without TRITON_INTERPRET, on a GPU that is not there."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TDCOLL_COMPILER")}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
