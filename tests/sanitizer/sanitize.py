# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over a short mixed run of tdcoll on GPUs.

    python tests/sanitizer/sanitize.py [--nproc N] [--tools memcheck,racecheck,synccheck,initcheck]
    [--deadline S]

First the run goes without a tool: this compiles its kernels, and what is wrong anyhow is no tool's
finding. Then the tools run beside each other, each with a job of its own, over the ranks alone: no
launcher and no compiler is watched. A control runs as well: a kernel that stores out of bounds,
which memcheck must report. Each prints a line when it ends, which says what was reported and whose
it is (:func:`parse`). Under it follows what is tdcoll's. What has not ended by the deadline is
killed, and the end of its logs is printed. Exit status: 0 if nothing is tdcoll's; 1 if something
is, or if a job failed or did not end; 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"^=========(.*)$")
_HOST = re.compile(r"Host Frame:\s*(?P<name>.*)")
_MODULE = re.compile(r"\bin (?P<module>\S+)\s*$")
_DEVICE = re.compile(
    r"(?:^\s+at|Device Frame:|access at)\s+(?:0x[0-9a-f]+ in )?(?P<name>[A-Za-z_]\w*)"
)
_SUMMARY = re.compile(r"^ (?:ERROR|RACECHECK) SUMMARY: ")
_NOT_REPORTS = re.compile(
    r"^ (?:COMPUTE-SANITIZER|LEAK SUMMARY|Target application terminated before first instrumented API call"
    r"|No attachable process|This tool is|Program hit sanitizer limits|Saving|Read \d+|Warning: Detected overlapping)"
)

_BELOW = re.compile(
    r"^(?:libcuda|libcudart|libcuda_driver|libsanitizer|libTreeLauncher|libInterceptor)"
)
"""Modules that are called by whoever is meant."""

_COPY = re.compile(
    r"^ ?Host API memory access error at host access to (?P<address>0x[0-9a-f]+) .*\n +Uninitialized access"
)

HEAP = "the symmetric heap"
"""The owner of what initcheck says of copies from the heap."""

OTHERS = {"NVSHMEM": re.compile(r"^(?:lib)?nvshmem"), "NCCL": re.compile(r"^libnccl")}
"""Whose libraries are whose, by the name of the file."""


class Report(NamedTuple):
    """One report, as it was written but without ``=========``.

    Attributes:
        owner: ``"tdcoll"``, a key of :data:`OTHERS`, or :data:`HEAP`.
        kernel: the innermost function of the device; empty if there is none.
    """

    text: str
    owner: str
    kernel: str


class Run(NamedTuple):
    """What was written about one process; ``watched``: it used CUDA and came to its end, since
    there is a summary."""

    reports: tuple[Report, ...]
    watched: bool


def _owner(modules: list[str]) -> str:
    above = [module for module in modules if not _BELOW.match(module)]
    return next(
        (name for name, pattern in OTHERS.items() if above and pattern.match(above[0])), "tdcoll"
    )


def _report(lines: list[str], heap: range) -> Report:
    modules, kernel, host = [], "", False
    copy = _COPY.match("\n".join(lines))
    for line in lines:
        if _HOST.search(line):
            host = True
        elif not kernel and not host and (found := _DEVICE.search(line)):
            kernel = found["name"]
        # The module is on the frame's line, or on the next.
        if host and (found := _MODULE.search(line)):
            modules.append(found["module"].rpartition("/")[2])
    owner = HEAP if copy and int(copy["address"], 16) in heap else _owner(modules)
    return Report("\n".join(line.removeprefix(" ") for line in lines), owner, kernel)


def parse(text: str, heap: range = range(0)) -> Run:
    """Take apart what compute-sanitizer wrote about one process, whose symmetric heap has the
    addresses ``heap``.

    A report is a paragraph of lines that begin with ``=========``. It has a first line (what
    happened), frames of the device (``at NAME+0x... in FILE:LINE``) and frames of the host (``Host
    Frame: NAME ... in MODULE``), the innermost first. Whose it is, the first frame of the host says
    that is in neither the driver nor CUDA's runtime: that module made the call or launched the
    kernel. What is in NVSHMEM's or NCCL's libraries is theirs, and all else is tdcoll's. Exception:
    initcheck does not follow writes to the symmetric heap, so copies from there are no findings.
    """
    reports: list[Report] = []
    paragraph: list[str] = []
    watched = False
    for raw in [*text.splitlines(), "========="]:
        found = _LINE.match(raw.rstrip())
        if not found:
            continue  # the program's own output
        line = found[1]
        watched |= bool(_SUMMARY.match(line))
        if line.strip() and not _SUMMARY.match(line) and not _NOT_REPORTS.match(line):
            # A first line is indented by one; what belongs to it by more. Some tools leave no line
            # between reports.
            if paragraph and not line.startswith("  "):
                reports.append(_report(paragraph, heap))
                paragraph = []
            paragraph.append(line)
        elif paragraph:
            reports.append(_report(paragraph, heap))
            paragraph = []
    return Run(tuple(reports), watched)


