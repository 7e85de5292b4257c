# SPDX-License-Identifier: Apache-2.0
"""All-gather, host side: check, choose, launch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel

from tdcoll import arguments, runtime
from tdcoll.collectives.all_gather import kernels, kernels_direct, kernels_ll, kernels_ring
from tdcoll.collectives.all_gather.policy import HANDED_OVER, LL_WORD_BYTES, Plan, choose, put_chunks
from tdcoll.collectives.launch import ReadyKernel, require_all
from tdcoll.context import CollectiveContext
from tdcoll.errors import ContextError, HeapExhaustedError, NotSymmetricError

__all__ = [
    *("all_gather", "all_gather_at_once", "all_gather_in_place", "all_gather_into_tensor", "all_gather_unchecked"),
    "exchange_counted",
]

_SMALLEST_DEFAULT_CONTEXT = 1 << 20

_log = logging.getLogger("tdcoll")


def _routes(ctx: CollectiveContext, algorithm: str) -> tuple[torch.Tensor, int, int]:
    """The kernel's ``routes`` with ``n_local`` and ``n_remote``; for LL also the ranks whose words come flagged.

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
    table = torch.tensor(entries or [0], dtype=torch.int32, device=ctx.device)
    return table, len(local), len(remote)


def _deltas(ctx: CollectiveContext) -> torch.Tensor:
    """``[world]`` int64: from an address in this rank's symmetric memory to the same in each rank's, for ranks that it
    can store to."""
    if "deltas" not in ctx.tables:
        _refuse_capture(ctx)
        heap = ctx._runtime.heap
        deltas = [heap.peer_base(pe) - heap.base for pe in ctx.topology.pes]
        ctx.tables["deltas"] = torch.tensor(deltas, dtype=torch.int64, device=ctx.device)
    table: torch.Tensor = ctx.tables["deltas"]
    return table


