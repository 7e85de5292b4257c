# SPDX-License-Identifier: Apache-2.0
"""How ``sanitize.py`` runs its jobs, with a script in place of compute-sanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sanitize

FAKE = f"""#!{sys.executable}
import subprocess, sys
options = sys.argv[1 : sys.argv.index(sys.executable)]
program = sys.argv[len(options) + 1 :]
with open(options[options.index("--log-file") + 1], "w") as log:
    log.write("========= COMPUTE-SANITIZER\\n")
    log.flush()
    status = subprocess.run(program).returncode
    if program[-1] == "control":
        log.write("========= Invalid __global__ write of size 4 bytes\\n=========     at store_out_of_bounds+0x10\\n")
    log.write("========= ERROR SUMMARY: 0 errors\\n")
sys.exit(status)
"""


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compute-sanitizer that runs its program, and sees a fault in the control alone."""
    script = tmp_path / "bin" / "compute-sanitizer"
    script.parent.mkdir()
    script.write_text(FAKE)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``ranks(shell)``: jobs of one rank are this shell script, without torchrun; ``$1`` is the tool, or nothing."""

    def replace(shell: str) -> None:
        def launch(_ranks: int, script: str, *rest: str) -> list[str]:
            tool = rest[rest.index("--tool") + 1] if "--tool" in rest else ""
            if rest[-1] == "control":
                tool = "control"
            log = rest[rest.index("--log-file") + 1].replace("{rank}", "0") if tool else os.devnull
            return ["sh", "-c", shell, "sh", tool, log, script]

        monkeypatch.setattr(sanitize, "launch", launch)
        monkeypatch.setattr(sanitize, "CHECKS", ("language",))

    return replace


CLEAN = 'echo "========= ERROR SUMMARY: 0 errors" > $2'
CONTROL = (
    'if [ "$1" = control ]; then echo "========= Invalid write\n=========     at store_out_of_bounds+0x1" > $2; fi'
)


def test_each_line_is_printed_when_its_tool_ends(ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(f'[ "$1" != memcheck ] || sleep 1.5; {CLEAN}; {CONTROL}')
    assert sanitize.main(["--nproc", "1", "--tools", "memcheck,synccheck"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("language without a tool: ok (")
    assert {line.partition(":")[0] for line in lines[1:3]} == {"synccheck", "control"}
    assert lines[3] == "memcheck: nothing of tdcoll's; nothing of others, in 1 process (2 s)"
    assert len(lines) == 4


def test_no_tool_runs_where_the_run_fails_without_one(ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks('echo "it is wrong"; [ -n "$1" ]')
    assert sanitize.main(["--nproc", "1"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("language without a tool: the job ended with 1 (")
    assert "it is wrong" in out
    assert "memcheck" not in out


def test_what_has_not_ended_by_the_deadline_is_killed(ranks, capsys: pytest.CaptureFixture[str]) -> None:
    hangs = 'echo "at work"; echo "========= seen" > $2; exec sleep 600'
    ranks(f'if [ "$1" = memcheck ]; then {hangs}; fi; {CLEAN}; {CONTROL}')
    assert sanitize.main(["--nproc", "1", "--tools", "memcheck,synccheck", "--deadline", "3"]) == 1
    out = capsys.readouterr().out
    assert "synccheck: nothing of tdcoll's" in out
    late = out[out.index("memcheck: not ended by the deadline; killed (") :]
    assert "at work" in late
    assert "the end of 0.log:\n========= seen" in late


def test_a_tool_watches_the_rank_alone_and_the_kernels_that_are_not_others(tmp_path: Path) -> None:
    memcheck = sanitize.under("memcheck", "compute-sanitizer", tmp_path, 30000, 2, "language")
    assert memcheck[memcheck.index("--target-processes") + 1] == "application-only"
    assert "--kernel-name-exclude" in memcheck
    # A kernel that is left out writes what initcheck then takes for never written.
    initcheck = sanitize.under("initcheck", "compute-sanitizer", tmp_path, 30000, 2, "language")
    assert "--kernel-name-exclude" not in initcheck


def test_a_rank_becomes_the_command_with_its_own_log_and_ports() -> None:
    done = subprocess.run(
        [sys.executable, str(sanitize.HERE / "sanitize.py"), "--become", "30000", "echo", "{rank}.log", "{port}"],
        capture_output=True, text=True, env={**os.environ, "RANK": "3"}, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["3.log", "30030"]


@pytest.mark.slow
def test_whole_on_the_simulator(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert sanitize.main(["--tools", "memcheck", "--deadline", "280"]) == 0, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in sorted(lines)] == sorted([*sanitize.CHECKS, "control:", "memcheck:"])
    assert any(line.startswith("memcheck: nothing of tdcoll's; nothing of others, in 2 processes") for line in lines)
