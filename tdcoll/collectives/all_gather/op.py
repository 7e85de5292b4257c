# SPDX-License-Identifier: Apache-2.0
"""All-gather, host side."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton

from tdcoll import arguments, runtime
from tdcoll.collectives._host.algorithm import Algorithm, Planned, local_peers, make_routes, on_device, successors
from tdcoll.collectives._host.checks import (
    check_context,
    check_tensor,
    strided_bytes,
    usable,
)
from tdcoll.collectives._host.collective import Collective
from tdcoll.collectives._host.drop_in import pooled, work_of
from tdcoll.collectives._host.gradient import attach, refuse
from tdcoll.collectives._host.plan import LL_WORD_BYTES, Plan
from tdcoll.collectives._host.reach import Standing, deltas_to, place_of
from tdcoll.collectives.all_gather import kernels_direct, kernels_ll, kernels_puts, kernels_ring
from tdcoll.collectives.all_gather.policy import POLICY, put_chunks
from tdcoll.context import CollectiveContext
from tdcoll.primitives.puts import Routes

__all__ = ["ALL_GATHER", "all_gather", "all_gather_in_place", "all_gather_into_tensor", "exchange_counted"]


def _routes(call: Planned) -> Routes:
    """Whom this rank sends to; for LL, after them, the ranks whose words come flagged."""
    ctx, topology, algorithm = call.ctx, call.ctx.topology, call.plan.algorithm

    def make() -> Routes:
        if algorithm in ("2d", "ll"):
            nodes = [(topology.node + i) % topology.n_nodes for i in range(1, topology.n_nodes)]
            remote = [topology.members[node][topology.place] for node in nodes]
        else:
            remote = [rank for rank in successors(topology) if topology.nodes[rank] != topology.node]
        flagged = [rank for rank in successors(topology) if rank not in remote] if algorithm == "ll" else []
        return make_routes(ctx, local_peers(topology), remote, flagged)

    routes: Routes = on_device(ctx, "all_gather", ("all_gather", "routes", algorithm), make)
    return routes


def _puts(call: Planned) -> dict[str, Any]:
    block = triton.next_power_of_2(call.ctx.world_size)
    return {"routes": _routes(call), "BLOCK": block, "COUNTED": bool(call.options)}


def _programs_of_puts(call: Planned) -> int:
    routes, world, channels = _routes(call), call.ctx.world_size, call.plan.channels
    pushes = routes.n_local * (1 + routes.n_remote if call.plan.algorithm == "2d" else 1)
    if call.in_buffer:
        return channels * (pushes + routes.n_remote + 1) + 1
    return channels * (pushes + (routes.n_remote > 0) + world)


def _programs_for_all(call: Planned) -> int:
    return call.plan.channels * call.ctx.world_size


def _several(call: Planned) -> bool:
    return call.facts.topology.n_nodes > 1


def _put(call: Planned) -> Plan:
    return put_chunks(call.facts.nbytes, call.plan, call.ctx.channels)


def _ll(call: Planned) -> dict[str, Any]:
    block = {"BLOCK": call.plan.chunk // LL_WORD_BYTES}
    if not _several(call):
        return block
    return {**block, "routes": _routes(call), "chunk": _put(call).chunk, "channels": _put(call).channels}


def _shapes(shape: torch.Size, world: int) -> tuple[torch.Size, ...]:
    """``out`` may be concatenated or stacked."""
    concatenated = (world * shape[0], *shape[1:]) if shape else (world,)
    return torch.Size(concatenated), torch.Size((world, *shape))


def _by_torch(tensor: torch.Tensor, out: torch.Tensor, group: Any) -> None:
    """As bytes: they are moved as they are, and not all dtypes are known there."""
    given, result = tensor.reshape(-1).view(torch.uint8), out.reshape(-1).view(torch.uint8)
    torch.distributed.all_gather_into_tensor(result, given, group=group)


ALL_GATHER = Collective(
    POLICY,
    {
        "ll": Algorithm(
            kernel=lambda call: kernels_puts.all_gather_ll_2d if _several(call) else kernels_ll.all_gather_ll,
            programs=lambda call: _programs_for_all(call) + (_put(call).channels if _several(call) else 0),
            values=_ll,
        ),
        "direct": Algorithm(
            kernel=lambda call: kernels_direct.all_gather_direct,
            programs=_programs_for_all,
            values=lambda call: {"COUNTED": bool(call.options)},
        ),
        "ring": Algorithm(kernel=lambda call: kernels_ring.all_gather_ring, programs=_programs_for_all),
        "1d": Algorithm(kernel=lambda call: kernels_puts.all_gather_1d, programs=_programs_of_puts, values=_puts),
        "2d": Algorithm(
            kernel=lambda call: kernels_puts.all_gather_2d,
            programs=_programs_of_puts,
            values=lambda call: {**_puts(call), "STORES": call.ctx.stores},
        ),
    },
    shapes=functools.lru_cache(maxsize=1024)(_shapes),
    layout="gather",
    hand_over=_by_torch,
)
"""The host side. The only option of a call is whether its segments are counted."""


def exchange_counted(ctx: CollectiveContext, address: int, nbytes: int) -> None:
    """All-gather in place of segments that say on the device how much they hold. For collectives built on it.

    One epoch of ``ctx``, which the caller has begun. Afterwards every rank has every segment, up to its count.

    Args:
        address: of ``world`` segments in symmetric memory, 16-byte aligned; this rank's own is filled, and begins with
            an int64: the bytes that it uses, itself included.
        nbytes: from one segment to the next, a multiple of 16.
    """
    key = ("all_gather", "counted", nbytes)
    launch = ctx.once(key, lambda: _make_counted(ctx, nbytes))
    launch.at(address + ctx.rank * nbytes, address)


def _make_counted(ctx: CollectiveContext, nbytes: int) -> Any:
    """By the seed, without LL: no table has measured such calls, and flagged words know of no counts."""
    facts = ALL_GATHER.facts(ctx, nbytes, in_place=True)
    plan = POLICY.choose(dataclasses.replace(facts, ll_bytes=-1))
    return ALL_GATHER.launches_of(ctx, facts, plan, "counted")


def all_gather(
    tensor: torch.Tensor,
    ctx: CollectiveContext | None = None,
    out: torch.Tensor | None = None,
    algorithm: str | Plan = "auto",
) -> torch.Tensor:
    """``[n, ...] -> [world * n, ...]``: the tensors of all ranks, concatenated in rank order.

    Collective over ``ctx``'s group; asynchronous on its stream, with no synchronisation, and CUDA-graph safe after one
    eager call of the size. Bytes are moved as they are, so any dtype will do; each rank gives the same number.

    Differentiable: the gradient is :func:`tdcoll.reduce_scatter`'s sum on the same context. So all ranks pass a tensor
    that requires grad, or none does, and their backward passes make the same calls in the same order.

    Args:
        tensor: this rank's contribution, contiguous, on the context's device; at most ``ctx.max_bytes_per_rank`` bytes.
        ctx: None: a context of tdcoll's own of all ranks, which is made at the first call and when a larger one comes.
            Making one is collective and synchronises.
        out: where the result goes: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous, same dtype. Made if None.
            May hold ``tensor`` as its own segment, and must not overlap it otherwise.
            It has no gradient: ``tensor`` must not require grad then, unless under ``torch.no_grad()``.
        algorithm: ``"ll"``, ``"direct"``, ``"ring"``, ``"1d"``, ``"2d"`` or ``"auto"``, which chooses by the context's
            tuning table, size and topology (see :mod:`tdcoll.collectives._host.plan`). A
            :class:`~tdcoll.Plan` fixes chunks and warps as well.

    Returns:
        ``out``, or a new ordinary tensor.

    Raises:
        ContextError: the context is closed, bound to another stream, or too small (the message has the number).
        CollectiveTimeout: an earlier wait on the context expired.
        RankMismatchError: (``debug``) ranks differ in size, dtype, algorithm or ``requires_grad``.
        NotInitializedError: (without ``ctx``) before ``tdcoll.initialize()``.
        HeapExhaustedError: (without ``ctx``) the symmetric heap has no room.
        TypeError, ValueError: an argument is not as described.

    Algorithms: direct all-gather by one-sided puts, each with a signal of its own (NVSHMEM documentation, *Signaling
    Operations*), or by stores and a released flag inside a node; the 2D form is the usual hierarchical exchange by
    rails; LL puts a flag beside every 96 bits (after NCCL's protocol of that name); the ring passes on by stores.
    """
    given = ctx
    if ctx is None:
        arguments.tensor("tensor", tensor)
        ctx = pooled("all_gather", None, strided_bytes(tensor))
    check_context(ctx)
    if getattr(tensor, "requires_grad", False) and torch.is_grad_enabled():
        if out is not None:
            return ALL_GATHER(tensor, ctx, out, algorithm, wish=algorithm, options=refuse)
        import tdcoll

        made = _all_gather(tensor.detach(), ctx, None, algorithm, gradient=True)
        return attach(tensor, made, lambda grad: tdcoll.reduce_scatter(grad, given))
    return _all_gather(tensor, ctx, out, algorithm)


def _all_gather(
    tensor: Any,
    ctx: CollectiveContext,
    out: Any,
    algorithm: Any = "auto",
    names: tuple[str, str] = ("tensor", "out"),
    gradient: bool = False,
) -> torch.Tensor:
    """Make the call of :func:`all_gather` without a gradient.

    Args:
        names: the caller's names of ``tensor`` and ``out``, for errors.
        gradient: the result will have one, so there will be a backward pass; compared in debug mode.
    """
    if (made := ALL_GATHER.at_once(tensor, ctx, out, algorithm)) is not None:
        return made
    agree = {"requires_grad": gradient}
    return ALL_GATHER(tensor, ctx, out, algorithm, wish=algorithm, agree=agree, names=names)


def all_gather_in_place(buffer: torch.Tensor, ctx: CollectiveContext, algorithm: str | Plan = "auto") -> torch.Tensor:
    """``[world * n, ...] -> the same``, without a copy: ``buffer`` is symmetric, each rank has filled its own segment.

    Peers put or store straight into ``buffer``. What they overwrite there may still be read by this rank's earlier
    work, so a rank first says that it has entered the call, and is not written to before: one more crossing (about 1 us
    over NVLink), and no staging, no copy and no limit by ``ctx.max_bytes_per_rank``. It pays for messages of megabytes.
    Small ones go by LL through the context's own memory, as out of place.

    Args:
        buffer: made by :func:`tdcoll.empty` over the context's group, at the same offset on all ranks, or, in one node,
            PyTorch's symmetric memory (``torch.distributed._symmetric_memory``) of its ProcessGroup; contiguous; its
            first extent is divisible by the number of ranks. Rank r's segment is ``buffer.chunk(world)[r]``. After a
            timeout, peers that are only late may still write to it.
        algorithm: as for :func:`all_gather`.

    Returns:
        ``buffer``.

    Raises:
        NotSymmetricError: ``buffer`` is not symmetric memory of the context's group.
        ContextError, CollectiveTimeout, RankMismatchError, TypeError, ValueError: as for :func:`all_gather`.
    """
    check_context(ctx)
    world = ctx.world_size
    key = None  # of the short way, as Collective.at_once has it, for one tensor; of plans only by name
    if type(algorithm) is str and isinstance(buffer, torch.Tensor) and not buffer.is_nested:
        key = ("all_gather_in_place", buffer.shape, buffer.dtype, algorithm)
    known = None if key is None else ctx.known(key)
    if known is not None and usable(buffer, ctx.device) and known[2].holds(buffer):
        if (stream := ctx.enter()) is not None:
            run, own, _ = known
            base = buffer.data_ptr()
            try:
                run(stream, base + own, base)
            except BaseException as error:
                ctx.fail("all_gather_in_place", error)
                raise
            return buffer

    def prepare() -> Any:
        check_tensor("buffer", buffer, ctx.device)
        if not buffer.dim() or buffer.shape[0] % world:
            raise ValueError(
                f"buffer's first extent must be divisible by the {world} rank(s); got shape {list(buffer.shape)}"
            )
        deltas = deltas_to("buffer", buffer, ctx)
        return ALL_GATHER.launches(ctx, buffer.nbytes // world, algorithm, in_place=True, deltas=deltas)

    nbytes = strided_bytes(buffer)
    agree = {
        "bytes of the buffer": nbytes,
        "dtype": getattr(buffer, "dtype", None),
        "algorithm": algorithm,
        "offset in the symmetric heap": place_of(buffer, ctx),
    }
    with ctx.calling("all_gather_in_place", 0, agree, prepare) as launch:
        if launch.group is not None:
            launch(buffer.chunk(world)[ctx.rank], buffer)
            return buffer
        base = buffer.data_ptr() or ctx.staging.data_ptr()  # a tensor of no bytes has no address
        own = ctx.rank * (buffer.nbytes // world)
        launch.at(base + own, base)
    if key is not None and not ctx.capturing:
        ctx.once(key, lambda: (launch.run, own, Standing(ctx)))[2].add(buffer)
    return buffer


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: runtime.Group = None,
    async_op: bool = False,
) -> torch.distributed.Work | None:
    """Drop-in for ``torch.distributed.all_gather_into_tensor``, in the order of the current stream.

    Uses a context that tdcoll makes for the group at the first call and replaces by a larger one when a larger message
    comes; ``tdcoll.finalize()`` frees what is left. Making one is collective and synchronises, so make the first and
    the largest call before capturing a CUDA graph.

    Args:
        output_tensor: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous, same dtype as ``input_tensor``.
        input_tensor: ``[n, ...]``, contiguous.
        group: a ProcessGroup, a sequence of global ranks, or None for all ranks.
        async_op: return a ``torch.distributed.Work``. The call is queued on the current stream in any case; ``wait()``
            makes the stream that is current then wait for it.

    Returns:
        None, or the ``Work``.

    Raises:
        NotInitializedError: before ``tdcoll.initialize()``.
        BackendTimeout: (``async_op``) a wait expired. ``Work.wait(timeout)`` raises it; in the simulator, the call.
        Others: as :func:`all_gather`.
    """
    arguments.tensor("output_tensor", output_tensor)
    arguments.tensor("input_tensor", input_tensor)
    ctx = pooled("all_gather", group, strided_bytes(input_tensor))
    _all_gather(input_tensor, ctx, output_tensor, names=("input_tensor", "output_tensor"))
    return work_of(ctx, output_tensor) if async_op else None
