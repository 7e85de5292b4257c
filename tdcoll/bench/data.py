# SPDX-License-Identifier: Apache-2.0
"""Buffers whose contents say where they belong: every byte depends on rank, index, call and round.

A *round* is one launch of all calls; the inputs change between rounds on the device, in stream order, so a
launch that shows an earlier round's data is found out. Words are integers, and compared exactly. Every call
of a launch has an input and a result of its own (a *set*), so each of them is checked after the launch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Buffers", "Pattern"]

_ALIGNMENT = 256
_RANK, _CALL, _ROUND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
"""Large odd numbers: sums of few multiples of them and of an index do not meet."""


class Pattern:
    """``[words]`` integers for each rank, call and round. Wraps around.

    Args:
        nbytes: bytes of one rank's data.
        device: where.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.word = torch.int32 if nbytes % 4 == 0 else torch.uint8
        self._bits = 8 * self.word.itemsize
        count = nbytes // self.word.itemsize
        self._index = torch.arange(count, dtype=torch.int64, device=device).to(self.word)

    def number(self, value: int) -> int:
        """``value`` modulo the words' range."""
        value &= (1 << self._bits) - 1
        return value - (1 << 32) if self.word == torch.int32 and value >= 1 << 31 else value

    @property
    def step(self) -> int:
        """What is added from one round to the next."""
        return self.number(_ROUND)

    def words(self, rank: int, call: int, round_: int) -> torch.Tensor:
        """What ``rank`` contributes to a call of a round."""
        return self._index + self.number(rank * _RANK + call * _CALL + round_ * _ROUND)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Buffers:
    """Inputs and results of the calls of one launch.

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
    ) -> None:
        def plain(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.uint8, device=device)

        make = allocate or plain
        self.world, self.rank, self.sets, self.round = world, rank, sets, 0
        self._pattern = pattern = Pattern(nbytes, device)
        self._nbytes = nbytes
        self._stride = _padded(world * nbytes)
        if storage is not None:
            self._results = storage[: sets * self._stride]
            own = self._results.view(sets, self._stride)[:, rank * nbytes : (rank + 1) * nbytes]
            self._inputs, self._changing = [*own], [own.view(pattern.word)]
        elif separate:
            self._results = plain(sets * self._stride)
            self._inputs = [make(nbytes) for _ in range(sets)]
            self._changing = [given.view(pattern.word) for given in self._inputs]
        else:
            self._results = make(sets * self._stride)
            input_stride = _padded(nbytes)
            given = make(sets * input_stride)
            self._inputs = [*given.view(sets, input_stride)[:, :nbytes]]
            self._changing = [given.view(pattern.word)]
        results = self._results.view(sets, self._stride)[:, : world * nbytes]
        self.inputs = [self._inputs[i].view(dtype) for i in range(sets)]
        """``[n]``: this rank's contribution to each call."""
        self.results = [results[i].view(dtype) for i in range(sets)]
        """``[world * n]``: where each call's result goes."""

    @staticmethod
    def storage_bytes(nbytes: int, world: int, sets: int) -> int:
        """Bytes of ``storage`` that the calls of one launch need."""
        return sets * _padded(world * nbytes)

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

    def errors(self, calls: int) -> tuple[int, str]:
        """Number of wrong words in the results of the first ``calls`` calls, and where the first is."""
        pattern, nbytes = self._pattern, self._nbytes
        wrong = torch.zeros((calls, self.world), dtype=torch.int64, device=self._results.device)
        for call in range(calls):
            result = self.results[call].view(torch.uint8)
            for peer in range(self.world):
                words = result[peer * nbytes : (peer + 1) * nbytes].view(pattern.word)
                wrong[call, peer] = (words != pattern.words(peer, call, self.round)).sum()
        total = int(wrong.sum())
        if not total:
            return 0, ""
        call, peer = (int(i) for i in wrong.nonzero()[0])
        words = self.results[call].view(torch.uint8)[peer * nbytes : (peer + 1) * nbytes].view(pattern.word)
        expected = pattern.words(peer, call, self.round)
        index = int((words != expected).nonzero()[0])
        return total, (
            f"rank {self.rank}: {total} wrong word(s), first: call {call}, rank {peer}'s word {index}: "
            f"expected {int(expected[index])}, got {int(words[index])}"
        )
