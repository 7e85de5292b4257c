# SPDX-License-Identifier: Apache-2.0
"""The symmetric heap: the interface of a transport, and the allocator that all transports share.

A *transport* (NVSHMEM or PyTorch's symmetric memory on GPUs, shared memory in the simulator) offers
one block of ``nbytes`` bytes on every PE, accessible from every other PE. tdcoll cuts that block up
itself, for two reasons:

- A context for a subgroup would hang with ``nvshmem_malloc``, because that is collective over *all*
  PEs. Here an allocation is collective over the ranks that take part: they agree on one offset that
  is free on each of them.
- If the heap is full, the error has exact numbers, because its use is known.

Another transport needs a block with addresses of the peers; device functions for puts and signals
if it spans hosts; and their guarantees of order, because kernels state which of NVSHMEM's they rely
on.

"Symmetric" means the same offset on every PE: the address of a peer's copy is ``peer_base(pe) +
(address - base)``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tdcoll.base.arguments import format_bytes
from tdcoll.base.errors import HeapExhaustedError

ALIGNMENT = 512
"""Bytes. Every allocation starts at a multiple of it, which is enough for TMA and for a cache line
pair."""


class SideStream(Protocol):
    """A stream of its own for copies beside the caller's stream. For one thread at a time.

    Attributes:
        handle: as ``stream_copy`` takes it.
    """

    handle: int

    def fork(self, stream: int) -> None:
        """Let later work here wait for the work that is queued on ``stream`` so far."""

    def join(self, stream: int) -> None:
        """Let later work on ``stream`` wait for the work that is queued here so far."""


class SymmetricHeap(Protocol):
    """One PE's view of the symmetric memory of a job.

    Attributes:
        n_pes: number of PEs of the job.
        nbytes: size of the block on every PE, in bytes.
        base: address of this PE's block.
        device: the torch device that the block lies on.
        puts: whether NVSHMEM's functions work in kernels. If not, a job is one node, whose PEs are
            peer-accessible.
    """

    pe: int
    n_pes: int
    nbytes: int
    base: int
    device: torch.device
    puts: bool

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """``-> [nbytes]``: return a uint8 tensor on this PE's bytes ``[offset, offset +
        nbytes)``."""

    def peer_base(self, pe: int) -> int:
        """Return the address at which this PE can load and store ``pe``'s block; 0 if only puts and
        gets reach it."""

    def peer_view(self, pe: int, offset: int, nbytes: int) -> torch.Tensor:
        """``-> [nbytes]``: :meth:`view` of the bytes of ``pe``, which must be peer-accessible."""

    def stream_wait(
        self, stream: int, address: int, bits: int, at_least: bool, value: int, timeout_s: float
    ) -> None:
        """Let a stream wait until the word of 32 or 64 bits at ``address`` is ``value``, or
        ``at_least`` that.

        If there are no streams, the caller waits, for ``timeout_s`` at most."""

    def stream_write(self, stream: int, address: int, bits: int, value: int) -> None:
        """Let a stream write a word of 32 or 64 bits when all ranks see the work that was queued
        before."""

    def stream_copy(self, stream: int, dest: int, source: int, nbytes: int) -> None:
        """Let a stream copy bytes between memory of this PE and peer-accessible memory."""

    def side_stream(self) -> SideStream:
        """Make a stream of the highest priority that this device has."""

    def label(self, offset: int, nbytes: int, name: str, itemsize: int, pes: Sequence[int]) -> None:
        """Take note of an allocation of ``pes``: its name for reports ("pe3.signals[0]"), and the
        bytes that an access may reach. Ignored if a transport checks and reports nothing."""
        return

    def unlabel(self, offset: int) -> None:
        """Take note that the allocation at ``offset`` was freed."""
        return

    def close(self) -> None:
        """Give the block back. Collective; no PE may touch symmetric memory afterwards."""

    def abort(self) -> None:
        """Let this process join another job when this one has failed. Local; peers may still write
        to the block."""


@dataclass(frozen=True)
class HeapInfo:
    """Use of this PE's symmetric heap, in bytes."""

    total: int
    used: int
    free: int
    largest_free: int
    allocations: int


