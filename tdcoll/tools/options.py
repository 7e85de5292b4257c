# SPDX-License-Identifier: Apache-2.0
"""Command lines that every rank of a job reads, where rank 0 speaks for all; types for argparse."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tdcoll.base.arguments import decimal, parse_bytes, parse_whole

LAUNCHER_DELAY_S = 10.0
"""Seconds that other ranks give rank 0 to print an error, because the launcher ends all ranks when
one of them ends."""

Parse = Callable[[str], Any]
"""A type of argparse."""


def is_first_rank() -> bool:
    """Return whether this process prints for its job: it is rank 0, or there is no job."""
    return os.environ.get("RANK", "0") == "0"


def exit_with_error(text: str) -> NoReturn:
    """Print ``text`` on rank 0, and end the process with status 2 on every rank."""
    if is_first_rank():
        print(text, file=sys.stderr)
    else:
        time.sleep(LAUNCHER_DELAY_S)
    raise SystemExit(2)


class JobParser(argparse.ArgumentParser):
    """A parser that prints help and errors on rank 0 only, because all ranks read the same line."""

    def print_help(self, file: Any = None) -> None:
        if is_first_rank():
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        exit_with_error(f"{self.format_usage()}{self.prog}: error: {message}")


def comma_list(parse: Parse, least: int = 1) -> Parse:
    """Parse ``"a,b"`` into at least ``least`` different values, each read by ``parse``."""

    def parse_list(text: str) -> list[Any]:
        values = list(dict.fromkeys(parse(part) for part in text.split(",") if part))
        if len(values) < least:
            raise argparse.ArgumentTypeError(f"expected at least {least} value, got {text!r}")
        return values

    return parse_list


def one_of(names: Sequence[str]) -> Parse:
    """Parse one of ``names``."""

    def parse_name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(names)}; got {text}")
        return text

    return parse_name


def whole(least: int, most: int | None = None) -> Parse:
    """Parse a whole number from ``least`` to ``most``."""
    expected = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse_number(text: str) -> int:
        value = decimal(text)
        if value is None or value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"expected a whole number {expected}, got {text!r}")
        return value

    return parse_number


def new_file(text: str) -> Path:
    """Parse the path of a file to write, in a directory that exists."""
    file = Path(text)
    if not file.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {file.parent}")
    return file


def size_steps(begin: str, end: str, factor: str, itemsize: int) -> list[int]:
    """Return sizes in bytes from ``begin`` to ``end``, each ``factor`` times the one before.

    Args:
        begin, end: texts such as "1024", "1K" or "64M".
        itemsize: bytes of an element.

    Raises:
        ValueError: one of the texts is wrong; it names the option ``-b``, ``-e`` or ``-f``.
    """
    first = parse_bytes(begin, "-b")
    last = parse_bytes(end, "-e")
    step = parse_whole(factor, "-f", 2)
    if first > last:
        raise ValueError(f"-b must be at most -e, got {begin} and {end}")
    if first % itemsize:
        raise ValueError(f"-b must be a multiple of the dtype's {itemsize} bytes, got {begin}")
    sizes = []
    size = first
    while size <= last:
        sizes.append(size)
        size *= step
    return sizes
