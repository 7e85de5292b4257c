# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm, as users call it, as a case for `tdcoll.testing.explore`: bits
compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from collectives.suite.data import different
from collectives.suite.data import values as numbers

import tdcoll
from tdcoll.calls.plan import Plan
from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.primitives.group import EPOCH_SHIFT

from .norms import norm_reference

NAMES = "normalized", "new residual", "scale"
FP8 = torch.float8_e4m3fn


def values(key: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of many magnitudes, whose sums show their order."""
    return numbers(key, 0, torch.Size(shape).numel(), dtype).view(*shape)


def plan(algorithm: str, hidden: int, dtype: torch.dtype, block: int) -> Plan:
    """Return the plan that has rows in pieces of ``block`` words."""
    words = hidden * dtype.itemsize // 16
    return Plan(algorithm, -(-words // block), 16 * block, 1)


class Kind(Enum):
    """How a call is made.

    Attributes:
        ROW_SCALES: the result is fp8, with a scale for each row.
        GIVEN_SCALE: the result is fp8, with a scale that the caller gives.
        NO_ROWS: out of place, of tensors without rows.
        ALL_REDUCE, ALL_GATHER: not of the norm, but on the same context.
    """

    OUT_OF_PLACE = "out of place"
    IN_PLACE = "in place"
    ROW_SCALES = "row scales"
    GIVEN_SCALE = "given scale"
    NO_ROWS = "no rows"
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"

    def __str__(self) -> str:
        return self.value


OUT_OF_PLACE = Kind.OUT_OF_PLACE
IN_PLACE = Kind.IN_PLACE
ROW_SCALES = Kind.ROW_SCALES
GIVEN_SCALE = Kind.GIVEN_SCALE
NO_ROWS = Kind.NO_ROWS
ALL_REDUCE = Kind.ALL_REDUCE
ALL_GATHER = Kind.ALL_GATHER


@dataclass(frozen=True)
class Norms:
    """Makes calls on every rank, one of each of ``kinds`` in order, without a synchronisation, and
    then looks at all results.

    Attributes:
        algorithms: of the calls in turn.
        kinds: of all calls, in order.
        rows: of the calls in turn.
        blocks: words of a piece, in turn; 0: as the policy says.
        hidden: of all calls.
        weight: dtype of the weights; None: that of the rows.
        lamport_bytes: of the context.
        first: number of the first epoch, and of the first Lamport call.
    """

    algorithms: Sequence[str]
    kinds: Sequence[Kind] = (OUT_OF_PLACE, IN_PLACE, OUT_OF_PLACE)
    rows: Sequence[int] = (3,)
    blocks: Sequence[int] = (0,)
    hidden: int = 72
    dtype: torch.dtype = torch.bfloat16
    weight: torch.dtype | None = None
    lamport_bytes: int | None = 1 << 14
    first: int = 1
    group: Sequence[int] | None = None

    def __call__(self, world: tdcoll.testing.World) -> None:
        world.run(self.host)

    def given(self, pe: int, call: int, rows: int) -> torch.Tensor:
        """Return what a PE brings to a call, ``[rows, hidden]``."""
        return values(1000 * call + pe, (rows, self.hidden), self.dtype)

    def host(self, pe: int) -> None:
        if self.group is not None and pe not in self.group:
            return
        with tdcoll.CollectiveContext(
            self.group, max_bytes_per_rank=1 << 12, lamport_bytes=self.lamport_bytes
        ) as ctx:
            ctx.control.fill_((self.first - 1) << EPOCH_SHIFT.value)
            if ctx.device_lamport is not None:
                ctx.device_lamport.control.fill_((self.first - 1) << EPOCH_SHIFT.value)
            results = [self.call(ctx, call, kind) for call, kind in enumerate(self.kinds)]
            ctx.check()
            for call, pairs in enumerate(results):
                for name, got, wanted in pairs:
                    wrong = int(different(got, wanted))
                    where = f"rank {ctx.rank}, call {call} ({self.kinds[call]}), {name}"
                    assert wrong == 0, f"{where}: {wrong} wrong elements"
        assert tdcoll.heap_info().used == 0

    def call(
        self,
        ctx: tdcoll.CollectiveContext,
        call: int,
        kind: Kind,
    ) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Make a call; return each result's name, what came out and what should."""
        pes, nodes = ctx.topology.pes, ctx.topology.nodes
        if kind is ALL_GATHER:
            every = [self.given(pe, call, 1) for pe in pes]
            gathered = tdcoll.all_gather(every[ctx.rank], ctx=ctx)
            return [("gathered", gathered, torch.cat(every))]
        if kind is ALL_REDUCE:
            every = [self.given(pe, call, 1) for pe in pes]
            reduced = tdcoll.all_reduce(every[ctx.rank], ctx=ctx)
            return [("reduced", reduced, reduce_parts(every, nodes))]
        rows = 0 if kind is NO_ROWS else self.rows[call % len(self.rows)]
        name = self.algorithms[call % len(self.algorithms)]
        block = self.blocks[call % len(self.blocks)]
        every = [self.given(pe, call, rows) for pe in pes]
        residual = self.given(-1, call, rows)
        weight = values(7, (self.hidden,), self.weight or self.dtype)
        scale = torch.tensor([0.03]) if kind is GIVEN_SCALE else None
        x = every[ctx.rank].clone()
        old = residual.clone()
        made = tdcoll.fused.all_reduce_rms_norm(
            x,
            old,
            weight,
            ctx=ctx,
            eps=1e-3,
            in_place=kind is IN_PLACE,
            out_dtype=FP8 if kind in (ROW_SCALES, GIVEN_SCALE) else None,
            scale=scale,
            algorithm=plan(name, self.hidden, self.dtype, block) if block else name,
        )
        assert (made[1] is old) == (kind is IN_PLACE)
        if not rows:
            return []
        asked = "row" if kind is ROW_SCALES else scale
        wanted = norm_reference(reduce_parts(every, nodes), residual, weight, 1e-3, asked)
        pairs = [(what, *pair) for what, *pair in zip(NAMES, made, wanted, strict=False)]
        pairs.append(("x, which must stay", x, every[ctx.rank]))
        if kind is not IN_PLACE:
            pairs.append(("the residual, which must stay", old, residual))
        return pairs
