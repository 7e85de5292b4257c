# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter as users call it: what is chosen, calls of several epochs, contexts that are too small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

import tdcoll
from tdcoll.collectives._host.plan import Facts, Plan
from tdcoll.collectives.reduce_scatter.reference import reduce_scatter_reference
from tdcoll.collectives.reduce_scatter.spec import SPEC
from tdcoll.primitives.group import EPOCH_SHIFT
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World, explore


def nodes_of(*sizes: int) -> Topology:
    ids = [node for node, size in enumerate(sizes) for _ in range(size)]
    return Topology.of(0, range(len(ids)), ids)


@pytest.mark.parametrize(
    ("nbytes", "nodes", "facts", "algorithm"),
    [
        (0, (4,), {"ll_bytes": 64, "stores": True}, "ll"),
        (64, (4,), {"ll_bytes": 64, "stores": True}, "ll"),
        (73, (4,), {"ll_bytes": 64, "stores": True}, "direct"),
        (73, (4,), {"ll_bytes": 64, "lamport_bytes": 80, "stores": True}, "ll"),
        (81, (4,), {"ll_bytes": 64, "lamport_bytes": 80, "stores": True}, "direct"),
        (64, (4,), {"ll_bytes": 64, "stores": True, "itemsize": 8}, "direct"),
        (64, (4,), {"ll_bytes": 64, "stores": True, "simulated": True}, "direct"),
        (64, (4,), {}, "1d"),  # ranks that cannot store to each other's memory
        (64, (2, 2), {"ll_bytes": 64, "stores": True}, "1d"),
        (1 << 30, (8,), {"stores": True}, "direct"),
    ],
)
def test_what_is_taken_where_nothing_was_measured(
    nbytes: int, nodes: tuple[int, ...], facts: dict[str, Any], algorithm: str
) -> None:
    plan = SPEC.choose(Facts(nbytes, nodes_of(*nodes), **{"itemsize": 4, **facts}))
    assert plan.algorithm == algorithm
    assert plan.channels * plan.chunk >= nbytes
    programs = plan.channels * (2 * sum(nodes) + 1)
    small = SPEC.choose(Facts(nbytes, nodes_of(*nodes), max_programs=100, **{"itemsize": 4, **facts}))
    assert small.algorithm == "ll" or small.channels * (2 * sum(nodes) + 1) < max(100, programs + 1)


@pytest.mark.parametrize(
    ("algorithm", "facts", "message"),
    [
        ("ring", {}, "algorithm must be one of auto, ll, direct, pull, 1d; got 'ring'"),
        ("ll", {"itemsize": 8, "ll_bytes": 64}, "needs elements of at most 4 bytes; got elements of 8 bytes"),
        ("direct", {}, "algorithm='direct' needs one node whose ranks can store"),
        (Plan("direct", 1, 128, 0), {"stores": True}, "a Plan's num_warps must be one of 1, 2, 4, 8, 16, 32; got 0"),
        (Plan("direct", 1, 128, 3), {"stores": True}, "a Plan's num_warps must be one of 1, 2, 4, 8, 16, 32; got 3"),
    ],
)
def test_what_cannot_be_had(algorithm: Any, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SPEC.choose(Facts(64, nodes_of(4), **facts), algorithm)


@pytest.mark.parametrize("ranks_per_node", [4, 2])
def test_larger_calls_are_several_epochs_also_where_delivery_is_late(ranks_per_node: int) -> None:
    def case(world: World) -> None:
        world.run(host)

    def host(pe: int) -> None:
        nodes = tdcoll.topology().nodes
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
            for call in range(3):
                given = [torch.arange(4 * 33) * 7 + 1000 * rank + 10**6 * call for rank in range(4)]
                tensors = [each.to(torch.int64) for each in given]
                got = tdcoll.reduce_scatter(tensors[pe], ctx)
                assert torch.equal(got, reduce_scatter_reference(tensors, nodes)[pe])
                gathered = tdcoll.all_gather(torch.tensor([pe + call]), ctx)  # which uses the same slots
                assert gathered.tolist() == [rank + call for rank in range(4)]
            ctx.check()

    explore(case, n_pes=4, seeds=2, ranks_per_node=ranks_per_node)


def test_a_context_without_room_for_one_epoch_is_refused() -> None:
    """Over nodes half of a segment is the outbox; 16 bytes leave none."""

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=0) as ctx:
            with pytest.raises(tdcoll.ContextError, match=r"8 bytes would .*max_bytes_per_rank=128"):
                tdcoll.reduce_scatter(torch.zeros(4, dtype=torch.int64), ctx)
            assert tdcoll.reduce_scatter(torch.zeros(0, dtype=torch.int64), ctx).shape == (0,)
            ctx.check()

    World(4, ranks_per_node=2).run(host)


