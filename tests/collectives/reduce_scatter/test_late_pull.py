# SPDX-License-Identifier: Apache-2.0
"""Deadlines that expire while a peer is only late, in reduce-scatter by ``pull``: the peer that was given up on still
reads the source of the rank that gave up, whose host fills it anew as soon as the call is over."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_mutants import Change, installed
from tiers import seeds

import tdcoll
from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.testing import Failure, World, explore, first_failure

from .cases import CHUNK, reduce_scatter, same_bits, values
from .mutants import MODULES, PULL, PULLED

HEAP = 1 << 18
QUEUED = 4
"""Calls that are launched before the host looks for expired waits, as by a stream or a CUDA graph: more than slots."""


class Queued:
    """Launches ``QUEUED`` calls on every rank, and checks the results of those before the one that a deadline ended.

    Args:
        chunks: of a part, as many as programs that read.

    Attributes:
        ended: how many ranks ended with right results only, and how many gave up.
        early: waits that expired while what they waited for was on its way.
        errors: of the ranks that gave up.
    """

    def __init__(self, chunks: int = 2) -> None:
        self.count = chunks * CHUNK // 4 - 2
        self.ended: Counter[str] = Counter()
        self.early = 0
        self.errors: list[tdcoll.CollectiveTimeout] = []

    def __call__(self, world: World) -> None:
        self.ended.update(world.run(self.host))
        self.early += len(world.gave_up)

    def host(self, pe: int) -> str:
        count = self.count
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=8 * count)
        n = ctx.world_size
        source = tdcoll.zeros((n * count,), torch.float32)
        outs = torch.empty((QUEUED, count), dtype=torch.float32)
        given = [[values(p, call, n * count, source.dtype) for p in range(n)] for call in range(QUEUED + 1)]
        looked_at, ctx.monitor.valid = ctx.monitor.valid, memoryview(bytearray(1))
        source.copy_(given[0][pe])
        for call, out in enumerate(outs):
            reduce_scatter(source, ctx, out, "sum", "pull")
            source.copy_(given[call + 1][pe])
            self.filled_anew(ctx, call)
        ctx.monitor.valid = looked_at
        ended, calls = "right", QUEUED
        try:
            ctx.check()
        except tdcoll.CollectiveTimeout as error:
            self.errors.append(error)
            ended, calls = "gave up", (error.epoch or 0) - 1  # those before had ended without an error
        for call, out in enumerate(outs[:calls]):
            parts = [of[pe * count : (pe + 1) * count] for of in given[call]]
            wrong = same_bits(out, reduce_parts(parts, [0] * n, "sum"))
            assert wrong == 0, f"rank {pe}, call {call}: {wrong} wrong elements"
        return ended

    def filled_anew(self, ctx: tdcoll.CollectiveContext, call: int) -> None:
        """Called when the source holds the numbers for the call after this one."""


@seeds(12, 100)
@pytest.mark.parametrize("n_pes", [2, 3])
def test_every_rank_gives_up_or_has_the_right_result(n_pes: int, seeds: Sequence[int]) -> None:
    case = Queued()
    explore(case, n_pes=n_pes, seeds=seeds, heap_bytes=HEAP, on_timeout="early")
    assert case.early > 0
    assert set(case.ended) == {"right", "gave up"}


CALL = 2
"""Epoch in which the last rank stalls."""
STALL = f"""
if (g.rank == g.world - 1) & (epoch == {CALL}):
    while tdl.ld(g.entered + g.rank, "sys", "relaxed") == 0:
        pass
"""
"""Until its own word of ``entered``, which the protocol does not use, is set."""
READ = "stores.release_to_all(g, row(g, epoch, channel) + g.rank, epoch)"
CHECK = "stores.none_gave_up(g, WAITED)"
TELL = "stores.tell_gave_up(g, epoch)"
TELL_ALL = "release_to_all(g, mine, epoch + tdl.GAVE_UP)"
EXPIRES = f"""
if (g.rank == 0) & (epoch == {CALL}):
    tdl.wait_signal(g.gave_up + g.rank, tdl.CMP_GE, epoch, g.monitor, g.rank, 0)
