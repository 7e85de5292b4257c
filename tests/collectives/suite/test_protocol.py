# SPDX-License-Identifier: Apache-2.0
"""All dense collectives under adverse schedules and deliveries: every algorithm gives the bits of
the reference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from exploring import explore
from tiers import parameters, seeds

import tdcoll
from tdcoll.base.limits import COLLECTIVES
from tdcoll.primitives.words import RANKS_OF_ONE_WAIT
from tdcoll.simulator.memory import MemoryView
from tdcoll.testing import World

from .algorithm_cases import (
    HEAP,
    AlgorithmCase,
    Dense,
    Grid,
    Nodes,
    cases_of,
    job,
    several,
    topology_of,
)
from .calls import Calls
from .kinds import (
    CALLER_BUFFER,
    IN_PLACE,
    OTHER,
    OUT_OF_PLACE,
    SYMMETRIC_IN_PLACE,
    in_turn,
    kinds_of,
    make_call,
    place,
    supported,
)
from .parameter_sets import ALL, EVERYWHERE, REDUCING, USUAL, each_case, each_dense


def test_the_suite_knows_all_collectives_and_algorithms() -> None:
    assert [dense.spec.name for dense in ALL] == list(COLLECTIVES)
    for dense in ALL:
        assert set(dense.nodes) == set(dense.spec.names)
        assert dense.mutants
        assert len({mutant.name for mutant in dense.mutants}) == len(dense.mutants)
        for case in cases_of(dense, every=True):
            assert OUT_OF_PLACE in case.kinds(), case


@seeds(1, 8)
@each_case(EVERYWHERE)
def test_clean_over_seeds(case: AlgorithmCase, seeds: Sequence[int]) -> None:
    kinds = case.kinds()
    usual = case.nodes == case.dense.nodes[case.algorithm][0]
    calls = case.calls((*kinds, OTHER, kinds[0]), counts=case.counts)
    explore(calls, **job(case.nodes, seeds=seeds if usual else seeds[:1]))


GRIDS = [parameters(grid, id=f"{dense} {i}") for dense in ALL for i, grid in enumerate(dense.grids)]
assert all(dense.grids for dense in ALL)


@seeds(1, 3)
@pytest.mark.parametrize("grid", GRIDS)
def test_further_grids_are_clean_over_seeds(grid: Grid, seeds: Sequence[int]) -> None:
    """In the first tier with one seed each, in the second with several times as many as a grid
    names."""
    if len(seeds) > 1:
        seeds = range(len(seeds) * grid.world["seeds"])
    explore(grid.calls, **{**grid.world, "seeds": seeds})


@pytest.mark.parametrize("nodes", [(1,), (4,), (2, 2), (2, 1)], ids=str)
@each_dense
def test_auto(dense: Dense, nodes: Nodes) -> None:
    kinds = (*kinds_of(dense.spec), OTHER)
    explore(Calls(dense.spec, ("auto",), kinds, (dense.counts, 0)), **job(nodes, seeds=2))


# ---------------------------------------------------------------------- ranks and nodes


def sets_of_world_sizes() -> list[Any]:
    """Cases on 1 to 8 ranks, on several nodes where the algorithm supports them."""
    cases = [case for case in USUAL if not case.looped]
    sets = []
    for case in cases:
        for n_pes in range(1, 9):
            layouts = [(n_pes,)]
            if n_pes > 3:
                layouts.append((n_pes - n_pes // 3, n_pes // 3))
            if n_pes > 3 and n_pes % 2 == 0:
                layouts.append((n_pes // 2, n_pes // 2))
            fitting = case.on(*layouts)
            if fitting:
                slow = n_pes not in (1, 2, 5)
                sets.append(parameters(fitting[-1], slow=slow, id=f"{case} of {n_pes}"))
    # Algorithms that need several equal nodes, of more than one rank, are on 4, 6 and 8 ranks.
    need_nodes = [case for case in cases if not case.on((2,))]
    assert len(sets) == 8 * (len(cases) - len(need_nodes)) + 3 * len(need_nodes)
    return sets


@pytest.mark.parametrize("case", sets_of_world_sizes())
def test_every_world_size(case: AlgorithmCase) -> None:
    """Of 13 elements for five ranks and of 26 for eight, a part is empty."""
    wanted = (OUT_OF_PLACE, IN_PLACE, SYMMETRIC_IN_PLACE, CALLER_BUFFER)
    kinds = supported(wanted, case.kinds())
    calls = case.calls(in_turn(kinds, 3 if sum(case.nodes) < 6 else 2), counts=(13, 26))
    explore(calls, **job(case.nodes, seeds=1))


GROUPS = [([0, 2], (3, 3)), ([5, 0, 3], (3, 3)), ([4, 3, 0, 1], (3, 3)), ([5, 0, 3], (6,))]
"""Ranks, and the nodes of the job. In the third the group's nodes are not in the order of the
job's."""


@pytest.mark.parametrize(("group", "nodes"), GROUPS, ids=str)
@each_dense
def test_subgroups(dense: Dense, group: list[int], nodes: Nodes) -> None:
    topology = topology_of(nodes, group)
    tried = 0
    for case in cases_of(dense):
        kinds = case.kinds(topology)
        if kinds and not case.looped:
            algorithms = (case.algorithm,)
            calls = Calls(dense.spec, algorithms, kinds[:3], group=group, **case.options)
            explore(calls, **job(nodes, seeds=1))
            tried += 1
    assert tried


