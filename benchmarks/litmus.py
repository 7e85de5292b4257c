# SPDX-License-Identifier: Apache-2.0
"""Litmus tests on GPUs: ``bash launch.sh --nproc 2 -m tdcoll bench litmus --help``.

A litmus test plays one pattern of communication many times and counts a *weak outcome*, such as a
signal that was seen before its data. Each test belongs to one of three groups:

- *relied*: tdcoll relies on the outcome not to happen, because PTX forbids it or because
  docs/correctness.md assumes so. Seeing it is an error.
- *planted*: the same pattern without a protection. PTX allows the outcome, and a machine needn't
  show it, so it is reported only.
- *allowed*: no protocol of tdcoll's relies on anything there. Reported only.

With a GPU for each rank the sides of a test are on different ranks. If there is one rank, or if
ranks share GPUs (which then take turns), rank 0 runs all sides in one launch on its GPU; the tests
of puts need two ranks with a GPU each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import tdcoll
from benchmarks import kernels_litmus as kernels
from benchmarks import parsing
from benchmarks.layout import Layout
from tdcoll.job import lifecycle
from tdcoll.language import INTERPRETED
from tdcoll.primitives.lamport import SENTINEL
from tdcoll.tools.measure.benchmark import Experiment, Show
from tdcoll.tools.measure.results import Row, Text, fact

COPIES = 16
"""Copies with a stamp that are queued at once."""

_COPY_WORDS = (256, 1 << 14, 1 << 19) if not INTERPRETED else (64,)
_TIMEOUT_S = 20.0

RELIED = "relied"
PLANTED = "planted"
ALLOWED = "allowed"


class Form(NamedTuple):
    """A pattern with a protection, or without.

    Attributes:
        name: what is there or missing.
        group: RELIED, PLANTED or ALLOWED.
        fault: how it differs from the pattern's usual form, as kernels take it; "" if it doesn't.
    """

    name: str
    group: str
    fault: str = ""


@dataclass(frozen=True)
class LitmusTest:
    """A pattern of communication.

    Attributes:
        pattern: a function of :mod:`benchmarks.kernels_litmus`; None for copies by copy engines.
        sides: sides that take part.
        observers: sides that may see the weak outcome by themselves.
        forms: with and without protections.
        puts: whether it needs NVSHMEM's puts, and so a GPU for each rank.
    """

    pattern: Any
    sides: int
    observers: int
    forms: tuple[Form, ...]
    puts: bool = False


TESTS = {
    "flagged-words": LitmusTest(
        kernels.flagged_words,
        2,
        2,
        (
            Form("128-bit word", RELIED),
            Form("two 64-bit words", PLANTED, "two 64-bit words"),
        ),
    ),
    "lamport-words": LitmusTest(
        kernels.lamport_words,
        2,
        2,
        (
            Form("all parts polled", RELIED),
            Form("one part polled", PLANTED, "one part polled"),
        ),
    ),
    "message-passing": LitmusTest(
        kernels.message_passing,
        2,
        2,
        (
            Form("barrier, release, acquire", RELIED),
            Form("relaxed release", PLANTED, "relaxed release"),
            Form("relaxed acquire", PLANTED, "relaxed acquire"),
            Form("no barrier", PLANTED, "no barrier"),
        ),
    ),
    "handing-on": LitmusTest(
        kernels.handing_on,
        3,
        1,
        (
            Form("release, acquire", RELIED),
            Form("relaxed release", PLANTED, "relaxed release"),
        ),
    ),
    "put-with-signal": LitmusTest(
        kernels.put_with_signal,
        2,
        2,
        (
            Form("one put", RELIED),
            Form("signal ahead", PLANTED, "signal ahead"),
        ),
        puts=True,
    ),
    "copy-stamp": LitmusTest(
        None,
        2,
        1,
        (
            Form("one stream", RELIED),
            Form("two streams", PLANTED, "two streams"),
        ),
    ),
    "store-buffering": LitmusTest(
        kernels.store_buffering,
        2,
        1,
        (
            Form("relaxed", ALLOWED),
            Form("fence.sc", RELIED, "fence.sc"),
        ),
    ),
    "two-signals": LitmusTest(
        kernels.two_signals,
        4,
        1,
        (
            Form("acquire", ALLOWED),
            Form("fence.sc", ALLOWED, "fence.sc"),
        ),
    ),
}
"""The litmus tests by name. `two-signals` is known as IRIW, `handing-on` as ISA2."""


class _LitmusLayout(Layout):
    """Rows without times."""

    def terminal(self) -> dict[str, Text]:
        return {
            f"{'test':>16}": self.size["test"],
            f"{'form':>26}": lambda row: row.algorithm,
            "group": fact("{group}"),
            "sides on": fact("{sides_on}"),
            f"{'instances':>14}": fact("{instances:,}"),
            "weak": fact("{weak:,}"),
            "check": lambda row: row.check if row.note is None else f"{row.check}: {row.note}",
        }


class Litmus(Experiment):
    """The command.

    Attributes:
        hosts: ranks that have sides, of which each runs every ``hosts``-th.
        shared: the regions of all sides, in symmetric memory: uint8 ``[MAX_SIDES, REGION_BYTES]``.
        counts: int64 ``[2, MAX_SIDES]`` on the device; see :func:`kernels_litmus.play`.
        side_streams: two streams for copies.
    """

    name = "litmus"
    shares_gpus = True
    columns = _LitmusLayout(title="Litmus tests", size={"test": fact("{test}")}, timed=False)

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> SimpleNamespace:
        rounds = 3 if INTERPRETED else 1_000_000
        return parsing.parse_benchmark(
            cls.name,
            "Litmus tests of the orders that protocols rely on, many rounds in a launch. On the "
            "simulator: a few rounds.",
            [
                parsing.names_option("--tests", list(TESTS), ",".join(TESTS), "litmus tests"),
                parsing.number_option("--rounds", 1, rounds, "rounds of one launch"),
                parsing.number_option(
                    "--seconds", 0, 0, "repeat the launches of each form for so long"
                ),
                parsing.number_option("--seed", 0, 0, "of the delays before rounds"),
                parsing.option(
                    "--json", type=parsing.NewFile(), metavar="FILE", help="write the rows"
                ),
            ],
            arguments,
        )

    @classmethod
    def heap_bytes(cls, options: SimpleNamespace, world: int) -> int:
        return 8 * COPIES * max(_COPY_WORDS) + (4 << 20)

    def __init__(self, options: SimpleNamespace) -> None:
        super().__init__(options)
        self.alone = self.ranks.topology.world_size == 1 or lifecycle.may_share_gpus()
        self.monitor = tdcoll.WaitMonitor(timeout_s=_TIMEOUT_S)
        shape = (kernels.MAX_SIDES, kernels.REGION_BYTES)
        self.shared = tdcoll.zeros(shape, torch.uint8)
        self.side_streams = [self.ranks.owner.heap.side_stream() for _ in range(2)]
        self.counts = torch.zeros(
            (2, kernels.MAX_SIDES), dtype=torch.int64, device=self.ranks.device
        )

    def measure(self, show: Show) -> list[Row]:
        rows = []
        for name in self.options.tests:
            for form in TESTS[name].forms:
                row = self._row(name, form)
                row.note = self._why_not(TESTS[name], form)
                row.check = "ok" if row.note is None else "not run"
                if row.note is None:
                    self._play(TESTS[name], form, row)
                rows.append(row)
                show([row])
        self.ranks.gather("litmus tests are over", None)
        tdcoll.free(self.shared)
        return rows

    def _row(self, name: str, form: Form) -> Row:
        """Return the row of a form before it is played."""
        topology = self.ranks.topology
        return Row(
            ranks=topology.world_size,
            nodes=topology.n_nodes,
            algorithm=form.name,
            peer=form.group != RELIED,
            launch="simulator" if self.ranks.owner.simulated else "eager",
            check="not run",
            facts={
                "test": name,
                "group": form.group,
                "sides_on": "one GPU" if self.alone else f"{self._hosts(TESTS[name])} ranks",
                "seed": self.options.seed,
                "rounds": 0,
                "instances": 0,
                "weak": 0,
            },
        )

    def _hosts(self, test: LitmusTest) -> int:
        """Return the number of ranks that have sides."""
        return 1 if self.alone else min(test.sides, self.ranks.topology.world_size)

    def _why_not(self, test: LitmusTest, form: Form) -> str | None:
        """Return the reason if a form can't be played here; the same on all ranks."""
        simulated = self.ranks.owner.simulated
        if form.fault == "fence.sc" and simulated:
            return "the simulator has no fence.sc"
        if test.puts and self.alone:
            return "needs two ranks with a GPU each"
        if test.puts and not self.ranks.owner.heap.puts:
            return "this heap has no puts"
        if test.pattern is None and simulated and form.group == PLANTED:
            return "the simulator copies at once"
        nodes = self.ranks.topology.nodes
        if test.pattern is not None:
            nodes = nodes[: self._hosts(test)]
        if len(set(nodes)) > 1:
            return "needs ranks of one node"
        return None

    def _play(self, test: LitmusTest, form: Form, row: Row) -> None:
        """Play a form and fill in its row. Collective."""
        begin = time.monotonic()
        self._clear(test)
        while True:
            if test.pattern is None:
                rounds, instances = self._copy(form, row.facts["rounds"])
            else:
                rounds, instances = self._launch(test, form, row.facts["rounds"])
            self._synchronize()
            self.monitor.check()
            row.facts["rounds"] += rounds
            row.facts["instances"] += instances
            over = time.monotonic() - begin >= self.options.seconds
            if self.ranks.gather("litmus time", over)[0]:
                break
        found = self.ranks.gather("weak outcomes", self.counts.tolist())
        weak = sum(sum(counts[0]) for counts in found)
        firsts = [turn for counts in found for turn in counts[1] if turn > 0]
        row.facts["weak"] = weak
        row.facts["first_round"] = min(firsts) if firsts else None
        row.facts["seconds"] = round(time.monotonic() - begin, 2)
        if form.group != RELIED:
            row.note = "seen" if weak > 0 else "not seen"
        elif weak > 0:
            row.check = "WRONG"
            row.note = f"{weak} weak outcomes, the first in round {row.facts['first_round']}"

    def _synchronize(self) -> None:
        """Wait for the GPU, if there is one."""
        if not self.ranks.owner.simulated:
            torch.cuda.synchronize()

    def _clear(self, test: LitmusTest) -> None:
        """Reset memory and counts before a form. Collective."""
        self.ranks.gather("begin", None)
        self.shared.zero_()
        if test.pattern is kernels.lamport_words:
            self.shared.view(torch.int32)[:, -4 * kernels.LANES :].fill_(SENTINEL.value)
        self.counts.zero_()
        self._synchronize()
        self.ranks.gather("cleared", None)

    def _sides(self, test: LitmusTest) -> kernels.Sides:
        """Return where the sides of a test are, for this rank's kernel."""
        owner = self.ranks.owner
        offset = owner.offset_of(self.shared, "shared")
        ranks = [side % self._hosts(test) for side in range(kernels.MAX_SIDES)]
        pes = [self.ranks.topology.pes[rank] for rank in ranks]
        places = [offset + side * kernels.REGION_BYTES for side in range(kernels.MAX_SIDES)]
        here = self.shared.data_ptr() - offset
        reach = []
        for pe, place in zip(pes, places, strict=True):
            base = owner.heap.peer_base(pe) if pe != owner.rank else here
            reach.append(base + place)

        def table(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.ranks.device)

        return kernels.Sides(
            reach=table(reach, torch.int64),
            symmetric=table([here + place for place in places], torch.int64),
            pes=table(pes, torch.int32),
            monitor=self.monitor.words,
            count=kernels.tl.constexpr(test.sides),
        )

    def _launch(self, test: LitmusTest, form: Form, before: int) -> tuple[int, int]:
        """Play rounds after ``before`` others; return rounds and instances, of all sides."""
        hosts = self._hosts(test)
        rank = self.ranks.topology.rank
        mine = range(rank, test.sides, hosts) if rank < hosts else range(0)
        played = self.options.rounds, self.options.rounds * kernels.LANES * test.observers
        if not mine:
            return played
        kernels.play[(len(mine),)](
            self._sides(test),
            self.counts,
            mine.start,
            hosts,
            before,
            self.options.rounds,
            self.options.seed,
            PATTERN=test.pattern,
            FAULT=form.fault,
            BLOCK=kernels.LANES,
            num_warps=max(1, kernels.LANES // 32),
        )
        return played

    def _copy(self, form: Form, before: int) -> tuple[int, int]:
        """Queue copies, each with a stamp behind it, to the next rank or within this GPU.

        Returns:
            Rounds, and words that all ranks compared.
        """
        receivers = 1 if self.alone else self.ranks.topology.world_size
        words = 0
        repeats = 3 if INTERPRETED else 40
        for n in _COPY_WORDS:
            data = tdcoll.zeros((COPIES, n), torch.int64)
            stamps = tdcoll.zeros(COPIES, torch.int64)
            for number in range(before + 1, before + repeats + 1):
                words += receivers * COPIES * n
                self._copy_once(form, data, stamps, number)
            self._synchronize()
            self.ranks.gather("copied", None)
            tdcoll.free(stamps)
            tdcoll.free(data)
        return repeats, words

    def _copy_once(self, form: Form, data: torch.Tensor, stamps: torch.Tensor, number: int) -> None:
        """Queue :data:`COPIES` copies of ``number``, and the kernel that looks at what arrives."""
        owner = self.ranks.owner
        rank = self.ranks.topology.rank
        target = rank if self.alone else (rank + 1) % self.ranks.topology.world_size
        main = 0 if owner.simulated else torch.cuda.current_stream().cuda_stream
        source = torch.full((data.shape[1],), number, dtype=torch.int64, device=data.device)
        theirs = tdcoll.peer_tensor(data, target)
        their_stamps = tdcoll.peer_tensor(stamps, target)
        streams = self.side_streams if form.group == PLANTED else self.side_streams[:1]
        tdcoll.barrier()
        if self.alone and rank != 0:
            return
        for stream in streams:
            stream.fork(main)
        for turn in range(COPIES):
            copies = [(theirs[turn], source.nbytes), (their_stamps[turn], 8)]
            for (there, nbytes), stream in zip(copies, [streams[0], streams[-1]], strict=True):
                owner.heap.stream_copy(stream.handle, there.data_ptr(), source.data_ptr(), nbytes)
        kernels.old_words[(1,)](
            data,
            stamps,
            self.counts,
            data.shape[1],
            number,
            self.monitor.words,
            COPIES=COPIES,
            BLOCK=min(data.shape[1], 2048),
            num_warps=8,
        )
        for stream in streams:
            stream.join(main)
