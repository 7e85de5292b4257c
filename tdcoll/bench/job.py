# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: the ranks and what they agree on, and the command around a measurement."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import tdcoll
from tdcoll import environment, runtime
from tdcoll.bench import rows as files
from tdcoll.bench.projection import Cluster, cluster
from tdcoll.bench.provenance import command_line, provenance
from tdcoll.bench.rows import AnyRow
from tdcoll.bench.sparse_data import Vocabulary
from tdcoll.bench.table import Column, Table
from tdcoll.errors import CollectiveTimeout, HeapExhaustedError
from tdcoll.language import INTERPRETED
from tdcoll.runtime import lifecycle

__all__ = [
    "Job",
    "Parser",
    "add_iterations",
    "add_json",
    "add_launches",
    "add_project",
    "add_rows",
    "at_least",
    "check_project",
    "check_rows",
    "each",
    "names",
    "positive",
    "require_directory",
    "run",
]


_SAVE_AFTER_S = 5.0
"""Of a job that is ended early, what it has measured until so long before is in its file."""


# ---------------------------------------------------------------------- options


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A type for argparse: ``"a,b"``, all of them known."""

    def parse_names(text: str) -> list[str]:
        given = [name for name in text.split(",") if name]
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}; got {', '.join(unknown)}")
        return list(dict.fromkeys(given))

    return parse_names


class Parser(argparse.ArgumentParser):
    """One that speaks on rank 0 only: all ranks of a job read the same command line."""

    patience_s = 10.0
    """Seconds that the others leave rank 0 to say what is wrong: the launcher ends all ranks when one has failed."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super()._print_message(message, file)
        elif file is sys.stderr:
            time.sleep(self.patience_s)


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: a whole number."""

    def parse_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    return parse_number


def positive(text: str) -> list[int]:
    """A type for argparse: ``"1,2"``, whole numbers of at least 1."""
    numbers = list(dict.fromkeys(at_least(1)(part) for part in text.split(",") if part))
    if not numbers:
        raise argparse.ArgumentTypeError("expected at least one number, got none")
    return numbers


def each(check: Callable[[str], object]) -> Callable[[str], list[str]]:
    """A type for argparse: ``"a,b"``, none of which ``check`` refuses with a ValueError."""

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


def add_rows(parser: argparse.ArgumentParser, rows: str, num_rows: int, distributions: str) -> None:
    """The options that say which row numbers there are, with these defaults."""
    parser.add_argument(
        "--rows",
        type=positive,
        default=rows,
        metavar="N,N",
        help="rows that each rank, or list, has (default %(default)s)",
    )
    parser.add_argument(
        "--num-rows", type=at_least(1), default=num_rows, metavar="N", help="of the whole tensor (default %(default)s)"
    )
    parser.add_argument(
        "--distributions",
        type=each(Vocabulary.exponent_of),
        default=distributions,
        metavar="A,B",
        help="which rows: uniform, or zipf and its exponent (default %(default)s)",
    )


def check_rows(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End with status 2 if there are not so many different rows."""
    if (most := max(given.rows)) > given.num_rows:
        parser.error(f"--rows: {most} different rows are more than the {given.num_rows} of --num-rows")


def add_iterations(parser: argparse.ArgumentParser, name: str, least: int, default: int, warmup: int = 5) -> None:
    """The options that say how often."""
    parser.add_argument(
        name, type=at_least(least), default=default, metavar="N", help="timed calls, or replays (default %(default)s)"
    )
    parser.add_argument(
        "--warmup", type=at_least(1), default=warmup, metavar="N", help="untimed ones (default %(default)s)"
    )


def add_launches(parser: argparse.ArgumentParser, default: str) -> None:
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


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option that says where the result goes."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and how they were measured")


def add_project(parser: argparse.ArgumentParser) -> None:
    """The option that asks for a projection."""
    parser.add_argument(
        "--project",
        type=cluster,
        metavar="nodes=N,ranks=N,latency_us=X,GBps=X[,intra_latency_us=X,intra_GBps=X,put_us=X]",
        help="on the simulator: from the counts, the time that a cluster of this shape would take (alpha-beta model; "
        "ranks of all nodes together; latency and rate of a rank between nodes, and inside)",
    )


def check_project(parser: argparse.ArgumentParser, wanted: Cluster | None) -> None:
    """End with status 2 where there are no counts to project from."""
    if wanted is not None and not INTERPRETED:
        parser.error("--project needs the counts of the simulator: start with launch.sh --simulate")


