# SPDX-License-Identifier: Apache-2.0
"""The advice of an installed package names ``tdcoll run``: it has no launch.sh and no setenv.sh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def said(package: Path, *words: str) -> str:
    """What a command of the package in a folder prints, on a machine without GPUs."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TDCOLL_", "TRITON_"))}
    variables = {**inherited, "PYTHONPATH": str(package), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tdcoll", *words]
    done = subprocess.run(command, cwd=package, env=variables, capture_output=True, text=True, timeout=200)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "tdcoll", folder / "tdcoll", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bench", "--help"], "  python -m tdcoll run -m tdcoll bench all_gather --json"),
        (["tune", "--help"], "python -m tdcoll run [--nproc N] -m tdcoll tune"),
        (["report", "--help"], "  python -m tdcoll run -m tdcoll bench"),
        (["doctor", "--help"], "without torchrun\nand tdcoll run."),
        (["doctor", "--no-run"], ": tdcoll run runs kernels in the simulator"),
    ],
    ids=["bench", "tune", "report", "help", "doctor"],
)
def test_advice(installed: Path, words: list[str], expected: str) -> None:
    text = said(installed, *words)
    assert expected in text
    assert "launch.sh" not in text
    assert "setenv.sh" not in text
