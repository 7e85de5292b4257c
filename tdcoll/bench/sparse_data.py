# SPDX-License-Identifier: Apache-2.0
"""Row-sparse inputs that are the same on every run, and what their sums must be.

Everything follows from integer hashes (no generator has a state), so every rank knows the rows of all others, and a
device, a version or an order of calls changes nothing. Zipf's most frequent row is row 0, as in a vocabulary that is
sorted by frequency.

The number at place ``d`` of the j-th row that rank r gives in input i is ``head[r, i, j] + tail[d] + round``: small
integers, so that sums are exact in any order, and a sum over entries needs three numbers per row to be known for all
places: the sum of the heads, how many entries there are, and the round. The round goes up from call to call, and the
inputs are taken in turn: what an earlier call left behind is wrong everywhere.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

import torch

from tdcoll.bench.arithmetic import moved_rows
from tdcoll.bench.data import EXACT
from tdcoll.bench.options import Parser, at_least, each, positive

__all__ = ["INPUTS", "Rows", "SparseData", "Vocabulary", "add_rows", "check_rows", "fraction", "mixed"]

INPUTS = 3
"""Inputs that calls take in turn, each with rows and values of its own."""

_MOST_HEADS, _MOST_TAILS = 1 << 15, 1 << 10
_CHECKED = 1 << 26
"""Numbers of a result that are compared at once."""

_DISTINCT, _REPEATED, _ORDER, _DRAWN, _HEAD, _TAIL = range(6)
"""What a hash is for: hashes for different purposes have nothing to do with each other."""


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """``x >> bits``, zeros coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _wrapped(value: int) -> int:
    """The int64 with the low 64 bits of ``value``."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def mixed(count: int, device: torch.device, *key: int) -> torch.Tensor:
    """``[count]`` int64: pseudo-random bits for the numbers 0 to ``count`` - 1 under a key (splitmix64)."""
    seed = 0
    for part in key:
        seed = int(_scramble(torch.tensor([_wrapped(seed * 0x5851F42D4C957F2D + part + 1)])))
    return _scramble(torch.arange(count, dtype=torch.int64, device=device) + seed)


def _scramble(x: torch.Tensor) -> torch.Tensor:
    x = x * _wrapped(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _wrapped(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _wrapped(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    """In (0, 1), float64."""
    return (_shift(bits, 11).double() + 0.5) * 2.0**-53


def fraction(duplicates: str) -> float | None:
    """Return which part of a rank's rows repeats others: None for ``"drawn"``.

    Raises:
        ValueError: neither ``"drawn"`` nor a number from 0 to below 1.
    """
    if duplicates == "drawn":
        return None
    if not re.fullmatch(r"0(\.\d+)?", duplicates):
        raise ValueError(f"expected 'drawn' or a fraction from 0 to below 1, got {duplicates!r}")
    return float(duplicates)


class Vocabulary:
    """``num_rows`` rows with a frequency each.

    Args:
        distribution: ``"uniform"``, or ``"zipf"`` and an exponent, such as ``"zipf1.2"``.
        num_rows: how many rows there are.
        device: where indices are made.

    Raises:
        ValueError: no such distribution.
    """

    def __init__(self, distribution: str, num_rows: int, device: torch.device) -> None:
        self.distribution, self.num_rows, self.device = distribution, num_rows, device
        self.exponent = self.exponent_of(distribution)
        # On the CPU: cumulative sums on a GPU may differ from run to run.
        weights = torch.arange(1, num_rows + 1, dtype=torch.float64).pow(-self.exponent)
        self._cumulative = weights.cumsum(0).to(device)
        self._weights = weights.to(device)

    @staticmethod
    def exponent_of(distribution: str) -> float:
        """Zipf's exponent, 0 for uniform."""
        if distribution == "uniform":
            return 0.0
        if not re.fullmatch(r"zipf\d+(\.\d+)?", distribution):
            raise ValueError(f"expected uniform or zipf with an exponent, such as zipf1.2; got {distribution!r}")
        return float(distribution.removeprefix("zipf"))

    def distinct(self, count: int, *key: int) -> torch.Tensor:
        """``[count]`` int64: different rows, ascending: the first so many different ones of endless draws.

        Each row has a clock that first rings after an exponential time, the sooner the more frequent it is; the first
        ``count`` clocks to ring are the first different rows drawn.

        Raises:
            ValueError: there are not so many rows.
        """
        if count > self.num_rows:
            raise ValueError(f"{count} different rows of {self.num_rows} are more than there are")
        rings = -_uniform(mixed(self.num_rows, self.device, _DISTINCT, *key)).log() / self._weights
        return rings.topk(count, largest=False, sorted=False).indices.sort().values

    def drawn(self, count: int, *key: int) -> torch.Tensor:
        """``[count]`` int64: each row drawn by itself, in the order of the draws."""
        at = _uniform(mixed(count, self.device, _DRAWN, *key)) * self._cumulative[-1]
        return torch.searchsorted(self._cumulative, at, right=True).clamp_(max=self.num_rows - 1)

    def rows(self, count: int, duplicates: str, *key: int) -> torch.Tensor:
        """``[count]`` int64 in [0, num_rows): see :class:`~tdcoll.bench.rows.SparseRow` for ``duplicates``.

        Ascending and different if ``duplicates`` is ``"0"``, else in no order.
        """
        part = fraction(duplicates)
        if part is None:
            return self.drawn(count, *key)
        repeats = min(round(part * count), count - 1)
        different = self.distinct(count - repeats, *key)
        if not repeats:
            return different
        again = _shift(mixed(repeats, self.device, _REPEATED, *key), 1) % (count - repeats)
        order = mixed(count, self.device, _ORDER, *key).argsort()
        return torch.cat([different, different[again]])[order]


