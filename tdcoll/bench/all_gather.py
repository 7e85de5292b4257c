# SPDX-License-Identifier: Apache-2.0
"""The all-gather benchmark: ``bash launch.sh [--nproc N] -m tdcoll bench all_gather --help``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from tdcoll.bench import case
from tdcoll.bench.data import Buffers
from tdcoll.bench.dense import Dense
from tdcoll.bench.peers import ALL_GATHERS, FCOLLECT, ByTorch, let_nvshmem_have_nccl
from tdcoll.collectives._host.plan import Plan
from tdcoll.collectives.all_gather import all_gather, all_gather_in_place
from tdcoll.collectives.all_gather.op import ALL_GATHER
from tdcoll.context import CollectiveContext
from tdcoll.language import INTERPRETED

__all__ = ["AllGather", "main"]


class AllGather(Dense):
    """The case; its peers are those of :data:`~tdcoll.bench.peers.ALL_GATHERS`."""

    benchmark = "all_gather"
    host = ALL_GATHER
    about = "all-gathers, checked. Sizes: bytes that each rank gives"
    dtypes: ClassVar = {
        name: getattr(torch, name)
        for name in ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    }
    tuned_dtype = torch.uint8
    peers = ALL_GATHERS
    in_place = in_heap = True

    def ours(
        self, algorithm: str | Plan, context: CollectiveContext, buffers: Buffers
    ) -> Callable[[int], torch.Tensor]:
        return lambda i: all_gather(buffers.inputs[i], context, buffers.results[i], algorithm=algorithm)

    def ours_in_place(
        self, algorithm: str | Plan, context: CollectiveContext, buffers: Buffers
    ) -> Callable[[int], torch.Tensor]:
        return lambda i: all_gather_in_place(buffers.results[i], context, algorithm=algorithm)

    @property
    def by_torch(self) -> ByTorch:
        return dist.all_gather_into_tensor


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 1 if a result was wrong."""
    options = AllGather.parse(arguments)
    if FCOLLECT in options.peers and not INTERPRETED:
        let_nvshmem_have_nccl()
    return case.run(AllGather, arguments, options)
