# SPDX-License-Identifier: Apache-2.0
"""The bytes of a simulated machine: the symmetric blocks of all PEs in one buffer, and each PE's
allocations."""

from __future__ import annotations

import ctypes
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tdcoll.base.errors import CollectiveTimeout
from tdcoll.runtime.heap import ALIGNMENT

NULL_PAGE = 4096
"""If a pointer is below this address, it is null, or null plus an offset, because no memory lies
there."""


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the alignment of symmetric allocations."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def read_word(address: int) -> int:
    """Return the unsigned 64-bit word at any address of this process."""
    return ctypes.c_uint64.from_address(address).value


def signed(word: int) -> int:
    """Return an unsigned 64-bit word as a report shows it: signals are int64 to their users."""
    return word - (1 << 64) if word >> 63 else word


def write_word(address: int, value: int) -> None:
    """Write a 64-bit word at any address of this process; as one store if the address is
    aligned."""
    ctypes.c_uint64.from_address(address).value = value & 0xFFFF_FFFF_FFFF_FFFF


@dataclass(slots=True, eq=False)
class Allocation:
    """Symmetric memory that ranks have allocated together: bytes ``[begin, end)`` of the block of
    each.

    Attributes:
        begin, end: offsets; ``end - begin`` bytes were requested, without padding.
        pes: PEs that have it.
        live: False once it is freed.
    """

    begin: int
    end: int
    name: str
    itemsize: int
    pes: frozenset[int]
    live: bool = True


class _Allocations:
    """The allocations of one PE, by offset."""

    def __init__(self) -> None:
        self._held: list[Allocation] = []
        self._begins: list[int] = []  # sorted

    def replace(self, begin: int, end: int, by: Sequence[Allocation] = ()) -> None:
        """Remove the allocations that have one of the bytes ``[begin, end)``, and add ``by``."""
        for held in self._held:
            held.live = not (held.begin < end and begin < held.end)
        self._held = sorted((a for a in (*self._held, *by) if a.live), key=lambda a: a.begin)
        self._begins = [a.begin for a in self._held]

    def at(self, offset: int) -> Allocation | None:
        """Return the allocation at ``offset``, if there is one."""
        place = bisect_right(self._begins, offset)
        if place == 0:
            return None
        found = self._held[place - 1]
        return found if offset < found.end else None


