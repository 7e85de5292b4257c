# SPDX-License-Identifier: Apache-2.0
"""The sparse all-reduce benchmark: ``bash launch.sh [--nproc N] -m tdcoll bench sparse_all_reduce --help``.

tdcoll and the baselines start from the same sparse tensors and end with the sum over the ranks. Every number of it is
checked after every timed call. Each call has other row numbers and other values than the one before it. The baselines
are made of torch.distributed's collectives: over NCCL on GPUs, over gloo on the simulator, which is enough to check
them.

Every rank knows the inputs of all others, because everything is drawn on the CPU by generators that are seeded with
rank and input. Zipf's most frequent row is row 0, as in a vocabulary that is sorted by frequency. The number at place
``d`` of the j-th row that rank r gives in input i is ``head[r, i, j] + tail[d] + round``: small whole numbers, so sums
are exact in any order. The results of an earlier call are wrong everywhere, because the round goes up from call to call
and the inputs are taken in turn.

Calls that return a sparse tensor are timed one at a time and from an idle GPU, because the host has to know the size.
tdcoll's padded form, which needs no host, is timed in CUDA graph replays.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import tdcoll
from tdcoll.bench import case, options
from tdcoll.bench.data import exact
from tdcoll.bench.engine import Subject, Wanted, calls_of
from tdcoll.collectives.sparse_all_reduce.context import symmetric_bytes
from tdcoll.collectives.sparse_all_reduce.policy import ALGORITHMS
from tdcoll.language import INTERPRETED

__all__ = ["SparseAllReduce"]

_DTYPES = ("float16", "bfloat16", "float32", "float64")
INPUTS = 3
"""Inputs that calls take in turn, each with rows and values of its own."""

DUPLICATES = ("0", "drawn")
"""``"0"``: the rows of a rank are different and ascending, the first different ones of endless draws; ``"drawn"``: each
is drawn by itself, as ``nn.Embedding(sparse=True)`` has them."""

_MOST_HEADS, _MOST_TAILS = 1 << 15, 1 << 10
_CHECKED = 1 << 26
"""Numbers of a dense result that are looked at together."""

_COPIES = {"both": [True, False], "yes": [True], "no": [False]}


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``(out, tensor)``; newer PyTorch has renamed it."""

_NOBODY = -1
"""Pads lists of row numbers."""

_SPARE_BYTES = 2 << 30
"""GPU memory that is kept free beside a dense tensor."""


def distribution(name: str) -> str:
    """Return the name of a distribution of row numbers: ``"uniform"``, or ``"zipf1.2"`` with Zipf's exponent.

    Raises:
        ValueError: it is no such name.
    """
    if not re.fullmatch(r"uniform|zipf\d+(\.\d+)?", name):
        raise ValueError(f"expected uniform or zipf with an exponent, such as zipf1.2; got {name!r}")
    return name


class Rows(NamedTuple):
    """Row numbers of all ranks.

    Attributes:
        distribution: that they are drawn from, see :func:`distribution`.
        num_rows: of the whole tensor.
        rows: of each rank, repetitions counted.
        duplicates: one of :data:`DUPLICATES`.
        world: ranks.
    """

    distribution: str
    num_rows: int
    rows: int
    duplicates: str
    world: int


@functools.lru_cache(maxsize=1)
def draw(of: Rows) -> list[list[np.ndarray]]:
    """Return the row numbers of every rank in every input: ``[input][rank]`` is ``[rows]`` int64 in [0, num_rows).

    Raises:
        ValueError: there are not so many different rows.
    """
    frequencies, repeated = None, of.duplicates == "drawn"  # None: all are equal
    if of.distribution != "uniform":
        weights = np.arange(1, of.num_rows + 1, dtype=np.float64) ** -float(of.distribution.removeprefix("zipf"))
        frequencies = weights / weights.sum()

    def rows(rank: int, number: int) -> np.ndarray:
        generator = np.random.default_rng((rank, number))
        drawn = generator.choice(of.num_rows, of.rows, replace=repeated, p=frequencies)
        return drawn if repeated else np.sort(drawn)

    return [[rows(rank, number) for rank in range(of.world)] for number in range(INPUTS)]


