# SPDX-License-Identifier: Apache-2.0
"""Long waits are logged, and ranks that hang say what they wait for: in a job of hang_job.py, which
does hang."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hang_job import FIRST_S, SECOND_S
from processes import python

from tdcoll.base import hang
from tdcoll.base.call_log import CallLog, CallRecord, ranks_text, record_of
from tdcoll.runtime import watch

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("hang_job.py")
MOST_S = 60


class Job:
    """The running job, its folder and what it has printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def printed(self) -> str:
        return (self.folder / "log").read_text()

    def until(self, true: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + MOST_S
        while not true():
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.printed}"
            time.sleep(0.05)

    def begun(self, phase: str) -> None:
        self.until(
            lambda: all((self.folder / f"{rank}.{phase}").exists() for rank in range(2)), phase
        )

    def go_on(self, phase: str) -> None:
        (self.folder / phase).touch()

    def lines(self, text: str) -> list[str]:
        return [
            line for line in self.printed.splitlines() if text in line and line.startswith("rank ")
        ]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    surroundings = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHON": sys.executable
    }
    with (tmp_path / "log").open("w") as file:
        process = subprocess.Popen(
            ["bash", str(ROOT / "launch.sh"), "--simulate", "--nproc", "2", str(JOB), str(tmp_path)],
            stdout=file, stderr=subprocess.STDOUT, env=surroundings, start_new_session=True,
        )  # fmt: skip
    yield Job(tmp_path)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ask(*pids: int) -> subprocess.CompletedProcess[str]:
    """``python -m tdcoll hang``, as people call it."""
    return python("-m", "tdcoll", "hang", *map(str, pids))


def processes(job: Job) -> list[int]:
    """Return the processes of the job's ranks, found by the command: other jobs may run beside this
    one."""
    found = {}
    for pid, rank in re.findall(r"^ *(\d+)  rank (\d)", ask().stdout, re.MULTILINE):
        with contextlib.suppress(psutil.NoSuchProcess):
            if str(job.folder) in psutil.Process(int(pid)).cmdline():
                found[int(rank)] = int(pid)
    assert sorted(found) == [0, 1]
    return [found[0], found[1]]


@pytest.mark.slow
@pytest.mark.timeout(4 * MOST_S)
def test_a_job_that_hangs_says_who_is_missing(job: Job) -> None:
    job.begun("join")
    meeting = r"rank 0 of 2: 'initialize, meeting at \S+:\d+', which ranks 0, 1 make together"
    job.until(lambda: re.search(meeting, ask().stdout), "the rank that joins")
    job.until(lambda: job.lines("'initialize, meeting"), "a line about the meeting")
    job.go_on("join")

    job.begun("make")
    pids = processes(job)
    assert "own handler" not in job.printed
    job.until(lambda: "which ranks 0, 1 make together" in ask(pids[0]).stdout, "the exchange")
    job.until(lambda: job.lines("'arguments of CollectiveContext'"), "a line about the exchange")
    job.go_on("make")

    job.begun("call")
    waits = r"all_reduce, call 3 of group 0, has waited ([\d.]+) s for rank 1"
    job.until(lambda: len(job.lines("call 3 of group 0")) == 2, "both lines")
    lines = job.lines("call 3 of group 0")
    times = [float(re.fullmatch(f"rank 0: {waits}", line)[1]) for line in lines]
    assert FIRST_S <= times[0] < SECOND_S <= times[1]

    table = ask().stdout
    command = re.escape(f"{JOB} {job.folder} ")
    lines_of_ranks = rf" +{pids[0]}  .*\n +{pids[1]}  "
    assert re.search(rf"{command}\(started by process \d+\):\n{lines_of_ranks}", table), table
    listed = {line.split()[0]: line for line in table.splitlines()}
    assert re.search(f"rank 0 of 2: {waits}", listed[str(pids[0])])
    assert re.search(
        r"rank 1 of 2: no wait; main thread: .*hang_job\.py:\d+ in ", listed[str(pids[1])]
    )
    both = ask(*pids)
    assert (both.returncode, both.stderr) == (0, "")
    first, second = both.stdout.split("process ")[1:]
    assert first.startswith(f"{pids[0]}, rank 0 of 2\n")
    assert re.search(
        f"group 0: 3 calls made, the last one all_reduce, up to epoch 3; in epoch 3: {waits}", first
    )
    assert "group 0: 3 calls made, the last one all_reduce, up to epoch 3; no wait" in first, (
        "the other context"
    )
    assert re.search(r"main thread: .*hang_job\.py:\d+ in main", first)
    assert "group 0: 2 calls made, the last one all_reduce, up to epoch 2; no wait" in second
    assert re.search(r"main thread: .*hang_job\.py:\d+ in late", second)

    os.kill(pids[0], signal.SIGUSR1)
    job.until(
        lambda: "rank 0 of 2\n  group 0: " in job.printed, "the report that the signal asks for"
    )
    os.kill(pids[1], signal.SIGUSR1)
    job.until(lambda: "own handler" in job.printed, "the process's own handler")
    assert "rank 1 of 2" not in job.printed
    assert len(job.lines("call 3 of group 0")) == 2, "a line came twice"
    job.go_on("call")

    job.begun("stopped")
    job.until(
        lambda: "rank 1 of 2: all_gather, call 2 of group 0" in ask().stdout,
        "the wait for the stopped rank",
    )
    silent = ask(pids[0])
    assert silent.returncode == 1
    assert silent.stderr == (
        f"process {pids[0]} does not answer: the process is stopped; `kill -CONT {pids[0]}` lets it go on\n"
    )
    os.kill(pids[0], signal.SIGCONT)
    job.until(lambda: job.printed.count("done\n") == 2, "the end")
    told = [
        line
        for line in job.printed.splitlines()
        if "has waited" in line and line.startswith("rank ")
    ]
    assert all(
        line
        in (
            *lines,
            *job.lines("CollectiveContext'"),
            *job.lines("for rank 0"),
            *job.lines("'initialize, meeting"),
        )
        for line in told
    ), told


