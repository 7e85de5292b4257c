# SPDX-License-Identifier: Apache-2.0
"""All-gather, host side: check, choose, launch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from tdcoll import arguments, runtime
from tdcoll.collectives._host.launch import Launch
from tdcoll.collectives._host.pool import Pool
from tdcoll.collectives.all_gather import kernels_direct, kernels_ll, kernels_puts, kernels_ring
from tdcoll.collectives.all_gather.policy import HANDED_OVER, LL_WORD_BYTES, Plan, choose, put_chunks
from tdcoll.context import CollectiveContext
from tdcoll.errors import ContextError, NotSymmetricError
from tdcoll.primitives.group import Window
from tdcoll.primitives.puts import Routes

__all__ = [
    *("all_gather", "all_gather_at_once", "all_gather_in_place", "all_gather_into_tensor", "all_gather_unchecked"),
    "exchange_counted",
]

_log = logging.getLogger("tdcoll")


def _routes(ctx: CollectiveContext, algorithm: str) -> Routes:
    """Whom a rank sends to; for LL, after them, the ranks whose words come flagged.

    Every rank starts with its successor, so that no rank is everybody's first target.
    """
    topology = ctx.topology
    mates = topology.members[topology.node]
    local = [mates[(topology.place + i) % len(mates)] for i in range(1, len(mates))]
    successors = [(topology.rank + i) % topology.world_size for i in range(1, topology.world_size)]
    if algorithm in ("2d", "ll"):
        nodes = [(topology.node + i) % topology.n_nodes for i in range(1, topology.n_nodes)]
        remote = [topology.members[node][topology.place] for node in nodes]
    else:
        remote = [rank for rank in successors if topology.nodes[rank] != topology.node]
    entries = [
        *local,
        *(topology.pes[rank] for rank in local),
        *remote,
        *(topology.pes[rank] for rank in remote),
    ]
    if algorithm == "ll":
        entries += [rank for rank in successors if rank not in remote]
    return Routes(torch.tensor(entries or [0], dtype=torch.int32, device=ctx.device), len(local), len(remote))


class _Launch:
    """One ready-made launch: everything about a call shape that does not change from call to call."""

    group = None
    """A process group that does it instead; see :class:`_HandOver`."""

    def __init__(self, ctx: CollectiveContext, nbytes: int, plan: Plan, in_place: bool, counted: bool = False) -> None:
        self._context = ctx
        in_buffer = in_place and plan.algorithm != "ll"  # whose words land elsewhere
        inbox = ctx.staging.data_ptr(), ctx.capacity, ctx.device_group.deltas, tl.constexpr(2)
        buffer = 0, nbytes, ctx.device_group.deltas, tl.constexpr(1)
        window = Window(*(buffer if in_buffer else inbox))
        prepares = {"ll": self._prepare_ll, "direct": self._prepare_direct, "ring": self._prepare_direct}
        kernel, programs, more = prepares.get(plan.algorithm, self._prepare_puts)(nbytes, plan, in_buffer)
        known = {"window": window, "g": ctx.device_group, "nbytes": nbytes, "COUNTED": counted, **more}
        arguments = {name: known[name] for name in kernel.arg_names if name in known}
        changing = ("source", "out", "window.base") if in_buffer else ("source", "out")
        self._in_buffer = in_buffer
        self.kernel = kernel
        self._launch = Launch(kernel, programs, arguments, changing, num_warps=plan.num_warps)
        constants = [(name, value) for name, value in arguments.items() if name.isupper()]
        self._variant = ("all_gather", kernel.__name__, *constants, plan.num_warps, in_buffer)

    def _routes(self, algorithm: str) -> Routes:
        tables = self._context.tables
        if ("routes", algorithm) not in tables:
            _refuse_capture(self._context)
            tables["routes", algorithm] = _routes(self._context, algorithm)
        routes: Routes = tables["routes", algorithm]
        return routes

    def _prepare_puts(self, nbytes: int, plan: Plan, in_buffer: bool) -> tuple[Any, int, dict[str, Any]]:
        ctx, routes = self._context, self._routes(plan.algorithm)
        world, n_local, n_remote = ctx.world_size, routes.n_local, routes.n_remote
        senders = n_local + (n_remote if in_buffer else n_remote > 0)
        more = {"routes": routes, "chunk": plan.chunk, "channels": plan.channels}
        more["BLOCK"] = triton.next_power_of_2(world)
        if plan.algorithm == "1d":
            kernel = kernels_puts.all_gather_1d
        else:
            kernel = kernels_puts.all_gather_2d
            senders += n_remote * n_local
            more["STORES"] = ctx.ll_bytes >= 0
        programs = plan.channels * (senders + 1) + 1 if in_buffer else plan.channels * (senders + world)
        return kernel, programs, more

    def _prepare_direct(self, nbytes: int, plan: Plan, in_buffer: bool) -> tuple[Any, int, dict[str, Any]]:
        # The ring has the same memory, signals, programs and arguments.
        kernel = kernels_direct.all_gather_direct if plan.algorithm == "direct" else kernels_ring.all_gather_ring
        return kernel, self._context.world_size * plan.channels, {"chunk": plan.chunk}

    def _prepare_ll(self, nbytes: int, plan: Plan, in_buffer: bool) -> tuple[Any, int, dict[str, Any]]:
        ctx = self._context
        world, flagged, deltas = ctx.world_size, ctx.flagged, ctx.device_group.deltas
        words = Window(flagged.data_ptr(), 16 * flagged.shape[2], deltas, tl.constexpr(2))
        more: dict[str, Any] = {"words": words, "blocks": plan.channels, "BLOCK": plan.chunk // LL_WORD_BYTES}
        if ctx.topology.n_nodes == 1:
            return kernels_ll.all_gather_ll, world * plan.channels, more
        put = put_chunks(nbytes, plan, ctx.channels)
        more |= {"routes": self._routes("ll"), "chunk": put.chunk, "channels": put.channels}
        return kernels_puts.all_gather_ll_2d, put.channels + plan.channels * world, more

    def gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """The call, out of place."""
        self.gather_at(tensor.data_ptr(), out.data_ptr())

    def gather_at(self, source: int, out: int, stream: int | None = None) -> None:
        """The call, of addresses: of this rank's segment, and of the result or the buffer that both are in.

        Args:
            stream: handle of the current stream, for callers that know it.
        """
        ctx, launch = self._context, self._launch
        if not launch.prepared:
            if self._variant not in ctx.tables:
                _refuse_capture(ctx)
            self.prepare()
        if stream is None:
            stream = ctx.current_stream()
        if self._in_buffer:
            launch(stream, source, 0, out)
        else:
            launch(stream, source, out)

    def prepare(self) -> None:
        """Compile and load what a CUDA graph may capture before any call of this kind is made."""
        self._launch.prepare()
        self._context.tables[self._variant] = True


class _HandOver:
    """In the place of a launch: torch.distributed's all-gather, because a tuning table says that it is faster."""

    def __init__(self, ctx: CollectiveContext, nbytes: int, graph: bool) -> None:
        self.group, self._context = ctx.tuning.group, ctx
        if "handed over" not in ctx.tables:
            ctx.tables["handed over"] = True
            if ctx.rank == 0:
                _log.info(
                    "all_gather: the tuning table leaves %d bytes per rank%s on %s to torch.distributed (%s)",
                    nbytes, " in CUDA graphs" if graph else "", ctx.topology.describe(), self.group.name(),
                )  # fmt: skip

    def prepare(self) -> None:
        """A first call, which makes the communicator: that cannot be captured."""
        mine = torch.zeros(1, dtype=torch.uint8, device=self._context.device)
        self.gather(mine, mine.new_empty(self._context.world_size))

    def gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """The call. As bytes: they are moved as they are, and not all dtypes are known there."""
        given, result = tensor.reshape(-1).view(torch.uint8), out.reshape(-1).view(torch.uint8)
        torch.distributed.all_gather_into_tensor(result, given, group=self.group)


