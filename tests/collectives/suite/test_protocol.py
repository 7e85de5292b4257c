# SPDX-License-Identifier: Apache-2.0
"""All dense collectives under adverse schedules and deliveries: every algorithm gives the bits of the reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from tiers import second, seeds

import tdcoll
from tdcoll.base.limits import COLLECTIVES
from tdcoll.primitives.reduce import OPERATIONS_OF
from tdcoll.primitives.words import RANKS_OF_ONE_WAIT
from tdcoll.simulator.memory import MemoryView
from tdcoll.testing import World, explore

from .calls import Calls, had, kinds_of, make, place
from .ways import Dense, Nodes, Way, all_dense, job, several, topology_of, ways_of

ALL = all_dense()
WAYS = [way for dense in ALL for way in ways_of(dense)]
EVERYWHERE = [way for dense in ALL for way in ways_of(dense, every=True)]
REDUCING = [way for way in WAYS if way.dense.spec.reduces]
OTHERS = (torch.bool, torch.int16, torch.int64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn)
"""Of collectives that move bytes."""


def over(ways: Iterable[Way], *, later: Callable[[Way], bool] = lambda way: False) -> pytest.MarkDecorator:
    """Parametrize ``way``. Each collective is there; those that are ``later`` in the second tier."""
    ways = list(ways)
    return pytest.mark.parametrize(
        "way", [second(way, id=str(way)) if later(way) else pytest.param(way, id=str(way)) for way in ways]
    )


def of_dtypes(ways: Iterable[Way], dtypes: Iterable[torch.dtype]) -> pytest.MarkDecorator:
    """Parametrize ``way`` and ``dtype``. In the first tier each way has every third dtype."""
    made = [
        (second if looped(way) or (i + j) % 3 else pytest.param)(way, dtype, id=f"{way} {dtype}")
        for i, way in enumerate(ways)
        for j, dtype in enumerate(dtypes)
    ]
    return pytest.mark.parametrize(("way", "dtype"), made)


def of_each(ways: Iterable[Way], dense: Sequence[Dense] = tuple(ALL)) -> list[Way]:
    """These ways, among which is one of each collective."""
    ways = list(ways)
    assert {str(way.dense) for way in ways} == {str(each) for each in dense}
    return ways


def looped(way: Way) -> bool:
    return "max_blocks" in way.more


def some(way: Way, n: int = 3) -> Sequence[int]:
    """Elements of a segment in turn: as usual, none, and a third of them."""
    counts = way.more.get("counts", (way.dense.counts,))
    return (*counts, 0, max(1, counts[0] // 3))[:n]


def test_the_suite_knows_all_collectives_and_algorithms() -> None:
    assert [dense.spec.name for dense in ALL] == list(COLLECTIVES)
    for dense in ALL:
        assert set(dense.nodes) == set(dense.spec.names)
        assert dense.mutants
        assert len({mutant.name for mutant in dense.mutants}) == len(dense.mutants)
        for way in ways_of(dense, every=True):
            assert way.served_kinds(), way


@seeds(1, 8)
@over(of_each(EVERYWHERE))
def test_clean_over_seeds(way: Way, seeds: Sequence[int]) -> None:
    kinds = way.served_kinds()
    usual = way.nodes == way.dense.nodes[way.algorithm][0]
    explore(way.calls(f"{kinds}x{kinds[0]}", counts=some(way)), **job(way.nodes, seeds=seeds if usual else seeds[:1]))


@seeds(1, 3)
@pytest.mark.parametrize(("dense", "grid"), [(dense, i) for dense in ALL for i in range(len(dense.grids))], ids=str)
def test_further_grids_are_clean_over_seeds(dense: Dense, grid: int, seeds: Sequence[int]) -> None:
    case, where = dense.grids[grid]
    explore(case, **{**where, "seeds": range(len(seeds) * where["seeds"]) if len(seeds) > 1 else seeds})


@pytest.mark.parametrize("nodes", [(1,), (4,), (2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("dense", ALL, ids=str)
def test_auto(dense: Dense, nodes: Nodes) -> None:
    kinds = kinds_of(dense.spec) + "x"
    explore(Calls(dense.spec, "auto", kinds, (dense.counts, 0)), **job(nodes, seeds=2))


@of_dtypes(WAYS, list(OPERATIONS_OF))
def test_every_dtype_and_operation(way: Way, dtype: torch.dtype) -> None:
    """With tensors that are not aligned to 16 bytes."""
    ops = OPERATIONS_OF[dtype] if way.dense.spec.reduces else ("",)
    both = (way.served_kinds() * 2)[:2]
    case = way.calls(both * len(ops), counts=(13,), dtype=dtype, offset=1, ops=[op for op in ops for _ in both])
    if way.dense.spec.reduces and not way.handles(way.facts(13, itemsize=dtype.itemsize, symmetric=both[0] in "st")):
        with pytest.raises(AssertionError, match=f"algorithm='{way.algorithm}' needs elements of at most 4 bytes"):
            explore(case, **job(way.nodes, seeds=1))
    elif way.more.get("lamport_bytes") != 0 or dtype.is_floating_point:  # others have flags in any case
        explore(case, **job(way.nodes, seeds=1))


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("dense", [dense for dense in ALL if not dense.spec.reduces], ids=str)
def test_bytes_are_moved_whatever_their_dtype(dense: Dense, dtype: torch.dtype) -> None:
    explore(Calls(dense.spec, "auto", kinds_of(dense.spec), (7,), dtype, offset=1), **job((3,), seeds=1))


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@of_dtypes(REDUCING, [dtype for dtype in OPERATIONS_OF if dtype.is_floating_point])
def test_special_numbers(way: Way, dtype: torch.dtype) -> None:
    """No result is -0.0, and a NaN is never lost."""
    way = (way.on((2,)) or [way])[0]
    if way.handles(way.facts(200, itemsize=dtype.itemsize, symmetric=True)):
        ops = OPERATIONS_OF[dtype]
        explore(
            way.calls("o" * len(ops), counts=(200,), dtype=dtype, ops=ops, specials=True), **job(way.nodes, seeds=1)
        )


@over(of_each(way for way in WAYS if not looped(way)))
@pytest.mark.parametrize("n_pes", [1, 2, 5, *map(second, (3, 4, 6, 7, 8))])
def test_every_world_size(way: Way, n_pes: int) -> None:
    """On several nodes where that can be had. Of 13 elements for five ranks and of 26 for eight, a part is empty."""
    layouts = [(n_pes,), *([(n_pes - n_pes // 3, n_pes // 3), (n_pes // 2, n_pes // 2)] if n_pes > 3 else [])]
    fitting = [nodes for nodes in layouts if sum(nodes) == n_pes]
    for there in way.on(*fitting)[-1:]:
        explore(there.calls("oitp"[: 2 + (n_pes < 6)], counts=(13, 26)), **job(there.nodes, seeds=1))


SIZES = (0, 1, 3, 7, 8, 33, 64)
KINDS: list[tuple[torch.dtype, int, str, Sequence[int]]] = [
    (torch.float32, 1, "oio", (0, 7, 33)),
    (torch.bfloat16, 0, "ioioioi", SIZES),
    (torch.bfloat16, 3, "o", (33,)),
    (torch.float8_e5m2, 0, "o", (33,)),
    (torch.float8_e4m3fn, 7, "oioi", (1, 3, 33, 64)),
    (torch.int8, 1, "o", (33,)),
]


@over(of_each(WAYS), later=looped)
def test_every_size(way: Way) -> None:
    """Of 4 bytes, of 2 and of 1; aligned and not; where 5 words or pieces of 16 bytes are, a rank of three has none."""
    kinds = (
        KINDS
        if way.dense.spec.reduces
        else [(torch.uint8, 1, "opopopopo", (0, 1, 3, 16, 127, 128, 129)), (torch.uint8, 0, "op", (129, 0))]
    )
    for dtype, offset, calls, counts in kinds:
        ops = OPERATIONS_OF[dtype][:1]
        explore(way.calls(calls, dtype=dtype, offset=offset, counts=counts, ops=ops), **job(way.nodes, seeds=1))


GROUPS = [([0, 2], (3, 3)), ([5, 0, 3], (3, 3)), ([4, 3, 0, 1], (3, 3)), ([5, 0, 3], (6,))]
"""Ranks, and the nodes of the job. In the third the group's nodes are not in the order of the job's."""


@pytest.mark.parametrize(("group", "nodes"), GROUPS, ids=str)
@pytest.mark.parametrize("dense", ALL, ids=str)
def test_subgroups(dense: Dense, group: list[int], nodes: Nodes) -> None:
    topology, tried = topology_of(nodes, group), 0
    for way in ways_of(dense):
        if not looped(way) and (kinds := way.served_kinds(topology)):
            case = Calls(dense.spec, way.algorithm, kinds[:3], (dense.counts,), group=group, **way.more)
            explore(case, **job(nodes, seeds=1))
            tried += 1
    assert tried


@pytest.mark.parametrize("nodes", [(4,), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("dense", ALL, ids=str)
def test_ranks_of_a_node_that_cannot_store_to_each_other(
    dense: Dense, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryView, "peer_base", lambda self, pe: self.base if pe == self.pe else 0)
    facts = Way(dense, "", nodes).facts(1, stores=False, ll_bytes=-1, lamport_bytes=0)
    served = [each.name for each in dense.spec.algorithms if each.supports(facts) is None]
    for algorithm in (*served, "auto"):
        explore(Calls(dense.spec, algorithm, had(dense.spec, "oio"), (dense.counts,)), **job(nodes, seeds=1))
    assert served


@over(of_each(EVERYWHERE), later=looped)
def test_one_resident_block_is_enough(way: Way) -> None:
    explore(way.calls(counts=some(way)), **job(way.nodes, seeds=1, resident=1))


@pytest.mark.parametrize(
    ("dense", "turns", "nodes"), [(dense, *turns) for dense in ALL for turns in several(dense)], ids=str
)
def test_many_calls_with_stragglers(dense: Dense, turns: str, nodes: Nodes) -> None:
    case = Calls(dense.spec, turns, had(dense.spec, "ooixoioo" * 2), (12, 0, 12, 5))
    explore(case, **job(nodes, seeds=2, stragglers=True))


@over(way for way in REDUCING if len(way.dense.spec.algorithm(way.algorithm).words) == 2 and not looped(way))
def test_more_ranks_than_one_wait_takes(way: Way) -> None:
    explore(way.calls("o", counts=(13,)), **job((RANKS_OF_ONE_WAIT.value + 1,), seeds=1))


def on_a_small_context(way: Way, dtype: torch.dtype | None = None) -> tuple[Calls, bool]:
    """Calls on a context that takes 80 bytes of a segment at a time, with room for two Lamport words; whether the first
    of them, of 96 bytes or of as many for each rank, is several epochs."""
    spec, words = way.dense.spec, 32 if way.dense.spec.reduces and "lamport_bytes" not in way.more else 0
    size = 4 if not spec.reduces else 1 if spec.scatters else 3
    case = way.calls(
        f"{way.served_kinds()}xo", counts=tuple(size * n for n in (24, 21, 6)), dtype=dtype,
        offset=dtype is torch.bfloat16, most=80, pieces=0, lamport_bytes=words,
    )  # fmt: skip
    item = case.kind.itemsize if spec.reduces else 1
    announced = words * (case.kind.is_floating_point and item <= 4)
    facts = way.facts(case.counts[0] * item, capacity=80, ll_bytes=80, lamport_bytes=announced, itemsize=item)
    return case, way.handles(facts) and spec.algorithm(way.algorithm).epoch(facts) < facts.nbytes


@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        (None, {}),
        second(None, {"resident": 1}),
        second(None, {"stragglers": True}),
        *(second(dtype, {}) for dtype in (torch.int64, torch.bfloat16)),
    ],
    ids=str,
)
@over(of_each(way for way in WAYS if on_a_small_context(way)[1]))
def test_larger_calls_are_several_epochs(way: Way, dtype: torch.dtype | None, more: dict[str, Any]) -> None:
    case, several = on_a_small_context(way, dtype)
    if several:
        explore(case, **job(way.nodes, seeds=1, **more))


@over(of_each(WAYS), later=looped)
def test_calls_whose_number_needs_more_than_32_bits(way: Way) -> None:
    explore(way.calls((way.served_kinds() * 4)[:4], first=(1 << 32) - 1), **job(way.nodes, seeds=2))


@pytest.mark.parametrize("dense", ALL, ids=str)
def test_algorithms_that_uneven_nodes_have_not_are_refused_on_every_rank(dense: Dense) -> None:
    tried = 0
    for name in dense.spec.names:
        if not Way(dense, name, (2, 1)).served_kinds():
            tried += 1

            def host(pe: int, name: str = name) -> None:
                with pytest.raises(
                    ValueError, match=rf"algorithm='{name}' needs .*3 rank\(s\) on 2 node\(s\) \(2 \+ 1\)"
                ):
                    Calls(dense.spec, name, pieces=0).host(pe)

            World(3, ranks_per_node=[2, 1], heap_bytes=1 << 18).run(host)
    assert tried


@over(of_each(EVERYWHERE), later=looped)
def test_a_killed_peer_is_named(way: Way) -> None:
    """By all others, or by those that wait for it, where data goes by way of others."""
    spec, told, victim = way.dense.spec, {}, sum(way.nodes) - 1
    case = way.calls("o" if "o" in way.served_kinds() else "s")

    def host(pe: int) -> None:
        with case.context() as ctx:
            shared = tdcoll.empty((4096,), case.kind)
            for call in range(2):
                if call and pe == victim:
                    world.kill(pe)
                tensor, out, _ = place(spec, case.calls, 16, 0, ctx, case.kind, shared)
                make(spec, case.calls, tensor, out, ctx, way.algorithm)
            with pytest.raises(tdcoll.CollectiveTimeout) as raised:
                ctx.check()
            told[pe] = raised.value
            assert repr(ctx).endswith("failed>")
            with pytest.raises(tdcoll.CollectiveTimeout, match=re.escape(str(raised.value))):
                make(spec, case.calls, tensor, out, ctx, way.algorithm)
            used = tdcoll.heap_info().used
            ctx.close()
            assert tdcoll.heap_info().used == used, "a message may still come: the memory stays taken"
            with pytest.raises(tdcoll.ContextError, match="closed"):
                make(spec, case.calls, tensor, out, ctx, way.algorithm)

    world = World(victim + 1, ranks_per_node=way.nodes, heap_bytes=1 << 18)
    world.run(host)
    assert sorted(told) == list(range(victim))
    epoch = 4 if way.algorithm == "ce" else 2  # which takes even ones only
    assert {(error.rank, error.epoch) for error in told.values()} == {(rank, epoch) for rank in range(victim)}
    named = {rank: error.peer for rank, error in told.items()}
    if len(way.nodes) < way.dense.relays.get(way.algorithm, 1 << 30):
        assert set(named.values()) == {victim}
    else:
        assert victim in named.values()
        assert all(named[rank] != rank for rank in named)