"""
"""A wait that expires in a program which has said that its loads are done."""


class Late(Queued):
    """The last rank stalls between its wait and its loads, until rank 0 has given up on it and filled its source."""

    def filled_anew(self, ctx: tdcoll.CollectiveContext, call: int) -> None:
        late = ctx.world_size - 1
        if ctx.rank == 0 and call + 1 == CALL:
            tdcoll.write_on_stream(tdcoll.peer_tensor(ctx.ready, late)[late], 1)


STALLED = Change(PULL, PULLED, f"{STALL}\n{PULLED}")


@pytest.mark.parametrize("n_pes", [2, 3])
def test_a_rank_that_reads_too_late_says_so(n_pes: int, tmp_path: Path) -> None:
    case = Late()
    with installed([STALLED], tmp_path, MODULES):
        explore(case, n_pes=n_pes, seeds=2, heap_bytes=HEAP, on_timeout="expire")
    assert case.ended == {"gave up": 2 * n_pes}
    late = [error for error in case.errors if error.rank == n_pes - 1]
    assert {(error.peer, error.epoch, error.signal, error.expected, error.seen) for error in late} == {
        (0, CALL, None, None, None)
    }
    assert all("peer 0, which had itself given up in epoch 2" in str(error) for error in late)
    assert {error.peer for error in case.errors if error.rank == 0} == {n_pes - 1}


def failure(changes: Sequence[Change], n_pes: int, folder: Path) -> Failure | None:
    """With the last rank stalled, and these changes besides."""
    with installed(changes, folder, MODULES):
        return first_failure(Late(), n_pes=n_pes, seeds=5, heap_bytes=HEAP, on_timeout="expire")


ONE_PEER = "release(mine, tl.load(g.deltas + (g.rank + 1) % g.world), epoch + tdl.GAVE_UP)"
MUTANTS = {
    "nobody tells": ([Change(PULL, TELL, "pass"), STALLED], 2),
    "the next launch tells": ([Change(PULL, "heard == 0", "alive == 0"), STALLED], 2),
    "one peer is told": ([Change("stores.tell_gave_up", TELL_ALL, ONE_PEER), STALLED], 3),
    "readers do not look": ([Change(PULL, CHECK, "pass"), STALLED], 2),
    "readers look before their loads": (
        [Change(PULL, f"{PULLED}\n{READ}\n{CHECK}", f"{CHECK}\n{STALL}\n{PULLED}\n{READ}")],
        2,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, tmp_path: Path) -> None:
    changes, n_pes = MUTANTS[name]
    found = failure(changes, n_pes, tmp_path)
    assert found is not None, f"nothing noticed: {name}"
    assert re.search(rf"rank {n_pes - 1}, call {CALL - 1}: \d+ wrong elements", found.report), found.report


def test_a_program_that_begins_after_another_has_given_up_must_tell(tmp_path: Path) -> None:
    """With one block on the GPU at a time, the program that waits for the readers begins when the context is dead."""
    expired = [Change(PULL, CHECK, f"{CHECK}\n{EXPIRES}"), STALLED]
    one_at_a_time: dict[str, Any] = {"n_pes": 2, "heap_bytes": HEAP, "on_timeout": "expire", "resident": 1}
    with installed(expired, tmp_path, MODULES):
        explore(Late(chunks=1), seeds=3, **one_at_a_time)
    silent = Change(PULL, "heard == 0", "(heard == 0) & (alive != 0)")
    with installed([silent, *expired], tmp_path, MODULES):
        found = first_failure(Late(chunks=1), seeds=5, **one_at_a_time)
    assert found is not None
    assert "wrong elements" in found.report
