# SPDX-License-Identifier: Apache-2.0
"""Inputs and results of dense collectives, and the check of results.

Inputs are whole numbers, drawn by seeded generators, because every rank must be able to draw the
input of any rank and call. They are small enough that every reduction over all ranks is exact in
the dtype, in any order, and never 0.

A *round* is one launch of all calls. From one round to the next all numbers change on the device,
in stream order, which shows results of an earlier launch. Consecutive calls of a launch use
different buffers (*sets*).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch

import tdcoll
from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.runtime.heap import ALIGNMENT
from tdcoll.tools.measure.collectives import DenseCall
from tdcoll.tools.measure.engine import Errors, Workload, do_nothing

_MAX_DRAWN = 1 << 30
_MAX_ROUNDS = 1 << 10


def largest_exact(dtype: torch.dtype) -> int:
    """Return the number up to which ``dtype`` has all whole numbers."""
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max + 1


class ExactIntegers:
    """Seeded whole numbers that are exact in a dtype, as are sums of ``terms`` of them.

    All numbers of a round are larger by 1 than those of the round before, until they begin again.

    Attributes:
        rounds: the number of rounds after which the numbers begin again.

    Raises:
        ValueError: ``dtype`` has no exact sums of so many different numbers.
    """

    def __init__(self, dtype: torch.dtype, terms: int, device: torch.device) -> None:
        room = largest_exact(dtype) // terms
        if room < 4:
            name = str(dtype).removeprefix("torch.")
            numbers = f"{terms} different numbers"
            raise ValueError(f"{name} has no exact sums of {numbers}; take another, or fewer ranks")
        # Half of the room is for drawn numbers and half for rounds, because a round adds its
        # number.
        self._max_drawn = min(room // 2, _MAX_DRAWN)
        self.rounds = min(room // 2, _MAX_ROUNDS)
        self._dtype = dtype
        self._generator = torch.Generator(device)

    def draw(self, shape: Sequence[int], round_: int, *seed: int) -> torch.Tensor:
        """Return the numbers of a round; ``seed`` has up to three numbers below 1024."""
        packed = 0  # CPU generators ignore all but 32 bits
        for number in seed:
            packed = packed << 10 | number
        generator = self._generator.manual_seed(packed)
        drawn = torch.empty(shape, dtype=self._dtype, device=generator.device)
        return drawn.random_(1, self._max_drawn + 1, generator=generator).add_(round_ % self.rounds)

    def step(self, round_: int) -> int:
        """Return the addend that leads to this round from the one before it."""
        return round_ % self.rounds - (round_ - 1) % self.rounds


def buffer_bytes(call: DenseCall, nbytes: int, world: int, sets: int) -> int:
    """Return the bytes that all inputs and results of :class:`Buffers` take in a heap."""
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in call.sizes(nbytes, world)]
    return sets * sum(aligned)


class Buffers:
    """Inputs and results of the calls of one launch.

    Args:
        call: the collective, with segments of ``nbytes``.
        nodes: the node of each rank.
        sets: number of inputs and of results. Each call of a launch has its own, because a call
            that repeats its input is faster than real use.
        op: the reduction's name; None if the collective doesn't reduce.
        allocate: ``bytes -> [bytes]`` uint8; if None, buffers are in ordinary memory of the device.

    Attributes:
        inputs, results: ``[segments * n]`` for each set.
    """

    def __init__(
        self,
        call: DenseCall,
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
        self.call = call
        self.nodes = nodes
        self.rank = rank
        self.sets = sets
        self.op = op
        self.world = len(nodes)
        self.round = 0
        self._segment = nbytes // dtype.itemsize
        adds = op in ("sum", "mean")
        self._numbers = ExactIntegers(dtype, self.world if adds else 1, device)
        if allocate is None:
            allocate = partial(torch.empty, dtype=torch.uint8, device=device)
        input_bytes, result_bytes = call.sizes(nbytes, self.world)
        self.results = [allocate(result_bytes).view(dtype) for _ in range(sets)]
        self.inputs = [allocate(input_bytes).view(dtype) for _ in range(sets)]

    def own_part(self, number: int) -> torch.Tensor:
        """Return the part of a result that a call in place takes its input from."""
        result = self.results[number]
        if self.call.is_single_tensor:
            return result
        return result.chunk(self.world)[self.rank]

    def _values(self, rank: int, number: int, segment: int) -> torch.Tensor:
        """``[n]``: a segment of the input that ``rank`` gives to a call in this round."""
        return self._numbers.draw((self._segment,), self.round, rank, number, segment)

    def fill(self, round_: int) -> None:
        """Set the inputs of ``round_``, and results that are wrong everywhere."""
        self.round = round_
        for number, given in enumerate(self.inputs):
            self.results[number].view(torch.uint8).fill_(0xA5)
            for segment, part in enumerate(given.split(self._segment)):
                part.copy_(self._values(self.rank, number, segment))

    def advance(self) -> None:
        """Set the inputs of the next round, by an addition on the current stream."""
        self.round += 1
        for given in self.inputs:
            given.add_(self._numbers.step(self.round))

    def expected(self, number: int) -> torch.Tensor:
        """``[segments * n]``: the right result of a call in this round."""
        segment = self.rank if self.call.spec.scatters else 0
        ranks = range(1 if self.call.spec.rooted else self.world)
        parts = [self._values(rank, number, segment) for rank in ranks]
        if self.call.spec.reduces:
            return reduce_parts(parts, self.nodes, self.op or "sum")
        return torch.cat(parts)

    def errors(self, number: int, result: torch.Tensor) -> Errors:
        """Return the number of wrong elements of a result, and a description of the first."""
        expected = self.expected(number)
        wrong = result != expected
        total = int(wrong.sum())
        if not total:
            return 0, ""
        place = int(wrong.nonzero()[0])
        first = f"call {number}, element {place}"
        values = f"expected {expected[place].item()}, got {result[place].item()}"
        return total, f"rank {self.rank}: {total} wrong element(s), first: {first}: {values}"


class SharedBuffers:
    """Buffers for the calls of one size, which several workloads may share.

    Attributes:
        new: makes further buffers of this size; takes ``allocate``, as :class:`Buffers` does.
    """

    def __init__(self, new: Callable[..., Buffers]) -> None:
        self.new = new
        self._in_heap: list[torch.Tensor] = []

    @cached_property
    def plain(self) -> Buffers:
        """Buffers in ordinary memory."""
        return self.new()

    @cached_property
    def in_heap(self) -> Buffers:
        """Buffers in tdcoll's symmetric memory. The first use is collective."""
        return self.new(allocate=self._allocate)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        tensor = tdcoll.empty((nbytes,), torch.uint8)
        self._in_heap.append(tensor)
        return tensor

    def close(self) -> None:
        """Free the buffers in tdcoll's heap. Collective."""
        while self._in_heap:
            tdcoll.free(self._in_heap.pop())


def buffer_workload(
    buffers: Buffers,
    call: Callable[[int], Any],
    close: Callable[[], object] = do_nothing,
    *,
    in_place: bool = False,
) -> Workload:
    """Return the workload of calls whose inputs, and mostly results, are in ``buffers``.

    Args:
        call: makes the call with this number; returns its result.
        close: gives back what the workload owns. Collective.
        in_place: whether calls take their input from their result. If so, the input is copied there
            before every launch, untimed.
    """

    def before(numbers: Sequence[int]) -> None:
        buffers.advance()
        if in_place:
            for number in numbers:
                buffers.own_part(number).copy_(buffers.inputs[number])

    return Workload(
        call=call,
        errors=buffers.errors,
        n_inputs=buffers.sets,
        begin=buffers.fill,
        before=before,
        launch_calls=(buffers.sets - 1, buffers.sets),
        close=close,
    )
