# SPDX-License-Identifier: Apache-2.0
"""Properties of the fused call, whatever the rows: its bits, and those of a row among other rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from collectives.suite.calls import different
from hypothesis import given, settings
from hypothesis import strategies as st

import tdcoll
from tdcoll.collectives._host.plan import Facts
from tdcoll.fused.policy import Rows, choose, programs
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World

from .cases import plan, values

HIDDEN = {24: 2, 64: 2, 200: 8, 576: 16}
"""Widths, and the fewest words of a piece: rows of more pieces take the simulator a minute."""


def same(made: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """The results of two calls have the same bits."""
    assert [int(different(*pair)) for pair in zip(made, others, strict=True)] == [0, 0, 0]


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    n_pes=st.integers(2, 3),
    hidden=st.sampled_from(list(HIDDEN)),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    cuts=st.lists(st.tuples(st.sampled_from(["one_shot", "two_stage", "composed"]), st.sampled_from([2, 8, 32, 256])),
                  min_size=2, max_size=3),
    rows=st.integers(3, 5),
)  # fmt: skip
def test_a_row_has_the_same_bits_in_every_batch_and_by_every_algorithm(seed, n_pes, hidden, dtype, cuts, rows) -> None:
    """The whole batch, a part of it in another order, and rows alone; on all ranks."""
    found: dict[int, list[torch.Tensor]] = {}

    def host(pe: int) -> None:
        x, residual = values(seed + pe, (rows, hidden), dtype), values(seed + 99, (rows, hidden), dtype)
        weight = values(5, (hidden,), dtype)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: max(n_pes, rows - 1)]
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 12, lamport_bytes=1 << 16) as ctx:

            def call(chosen: torch.Tensor, algorithm: str, block: int) -> tuple[torch.Tensor, ...]:
                cut = plan(algorithm, hidden, dtype, max(block, HIDDEN[hidden]))
                return tdcoll.fused.all_reduce_rms_norm(
                    x[chosen], residual[chosen], weight, ctx=ctx, out_dtype=torch.float8_e4m3fn, algorithm=cut
                )

            whole = [call(torch.arange(rows), *cut) for cut in cuts]
            part = [call(order, *cut) for cut in cuts]
            alone = call(order[:1], "one_shot", cuts[0][1])
            ctx.check()
        found[pe] = list(whole[0])
        for made in whole[1:]:
            same(made, whole[0])
        for made in part:
            same(made, [rows[order] for rows in whole[0]])
        same(alone, [rows[order[:1]] for rows in whole[0]])

    World(n_pes, seed=seed, weak=True, heap_bytes=1 << 21).run(host)
    for pe in range(1, n_pes):
        same(found[pe], found[0])


@given(
    rows=st.integers(1, 5000),
    hidden=st.integers(1, 256).map(lambda n: 64 * n),
    itemsize=st.sampled_from([2, 4]),
    world=st.integers(1, 8),
    nodes=st.integers(1, 2),
    lamport=st.sampled_from([0, 1 << 14, 1 << 19, 1 << 24, 1 << 30]),
    max_programs=st.sampled_from([18, 200, 1 << 20]),
    simulated=st.booleans(),
)
def test_every_call_has_a_plan_that_is_the_same_on_all_ranks(
    rows, hidden, itemsize, world, nodes, lamport, max_programs, simulated
) -> None:
    asked = Rows(rows, hidden, itemsize)
    plans = set()
    for rank in range(world * nodes):
        topology = Topology.of(rank, range(world * nodes), [place // world for place in range(world * nodes)])
        facts = Facts(0, topology, stores=True, lamport_bytes=lamport, max_programs=max_programs, simulated=simulated)
        plans.add(choose(asked, facts))
    (made,) = plans
    assert made.channels * made.chunk >= 16 * asked.words
    assert made.chunk <= 1 << 14
    assert 1 <= made.num_warps <= 16
    assert made.algorithm == "composed" or programs(asked, made, world) <= max_programs
    assert choose(asked, facts, made) == made
    if nodes > 1 or not lamport:
        assert made.algorithm == "composed"