@pytest.mark.parametrize("nodes", [(4,), (2, 2), (3, 1)], ids=str)
@each_dense
def test_ranks_of_a_node_that_cannot_store_to_each_other(
    dense: Dense, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def peer_base(self: MemoryView, pe: int) -> int:
        return self.base if pe == self.pe else 0

    monkeypatch.setattr(MemoryView, "peer_base", peer_base)
    facts = AlgorithmCase(dense, "", nodes).facts(1, stores=False, ll_bytes=-1, lamport_bytes=0)
    served = [how.name for how in dense.spec.algorithms if how.supports(facts) is None]
    kinds = in_turn(supported((OUT_OF_PLACE, IN_PLACE), kinds_of(dense.spec)), 3)
    assert served
    for algorithm in (*served, "auto"):
        explore(Calls(dense.spec, (algorithm,), kinds, (dense.counts,)), **job(nodes, seeds=1))


@each_dense
def test_algorithms_that_need_equal_nodes_are_refused_on_every_rank(dense: Dense) -> None:
    cases = [AlgorithmCase(dense, name, (2, 1)) for name in dense.spec.names]
    refused = [case.algorithm for case in cases if not case.kinds()]
    assert refused
    for name in refused:
        message = rf"algorithm='{name}' needs .*3 rank\(s\) on 2 node\(s\) \(2 \+ 1\)"
        calls = Calls(dense.spec, (name,), (OUT_OF_PLACE,), pieces=0)

        def host(pe: int, calls: Calls = calls, message: str = message) -> None:
            with pytest.raises(ValueError, match=message):
                calls.host(pe)

        World(3, ranks_per_node=[2, 1], heap_bytes=HEAP).run(host)


def waits_for_words_of_all(case: AlgorithmCase) -> bool:
    """Whether one wait may be for words of all ranks."""
    return len(case.dense.spec.algorithm(case.algorithm).words) == 2


BY_WORDS = [case for case in REDUCING if waits_for_words_of_all(case) and not case.looped]
REDUCE = [dense for dense in ALL if dense.spec.reduces]


@each_case(BY_WORDS, dense=REDUCE)
def test_more_ranks_than_one_wait_takes(case: AlgorithmCase) -> None:
    calls = case.calls((OUT_OF_PLACE,), counts=(13,))
    explore(calls, **job((RANKS_OF_ONE_WAIT.value + 1,), seeds=1))


# ---------------------------------------------------------------------- schedules, and long jobs


@each_case(EVERYWHERE, looped_later=True)
def test_one_resident_block_is_enough(case: AlgorithmCase) -> None:
    """For a call of each kind, which has several thread blocks, and for one of no bytes."""
    kinds = case.kinds()
    usual = case.counts[0]
    calls = case.calls((*kinds, OUT_OF_PLACE), counts=(*len(kinds) * (usual,), 0))
    explore(calls, **job(case.nodes, seeds=1, resident=1))


MIXED = (
    OUT_OF_PLACE, OUT_OF_PLACE, IN_PLACE, OTHER, OUT_OF_PLACE, IN_PLACE, OUT_OF_PLACE, OUT_OF_PLACE,
)  # fmt: skip


@pytest.mark.parametrize("nodes", [(3,), (2, 2)], ids=str)
@each_dense
def test_many_calls_with_stragglers(dense: Dense, nodes: Nodes) -> None:
    """By all algorithms in turn."""
    kinds = in_turn(supported(MIXED, (*kinds_of(dense.spec), OTHER)), 18)
    calls = Calls(dense.spec, several(dense, nodes), kinds, (12, 0, 12, 5))
    explore(calls, **job(nodes, seeds=2, stragglers=True))


@each_case(USUAL, looped_later=True)
def test_calls_whose_number_needs_more_than_32_bits(case: AlgorithmCase) -> None:
    calls = case.calls(in_turn(case.kinds(), 4), first=(1 << 32) - 1)
    explore(calls, **job(case.nodes, seeds=2))


@each_case(EVERYWHERE, looped_later=True)
def test_a_killed_peer_is_named(case: AlgorithmCase) -> None:
    """By all others, or by those that wait for it, where data goes by way of others."""
    spec = case.dense.spec
    victim = sum(case.nodes) - 1
    errors: dict[int, tdcoll.CollectiveTimeout] = {}
    calls = case.calls((OUT_OF_PLACE,))

    def host(pe: int) -> None:
        with calls.context() as ctx:
            placed = place(spec, OUT_OF_PLACE, 16, 0, ctx, calls.tensor_dtype, None)

            def call() -> None:
                make_call(spec, OUT_OF_PLACE, placed.tensor, placed.out, ctx, case.algorithm)

            call()
            if pe == victim:
                world.kill(pe)
            call()
            with pytest.raises(tdcoll.CollectiveTimeout) as raised:
                ctx.check()
            errors[pe] = raised.value
            assert repr(ctx).endswith("failed>")
            with pytest.raises(tdcoll.CollectiveTimeout, match=re.escape(str(raised.value))):
                call()
            used = tdcoll.heap_info().used
            ctx.close()
            assert tdcoll.heap_info().used == used, "a message may still come to this memory"
            with pytest.raises(tdcoll.ContextError, match="closed"):
                call()

    world = World(victim + 1, ranks_per_node=case.nodes, heap_bytes=HEAP)
    world.run(host)
    assert sorted(errors) == list(range(victim))
    epoch = 4 if case.algorithm == "ce" else 2  # copies take even epochs only
    for rank, error in errors.items():
        assert (error.rank, error.epoch) == (rank, epoch)
    named = {rank: error.peer for rank, error in errors.items()}
    passes_on = case.dense.relays.get(case.algorithm)
    if passes_on is None or len(case.nodes) < passes_on:
        assert set(named.values()) == {victim}
    else:
        assert victim in named.values()
        assert all(named[rank] != rank for rank in named)
