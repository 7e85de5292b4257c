# SPDX-License-Identifier: Apache-2.0
"""Options of command lines, one word for one thing, and what may be given for them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    *("Parser", "add_common", "add_launches", "at_least", "check_common", "each", "names", "percent"),
    *("positive", "positive_number"),
]


class Parser(argparse.ArgumentParser):
    """One that speaks on rank 0 only: all ranks of a job read the same command line.

    Args:
        prog: the command, as in ``bash launch.sh [--nproc N] -m tdcoll bench signal``.
        example: options that its help shows in use.
    """

    patience_s = 10.0
    """Seconds that the others leave rank 0 to say what is wrong: the launcher ends all ranks when one has failed."""

    def __init__(self, *, prog: str, example: str = "--json result.json", **rest: Any) -> None:
        command = prog.replace("[--nproc N] ", "")
        super().__init__(prog=prog, epilog=f"example: {command} {example}", **rest)

    def _print_message(self, message: str, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super()._print_message(message, file)
        elif file is sys.stderr:
            time.sleep(self.patience_s)

    def option(self, name: str, kind: Callable[[str], Any], default: Any, metavar: str, text: str) -> None:
        """An option with a value; its help says what it is by default."""
        self.add_argument(name, type=kind, default=default, metavar=metavar, help=f"{text} (default %(default)s)")

    def some(self, name: str, known: Sequence[str], default: str | None = None) -> None:
        """An option that takes some of these names, by default all."""
        usual = ",".join(known) if default is None else default
        self.option(name, names(known), usual, "A,B", f"some of {', '.join(known)}, or ''")


# ---------------------------------------------------------------------- types for argparse


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """``"a,b"``, all of them known."""

    def parse_names(text: str) -> list[str]:
        given = [name for name in text.split(",") if name]
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}; got {', '.join(unknown)}")
        return list(dict.fromkeys(given))

    return parse_names


def at_least(least: int) -> Callable[[str], int]:
    """A whole number."""

    def parse_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    return parse_number


def positive(text: str) -> list[int]:
    """``"1,2"``, whole numbers of at least 1."""
    numbers = list(dict.fromkeys(at_least(1)(part) for part in text.split(",") if part))
    if not numbers:
        raise argparse.ArgumentTypeError("expected at least one number, got none")
    return numbers


def _number(text: str, fits: Callable[[float], bool], expected: str) -> float:
    try:
        if fits(value := float(text)):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")


def positive_number(unit: str) -> Callable[[str], float]:
    """A number above 0."""
    return lambda text: _number(text, lambda value: value > 0, f"a positive number of {unit}")


def percent(text: str) -> float:
    """``"3"`` is 0.03."""
    return _number(text, lambda value: 0 <= value < 100, "a number of percent from 0 to below 100") / 100


def each(check: Callable[[str], object]) -> Callable[[str], list[str]]:
    """``"a,b"``, none of which ``check`` refuses with a ValueError."""

    def parse_list(text: str) -> list[str]:
        given = list(dict.fromkeys(part for part in text.split(",") if part))
        if not given:
            raise argparse.ArgumentTypeError("expected at least one, got none")
        for part in given:
            try:
                check(part)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from error
        return given

    return parse_list


# ---------------------------------------------------------------------- options that benchmarks share


def add_common(parser: Parser, iterations: int, warmup: int = 5) -> None:
    """The options that say how often, and where the result goes."""
    what = "timed launches, or calls that are timed one at a time"
    parser.option("--iterations", at_least(2), iterations, "N", what)
    parser.option("--warmup", at_least(1), warmup, "N", "untimed ones before")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and how they were measured")


def add_launches(parser: argparse.ArgumentParser, default: str, straggler: bool = True) -> None:
    """The options that say how to launch: ``launches``, of which ``default`` (``"graph"``, ``"both"``)."""
    group = parser.add_mutually_exclusive_group()
    for name, launches, what in (
        ("graph", ["graph"], "CUDA graph replays"),
        ("eager", ["eager"], "eager calls"),
        ("both", ["graph", "eager"], "one after the other"),
    ):
        usual = " (default)" if name == default else ""
        group.add_argument(f"--{name}", dest="launches", action="store_const", const=launches, help=f"{what}{usual}")
        if usual:
            parser.set_defaults(launches=launches)
    if straggler:
        parser.add_argument(
            "--straggler", action="store_true", help="delay a random rank in each iteration; times hold the waiting"
        )


def check_common(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End with status 2 unless ``--json`` can be written."""
    if given.json is not None and not given.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no directory {given.json.parent}")
