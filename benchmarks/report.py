# SPDX-License-Identifier: Apache-2.0
"""``tdcoll report``: Markdown tables and pictures of the benchmarks' files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import click

from benchmarks import pages, parsing, tables
from benchmarks.plots import plot
from benchmarks.registry import load_result
from tdcoll.tools.setenv import COMMAND

_EXAMPLES = [
    f"{COMMAND} -m tdcoll bench all_gather --json result.json",
    "python -m tdcoll report result.json --plot result.png",
]

_PARAMETERS = [
    click.Argument(["files"], nargs=-1, type=click.Path(path_type=Path), metavar="[FILE.json]..."),
    click.Option(
        ["--plot"],
        type=click.Path(path_type=Path),
        metavar="FILE.png",
        help="draw one file: time against size, or multiprocessors if it has rows of --blocks",
    ),
    click.Option(
        ["--only"],
        type=parsing.CommaList(click.STRING, least=0),
        default="",
        metavar="A,B",
        help="columns and curves: these algorithms and peers, and the fastest peer of all",
    ),
    click.Option(
        ["--write"],
        type=click.Path(path_type=Path),
        is_flag=False,
        flag_value=".",
        metavar="[DIR]",
        help="write the tables and pictures of a checkout's pages (default: here)",
    ),
]


def _check(options: SimpleNamespace) -> None:
    if bool(options.files) == (options.write is not None):
        raise click.UsageError("expected either FILE.json or --write")
    if options.plot is not None and len(options.files) != 1:
        raise click.UsageError(f"--plot: expected one FILE.json, got {len(options.files)}")


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    options = parsing.parse(
        "python -m tdcoll report",
        "Markdown tables, and pictures, of results that `tdcoll bench` wrote with --json.",
        _PARAMETERS,
        arguments,
        _check,
        _EXAMPLES,
    )
    try:
        if options.write is not None:
            pages.write(options.write)
        results = [load_result(path) for path in options.files]
        texts = [tables.markdown(head, rows, only=options.only) for head, rows in results]
        print("\n".join(texts), end="")
        if options.plot is not None:
            plot(*results[0], options.plot, options.only)
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0