def _refuse_capture(ctx: CollectiveContext) -> None:
    """What comes next compiles a kernel or copies to the device, neither of which a CUDA graph can capture."""
    if ctx.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ContextError(
            "all_gather: the first call of a kind on a context prepares what a CUDA graph cannot capture; make one "
            "such call, of about the same size, on every rank before capturing"
        )


def _launch(ctx: CollectiveContext, nbytes: int, algorithm: str | Plan, in_place: bool) -> _Launch | _HandOver:
    arguments.instance("algorithm", algorithm, (str, Plan), "a str or a Plan")
    graph = ctx.capturing and bool(ctx.tuning.entries)
    key = ("all_gather", nbytes, algorithm, in_place, graph)
    return ctx.once(key, lambda: _make_launch(ctx, nbytes, algorithm, in_place, graph))


def _make_launch(
    ctx: CollectiveContext, nbytes: int, algorithm: str | Plan, in_place: bool, graph: bool
) -> _Launch | _HandOver:
    """The launch of such calls; with a table also that of the same calls in a CUDA graph, where no more can be made."""

    def plan_of(graph: bool) -> Plan:
        return choose(
            nbytes,
            ctx.topology,
            algorithm,
            ll_bytes=ctx.ll_bytes,
            direct=ctx.ll_bytes >= 0,
            channels=ctx.channels,
            entries=ctx.tuning.entries,
            graph=graph,
            in_place=in_place,
            hand_over=ctx.tuning.group is not None,
            simulated=ctx.job.simulated,
        )

    def launch_of(plan: Plan, graph: bool) -> _Launch | _HandOver:
        if plan.algorithm == HANDED_OVER:
            return _HandOver(ctx, nbytes, graph)
        return _Launch(ctx, nbytes, plan, in_place)

    plan = plan_of(graph)
    launch = launch_of(plan, graph)
    if ctx.tuning.entries and not graph:
        captured = plan_of(True)
        other = launch if captured == plan else launch_of(captured, True)
        if other is not launch:
            other.prepare()
        ctx.once(("all_gather", nbytes, algorithm, in_place, True), lambda: other)
    return launch


