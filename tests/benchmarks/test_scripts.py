# SPDX-License-Identifier: Apache-2.0
"""Scripts of benchmarks/ for machines with GPUs.

The commands of measure.py exist, and its jobs end; backend_calls.py names its columns after thread
blocks.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from benchmarks import (
    all_reduce_rms_norm,
    backend_calls,
    backend_timing,
    measure,
    signals,
    sparse_all_reduce,
    start_up,
    training,
)
from tdcoll import runtime
from tdcoll.__main__ import main
from tdcoll.testing import World
from tdcoll.tools.tune import command as tune

ROOT = Path(__file__).resolve().parents[2]

COMMANDS: dict[str, click.Command] = {
    "benchmarks/backend_calls.py": backend_calls.main,
    "benchmarks/start_up.py": start_up.main,
    "benchmarks/training.py": training.main,
}


def run_measure(*arguments: str) -> int:
    """Run measure.py; return its exit status."""
    with pytest.raises(SystemExit) as ended:
        measure.main(list(arguments), prog_name="measure.py")
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("nproc", [1, 2, 3, 8])
def test_commands_of_benchmarks_can_be_parsed(
    nproc: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[Any] = []

    def run(benchmark: Any, arguments: list[str]) -> int:
        parsed.append(benchmark.parse(arguments))
        return 0

    monkeypatch.setattr("tdcoll.tools.measure.benchmark.run", run)
    monkeypatch.setattr(tune, "run", run)
    for module in (tune, sparse_all_reduce, all_reduce_rms_norm, signals):
        monkeypatch.setattr(module, "INTERPRETED", False)
    files = set()
    for jobs in measure.stages(nproc).values():
        for job in jobs:
            words = job.command(tmp_path / f"{job.name}.json")
            if "tdcoll" not in words:
                continue
            assert main(words[words.index("tdcoll") + 1 :]) == 0
            options = parsed[-1]
            files.add(getattr(options, "json", None) or options.output)
    assert len(parsed) == len(files) == 28
    assert {Path(file).parent for file in files} == {tmp_path}


def script_of(job: measure.Job) -> str:
    return next(word for word in job.words if word.endswith(".py") or word in ("-m", "tests"))


def test_scripts_have_the_options_that_they_are_given(tmp_path: Path) -> None:
    seen = set()
    for jobs in measure.stages(2).values():
        for job in jobs:
            script = script_of(job)
            if script in COMMANDS:
                words = job.command(tmp_path / "a.json")
                COMMANDS[script].make_context(script, words[words.index(script) + 1 :])
                seen.add(script)
            elif script == "-m":
                assert job.words[-2] in ("--json", "-o")
            elif script == "tests/sanitizer/sanitize.py":
                declared = re.findall(r'"(--[\w-]+)"', (ROOT / script).read_text(encoding="utf-8"))
                given = [word for word in job.words if word.startswith("--")]
                assert set(given) <= set(declared)
                seen.add(script)
            else:
                assert script == "tests" or (ROOT / script).is_file()
    assert seen == {
        "benchmarks/backend_calls.py",
        "benchmarks/training.py",
        "tests/sanitizer/sanitize.py",
    }


@pytest.mark.parametrize("script", [*COMMANDS, "benchmarks/measure.py"])
def test_help_has_the_commands_on_lines_of_their_own(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = COMMANDS.get(script, measure.main)
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"], prog_name=script)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    source = (ROOT / script).read_text(encoding="utf-8")
    commands = re.findall(
        rf"^ +((?:bash|python|job=).*{script}.*)$", source.split('"""')[1], re.MULTILINE
    )
    assert commands
    assert set(commands) <= set(lines)


def test_heaps_differ_only_in_the_heap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_measure("--nproc", "2", "--dry-run", str(tmp_path), "heaps", "tests") == 0
    *lines, tests = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert tests[4:6] == ["-k", "not shared"]
    assert [line[0] for line in lines] == ["TDCOLL_HEAP=nvshmem", "TDCOLL_HEAP=torch"] * 6
    for one, other in zip(lines[::2], lines[1::2], strict=True):
        assert one[1:-1] == other[1:-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FOLDER", "gather"], "'gather' is not one of 'tests', "),
        (
            ["--nproc", "2", "FOLDER", "tune"],
            "--nproc: expected at least 1 and at most the 0 GPUs of this host; got 2",
        ),
        (["FOLDER", "tune"], "the 0 GPUs of this host; got 0"),
        (["--dry-run", "--nproc", "0", "FOLDER", "tune"], "got 0"),
        (["--limit", "soon", "FOLDER", "tune"], "--limit"),
    ],
)
def test_a_wrong_command_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(measure, "_gpus", lambda: iter(()))
    folder = tmp_path / "made"
    words = [str(folder) if word == "FOLDER" else word for word in arguments]
    assert run_measure(*words) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


