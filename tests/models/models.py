# SPDX-License-Identifier: Apache-2.0
"""The protocols' models, their mutants, and how spin checks them.

``python tests/models/models.py [NAME...]`` checks the models of these names, or all, and writes their
lines of the table in ``docs/correctness.md``. It needs ``spin`` and a C compiler.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parents[1] / "docs" / "correctness.md"
BEGIN, END = "<!-- models -->", "<!-- end of models -->"

MEMORY_MB = 2048
"""Most memory of a search."""
DEPTH = 1_000_000
"""Most steps of an execution."""
DEADLINE_S = 240
"""Longest search, in seconds, on a machine that does other things as well."""


@dataclass(frozen=True)
class Model:
    """A model in one of its forms.

    Attributes:
        name: Of the file, without its suffix.
        ranks, calls: Bounds of the search.
        mutants: Macros, separated by spaces, with which the search must find an error.
        harmless: Macros that take a protection away which this protocol doesn't need.
        form: Macros of this form of the protocol.
        slow: The search takes more than two seconds.
        slow_mutants: Those of the mutants whose search takes more than two seconds.
    """

    name: str
    ranks: int
    calls: int
    mutants: tuple[str, ...]
    harmless: tuple[str, ...] = ()
    form: str = ""
    slow: bool = False
    slow_mutants: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.form}".strip()


MODELS = [
    Model(
        "puts",
        2,
        6,
        ("ONE_SLOT", "REUSED_ROW", "SIGNAL_FIRST", "SENDS_AFTER_EXPIRY"),
        harmless=("EQUAL_FOR_AT_LEAST",),
    ),
    Model(
        "puts",
        2,
        6,
        ("NO_ENTERED", "NO_QUIET", "SIGNAL_FIRST"),
        harmless=("REUSED_ROW", "EQUAL_FOR_AT_LEAST"),
        form="IN_PLACE",
    ),
    Model(
        "ll",
        2,
        4,
        ("ONE_SLOT", "SPLIT_WORD", "ZERO_FLAG", "SKIPS_EMPTY", "SENDS_AFTER_EXPIRY"),
        slow=True,
    ),
    Model(
        "lamport",
        2,
        4,
        (
            "TWO_SLOTS",
            "NO_CLEAR",
            "COUNTS_EPOCHS",
            "CLEARS_ITS_SIZE",
            "SENDS_AFTER_EXPIRY ONE_SIZE",
        ),
        slow=True,
        slow_mutants=("COUNTS_EPOCHS", "CLEARS_ITS_SIZE", "SENDS_AFTER_EXPIRY ONE_SIZE"),
    ),
    Model(
        "direct",
        2,
        4,
        ("NO_ENTERED", "RELAXED", "SENDS_AFTER_EXPIRY"),
        harmless=("REUSED_ROW", "EQUAL_FOR_AT_LEAST"),
        slow=True,
        slow_mutants=("SENDS_AFTER_EXPIRY",),
    ),
    Model("direct", 2, 4, ("LAST_ANNOUNCES",), form="ONE_RESIDENT"),
    Model(
        "two_shot",
        2,
        4,
        ("RELAXED", "ONE_HALF", "SAME_SIGNALS", "NO_SUM_WAIT", "SENDS_AFTER_EXPIRY"),
        harmless=("ONE_SLOT", "REUSED_ROW", "EQUAL_FOR_AT_LEAST"),
        slow_mutants=("SENDS_AFTER_EXPIRY",),
    ),
    Model("two_shot", 2, 4, ("RELAXED", "NO_SUM_WAIT"), form="ZERO_COPY"),
    Model(
        "copies",
        2,
        4,
        ("NO_ENTERED", "STAMP_FIRST", "NO_TELL", "NO_CHECK", "EVERY_EPOCH"),
        harmless=("EQUAL_FOR_AT_LEAST", "STAMP_ALWAYS"),
    ),
    Model(
        "copies",
        2,
        4,
        ("NO_ENTERED", "NO_TELL", "NO_CHECK"),
        harmless=("STAMP_ALWAYS",),
        form="PULLED",
    ),
    Model(
        "copies",
        2,
        4,
        ("EQUAL_FOR_AT_LEAST", "STAMP_ALWAYS", "NO_TELL"),
        form="REDUCE",
    ),
    Model(
        "rails",
        4,
        4,
        (
            "ONE_SLOT",
            "REUSED_ROW",
            "RELAXED",
            "NO_FORWARD_WAIT",
            "HEARS_RAIL_ONLY",
            "EARLY SENDS_AFTER_EXPIRY",
        ),
        harmless=("EQUAL_FOR_AT_LEAST",),
        slow=True,
        slow_mutants=("EARLY SENDS_AFTER_EXPIRY",),
    ),
    Model(
        "sparse",
        2,
        4,
        (
            "NO_BEGUN",
            "NO_MEETING",
            "REUSED_ROW",
            "SENDS_AFTER_EXPIRY",
            "STAGE_AFTER_EXPIRY NO_NUMBER",
        ),
        harmless=("NO_ENTERED", "STAGE_EARLY", "STAGE_AFTER_EXPIRY", "EQUAL_FOR_AT_LEAST"),
    ),
    Model("sparse", 2, 4, ("NO_ENTERED",), form="GATHER"),
    Model("sparse", 2, 4, ("NO_NUMBER",), form="MISUSE", slow=True),
    Model(
        "rejoin",
        2,
        2,
        ("REUSED_MEMORY", "NO_MARK", "TAKES_SPENT", "COUNTS_JOINS", "NO_BARRIER"),
        slow=True,
    ),
]


@dataclass(frozen=True)
class Search:
    """What a search has found.

    Attributes:
        error: The first error, in spin's words; empty if there is none.
        exhausted: All states were visited, or there is an error.
        states: Different states that were stored.
        seconds: How long the search took, without compiling.
        report: All that the search printed, and the folder's trail if there is an error.
    """

    error: str
    exhausted: bool
    states: int
    seconds: float
    report: str


def missing() -> str | None:
    """Return what is missing to search; None if nothing is."""
    if shutil.which("spin") is None:
        return "spin isn't installed (apt-get install spin)"
    if compiler() is None:
        return "there is no C compiler (apt-get install gcc)"
    return None


def compiler() -> str | None:
    """Return the C compiler, if there is one."""
    return shutil.which(os.environ.get("CC") or "cc")


def search(model: Model, mutant: str = "") -> Search:
    """Search all executions of a model, changed by the macros of a mutant."""
    bounds = [f"RANKS={model.ranks}", f"CALLS={model.calls}"]
    macros = [f"-D{name}" for name in (*bounds, *model.form.split(), *mutant.split())]
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        source = FOLDER / f"{model.name}.pml"
        made = _run(where, 60, "spin", *macros, "-a", str(source))
        # -a reports syntax errors on stdout, and may write a program all the same
        assert made.returncode == 0, made.stdout + made.stderr
        assert "Error" not in made.stdout, made.stdout
        options = ["-O2", "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MB}"]
        built = _run(where, 120, str(compiler()), *options, "-o", "pan", "pan.c")
        assert built.returncode == 0, built.stderr
        began = time.monotonic()
        done = _run(where, DEADLINE_S, "./pan", f"-m{DEPTH}", "-w22")
        seconds = time.monotonic() - began
        report = done.stdout + done.stderr
        if list(where.glob("*.trail")):
            report += _run(where, 60, "./pan", "-r", "-n").stdout
    return result(report, seconds)


def _run(where: Path, timeout_s: float, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=timeout_s)


def result(report: str, seconds: float) -> Search:
    """Return what the report of a search says."""
    errors = re.search(r"errors: (\d+)", report)
    states = re.search(r"(\d+) states, stored", report)
    assert errors is not None, report
    assert states is not None, report
    first = re.search(r"^pan:\d+: (.*)$", report, re.M)
    error = ""
    if int(errors[1]):
        error = first[1] if first else "an error without a description"
    limits = r"Search not completed|max search depth too small|reached -DMEMLIM|out of memory"
    complete = not re.search(limits, report)
    return Search(error, bool(error) or complete, int(states[1]), seconds, report)


def row(model: Model, found: Search) -> str:
    """Return the line of the table for a model: what was searched and which mutants fail."""
    mutants = ", ".join(f"`{name}`" for name in model.mutants)
    harmless = ", ".join(f"`{name}`" for name in model.harmless)
    name = f"[{model.name}](../tests/models/{model.name}.pml)"
    form = f" `{model.form}`" if model.form else ""
    bounds = f"{model.ranks} | {model.calls}"
    return f"| {name}{form} | {bounds} | {found.states:,} | {mutants} | {harmless} |"


HEADER = """| model | ranks | calls | states | mutants that fail | that change nothing |
|---|---|---|---|---|---|"""


def check(model: Model) -> str:
    """Check a model and all that is said of its macros; return its line of the table."""
    line = row(model, _without_error(model, ""))
    for change in model.harmless:
        _without_error(model, change)
    for mutant in model.mutants:
        assert search(model, mutant).error, f"{model} has no error with {mutant}"
    return line


def _without_error(model: Model, change: str) -> Search:
    found = search(model, change)
    assert not found.error, f"{model} {change}\n{found.report}"
    assert found.exhausted, f"{model} {change}\n{found.report}"
    return found


def write(model: Model, line: str) -> None:
    """Put the line of a model into the table of the page, in the order of :data:`MODELS`."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    present, after = rest.split(END)
    lines = dict.fromkeys(map(_key, MODELS), "")
    lines |= {_key_of(old): old for old in present.strip().splitlines()[2:]}
    lines[_key(model)] = line
    table = "\n".join([HEADER, *filter(None, lines.values())])
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


def _key(model: Model) -> str:
    """Return what begins the line of a model."""
    return _key_of(row(model, Search("", True, 0, 0.0, "")))


def _key_of(line: str) -> str:
    return line.split(" | ")[0]


def main(names: list[str]) -> int:
    """Check the models with these names, or all, and write the page's table."""
    problem = missing()
    if problem is not None:
        print(problem, file=sys.stderr)
        return 1
    for model in MODELS:
        if not names or model.name in names:
            line = check(model)
            write(model, line)
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
