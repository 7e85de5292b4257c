# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a group are, for whole jobs, uneven nodes and subgroups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tdcoll
from tdcoll.runtime.topology import Topology, emulated_node
from tdcoll.testing import World


def test_even_and_uneven_nodes() -> None:
    topology = Topology.of(4, range(6), ["a", "a", "a", "b", "b", "b"])
    assert (topology.world_size, topology.n_nodes, topology.ranks_per_node) == (6, 2, 3)
    assert (topology.node, topology.place, topology.members) == (1, 1, ((0, 1, 2), (3, 4, 5)))
    assert topology.describe() == "6 rank(s) on 2 node(s) (3 + 3)"
    topology = Topology.of(5, range(6), [0, 0, 0, 0, 1, 1])
    assert (topology.ranks_per_node, topology.node, topology.place) == (None, 1, 1)
    assert topology.describe() == "6 rank(s) on 2 node(s) (4 + 2)"


def test_nodes_are_numbered_by_first_appearance_whatever_they_are_called() -> None:
    topology = Topology.of(0, [7, 2, 5, 0], [("host", 9), None, ("host", 9), None])
    assert (topology.pes, topology.nodes) == ((7, 2, 5, 0), (0, 1, 0, 1))
    assert topology.members == ((0, 2), (1, 3))


def test_strided_subgroup_has_its_own_places() -> None:
    """Ranks 1, 3, 5, 7 of 2 nodes of 4: group rank, PE, node and rail are four different numbers."""
    node_ids = [0, 0, 0, 0, 1, 1, 1, 1]
    pes = [1, 3, 5, 7]
    seen = [Topology.of(rank, pes, [node_ids[pe] for pe in pes]) for rank in range(4)]
    found = [(t.rank, t.pes[t.rank], t.node, t.place) for t in seen]
    assert found == [(0, 1, 0, 0), (1, 3, 0, 1), (2, 5, 1, 0), (3, 7, 1, 1)]
    assert {t.ranks_per_node for t in seen} == {2}


NODES = st.lists(st.integers(0, 4), min_size=1, max_size=16)


@given(NODES)
def test_every_rank_has_one_place_and_all_ranks_see_the_same(node_ids: list[int]) -> None:
    world = len(node_ids)
    views = [Topology.of(rank, range(world), node_ids) for rank in range(world)]
    assert len({view.members for view in views}) == 1
    assert sorted(rank for members in views[0].members for rank in members) == list(range(world))
    for rank, view in enumerate(views):
        assert view.members[view.node][view.place] == rank
        assert all((node_ids[other] == node_ids[rank]) == (view.nodes[other] == view.node) for other in range(world))
    sizes = {len(members) for members in views[0].members}
    assert views[0].ranks_per_node == (sizes.pop() if len(sizes) == 1 else None)


@given(st.integers(1, 32).flatmap(lambda world: st.tuples(st.just(world), st.integers(1, world))))
def test_emulated_nodes_are_near_equal_contiguous_blocks(case: tuple[int, int]) -> None:
    world, n_nodes = case
    nodes = [emulated_node(rank, world, n_nodes) for rank in range(world)]
    assert nodes == sorted(nodes)
    assert set(nodes) == set(range(n_nodes))
    sizes = [nodes.count(node) for node in range(n_nodes)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("n_nodes", [0, -1, 5])
def test_emulated_nodes_out_of_range(n_nodes: int) -> None:
    with pytest.raises(ValueError, match=rf"between 1 and the 4 rank\(s\) of this host, got {n_nodes}"):
        emulated_node(0, 4, n_nodes)


# ---------------------------------------------------------------------- groups of a job


def test_groups() -> None:
    def host(pe: int) -> None:
        assert tdcoll.topology() == Topology(pe, (0, 1, 2, 3), (0, 0, 1, 1))
        if pe in (1, 3):
            assert tdcoll.topology([3, 1]) == Topology((3, 1).index(pe), (3, 1), (0, 1))
        assert tdcoll.topology((pe,)) == Topology(0, (pe,), (0,))
        assert tdcoll.device() == torch.device("cpu")

    World(4, ranks_per_node=2).run(host)


@pytest.mark.parametrize(
    ("group", "error", "text"),
    [
        ([], ValueError, r"distinct ranks in 0\.\.2, at least one; got \[\]"),
        ([0, 0], ValueError, r"distinct ranks in 0\.\.2, at least one; got \[0, 0\]"),
        ([0, 3], ValueError, r"0\.\.2.*got \[0, 3\]"),
        ([-1, 0], ValueError, r"0\.\.2.*got \[-1, 0\]"),
        ([1, 2], ValueError, r"group \[1, 2\] does not contain this process, which is rank 0"),
        ("01", TypeError, "a sequence of global ranks, or None; got '01'"),
        (3, TypeError, "ProcessGroup"),
        ({0, 1}, TypeError, "sequence"),
    ],
)
def test_groups_that_are_none(group: object, error: type[Exception], text: str) -> None:
    def host(pe: int) -> None:
        if pe == 0:
            for call in (
                lambda: tdcoll.topology(group),
                lambda: tdcoll.empty(4, group=group),
                lambda: tdcoll.barrier(group),
                lambda: tdcoll.CollectiveContext(group, max_bytes_per_rank=16),
            ):
                with pytest.raises(error, match=text):
                    call()

    World(3).run(host)