def require_directory(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """End with status 2 unless ``--json`` can be written."""
    if path is not None and not path.absolute().parent.is_dir():
        parser.error(f"--json: there is no directory {path.parent}")


# ---------------------------------------------------------------------- the ranks


class Job:
    """The ranks, and what they agree on."""

    def __init__(self) -> None:
        self.owner = runtime.current()
        self.topology = self.owner.topology()
        self.device = self.owner.device

    def gather(self, what: str, value: Any) -> list[Any]:
        """``value`` of every rank; also a barrier between hosts."""
        return self.owner.control.all_gather(range(self.owner.world_size), what, value)

    def agree(self, what: str, action: Callable[[], Any], peer: bool) -> tuple[Any, str | None]:
        """``(result, None)`` if the action works on every rank, else ``(None, why not)``, on every rank.

        A peer may fail as it likes. What tdcoll does not support is a ValueError, what does not fit a
        HeapExhaustedError; anything else is raised.
        """
        result, problem = None, None
        try:
            result = action()
        except Exception as error:
            if isinstance(error, CollectiveTimeout) or not (
                peer or isinstance(error, (ValueError, HeapExhaustedError))
            ):
                raise
            problem = " ".join(f"{error}".split())[:300] or type(error).__name__
        for rank, other in enumerate(self.gather(what, problem)):
            if other is not None:
                return None, other if rank == self.topology.rank or problem else f"rank {rank}: {other}"
        return result, None

    def count(self, action: Callable[[], Any], calls: int = 1) -> dict[str, list[float]]:
        """What the simulator counts while ``action`` makes ``calls`` calls: per call, of each rank."""
        from tdcoll.runtime.simulator.current import machine

        counted = machine().counts[self.topology.pes[self.topology.rank]]
        before = dataclasses.asdict(counted)
        action()
        own = {key: (value - before[key]) / calls for key, value in dataclasses.asdict(counted).items()}
        counts = self.gather("counts", own)
        return {key: [of_rank[key] for of_rank in counts] for key in own}


# ---------------------------------------------------------------------- the command


def refuse_shared_gpus(benchmark: str) -> None:
    """End with status 2 where ranks may share GPUs."""
    if lifecycle.may_share_gpus():
        Parser(prog=f"bash launch.sh [--nproc N] -m tdcoll.bench {benchmark}", usage="%(prog)s [options]").error(
            "TDCOLL_SHARE_GPUS (launch.sh --share-gpus) or initialize(share_gpus=True): expected neither, got a job "
            "whose ranks may share GPUs, where times mean nothing and gloo takes NCCL's place. Take as many ranks as "
            "GPUs, or --simulate"
        )


def run(
    benchmark: str,
    arguments: Sequence[str],
    json: Path | None,
    *,
    title: str,
    heap_bytes: Callable[[int], int],
    columns: Callable[[bool], Sequence[Column]] | None,
    measure: Callable[[bool, Callable[[AnyRow], None]], Sequence[AnyRow]],
    project: Callable[[Sequence[AnyRow]], Sequence[str]] | None = None,
) -> int:
    """Join, measure, show, write, leave. The exit status: 1 if a result was wrong; ends with 2 on shared GPUs.

    Args:
        benchmark: its name; ``arguments``: its command line; ``title``: what is measured with.
        json: where the rows go, in the end and every few seconds.
        heap_bytes: symmetric heap that it needs, from the number of ranks.
        columns: of the table, from whether there are no times. None: ``measure`` prints what there is to see.
        measure: makes the rows, and shows each as soon as it is known; told whether it is simulated.
        project: what follows from the rows, as lines of Markdown; they are printed and written as well.
    """
    refuse_shared_gpus(benchmark)
    needed = heap_bytes(int(os.environ.get("WORLD_SIZE", "1")))
    tdcoll.initialize(heap_bytes=max(environment.heap_bytes(INTERPRETED), needed))
    owner = runtime.current()
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    facts = provenance()
    heading = f"{benchmark}, {owner.topology().describe()}, {title}"
    visible = columns is not None and owner.rank == 0
    table = Table(heading, columns(owner.simulated) if columns is not None else (), visible)
    stream: AbstractContextManager[Any] = nullcontext() if owner.simulated else torch.cuda.stream(torch.cuda.Stream())
    command = command_line(benchmark, arguments, owner.world_size, owner.simulated)
    head: dict[str, Any] = {"benchmark": benchmark, "command": command, "started": started, "provenance": facts}
    shown: list[AnyRow] = []
    saved = time.monotonic()

    def show(row: AnyRow) -> None:
        nonlocal saved
        table.add(row)
        shown.append(row)
        if json is not None and owner.rank == 0 and time.monotonic() - saved > _SAVE_AFTER_S:
            files.save(json, head, shown)
            saved = time.monotonic()

    with table, stream:
        rows = measure(owner.simulated, show)
    if project is not None and owner.rank == 0:
        head["projection"] = list(project(rows))
        print("\n" + "\n".join(head["projection"]), flush=True)
    if json is not None and owner.rank == 0:
        files.save(json, head, rows)
    tdcoll.finalize()
    return 1 if any(row.check == "WRONG" for row in rows) else 0
