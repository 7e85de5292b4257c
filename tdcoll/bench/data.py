# SPDX-License-Identifier: Apache-2.0
"""Buffers whose contents say where they belong: every word depends on rank, index, call and round.

A *round* is one launch of all calls; the inputs change between rounds on the device, in stream order, so a launch that
shows an earlier round's data is found out. Words are integers, and compared exactly. Every call of a launch has an
input and a result of its own (a *set*), so each of them is checked after the launch.

:class:`Buffers` are those of an all-gather, whose words are of any value. :class:`Reduced` are those of a
reduce-scatter, and :class:`ReducedAlike` of an all-reduce, whose words are so small that sums over all ranks are exact
in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tdcoll.collectives.reduce_scatter.reference import reduce_parts

__all__ = ["EXACT", "Buffers", "Pattern", "Reduced", "ReducedAlike"]

_ALIGNMENT = 256
_RANK, _CALL, _ROUND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
"""Large odd numbers: sums of few multiples of them and of an index do not meet."""

EXACT = {torch.float16: 1 << 11, torch.bfloat16: 1 << 8, torch.float32: 1 << 24, torch.float64: 1 << 53}
"""Whole numbers up to this are exact."""

_INDEX, _MIX = 0x27D4EB2F, 0x2C1B3C6D
"""Odd numbers that scatter bits."""

_CHECKED = 1 << 24
"""Words of a sum that are compared at once."""


class Pattern:
    """``[words]`` integers for each rank, call and round. Wraps around.

    Args:
        nbytes: bytes of one rank's data.
        device: where.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.word = torch.int32 if nbytes % 4 == 0 else torch.uint8
        count = nbytes // self.word.itemsize
        self._index = torch.arange(count, dtype=torch.int64, device=device).to(self.word)

    def number(self, value: int) -> int:
        """``value`` modulo the words' range."""
        return _signed(value) if self.word == torch.int32 else value % 256

    @property
    def step(self) -> int:
        """What is added from one round to the next."""
        return self.number(_ROUND)

    def words(self, rank: int, call: int, round_: int) -> torch.Tensor:
        """Return what ``rank`` contributes to a call of a round."""
        return self._index + self.number(rank * _RANK + call * _CALL + round_ * _ROUND)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Buffers:
    """Inputs and results of the calls of one launch: of an all-gather.

    Args:
        nbytes: bytes per rank.
        world, rank: of the group.
        sets: number of calls.
        dtype: as which the calls see their data.
        device: where.
        storage: bytes for results that hold their inputs as their own segments, as calls in place have them;
            None: inputs lie elsewhere.
        allocate: makes bytes, where it is not ``torch.empty``.
        separate: each input is an allocation of its own.
        calls: of a launch, which take the sets in turn; None: as many as there are sets.
    """

    def __init__(
        self,
        nbytes: int,
        world: int,
        rank: int,
        sets: int,
        dtype: torch.dtype,
        device: torch.device,
        storage: torch.Tensor | None = None,
        allocate: Callable[[int], torch.Tensor] | None = None,
        separate: bool = False,
        *,
        calls: int | None = None,
    ) -> None:
        def plain(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.uint8, device=device)

        make = allocate or plain
        self.world, self.rank, self.sets, self.round = world, rank, sets, 0
        self.calls = calls or sets
        self._nbytes = nbytes
        given_bytes, result_bytes = self.extents(nbytes, world)
        stride, given_stride = _padded(result_bytes), _padded(given_bytes)
        if storage is not None:
            self._results = storage[: sets * stride]
            own = self._results.view(sets, stride)[:, rank * nbytes : (rank + 1) * nbytes]
            self._inputs, self._changing = [*own], [own]
        elif separate:
            self._results = plain(sets * stride)
            self._inputs = [make(given_bytes) for _ in range(sets)]
            self._changing = self._inputs
        else:
            self._results = make(sets * stride)
            given = make(sets * given_stride)
            self._inputs = [*given.view(sets, given_stride)[:, :given_bytes]]
            self._changing = [given]
        results = self._results.view(sets, stride)[:, :result_bytes]
        self.inputs = [self._inputs[i].view(dtype) for i in range(sets)]
        """Inputs of this rank, one for each call: ``[n]``; of a reduce-scatter ``[world * n]``."""
        self.results = [results[i].view(dtype) for i in range(sets)]
        """Results, one for each call: ``[n]``; of an all-gather ``[world * n]``."""
        self._begin(dtype, device)

    def _begin(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make what the words follow from."""
        self._pattern = Pattern(self._nbytes, device)
        self._changing = [part.view(self._pattern.word) for part in self._changing]

    @staticmethod
    def extents(nbytes: int, world: int) -> tuple[int, int]:
        """Bytes of an input and of a result."""
        return nbytes, world * nbytes

    @classmethod
    def storage_bytes(cls, nbytes: int, world: int, sets: int) -> int:
        """Bytes of ``storage`` that the calls of one launch need."""
        return sets * _padded(cls.extents(nbytes, world)[1])

    @classmethod
    def whole_bytes(cls, nbytes: int, world: int, sets: int) -> int:
        """Bytes of all inputs and results."""
        return sets * sum(map(_padded, cls.extents(nbytes, world)))

    def fill(self, round_: int) -> None:
        """Inputs of ``round_``, and results that are wrong everywhere."""
        self._results.fill_(0xA5)
        self.round = round_
        for call in range(self.sets):
            self._inputs[call].view(self._pattern.word).copy_(self._pattern.words(self.rank, call, round_))

    def advance(self) -> None:
        """The inputs of the next round, by one addition on the current stream."""
        self.round += 1
        for words in self._changing:
            words.add_(self._pattern.step)

    def errors(self, call: int, result: torch.Tensor) -> tuple[int, str]:
        """Number of wrong words in a call's result, and where the first is."""
        parts = [part.view(self._pattern.word) for part in result.view(torch.uint8).chunk(self.world)]
        wrong = [(part != self._pattern.words(peer, call, self.round)).sum() for peer, part in enumerate(parts)]
        total = int(torch.stack(wrong).sum())
        if not total:
            return 0, ""
        peer = next(peer for peer, count in enumerate(wrong) if int(count))
        expected = self._pattern.words(peer, call, self.round)
        return total, self._said(total, call, f"rank {peer}'s word", parts[peer], expected)

    def _said(
        self, total: int, call: int, what: str, found: torch.Tensor, expected: torch.Tensor, first: int = 0
    ) -> str:
        index = int((found != expected).nonzero()[0])
        return (
            f"rank {self.rank}: {total} wrong word(s), first: call {call}, {what} {first + index}: "
            f"expected {expected[index].item()}, got {found[index].item()}"
        )


class Reduced(Buffers):
    """Those of a reduce-scatter: element i of a rank's input to a call is a whole number of [0, heads + rounds).

    It is ``head(rank, call, i) + round % rounds``; the heads are pseudo-random.

    Args:
        op: how the parts are reduced; ``nodes``: the node of each rank.
        Others: as for :class:`Buffers`, but that a result has no place for its input: there is no ``storage``.

    Raises:
        ValueError: sums over so many ranks, of sums where calls take the same buffer, are not exact in ``dtype``.
    """

    def __init__(self, *arguments: Any, op: str = "sum", nodes: Sequence[int], **named: Any) -> None:
        self._op, self._nodes = op, nodes
        super().__init__(*arguments, **named)

    def _begin(self, dtype: torch.dtype, device: torch.device) -> None:
        # Calls in place that take a buffer again add up sums, and round each time that they add two.
        most = self.world if self.calls == self.sets else self.world**2
        room = EXACT.get(dtype, 1 << 24) // (most if self._op in ("sum", "mean") else 1)
        if room < 4:
            name = str(dtype).removeprefix("torch.")
            raise ValueError(f"{name} has no exact sums of different numbers over {self.world} ranks; take another")
        self._heads = min(1 << 12, 1 << (room // 2).bit_length() - 1)
        self._rounds = min(1 << 10, room // 2)
        self._dtype = dtype
        self._index = torch.arange(self.inputs[0].numel(), dtype=torch.int32, device=device) * _signed(_INDEX)
        self._changing = [part.view(dtype) for part in self._changing]

    @staticmethod
    def extents(nbytes: int, world: int) -> tuple[int, int]:
        return world * nbytes, nbytes

    def first_of_result(self) -> int:
        """The element of an input that the result begins with."""
        return self.rank * self.results[0].numel()

    def _values(self, rank: int, call: int, begin: int, end: int) -> torch.Tensor:
        """Elements ``begin`` to before ``end`` of what ``rank`` gives to a call of this round."""
        bits = self._index[begin:end] + _signed(rank * _RANK + call * _CALL)
        bits = (bits ^ (bits >> 15)) * _signed(_MIX)
        return ((bits >> 12) & (self._heads - 1)).add_(self.round % self._rounds).to(self._dtype)

    def fill(self, round_: int) -> None:
        self._results.fill_(0xA5)
        self.round = round_
        for call, given in enumerate(self.inputs):
            given.copy_(self._values(self.rank, call, 0, given.numel()))

    def advance(self) -> None:
        before = self.round % self._rounds
        self.round += 1
        for values in self._changing:
            values.add_(self.round % self._rounds - before)

    def errors(self, call: int, result: torch.Tensor) -> tuple[int, str]:
        count = self.results[0].numel()
        own = self.first_of_result()

        def expected(begin: int, end: int) -> torch.Tensor:
            parts = [self._values(rank, call, own + begin, own + end) for rank in range(self.world)]
            return reduce_parts(parts, self._nodes, self._op)

        parts = [(begin, min(begin + _CHECKED, count)) for begin in range(0, count, _CHECKED)]
        wrong = [(result[begin:end] != expected(begin, end)).sum() for begin, end in parts]
        total = int(torch.stack(wrong).sum())
        if not total:
            return 0, ""
        begin, end = next(part for part, errors in zip(parts, wrong, strict=True) if int(errors))
        return total, self._said(total, call, "element", result[begin:end], expected(begin, end), begin)


class ReducedAlike(Reduced):
    """Those of an all-reduce: :class:`Reduced` whose results are as large as the inputs."""

    @staticmethod
    def extents(nbytes: int, world: int) -> tuple[int, int]:
        return nbytes, nbytes

    def first_of_result(self) -> int:
        return 0


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of ``value``."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
