# SPDX-License-Identifier: Apache-2.0
"""Calls of every kernel of every collective, again and again with the same memory, and what they
have to give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fused.norms import norm_reference
from landings import make_facts

import tdcoll
from tdcoll.calls import plan as plans
from tdcoll.calls.plan import Plan
from tdcoll.calls.spec import Collective
from tdcoll.collectives.reduce_scatter.reference import reduce_parts

from .suite.algorithm_cases import Dense, Nodes, all_dense, topology_of
from .suite.data import reference, values
from .suite.kinds import CALLER_BUFFER, OUT_OF_PLACE, SYMMETRIC, Kind, kinds_of, make_call, place

ROWS, HIDDEN = 6, 24
WEIGHT = torch.linspace(0.5, 2, HIDDEN)
LOST = -77

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Operation:
    """A collective, which each rank calls again and again with the same memory.

    Attributes:
        name: of it.
        memory: ``memory(ctx)``: the source, the result, and all memory that they lie in.
        call: ``call(source, out, ctx, algorithm, number)``: make the call of this number; return
            what it makes.
        results: ``results(made, out)``: the results of a call that is over, given what it has made.
        wanted: ``wanted(sources, topology, number)``: its results, given what all ranks bring.
        sparse: its context is a ``SparseContext``.
        tells: a rank that gives up tells its peers: they read its source, or its copies run in any
            case.
    """

    name: str
    memory: Callable[[Any], tuple[torch.Tensor, torch.Tensor, Tensors]]
    call: Callable[..., Any]
    wanted: Callable[[Tensors, Any, int], Tensors]
    results: Callable[[Any, torch.Tensor], Tensors] = lambda made, out: made
    sparse: bool = False
    tells: bool = False


def dense(spec: Collective, kind: Kind, copies: bool = False) -> Operation:
    """Calls of this kind of a dense collective, by copy engines or not."""

    def memory(ctx: Any) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        shared = None
        if kind.needs_symmetric_memory:
            shared = tdcoll.empty((128,), torch.float32)
        placed = place(spec, kind, 18, 0, ctx, torch.float32, shared)
        return placed.tensor, placed.out, placed.memories

    return Operation(
        spec.name if kind is OUT_OF_PLACE else f"{spec.name} {kind}",
        memory,
        lambda source, out, ctx, algorithm, number: [
            make_call(spec, kind, source, out, ctx, algorithm)
        ],
        lambda sources, topology, number: [reference(spec, sources, topology)],
        tells=copies,
    )


def apart(given: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    return given, out, (given, out)


def norm(source: torch.Tensor, out: torch.Tensor, ctx: Any, algorithm: Any, number: int) -> Tensors:
    made: Tensors = tdcoll.fused.all_reduce_rms_norm(
        source, out.fill_(0.25), WEIGHT, ctx=ctx, eps=1e-3, in_place=True, algorithm=algorithm
    )
    return made


def rows_of(rank: int, number: int) -> torch.Tensor:
    """Two rows that all ranks bring to a sparse all-reduce, and two that one or two do; others in
    the next call."""
    return torch.tensor([0, 1 + rank % 2, 3, 4]) + number % 2


def sparse(
    source: torch.Tensor, out: torch.Tensor, ctx: tdcoll.SparseContext, algorithm: str, number: int
) -> tdcoll.PaddedRows:  # fmt: skip
    ids = rows_of(ctx.rank, number)
    return tdcoll.sparse_all_reduce_padded(
        ids, source, ROWS, ctx=ctx, coalesced=True, algorithm=algorithm
    )


def sparse_results(made: tdcoll.PaddedRows, out: torch.Tensor) -> Tensors:
    """The rows that there are, in the table."""
    return (out.zero_().index_add_(0, made.indices, made.values),)


def sparse_wanted(sources: Tensors, topology: Any, number: int) -> Tensors:
    tables = [
        torch.zeros(ROWS, 3).index_copy_(0, rows_of(rank, number), part)
        for rank, part in enumerate(sources)
    ]
    return (reduce_parts(tables, topology.nodes),)


NORM = Operation(
    "norm", lambda ctx: apart(torch.empty(2, HIDDEN), torch.empty(2, HIDDEN)), norm,
    lambda sources, topology, number: norm_reference(
        reduce_parts(list(sources), topology.nodes), torch.full((2, HIDDEN), 0.25), WEIGHT, 1e-3, None
    )[:2],
)  # fmt: skip
SPARSE = Operation(
    "sparse",
    lambda ctx: apart(torch.empty(4, 3), torch.empty(ROWS, 3)),
    sparse,
    sparse_wanted,
    sparse_results,
    True,
)
BY_COPIES = dataclasses.replace(SPARSE, name="sparse by copies")
"""With a budget of thread blocks, as which :func:`lists_by_copies` makes exchanges of lists by copy
engines."""


@contextmanager
def lists_by_copies() -> Iterator[None]:
    """Lists of few rows count as large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "LARGE", 1)
        patch.setattr(plans, "LOOPS_FROM", 1)
        yield