HERE = Path(__file__).resolve().parent
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TOOLKIT = "/usr/local/cuda/bin"
CHECKS = ("dense", "sparse_all_reduces", "language")
CONTROL = "store_out_of_bounds"
DEADLINE_S = 150.0
TIMEOUT_S = 60
"""Deadline of waits in kernels: each rank runs many times slower, and takes turns at its GPU with
other jobs."""
PORTS, FIRST_PORT = 10, 30000
"""Ports per watched process, and the first of all; below the range from which Linux gives ports to
clients."""


class Verdict(NamedTuple):
    """What came of one tool: a summary, and what is to be read if it is not ok."""

    ok: bool
    line: str
    details: str = ""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'es' if number != 1 else ''}"


def heap_of(log: Path) -> range:
    """The addresses of a rank's symmetric heap, which ``mixed_calls.py`` has written beside its
    log."""
    file = log.with_suffix(".heap")
    if not file.exists():
        return range(0)
    base, nbytes = map(int, file.read_text().split())
    return range(base, base + nbytes)


def judge(tool: str, folder: Path, ranks: int, status: int, output: str = "") -> Verdict:
    """The verdict on a job of so many ranks, by the logs in ``folder``, one for each process."""
    runs = [
        parse(file.read_text(errors="replace"), heap_of(file))
        for file in sorted(folder.glob("*.log"))
    ]
    watched = sum(run.watched for run in runs)
    reports = [report for run in runs for report in run.reports]
    ours = [report.text for report in reports if report.owner == "tdcoll"]
    owners = Counter(report.owner for report in reports if report.owner != "tdcoll")
    theirs = ", ".join(f"{number} of {owner}'s" for owner, number in sorted(owners.items()))
    if status:
        return Verdict(
            False, f"{tool}: the job ended with {status}", "\n\n".join([*ours[:5], output[-4000:]])
        )
    if watched < ranks:
        return Verdict(
            False, f"{tool}: watched {count(watched, 'process')}, not {ranks}", output[-4000:]
        )
    where = f"in {count(watched, 'process')}"
    if ours:
        line = ", ".join([f"{tool}: {len(ours)} of tdcoll's", *([theirs] if theirs else []), where])
        return Verdict(False, line, "\n\n".join(ours[:20]))
    return Verdict(True, f"{tool}: nothing of tdcoll's; {theirs or 'nothing of others'}, {where}")


def judge_control(folder: Path, output: str = "") -> Verdict:
    """The verdict on the kernel that stores out of bounds."""
    runs = [parse(file.read_text(errors="replace")) for file in sorted(folder.glob("*.log"))]
    found = [
        report
        for run in runs
        for report in run.reports
        if report.owner == "tdcoll" and report.kernel == CONTROL
    ]
    if found:
        return Verdict(True, f"control: {CONTROL} is reported as tdcoll's")
    seen = "\n\n".join(report.text for run in runs for report in run.reports)
    return Verdict(False, f"control: {CONTROL} is not reported", f"{seen}\n{output[-4000:]}")


class Ended(NamedTuple):
    """A job that has ended: with a status, or None if it was killed at the deadline; and the end of
    what it printed."""

    status: int | None
    seconds: float
    output: str


