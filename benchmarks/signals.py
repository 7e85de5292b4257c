# SPDX-License-Identifier: Apache-2.0
"""How long a signal takes: ``bash launch.sh -m tdcoll bench signal --help``.

A signal goes from rank 0 to each other rank and back, many times in one launch, so that the launch
hardly counts: with signals of the library (``signal_block``) and by stores to the peer's memory
(``st_release``). The result is half of the round-trip time, which includes the receiver's polling,
in CUDA graph replays. The signals' last values are checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import tdcoll
from benchmarks import parsing
from benchmarks.kernels_signals import ping_pong
from benchmarks.layout import Layout
from tdcoll.language import INTERPRETED
from tdcoll.tools.measure.benchmark import Benchmark
from tdcoll.tools.measure.engine import Errors, Variant, Workload
from tdcoll.tools.measure.results import Row, fact

SENDS = {"signal_block": False, "st_release": True}
"""The ways to send, and whether they are stores to the peer's memory."""


def _ends(row: Row) -> str:
    """Return between which ranks the signal goes."""
    text = f"0 to {row.facts['peer_rank']}"
    return text if row.facts["same_node"] else f"{text}, other node"


class SignalBenchmark(Benchmark):
    """The benchmark. A size is the other rank than 0.

    Attributes:
        signals: ``[world]`` int64 in symmetric memory: signal r is written by rank r.
        counter: ``[1]`` int64, this GPU's own: the last value.
        addresses: ``[world]`` int64: the address of this rank's signal on each rank.
        accessible: ``accessible[r][s]`` is true if rank r can store to the memory of rank s.
        launched: launches since the signals were 0.
    """

    name = "signal"
    columns = Layout(
        title="Signals", size={"between": _ends, "rounds in a launch": fact("{rounds}")}
    )

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> SimpleNamespace:
        default = 3 if INTERPRETED else 500
        rounds = parsing.number_option("--rounds", 2, default, "rounds in one launch")
        return parsing.parse_benchmark(
            cls.name,
            "Latency of signals, checked: CUDA graph replays. On the simulator: checks.",
            [rounds, *parsing.common_options(50)],
            arguments,
        )

    def __init__(self, options: SimpleNamespace) -> None:
        super().__init__(options)
        topology = self.ranks.topology
        owner = self.ranks.owner
        device = self.ranks.device
        self.signals = tdcoll.zeros(topology.world_size, torch.int64)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.monitor = tdcoll.WaitMonitor()
        offset = owner.offset_of(self.signals, "signals") + 8 * topology.rank
        bases = [owner.heap.peer_base(pe) for pe in topology.pes]
        addresses = [base + offset for base in bases]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.accessible = self.ranks.gather("accessible", [base != 0 for base in bases])
        self.launched = 0

    def sizes(self) -> Iterator[int]:
        yield from range(1, self.ranks.topology.world_size)

    def facts(self, peer: int) -> dict[str, Any]:
        nodes = self.ranks.topology.nodes
        return {
            "peer_rank": peer,
            "same_node": nodes[peer] == nodes[0],
            "rounds": self.options.rounds,
        }

    @contextlib.contextmanager
    def variants(self, peer: int) -> Iterator[tuple[Sequence[Variant], Callable[[], object]]]:
        variants = [
            Variant(send, False, partial(self.workload, send, peer), ["graph"]) for send in SENDS
        ]
        yield variants, self.monitor.check

    def workload(self, send: str, peer: int) -> Workload:
        """Return the workload in which a launch is one call.

        A rank that takes no part does nothing in it.
        """
        stores = SENDS[send]
        if stores and not (self.accessible[0][peer] and self.accessible[peer][0]):
            raise ValueError("needs ranks that can store to each other's memory")

        def before(numbers: Sequence[int]) -> None:
            self.launched += len(numbers)

        return Workload(
            call=lambda _: self.launch(peer, stores),
            errors=lambda _, __: self.errors(peer),
            begin=self.zero,
            before=before,
            launch_calls=(1, 2),
            parts=2 * self.options.rounds,  # half of there and back
            one_at_a_time=True,
            takes_part=self.ranks.topology.rank in (0, peer),
        )

    def launch(self, peer: int, stores: bool) -> None:
        """Launch once; do nothing if this rank takes no part."""
        topology = self.ranks.topology
        rank = topology.rank
        if rank not in (0, peer):
            return
        other = peer if rank == 0 else 0
        ping_pong[(1,)](
            self.signals,
            self.addresses,
            self.counter,
            self.monitor.words,
            rank,
            other,
            topology.pes[other],
            int(rank == 0),
            self.options.rounds,
            stores,
            num_warps=1,
        )

    def zero(self, _: int) -> None:
        """Reset the signals to 0. Collective."""
        self.synchronize()
        self.ranks.gather("begin", None)
        self.signals.zero_()
        self.counter.zero_()
        self.launched = 0
        self.synchronize()
        self.ranks.gather("zeroed", None)

    def synchronize(self) -> None:
        """Wait for the GPU. The simulator has none, and takes the reading of a value for a wait."""
        if self.ranks.owner.simulated:
            self.counter.item()
        else:
            torch.cuda.synchronize()

    def errors(self, peer: int) -> Errors:
        """Return the errors after all launches since the signals were 0. Collective."""
        self.synchronize()
        self.monitor.check()
        expected = self.launched * self.options.rounds
        rank = self.ranks.topology.rank
        last = self.signals.tolist()
        counted = int(self.counter)
        self.ranks.gather("read", None)  # the next launch may signal
        got = last[peer if rank == 0 else 0]
        if rank not in (0, peer) or got == counted == expected:
            return 0, ""
        return 1, f"rank {rank}: expected signals of {expected}, got {got}, counted {counted}"
