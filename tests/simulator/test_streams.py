# SPDX-License-Identifier: Apache-2.0
"""Streams of one PE: contexts whose thread blocks fit together or wait crosswise; copies in and out
of order."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import triton.language as tl
from cases import Case, device, expect
from exploring import explore, first_failure
from ranks import on_streams

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.base.errors import ContextError, TdcollError
from tdcoll.calls import budget
from tdcoll.calls.budget import Budget
from tdcoll.calls.implicit import ImplicitContext
from tdcoll.calls.streams import copy_on_stream, peer_tensor, wait_on_stream, write_on_stream
from tdcoll.testing import Deadlock, World

N_PES, CALLS, HEAP = 2, 3, 16 << 20
NBYTES = 4096
LEAST = 2 * N_PES + 2
STAMP = 0x0101_0101_0101_0101


def calls(kind: str, ctx: Any) -> Callable[[], None]:
    """Some calls of a collective, which check their results."""

    def run() -> None:
        for call in range(CALLS):
            of_all = [
                torch.arange(NBYTES // 4, dtype=torch.int32) * 3 + 1000 * rank + call
                for rank in range(N_PES)
            ]
            got = getattr(tdcoll, kind)(of_all[ctx.rank], ctx=ctx, algorithm="direct")
            total = sum(of_all)
            wanted = {
                "all_gather": torch.cat(of_all),
                "reduce_scatter": total.chunk(N_PES)[ctx.rank],
            }
            assert got.equal(wanted.get(kind, total))

    return run


def at_once(world: World, contexts: list[Any]) -> None:
    """An all-gather, a reduce-scatter and an all-reduce on a stream each."""
    on_streams(world, *map(calls, ("all_gather", "reduce_scatter", "all_reduce"), contexts))


def contexts_of(blocks: int | None) -> Callable[[World], None]:
    """Three contexts, whose launches have at most so many thread blocks."""

    def case(world: World) -> None:
        def host(pe: int) -> None:
            given = {"max_bytes_per_rank": NBYTES, "chunks": 8, "max_blocks": blocks}
            made = [tdcoll.CollectiveContext(**given) for _ in range(3)]
            at_once(world, made)
            for ctx in made:
                ctx.close()

        world.run(host)

    return case


@pytest.mark.parametrize("blocks", [LEAST, 12])
def test_contexts_whose_blocks_fit_together_are_clean(blocks: int) -> None:
    explore(contexts_of(blocks), n_pes=N_PES, seeds=6, heap_bytes=HEAP, room=3 * blocks)


def test_contexts_that_do_not_fit_together_wait_crosswise() -> None:
    """Each launch alone goes on with any number of resident thread blocks, and together they do
    not."""
    failure = first_failure(contexts_of(12), n_pes=N_PES, seeds=40, heap_bytes=HEAP, room=2)
    assert failure is not None
    assert isinstance(failure.error, Deadlock)
    blocks = [line.task for line in failure.error.blocked if "host" not in line.task]
    waiting = [
        {task.split("(")[0] for task in blocks if task.startswith(f"pe{pe}")} for pe in range(N_PES)
    ]
    assert all(waiting), failure.report
    assert len({frozenset(name.split()[1] for name in names) for names in waiting}) == 2, (
        failure.report
    )
    assert "not started for lack of room" in str(failure.error)
    assert "room=2" in failure.report


def test_contexts_of_tdcolls_own_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tdcoll makes them, each with a budget of its own."""
    monkeypatch.setattr(budget, "_SIMULATED_MULTIPROCESSORS", 12)

    def case(world: World) -> None:
        def host(pe: int) -> None:
            owner = runtime.current()
            budgets = [Budget(owner, range(N_PES), 20) for _ in range(3)]
            kinds = [
                ImplicitContext(owner, range(N_PES), f"kind {i}", limit=NBYTES, budget=own)
                for i, own in enumerate(budgets)
            ]
            for kind in kinds:
                assert kind.prepare(NBYTES), kind.problem
            contexts = [kind.context for kind in kinds]
            assert [context.max_blocks for context in contexts] == [8, 6, 6]
            assert owner.blocks_taken == 20
            at_once(world, contexts)
            for kind, owned in zip(kinds, budgets, strict=True):
                kind.close()
                owned.give_back()
            assert owner.blocks_taken == 0

        world.run(host)

    explore(case, n_pes=N_PES, seeds=4, heap_bytes=HEAP, room=24)


