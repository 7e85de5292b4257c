# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter as a case for `tdcoll.testing.explore`: several calls, results read late, bits compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

import tdcoll
import tdcoll.collectives.reduce_scatter.kernels_pull
import tdcoll.collectives.reduce_scatter.kernels_puts  # and kernels_direct; looked up when called, for mutants
import tdcoll.collectives.reduce_scatter.kernels_words
from tdcoll.collectives import reduce_scatter as kernels
from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.primitives.group import EPOCH_SHIFT, Window, nodes_of
from tdcoll.primitives.puts import Routes
from tdcoll.primitives.reduce import OPERATIONS, accumulator, triton_dtype

BY_WORDS = ("ll", "lamport", "looped")
"""By words with a flag, by such as announce themselves, and these by two programs that take several blocks each."""

CHUNK = 128
"""Bytes of a chunk, so that few elements have several."""


def reduce_scatter(
    tensor: torch.Tensor, ctx: tdcoll.CollectiveContext, out: torch.Tensor, op: str, algorithm: str
) -> None:
    """``[world * n] -> [n]``: one launch. Tiles are small, and two programs reduce a chunk, to have many of all."""
    world, nbytes, size = ctx.world_size, out.nbytes, out.element_size()
    source, channels, reducers = tensor.data_ptr(), max(1, -(-out.nbytes // CHUNK)), 2
    ctx.begin("reduce_scatter")
    deltas = ctx.device_group.deltas
    known: dict[str, Any] = {
        "source": source,
        "source_stride": nbytes,
        "out": out.data_ptr(),
        "window": Window(ctx.staging.data_ptr(), ctx.capacity, deltas, tl.constexpr(2)),
        "inbox": ctx.device_lamport,
        "g": ctx.device_group,
        "nbytes": nbytes,
        "chunk": CHUNK,
        "channels": channels,
        "reducers": reducers,
        "DTYPE": triton_dtype(out.dtype),
        "ACC": accumulator(out.dtype),
        "OP": OPERATIONS[op],
        "COUNT": max(4, 32 // size),
        "WAITED": triton.next_power_of_2(world),
        "BLOCK": 4,
        "LAMPORT": algorithm != "ll",
        "LOOPED": algorithm == "looped",
    }
    if algorithm == "pull":
        kernel, programs = kernels.kernels_pull.reduce_scatter_pull, channels + 1
        known["window"] = Window(0, 0, deltas, tl.constexpr(1))
    elif algorithm == "direct":
        kernel, programs = kernels.kernels_direct.reduce_scatter_direct, channels * (world - 1 + reducers)
    elif algorithm in BY_WORDS:
        kernel, width = kernels.kernels_words.reduce_scatter_words, 16
        if algorithm == "ll":
            known["inbox"] = Window(ctx.flagged.data_ptr(), 16 * ctx.flagged.shape[2], deltas, tl.constexpr(2))
            width = 12
        known["blocks"] = max(1, -(-nbytes // (4 * width)))
        programs = min(2, known["blocks"]) if algorithm == "looped" else known["blocks"]
    else:
        kernel, routes = kernels.kernels_puts.reduce_scatter_puts, routes_of(ctx)
        known |= {"routes": routes, "nodes": nodes_of(ctx.topology, ctx.device), "outbox": ctx.capacity // 32 * 16}
        programs = channels * (routes.n_remote + routes.n_local + reducers)
    kernel[(programs,)](**{name: known[name] for name in kernel.arg_names})


def routes_of(ctx: tdcoll.CollectiveContext) -> Routes:
    topology, stored = ctx.topology, ctx.ll_bytes >= 0 or ctx.job.heap.peer_base(ctx.topology.pes[ctx.rank - 1]) != 0
    others = [(ctx.rank + i) % ctx.world_size for i in range(1, ctx.world_size)]
    local = [r for r in others if stored and topology.nodes[r] == topology.node]
    remote = [r for r in others if r not in local]
    entries = [*local, *(topology.pes[r] for r in local), *remote, *(topology.pes[r] for r in remote)]
    return Routes(torch.tensor(entries or [0], dtype=torch.int32), len(local), len(remote))


def values(owner: int, call: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``[count]``: numbers of the dtype whose sums show their order, and when an operand is of another rank or call."""
    made = torch.Generator().manual_seed(1 + owner + 1000 * call)
    if dtype.is_floating_point:
        scale = torch.exp2(torch.randint(-4, 5, (count,), generator=made).double())
        return (torch.randn(count, generator=made, dtype=torch.float64) * scale).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (count,), generator=made, dtype=dtype)


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (*FLOATS, torch.int32, torch.int64, torch.int8, torch.uint8)


def special(dtype: torch.dtype) -> torch.Tensor:
    """Infinities (where there are), NaN, zeros of both signs, subnormal and large numbers."""
    kinds = torch.finfo(dtype)
    numbers = [0.0, -0.0, 1.0, -1.0, kinds.max, -kinds.max, kinds.tiny, float("inf"), float("nan")]
    numbers.append(-kinds.tiny * kinds.eps)  # the smallest: half of it is rounded to -0.0
    numbers += [0.0, 0.0, 0.0, -0.0]  # of 8 bits: a word that no sender may send as it is
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """Elements that differ; any NaN is the same as any other."""
    nan = got.isnan() & wanted.isnan()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    return int(((got.view(kind) != wanted.view(kind)) & ~nan).sum())


@dataclass(frozen=True)
class Reductions:
    """Runs ``calls`` on every rank: ``o`` out of place, ``i`` in place, ``z`` of no elements. Where one is by ``pull``,
    all tensors are the same symmetric memory, which is filled anew as soon as a call is over.

    Attributes:
        algorithm: of the calls; or several, separated by spaces, for the calls in turn.
        calls: kinds of calls, in order.
        count: elements per rank.
        ops: of the calls, in turn.
        offset: elements from an aligned address to those of the tensors.
        group: ranks that take part; None for all.
        first_epoch: of the first call.
    """

    algorithm: str
    calls: str = "oio"
    count: int = 34
    dtype: torch.dtype = torch.float32
    ops: Sequence[str] = ("sum",)
    offset: int = 0
    group: Sequence[int] | None = None
    first_epoch: int = 1

    def __call__(self, world: tdcoll.testing.World) -> None:
        world.run(self.host)

    def tensor(self, pe: int, call: int, count: int) -> torch.Tensor:
        """What a PE gives to a call."""
        return values(pe, call, count, self.dtype)

    def host(self, pe: int) -> None:
        if self.group is not None and pe not in self.group:
            return
        dtype, count, offset, turns = self.dtype, self.count, self.offset, self.algorithm.split()
        most = 2 * (-(-count * dtype.itemsize // 16) * 16) + 16
        with tdcoll.CollectiveContext(self.group, max_bytes_per_rank=most) as ctx:
            for control in (ctx.control, *([ctx.device_lamport.control] if ctx.device_lamport else [])):
                control.fill_((self.first_epoch - 1) << EPOCH_SHIFT.value)
            world, topology, shared = ctx.world_size, ctx.topology, None
            if "pull" in turns:
                shared = tdcoll.empty((offset + world * count,), dtype, group=self.group, name="shared")
            for call, kind in enumerate(self.calls):
                n = 0 if kind == "z" else count
                op = self.ops[call % len(self.ops)]
                given = [self.tensor(p, call, world * n) for p in topology.pes]
                tensor = torch.empty(offset + world * n, dtype=dtype)[offset:]
                if shared is not None:
                    tensor = shared[offset : offset + world * n]
                tensor.copy_(given[ctx.rank])
                mine = slice(ctx.rank * n, (ctx.rank + 1) * n)
                out = tensor[mine] if kind == "i" else torch.empty(offset + n + 1, dtype=dtype)[offset:-1]
                reduce_scatter(tensor, ctx, out, op, turns[call % len(turns)])
                wanted = reduce_parts([of[mine] for of in given], topology.nodes, op)
                wrong = same_bits(out, wanted)
                assert wrong == 0, f"rank {ctx.rank}, call {call} ({kind}): {wrong} wrong elements"
                for part in set(range(world)) - {ctx.rank}:
                    other = slice(part * n, (part + 1) * n)
                    assert same_bits(tensor[other], given[ctx.rank][other]) == 0, "the input was written to"
            ctx.check()
            if shared is not None:
                tdcoll.free(shared)
        assert tdcoll.heap_info().used == 0
