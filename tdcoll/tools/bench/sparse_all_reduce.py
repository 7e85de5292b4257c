# SPDX-License-Identifier: Apache-2.0
"""The sparse all-reduce benchmark: ``bash launch.sh [--nproc N] -m tdcoll bench sparse_all_reduce --help``.

tdcoll and the baselines start from the same sparse tensors and end with the sum over the ranks, of which every number
is checked after every timed call. The baselines are made of torch.distributed's collectives: over NCCL on GPUs, over
gloo on the simulator, which is enough to check them.

Every rank draws the inputs of all ranks, from generators that are seeded with rank and input. Zipf's most frequent row
is row 0, as in a vocabulary that is sorted by frequency. Values are small whole numbers, so sums are exact in any
order. Results of an earlier call are wrong everywhere, because all values go up from call to call and the inputs are
taken in turn.

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
from tdcoll.collectives.sparse_all_reduce.policy import ALGORITHMS, choose
from tdcoll.language import INTERPRETED
from tdcoll.tools.bench import case, options
from tdcoll.tools.bench.arithmetic import FLOORS
from tdcoll.tools.bench.data import Numbers
from tdcoll.tools.bench.engine import Subject, Wanted, calls_of

_DTYPES = ("float16", "bfloat16", "float32", "float64")
INPUTS = 3
"""Inputs that calls take in turn, each with rows and values of its own."""

_GBPS = FLOORS["NVIDIA H200"].gbps
"""The rate at which a GPU could send, for the lower bound."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``(out, tensor)``; newer PyTorch has renamed it."""


def distribution(name: str) -> str:
    """Return the name of a distribution of row numbers: ``"uniform"``, or ``"zipf1.2"`` with Zipf's exponent."""
    if not re.fullmatch(r"uniform|zipf\d+(\.\d+)?", name):
        raise ValueError(f"expected uniform or zipf with an exponent, such as zipf1.2; got {name!r}")
    return name


class DrawnRows(NamedTuple):
    """Row numbers: ``rows`` for each of ``world`` ranks, of a tensor of ``num_rows``, from a :func:`distribution`."""

    distribution: str
    num_rows: int
    rows: int
    world: int


@functools.lru_cache(maxsize=1)
def draw(of: DrawnRows) -> list[list[np.ndarray]]:
    """Return the row numbers of every rank in every input: ``[input][rank]`` is ``[rows]`` int64, ascending.

    They are the first different ones of endless draws from [0, num_rows).
    """
    frequencies = None  # all are equal
    if of.distribution != "uniform":
        weights = np.arange(1, of.num_rows + 1, dtype=np.float64) ** -float(of.distribution.removeprefix("zipf"))
        frequencies = weights / weights.sum()

    def rows(rank: int, number: int) -> np.ndarray:
        drawn = np.random.default_rng((rank, number)).choice(of.num_rows, of.rows, replace=False, p=frequencies)
        return np.sort(drawn)

    return [[rows(rank, number) for rank in range(of.world)] for number in range(INPUTS)]


class SparseData:
    """One rank's inputs, and the check of results.

    Attributes:
        tensors: ``[num_rows, dim]`` sparse COO, one for each input; coalesced.
        rounds: that the values of each input are of.
        union_rows: different rows of all ranks, the mean over the inputs.
        moved_rows: rows that move between ranks if a contributor of each row sums it and sends the sum to all others,
            likewise: ``sum(c_u - 1) + U (W - 1)``, with c_u contributors of row u, U rows of the union and W ranks.
            This is the lower bound if each row is summed in one place.
    """

    def __init__(self, rows: DrawnRows, dim: int, dtype: torch.dtype, rank: int, device: torch.device) -> None:
        self.rows, self.shape, self.dtype, self.rank, self.device = rows, (rows.num_rows, dim), dtype, rank, device
        self._drawn, self._numbers = draw(rows), Numbers(dtype, rows.world, device)
        self.rounds = [0] * INPUTS
        self.tensors = [self._input(rank, number) for number in range(INPUTS)]
        self.union_rows = sum(np.unique(np.concatenate(lists)).size for lists in self._drawn) / INPUTS
        self.moved_rows = rows.rows * rows.world + (rows.world - 2) * self.union_rows

    def _input(self, rank: int, number: int) -> torch.Tensor:
        """``[num_rows, dim]`` sparse COO: the input of a rank in its round."""
        values = self._numbers.draw((self.rows.rows, self.shape[1]), self.rounds[number], rank, number)
        rows = torch.from_numpy(self._drawn[number][rank]).to(self.device)
        return _sparse(rows, values, self.shape)

    def advance(self, number: int) -> None:
        """The input's next round, by one addition on the current stream."""
        self.rounds[number] += 1
        self.tensors[number]._values().add_(self._numbers.step(self.rounds[number]))

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
        for what, right, found in (("row number", rows, indices), ("value", sums, values)):
            if found.shape != right.shape:
                return 1, f"{at}: expected {what}s of shape {list(right.shape)}, got {list(found.shape)}"
            if count := int((wrong := found != right).sum()):
                place = tuple(wrong.nonzero()[0].tolist())
                first = f"place {list(place)}: expected {float(right[place]):g}, got {float(found[place]):g}"
                return count, f"{at}: {count} wrong {what}(s), first: {first}"
        return 0, ""

    def errors_of(self, number: int, result: torch.Tensor) -> tuple[int, str]:
        """Return the count and a description of wrong values in a sparse ``[num_rows, dim]`` tensor."""
        if result.shape != self.shape or not result.is_coalesced():
            said = f"a coalesced tensor of {self.shape}, got {tuple(result.shape)}, coalesced: {result.is_coalesced()}"
            return 1, f"rank {self.rank}, input {number}: expected {said}"
        return self.errors(number, result._indices()[0], result._values())


