# SPDX-License-Identifier: Apache-2.0
"""The command line: collect facts, judge them, run the small job, and print a line about each."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from tdcoll.base import arguments
from tdcoll.base.child import Ended
from tdcoll.tools.doctor import job
from tdcoll.tools.doctor.checks import Line, diagnose
from tdcoll.tools.doctor.facts import collect
from tdcoll.tools.setenv import IN_CHECKOUT, LAUNCHER

_MOST_LINES = 30
"""Lines of a failed job's output that are shown, the last ones."""

_AFTER, _FIRST = ("after `source setenv.sh`, ", "  source setenv.sh\n") if IN_CHECKOUT else ("", "")

_EPILOG = f"""\
Each line is ok, a note (look at it if something doesn't work) or a problem, with what to do. Exit status: 0 without
problems, 1 with some, 2 for a wrong command line. Run it once on each host, {_AFTER}without torchrun
and {LAUNCHER}.

example:
{_FIRST}  python -m tdcoll doctor --nproc 2"""


def _options(argv: Sequence[str], environment: Mapping[str, str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tdcoll doctor",
        description="Find out why a job of tdcoll doesn't start.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--nproc",
        type=int,
        metavar="N",
        help="ranks on this host; default: one per GPU, or 2 simulated",
    )
    add("--no-run", action="store_true", help="start no job")
    add(
        "--timeout",
        type=float,
        metavar="SECONDS",
        default=120.0,
        help="when to end the job; default 120",
    )
    options = parser.parse_args(argv)
    if "LOCAL_RANK" in environment:
        parser.error(f"run it without torchrun and {LAUNCHER}: it starts a job itself")
    try:
        arguments.whole("--nproc", 1 if options.nproc is None else options.nproc, 1)
        arguments.seconds("--timeout", options.timeout)
    except ValueError as error:
        parser.error(str(error))
    return options


def _show(line: Line) -> None:
    print(f"{line.status:8} {line.name}: {line.text}", flush=True)
    if line.advice:
        print(f"{'':8} -> {line.advice}", flush=True)


def _count(lines: Sequence[Line], status: str) -> str:
    count = sum(line.status == status for line in lines)
    return f"{count or 'no'} {status}{'' if count == 1 else 's'}"


def main(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run the command; return its exit status. Bad arguments end the process with 2."""
    environment = dict(os.environ if environment is None else environment)
    options = _options(argv, environment)
    facts = collect(environment, options.nproc)
    visible = len(facts.gpus)
    if not facts.simulated and 0 < visible < facts.nproc:
        print(
            f"--nproc must be at most the {visible} visible GPUs of this host, got {facts.nproc}",
            file=sys.stderr,
        )
        return 2
    lines = diagnose(facts)
    for line in lines:
        _show(line)
    ended: Ended | str = "--no-run was given" if options.no_run else job.cannot_run(facts)
    ended = ended or job.start(facts, options.timeout)
    lines.append(job.judge(facts, ended))
    _show(lines[-1])
    if lines[-1].status == "problem" and not isinstance(ended, str):
        print(*(f"{'':8} | {line}" for line in ended.output.splitlines()[-_MOST_LINES:]), sep="\n")
    print(f"\n{_count(lines, 'problem')}, {_count(lines, 'note')}")
    return int(any(line.status == "problem" for line in lines))