@dataclass(frozen=True)
class Calls:
    """Calls that use some kernels.

    Attributes:
        operation: what the calls are.
        algorithm: theirs, or a plan.
        kernels: as a :class:`~kernel_mutants.Change` has them.
        nodes: ranks of each node.
        lamport_bytes: of the context; 0: words have flags.
    """

    operation: Operation
    algorithm: Any
    kernels: tuple[str, ...]
    nodes: Nodes = (2,)
    lamport_bytes: int | None = None

    def __str__(self) -> str:
        algorithm = (
            self.algorithm
            if isinstance(self.algorithm, str)
            else f"{self.algorithm.algorithm} in two pieces"
        )
        flags = " flags" * (self.lamport_bytes == 0)
        return f"{self.operation.name} {algorithm}{flags} {'+'.join(map(str, self.nodes))}"

    @property
    def queued(self) -> int:
        """Calls that are launched before the host looks for expired waits, as in a CUDA graph: more
        than there are slots, of which sparse calls, each of several launches, have one."""
        return 3 if self.operation.sparse else 5

    def context(self, **options: Any) -> tuple[Any, tdcoll.WaitMonitor]:
        """A context of all ranks, and what ends its waits. ``options``: of the context, such as
        ``debug``."""
        if self.operation.sparse:
            options |= {"max_blocks": 8} if self.operation is BY_COPIES else {}
            sparse = tdcoll.SparseContext(max_rows_per_rank=4, max_row_bytes=12, **options)
            return sparse, sparse.monitor
        ctx = tdcoll.CollectiveContext(
            max_bytes_per_rank=256, lamport_bytes=self.lamport_bytes, **options
        )
        return ctx, ctx.monitor

    def check(self, ctx: Any, call: int, made: Tensors, source: torch.Tensor) -> None:
        """Raise AssertionError unless ``made`` are the results of a call."""
        sources = [given(pe, call, source) for pe in range(ctx.world_size)]
        for got, wanted in zip(
            made, self.operation.wanted(sources, ctx.topology, call), strict=True
        ):
            wrong = int((got != wanted).sum())
            assert wrong == 0, f"rank {ctx.rank}, call {call}: {wrong} wrong numbers"


def given(pe: int, call: int, like: torch.Tensor) -> torch.Tensor:
    """What a rank brings to a call."""
    return values(pe, call, like.numel(), like.dtype).reshape(like.shape)


def calls_of(known: Dense) -> list[Calls]:
    """Calls of all kernels of a dense collective, on as few ranks as will do."""
    found = []
    for name, how in ((name, known.spec.algorithm(name)) for name in known.spec.names):
        hops = known.relays.get(name)
        layouts = [(3,) if hops == 1 else (2,), (2, 2) if hops == 2 else (1, 1)]
        for nodes in layouts:
            for kind in (OUT_OF_PLACE, CALLER_BUFFER, SYMMETRIC):
                facts = make_facts(
                    72, topology_of(nodes), stores=True, ll_bytes=99, lamport_bytes=99, **kind.form
                )
                if how.supports(facts) is not None or kind not in kinds_of(known.spec):
                    continue
                out_of_place = how.supports(make_facts(72, facts.topology, stores=True)) is None
                if kind is SYMMETRIC and how.copies is None and out_of_place:
                    continue  # as out of place, but for where sums land
                kernel = how.kernel(facts).fn
                where = f"{kernel.__module__}.{kernel.__name__}"
                words = (None, 0) if len(how.words) == 2 else (None,)
                operation = dense(known.spec, kind, how.copies is not None)
                found += [Calls(operation, name, (where,), nodes, lamport) for lamport in words]
    return found


def two_pieces(algorithm: str) -> Plan:
    return Plan(algorithm, 2, 64, 1)


ONE_SHOT, TWO_SHOT = (
    ("tdcoll.fused.kernels.norm_rows_one_shot",),
    ("tdcoll.fused.kernels.norm_rows_two_shot",),
)
ONE_NODE = ("sparse_all_reduce.kernels_reduce.reduce",)
NODES = tuple(
    f"sparse_all_reduce.kernels_nodes.{name}" for name in ("reduce_nodes", "forward", "meet_nodes")
)
ALL = [
    *(calls for known in all_dense() for calls in calls_of(known)),
    Calls(NORM, "one_shot", ONE_SHOT),
    Calls(NORM, two_pieces("one_shot"), ONE_SHOT),
    Calls(NORM, "two_shot", TWO_SHOT),
    Calls(NORM, two_pieces("two_shot"), TWO_SHOT),
    Calls(SPARSE, "owner", ONE_NODE),
    Calls(SPARSE, "gather", ("tdcoll.collectives.exchange.kernels_direct.exchange_direct",)),
    Calls(SPARSE, "owner", NODES, (1, 1)),
]
KNOWN = {str(calls): calls for calls in ALL}
