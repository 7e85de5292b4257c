# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.kernels.nvidia.reduce_scatter``: rows that a matmul produces, summed over all ranks, on streams.

For nodes of L ranks each, on rank ``(node, local)``; rows are cut into one part for each rank of the job::

    input[part of (n, p)]          --copy, when signal[(n, p)] is 1-->  scatter[n, local] on rank (node, p)
                                     meet
    sum over l of scatter[n, l]    ------------------------------->  sums[n]
    sums[n]                        --copy or put-->                  gathered[node] on rank (n, local)
                                     meet
    sum over n of gathered[n]      ------------------------------->  output

Signals are this rank's own: the matmul sets one when the part is there, and the operation sets them back. A peer reads
the data that it receives before it comes to the barrier with which the next operation begins.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

import tdcoll
import tdcoll.language as tdl
from tdcoll.compat.missing import attributes_of
from tdcoll.compat.triton_dist import utils
from tdcoll.compat.triton_dist.kernels.nvidia.common_ops import wait_eq

__all__ = ["ReduceScatter2DContext", "create_reduce_scater_2d_ctx", "reduce_scatter_2d_op", "ring_reduce"]

__getattr__ = attributes_of("triton_dist.kernels.nvidia.reduce_scatter")

_BLOCK = 2048


@triton.jit
def _sum_of_splits(source, out, begin, elements, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """``[SPLITS, elements] -> [elements]``: the fp32 sum of the splits, from ``begin + 1`` on and wrapping around."""
    for block in range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = index < elements
        total = tl.zeros((BLOCK,), tl.float32)
        for i in range(SPLITS):
            split = tl.cast((begin + 1 + i) % SPLITS, tl.int64)
            total += tl.load(source + split * elements + index, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + index, total.to(out.dtype.element_ty), mask=mask)


@tdcoll.jit
def _put(dest, source, nbytes, pe):
    tdl.putmem_block(dest, source, nbytes, pe)


def ring_reduce(
    input: torch.Tensor, output: torch.Tensor, begin_idx: int, num_splits: int, num_sms: int = -1
) -> torch.Tensor:
    """``[num_splits * m, n] -> [m, n]``: the sum of the splits, from ``begin_idx + 1`` on and wrapping around.

    It is made on the current stream, in fp32, and rounded once. (Triton-distributed's adds in the type of the input.)

    Args:
        num_sms: thread blocks; if -1, as many as there are blocks of data.

    Raises:
        ValueError: shapes do not match.
    """
    if output.numel() * num_splits != input.numel() or not (input.is_contiguous() and output.is_contiguous()):
        raise ValueError(
            f"input must be num_splits={num_splits} times as large as output, both contiguous; got {list(input.shape)} "
            f"and {list(output.shape)}"
        )
    programs = triton.cdiv(output.numel(), _BLOCK)
    programs = programs if num_sms == -1 else min(programs, num_sms)
    _sum_of_splits[(programs,)](input, output, begin_idx, output.numel(), num_splits, _BLOCK)
    return output


@dataclasses.dataclass
class ReduceScatter2DContext:
    """Memory, signals and a barrier for reduce-scatters of up to ``[max_M, N]``. Collective to make.

    Attributes:
        scatter_bufs: ``[max_M, N]`` of each rank of this node.
        rs_per_node_bufs: ``[max_M / local_world_size, N]`` of each rank of this node: sums of a node.
        p2p_bufs: as large: sums of all nodes, for this rank.
        scatter_signal_buf: int64 ``[world_size]``: set to 1 by the producer of the input when the part for a rank is
            there.
        num_rs_sms: how many thread blocks run beside the matmul.
    """

    max_M: int
    N: int
    rank: int
    world_size: int
    local_world_size: int
    dtype: torch.dtype
    num_reduction_sms: int = 15

    def __post_init__(self) -> None:
        if self.world_size % self.local_world_size or self.max_M % self.world_size:
            raise ValueError(
                f"local_world_size must divide world_size, which must divide max_M; got {self.local_world_size}, "
                f"{self.world_size} and {self.max_M}"
            )
        self.nnodes = self.world_size // self.local_world_size
        self.node_id, self.local_rank = divmod(self.rank, self.local_world_size)
        where = self.rank, self.local_world_size
        rows = self.max_M // self.local_world_size
        self.scatter_bufs = utils.nvshmem_create_tensors((self.max_M, self.N), self.dtype, *where)
        self.rs_per_node_bufs = utils.nvshmem_create_tensors((rows, self.N), self.dtype, *where)
        self.p2p_bufs = utils.nvshmem_create_tensors((rows, self.N), self.dtype, *where)
        self.scatter_signal_buf = tdcoll.zeros(self.world_size, utils.NVSHMEM_SIGNAL_DTYPE)
        utils.nvshmem_barrier_all_on_stream()

    @property
    def num_rs_sms(self) -> int:
        """Return how many thread blocks run beside the matmul: none on one node, because copy engines do the work."""
        return 1 + self.num_reduction_sms if self.nnodes > 1 else 0

    def reset_barriers(self) -> None:
        """Set the signals back, in the order of the current stream."""
        self.scatter_signal_buf.zero_()

    def finalize(self) -> None:
        """Give the memory back. Collective."""
        mine = self.local_rank
        for tensor in (self.scatter_bufs[mine], self.rs_per_node_bufs[mine], self.p2p_bufs[mine]):
            utils.nvshmem_free_tensor_sync(tensor)
        utils.nvshmem_free_tensor_sync(self.scatter_signal_buf)


create_reduce_scater_2d_ctx = ReduceScatter2DContext


def reduce_scatter_2d_op(
    input: torch.Tensor, ctx: ReduceScatter2DContext, output: torch.Tensor | None = None
) -> torch.Tensor:
    """``[M, N] -> [M / world_size, N]``: this rank's rows of the sum over all ranks. Collective.

    The work is on the current stream. It takes each part of ``input`` when its signal in ``ctx.scatter_signal_buf`` is
    1.

    Raises:
        ValueError: the input is not of the context's dtype and width, too long, or does not divide among the ranks.
    """
    M, N = input.shape
    if input.dtype != ctx.dtype or ctx.N != N or ctx.max_M < M or M % ctx.world_size or not input.is_contiguous():
        raise ValueError(
            f"input must be contiguous [M, {ctx.N}] of {ctx.dtype}, with M up to {ctx.max_M} and a multiple of "
            f"{ctx.world_size}; got {list(input.shape)} of {input.dtype}"
        )
    rows, mine = M // ctx.world_size, ctx.local_rank
    stream: Any = torch.cuda.current_stream()
    utils.nvshmem_barrier_all_on_stream(stream)
    per_node = rows * ctx.local_world_size
    for n in range(ctx.nnodes):
        node = (ctx.node_id + n + 1) % ctx.nnodes
        for i in range(ctx.local_world_size):
            peer = (mine + i + 1) % ctx.local_world_size
            target = node * ctx.local_world_size + peer
            wait_eq(ctx.scatter_signal_buf[target], 1, stream)
            place = ctx.scatter_bufs[peer][node * per_node + mine * rows :][:rows]
            tdcoll.copy_on_stream(place, input[target * rows :][:rows], stream)
    utils.nvshmem_barrier_all_on_stream(stream)
    sums, gathered = ctx.rs_per_node_bufs[mine], ctx.p2p_bufs[mine]
    for n in range(ctx.nnodes):
        node = (ctx.node_id + n + 1) % ctx.nnodes
        part = sums[node * rows :][:rows]
        ring_reduce(ctx.scatter_bufs[mine][node * per_node :][:per_node], part, mine, ctx.local_world_size)
        place = gathered[ctx.node_id * rows :][:rows]
        if node == ctx.node_id:
            place.copy_(part)
        else:
            _put[(1,)](place, part, part.nbytes, node * ctx.local_world_size + mine, num_warps=16)
    utils.nvshmem_barrier_all_on_stream(stream)
    output = input.new_empty((rows, N)) if output is None else output
    ring_reduce(gathered[: rows * ctx.nnodes], output, ctx.node_id, ctx.nnodes)
    ctx.reset_barriers()
    return output
