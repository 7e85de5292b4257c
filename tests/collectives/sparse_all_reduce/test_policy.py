# SPDX-License-Identifier: Apache-2.0
"""How sparse rows are summed: a table, and what must hold for any size and topology."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdcoll.collectives.sparse_all_reduce.policy import (
    ALGORITHMS,
    TILE_BYTES,
    Capacities,
    choose,
    tiles,
)
from tdcoll.runtime.topology import Topology

from ..suite.algorithm_cases import topology_of

TABLE = 100_000


def pick(
    algorithm: str = "auto", nodes: tuple[int, ...] = (8,), fit: bool = True, **facts: Any
) -> str:
    """``choose`` with what a test does not care about filled in: many rows, all of which ``fit``
    beside the ids."""
    known: dict[str, Any] = {
        "max_rows_per_rank": TABLE,
        "max_row_bytes": 512,
        "grow": False,
    } | facts
    union = known["max_rows_per_rank"] * (sum(nodes) if fit else 0) or 1
    return choose(
        algorithm,
        Capacities(topology_of(nodes), max_union_rows=union, **known),
        known["max_row_bytes"],
    )


FEW_BYTES = {
    (1,): 8 << 20,
    (2,): 8 << 20,
    (8,): 1198372,
    (4, 4): 65536,
    (1, 3): 65536,
    (200,): 65536,
}
"""The most bytes of a rank's rows and ids that go together, by the ranks of each node."""


@pytest.mark.parametrize("nodes", FEW_BYTES)
@pytest.mark.parametrize(
    ("rows", "over", "fit", "algorithm"),
    [
        (1, None, True, "gather"),
        (1, 0, True, "gather"),
        (1, 1, True, "owner"),
        (1000, 0, True, "gather"),
        (1000, 1, True, "owner"),
        # max_union_rows is less than the rows of all ranks: no room beside the ids
        (64, None, False, "owner"),
        (16 * TABLE, None, True, "owner"),
    ],
)
def test_few_rows_go_with_their_ids(
    nodes: tuple[int, ...], rows: int, over: int | None, fit: bool, algorithm: str
) -> None:
    """``over``: bytes of a row over what just fits; None: rows of 4 bytes."""
    row_bytes = 4 if over is None else FEW_BYTES[nodes] // rows - 8 + over
    facts: dict[str, Any] = {"max_rows_per_rank": rows, "max_row_bytes": row_bytes}
    assert pick(nodes=nodes, fit=fit, **facts) == algorithm


def test_beside_others_few_rows_go_with_their_ids() -> None:
    facts: dict[str, Any] = {"max_row_bytes": 56, "beside_others": True}
    assert pick(nodes=(8,), max_rows_per_rank=1024, **facts) == "gather"
    assert pick(nodes=(8,), max_rows_per_rank=1025, **facts) == "owner"


@pytest.mark.parametrize("asked", ["owner", "gather", "dense"])
@pytest.mark.parametrize("nodes", [(1,), (8,), (2, 2)])
def test_a_requested_algorithm_is_taken(asked: str, nodes: tuple[int, ...]) -> None:
    for rows, fit in ((1, True), (TABLE, True), (TABLE, asked == "gather")):
        assert pick(asked, nodes, fit, max_rows_per_rank=rows) == asked


# ---------------------------------------------------------------------- for any size and topology


NODES = st.lists(st.integers(1, 8), min_size=1, max_size=6)


@given(
    NODES, st.integers(0, 1 << 16), st.integers(1, 1 << 20), st.sampled_from(ALGORITHMS), st.data()
)
def test_all_ranks_choose_the_same(
    nodes: list[int], row_bytes: int, rows: int, asked: str, data: st.DataObject
) -> None:
    """In any order of ranks, for any PEs, seen from any rank."""
    node_ids = data.draw(
        st.permutations([node for node, size in enumerate(nodes) for _ in range(size)])
    )
    world = len(node_ids)
    pes = data.draw(st.permutations(range(100, 100 + world)))
    union = data.draw(st.sampled_from([1, rows * world]))
    answers = set()
    for rank in range(world):
        try:
            topology = Topology.of(rank, pes, node_ids)
            answers.add(
                choose(asked, Capacities(topology, rows, row_bytes, union, False), row_bytes)
            )
        except ValueError as error:
            answers.add(str(error))
    assert len(answers) == 1


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("elements", [0, 1, 2, 3, 64, 65, 100, 512, 2048, 4096, 4097, 100_000])
def test_tiles(elements: int, itemsize: int) -> None:
    cut = tiles(elements, itemsize)
    room = TILE_BYTES // itemsize
    for value in cut:
        assert value.bit_count() == 1, "Triton wants a power of two"
    assert cut.rows * cut.wide <= room
    assert cut.deep * cut.wide <= 4 * room
    assert cut.rows <= 64
    assert cut.deep <= 16
    assert cut.wide == room or cut.wide >= elements, "a row that fits is one tile wide"
    assert 2 <= cut.wide < 2 * max(elements, 2), "and the tile is not for the most part empty"
    assert cut.rows == 64 or cut.rows * cut.wide == room, "the room is used"
