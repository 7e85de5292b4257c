# SPDX-License-Identifier: Apache-2.0
"""Deadlines that expire while the peer is only late: whoever gives up must not spoil the peer's results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from kernel_mutants import Change, installed
from tiers import second

import tdcoll
from tdcoll.testing import World, explore, first_failure

from .cases import pattern

pytestmark = pytest.mark.usefixtures("small_chunks")

HEAP = 1 << 18
NBYTES = 64
QUEUED = 4
"""Calls that are launched before the host looks for expired waits, as by a stream or a CUDA graph: more than slots."""


class Queued:
    """Launches ``QUEUED`` calls on every rank, and checks the results of those that no deadline ended.

    Attributes:
        ended: how many ranks ended with right results, and how many gave up.
        early: waits that expired while what they waited for was on its way.
    """

    def __init__(self, algorithm: str, kind: str) -> None:
        self.algorithm, self.kind = algorithm, kind
        self.ended: Counter[str] = Counter()
        self.early = 0

    def __call__(self, world: World) -> None:
        self.ended.update(world.run(self.host))
        self.early += len(world.gave_up)

    def host(self, pe: int) -> str:
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=NBYTES)
        n = ctx.world_size
        buffers = tdcoll.empty((QUEUED, n * NBYTES), torch.uint8)
        looked_at, ctx.monitor.valid = ctx.monitor.valid, memoryview(bytearray(1))
        results = []
        for call, buffer in enumerate(buffers):
            data = pattern(pe, call, NBYTES)
            if self.kind == "i":
                buffer[pe * NBYTES : (pe + 1) * NBYTES] = data
                results.append(tdcoll.all_gather_in_place(buffer, ctx, self.algorithm))
            else:
                results.append(tdcoll.all_gather(data, ctx, algorithm=self.algorithm))
        ctx.monitor.valid = looked_at
        try:
            ctx.check()
        except tdcoll.CollectiveTimeout:
            return "gave up"
        for call, result in enumerate(results):
            wrong = int((result != torch.cat([pattern(p, call, NBYTES) for p in range(n)])).sum())
            assert wrong == 0, f"rank {pe}, call {call} ({self.kind}): {wrong} wrong bytes"
        return "right"


@pytest.mark.parametrize("kind", ["o", "i"])
@pytest.mark.parametrize(
    ("algorithm", "n_pes", "per_node"),
    [
        ("ll", 2, None),
        second("ll", 4, 2),
        ("direct", 2, None),
        ("ring", 3, None),
        ("1d", 2, None),
        ("1d", 2, 1),
        second("2d", 4, 2),
    ],
)
def test_every_rank_gives_up_or_has_the_right_result(
    algorithm: str, n_pes: int, per_node: int | None, kind: str
) -> None:
    case = Queued(algorithm, kind)
    explore(case, n_pes=n_pes, seeds=8, ranks_per_node=per_node, heap_bytes=HEAP, on_timeout="early")
    assert case.early > 0
    assert set(case.ended) == {"right", "gave up"}


@pytest.mark.parametrize(
    ("algorithm", "kernel"),
    [
        ("direct", "kernels_direct.all_gather_direct"),
        ("ring", "kernels_ring.all_gather_ring"),
        ("1d", "kernels_puts.all_gather_1d"),
    ],
)
def test_launches_after_an_expired_wait_must_do_nothing(algorithm: str, kernel: str, tmp_path: Path) -> None:
    """A rank that gave up and goes on sending writes over what a late peer has yet to read."""
    with installed([Change(kernel, "if alive == 0:\n    return", "pass")], tmp_path):
        failure = first_failure(Queued(algorithm, "o"), n_pes=2, seeds=20, heap_bytes=HEAP, on_timeout="early")
    assert failure is not None
    assert "wrong bytes" in failure.report
    assert "gave up early: pe" in failure.report
