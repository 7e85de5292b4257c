# SPDX-License-Identifier: Apache-2.0
"""Counters of tiles: the last one of several programs, and programs that wait for others of their GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from kernel_mutants import Change, installed

import tdcoll
from tdcoll.testing import World, explore, first_failure

from . import cases
from .cases import Tiles

HEAP = 1 << 18
MORE = ("tdcoll.primitives.tiles", cases.kernels().__name__)
WRONG = r"AssertionError: rank \d+, call \d+: \d+ wrong numbers"
SUMS = Tiles([(3, 2, 4), (5, 1, 4), (2, 4, 3), (3, 2, 4), (5, 2, 1)])


def test_sums() -> None:
    for n_pes, seeds in ((1, 1), (2, 4), (3, 1)):
        explore(SUMS, n_pes=n_pes, seeds=seeds, heap_bytes=HEAP)
    explore(SUMS, n_pes=2, seeds=1, heap_bytes=HEAP, resident=1)


def test_a_context_of_thousands_of_tiles() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=16, tiles=4000) as ctx:
            tiles = ctx.device_tiles
            assert tiles is not None
            assert (ctx.tiles, tiles.counts.shape, tiles.ready.shape) == (4000, (4000,), (4000,))
        with tdcoll.CollectiveContext(max_bytes_per_rank=16) as ctx:
            assert (ctx.tiles, ctx.device_tiles) == (0, None)
        with pytest.raises(ValueError, match="tiles must be at least 0, got -1"):
            tdcoll.CollectiveContext(max_bytes_per_rank=16, tiles=-1)
        with pytest.raises(tdcoll.RankMismatchError, match=r"differ in tiles \(rank 0: 1, rank 1: 2\)$"):
            tdcoll.CollectiveContext(max_bytes_per_rank=16, tiles=pe + 1)

    World(2, heap_bytes=1 << 20).run(host)


def look_back(world: World) -> None:
    """A tile that a later call has published is ready."""

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=16, tiles=1) as ctx:
            out = torch.zeros(1, dtype=torch.int32)
            for _ in range(3):
                cases.kernels().look_back[(2,)](out.data_ptr(), ctx.device_group, ctx.device_tiles)
                assert int(out) == 1

    world.run(host)


def test_a_tile_of_a_later_call_is_ready() -> None:
    explore(look_back, n_pes=1, seeds=10, heap_bytes=HEAP)


def test_a_tile_that_nobody_publishes_is_named() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=16, tiles=4) as ctx:
            ctx.control.fill_(5 << 20)
            cases.kernels().wait_for_nothing[(1,)](ctx.device_group, ctx.device_tiles)
            with pytest.raises(tdcoll.CollectiveTimeout) as raised:
                ctx.check()
            error = raised.value
            assert (error.rank, error.peer, error.signal, error.epoch, error.seen) == (pe, pe, 3, 6, 0)
            ctx.close()

    World(2, heap_bytes=HEAP, on_timeout="expire").run(host)


MUTANTS = {
    "the count is not reset": (
        Change("tiles.arrive", "tl.store(tiles.counts + tile, 0)", "pass"),
        r"[Dd]eadlock[\s\S]*waits for pe\d+\.tiles\[",
        SUMS,
    ),
    "the first one takes itself for the last": (
        Change("tiles.arrive", "before == arrivals - 1", "before == 0"),
        WRONG,
        SUMS,
    ),
    "what contributors have stored is not released": (
        Change("tiles.arrive", '"acq_rel"', '"relaxed"'),
        WRONG + " of rank",
        SUMS,
    ),
    "a wait for this very epoch": (
        Change("tiles.wait_tile", "tdl.CMP_GE", "tdl.CMP_EQ"),
        r"[Dd]eadlock[\s\S]*waits for pe0\.tiles\[0\] == \d",
        look_back,
    ),
    "a tile is ready once it was": (Change("tiles.wait_tile", "epoch", "1"), WRONG, SUMS),
    "nobody waits for a tile": (Change("tiles.wait_tile", "epoch", "0"), WRONG, SUMS),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, tmp_path: Path) -> None:
    change, expect, case = MUTANTS[name]
    with installed([change], tmp_path, MORE):
        failure = first_failure(case, n_pes=2, seeds=40, heap_bytes=HEAP)
    assert failure is not None, f"nothing noticed: {name}"
    assert re.search(expect, failure.report), f"{name} fails, but not as it should: {failure.report}"
