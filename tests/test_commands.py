# SPDX-License-Identifier: Apache-2.0
"""The command line: one program, light to start, whose every command helps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import tdcoll
from benchmarks.registry import SUBJECTS
from tdcoll.__main__ import main

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m tdcoll`` where nothing is installed: neither torch nor triton nor numpy can be
    imported."""
    command = [sys.executable, "-S", "-m", "tdcoll", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize(
    "command",
    [["--help"], ["-h"], ["run", "--help"], ["doctor", "--help"], ["bench", "--help"]],
    ids=" ".join,
)
def test_help_has_an_example_and_needs_nothing(command: list[str]) -> None:
    done = run(*command)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
    assert "example:\n" in done.stdout
    assert "-m tdcoll " in done.stdout.split("example:\n")[1]


@pytest.mark.parametrize("command", [["bench", "all_reduce"], ["tune"]], ids=" ".join)
def test_what_is_missing_is_said_in_a_line(command: list[str]) -> None:
    done = run(*command)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"tdcoll {command[0]}: needs torch, which {sys.executable} lacks; `source setenv.sh`"
    )


def test_a_missing_package_of_an_extra_names_the_extra() -> None:
    done = run("report", "--help")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"tdcoll report: needs click, which {sys.executable} lacks; the extra 'bench' has it: "
    )
    assert line.endswith("pip install -e '.[bench]' in the checkout")


@pytest.mark.parametrize("command", ["report", "tune", *(f"bench {name}" for name in SUBJECTS)])
def test_commands_with_options_have_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    name = command.split()[-1]
    assert re.search(
        rf"example:\s+bash launch.sh .*-m tdcoll\s+.*{name}", capsys.readouterr().out, re.S
    )


def test_a_folder_of_the_same_name_elsewhere_is_not_imported(tmp_path: Path) -> None:
    """Other projects have benchmarks, too, and the current folder comes first in Python's path."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text(
        "raise SystemExit('imported another project')"
    )
    command = [sys.executable, "-m", "tdcoll", "bench", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "all_gather" in done.stdout


def run_without_a_reader(*command: str) -> tuple[int, str]:
    """The exit status and stderr of a Python program whose output nothing reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    # with it, the first print fails, and without it the flush in the end
    environment.pop("PYTHONUNBUFFERED", None)
    try:
        words = [sys.executable, "-m", *command]
        done = subprocess.run(
            words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, env=environment
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "command",
    [["tdcoll", "--version"], ["tdcoll", "doctor", "--help"], ["tdcoll", "report", "--help"]],
    ids=" ".join,
)
def test_a_reader_that_goes_ends_a_command_quietly(command: list[str]) -> None:
    status, said = run_without_a_reader(*command)
    assert said == ""
    assert status in ((0, 141) if len(command) == 3 else (141,))  # argparse ignores it by itself


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"tdcoll {tdcoll.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected run, doctor, hang, bench, tune, report or --help, got nothing"),
        (["docter"], "expected run, doctor, hang, bench, tune, report or --help, got docter"),
        (["bench"], "expected all_gather, "),
        (["bench", "all_scatter"], "got all_scatter"),
    ],
)
def test_a_wrong_command_line_is_exit_status_2(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_the_console_script_is_the_same_program() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^\[project.scripts\]\ntdcoll = "([\w.]+):(\w+)"\n\n', text, re.M)
    assert found is not None
    assert getattr(import_module(found[1]), found[2]) is main
