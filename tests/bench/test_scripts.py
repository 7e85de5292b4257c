# SPDX-License-Identifier: Apache-2.0
"""benchmarks/, for machines with GPUs: the commands of measure.py exist, and its jobs end; backend_calls.py makes its
calls, and names its columns after the thread blocks that the launches had."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tdcoll import runtime
from tdcoll.__main__ import main
from tdcoll.distributed.handlers import Dense
from tdcoll.testing import World
from tdcoll.tools.bench import case, sparse_all_reduce, tune

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
measure: Any = importlib.import_module("measure")
backend_calls: Any = importlib.import_module("backend_calls")


def options_of(script: str) -> set[str]:
    """Return the options that a script declares."""
    return set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', (ROOT / script).read_text(encoding="utf-8")))


@pytest.mark.parametrize("nproc", [1, 2, 3, 8])
def test_benchmarks_can_be_given(nproc: int, tmp_path: Path, monkeypatch: Any) -> None:
    parsed: list[argparse.Namespace] = []

    def run(kind: Any, arguments: list[str]) -> int:
        parsed.append(kind.parse(arguments))
        return 0

    monkeypatch.setattr(case, "run", run)
    for module in (tune, sparse_all_reduce):
        monkeypatch.setattr(module, "INTERPRETED", False)
    files = set()
    for jobs in measure.stages(nproc).values():
        for job in jobs:
            command = job.command(tmp_path / f"{job.name}.json")
            if "tdcoll" in command:
                assert main(command[command.index("tdcoll") + 1 :]) == 0
                files.add(getattr(parsed[-1], "json", None) or parsed[-1].output)
    assert len(parsed) == len(files) == 22
    assert all(Path(file).parent == tmp_path for file in files)


def test_scripts_have_the_options_that_they_are_given() -> None:
    seen = set()
    for jobs in measure.stages(2).values():
        for job in jobs:
            script = next(word for word in job.words if word.endswith(".py") or word == "-m" or word == "tests")
            if script.startswith(("benchmarks/", "tests/")):
                given = {word for word in job.words[job.words.index(script) :] if word.startswith("--")}
                assert given <= options_of(script), script
                seen.add(script)
            elif script == "-m":
                assert job.words[-2:-1] in (["--json"], ["-o"])
            else:
                assert script == "tests" or (ROOT / script).is_file()
    assert seen == {"benchmarks/backend_calls.py", "benchmarks/training.py", "tests/sanitizer/sanitize.py"}


def test_heaps_differ_in_the_heap_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main(["--nproc", "2", "--dry-run", str(tmp_path), "heaps", "tests"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert lines.pop()[4:6] == ["-k", "not shared"]
    assert [line[0] for line in lines] == ["TDCOLL_HEAP=nvshmem", "TDCOLL_HEAP=torch"] * 6
    assert all(one[1:-1] == other[1:-1] for one, other in zip(lines[::2], lines[1::2], strict=True))


def test_a_wrong_command_line(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure, "_gpus", lambda: iter(()))
    for wrong, said in (
        (["FOLDER", "gather"], "invalid choice: 'gather'"),
        (["--nproc", "2", "FOLDER", "tune"], "--nproc: expected at least 1 and at most the 0 GPUs of this host; got 2"),
        (["FOLDER", "tune"], "the 0 GPUs of this host; got 0"),
        (["--dry-run", "--nproc", "0", "FOLDER", "tune"], "got 0"),
        (["--limit", "soon", "FOLDER", "tune"], "--limit"),
    ):
        with pytest.raises(SystemExit, match="2"):
            measure.main([word.replace("FOLDER", str(tmp_path / "made")) for word in wrong])
        assert said in capsys.readouterr().err
        assert not (tmp_path / "made").exists()


@pytest.fixture
def _handlers() -> Iterator[None]:
    """Signal handlers as they were, but at first as in a shell's background job."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
def test_a_job_that_takes_too_long_ends_with_all_it_has_started(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """It may write what it has; the next job runs, and the exit status tells."""
    writes = "import sys, time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: open(sys.argv[1], 'w').write('rows')"
    starts = "import subprocess, sys\njob = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]])\n"
    starts += "try: job.wait()\nexcept KeyboardInterrupt: job.wait()"  # subprocess.run would kill it after 0.25 s
    jobs = {
        "tests": [measure.Job("long", [sys.executable, "-c", starts, writes, "FILE"])],
        "calls": [measure.Job("calls", ["sh", "-c", "echo $TDCOLL_HEAP; exit 3"], {"TDCOLL_HEAP": "torch"})],
        "tune": [measure.Job("tune", ["true"])],
    }
    monkeypatch.setattr(measure, "stages", lambda nproc: jobs)
    monkeypatch.setattr(measure, "_gpus", lambda: iter(["NVIDIA H200"]))
    assert measure.main(["--limit", "5", str(tmp_path), "tests"]) == 1
    assert (tmp_path / "long-1xH200.json").read_text() == "rows"
    assert measure.main([str(tmp_path), "tune", "calls", "tune"]) == 1
    assert measure.main([str(tmp_path), "tune"]) == 0
    assert (tmp_path / "calls-1xH200.log").read_text() == "torch\n"
    said = capsys.readouterr().out
    assert re.sub(r"\d+ s$", "s", said, flags=re.MULTILINE).split("\n")[0] == "long-1xH200: status 124, s"
    assert "calls-1xH200: status 3" in said


@pytest.mark.parametrize(("granted", "name"), [(30, "tdcoll 30 (of 64)"), (None, "tdcoll none (of 64)")])
def test_columns_are_named_after_the_granted_blocks(granted: int | None, name: str) -> None:
    """Those of the kind that was called; a group that serves nothing has a column too."""
    contexts = granted and SimpleNamespace(max_bytes_per_rank=1 << 20, max_blocks=granted), None
    kinds = [SimpleNamespace(pool=SimpleNamespace(context=context), limit=4096, _most=4096) for context in contexts]
    said = [
        f"  {kind}: tdcoll; {Dense.describe(of)}" for kind, of in zip(("all_gather", "all_reduce"), kinds, strict=True)
    ]
    assert backend_calls.column(64, "\n".join(said)) == name


def test_every_own_call_is_made(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    dist = SimpleNamespace(get_world_size=lambda: 2, get_rank=lambda: runtime.current().rank)
    monkeypatch.setattr(backend_calls, "dist", dist)
    monkeypatch.setattr(backend_calls, "ROUNDS", 1)
    monkeypatch.setattr(backend_calls, "host_us", lambda call, asynchronous: float(call().numel()))
    row, _ = World(2).run(lambda pe: backend_calls.own_row())
    gathered = {"all_gather": [2048.0], "all_gather_": [2048.0], "reduce_scatter": [1024.0]}
    reduced = {name: [1024.0] for name in ("all_reduce", "all_reduce_", "all_reduce_ symmetric")}
    assert row == {"kind": "own calls", "nbytes": 4096, "us": gathered | reduced}
    assert capsys.readouterr().out.count("own calls") == 1


def test_the_page_has_the_table_of_its_file() -> None:
    rows = json.loads((ROOT / "docs/results/host/calls-4xH200.json").read_text())["host"]
    assert backend_calls.table(rows) in (ROOT / "docs/tables.md").read_text()
