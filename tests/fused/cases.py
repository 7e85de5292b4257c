# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm, as users call it, as a case for `tdcoll.testing.explore`: bits compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Norms:
    """Runs ``calls`` on every rank, without a synchronisation, and then looks at all results.

    A call is ``o`` out of place, ``i`` in place; ``8`` fp8 with a scale per row, ``s`` with a given one, ``z`` of no
    rows; ``a`` is an all-reduce on the same context and ``g`` an all-gather.

    Attributes:
        algorithms: of the calls in turn, separated by spaces.
        rows: of the calls in turn.
        blocks: words of a piece, in turn; 0: as the policy says.
        hidden: of all calls.
        weight: dtype of the weights; None: that of the rows.
        lamport_bytes: of the context.
        first: number of the first epoch, and of the first Lamport call.
    """

    algorithms: str
    calls: str = "oio"
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
        with tdcoll.CollectiveContext(self.group, max_bytes_per_rank=1 << 12, lamport_bytes=self.lamport_bytes) as ctx:
            ctx.control.fill_((self.first - 1) << EPOCH_SHIFT.value)
            if ctx.device_lamport is not None:
                ctx.device_lamport.control.fill_((self.first - 1) << EPOCH_SHIFT.value)
            results = [self.call(ctx, call, kind) for call, kind in enumerate(self.calls)]
            ctx.check()
            for call, pairs in enumerate(results):
                for name, got, wanted in pairs:
                    wrong = int(different(got, wanted))
                    where = f"rank {ctx.rank}, call {call} ({self.calls[call]}), {name}"
                    assert wrong == 0, f"{where}: {wrong} wrong elements"
        assert tdcoll.heap_info().used == 0

    def call(self, ctx: tdcoll.CollectiveContext, call: int, kind: str) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Make a call; return each result's name, what came out and what should."""
        pes, nodes = ctx.topology.pes, ctx.topology.nodes
        if kind in "ag":
            mine = [self.given(pe, call, 1) for pe in pes]
            if kind == "g":
                return [("gathered", tdcoll.all_gather(mine[ctx.rank], ctx=ctx), torch.cat(mine))]
            return [("reduced", tdcoll.all_reduce(mine[ctx.rank], ctx=ctx), reduce_parts(mine, nodes))]
        rows = 0 if kind == "z" else self.rows[call % len(self.rows)]
        turns = self.algorithms.split()
        name, block = turns[call % len(turns)], self.blocks[call % len(self.blocks)]
        every = [self.given(pe, call, rows) for pe in pes]
        residual, weight = self.given(-1, call, rows), values(7, (self.hidden,), self.weight or self.dtype)
        scale = torch.tensor([0.03]) if kind == "s" else None
        x, old = every[ctx.rank].clone(), residual.clone()
        made = tdcoll.fused.all_reduce_rms_norm(
            x,
            old,
            weight,
            ctx=ctx,
            eps=1e-3,
            in_place=kind == "i",
            out_dtype=FP8 if kind in "8s" else None,
            scale=scale,
            algorithm=plan(name, self.hidden, self.dtype, block) if block else name,
        )
        assert (made[1] is old) == (kind == "i")
        if not rows:
            return []
        asked = "row" if kind == "8" else scale
        wanted = norm_reference(reduce_parts(every, nodes), residual, weight, 1e-3, asked)
        pairs = [(what, *pair) for what, *pair in zip(NAMES, made, wanted, strict=False)]
        pairs.append(("x, which must stay", x, every[ctx.rank]))
        if kind != "i":
            pairs.append(("the residual, which must stay", old, residual))
        return pairs