class SparseData:
    """One rank's inputs, and the check of results.

    Args:
        rows: of all ranks.
        dim: numbers in a row.
        dtype: of the values.
        rank: whose inputs these are.
        device: of the inputs.

    Attributes:
        tensors: ``[num_rows, dim]`` sparse COO, one for each input; coalesced if there are no duplicates.
        shape: theirs.
        rounds: that the values of each input are of.
        union_rows: different rows of all ranks, the mean over the inputs.
        moved_rows: rows that move between ranks if a contributor of each row sums it and sends the sum to all others,
            likewise: ``sum(c_u - 1) + U (W - 1)``, with c_u contributors of row u, U rows of the union and W ranks.
            This is the lower bound if each row is summed in one place.

    Raises:
        ValueError: not enough rows, or sums would not be exact in ``dtype``.
    """

    def __init__(self, rows: Rows, dim: int, dtype: torch.dtype, rank: int, device: torch.device) -> None:
        self.rows, self.shape, self.dtype, self.rank, self.device = rows, (rows.num_rows, dim), dtype, rank, device
        self.coalesced, self._drawn = rows.duplicates == "0", draw(rows)
        unions = [np.unique(np.concatenate(lists), return_counts=True) for lists in self._drawn]
        most = max(int(entries.max()) for _, entries in unions)
        room = exact(dtype) // most
        if room < 8:
            raise ValueError(
                f"one row is the sum of {most} rows, and so many values have no exact sum in "
                f"{str(dtype).removeprefix('torch.')}; take fewer rows or duplicates, or another dtype"
            )
        self._n_heads, self._n_tails = min(_MOST_HEADS, room // 2), min(_MOST_TAILS, room // 4)
        self.n_rounds = self._n_tails
        self.rounds = [0] * INPUTS
        self.tensors = [self._input(rank, number) for number in range(INPUTS)]
        self.union_rows = sum(union.size for union, _ in unions) / INPUTS
        held = sum(np.unique(one).size for lists in self._drawn for one in lists) / INPUTS
        self.moved_rows = held + (rows.world - 2) * self.union_rows

    def _input(self, rank: int, number: int) -> torch.Tensor:
        """``[num_rows, dim]`` sparse COO: the input of a rank in its round."""
        generator = np.random.default_rng((rank, number, 1))
        heads = torch.from_numpy(generator.integers(self._n_heads, size=(self.rows.rows, 1)))
        tails = torch.from_numpy(np.random.default_rng(0).integers(self._n_tails, size=self.shape[1]))
        values = (heads.to(self.device) + (tails + self.rounds[number]).to(self.device)).to(self.dtype)
        indices = torch.from_numpy(self._drawn[number][rank])[None].to(self.device)
        shape, coalesced = self.shape, self.coalesced
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=False)

    def advance(self, number: int) -> None:
        """The input's next round, by one addition on the current stream. They begin again after ``n_rounds``."""
        following = (self.rounds[number] + 1) % self.n_rounds
        self.tensors[number]._values().add_(following - self.rounds[number])
        self.rounds[number] = following

    def expected(self, number: int) -> torch.Tensor:
        """``[num_rows, dim]`` sparse COO, coalesced: the sum of an input over the ranks."""
        inputs = [self._input(rank, number) for rank in range(self.rows.world)]
        indices = torch.cat([one._indices() for one in inputs], 1)
        values = torch.cat([one._values() for one in inputs])
        return torch.sparse_coo_tensor(indices, values, self.shape, check_invariants=False).coalesce()

    def errors(self, number: int, indices: torch.Tensor, values: torch.Tensor) -> tuple[int, str]:
        """Return how much is wrong in ``[U]`` row numbers and ``[U, dim]`` sums of an input, and where it begins."""
        at, expected = f"rank {self.rank}, input {number}", self.expected(number)
        rows, sums = expected._indices()[0], expected._values()
        if indices.shape != rows.shape or values.shape != sums.shape:
            shapes = f"{list(indices.shape)} row numbers and {list(values.shape)} values"
            return 1, f"{at}: expected {rows.numel()} rows of {self.shape[1]} values, got {shapes}"
        if wrong := int((indices != rows).sum()):
            place = int((indices != rows).nonzero()[0])
            found = f"expected {int(rows[place])}, got {int(indices[place])}"
            return wrong, f"{at}: {wrong} wrong row number(s), first: place {place}: {found}"
        differs = values != sums
        if not (wrong := int(differs.sum())):
            return 0, ""
        row, place = (int(i) for i in differs.nonzero()[0])
        found = f"expected {float(sums[row, place]):g}, got {float(values[row, place]):g}"
        return wrong, f"{at}: {wrong} wrong value(s), first: row {int(rows[row])} [{place}]: {found}"

    def errors_of(self, number: int, result: torch.Tensor) -> tuple[int, str]:
        """The same for a sparse tensor or, zeros elsewhere, a dense one of ``[num_rows, dim]``."""
        at = f"rank {self.rank}, input {number}"
        if result.shape != self.shape:
            return 1, f"{at}: expected a tensor of {self.shape}, got {tuple(result.shape)}"
        if result.is_sparse:
            if not result.is_coalesced():
                return 1, f"{at}: the result is not coalesced"
            return self.errors(number, result._indices()[0], result._values())
        rows = self.expected(number)._indices()[0]
        wrong, where = self.errors(number, rows, result[rows])
        if not wrong:
            filled = sum(int(part.count_nonzero()) for part in result.flatten().split(_CHECKED))
            wrong = filled - int(result[rows].count_nonzero())
            where = f"{at}: {wrong} value(s) in rows that nobody gave" if wrong else ""
        return wrong, where


