# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over a short mixed run of tdcoll on GPUs.

    python tests/sanitizer/sanitize.py [--nproc N] [--tools memcheck,racecheck,synccheck,initcheck]

The tools run beside each other, each with a job of its own, and so does a control: a kernel that stores out of bounds,
which memcheck must report. A line for each says what was reported and whose it is (``reports.py``); what is tdcoll's
follows. Exit status: 0 if nothing is tdcoll's, 1 if something is or a job failed, 2 for a wrong command line.
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
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from reports import parse

HERE = Path(__file__).resolve().parent
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TOOLKIT = "/usr/local/cuda/bin"
CONTROL = "store_out_of_bounds"
DEADLINE_S = 300.0
TIMEOUT_S = 120
"""Of waits in kernels: each rank runs many times slower than it would, and takes turns at its GPU with other jobs."""


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


def judge(tool: str, folder: Path, ranks: int, status: int, output: str = "") -> Verdict:
    """The verdict on a job of so many ranks, by the logs in ``folder``, one for each process."""
    runs = [parse(file.read_text(errors="replace")) for file in sorted(folder.glob("*.log"))]
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


def run(command: Sequence[str]) -> tuple[int, str]:
    """Exit status and output of a job that ends with all its children, or is ended."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return 124, f"not ended after {DEADLINE_S:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def job(ranks: int, *checks: str) -> list[str]:
    launch = [
        shutil.which("bash") or "bash",
        str(HERE.parents[1] / "launch.sh"),
        "--nproc",
        str(ranks),
        "--timeout",
        str(TIMEOUT_S),
    ]
    return [*launch, str(HERE / "mixed_calls.py"), *checks]


def under(tool: str, sanitizer: str, folder: Path, command: list[str]) -> list[str]:
    return [sanitizer, "--tool", tool, "--target-processes", "all", "--log-file", str(folder / "%p.log"), *command]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def tools(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(TOOLS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(TOOLS)}, got {text!r}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=positive, default=2, help="ranks, one per GPU (default: 2)")
    parser.add_argument("--tools", type=tools, default=list(TOOLS), help=f"some of {','.join(TOOLS)} (default: all)")
    options = parser.parse_args(argv)
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=TOOLKIT)
    if sanitizer is None:
        parser.error(f"compute-sanitizer: expected on PATH or in {TOOLKIT}, found in neither")

    # Without a tool first: the kernels are compiled once, and what is wrong anyhow is no tool's finding.
    status, output = run(job(options.nproc, "mixed_calls", "language"))
    if status:
        print(f"the job ended with {status} without any tool\n{output[-4000:]}")
        return 1

    with tempfile.TemporaryDirectory() as scratch:

        def sanitized(tool: str) -> Verdict:
            folder = Path(scratch) / tool
            folder.mkdir()
            if tool == "control":
                _, output = run(under("memcheck", sanitizer, folder, job(1, "control")))
                return judge_control(folder, output)
            status, output = run(under(tool, sanitizer, folder, job(options.nproc, "mixed_calls", "language")))
            return judge(tool, folder, options.nproc, status, output)

        with ThreadPoolExecutor(len(TOOLS) + 1) as pool:
            verdicts = list(pool.map(sanitized, [*options.tools, "control"]))
    for verdict in verdicts:
        print(verdict.line)
    for verdict in verdicts:
        if not verdict.ok:
            print(f"\n--- {verdict.line}\n{verdict.details}")
    return 0 if all(verdict.ok for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
