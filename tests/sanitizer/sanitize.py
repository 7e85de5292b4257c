# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over a short mixed run of tdcoll on GPUs.

    python tests/sanitizer/sanitize.py [--nproc N] [--tools memcheck,racecheck,synccheck,initcheck] [--deadline S]

First the run goes without a tool: this compiles its kernels, and what is wrong anyhow is no tool's finding. Then the
tools run beside each other, each with a job of its own, over the ranks alone: no launcher and no compiler is watched. A
control runs as well: a kernel that stores out of bounds, which memcheck must report. Each prints a line when it ends,
which says what was reported and whose it is (``reports.py``). Under it follows what is tdcoll's. What has not ended by
the deadline is killed, and the end of its logs is printed. Exit status: 0 if nothing is tdcoll's; 1 if something is, or
if a job failed or did not end; 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from reports import parse

HERE = Path(__file__).resolve().parent
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TOOLKIT = "/usr/local/cuda/bin"
CHECKS = ("dense", "sparse_all_reduces", "language")
CONTROL = "store_out_of_bounds"
DEADLINE_S = 150.0
TIMEOUT_S = 60
"""Deadline of waits in kernels: each rank runs many times slower, and takes turns at its GPU with other jobs."""
PORTS, FIRST_PORT = 10, 30000
"""Ports per watched process, and the first of all; below the range from which Linux gives ports to clients."""


@dataclass(frozen=True)
class Verdict:
    """What came of one tool.

    Attributes:
        line: the summary.
        details: what is to be read if it is not ok.
    """

    ok: bool
    line: str
    details: str = ""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'es' if number != 1 else ''}"


def heap_of(log: Path) -> range:
    """The addresses of a rank's symmetric heap, which ``mixed_calls.py`` has written beside its log."""
    file = log.with_suffix(".heap")
    if not file.exists():
        return range(0)
    base, nbytes = map(int, file.read_text().split())
    return range(base, base + nbytes)


def judge(tool: str, folder: Path, ranks: int, status: int, output: str = "") -> Verdict:
    """The verdict on a job of so many ranks, by the logs in ``folder``, one for each process."""
    runs = [parse(file.read_text(errors="replace"), heap_of(file)) for file in sorted(folder.glob("*.log"))]
    watched = sum(run.watched for run in runs)
    reports = [report for run in runs for report in run.reports]
    ours = [report.text for report in reports if report.owner == "tdcoll"]
    owners = Counter(report.owner for report in reports if report.owner != "tdcoll")
    theirs = ", ".join(f"{number} of {owner}'s" for owner, number in sorted(owners.items()))
    if status:
        return Verdict(False, f"{tool}: the job ended with {status}", "\n\n".join([*ours[:5], output[-4000:]]))
    if watched < ranks:
        return Verdict(False, f"{tool}: watched {count(watched, 'process')}, not {ranks}", output[-4000:])
    where = f"in {count(watched, 'process')}"
    if ours:
        line = ", ".join([f"{tool}: {len(ours)} of tdcoll's", *([theirs] if theirs else []), where])
        return Verdict(False, line, "\n\n".join(ours[:20]))
    return Verdict(True, f"{tool}: nothing of tdcoll's; {theirs or 'nothing of others'}, {where}")


def judge_control(folder: Path, output: str = "") -> Verdict:
    """The verdict on the kernel that stores out of bounds."""
    runs = [parse(file.read_text(errors="replace")) for file in sorted(folder.glob("*.log"))]
    found = [report for run in runs for report in run.reports if report.owner == "tdcoll" and report.kernel == CONTROL]
    if found:
        return Verdict(True, f"control: {CONTROL} is reported as tdcoll's")
    seen = "\n\n".join(report.text for run in runs for report in run.reports)
    return Verdict(False, f"control: {CONTROL} is not reported", f"{seen}\n{output[-4000:]}")


@dataclass(frozen=True)
class Ended:
    """A job that has ended, or was killed at the deadline.

    Attributes:
        status: its exit status; None if it was killed.
        seconds: how long it ran.
        output: the end of what it printed.
    """

    status: int | None
    seconds: float
    output: str


