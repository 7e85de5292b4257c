# SPDX-License-Identifier: Apache-2.0
"""How long a signal takes: ``bash launch.sh [--nproc N] -m tdcoll bench signal --help``.

Two patterns, each with signals of the library (``signal_block``) and by stores to the peer's memory (``st_release``):

- *one-way*: from rank 0 to each other rank and back, many times in one launch, so that the launch hardly counts. What
  is reported is half of the time there and back. It includes that the receiver, which polls, sees the signal.
- *all-to-all*: every rank signals every other and waits for all of them: what a collective without data costs. Many
  times in one launch, and once in a launch, where the launch counts, as in a collective of its own.

CUDA graph replays. The check: afterwards the signals have the values that so many rounds give.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton

import tdcoll
from tdcoll.bench import case, options
from tdcoll.bench.engine import CALLS, Entry, Found, Subject
from tdcoll.bench.kernels import ping_pong, signal_all
from tdcoll.bench.options import at_least
from tdcoll.bench.rows import SignalRow
from tdcoll.bench.table import signal_columns
from tdcoll.language import INTERPRETED

__all__ = ["SENDS", "Signalling", "main"]

SENDS = {"signal_block": False, "st_release": True}
"""Ways to send, and whether they are stores to the peer's memory."""


@dataclass(frozen=True)
class Between:
    """Who signals whom.

    Attributes:
        pattern, peer_rank, same_node, rounds: as in :class:`~tdcoll.bench.rows.SignalRow`.
        reached: whether all of them can store to each other's memory.
    """

    pattern: str
    peer_rank: int | None
    same_node: bool
    rounds: int
    reached: bool


class Signalling(case.Case):
    """The case; a size is :class:`Between`."""

    benchmark = "signal"
    columns = staticmethod(lambda peers, simulated: signal_columns(simulated))

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        parser = options.Parser(
            prog="bash launch.sh [--nproc N] -m tdcoll bench signal",
            description="Latency of signals, checked: CUDA graph replays. On the simulator: checks and counts.",
        )
        parser.some("--patterns", ("one-way", "all-to-all"))
        parser.some("--sends", tuple(SENDS))
        parser.option("--rounds", at_least(2), 3 if INTERPRETED else 500, "N", "rounds in one launch")
        options.add_common(parser, 50)
        given = parser.parse_args(arguments)
        options.check_common(parser, given)
        return given

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        topology, heap = self.topology, self.owner.heap
        world = topology.world_size
        self.block = triton.next_power_of_2(world)
        self.signals = tdcoll.zeros((2, world), torch.int64)
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.scratch = torch.zeros(world + 1, dtype=torch.int64, device=self.device)
        self.monitor = tdcoll.WaitMonitor()
        self.pes = torch.tensor(topology.pes, dtype=torch.int32, device=self.device)
        offset = self.owner.offset_of(self.signals, "signals") + 8 * topology.rank
        bases = [heap.peer_base(pe) for pe in topology.pes]
        scratch = self.scratch.data_ptr()
        addresses = [base + offset if base else scratch for base in bases]
        addresses[topology.rank] = scratch
        addresses += [scratch] * (self.block - world)
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        self.reached = self.gather("reached", [base != 0 for base in bases])
        self.launched = 0
        """Launches since the signals were 0."""

    def close(self) -> None:
        tdcoll.free(self.signals)

    def sizes(self) -> Iterator[Between]:
        options, topology = self.options, self.topology
        if "one-way" in options.patterns:
            for peer in range(1, topology.world_size):
                reached = self.reached[0][peer] and self.reached[peer][0]
                yield Between("one-way", peer, topology.nodes[peer] == topology.nodes[0], options.rounds, reached)
        if "all-to-all" in options.patterns:
            for rounds in (options.rounds, 1):
                yield Between("all-to-all", None, topology.n_nodes == 1, rounds, all(map(all, self.reached)))

    @contextlib.contextmanager
    def wanted(self, size: Between) -> Iterator[tuple[Sequence[case.Wanted], Callable[[], object]]]:
        sends = self.options.sends
        yield [case.Wanted(send, False, partial(self.subject, size, send), ["graph"]) for send in sends], self.check

    def check(self) -> None:
        """Raise if a wait has expired."""
        self.monitor.check()

    def row(self, size: Between, entry: Entry, /, **common: Any) -> SignalRow:
        return SignalRow(
            **common, pattern=size.pattern, peer_rank=size.peer_rank, same_node=size.same_node, rounds=size.rounds
        )

    def subject(self, size: Between, send: str) -> Subject:
        """A launch is a call. Ranks that take no part do nothing in it."""
        if SENDS[send] and not size.reached:
            raise ValueError("needs ranks that can store to each other's memory")
        one_way = size.pattern == "one-way"

        def before(numbers: Sequence[int]) -> None:
            self.launched += len(numbers)

        return Subject(
            lambda _: self.launch(size, SENDS[send]),
            partial(self.errors, size),
            begin=self.zero,
            before=before,
            calls=CALLS if size.rounds == 1 else (1, 2),
            parts=size.rounds * (2 if one_way else 1),  # one-way: half of there and back
            alone=True,
            takes_part=self.takes_part(size),
        )

    def takes_part(self, size: Between) -> bool:
        """Return whether this rank does."""
        return size.peer_rank is None or self.topology.rank in (0, size.peer_rank)

    def launch(self, size: Between, direct: bool) -> None:
        """One launch; nothing on ranks that take no part."""
        if not self.takes_part(size):
            return
        topology = self.topology
        rank, words = topology.rank, self.monitor.words
        if size.peer_rank is None:
            signal_all[(1,)](
                *(self.signals, self.addresses, self.pes, self.counter, words, rank, size.rounds),
                *(topology.world_size, self.block, direct),
                num_warps=max(1, min(4, self.block // 32)),
            )
            return
        peer = size.peer_rank if rank == 0 else 0
        ping_pong[(1,)](
            *(self.signals, self.addresses, self.counter, words, rank, peer, topology.pes[peer]),
            *(int(rank == 0), size.rounds, direct),
            num_warps=1,
        )

    def zero(self, _: int) -> None:
        """Everything from 0 again. Collective."""
        self.synchronize()
        self.gather("begin", None)
        self.signals.zero_()
        self.counter.zero_()
        self.launched = 0
        self.synchronize()
        self.gather("zeroed", None)

    def synchronize(self) -> None:
        """Wait for the GPU, if there is one."""
        if not self.owner.simulated:
            torch.cuda.synchronize()

    def errors(self, size: Between, _: int, __: Any) -> Found:
        """Return what is wrong after all launches since the signals were 0."""
        self.synchronize()
        self.check()
        expected, mine = self.launched * size.rounds, self.topology.rank
        others = range(self.topology.world_size) if size.peer_rank is None else [size.peer_rank if mine == 0 else 0]
        # With all-to-all the rows are taken in turn.
        last = self.signals[expected % 2 if size.peer_rank is None else 0].tolist()
        self.gather("read", None)  # the next launch may signal
        wrong = {other: last[other] for other in others if other != mine and last[other] != expected}
        if not self.takes_part(size) or (not wrong and int(self.counter) == expected):
            return 0, ""
        return 1, f"rank {mine}: expected signals of {expected}, got {wrong}, counted {int(self.counter)}"


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 1 if a signal was wrong."""
    return case.run(Signalling, arguments)