def run(name: str, command: Sequence[str], scratch: Path, until: float) -> Ended:
    """Run a command until it ends, or at most until ``time.monotonic()`` is ``until``; ranks die
    with their launcher.

    Args:
        scratch: a folder, for Triton's cache and for what the job prints.
    """
    begin, file = time.monotonic(), scratch / f"{name}.txt"
    variables = {
        "PYTHON": sys.executable,
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "CUDA_MODULE_LOADING": "LAZY",
    }
    with file.open("w") as output:
        try:
            status = subprocess.run(
                command,
                stdout=output, stderr=subprocess.STDOUT, env=os.environ | variables, timeout=until - begin, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            status = None
    return Ended(status, time.monotonic() - begin, tail(file))


def tail(file: Path, characters: int = 4000) -> str:
    return file.read_text(errors="replace")[-characters:] if file.exists() else ""


def launch(ranks: int, *program: str) -> list[str]:
    script = str(HERE.parents[1] / "launch.sh")
    return [
        shutil.which("bash") or "bash",
        script,
        "--nproc",
        str(ranks),
        "--timeout",
        str(TIMEOUT_S),
        *program,
    ]


def under(
    tool: str, sanitizer: str, folder: Path, first_port: int, ranks: int, *checks: str
) -> list[str]:
    """Return the command of a job whose ranks a tool watches, each with a log of its own in
    ``folder``."""
    # Other kernels than tdcoll's are C++ functions, or NVSHMEM's. initcheck has to see who writes
    # memory: all of them.
    others = (
        []
        if tool == "initcheck"
        else ["--kernel-name-exclude", "regex=^_Z", "--kernel-name-exclude", "regex=^nvs"]
    )
    watched = [
        *(
            sanitizer,
            "--tool",
            tool,
            "--target-processes",
            "application-only",
            "--log-file",
            f"{folder}/{{rank}}.log",
        ),
        *("--port", "{port}", "--max-connections", str(PORTS), "--launch-timeout", "60", "--kill"),
        *("--num-callers-host", "20", *others),
        *(
            sys.executable,
            str(HERE / "mixed_calls.py"),
            "--heap",
            f"{folder}/{{rank}}.heap",
            *checks,
        ),
    ]
    return launch(ranks, str(HERE / "sanitize.py"), "--become", str(first_port), *watched)


def become(first_port: str, *command: str) -> None:
    """Become a command with ``{rank}`` and ``{port}`` filled in; torchrun starts it, so a tool sees
    one rank alone."""
    rank = os.environ["RANK"]
    # tools beside each other would else ask for the same ones
    port = str(int(first_port) + PORTS * int(rank))
    os.execvp(
        command[0], [word.replace("{rank}", rank).replace("{port}", port) for word in command]
    )


def not_ended(name: str, ended: Ended, folder: Path) -> Verdict:
    logs = [f"the end of {file.name}:\n{tail(file, 2000)}" for file in sorted(folder.glob("*.log"))]
    return Verdict(
        False, f"{name}: not ended by the deadline; killed", "\n\n".join([ended.output, *logs])
    )


def show(verdict: Verdict, took_s: float) -> bool:
    """Print a verdict; return whether it is ok."""
    print(f"{verdict.line} ({took_s:.0f} s)", flush=True)
    if not verdict.ok:
        print(f"{verdict.details}\n--- end of {verdict.line.partition(':')[0]}", flush=True)
    return verdict.ok


def positive_seconds(text: str) -> float:
    """Parse a number of seconds, greater than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    sys.path.append(str(HERE.parents[1]))
    # here, since a rank's program need not wait for it
    from tdcoll.tools.options import comma_list, one_of, whole

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=whole(1), default=2, help="ranks, one per GPU (default: 2)")
    parser.add_argument(
        "--tools", type=comma_list(one_of(TOOLS)), default=TOOLS, help=f"some of {','.join(TOOLS)}"
    )
    parser.add_argument(
        "--deadline",
        type=positive_seconds,
        default=DEADLINE_S,
        metavar="S",
        help="seconds in all (default: 150)",
    )
    options = parser.parse_args(argv)
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=TOOLKIT)
    if sanitizer is None:
        parser.error(f"compute-sanitizer: expected on PATH or in {TOOLKIT}, found in neither")

    def plain(check: str) -> tuple[Verdict, float]:
        name = f"{check} without a tool"
        ended = run(name, launch(options.nproc, str(HERE / "mixed_calls.py"), check), folder, until)
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
        ended = run(tool, under(kind, sanitizer, logs, first_port, ranks, *checks), folder, until)
        if ended.status is None:
            return not_ended(tool, ended, logs), ended.seconds
        if tool == "control":
            return judge_control(logs, ended.output), ended.seconds
        return judge(tool, logs, ranks, ended.status, ended.output), ended.seconds

    def shown(judge_one: Callable[[str], tuple[Verdict, float]], names: Sequence[str]) -> bool:
        """Judge all beside each other, and show each when it ends; return whether all are ok."""
        with ThreadPoolExecutor(len(names)) as pool:
            jobs = [pool.submit(judge_one, name) for name in names]
            ok = [show(*job.result()) for job in as_completed(jobs)]
        return all(ok)

    with tempfile.TemporaryDirectory(prefix="tdcoll-") as scratch:
        folder, until = Path(scratch), time.monotonic() + options.deadline
        # Beside each other, for the compiler's sake; the tools find all kernels in the cache.
        return 0 if shown(plain, CHECKS) and shown(watched, [*options.tools, "control"]) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--become"]:
        become(*sys.argv[2:])
    sys.exit(main())
