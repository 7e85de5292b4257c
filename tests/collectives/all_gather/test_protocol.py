# SPDX-License-Identifier: Apache-2.0
"""The kernels under adverse schedules and deliveries, and broken kernels, each of which must be caught."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton.language as tl
from kernel_mutants import installed
from tiers import second, seeds

import tdcoll
from tdcoll.collectives._host.plan import Facts, Plan
from tdcoll.collectives.all_gather import kernels_puts, policy
from tdcoll.runtime.simulator.memory import MemoryView
from tdcoll.testing import World, explore, first_failure

from .cases import Gathers, nodes_of
from .mutants import MUTANTS, Mutant

pytestmark = pytest.mark.usefixtures("small_chunks")

HEAP = 1 << 18


@pytest.mark.parametrize(
    ("algorithm", "nodes", "per_node", "calls", "nbytes"),
    [
        ("ll", 1, 4, "oiozi", 201),
        ("ll", 2, 2, "oioiz", 201),
        second("ll", 3, 2, "oio", 64),
        ("auto", 2, 2, "oio", 100),
        ("direct", 1, 4, "oioiz", 200),
        ("ring", 1, 4, "oioiz", 200),
        ("1d", 1, 4, "oio", 200),
        ("1d", 2, 2, "oio", 200),
        ("2d", 2, 2, "oio", 200),
        second("2d", 2, 4, "oio", 48),
        ("2d", 3, 2, "oio", 100),
        second("2d", 4, 2, "oio", 48),
    ],
)
@seeds(4, 16)
def test_clean_over_seeds(
    algorithm: str, nodes: int, per_node: int, calls: str, nbytes: int, seeds: Sequence[int]
) -> None:
    case = Gathers(algorithm, calls, nbytes)
    explore(case, n_pes=nodes * per_node, seeds=seeds, ranks_per_node=per_node, heap_bytes=HEAP)


@pytest.mark.parametrize("n_pes", [1, 2, 3, second(4), 5, second(6), second(7), 8])
@pytest.mark.parametrize("algorithm", ["ll", "direct", "ring", "1d", "2d"])
def test_every_world_size(algorithm: str, n_pes: int) -> None:
    if algorithm != "ring" or n_pes <= 5:
        explore(Gathers(algorithm, "oi"), n_pes=n_pes, seeds=1, heap_bytes=HEAP)


@pytest.mark.parametrize("nbytes", [0, 1, 3, 16, 127, 128, 129, second(1000)])
@pytest.mark.parametrize("algorithm", ["ll", "direct", "ring", "1d", "2d"])
def test_every_size(algorithm: str, nbytes: int) -> None:
    for per_node in {"ll": (None, 2), "direct": (None,), "ring": (None,)}.get(algorithm, (2,)):
        explore(Gathers(algorithm, "oi", nbytes), n_pes=4, seeds=1, ranks_per_node=per_node, heap_bytes=HEAP)


def test_two_dimensions_where_ranks_of_a_node_cannot_store_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryView, "peer_base", lambda self, pe: self.base if pe == self.pe else 0)
    explore(Gathers("2d", "oio"), n_pes=4, seeds=4, ranks_per_node=2, heap_bytes=HEAP)


@pytest.mark.parametrize("nbytes", [201, second(599)])
def test_ll_over_nodes_in_many_pieces(nbytes: int) -> None:
    """4 words for each program, three programs' words for each put."""
    plan = Plan("ll", -(-nbytes // 48), 48, 1)
    assert policy.put_chunks(Facts(nbytes, nodes_of(2, 2)), plan).chunk == 144
    explore(Gathers(plan, "ooo", nbytes), n_pes=4, seeds=2, ranks_per_node=2, heap_bytes=HEAP)


@pytest.mark.parametrize("group", [[0, 2], [1, 3, 5], [5, 0, 3]])
def test_subgroups(group: list[int]) -> None:
    explore(Gathers("1d", group=group), n_pes=6, seeds=2, ranks_per_node=2, heap_bytes=HEAP)


@seeds(2, 8)
@pytest.mark.parametrize(("algorithm", "calls"), [("2d", "oio"), ("ll", "ooo")])
def test_subgroup_over_nodes(algorithm: str, calls: str, seeds: Sequence[int]) -> None:
    """Two of the three ranks of each node, listed so that the group's nodes are not the job's."""
    case = Gathers(algorithm, calls, group=[4, 3, 0, 1])
    explore(case, n_pes=6, seeds=seeds, ranks_per_node=3, heap_bytes=HEAP)


@seeds(2, 6)
@pytest.mark.parametrize(
    ("algorithm", "per_node", "calls"),
    [
        ("ll", None, "oioo"),
        ("ll", 2, "oooo"),
        ("direct", None, "oioo"),
        ("ring", None, "oioo"),
        ("1d", None, "oioo"),
        ("1d", 2, "iiii"),
        ("2d", 2, "oioo"),
        ("2d", 2, "iiii"),
    ],
)
def test_one_resident_block_is_enough(algorithm: str, per_node: int | None, calls: str, seeds: Sequence[int]) -> None:
    explore(Gathers(algorithm, calls), n_pes=4, seeds=seeds, ranks_per_node=per_node, heap_bytes=HEAP, resident=1)


@pytest.mark.parametrize("algorithm", ["1d", "direct", "ll"])
def test_many_calls_with_stragglers(algorithm: str) -> None:
    explore(Gathers(algorithm, "ooiioi" * 3), n_pes=3, seeds=2, heap_bytes=HEAP, stragglers=True)


@pytest.mark.parametrize("n_pes", [2, 3, second(4)])
def test_the_ring_among_other_calls(n_pes: int) -> None:
    """On one context: who hears from whom differs from call to call, in place and not."""
    turns = ("ring", "direct", "1d", "ring", "ring")
    explore(Gathers(turns, "oioiiioooi"), n_pes=n_pes, seeds=2, heap_bytes=HEAP, stragglers=True)
    explore(Gathers(("ring", "ll"), "ozooioo"), n_pes=n_pes, seeds=2, heap_bytes=HEAP, stragglers=True)


def test_ll_in_place_among_other_calls() -> None:
    """LL waits for nobody to enter the call; the others in place do."""
    turns = ("ll", "direct", "1d", "ll", "ring")
    explore(Gathers(turns, "iioiziiooi"), n_pes=3, seeds=2, heap_bytes=HEAP, stragglers=True)
    turns = ("ll", "2d", "1d", "ll")
    explore(Gathers(turns, "iioiziiooi"), n_pes=4, seeds=2, ranks_per_node=2, heap_bytes=HEAP, stragglers=True)


@pytest.mark.parametrize("algorithm", ["2d", "ll"])
def test_uneven_nodes_are_refused_on_every_rank(algorithm: str) -> None:
    def host(pe: int) -> None:
        with pytest.raises(
            ValueError, match=r"same number of ranks on every node.*3 rank\(s\) on 2 node\(s\) \(2 \+ 1\)"
        ):
            Gathers(algorithm).host(pe)

    World(3, ranks_per_node=[2, 1], heap_bytes=HEAP).run(host)


def test_auto_on_uneven_nodes() -> None:
    explore(Gathers("auto"), n_pes=3, seeds=5, ranks_per_node=[2, 1], heap_bytes=HEAP)


class Extents(NamedTuple):
    """What a program needs of a window, and of a group, to know its task."""

    slots: tl.constexpr
    world: tl.constexpr


@tdcoll.jit(do_not_specialize=["channels", "n_senders", "n_pushes"])
def tasks_of_a_grid(out, channels, n_senders, n_pushes, extents):
    _, channel, given = kernels_puts._task(channels, n_senders, n_pushes, extents, extents)
    tl.store(out + 2 * tl.program_id(0), channel)
    tl.store(out + 2 * tl.program_id(0) + 1, given)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("n_senders", "n_pushes"), [(0, 3), (1, 3), (2, 0), (1, 9)])
def test_programs_come_chunk_by_chunk(n_senders: int, n_pushes: int, in_place: bool) -> None:
    """After those that send to other nodes: each chunk is put, forwarded and received before the next."""
    channels, world = 5, 4
    receivers = 1 if in_place else world
    grid = in_place + channels * (n_senders + n_pushes + receivers)
    out = torch.full((grid, 2), -99, dtype=torch.int32)

    def host(pe: int) -> None:
        extents = Extents(tl.constexpr(1 if in_place else 2), tl.constexpr(world))
        tasks_of_a_grid[(grid,)](out, channels, n_senders, n_pushes, extents)

    World(1, heap_bytes=HEAP).run(host)
    told = [tuple(pair) for pair in out[int(in_place) :].tolist()]
    sent = [(channel, given) for given in range(-n_senders, 0) for channel in range(channels)]
    assert told == sent + [(channel, given) for channel in range(channels) for given in range(n_pushes + receivers)]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    case = Gathers(mutant.algorithm, mutant.calls, first_epoch=mutant.first_epoch)
    with installed(mutant.changes, tmp_path):
        failure = first_failure(case, seeds=100, heap_bytes=HEAP, **mutant.job)
    assert failure is not None, f"nothing noticed: {mutant.name}"
    assert re.search(mutant.expect, failure.report), f"{mutant.name} fails, but not as it should: {failure.report}"


SAME_AS_MUTANTS = {f"{m.algorithm} {m.calls} from {m.first_epoch} {m.job}": m for m in MUTANTS}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SAME_AS_MUTANTS.values(), ids=SAME_AS_MUTANTS)
def test_real_kernels_pass_where_mutants_are_caught(mutant: Mutant) -> None:
    case = Gathers(mutant.algorithm, mutant.calls, first_epoch=mutant.first_epoch)
    explore(case, seeds=6, heap_bytes=HEAP, **mutant.job)


@pytest.mark.parametrize("algorithm", ["ll", "1d", "ring"])
def test_a_killed_peer_is_named_by_all_others(algorithm: str) -> None:
    """On a ring by its successor: the others name the rank before them, which waits, too."""
    victim, told = 2, {}

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
            data = tdcoll.empty(64).view(-1)[:16]
            tdcoll.all_gather(data, ctx, algorithm=algorithm)
            if pe == victim:
                world.kill(pe)
            try:
                tdcoll.all_gather(data, ctx, algorithm=algorithm)
                ctx.check()
            except tdcoll.CollectiveTimeout as error:
                told[pe] = error
                with pytest.raises(tdcoll.CollectiveTimeout):
                    tdcoll.all_gather(data, ctx)
                ctx.close()

    world = World(4, heap_bytes=HEAP)
    world.run(host)
    assert sorted(told) == [0, 1, 3]
    for rank, error in told.items():
        peer = (rank - 1) % 4 if algorithm == "ring" else victim
        assert (error.rank, error.peer, error.epoch, error.expected, error.seen) == (rank, peer, 2, 2, 0)
