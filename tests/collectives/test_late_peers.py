# SPDX-License-Identifier: Apache-2.0
"""Deadlines that expire while the peer is only late: a rank that gives up must not spoil the results of its peers.

To test another kernel, add a row to ``KERNELS``.
"""

from __future__ import annotations

import re
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
        return {"n_pes": sum(self.nodes), "ranks_per_node": self.nodes, "heap_bytes": HEAP}

    def context(self) -> tuple[Any, tdcoll.WaitMonitor]:
        """A context of all ranks, and what ends its waits."""
        if self.operation.sparse:
            sparse = tdcoll.SparseContext(max_rows_per_rank=4, max_row_bytes=12)
            return sparse, sparse.collective.monitor
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=256, lamport_bytes=self.lamport_bytes)
        return ctx, ctx.monitor

    def check(self, ctx: Any, call: int, made: Tensors, source: torch.Tensor) -> None:
        """Raise AssertionError unless ``made`` are the results of a call."""
        sources = [given(pe, call, source) for pe in range(ctx.world_size)]
        for got, wanted in zip(made, self.operation.wanted(sources, ctx.topology), strict=True):
            wrong = int((got != wanted).sum())
            assert wrong == 0, f"rank {ctx.rank}, call {call}: {wrong} wrong numbers"


def given(pe: int, call: int, like: torch.Tensor) -> torch.Tensor:
    """What a rank brings to a call."""
    return values(pe, call, like.numel(), like.dtype).reshape(like.shape)


def two_pieces(algorithm: str) -> tdcoll.Plan:
    return tdcoll.Plan(algorithm, 2, 64, 1)


KERNELS = [
    Kernel("kernels_ll.exchange_ll", GATHER, "ll"),
    Kernel("kernels_ll.exchange_ll", GATHER_IN_PLACE, "ll"),
    Kernel("all_gather.kernels_puts.all_gather_ll_2d", GATHER, "ll", (2, 2)),
    Kernel("exchange.kernels_direct.exchange_direct", GATHER, "direct"),
    Kernel("exchange.kernels_direct.exchange_direct", GATHER_IN_PLACE, "direct"),
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
    Kernel("exchange.kernels_direct.exchange_direct", SPARSE, "gather"),
    Kernel("sparse_all_reduce.kernels_nodes.reduce_nodes", SPARSE, "owner", (1, 1)),
    Kernel("sparse_all_reduce.kernels_nodes.forward", SPARSE, "owner", (1, 1)),
    Kernel("sparse_all_reduce.kernels_nodes.meet_nodes", SPARSE, "owner", (1, 1)),
]


EARLY: dict[str, Any] = {"on_timeout": "early"}


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
        ctx, monitor = kernel.context()
        memory = source, out = operation.memory(ctx.world_size, pe)
        looked_at, monitor.valid = monitor.valid, memoryview(bytearray(1))
        results = []
        for call in range(QUEUED):
            source.copy_(given(pe, call, source))
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
            kernel.check(ctx, call, made, source)
        return "right", memory

    @staticmethod
    def sent(world: World, pe: int) -> tuple[int, ...]:
        """How often a rank has written to others."""
        counts = world.counts[pe]
        return counts.puts, counts.signals, counts.stores


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "TARGET_CHUNK_BYTES", 32)


CALLS: dict[Any, Kernel] = {}
for _kernel in KERNELS:
    CALLS.setdefault((_kernel.operation, str(_kernel.algorithm), _kernel.nodes, _kernel.lamport_bytes), _kernel)


@seeds(2, 30)
@pytest.mark.parametrize("kernel", CALLS.values(), ids=str)
def test_every_rank_gives_up_or_has_the_right_result(kernel: Kernel, seeds: range) -> None:
    case = Queued(kernel)
    explore(case, seeds=seeds, **kernel.job, **EARLY)
    for seed in range(1000, 1030):  # until both have happened
        if case.early and len(case.ended) == 2:
            break
        explore(case, seeds=[seed], **kernel.job, **EARLY)
    assert case.early > 0
    assert set(case.ended) == {"right", "gave up"}


@pytest.mark.parametrize("kernel", {kernel.where: kernel for kernel in reversed(KERNELS)}.values(), ids=str)
def test_launches_after_an_expired_wait_must_do_nothing(kernel: Kernel, tmp_path: Path) -> None:
    """A rank that gave up and goes on sending writes over what a late peer has yet to read."""
    with installed([Change(kernel.where, "if alive == 0:\n    return", "pass")], tmp_path, MODULES):
        failure = first_failure(Queued(kernel), seeds=30, **kernel.job, **EARLY)
    assert failure is not None
    assert "gave up early: pe" in failure.report


