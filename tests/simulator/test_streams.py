# SPDX-License-Identifier: Apache-2.0
"""Launches of several streams of one PE at once: contexts whose programs fit together, and such that wait crosswise."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll import runtime
from tdcoll.collectives._host import pool
from tdcoll.collectives._host.pool import Pool
from tdcoll.errors import ContextError, TdcollError
from tdcoll.testing import Deadlock, World, explore, first_failure

N_PES, CALLS, HEAP = 2, 3, 16 << 20
NBYTES = 4096
LEAST = 2 * N_PES + 2


def data(rank: int, call: int) -> torch.Tensor:
    return torch.arange(NBYTES // 4, dtype=torch.int32) * 3 + 1000 * rank + call


def gathers(ctx: Any) -> Callable[[], None]:
    def run() -> None:
        for call in range(CALLS):
            got = tdcoll.all_gather(data(ctx.rank, call), ctx, algorithm="direct")
            assert got.equal(torch.cat([data(rank, call) for rank in range(N_PES)]))

    return run


def scatters(ctx: Any) -> Callable[[], None]:
    def run() -> None:
        for call in range(CALLS):
            got = tdcoll.reduce_scatter(data(ctx.rank, call), ctx, algorithm="direct")
            assert got.equal(sum(data(rank, call) for rank in range(N_PES)).chunk(N_PES)[ctx.rank])

    return run


def reduces(ctx: Any) -> Callable[[], None]:
    def run() -> None:
        for call in range(CALLS):
            got = tdcoll.all_reduce(data(ctx.rank, call), ctx, algorithm="direct")
            assert got.equal(sum(data(rank, call) for rank in range(N_PES)))

    return run


def on_streams(programs: int | None) -> Callable[[World], None]:
    """An all-gather, a reduce-scatter and an all-reduce on a stream each, with launches of at most so many programs."""

    def case(world: World) -> None:
        def host(pe: int) -> None:
            made = [
                tdcoll.CollectiveContext(max_bytes_per_rank=NBYTES, channels=8, max_programs=programs) for _ in range(3)
            ]
            world.streams(*(kind(ctx) for kind, ctx in zip((gathers, scatters, reduces), made, strict=True)))
            for ctx in made:
                ctx.close()

        world.run(host)

    return case


@pytest.mark.parametrize("programs", [LEAST, 12])
def test_contexts_whose_programs_fit_together_are_clean(programs: int) -> None:
    explore(on_streams(programs), n_pes=N_PES, seeds=6, heap_bytes=HEAP, room=3 * programs)


def test_contexts_that_do_not_fit_together_wait_crosswise() -> None:
    """Each launch alone goes on with any number of resident programs, and together they do not."""
    failure = first_failure(on_streams(12), n_pes=N_PES, seeds=40, heap_bytes=HEAP, room=2)
    assert failure is not None
    assert isinstance(failure.error, Deadlock)
    waiting: dict[str, set[str]] = {"pe0": set(), "pe1": set()}
    for line in failure.error.blocked:
        pe, _, task = line.task.partition(" ")
        if "host" not in task:
            waiting[pe].add(task.partition("(")[0])
    assert all(waiting.values()), failure.report
    assert waiting["pe0"] != waiting["pe1"], failure.report
    assert "not started for lack of room" in str(failure.error)
    assert "room=2" in failure.report


def pools(programs: int, made: list[int]) -> Callable[[World], None]:
    """As tdcoll's own contexts are made, one for each kind; the programs of each go to ``made``."""

    def case(world: World) -> None:
        made.clear()

        def host(pe: int) -> None:
            owner = runtime.current()
            kinds = [Pool(owner, range(N_PES), f"kind {i}", limit=NBYTES, programs=programs) for i in range(3)]
            for kind in kinds:
                assert kind.prepare(NBYTES), kind.problem
            contexts = [kind.context for kind in kinds]
            assert owner.programs_taken == sum(context.max_programs for context in contexts)
            made.extend(context.max_programs for context in contexts if pe == 0)
            world.streams(*(kind(ctx) for kind, ctx in zip((gathers, scatters, reduces), contexts, strict=True)))
            for kind in kinds:
                kind.close()
            assert owner.programs_taken == 0

        world.run(host)

    return case


def test_contexts_of_tdcolls_own_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_SIMULATED_MULTIPROCESSORS", 12)
    made: list[int] = []
    explore(pools(20, made), n_pes=N_PES, seeds=4, heap_bytes=HEAP, room=24)
    assert made == [8, 6, 6]


def test_a_context_for_which_no_programs_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank only: all are told."""
    monkeypatch.setattr(pool, "_SIMULATED_MULTIPROCESSORS", 8)

    def host(pe: int) -> None:
        owner = runtime.current()
        owner.programs_taken += 12 * pe
        kind = Pool(owner, range(N_PES), "kind", limit=NBYTES, programs=20)
        assert not kind.prepare(64)
        assert kind.problem == "a context of 2 ranks needs 6 programs, and other contexts have left 4"
        assert owner.programs_taken == 12 * pe
        with pytest.raises(ContextError, match="other contexts have left 4"):
            pool.take_programs(owner, range(N_PES), 1, "all_reduce")

    World(N_PES).run(host)


def test_results_and_wrong_places() -> None:
    world = World(1)
    assert world.run(lambda pe: world.streams(lambda: 7, lambda: "x")) == [[7, "x"]]
    assert world.run(lambda pe: world.streams()) == [[]]
    with pytest.raises(TdcollError, match="for host functions"):
        world.streams(lambda: 0)
    with pytest.raises(ValueError, match="room must be at least 1"):
        World(1, room=0)

    def fail() -> None:
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        world.run(lambda pe: world.streams(lambda: world.pause(3), fail))


def test_each_launch_has_rows_of_the_timeline() -> None:
    """Programs of two launches at once are not drawn over each other."""
    world = World(N_PES, seed=1, weak=True, heap_bytes=HEAP, trace=True)
    on_streams(None)(world)
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in json.loads(world.trace.to_json())["traceEvents"]:
        if event["ph"] == "X" and "(" in event["name"] and not event["name"].startswith("wait"):
            spans.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(spans) > 10
    for row in spans.values():
        row.sort()
        assert all(first[1] <= second[0] for first, second in pairwise(row))
