# SPDX-License-Identifier: Apache-2.0
"""Deadlines that expire while the peer is only late: a rank that gives up must not spoil the results of its peers.

To test another kernel, add a row to ``KERNELS``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_mutants import Change, installed
from tiers import seeds

import tdcoll
import tdcoll.collectives.all_gather.op  # this and the next name the kernels: before one is replaced
import tdcoll.collectives.reduce_scatter.op
import tdcoll.collectives.sparse_all_reduce.op
import tdcoll.fused.op
from tdcoll.collectives._host import plan
from tdcoll.collectives.reduce_scatter.reference import reduce_parts, reduce_scatter_reference
from tdcoll.fused.reference import norm_reference
from tdcoll.testing import World, explore, first_failure

from .all_reduce.mutants import MODULES as REDUCTIONS
from .reduce_scatter.cases import values
from .reduce_scatter.mutants import MODULES as SCATTERS

MODULES = (*SCATTERS, *REDUCTIONS, "tdcoll.fused.kernels_rows", "tdcoll.fused.kernels")
HEAP = 1 << 18
QUEUED = 5
"""Calls that are launched before the host looks for expired waits, as in a CUDA graph: more than there are slots."""
ROWS, HIDDEN = 5, 24
WEIGHT = torch.linspace(0.5, 2, HIDDEN)

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Operation:
    """A collective, which each rank calls again and again with the same memory.

    Attributes:
        memory: ``memory(world, rank)``: the source and the result, which may share memory.
        call: ``call(source, out, ctx, **how)``: make the call; return its results.
        wanted: ``wanted(sources, topology)``: its results, given what all ranks bring.
        sparse: its context is a ``SparseContext``.
    """

    memory: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
    call: Callable[..., Tensors]
    wanted: Callable[[Tensors, Any], Tensors]
    sparse: bool = False


def one_buffer(world: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    buffer = tdcoll.empty((world, 10), torch.float32)
    return buffer[rank], buffer


def rows_of(rank: int) -> torch.Tensor:
    """Two rows that all ranks bring to a sparse all-reduce, and two that one or two do."""
    return torch.tensor([0, 1 + rank % 2, 3, 4])


def sparse_call(source: torch.Tensor, out: torch.Tensor, ctx: tdcoll.SparseContext, **how: Any) -> Tensors:
    made = tdcoll.sparse_all_reduce_padded(rows_of(ctx.rank), source, ROWS, ctx, coalesced=True, **how)
    return (out.zero_().index_add_(0, made.indices, made.values),)


def sparse_wanted(sources: Tensors, topology: Any) -> Tensors:
    tables = [torch.zeros(ROWS, 3).index_copy_(0, rows_of(rank), source) for rank, source in enumerate(sources)]
    return (reduce_parts(tables, topology.nodes),)


GATHER = Operation(
    memory=lambda world, rank: (torch.empty(10), torch.empty(world, 10)),
    call=lambda source, out, ctx, **how: [tdcoll.all_gather(source, ctx, out, **how)],
    wanted=lambda sources, topology: [torch.stack(list(sources))],
)
GATHER_IN_PLACE = Operation(
    memory=one_buffer,
    call=lambda source, out, ctx, **how: [tdcoll.all_gather_in_place(out, ctx, **how)],
    wanted=GATHER.wanted,
)
REDUCE = Operation(
    memory=lambda world, rank: (torch.empty(18), torch.empty(18)),
    call=lambda source, out, ctx, **how: [tdcoll.all_reduce(source, ctx, out, **how)],
    wanted=lambda sources, topology: [reduce_parts(list(sources), topology.nodes)],
)
SCATTER = Operation(
    memory=lambda world, rank: (torch.empty(world, 10), torch.empty(10)),
    call=lambda source, out, ctx, **how: [tdcoll.reduce_scatter(source, ctx, out, **how)],
    wanted=lambda sources, topology: [
        reduce_scatter_reference(list(sources), topology.nodes)[topology.rank].reshape(10)
    ],
)
NORM = Operation(
    memory=lambda world, rank: (torch.empty(2, HIDDEN), torch.empty(2, HIDDEN)),
    call=lambda source, out, ctx, **how: tdcoll.fused.all_reduce_rms_norm(
        source, out.fill_(0.25), WEIGHT, ctx, 1e-3, in_place=True, **how
    ),
    wanted=lambda sources, topology: norm_reference(
        reduce_parts(list(sources), topology.nodes), torch.full((2, HIDDEN), 0.25), WEIGHT, 1e-3, None
    )[:2],
)
SPARSE = Operation(
    memory=lambda world, rank: (torch.empty(4, 3), torch.empty(ROWS, 3)),
    call=sparse_call,
    wanted=sparse_wanted,
    sparse=True,
)


@dataclass(frozen=True)
class Kernel:
    """A kernel, and the calls that use it.

    Attributes:
        where: its name, as a :class:`~kernel_mutants.Change` has it.
        operation: what the calls are.
        algorithm: theirs, or a plan.
        nodes: ranks of each node.
        lamport_bytes: of the context; 0: words have flags.
    """

    where: str
    operation: Operation
    algorithm: Any
    nodes: tuple[int, ...] = (2,)
    lamport_bytes: int | None = None

    def __str__(self) -> str:
        pieces = "" if isinstance(self.algorithm, str) else ", rows of two pieces"
        in_place = {GATHER_IN_PLACE: ", in place", SPARSE: ", sparse"}.get(self.operation, "")
        flags = ", flags" if self.lamport_bytes == 0 else ""
        return f"{self.where.rpartition('.')[2]}{in_place}{pieces}{flags} on {'+'.join(map(str, self.nodes))}"

    @property
    def job(self) -> dict[str, Any]:
        """Arguments of ``World``."""
        return {
            "n_pes": sum(self.nodes),
            "ranks_per_node": self.nodes,
            "heap_bytes": HEAP,
            "on_timeout": "early",
        }


def two_pieces(algorithm: str) -> tdcoll.Plan:
    return tdcoll.Plan(algorithm, 2, 64, 1)


KERNELS = [
    Kernel("kernels_ll.all_gather_ll", GATHER, "ll"),
    Kernel("kernels_ll.all_gather_ll", GATHER_IN_PLACE, "ll"),
    Kernel("all_gather.kernels_puts.all_gather_ll_2d", GATHER, "ll", (2, 2)),
    Kernel("all_gather.kernels_direct.all_gather_direct", GATHER, "direct"),
    Kernel("all_gather.kernels_direct.all_gather_direct", GATHER_IN_PLACE, "direct"),
    Kernel("kernels_ring.all_gather_ring", GATHER, "ring", (3,)),
    Kernel("kernels_ring.all_gather_ring", GATHER_IN_PLACE, "ring", (3,)),
    Kernel("all_gather.kernels_puts.all_gather_1d", GATHER, "1d"),
    Kernel("all_gather.kernels_puts.all_gather_1d", GATHER, "1d", (1, 1)),
    Kernel("all_gather.kernels_puts.all_gather_1d", GATHER_IN_PLACE, "1d", (1, 1)),
    Kernel("all_gather.kernels_puts.all_gather_2d", GATHER, "2d", (2, 2)),
    Kernel("all_gather.kernels_puts.all_gather_2d", GATHER_IN_PLACE, "2d", (2, 2)),
    Kernel("all_reduce.kernels_words.all_reduce_one_shot", REDUCE, "one_shot"),
    Kernel("all_reduce.kernels_words.all_reduce_one_shot", REDUCE, "one_shot", lamport_bytes=0),
    Kernel("all_reduce.kernels_words.all_reduce_two_shot", REDUCE, "two_shot"),
    Kernel("all_reduce.kernels_words.all_reduce_two_shot", REDUCE, "two_shot", lamport_bytes=0),
    Kernel("all_reduce.kernels_direct.all_reduce_direct", REDUCE, "direct"),
    Kernel("all_reduce.kernels_puts.all_reduce_puts", REDUCE, "1d", (1, 1)),
    Kernel("all_reduce.kernels_nodes.all_reduce_nodes", REDUCE, "2d", (2, 2)),
    Kernel("reduce_scatter.kernels_words.reduce_scatter_words", SCATTER, "ll"),
    Kernel("reduce_scatter.kernels_words.reduce_scatter_words", SCATTER, "ll", lamport_bytes=0),
    Kernel("reduce_scatter.kernels_direct.reduce_scatter_direct", SCATTER, "direct"),
    Kernel("reduce_scatter.kernels_puts.reduce_scatter_puts", SCATTER, "1d", (1, 1)),
    Kernel("fused.kernels.norm_rows_one_shot", NORM, "one_shot"),
    Kernel("fused.kernels.norm_rows_one_shot", NORM, two_pieces("one_shot")),
    Kernel("fused.kernels.norm_rows_two_stage", NORM, "two_stage"),
    Kernel("fused.kernels.norm_rows_two_stage", NORM, two_pieces("two_stage")),
    Kernel("sparse_all_reduce.kernels_reduce.reduce", SPARSE, "owner"),
    Kernel("sparse_all_reduce.kernels_reduce.meet", SPARSE, "owner"),
    Kernel("all_gather.kernels_direct.all_gather_direct", SPARSE, "gather"),
    Kernel("sparse_all_reduce.kernels_nodes.reduce_nodes", SPARSE, "owner", (1, 1)),
    Kernel("sparse_all_reduce.kernels_nodes.forward", SPARSE, "owner", (1, 1)),
    Kernel("sparse_all_reduce.kernels_nodes.meet_nodes", SPARSE, "owner", (1, 1)),
]


class Queued:
    """Launches ``QUEUED`` calls on every rank, and checks the results of the ranks that no deadline has ended.

    Each call has the memory of the one before: results are copied away, and all is written over, right after the call,
    as the next kernels on a stream may do it whether or not a wait has expired.

    Attributes:
        ended: how many ranks ended with right results, and how many gave up.
        early: waits that expired while what they waited for was on its way.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.ended: Counter[str] = Counter()
        self.early = 0

    def __call__(self, world: World) -> None:
        ended = world.run(lambda pe: self.host(pe, world))
        self.early += len(world.gave_up)
        for rank, (how, left) in enumerate(ended):
            self.ended[how] += 1
            if how == "right":  # one that gave up may still be written to, where the result is symmetric
                assert all(bool((tensor == -77).all()) for tensor in left), f"rank {rank} is written to after its calls"

    def host(self, pe: int, world: World) -> tuple[str, Tensors]:
        kernel, operation = self.kernel, self.kernel.operation
        if operation.sparse:
            ctx: Any = tdcoll.SparseContext(max_rows_per_rank=4, max_row_bytes=12)
            monitor = ctx.collective.monitor
        else:
            ctx = tdcoll.CollectiveContext(max_bytes_per_rank=256, lamport_bytes=kernel.lamport_bytes)
            monitor = ctx.monitor
        memory = source, out = operation.memory(ctx.world_size, pe)
        looked_at, monitor.valid = monitor.valid, memoryview(bytearray(1))
        results = []
        for call in range(QUEUED):
            source.copy_(self.given(pe, call, source))
            gave_up, sent = looked_at[0], self.sent(world, pe)
            made = operation.call(source, out, ctx, algorithm=kernel.algorithm)
            if gave_up:
                assert self.sent(world, pe) == sent, f"rank {pe} has given up, and sends in call {call}"
            results.append([result.clone() for result in made])
            for tensor in memory:
                tensor.fill_(-77)
        monitor.valid = looked_at
        try:
            ctx.check()
        except tdcoll.CollectiveTimeout:
            return "gave up", memory
        for call, made in enumerate(results):
            sources = [self.given(p, call, source) for p in range(ctx.world_size)]
            for got, wanted in zip(made, operation.wanted(sources, ctx.topology), strict=True):
                wrong = int((got != wanted).sum())
                assert wrong == 0, f"rank {pe}, call {call}: {wrong} wrong numbers"
        return "right", memory

    @staticmethod
    def given(pe: int, call: int, like: torch.Tensor) -> torch.Tensor:
        """What a rank brings to a call."""
        return values(pe, call, like.numel(), like.dtype).reshape(like.shape)

    @staticmethod
    def sent(world: World, pe: int) -> tuple[int, ...]:
        """How often a rank has written to others."""
        counts = world.counts[pe]
        return counts.puts, counts.signals, counts.stores


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "TARGET_CHUNK_BYTES", 32)


CALLS = {(kernel.operation, str(kernel.algorithm), kernel.nodes, kernel.lamport_bytes): kernel for kernel in KERNELS}


@seeds(2, 30)
@pytest.mark.parametrize("kernel", CALLS.values(), ids=str)
def test_every_rank_gives_up_or_has_the_right_result(kernel: Kernel, seeds: range) -> None:
    case = Queued(kernel)
    explore(case, seeds=seeds, **kernel.job)
    for seed in range(1000, 1030):  # until both have happened
        if case.early and len(case.ended) == 2:
            break
        explore(case, seeds=[seed], **kernel.job)
    assert case.early > 0
    assert set(case.ended) == {"right", "gave up"}


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_launches_after_an_expired_wait_must_do_nothing(kernel: Kernel, tmp_path: Path) -> None:
    """A rank that gave up and goes on sending writes over what a late peer has yet to read."""
    with installed([Change(kernel.where, "if alive == 0:\n    return", "pass")], tmp_path, MODULES):
        failure = first_failure(Queued(kernel), seeds=30, **kernel.job)
    assert failure is not None
    assert "gave up early: pe" in failure.report