def _sparse(rows: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)


def _exchange_counts(rows: torch.Tensor) -> int:
    """Exchange how many rows each rank has, as every caller must, and wait for it. Return the number of ranks."""
    counts = torch.empty(dist.get_world_size(), dtype=torch.int64, device=rows.device)
    _all_gather(counts, torch.full((1,), rows.numel(), dtype=torch.int64, device=rows.device))
    return len(counts.tolist())


def all_reduce_union(tensor: torch.Tensor) -> torch.Tensor:
    """Reduce by the published method: rank 0 makes the union, and zeros with every rank's rows are all-reduced.

    Row numbers go to rank 0. It removes duplicates, and sends the union's size and then the union to all ranks. Each
    rank finds its rows in the union, copies them into ``[U, dim]`` zeros, and all-reduces these.
    """
    rows, values = tensor.indices()[0], tensor.values()
    world, first = _exchange_counts(rows), dist.get_rank() == 0
    lists = [torch.empty_like(rows) for _ in range(world)] if first else None
    dist.gather(rows, lists)
    union = torch.unique(torch.cat(lists)) if lists else rows
    size = torch.full((1,), union.numel(), dtype=torch.int64, device=rows.device)
    dist.broadcast(size, 0)
    union = union if first else rows.new_empty(int(size))
    dist.broadcast(union, 0)
    total = values.new_zeros((union.numel(), *values.shape[1:]))
    total[torch.searchsorted(union, rows)] = values
    dist.all_reduce(total)
    return _sparse(union, total, tensor.shape)


