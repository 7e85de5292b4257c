# SPDX-License-Identifier: Apache-2.0
"""Ranks that are emulated in one process on one GPU: memory, launches and a report, for
``matmul_kernels.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton.language as tl

from tdcoll.fused.matmul.launches import Cut, Operands
from tdcoll.primitives.group import Group, Inbox
from tdcoll.primitives.lamport import SENTINEL, Lamport
from tdcoll.spec import constants

CHUNKS = 4096
"""Signals of each slot, for each rank."""


class Heap:
    """Memory of one emulated rank.

    Attributes:
        inbox: bytes ``[2, world, capacity]``.
        signals: int64 ``[2, CHUNKS, world]``.
        lamport: bytes ``[3, world, lamport_bytes]``.
    """

    def __init__(self, rank: int, world: int, capacity: int, lamport_bytes: int = 0) -> None:
        self.rank = rank
        self.world = world
        self.capacity = capacity
        self.stride = lamport_bytes
        signal_bytes = 8 * (2 * CHUNKS * world + 2 * world)
        total = 2 * world * capacity + signal_bytes + 3 * world * lamport_bytes
        self.memory = torch.zeros(total, dtype=torch.uint8, device="cuda")
        self.inbox = self.memory[: 2 * world * capacity].view(2, world, capacity)
        words = self.memory[2 * world * capacity :][:signal_bytes].view(torch.int64)
        self.signals = words[: 2 * CHUNKS * world].view(2, CHUNKS, world)
        self.entered = words[2 * CHUNKS * world :][:world]
        self.expired_epochs = words[2 * CHUNKS * world + world :][:world]
        self.lamport = self.memory[2 * world * capacity + signal_bytes :]
        self.lamport.view(torch.int32).fill_(SENTINEL.value)
        self.control = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.calls = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.written = torch.zeros(3, dtype=torch.int64, device="cuda")
        self.record = torch.zeros(constants.RECORD_WORDS.value, dtype=torch.int64, device="cuda")
        self.monitor = torch.tensor([0, 2_000_000_000, self.record.data_ptr(), rank], device="cuda")

    def group(self, deltas: torch.Tensor) -> Group:
        """Return the group that kernels get, of ranks whose memory lies ``deltas`` bytes from this
        one's."""
        words = (
            self.signals,
            self.entered,
            self.expired_epochs,
            self.control,
            self.monitor,
            deltas,
        )
        return Group(*words, self.rank, tl.constexpr(CHUNKS), tl.constexpr(self.world))

    def device_inbox(self, deltas: torch.Tensor) -> Inbox:
        """Return the inbox that kernels get."""
        return Inbox(self.inbox.data_ptr(), self.capacity, deltas, tl.constexpr(2))

    def device_lamport(self) -> Lamport:
        """Return the memory of words that kernels get."""
        return Lamport(self.lamport.data_ptr(), self.stride, self.calls, self.written)

    def expired(self) -> bool:
        """Return whether a wait has expired."""
        return bool(self.monitor[constants.MONITOR_ABORTED.value])


def connected(heaps: list[Heap]) -> list[tuple[Group, Inbox]]:
    """Return what kernels of each rank get, if ranks write to each other."""
    found = []
    for heap in heaps:
        deltas = [other.memory.data_ptr() - heap.memory.data_ptr() for other in heaps]
        table = torch.tensor(deltas, dtype=torch.int64, device="cuda")
        found.append((heap.group(table), heap.device_inbox(table)))
    return found


@dataclass(frozen=True)
class Launch:
    """A kernel with all that it is launched with.

    Attributes:
        made: thread blocks and arguments.
        operands: whose addresses are among them.
    """

    kernel: Any
    cut: Cut
    made: tuple[int, dict[str, Any]]
    operands: Operands

    def __call__(self) -> None:
        blocks, arguments = self.made
        self.kernel[(blocks,)](**arguments, **self.cut.options)

    def compile(self) -> str | None:
        """Return what is wrong with it, if it can't be compiled."""
        blocks, arguments = self.made
        try:
            self.kernel.warmup(**arguments, **self.cut.options, grid=(blocks,))
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[-200:]}"
        return None


def compile_all(made: list[Launch]) -> None:
    """Compile kernels in several threads, so that later launches find them."""
    different = {(one.kernel, one.cut, str(sorted(_constants(one)))): one for one in made}
    first, *rest = different.values()
    first.compile()
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(Launch.compile, rest))


def _constants(launch: Launch) -> Iterator[tuple[str, str]]:
    for name, value in launch.made[1].items():
        if name.isupper():
            yield name, str(value)


def verdict(got: torch.Tensor, wanted: torch.Tensor) -> str:
    """Return ``equal``, ``near`` or ``WRONG``."""
    if torch.equal(got, wanted):
        return "equal"
    scale = float(wanted.float().abs().max())
    return "near" if float((got.float() - wanted.float()).abs().max()) <= 0.02 * scale else "WRONG"


class Report:
    """Rows that are printed and written to a file as soon as they are there."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = []

    def add(self, section: str, **row: Any) -> None:
        """Print a row and write all rows."""
        self.rows.append({"section": section, **row})
        print(
            f"{section:8}", "  ".join(f"{name} {value}" for name, value in row.items()), flush=True
        )
        if self.file is not None:
            self.file.write_text(json.dumps(self.rows, indent=1))
