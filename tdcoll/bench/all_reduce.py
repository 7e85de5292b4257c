# SPDX-License-Identifier: Apache-2.0
"""The all-reduce benchmark: ``bash launch.sh [--nproc N] -m tdcoll bench all_reduce --help``.

Inputs are those of the reduce-scatter benchmark, and so is the check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from tdcoll.bench import case
from tdcoll.bench.data import EXACT, Buffers, ReducedAlike
from tdcoll.bench.dense import Reduction
from tdcoll.bench.engine import Subject
from tdcoll.bench.peers import ByTorch, MakeBuffers, nccl, nccl_symmetric
from tdcoll.bench.reduction_peers import FLASHINFER, in_place, torch_one_shot, torch_two_shot
from tdcoll.collectives._host.plan import CHUNK_ALIGNMENT, Plan
from tdcoll.collectives.all_reduce import all_reduce, all_reduce_
from tdcoll.collectives.all_reduce.algorithms import ALL_REDUCE
from tdcoll.context import CollectiveContext

__all__ = ["AllReduce", "main"]


class AllReduce(Reduction):
    """The case."""

    benchmark = "all_reduce"
    host = ALL_REDUCE
    about = "all-reduces, checked; those of NCCL and torch-two-shot in place. Sizes: bytes of a rank's data"
    peers: ClassVar = {
        "nccl": nccl,
        "nccl-symmetric": nccl_symmetric,
        "torch-one-shot": torch_one_shot,
        "torch-two-shot": torch_two_shot,
        **FLASHINFER,
    }
    peers_in_place = ("nccl", "nccl-symmetric", "torch-two-shot")
    sums = ("torch-one-shot", "torch-two-shot", *FLASHINFER)
    in_place = True
    data = ReducedAlike

    @classmethod
    def context_bytes(cls, nbytes: int) -> int:
        """One epoch between nodes takes a third of a segment for each part, and a part is at most all of it."""
        return 3 * (-(-nbytes // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT)

    def ours(
        self, algorithm: str | Plan, context: CollectiveContext, buffers: Buffers, symmetric: bool = False
    ) -> Callable[[int], torch.Tensor]:
        op = self.op
        return lambda i: all_reduce(buffers.inputs[i], context, buffers.results[i], op, algorithm, symmetric)

    def ours_in_place(
        self, algorithm: str | Plan, context: CollectiveContext, buffers: Buffers
    ) -> Callable[[int], torch.Tensor]:
        op = self.op
        return lambda i: all_reduce_(buffers.results[i], context, op, algorithm)

    def subject(self, algorithm: str | Plan, context: CollectiveContext, buffers: Buffers, inside: bool) -> Subject:
        made = super().subject(algorithm, context, buffers, inside)
        return in_place(made, self.growth(buffers)) if inside else made

    @property
    def by_torch(self) -> ByTorch:
        op = self.torch_operation
        return lambda result, given, **named: dist.all_reduce(result, op, **named)

    def growth(self, buffers: Buffers) -> int:
        """By what a call in place multiplies the result of the one before on the same buffer.

        Raises:
            ValueError: a launch has such calls (``--buffers``), and its results are not exact.
        """
        world, dtype = buffers.world, self.options.dtype
        if self.op != "sum" or buffers.sets == buffers.calls:
            return 1
        most = float(world) ** -(-buffers.calls // buffers.sets)
        if world & (world - 1) or not dtype.is_floating_point or EXACT[dtype] * most > torch.finfo(dtype).max:
            raise ValueError(
                f"adds up its own results with --buffers {buffers.sets}, which of {dtype} over {world} ranks is inexact"
            )
        return world

    def backend(self, nbytes: int, buffers: Buffers) -> Subject:
        growth = self.growth(buffers)
        return in_place(super().backend(nbytes, buffers), growth)

    def peer(self, name: str, make: MakeBuffers) -> Subject:
        if name not in self.peers_in_place:
            return super().peer(name, make)
        growth = self.growth(make(None))
        return in_place(super().peer(name, make), growth)


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 1 if a result was wrong."""
    return case.run(AllReduce, arguments)