def test_a_context_for_which_no_blocks_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank only: all are told."""
    monkeypatch.setattr(budget, "_SIMULATED_MULTIPROCESSORS", 8)

    def host(pe: int) -> None:
        owner = runtime.current()
        owner.blocks_taken += 12 * pe
        budget = Budget(owner, range(N_PES), 20)
        kind = ImplicitContext(owner, range(N_PES), "kind", limit=NBYTES, budget=budget)
        assert not kind.prepare(64)
        assert (
            kind.problem
            == "a context of 2 ranks needs 6 thread blocks, and other contexts have left 4"
        )
        assert owner.blocks_taken == 12 * pe
        with pytest.raises(ContextError, match="other contexts have left 4"):
            budget.take("all_reduce")
        owner.blocks_taken -= 12 * pe
        budget.take("all_reduce")
        assert (budget.blocks, owner.blocks_taken) == (6, 6)
        assert not kind.prepare(64), "calls of this kind fall back on all ranks for good"

    World(N_PES).run(host)


def test_streams_of_hosts_only_and_their_errors() -> None:
    world = World(1)
    with pytest.raises(TdcollError, match="for host functions"):
        world.stream()
    with pytest.raises(KeyError, match="this one"):
        world.run(lambda pe: on_streams(world, lambda: world.pause(3), lambda: {}["this one"]))


def test_each_launch_has_rows_of_the_timeline() -> None:
    """Thread blocks of two launches at once are not drawn over each other."""
    world = World(N_PES, seed=1, weak=True, heap_bytes=HEAP, trace=True)
    contexts_of(None)(world)
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in json.loads(world.trace.to_json())["traceEvents"]:
        if event["ph"] == "X" and "(" in event["name"] and not event["name"].startswith("wait"):
            spans.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    assert len(spans) > 10
    for row in spans.values():
        row.sort()
        assert all(first[1] <= second[0] for first, second in pairwise(row))


def fill(source, flag, scope=""):
    """Device code: 64 values for a peer, and then a flag, if that has a ``scope``."""
    tl.store(source + tl.arange(0, 64), tl.arange(0, 64) + 1)
    if scope:
        tdl.syncthreads()
        tdl.st_release(flag, 1, scope)


def read(inbox, out, waits):
    """Device code: what a peer has copied here, when its stamp has come or at once."""
    if waits:
        tl.store(out + 64, tdl.signal_wait_until(inbox + 64, tdl.CMP_NE, 0).to(tl.int64))
    tl.store(out + tl.arange(0, 64), tl.load(inbox + tl.arange(0, 64)))


def exchange(elsewhere: str = "", link: str = "", stamp: str = "copy") -> Case:
    """A PE fills a source, copies it to the other's inbox, and then a stamp. A reader there waits
    for the stamp.

    All is on one stream, but for the step ``elsewhere``. The ``link`` of the two streams is a join
    in each step, or a flag of some scope, for which the copy waits.
    """

    def case(world: World) -> None:
        def host(pe: int) -> None:
            source, inbox, flag = (
                tdcoll.zeros(n, torch.int64, name=f"words{n}") for n in (64, 65, 1)
            )
            to, out, one = peer_tensor(inbox, 1 - pe), torch.zeros(65).long(), torch.tensor([STAMP])
            main, other, reader = (world.stream() for _ in range(3))

            def copy() -> None:
                if link in ("gpu", "sys"):
                    wait_on_stream(flag, tdl.CMP_EQ, 1)
                copy_on_stream(to[:64], source)

            stamps = {
                "copy": lambda: copy_on_stream(to[64:], one),
                "write": lambda: write_on_stream(to[64], STAMP),
            }
            for name, step in {
                "fill": lambda: device(
                    lambda *words: fill(*words, link.removeprefix("join")), source, flag
                ),
                "copy": copy,
                "stamp": stamps.get(stamp, stamps["copy"]),
            }.items():
                stream = other if name == elsewhere else main
                if link == "join":
                    stream.join(main if stream is other else other)
                with stream:
                    step()
            with reader:
                device(lambda *words: read(*words, stamp != "ignored"), inbox, out)
            for stream in (main, other, reader):
                stream.synchronize()
            tdcoll.barrier()
            assert out[:64].tolist() == list(range(1, 65)), "old data"
            assert stamp == "ignored" or out[64] == STAMP, "a torn stamp"

        world.run(host)

    return case


@pytest.mark.parametrize("weak", [True, False])
@pytest.mark.parametrize(
    ("given", "clean"),
    [
        *((("", "", stamp), True) for stamp in ("copy", "write")),
        *(((step, link), bool(link)) for step in ("fill", "stamp") for link in ("", "join")),
        (("fill", "sys"), True),
        (("fill", "gpu"), False),
        (("stamp", "", "write"), False),
        (("", "", "ignored"), False),
    ],
)
def test_copies_come_late_and_in_order_on_one_stream_only(
    given: tuple[str, ...], clean: bool, weak: bool
) -> None:
    expect(
        exchange(*given),
        clean or (not weak and "gpu" in given),
        "old data",
        n_pes=2,
        seeds=20,
        weak=weak,
    )


def test_what_streams_refuse_and_what_needs_none() -> None:
    world = World(2)

    def host(pe: int) -> None:
        sums, word, stream = torch.zeros(2, 64).long(), torch.zeros(1).long(), world.stream()
        with stream:
            wait_on_stream(word, tdl.CMP_EQ, 1)
            device(fill, sums[0], sums)
        device(fill, sums[1], sums)
        assert sums.sum(1).tolist() == [0, 2080]  # the host has gone on
        write_on_stream(word, 1)
        stream.synchronize()
        assert sums[0].sum() == 2080
        with stream:
            copy_on_stream(sums, torch.ones(2, 64).long())

    with pytest.raises(
        ValueError, match=r"a copy of pe. stream 1 would read address .*, where no tensor lives"
    ):
        world.run(host)