class Arena:
    """Bookkeeping of ``nbytes`` bytes, for several threads: first fit, at multiples of ALIGNMENT;
    counts releases."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.releases = 0
        self._used: dict[int, tuple[int, tuple[int, ...]]] = {}  # offset -> (padded size, owners)
        self._lock = threading.Lock()

    @staticmethod
    def padded(nbytes: int) -> int:
        """Return the bytes that an allocation of ``nbytes`` takes: a multiple of :data:`ALIGNMENT`,
        never 0."""
        return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)

    @property
    def info(self) -> HeapInfo:
        with self._lock:
            free = self._gaps()
            allocations = len(self._used)
        total, largest = _sizes(free)
        return HeapInfo(self.nbytes, self.nbytes - total, total, largest, allocations)

    def free(self, current_offset: int | None = None) -> list[tuple[int, int]]:
        """Return the free intervals ``(begin, end)``, as if the allocation at ``current_offset`` were not
        there."""
        with self._lock:
            return self._gaps(current_offset)

    def _gaps(self, current_offset: int | None = None) -> list[tuple[int, int]]:
        taken = sorted(
            (begin, begin + size)
            for begin, (size, _) in self._used.items()
            if begin != current_offset
        )
        ends = [0, *(end for _, end in taken)]
        begins = [*(begin for begin, _ in taken), self.nbytes]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]

    def hold(
        self,
        nbytes: int,
        owners: Sequence[int],
        current_offset: int | None = None,
        wanted: int | None = None,
    ) -> int | None:
        """Take ``nbytes`` for the ranks ``owners``: at the first free place, or at ``wanted``
        instead of the allocation at ``current_offset``. Return the allocation's offset: as it was if
        ``wanted`` is not free, None if there is none."""
        size = self.padded(nbytes)
        with self._lock:
            free = self._gaps(current_offset)
            at = wanted
            if at is None:
                at = next((begin for begin, end in free if end - begin >= size), None)
            if at is None or not _fits(at, size, free):
                return current_offset
            if current_offset is not None:
                del self._used[current_offset]
            self._used[at] = size, tuple(owners)
            return at

    def release(self, offset: int) -> None:
        """Free the allocation at ``offset``; raises ``KeyError`` if there is none."""
        with self._lock:
            del self._used[offset]
            self.releases += 1

    def owners_of(self, offset: int) -> tuple[int, ...] | None:
        """Return the ranks that share the allocation that starts at ``offset``, or None if there is
        none."""
        found = self._used.get(offset)
        return None if found is None else found[1]

    def owners_around(self, offset: int, nbytes: int) -> tuple[int, ...] | None:
        """Return the ranks that share the allocation around ``[offset, offset + nbytes)``, or None
        if there is none."""
        for begin, (size, owners) in tuple(self._used.items()):
            if begin <= offset and offset + nbytes <= begin + size:
                return owners
        return None


def _sizes(free: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the bytes of all intervals, and of the largest."""
    sizes = [end - begin for begin, end in free]
    return sum(sizes), max(sizes, default=0)


def _fits(offset: int, size: int, free: Sequence[tuple[int, int]]) -> bool:
    return any(begin <= offset and offset + size <= end for begin, end in free)


def agree(proposals: Sequence[Sequence[tuple[int, int]]], nbytes: int, total: int) -> int:
    """Return the lowest offset at which ``nbytes`` are free on every PE; the same on all of
    them."""
    size = Arena.padded(nbytes)
    for offset in sorted({begin for proposal in proposals for begin, _ in proposal}):
        if all(_fits(offset, size, proposal) for proposal in proposals):
            return offset
    free, largest = min(map(_sizes, proposals), key=lambda sizes: sizes[1])
    behind_all = 1 << (total + size - 1).bit_length()
    enough = format_bytes(behind_all)[:-1].replace(" ", "")
    raise HeapExhaustedError(
        f"the symmetric heap has no room: {size} bytes asked, {free} of {total} bytes free on the fullest rank "
        f"(largest free piece {largest} bytes). Raise NVSHMEM_SYMMETRIC_SIZE (to {enough}, say) or pass "
        "initialize(heap_bytes=...), or free contexts and tensors that are not needed."
    )