def _sparse(rows: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(rows[None], values, like.shape, is_coalesced=True, check_invariants=False)


def _counts(count: int, device: torch.device) -> list[int]:
    """``count`` of every rank. Waits for the GPU."""
    counts = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    _all_gather(counts, torch.full((1,), count, dtype=torch.int64, device=device))
    return [int(number) for number in counts.tolist()]


def _padded(tensor: torch.Tensor, length: int, value: int) -> torch.Tensor:
    """``[n, ...] -> [length, ...]``"""
    if tensor.shape[0] == length:
        return tensor
    return torch.nn.functional.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, length - tensor.shape[0]], value=value)


def all_reduce_union(tensor: torch.Tensor) -> torch.Tensor:
    """Reduce by the published method: rank 0 makes the union, and zeros with every rank's rows are all-reduced.

    Row numbers go to rank 0, padded to the longest list. It removes duplicates, and sends the union's size and then the
    union to all ranks. Each rank finds its rows in the union, copies them into ``[U, dim]`` zeros, and all-reduces
    these.
    """
    tensor = tensor.coalesce()
    rows, values = tensor.indices()[0], tensor.values()
    counts = _counts(rows.numel(), rows.device)
    own = _padded(rows, max(counts), _NOBODY)
    size = torch.zeros(1, dtype=torch.int64, device=rows.device)
    union = rows
    if dist.get_rank() == 0:
        lists = [torch.empty_like(own) for _ in counts]
        dist.gather(own, lists)
        union = torch.unique(torch.cat(lists))
        union = union[int(min(counts) < max(counts)) :]  # without the padding, which is the least of all
        size.fill_(union.numel())
    else:
        dist.gather(own)
    dist.broadcast(size, 0)
    if dist.get_rank() != 0:
        union = rows.new_empty(int(size))
    dist.broadcast(union, 0)
    total = values.new_zeros((union.numel(), *values.shape[1:]))
    total[torch.searchsorted(union, rows)] = values
    dist.all_reduce(total)
    return _sparse(union, total, tensor)