@pytest.fixture
def _handlers() -> Iterator[None]:
    """Keep signal handlers as they were, but at first as in a shell's background job."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


WRITES_WHEN_INTERRUPTED = """
import sys, time
try: time.sleep(60)
except KeyboardInterrupt: open(sys.argv[1], 'w').write('rows')
"""

# subprocess.run would kill its child after 0.25 s.
STARTS_ANOTHER = """
import subprocess, sys
job = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]])
try: job.wait()
except KeyboardInterrupt: job.wait()
"""


@pytest.mark.usefixtures("_handlers")
def test_a_job_that_takes_too_long_ends_with_all_it_has_started(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """It may write what it has; the next job runs, and the exit status tells."""
    long = [sys.executable, "-c", STARTS_ANOTHER, WRITES_WHEN_INTERRUPTED, "FILE"]
    failing = ["sh", "-c", "echo $TDCOLL_HEAP; exit 3"]
    jobs = {
        "tests": [measure.Job("long", long)],
        "calls": [measure.Job("calls", failing, {"TDCOLL_HEAP": "torch"})],
        "tune": [measure.Job("tune", ["true"])],
    }
    monkeypatch.setattr(measure, "stages", lambda nproc: jobs)
    monkeypatch.setattr(measure, "_gpus", lambda: iter(["NVIDIA H200"]))
    folder = str(tmp_path)
    assert run_measure("--limit", "5", folder, "tests") == 1
    assert (tmp_path / "long-1xH200.json").read_text() == "rows"
    assert run_measure(folder, "tune", "calls", "tune") == 1
    assert run_measure(folder, "tune") == 0
    assert (tmp_path / "calls-1xH200.log").read_text() == "torch\n"
    printed = capsys.readouterr().out
    assert re.match(r"long-1xH200: status 124, \d+ s\n", printed)
    assert "calls-1xH200: status 3" in printed


def test_shares_are_of_what_a_group_handles() -> None:
    def row(us: float, *handled: str) -> dict[str, Any]:
        return {"us": {"nccl": [10.0, 20.0, 90.0], "group 1": [us]}, "handled": handled}

    rows = [row(9.0, "group 1"), row(16.0, "group 1"), row(20.5)]
    assert list(backend_calls.shares(rows)) == [
        "group 1: handles 2 of 3 rows, at most 0.80 of NCCL's time; the others at most 1.02"
    ]


class FakeClock:
    """Returns the number of elements of a call's result instead of its time."""

    def host_us(self, call: Any) -> float:
        return float(call().numel())

    def call_us(self, call: Any) -> float:
        return float(call().shape[0])

    def slowest(self, us: float) -> float:
        return us


@pytest.mark.slow
def test_every_own_call_is_made(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    dist = SimpleNamespace(get_world_size=lambda: 2, get_rank=lambda: runtime.current().rank)
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None, seconds=0.0)
    for module in (backend_calls, backend_timing):
        monkeypatch.setattr(module, "dist", dist)
    monkeypatch.setattr(backend_timing, "ROUNDS", 1)
    monkeypatch.setattr(backend_calls, "TimedEvent", lambda real: event)
    clock: Any = FakeClock()
    row, _ = World(2).run(lambda pe: backend_calls.own_row(clock))
    assert row == {
        "kind": "own calls",
        "nbytes": 4096,
        "us": {
            "all_gather": [2048.0],
            "all_gather_": [2048.0],
            "reduce_scatter": [1024.0],
            "all_reduce": [1024.0],
            "all_reduce_": [1024.0],
            "all_reduce_ symmetric": [1024.0],
            "sparse_all_reduce of 1,000 rows": [1e5],
        },
    }
    assert capsys.readouterr().out.count("own calls") == 1


@pytest.mark.parametrize("name", ["calls-2xH200", "groups-2xH200"])
def test_the_page_has_the_table_of_its_file(name: str) -> None:
    file = json.loads((ROOT / f"docs/results/host/{name}.json").read_text())
    page = (ROOT / "docs/tables.md").read_text(encoding="utf-8")
    assert backend_calls.table(file) in page
