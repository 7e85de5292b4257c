# SPDX-License-Identifier: Apache-2.0
"""The all-reduce benchmark: ``bash launch.sh [--nproc N] -m tdcoll bench all_reduce --help``.

Inputs are those of the reduce-scatter benchmark, and so is the check.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from tdcoll.bench import case
from tdcoll.bench.data import Buffers, ReducedAlike
from tdcoll.bench.dense import Reduction
from tdcoll.bench.engine import Subject
from tdcoll.bench.peers import ByTorch, MakeBuffers, nccl, nccl_symmetric, subject_of, symmetric_buffers
from tdcoll.bench.peers import symmetric_memory as torch_symmetric_memory
from tdcoll.collectives._host.plan import CHUNK_ALIGNMENT, Plan
from tdcoll.collectives.all_reduce import all_reduce
from tdcoll.collectives.all_reduce.algorithms import ALL_REDUCE
from tdcoll.context import CollectiveContext

__all__ = ["AllReduce", "main"]


def _torch(operator: str) -> Callable[..., Subject]:
    """Makes the subject of an operator of torch's, from symmetric inputs."""

    def make(make_buffers: MakeBuffers, device: torch.device, _: object = None) -> Subject:
        symmetric = torch_symmetric_memory(device)
        buffers = symmetric_buffers(symmetric, make_buffers, device)
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        reduce = getattr(torch.ops.symm_mem, operator)

        def call(i: int) -> torch.Tensor:
            reduce(buffers.inputs[i], "sum", group, buffers.results[i])
            return buffers.results[i]

        return subject_of(buffers, call)

    return make


def _in_place(subject: Subject) -> Subject:
    """A subject that reduces its results: they are the inputs before every launch, which is not timed."""
    buffers: Buffers = subject.data

    def before(numbers: Sequence[int]) -> None:
        buffers.advance()
        for number in numbers:
            buffers.results[number].copy_(buffers.inputs[number])

    return dataclasses.replace(subject, before=before)


class AllReduce(Reduction):
    """The case."""

    benchmark = "all_reduce"
    host = ALL_REDUCE
    about = (
        "all-reduces, checked: tdcoll's and torch's own out of place, NCCL's in place. Sizes: bytes of a rank's data"
    )
    peers: ClassVar = {
        "nccl": nccl,
        "nccl-symmetric": nccl_symmetric,
        "torch-one-shot": _torch("one_shot_all_reduce_out"),
        "torch-two-shot": _torch("two_shot_all_reduce_out"),
    }
    data = ReducedAlike

    @classmethod
    def context_bytes(cls, nbytes: int) -> int:
        """One epoch between nodes takes a third of a segment for each part, and a part is at most all of it."""
        return 3 * (-(-nbytes // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT)

    def ours(
        self, algorithm: str | Plan, context: CollectiveContext, buffers: Buffers
    ) -> Callable[[int], torch.Tensor]:
        op = self.op
        return lambda i: all_reduce(buffers.inputs[i], context, buffers.results[i], op, algorithm)

    @property
    def by_torch(self) -> ByTorch:
        op = self.torch_operation
        return lambda result, given, **named: dist.all_reduce(result, op, **named)

    def peer(self, name: str, make: MakeBuffers) -> Subject:
        if self.op != "sum" and name.startswith("torch-"):
            raise ValueError(f"has sums only, and --op is {self.op}")
        made = super().peer(name, make)
        return made if name.startswith("torch-") else _in_place(made)


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 1 if a result was wrong."""
    return case.run(AllReduce, arguments)
