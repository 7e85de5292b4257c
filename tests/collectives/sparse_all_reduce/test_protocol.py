# SPDX-License-Identifier: Apache-2.0
"""The kernels under adverse schedules and deliveries, dead peers, and how many rows move."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from exploring import explore
from tiers import seeds, slow_tier

import tdcoll
from tdcoll.simulator.pointers import PointerAccess
from tdcoll.testing import World

from .cases import GATHER, HEAP, OWNER, TABLES, Reduces, small_pieces, some_part
from .reference import Rows, coalesce


@pytest.fixture(autouse=True)
def pieces() -> Iterator[None]:
    with small_pieces():
        yield


@seeds(1, 4)
@pytest.mark.parametrize(
    ("algorithms", "layout", "tables"),
    [
        ((OWNER, OWNER, OWNER), [4], None),
        ((OWNER, OWNER), [2, 2], None),
        ((OWNER, OWNER), [1, 1, 1], None),
        ((OWNER, OWNER), [2, 2, 1], None),
        ((GATHER, GATHER, GATHER), [4], None),
        ((GATHER, GATHER, GATHER), [2, 2], None),
        ((OWNER, GATHER, OWNER, GATHER, GATHER, OWNER), [3], None),
        ((OWNER, OWNER, GATHER, OWNER), [4], TABLES),
        ((OWNER, OWNER, GATHER, OWNER), [2, 2], TABLES),
        ((OWNER, OWNER, GATHER, OWNER), [1, 1, 1], TABLES),
    ],
    ids=str,
)
def test_clean_over_seeds(
    algorithms: tuple[str, ...], layout: list[int], tables: Any, seeds: Sequence[int]
) -> None:
    """Ranks with many rows, few and none, and who has which changes from call to call."""
    case = Reduces(algorithms, tables=tables)
    explore(case, n_pes=sum(layout), seeds=seeds, ranks_per_node=layout, heap_bytes=HEAP)


MIXED = (OWNER, OWNER, GATHER)
FEW_ROWS = [
    (Reduces(MIXED, rows), sum(layout), layout)
    for rows in ((0,), (0, 0, 0, 5), (5, 0, 0, 0))
    for layout in ([4], [2, 2])
]
# Index spaces so large that nothing is shared, searched by bisection.
HUGE_SPACES = [
    (Reduces((OWNER, OWNER), rows, 1 << 40, coalesced=True), 3, None)
    for rows in ((12,), (0, 12, 1))
]
SUBGROUPS = [(Reduces(MIXED, group=group), 6, 2) for group in ([1, 3], [5, 0, 3])]
# Repeated rows of fp16, so that every rounding shows; the reference knows no schedule.
ROUNDED = [
    (Reduces((OWNER, GATHER), (12,), dtype=torch.float16, exact=False), 3, layout)
    for layout in ([3], [2, 1], [1, 1, 1])
]
FURTHER = [*FEW_ROWS, *HUGE_SPACES, *SUBGROUPS, *ROUNDED]


@seeds(1, 4)
@pytest.mark.parametrize(("case", "n_pes", "layout"), FURTHER)
def test_special_rows_and_subgroups(
    case: Reduces, n_pes: int, layout: Any, seeds: Sequence[int]
) -> None:
    explore(case, n_pes=n_pes, seeds=seeds, ranks_per_node=layout, heap_bytes=HEAP)


@seeds(1, 3)
@pytest.mark.parametrize("layout", [[4], [2, 2], [2, 1]], ids=["4", "2+2", "2+1"])
@pytest.mark.parametrize("tables", [None, TABLES], ids=["", "tables"])
def test_one_resident_block_is_enough(layout: list[int], tables: Any, seeds: Sequence[int]) -> None:
    case = Reduces(MIXED, tables=tables)
    explore(
        case, n_pes=sum(layout), seeds=seeds, ranks_per_node=layout, heap_bytes=HEAP, resident=1
    )


@seeds(1, 2)
@pytest.mark.parametrize("layout", [[3], [2, 1]], ids=["3", "2+1"])
def test_many_calls_with_stragglers(layout: list[int], seeds: Sequence[int]) -> None:
    case = Reduces((OWNER, OWNER, GATHER, OWNER, GATHER, OWNER, OWNER), (2, 0, 5))
    explore(case, n_pes=3, seeds=seeds, ranks_per_node=layout, heap_bytes=HEAP, stragglers=True)


# ---------------------------------------------------------------------- dead peers


class Killed:
    """Two calls that succeed, then one in which a rank dies: all later calls of the others raise
    the same error.

    Args:
        algorithm: of the calls.
        after_turns: how far into the last call the victim gets.
        padded: results have a fixed size.
    """

    def __init__(self, algorithm: str, after_turns: int = 0, padded: bool = False) -> None:
        self.algorithm, self.after_turns, self.padded, self.victim = (
            algorithm,
            after_turns,
            padded,
            2,
        )
        self.told: dict[int, tdcoll.CollectiveTimeout] = {}

    def __call__(self, world: World) -> None:
        self.told.clear()
        world.run(lambda pe: self.host(world, pe))

    def host(self, world: World, pe: int) -> None:
        part = some_part(pe, 4, 6, (2,), torch.float32)
        reduce = tdcoll.sparse_all_reduce_padded if self.padded else tdcoll.sparse_all_reduce_rows
        with tdcoll.SparseContext(max_rows_per_rank=4, max_row_bytes=8, timeout_s=5) as ctx:

            def call() -> None:
                reduce(*part, 6, ctx=ctx, algorithm=self.algorithm)  # type: ignore[operator]
                ctx.check()

            for _ in range(2):
                call()
            tdcoll.barrier()  # what the victim has sent has arrived
            if pe == self.victim:
                world.kill(pe, after_turns=self.after_turns)
            try:
                call()
            except tdcoll.CollectiveTimeout as error:
                self.told[pe] = error
                with pytest.raises(tdcoll.CollectiveTimeout, match=re.escape(str(error))):
                    call()
                used = tdcoll.heap_info().used
                ctx.close()
                assert tdcoll.heap_info().used == used, (
                    "a message may still come: the memory stays taken"
                )
                with pytest.raises(
                    tdcoll.ContextError, match=f"^{reduce.__name__}: the context is closed"
                ):
                    call()


@pytest.mark.parametrize("layout", [[4], [2, 2], [1, 1, 1, 1]], ids=["4", "2+2", "1+1+1+1"])
@pytest.mark.parametrize("algorithm", [OWNER, GATHER])
@pytest.mark.parametrize("padded", [False, True])
def test_a_killed_peer_is_named_by_all_others(
    algorithm: str, layout: list[int], padded: bool
) -> None:
    case = Killed(algorithm, padded=padded)
    case(World(4, ranks_per_node=layout, heap_bytes=HEAP, on_timeout="expire"))
    assert sorted(case.told) == [0, 1, 3]
    epochs = 1  # exchange
    if algorithm == OWNER:  # the steps, and with several nodes handing on and meeting
        epochs += len(layout) + 2 * (len(layout) > 1)
    for rank, error in case.told.items():
        assert (error.rank, error.peer, error.timeout_s) == (rank, case.victim, 5.0)
        assert error.epoch == error.expected == 2 * epochs + 1
        assert error.seen < error.expected


def test_a_peer_that_stays_away_is_named() -> None:
    """Also in the middle of a group whose ranks are not the PEs."""

    def host(pe: int) -> None:
        if pe == 0:
            return
        part = some_part(pe, 4, 6, (2,), torch.float32)
        ctx = tdcoll.SparseContext([3, 1, 2], max_rows_per_rank=4, max_row_bytes=8, timeout_s=2)
        tdcoll.sparse_all_reduce_rows(*part, 6, ctx=ctx)
        if pe == 1:
            return
        with pytest.raises(tdcoll.CollectiveTimeout, match="waited 2 s for peer 1"):
            tdcoll.sparse_all_reduce_rows(*part, 6, ctx=ctx)

    World(4, heap_bytes=HEAP, on_timeout="expire").run(host)


@seeds(1, 2)
@pytest.mark.parametrize("after_turns", [3, 10, 30, 60, 90])
@pytest.mark.parametrize("layout", [[4], [2, 2]], ids=["4", "2+2"])
def test_a_peer_that_dies_in_the_middle_hangs_nobody(
    layout: list[int], after_turns: int, seeds: Sequence[int]
) -> None:
    case = Killed(OWNER, after_turns)
    for seed in seeds:
        case(
            World(
                4, ranks_per_node=layout, heap_bytes=HEAP, on_timeout="expire", seed=seed, weak=True
            )
        )
        assert case.told, "everybody got through, so nobody died in the middle"
        assert case.victim in {error.peer for error in case.told.values()}


# ---------------------------------------------------------------------- what moves


def _parts(world: int, elements: int) -> list[Rows]:
    return [some_part(rank, 7 - rank % 3, 11, (elements,), torch.float32) for rank in range(world)]


def _moved(layout: list[int], elements: int, algorithm: str = "owner") -> tuple[World, int]:
    """The world in which rows of ``elements`` were reduced, and how many elements came through
    pointers to peers."""
    parts = _parts(sum(layout), elements)
    loaded = 0
    real = PointerAccess.before_load

    def before_load(self: Any, addresses: Any, mask: Any, *, polls: bool, symmetric: bool) -> None:
        nonlocal loaded
        inside = self._symmetric(addresses, mask) if symmetric and not polls else None
        if inside is not None:
            loaded += int((self._pes(addresses[inside]) != self._machine.program.pe).sum())
        real(self, addresses, mask, polls=polls, symmetric=symmetric)

    def host(pe: int) -> None:
        with tdcoll.SparseContext(max_rows_per_rank=7, max_row_bytes=64) as ctx:
            tdcoll.sparse_all_reduce_rows(*parts[pe], 11, ctx=ctx, algorithm=algorithm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PointerAccess, "before_load", before_load)
        world = World(len(parts), ranks_per_node=layout, heap_bytes=HEAP, seed=0, weak=True)
        world.run(host)
    return world, loaded


def _having(layout: list[int]) -> list[tuple[int, int]]:
    """Of every row of the union, how many ranks have it, and how many nodes."""
    nodes = [node for node, size in enumerate(layout) for _ in range(size)]
    lists = [set(coalesce(part).indices.tolist()) for part in _parts(len(nodes), 1)]
    ranks = {
        id: [rank for rank, ids in enumerate(lists) if id in ids] for id in set().union(*lists)
    }
    return [(len(having), len({nodes[rank] for rank in having})) for having in ranks.values()]


@pytest.mark.parametrize("world", [2, 4, slow_tier(6)])
def test_rows_that_move_inside_a_node(world: int) -> None:
    """Each comes in from all that have it but one, and goes out to all but one."""
    having = _having([world])
    moved, loaded = _moved([world], 5)
    assert loaded == 5 * sum(ranks - 1 for ranks, _ in having)
    larger, _ = _moved([world], 9)  # whose lists are the same
    small, large = (sum(counts.store_bytes for counts in each.counts) for each in (moved, larger))
    assert large - small == 4 * 4 * len(having) * (world - 1)


@pytest.mark.parametrize(
    "layout", [[2, 2], [1, 1, 1], *map(slow_tier, ([2, 2, 1], [3, 1], [1, 1, 1, 1]))], ids=str
)
def test_rows_that_cross_between_nodes(layout: list[int]) -> None:
    """(nodes that have the row - 1) + (nodes - 1) times each: what larger rows add to the bytes
    that cross."""
    having = _having(layout)
    small, large = (
        sum(c.inter_node_bytes for c in _moved(layout, elements)[0].counts) for elements in (1, 9)
    )
    crossings = sum(nodes - 1 + len(layout) - 1 for _, nodes in having)
    assert large - small == 4 * 8 * crossings
