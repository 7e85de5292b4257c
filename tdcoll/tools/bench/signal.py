# SPDX-License-Identifier: Apache-2.0
"""How long a signal takes: ``bash launch.sh [--nproc N] -m tdcoll bench signal --help``.

A signal goes from rank 0 to each other rank and back, many times in one launch, so that the launch hardly counts: with
signals of the library (``signal_block``) and by stores to the peer's memory (``st_release``). The result is half of the
round-trip time, which includes the receiver's polling, in CUDA graph replays. The signals' last values are checked.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import tdcoll
from tdcoll.language import INTERPRETED
from tdcoll.tools.bench import case, options
from tdcoll.tools.bench.engine import Found, Subject, Wanted
from tdcoll.tools.bench.kernels import ping_pong

SENDS = {"signal_block": False, "st_release": True}
"""Ways to send, and whether they are stores to the peer's memory."""


class Signalling(case.Case):
    """The case. A size is the other rank than 0."""

    benchmark = "signal"

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        parser = options.Parser(
            "bench signal", "Latency of signals, checked: CUDA graph replays. On the simulator: checks."
        )
        parser.option("--rounds", options.at_least(2), 3 if INTERPRETED else 500, "N", "rounds in one launch")
        options.add_common(parser, 50)
        return parser.parse_args(arguments)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        topology, heap = self.topology, self.owner.heap
        self.signals = tdcoll.zeros(topology.world_size, torch.int64)
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.monitor = tdcoll.WaitMonitor()
        offset = self.owner.offset_of(self.signals, "signals") + 8 * topology.rank
        bases = [heap.peer_base(pe) for pe in topology.pes]
        self.addresses = torch.tensor([base + offset for base in bases], dtype=torch.int64, device=self.device)
        self.accessible = self.gather("accessible", [base != 0 for base in bases])
        """``accessible[r][s]``: true if rank r can store to the memory of rank s."""
        self.launched = 0
        """Launches since the signals were 0."""

    def sizes(self) -> Iterator[int]:
        yield from range(1, self.topology.world_size)

    def facts(self, peer: int) -> dict[str, Any]:
        nodes = self.topology.nodes
        return {"peer_rank": peer, "same_node": nodes[peer] == nodes[0], "rounds": self.options.rounds}

    @contextlib.contextmanager
    def wanted(self, peer: int) -> Iterator[tuple[Sequence[Wanted], Callable[[], object]]]:
        yield [Wanted(send, False, partial(self.subject, send, peer), ["graph"]) for send in SENDS], self.monitor.check

    def subject(self, send: str, peer: int) -> Subject:
        """Return a subject whose launch is one call. If a rank takes no part, it does nothing in it."""
        if SENDS[send] and not (self.accessible[0][peer] and self.accessible[peer][0]):
            raise ValueError("needs ranks that can store to each other's memory")

        def before(numbers: Sequence[int]) -> None:
            self.launched += len(numbers)

        return Subject(
            lambda _: self.launch(peer, SENDS[send]),
            lambda _, __: self.errors(peer),
            begin=self.zero,
            before=before,
            calls=(1, 2),
            parts=2 * self.options.rounds,  # half of there and back
            alone=True,
            takes_part=self.topology.rank in (0, peer),
        )

    def launch(self, peer: int, direct: bool) -> None:
        """Launch once; do nothing if this rank takes no part."""
        if (rank := self.topology.rank) in (0, peer):
            other = peer if rank == 0 else 0
            ping_pong[(1,)](
                *(self.signals, self.addresses, self.counter, self.monitor.words, rank, other),
                *(self.topology.pes[other], int(rank == 0), self.options.rounds, direct),
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

    def errors(self, peer: int) -> Found:
        """Return the errors after all launches since the signals were 0. Collective."""
        self.synchronize()
        self.monitor.check()
        expected, own = self.launched * self.options.rounds, self.topology.rank
        last, counted = self.signals.tolist(), int(self.counter)
        self.gather("read", None)  # the next launch may signal
        got = last[peer if own == 0 else 0]
        if own not in (0, peer) or got == counted == expected:
            return 0, ""
        return 1, f"rank {own}: expected signals of {expected}, got {got}, counted {counted}"
