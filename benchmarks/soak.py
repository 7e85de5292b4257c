# SPDX-License-Identifier: Apache-2.0
"""Random sequences of calls: ``bash launch.sh --nproc 2 -m tdcoll bench soak --help``.

All ranks draw the same sequence from a seed: every collective by every algorithm, of any size and
form; fused norms; matmuls; sparse all-reduces; calls of ``torch.distributed`` on a group of backend
"tdcoll". Some calls are captured in CUDA graphs, which are replayed between eager calls, and one
rank or another is late now and then. Every result is compared on the device
(:mod:`benchmarks.soak_calls`). The first wrong one ends the run: its seed, step and call are
printed, and the exit status is 1.

The calls come in *phases*, because launches that are in flight together must fit on the GPU at
once:

- *Together*: calls on contexts with a budget of thread blocks, each of which has a stream, and
  calls of the backend, some of them asynchronous. Nothing orders the streams among each other.
- *Alone*: calls that may fill the GPU, one after the other, on streams that change.

Between phases all streams wait for each other, and results are looked at once in a while, so the
host runs ahead of the GPU.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import tdcoll
from benchmarks import parsing
from benchmarks.layout import Layout
from benchmarks.soak_calls import MOST_BYTES, Lane, Palette, SoakCall
from tdcoll.distributed import Options
from tdcoll.language import INTERPRETED
from tdcoll.tools.measure.benchmark import Experiment, Show
from tdcoll.tools.measure.results import Row, Text, fact

PHASES_OF_A_LOOK = 8 if not INTERPRETED else 2
"""Phases after which the host looks at the results of all calls."""

_MOST_GRAPHS = 4
_BLOCKS = 24
"""Budget of thread blocks of a context whose calls are in flight with others."""

_PROGRESS_S = 15.0


@dataclass(frozen=True)
class Graph:
    """A captured sequence of calls.

    Attributes:
        replay: launches it on the current stream.
        lane: the lane whose context it uses.
        calls: the calls.
        wrong: int64 ``[len(calls)]``: wrong elements of each, over all replays.
        turn: what the calls' data depends on, which each replay counts up.
    """

    replay: Callable[[], object]
    lane: Lane
    calls: Sequence[SoakCall]
    wrong: torch.Tensor
    turn: torch.Tensor


class _SoakLayout(Layout):
    """Rows without times."""

    def terminal(self) -> dict[str, Text]:
        return {
            f"{'kind':>40}": self.size["kind"],
            "eager": fact("{eager:,}"),
            "replayed": fact("{replayed:,}"),
            "check": lambda row: row.check if row.note is None else f"{row.check}: {row.note}",
        }


class Soak(Experiment):
    """The command.

    Attributes:
        chooser: draws everything; the same on all ranks.
        step: number of the step, from 1.
        eager, replayed: calls by kind.
        wrong: ``(step, call, wrong elements on the device)`` of calls that were not looked at yet.
        problem: the first wrong result, in words; None so far.
    """

    name = "soak"
    shares_gpus = True
    columns = _SoakLayout(title="Soak", size={"kind": fact("{kind}")}, timed=False)

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> SimpleNamespace:
        return parsing.parse_benchmark(
            cls.name,
            "Random sequences of all kinds of calls, each compared with the exact result. Ends with "
            "status 1 at the first wrong one.",
            [
                parsing.number_option("--seconds", 1, 60 if not INTERPRETED else 5, "duration"),
                parsing.number_option("--seed", 0, 0, "of the sequence"),
                parsing.number_option("--steps", 0, 0, "end after so many steps; 0: no limit"),
                parsing.number_option(
                    "--variety", 1, 2, "dtypes and operations of each collective"
                ),
                parsing.option(
                    "--json", type=parsing.NewFile(), metavar="FILE", help="write the counts"
                ),
            ],
            arguments,
        )

    @classmethod
    def heap_bytes(cls, options: SimpleNamespace, world: int) -> int:
        return (1 << 30) if not INTERPRETED else (128 << 20)

    def __init__(self, options: SimpleNamespace) -> None:
        super().__init__(options)
        self.chooser = random.Random(options.seed)
        self.step = 0
        self.eager: Counter[str] = Counter()
        self.replayed: Counter[str] = Counter()
        self.wrong: list[tuple[int, str, torch.Tensor]] = []
        self.problem: str | None = None
        self._found: str | None = None  # in graphs that are given up
        self._call = "nothing"
        self._delay = 0, False  # cycles, and whether the host waits rather than the GPU
        self._graphs: list[Graph] = []
        self._pending: list[tuple[int, str, Callable[[], torch.Tensor]]] = []
        self._begin = time.monotonic()
        self._shown_at = self._begin

    # ------------------------------------------------------------------ contexts

    def _make_lanes(self) -> None:
        """Make the contexts, the group and the palette of calls. Collective."""
        world = self.ranks.topology.world_size
        capacity = (4 << 20) if not INTERPRETED else (1 << 13)

        def lane(name: str, **sizes: Any) -> Lane:
            # Elements before a result, and results of all ranks.
            buffer = tdcoll.zeros(MOST_BYTES + 64, torch.uint8)
            return Lane(name, tdcoll.CollectiveContext(**sizes), self._new_stream(), buffer)

        # The second one takes several epochs for large calls, and has no Lamport words.
        few = (64 << 10) if not INTERPRETED else 256
        self.alone = [
            lane("whole GPU", max_bytes_per_rank=capacity),
            lane("small context", max_bytes_per_rank=few, lamport_bytes=0),
        ]
        blocks = max(_BLOCKS, 2 * world + 2)
        self.together = [
            lane(f"{blocks} blocks, {number}", max_bytes_per_rank=capacity // 4, max_blocks=blocks)
            for number in (1, 2)
        ]
        self.group = None
        if dist.is_available() and dist.is_initialized():
            self.group = dist.new_group(
                backend="tdcoll", pg_options=Options(blocks=40), timeout=timedelta(seconds=120)
            )
        rank = self.ranks.topology.rank
        self.palette = Palette(self.chooser, self.options.variety, rank, world)

    def _new_stream(self) -> Any:
        return None if self.ranks.owner.simulated else torch.cuda.Stream()

    def _on(self, stream: Any) -> Any:
        """Return the context manager in which calls are on a stream, if there are streams."""
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    def _join(self) -> None:
        """Let all streams wait for each other."""
        streams = [lane.stream for lane in (*self.alone, *self.together) if lane.stream is not None]
        if not streams:
            return
        main = torch.cuda.current_stream()
        for stream in streams:
            main.wait_stream(stream)
        for stream in streams:
            stream.wait_stream(main)

    # ------------------------------------------------------------------ steps

    def measure(self, show: Show) -> list[Row]:
        self._make_lanes()
        phases = 0
        try:
            while self.problem is None and not self._is_over():
                self._phase(self.chooser.choice((self._play_together, self._play_alone)))
                phases += 1
                if phases % PHASES_OF_A_LOOK == 0:
                    self._look()
            if self.problem is None:
                self._look()
        except BaseException:
            self._report(f"{self._where(self.step, self._call)}: an error")
            raise
        if self.problem is not None:
            self._report(self.problem)
        rows = self._rows()
        show(rows)
        self._close()
        return rows

    def _where(self, step: int, call: str) -> str:
        return f"seed {self.options.seed}, step {step}: {call}"

    def _report(self, text: str) -> None:
        print(f"soak: rank {self.ranks.topology.rank}: {text}", file=sys.stderr, flush=True)

    def _is_over(self) -> bool:
        """Return whether the time or the steps are over, as rank 0 says. Collective."""
        seconds = time.monotonic() - self._begin
        over = seconds >= self.options.seconds
        if self.options.steps:
            over = over or self.step >= self.options.steps
        is_first = self.ranks.topology.rank == 0
        if is_first and time.monotonic() - self._shown_at > _PROGRESS_S:
            self._shown_at = time.monotonic()
            print(f"# {self.step:,} steps in {seconds:.0f} s", flush=True)
        decided: bool = self.ranks.gather("soak time", over)[0]
        return decided

    def _phase(self, play: Callable[[], None]) -> None:
        """Make some steps of one kind of phase; then let all streams meet."""
        for _ in range(self.chooser.randrange(2, 12)):
            self.step += 1
            if self.chooser.random() < 0.1:
                self._draw_delay()
            play()
        self._end_pending()
        self._join()

    def _draw_delay(self) -> None:
        """Draw a rank whose next launch is late, and by how much."""
        rank = self.chooser.randrange(self.ranks.topology.world_size)
        cycles = self.chooser.randrange(10_000, 3_000_000)
        on_host = self.chooser.random() < 0.5
        if rank == self.ranks.topology.rank:
            self._delay = cycles, on_host or self.ranks.owner.simulated

    def _hold_up(self) -> None:
        """Hold up the host or the current stream, if that was drawn."""
        cycles, on_host = self._delay
        self._delay = 0, False
        if on_host:
            time.sleep(cycles * 1e-9)
        elif cycles > 0:
            torch.cuda._sleep(cycles)

    def _play_together(self) -> None:
        """Make a step in a phase in which streams aren't ordered."""
        draw = self.chooser.random()
        if self.group is not None and draw < 0.4:
            call = self.palette.backend(self.group, self._later)
            self._make(call, None)
            return
        lane = self.chooser.choice(self.together)
        if draw > 0.9:
            self._graph_step(lane)
        else:
            self._make(self.palette.dense(lane), lane.stream)

    def _play_alone(self) -> None:
        """Make a step in a phase in which calls come one after the other."""
        lane = self.chooser.choice(self.alone)
        whole = self.alone[0].ctx
        draw = self.chooser.random()
        if draw < 0.5:
            call = self.palette.dense(lane)
        elif draw < 0.6:
            call = self.palette.norm(whole)
        elif draw < 0.75:
            call = self.palette.matmul(whole)
        elif draw < 0.85:
            call = self.palette.sparse()
        else:
            self._graph_step(lane)
            return
        self._make(call, self.chooser.choice(self.alone).stream)
        self._join()

    def _make(self, call: SoakCall, stream: Any) -> None:
        """Make a call on a stream, and note its result to be looked at later.

        Args:
            stream: None: the current one.
        """
        self._call = call.text
        self.eager[call.kind] += 1
        with self._on(stream):
            self._hold_up()
            turn = torch.full((), self.step, dtype=torch.int64, device=self.ranks.device)
            self.wrong.append((self.step, call.text, call.wrong(turn)))

    def _later(self, end: Callable[[], torch.Tensor]) -> None:
        """Note the end of an asynchronous call, for the end of the phase."""
        self._pending.append((self.step, self._call, end))

    def _end_pending(self) -> None:
        """Wait for the asynchronous calls of a phase, in the order in which they were made."""
        for step, text, end in self._pending:
            self.wrong.append((step, text, end()))
        self._pending.clear()

    # ------------------------------------------------------------------ graphs

    def _graph_step(self, lane: Lane) -> None:
        """Capture calls on a lane's context, or replay what was captured, between eager calls."""
        self._end_pending()
        self._join()
        captured = [graph for graph in self._graphs if graph.lane is lane]
        if captured and self.chooser.random() < 0.6:
            graph = self.chooser.choice(captured)
        else:
            graph = self._capture(lane)
        for _ in range(self.chooser.randrange(1, 5)):
            self._call = "replay of " + "; ".join(call.text for call in graph.calls)
            with self._on(lane.stream):
                self._hold_up()
                graph.replay()
            for call in graph.calls:
                self.replayed[call.kind] += 1
            if self.chooser.random() < 0.3:
                self._make(self.palette.dense(lane), lane.stream)
        self._join()

    def _capture(self, lane: Lane) -> Graph:
        """Capture a few calls, each of which is made eagerly before."""
        calls = []
        for _ in range(self.chooser.randrange(1, 5)):
            draw = self.chooser.random()
            if lane is self.alone[0] and draw < 0.2:
                calls.append(self.palette.norm(lane.ctx))
            elif lane is self.alone[0] and draw < 0.4:
                calls.append(self.palette.matmul(lane.ctx))
            else:
                calls.append(self.palette.dense(lane))
        for call in calls:
            self._make(call, lane.stream)
        device = self.ranks.device
        wrong = torch.zeros(len(calls), dtype=torch.int64, device=device)
        turn = torch.full((), self.step, dtype=torch.int64, device=device)

        def make_all() -> None:
            turn.add_(1)
            for place, call in enumerate(calls):
                wrong[place] += call.wrong(turn)

        replay: Callable[[], object] = make_all
        if lane.stream is not None:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            self._call = "capture of " + "; ".join(call.text for call in calls)
            with torch.cuda.graph(graph, stream=lane.stream):
                make_all()
            replay = graph.replay
        made = Graph(replay, lane, calls, wrong, turn)
        if len(self._graphs) == _MOST_GRAPHS:
            self._found = self._found or self._look_at_graph(self._graphs.pop(0))
        self._graphs.append(made)
        return made

    # ------------------------------------------------------------------ results

    def _look(self) -> None:
        """Look at all results since the last time; set :attr:`problem`, the same on all ranks."""
        if not self.ranks.owner.simulated:
            torch.cuda.synchronize()
        for lane in (*self.alone, *self.together):
            lane.ctx.check()
        found = self._found
        for step, text, wrong in self.wrong:
            count = int(wrong)
            if count > 0 and found is None:
                found = f"{self._where(step, text)}: {count} wrong elements"
        self.wrong.clear()
        for graph in self._graphs:
            found = found or self._look_at_graph(graph)
        for rank, text in enumerate(self.ranks.gather("soak results", found)):
            if text is not None and self.problem is None:
                self.problem = f"{text} on rank {rank}"

    def _look_at_graph(self, graph: Graph) -> str | None:
        """Return what is wrong with a graph's results, if anything is."""
        for call, count in zip(graph.calls, graph.wrong.tolist(), strict=True):
            if count > 0:
                return f"{self._where(self.step, f'replay of {call.text}')}: {count} wrong elements"
        return None

    def _rows(self) -> list[Row]:
        """Return a row for each kind of call, and one for the whole run."""
        topology = self.ranks.topology
        kinds = sorted(self.eager | self.replayed)
        rows = []
        for kind in ["all", *kinds]:
            totals = [self.eager, self.replayed]
            eager, replayed = (
                counts.total() if kind == "all" else counts[kind] for counts in totals
            )
            facts: dict[str, Any] = {"kind": kind, "eager": eager, "replayed": replayed}
            if kind == "all":
                seconds = round(time.monotonic() - self._begin, 1)
                facts |= {"seed": self.options.seed, "steps": self.step, "seconds": seconds}
            is_wrong = kind == "all" and self.problem is not None
            rows.append(
                Row(
                    ranks=topology.world_size,
                    nodes=topology.n_nodes,
                    algorithm=kind,
                    peer=False,
                    launch="simulator" if self.ranks.owner.simulated else "eager and graph",
                    check="WRONG" if is_wrong else "ok",
                    note=self.problem if is_wrong else None,
                    facts=facts,
                )
            )
        return rows

    def _close(self) -> None:
        """Give everything back. Collective."""
        self._graphs.clear()
        if self.group is not None:
            dist.destroy_process_group(self.group)
        for lane in (*self.alone, *self.together):
            lane.ctx.close()
            tdcoll.free(lane.buffer)
