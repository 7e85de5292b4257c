# SPDX-License-Identifier: Apache-2.0
"""What ``tdcoll.explain`` says is what a call then does, and ``memory_plan`` what is then
allocated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import on_ranks

import tdcoll
from tdcoll import runtime
from tdcoll.base import environment
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.call_launches import CallLaunches
from tdcoll.calls.collective import spec_of
from tdcoll.calls.explain import explain_call
from tdcoll.calls.plan import Facts, Plan
from tdcoll.calls.tuning import Entry, Section, Table
from tdcoll.fused import all_reduce_rms_norm
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World

N = 4
PLAN = ("algorithm", "chunks", "chunk_bytes", "blocks", "warps")


def launched(ctx: Any) -> list[tuple[Any, ...]]:
    """The plans of all calls that a context has prepared."""
    plans = [made.plan for made in ctx.cache.values() if isinstance(made, CallLaunches)]
    return [
        (plan.algorithm, plan.chunks, plan.chunk, plan.blocks, plan.num_warps) for plan in plans
    ]


def table(*entries: Entry, name: str = "all_reduce") -> Table:
    return Table((Section("simulator", name, N, 1, False, entries),), "measured.json")


@pytest.mark.parametrize("ranks_per_node", [None, 2, 3])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_it_says_what_the_call_does(name: str, ranks_per_node: int | None) -> None:
    def host(pe: int) -> None:
        job, before = runtime.current(), tdcoll.heap_info()
        for count in (4, 1500):
            said = tdcoll.explain(name, (count * N,), dtype=torch.int32)
            contexts = dict(job.contexts)
            tensor = torch.full((count * N,), pe, dtype=torch.int32)
            assert tdcoll.explain(name, tensor) == said
            if count == 4:
                assert contexts == {}
                assert tdcoll.heap_info() == before
            getattr(tdcoll, name)(tensor)
            context = job.contexts[name, tuple(range(N))].context
            assert launched(context)[-1] == tuple(getattr(said, field) for field in PLAN)
            assert tdcoll.explain(name, tensor, ctx=context) == said

    World(N, ranks_per_node=ranks_per_node).run(host)


@on_ranks(N)
def test_calls_in_place_and_of_several_epochs(pe: int) -> None:
    buffer = tdcoll.zeros(N * 64, torch.float32)
    said = tdcoll.explain("all_gather", buffer, in_place=True)
    assert (said.nbytes, said.epochs) == (256, 1)
    with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 10) as ctx:
        tdcoll.all_gather_(buffer, ctx=ctx)
        assert launched(ctx)[-1] == tuple(getattr(said, field) for field in PLAN)
        large = tdcoll.explain("all_gather", (10 << 10,), dtype=torch.uint8, ctx=ctx)
        assert large.epochs == 10
        assert ", 10 epochs (" in large.line
    assert tdcoll.explain("all_reduce", 4, in_place=True) == tdcoll.explain("all_reduce", 4)


def test_reasons() -> None:
    measured = table(Entry(1024, "one_shot", num_warps=1), Entry(4096, "2d"))

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 16, tuning=measured) as ctx:
            first = tdcoll.explain("all_reduce", 256, ctx=ctx)
            assert (first.algorithm, first.reason, first.warps) == ("one_shot", "table", 1)
            assert "(table: measured.json, architecture" in first.line
            assert first.line.endswith('entry up to "1 KB")')
            second = tdcoll.explain("all_reduce", 512, ctx=ctx)
            assert (second.algorithm, second.reason) == ("direct", "default")
            assert "says 2d, which needs several nodes" in second.line
            assert "  not 2d: needs several nodes" in str(second)
            assert "2d" in second.unsupported
            third = tdcoll.explain("all_reduce", 5000, ctx=ctx)
            assert third.line.endswith(
                "(default: no entry of the tuning table holds for such a call)"
            )
            fourth = tdcoll.explain("all_reduce", 256, ctx=ctx, algorithm="direct")
            assert (fourth.algorithm, fourth.reason) == ("direct", "requested")
            refused = tdcoll.explain("all_reduce", 256, ctx=ctx, algorithm="2d")
            assert (refused.algorithm, refused.reason, refused.blocks) == (None, "unsupported", 0)
            assert "refused (algorithm='2d' needs several nodes" in refused.line
            plan = Plan("direct", 1, 256, 4)
            assert tdcoll.explain("all_reduce", 256, ctx=ctx, algorithm=plan).warps == 4

    World(N).run(host)
    facts = Facts(1 << 10, Topology.of(0, range(N), range(N)), itemsize=8)
    only = explain_call(spec_of("all_reduce"), facts)
    assert (only.algorithm, only.reason, len(only.unsupported)) == ("1d", "default", 6)


def test_sparse_calls() -> None:
    """On no context yet, on tdcoll's own, and on one whose capacity decides."""

    explain = partial(tdcoll.explain, "sparse_all_reduce")

    def host(pe: int) -> None:
        table = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2, 4), (8, 4))
        wide = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 2, 3), (8, 2, 3))
        few, many = explain((2, 4)), explain((1 << 20, 64))
        assert (few.algorithm, few.reason, few.nbytes) == ("gather", "default", 32)
        assert many.line.startswith(
            "sparse_all_reduce of 256 MiB per rank on 2 rank(s) on 1 node(s): owner (default"
        )
        assert few.why == "the context holds 256 rows of 16 B per rank; dense was never faster"
        with tdcoll.SparseContext(max_rows_per_rank=64, max_row_bytes=24, max_union_rows=64) as ctx:
            assert explain([table, wide], ctx=ctx).nbytes == 3 * 24
            for algorithm, taken in (("auto", "owner"), ("dense", "dense"), ("gather", None)):
                found = explain(table, ctx=ctx, algorithm=algorithm)
                assert (found.algorithm, list(found.unsupported)) == (taken, ["gather"])
                tdcoll.sparse_all_reduce(table, ctx=ctx, algorithm=taken or "auto")
                assert ctx.last_algorithm == (taken or "owner")
            with pytest.raises(ValueError, match="algorithm must be one of"):
                explain(table, algorithm="fast")
        with pytest.raises(TypeError, match=r"must be torch\.sparse_coo"):
            explain(torch.ones(2))

    World(2).run(host)