class Deserted:
    """Rank ``late`` begins its second call when rank ``gives_up`` has given up on it.

    Each of the others gives up, too, or has the right results.
    """

    def __init__(self, kernel: Kernel, late: int, gives_up: int) -> None:
        self.kernel, self.late, self.gives_up = kernel, late, gives_up

    def __call__(self, world: World) -> None:
        self.monitors: dict[int, tdcoll.WaitMonitor] = {}
        world.run(lambda pe: self.host(pe, world))

    def host(self, pe: int, world: World) -> None:
        kernel = self.kernel
        ctx, self.monitors[pe] = kernel.context()
        memory = source, out = kernel.operation.memory(ctx.world_size, pe)
        for call in range(2):
            for tensor in memory:
                tensor.fill_(-77)
            if call and pe == self.late:
                world.pause(100)
                monitor = self.monitors[self.gives_up]
                monitor.abort()
                world.scheduler.notify(("monitor", monitor.words.data_ptr()))
                world.pause(100)
                assert all(bool((tensor == -77).all()) for tensor in memory), f"rank {pe} is written to before its call"
            source.copy_(given(pe, call, source))
            made = kernel.operation.call(source, out, ctx, algorithm=kernel.algorithm)
            if self.monitors[pe].expired or (pe == self.gives_up and call):
                return
            kernel.check(ctx, call, made, source)


def pairs(kernel: Kernel) -> list[tuple[int, int]]:
    """The late rank and the one that gives up: neighbours either way, and of two nodes where there are several."""
    world, first = sum(kernel.nodes), kernel.nodes[0]
    return [(late, 0) for late in sorted({1, first if first < world else world - 1})]


PATIENT: dict[str, Any] = {"on_timeout": "expire", "weak": False, "stragglers": False}


NODES_OF_THREE = Kernel("all_reduce.kernels_nodes.all_reduce_nodes", REDUCE, "2d", (3, 3))


@pytest.mark.parametrize("kernel", [*CALLS.values(), NODES_OF_THREE], ids=str)
def test_a_rank_that_comes_when_another_has_given_up(kernel: Kernel) -> None:
    for late, gives_up in pairs(kernel):
        explore(Deserted(kernel, late, gives_up), seeds=2, **kernel.job, **PATIENT)


WRITES = "stores.may_write(g, window, {}, epoch) != 0"
SUMS = "tdl.wait_signals(arrived, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WAITED) != 0"
SEND_ON = "words.send_to_all(g, inbox, deltas, part + place, result, call, {}, LAMPORT)"
ROWS_ON = "words.send_to_all(g, inbox, deltas, each * width + place, made, call, {}, True)"
OF_NODE = "_wait_for(routes.ranks, routes.n_local, arrived, index, g, epoch) != 0"
OF_RAIL = "_wait_for(rail, routes.n_remote, arrived, index, g, epoch) != 0"
ONE_SIGNAL = "tdl.wait_signal(signals + r, tdl.CMP_GE, epoch, g.monitor, r, first_index + r)"
HEEDLESS: dict[str, tuple[Any, str, str, str | None]] = {
    # Calls; the function, if it is not the kernel; what it has; what it gets instead, or None: any outcome will do.
    "direct writes to who has not entered": ("exchange_direct, in place on 2", "", WRITES.format("to"), None),
    "ring writes to who has not entered": ("all_gather_ring, in place on 3", "", WRITES.format("after"), None),
    "1d writes to who has not entered": (
        "all_gather_1d, in place on 1+1", "primitives.puts.push_remote", "may_write(g, window, peer, epoch) != 0", None,
    ),
    "ring passes on what has not come": ("all_gather_ring on 3", "", "here != 0", None),
    "2d passes on what has not come": ("all_gather_2d on 2+2", "", "arrived != 0", None),
    "ll passes on what has not come": ("all_gather_ll_2d on 2+2", "", "arrived != 0", None),
    **{
        f"two-shot sends sums of what has not come{more}": (
            f"all_reduce_two_shot{more} on 2", "all_reduce.kernels_words._sum_and_hand_on",
            SEND_ON.format("summed"), SEND_ON.format("mask"),
        )
        for more in ("", ", flags")
    },
    "direct sums what has not come": ("all_reduce_direct on 2", "", SUMS, None),
    "1d sums what has not come": ("all_reduce_puts on 1+1", "", SUMS, None),
    "2d sums what has not come of the node": ("all_reduce_nodes on 2+2", "", OF_NODE, None),
    "2d sums what has not come of the rail": ("all_reduce_nodes on 2+2", "", OF_RAIL, None),
    "two-stage sends rows of what has not come": (
        "norm_rows_two_stage on 2", "", ROWS_ON.format("mask"), ROWS_ON.format("there"),
    ),
    "2d sums when the last rank has come": (
        NODES_OF_THREE, "all_reduce.kernels_nodes._wait_for",
        f"came & {ONE_SIGNAL}", ONE_SIGNAL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEEDLESS)
def test_kernels_must_heed_waits_that_expire(name: str, tmp_path: Path) -> None:
    """A late peer would take for right what a rank sends that has given up within the launch."""
    calls, where, old, new = HEEDLESS[name]
    kernel = calls if isinstance(calls, Kernel) else next(known for known in CALLS.values() if str(known) == calls)
    reports = []
    with installed([Change(where or kernel.where, old, new or old.replace("!= 0", ">= 0"))], tmp_path, MODULES):
        for late, gives_up in pairs(kernel):
            failure = first_failure(Deserted(kernel, late, gives_up), seeds=4, **kernel.job, **PATIENT)
            reports += [] if failure is None else [failure.report]
    assert reports
    assert all(re.search("wrong numbers|is written to", report) for report in reports)
