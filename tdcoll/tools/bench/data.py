# SPDX-License-Identifier: Apache-2.0
"""Inputs and results of dense collectives, and the check of results.

Inputs are whole numbers, drawn by seeded generators, because every rank must be able to draw the input of any rank and
call. They are small enough that every reduction over all ranks is exact in the dtype, in any order, and never 0.

A *round* is one launch of all calls. From one round to the next all numbers change on the device, in stream order,
which shows results of an earlier launch. Consecutive calls of a launch use different buffers (*sets*).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.runtime.heap import ALIGNMENT
from tdcoll.tools.bench.specs import Spec

_MOST_DRAWN, _MOST_ROUNDS = 1 << 30, 1 << 10


def exact(dtype: torch.dtype) -> int:
    """Return the number up to which ``dtype`` has all whole numbers."""
    return int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max + 1


class Numbers:
    """Seeded whole numbers that are exact in a dtype, of which sums of so many terms are, too.

    All numbers of a round are larger by 1 than those of the round before, until they begin again.

    Raises:
        ValueError: ``dtype`` has no exact sums of so many different numbers.
    """

    def __init__(self, dtype: torch.dtype, terms: int, device: torch.device) -> None:
        room = exact(dtype) // terms
        if room < 4:
            name = str(dtype).removeprefix("torch.")
            raise ValueError(f"{name} has no exact sums of {terms} different numbers; take another, or fewer ranks")
        self._dtype, self._drawn, self.rounds = dtype, min(room // 2, _MOST_DRAWN), min(room // 2, _MOST_ROUNDS)
        self._generator = torch.Generator(device)

    def draw(self, shape: Sequence[int], round_: int, *seed: int) -> torch.Tensor:
        """Return the numbers of a round; ``seed`` are up to three numbers below 1024."""
        # CPU generators ignore all but 32 bits.
        generator = self._generator.manual_seed(functools.reduce(lambda number, one: number << 10 | one, seed))
        drawn = torch.empty(shape, dtype=self._dtype, device=generator.device)
        return drawn.random_(1, self._drawn + 1, generator=generator).add_(round_ % self.rounds)

    def step(self, round_: int) -> int:
        """Return the addend that leads to this round from the one before it."""
        return round_ % self.rounds - (round_ - 1) % self.rounds


def buffer_bytes(spec: Spec, nbytes: int, world: int, sets: int) -> int:
    """Return the bytes that all inputs and results of :class:`Buffers` take in a heap, which aligns each."""
    return sets * sum(-(-size // ALIGNMENT) * ALIGNMENT for size in spec.sizes(nbytes, world))


class Buffers:
    """Inputs and results of the calls of one launch.

    Args:
        spec: the collective, with segments of ``nbytes``.
        nodes: the node of each rank.
        sets: how many inputs and results there are, one for each call of a launch.
        op: how the collective reduces; None if it does not.
        allocate: ``bytes -> [bytes]`` uint8, if the buffers are not ordinary memory of the device.

    Attributes:
        inputs, results: ``[segments * n]`` for each set.
    """

    def __init__(
        self,
        spec: Spec,
        nbytes: int,
        nodes: Sequence[int],
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        sets: int,
        op: str | None = None,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.spec, self.nodes, self.rank, self.sets, self.op = spec, nodes, rank, sets, op
        self.world, self.round = len(nodes), 0
        self._segment = nbytes // dtype.itemsize
        self._numbers = Numbers(dtype, self.world if op in ("sum", "mean") else 1, device)
        make = allocate or (lambda size: torch.empty(size, dtype=torch.uint8, device=device))

        given, result = spec.sizes(nbytes, self.world)
        self.results, self.inputs = ([make(size).view(dtype) for _ in range(sets)] for size in (result, given))

    def own(self, call: int) -> torch.Tensor:
        """Return the part of a result that a call in place takes its input from."""
        result = self.results[call]
        return result if self.spec.one_tensor else result.chunk(self.world)[self.rank]

    def _values(self, rank: int, call: int, segment: int) -> torch.Tensor:
        """``[n]``: a segment of the input that ``rank`` gives to a call in this round."""
        return self._numbers.draw((self._segment,), self.round, rank, call, segment)

    def fill(self, round_: int) -> None:
        """Set the inputs of ``round_``, and results that are wrong everywhere."""
        self.round = round_
        for call, (given, result) in enumerate(zip(self.inputs, self.results, strict=True)):
            result.view(torch.uint8).fill_(0xA5)
            for segment, part in enumerate(given.split(self._segment)):
                part.copy_(self._values(self.rank, call, segment))

    def advance(self) -> None:
        """Set the inputs of the next round, by an addition on the current stream."""
        self.round += 1
        for given in self.inputs:
            given.add_(self._numbers.step(self.round))

    def expected(self, call: int) -> torch.Tensor:
        """``[segments * n]``: the result of a call in this round."""
        own = self.rank if self.spec.scatters else 0
        parts = [self._values(rank, call, own) for rank in range(self.world)]
        return reduce_parts(parts, self.nodes, self.op or "sum") if self.spec.reduces else torch.cat(parts)

    def errors(self, call: int, result: torch.Tensor) -> tuple[int, str]:
        """Return how many elements of a call's result are wrong, and where the first is."""
        expected = self.expected(call)
        wrong = result != expected
        if not (total := int(wrong.sum())):
            return 0, ""
        place = int(wrong.nonzero()[0])
        values = f"expected {expected[place].item()}, got {result[place].item()}"
        return total, f"rank {self.rank}: {total} wrong element(s), first: call {call}, element {place}: {values}"
