# SPDX-License-Identifier: Apache-2.0
"""Inputs of sparse all-reduces, and the check of results.

Every rank draws the inputs of all ranks, from generators that are seeded with rank and input.
Zipf's most frequent row is row 0, as in a vocabulary that is sorted by frequency. Values are small
whole numbers, so sums are exact in any order. Results of an earlier call are wrong everywhere,
because all values go up from call to call and the inputs are taken in turn.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from tdcoll.tools.measure.buffers import ExactIntegers
from tdcoll.tools.measure.engine import Errors

INPUTS = 3
"""Inputs that calls take in turn, each with rows and values of its own."""


class RowSample(NamedTuple):
    """The row numbers of all ranks.

    Attributes:
        distribution: ``"uniform"``, or ``"zipf1.2"`` with Zipf's exponent.
        num_rows: rows of the whole tensor.
        rows: rows of each rank.
        world: number of ranks.
    """

    distribution: str
    num_rows: int
    rows: int
    world: int


@functools.lru_cache(maxsize=1)
def draw(sample: RowSample) -> list[list[np.ndarray]]:
    """Return the row numbers: ``[input][rank]`` is ``[rows]`` int64, ascending.

    They are the first different ones of endless draws from [0, num_rows).
    """
    frequencies = None  # all are equal
    if sample.distribution != "uniform":
        exponent = float(sample.distribution.removeprefix("zipf"))
        weights = np.arange(1, sample.num_rows + 1, dtype=np.float64) ** -exponent
        frequencies = weights / weights.sum()

    def rows(rank: int, number: int) -> np.ndarray:
        generator = np.random.default_rng((rank, number))
        drawn = generator.choice(sample.num_rows, sample.rows, replace=False, p=frequencies)
        return np.sort(drawn)

    inputs = []
    for number in range(INPUTS):
        inputs.append([rows(rank, number) for rank in range(sample.world)])
    return inputs


def sparse_tensor(rows: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the coalesced sparse COO tensor ``[num_rows, dim]`` with these rows, ascending."""
    return torch.sparse_coo_tensor(
        rows[None], values, shape, is_coalesced=True, check_invariants=False
    )


class SparseData:
    """One rank's inputs, and the check of results.

    Attributes:
        sample: the row numbers of all ranks.
        shape: ``(num_rows, dim)``.
        tensors: ``[num_rows, dim]`` sparse COO, one for each input; coalesced.
        rounds: the round of each input's values.
        union_rows: number of different rows of all ranks, the mean over the inputs.
        moved_rows: number of rows that move between ranks if one contributor of each row sums it
            and sends the sum to all others, the mean over the inputs: ``sum(c_u - 1) + U (W - 1)``,
            with c_u contributors of row u, U rows of the union and W ranks. This is the lower bound
            if each row is summed in one place.
    """

    def __init__(
        self, sample: RowSample, dim: int, dtype: torch.dtype, rank: int, device: torch.device
    ) -> None:
        self.sample = sample
        self.shape = (sample.num_rows, dim)
        self.dtype = dtype
        self.rank = rank
        self.device = device
        self._drawn = draw(sample)
        self._numbers = ExactIntegers(dtype, sample.world, device)
        self.rounds = [0] * INPUTS
        self.tensors = [self._input(rank, number) for number in range(INPUTS)]
        sizes = [np.unique(np.concatenate(lists)).size for lists in self._drawn]
        self.union_rows = sum(sizes) / INPUTS
        self.moved_rows = sample.rows * sample.world + (sample.world - 2) * self.union_rows

    def _input(self, rank: int, number: int) -> torch.Tensor:
        """``[num_rows, dim]`` sparse COO: the input of a rank in its round."""
        shape = (self.sample.rows, self.shape[1])
        values = self._numbers.draw(shape, self.rounds[number], rank, number)
        rows = torch.from_numpy(self._drawn[number][rank]).to(self.device)
        return sparse_tensor(rows, values, self.shape)

    def advance(self, number: int) -> None:
        """Set the values of an input's next round, by one addition on the current stream."""
        self.rounds[number] += 1
        self.tensors[number]._values().add_(self._numbers.step(self.rounds[number]))

    def expected(self, number: int) -> torch.Tensor:
        """``[num_rows, dim]`` sparse COO, coalesced: the sum of an input over the ranks."""
        inputs = [self._input(rank, number) for rank in range(self.sample.world)]
        indices = torch.cat([tensor._indices() for tensor in inputs], 1)
        values = torch.cat([tensor._values() for tensor in inputs])
        total = torch.sparse_coo_tensor(indices, values, self.shape, check_invariants=False)
        return total.coalesce()

    def errors(self, number: int, indices: torch.Tensor, values: torch.Tensor) -> Errors:
        """Return the number of wrong elements, and a description of the first.

        Args:
            number: the input.
            indices: ``[U]`` row numbers of the result.
            values: ``[U, dim]`` sums of the result.
        """
        expected = self.expected(number)
        count, text = _difference("row number", expected._indices()[0], indices)
        if not count:
            count, text = _difference("value", expected._values(), values)
        if count:
            text = f"rank {self.rank}, input {number}: {text}"
        return count, text

    def tensor_errors(self, number: int, result: torch.Tensor) -> Errors:
        """Return the errors of a sparse ``[num_rows, dim]`` tensor, as :meth:`errors` does."""
        if result.shape != self.shape or not result.is_coalesced():
            got = f"{tuple(result.shape)}, coalesced: {result.is_coalesced()}"
            expected = f"expected a coalesced tensor of {self.shape}, got {got}"
            return 1, f"rank {self.rank}, input {number}: {expected}"
        return self.errors(number, result._indices()[0], result._values())


def _difference(what: str, expected: torch.Tensor, found: torch.Tensor) -> Errors:
    """Return the number of different elements, and a description of the first."""
    if found.shape != expected.shape:
        return 1, f"expected {what}s of shape {list(expected.shape)}, got {list(found.shape)}"
    wrong = found != expected
    count = int(wrong.sum())
    if not count:
        return 0, ""
    place = tuple(wrong.nonzero()[0].tolist())
    first = f"place {list(place)}: expected {float(expected[place]):g}, got {float(found[place]):g}"
    return count, f"{count} wrong {what}(s), first: {first}"
