# SPDX-License-Identifier: Apache-2.0
"""The command line: find the facts, judge them, start the job, print a line each. Exit status 0, 1 or 2."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tdcoll.arguments import decimal
from tdcoll.doctor import functional
from tdcoll.doctor.collect import collect
from tdcoll.doctor.devices import DEVICE_CHECKS
from tdcoll.doctor.facts import Facts, Line
from tdcoll.doctor.packages import PACKAGE_CHECKS
from tdcoll.doctor.surroundings import SURROUNDINGS_CHECKS

__all__ = ["diagnose", "exit_status", "main"]

CHECKS: tuple[Callable[[Facts], Line | list[Line]], ...] = (*PACKAGE_CHECKS, *DEVICE_CHECKS, *SURROUNDINGS_CHECKS)

_EPILOG = """\
Each line is ok, a note (look at it if something does not work) or a problem, with what to do. Exit status: 0 without
problems, 1 with some, 2 for a wrong command line. Run it once on each host, after `source setenv.sh`, without torchrun
and launch.sh.

example:
  source setenv.sh
  python -m tdcoll doctor --nnodes 2"""

_COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


def diagnose(facts: Facts) -> list[Line]:
    """Every line but that of the functional test."""
    lines: list[Line] = []
    for check in CHECKS:
        found = check(facts)
        lines += [found] if isinstance(found, Line) else found
    return lines


def exit_status(lines: Sequence[Line]) -> int:
    """0 if there is no problem, else 1."""
    return int(any(line.status == "problem" for line in lines))


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = kind(text)
        if not 0 < value < 1 << 20:
            raise ValueError
        return value

    read.__name__ = {"int": "whole number above 0", "float": "number of seconds above 0"}[kind.__name__]
    return read


def _options(arguments: Sequence[str], environment: Mapping[str, str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tdcoll doctor",
        description="What a job of tdcoll needs, and whether it is here.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hosts = environment.get("TDCOLL_NNODES", "")
    number, seconds = _positive(int), _positive(float)
    parser.add_argument(
        "--nproc", type=number, metavar="N", help="ranks on this host; default: one per GPU, or 2 simulated"
    )
    parser.add_argument(
        "--nnodes",
        type=number,
        metavar="N",
        default=decimal(hosts) or 1,
        help="hosts of the job: looks at network cards too; the test stays on this host. Default: TDCOLL_NNODES, or 1",
    )
    parser.add_argument("--no-run", action="store_true", help="start no job")
    parser.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", default=120.0, help="when to end that job; default 120"
    )
    parser.add_argument("--json", metavar="FILE", help="write lines, facts and the job's output there as well")
    options = parser.parse_args(arguments)
    if "LOCAL_RANK" in environment:
        parser.error("run it without torchrun and launch.sh: it starts a job itself")
    if options.json and not os.path.isdir(os.path.dirname(os.path.abspath(options.json))):
        parser.error(f"--json: {options.json} is in no folder that exists")
    return options


def _printer() -> Callable[[Line], None]:
    """Prints a line; in colours on a terminal where rich is installed."""
    show: Callable[[str, str], None] = lambda text, _: print(text, flush=True)  # noqa: E731
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass
        else:
            console = Console(highlight=False, soft_wrap=True)
            show = lambda text, style: console.print(Text(text, style=style))  # noqa: E731

    def print_line(line: Line) -> None:
        # The first word has the colour; the rest is for reading.
        show(f"{line.status:8} {line.name}: {line.text}", _COLOURS[line.status] if line.status != "ok" else "")
        if line.advice:
            show(f"{'':8} -> {line.advice}", "")

    return print_line


def main(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run the command; its exit status. Bad arguments end the process with 2."""
    environment = os.environ if environment is None else environment
    options = _options(arguments, environment)
    facts = collect(environment, options.nproc, options.nnodes)
    if not facts.simulated and facts.gpus and facts.nproc > len(facts.gpus):
        print(f"--nproc: at most the {len(facts.gpus)} visible GPUs of this host, got {facts.nproc}", file=sys.stderr)
        return 2
    show = _printer()
    lines = diagnose(facts)
    for line in lines:
        show(line)
    outcome: functional.Outcome | str = "--no-run was given" if options.no_run else functional.cannot_run(facts)
    if not outcome:
        outcome = functional.start(facts, options.timeout)
    lines.append(functional.judge(facts, outcome))
    show(lines[-1])
    counts = {status: sum(line.status == status for line in lines) for status in ("problem", "note")}
    print(f"\n{_count(counts['problem'], 'problem')}, {_count(counts['note'], 'note')}")
    status = exit_status(lines)
    if options.json:
        output = "" if isinstance(outcome, str) else outcome.output
        return _write(options.json, status, facts, lines, output)
    return status


def _count(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def _write(path: str, status: int, facts: Facts, lines: Sequence[Line], output: str) -> int:
    """Write the file; the exit status."""
    content = {
        "exit_status": status,
        "lines": [asdict(line) for line in lines],
        "facts": {**_plain(vars(facts)), "environment": _of_interest(facts.environment)},
        "output": output,
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
    except OSError as error:
        print(f"--json: {error}", file=sys.stderr)
        return 2
    return status


def _plain(value: Any) -> Any:
    """As JSON has it: pairs as keys become ``"0-1"``, what is no number, text or collection becomes its fields."""
    if isinstance(value, Mapping):
        return {"-".join(map(str, k)) if isinstance(k, tuple) else str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    return value if isinstance(value, (str, int, float, bool, type(None))) else _plain(vars(value))


def _of_interest(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that say how a job starts; the others are nobody's business."""
    prefixes = ("TDCOLL_", "NVSHMEM_", "NCCL_", "TORCH_SYMM_MEM_", "CUDA_", "TRITON_")
    names = ("LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX")
    return {name: value for name, value in sorted(environment.items()) if name.startswith(prefixes) or name in names}
