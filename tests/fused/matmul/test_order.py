# SPDX-License-Identifier: Apache-2.0
"""Which thread block computes which tile, and in which order."""

from __future__ import annotations

import random

import pytest
import torch
import triton.language as tl
from tiers import slow_tier

from tdcoll.fused.matmul.kernels_scatter import _work
from tdcoll.fused.matmul.launches import Cut, tile_of
from tdcoll.fused.matmul.product import place
from tdcoll.language.jit import jit
from tdcoll.testing import World


@jit
def note_work(lag, tiles, world, turns, programs_of, turns_of, counts):
    """Note the program and the turn of every tile, ``[world, tiles]``, and how often it is
    computed."""
    for turn in range(turns):
        any, tile, distance = _work(turn, lag, tiles, world)
        if any:
            at = (distance - 1) * tiles + tile
            tl.store(programs_of + at, tl.program_id(0))
            tl.store(turns_of + at, turn)
            tl.atomic_add(counts + at, 1)


@jit
def note_places(places, row_tiles, column_tiles, tile):
    """Note the place of every tile, ``[tiles, 2]``."""
    row, column = place(tl.program_id(0), row_tiles, column_tiles, tile)
    tl.store(places + 2 * tl.program_id(0), row)
    tl.store(places + 2 * tl.program_id(0) + 1, column)


def cases(count: int) -> list[tuple[int, int, int, int]]:
    """Return ``(tiles, world, programs, lag)``: more and fewer tiles than programs."""
    chosen = random.Random(1)
    made = [
        (1, 1, 1, 1),
        (1, 8, 20, 0),
        (7, 2, 7, 1),
        (16, 8, 13, 2),
        (5, 3, 1, 1),
        (3, 4, 12, 5),
        (9, 4, 20, 1),
    ]
    while len(made) < count:
        made.append(
            (
                chosen.randint(1, 40),
                chosen.randint(1, 8),
                chosen.randint(1, 30),
                chosen.randint(0, 4),
            )
        )
    return made


@pytest.mark.parametrize("count", [20, slow_tier(300)])
def test_every_tile_is_computed_once_and_waits_for_no_later_thread_block(count: int) -> None:
    """Own tile i waits for tile i of every other rank, which the program of that tile sends
    there."""

    def host(pe: int) -> None:
        for tiles, world, programs, lag in cases(count):
            where = f"{tiles} tiles, {world} ranks, {programs} programs, lag {lag}"
            programs_of, turns_of, counts = torch.zeros(3, world, tiles, dtype=torch.int32).unbind()
            late = min(lag, tiles // programs + 1)
            turns = (tiles // programs + 1 + late) * world
            note_work[(programs,)](late, tiles, world, turns, programs_of, turns_of, counts)
            assert (counts == 1).all(), where
            assert (programs_of <= programs_of[-1]).all(), f"{where}: a later thread block"
            same = programs_of == programs_of[-1]
            earlier = turns_of < turns_of[-1]
            assert (earlier | ~same)[:-1].all(), f"{where}: a later turn"
            ahead = (turns_of[-1] - turns_of)[:-1][same[:-1]]
            assert (ahead >= late * world).all(), f"{where}: too early"
            work = torch.bincount(programs_of.view(-1), minlength=programs)
            rest = tiles % programs
            groups = min(world, programs // rest) if rest else world
            most = tiles // programs * world + (-(-world // groups) if rest else 0)
            assert int(work.max()) == most, where
            assert most <= -(-tiles * world // programs) + world // 2 + 1, f"{where}: not balanced"

    World(1).run(host)


@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(1, 1, 8), (5, 3, 2), (7, 4, 8), (4, 9, 1), (16, 2, 4)]
)
def test_every_place_has_a_tile(rows: int, columns: int, group: int) -> None:
    """Tiles that follow each other share rows of at most ``group`` tiles."""

    def host(pe: int) -> None:
        cut = Cut(8, 32, 16, 1, 1, group)
        places = torch.full((rows * columns, 2), -1, dtype=torch.int32)
        note_places[(rows * columns,)](places, rows, columns, tile_of(cut))
        found = {(row, column) for row, column in places.tolist()}
        assert found == {(8 * row, 32 * column) for row in range(rows) for column in range(columns)}
        for number in range(rows * columns):
            in_group = places[number // (group * columns) * group * columns :][: group * columns]
            assert int(in_group[:, 0].max() - in_group[:, 0].min()) < 8 * group

    World(1).run(host)
