# SPDX-License-Identifier: Apache-2.0
"""Matmuls that communicate, as users call them, as cases for `tdcoll.testing.explore`: bits
compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from collectives.suite.data import different

import tdcoll
from tdcoll.fused.matmul.operation import FP8
from tdcoll.fused.matmul.policy import GATHER, SCATTER, Cut, MatmulPlan

from .cases import Residual, add_residual, sum_of, whole


def calls_by(name: str, algorithm: Any, **changes: Any) -> Calls:
    """Return calls by an algorithm that supports them: two-shot calls need a share of each tile for
    each rank, and copied ones a tile of rows from each rank."""
    usual: dict[str, Any] = {}
    if algorithm == "two_shot":
        usual = {"rows": (6,), "columns": 72}
    if algorithm == "copied":
        depth = 128 if changes.get("dtype") in FP8 else 16
        keepers = 2 if changes.get("gathered") else 0
        cut = Cut(4, 16, depth, 1, 1, group=2)
        algorithm = MatmulPlan("copied", cut, 3, keepers=keepers, piece=160)
    return Calls(name, (algorithm,), **{**usual, **changes})


@dataclass(frozen=True)
class Call:
    """What one rank brings to a call, and its result.

    Attributes:
        x, weight: operands.
        more: further arguments.
        result: what the call returned.
    """

    x: torch.Tensor
    weight: torch.Tensor
    more: dict[str, Any]
    result: Any


@dataclass(frozen=True)
class Calls:
    """Makes ``count`` calls on every rank, without a synchronisation, and then compares all
    results.

    Attributes:
        name: of the public function.
        algorithms: of the calls in turn.
        rows: of a rank's shard, or of all rows of an all-reduce; of the calls in turn.
        depth, columns: of this rank's matmul.
        dtype, out_dtype: of operands and results.
        scales: of fp8 operands, ``"tensor"`` or ``"row"``.
        gathered: the gathered matrix is wanted.
        given: ``out`` is given.
        own: the calls use tdcoll's own context.
        context: arguments of the context.
        late: turns of the scheduler that a rank lets pass before each call, by rank.
    """

    name: str
    algorithms: Sequence[Any] = ("auto",)
    count: int = 2
    rows: Sequence[int] = (5,)
    depth: int = 32
    columns: int = 40
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    depth_first: bool = False
    biased: bool = False
    residual: bool = False
    scales: str = ""
    gathered: bool = False
    given: bool = False
    own: bool = False
    batch_invariant: bool = False
    context: tuple[tuple[str, Any], ...] = (
        ("max_bytes_per_rank", 1 << 17),
        ("lamport_bytes", 1 << 16),
    )
    late: Sequence[int] = ()

    def __call__(self, world: tdcoll.testing.World) -> None:
        world.run(lambda pe: self.host(world, pe))

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of results."""
        if self.out_dtype is not None:
            return self.out_dtype
        return torch.bfloat16 if self.dtype in FP8 else self.dtype

    def host(self, world: Any, pe: int) -> None:
        """Run on one rank."""
        if self.own:
            self.calls(world, None, pe, world.n_pes)
            return
        with tdcoll.CollectiveContext(**dict(self.context)) as ctx:
            self.calls(world, ctx, pe, ctx.world_size)
            ctx.check()

    def calls(self, world: Any, ctx: Any, rank: int, n_ranks: int) -> None:
        """Make the calls, and compare."""
        made = []
        for number in range(self.count):
            for _ in range(self.late[rank % len(self.late)] if self.late else 0):
                world.pause()
            made.append(self.call(number, rank, n_ranks, ctx))
        for number, call in enumerate(made):
            self.compare(number, rank, n_ranks, call)

    def operands(
        self, number: int, rank: int, n_ranks: int
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return ``x``, the weight and the scales of a rank."""
        rows = self.rows[number % len(self.rows)]
        if self.name == SCATTER:
            rows *= n_ranks
        # Sums of the ranks' parts show their order.
        largest = 1.0 if self.name == GATHER or self.dtype in FP8 else 2.0**5
        scale = (largest, 1 / largest, -largest)[rank % 3]
        x = whole(100 * number + 2 * rank, rows, self.depth).to(self.dtype)
        weight = (whole(100 * number + 2 * rank + 1, self.columns, self.depth) * scale).to(
            self.dtype
        )
        scales: dict[str, Any] = {}
        if self.scales:
            counts = (rows, self.columns) if self.scales == "row" else (1, 1)
            scales = {
                "x_scale": torch.exp2(whole(number + 7 * rank, counts[0])),
                "weight_scale": torch.exp2(whole(number + 7 * rank + 3, counts[1])),
            }
        return x, weight, scales

    def call(self, number: int, rank: int, n_ranks: int, ctx: Any) -> Call:
        """Make a call."""
        x, weight, more = self.operands(number, rank, n_ranks)
        rows = self.tall(number, n_ranks)
        if self.biased:
            more["bias"] = whole(3, self.columns).to(self.result_dtype)
        if self.residual:
            residual = whole(5 + number, rows, self.columns).to(self.result_dtype)
            more |= {"epilogue": add_residual, "extra": Residual(residual, self.columns)}
        if self.given:
            more["out"] = torch.full((rows, self.columns), 77.0).to(self.result_dtype)
        if self.gathered:
            more["gathered"] = True
        if self.batch_invariant:
            more["batch_invariant"] = True
        function: Callable[..., Any] = getattr(tdcoll.fused, self.name)
        result = function(
            x,
            weight.t().contiguous() if self.depth_first else weight,
            depth_first=self.depth_first,
            out_dtype=self.out_dtype,
            algorithm=self.algorithms[number % len(self.algorithms)],
            ctx=ctx,
            **more,
        )
        assert not self.given or result is more["out"]
        return Call(x, weight, more, result)

    def tall(self, number: int, n_ranks: int) -> int:
        """Return the rows of a result."""
        rows = self.rows[number % len(self.rows)]
        return rows * n_ranks if self.name == GATHER else rows

    def compare(self, number: int, rank: int, n_ranks: int, call: Call) -> None:
        """Compare a result with the same in fp32, from all ranks' operands."""
        everyone = [self.operands(number, pe, n_ranks) for pe in range(n_ranks)]
        rows = everyone[0][0].shape[0]
        x_scale = [more["x_scale"].expand(rows) for _, _, more in everyone] if self.scales else []
        if self.name == GATHER:
            x = torch.cat([x.float() for x, _, _ in everyone])
            wanted = x @ call.weight.float().t()
            if self.scales:
                wanted = wanted * call.more["weight_scale"] * torch.cat(x_scale)[:, None]
        else:
            parts = []
            for pe, (x, weight, more) in enumerate(everyone):
                part = x.float() @ weight.float().t()
                if self.scales:
                    part = part * more["weight_scale"] * x_scale[pe][:, None]
                parts.append(part.to(self.result_dtype).float())
            wanted = sum_of(parts)
            if self.name == SCATTER:
                wanted = wanted.chunk(n_ranks)[rank]
        if self.biased:
            wanted = wanted + call.more["bias"].float()
        if self.residual:
            wanted = 2.0 * wanted + call.more["extra"].base.float()
        result = call.result[0] if self.gathered else call.result
        where = f"rank {rank}, call {number}"
        wrong = int(different(result, wanted.to(self.result_dtype)))
        assert wrong == 0, f"{where}: {wrong} wrong elements"
        if self.gathered:
            every_x = torch.cat([x for x, _, _ in everyone])
            assert int(different(call.result[1], every_x)) == 0, f"{where}: gathered"
