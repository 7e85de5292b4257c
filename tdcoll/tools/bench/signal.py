# SPDX-License-Identifier: Apache-2.0
"""How long a signal takes: ``bash launch.sh [--nproc N] -m tdcoll bench signal --help``.

Two patterns, each with signals of the library (``signal_block``) and by stores to the peer's memory (``st_release``):

- *one-way*: from rank 0 to each other rank and back, many times in one launch, so that the launch hardly counts. The
  result is half of the round-trip time, which includes the receiver's polling.
- *all-to-all*: every rank signals every other and waits for all of them, which is the cost of a collective without
  data. Many times in one launch, and once in a launch, when the launch counts as it does in a collective.

Both use CUDA graph replays. When they have ended, the signals must have the values that so many rounds give.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import triton

import tdcoll
from tdcoll.language import INTERPRETED
from tdcoll.tools.bench import case, options
from tdcoll.tools.bench.engine import CALLS, Found, Subject, Wanted
from tdcoll.tools.bench.kernels import ping_pong, signal_all

__all__ = ["SENDS", "Signalling"]

SENDS = {"signal_block": False, "st_release": True}
"""Ways to send, and whether they are stores to the peer's memory."""


class Signalling(case.Case):
    """The case. A size is its facts:

    - pattern: ``"one-way"`` or ``"all-to-all"``;
    - peer_rank: the other rank than 0; None with all-to-all;
    - same_node: whether it is on rank 0's node; with all-to-all, whether all are;
    - rounds: how often in one launch.
    """

    benchmark = "signal"

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        parser = options.Parser(
            "bench signal", "Latency of signals, checked: CUDA graph replays. On the simulator: checks and counts."
        )
        parser.option("--rounds", options.at_least(2), 3 if INTERPRETED else 500, "N", "rounds in one launch")
        options.add_common(parser, 50)
        return parser.parse_args(arguments)

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
        own, scratch = topology.rank, self.scratch.data_ptr()
        addresses = [base + offset if base and rank != own else scratch for rank, base in enumerate(bases)]
        addresses += [scratch] * (self.block - world)
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        self.accessible = self.gather("accessible", [base != 0 for base in bases])
        """``accessible[r][s]``: true if rank r can store to the memory of rank s."""
        self.launched = 0
        """Launches since the signals were 0."""

    def sizes(self) -> Iterator[dict[str, Any]]:
        rounds, nodes = self.options.rounds, self.topology.nodes
        for peer in range(1, len(nodes)):
            yield {"pattern": "one-way", "peer_rank": peer, "same_node": nodes[peer] == nodes[0], "rounds": rounds}
        for many in (rounds, 1):
            yield {"pattern": "all-to-all", "peer_rank": None, "same_node": len(set(nodes)) == 1, "rounds": many}

    def facts(self, size: dict[str, Any]) -> dict[str, Any]:
        return size

    @contextlib.contextmanager
    def wanted(self, size: dict[str, Any]) -> Iterator[tuple[Sequence[Wanted], Callable[[], object]]]:
        made = [Wanted(send, False, partial(self.subject, send, **size), ["graph"]) for send in SENDS]
        yield made, self.monitor.check

    def subject(self, send: str, pattern: str, peer_rank: int | None, same_node: bool, rounds: int) -> Subject:
        """Return a subject whose launch is one call. If a rank takes no part, it does nothing in it."""
        ranks = range(self.topology.world_size) if peer_rank is None else (0, peer_rank)
        if SENDS[send] and not all(self.accessible[one][other] for one in ranks for other in ranks):
            raise ValueError("needs ranks that can store to each other's memory")

        def before(numbers: Sequence[int]) -> None:
            self.launched += len(numbers)

        return Subject(
            lambda _: self.launch(ranks, rounds, SENDS[send], peer_rank is None),
            lambda _, __: self.errors(ranks, rounds, peer_rank is None),
            begin=self.zero,
            before=before,
            calls=CALLS if rounds == 1 else (1, 2),
            parts=rounds * (1 if peer_rank is None else 2),  # one-way: half of there and back
            alone=True,
            takes_part=self.topology.rank in ranks,
        )

    def launch(self, ranks: Sequence[int], rounds: int, direct: bool, all_to_all: bool) -> None:
        """Launch once; do nothing if this rank takes no part."""
        topology, words = self.topology, self.monitor.words
        if (rank := topology.rank) not in ranks:
            return
        if all_to_all:
            signal_all[(1,)](
                *(self.signals, self.addresses, self.pes, self.counter, words, rank, rounds),
                *(topology.world_size, self.block, direct),
                num_warps=max(1, min(4, self.block // 32)),
            )
            return
        peer = ranks[1] if rank == 0 else 0
        ping_pong[(1,)](
            *(self.signals, self.addresses, self.counter, words, rank, peer, topology.pes[peer]),
            *(int(rank == 0), rounds, direct),
            num_warps=1,
        )

    def zero(self, _: int) -> None:
        """Reset the signals to 0. Collective."""
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

    def errors(self, ranks: Sequence[int], rounds: int, all_to_all: bool) -> Found:
        """Return the errors after all launches since the signals were 0. Collective."""
        self.synchronize()
        self.monitor.check()
        expected, own = self.launched * rounds, self.topology.rank
        last = self.signals[expected % 2 if all_to_all else 0].tolist()  # all-to-all takes the rows in turn
        self.gather("read", None)  # the next launch may signal
        wrong = {other: last[other] for other in ranks if other != own and last[other] != expected}
        if own not in ranks or (not wrong and int(self.counter) == expected):
            return 0, ""
        return 1, f"rank {own}: expected signals of {expected}, got {wrong}, counted {int(self.counter)}"
