# SPDX-License-Identifier: Apache-2.0
"""What holds for plans of dense collectives whatever the facts, and how all-reduces are cut into
epochs."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from landings import make_facts
from ranks import on_ranks

import tdcoll
from tdcoll.base.limits import MAX_BLOCKS, MAX_CHUNKS, lamport_bytes
from tdcoll.calls import plan as plans
from tdcoll.calls import spec as specs
from tdcoll.calls import words as word_plans
from tdcoll.calls.collective import spec_of
from tdcoll.calls.plan import CHUNK_ALIGNMENT, MOST_EPOCHS, TARGET_CHUNK_BYTES, Facts, Plan
from tdcoll.calls.spec import Collective
from tdcoll.calls.tuning import Entry, Section
from tdcoll.calls.words import LL_MOST_WORDS, power
from tdcoll.collectives.all_reduce.policy import part_bytes
from tdcoll.runtime.topology import Topology

from .algorithm_cases import Nodes, topology_of
from .data import SPECS, values

K = 1 << 10
M = 1 << 20
G = 1 << 30
REDUCE = spec_of("all_reduce")
USUAL: dict[str, Any] = {
    "stores": True,
    "lamport_bytes": 512 * K,
    "ll_bytes": 340 * K,
    "itemsize": 4,
}


# ---------------------------------------------------------------------- whatever the facts

SIZES = st.one_of(
    st.integers(0, 300), st.integers(0, 3 * MAX_CHUNKS * CHUNK_ALIGNMENT),
    st.integers(0, 2 * MAX_CHUNKS * TARGET_CHUNK_BYTES),
    st.integers(0, 1 << 40),
)  # fmt: skip
NODES = st.lists(st.integers(1, 8), min_size=1, max_size=6).map(tuple)
FACTS = st.fixed_dictionaries(
    {
        "stores": st.booleans(),
        "in_place": st.booleans(),
        "symmetric": st.booleans(),
        "simulated": st.booleans(),
        "puts": st.booleans(),
        "ll_bytes": st.sampled_from([-1, 0, 100, 128 * K, M]),
        "lamport_bytes": st.sampled_from([0, 1, 100, 128 * K, 2 * M]),
        "chunks": st.sampled_from([2, 3, 100, MAX_CHUNKS]),
        "max_blocks": st.sampled_from([200, 1000, MAX_BLOCKS]),
        "itemsize": st.sampled_from([1, 2, 4, 8]),
    }
).map(lambda facts: facts if facts["stores"] else {**facts, "ll_bytes": -1, "lamport_bytes": 0})
SPEC = st.sampled_from(SPECS)


@given(SPEC, SIZES, NODES, FACTS, st.data())
def test_all_ranks_choose_the_same(
    spec: Collective, nbytes: int, nodes: Nodes, facts: Any, data: st.DataObject
) -> None:
    """In any order of ranks, for any PEs, seen from any rank; but for the thread blocks of uneven
    nodes."""
    node_ids = data.draw(
        st.permutations([node for node, size in enumerate(nodes) for _ in range(size)])
    )
    pes = data.draw(st.permutations(range(100, 100 + len(node_ids))))
    algorithm = data.draw(st.sampled_from(("auto", *spec.names)))
    answers = set()
    blocks = set()
    for rank in range(len(node_ids)):
        try:
            plan = spec.choose(
                make_facts(nbytes, Topology.of(rank, pes, node_ids), **facts), algorithm
            )
            answers.add(replace(plan, blocks=0))
            blocks.add(plan.blocks)
        except ValueError as error:
            answers.add(str(error))
    assert len(answers) == 1
    assert len(blocks) <= 1 or len(set(nodes)) > 1


ENTRIES = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"chunks": st.integers(1, MAX_CHUNKS)}),
    st.fixed_dictionaries({"chunk": st.integers(7, 20).map(lambda power: 1 << power)}),
    # as LL cuts
    st.fixed_dictionaries({"chunk": st.integers(7, 12).map(lambda power: 3 << power)}),
)


@given(SPEC, SIZES, NODES, FACTS, st.sampled_from((CHUNK_ALIGNMENT, TARGET_CHUNK_BYTES)), ENTRIES)
def test_plans_cover_the_data_and_can_be_launched(
    spec: Collective, nbytes: int, nodes: Nodes, facts: Any, target: int, entry: dict[str, int]
) -> None:
    """Also with chunks near their alignment, where rounding up leaves whole ones without work, and
    with a table's."""
    known = make_facts(nbytes, topology_of(nodes), **facts)
    kind = ("", spec.name, known.topology.ranks_per_node, len(nodes), known.in_place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "TARGET_CHUNK_BYTES", target)
        for how in spec.algorithms:
            if how.supports(known) is not None:
                with pytest.raises(ValueError, match=f"algorithm='{how.name}' needs"):
                    spec.choose(known, how.name)
                continue
            said = {
                name: min(value, LL_MOST_WORDS * 8) if how.words else value
                for name, value in entry.items()
            }
            table = [Section(*kind, (Entry(None, how.name, **said),))]
            plan = spec.choose(known, how.name, table)
            whole = how.payload(known).nbytes
            assert plan.algorithm == how.name
            assert plan.chunks * plan.chunk >= whole
            assert (plan.chunks - 1) * plan.chunk < max(whole, 1), (
                "the last chunk has nothing to carry"
            )
            assert plan.blocks < known.max_blocks
            assert spec.choose(known, plan) == plan, "somebody may ask for it"
            if how.words:
                width = how.payload(known).width
                assert plan.chunk % width == 0
                assert power(plan.chunk // width) == plan.chunk // width <= LL_MOST_WORDS
                assert plan.chunk >= width * 32 * plan.num_warps or plan.num_warps == 1
            else:
                assert plan.chunk % CHUNK_ALIGNMENT == 0
                assert plan.chunks <= known.chunks
    assert nbytes < 1 << 41


@given(SIZES, NODES, FACTS)
@example(0, (1, 1), {"puts": False, "stores": True, "ll_bytes": 0})
def test_auto_takes_what_can_be_had(nbytes: int, nodes: Nodes, facts: Any) -> None:
    for spec in SPECS:
        known = make_facts(nbytes, topology_of(nodes), **facts)
        supported = [how.name for how in spec.algorithms if how.supports(known) is None]
        if supported:
            assert spec.choose(known).algorithm in supported
        else:
            with pytest.raises(ValueError, match=f"^{spec.name} needs"):
                spec.choose(known)


def test_it_looks_at_nothing_that_ranks_may_see_differently() -> None:
    """But for the number of thread blocks, of which each rank has what its own node needs."""
    modules = [
        plans,
        word_plans,
        specs,
        *(import_module(f"tdcoll.collectives.{spec.name}.policy") for spec in SPECS),
    ]
    allowed = {"__future__", "collections.abc", "dataclasses", "enum", "typing"}
    allowed |= {"tdcoll.base.errors", "tdcoll.base.limits"}
    allowed |= {
        "tdcoll.calls.tuning",
        "tdcoll.calls",
        "tdcoll.calls.plan",
        "tdcoll.calls.words",
        "tdcoll.runtime.topology",
    }
    for module in modules:
        tree = ast.parse(inspect.getsource(module))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert imported <= allowed, module.__name__
        names = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert names <= {"dataclasses"}, module.__name__
        for function in tree.body:
            looked_at = {
                node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)
            }
            own = looked_at & {"rank", "node", "place"}
            assert not own or getattr(function, "name", "").startswith("blocks"), (
                module.__name__,
                own,
            )


