# SPDX-License-Identifier: Apache-2.0
"""Which all-gather is launched, and how: a table, and what must hold for any size and topology."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import second

import tdcoll
from tdcoll.collectives._host import plan as plans
from tdcoll.collectives._host.plan import CHUNK_ALIGNMENT, LL_BLOCK, TARGET_CHUNK_BYTES, Plan
from tdcoll.collectives.all_gather import policy
from tdcoll.collectives.all_gather.spec import SPEC
from tdcoll.collectives.exchange import kernels_direct
from tdcoll.errors import RankMismatchError
from tdcoll.limits import CHANNELS, MAX_PROGRAMS
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World
from tdcoll.tuning import Entry, Section

from .cases import choose, nodes_of

M, G = 1 << 20, 1 << 30


def section(topology: Topology, in_place: bool, entry: Entry) -> Section:
    """For eager calls on such a group."""
    return Section("", "all_gather", topology.ranks_per_node or 0, topology.n_nodes, in_place, (entry,))


@pytest.mark.parametrize(
    ("nodes", "asked", "algorithm"),
    [
        ((8,), "auto", "1d"),
        ((1,), "auto", "1d"),
        ((8,), "1d", "1d"),
        ((8,), "2d", "2d"),
        ((4, 4), "auto", "2d"),
        ((2, 2, 2), "auto", "2d"),
        ((4, 4), "1d", "1d"),
        ((4, 4), "2d", "2d"),
        ((1, 1, 1), "auto", "1d"),  # one rank per node: nothing to forward
        ((1, 1, 1), "2d", "2d"),
        ((4, 2), "auto", "1d"),
        ((4, 2), "1d", "1d"),
    ],
)
@pytest.mark.parametrize("nbytes", [M, G])
def test_algorithm_of_large_messages(nbytes: int, nodes: tuple[int, ...], asked: str, algorithm: str) -> None:
    assert choose(nbytes, nodes_of(*nodes), asked).algorithm == algorithm


@pytest.mark.parametrize(
    ("nbytes", "channels", "chunk"),
    [
        (0, 1, CHUNK_ALIGNMENT),
        (1, 1, CHUNK_ALIGNMENT),
        (CHUNK_ALIGNMENT, 1, CHUNK_ALIGNMENT),
        (CHUNK_ALIGNMENT + 1, 1, 2 * CHUNK_ALIGNMENT),
        (TARGET_CHUNK_BYTES, 1, TARGET_CHUNK_BYTES),
        (TARGET_CHUNK_BYTES + 1, 2, TARGET_CHUNK_BYTES // 2 + CHUNK_ALIGNMENT),
        (4 * TARGET_CHUNK_BYTES, 4, TARGET_CHUNK_BYTES),
        (64 * TARGET_CHUNK_BYTES, 64, TARGET_CHUNK_BYTES),
        (M, 64, M // 64),
        (4 * M, 64, 64 << 10),
        (16 * M, 256, 64 << 10),
        (32 * M, CHANNELS, 64 << 10),
        (G, CHANNELS, G // CHANNELS),
    ],
)
def test_chunks(nbytes: int, channels: int, chunk: int) -> None:
    for algorithm in ("1d", "direct", "ring"):
        plan = choose(nbytes, nodes_of(8), algorithm, stores=True)
        assert (plan.channels, plan.chunk) == (channels, chunk)
        assert plan.num_warps == (16 if nbytes >= 16 * M else 8)


@pytest.mark.parametrize(
    ("nbytes", "channels", "chunk"),
    [(256 << 10, 32, 8 << 10), (M, 32, 32 << 10), (64 * M, 256, 256 << 10), (G, CHANNELS, G // CHANNELS)],
)
def test_chunks_between_nodes(nbytes: int, channels: int, chunk: int) -> None:
    for algorithm in ("1d", "2d"):
        plan = choose(nbytes, nodes_of(4, 4), algorithm)
        assert (plan.channels, plan.chunk) == (channels, chunk)


@pytest.mark.parametrize(
    ("nodes", "room", "channels"),
    [((8,), 32, 32), ((8,), 512, 512), ((8,) * 256, 512, 255), second((1,) * 16384, 512, 31)],
)
def test_chunks_have_signals_and_all_programs_a_share_of_the_epoch(
    nodes: tuple[int, ...], room: int, channels: int
) -> None:
    topology = nodes_of(*nodes)
    plan = choose(G, topology, "1d", channels=room)
    assert plan.channels == channels
    assert plan.channels * (2 * topology.world_size + 1) < MAX_PROGRAMS
    with pytest.raises(ValueError, match=f"channels must be 1 to {channels}, got {channels + 1}"):
        choose(1, topology, Plan("1d", channels + 1, 128, 4), channels=room)


def test_a_plan_for_ll_has_no_programs_with_nothing_to_carry() -> None:
    """Over several nodes they would wait for the signals of puts that nobody makes."""
    choose(1000, nodes_of(2, 2), Plan("ll", 1, 1536, 4), ll_bytes=1000)
    with pytest.raises(ValueError, match="channels must be 1 to 1, got 9"):
        choose(1000, nodes_of(2, 2), Plan("ll", 9, 1536, 4), ll_bytes=1000)
    with pytest.raises(ValueError, match="chunks of more than 12 bytes for 72 rank"):
        choose(1 << 18, nodes_of(72), Plan("ll", 21846, 12, 1), ll_bytes=1 << 18)
    with pytest.raises(ValueError, match="chunks must be 12 times a power of two, at most 12288, bytes and c"):
        choose(100, nodes_of(4), Plan("ll", 1, 128, 1), ll_bytes=100)
    with pytest.raises(ValueError, match="at most 12288, bytes and cover all 100 bytes; got 1 of 24576 bytes"):
        choose(100, nodes_of(4), Plan("ll", 1, 24576, 16), ll_bytes=100)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan("nccl", 1, 128, 4), "a Plan's algorithm must be one of ll, direct, ring, 1d, 2d; got 'nccl'"),
        (Plan("ll", 1, 4096, 4), "algorithm='ll' needs the same number of ranks on every node and"),
        (Plan("1d", 2, 100, 4), "must be a multiple of 16 bytes and cover all 1000 bytes; got 2 of 100 bytes"),
        (Plan("1d", 2, 480, 4), "cover all 1000 bytes; got 2 of 480"),
        (Plan("1d", CHANNELS + 1, 128, 4), f"channels must be 1 to {CHANNELS}, got {CHANNELS + 1}"),
    ],
)
def test_plans_that_cannot_be_launched(plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        choose(1000, nodes_of(4), plan)


def test_a_caller_may_give_a_plan() -> None:
    simulated = World(4)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1024, debug=True) as ctx:
            before = simulated.counts[pe].puts
            y = tdcoll.all_gather(torch.full((100,), pe), ctx, algorithm=Plan("1d", 8, 128, 4))
            assert y.view(4, 100)[:, 0].tolist() == [0, 1, 2, 3]
            ctx.check()
            assert simulated.counts[pe].puts - before == 8 * 3
            with pytest.raises(RankMismatchError):
                tdcoll.all_gather(torch.zeros(8), ctx, algorithm=Plan("1d", 1, 128, 4 if pe else 8))
            with pytest.raises(ValueError, match="cover all 32 bytes"):
                tdcoll.all_gather(torch.zeros(8), ctx, algorithm=Plan("1d", 1, 16, 4))

    simulated.run(host)


@pytest.mark.parametrize(
    ("nodes", "nbytes", "direct", "algorithm"),
    [
        ((8,), 64 << 10, True, "ll"),
        ((8,), (64 << 10) + 1, True, "direct"),
        ((8,), 8 * M - 1, True, "direct"),
        ((8,), 8 * M, True, "1d"),
        ((8,), M, False, "1d"),
        ((4, 4), M, True, "2d"),
    ],
)
def test_medium_messages_are_stored(nodes: tuple[int, ...], nbytes: int, direct: bool, algorithm: str) -> None:
    plan = choose(nbytes, nodes_of(*nodes), ll_bytes=64 << 10 if len(nodes) == 1 else -1, stores=direct)
    assert plan.algorithm == algorithm
    if len(nodes) == 1:
        in_place = choose(nbytes, nodes_of(*nodes), stores=direct, in_place=True)
        assert in_place.algorithm == ("direct" if direct else "1d")
        assert in_place.channels <= 64
        small = choose(64 << 10, nodes_of(*nodes), ll_bytes=64 << 10, stores=direct, in_place=True)
        assert small.algorithm == "ll"


@pytest.mark.parametrize("in_place", [False, True])
def test_the_ring_is_had_where_ranks_store_to_each_other_and_only_when_asked_for(in_place: bool) -> None:
    plan = choose(32 * M, nodes_of(8), "ring", stores=True, in_place=in_place)
    assert plan == Plan("ring", CHANNELS, 64 << 10, 16)  # in place as well: chunks are passed on
    sections = (section(nodes_of(8), in_place, Entry(None, "ring", channels=64)),)
    tabled = choose(32 * M, nodes_of(8), stores=True, in_place=in_place, sections=sections)
    assert tabled == Plan("ring", 64, M // 2, 16)
    assert choose(32 * M, nodes_of(8), in_place=in_place, sections=sections).algorithm == "1d"
    for nodes, direct in (((8,), False), ((4, 4), True), ((4, 2), True)):
        for asked in ("ring", plan):
            with pytest.raises(
                ValueError, match=r"algorithm='ring' needs one node whose ranks can store .*; got [68] "
            ):
                choose(M, nodes_of(*nodes), asked, stores=direct, in_place=in_place)
    for nbytes in (0, 1, 64 << 10, M, 8 * M, 64 * M, G):
        for world in (1, 2, 3, 4, 8):
            chosen = choose(nbytes, nodes_of(world), stores=True, ll_bytes=64 << 10, in_place=in_place)
            assert chosen.algorithm != "ring"


@pytest.mark.parametrize(
    ("nodes", "asked", "nbytes", "ll_bytes", "algorithm"),
    [
        ((8,), "auto", 0, 16 << 10, "ll"),
        ((8,), "auto", 1, 16 << 10, "ll"),
        ((8,), "auto", 16 << 10, 16 << 10, "ll"),
        ((8,), "auto", (16 << 10) + 1, 16 << 10, "1d"),
        ((1,), "auto", 8, 16 << 10, "ll"),
        ((8,), "auto", 0, 0, "ll"),
        ((8,), "auto", 1, 0, "1d"),
        ((8,), "auto", 0, -1, "1d"),  # ranks that cannot store to each other's memory
        ((4, 4), "auto", 8, 16 << 10, "ll"),
        ((4, 4), "auto", (16 << 10) + 1, 16 << 10, "2d"),
        ((8, 8, 8, 8, 8, 8, 8, 8), "auto", 8 << 10, 16 << 10, "ll"),
        ((8, 8, 8, 8, 8, 8, 8, 8), "auto", (8 << 10) + 1, 16 << 10, "2d"),  # too much to pass on with its flags
        ((4, 4), "auto", 8, -1, "2d"),
        ((1, 1, 1), "auto", 8, 16 << 10, "1d"),  # nobody to pass it on to
        ((1, 1, 1), "ll", 8, 16 << 10, "ll"),
        ((4, 2), "auto", 8, 16 << 10, "1d"),
        ((8,), "ll", 16 << 10, 16 << 10, "ll"),
        ((8,), "1d", 8, 16 << 10, "1d"),
        ((8,), "2d", 8, 16 << 10, "2d"),
    ],
)
def test_algorithm_of_small_messages(
    nodes: tuple[int, ...], asked: str, nbytes: int, ll_bytes: int, algorithm: str
) -> None:
    assert choose(nbytes, nodes_of(*nodes), asked, ll_bytes=ll_bytes).algorithm == algorithm


@pytest.mark.parametrize(
    ("nodes", "asked", "nbytes", "in_place", "plan"),
    [
        ((2,), "auto", 0, False, ("direct", 1, 128)),
        ((2,), "auto", M, False, ("direct", 64, M // 64)),
        ((8,), "auto", 64 << 10, True, ("direct", 8, 8 << 10)),
        ((8,), "auto", 8 * M, False, ("1d", 128, 64 << 10)),  # no LL before, and none after
        ((1,), "auto", 8, False, ("direct", 1, 128)),
        ((2, 2), "auto", 4096, False, ("2d", 1, 4096)),
        ((2, 2), "auto", 0, True, ("2d", 1, 128)),
        ((1, 1), "auto", 4096, False, ("1d", 1, 4096)),
        ((2, 1), "auto", 4096, False, ("1d", 1, 4096)),
        ((2,), "ll", 0, False, ("ll", 1, 12 << 10)),
        ((2,), "ll", M, False, ("ll", 86, 12 << 10)),
        ((2, 2), "ll", 4096, False, ("ll", 1, 12 << 10)),
    ],
)
def test_the_simulator_takes_what_is_cheap_there(
    nodes: tuple[int, ...], asked: str, nbytes: int, in_place: bool, plan: tuple[str, int, int]
) -> None:
    facts: dict[str, Any] = {"ll_bytes": M, "stores": True, "in_place": in_place}
    chosen = choose(nbytes, nodes_of(*nodes), asked, **facts, simulated=True)
    assert (chosen.algorithm, chosen.channels, chosen.chunk) == plan
    sections = (section(nodes_of(*nodes), in_place, Entry(None, "ll")),)
    tabled = choose(nbytes, nodes_of(*nodes), **facts, simulated=True, sections=sections)
    assert (tabled.algorithm == "ll") == (len(set(nodes)) == 1 and nbytes <= M), "a table goes before"


def test_calls_in_the_simulator_are_planned_as_such() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
            tdcoll.all_gather(torch.zeros(64, dtype=torch.uint8), ctx)
            launch = ctx.known[("all_gather", 64, "auto", None, False, False)]
            assert launch.kernel is kernels_direct.exchange_direct

    World(2, heap_bytes=1 << 18).run(host)


@pytest.mark.parametrize(
    ("nbytes", "programs"),
    [(0, 1), (1, 1), (12 * LL_BLOCK, 1), (12 * LL_BLOCK + 1, 2), (16 << 10, 11), (64 << 10, 43)],
)
def test_blocks_of_ll(nbytes: int, programs: int) -> None:
    plan = choose(nbytes, nodes_of(8), "ll", ll_bytes=64 << 10)
    assert (plan.channels, plan.chunk, plan.num_warps) == (programs, 12 * LL_BLOCK, 4)


@given(st.integers(0, 16 << 10))
def test_blocks_of_ll_cover_the_words(nbytes: int) -> None:
    plan = choose(nbytes, nodes_of(8), "ll", ll_bytes=16 << 10)
    assert plan.channels * plan.chunk >= nbytes
    assert (plan.channels - 1) * plan.chunk < max(nbytes, 1), "the last program has nothing to carry"
    block = plan.chunk // 12
    assert 12 * block == plan.chunk
    assert block & (block - 1) == 0, "Triton wants a power of two"


SIZES = st.one_of(
    st.integers(0, 300),
    st.integers(0, 3 * CHANNELS * CHUNK_ALIGNMENT),
    st.integers(0, 2 * CHANNELS * TARGET_CHUNK_BYTES),
    st.integers(0, 1 << 45),
)
NODES = st.lists(st.integers(1, 8), min_size=1, max_size=6)


@given(SIZES, NODES, st.sampled_from((CHUNK_ALIGNMENT, TARGET_CHUNK_BYTES)))
def test_chunks_cover_the_bytes_and_none_is_empty(nbytes: int, nodes: list[int], target: int) -> None:
    """With chunks near their alignment, too, where rounding up leaves whole channels without work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "TARGET_CHUNK_BYTES", target)
        plan = choose(nbytes, nodes_of(*nodes), "1d")
    assert 1 <= plan.channels <= CHANNELS
    assert plan.chunk > 0
    assert plan.chunk % CHUNK_ALIGNMENT == 0
    assert plan.channels * plan.chunk >= nbytes
    assert (plan.channels - 1) * plan.chunk < max(nbytes, 1), "the last channel has nothing to carry"


