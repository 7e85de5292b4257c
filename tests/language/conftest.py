# SPDX-License-Identifier: Apache-2.0
"""One process that compiles, for all the tests of what the language and `tdcoll.jit` do there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import python

PROGRAM = Path(__file__).with_name("compiled_process.py")


@pytest.fixture(scope="session")
def compiled() -> dict[str, Any]:
    """What `compiled_process.py` reports: a process without TRITON_INTERPRET, on a GPU that is not
    there."""
    done = python(str(PROGRAM), without=["TRITON_INTERPRET", "TDCOLL_COMPILER"], timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
