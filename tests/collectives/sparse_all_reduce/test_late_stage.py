# SPDX-License-Identifier: Apache-2.0
"""Deadlines that expire while a peer is only late: it may still read the stage of a rank that has given up, on whose
stream the launches of the next call follow."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from kernel_mutants import Change, installed
from tiers import second

import tdcoll
from tdcoll.testing import World, explore, first_failure

from .calls import ROWS, make, rows_of, sparse, total
from .cases import HEAP, small_pieces

QUEUED = 3
"""Calls that are launched before the host looks for expired waits, as in a CUDA graph."""
EPOCHS = 3
"""Of a call: exchange, reduce, meet."""


def ids_of(rank: int) -> list[int]:
    """Most of them other ranks' as well, and one twice."""
    return [*((i + rank) % 8 for i in range(6)), rank]


CALL = 1
"""In which the last rank stalls, from 0."""
ITEMS = "items = k + tl.arange(0, ROWS)"
STALL = f"""
if (g.rank == g.world - 1) & (epoch == {EPOCHS * CALL + 2}):
    while tdl.ld(g.entered + g.rank, "sys", "relaxed") == 0:
        pass
"""
"""Until its own word of ``entered``, which the protocol does not use, is set."""


class Late:
    """Launches ``QUEUED`` calls on every rank, and checks the results of those before the one that a deadline ended.

    The last rank stalls before it reads any stage, until rank 0, which has given up on it, has launched a further call.
    """

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()

    def __call__(self, world: World) -> None:
        with small_pieces():
            self.ended.update(world.run(self.host))

    def host(self, pe: int) -> str:
        ctx = make(max_union_rows=ROWS)
        looked_at, ctx.monitor.valid = ctx.monitor.valid, memoryview(bytearray(1))
        results = []
        for call in range(QUEUED):
            ids = ids_of(pe)
            numbers = rows_of(pe + call, ids)
            ctx.exchanges = 0  # which the host counts, and a replay of a graph does not
            made = tdcoll.sparse_all_reduce_padded(torch.tensor(ids), numbers, ROWS, ctx=ctx, algorithm="owner")
            results.append((made.indices, made.values.clone(), int(made.count)))
            if ctx.rank == 0 and call == CALL + 1:
                late = ctx.world_size - 1
                tdcoll.write_on_stream(tdcoll.peer_tensor(ctx.ready, late)[late], 1)
        ctx.monitor.valid = looked_at
        ended, calls = "right", QUEUED
        try:
            ctx.check()
        except tdcoll.CollectiveTimeout as error:
            ended, calls = "gave up", ((error.epoch or 0) - 1) // EPOCHS
        for call in range(calls):
            given = [(ids_of(p), p + call) for p in range(ctx.world_size)]
            wanted = total([sparse(ids, rows_of(seed, ids)) for ids, seed in given])
            indices, numbers, count = results[call]
            assert count == len(wanted.values()), f"rank {pe}, call {call}: {count} rows"
            assert torch.equal(indices[:count], wanted.indices()[0])
            wrong = int((numbers[:count] != wanted.values()).sum())
            assert wrong == 0, f"rank {pe}, call {call}: {wrong} wrong numbers"
        return ended


STALLED = Change("kernels_reduce.reduce", ITEMS, f"{STALL}\n{ITEMS}")


@pytest.mark.parametrize("n_pes", [2, second(3)])
def test_launches_after_an_expired_wait_leave_the_stage_alone(n_pes: int, tmp_path: Path) -> None:
    case = Late()
    with installed([STALLED], tmp_path):
        explore(case, n_pes=n_pes, seeds=1, heap_bytes=HEAP, on_timeout="expire")
    assert case.ended == {"gave up": n_pes}


def test_a_stage_that_is_filled_all_the_same_is_caught(tmp_path: Path) -> None:
    fills = Change("kernels_values.combine", "still_alive(g.monitor) == 0", "False")
    with installed([fills, STALLED], tmp_path):
        failure = first_failure(Late(), n_pes=2, seeds=2, heap_bytes=HEAP, on_timeout="expire")
    assert failure is not None
    assert f"rank 1, call {CALL}" in failure.report
    assert "wrong numbers" in failure.report
