# SPDX-License-Identifier: Apache-2.0
"""The reduce-scatter benchmark: ``bash launch.sh [--nproc N] -m tdcoll bench reduce_scatter --help``.

Its inputs are small whole numbers, whose sums over all ranks are exact in every dtype and in any order; the check is
the collective's own reference.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tdcoll.bench import case
from tdcoll.bench.data import Buffers, Reduced
from tdcoll.bench.dense import Dense
from tdcoll.bench.engine import Subject
from tdcoll.bench.peers import ByTorch, MakeBuffers, nccl, nccl_symmetric
from tdcoll.collectives._host.drop_in import TORCH_OPERATIONS
from tdcoll.collectives._host.plan import CHUNK_ALIGNMENT, Plan
from tdcoll.collectives.reduce_scatter import reduce_scatter
from tdcoll.collectives.reduce_scatter.algorithms import REDUCE_SCATTER
from tdcoll.context import CollectiveContext
from tdcoll.primitives.reduce import ACCUMULATORS

__all__ = ["ReduceScatter", "main"]

_OPERATIONS = {name: op for op, name in TORCH_OPERATIONS.items() if name != "prod"}
"""Products of different numbers over many ranks are not exact."""


class ReduceScatter(Dense):
    """The case."""

    benchmark = "reduce_scatter"
    host = REDUCE_SCATTER
    about = (
        "reduce-scatters, checked. Sizes: bytes of the part that each rank gets, which is what it sends to each other "
        "rank. An input is as many times larger as there are ranks, and that is the size that nccl-tests shows"
    )
    dtypes: ClassVar = {str(dtype).removeprefix("torch."): dtype for dtype in ACCUMULATORS}
    tuned_dtype = torch.bfloat16
    peers: ClassVar = {"nccl": nccl, "nccl-symmetric": nccl_symmetric}
    data = Reduced

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--op", choices=_OPERATIONS, default="sum", help="how to reduce (default %(default)s)")

    @classmethod
    def check_options(cls, parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
        if given.op == "mean" and not given.dtype.is_floating_point:
            parser.error(f"--op: a mean is of floating-point numbers; got --dtype {given.dtype}")

    @classmethod
    def title(cls, options: argparse.Namespace) -> str:
        return f"{super().title(options)}, {options.op}"

    @classmethod
    def context_bytes(cls, nbytes: int) -> int:
        """Between nodes half of a segment is what a rank puts from."""
        return 2 * (-(-nbytes // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT)

    @property
    def op(self) -> str:
        return str(self.options.op)

    def buffers(self, nbytes: int, *rest: Any, **named: Any) -> Buffers:
        return super().buffers(nbytes, *rest, op=self.op, nodes=self.topology.nodes, **named)

    def ours(
        self, algorithm: str | Plan, context: CollectiveContext, buffers: Buffers
    ) -> Callable[[int], torch.Tensor]:
        op = self.op
        return lambda i: reduce_scatter(buffers.inputs[i], context, buffers.results[i], op, algorithm)

    @property
    def by_torch(self) -> ByTorch:
        return partial(dist.reduce_scatter_tensor, op=_OPERATIONS[self.op])

    def peer(self, name: str, make: MakeBuffers) -> Subject:
        if self.op == "mean" and (world := self.topology.world_size) & (world - 1):
            raise ValueError(f"rounds a mean over {world} ranks more than once: it cannot be checked to the bit")
        return super().peer(name, make)


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 1 if a result was wrong."""
    return case.run(ReduceScatter, arguments)