def all_gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Send all row numbers and all rows to all ranks; each rank sums them itself."""
    rows, values = tensor.indices()[0], tensor.values()
    all_rows = rows.new_empty(rows.numel() * _exchange_counts(rows))
    _all_gather(all_rows, rows)
    all_values = values.new_empty((all_rows.numel(), *values.shape[1:]))
    _all_gather(all_values, values)
    union, places = torch.unique(all_rows, return_inverse=True)
    total = values.new_zeros((union.numel(), *values.shape[1:])).index_add_(0, places, all_values)
    return _sparse(union, total, tensor.shape)


def _subject_of(data: SparseData, call: Callable[[int], object], /, **named: Any) -> Subject:
    """Return a subject whose calls take the inputs of ``data`` in turn, each in its next round."""

    def before(numbers: Sequence[int]) -> None:
        for number in dict.fromkeys(numbers):
            data.advance(number)

    usual = {"errors": data.errors_of, "before": before, "inputs": INPUTS, "alone": True}
    return Subject(call, **{**usual, **named})


PEERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"published": all_reduce_union, "allgather": all_gather_rows}
"""The call of each baseline."""


class SparseCase(case.Case):
    """The case; a size is :class:`SparseData`."""

    benchmark = "sparse_all_reduce"

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        small = INTERPRETED
        parser = options.Parser(
            "bench sparse_all_reduce",
            "Time of row-sparse all-reduces from sparse tensor to sparse tensor, checked. On the "
            "simulator: checks, of small sizes.",
        )
        counts = options.each(options.at_least(1))
        parser.option("--rows", counts, "40" if small else "1000,10000,50000", "N,N", "rows of each rank")
        parser.option("--num-rows", options.at_least(1), 500 if small else 5_000_000, "N", "of the whole tensor")
        what = "which rows: uniform, or zipf and its exponent"
        parser.option("--distributions", options.each(distribution), "uniform,zipf1.05,zipf1.2", "A,B", what)
        parser.option("--dims", counts, "8" if small else "64,512,2048", "N,N", "numbers in a row")
        parser.option("--dtype", options.dtype(_DTYPES), "float32", "NAME", "of the values")
        parser.some("--algorithms", ALGORITHMS, "owner,gather,auto")
        parser.some("--peers", tuple(PEERS), "published,allgather")
        options.add_launches(parser, "both")
        options.add_common(parser, 20, warmup=2)
        given = parser.parse_args(arguments)
        if (most := max(given.rows)) > given.num_rows:
            parser.error(f"--rows: {most} different rows are more than the {given.num_rows} of --num-rows")
        return given

    @classmethod
    def heap_bytes(cls, options: argparse.Namespace, world: int) -> int:
        """Return the bytes that the largest size and the line-up need."""
        largest = {"max_rows_per_rank": max(options.rows), "max_row_bytes": max(options.dims) * options.dtype.itemsize}
        return tdcoll.memory_plan({"largest": largest}, world_size=world).total + (world << 18) + (1 << 20)

    def sizes(self) -> Iterator[SparseData]:
        given, world = self.options, self.topology.world_size
        for of in itertools.product(given.distributions, [given.num_rows], given.rows, [world]):
            for dim in given.dims:
                yield SparseData(DrawnRows(*of), dim, given.dtype, self.topology.rank, self.device)

    @contextlib.contextmanager
    def wanted(self, data: SparseData) -> Iterator[tuple[Sequence[Wanted], Callable[[], object]]]:
        row_bytes = data.shape[1] * data.dtype.itemsize
        with tdcoll.SparseContext(max_rows_per_rank=data.rows.rows, max_row_bytes=row_bytes) as context:
            took = {"took": choose("auto", context.capacities, row_bytes)}
            made = [
                Wanted(name, False, partial(_ours, name, copy, data, context), [how],
                       {"form": form, "copy": copy, **(took if name == "auto" else {})})
                for name in self.options.algorithms
                for how, form, copy in (("eager", "coo", True), ("eager", "coo", False), ("graph", "padded", None))
                if how in self.options.launches
            ]  # fmt: skip
            made += [Wanted(name, True, partial(_peer, name, data), ["eager"]) for name in self.options.peers]
            yield made, context.check

    def facts(self, data: SparseData) -> dict[str, Any]:
        nbytes = data.moved_rows * data.shape[1] * data.dtype.itemsize / data.rows.world
        rows = {name: value for name, value in data.rows._asdict().items() if name != "world"}
        values = {"dim": data.shape[1], "dtype": str(data.dtype).removeprefix("torch.")}
        floor = {"bytes_per_rank": nbytes, "floor_us": nbytes / _GBPS / 1e3}
        return {**rows, **values, "union_rows": data.union_rows, "moved_rows": data.moved_rows, **floor}


def _peer(name: str, data: SparseData) -> Subject:
    """Return a baseline's calls."""
    return _subject_of(data, lambda number: PEERS[name](data.tensors[number]))


def _ours(name: str, copy: bool | None, data: SparseData, context: tdcoll.SparseContext) -> Subject:
    """Return tdcoll's all-reduce: from sparse tensor to sparse tensor, or padded if ``copy`` is None."""

    def reduce(number: int) -> torch.Tensor:
        return tdcoll.sparse_all_reduce(data.tensors[number], ctx=context, algorithm=name, copy=bool(copy))

    def reduce_padded(number: int) -> Any:
        given = data.tensors[number]
        what = given._indices()[0], given._values(), data.shape[0]
        return tdcoll.sparse_all_reduce_padded(*what, ctx=context, coalesced=True, algorithm=name)

    def errors_padded(number: int, result: Any) -> tuple[int, str]:
        count = int(result.count)
        return data.errors(number, result.indices[:count], result.values[:count])

    if copy is not None:
        return _subject_of(data, reduce)
    calls = calls_of(data.tensors[0]._values().nbytes * context.world_size)
    return _subject_of(data, reduce_padded, errors=errors_padded, calls=calls)