def exchange_counted(ctx: CollectiveContext, address: int, nbytes: int) -> None:
    """All-gather in place of segments that say on the device how much they hold. For collectives built on it.

    One epoch of ``ctx``, which the caller has begun. Afterwards every rank has every segment, up to its count.

    Args:
        address: of ``world`` segments in symmetric memory, 16-byte aligned; this rank's own is filled, and begins with
            an int64: the bytes that it uses, itself included.
        nbytes: from one segment to the next, a multiple of 16.
    """
    key = ("exchange_counted", nbytes)

    def make() -> _Launch:
        plan = choose(nbytes, ctx.topology, direct=ctx.ll_bytes >= 0, channels=ctx.channels, in_place=True)
        return _Launch(ctx, nbytes, plan, in_place=True, counted=True)

    launch = ctx.once(key, make)
    launch.gather_at(address + ctx.rank * nbytes, address)


def _check_context(ctx: Any) -> None:
    arguments.instance("ctx", ctx, CollectiveContext, "a tdcoll.CollectiveContext")


def _strided_bytes(tensor: Any) -> int:
    """Bytes of a tensor; 0 of what is none, or has no strides."""
    return tensor.nbytes if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided else 0


def _check(name: str, tensor: Any, ctx: CollectiveContext) -> None:
    arguments.tensor(name, tensor)
    if tensor.device != ctx.device:
        raise ValueError(f"{name} must be on {ctx.device}, where the context is; got {tensor.device}")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name} must hold its values as they are; call resolve_conj() and resolve_neg() first")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous; got shape {list(tensor.shape)}"
            + (f" with strides {tensor.stride()}" if tensor.layout == torch.strided else f" in {tensor.layout}")
        )


@functools.lru_cache(maxsize=1024)
def _gathered_shapes(shape: torch.Size, world: int) -> tuple[torch.Size, torch.Size]:
    """What ``out`` may be for tensors of this shape: concatenated, or stacked."""
    concatenated = (world * shape[0], *shape[1:]) if shape else (world,)
    return torch.Size(concatenated), torch.Size((world, *shape))