class Jobs:
    """The jobs of one run, which end by the same deadline.

    Args:
        scratch: a folder, for Triton's cache and for what the jobs print.
        deadline_s: how long from now they have, all together.
    """

    def __init__(self, scratch: Path, deadline_s: float) -> None:
        self.until = time.monotonic() + deadline_s
        self.scratch = scratch
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen] = set()
        self._closed = False

    def run(self, name: str, command: Sequence[str]) -> Ended:
        """Run a command, in a session of its own, until it ends or the deadline comes."""
        begin = time.monotonic()
        file = self.scratch / f"{name}.txt"
        surroundings = {
            **os.environ,
            "PYTHON": sys.executable,
            "TRITON_CACHE_DIR": str(self.scratch / "triton"),
            "CUDA_MODULE_LOADING": "LAZY",
        }
        with file.open("w") as output:
            with self._lock:
                if self._closed:
                    return Ended(None, 0.0, "not started")
                process = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, env=surroundings, start_new_session=True
                )
                self._running.add(process)
            status: int | None = None
            try:
                status = process.wait(max(0.0, self.until - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            finally:
                kill(process)
                with self._lock:
                    self._running.remove(process)
                    status = None if self._closed else status
        return Ended(status, time.monotonic() - begin, tail(file))

    def close(self) -> None:
        """Kill what still runs, and start nothing more."""
        with self._lock:
            self._closed = True
            for process in self._running:
                kill(process, wait=False)


def kill(process: subprocess.Popen, wait: bool = True) -> None:
    """Kill a job with all its processes. torchrun gives each rank a session, so the job's own group is not all."""
    groups = {process.pid}
    if process.poll() is None:
        groups |= groups_below(process.pid)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    if wait:
        process.wait()


def groups_below(pid: int) -> set[int]:
    """Return the process groups of all processes below one."""
    children: dict[int, list[tuple[int, int]]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            _, parent, group = file.read_text(errors="replace").rpartition(")")[2].split()[:3]
            children.setdefault(int(parent), []).append((int(file.parent.name), int(group)))
    groups, left = set(), [pid]
    while left:
        for child, group in children.get(left.pop(), []):
            groups.add(group)
            left.append(child)
    return groups


def tail(file: Path, characters: int = 4000) -> str:
    return file.read_text(errors="replace")[-characters:] if file.exists() else ""


def launch(ranks: int, *program: str) -> list[str]:
    script = str(HERE.parents[1] / "launch.sh")
    return [shutil.which("bash") or "bash", script, "--nproc", str(ranks), "--timeout", str(TIMEOUT_S), *program]


def under(tool: str, sanitizer: str, folder: Path, first_port: int, ranks: int, *checks: str) -> list[str]:
    """Return the command of a job whose ranks a tool watches, each with a log of its own in ``folder``."""
    # Other kernels than tdcoll's are C++ functions, or NVSHMEM's. initcheck has to see who writes memory: all of them.
    others = (
        [] if tool == "initcheck" else ["--kernel-name-exclude", "regex=^_Z", "--kernel-name-exclude", "regex=^nvs"]
    )
    watched = [
        *(sanitizer, "--tool", tool, "--target-processes", "application-only", "--log-file", f"{folder}/{{rank}}.log"),
        *("--port", "{port}", "--max-connections", str(PORTS), "--launch-timeout", "60", "--kill"),
        *("--num-callers-host", "20", *others),
        *("{python}", str(HERE / "mixed_calls.py"), "--heap", f"{folder}/{{rank}}.heap", *checks),
    ]
    return launch(ranks, str(HERE / "rank.py"), str(first_port), str(PORTS), *watched)


def not_ended(name: str, ended: Ended, folder: Path) -> Verdict:
    logs = [f"the end of {file.name}:\n{tail(file, 2000)}" for file in sorted(folder.glob("*.log"))]
    return Verdict(False, f"{name}: not ended by the deadline; killed", "\n\n".join([ended.output, *logs]))


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return number


def tools(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(TOOLS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(TOOLS)}, got {text!r}")
    return names


def show(verdict: Verdict, took_s: float) -> bool:
    """Print a verdict; return whether it is ok."""
    print(f"{verdict.line} ({took_s:.0f} s)", flush=True)
    if not verdict.ok:
        print(f"{verdict.details}\n--- end of {verdict.line.partition(':')[0]}", flush=True)
    return verdict.ok


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=positive, default=2, help="ranks, one per GPU (default: 2)")
    parser.add_argument("--tools", type=tools, default=list(TOOLS), help=f"some of {','.join(TOOLS)} (default: all)")
    parser.add_argument(
        "--deadline", type=seconds, default=DEADLINE_S, metavar="S", help=f"seconds in all (default: {DEADLINE_S:g})"
    )
    options = parser.parse_args(argv)
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=TOOLKIT)
    if sanitizer is None:
        parser.error(f"compute-sanitizer: expected on PATH or in {TOOLKIT}, found in neither")

    def plain(check: str) -> tuple[Verdict, float]:
        name = f"{check} without a tool"
        ended = jobs.run(name, launch(options.nproc, str(HERE / "mixed_calls.py"), check))
        if ended.status is None:
            return not_ended(name, ended, folder), ended.seconds
        line = f"{name}: " + ("ok" if ended.status == 0 else f"the job ended with {ended.status}")
        return Verdict(ended.status == 0, line, ended.output), ended.seconds

    def watched(tool: str) -> tuple[Verdict, float]:
        logs = folder / tool
        logs.mkdir()
        place = len(TOOLS) if tool == "control" else TOOLS.index(tool)
        ranks, checks = (1, ("control",)) if tool == "control" else (options.nproc, CHECKS)
        first_port = FIRST_PORT + place * PORTS * options.nproc
        kind = "memcheck" if tool == "control" else tool
        ended = jobs.run(tool, under(kind, sanitizer, logs, first_port, ranks, *checks))
        if ended.status is None:
            return not_ended(tool, ended, logs), ended.seconds
        if tool == "control":
            return judge_control(logs, ended.output), ended.seconds
        return judge(tool, logs, ranks, ended.status, ended.output), ended.seconds

    with tempfile.TemporaryDirectory(prefix="tdcoll-") as scratch:
        folder = Path(scratch)
        jobs = Jobs(folder, options.deadline)
        with ThreadPoolExecutor(len(CHECKS) + len(TOOLS)) as pool:
            try:
                # Beside each other, for the compiler's sake; the tools find all kernels in the cache.
                if not each(pool, plain, CHECKS):
                    return 1
                return 0 if each(pool, watched, [*options.tools, "control"]) else 1
            finally:
                jobs.close()


def each(pool: ThreadPoolExecutor, judged: Callable[[str], tuple[Verdict, float]], names: Sequence[str]) -> bool:
    """Judge all beside each other, and show each when it ends; return whether all are ok."""
    futures: list[Future[tuple[Verdict, float]]] = [pool.submit(judged, name) for name in names]
    shown = [show(*future.result()) for future in as_completed(futures)]
    return all(shown)


def stop(number: int, _frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
