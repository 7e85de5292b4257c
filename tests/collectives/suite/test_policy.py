# SPDX-License-Identifier: Apache-2.0
"""Which algorithm is taken, and how a call is cut: tables of facts and plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from landings import facts_on, make_facts
from ranks import on_ranks
from tiers import slow_tier

import tdcoll
from tdcoll.base.limits import MAX_BLOCKS, MAX_CHUNKS, SHARED_WARPS, lamport_bytes
from tdcoll.calls.call_launches import launches_of
from tdcoll.calls.collective import spec_of
from tdcoll.calls.plan import CHUNK_ALIGNMENT, TARGET_CHUNK_BYTES, Plan
from tdcoll.calls.spec import Collective
from tdcoll.calls.tuning import Entry, Section
from tdcoll.calls.words import LL_BLOCK
from tdcoll.testing import World

from .algorithm_cases import Nodes, topology_of
from .data import SPECS

K = 1 << 10
M = 1 << 20
G = 1 << 30
GATHER = spec_of("all_gather")
SCATTER = spec_of("reduce_scatter")
REDUCE = spec_of("all_reduce")
ALL = spec_of("all_to_all")
STORES: dict[str, Any] = {"stores": True}
LL: dict[str, Any] = {**STORES, "ll_bytes": 16 * K}
INSIDE: dict[str, Any] = {"in_place": True}
USUAL: dict[str, Any] = {**STORES, "lamport_bytes": 512 * K, "ll_bytes": 340 * K, "itemsize": 4}
FLAGS: dict[str, Any] = {**USUAL, "lamport_bytes": 0}
LARGE: dict[str, Any] = {**USUAL, "lamport_bytes": 16 * M}
PARTS: dict[str, Any] = {**STORES, "ll_bytes": 64, "itemsize": 4}


def choose(
    spec: Collective,
    nbytes: int,
    nodes: Nodes,
    algorithm: Any = "auto",
    sections: Any = (),
    **facts: Any,
) -> Plan:
    """The plan for segments of so many bytes, without its thread blocks, which differ between ranks
    of uneven nodes."""
    return replace(
        spec.choose(make_facts(nbytes, topology_of(nodes), **facts), algorithm, sections), blocks=0
    )


def few(blocks: int, **more: Any) -> dict[str, Any]:
    """Facts of a context with a budget of thread blocks."""
    return {**STORES, "max_blocks": blocks, **more}


SIMULATED: dict[str, Any] = {**STORES, "ll_bytes": M, "simulated": True}
TAKEN: list[tuple[Collective, int, Nodes, dict[str, Any], str | tuple[str, int] | Plan]] = [
    # The choice of "auto": facts; algorithm, with the bytes of a chunk or not, or the plan.
    (GATHER, M, (8,), {}, "1d"),
    (GATHER, M, (2, 2, 2), {}, "1d"),
    (GATHER, M, (2, 2, 2), STORES, "2d"),
    (GATHER, M, (4, 2), STORES, "1d"),
    (GATHER, G, (1, 1, 1), STORES, "1d"),  # one rank per node: nothing to forward
    (GATHER, 0, (8,), LL, "ll"),
    (GATHER, 16 * K, (8,), LL, "ll"),
    (GATHER, 16 * K + 1, (8,), LL, "direct"),
    (GATHER, 0, (8,), {}, "1d"),  # ranks that cannot store to each other's memory
    (GATHER, 8, (4, 4), LL, "2d"),
    (GATHER, 8, (1, 1, 1), LL, "1d"),  # nobody to pass it on to
    (GATHER, 8, (4, 2), LL, "1d"),  # uneven nodes
    (GATHER, 64 * K, (8,), {**STORES, **INSIDE, "ll_bytes": 64 * K}, "ll"),
    (GATHER, 64 * K + 1, (8,), {**STORES, "ll_bytes": 64 * K}, "direct"),
    (GATHER, 8 * M - 1, (8,), STORES, "direct"),
    (GATHER, 8 * M, (8,), STORES, "1d"),
    (GATHER, 8 * M, (8,), {**STORES, **INSIDE}, "direct"),
    (GATHER, M, (4, 4), STORES, "2d"),
    (GATHER, 4 * K, (2,), SIMULATED, "direct"),
    (GATHER, 4 * K, (2, 2), SIMULATED, "2d"),
    (GATHER, 4 * K, (1, 1), SIMULATED, "1d"),
    (SCATTER, 64, (4,), PARTS, "ll"),
    (SCATTER, 73, (4,), PARTS, "direct"),
    (SCATTER, 73, (4,), {**PARTS, "lamport_bytes": 80}, "ll"),
    (SCATTER, 64, (4,), {**PARTS, "itemsize": 8}, "direct"),
    (SCATTER, 64, (4,), {**PARTS, "simulated": True}, "direct"),
    (SCATTER, 64, (4,), {"itemsize": 4}, "1d"),
    (SCATTER, 64, (2, 2), PARTS, "1d"),
    (ALL, 16 * K, (8,), {**STORES, **LL}, "ll"),
    (ALL, 16 * K + 1, (8,), {**STORES, **LL}, "direct"),
    (ALL, 8, (8,), SIMULATED, "direct"),
    (ALL, 8, (4, 4), {**STORES, **LL}, "1d"),
    (ALL, 8, (4,), {}, "1d"),
    (REDUCE, 0, (4,), USUAL, ("one_shot", 64 * 16)),
    (REDUCE, 64 * K, (4,), FLAGS, ("one_shot", 64 * 12)),
    (REDUCE, 640 * K // 3, (4,), USUAL, ("one_shot", 128 * 16)),
    (REDUCE, 640 * K // 3 + 1, (4,), USUAL, ("two_shot", 64 * 16)),
    (REDUCE, 60 * K, (8,), USUAL, ("one_shot", 64 * 16)),
    (REDUCE, 61 * K, (8,), USUAL, ("two_shot", 64 * 16)),
    (REDUCE, 1536 * K, (2,), LARGE, ("one_shot", 512 * 16)),
    (REDUCE, 1536 * K + 1, (2,), LARGE, ("two_shot", 512 * 16)),
    (REDUCE, 16 * M, (2,), LARGE, ("two_shot", 512 * 16)),
    # Several epochs, of at least 4 MB each:
    (REDUCE, 16 * M + 1, (2,), LARGE, ("two_shot", 512 * 16)),
    (REDUCE, 8 * M, (4,), {**LARGE, "lamport_bytes": 2 * M}, ("two_shot", 512 * 16)),
    (REDUCE, 8 * M - 32, (4,), {**LARGE, "lamport_bytes": 2 * M}, ("direct", 16 * K)),
    (REDUCE, 16 * M + 1, (2,), {**LARGE, "symmetric": True}, ("direct", 32 * K + 128)),
    (REDUCE, 16 * M + 1, (2,), {**LARGE, "lamport_bytes": 0}, ("direct", 32 * K + 128)),
    (REDUCE, 16 * M + 1, (2,), {**LARGE, "simulated": True}, ("direct", 32 * K + 128)),
    (REDUCE, 16 * M + 1, (2,), {**LARGE, "stores": False}, ("1d", 509 * 128)),
    (REDUCE, M + 1, (4,), USUAL, ("direct", 121 * 128)),  # both halves are over the room
    (REDUCE, G, (8,), USUAL, ("direct", 512 * K)),
    (REDUCE, 64, (4,), {**USUAL, "itemsize": 8}, ("direct", 128)),
    (REDUCE, 64, (4,), {**USUAL, "simulated": True}, ("direct", 128)),
    (REDUCE, 64, (2, 2), USUAL, ("2d", 128)),
    (REDUCE, 64, (2, 1), USUAL, ("1d", 128)),
    (REDUCE, 64, (1, 1), USUAL, ("1d", 128)),
    (REDUCE, 64, (2, 2), {**USUAL, "stores": False}, ("1d", 128)),
    # Few thread blocks loop:
    (GATHER, 4 * M, (2,), few(31), Plan("loop", 30, 1093 * 128, 8, 30)),
    (GATHER, 16 * M, (2,), few(64), Plan("loop", 63, 2081 * 128, 8, 63)),
    (GATHER, K, (2,), few(31, **INSIDE), "loop"),
    (GATHER, 4 * M, (2,), few(31, **INSIDE), "loop"),
    (GATHER, 8 * M, (2,), few(31, **INSIDE), "ce"),
    (GATHER, 4 * M, (2,), few(MAX_BLOCKS), "direct"),
    (ALL, 4 * M, (2,), few(14), Plan("loop", 13, 2521 * 128, 8, 13)),
    (ALL, 64 * K, (2,), few(14), "loop"),
    (GATHER, 64 * K, (2,), few(31, ll_bytes=M), "ll"),
    (REDUCE, 4 * M, (2,), few(200, **LARGE), "two_shot"),
    (SCATTER, 4 * M, (2,), few(47, **LARGE), Plan("loop", 32, 1024 * 128, 8, 32)),
    (SCATTER, 64 * K, (2,), few(47, **LARGE), "ll"),
    (REDUCE, K, (2,), few(45, **LARGE), "one_shot"),
    (REDUCE, M, (2,), few(45, **LARGE), "one_shot"),
    (REDUCE, 2 * M, (2,), few(45, **LARGE), "loop"),
    (REDUCE, 128 * K, (2,), few(30, **LARGE), "one_shot"),
    (REDUCE, 256 * K, (2,), few(30, **LARGE), "loop"),
    (REDUCE, 4 * M, (2,), few(MAX_BLOCKS, **LARGE), "two_shot"),
    (REDUCE, 64 * M, (2,), few(64, **FLAGS), "loop"),
]


@pytest.mark.parametrize(("spec", "nbytes", "nodes", "facts", "wanted"), TAKEN)
def test_what_is_taken_where_nothing_was_measured(
    spec: Collective, nbytes: int, nodes: Nodes, facts: dict[str, Any], wanted: Any
) -> None:
    plan = spec.choose(make_facts(nbytes, topology_of(nodes), **facts))
    assert wanted in (plan.algorithm, (plan.algorithm, plan.chunk), plan)
    fewer = choose(spec, nbytes, nodes, **{**facts, "max_blocks": 100})
    words = spec.algorithm(fewer.algorithm).words or fewer.algorithm == "loop"
    assert words or fewer.chunks * (2 * sum(nodes) + 1) < 100 or sum(nodes) > 49


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_context_that_tdcoll_makes_for_one_small_call_has_memory_for_one_shot(world: int) -> None:
    for nbytes in (16, K, 60 * K):
        lamport = min(REDUCE.capacity(nbytes, world), lamport_bytes(world, 1))
        plan = choose(
            REDUCE, nbytes, (world,), **{**FLAGS, "ll_bytes": 0, "lamport_bytes": lamport}
        )
        assert plan.algorithm == "one_shot", nbytes


@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks_with_few_thread_blocks(world: int) -> None:
    """None takes direct stores, which need a thread block for each chunk of each peer; loops have
    enough parts."""
    for spec in SPECS:
        for nbytes in (4 * K, 100 * K, 255 * K, M, 16 * M):
            plan = spec.choose(
                make_facts(nbytes, topology_of((world,)), max_blocks=32, **{**LARGE, "ll_bytes": M})
            )
            assert plan.algorithm != "direct"
            if plan.algorithm == "loop" and nbytes >= M:
                assert plan.blocks >= 16


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_plans_and_entries_say_how_many_thread_blocks(spec: Collective) -> None:
    """By default 32 to 64; entries and plans made by hand may have any number that the context
    allows."""
    facts = make_facts(8 * M, topology_of((2,)), max_blocks=24, **STORES)
    for name in {"loop", "ce"} & set(spec.names):
        free = replace(facts, max_blocks=MAX_BLOCKS)
        plan = spec.choose(free, name)
        how = spec.algorithm(name)
        assert plan.blocks == (
            1
            if not how.works_with_any_grid
            else 32
            if name == "ce" or spec.name == "all_reduce"
            else 64
        )
        kind = ("", spec.name, 2, 1, False)
        for blocks, found in ((8, 8), (16, 16), (64, 23)):
            taken = spec.choose(facts, name, [Section(*kind, (Entry(None, name, blocks=blocks),))])
            assert taken.blocks == (found if how.works_with_any_grid else 1)
            assert taken.num_warps <= SHARED_WARPS
        if how.works_with_any_grid:
            for blocks in (1, 7, 23):
                assert spec.choose(facts, replace(taken, blocks=blocks)).blocks == blocks


def test_copies_are_whole_and_not_for_several_nodes() -> None:
    copying = [spec for spec in SPECS if "ce" in spec.names]
    assert len(copying) >= 4
    for spec in copying:
        facts = make_facts(5 * M, topology_of((2,)), itemsize=4, **STORES)
        plan = spec.choose(facts, "ce")
        assert plan.chunks == 1
        assert plan.chunk >= spec.algorithm("ce").payload(facts).nbytes
        with pytest.raises(
            ValueError,
            match="algorithm='ce' needs one node whose ranks can store to each other's mem",
        ):
            spec.choose(replace(facts, topology=topology_of((2, 2))), "ce")
        assert "ce" not in {
            spec.choose(replace(facts, nbytes=n)).algorithm for n in (0, 64, K, M, 64 * M, G)
        }


def test_budgets_limit_what_the_backend_handles() -> None:
    assert [REDUCE.backend_limit(2, n) for n in (64, 30, 29, 13, 12)] == [
        16 * M,
        16 * M,
        4 * M,
        4 * M,
        M,
    ]
    assert [GATHER.backend_limit(8, n) for n in (64, 12)] == [4 * M, M]
    assert [spec.backend_limit(4, 64) for spec in (REDUCE, SCATTER, ALL)] == [M, M, 4 * M]


SIZES_OF_CHUNKS = [
    (0, 1, CHUNK_ALIGNMENT),
    (CHUNK_ALIGNMENT + 1, 1, 2 * CHUNK_ALIGNMENT),
    (TARGET_CHUNK_BYTES + 1, 2, TARGET_CHUNK_BYTES // 2 + CHUNK_ALIGNMENT),
    (4 * TARGET_CHUNK_BYTES, 4, TARGET_CHUNK_BYTES),
    (M, 64, M // 64),
    (16 * M, 256, 64 << 10),
    (G, MAX_CHUNKS, G // MAX_CHUNKS),
]
CUT = [
    # Requested algorithm, facts, chunks and bytes of a chunk.
    *((n, (8,), "direct", STORES, chunks, chunk) for n, chunks, chunk in SIZES_OF_CHUNKS),
    (256 * K, (4, 4), "2d", STORES, 32, 256 * K // 32),
    (64 * M, (4, 4), "2d", STORES, 256, 64 * M // 256),
    (G, (4, 4), "2d", STORES, MAX_CHUNKS, G // MAX_CHUNKS),
    (0, (8,), "ll", {**STORES, "ll_bytes": 64 * K}, 1, 12 * LL_BLOCK),
    (12 * LL_BLOCK, (8,), "ll", {**STORES, "ll_bytes": 64 * K}, 1, 12 * LL_BLOCK),
    (12 * LL_BLOCK + 1, (8,), "ll", {**STORES, "ll_bytes": 64 * K}, 2, 12 * LL_BLOCK),
    (64 * K, (8,), "ll", {**STORES, "ll_bytes": 64 * K}, 43, 12 * LL_BLOCK),
    (M, (2,), "ll", SIMULATED, 86, 12 * K),  # blocks of many words cost no more in the simulator
    (64 * K, (8,), "direct", {**STORES, **INSIDE}, 8, 8 * K),
    (32 * M, (8,), "direct", {**STORES, **INSIDE}, 64, 512 * K),
    # chunks are passed on in place as well
    (32 * M, (8,), "ring", {**STORES, **INSIDE}, MAX_CHUNKS, 64 * K),
]


@pytest.mark.parametrize(("nbytes", "nodes", "asked", "facts", "chunks", "chunk"), CUT)
def test_how_all_gathers_are_cut(
    nbytes: int, nodes: Nodes, asked: str, facts: dict[str, Any], chunks: int, chunk: int
) -> None:
    plan = choose(GATHER, nbytes, nodes, asked, **facts)
    assert (plan.algorithm, plan.chunks, plan.chunk) == (asked, chunks, chunk)
    if asked == "ll":
        assert plan.num_warps == (8 if "simulated" in facts else 4)
    elif nodes == (8,):
        assert plan.num_warps == (16 if nbytes >= 16 * M else 8)


@pytest.mark.parametrize(
    ("nodes", "room", "chunks"),
    [((8,), 32, 32), ((8,) * 256, 512, 255), slow_tier((1,) * 16384, 512, 31)],
)
def test_chunks_have_signals_and_all_blocks_a_share_of_the_epoch(
    nodes: Nodes, room: int, chunks: int
) -> None:
    plan = choose(GATHER, G, nodes, "1d", chunks=room)
    assert plan.chunks == chunks
    assert plan.chunks * (2 * sum(nodes) + 1) < MAX_BLOCKS


NAMES = {spec.name: ", ".join(spec.names) for spec in SPECS}
RING_ON_ONE_NODE = r"algorithm='ring' needs one node whose ranks can store .*; got [68] "
TOO_FEW = "needs fewer bytes, or a context with more lamport_bytes or flagged_bytes; got"
REFUSED: list[tuple[Collective, int, Nodes, Any, dict[str, Any], str]] = [
    (
        SCATTER,
        64,
        (4,),
        "ring",
        {},
        f"algorithm must be one of auto, {NAMES['reduce_scatter']}; got 'ring'",
    ),
    (
        GATHER,
        65,
        (4,),
        "ll",
        {**LL, "ll_bytes": 64},
        r"needs at most 64 bytes per rank; got 65 bytes on 4 rank",
    ),
    (GATHER, 1, (4, 2), "ll", LL, "'ll' needs one node whose ranks can store"),
    (GATHER, 1, (4,), "ll", {}, "'ll' needs one node whose ranks can store"),
    (GATHER, 1, (4, 2), "2d", {}, r"6 rank\(s\) on 2 node\(s\) \(4 \+ 2\)\. Use algorithm='auto'"),
    *(
        (
            spec,
            8,
            (4,),
            "1d",
            {"puts": False},
            "'1d' needs NVSHMEM's puts, which memory of PyTorch's",
        )
        for spec in SPECS
    ),
    (GATHER, M, (8,), "ring", {}, RING_ON_ONE_NODE),
    (GATHER, M, (8,), Plan("ring", MAX_CHUNKS, 64 << 10, 16), {}, RING_ON_ONE_NODE),
    (GATHER, M, (4, 4), "ring", STORES, RING_ON_ONE_NODE),
    (GATHER, M, (4, 4), Plan("ring", MAX_CHUNKS, 64 << 10, 16), STORES, RING_ON_ONE_NODE),
    *(
        (spec, 64, (4,), "direct", {}, "algorithm='direct' needs one node whose ranks can store")
        for spec in SPECS
    ),
    (
        SCATTER,
        64,
        (4,),
        "ll",
        {**PARTS, "itemsize": 8},
        "needs elements of at most 4 bytes; got elements of 8 bytes",
    ),
    (
        ALL,
        8,
        (2, 2),
        "ll",
        {**STORES, **LL},
        r"algorithm='ll' needs one node whose ranks can store .*; got 4 rank",
    ),
    (
        ALL,
        16 * K + 1,
        (4,),
        "ll",
        {**STORES, **LL},
        "algorithm='ll' needs .*; got 16385 bytes on 4 rank",
    ),
    (
        REDUCE,
        100,
        (4,),
        "two_shot",
        {"itemsize": 4},
        "'two_shot' needs one node whose ranks can store to each other's",
    ),
    (REDUCE, 100, (4,), "one_shot", {**PARTS, "ll_bytes": 12}, TOO_FEW),
    # no word
    (REDUCE, 100, (4,), "two_shot", {**STORES, "lamport_bytes": 0, "itemsize": 4}, TOO_FEW),
    # A word for one of the two halves:
    (REDUCE, 100, (4,), "two_shot", {**STORES, "lamport_bytes": 16, "itemsize": 4}, TOO_FEW),
]


@pytest.mark.parametrize(("spec", "nbytes", "nodes", "asked", "facts", "message"), REFUSED)
def test_what_cannot_be_had_says_why(
    spec: Collective, nbytes: int, nodes: Nodes, asked: Any, facts: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose(spec, nbytes, nodes, asked, **facts)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_ring_is_taken_only_where_a_table_says_so(in_place: bool) -> None:
    facts: dict[str, Any] = {**STORES, "in_place": in_place}
    sections = (Section("", "all_gather", 8, 1, in_place, (Entry(None, "ring", chunks=64),)),)
    assert choose(GATHER, 32 * M, (8,), sections=sections, **facts) == Plan("ring", 64, M // 2, 16)
    assert choose(GATHER, 32 * M, (8,), in_place=in_place, sections=sections).algorithm == "1d"
    for nbytes in (0, 1, M, 8 * M, G):
        for world in (1, 2, 8):
            assert choose(GATHER, nbytes, (world,), ll_bytes=64 << 10, **facts).algorithm != "ring"


# ---------------------------------------------------------------------- in calls


@on_ranks(2, heap_bytes=1 << 18)
def test_calls_in_the_simulator_are_planned_as_such(pe: int) -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        assert launches_of(GATHER, ctx, facts_on(ctx, 64)).plan.algorithm == "direct"


def test_a_call_may_have_a_plan() -> None:
    simulated = World(4)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1024, debug=True) as ctx:
            before = simulated.counts[pe].puts
            y = tdcoll.all_gather(torch.full((100,), pe), ctx=ctx, algorithm=Plan("1d", 8, 128, 4))
            assert y.view(4, 100)[:, 0].tolist() == [0, 1, 2, 3]
            ctx.check()
            assert simulated.counts[pe].puts - before == 8 * 3
            with pytest.raises(tdcoll.RankMismatchError):
                tdcoll.all_gather(
                    torch.zeros(8), ctx=ctx, algorithm=Plan("1d", 1, 128, 4 if pe else 8)
                )

    simulated.run(host)
