# SPDX-License-Identifier: Apache-2.0
"""Launches of the matmul kernels on every rank, as cases for `tdcoll.testing.explore`: bits
compared.

Numbers are whole, times a power of two for each rank. So a product is exact in fp32, whatever the
order of its depth, and a sum over ranks shows its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from collectives.suite.calls import different

import tdcoll
import tdcoll.fused.matmul.kernels_all_reduce
import tdcoll.fused.matmul.kernels_gather
import tdcoll.fused.matmul.kernels_scatter
import tdcoll.primitives.copies
from tdcoll.fused.matmul import launches
from tdcoll.fused.matmul.launches import Cut, Operands
from tdcoll.language.jit import jit
from tdcoll.primitives.epilogue import identity
from tdcoll.primitives.group import EPOCH_SHIFT, Inbox

# Kernels are looked up in these packages at every call, because mutants replace their modules.
KERNELS = tdcoll.fused.matmul

GUARD = 16
"""Elements around a result, which must stay as they are: so many that results are aligned."""
SMALL = Cut(4, 16, 8, 1, 1, group=2)
DEEP = Cut(4, 32, 128, 1, 1, group=2)
"""For fp8, whose steps have 128 elements."""


class Residual(NamedTuple):
    """What :func:`add_residual` adds, and the elements of a row."""

    base: Any
    stride: tl.int64


@jit
def add_residual(sums, rows, columns, inside, extra):
    """An epilogue: twice the sum plus a residual."""
    return 2.0 * sums + tl.load(
        extra.base + rows * extra.stride + columns, mask=inside, other=0.0
    ).to(tl.float32)


@jit
def negate(sums, rows, columns, inside, extra):
    """An epilogue that makes -0.0 of 0.0."""
    return sums * -1.0


def whole(key: int, *shape: int) -> torch.Tensor:
    """Return whole numbers from -6 to 6, which every dtype has."""
    made = torch.Generator().manual_seed(key)
    numbers = torch.tensor([-6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6])
    return numbers[torch.randint(0, len(numbers), shape, generator=made)].float()


@dataclass(frozen=True)
class Matmuls:
    """Runs ``calls`` on every rank, without a synchronisation, and then looks at all results.

    A call is ``m``, the matmul; ``g`` is an all-gather and ``a`` an all-reduce on the same context.

    Attributes:
        rows: of the calls in turn, as the kernel's ``shape`` counts them.
        depth, columns: of all calls.
        cut: of all calls.
        blocks: thread blocks that multiply, of the calls in turn.
        dtype, out: of operands and results; None: as the operands, or bf16 for fp8.
        depth_first: the weight is ``[depth, columns]``.
        biased, residual: whether there is a bias, and an epilogue that adds a residual.
        scales: of fp8 operands: ``"tensor"`` or ``"row"``.
        group: ranks that call; None: all.
        first: number of the first epoch, and of the first Lamport call.
        late: turns of the scheduler that a rank lets pass before each call, by rank.
        patient: waits don't expire. Otherwise a rank whose wait has expired may raise; all others
            get right results.
        looks: ranks other than the first look for expired waits behind every call, and then use its
            result.
        ended: how many ranks ended with right results and how many gave up, and waits that expired
            early.
    """

    calls: str = "mmm"
    rows: Sequence[int] = (5,)
    depth: int = 24
    columns: int = 40
    cut: Cut = SMALL
    blocks: Sequence[int] = (3,)
    dtype: torch.dtype = torch.bfloat16
    out: torch.dtype | None = None
    depth_first: bool = False
    biased: bool = False
    residual: bool = False
    scales: str = ""
    group: Sequence[int] | None = None
    first: int = 1
    late: Sequence[int] = ()
    patient: bool = True
    looks: bool = False
    ended: Counter[str] = field(default_factory=Counter, compare=False, repr=False)
    context: dict[str, int] = field(
        default_factory=lambda: {"max_bytes_per_rank": 1 << 14, "lamport_bytes": 1 << 14}
    )

    def __call__(self, world: tdcoll.testing.World) -> None:
        ended = world.run(lambda pe: self.host(world, pe))
        self.ended.update(how for how in ended if how)
        self.ended["early"] += len(world.gave_up)

    @property
    def result(self) -> torch.dtype:
        """The dtype of results."""
        if self.out is not None:
            return self.out
        return torch.bfloat16 if self.dtype.itemsize == 1 else self.dtype

    def host(self, world: Any, pe: int) -> str:
        """Run on one rank; return how it ended."""
        if self.group is not None and pe not in self.group:
            return ""
        ctx = tdcoll.CollectiveContext(self.group, **self.context)
        ctx.control.fill_((self.first - 1) << EPOCH_SHIFT.value)
        ctx.device_lamport.control.fill_((self.first - 1) << EPOCH_SHIFT.value)
        checks: list[Callable[[], None]] = []
        try:
            for number, kind in enumerate(self.calls):
                for _ in range(self.late[ctx.rank % len(self.late)] if self.late else 0):
                    world.pause()
                check = self.call(ctx, number) if kind == "m" else self.other(ctx, number, kind)
                checks.append(check)
                if self.looks and ctx.rank > 0:
                    # As its next call does. check() would also find who has given up.
                    ctx.monitor.raise_if_expired()
                    check()
            ctx.check()
        except tdcoll.CollectiveTimeout:
            if self.patient:
                raise
            return "gave up"
        for check in checks:
            check()
        if self.patient:  # otherwise peers may be gone
            self.release(ctx)
            ctx.close()
            assert tdcoll.heap_info().used == 0
        return "right"

    def other(self, ctx: tdcoll.CollectiveContext, number: int, kind: str) -> Callable[[], None]:
        """Make a call of another collective; return what looks at its result."""
        every = [whole(1000 * number + pe, 9).to(torch.float32) for pe in ctx.topology.pes]
        if kind == "g":
            made = tdcoll.all_gather(every[ctx.rank], ctx=ctx)
            return lambda: compare(
                made, torch.cat(every), f"rank {ctx.rank}, call {number} (all-gather)"
            )
        summed = tdcoll.all_reduce(every[ctx.rank], ctx=ctx)
        return lambda: compare(summed, sum(every), f"rank {ctx.rank}, call {number} (all-reduce)")

    def call(self, ctx: tdcoll.CollectiveContext, number: int) -> Callable[[], None]:
        """Launch the kernel; return what looks at its result."""
        ranks, rank = ctx.topology.pes, ctx.rank
        rows = self.rows[number % len(self.rows)]
        matrices = [Matrices(self, pe, number, self.rows_of_x(rows, len(ranks))) for pe in ranks]
        made = matrices[rank]
        tall = self.rows_of_result(rows, len(ranks))
        space = torch.full((tall * self.columns + 2 * GUARD,), 77.0).to(self.result)
        out = space[GUARD : GUARD + tall * self.columns].view(tall, self.columns)
        residual = whole(5 + number, tall, self.columns).to(self.result) if self.residual else None
        operands = made.operands(out, residual)
        more = self.launch(ctx, operands, number)
        wanted = self.wanted(matrices, rank)
        if made.bias is not None:
            wanted = wanted + made.bias.float()
        if residual is not None:
            wanted = 2.0 * wanted + residual.float()
        where = f"rank {rank}, call {number}"

        def check() -> None:
            compare(out, wanted.to(self.result), where)
            assert (space[:GUARD] == 77).all(), f"{where}: elements before the result"
            assert (space[-GUARD:] == 77).all(), f"{where}: elements behind the result"
            assert operands.x is made.x, "kept until here"
            for got, expected, what in more:
                compare(got, expected(matrices), f"{where}, {what}")

        return check

    # What kernels differ in.

    @property
    def distinct(self) -> bool:
        """Whether ranks bring different numbers; those of a sum only have different factors."""
        return False

    def release(self, ctx: tdcoll.CollectiveContext) -> None:
        """Give back symmetric memory that the calls have taken."""

    def rows_of_x(self, rows: int, world: int) -> int:
        """Return the rows of each rank's ``x``."""
        return rows

    def rows_of_result(self, rows: int, world: int) -> int:
        """Return the rows of a result."""
        return rows

    def wanted(self, matrices: list[Matrices], rank: int) -> torch.Tensor:
        """Return the result in fp32, before bias and epilogue."""
        return sum_of([one.part() for one in matrices])

    def launch(
        self, ctx: Any, operands: Operands, number: int
    ) -> list[tuple[torch.Tensor, Any, str]]:
        """Launch the kernel; return further results, what makes the wanted ones, and their
        names."""
        raise NotImplementedError


