# SPDX-License-Identifier: Apache-2.0
"""The symmetric heap: ranks agree on an offset, pieces never overlap and merge when freed; and
groups of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks

import tdcoll
from tdcoll import runtime
from tdcoll.runtime.heap import ALIGNMENT, Arena, HeapInfo, agree
from tdcoll.runtime.topology import Topology, emulated_node
from tdcoll.testing import World

PES = 4
HEAP = 32 * ALIGNMENT

GROUPS = st.sets(st.integers(0, PES - 1), min_size=1).map(sorted)
SIZES = st.integers(1, HEAP // 3)
# Allocate so many bytes over a group, or free the allocation of that number, if it is there.
STEPS = st.lists(
    st.tuples(st.just("allocate"), GROUPS, SIZES) | st.tuples(st.just("free"), st.integers(0, 20))
)


def allocate(arenas: list[Arena], group: list[int], nbytes: int) -> int:
    members = [arenas[pe] for pe in group]
    offset = agree([arena.free() for arena in members], nbytes, members[0].nbytes)
    for arena in members:
        assert arena.hold(nbytes, group, wanted=offset) == offset
    return offset


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_any_sequence_keeps_pieces_apart_and_ends_in_one_free_piece(steps: list[tuple]) -> None:
    arenas = [Arena(HEAP) for _ in range(PES)]
    alive: list[tuple[list[int], int, int]] = []
    for step in steps:
        if step[0] == "free":
            if step[1] < len(alive):
                group, offset, _ = alive.pop(step[1])
                for pe in group:
                    arenas[pe].release(offset)
        else:
            _, group, nbytes = step
            taken = [(o, o + Arena.padded(n)) for g, o, n in alive if set(g) & set(group)]
            try:
                offset = allocate(arenas, group, nbytes)
            except tdcoll.HeapExhaustedError:
                starts = [0, *(end for _, end in taken)]
                size = Arena.padded(nbytes)
                assert not any(
                    s + size <= HEAP and all(s + size <= b or e <= s for b, e in taken)
                    for s in starts
                )
                continue
            assert offset % ALIGNMENT == 0
            assert 0 <= offset <= offset + nbytes <= HEAP
            assert all(offset + nbytes <= begin or end <= offset for begin, end in taken)
            alive.append((group, offset, nbytes))
        for pe, arena in enumerate(arenas):
            mine = [Arena.padded(nbytes) for group, _, nbytes in alive if pe in group]
            info = arena.info
            assert (info.used, info.free, info.allocations) == (
                sum(mine),
                HEAP - sum(mine),
                len(mine),
            )
            assert info.largest_free <= info.free
    for group, offset, _ in alive:
        for pe in group:
            arenas[pe].release(offset)
    assert [arena.info for arena in arenas] == [HeapInfo(HEAP, 0, HEAP, HEAP, 0)] * PES


def test_offset_is_the_lowest_that_is_free_on_all() -> None:
    first, second = Arena(HEAP), Arena(HEAP)
    allocate([first], [0], 1)
    allocate([first, second], [1], 2 * ALIGNMENT + 1)
    assert allocate([first, second], [0, 1], 1) == 3 * ALIGNMENT
    assert allocate([first, second], [0], 1) == ALIGNMENT


def test_the_edges_of_an_arena() -> None:
    assert [Arena.padded(nbytes) for nbytes in (0, 1, 511, 512, 513, 1 << 40)] == [
        *[512] * 4,
        1024,
        1 << 40,
    ]
    arena = Arena(4 * ALIGNMENT)
    assert arena.hold(1, [0], wanted=ALIGNMENT) == ALIGNMENT
    assert arena.hold(1, [0], wanted=ALIGNMENT) is None
    assert arena.hold(ALIGNMENT + 1, [0], wanted=3 * ALIGNMENT) is None
    arena.release(ALIGNMENT)
    with pytest.raises(KeyError):
        arena.release(ALIGNMENT)
    assert arena.releases == 1
    assert Arena(0).info == HeapInfo(0, 0, 0, 0, 0)
    assert Arena(0).free() == []
    assert Arena(0).hold(1, [0]) is None


def test_an_allocation_moves_to_a_place_that_is_free_without_it() -> None:
    arena = Arena(4 * ALIGNMENT)
    first, second = arena.hold(2 * ALIGNMENT, [0]), arena.hold(ALIGNMENT, [0])
    assert (first, second) == (0, 2 * ALIGNMENT)
    assert (arena.free(), arena.free(first)) == ([(1536, 2048)], [(0, 1024), (1536, 2048)])
    assert arena.hold(ALIGNMENT, [0], second, 3 * ALIGNMENT) == 3 * ALIGNMENT
    assert arena.hold(2 * ALIGNMENT, [0], first, ALIGNMENT) == ALIGNMENT  # in part where it is
    # another one is there
    assert arena.hold(2 * ALIGNMENT, [0], ALIGNMENT, 2 * ALIGNMENT) == ALIGNMENT
    assert arena.info == HeapInfo(2048, 1536, 512, 512, 2)
    assert arena.releases == 0


def test_exhaustion_names_what_was_asked_what_is_free_and_the_setting() -> None:
    roomy, tight = Arena(HEAP), Arena(HEAP)
    offsets = [allocate([tight], [0], ALIGNMENT) for _ in range(32)]
    for offset in offsets[::2]:
        tight.release(offset)
    with pytest.raises(tdcoll.HeapExhaustedError) as raised:
        allocate([roomy, tight], [0, 1], ALIGNMENT + 1)
    assert str(raised.value).startswith(
        f"the symmetric heap has no room: {2 * ALIGNMENT} bytes asked, {16 * ALIGNMENT} of {HEAP} bytes free on the "
        f"fullest rank (largest free piece {ALIGNMENT} bytes). Raise NVSHMEM_SYMMETRIC_SIZE (to {2 * HEAP >> 10}K, say)"
        " or pass initialize(heap_bytes=...), "
    )


@pytest.mark.parametrize(
    ("total", "nbytes", "enough"),
    [(384, 1, "512M"), (384, 200, "1G"), (64, 64, "128M"), (1024, 9216, "16G")],
)
def test_exhaustion_names_a_size_that_is_enough(total: int, nbytes: int, enough: str) -> None:
    """``total`` and ``nbytes`` in MiB."""
    full = Arena(total << 20)
    assert full.hold(total << 20, [0]) == 0
    with pytest.raises(
        tdcoll.HeapExhaustedError, match=rf"Raise NVSHMEM_SYMMETRIC_SIZE \(to {enough}, say\)"
    ):
        allocate([full], [0], nbytes << 20)


# ---------------------------------------------------------------------- tensors


def test_tensors_are_symmetric_over_groups_whose_heaps_differ() -> None:
    def host(pe: int) -> list[int]:
        job = runtime.current()
        if pe == 1:
            tdcoll.empty(5000, torch.uint8, group=[1])
        pair = tdcoll.empty((3, 5), torch.float64, group=[1, 0] if pe < 2 else [2, 3])
        everywhere = tdcoll.zeros(7, torch.bfloat16)
        assert everywhere.shape == (7,)
        assert everywhere.dtype is torch.bfloat16
        assert not everywhere.any()
        assert pair.is_contiguous()
        return [job.offset_of(pair, "pair"), job.offset_of(everywhere, "everywhere")]

    offsets = World(4).run(host)
    assert offsets == [[5120, 5632], [5120, 5632], [0, 5632], [0, 5632]]


@on_ranks(2)
def test_empty_and_free_leave_the_heap_as_it_was(pe: int) -> None:
    before = tdcoll.heap_info()
    tensors = [tdcoll.empty(sizes, torch.int32) for sizes in (5, (2, 3), [4, 0], ())]
    assert [list(tensor.shape) for tensor in tensors] == [[5], [2, 3], [4, 0], []]
    assert tdcoll.heap_info().allocations == 3  # a tensor of no bytes takes no room
    for tensor in tensors:
        tdcoll.free(tensor)
    assert tdcoll.heap_info() == before
    assert before == HeapInfo(before.total, 0, before.total, before.total, 0)


@on_ranks(2)
def test_tensors_that_are_not_symmetric_are_refused(pe: int) -> None:
    tensor = tdcoll.empty(1024, torch.uint8)
    with pytest.raises(
        tdcoll.NotSymmetricError, match=r"must lie in the symmetric heap.*3 bytes on cpu"
    ):
        tdcoll.free(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(tdcoll.NotSymmetricError, match=r"not a view into it \(offset 512\)"):
        tdcoll.free(tensor[512:])
    tdcoll.free(tensor)
    with pytest.raises(tdcoll.NotSymmetricError, match="freed already"):
        tdcoll.free(tensor)


@on_ranks(3, heap_bytes=1 << 16)
def test_disagreement_and_exhaustion_raise_on_all_ranks_and_take_nothing(pe: int) -> None:
    before = tdcoll.heap_info()
    with pytest.raises(tdcoll.RankMismatchError, match="rank 0: 100, rank 1: 101, rank 2: 102"):
        tdcoll.empty(100 + pe, torch.uint8)
    with pytest.raises(tdcoll.HeapExhaustedError, match=f"{before.total + ALIGNMENT} bytes asked"):
        tdcoll.empty(before.total + 1, torch.uint8)
    assert tdcoll.heap_info() == before
    assert tdcoll.empty(before.total, torch.uint8).numel() == before.total


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
    """Ranks 1, 3, 5, 7 of 2 nodes of 4: group rank, PE, node and rail are four different
    numbers."""
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
        assert all(
            (node_ids[other] == node_ids[rank]) == (view.nodes[other] == view.node)
            for other in range(world)
        )
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
    with pytest.raises(
        ValueError, match=rf"between 1 and the 4 rank\(s\) of this host, got {n_nodes}"
    ):
        emulated_node(0, 4, n_nodes)


# ---------------------------------------------------------------------- groups of a job


@on_ranks(4, ranks_per_node=2)
def test_groups(pe: int) -> None:
    assert tdcoll.topology() == Topology(pe, (0, 1, 2, 3), (0, 0, 1, 1))
    if pe in (1, 3):
        assert tdcoll.topology([3, 1]) == Topology((3, 1).index(pe), (3, 1), (0, 1))
    assert tdcoll.topology((pe,)) == Topology(0, (pe,), (0,))
    assert tdcoll.device() == torch.device("cpu")


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
@on_ranks(3)
def test_groups_that_are_none(pe: int, group: object, error: type[Exception], text: str) -> None:
    if pe == 0:
        for call in (
            lambda: tdcoll.topology(group),
            lambda: tdcoll.empty(4, group=group),
            lambda: tdcoll.barrier(group),
            lambda: tdcoll.CollectiveContext(group, max_bytes_per_rank=16),
        ):
            with pytest.raises(error, match=text):
                call()