def lies_elsewhere_in(begin: int, nbytes: int, first: int, total: int, own: int) -> bool:
    """Return whether ``nbytes`` bytes at ``begin`` overlap ``total`` bytes at ``first``, other than as the segment that
    begins ``own`` bytes into them."""
    return nbytes > 0 and first < begin + nbytes and begin < first + total and begin != first + own


_SHORT = "all_gather, the short way"
"""The first part of the keys under which a context remembers such calls."""

UNCHECKED = object()
"""In the place of an algorithm for :func:`all_gather_at_once`: "auto", after :func:`all_gather_unchecked`."""


class _Known:
    """What is known of calls with tensors of some shapes and dtype, after the first: all but where the tensors lie.

    Attributes:
        launch: of such calls, outside of CUDA graphs.
        nbytes: per rank.
        total: of the result.
        own: where this rank's segment begins in it, in bytes.
        shape: of the result, where the call makes it.
    """

    __slots__ = ("launch", "nbytes", "own", "shape", "total")

    def __init__(self, launch: _Launch, nbytes: int, ctx: CollectiveContext, shape: torch.Size) -> None:
        self.launch, self.nbytes, self.shape = launch, nbytes, shape
        self.total, self.own = ctx.world_size * nbytes, ctx.rank * nbytes


def _remember(
    tensor: torch.Tensor, ctx: CollectiveContext, out: torch.Tensor | None, algorithm: Hashable, launch: Any
) -> None:
    """Let the next call with such tensors, which have been found right, be made by :func:`all_gather_at_once`."""
    dtype = tensor.dtype
    nested = tensor.is_nested or (out is not None and out.is_nested)  # those have no shape
    if isinstance(launch, _Launch) and not (ctx.capturing or dtype.is_complex or nested):
        shape = _gathered_shapes(tensor.shape, ctx.world_size)[0]
        key = (
            (_SHORT, tensor.shape, dtype, algorithm)
            if out is None
            else (_SHORT, tensor.shape, out.shape, dtype, out.dtype, algorithm)
        )
        ctx.once(key, lambda: _Known(launch, tensor.nbytes, ctx, shape))


def all_gather_at_once(tensor: Any, ctx: CollectiveContext, out: Any, algorithm: Hashable) -> torch.Tensor | None:
    """:func:`all_gather` like one that was made before, with as little on the host as will do.

    Everything that the long way checks is checked here or follows from the shapes and dtypes, which were found right
    then. (Conjugate bits: only complex tensors have them, and those go the long way.)

    Returns:
        The result; None if anything is not as it should be, or not known yet, which the long way finds out and says.
    """
    if not isinstance(tensor, torch.Tensor) or not (out is None or isinstance(out, torch.Tensor)):
        return None
    known: _Known | None
    try:
        if out is None:
            known = ctx.known((_SHORT, tensor.shape, tensor.dtype, algorithm))
        else:
            known = ctx.known((_SHORT, tensor.shape, out.shape, tensor.dtype, out.dtype, algorithm))
    except (RuntimeError, TypeError):  # a shape or an algorithm that cannot be a key
        return None
    device = ctx.device
    if (
        known is None
        or tensor.device != device
        or tensor.layout is not torch.strided
        or tensor.is_neg()
        or not tensor.is_contiguous()
    ):
        return None
    source = tensor.data_ptr()
    if out is None:
        if (stream := ctx.enter()) is None:
            return None
        out = torch.empty(*known.shape, dtype=tensor.dtype, device=device)  # of numbers: a tuple takes twice as long
        known.launch.gather_at(source, out.data_ptr(), stream)
        return out
    if out.device != device or out.layout is not torch.strided or out.is_neg() or not out.is_contiguous():
        return None
    first = out.data_ptr()
    if lies_elsewhere_in(source, known.nbytes, first, known.total, known.own):
        return None
    if (stream := ctx.enter()) is None:
        return None
    known.launch.gather_at(source, first, stream)
    return out


