# SPDX-License-Identifier: Apache-2.0
"""``tdcoll.memory_plan`` says what is then allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll.base import environment
from tdcoll.fused import all_reduce_rms_norm
from tdcoll.testing import World

HEAP = 128 << 20
SPARSE = {"max_rows_per_rank": 100, "max_row_bytes": 24}


def made(name: str, given: Any) -> Callable[[], object]:
    """What makes the context of an entry."""
    if isinstance(given, dict):
        kind = tdcoll.SparseContext if "max_rows_per_rank" in given else tdcoll.CollectiveContext
        return lambda: kind(**given)
    tensor = torch.zeros(given // 4)
    if name == "all_reduce_rms_norm":
        rows = tensor.view(-1, 1024)
        return lambda: all_reduce_rms_norm(rows, rows, torch.ones(1024))
    return lambda: getattr(tdcoll, name)(tensor)


def compare(contexts: dict[str, Any], world: int, nodes: int = 1) -> tdcoll.MemoryPlan:
    """Make contexts and compare what each takes with the plan, which is returned."""
    plan = tdcoll.memory_plan(contexts, world_size=world, nodes=nodes, heap_bytes=HEAP)
    assert [context.name for context in plan.contexts] == list(contexts)

    def host(pe: int) -> None:
        for (name, given), context in zip(contexts.items(), plan.contexts, strict=True):
            before = tdcoll.heap_info().used
            make = made(name, given)
            kept.append(make())
            assert (name, tdcoll.heap_info().used - before) == (name, context.total)
        assert tdcoll.heap_info().used == plan.total

    kept: list[Any] = []
    World(world, ranks_per_node=-(-world // nodes), heap_bytes=HEAP).run(host)
    assert plan.fits
    return plan


@pytest.mark.parametrize(("world", "nodes"), [(2, 1), (4, 2), (3, 2)])
def test_it_is_what_a_job_takes(world: int, nodes: int) -> None:
    contexts = {
        "small": {"max_bytes_per_rank": 1000, "chunks": 3, "flagged_bytes": 5000, "lamport_bytes": 77},
        "none": {"max_bytes_per_rank": 0, "flagged_bytes": 0, "lamport_bytes": 0},
        "rows": SPARSE,
        "few": {**SPARSE, "max_union_rows": 120},
        "all_gather": 3 << 19 if world == 1 else 4096,  # more, and less, than the least that a context holds
        "all_reduce": 1 << 14,
        "all_to_all": 64 * world,
        "reduce_scatter": 4096 * world,
        "all_reduce_rms_norm": 1 << 13,
    }
    compare(contexts, world, nodes)


def test_a_heap_that_has_no_room_for_the_usual_words() -> None:
    plan = compare({"first": {}, "second": {}, "third": {}}, 2)
    first, second, third = (context.lamport for context in plan.contexts)
    assert first == second > 8 * third > 0


def test_the_parts_of_a_context() -> None:
    plan = tdcoll.memory_plan({"mine": {"max_bytes_per_rank": 1 << 20}, "rows": SPARSE}, world_size=8, heap_bytes="1G")
    mine, rows = plan.contexts
    assert (mine.inbox, mine.lamport, mine.rows) == (2 * 8 << 20, 3 * 8 << 20, 0)
    assert mine.ll == -(-2 * 8 * 16 * -(-(1 << 20) // 7 // 12) // 512) * 512
    assert mine.signals == 2 * 512 * 8 * 8 + 2 * 512
    assert rows.total == tdcoll.collectives.sparse_all_reduce.context.symmetric_bytes(8, 100, 24)
    assert plan.total == mine.total + rows.total


def test_the_table() -> None:
    plan = tdcoll.memory_plan({"all_reduce": "64M", "all_gather": "1M"}, world_size=8)
    assert plan.heap_bytes == environment.DEFAULT_HEAP_BYTES
    title, head, first, second, total, fits = str(plan).splitlines()
    assert title == "symmetric memory of each of 8 ranks on 1 node(s)"
    assert head.split() == ["context", "inbox", "signals", "LL", "Lamport", "rows", "total"]
    assert first.split()[:3] == ["all_reduce", "48", "MiB"]
    assert (second.split()[0], total.split()[0]) == ("all_gather", "total")
    assert fits == "fits into a heap of 384 MiB"
    large = tdcoll.memory_plan({"rows": {"max_rows_per_rank": 10**6, "max_row_bytes": 2048}}, world_size=8)
    assert not large.fits
    assert str(large).splitlines()[-1].startswith("does not fit into")


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ({"nodes": 5}, ValueError, "nodes must be 1 to 4, got 5"),
        ({"contexts": [1]}, TypeError, "contexts must be a dict of names and sizes, got list"),
        ({"contexts": {"mine": 3}}, ValueError, r"contexts\['mine'\] must be a dict of sizes, unless the name is one"),
        ({"contexts": {"all_reduce": "x"}}, ValueError, r"contexts\['all_reduce'\] must be a positive number of bytes"),
        ({"contexts": {"a": {"chanels": 3}}}, ValueError, r"contexts\['a'\] must have no sizes but max_bytes_per_rank"),
        ({"contexts": {"a": {"chunks": -1}}}, ValueError, r"contexts\['a'\]\['chunks'\] must be at least 0"),
        ({"contexts": {"a": {"max_rows_per_rank": 1}}}, ValueError, r"contexts\['a'\] must have max_row_bytes with"),
        ({"heap_bytes": 0}, ValueError, "heap_bytes must be at least 1, got 0"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        tdcoll.memory_plan(**{"contexts": {}, "world_size": 4, **given})