class _Launch:
    """One ready-made launch: everything about a call shape that does not change from call to call."""

    group = None
    """A process group that does it instead; see :class:`_HandOver`."""

    def __init__(self, ctx: CollectiveContext, nbytes: int, plan: Plan, in_place: bool, counted: bool = False) -> None:
        prepares = {"ll": self._prepare_ll, "direct": self._prepare_direct, "ring": self._prepare_ring}
        prepare = prepares.get(plan.algorithm) or functools.partial(self._prepare_puts, counted=counted)
        kernel, programs, self._tensors, self._numbers, self._constants = prepare(ctx, nbytes, plan, in_place)
        self._in_words = plan.algorithm == "ll"
        in_words_only = self._in_words and ctx.topology.n_nodes == 1
        self._landing = ctx.flagged.data_ptr() if in_words_only else ctx.staging.data_ptr()
        self._grid = (programs, 1, 1)
        self._function = kernel
        self._kernel = kernel[self._grid]
        self._num_warps = plan.num_warps
        self._compiled: ReadyKernel | None = None
        # Addresses of nothing are 32-bit to Triton, as small numbers are.
        sizes = (nbytes > 0, nbytes >> 31 > 0)
        self._variant = ("compiled", plan.algorithm, self._constants, plan.num_warps, in_place, *sizes)
        self._context = ctx
        self._rest = (*(tensor.data_ptr() for tensor in self._tensors), *self._numbers, *self._constants)

    @staticmethod
    def _prepare_puts(
        ctx: CollectiveContext, nbytes: int, plan: Plan, in_place: bool, counted: bool
    ) -> tuple[Any, ...]:
        key = ("routes", plan.algorithm)
        if key not in ctx.tables:
            _refuse_capture(ctx)
            ctx.tables[key] = _routes(ctx, plan.algorithm)
        routes, n_local, n_remote = ctx.tables[key]
        world = ctx.world_size
        senders = n_local + (n_remote if in_place else n_remote > 0)
        if plan.algorithm == "1d":
            kernel = kernels.all_gather_1d
        else:
            kernel = kernels.all_gather_2d
            senders += n_remote * n_local
        programs = plan.channels * (senders + 1) + 1 if in_place else plan.channels * (senders + world)
        tensors: tuple[torch.Tensor, ...] = (ctx.signals, ctx.ready, ctx.control, ctx.monitor.words, routes)
        capacity = nbytes if in_place else ctx.capacity
        numbers = (nbytes, plan.chunk, capacity, ctx.rank, plan.channels, n_local, n_remote)
        # WORLD, BLOCK, SLOT_SIGNALS, IN_PLACE, COUNTED, and in two dimensions STORES
        constants: tuple[int, ...] = (world, triton.next_power_of_2(world), ctx.signals[0].numel(), in_place, counted)
        if plan.algorithm == "2d":
            tensors, constants = (*tensors, _deltas(ctx)), (*constants, ctx.ll_bytes >= 0)
        return kernel, programs, tensors, numbers, constants

    @staticmethod
    def _prepare_direct(ctx: CollectiveContext, nbytes: int, plan: Plan, in_place: bool) -> tuple[Any, ...]:
        tensors = (ctx.signals, ctx.ready, ctx.control, ctx.monitor.words, _deltas(ctx))
        numbers = (nbytes, plan.chunk, nbytes if in_place else ctx.capacity, ctx.rank, plan.channels)
        # WORLD, SLOT_SIGNALS, IN_PLACE
        constants = (ctx.world_size, ctx.signals[0].numel(), in_place)
        return kernels_direct.all_gather_direct, ctx.world_size * plan.channels, tensors, numbers, constants

    @staticmethod
    def _prepare_ring(ctx: CollectiveContext, nbytes: int, plan: Plan, in_place: bool) -> tuple[Any, ...]:
        # The same memory, signals, programs and arguments.
        return kernels_ring.all_gather_ring, *_Launch._prepare_direct(ctx, nbytes, plan, in_place)[1:]

    @staticmethod
    def _prepare_ll(ctx: CollectiveContext, nbytes: int, plan: Plan, in_place: bool) -> tuple[Any, ...]:
        if "peers" not in ctx.tables:
            _refuse_capture(ctx)
            ctx.tables["peers"] = _peer_addresses(ctx, ctx.flagged)
        peers, world = ctx.tables["peers"], ctx.world_size
        words = ctx.flagged.shape[2]
        tensors: tuple[torch.Tensor, ...] = (peers, ctx.control, ctx.monitor.words)
        numbers: tuple[int, ...] = (nbytes, words, ctx.rank, plan.channels)
        # WORLD, BLOCK, and over nodes SLOT_SIGNALS
        constants: tuple[int, ...] = (world, plan.chunk // LL_WORD_BYTES)
        if ctx.topology.n_nodes == 1:
            return kernels_ll.all_gather_ll, world * plan.channels, tensors, numbers, constants
        if ("routes", "ll") not in ctx.tables:
            ctx.tables["routes", "ll"] = _routes(ctx, "ll")
        routes, n_local, n_remote = ctx.tables["routes", "ll"]
        puts = put_chunks(nbytes, plan, ctx.channels)
        tensors = (ctx.flagged, peers, ctx.signals, *tensors[1:], routes)
        numbers = (nbytes, words, ctx.capacity, puts.chunk, ctx.rank, puts.channels, plan.channels, n_local, n_remote)
        constants = (*constants, ctx.signals[0].numel())
        return kernels_ll.all_gather_ll_2d, puts.channels + plan.channels * world, tensors, numbers, constants

    def __call__(self, source: int, out: int, landing: int) -> None:
        if self._compiled is not None:
            self._compiled(source, out, landing, *self._rest, grid=self._grid)
            return
        if self._variant not in self._context.tables:
            _refuse_capture(self._context)
            self._context.tables[self._variant] = True
        arguments = (source, out, landing, *self._tensors, *self._numbers, *self._constants)
        require_all(self._function, arguments)
        compiled = self._kernel(*arguments, num_warps=self._num_warps)
        if isinstance(compiled, CompiledKernel):  # not in the interpreter, nor while it is compiled in the background
            # The same types and alignments on every call: what Triton would look up again, at 15 us a time.
            self._compiled = ReadyKernel(compiled, self._context.device.index)

    def gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """The call, out of place."""
        self(tensor.data_ptr(), out.data_ptr(), self._landing)

    def gather_in_place(self, segment: int, buffer: int) -> None:
        """The call in place: addresses of this rank's segment, and of the buffer that it is in."""
        if self._in_words:  # lands elsewhere, and nobody else writes to the buffer
            self(segment, buffer, self._landing)
        else:
            self(segment, 0, buffer)

    def gather_at(self, source: int, out: int, stream: int) -> None:
        """The same, of addresses, on the stream of this handle, which is the current one."""
        if self._compiled is None:
            self(source, out, self._landing)
        else:
            self._compiled.launch(self._grid, stream, (source, out, self._landing, *self._rest))

    def prepare(self) -> None:
        """Compile and load what a CUDA graph may capture before any call of this kind is made."""
        if self._variant in self._context.tables:
            return
        address = self._context.staging.data_ptr()  # an address like others: only its type counts
        arguments = (address, address, address, *self._tensors, *self._numbers, *self._constants)
        compiled = self._function.warmup(*arguments, grid=self._grid, num_warps=self._num_warps)
        if isinstance(compiled, CompiledKernel):
            self._compiled = ReadyKernel(compiled, self._context.device.index)
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


def _peer_addresses(ctx: CollectiveContext, tensor: torch.Tensor) -> torch.Tensor:
    """``[world]`` int64: where each rank's copy of a symmetric tensor is for this rank's loads and stores."""
    heap = ctx._runtime.heap
    offset = ctx._runtime.offset_of(tensor, "tensor")
    addresses = [heap.peer_base(pe) + offset for pe in ctx.topology.pes]
    return torch.tensor(addresses, dtype=torch.int64, device=ctx.device)


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
            simulated=ctx._runtime.simulated,
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
        return _Launch(ctx, nbytes, choose(nbytes, ctx.topology, channels=ctx.channels), in_place=True, counted=True)

    launch = ctx.once(key, make)
    launch(address + ctx.rank * nbytes, 0, address)


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
            (tensor.shape, dtype, algorithm) if out is None else (tensor.shape, out.shape, dtype, out.dtype, algorithm)
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
            known = ctx.known((tensor.shape, tensor.dtype, algorithm))
        else:
            known = ctx.known((tensor.shape, out.shape, tensor.dtype, out.dtype, algorithm))
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
    if first < source + known.nbytes and source < first + known.total and source != first + known.own:
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
    if nbytes and first < begin + nbytes and begin < first + ctx.world_size * nbytes and begin != first + own:
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
    launch.gather_in_place(base + ctx.rank * (buffer.nbytes // world), base)
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
    ctx = owner.contexts.get(ranks)
    if ctx is None or ctx.max_bytes_per_rank < input_tensor.nbytes:
        ctx = _grow_default_context(owner, ranks, ctx, input_tensor.nbytes)
    all_gather(input_tensor, ctx, output_tensor)


def _grow_default_context(
    owner: runtime.Runtime, ranks: tuple[int, ...], old: CollectiveContext | None, nbytes: int
) -> CollectiveContext:
    """A context for ``nbytes`` and, where the heap has room, for twice what the old one held. Collective."""
    if owner.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ContextError(
            f"all_gather_into_tensor: a message of {nbytes} bytes needs a larger context, which cannot be made while a "
            "CUDA graph is captured; make one call of this size before"
        )
    generous = max(_SMALLEST_DEFAULT_CONTEXT, nbytes, 2 * old.max_bytes_per_rank if old else 0)
    if old is not None:
        del owner.contexts[ranks]
        if any(owner.exchange(ranks, "all_gather_into_tensor: captured", old.captured)):
            owner.contexts[(ranks, old.max_bytes_per_rank)] = old  # for the graphs that use it, until finalize
        else:
            old.close()
    try:
        ctx = CollectiveContext(ranks, max_bytes_per_rank=generous)
    except HeapExhaustedError:
        if generous == nbytes:
            raise
        ctx = CollectiveContext(ranks, max_bytes_per_rank=nbytes)
    ctx._follows_stream = True
    owner.contexts[ranks] = ctx
    return ctx