def all_gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Send all row numbers and all rows to all ranks, padded to the longest list; each rank sums them itself."""
    rows, values = tensor._indices()[0], tensor._values()
    counts = _counts(rows.numel(), rows.device)
    most, world = max(counts), len(counts)
    all_rows = rows.new_empty(world * most)
    _all_gather(all_rows, _padded(rows, most, _NOBODY))
    all_values = values.new_empty((world * most, *values.shape[1:]))
    _all_gather(all_values, _padded(values, most, 0))
    union, places = torch.unique(all_rows, return_inverse=True)
    total = values.new_zeros((union.numel(), *values.shape[1:])).index_add_(0, places, all_values)
    padding = int(min(counts) < most)
    return _sparse(union[padding:], total[padding:], tensor)


def _subject_of(data: SparseData, call: Callable[[int], object], /, **named: Any) -> Subject:
    """Return a subject whose calls take the inputs of ``data`` in turn, each in its next round."""

    def before(numbers: Sequence[int]) -> None:
        for number in dict.fromkeys(numbers):
            data.advance(number)

    usual = {"errors": data.errors_of, "before": before, "inputs": INPUTS, "alone": True}
    return Subject(call, **{**usual, **named})


def _dense(data: SparseData) -> Subject:
    """Return a subject that all-reduces a dense ``[num_rows, dim]`` tensor, if it fits into the free memory."""
    need = data.shape[0] * data.shape[1] * data.dtype.itemsize
    if data.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        check = 4 * data.rows.world * data.tensors[0]._values().nbytes
        room = max(0, int(torch.cuda.mem_get_info()[0]) - check - _SPARE_BYTES)
        if need > room:
            raise RuntimeError(f"the dense tensor has {need / 1e9:.1f} GB, and {room / 1e9:.1f} GB are free")

    def all_reduce(number: int) -> torch.Tensor:
        dist.all_reduce(dense := data.tensors[number].to_dense())
        return dense

    return _subject_of(data, all_reduce)


PEERS: dict[str, Callable[[SparseData], Subject]] = {
    "published": lambda data: _subject_of(data, lambda number: all_reduce_union(data.tensors[number])),
    "allgather": lambda data: _subject_of(data, lambda number: all_gather_rows(data.tensors[number])),
    "dense": _dense,
}
"""Functions that make each baseline's subject, or raise the reason if it cannot run. Collective."""


