# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.kernels.common_ops`` and ``.nvidia.common_ops``: barriers of a node, words on
streams.

The barrier of a node, by tokens: ``flags[r]`` on rank p is where rank r leaves a token for p::

    rank r  --0 becomes 1-->  flags[r] on every rank p of the node, r itself included
    rank r  <--1 becomes 0--  its own flags[p], for every p

When a rank has taken the tokens of all, all have come. A second barrier may follow at once, because
a rank that leaves a token first waits until the last one was taken, which needs only ranks that
have left this barrier or are in it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime

__all__ = [
    "BarrierAllContext",
    "barrier_all_intra_node_atomic_cas_block",
    "barrier_all_on_stream",
    "set_signal",
]
__all__ += ["wait_eq"]


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


class BarrierAllContext:
    """Selects the barrier of :func:`barrier_all_on_stream`. Here it is that of all ranks, which
    needs no memory."""

    def __init__(self, is_intra_node: bool) -> None:
        self.is_intra_node = is_intra_node

    def finalize(self) -> None:
        """Do nothing."""


def barrier_all_on_stream(
    ctx: BarrierAllContext | None, stream: torch.cuda.Stream | None = None
) -> None:
    """Let a stream, by default the current one, wait for all ranks, those of other nodes too."""
    tdcoll.barrier_on_stream(stream)


# ---------------------------------------------------------------------- words on streams


def _word(signal: torch.Tensor | int, require_i64: bool) -> tuple[int, int]:
    """Return the address and the bits of a signal. Older programs give the address instead of the
    tensor."""
    if isinstance(signal, torch.Tensor):
        if signal.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"signal_tensor must be of int32 or int64, got {signal.dtype}")
        return signal.data_ptr(), 8 * signal.itemsize
    return int(signal), 64 if require_i64 else 32


def _handle(stream: Any) -> int:
    return int((stream or torch.cuda.current_stream()).cuda_stream)


def wait_eq(
    signal_tensor: torch.Tensor | int, signal: int, stream: Any = None, require_i64: bool = False
) -> None:
    """Let a stream wait until a word is ``signal``. ``require_i64`` is for addresses, because they
    have no type."""
    address, bits = _word(signal_tensor, require_i64)
    job = runtime.current()
    job.heap.stream_wait(_handle(stream), address, bits, False, signal, job.timeout_s)


def set_signal(
    signal_tensor: torch.Tensor | int, signal: int, stream: Any = None, require_i64: bool = False
) -> None:
    """Let a stream write ``signal`` to a word. ``require_i64`` is for addresses, because they have
    no type."""
    address, bits = _word(signal_tensor, require_i64)
    runtime.current().heap.stream_write(_handle(stream), address, bits, signal)
