# SPDX-License-Identifier: Apache-2.0
"""All-reduce, as users call it, as a case for `tdcoll.testing.explore`: many small chunks, results read late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import tdcoll
from tdcoll.collectives.all_reduce.policy import part_bytes, parts
from tdcoll.collectives.reduce_scatter.reference import reduce_parts, reduce_scatter_reference
from tdcoll.primitives.group import EPOCH_SHIFT

from ..reduce_scatter.cases import same_bits, values

CHUNK = 32
"""Bytes of a chunk, so that few elements have several."""

WORDS = {"one_shot": 4, "two_shot": 2}
"""Words of one that needs no signal."""


def by_hand(algorithm: str, tensor: torch.Tensor, ctx: tdcoll.CollectiveContext) -> tdcoll.Plan:
    """Chunks as small as these."""
    if algorithm not in WORDS:
        part = part_bytes(tensor.nbytes, parts(ctx.topology, algorithm))
        return tdcoll.Plan(algorithm, max(1, -(-part // CHUNK)), CHUNK, 1)
    width = 16 if tensor.is_floating_point() and ctx.lamport_bytes else 12
    words = max(1, -(-tensor.nbytes // width))
    if algorithm == "two_shot":
        words = -(-words // ctx.world_size)
    return tdcoll.Plan(algorithm, -(-words // WORDS[algorithm]), width * WORDS[algorithm], 1)


@dataclass(frozen=True)
class Reductions:
    """Runs ``calls`` on every rank, without a synchronisation, and then looks at all results.

    A call is ``o`` out of place, ``i`` in place, ``z`` of no elements; ``y`` out of place and ``Y`` in place with a
    symmetric result, which is the same memory for all of them and is read right after the call; ``g`` is an all-gather
    on the same context, and ``s`` a reduce-scatter.

    Attributes:
        algorithm: of the calls; or several, separated by spaces, for the all-reduces in turn.
        calls: kinds of calls, in order.
        counts: elements of the all-reduces, in turn.
        ops: of the all-reduces, in turn.
        offset: elements from an aligned address to those of the tensors.
        group: ranks that take part; None for all.
        named: chunks are the policy's, and not many small ones.
        most: as ``max_bytes_per_rank`` of the context; None: what makes each call one epoch.
        lamport_bytes: of the context; 0: floating types go by flagged words, too.
        max_programs: of the context; with few of them, programs take several blocks of words.
        first: number of the first epoch, and of the first Lamport call.
    """

    algorithm: str
    calls: str = "oio"
    counts: Sequence[int] = (46,)
    dtype: torch.dtype = torch.float32
    ops: Sequence[str] = ("sum",)
    offset: int = 0
    group: Sequence[int] | None = None
    named: bool = False
    most: int | None = None
    lamport_bytes: int | None = None
    max_programs: int | None = None
    first: int = 1

    def __call__(self, world: tdcoll.testing.World) -> None:
        world.run(self.host)

    def tensor(self, pe: int, call: int, count: int) -> torch.Tensor:
        """What a PE gives to a call."""
        return values(pe, call, count, self.dtype)

    def host(self, pe: int) -> None:
        if self.group is not None and pe not in self.group:
            return
        most = 3 * (max(self.counts) + 1) * self.dtype.itemsize + 48 if self.most is None else self.most
        with tdcoll.CollectiveContext(
            self.group, max_bytes_per_rank=most, lamport_bytes=self.lamport_bytes, max_programs=self.max_programs
        ) as ctx:
            ctx.control.fill_((self.first - 1) << EPOCH_SHIFT.value)
            if ctx.device_lamport is not None:
                ctx.device_lamport.control.fill_((self.first - 1) << EPOCH_SHIFT.value)
            results = []
            turn = 0
            shared = None
            if "y" in self.calls.lower():
                shared = tdcoll.empty(
                    (32 + self.offset + max(self.counts),), self.dtype, group=self.group, name="shared"
                )
            for call, kind in enumerate(self.calls):
                if kind in "gs":
                    results.append(self.other_call(ctx, call, kind))
                else:
                    results.append(self.call(ctx, call, kind, turn, shared))
                    turn += 1
            ctx.check()
            if shared is not None:
                tdcoll.free(shared)
            for call, (got, wanted) in enumerate(results):
                wrong = same_bits(got, wanted)
                assert wrong == 0, f"rank {ctx.rank}, call {call} ({self.calls[call]}): {wrong} wrong elements"
        assert tdcoll.heap_info().used == 0

    def call(
        self, ctx: tdcoll.CollectiveContext, call: int, kind: str, turn: int, shared: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(what came out, what should)`` of an all-reduce."""
        turns, offset = self.algorithm.split(), self.offset
        count = 0 if kind == "z" else self.counts[turn % len(self.counts)]
        op, algorithm = self.ops[turn % len(self.ops)], turns[turn % len(turns)]
        given = [self.tensor(pe, call, count) for pe in ctx.topology.pes]
        tensor = torch.empty(offset + count, dtype=self.dtype)[offset:]
        tensor.copy_(given[ctx.rank])
        # Elements before and after the result, which must stay as they are.
        room = torch.full((offset + count + 2,), 3, dtype=self.dtype)
        begin = offset + 1
        if symmetric := kind in "yY":
            assert shared is not None
            begin = 16 + offset
            room = shared[: begin + count + 1].fill_(3)
            if kind == "Y":
                tensor = room[begin:-1].copy_(tensor)
        out = tensor if kind in "iY" else room[begin:-1]
        named = algorithm if self.named else by_hand(algorithm, tensor, ctx)
        got = tdcoll.all_reduce(tensor, ctx, out, op, named, symmetric=symmetric)
        assert got is out
        assert bool((room[:begin] == 3).all() and room[-1] == 3), "something else was written to"
        if symmetric:
            out = out.clone()
        if kind not in "iY":
            assert same_bits(tensor, given[ctx.rank]) == 0, "the input was written to"
        return out, reduce_parts(given, ctx.topology.nodes, op)

    def other_call(self, ctx: tdcoll.CollectiveContext, call: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of another collective."""
        count = ctx.max_bytes_per_rank // self.dtype.itemsize if kind == "g" else 2 * ctx.world_size
        given = [self.tensor(pe, call, count) for pe in ctx.topology.pes]
        if kind == "g":  # of all the memory that peers write to
            return tdcoll.all_gather(given[ctx.rank], ctx).flatten(), torch.cat(given)
        wanted = reduce_scatter_reference(given, ctx.topology.nodes)
        return tdcoll.reduce_scatter(given[ctx.rank], ctx), wanted[ctx.rank]