class Matrices:
    """What one rank brings to a call."""

    def __init__(self, case: Matmuls, pe: int, call: int, rows: int) -> None:
        self.case = case
        largest = 2.0**12
        if case.dtype.itemsize == 1:
            largest = 1.0
        elif case.dtype == torch.float16 or case.result == torch.float16:
            largest = 2.0**5
        # The last of three cancels the first, and leaves what the order of the sum has left of the
        # second.
        scale = (largest, 1 / largest, -largest)[pe % 3]
        key = 1000 * call + (2 * pe if case.distinct else 0)
        self.x = whole(key, rows, case.depth).to(case.dtype)
        weight = (whole(key + 1, case.columns, case.depth) * scale).to(case.dtype)
        self.weight = weight.t().contiguous() if case.depth_first else weight
        self.bias = whole(3, case.columns).to(case.result) if case.biased else None
        self.x_scale: torch.Tensor | None = None
        self.weight_scale: torch.Tensor | None = None
        if case.scales:
            counts = (rows, case.columns) if case.scales == "row" else (1, 1)
            self.x_scale = torch.exp2(whole(call + 7 * pe, counts[0]))
            self.weight_scale = torch.exp2(whole(call + 7 * pe + 3, counts[1]))

    def product(
        self, x: torch.Tensor | None = None, x_scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the product of ``x``, by default this rank's, with this rank's weight, in fp32."""
        weight = self.weight.float()
        made = (self.x if x is None else x).float() @ (
            weight if self.case.depth_first else weight.t()
        )
        if self.x_scale is not None and self.weight_scale is not None:
            made = (
                made * self.weight_scale * (self.x_scale if x_scale is None else x_scale)[:, None]
            )
        return made

    def part(self) -> torch.Tensor:
        """Return this rank's part of a sum, rounded."""
        return self.product().to(self.case.result).float()

    def operands(self, out: torch.Tensor, residual: torch.Tensor | None) -> Operands:
        """Return what the kernel gets."""
        extra = None if residual is None else Residual(residual, residual.shape[1])
        return Operands(
            self.x,
            self.weight,
            out,
            self.case.depth_first,
            self.bias,
            self.x_scale,
            self.weight_scale,
            identity if residual is None else add_residual,
            extra,
        )


def sum_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return a sum in rank order, in fp32."""
    sums = torch.zeros_like(parts[0])
    for part in parts:
        sums = sums + part
    return sums


def compare(got: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    """Raise ``AssertionError`` unless all bits are equal."""
    wrong = int(different(got, wanted))
    assert wrong == 0, f"{where}: {wrong} wrong elements"


@dataclass(frozen=True)
class Gather(Matmuls):
    """All-gather + matmul.

    Attributes:
        pushers, keepers: thread blocks; no keepers: the gathered matrix isn't wanted.
        piece: bytes.
        whole: tiles span several shards.
        symmetric: peers write to a symmetric gathered matrix, the same in all calls.
        copied: copies on streams bring the shards.
    """

    pushers: int = 2
    keepers: int = 0
    piece: int = 96
    whole: bool = False
    symmetric: bool = False
    copied: bool = False

    @property
    def distinct(self) -> bool:
        return True

    def release(self, ctx: tdcoll.CollectiveContext) -> None:
        if "gathered" in ctx.cache:
            ctx.job.release(ctx.cache.pop("gathered"))

    def rows_of_result(self, rows: int, world: int) -> int:
        return rows * world

    def wanted(self, matrices: list[Matrices], rank: int) -> torch.Tensor:
        x = torch.cat([one.x.float() for one in matrices])
        scales = None
        if self.scales:
            rows = matrices[0].x.shape[0]
            scales = torch.cat([torch.broadcast_to(one.x_scale, (rows,)) for one in matrices])
        return matrices[rank].product(x, scales)

    def launch(
        self, ctx: Any, operands: Operands, number: int
    ) -> list[tuple[torch.Tensor, Any, str]]:
        group, world = ctx.device_group, ctx.world_size
        rows, depth = operands.x.shape
        inbox = Inbox(ctx.inbox.data_ptr(), ctx.capacity, group.deltas, tl.constexpr(2))
        gathered = torch.zeros(world * rows, depth).to(self.dtype)
        if self.symmetric:
            nbytes = world * operands.x.nbytes
            room = (nbytes + 4 * world * rows,)  # scales lie behind the matrix
            buffer = ctx.cached(
                "gathered", lambda: ctx.job.allocate(room, torch.uint8, group=ctx._group)
            )
            inbox = Inbox(buffer.data_ptr(), operands.x.nbytes, group.deltas, tl.constexpr(1))
            gathered = buffer[:nbytes].view(self.dtype).view(world * rows, depth)
        streams = self.copy(ctx, operands, inbox) if self.copied else []
        blocks, arguments = launches.gather(
            operands,
            self.cut,
            group,
            inbox,
            workers=self.blocks[number % len(self.blocks)],
            pushers=0 if self.copied else self.pushers,
            piece=self.piece,
            gathered=gathered,
            keepers=self.keepers,
            whole=self.whole,
            to_self=self.symmetric,
            shards=KERNELS.kernels_gather.Shards(0, world) if self.copied else None,
            words=16,
        )
        KERNELS.kernels_gather.all_gather_matmul[(blocks,)](**arguments)
        for stream in streams:
            stream.join(0)
        if not self.keepers and not self.symmetric:
            return []
        kept = (
            gathered.clone() if self.symmetric else gathered
        )  # peers write to it in the next call
        return [(kept, lambda matrices: torch.cat([one.x for one in matrices]), "gathered")]

    def copy(self, ctx: Any, operands: Operands, inbox: Inbox) -> list[Any]:
        """Begin the call, and queue copies of pieces, scales and stamps to all peers; return their
        streams."""
        group, heap, world = ctx.device_group, ctx.job.heap, ctx.world_size
        stamp = ctx.cached("stamp", lambda: torch.zeros(1, dtype=torch.int64))
        kernels = tdcoll.primitives.copies
        summed = torch.zeros(
            1, dtype=torch.int32
        )  # of kernels that sum copies, of which there is none here
        kernels.enter[(1,)](group, stamp, summed, WORLD_POW2=triton.next_power_of_2(world))
        source, nbytes = operands.x, operands.x.nbytes
        streams = []
        for step in range(1, world):
            peer = (ctx.rank + step) % world
            delta = int(group.deltas[peer])
            stream = heap.side_stream()
            stream.fork(0)
            if operands.x_scale is not None:
                behind = inbox.base + delta + world * nbytes + 4 * source.shape[0] * ctx.rank
                heap.stream_copy(
                    stream.handle, behind, operands.x_scale.data_ptr(), operands.x_scale.nbytes
                )
            for piece in range(triton.cdiv(nbytes, self.piece)):
                at = piece * self.piece
                landing = inbox.base + delta + ctx.rank * nbytes + at
                size = min(self.piece, nbytes - at)
                heap.stream_copy(stream.handle, landing, source.data_ptr() + at, size)
                signal = group.arrived[0, piece, ctx.rank].data_ptr() + delta
                heap.stream_copy(stream.handle, signal, stamp.data_ptr(), 8)
            streams.append(stream)
        return streams


@dataclass(frozen=True)
class Scatter(Matmuls):
    """Matmul + reduce-scatter.

    Attributes:
        lags: of the calls in turn.
    """

    lags: Sequence[int] = (1,)
    slices: int = 2
    stages: int = 2

    def rows_of_x(self, rows: int, world: int) -> int:
        return rows * world

    def wanted(self, matrices: list[Matrices], rank: int) -> torch.Tensor:
        return super().wanted(matrices, rank).chunk(len(matrices))[rank]

    def launch(
        self, ctx: Any, operands: Operands, number: int
    ) -> list[tuple[torch.Tensor, Any, str]]:
        inbox = Inbox(ctx.inbox.data_ptr(), ctx.capacity, ctx.device_group.deltas, tl.constexpr(2))
        blocks, arguments = launches.scatter(
            operands,
            self.cut,
            ctx.device_group,
            inbox,
            workers=self.blocks[number % len(self.blocks)],
            lag=self.lags[number % len(self.lags)],
            slices=self.slices,
            stages=self.stages,
        )
        KERNELS.kernels_scatter.matmul_reduce_scatter[(blocks,)](**arguments)
        return []


@dataclass(frozen=True)
class Reduce(Matmuls):
    """Matmul + all-reduce.

    Attributes:
        two_shot: of the calls in turn.
    """

    two_shot: Sequence[bool] = (False,)
    words: int = 8

    def launch(
        self, ctx: Any, operands: Operands, number: int
    ) -> list[tuple[torch.Tensor, Any, str]]:
        blocks, arguments = launches.reduce(
            operands,
            self.cut,
            ctx.device_group,
            ctx.device_lamport,
            workers=self.blocks[number % len(self.blocks)],
            two_shot=self.two_shot[number % len(self.two_shot)],
            block=self.words,
        )
        KERNELS.kernels_all_reduce.matmul_all_reduce[(blocks,)](**arguments)
        return []
