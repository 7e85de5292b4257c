# SPDX-License-Identifier: Apache-2.0
"""The reduce-scatter benchmark: ``bash launch.sh [--nproc N] -m tdcoll bench reduce_scatter --help``.

Its inputs are small whole numbers, whose sums over all ranks are exact in every dtype and in any order; the check is
the collective's own reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist

from tdcoll.bench import case
from tdcoll.bench.data import Buffers, Reduced
from tdcoll.bench.dense import Reduction
from tdcoll.bench.peers import ByTorch, nccl, nccl_symmetric
from tdcoll.bench.reduction_peers import torch_reduce_scatter
from tdcoll.collectives._host.plan import CHUNK_ALIGNMENT, Plan
from tdcoll.collectives.reduce_scatter import reduce_scatter
from tdcoll.collectives.reduce_scatter.algorithms import REDUCE_SCATTER
from tdcoll.context import CollectiveContext

__all__ = ["ReduceScatter", "main"]


class ReduceScatter(Reduction):
    """The case."""

    benchmark = "reduce_scatter"
    host = REDUCE_SCATTER
    about = (
        "reduce-scatters, checked. Sizes: bytes of the part that each rank gets, which is what it sends to each other "
        "rank. An input is as many times larger as there are ranks, and that is the size that nccl-tests shows"
    )
    peers: ClassVar = {"nccl": nccl, "nccl-symmetric": nccl_symmetric, "torch-reduce-scatter": torch_reduce_scatter}
    sums = ("torch-reduce-scatter",)
    data = Reduced

    @classmethod
    def context_bytes(cls, nbytes: int) -> int:
        """Between nodes half of a segment is what a rank puts from."""
        return 2 * (-(-nbytes // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT)

    def ours(
        self, algorithm: str | Plan, context: CollectiveContext, buffers: Buffers, symmetric: bool = False
    ) -> Callable[[int], torch.Tensor]:
        op = self.op
        return lambda i: reduce_scatter(buffers.inputs[i], context, buffers.results[i], op, algorithm, symmetric)

    @property
    def by_torch(self) -> ByTorch:
        return partial(dist.reduce_scatter_tensor, op=self.torch_operation)


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 1 if a result was wrong."""
    return case.run(ReduceScatter, arguments)
