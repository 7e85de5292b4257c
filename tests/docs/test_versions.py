# SPDX-License-Identifier: Apache-2.0
"""Bounds and tested versions are the same everywhere, and the page's tables are those of the
results."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tdcoll.base import versions
from tdcoll.base.versions import TESTED_NVSHMEM, TESTED_TORCH, TESTED_TRITON, text_of

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("versions_page", ROOT / "docs" / "versions.py")
page: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(page)

PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
RESULTS = json.loads((ROOT / "docs" / "results" / "versions.json").read_text())


def minor(version: str) -> str:
    """``"3.7.1"`` -> ``"3.7"``."""
    return text_of(versions.version_of(version))


def test_tables_are_of_the_results() -> None:
    assert page.written(PAGE, RESULTS) == PAGE, "run python docs/versions.py"


def test_every_tested_pair_has_its_row() -> None:
    pairs = [(row["torch"], row["triton"]) for row in RESULTS.values()]
    assert sorted(pairs) == sorted(zip(TESTED_TORCH, TESTED_TRITON, strict=True))
    assert all(
        "tests" in row for row in RESULTS.values() if row["torch"] in (TESTED_TORCH[-1], "2.13.0")
    )


def test_every_run_that_failed_is_named() -> None:
    runs = [
        run
        for row in RESULTS.values()
        for run in (row.get("tests"), *row.get("compile", {}).values())
        if run
    ]
    assert runs
    for run in runs:
        assert run["passed"] > 50
        assert len(run["failures"]) >= run.get("failed", 0) + run.get("error", 0)


def test_what_the_package_asks_for() -> None:
    torch, oldest, below = (
        text_of(v) for v in (versions.OLDEST_TORCH, versions.OLDEST_TRITON, versions.TRITON_BELOW)
    )
    dependencies = re.search(r"^dependencies = \[\n(.*?)^\]", PYPROJECT, re.M | re.S)
    assert dependencies
    assert re.findall(r'"(.*)"', dependencies[1]) == [
        f"torch>={torch}",
        f"triton>={oldest},<{below}",
        "numpy",
    ]
    extras = dict(re.findall(r"^(cu12|cu13|compile) = \[(.*)\]", PYPROJECT, re.M))
    assert extras == {
        "cu12": '"nvshmem4py-cu12", "nvidia-nvshmem-cu12"',
        "cu13": '"nvshmem4py-cu13", "nvidia-nvshmem-cu13"',
        "compile": '"nvidia-nvshmem-cu13"',
    }
    assert 'requires-python = ">=3.10"' in PYPROJECT


def test_what_pages_say() -> None:
    torch, oldest, below = (
        text_of(v) for v in (versions.OLDEST_TORCH, versions.OLDEST_TRITON, versions.TRITON_BELOW)
    )
    bounds = f"PyTorch {torch} or newer, Triton from {oldest} to below {below}"
    for name in ("docs/versions.md", "docs/limits.md"):
        assert bounds in " ".join((ROOT / name).read_text(encoding="utf-8").split()), name
    for line in (
        f"| PyTorch {torch} or newer |",
        f"| Triton {oldest} or newer |",
        f"| Triton below {below} |",
    ):
        assert line in PAGE
    last = (ROOT / "README.md").read_text(encoding="utf-8").strip().rpartition("\n\n")[2]
    tested = f"PyTorch {minor(TESTED_TORCH[0])} to {minor(TESTED_TORCH[-1])} and Triton {minor(TESTED_TRITON[0])} to"
    assert (
        f"tested](docs/versions.md) with {tested} {minor(TESTED_TRITON[-1])}, on Linux; it needs Python 3.10"
        in last
    )


def test_what_is_installed_by_itself() -> None:
    """Pairs of the table: without a GPU, with the newest NVSHMEM, and on GPUs."""
    pinned = dict(
        re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints-cpu.txt").read_text(), re.M)
    )
    assert (pinned["torch"], pinned["triton"]) in zip(TESTED_TORCH, TESTED_TRITON, strict=True)
    assert pinned["nvidia-nvshmem-cu13"] == TESTED_NVSHMEM[-1]
    first, _ = versions.INSTALLED_ON_GPUS
    match = re.match(r"torch==(\d+\.\d+)\.\*;", first)
    assert match
    assert match[1] in map(minor, TESTED_TORCH)
    assert f"`launch.sh` installs PyTorch {match[1]} on a machine with GPUs" in PAGE


# ---------------------------------------------------------------------- the page's parts

PASSED = {"passed": 1234, "failures": [], "registers and spilled bytes": {"put, sm_90": [128, 20]}}
FAILED = {
    "passed": 7,
    "failed": 1,
    "failures": ["tests/a.py::test"],
    "registers and spilled bytes": {},
}
MADE = {
    "torch-2.13": {
        "torch": "2.13.0", "triton": "3.7.1", "resolve": {"nvidia-nvshmem-cu13": "3.4.5"}, "tests": PASSED,
        "compile": {"3.8.0": PASSED}, "arithmetic": {"sum 1": {"add.f32": 7}}, "commits": {"tests": "abc"},
    },
    "torch-2.15": {
        "torch": "2.15.0", "triton": "3.9.0", "resolve": {"error": "ResolutionImpossible"}, "tests": FAILED,
        "arithmetic": {"sum 1": {"add.f32": 7}}, "commits": {"tests": "def"},
    },
}  # fmt: skip


def test_a_row_says_what_was_run_and_what_failed() -> None:
    rows = page.rows_of(MADE)
    assert "| 2.13.0 | 3.7.1 | 3.4.5 | 1,234 passed | 1,234 passed |" in rows
    assert "| 2.15.0 | 3.9.0 | ResolutionImpossible | 7 passed, 1 failed | not run |" in rows
    assert page.failures_of(MADE) == "- torch-2.15, first tier: `tests/a.py::test`\n"
    assert page.failures_of({"torch-2.13": MADE["torch-2.13"]}) == "No test failed.\n"
    assert page.kernels_of(MADE).splitlines()[-1] == "| put | 128, 20 |"
    assert page.commits_of(MADE) == "Run at abc, def.\n"


def test_arithmetic_that_differs_is_listed() -> None:
    assert page.arithmetic_of(MADE) == "All 1 kernels agree in Triton 3.7.1, 3.9.0.\n"
    other = {**MADE, "torch-2.15": {**MADE["torch-2.15"], "arithmetic": {"sum 1": {"fma.f32": 7}}}}
    assert (
        "- sum 1: {'add.f32': 7} with Triton 3.7.1, {'fma.f32': 7} with 3.9.0"
        in page.arithmetic_of(other)
    )


@pytest.mark.parametrize("broken", ["<!-- rows -->", "<!-- /kernels -->"])
def test_a_page_without_a_mark_is_refused(broken: str) -> None:
    with pytest.raises(ValueError, match=r"docs/versions\.md has 0 parts"):
        page.written(PAGE.replace(broken, ""), MADE)


def test_the_script_lists_its_rows_and_refuses_others() -> None:
    script = [sys.executable, str(ROOT / "tests" / "versions" / "matrix.py")]
    listed = subprocess.run(
        [*script, "--list"], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert [line.partition(":")[0] for line in listed.splitlines()] == [
        f"torch-{minor(torch)}" for torch in TESTED_TORCH
    ]
    for wrong in (["--only", "torch-1.0"], ["--steps", "everything"], ["--nvshmem", "2.0"]):
        ended = subprocess.run(
            [*script, *wrong], capture_output=True, text=True, check=False, timeout=120
        )
        assert ended.returncode == 2
        assert wrong[1] in ended.stderr
