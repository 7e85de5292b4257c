# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests that start the check scripts of ``workers``, because several test files do."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["DISTRIBUTED", "WORKERS", "checks_of", "program_of", "verdicts"]

WORKERS = Path(__file__).with_name("workers")
_PARTS = (
    "_order",
    "",
    "_sparse",
    "_forms",
    "_averages",
    "_works",
    "_observers",
    "_tensors",
    "_groups",
    "_training",
    "_reducer",
)
DISTRIBUTED = " ".join(f"distributed{part}" for part in _PARTS)
"""The scripts of the backend, in the order of their job."""


def program_of(names: str) -> list[str]:
    """Script and arguments of a job that runs the checks of these scripts."""
    if names == DISTRIBUTED:
        return [str(WORKERS / "distributed_job.py")]
    if names == "fsdp":
        return [str(WORKERS / "fsdp_job.py")]
    return [str(WORKERS / "checks_job.py"), names.replace(" ", ",")]


def checks_of(names: str, options: str = r"(?:\(.*\))?") -> list[str]:
    """Names of the checks in these scripts, in order: of all, or of those with these options."""
    text = "\n".join(
        (WORKERS / f"{name}_checks.py").read_text(encoding="utf-8") for name in names.split()
    )
    return re.findall(rf"^@check{options}\ndef (\w+)", text, re.MULTILINE)


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """The JSON line of each check of a job that has ended well."""
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    return {verdict["check"]: verdict for verdict in found}
