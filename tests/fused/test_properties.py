# SPDX-License-Identifier: Apache-2.0
"""Properties of the fused call, whatever the rows: its bits, and those of a row among other
rows."""

from __future__ import annotations

import torch
from exploring import explore
from hypothesis import given, settings
from hypothesis import strategies as st

from tdcoll.base.limits import MAX_BLOCKS, SHARED_WARPS
from tdcoll.calls.plan import Facts
from tdcoll.fused.policy import NormRows, blocks_of, choose
from tdcoll.runtime.topology import Topology

from .cases import IN_PLACE, OUT_OF_PLACE, ROW_SCALES, Norms


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_a_row_has_the_bits_of_the_reference_in_every_batch_and_by_every_algorithm(data) -> None:
    """So it has the same bits whatever else is in the batch."""
    draw, names = data.draw, ["one_shot", "two_shot", "composed"]
    # more pieces take a minute here
    hidden, fewest = draw(st.sampled_from([(24, 2), (64, 2), (200, 8), (576, 16)]))
    blocks = draw(st.lists(st.sampled_from([0, fewest, 32, 256]), min_size=1, max_size=3))
    case = Norms(
        draw(st.lists(st.sampled_from(names), min_size=2, max_size=3)),
        draw(st.sampled_from([(OUT_OF_PLACE, ROW_SCALES), (ROW_SCALES, IN_PLACE)])),
        draw(st.lists(st.integers(3, 5), min_size=1, max_size=2)), blocks, hidden,
        draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32])), lamport_bytes=1 << 16,
    )  # fmt: skip
    explore(
        case, n_pes=draw(st.integers(2, 3)), seeds=[draw(st.integers(0, 9))], heap_bytes=1 << 21
    )


@given(
    rows=st.integers(1, 5000),
    hidden=st.integers(1, 256).map(lambda n: 64 * n),
    itemsize=st.sampled_from([2, 4]),
    world=st.integers(1, 8),
    nodes=st.integers(1, 2),
    lamport=st.sampled_from([0, 1 << 14, 1 << 19, 1 << 24, 1 << 30]),
    max_blocks=st.sampled_from([18, 200, 1 << 20]),
    simulated=st.booleans(),
    algorithm=st.sampled_from(["auto", "one_shot", "two_shot"]),
)
def test_every_call_has_a_plan_that_is_the_same_on_all_ranks(
    rows, hidden, itemsize, world, nodes, lamport, max_blocks, simulated, algorithm
) -> None:
    asked = NormRows(rows, hidden, itemsize)
    plans = set()
    for rank in range(world * nodes):
        topology = Topology.of(
            rank, range(world * nodes), [place // world for place in range(world * nodes)]
        )
        facts = Facts(
            0,
            topology,
            stores=True,
            lamport_bytes=lamport,
            max_blocks=max_blocks,
            simulated=simulated,
        )
        try:
            plans.add(choose(asked, facts, algorithm))
        except ValueError as error:
            plans.add(str(error))
    (made,) = plans
    if isinstance(made, str):
        assert algorithm != "auto"
        return
    assert made.chunks * made.chunk >= 16 * asked.words
    assert made.chunk <= 1 << 14
    assert 1 <= made.num_warps <= 16
    assert made.algorithm == "composed" or blocks_of(asked, made, world) <= max_blocks
    if made.algorithm != "composed" and max_blocks < MAX_BLOCKS:
        assert made.num_warps <= SHARED_WARPS
        assert made.chunk <= 16 * 64 * SHARED_WARPS, "a warp has 64 words at most"
    assert choose(asked, facts, made) == made
    if nodes > 1 or not lamport:
        assert made.algorithm == "composed"