def test_fused_calls() -> None:
    """Of tdcoll's own context, and of one that is too small for a kernel that does all."""

    def host(pe: int) -> None:
        explain = partial(tdcoll.explain, "all_reduce_rms_norm")
        x = torch.ones(8, 16)
        own = explain(x)
        assert (own.algorithm, own.reason, own.nbytes, own.chunk_bytes) == (
            "one_shot",
            "default",
            512,
            64,
        )
        all_reduce_rms_norm(x, x.clone(), torch.ones(16))
        assert explain(x) == own
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 10, lamport_bytes=256) as ctx:
            found = explain((2, 4, 16), ctx=ctx)
            # its all-reduce has numbers of its own
            assert (found.algorithm, found.blocks) == ("composed", 0)
            assert (
                "(default: one_shot needs lamport_bytes=512 or more in the context; got 256 on "
                in found.line
            )
            assert explain(x, ctx=ctx, algorithm="composed").reason == "requested"
            refused = explain(x, ctx=ctx, algorithm="one_shot")
            assert (refused.algorithm, list(refused.unsupported)) == (
                None,
                ["one_shot", "two_shot"],
            )
            with pytest.raises(ValueError, match=r"algorithm must be one of auto, one_shot"):
                explain(x, ctx=ctx, algorithm="fast")
        for given, dtype in ((3, torch.float32), ((2, 16), torch.float64)):
            with pytest.raises(
                ValueError, match=f"rows that all_reduce_rms_norm takes; got {dtype} of shape"
            ):
                explain(given, dtype=dtype)

    World(2).run(host)


