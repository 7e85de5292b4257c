# SPDX-License-Identifier: Apache-2.0
"""Options of benchmarks, with one name for one thing, and the values that they accept."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch

from tdcoll.base.arguments import parse_bytes
from tdcoll.tools.options import LAUNCHER_DELAY_S, is_first_rank, size_steps
from tdcoll.tools.setenv import COMMAND

_HELP_WIDTH = 100
_ITERATIONS = "timed launches, or calls that are timed one at a time"
_JSON = "write the rows, and how they were measured"


class CommaList(click.ParamType):
    """``"a,b"``: a list of at least ``least`` different values, each of the type ``item``."""

    name = "list"

    def __init__(self, item: click.ParamType, least: int = 1) -> None:
        self.item = item
        self.least = least

    def convert(self, value: Any, param: Any, ctx: Any) -> list[Any]:
        if isinstance(value, list):
            return value
        items = [self.item.convert(text, param, ctx) for text in value.split(",") if text]
        if len(items) < self.least:
            self.fail(f"expected at least {self.least} value, got {value!r}", param, ctx)
        return list(dict.fromkeys(items))


class ByteCount(click.ParamType):
    """A number of bytes, such as 1024, 1K or 64M."""

    name = "bytes"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        try:
            nbytes = parse_bytes(value, "a size")
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return nbytes


class Dtype(click.Choice):
    """The name of one of these dtypes; the value is the dtype."""

    def convert(self, value: Any, param: Any, ctx: Any) -> torch.dtype:
        if isinstance(value, torch.dtype):
            return value
        dtype: torch.dtype = getattr(torch, super().convert(value, param, ctx))
        return dtype


class NewFile(click.ParamType):
    """The path of a file to write, in a directory that exists."""

    name = "file"

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        file = Path(value)
        if not file.absolute().parent.is_dir():
            self.fail(f"there is no directory {file.parent}", param, ctx)
        return file


def option(*names: str, **settings: Any) -> click.Option:
    """Return an option whose help shows its default."""
    return click.Option(list(names), show_default=bool(settings.get("default")), **settings)


def names_option(name: str, known: Sequence[str], default: str, text: str) -> click.Option:
    """Return an option that takes some of the names in ``known``, or none."""
    return option(
        name,
        type=CommaList(click.Choice(known), least=0),
        default=default,
        metavar="A,B",
        help=f"{text}: some of {', '.join(known)}, or ''",
    )


def numbers_option(name: str, default: str, text: str) -> click.Option:
    """Return an option that takes whole numbers of at least 1; none, if that is the default."""
    numbers = CommaList(click.IntRange(min=1), least=1 if default else 0)
    return option(name, type=numbers, default=default, metavar="N,N", help=text)


def number_option(name: str, least: int, default: int, text: str) -> click.Option:
    """Return an option that takes a whole number of at least ``least``."""
    number = click.IntRange(min=least)
    return option(name, type=number, default=default, metavar="N", help=text)


def dtype_option(names: Sequence[str], default: str) -> click.Option:
    """Return the option for the dtype of the data."""
    return option("--dtype", type=Dtype(names), default=default, help="dtype of the data")


def common_options(iterations: int, warmup: int = 5) -> list[click.Option]:
    """Return the options for the number of iterations, and for the file of the result."""
    return [
        number_option("--iterations", 2, iterations, _ITERATIONS),
        number_option("--warmup", 1, warmup, "untimed launches before"),
        option("--json", type=NewFile(), metavar="FILE", help=_JSON),
    ]


_LAUNCHES = {"graph": ["graph"], "eager": ["eager"], "both": ["graph", "eager"]}


def launch_options(default: str) -> list[click.Option]:
    """Return the options for the ways to launch: "graph", "eager" or "both".

    :func:`launches` reads them.
    """
    texts = {
        "graph": "CUDA graph replays",
        "eager": "eager calls",
        "both": "one after the other",
    }
    texts[default] += " (default)"
    return [click.Option([f"--{name}"], is_flag=True, help=text) for name, text in texts.items()]


def launches(options: SimpleNamespace, default: str) -> list[str]:
    """Return the ways to launch that the options of :func:`launch_options` request."""
    given = [name for name in _LAUNCHES if getattr(options, name)]
    if len(given) > 1:
        raise click.UsageError(f"expected one of --{', --'.join(_LAUNCHES)}; got {len(given)}")
    return _LAUNCHES[given[0] if given else default]


def size_options(begin: str, end: str) -> list[click.Option]:
    """Return the options for sizes, which :func:`sizes` reads."""
    return [
        option("-b", "--begin", default=begin, help="first size"),
        option("-e", "--end", default=end, help="last size, such as 64M"),
        option("-f", "--factor", default="4", help="from one size to the next"),
    ]


def sizes(options: SimpleNamespace, itemsize: int) -> list[int]:
    """Return the sizes in bytes that the options of :func:`size_options` request."""
    try:
        return size_steps(options.begin, options.end, options.factor, itemsize)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def parse(
    program: str,
    summary: str,
    parameters: Sequence[click.Parameter],
    arguments: Sequence[str],
    finish: Callable[[SimpleNamespace], object] = lambda options: None,
    examples: Sequence[str] = (),
) -> SimpleNamespace:
    """Return the options of a command; if one is wrong, end the process with status 2.

    Help and errors are printed on rank 0 only, because all ranks of a job read the same command
    line.

    Args:
        finish: completes the options, or raises ``click.UsageError``.
        examples: commands that the help shows.
    """
    parser = click.Command(
        program,
        params=list(parameters),
        help=summary,
        epilog="\n".join(["\b", "example:", *(f"  {example}" for example in examples)]),
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _HELP_WIDTH},
    )
    if is_first_rank():
        output: Any = contextlib.nullcontext()
    else:
        output = contextlib.redirect_stdout(io.StringIO())
    try:
        with output:
            context = parser.make_context(program, list(arguments))
        options = SimpleNamespace(**context.params)
        with context:
            finish(options)
    except click.exceptions.Exit as end:  # after --help
        raise SystemExit(end.exit_code) from end
    except click.ClickException as error:
        if is_first_rank():
            error.show()
        else:
            time.sleep(LAUNCHER_DELAY_S)
        raise SystemExit(error.exit_code) from error
    return options


def parse_benchmark(
    name: str,
    summary: str,
    parameters: Sequence[click.Parameter],
    arguments: Sequence[str],
    finish: Callable[[SimpleNamespace], object] = lambda options: None,
) -> SimpleNamespace:
    """Return the options of the benchmark ``name``, as :func:`parse` does."""
    command = f"-m tdcoll bench {name}"
    return parse(
        f"{COMMAND} [--nproc N] {command}",
        summary,
        parameters,
        arguments,
        finish,
        [f"{COMMAND} {command} --json result.json"],
    )
