# SPDX-License-Identifier: Apache-2.0
"""Calls of fixed size that one rank replays while another makes them, as ``docs/cuda-graphs.md``
allows.

The simulator has no graphs. A stand-in records what a call launches, and launches it again, without
the host's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from exploring import explore
from kernel_mutants import Change, Mutant

import tdcoll
from tdcoll import runtime
from tdcoll.calls.kernel_launch import KernelLaunch
from tdcoll.testing import World

from .calls import make, reduce_and_compare
from .cases import HEAP, some_part
from .reference import Rows, reduce, wrong_rows

ROWS, COUNT, CALLS = 9, 5, 6


class Graph:
    """The launches of a rank, recorded instead of made. :meth:`replay` makes them."""

    recording: dict[int, Graph]

    def __init__(self) -> None:
        self._launches: list[Callable[[], None]] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record the launches of the calling rank."""
        Graph.recording[runtime.current().rank] = self
        try:
            yield
        finally:
            del Graph.recording[runtime.current().rank]

    def replay(self) -> None:
        """Make the launches."""
        for launch in self._launches:
            launch()


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launches be recorded."""
    monkeypatch.setattr(Graph, "recording", {}, raising=False)
    for name in ("__call__", "with_arguments"):
        real = getattr(KernelLaunch, name)

        def launch(self: KernelLaunch, *given: Any, real: Callable[..., None] = real) -> None:
            graph = Graph.recording.get(runtime.current().rank)
            if graph is None:
                real(self, *given)
            else:
                graph._launches.append(partial(real, self, *given))

        monkeypatch.setattr(KernelLaunch, name, launch)


class Replays:
    """Each rank makes calls with the same tensors, filled anew. Some ranks record one, and replay
    it.

    Args:
        algorithm: of the calls.
        ranks: those that replay.
        first: calls that all ranks make before it is recorded.
        recorded: how many calls each of these ranks records, of which it replays the last.
    """

    def __init__(
        self, algorithm: str, ranks: tuple[int, ...], first: int = 1, recorded: int = 1
    ) -> None:
        self.algorithm, self.ranks, self.first, self.recorded = algorithm, ranks, first, recorded

    def __call__(self, world: World) -> None:
        world.run(self.host)

    def host(self, pe: int) -> None:
        """Run on one rank."""
        ctx = tdcoll.SparseContext(max_rows_per_rank=COUNT, max_row_bytes=8, debug=False)
        mine = self.part(pe, 0)
        graph, made = None, None
        for call in range(CALLS):
            part = self.part(pe, call)
            mine.indices.copy_(part.indices)
            mine.values.copy_(part.values)
            if call == self.first and pe in self.ranks:
                for _ in range(self.recorded):
                    graph = Graph()
                    with graph.capture():
                        made = self.call(ctx, mine)
            if graph is None:
                made = self.call(ctx, mine)
            else:
                graph.replay()
            ctx.check()
            self.check(ctx, call, made)
        ctx.close()

    def part(self, rank: int, call: int) -> Rows:
        return some_part(17 * call + rank, COUNT, ROWS, (2,), torch.float32)

    def call(self, ctx: tdcoll.SparseContext, part: Rows) -> tdcoll.PaddedRows:
        return tdcoll.sparse_all_reduce_padded(*part, ROWS, ctx=ctx, algorithm=self.algorithm)

    def check(self, ctx: tdcoll.SparseContext, call: int, made: Any) -> None:
        parts = [self.part(rank, call) for rank in range(ctx.world_size)]
        wanted = reduce(parts, nodes=ctx.topology.nodes if self.algorithm == "owner" else None)
        count = int(made.count)
        assert made.indices[:count].tolist() == wanted.indices.tolist(), (
            f"rank {ctx.rank}, call {call}"
        )
        assert wrong_rows(made.values[:count], wanted.values) == 0, f"rank {ctx.rank}, call {call}"


@pytest.mark.parametrize("ranks", [(1,), (0, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("nodes", [(3,), (2, 1)], ids=str)
@pytest.mark.parametrize("algorithm", ["owner", "gather"])
def test_some_ranks_replay_while_others_call(
    algorithm: str, nodes: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    explore(Replays(algorithm, ranks), n_pes=3, ranks_per_node=nodes, heap_bytes=HEAP, seeds=1)


@pytest.mark.parametrize("algorithm", ["owner", "gather"])
def test_a_capture_on_one_rank_makes_no_call(algorithm: str) -> None:
    """Nor do several, of which one is replayed."""
    explore(Replays(algorithm, (1,), first=2, recorded=3), n_pes=2, heap_bytes=HEAP, seeds=1)


def different_ways(world: World) -> None:
    """After calls of both kinds, rank 0 takes another one than the others. No rank may have a
    result."""

    def host(pe: int) -> None:
        ctx = make(timeout_s=2, debug=False)
        for algorithm in ("owner", "gather", "owner", "gather"):
            reduce_and_compare(ctx, algorithm=algorithm)
        with pytest.raises((tdcoll.RankMismatchError, tdcoll.CollectiveTimeout)):
            reduce_and_compare(ctx, algorithm="owner" if pe else "gather")

    try:
        world.run(host)
    except BaseException as error:  # pytest's is no Exception
        raise AssertionError(str(error)) from error


UNNUMBERED = Mutant(
    "lists have no number", (Change("kernels_lists.numbered", "number << 32", "number * 0"),), "DID NOT RAISE",
    different_ways, {"n_pes": 3, "heap_bytes": HEAP, "on_timeout": "expire"}, seeds=3,
)  # fmt: skip


def test_lists_of_earlier_calls_are_told_by_their_number(tmp_path: Path) -> None:
    explore(different_ways, **UNNUMBERED.world, seeds=1)
    UNNUMBERED.is_caught(tmp_path)
