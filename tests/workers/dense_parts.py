# SPDX-License-Identifier: Apache-2.0
"""What check scripts share that call dense collectives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import device, expect, simulated, world

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from collectives.suite.calls import Calls, in_pieces
from collectives.suite.data import SPECS, different, pattern, reference, values
from collectives.suite.kinds import (
    CALLER_BUFFER,
    IN_PLACE,
    OUT_OF_PLACE,
    SYMMETRIC,
    Kind,
    in_turn,
    kinds_of,
    make_call,
    place,
    supported,
)
from primitives import cases

import tdcoll
from tdcoll import runtime
from tdcoll.calls.plan import Facts
from tdcoll.calls.spec import Collective

__all__ = [
    "CALLER_BUFFER",
    "IN_PLACE",
    "OUT_OF_PLACE",
    "SIZES",
    "SPECS",
    "SYMMETRIC",
    "Calls",
    "Kind",
    "Watched",
    "cases",
    "data",
    "in_pieces",
    "in_turn",
    "kind_of",
    "kinds_of",
    "left_alone",
    "make_call",
    "place",
    "reference",
    "replay_captured",
    "right",
    "served",
    "sizes_of",
    "supported",
    "wanted",
]

SIZES = [0, 7, 1000] if simulated() else [0, 1, 2, 7, 255, 1000, 4096, 65536 + 3, 1 << 18, 3 << 20]


def kind_of(spec: Collective) -> torch.dtype:
    return torch.float32 if spec.reduces else torch.uint8


def served(
    spec: Collective,
    ctx: tdcoll.CollectiveContext,
    nbytes: int,
    dtype: torch.dtype,
    kind: Kind = OUT_OF_PLACE,
) -> list[str]:
    """Algorithms that serve segments of so many bytes on all ranks of this context."""
    facts = Facts.of(ctx, nbytes, dtype if spec.reduces else None, kind.landing)
    return [each.name for each in spec.algorithms if each.supports(facts) is None]


def sizes_of(spec: Collective) -> list[int]:
    """Elements of a segment: not too many for all ranks together."""
    return [size for size in SIZES if size <= (4 << 20) // (world() if spec.scatters else 1)]


def data(
    spec: Collective, call: int, n: int, dtype: torch.dtype, ranks: int = 0
) -> list[torch.Tensor]:
    """What each rank gives to a call of ``n`` elements in a segment; the same on all."""
    ranks = ranks or world()
    numbers = values if spec.reduces else pattern
    return [
        numbers(owner, call, n * ranks if spec.scatters else n, dtype).to(device())
        for owner in range(ranks)
    ]


def wanted(spec: Collective, every: list[torch.Tensor], op: str = "sum") -> torch.Tensor:
    return reference(spec, every, tdcoll.topology(), op)


def right(got: torch.Tensor, should: torch.Tensor, what: str) -> None:
    expect(
        got.dtype == should.dtype and got.numel() == should.numel(),
        f"{what}: got {got.dtype} {list(got.shape)}",
    )
    wrong = int(different(got.flatten(), should.flatten()))
    expect(wrong == 0, f"{what}: {wrong} wrong elements")


class Watched:
    """Symmetric memory for calls of one kind after the other, and a counter of wrong elements on
    the device."""

    def __init__(self, spec: Collective, most: int, dtype: torch.dtype) -> None:
        self.spec, self.dtype = spec, dtype
        many = world() if spec.scatters or spec.gathers else 1
        self.shared = tdcoll.empty((32 + most * many,), dtype)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device())

    def call(
        self, ctx: tdcoll.CollectiveContext, kind: Kind, every: list[torch.Tensor], n: int, how: Any,
        should: torch.Tensor, offset: int = 0, op: str = "sum",
    ) -> None:  # fmt: skip
        """Make a call, and look at everything around its result as well."""
        placed = place(self.spec, kind, n, offset, ctx, self.dtype, self.shared)
        placed.tensor.copy_(every[ctx.rank])
        got = make_call(self.spec, kind, placed.tensor, placed.out, ctx, how, op)
        expect(got is placed.out, "a call returns its result")
        for memory in placed.memories:
            self.wrong += different(memory, placed.expected(memory, every[ctx.rank], should))

    def done(self, what: str) -> None:
        """Raise if anything was wrong; give the memory back."""
        expect(int(self.wrong) == 0, f"{self.spec.name}, {what}: {int(self.wrong)} wrong elements")
        tdcoll.free(self.shared)


def replay_captured(spec: Collective, n: int, captured: int, replays: int) -> None:
    """``captured`` calls of all kinds as one graph, of changing data, replayed with eager calls in
    between."""
    dtype = torch.float32 if spec.reduces else torch.int32
    # exact in any order
    base = [tensor.remainder(50).to(dtype) for tensor in data(spec, 3, n, torch.int32)]
    watched, step = Watched(spec, n, dtype), torch.ones((), dtype=dtype, device=device())
    with tdcoll.CollectiveContext(dist.group.WORLD, max_bytes_per_rank=8192) as ctx:
        kinds = [
            (kind, name)
            for kind in kinds_of(spec)
            for name in ("auto", *served(spec, ctx, n * dtype.itemsize, dtype, kind))
        ]

        def one(turn: int) -> None:
            kind, name = kinds[turn % len(kinds)]
            step.add_(1)
            every = [tensor * step for tensor in base]
            watched.call(ctx, kind, every, n, name, wanted(spec, every))

        for turn in range(len(kinds)):
            one(turn)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for turn in range(captured):
                one(turn)
        for replay in range(replays):
            step.fill_(replay % 100)
            graph.replay()
            if replay % 7 == 3:
                one(replay)
        ctx.check()
    expect(int(step) >= captured, "the graph did not run")
    watched.done(f"{captured} calls of {n} captured")


def left_alone() -> None:
    """Let all ranks leave without each other: contexts whose calls failed are never given back."""
    runtime.current().failed = True
