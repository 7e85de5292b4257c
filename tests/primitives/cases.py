# SPDX-License-Identifier: Apache-2.0
"""Calls of the kernels beside this file, as cases for `tdcoll.testing.explore` and for jobs on GPUs.

Data says where it comes from: rank, call and index are in every number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton

import tdcoll
from tdcoll.primitives.reduce import triton_dtype

from . import kernels as _kernels

if TYPE_CHECKING:
    from tdcoll.testing import World

Call = Callable[[], None]
"""One call, with what it reads and writes; may be made again and again."""


def kernels() -> Any:
    """The module of kernels; while a mutant is installed, the mutant's."""
    return sys.modules[_kernels.__name__]


def numbers(rank: int, call: int, count: int) -> torch.Tensor:
    """``-> [count]`` int32."""
    return rank * 1_000_000 + call * 10_000 + torch.arange(count, dtype=torch.int32)


MINUS_ZERO = -(1 << 31)


def floats(rank: int, call: int, count: int) -> torch.Tensor:
    """``-> [count]`` fp32, whose sums depend on the order, and every third of which is -0.0."""
    index = torch.arange(count)
    values = (0.1 + rank + index * 0.01 + call * 7) * torch.tensor([1.0, -3e7, 3e7])[(rank + index) % 3]
    values[index % 3 == call % 3] = -0.0
    return values.float()


def sum_in_rank_order(call: int, count: int, world: int) -> torch.Tensor:
    """``-> [count]`` fp32."""
    total = torch.zeros(count)
    for rank in range(world):
        total += floats(rank, call, count)
    return total


class Words:
    """All-reduces of fp32 by words that announce themselves, with calls of another kind between.

    Args:
        calls: the elements of a call; ``"g"`` for an all-gather.
        pause: turns for which rank 0 rests after each call.
    """

    def __init__(self, calls: Sequence[Any], block: int = 4, pause: int = 0) -> None:
        self.calls, self.block, self.pause = calls, block, pause

    def __call__(self, world: World) -> None:
        def host(pe: int) -> None:
            n = world.n_pes
            with tdcoll.CollectiveContext(max_bytes_per_rank=16, channels=1, lamport_bytes=200) as ctx:
                for call, kind in enumerate(self.calls):
                    if kind == "g":
                        got = tdcoll.all_gather(numbers(pe, call, 4), ctx, algorithm="direct")
                        assert torch.equal(got, torch.cat([numbers(rank, call, 4) for rank in range(n)]))
                        continue
                    count = int(kind)
                    source = floats(pe, call, count)
                    out = torch.full((count + 1,), 9.5)
                    self.launch(ctx, source, out)
                    ctx.check()
                    wanted = sum_in_rank_order(call, count, n)
                    wrong = int((out[:count].view(torch.int32) != wanted.view(torch.int32)).sum())
                    assert wrong == 0, f"rank {pe}, call {call}: {wrong} wrong numbers of {count}"
                    assert out[count] == 9.5
                    if self.pause and pe == 0:
                        world.pause(self.pause)

        world.run(host)

    def launch(self, ctx: tdcoll.CollectiveContext, source: torch.Tensor, out: torch.Tensor) -> None:
        """``[n] -> [n]``, or more."""
        programs = max(1, -(-source.nbytes // (16 * self.block)))
        at = source.data_ptr() if source.numel() else 0
        kernels().all_reduce_of_words[(programs,)](
            at, out.data_ptr(), ctx.device_group, ctx.device_lamport, source.numel(), self.block
        )


def decoded(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[256] uint8 -> [256] fp32``."""
    out = torch.empty(256, device=codes.device)
    kernels().decode_all[(1,)](codes, out, triton_dtype(dtype))
    return out


def encoded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[n] fp32 -> [n] uint8``."""
    out, block = torch.empty(len(values), dtype=torch.uint8, device=values.device), 4096 if values.is_cuda else 1 << 18
    kernels().encode_all[(triton.cdiv(len(values), block),)](values, out, len(values), triton_dtype(dtype), block)
    return out


def roundings(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``(fp32, codes)``: numbers of every exponent and both signs, every number halfway between two of ``dtype`` and
    its neighbours, and what PyTorch makes of them. It makes no infinities into numbers before 2.12, so they are
    clamped."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    known = torch.arange(256).to(torch.uint8).view(dtype).double()
    known = known[known.isfinite()].sort().values
    halfway = ((known[1:] + known[:-1]) / 2).float().view(torch.int32).to(torch.int64)
    bits = torch.cat([upper, upper + 1, upper + 0x8000, upper + 0xFFFF, halfway - 1, halfway, halfway + 1])
    values = bits.to(torch.int32).view(torch.float32)
    limit = torch.finfo(dtype).max if dtype == torch.float8_e4m3fn else float("inf")
    return values, values.clamp(-limit, limit).to(dtype).view(torch.uint8)
