# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.kernels.common_ops`` and ``.nvidia.common_ops``: barriers of a node and a grid, words on streams.

The barrier of a node, by tokens: ``flags[r]`` on rank p is where rank r leaves a token for p::

    rank r  --0 becomes 1-->  flags[r] on every rank p of the node, r itself included
    rank r  <--1 becomes 0--  its own flags[p], for every p

When a rank has taken the tokens of all, all have come. A second barrier may follow at once, because a rank that leaves
a token first waits until the last one was taken, which needs only ranks that have left this barrier or are in it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.compat.missing import attributes_of
from tdcoll.compat.triton_dist.language.extra.language_extra import pack_b32_v2

__all__ = ["BarrierAllContext", "barrier_all_intra_node_atomic_cas_block", "barrier_all_intra_node_non_atomic"]
__all__ += ["barrier_all_intra_node_non_atomic_block", "barrier_all_on_stream", "barrier_on_this_grid"]
__all__ += ["pack_b32_v2", "set_signal", "wait_eq"]

__getattr__ = attributes_of("triton_dist.kernels.nvidia.common_ops")


@tdcoll.jit(do_not_specialize=["local_rank", "rank", "local_world_size"])
def barrier_all_intra_node_atomic_cas_block(local_rank, rank, local_world_size, symm_flag_ptr):
    """Wait for all ranks of the node, of which this is ``local_rank``; launched as one program.

    ``symm_flag_ptr``: symmetric int32 ``[local_world_size]``, 0 before the first barrier.
    """
    first = rank - local_rank
    tdl.syncthreads()
    for peer in range(local_world_size):
        theirs = tdl.remote_ptr(symm_flag_ptr + local_rank, first + peer)
        while tl.atomic_cas(theirs, 0, 1, sem="release", scope="sys") != 0:
            pass
    for peer in range(local_world_size):
        while tl.atomic_cas(symm_flag_ptr + peer, 1, 0, sem="acquire", scope="sys") != 1:
            pass
    tdl.syncthreads()


@triton.jit
def _meet_once(local_rank, rank, num_ranks, flags, target_value):
    first = rank - local_rank
    tdl.syncthreads()
    for peer in range(num_ranks):
        if tdl.tid(0) == 0:
            tdl.st_release(tdl.remote_ptr(flags + local_rank, first + peer), target_value, "sys")
    for peer in range(num_ranks):
        while tdl.ld(flags + peer, "sys", "acquire") != target_value:
            pass
    tdl.syncthreads()


@tdcoll.jit(do_not_specialize=["local_rank", "rank", "num_ranks", "target_value"])
def barrier_all_intra_node_non_atomic_block(local_rank, rank, num_ranks, symm_flags, target_value):
    """Wait for all ranks of the node without atomics; launched as one program, each time with another value.

    ``symm_flags``: symmetric int32 or int64 ``[2 * num_ranks]``. The ranks meet twice, because one that is ahead would
    otherwise overwrite a value that another has yet to read.
    """
    _meet_once(local_rank, rank, num_ranks, symm_flags, target_value)
    _meet_once(local_rank, rank, num_ranks, symm_flags + num_ranks, target_value)


@triton.jit
def barrier_on_this_grid(ptr, use_cooperative: tl.constexpr):
    """Wait for all thread blocks of the launch, which must be resident at once. ``ptr``: int32, 0 at first.

    The top bit of the word turns over when the last thread block has come, because the shares of all add up to it. Use
    ``tdl.grid_barrier`` for one with a deadline.
    """
    word = ptr.to(tl.pointer_type(tl.int32))
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    share = tl.cast(1, tl.int32)
    if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
        share = -2147483647 - programs  # 0x80000000 - (programs - 1), as a signed number
    tdl.syncthreads()
    before = tl.atomic_add(word, share, sem="acq_rel", scope="gpu")
    while ((tdl.ld(word, "gpu", "acquire") ^ before) >> 31) == 0:
        pass
    tdl.syncthreads()


@tdcoll.jit(do_not_specialize=["local_rank", "rank", "num_ranks", "target_value"])
def barrier_all_intra_node_non_atomic(
    local_rank, rank, num_ranks, symm_flags, target_value, use_cooperative: tl.constexpr
):
    """Wait for all thread blocks of all ranks of the node, each time with another value.

    ``symm_flags``: symmetric int32 ``[2 * num_ranks + 1]``, the last for the programs, 0 at first.
    """
    if tl.program_id(0) == 0:
        _meet_once(local_rank, rank, num_ranks, symm_flags, target_value)
    barrier_on_this_grid(symm_flags + 2 * num_ranks, use_cooperative)
    if tl.program_id(0) == 0:
        _meet_once(local_rank, rank, num_ranks, symm_flags + num_ranks, target_value)
    barrier_on_this_grid(symm_flags + 2 * num_ranks, use_cooperative)


class BarrierAllContext:
    """The memory and the count of barriers of a node, or of all ranks. Collective to make.

    Args:
        is_intra_node: whether they are of this node's ranks; otherwise of all.
    """

    def __init__(self, is_intra_node: bool) -> None:
        self.is_intra_node = is_intra_node
        self.target_value = 1
        if is_intra_node:
            self.rank = runtime.current().rank
            self.num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            self.local_rank = self.rank % self.num_local_ranks
            self.symm_barrier = tdcoll.zeros(2 * self.num_local_ranks, torch.int32)

    def finalize(self) -> None:
        """Give the memory back. Collective."""
        if self.is_intra_node:
            tdcoll.free(self.symm_barrier)


def barrier_all_on_stream(ctx: BarrierAllContext | None, stream: torch.cuda.Stream | None = None) -> None:
    """Let a stream, by default the current one, wait for the ranks of ``ctx``, or for all if it is None."""
    if ctx is None or not ctx.is_intra_node:
        tdcoll.barrier_on_stream(stream)
        return
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        barrier_all_intra_node_non_atomic_block[(1,)](
            ctx.local_rank, ctx.rank, ctx.num_local_ranks, ctx.symm_barrier, ctx.target_value
        )
    ctx.target_value += 1


# ---------------------------------------------------------------------- words on streams


def _word(signal: torch.Tensor | int, require_i64: bool) -> tuple[int, int]:
    """Return the address and the bits of a signal. Older programs give the address instead of the tensor."""
    if isinstance(signal, torch.Tensor):
        if signal.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"signal_tensor must be of int32 or int64, got {signal.dtype}")
        return signal.data_ptr(), 8 * signal.itemsize
    return int(signal), 64 if require_i64 else 32


def _handle(stream: Any) -> int:
    return int((stream or torch.cuda.current_stream()).cuda_stream)


def wait_eq(signal_tensor: torch.Tensor | int, signal: int, stream: Any = None, require_i64: bool = False) -> None:
    """Let a stream wait until a word is ``signal``. ``require_i64`` is for addresses, because they have no type."""
    address, bits = _word(signal_tensor, require_i64)
    job = runtime.current()
    job.heap.stream_wait(_handle(stream), address, bits, False, signal, job.timeout_s)


def set_signal(signal_tensor: torch.Tensor | int, signal: int, stream: Any = None, require_i64: bool = False) -> None:
    """Let a stream write ``signal`` to a word. ``require_i64`` is for addresses, because they have no type."""
    address, bits = _word(signal_tensor, require_i64)
    runtime.current().heap.stream_write(_handle(stream), address, bits, signal)


_wait_eq_cuda, _set_signal_cuda = wait_eq, set_signal
