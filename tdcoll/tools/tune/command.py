# SPDX-License-Identifier: Apache-2.0
"""Measure a tuning table of the dense collectives: ``python -m tdcoll run -m tdcoll tune --help``.

For each size all candidates are measured as the benchmarks do it, interleaved and checked:
algorithms, each with several numbers of chunks and of warps. :mod:`tdcoll.tools.tune.tuner`
describes how the table is made. After every size the table so far is written. The simulator, which
has no times, checks the candidates.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch

from tdcoll.base.arguments import format_bytes
from tdcoll.base.limits import MAX_CHUNKS
from tdcoll.calls.tuning import WARPS, Section
from tdcoll.language import INTERPRETED
from tdcoll.tools.measure.benchmark import Benchmark, Show, run
from tdcoll.tools.measure.collectives import DENSE_CALLS
from tdcoll.tools.measure.dense import dense_calls, dense_facts, dense_heap_bytes
from tdcoll.tools.measure.engine import Variant, Workload
from tdcoll.tools.measure.results import Columns, Row, fact
from tdcoll.tools.options import JobParser, comma_list, new_file, one_of, size_steps, whole
from tdcoll.tools.setenv import COMMAND
from tdcoll.tools.tune.tuner import CHUNK_COUNTS, WARP_COUNTS, Candidate, Tuner
from tdcoll.tools.tune.writing import read_output, saving, source_of

_DESCRIPTION = (
    "Measures which algorithm of a collective is the fastest on this machine, and writes a table "
    "for TDCOLL_TUNING. Sizes: bytes of a segment (per rank), such as 64M. 'tune matmul --help' has "
    "the options of matmuls that communicate."
)

_NAMES = itertools.chain.from_iterable(call.spec.names for call in DENSE_CALLS.values())
_ALGORITHMS = tuple(dict.fromkeys(_NAMES))
"""The algorithms of all dense collectives."""

_ITEMSIZE = 2
"""Sizes are multiples of so many bytes, because reductions are tuned with bfloat16."""


def _numbers(values: Sequence[int]) -> str:
    return ",".join(str(value) for value in values)


def _warps(text: str) -> int:
    """Parse a number of warps that a thread block can have."""
    expected = [str(count) for count in WARPS]
    if text not in expected:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(expected)}, got {text!r}")
    return int(text)


def _parser() -> JobParser:
    """Return the parser of the command line."""
    parser = JobParser(
        prog=f"{COMMAND} [--nproc N] -m tdcoll tune",
        description=_DESCRIPTION,
        epilog=f"example: {COMMAND} -m tdcoll tune -b 1K -e 64M -o mine.json",
    )

    def add(*names: str, default: str, text: str, **more: Any) -> None:
        parser.add_argument(*names, default=default, help=f"{text} (default {default})", **more)

    names = tuple(DENSE_CALLS)
    add(
        "--operation",
        type=comma_list(one_of(names)),
        default=",".join(names),
        metavar="A,B",
        text=f"some of {', '.join(names)}",
    )
    add("-b", "--begin", default="256", text="first size")
    add("-e", "--end", default="1K" if INTERPRETED else "64M", text="last size, such as 64M")
    add("-f", "--factor", default="4", text="from one size to the next")
    add(
        "--algorithms",
        type=comma_list(one_of(_ALGORITHMS)),
        default=",".join(_ALGORITHMS),
        metavar="A,B",
        text=f"some of {', '.join(_ALGORITHMS)}",
    )
    add(
        "--chunks",
        type=comma_list(whole(1, MAX_CHUNKS)),
        default=_numbers(CHUNK_COUNTS),
        metavar="N,N",
        text="numbers of chunks of a segment",
    )
    add(
        "--warps",
        type=comma_list(_warps),
        default=_numbers(WARP_COUNTS),
        metavar="N,N",
        text="numbers of warps of a thread block",
    )
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="measure calls in place as well, where tables have sections for them",
    )
    add(
        "--iterations",
        type=whole(2),
        default="40",
        metavar="N",
        text="timed launches of each candidate",
    )
    add("--warmup", type=whole(1), default="5", metavar="N", text="untimed launches before")
    parser.add_argument(
        "--json",
        type=new_file,
        metavar="FILE",
        help="write the candidates' rows, and how they were measured",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=new_file,
        metavar="FILE",
        required=True,
        help="the table, written after every size; if it exists, its sections of other machines, "
        "operations and kinds of call are kept",
    )
    return parser


class TuneSize(NamedTuple):
    """An operation to tune, and the bytes of a segment."""

    tuner: Tuner
    nbytes: int


class Tune(Benchmark):
    """The command, as a benchmark of candidates."""

    name = "tune"
    columns = Columns(
        size={
            "collective": fact("{operation}"),
            "bytes per rank": lambda row: format_bytes(row.facts["bytes_per_rank"]),
        }
    )

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        parser = _parser()
        options = parser.parse_args(arguments)
        try:
            options.sizes = size_steps(options.begin, options.end, options.factor, _ITEMSIZE)
        except ValueError as error:
            parser.error(str(error))
        read_output(parser, options.output)
        options.arguments = list(arguments)
        return options

    @classmethod
    def heap_bytes(cls, options: argparse.Namespace, world: int) -> int:
        needs = []
        for name in options.operation:
            call = DENSE_CALLS[name]
            in_heap = options.in_place and bool(call.spec.in_place)
            needs.append(dense_heap_bytes(call, options.sizes, world, buffers_in_heap=in_heap))
        return max(needs)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        topology = self.ranks.topology
        if topology.ranks_per_node is None:
            job = topology.describe()
            raise ValueError(f"tables are for nodes of one size; this job has {job}")
        self._tuners = [
            Tuner(
                DENSE_CALLS[name],
                topology,
                in_place=options.in_place,
                names=options.algorithms,
                chunks=options.chunks,
                warps=options.warps,
            )
            for name in options.operation
        ]
        self._source = source_of(self.name, options.arguments, self.ranks.owner)

    def sizes(self) -> Iterator[TuneSize]:
        for tuner in self._tuners:
            for nbytes in self.options.sizes:
                if tuner.candidates(nbytes):
                    yield TuneSize(tuner, nbytes)

    @contextlib.contextmanager
    def variants(self, size: TuneSize) -> Iterator[tuple[list[Variant], Callable[[], object]]]:
        """Yield every candidate; calls out of place share their buffers, and so do those in place.

        They are timed in CUDA graphs. Eager calls take the same plans, and small ones are bound by
        launch overhead.
        """
        tuner, nbytes = size
        dtype, op = _kind_of(tuner)
        with dense_calls(self.ranks, tuner.call, nbytes, dtype, op) as calls:

            def make(candidate: Candidate) -> Workload:
                algorithm = tuner.algorithm(candidate, nbytes)
                return calls.workload(algorithm, in_place=candidate.in_place)

            variants = [
                Variant(
                    name=candidate.name,
                    is_baseline=False,
                    make=partial(make, candidate),
                    launches=["graph"],
                    facts={"candidate": asdict(candidate)},
                )
                for candidate in tuner.candidates(nbytes)
            ]
            yield variants, calls.context.check

    def facts(self, size: TuneSize) -> dict[str, Any]:
        dtype, op = _kind_of(size.tuner)
        return dense_facts(size.tuner.call, size.nbytes, dtype, op)

    def measure(self, show: Show) -> list[Row]:
        """Write the table after every size. Collective."""
        return super().measure(saving(show, self.options.output, self.ranks, self._sections))

    def _sections(self, rows: Sequence[Row], architecture: str) -> list[Section]:
        """Return the sections that follow from ``rows``."""
        found: list[Section] = []
        for tuner in self._tuners:
            own = [row for row in rows if row.facts["operation"] == tuner.call.name]
            found += tuner.sections(own, architecture, self._source)
        return found


def _kind_of(tuner: Tuner) -> tuple[torch.dtype, str | None]:
    """Return the dtype and the reduction of the calls that are tuned."""
    call = tuner.call
    return getattr(torch, call.tuned_dtype), "sum" if call.spec.reduces else None


def main(arguments: Sequence[str]) -> int:
    """Run the command, or ``tune matmul``; return 1 if a result was wrong."""
    if arguments and arguments[0] == "matmul":
        from tdcoll.tools.tune import matmul

        return matmul.main(arguments[1:])
    return run(Tune, arguments)
