# SPDX-License-Identifier: Apache-2.0
"""The bytes of a simulated machine: the symmetric blocks of all PEs in one buffer, and names for reports."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from typing import Any

import numpy as np
import torch

from tdcoll.runtime.heap import ALIGNMENT

__all__ = ["NULL_PAGE", "Memory", "MemoryView", "aligned", "read_word", "write_word"]

NULL_PAGE = 4096
"""No memory lies below this address: a pointer there is null, or null plus an offset."""


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment of symmetric allocations."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def read_word(address: int) -> int:
    """The unsigned 64-bit word at any address of this process."""
    return ctypes.c_uint64.from_address(address).value


def write_word(address: int, value: int) -> None:
    """Write a 64-bit word at any address of this process; as one store where the address is aligned."""
    ctypes.c_uint64.from_address(address).value = value & 0xFFFF_FFFF_FFFF_FFFF


class Memory:
    """The symmetric blocks of ``n_pes`` PEs, one after another in a buffer that starts page-aligned.

    Args:
        buffer: writable, at least ``begin + n_pes * nbytes`` bytes.
        begin: where the first block starts.
        nbytes: size of one block, a multiple of the alignment of allocations.
    """

    def __init__(self, buffer: memoryview, begin: int, nbytes: int, n_pes: int) -> None:
        self.nbytes, self.n_pes, self.total = nbytes, n_pes, nbytes * n_pes
        self.tensor = torch.frombuffer(buffer, dtype=torch.uint8, count=self.total, offset=begin)
        self.base = self.tensor.data_ptr()
        self._words = buffer[begin : begin + self.total].cast("Q")
        self._array = np.asarray(self._words)
        self._labels: dict[int, tuple[int, str, int]] = {}  # offset -> (end, name, itemsize)
        self._offsets: list[int] = []

    def owns(self, address: int) -> bool:
        """Whether ``address`` lies in some PE's symmetric block."""
        return 0 <= address - self.base < self.total

    def pe_of(self, address: int) -> int:
        """The PE in whose block ``address`` lies."""
        return (address - self.base) // self.nbytes

    def block(self, pe: int) -> int:
        """Address of ``pe``'s block."""
        return self.base + pe * self.nbytes

    def word(self, address: int) -> int:
        """The unsigned 64-bit word at an aligned symmetric address."""
        return self._words[(address - self.base) >> 3]

    def words(self, addresses: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The unsigned 64-bit words at aligned symmetric addresses (uint64), each as one load."""
        return self._array[(addresses - np.uint64(self.base)) >> np.uint64(3)]

    def set_word(self, address: int, value: int) -> None:
        """Write a 64-bit word at an aligned symmetric address, as one store."""
        self._words[(address - self.base) >> 3] = value & 0xFFFF_FFFF_FFFF_FFFF

    # ------------------------------------------------------------------ names

    def label(self, offset: int, nbytes: int, name: str, itemsize: int) -> None:
        """Name an allocation; whatever had these bytes before loses its name."""
        for start in [s for s, (end, *_) in self._labels.items() if s < offset + nbytes and offset < end]:
            del self._labels[start]
        if nbytes:
            self._labels[offset] = (offset + nbytes, name, itemsize)
        self._offsets = sorted(self._labels)

    def describe(self, address: int) -> str:
        """``pe3.signals[0]`` for an address in a named allocation, else the PE and the offset."""
        if not self.owns(address):
            return f"address {address:#x}"
        pe, offset = divmod(address - self.base, self.nbytes)
        place = bisect_right(self._offsets, offset)
        if place:
            start = self._offsets[place - 1]
            end, name, itemsize = self._labels[start]
            if offset < end:
                index, rest = divmod(offset - start, itemsize)
                return f"pe{pe}.{name}[{index}]" + (f"+{rest}" if rest else "")
        return f"pe{pe}.heap[{offset:#x}]"


class MemoryView:
    """One PE's view of a :class:`Memory`: the symmetric heap that tdcoll's host code works with.

    Args:
        memory: all blocks.
        pe: whose view.
        reachable: for each PE, whether loads and stores reach it.
    """

    def __init__(self, memory: Memory, pe: int, reachable: tuple[bool, ...]) -> None:
        self._memory, self._reachable = memory, reachable
        self.pe, self.n_pes, self.nbytes = pe, memory.n_pes, memory.nbytes
        self.base = memory.block(pe)
        self.device = torch.device("cpu")

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"bytes {offset}..{offset + nbytes} do not lie in the heap of {self.nbytes} bytes")
        begin = self.pe * self.nbytes + offset
        return self._memory.tensor[begin : begin + nbytes]

    def peer_base(self, pe: int) -> int:
        if not 0 <= pe < self.n_pes:
            raise ValueError(f"pe must be in 0..{self.n_pes - 1}, got {pe}")
        return self._memory.block(pe) if self._reachable[pe] else 0

    def label(self, offset: int, nbytes: int, name: str, itemsize: int) -> None:
        self._memory.label(offset, nbytes, name, itemsize)

    def close(self) -> None:
        """Nothing to give back: the buffer goes with the last tensor that views it."""

    def abandon(self) -> None:
        """Nothing to leave behind."""
