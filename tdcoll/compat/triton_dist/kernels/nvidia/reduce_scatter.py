# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.kernels.nvidia.reduce_scatter``: rows that a matmul produces, summed over all
ranks, on streams."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import tdcoll
from tdcoll.compat.triton_dist.kernels.nvidia.common_ops import wait_eq
from tdcoll.compat.triton_dist.utils import NVSHMEM_SIGNAL_DTYPE

__all__ = [
    "ReduceScatter2DContext",
    "create_reduce_scater_2d_ctx",
    "reduce_scatter_2d_op",
    "ring_reduce",
]


def ring_reduce(
    input: torch.Tensor, output: torch.Tensor, begin_idx: int, num_splits: int, num_sms: int = -1
) -> torch.Tensor:
    """``[num_splits * m, n] -> [m, n]``: the sum of the splits, by PyTorch on the current stream.

    It is made in fp32 and rounded once. (Triton-distributed's begins with split ``begin_idx + 1``,
    in the type of the input, and takes ``num_sms`` thread blocks.)
    """
    return output.copy_(input.view(num_splits, *output.shape).sum(0, dtype=torch.float32))


@dataclasses.dataclass
class ReduceScatter2DContext:
    """Signals and a context for reduce-scatters of up to ``[max_M, N]``. Collective to make.

    Attributes:
        scatter_signal_buf: int64 ``[world_size]``: set to 1 by the producer when the part for a
            rank is there.
        num_rs_sms: how many thread blocks run beside the matmul: none, because the sum begins when
            the input is there.
    """

    max_M: int
    N: int
    rank: int
    world_size: int
    local_world_size: int
    dtype: torch.dtype
    num_reduction_sms: int = 15
    num_rs_sms = 0

    def __post_init__(self) -> None:
        self.local_rank = self.rank % self.local_world_size
        self.scatter_signal_buf = tdcoll.zeros(self.world_size, NVSHMEM_SIGNAL_DTYPE)
        self.context = tdcoll.CollectiveContext()

    def reset_barriers(self) -> None:
        """Set the signals back, in the order of the current stream."""
        self.scatter_signal_buf.zero_()

    def finalize(self) -> None:
        """Give the memory back. Collective."""
        self.context.close()
        tdcoll.free(self.scatter_signal_buf)


create_reduce_scater_2d_ctx = ReduceScatter2DContext


def reduce_scatter_2d_op(
    input: torch.Tensor, ctx: ReduceScatter2DContext, output: torch.Tensor | None = None
) -> torch.Tensor:
    """``[M, N] -> [M / world_size, N]``: this rank's rows of the sum over all ranks. Collective.

    :func:`tdcoll.reduce_scatter` on the current stream, when all signals in
    ``ctx.scatter_signal_buf`` are 1.

    Raises:
        ValueError: the input is not of the context's dtype and width, or too long.
    """
    M, N = input.shape
    if input.dtype != ctx.dtype or ctx.N != N or ctx.max_M < M:
        raise ValueError(
            f"input must be [M, {ctx.N}] of {ctx.dtype}, with M up to {ctx.max_M}; got {list(input.shape)} of "
            f"{input.dtype}"
        )
    stream: Any = torch.cuda.current_stream()
    for signal in ctx.scatter_signal_buf:
        wait_eq(signal, 1, stream)
    output = tdcoll.reduce_scatter(input, out=output, ctx=ctx.context)
    ctx.reset_barriers()
    return output