def add_rows(parser: Parser, rows: str, num_rows: int, distributions: str) -> None:
    """The options that say which row numbers there are, with these defaults."""
    parser.option("--rows", positive, rows, "N,N", "rows that each rank, or list, has")
    parser.option("--num-rows", at_least(1), num_rows, "N", "of the whole tensor")
    what = "which rows: uniform, or zipf and its exponent"
    parser.option("--distributions", each(Vocabulary.exponent_of), distributions, "A,B", what)


def check_rows(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End with status 2 if there are not so many different rows."""
    if (most := max(given.rows)) > given.num_rows:
        parser.error(f"--rows: {most} different rows are more than the {given.num_rows} of --num-rows")


@dataclass(frozen=True)
class _Union:
    """What the sum over the ranks of one input is, but for the tails and the round."""

    rows: torch.Tensor  # [U] ascending
    heads: torch.Tensor  # [U] sum of the heads
    entries: torch.Tensor  # [U] how many rows of all ranks are summed
    held: int  # distinct rows of each rank, all ranks together


class Rows:
    """The row numbers of every rank in every input, and their sums: all that does not depend on a row's length.

    Args:
        vocabulary: that they are drawn from.
        rows: of each rank.
        duplicates: see :meth:`Vocabulary.rows`.
        world: ranks.
        dtype: of the values.
        inputs: how many there are.

    Raises:
        ValueError: not enough rows, or sums would not be exact in ``dtype``.
    """

    def __init__(
        self, vocabulary: Vocabulary, rows: int, duplicates: str, world: int, dtype: torch.dtype, inputs: int = INPUTS
    ) -> None:
        self.vocabulary, self.rows, self.duplicates = vocabulary, rows, duplicates
        self.world, self.dtype, self.inputs = world, dtype, inputs
        self.coalesced = fraction(duplicates) == 0.0
        self.indices = [
            [vocabulary.rows(rows, duplicates, rank, number) for rank in range(world)] for number in range(inputs)
        ]
        """``indices[input][rank]``: ``[rows]`` int64."""
        found = [torch.unique(torch.cat(lists), return_inverse=True, return_counts=True) for lists in self.indices]
        most = max(int(entries.max()) for _, _, entries in found)
        room = EXACT[dtype] // most
        if room < 8:
            raise ValueError(
                f"one row is the sum of {most} rows, and so many values have no exact sum in "
                f"{str(dtype).removeprefix('torch.')}; take fewer rows or duplicates, or another dtype"
            )
        self.n_heads, self.n_tails = min(_MOST_HEADS, room // 2), min(_MOST_TAILS, room // 4)
        self.n_rounds = self.n_tails
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        self.unions = []
        for number, (union, inverse, entries) in enumerate(found):
            heads = torch.cat([self.heads(rank, number) for rank in range(world)])
            sums = torch.zeros_like(union).index_add_(0, inverse, heads)
            held = rows * world
            if not self.coalesced:
                held = sum(torch.unique(part).numel() for part in self.indices[number])
            self.unions.append(_Union(union, sums.to(exact), entries.to(exact), held))

    def heads(self, rank: int, number: int) -> torch.Tensor:
        """``[rows]`` int64: what tells the rows of this rank and input apart."""
        bits = mixed(self.rows, self.vocabulary.device, _HEAD, rank, number)
        return _shift(bits, 1) % self.n_heads

    @property
    def union_rows(self) -> float:
        """U, the mean over the inputs."""
        return sum(union.rows.numel() for union in self.unions) / self.inputs

    @property
    def moved_rows(self) -> float:
        """See :func:`~tdcoll.bench.arithmetic.moved_rows`; the mean over the inputs."""
        return sum(moved_rows(union.held, union.rows.numel(), self.world) for union in self.unions) / self.inputs

    @property
    def checksum(self) -> int:
        """The same on all ranks, if they made the same rows."""
        total = torch.zeros((), dtype=torch.int64)
        for number, lists in enumerate(self.indices):
            for rank, rows in enumerate(lists):
                weights = mixed(rows.numel(), rows.device, rank, number)
                total += (weights * rows).sum().cpu()
        return int(total)


class SparseData:
    """One rank's inputs, and the check of results.

    Args:
        rows: of all ranks.
        dim: numbers in a row.
        rank: whose inputs.

    Attributes:
        tensors: ``[num_rows, dim]`` sparse COO, one for each input; coalesced if there are no duplicates.
        rounds: that the values of each input are of.
    """

    def __init__(self, rows: Rows, dim: int, rank: int) -> None:
        self.rows, self.dim, self.rank = rows, dim, rank
        self.rounds = [0] * rows.inputs
        vocabulary = rows.vocabulary
        self._tails = _shift(mixed(dim, vocabulary.device, _TAIL), 1) % rows.n_tails
        self.tensors = []
        for number in range(rows.inputs):
            values = (rows.heads(rank, number)[:, None] + self._tails).to(rows.dtype)
            indices = rows.indices[number][rank][None]
            shape = (vocabulary.num_rows, dim)
            self.tensors.append(
                torch.sparse_coo_tensor(indices, values, shape, is_coalesced=rows.coalesced, check_invariants=False)
            )

    def indices(self, number: int) -> torch.Tensor:
        """``[rows]`` int64."""
        return self.tensors[number]._indices()[0]

    def values(self, number: int) -> torch.Tensor:
        """``[rows, dim]``."""
        return self.tensors[number]._values()

    def advance(self, number: int) -> None:
        """The input's next round, by one addition on the current stream. They begin again after ``rows.n_rounds``."""
        following = (self.rounds[number] + 1) % self.rows.n_rounds
        self.values(number).add_(following - self.rounds[number])
        self.rounds[number] = following

    def _expected(self, number: int, first: int, last: int) -> torch.Tensor:
        """Sums of the union's rows ``first`` to before ``last``."""
        union = self.rows.unions[number]
        tails = (self._tails + self.rounds[number]).to(union.heads.dtype)
        return torch.addcmul(union.heads[first:last, None], union.entries[first:last, None], tails)

    def errors(self, number: int, indices: torch.Tensor, values: torch.Tensor) -> tuple[int, str]:
        """How much is wrong in ``[U]`` row numbers and ``[U, dim]`` sums of an input, and where it begins."""
        expected_rows = self.rows.unions[number].rows
        count = expected_rows.numel()
        if indices.shape != expected_rows.shape or values.shape != (count, self.dim):
            shapes = f"{list(indices.shape)} row numbers and {list(values.shape)} values"
            return 1, f"rank {self.rank}, input {number}: expected {count} rows of {self.dim} values, got {shapes}"
        if wrong := int((indices != expected_rows).sum()):
            at = int((indices != expected_rows).nonzero()[0])
            return wrong, (
                f"rank {self.rank}, input {number}: {wrong} wrong row number(s), first: place {at}: expected "
                f"{int(expected_rows[at])}, got {int(indices[at])}"
            )
        step = max(1, _CHECKED // max(1, self.dim))
        parts = [(first, min(first + step, count)) for first in range(0, count, step)]
        found = [(values[a:b] != self._expected(number, a, b)).sum() for a, b in parts]
        wrong = sum(int(part) for part in found)
        if not wrong:
            return 0, ""
        first, last = next(part for part, errors in zip(parts, found, strict=True) if int(errors))
        expected = self._expected(number, first, last)
        row, place = (int(i) for i in (values[first:last] != expected).nonzero()[0])
        return wrong, (
            f"rank {self.rank}, input {number}: {wrong} wrong value(s), first: row {int(indices[first + row])} "
            f"[{place}]: expected {float(expected[row, place]):g}, got {float(values[first + row, place]):g}"
        )

    def errors_of(self, number: int, result: torch.Tensor) -> tuple[int, str]:
        """The same for a sparse tensor or, zeros elsewhere, a dense one of ``[num_rows, dim]``."""
        shape = (self.rows.vocabulary.num_rows, self.dim)
        if result.shape != shape:
            return 1, f"rank {self.rank}, input {number}: expected a tensor of {shape}, got {tuple(result.shape)}"
        if result.is_sparse:
            result = result.to(self.rows.vocabulary.device)
            if not result.is_coalesced():
                return 1, f"rank {self.rank}, input {number}: the result is not coalesced"
            return self.errors(number, result._indices()[0], result._values())
        rows = self.rows.unions[number].rows
        values = result[rows]
        wrong, where = self.errors(number, rows, values)
        if not wrong:
            filled = sum(int(part.count_nonzero()) for part in result.flatten().split(_CHECKED))
            wrong = filled - int(values.count_nonzero())
            where = f"rank {self.rank}, input {number}: {wrong} value(s) in rows that nobody gave" if wrong else ""
        return wrong, where
