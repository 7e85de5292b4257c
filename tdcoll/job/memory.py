# SPDX-License-Identifier: Apache-2.0
"""Symmetric tensors for users."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.errors import NotSymmetricError
from tdcoll.runtime.heap import HeapInfo
from tdcoll.runtime.topology import Topology


def empty(
    shape: Sequence[int] | int,
    dtype: torch.dtype = torch.float32,
    *,
    group: runtime.Group = None,
    name: str = "tensor",
) -> torch.Tensor:
    """``-> [*shape]`` uninitialised tensor in symmetric memory: at the same offset on every rank of
    ``group``.

    Collective over ``group``. Python's garbage collector doesn't free such a tensor, because it
    cannot act on all ranks at once: pass it to :func:`free`, or let :func:`tdcoll.finalize` release
    the whole heap.

    >>> inbox = tdcoll.empty((2, 1024), torch.float32, name="inbox")
    >>> inbox.shape
    torch.Size([2, 1024])

    Args:
        shape: sizes, or one size.
        dtype: any torch dtype.
        group: a ProcessGroup, a sequence of global ranks, or None for all ranks of the job.
        name: for the simulator's reports ("pe3.signals[0]"); the same on all ranks.

    Raises:
        TypeError, ValueError: an argument is not as described.
        NotInitializedError: before :func:`tdcoll.initialize`.
        HeapExhaustedError: the heap is too small; the message has the bytes, and the setting to
            raise.
        RankMismatchError: ranks ask for different sizes. Nothing is allocated on any of them.
    """
    sizes = arguments.shape("shape", shape)
    together = f" (sizes go together: empty(({shape}, {dtype})))" if isinstance(dtype, int) else ""
    arguments.instance("dtype", dtype, torch.dtype, f"a torch.dtype{together}")
    arguments.instance("name", name, str, "a str")
    return runtime.current().allocate(sizes, dtype, group=group, name=name)


def zeros(
    shape: Sequence[int] | int,
    dtype: torch.dtype = torch.float32,
    *,
    group: runtime.Group = None,
    name: str = "tensor",
) -> torch.Tensor:
    """``-> [*shape]`` symmetric tensor of zeros, on every rank when this returns: for signals and
    counters.

    Because it calls :func:`empty` and then :func:`barrier`, a peer may put to the tensor, or signal
    it, at once.

    >>> signals = tdcoll.zeros(tdcoll.world_size(), torch.int64, name="signals")
    """
    tensor = empty(shape, dtype, group=group, name=name)
    tensor.zero_()
    barrier(group)
    return tensor


def barrier(group: runtime.Group = None) -> None:
    """Wait for this rank's GPU, then for all ranks of ``group``. Collective; on the host, so not
    for the fast path.

    >>> tdcoll.barrier()

    Raises:
        TdcollError: a rank did not come within the timeout of :func:`tdcoll.initialize`.
    """
    owner = runtime.current()
    if owner.device.type == "cuda":
        torch.cuda.synchronize(owner.device)
    owner.exchange(owner.ranks_of(group), "barrier")


def device() -> torch.device:
    """Return the device of this rank's symmetric memory: its GPU, or the CPU in the simulator.

    >>> x = torch.ones(4, device=tdcoll.device())
    """
    return runtime.facts().device


def free(tensor: torch.Tensor) -> None:
    """Free a tensor of :func:`empty`. Collective over the ranks that made it; waits for this rank's
    GPU.

    >>> scratch = tdcoll.empty(16)
    >>> tdcoll.free(scratch)

    Raises:
        TypeError: not a tensor.
        NotSymmetricError: not made by :func:`empty`, a view into it, or freed already.
        RankMismatchError: ranks free different tensors.
    """
    owner = runtime.current()
    arguments.tensor("tensor", tensor)
    if tensor.layout != torch.strided:
        raise NotSymmetricError(
            f"tensor must be one that tdcoll.empty() returned, got one of layout {tensor.layout}"
        )
    owner.release(tensor)


def heap_info() -> HeapInfo:
    """Return the use of this rank's symmetric heap: total, used and free bytes, largest free piece,
    and allocations.

    >>> tdcoll.heap_info().allocations
    0
    """
    return runtime.facts().arena.info


def rank(group: runtime.Group = None) -> int:
    """Return this process's rank in ``group``, from 0 to ``world_size(group) - 1``; in the job if
    it is None.

    >>> tdcoll.rank()  # on the second of two ranks
    1

    Raises:
        NotInitializedError: before ``tdcoll.initialize()``.
        TypeError, ValueError: ``group`` is not as :func:`tdcoll.all_gather` takes it, or this
            process is not in it.
    """
    owner = runtime.facts()
    return owner.rank if group is None else owner.ranks_of(group).index(owner.rank)


def world_size(group: runtime.Group = None) -> int:
    """Return the number of ranks in ``group``; in the job, if it is None.

    >>> tdcoll.world_size()  # on 2 ranks
    2

    Raises:
        NotInitializedError: before :func:`tdcoll.initialize`.
    """
    owner = runtime.facts()
    return owner.world_size if group is None else len(owner.ranks_of(group))


def topology(group: runtime.Group = None) -> Topology:
    """Return the ranks, PEs and nodes of ``group``, seen from this rank.

    >>> tdcoll.topology().n_nodes
    1
    """
    return runtime.facts().topology(group)