def all_gather(
    tensor: torch.Tensor,
    ctx: CollectiveContext,
    out: torch.Tensor | None = None,
    algorithm: str | Plan = "auto",
) -> torch.Tensor:
    """``[n, ...] -> [world * n, ...]``: the tensors of all ranks, concatenated in rank order.

    Collective over ``ctx``'s group; asynchronous on its stream, with no synchronisation, and CUDA-graph safe after one
    eager call of the size. Bytes are moved as they are, so any dtype will do; each rank gives the same number.

    Args:
        tensor: this rank's contribution, contiguous, on the context's device; at most ``ctx.max_bytes_per_rank`` bytes.
        out: where the result goes: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous, same dtype. Made if None.
            May hold ``tensor`` as its own segment, and must not overlap it otherwise.
        algorithm: ``"ll"``, ``"direct"``, ``"ring"``, ``"1d"``, ``"2d"`` or ``"auto"``, which chooses by the context's
            tuning table, size and topology (see :func:`tdcoll.collectives.all_gather.policy.choose`). A
            :class:`~tdcoll.collectives.all_gather.policy.Plan` fixes chunks and warps as well.

    Returns:
        ``out``, or a new ordinary tensor.

    Raises:
        ContextError: the context is closed, bound to another stream, or too small (the message has the number).
        CollectiveTimeout: an earlier wait on the context expired.
        RankMismatchError: (``debug``) ranks pass different sizes, dtypes or algorithms.
        TypeError, ValueError: an argument is not as described.

    Algorithms: direct all-gather by one-sided puts, each with a signal of its own (NVSHMEM documentation, *Signaling
    Operations*), or by stores and a released flag inside a node; the 2D form is the usual hierarchical exchange by
    rails; LL puts a flag beside every 96 bits (after NCCL's protocol of that name); the ring passes on by stores.
    """
    _check_context(ctx)
    if (made := all_gather_at_once(tensor, ctx, out, algorithm)) is not None:
        return made
    nbytes = _strided_bytes(tensor)
    given = out

    def prepare() -> _Launch | _HandOver:
        _check("tensor", tensor, ctx)
        if given is not None:
            _check_out(tensor, given, ctx)
        return _launch(ctx, nbytes, algorithm, False)

    agree = {"dtype": getattr(tensor, "dtype", None), "algorithm": algorithm}
    launch = ctx.begin("all_gather", nbytes, agree, prepare)
    if out is None:
        out = torch.empty(_gathered_shapes(tensor.shape, ctx.world_size)[0], dtype=tensor.dtype, device=tensor.device)
    launch.gather(tensor, out)
    _remember(tensor, ctx, given, algorithm, launch)
    return out


def all_gather_unchecked(tensor: torch.Tensor, ctx: CollectiveContext, out: torch.Tensor) -> None:
    """:func:`all_gather` for callers that have checked both tensors themselves: as it says, but of any shapes.

    The next call like it may be ``all_gather_at_once(tensor, ctx, out, UNCHECKED)``.
    """
    nbytes = tensor.nbytes
    agree = {"dtype": tensor.dtype, "algorithm": "auto"}
    launch = ctx.begin("all_gather", nbytes, agree, lambda: _launch(ctx, nbytes, "auto", False))
    launch.gather(tensor, out)
    _remember(tensor, ctx, out, UNCHECKED, launch)


def _check_out(tensor: torch.Tensor, out: torch.Tensor, ctx: CollectiveContext) -> None:
    """Raise unless ``out`` can take what the ranks give."""
    _check("out", out, ctx)
    shapes = _gathered_shapes(tensor.shape, ctx.world_size)
    if out.dtype != tensor.dtype or out.shape not in shapes:
        shape, stacked = (list(shape) for shape in shapes)
        raise ValueError(
            f"out must be {tensor.dtype} of shape {shape} or {stacked}; got {out.dtype} of {list(out.shape)}"
        )
    begin, nbytes, first = tensor.data_ptr(), tensor.nbytes, out.data_ptr()
    own = ctx.rank * nbytes
    if lies_elsewhere_in(begin, nbytes, first, ctx.world_size * nbytes, own):
        raise ValueError(
            f"tensor must not overlap out, except as out's own segment at byte {own}; it lies at byte {begin - first}"
        )