class SparseAllReduce(case.Case):
    """The case; a size is :class:`SparseData`."""

    benchmark = "sparse_all_reduce"

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        small = INTERPRETED
        parser = options.Parser(
            prog="bash launch.sh [--nproc N] -m tdcoll bench sparse_all_reduce",
            description="Time of row-sparse all-reduces from sparse tensor to sparse tensor, checked. On the "
            "simulator: checks and counts, of small sizes.",
        )
        counts = options.each(options.at_least(1))
        parser.option("--rows", counts, "40" if small else "1000,10000,50000", "N,N", "rows of each rank")
        parser.option("--num-rows", options.at_least(1), 500 if small else 5_000_000, "N", "of the whole tensor")
        what = "which rows: uniform, or zipf and its exponent"
        parser.option("--distributions", options.each(distribution), "uniform,zipf1.05,zipf1.2", "A,B", what)
        parser.option("--dims", counts, "8" if small else "64,512,2048", "N,N", "numbers in a row")
        what = "rows that are different, or 'drawn': each drawn by itself, as nn.Embedding(sparse=True) has them"
        parser.option("--duplicates", options.each(options.one_of(DUPLICATES)), "0", "A,B", what)
        parser.option("--dtype", options.dtype(_DTYPES), "float32", "NAME", "of the values")
        parser.some("--algorithms", ALGORITHMS, "owner,gather,auto")
        parser.some("--peers", tuple(PEERS), "published,allgather,dense")
        what = "results in their own memory? (default both)"
        parser.add_argument("--copy", choices=_COPIES, default="both", help=what)
        options.add_launches(parser, "both")
        what = "rate that a GPU could send at, for the floor"
        rate = options.number(float, lambda value: value > 0, "a positive number of GB/s")
        parser.option("--floor-GBps", rate, 390.0, "X", what)
        options.add_common(parser, 20, warmup=2)
        given = parser.parse_args(arguments)
        if given.duplicates != ["drawn"] and (most := max(given.rows)) > given.num_rows:
            parser.error(f"--rows: {most} different rows are more than the {given.num_rows} of --num-rows")
        if given.dtype.itemsize == 2 and given.duplicates != ["0"]:
            parser.error("--duplicates: sums of many rows have no exact value in 16 bits; take float32 or float64")
        return given

    @classmethod
    def heap_bytes(cls, options: argparse.Namespace, world: int) -> int:
        """Return the bytes that the largest size and the line-up need."""
        sizes = [(rows, dim * options.dtype.itemsize) for rows in options.rows for dim in options.dims]
        return max(symmetric_bytes(world, *size) for size in sizes) + (world << 18) + (1 << 20)

    @staticmethod
    def forms(options: argparse.Namespace) -> list[tuple[str, bool | None]]:
        """Return the requested forms of tdcoll's call: ``(form, copy)``."""
        copies = _COPIES[options.copy] if "eager" in options.launches else []
        return [*(("coo", copy) for copy in copies), *[("padded", None)] * ("graph" in options.launches)]

    def sizes(self) -> Iterator[SparseData]:
        given, world = self.options, self.topology.world_size
        for of in itertools.product(given.distributions, [given.num_rows], given.rows, given.duplicates, [world]):
            for dim in given.dims:
                yield SparseData(Rows(*of), dim, given.dtype, self.topology.rank, self.device)

    @contextlib.contextmanager
    def wanted(self, data: SparseData) -> Iterator[tuple[Sequence[Wanted], Callable[[], object]]]:
        row_bytes = data.shape[1] * data.dtype.itemsize
        with tdcoll.SparseContext(max_rows_per_rank=data.rows.rows, max_row_bytes=row_bytes) as context:
            made = [
                Wanted(name, False, partial(_ours, name, form, bool(copy), data, context), [how], facts)
                for name in self.options.algorithms
                for form, copy in self.forms(self.options)
                for how, facts in [("graph" if form == "padded" else "eager", {"form": form, "copy": copy})]
            ]
            made += [Wanted(name, True, partial(PEERS[name], data), ["eager"]) for name in self.options.peers]
            yield made, context.check

    def facts(self, data: SparseData) -> dict[str, Any]:
        nbytes = data.moved_rows * data.shape[1] * data.dtype.itemsize / data.rows.world
        rows = {name: value for name, value in data.rows._asdict().items() if name != "world"}
        values = {"dim": data.shape[1], "dtype": str(data.dtype).removeprefix("torch.")}
        floor = {"bytes_per_rank": nbytes, "floor_us": nbytes / self.options.floor_GBps / 1e3}
        return {**rows, **values, "union_rows": data.union_rows, "moved_rows": data.moved_rows, **floor}


def _ours(name: str, form: str, copy: bool, data: SparseData, context: tdcoll.SparseContext) -> Subject:
    """Return tdcoll's all-reduce: from sparse tensor to sparse tensor, or padded."""
    calls = calls_of(data.tensors[0]._values().nbytes * context.world_size)

    def reduce(number: int) -> torch.Tensor:
        return tdcoll.sparse_all_reduce(data.tensors[number], ctx=context, algorithm=name, copy=copy)

    def reduce_padded(number: int) -> Any:
        given = data.tensors[number]
        what = given._indices()[0], given._values(), data.shape[0]
        return tdcoll.sparse_all_reduce_padded(*what, ctx=context, coalesced=data.coalesced, algorithm=name)

    def errors_padded(number: int, result: Any) -> tuple[int, str]:
        count = int(result.count)
        return data.errors(number, result.indices[:count], result.values[:count])

    def errors(number: int, result: torch.Tensor) -> tuple[int, str]:
        if name == "auto" and (said := f"took {context.last_algorithm}") not in notes:
            notes.append(said)
        return data.errors_of(number, result)

    notes: list[str] = []
    if form == "padded":
        return _subject_of(data, reduce_padded, errors=errors_padded, calls=calls)
    return _subject_of(data, reduce, errors=errors, notes=notes)
