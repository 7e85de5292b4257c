# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.kernels.nvidia.allgather_gemm``: the memory and the streams of an all-gather beside
a matmul."""

from __future__ import annotations

import os
from typing import Any

import torch

from tdcoll.compat.triton_dist import utils

__all__ = ["create_ag_gemm_context"]


class create_ag_gemm_context:
    """Symmetric memory for ``A``'s rows of all ranks, a signal for each rank, and two streams.
    Collective to make.

    Args:
        A: this rank's ``[M_per_rank, K]``.
        max_M: rows of all ranks.
        B, options: the matmul's, which the caller makes.

    Attributes:
        symm_workspaces: ``[max_M, K]`` of each rank of this node; ``symm_workspace`` is this
            rank's.
        symm_barriers: ``[num_ranks]`` signals of each local rank; ``symm_barrier`` is its own.
            int32, int64 over nodes.
        symm_comm_buf: int32 ``[3 * num_ranks]``.
        ag_intranode_stream, ag_internode_stream: for the two halves of the all-gather.
    """

    def __init__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        rank: int,
        num_ranks: int,
        max_M: int,
        **options: Any,
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        word, local = (
            utils.NVSHMEM_SIGNAL_DTYPE if num_ranks > per_node else torch.int32,
            rank % per_node,
        )
        self.symm_workspaces = utils.nvshmem_create_tensors(
            (max_M, A.shape[1]), A.dtype, rank, per_node
        )
        self.symm_barriers = utils.nvshmem_create_tensors((num_ranks,), word, rank, per_node)
        self.symm_workspace, self.symm_barrier = (
            self.symm_workspaces[local],
            self.symm_barriers[local],
        )
        self.symm_comm_buf = utils.nvshmem_create_tensor((3 * num_ranks,), torch.int32)
        self.symm_barrier.fill_(0)
        self.symm_comm_buf.fill_(0)
        self.ag_intranode_stream, self.ag_internode_stream = (
            torch.cuda.Stream(priority=-1) for _ in range(2)
        )
        utils.nvshmem_barrier_all_on_stream()
        torch.cuda.synchronize()

    def finalize(self) -> None:
        """Give the memory back. Collective."""
        for tensor in (self.symm_workspace, self.symm_barrier, self.symm_comm_buf):
            utils.nvshmem_free_tensor_sync(tensor)
