# SPDX-License-Identifier: Apache-2.0
"""The sparse all-reduce benchmark: ``bash launch.sh [--nproc N] -m tdcoll bench sparse_all_reduce --help``.

Everybody starts from the same sparse tensors and ends with the sum over the ranks, of which every number is checked,
after every timed call. Each call has other row numbers and other values than the one before it.

Calls that give a sparse tensor have to know its size on the host, so they are timed one at a time and from an idle GPU
(:func:`~tdcoll.bench.timing.time_call`); tdcoll's padded form, which needs no host, in CUDA graph replays.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import tdcoll
from tdcoll.bench import case, options
from tdcoll.bench.arithmetic import calls_per_launch, floor_us
from tdcoll.bench.engine import Entry, Subject, nothing
from tdcoll.bench.options import each
from tdcoll.bench.rows import SparseRow
from tdcoll.bench.sparse_data import Rows, SparseData, Vocabulary, add_rows, check_rows, fraction
from tdcoll.bench.sparse_peers import PEERS, subject_of
from tdcoll.bench.table import sparse_columns
from tdcoll.collectives.sparse_all_reduce.context import symmetric_bytes
from tdcoll.collectives.sparse_all_reduce.policy import ALGORITHMS
from tdcoll.errors import RankMismatchError
from tdcoll.language import INTERPRETED

__all__ = ["SparseAllReduce", "main"]

_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
_COPIES = {"both": [True, False], "yes": [True], "no": [False]}


class SparseAllReduce(case.Case):
    """The case; a size is :class:`~tdcoll.bench.sparse_data.SparseData`."""

    benchmark = "sparse_all_reduce"
    columns = staticmethod(sparse_columns)

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        small = INTERPRETED
        parser = options.Parser(
            prog="bash launch.sh [--nproc N] -m tdcoll bench sparse_all_reduce",
            description="Time of row-sparse all-reduces from sparse tensor to sparse tensor, checked. On the "
            "simulator: checks and counts, of small sizes.",
        )
        distributions = "uniform,zipf1.05,zipf1.2"
        add_rows(parser, "40" if small else "1000,10000,50000", 500 if small else 5_000_000, distributions)
        parser.option("--dims", options.positive, "8" if small else "64,512,2048", "N,N", "numbers in a row")
        what = (
            "inputs that are not coalesced: which part of a rank's rows repeats others of that rank, or 'drawn', each "
            "drawn by itself, as nn.Embedding(sparse=True) has them; --rows counts all"
        )
        parser.option("--duplicates", each(fraction), "0", "A,B", what)
        parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="default %(default)s")
        parser.some("--algorithms", ALGORITHMS, "owner,gather,auto")
        parser.some("--peers", tuple(PEERS), "published,allgather,gloo,dense")
        what = "results in their own memory? (default both)"
        parser.add_argument("--copy", choices=_COPIES, default="both", help=what)
        options.add_launches(parser, "both")
        what = "rate that a GPU could send at, for the floor"
        parser.option("--floor-GBps", options.positive_number("GB/s"), 390.0, "X", what)
        options.add_common(parser, 20, warmup=2)
        given = parser.parse_args(arguments)
        options.check_common(parser, given)
        if given.duplicates != ["drawn"]:
            check_rows(parser, given)
        given.dtype = _DTYPES[given.dtype]
        if given.dtype.itemsize == 2 and given.duplicates != ["0"]:
            parser.error("--duplicates: sums of many rows have no exact value in 16 bits; take float32 or float64")
        return given

    @classmethod
    def title(cls, options: argparse.Namespace) -> str:
        return f"{options.num_rows} rows, {str(options.dtype).removeprefix('torch.')}"

    @classmethod
    def heap_bytes(cls, options: argparse.Namespace, world: int) -> int:
        """Return what the largest size needs, and what lines the ranks up."""
        sizes = [(rows, dim * options.dtype.itemsize) for rows in options.rows for dim in options.dims]
        return max(symmetric_bytes(world, *size) for size in sizes) + (world << 18) + (1 << 20)

    @staticmethod
    def forms(options: argparse.Namespace) -> list[tuple[str, bool | None]]:
        """Return what tdcoll is asked for: ``(form, copy)``."""
        copies = _COPIES[options.copy] if "eager" in options.launches else []
        return [*(("coo", copy) for copy in copies), *[("padded", None)] * ("graph" in options.launches)]

    def sizes(self) -> Iterator[SparseData]:
        """Every size, whose row numbers are made alike on all ranks."""
        options, rank, world = self.options, self.topology.rank, self.topology.world_size
        for distribution in options.distributions:
            vocabulary = Vocabulary(distribution, options.num_rows, self.device)
            for duplicates in options.duplicates:
                for count in options.rows:
                    made = Rows(vocabulary, count, duplicates, world, options.dtype)
                    if len(set(self.gather("rows", made.checksum))) > 1:
                        raise RankMismatchError("the ranks made different row numbers: are their GPUs of one kind?")
                    yield from (SparseData(made, dim, rank) for dim in options.dims)

    @contextlib.contextmanager
    def wanted(self, data: SparseData) -> Iterator[tuple[Sequence[case.Wanted], Callable[[], object]]]:
        context, problem = self.agree(
            "make the context",
            lambda: tdcoll.SparseContext(
                max_rows_per_rank=data.rows.rows, max_row_bytes=data.dim * data.rows.dtype.itemsize
            ),
            False,
        )

        def ours(name: str, form: str, copy: bool) -> Subject:
            if context is None:
                raise ValueError(problem)
            return _ours(name, form, copy, data, context)

        made = [
            case.Wanted(
                name,
                False,
                partial(ours, name, form, bool(copy)),
                ["graph" if form == "padded" else "eager"],
                {"form": form, "copy": copy},
            )
            for name in self.options.algorithms
            for form, copy in self.forms(self.options)
        ]
        made += [case.Wanted(name, True, partial(PEERS[name], data), ["eager"]) for name in self.options.peers]
        with contextlib.nullcontext() if context is None else context:
            yield made, nothing if context is None else context.check

    def row(self, data: SparseData, entry: Entry, /, **common: Any) -> SparseRow:
        if entry.subject is not None and entry.subject.data is not None:
            data = entry.subject.data
        rows = data.rows
        nbytes = rows.moved_rows * data.dim * rows.dtype.itemsize / self.topology.world_size
        return SparseRow(
            **common,
            rows=rows.rows,
            dim=data.dim,
            num_rows=rows.vocabulary.num_rows,
            dtype=str(rows.dtype).removeprefix("torch."),
            distribution=rows.vocabulary.distribution,
            duplicates=rows.duplicates,
            union_rows=rows.union_rows,
            moved_rows=rows.moved_rows,
            bytes_per_rank=nbytes,
            floor_us=floor_us(nbytes, self.options.floor_GBps),
        )


def _ours(name: str, form: str, copy: bool, data: SparseData, context: tdcoll.SparseContext) -> Subject:
    """tdcoll's all-reduce: from sparse tensor to sparse tensor, or padded."""
    calls = calls_per_launch(data.values(0).nbytes, context.world_size)

    def reduce(number: int) -> torch.Tensor:
        return tdcoll.sparse_all_reduce(data.tensors[number], context, algorithm=name, copy=copy)

    def reduce_padded(number: int) -> Any:
        indices, values, num_rows = data.indices(number), data.values(number), data.rows.vocabulary.num_rows
        coalesced = data.rows.coalesced
        return tdcoll.sparse_all_reduce_padded(indices, values, num_rows, context, coalesced=coalesced, algorithm=name)

    def errors_padded(number: int, result: Any) -> tuple[int, str]:
        count = int(result.count)
        return data.errors(number, result.indices[:count], result.values[:count])

    def errors(number: int, result: torch.Tensor) -> tuple[int, str]:
        if name == "auto" and (said := f"took {context.last_algorithm}") not in notes:
            notes.append(said)
        return data.errors_of(number, result)

    notes: list[str] = []
    if form == "padded":
        return subject_of(data, reduce_padded, errors=errors_padded, calls=calls)
    return subject_of(data, reduce, errors=errors, notes=notes)


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 1 if a result was wrong."""
    return case.run(SparseAllReduce, arguments)