def test_processes_that_are_no_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hang.main([str(os.getpid())]) == 1
    assert capsys.readouterr() == (
        "",
        f"process {os.getpid()} is no rank that has made a context; `python -m tdcoll hang` lists those that are\n",
    )
    monkeypatch.setattr(hang, "ranks", dict)
    assert hang.main([]) == 1
    assert (
        capsys.readouterr().err
        == "no rank of this user runs on this host, or none has made a context yet\n"
    )


@pytest.mark.parametrize(
    ("timeout_s", "at"),
    [(600, [10, 60]), (60, [10]), (30, [10]), (12, [4]), (0.3, [0.1]), (61, [10, 60])],
)
def test_when_there_is_a_line(timeout_s: float, at: list[float]) -> None:
    assert watch.lines_at(timeout_s) == pytest.approx(at)


def test_ranks_as_text() -> None:
    assert [ranks_text(ranks) for ranks in ([3], [0, 1], [0, 2, 5], [4, 5, 6])] == [
        "rank 3", "ranks 0, 1", "ranks 0, 2, 5", "ranks 4-6",
    ]  # fmt: skip


def calls(*several: CallRecord | str) -> CallLog:
    found = CallLog((0, 1), "7")
    found.log += several
    return found


def test_names_of_calls() -> None:
    of = calls(
        CallRecord("a"),
        CallRecord("b", 3),
        CallRecord("c", 0, 1),
        CallRecord("d"),
        CallRecord("e", 0, 2),
    )
    epochs = [of.name_of(epoch, False) for epoch in range(1, 7)]
    names = ("a, call 1", "b, call 2", "b, call 2", "b, call 2", "d, call 4", "epoch 6")
    assert epochs == [f"{name} of group 7" for name in names]
    lamport = [of.name_of(call, True) for call in range(1, 5)]
    assert lamport == [
        f"{name} of group 7" for name in ("c, call 3", "e, call 5", "e, call 5", "Lamport call 4")
    ]
    assert (
        of.describe() == "group 7: 5 calls made, the last one e, up to epoch 5 and Lamport call 3"
    )
    assert calls().describe() == "group 7: no call made"
    assert CallLog((0, 2), None).describe() == "ranks 0, 2: no call made"


def test_names_that_are_not_known() -> None:
    """The host sees no replays of graphs, and does not count the epochs of some calls: then it
    gives no number."""
    captured = calls(CallRecord("a"), CallRecord("a"))
    captured.exact = False
    assert captured.name_of(2, False) == "a, epoch 2 of group 7"
    captured.log.append(CallRecord("b"))
    assert captured.name_of(2, False) == "epoch 2 of group 7"
    assert calls("s", "s").name_of(2, False) == "s, epoch 2 of group 7"
    assert calls("s", CallRecord("t")).name_of(1, False) == "epoch 1 of group 7"
    assert calls("s", "s").describe() == "group 7: 2 calls made, the last one s"


def test_calls_of_a_kind_are_one_object() -> None:
    assert record_of("a", 2) is record_of("a", 2)
    assert record_of("a", 2) == CallRecord("a", 2, 0, False) != record_of("a", 2, 0, True)


def test_calls_that_take_even_epochs() -> None:
    copies = [CallRecord("by copies", even=True), CallRecord("by copies", 2, even=True)]
    of = calls(CallRecord("a"), copies[0], CallRecord("b"), copies[1], CallRecord("c"))
    names = {
        1: "a, call 1",
        2: "by copies, call 2",
        3: "b, call 3",
        4: "by copies, call 4",
        6: "by copies, call 4",
    }
    assert {epoch: of.name_of(epoch, False) for epoch in names} == {
        k: f"{v} of group 7" for k, v in names.items()
    }
    assert of.name_of(7, False) == "c, call 5 of group 7"
    assert of.describe() == "group 7: 5 calls made, the last one c, up to epoch 7"
    first = calls(CallRecord("by copies", even=True))
    assert first.name_of(2, False) == "by copies, call 1 of group 7"
    assert first.describe().endswith("up to epoch 2")


def test_old_calls_are_forgotten_and_still_counted() -> None:
    of = calls(*(1000 * [CallRecord("a", 2), CallRecord("b", 0, 1), CallRecord("c", even=True)]))
    of.forget_older()
    of.forget_older()
    assert len(of.log) == 750
    assert (
        of.describe()
        == "group 7: 3000 calls made, the last one c, up to epoch 4000 and Lamport call 1000"
    )
    assert of.name_of(3998, False) == "a, call 2998 of group 7"
    assert of.name_of(4000, False) == "c, call 3000 of group 7"
    assert of.name_of(1000, True) == "b, call 2999 of group 7"
    assert of.name_of(1, False) == "epoch 1 of group 7"
    unknown = calls("s", *(3000 * [CallRecord("a")]))
    unknown.forget_older()
    assert unknown.describe() == "group 7: 3001 calls made, the last one a"
    assert unknown.name_of(3000, False) == "a, epoch 3000 of group 7"
