# SPDX-License-Identifier: Apache-2.0
"""How long a signal takes: ``bash launch.sh [--nproc N] -m tdcoll.bench signal --help``.

Two patterns, each with signals of the library (``signal_block``) and by stores to the peer's memory (``st_release``):

- *one-way*: from rank 0 to each other rank and back, many times in one launch, so that the launch hardly counts. What
  is reported is half of the time there and back. It includes that the receiver, which polls, sees the signal.
- *all-to-all*: every rank signals every other and waits for all of them: what a collective without data costs. Many
  times in one launch, and once in a launch, where the launch counts, as in a collective of its own.

CUDA graph replays. The check: afterwards the signals have the values that so many rounds give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

import tdcoll
from tdcoll.bench import job as jobs
from tdcoll.bench.arithmetic import summarize
from tdcoll.bench.job import at_least, names
from tdcoll.bench.kernels import ping_pong, signal_all
from tdcoll.bench.rows import SignalRow
from tdcoll.bench.table import signal_columns
from tdcoll.bench.timing import Launch, LineUp, capture, time_launches
from tdcoll.language import INTERPRETED

__all__ = ["SENDS", "Options", "main", "measure", "parse", "simulate"]

SENDS = {"signal_block": False, "st_release": True}
"""Ways to send, and whether they are stores to the peer's memory."""