# ---------------------------------------------------------------------- all-reduces of several epochs


def epochs(facts: Facts) -> list[int]:
    """Bytes of each epoch of a two-shot."""
    each = REDUCE.algorithm("two_shot").epoch(facts)
    return [min(each, facts.nbytes - begin) for begin in range(0, facts.nbytes, each)]


@pytest.mark.parametrize("algorithm", ["direct", "loop", "ce"])
def test_an_all_gather_that_the_inbox_holds_is_one_epoch(algorithm: str) -> None:
    gather = spec_of("all_gather")
    for nbytes in (1000, 3 * M + 7 * K + 832, 6_000_016):
        facts = make_facts(nbytes, topology_of((4,)), stores=True, capacity=-(-nbytes // 16) * 16)
        assert gather.epochs(facts, algorithm) == [nbytes]


def test_a_plan_covers_a_call_of_one_epoch() -> None:
    gather = spec_of("all_gather")
    facts = make_facts(4096, topology_of((4,)), stores=True, capacity=4096)
    assert gather.decide_call(facts, Plan("direct", 4, 1024, 8))[0].plan.chunks == 4
    for nbytes, plan in ((4096, Plan("direct", 1, 16, 8)), (10_000, Plan("direct", 4, 4096, 8))):
        with pytest.raises(ValueError, match=r"^a Plan must cover \d+ bytes in one epoch; got"):
            gather.decide_call(replace(facts, nbytes=nbytes), plan)


def test_words_are_for_less_than_half_of_what_32_bits_count() -> None:
    huge = {**USUAL, "lamport_bytes": 4 * G, "ll_bytes": 4 * G}
    assert (
        REDUCE.choose(make_facts(G - 1, topology_of((2,)), **huge), "two_shot").algorithm
        == "two_shot"
    )
    for nbytes, several in ((G, [G // 2] * 2), (3 * G, [3 * G // 4] * 4)):
        assert epochs(make_facts(nbytes, topology_of((2,)), **huge)) == several
        for name, facts in (("one_shot", huge), ("two_shot", {**huge, "lamport_bytes": 0})):
            with pytest.raises(ValueError, match=f"algorithm='{name}' needs less than {G} bytes"):
                REDUCE.choose(make_facts(nbytes, topology_of((2,)), **facts), name)


@given(
    nbytes=st.one_of(st.integers(1, 4096), st.integers(1, 64 * M)),
    world=st.integers(1, 16),
    lamport=st.sampled_from([16, 32, 33, 100, 4 * K, 2 * M]),
    flagged=st.sampled_from([-1, 0, 100, 4 * K]),
)
def test_two_shot_is_as_few_equal_epochs_as_can_be(
    nbytes: int, world: int, lamport: int, flagged: int
) -> None:
    facts = make_facts(
        nbytes, topology_of((world,)), flagged, stores=True, lamport_bytes=lamport, itemsize=1
    )
    room = -(-lamport // 16) // 2 * world * 16
    if REDUCE.algorithm("two_shot").supports(facts) is not None:
        assert nbytes > MOST_EPOCHS * room
        return
    first, *others = epochs(facts)
    if not others:  # by either kind of words
        return
    assert len(others) == -(-nbytes // room) - 1 < MOST_EPOCHS
    assert first % 16 == 0
    assert others[:-1] == [first] * (len(others) - 1)
    assert first - 16 * len(others) - 16 < others[-1] <= first <= room
    for each in (first, others[-1]):
        assert epochs(replace(facts, nbytes=each)) == [each]
    assert REDUCE.choose(facts, "two_shot") == REDUCE.choose(
        replace(facts, nbytes=first), "two_shot"
    )


@given(
    nbytes=st.integers(0, 4 * M), world=st.integers(1, 16), lamport=st.sampled_from([0, 1, 100, 128 * K, 2 * M]),
    flagged=st.sampled_from([0, 100, 128 * K]), itemsize=st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_words_fit_the_memory_of_the_context(
    nbytes: int, world: int, lamport: int, flagged: int, itemsize: int
) -> None:
    facts = make_facts(
        nbytes,
        topology_of((world,)),
        ll_bytes=flagged,
        stores=True,
        lamport_bytes=lamport,
        itemsize=itemsize,
    )
    for name, parts, phases in (("one_shot", 1, 1), ("two_shot", world, 2)):
        how = REDUCE.algorithm(name)
        if how.supports(facts) is None:
            epoch = how.epoch(facts)
            width = how.payload(facts).width
            room = -(-lamport // 16) if width == 16 else max(1, -(-flagged // 12))
            assert phases * -(-max(1, -(-epoch // width)) // parts) <= room
            assert epoch == nbytes or name == "two_shot"
    part = part_bytes(nbytes, world)
    assert part % 16 == 0
    assert nbytes <= world * part < nbytes + 16 * world + 16 * (nbytes == 0)


def test_room_for_words_by_default() -> None:
    assert [lamport_bytes(world, 1) * world for world in (1, 2, 4, 8)] == [32 * M] * 4
    assert lamport_bytes(8, 2) == 0


@on_ranks(3)
def test_a_chunk_of_several_tiles_reaches_all_by_loops(pe: int) -> None:
    """A thread block of one warp moves 2 KB at a time; here 3 and a bit, in place as well, aligned
    and not."""
    shared = tdcoll.zeros(3 * 1700)
    with tdcoll.CollectiveContext(max_bytes_per_rank=8 << 10) as ctx:
        for n in (1700, 1699):
            nbytes = 4 * n
            plan = Plan("loop", 1, -(-nbytes // 16) * 16, 1, 1)
            wanted = torch.cat([values(rank, 0, n, torch.float32) for rank in range(3)])
            given = values(pe, 0, n, torch.float32)
            assert torch.equal(tdcoll.all_gather(given, ctx=ctx, algorithm=plan), wanted)
            whole = shared[: 3 * n]
            whole[pe * n : (pe + 1) * n] = given
            assert torch.equal(tdcoll.all_gather_(whole, ctx=ctx, algorithm=plan), wanted)
        ctx.check()