def test_the_first_call_of_a_shape_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 10, lamport_bytes=1 << 12) as ctx:
            for count in (16, 16, 32):
                tdcoll.all_reduce(torch.ones(count), ctx=ctx)
            all_reduce_rms_norm(torch.ones(2, 16), torch.ones(2, 16), torch.ones(16), ctx=ctx)
            if pe == 0:
                lines.extend(
                    tdcoll.explain("all_reduce", count, ctx=ctx).line for count in (16, 32)
                )
                lines.append(tdcoll.explain("all_reduce_rms_norm", (2, 16), ctx=ctx).line)
        tensor = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2, 4), (8, 4))
        tdcoll.sparse_all_reduce(tensor)
        tdcoll.sparse_all_reduce(tensor)
        if pe == 0:
            lines.append(
                "sparse_all_reduce: gather (auto), rows of 16 bytes, context of 256 rows of 16 bytes per rank"
            )

    caplog.set_level(logging.DEBUG, "tdcoll")
    World(2).run(host)
    assert [
        record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG
    ] == lines
    caplog.clear()
    caplog.set_level(logging.INFO, "tdcoll")
    World(2).run(host)
    assert [record for record in caplog.records if record.levelno == logging.DEBUG] == []


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (
            {"operation": "all_scatter"},
            ValueError,
            "operation must be one of all_gather, all_reduce, ",
        ),
        ({"tensor": "x"}, TypeError, "tensor must be an int or a sequence of ints, got 'x'"),
        ({"dtype": torch.complex64}, TypeError, "tensor must be of float16, "),
        (
            {"operation": "all_to_all", "tensor": 3},
            ValueError,
            "tensor's first dimension must be divisible by the 2 ",
        ),
        ({"algorithm": "ring"}, ValueError, "algorithm must be one of auto, one_shot, "),
        ({"algorithm": 3}, TypeError, "algorithm must be a str, got 3"),
    ],
)
@on_ranks(2)
def test_wrong_arguments(pe: int, given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        tdcoll.explain(**{"operation": "all_reduce", "tensor": 4, **given})


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
        "small": {
            "max_bytes_per_rank": 1000,
            "chunks": 3,
            "flagged_bytes": 5000,
            "lamport_bytes": 77,
        },
        "none": {"max_bytes_per_rank": 0, "flagged_bytes": 0, "lamport_bytes": 0},
        "rows": SPARSE,
        "few": {**SPARSE, "max_union_rows": 120},
        # more, and less, than the least that a context holds
        "all_gather": 3 << 19 if world == 1 else 4096,
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
    plan = tdcoll.memory_plan(
        {"mine": {"max_bytes_per_rank": 1 << 20}, "rows": SPARSE}, world_size=8, heap_bytes="1G"
    )
    mine, rows = plan.contexts
    assert (mine.inbox, mine.lamport, mine.rows) == (2 * 8 << 20, 3 * 8 << 20, 0)
    assert mine.ll == -(-2 * 8 * 16 * -(-(1 << 20) // 7 // 12) // 512) * 512
    assert mine.signals == 2 * 512 * 8 * 8 + 2 * 512
    assert plan.total == mine.total + rows.total


def test_the_table() -> None:
    plan = tdcoll.memory_plan({"all_reduce": "64M", "all_gather": "1M"}, world_size=8)
    assert plan.heap_bytes == environment.DEFAULT_HEAP_BYTES
    title, head, first, second, total, fits = str(plan).splitlines()
    assert title == "symmetric memory of each of 8 ranks on 1 node(s)"
    assert head.split() == [
        "context",
        "inbox",
        "signals",
        "LL",
        "Lamport",
        "rows",
        "buffers",
        "total",
    ]
    assert first.split()[:3] == ["all_reduce", "48", "MiB"]
    assert (second.split()[0], total.split()[0]) == ("all_gather", "total")
    assert fits == "fits into a heap of 384 MiB"
    large = tdcoll.memory_plan(
        {"rows": {"max_rows_per_rank": 10**6, "max_row_bytes": 2048}}, world_size=8
    )
    assert not large.fits
    assert str(large).splitlines()[-1].startswith("does not fit into")


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ({"nodes": 5}, ValueError, "nodes must be 1 to 4, got 5"),
        ({"contexts": [1]}, TypeError, "contexts must be a dict of names and sizes, got list"),
        (
            {"contexts": {"mine": 3}},
            ValueError,
            r"contexts\['mine'\] must be a dict of sizes .*, unless the name is one",
        ),
        (
            {"contexts": {"all_reduce": "x"}},
            ValueError,
            r"contexts\['all_reduce'\] must be a positive number of bytes",
        ),
        (
            {"contexts": {"a": {"chanels": 3}}},
            ValueError,
            r"contexts\['a'\] must have no sizes but max_bytes_per_rank",
        ),
        (
            {"contexts": {"a": {"chunks": -1}}},
            ValueError,
            r"contexts\['a'\]\['chunks'\] must be at least 0",
        ),
        (
            {"contexts": {"a": {"max_rows_per_rank": 1}}},
            ValueError,
            r"contexts\['a'\] must have max_row_bytes with",
        ),
        ({"heap_bytes": 0}, ValueError, "heap_bytes must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_of_a_plan(
    given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"^{text}"):
        tdcoll.memory_plan(**{"contexts": {}, "world_size": 4, **given})