_CALLS = (20, 21)
"""Launches in a graph where a launch is what is measured; an even and an odd number, taken in turn."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    patterns: list[str]
    sends: list[str]
    rounds: int
    iterations: int
    warmup: int
    json: Path | None


def parse(arguments: Sequence[str]) -> Options:
    """Options from the command line; a wrong one ends the process with status 2."""
    parser = jobs.Parser(
        prog="bash launch.sh [--nproc N] -m tdcoll.bench signal",
        description="Latency of signals, checked: CUDA graph replays. On the simulator: checks and counts.",
    )
    patterns = ("one-way", "all-to-all")
    parser.add_argument(
        *("--patterns", "-p"), type=names(patterns), default=list(patterns), metavar="A,B", help="default: both"
    )
    parser.add_argument(
        "--sends", type=names(tuple(SENDS)), default=list(SENDS), metavar="A,B", help=f"some of {', '.join(SENDS)}"
    )
    parser.add_argument(
        "--rounds",
        type=at_least(2),
        default=3 if INTERPRETED else 500,
        metavar="N",
        help="rounds in one launch (default %(default)s)",
    )
    jobs.add_iterations(parser, "--iters", 2, 50)
    jobs.add_json(parser)
    given = parser.parse_args(arguments)
    jobs.require_directory(parser, given.json)
    return Options(given.patterns, given.sends, given.rounds, given.iters, given.warmup, given.json)


# ---------------------------------------------------------------------- what is measured


class _Bench(jobs.Job):
    """The ranks, and what they signal with."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
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
        self.gather("zeroed", None)

    def close(self) -> None:
        """Free the signals. Collective."""
        tdcoll.free(self.signals)

    def rows(self) -> list[SignalRow]:
        """What there is to measure, in order."""
        options, topology = self.options, self.topology
        made = []

        def add(pattern: str, peer: int | None, rounds: int, same_node: bool, reached: bool) -> None:
            for send in options.sends:
                row = SignalRow(
                    ranks=topology.world_size,
                    nodes=topology.n_nodes,
                    algorithm=send,
                    peer=False,
                    launch="simulator" if self.owner.simulated else "graph",
                    check="ok",
                    pattern=pattern,
                    peer_rank=peer,
                    same_node=same_node,
                    rounds=rounds,
                )
                if SENDS[send] and not reached:
                    note = "needs ranks that can store to each other's memory"
                    row = dataclasses.replace(row, check="not run", note=note)
                made.append(row)

        if "one-way" in options.patterns:
            for peer in range(1, topology.world_size):
                reached = self.reached[0][peer] and self.reached[peer][0]
                add("one-way", peer, options.rounds, topology.nodes[peer] == topology.nodes[0], reached)
        if "all-to-all" in options.patterns:
            for rounds in (options.rounds, 1):
                add("all-to-all", None, rounds, topology.n_nodes == 1, all(map(all, self.reached)))
        return made

    def takes_part(self, row: SignalRow) -> bool:
        """Whether this rank does."""
        return row.pattern == "all-to-all" or self.topology.rank in (0, row.peer_rank)

    def launch(self, row: SignalRow) -> None:
        """One launch; nothing on ranks that take no part."""
        if not self.takes_part(row):
            return
        topology, direct = self.topology, SENDS[row.algorithm]
        rank, words = topology.rank, self.monitor.words
        if row.pattern == "all-to-all":
            signal_all[(1,)](
                *(self.signals, self.addresses, self.pes, self.counter, words, rank, row.rounds),
                *(topology.world_size, self.block, direct),
                num_warps=max(1, min(4, self.block // 32)),
            )
            return
        assert row.peer_rank is not None
        peer = row.peer_rank if rank == 0 else 0
        ping_pong[(1,)](
            *(self.signals, self.addresses, self.counter, words, rank, peer, topology.pes[peer]),
            *(int(rank == 0), row.rounds, direct),
            num_warps=1,
        )

    def begin(self) -> None:
        """Everything from 0 again. Collective."""
        self.synchronize()
        self.gather("begin", None)
        self.signals.zero_()
        self.counter.zero_()
        self.synchronize()
        self.gather("zeroed", None)

    def synchronize(self) -> None:
        """Wait for the GPU, if there is one."""
        if not self.owner.simulated:
            torch.cuda.synchronize()

    def checked(self, row: SignalRow, launches: int) -> SignalRow:
        """The row, with what is wrong after so many launches on any rank. Collective."""
        self.monitor.check()
        found = None
        if self.takes_part(row):
            expected = launches * row.rounds
            mine = self.topology.rank
            others = [row.peer_rank if mine == 0 else 0] if row.peer_rank else range(self.topology.world_size)
            # With all-to-all the rows are taken in turn.
            last = self.signals[expected % 2 if row.peer_rank is None else 0].tolist()
            values = {other: last[other] for other in others if other is not None and other != mine}
            wrong = {other: value for other, value in values.items() if value != expected}
            if wrong or int(self.counter) != expected:
                found = f"rank {mine}: expected signals of {expected}, got {wrong}, counted {int(self.counter)}"
        said = [other for other in self.gather("check", found) if other is not None]
        return dataclasses.replace(row, check="WRONG", note=said[0]) if said else row


def _measure_row(bench: _Bench, row: SignalRow, line_up: LineUp) -> SignalRow:
    options = bench.options
    bench.begin()
    made = 0

    def one(_: int) -> None:
        bench.launch(row)

    one(0)
    made += 1
    bench.synchronize()
    graphs = [capture(one, calls) for calls in (_CALLS if row.rounds == 1 else (1, 2))]
    # One-way: half of there and back.
    parts = row.rounds * (2 if row.pattern == "one-way" else 1)
    launches = [Launch(graph.run, graph.calls * parts, graph.head_start_us) for graph in graphs]
    times: list[float] = []
    for iterations, kept in ((options.warmup, False), (options.iterations, True)):
        found = time_launches(launches, iterations, line_up)
        # The iterations take the graphs in turn, backwards from the first.
        made += sum(graphs[(iterations - 1 - i) % len(graphs)].calls for i in range(iterations))
        times += found if kept else []
    checked = bench.checked(row, made)
    summary = summarize(bench.gather("times", times))
    calls = tuple(graph.calls for graph in graphs)
    return dataclasses.replace(checked, calls=calls, iterations=options.iterations).timed(summary)


def measure(options: Options, show: Callable[[SignalRow], None]) -> list[SignalRow]:
    """All rows, from GPUs. Collective."""
    bench = _Bench(options)
    rows = []
    with LineUp() as line_up:
        for row in bench.rows():
            rows.append(row if row.check == "not run" else _measure_row(bench, row, line_up))
            show(rows[-1])
    bench.close()
    return rows


def simulate(options: Options, show: Callable[[SignalRow], None]) -> list[SignalRow]:
    """All rows, from the simulator: checks and counts of one launch. Collective."""
    bench = _Bench(options)
    rows = []
    for row in bench.rows():
        if row.check != "not run":
            bench.begin()

            def run(row: SignalRow = row) -> None:
                bench.launch(row)
                bench.gather("run", None)

            counts = bench.count(run)
            row = dataclasses.replace(bench.checked(row, 1), counts=counts, calls=(1,), iterations=1)
        rows.append(row)
        show(row)
    bench.close()
    return rows


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 1 if a signal was wrong."""
    options = parse(arguments)

    def rows(simulated: bool, show: Callable[[SignalRow], None]) -> list[SignalRow]:
        return (simulate if simulated else measure)(options, show)

    return jobs.run(
        "signal",
        arguments,
        options.json,
        title="signals",
        heap_bytes=lambda world: 1 << 20,
        columns=signal_columns,
        measure=rows,
    )