@given(SIZES, NODES, st.sampled_from(("auto", *SPEC.names)), st.integers(-1, 1 << 20), st.data())
def test_all_ranks_choose_the_same(
    nbytes: int, nodes: list[int], algorithm: str, ll_bytes: int, data: st.DataObject
) -> None:
    """In any order of ranks, for any PEs, seen from any rank."""
    node_ids = data.draw(st.permutations([node for node, size in enumerate(nodes) for _ in range(size)]))
    pes = data.draw(st.permutations(range(100, 100 + len(node_ids))))
    answers = set()
    facts: dict[str, Any] = {
        "stores": data.draw(st.booleans()), "in_place": data.draw(st.booleans()),
        "channels": data.draw(st.integers(1, CHANNELS)), "simulated": data.draw(st.booleans()),
    }  # fmt: skip
    for rank in range(len(node_ids)):
        try:
            answers.add(choose(nbytes, Topology.of(rank, pes, node_ids), algorithm, ll_bytes=ll_bytes, **facts))
        except ValueError as error:
            answers.add(str(error))
    assert len(answers) == 1


@given(SIZES.filter(bool), NODES, st.sampled_from(("auto", "1d", "2d")))
def test_a_wish_is_granted_or_refused(nbytes: int, nodes: list[int], asked: str) -> None:
    even = len(set(nodes)) == 1
    if asked == "2d" and not even:
        with pytest.raises(ValueError, match="needs the same number of ranks on every node"):
            choose(nbytes, nodes_of(*nodes), asked)
        return
    algorithm = choose(nbytes, nodes_of(*nodes), asked).algorithm
    if asked == "auto":
        assert algorithm == ("2d" if even and len(nodes) > 1 and nodes[0] > 1 else "1d")
    else:
        assert algorithm == asked


