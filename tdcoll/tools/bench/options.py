# SPDX-License-Identifier: Apache-2.0
"""Options of command lines, with one name for one thing, and the values that they accept."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tdcoll.base.arguments import parse_bytes, parse_whole
from tdcoll.tools.bench.arithmetic import distinct
from tdcoll.tools.setenv import COMMAND


class Parser(argparse.ArgumentParser):
    """A parser that prints on rank 0 only, because all ranks of a job read the same command line.

    Args:
        command: of tdcoll, as in ``bench signal``.
        example: options that its help shows in use.
    """

    def __init__(self, command: str, description: str = "", example: str = "--json result.json") -> None:
        prog, epilog = f"{COMMAND} [--nproc N] -m tdcoll {command}", f"example: {COMMAND} -m tdcoll {command} {example}"
        super().__init__(prog=prog, description=description, epilog=epilog)

    def _print_message(self, message: str, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super()._print_message(message, file)
        elif file is sys.stderr:
            time.sleep(10.0)  # the launcher ends all ranks when one fails: let rank 0 print first

    def option(self, name: str, kind: Kind, default: Any, metavar: str, text: str) -> None:
        """Add an option with a value; its help shows the default."""
        self.add_argument(name, type=kind, default=default, metavar=metavar, help=f"{text} (default %(default)s)")

    def some(self, name: str, known: Sequence[str], default: str | None = None) -> None:
        """Add an option that takes some of these names, by default all."""
        usual = ",".join(known) if default is None else default
        self.option(name, each(one_of(known), 0), usual, "A,B", f"some of {', '.join(known)}, or ''")


Kind = Callable[[str], Any]
"""A type of argparse."""


def each(kind: Kind, least: int = 1) -> Kind:
    """Parse ``"a,b"``, each of this kind, and at least so many."""

    def parse_list(text: str) -> list[Any]:
        try:
            given = distinct(kind(part) for part in text.split(",") if part)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        if len(given) < least:
            raise argparse.ArgumentTypeError("expected at least one, got none")
        return given

    return parse_list


def one_of(known: Sequence[str]) -> Kind:
    """One of these names."""

    def parse_name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}; got {text}")
        return text

    return parse_name


def number(kind: Kind, fits: Callable[[Any], bool], expected: str) -> Kind:
    """A number for which ``fits`` is true."""

    def parse_number(text: str) -> Any:
        try:
            if fits(value := kind(text)):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return parse_number


def dtype(known: Sequence[str]) -> Kind:
    """The name of one of these dtypes."""
    return lambda text: getattr(torch, one_of(known)(text))


def at_least(least: int) -> Kind:
    """A whole number."""
    return number(int, lambda value: value >= least, f"a whole number of at least {least}")


def new_file(text: str) -> Path:
    """A file in a directory that there is."""
    if not (file := Path(text)).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {file.parent}")
    return file


def add_common(parser: Parser, iterations: int, warmup: int = 5) -> None:
    """Add the options for the number of iterations, and for the file of the result."""
    what = "timed launches, or calls that are timed one at a time"
    parser.option("--iterations", at_least(2), iterations, "N", what)
    parser.option("--warmup", at_least(1), warmup, "N", "untimed ones before")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the rows and how they were measured")


def add_launches(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the options for how to launch: ``launches``, with this ``default`` (``"graph"``, ``"both"``)."""
    group = parser.add_mutually_exclusive_group()
    for name, launches, what in (
        ("graph", ["graph"], "CUDA graph replays"),
        ("eager", ["eager"], "eager calls"),
        ("both", ["graph", "eager"], "one after the other"),
    ):
        usual = f"{what} (default)" if name == default else what
        group.add_argument(f"--{name}", dest="launches", action="store_const", const=launches, help=usual)
    parser.set_defaults(launches=["graph", "eager"] if default == "both" else [default])


def add_sizes(parser: argparse.ArgumentParser, begin: str, end: str) -> None:
    """Add the options for the sizes."""
    for name, usual, what in (
        ("begin", begin, "first size"),
        ("end", end, "last size, such as 64M"),
        ("factor", "4", "from one size to the next"),
    ):
        parser.add_argument(f"-{name[0]}", f"--{name}", default=usual, help=f"{what} (default %(default)s)")


def read_sizes(parser: argparse.ArgumentParser, given: argparse.Namespace, itemsize: int) -> list[int]:
    """Return the sizes in bytes, such as 1024, 1K or 64M; if one is wrong, end the process with status 2."""
    try:
        first, last = parse_bytes(given.begin, "-b"), parse_bytes(given.end, "-e")
        step = parse_whole(given.factor, "-f", 2)
    except ValueError as error:
        parser.error(str(error))
    if first > last:
        parser.error(f"-b must be at most -e, got {given.begin} and {given.end}")
    if first % itemsize:
        parser.error(f"-b must be a multiple of the dtype's {itemsize} bytes, got {given.begin}")
    return list(itertools.takewhile(lambda size: size <= last, (first * step**power for power in itertools.count())))
