# SPDX-License-Identifier: Apache-2.0
"""Calls of the kernels beside this file, as cases for `tdcoll.testing.explore` and for jobs on GPUs.

Data says where it comes from: rank, call and index are in every number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

import tdcoll
from tdcoll.primitives.group import Window
from tdcoll.testing import World

from . import kernels as _kernels

Call = Callable[[], None]
"""One call, with what it reads and writes; may be made again and again."""


def kernels() -> Any:
    """The module of kernels; while a mutant is installed, the mutant's."""
    return sys.modules[_kernels.__name__]


def inbox(ctx: tdcoll.CollectiveContext) -> Window:
    return Window(ctx.staging.data_ptr(), ctx.capacity, ctx.device_group.deltas, tl.constexpr(2))


def numbers(rank: int, call: int, count: int) -> torch.Tensor:
    """``-> [count]`` int32."""
    return rank * 1_000_000 + call * 10_000 + torch.arange(count, dtype=torch.int32)


class TwoStages:
    """All-reduces in two stages of int32.

    Args:
        counts: elements of a part, call by call.
        launches: whether a call is three launches, and not one.
        pause: turns for which rank 0 rests after each call.
    """

    def __init__(self, counts: Sequence[int], launches: bool = False, pause: int = 0) -> None:
        self.counts, self.launches, self.pause = counts, launches, pause

    def __call__(self, world: World) -> None:
        def host(pe: int) -> None:
            with tdcoll.CollectiveContext(max_bytes_per_rank=4 * max(self.counts), phases=2, channels=1) as ctx:
                for call, count in enumerate(self.counts):
                    source = numbers(pe, call, count * world.n_pes)
                    out = torch.full_like(source, -1)
                    self.launch(ctx, source, out)
                    wanted = sum(numbers(rank, call, count * world.n_pes) for rank in range(world.n_pes))
                    wrong = int((out != wanted).sum())
                    assert wrong == 0, f"rank {pe}, call {call}: {wrong} wrong numbers"
                    if self.pause and pe == 0:
                        world.pause(self.pause)
                ctx.check()

        world.run(host)

    def launch(self, ctx: tdcoll.CollectiveContext, source: torch.Tensor, out: torch.Tensor) -> None:
        nbytes, world = source.nbytes // ctx.world_size, ctx.world_size
        at, to, g, window = source.data_ptr(), out.data_ptr(), ctx.device_group, inbox(ctx)
        BLOCK = triton.next_power_of_2(nbytes // 4)
        if not self.launches:
            kernels().all_reduce_in_two_stages[(2 * world - 1,)](at, to, window, g, nbytes, BLOCK)
            return
        kernels().push_parts[(max(1, world - 1),)](at, window, g, nbytes)
        kernels().reduce_part[(1,)](at, to, window, g, nbytes, BLOCK)
        kernels().hand_out[(2,)](to, window, g, nbytes)
