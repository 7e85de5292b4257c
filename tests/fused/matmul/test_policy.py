# SPDX-License-Identifier: Apache-2.0
"""The algorithm of a matmul that communicates, and how it is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tdcoll.calls.plan import Facts
from tdcoll.fused.matmul.explanation import explain_matmul
from tdcoll.fused.matmul.policy import (
    ALGORITHMS,
    COMPOSED,
    COPIED,
    FUSED,
    GATHER,
    NAMES,
    ONE_SHOT,
    REDUCE,
    SCATTER,
    TWO_SHOT,
    MatmulShape,
    choose,
    inbox_bytes,
)
from tdcoll.runtime.topology import Topology

EACH = pytest.mark.parametrize("name", NAMES)


def facts(world: int, n_nodes: int = 1, **more: Any) -> Facts:
    topology = Topology.of(0, range(world), [rank * n_nodes // world for rank in range(world)])
    usual = {"stores": True, "lamport_bytes": 1 << 23, "capacity": 1 << 28, "chunks": 4096}
    return Facts(0, topology, **{**usual, **more})


def shape(name: str, rows: int, depth: int, columns: int, **more: Any) -> MatmulShape:
    return MatmulShape(name, rows, columns, depth, 2, 2, **more)


@pytest.mark.parametrize(
    ("call", "world", "algorithm", "blocks", "pushers"),
    [
        (shape(GATHER, 128, 8192, 3584), 2, COMPOSED, 56, 0),
        (shape(GATHER, 512, 8192, 3584), 2, FUSED, 112, 16),
        (shape(GATHER, 2048, 4096, 1792), 2, FUSED, 112, 8),
        (shape(GATHER, 8192, 2048, 1280), 2, FUSED, 132, 32),
        (shape(GATHER, 8192, 8192, 1280), 2, COPIED, 132, 0),
        (shape(GATHER, 4096, 8192, 3584), 2, COPIED, 132, 0),
        (shape(GATHER, 4096, 4096, 3584), 2, FUSED, 132, 16),
        (shape(GATHER, 8192, 4096, 3584), 4, COPIED, 132, 0),
        (shape(GATHER, 8192, 8192, 1280), 1, COMPOSED, 132, 0),
        (shape(SCATTER, 128, 3584, 8192), 2, COMPOSED, 128, 0),
        (shape(SCATTER, 512, 3584, 8192), 2, COMPOSED, 128, 0),
        (shape(SCATTER, 8192, 1280, 8192), 4, FUSED, 132, 0),
        (shape(REDUCE, 8, 3584, 8192), 2, COMPOSED, 128, 0),
        (shape(REDUCE, 64, 3584, 8192), 2, ONE_SHOT, 128, 0),
        (shape(REDUCE, 64, 3584, 8192), 4, TWO_SHOT, 128, 0),
        (shape(REDUCE, 512, 3584, 8192), 4, COMPOSED, 132, 0),
    ],
)
def test_plans(call: MatmulShape, world: int, algorithm: str, blocks: int, pushers: int) -> None:
    plan, _ = choose(call, facts(world), "auto", False, False)
    assert (plan.algorithm, plan.blocks, plan.pushers) == (algorithm, blocks, pushers)


def test_batch_invariance_excludes_the_reason_for_cublas() -> None:
    for call, fused in (
        (shape(GATHER, 128, 8192, 3584), FUSED),
        (shape(REDUCE, 8, 4096, 4096), ONE_SHOT),
    ):
        assert choose(call, facts(2), "auto", True, False)[0].algorithm == fused
        assert choose(call, facts(2), "auto", False, False)[0].algorithm == COMPOSED


@EACH
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"n_nodes": 2}, "needs one node whose ranks can store"),
        (
            {"capacity": 64, "lamport_bytes": 64},
            r"needs (max_bytes_per_rank|lamport_bytes)=\d+ or more in the context",
        ),
        ({"max_blocks": 40}, "needs all multiprocessors, hence a context without max_blocks"),
        ({"world": 9}, "needs at most 8 ranks"),
    ],
)
def test_one_kernel_that_there_cannot_be(name: str, where: dict[str, int], message: str) -> None:
    call = shape(name, 180, 64, 64)
    found = facts(**{"world": 2, **where})
    for algorithm in ALGORITHMS[name][:-1]:
        with pytest.raises(ValueError, match=message):
            choose(call, found, algorithm, False, False)
    plan, why = choose(call, found, "auto", True, False)
    assert plan.algorithm == COMPOSED
    assert ALGORITHMS[name][0] in why


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("rows", [128, 4096, 40000])
def test_pieces_for_copy_engines_are_few_and_large(world: int, rows: int) -> None:
    call = shape(GATHER, rows * world, 8192, 1024)
    found = facts(world, capacity=1 << 30)
    plan, _ = choose(call, found, COPIED, False, True)
    pieces = -(-rows * 16384 // plan.piece)
    assert plan.piece % 16 == 0
    assert plan.piece >= 4 << 20
    assert 1 <= pieces <= 4
    assert plan.keepers > plan.pushers == 0
    fused, _ = choose(call, found, FUSED, False, True)
    assert inbox_bytes(call, plan, world) == inbox_bytes(call, fused, world)


def test_explanations_of_copies() -> None:
    call = shape(GATHER, 8192, 8192, 1280)
    said = explain_matmul(call, facts(2), "auto", False, False)
    assert (said.algorithm, said.reason) == (COPIED, "default")
    assert (said.chunks, said.chunk_bytes, said.blocks, said.epochs) == (4, 16 << 20, 132, 1)
    few = explain_matmul(shape(GATHER, 100, 8192, 1280), facts(2), COPIED, False, False)
    assert few.algorithm is None
    assert "needs at least 64 rows of each rank; got 50 on" in few.why


def test_copies_need_a_tile_of_rows_from_each_rank() -> None:
    """The own rows of a tile would otherwise have to be copied as well."""
    small = shape(GATHER, 2 * 63, 8192, 512)
    with pytest.raises(ValueError, match="'copied' needs at least 64 rows of each rank; got 63 on"):
        choose(small, facts(2), COPIED, False, False)
    assert choose(replace(small, rows=128), facts(2), COPIED, False, False)[0].algorithm == COPIED


def test_gpus_before_hopper_take_the_parts_in_a_row() -> None:
    call = shape(GATHER, 4096, 1024, 1024, has_descriptors=False)
    plan, why = choose(call, facts(2), "auto", False, False)
    assert plan.algorithm == COMPOSED
    assert "Hopper" in why


def test_signals_for_every_tile() -> None:
    call = shape(SCATTER, 8192, 1280, 8192)
    with pytest.raises(ValueError, match="needs chunks=1024 or more in the context; got 512"):
        choose(call, facts(2, chunks=512), FUSED, False, False)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 7, 130, 1000, 5000])
def test_pieces_of_a_gather_have_signals_and_few_touch_a_tile(
    world: int, itemsize: int, rows: int
) -> None:
    for depth in (16, 4096, 20480):
        call = replace(shape(GATHER, rows * world, depth, 256), itemsize=itemsize)
        plan, _ = choose(call, facts(world, capacity=1 << 30), FUSED, False, False)
        row_bytes = depth * itemsize
        assert plan.piece % 16 == 0
        assert -(-rows * row_bytes // plan.piece) <= 512
        assert -(-min(rows, plan.cut.rows) * row_bytes // plan.piece) < 127
        assert inbox_bytes(call, plan, world) == rows * (row_bytes + 4)