def test_tdcolls_own_context_leaves_room_in_the_heap() -> None:
    """Parts of 700 KB in a heap of 4 MB are several epochs; in one they would take 2.8 MB."""

    def host(pe: int) -> None:
        got = tdcoll.reduce_scatter(torch.ones(2 * 175_000))
        assert got.eq(2).all()
        assert tdcoll.heap_info().used < 2 << 20

    World(2, heap_bytes=4 << 20).run(host)


def test_symmetric_tensors_of_any_size_are_one_epoch() -> None:
    """And need no room in the context: 16 bytes for parts of 400."""

    def host(pe: int) -> None:
        call = tdcoll.reduce_scatter
        x = tdcoll.empty((4 * 100,), torch.int32)
        with tdcoll.CollectiveContext(max_bytes_per_rank=16, debug=True) as ctx:
            for turn in range(3):
                x.copy_(torch.arange(400) * (pe + 1) + turn)
                before = int(ctx.control[0]) >> EPOCH_SHIFT.value
                got = call(x, ctx, symmetric=True)
                assert got.tolist() == [10 * i + 4 * turn for i in range(100 * pe, 100 * pe + 100)]
                assert (int(ctx.control[0]) >> EPOCH_SHIFT.value) == before + 1
            for algorithm in ("direct", "ll", "1d"):
                small = x[:12].copy_(torch.arange(12))
                assert call(small, ctx, algorithm=algorithm, symmetric=True).tolist() == [
                    4 * i for i in (3 * pe, 3 * pe + 1, 3 * pe + 2)
                ]
            with pytest.raises(
                ValueError, match="algorithm='pull' needs symmetric=True; got a tensor of any memory on"
            ):
                call(x, ctx, algorithm="pull")
            with pytest.raises(tdcoll.NotSymmetricError, match=r"tensor must .*symmetric"):
                call(x.clone(), ctx, symmetric=True)
            ctx.check()

    World(4).run(host)


def test_a_killed_peer_is_named_by_those_that_read() -> None:
    told = {}

    def host(pe: int) -> None:
        x = tdcoll.zeros((3,))
        with tdcoll.CollectiveContext(max_bytes_per_rank=256) as ctx:
            tdcoll.reduce_scatter(x, ctx, symmetric=True)
            if pe == 1:
                world.kill(pe)
            tdcoll.reduce_scatter(x, ctx, symmetric=True)
            with pytest.raises(tdcoll.CollectiveTimeout) as raised:
                ctx.check()
            told[pe] = raised.value
            ctx.close()

    world = World(3)
    world.run(host)
    assert {(error.rank, error.peer, error.epoch) for error in told.values()} == {(0, 1, 2), (2, 1, 2)}


def test_drop_ins_name_their_own_arguments() -> None:
    def host(pe: int) -> None:
        x, y = torch.zeros(2), torch.zeros(4)
        with pytest.raises(TypeError, match=r"output must be a torch\.Tensor"):
            tdcoll.reduce_scatter_tensor(None, x)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"input must be a torch\.Tensor"):
            tdcoll.reduce_scatter_tensor(x, 3)  # type: ignore[arg-type]
        for message, arguments in (
            ("input's first extent must be divisible by the 2", (x, x[:1])),
            (r"output must be torch\.float32 of shape \[1\]", (x, x)),
            ("output must be contiguous", (torch.zeros(4)[::2], torch.zeros(4))),
            ("output must not overlap input, except as input's own segment", (y[1 - pe : 3 - pe], y)),
            ("op must be one of SUM, MAX, MIN, PRODUCT for torch.int32; got AVG", (x.int(), x.int(), ReduceOp.AVG)),
        ):
            with pytest.raises(ValueError, match=message):
                tdcoll.reduce_scatter_tensor(*arguments)
        with pytest.raises(TypeError, match=r"input must be of float16, .*; got torch\.bool"):
            tdcoll.reduce_scatter_tensor(x[:1].bool(), x.bool())
        with pytest.raises(ValueError, match=r"output_tensor must be torch\.float32 of shape \[4\]"):
            tdcoll.all_gather_into_tensor(x, x)
        with pytest.raises(ValueError, match="input_tensor must be contiguous"):
            tdcoll.all_gather_into_tensor(x, torch.zeros(4)[::2])
        with pytest.raises(ValueError, match="input_tensor must not overlap output_tensor, except as"):
            tdcoll.all_gather_into_tensor(y, y[1:3])
        with pytest.raises(ValueError, match="op must be one of sum, mean, max, min, prod; got"):
            tdcoll.reduce_scatter(x, op=["sum"])  # type: ignore[arg-type]

    World(2).run(host)


def test_what_ll_stages_between_nodes_fits_the_inbox() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=64, flagged_bytes=1200) as ctx:
            assert ctx.ll_bytes == (64 if tdcoll.topology().n_nodes > 1 else 1200)

    World(4, ranks_per_node=2).run(host)
    World(4).run(host)