def test_refusals_say_what_and_why() -> None:
    with pytest.raises(ValueError, match=f"algorithm must be one of {', '.join(('auto', *SPEC.names))}; got '3d'"):
        choose(1, nodes_of(4), "3d")
    with pytest.raises(
        ValueError, match=r"on every node and at most 64 bytes per rank; got 65 bytes on 4 rank\(s\) on 1 node"
    ):
        choose(65, nodes_of(4), "ll", ll_bytes=64)
    with pytest.raises(
        ValueError, match=r"same number of ranks on every node and .*; got 1 bytes on 6 rank\(s\) on 2 node"
    ):
        choose(1, nodes_of(4, 2), "ll", ll_bytes=64)
    with pytest.raises(ValueError, match=r"ranks that can store to each other's memory inside each node; got 1 bytes"):
        choose(1, nodes_of(4), "ll")
    with pytest.raises(ValueError, match=r"6 rank\(s\) on 2 node\(s\) \(4 \+ 2\)\. Use algorithm='auto'"):
        choose(1, nodes_of(4, 2), "2d")


def test_it_looks_at_nothing_that_ranks_may_see_differently() -> None:
    tree = [node for module in (policy, plans) for node in ast.walk(ast.parse(inspect.getsource(module)))]
    imported = {node.module for node in tree if isinstance(node, ast.ImportFrom)}
    assert imported == {
        *("__future__", "dataclasses", "typing"),
        *("tdcoll.collectives._host", "tdcoll.collectives._host.plan", "tdcoll.limits", "tdcoll.tuning"),
        "tdcoll.runtime.topology",  # for its type
    }
    assert not any(isinstance(node, ast.Import) for node in tree)
    looked_at = {node.attr for node in tree if isinstance(node, ast.Attribute)}
    assert looked_at & {"rank", "node", "place"} == {"node"}, "blocks_of_puts alone counts those of its own node"