class Memory:
    """The symmetric blocks of ``n_pes`` PEs, one after another in a buffer that starts
    page-aligned.

    Args:
        buffer: writable, at least ``begin + n_pes * nbytes`` bytes.
        begin: where the first block starts.
        nbytes: size of one block, a multiple of the alignment of allocations.
        one_view: take one PE's allocations for those of all, because a process that is one PE knows
            only its own.
        puts: whether NVSHMEM's functions work in kernels.

    Attributes:
        allocations: of each PE.
    """

    def __init__(
        self,
        buffer: memoryview,
        begin: int,
        nbytes: int,
        n_pes: int,
        *,
        one_view: bool = False,
        puts: bool = True,
    ) -> None:
        self.nbytes = nbytes
        self.n_pes = n_pes
        self.total = nbytes * n_pes
        self.puts = puts
        self.tensor = torch.frombuffer(buffer, dtype=torch.uint8, count=self.total, offset=begin)
        self.base = self.tensor.data_ptr()
        self._words = np.frombuffer(buffer, np.uint64, self.total // 8, begin)
        shared = _Allocations()
        self.allocations = [shared if one_view else _Allocations() for _ in range(n_pes)]

    def owns(self, address: int) -> bool:
        """Return whether ``address`` lies in some PE's symmetric block."""
        return 0 <= address - self.base < self.total

    def pe_of(self, address: int) -> int:
        """Return the PE in whose block ``address`` lies."""
        return (address - self.base) // self.nbytes

    def block(self, pe: int) -> int:
        """Return the address of ``pe``'s block."""
        return self.base + pe * self.nbytes

    def words(self, addresses: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the unsigned 64-bit words at aligned symmetric addresses (uint64), each as one
        load."""
        return self._words[(addresses - np.uint64(self.base)) >> np.uint64(3)]

    def describe(self, address: int) -> str:
        """Return ``pe3.signals[0]`` if an address is in an allocation, otherwise the PE and the
        offset."""
        if not self.owns(address):
            return f"address {address:#x}"
        pe, offset = divmod(address - self.base, self.nbytes)
        found = self.allocations[pe].at(offset)
        if found is None:
            return f"pe{pe}.heap[{offset:#x}]"
        index, rest = divmod(offset - found.begin, found.itemsize)
        return f"pe{pe}.{found.name}[{index}]" + (f"+{rest}" if rest else "")

    def describe_range(self, address: int, nbytes: int) -> str:
        """``slots[24:48]`` for the elements in ``[address, address + nbytes)`` of an allocation, of
        any PE."""
        pe, offset = divmod(address - self.base, self.nbytes)
        found = self.allocations[pe].at(offset) if self.owns(address) else None
        if found is None:
            return f"{nbytes} bytes"
        begin = (offset - found.begin) // found.itemsize
        end = max(begin, -((found.begin - offset - nbytes) // found.itemsize))
        return f"{found.name}[{begin}]" if end == begin + 1 else f"{found.name}[{begin}:{end}]"


class ImmediateStream:
    """A :class:`~tdcoll.runtime.heap.SideStream` where there are no streams."""

    handle = 0

    def fork(self, stream: int) -> None:
        """Do nothing, because all work is done."""

    join = fork


class MemoryView:
    """One PE's view of a :class:`Memory`: the symmetric heap that tdcoll's host code works with."""

    def __init__(self, memory: Memory, pe: int, accessible: tuple[bool, ...]) -> None:
        self._memory = memory
        self._accessible = accessible
        self.pe = pe
        self.n_pes = memory.n_pes
        self.nbytes = memory.nbytes
        self.base = memory.block(pe)
        self.puts = memory.puts
        self.device = torch.device("cpu")

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        return self.peer_view(self.pe, offset, nbytes)

    def peer_base(self, pe: int) -> int:
        if not 0 <= pe < self.n_pes:
            raise ValueError(f"pe must be in 0..{self.n_pes - 1}, got {pe}")
        return self._memory.block(pe) if self._accessible[pe] else 0

    def peer_view(self, pe: int, offset: int, nbytes: int) -> torch.Tensor:
        begin = pe * self.nbytes + offset
        return self._memory.tensor[begin : begin + nbytes]

    def stream_wait(
        self, stream: int, address: int, bits: int, at_least: bool, value: int, timeout_s: float
    ) -> None:
        word = (ctypes.c_uint32 if bits == 32 else ctypes.c_uint64).from_address(address)
        what = f"{self._memory.describe(address)} {'>=' if at_least else '=='} {value}"

        def ready() -> bool:
            return word.value >= value if at_least else word.value == value

        if not self.wait_on_host(
            address, ready, lambda: f"waits for {what}, is {word.value}", timeout_s
        ):
            raise CollectiveTimeout(
                f"in a stream's wait for {what}, which is {word.value}",
                rank=self.pe,
                timeout_s=timeout_s,
            )

    def stream_write(self, stream: int, address: int, bits: int, value: int) -> None:
        (ctypes.c_uint32 if bits == 32 else ctypes.c_uint64).from_address(address).value = value
        self.written_by_host(address, bits // 8)

    def stream_copy(self, stream: int, dest: int, source: int, nbytes: int) -> None:
        ctypes.memmove(dest, source, nbytes)
        self.written_by_host(dest, nbytes)

    def side_stream(self) -> Any:
        """Return a stream on which everything is done at once, as on the caller's."""
        return ImmediateStream()

    def wait_on_host(
        self, address: int, ready: Callable[[], bool], describe: Callable[[], str], timeout_s: float
    ) -> bool:
        """Wait on the host, by polling, until ``ready()`` (of the word at ``address``); False after
        ``timeout_s``."""
        end = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > end:
                return False
            time.sleep(2e-5)
        return True

    def written_by_host(self, address: int, nbytes: int) -> None:
        """Tell waits on the host that it has written these bytes. Waits that poll need no
        notice."""

    def label(self, offset: int, nbytes: int, name: str, itemsize: int, pes: Sequence[int]) -> None:
        made = Allocation(offset, offset + nbytes, name, itemsize, frozenset(pes))
        self._memory.allocations[self.pe].replace(offset, offset + nbytes, [made] if nbytes else [])

    def unlabel(self, offset: int) -> None:
        self._memory.allocations[self.pe].replace(offset, offset + 1)

    def close(self) -> None:
        """Do nothing, because the buffer is freed with the last tensor that views it."""

    def abort(self) -> None:
        """Do nothing, because there is nothing to leave behind."""
