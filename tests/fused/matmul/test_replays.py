# SPDX-License-Identifier: Apache-2.0
"""Replays of matmuls that communicate, as of a CUDA graph: launches with the addresses of one call,
without the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from exploring import explore, first_failure
from kernel_mutants import AnyChange, dropped, installed, no_wait
from tiers import seeds, slow_tier

import tdcoll
from tdcoll.fused.matmul.policy import ALGORITHMS, GATHER, REDUCE, SCATTER
from tdcoll.fused.matmul.prepared import PreparedMatmul
from tdcoll.testing import World

from .calls import Call, Calls, calls_by
from .mutants import ONE_SLOT

WAYS = [(name, algorithm) for name, algorithms in ALGORITHMS.items() for algorithm in algorithms]
JOB: dict[str, Any] = {"n_pes": 3, "heap_bytes": 1 << 22}


@dataclass(frozen=True)
class Graph:
    """What a CUDA graph holds of a call: its launches, and the memory that they read and write."""

    call: Call
    launch: Callable[[], None]

    @staticmethod
    def of(calls: Calls, ctx: Any, rank: int) -> Graph:
        """Make a call, which compiles it, and capture another one like it."""
        made = calls.call(0, rank, ctx.world_size, ctx)
        calls.compare(0, rank, ctx.world_size, made)
        prepared = [one for one in ctx.cache.values() if isinstance(one, PreparedMatmul)][-1]
        tensors = [tensor for name, tensor in made.more.items() if name == "bias"]
        bound = prepared.bind(made.x, made.weight, *tensors)
        assert bound is not None
        result, (frame,) = bound
        call = Call(made.x, made.weight, made.more, result)

        def launch() -> None:
            ctx.capturing = True  # as in the capture, in which the launches are chosen
            prepared.launch(ctx.current_stream(), frame)
            ctx.capturing = False

        return Graph(call, launch)


@dataclass(frozen=True)
class Replays:
    """Replays two graphs of one context in turns, of several calls each, with eager calls between,
    and compares every replay.

    Attributes:
        first, second: Calls of the graphs.
        lengths: Calls in a graph.
        late: Turns that a rank lets pass before each replay, by rank.
    """

    first: Calls
    second: Calls
    lengths: tuple[int, int] = (1, 2)
    late: tuple[int, ...] = (0, 25)

    def __call__(self, world: World) -> None:
        world.run(lambda pe: self.host(world, pe))

    def host(self, world: World, rank: int) -> None:
        """Run on one rank."""
        with tdcoll.CollectiveContext(**dict(self.first.context)) as ctx:
            kinds = self.first, self.second
            graphs = [Graph.of(calls, ctx, rank) for calls in kinds]
            made = []
            for number in range(1, 5):
                for calls, graph, length in zip(kinds, graphs, self.lengths, strict=True):
                    for _ in range(self.late[rank % len(self.late)]):
                        world.pause()
                    x, weight, _ = calls.operands(number, rank, ctx.world_size)
                    graph.call.x.copy_(x)
                    graph.call.weight.copy_(weight)
                    for _ in range(length):
                        graph.launch()
                    more = graph.call.more
                    made.append((calls, number, Call(x, weight, more, graph.call.result.clone())))
                if number % 2:
                    eager = self.second.call(number + 10, rank, ctx.world_size, ctx)
                    made.append((self.second, number + 10, eager))
            for calls, number, call in made:
                calls.compare(number, rank, ctx.world_size, call)
            ctx.check()


def replays(name: str, algorithm: str, **more: Any) -> Replays:
    """Return replays of a call, and of another operation's."""
    others = {GATHER: (SCATTER, "fused"), SCATTER: (REDUCE, "one_shot"), REDUCE: (GATHER, "fused")}
    other, other_algorithm = others[name]
    return Replays(calls_by(name, algorithm, biased=True), Calls(other, (other_algorithm,)), **more)


@pytest.mark.parametrize(("name", "algorithm"), WAYS)
@pytest.mark.parametrize("lengths", [(1, 2), slow_tier((3, 1)), slow_tier((2, 2))], ids=str)
@seeds(2, 12)
def test_replays_are_right(
    name: str, algorithm: str, lengths: tuple[int, int], seeds: range
) -> None:
    explore(replays(name, algorithm, lengths=lengths), seeds=seeds, **JOB)


NOT_ENTERED = no_wait("primitives.copies.enter", "tdl.wait_signals")
CLEAR = dropped("kernels_all_reduce.matmul_all_reduce", "lamport.clear")


@pytest.mark.parametrize(
    ("name", "algorithm", "change"),
    [
        (GATHER, "fused", ONE_SLOT),
        (GATHER, "copied", NOT_ENTERED),
        (SCATTER, "fused", ONE_SLOT),
        (REDUCE, "one_shot", CLEAR),
        (REDUCE, "two_shot", CLEAR),
    ],
    ids=str,
)
def test_wrong_replays_are_found(
    name: str, algorithm: str, change: AnyChange, tmp_path: Path
) -> None:
    """Both graphs are of one operation, because another one would keep the ranks together."""
    calls = replays(name, algorithm).first
    with installed([change], tmp_path):
        failure = first_failure(Replays(calls, calls), seeds=30, stragglers=True, **JOB)
    assert failure is not None
    assert "wrong elements" in failure.report or "eadlock" in failure.report, failure.report
