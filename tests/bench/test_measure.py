# SPDX-License-Identifier: Apache-2.0
"""The commands of tests/gpu/measure.sh, which are given to machines with GPUs, are ones that there are."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tdcoll.__main__ import main
from tdcoll.bench import case, sparse_all_reduce, tune

SCRIPT = Path(__file__).parents[1] / "gpu" / "measure.sh"
STAGES = re.findall(r"^    (\S+)\)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)


def lines(folder: Path, stage: str, nproc: int) -> list[list[str]]:
    command = ["bash", str(SCRIPT), "--nproc", str(nproc), "--dry-run", str(folder), stage]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [shlex.split(line.replace("not shared", "'not shared'")) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("stage", [stage for stage in STAGES if not stage.startswith(("-", "*"))])
def test_a_stage_has_commands_that_can_be_given(stage: str, tmp_path: Path, monkeypatch: Any) -> None:
    parsed: list[argparse.Namespace] = []

    def run(kind: Any, arguments: list[str], given: Any = None) -> int:
        parsed.append(given or kind.parse(arguments))
        return 0

    monkeypatch.setattr(case, "run", run)
    for module in (tune, sparse_all_reduce):
        monkeypatch.setattr(module, "INTERPRETED", False)
    commands = lines(tmp_path, stage, 8)
    assert commands
    for command in commands:
        scripts = [word for word in command if word.endswith((".py", ".sh"))]
        assert all((SCRIPT.parents[2] / script).is_file() for script in scripts), command
        if "tdcoll" in command:
            assert main(command[command.index("tdcoll") + 1 :]) == 0
    assert len(parsed) == sum("tdcoll" in command for command in commands)
    files = [getattr(given, "json", None) or given.output for given in parsed]
    assert len(set(files)) == len(files)
    assert all(Path(file).parent == tmp_path for file in files)


@pytest.mark.parametrize(
    "wrong", [["--nprocs", "2"], ["--dry-run", "FOLDER"], ["--dry-run", "--nproc", "2", "FOLDER", "gather"]]
)
def test_a_wrong_command_line_says_what_is_right(wrong: list[str], tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), *(word.replace("FOLDER", str(tmp_path)) for word in wrong)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "[--nproc N] [--limit SECONDS] [--dry-run] FOLDER STAGE..." in done.stderr
