# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter by ``pull``, when a rank is given up on between its wait and its loads: it still reads the source of
the rank that gave up, whose host fills it anew as soon as the call is over."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_mutants import AnyChange, Call, Change, Inserted, Mutant, dropped, installed

import tdcoll
from tdcoll.calls.plan import Plan
from tdcoll.collectives.reduce_scatter.spec import SPEC
from tdcoll.testing import explore

from .calls import different, reference, values

QUEUED = 4
"""Calls that are launched before the host looks for expired waits, as by a stream or a CUDA graph: more than slots."""

LATE_CALL = 2
"""Epoch in which the last rank stalls."""

CHUNK = 128


class Late:
    """The last rank stalls until rank 0 has given up on it and filled its source.

    Args:
        chunks: of a part, as many as thread blocks that read.

    Attributes:
        ended: how many ranks ended with right results only, and how many gave up.
        errors: of the ranks that gave up.
    """

    def __init__(self, chunks: int = 2) -> None:
        self.count, self.plan = chunks * CHUNK // 4 - 2, Plan("pull", chunks, CHUNK, 1)
        self.ended: Counter[str] = Counter()
        self.errors: list[tdcoll.CollectiveTimeout] = []

    def __str__(self) -> str:
        return f"late, {self.plan.chunks} chunks"

    def __call__(self, world: tdcoll.testing.World) -> None:
        self.ended.update(world.run(self.host))

    def host(self, pe: int) -> str:
        """Run on one rank."""
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=8 * self.count)
        n, late = ctx.world_size, ctx.world_size - 1
        source = tdcoll.zeros((n * self.count,), torch.float32)
        outs = torch.empty((QUEUED, self.count), dtype=torch.float32)
        given = [[values(p, call, n * self.count, source.dtype) for p in range(n)] for call in range(QUEUED + 1)]
        looked_at, ctx.monitor.valid = ctx.monitor.valid, memoryview(bytearray(1))
        source.copy_(given[0][pe])
        for call, out in enumerate(outs):
            tdcoll.reduce_scatter(source, ctx=ctx, out=out, algorithm=self.plan, symmetric=True)
            source.copy_(given[call + 1][pe])
            if pe == 0 and call + 1 == LATE_CALL:
                tdcoll.write_on_stream(tdcoll.peer_tensor(ctx.ready, late)[late], 1)
        ctx.monitor.valid = looked_at
        ended, calls = "right", QUEUED
        try:
            ctx.check()
        except tdcoll.CollectiveTimeout as error:
            self.errors.append(error)
            ended, calls = "gave up", (error.epoch or 0) - 1  # those before had ended without an error
        for call, out in enumerate(outs[:calls]):
            wrong = int(different(out, reference(SPEC, given[call], ctx.topology)))
            assert wrong == 0, f"rank {pe}, call {call}: {wrong} wrong elements"
        return ended


PULL = "reduce_scatter.kernels_pull.reduce_scatter_pull"
STALL = f"""
if (g.rank == g.world - 1) & (epoch == {LATE_CALL}):
    while tdl.ld(g.entered + g.rank, "sys", "relaxed") == 0:
        pass
"""
"""Until its own word of ``entered``, which the protocol does not use, is set."""
EXPIRES = f"""
if (g.rank == 0) & (epoch == {LATE_CALL}):
    tdl.wait_signal(g.gave_up + g.rank, tdl.CMP_GE, epoch, g.monitor, g.rank, 0)
"""
"""A wait that expires in a program which has said that its loads are done."""

STALLED = Inserted(PULL, "reduce_chunk", STALL)
EXPIRED = (Inserted(PULL, "stores.none_gave_up", EXPIRES, behind=True), STALLED)
UNCHECKED = dropped(PULL, "stores.none_gave_up")
ONE_AT_A_TIME: dict[str, Any] = {"resident": 1}


@pytest.mark.parametrize("n_pes", [2, 3])
def test_a_rank_that_reads_too_late_says_so(n_pes: int, tmp_path: Path) -> None:
    case = Late()
    with installed([STALLED], tmp_path):
        explore(case, n_pes=n_pes, seeds=2, heap_bytes=1 << 18, on_timeout="expire")
    assert case.ended == {"gave up": 2 * n_pes}
    late = [error for error in case.errors if error.rank == n_pes - 1]
    assert {(error.peer, error.epoch, error.signal, error.expected, error.seen) for error in late} == {
        (0, LATE_CALL, None, None, None)
    }
    assert all("peer 0, which had itself given up in epoch 2" in str(error) for error in late)
    assert {error.peer for error in case.errors if error.rank == 0} == {n_pes - 1}


def test_a_program_that_begins_after_another_has_given_up_tells(tmp_path: Path) -> None:
    """With one block on the GPU at a time, the program that waits for the readers begins when the context is dead."""
    with installed(EXPIRED, tmp_path):
        explore(Late(1), n_pes=2, seeds=3, heap_bytes=1 << 18, on_timeout="expire", **ONE_AT_A_TIME)


def _mutant(name: str, *changes: AnyChange, n_pes: int = 2, chunks: int = 2, **world: Any) -> Mutant:
    job = {"n_pes": n_pes, "heap_bytes": 1 << 18, "on_timeout": "expire", **world}
    expect = rf"rank {n_pes - 1}, call {LATE_CALL - 1}: \d+ wrong elements"
    return Mutant(name, changes, expect, Late(chunks), job, seeds=5)


MUTANTS = (
    _mutant("nobody tells", dropped(PULL, "stores.tell_gave_up"), STALLED),
    _mutant("the next launch tells", Change(PULL, "heard == 0", "alive == 0"), STALLED),
    _mutant(
        "one peer is told",
        Call(
            "stores.tell_gave_up", "release_to_all",
            "release({1}, tl.load({0}.deltas + ({0}.rank + 1) % {0}.world), {2})",
        ),
        STALLED, n_pes=3,
    ),
    _mutant("readers do not look", UNCHECKED, STALLED),
    _mutant(
        "readers look before their loads", UNCHECKED,
        Inserted(PULL, "reduce_chunk", f"stores.none_gave_up(g, WAITED)\n{STALL}"),
    ),
    _mutant(
        "a program that begins after another has given up does not tell",
        Change(PULL, "heard == 0", "(heard == 0) & (alive != 0)"), *EXPIRED, chunks=1, **ONE_AT_A_TIME,
    ),
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    mutant.is_caught(tmp_path)
