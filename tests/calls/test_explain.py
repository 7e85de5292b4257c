# SPDX-License-Identifier: Apache-2.0
"""What ``tdcoll.explain`` says is what a call then does."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from ranks import on_ranks

import tdcoll
from tdcoll import runtime
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.call import spec_of
from tdcoll.calls.explain import explain_call
from tdcoll.calls.launches import Launches
from tdcoll.calls.plan import Facts
from tdcoll.calls.tuning import Entry, Section, Table
from tdcoll.fused import all_reduce_rms_norm
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World

N = 4
PLAN = ("algorithm", "chunks", "chunk_bytes", "blocks", "warps")


def launched(ctx: Any) -> list[tuple[Any, ...]]:
    """The plans of all calls that a context has prepared."""
    plans = [made.plan for made in ctx.known.values() if isinstance(made, Launches)]
    return [(plan.algorithm, plan.chunks, plan.chunk, plan.blocks, plan.num_warps) for plan in plans]


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
            assert tdcoll.explain(name, tensor) == said  # now by the facts of the context itself
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
    with pytest.raises(ValueError, match=r"^in_place must be False: there is no tdcoll\.all_to_all_"):
        tdcoll.explain("all_to_all", 4, in_place=True)
    assert tdcoll.explain("all_reduce", 4, in_place=True) == tdcoll.explain("all_reduce", 4)


def test_reasons() -> None:
    measured = table(Entry(1024, "one_shot", num_warps=1), Entry(4096, "2d"))

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 16, tuning=measured) as ctx:
            first = tdcoll.explain("all_reduce", 256, ctx=ctx)
            assert (first.algorithm, first.reason, first.warps) == ("one_shot", "table", 1)
            assert first.entry.startswith("measured.json: architecture")
            assert first.entry.endswith('entry up to "1 KB"')
            assert first.entry.split(": ", 1)[1] in first.line
            second = tdcoll.explain("all_reduce", 512, ctx=ctx)
            assert (second.algorithm, second.reason) == ("direct", "default")
            assert "says 2d, which needs several nodes" in second.line
            assert "  not 2d: needs several nodes" in str(second)
            assert "2d" in second.unsupported
            third = tdcoll.explain("all_reduce", 5000, ctx=ctx)
            assert (third.reason, third.entry) == ("default", "")
            fourth = tdcoll.explain("all_reduce", 256, ctx=ctx, algorithm="direct")
            assert (fourth.algorithm, fourth.reason) == ("direct", "requested")
            refused = tdcoll.explain("all_reduce", 256, ctx=ctx, algorithm="2d")
            assert (refused.algorithm, refused.reason, refused.blocks) == (None, "unsupported", 0)
            assert "refused (algorithm='2d' needs several nodes" in refused.line
            plan = tdcoll.Plan("direct", 1, 256, 4)
            assert tdcoll.explain("all_reduce", 256, ctx=ctx, algorithm=plan).warps == 4

    World(N).run(host)
    facts = Facts(1 << 10, Topology.of(0, range(N), range(N)), itemsize=8)
    only = explain_call(spec_of("all_reduce"), facts)
    assert (only.algorithm, only.reason, len(only.unsupported)) == ("1d", "supports", 6)


@on_ranks(2)
def test_the_fused_call(pe: int) -> None:
    x = torch.ones(8, 64)
    for algorithm in ("auto", "one_shot", "composed"):
        said = tdcoll.explain("all_reduce_rms_norm", (8, 64), algorithm=algorithm)
        assert said == tdcoll.explain("all_reduce_rms_norm", x, algorithm=algorithm)
        assert said.reason == ("default" if algorithm == "auto" else "requested")
    with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 12, lamport_bytes=64) as ctx:
        said = tdcoll.explain("all_reduce_rms_norm", x, ctx=ctx)
        assert (said.algorithm, said.reason) == ("composed", "supports")
        assert "needs lamport_bytes=2048 or more" in str(said)
        refused = tdcoll.explain("all_reduce_rms_norm", x, ctx=ctx, algorithm="one_shot")
        assert refused.algorithm is None
    with pytest.raises(ValueError, match=r"^tensor must have rows of at most 16384 elements, a multiple of 4 of"):
        tdcoll.explain("all_reduce_rms_norm", (8, 63))


@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_the_sparse_call(ranks_per_node: int | None) -> None:
    def host(pe: int) -> None:
        job = runtime.current()
        for count, width in ((3, 2), (600, 16)):
            job.contexts.pop(("sparse", tuple(range(N))), None)
            indices, values = torch.arange(count)[None], torch.ones(count, width)
            tensor = torch.sparse_coo_tensor(indices, values, (2 * count, width))
            said = tdcoll.explain("sparse_all_reduce", tensor)
            assert tdcoll.explain("sparse_all_reduce", (count, width)).algorithm == said.algorithm
            assert ("sparse", tuple(range(N))) not in job.contexts
            tdcoll.sparse_all_reduce(tensor)
            ctx = job.contexts["sparse", tuple(range(N))]
            assert ctx.last_algorithm == said.algorithm
            assert tdcoll.explain("sparse_all_reduce", tensor, ctx=ctx).algorithm == said.algorithm
            assert "known after the exchange of ids" in str(said)
            both = [tensor, torch.sparse_coo_tensor(indices, values[:, :1], (2 * count, 1))]
            several = tdcoll.explain("sparse_all_reduce", both, ctx=ctx)
            assert several.nbytes == 2 * count * width * 4
            with pytest.raises(ValueError, match=r"^tensor\[1\] must be of torch.float32, as tensor\[0\]; got"):
                tdcoll.explain("sparse_all_reduce", [tensor, tensor.double()])
            assert not said.unsupported
        over = tdcoll.explain("sparse_all_reduce", (1 << 20, 16))
        assert "exceed the context's capacity of 600 rows of 64 B per rank, 2400 together: the context grows" in str(
            over
        )

    World(N, ranks_per_node=ranks_per_node, heap_bytes=32 << 20).run(host)


def test_the_first_call_of_a_shape_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 10, lamport_bytes=1 << 12) as ctx:
            for count in (16, 16, 32):
                tdcoll.all_reduce(torch.ones(count), ctx=ctx)
            all_reduce_rms_norm(torch.ones(2, 16), torch.ones(2, 16), torch.ones(16), ctx=ctx)
            if pe == 0:
                lines.extend(tdcoll.explain("all_reduce", count, ctx=ctx).line for count in (16, 32))
                lines.append(tdcoll.explain("all_reduce_rms_norm", (2, 16), ctx=ctx).line)
        tensor = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2, 4), (8, 4))
        tdcoll.sparse_all_reduce(tensor)
        tdcoll.sparse_all_reduce(tensor)
        if pe == 0:
            lines.append(tdcoll.explain("sparse_all_reduce", tensor).line)

    caplog.set_level(logging.DEBUG, "tdcoll")
    World(2).run(host)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG] == lines
    caplog.clear()
    caplog.set_level(logging.INFO, "tdcoll")
    World(2).run(host)
    assert [record for record in caplog.records if record.levelno == logging.DEBUG] == []


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"operation": "all_scatter"}, ValueError, "operation must be one of all_gather, all_reduce, "),
        ({"tensor": "x"}, TypeError, "tensor must be an int or a sequence of ints, got 'x'"),
        ({"dtype": "float"}, TypeError, "dtype must be a torch.dtype or None, got 'float'"),
        ({"dtype": torch.complex64}, TypeError, "dtype must be one of torch.float16, "),
        ({"tensor": torch.ones(1), "dtype": torch.int32}, ValueError, "dtype must be None with a tensor, which is of"),
        ({"operation": "all_to_all", "tensor": 3}, ValueError, "tensor's first dimension must be divisible by the 2 "),
        ({"algorithm": "ring"}, ValueError, "algorithm must be one of auto, one_shot, "),
        ({"algorithm": 3}, TypeError, "algorithm must be a str or a Plan, got 3"),
        ({"symmetric": 1}, TypeError, "symmetric must be a bool, got 1"),
        ({"op": "xor"}, ValueError, "op must be"),
    ],
)
@on_ranks(2)
def test_wrong_arguments(pe: int, given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        tdcoll.explain(**{"operation": "all_reduce", "tensor": 4, **given})
