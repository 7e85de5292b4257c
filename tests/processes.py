# SPDX-License-Identifier: Apache-2.0
"""Processes that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

__all__ = ["python"]


def python(
    *words: str, without: Collection[str] = (), timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python where the package is, with more environment variables, and ``without`` some of
    them."""
    environment = {
        name: value for name, value in os.environ.items() if name not in without
    } | variables
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True, text=True, timeout=timeout, check=False, env=environment, cwd=Path(__file__).parents[1],
    )  # fmt: skip
