# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.kernels.nvidia.allgather_gemm``: the memory and the streams of an all-gather beside a matmul."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tdcoll.compat.missing import attributes_of
from tdcoll.compat.triton_dist import utils

__all__ = ["AllGatherGEMMTensorParallelContext", "create_ag_gemm_context"]

__getattr__ = attributes_of("triton_dist.kernels.nvidia.allgather_gemm")


@dataclasses.dataclass
class AllGatherGEMMTensorParallelContext:
    """Symmetric memory for ``[max_M, K]`` gathered rows, a signal for each rank, and two streams.

    Attributes:
        symm_workspaces: ``[max_M, K]`` of each rank of this node; ``symm_workspace`` is this rank's.
        symm_barriers: ``[num_ranks]`` signals of each rank of this node; ``symm_barrier`` is this rank's. int64 over
            several nodes, else int32.
        symm_comm_buf: int32 ``[3 * num_ranks]``.
        ag_intranode_stream, ag_internode_stream: for the two halves of the all-gather.
    """

    max_M: int
    N_per_rank: int
    K: int
    dtype: torch.dtype
    rank: int
    num_ranks: int
    num_local_ranks: int
    ag_intranode_stream: Any
    ag_internode_stream: Any

    def __post_init__(self) -> None:
        if self.num_ranks % self.num_local_ranks:
            raise ValueError(
                f"num_local_ranks must divide num_ranks={self.num_ranks}: all nodes are of one size; got "
                f"{self.num_local_ranks}"
            )
        self.is_multinode = self.num_ranks > self.num_local_ranks
        self.n_nodes = self.num_ranks // self.num_local_ranks
        self.node_rank, self.local_rank = divmod(self.rank, self.num_local_ranks)
        where = self.rank, self.num_local_ranks
        self.symm_workspaces = utils.nvshmem_create_tensors((self.max_M, self.K), self.dtype, *where)
        self.symm_workspace = self.symm_workspaces[self.local_rank]
        word = utils.NVSHMEM_SIGNAL_DTYPE if self.is_multinode else torch.int32
        self.symm_barriers = utils.nvshmem_create_tensors((self.num_ranks,), word, *where)
        self.symm_barrier = self.symm_barriers[self.local_rank]
        self.symm_comm_buf = utils.nvshmem_create_tensor((3 * self.num_ranks,), torch.int32)
        self.symm_barrier.fill_(0)
        self.symm_comm_buf.fill_(0)
        self.max_gemm_sm = torch.cuda.get_device_properties("cuda").multi_processor_count
        utils.nvshmem_barrier_all_on_stream()
        torch.cuda.synchronize()

    def finalize(self) -> None:
        """Give the memory back. Collective."""
        for tensor in (self.symm_workspace, self.symm_barrier, self.symm_comm_buf):
            utils.nvshmem_free_tensor_sync(tensor)


def create_ag_gemm_context(*args: Any, **kwargs: Any) -> AllGatherGEMMTensorParallelContext:
    """Make memory and streams for ``all_gather([M_per_rank, K]) @ [K, N_per_rank]``. Collective.

    The arguments have one of two forms:

    - ``(max_M, N, K, dtype, rank, num_ranks, num_local_ranks=8, ag_intranode_stream=None, ag_internode_stream=None)``,
      with N of all ranks together;
    - ``(A, B, rank, num_ranks, max_M, ...)``, as the tutorials call it: shapes and dtype are those of the operands, and
      further options, which are the matmul's, are left to the caller.

    Raises:
        TypeError: the arguments are of neither form.
    """
    form = _of_operands if args and isinstance(args[0], torch.Tensor) else _of_sizes
    return form(*args, **kwargs)


def _of_sizes(
    max_M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    rank: int,
    num_ranks: int,
    num_local_ranks: int = 8,
    ag_intranode_stream: Any = None,
    ag_internode_stream: Any = None,
) -> AllGatherGEMMTensorParallelContext:
    if N % num_ranks:
        raise ValueError(f"N must be a multiple of num_ranks={num_ranks}, got {N}")
    return AllGatherGEMMTensorParallelContext(
        max_M=max_M,
        N_per_rank=N // num_ranks,
        K=K,
        dtype=dtype,
        rank=rank,
        num_ranks=num_ranks,
        num_local_ranks=num_local_ranks,
        ag_intranode_stream=ag_intranode_stream or torch.cuda.Stream(priority=-1),
        ag_internode_stream=ag_internode_stream or torch.cuda.Stream(priority=-1),
    )


def _of_operands(
    A: torch.Tensor, B: torch.Tensor, rank: int, num_ranks: int, max_M: int, **options: Any
) -> AllGatherGEMMTensorParallelContext:
    unknown = sorted(set(options) - {"BLOCK_M", "BLOCK_N", "BLOCK_K", "stages"})
    if unknown:
        raise TypeError(f"create_ag_gemm_context of operands got unknown option(s) {', '.join(unknown)}")
    n_per_rank = B.shape[1] if B.shape[0] == A.shape[1] else B.shape[0]
    local = utils.get_triton_dist_local_world_size()
    return _of_sizes(max_M, n_per_rank * num_ranks, A.shape[1], A.dtype, rank, num_ranks, local)