def all_gather_in_place(buffer: torch.Tensor, ctx: CollectiveContext, algorithm: str | Plan = "auto") -> torch.Tensor:
    """``[world * n, ...] -> the same``, without a copy: ``buffer`` is symmetric, each rank has filled its own segment.

    Peers put or store straight into ``buffer``. What they overwrite there may still be read by this rank's earlier
    work, so a rank first says that it has entered the call, and is not written to before: one more crossing (about 1 us
    over NVLink), and no staging, no copy and no limit by ``ctx.max_bytes_per_rank``. It pays for messages of megabytes.
    Small ones go by LL through the context's own memory, as out of place.

    Args:
        buffer: made by :func:`tdcoll.empty` over the context's group, at the same offset on all ranks; contiguous;
            its first extent is divisible by the number of ranks. Rank r's segment is ``buffer.chunk(world)[r]``.
        algorithm: as for :func:`all_gather`.

    Returns:
        ``buffer``.

    Raises:
        NotSymmetricError: ``buffer`` is not in the symmetric heap.
        ContextError, CollectiveTimeout, RankMismatchError, TypeError, ValueError: as for :func:`all_gather`.
    """
    _check_context(ctx)
    world = ctx.world_size
    owner = runtime.current()

    def prepare() -> _Launch | _HandOver:
        _check("buffer", buffer, ctx)
        if not buffer.dim() or buffer.shape[0] % world:
            raise ValueError(
                f"buffer's first extent must be divisible by the {world} rank(s); got shape {list(buffer.shape)}"
            )
        if buffer.nbytes:
            owners = owner.arena.owners_around(owner.offset_of(buffer, "buffer"), buffer.nbytes)
            if owners is None or not set(ctx.topology.pes) <= set(owners):
                raise NotSymmetricError(
                    "buffer must be made by tdcoll.empty() over all ranks of the context's group, and not freed; it "
                    + ("is not allocated" if owners is None else f"belongs to ranks {list(owners)}")
                )
        return _launch(ctx, buffer.nbytes // world, algorithm, True)

    nbytes = _strided_bytes(buffer)
    agree = {
        "bytes of the buffer": nbytes,
        "dtype": getattr(buffer, "dtype", None),
        "algorithm": algorithm,
        # A tensor of no bytes has no address.
        "offset in the symmetric heap": buffer.data_ptr() - owner.heap.base if nbytes else 0,
    }
    launch = ctx.begin("all_gather_in_place", 0, agree, prepare)
    if launch.group is not None:
        launch.gather(buffer.chunk(world)[ctx.rank], buffer)
        return buffer
    base = buffer.data_ptr() or ctx.staging.data_ptr()  # a tensor of no bytes has no address
    launch.gather_at(base + ctx.rank * (buffer.nbytes // world), base)
    return buffer


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: runtime.Group = None,
    async_op: bool = False,
) -> None:
    """Drop-in for ``torch.distributed.all_gather_into_tensor``, in the order of the current stream.

    Uses a context that tdcoll makes for the group at the first call and replaces by a larger one when a larger message
    comes; ``tdcoll.finalize()`` frees what is left. Making one is collective and synchronises, so make the first and
    the largest call before capturing a CUDA graph.

    Args:
        output_tensor: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous, same dtype as ``input_tensor``.
        input_tensor: ``[n, ...]``, contiguous.
        group: a ProcessGroup, a sequence of global ranks, or None for all ranks.
        async_op: False. The call is asynchronous on the stream in any case; there is no ``Work`` to return.

    Raises:
        NotInitializedError: before ``tdcoll.initialize()``.
        ValueError: ``async_op`` is true.
        Others: as :func:`all_gather`.
    """
    owner = runtime.current()
    if async_op:
        raise ValueError("async_op must be False: the call only queues work on the current stream")
    arguments.tensor("output_tensor", output_tensor)
    arguments.tensor("input_tensor", input_tensor)
    ranks = owner.ranks_of(group)
    pool: Any = owner.contexts.get(ranks)
    if pool is None:
        pool = owner.contexts[ranks] = Pool(owner, ranks, "all_gather_into_tensor")
    pool.prepare(input_tensor.nbytes)
    all_gather(input_tensor, pool.context, output_tensor)
