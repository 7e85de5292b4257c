# SPDX-License-Identifier: Apache-2.0
"""SparseContext: the memory that sparse all-reduces of one group on one stream share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any

import torch
import triton.language as tl

from tdcoll import arguments, runtime
from tdcoll.capture import refuse
from tdcoll.collectives._host.launch import Launcher, Packed
from tdcoll.collectives.index_match.kernels import STATUS_WORDS
from tdcoll.collectives.index_match.op import MOST_PLACES, Directory
from tdcoll.collectives.sparse_all_reduce.kernels_lists import HEADER, LISTS, Index, Memory
from tdcoll.collectives.sparse_all_reduce.policy import EXCHANGE_CHANNELS, PROGRAMS_PER_SM
from tdcoll.context import CollectiveContext
from tdcoll.errors import ContextError, HeapExhaustedError
from tdcoll.limits import MAX_PROGRAMS
from tdcoll.memory import barrier
from tdcoll.primitives.group import nodes_of
from tdcoll.runtime.topology import Topology

__all__ = ["SparseContext", "symmetric_bytes"]

_WORD = 8


def _up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


def _list_bytes(rows: int) -> int:
    """Bytes of one rank's list of ``rows`` ids with its header."""
    return _up(_WORD * (HEADER.value + rows), 16)


def _segment_bytes(rows: int, row_bytes: int) -> int:
    """Bytes of one rank's list followed by its rows."""
    return _up(_list_bytes(rows) + rows * row_bytes, 16)


def symmetric_bytes(world: int, max_rows_per_rank: int, max_row_bytes: int, max_union_rows: int | None = None) -> int:
    """Bytes of symmetric heap that a :class:`SparseContext` takes on each rank, for signals 8 KiB and 1 KiB per rank.

    The rows that come in (``max_rows_per_rank * max_row_bytes``), those that go out (``max_union_rows *
    max_row_bytes``) and the ids of all ranks (8 bytes for each of ``world * max_rows_per_rank``).
    """
    union = world * max_rows_per_rank if max_union_rows is None else max_union_rows
    lists, out, stage = _areas(world, max_rows_per_rank, max_row_bytes, union)
    return lists + out + stage + (8 << 10) + (world << 10)


def _areas(world: int, rows: int, row_bytes: int, union: int) -> tuple[int, int, int]:
    """Bytes of lists, out and stage. ``out`` has a few more, for the padding of segments in its place."""
    return world * _list_bytes(rows), _up(union * row_bytes, 16) + 16 * world, _up(rows * row_bytes, 16)


class SparseContext:
    """Symmetric rows, lists of ids, signals and scratch for :func:`tdcoll.sparse_all_reduce` of one group.

    Collective over the group to make and to close; a context manager, with the rules of
    :class:`~tdcoll.CollectiveContext` for streams, deadlines and leaving by an exception. One context serves tensors of
    any number of rows, any dtype and any row of at most ``max_row_bytes``.

    It takes (``symmetric_bytes``) the rows that come in, those that go out and the ids of all ranks from the symmetric
    heap, and from the GPU's other memory about ``16 * world`` bytes per row of one rank, and 8 bytes per 32 rows of
    the largest table and rank while that is worth it (see ``docs/index-matching.md``).

    Args:
        group: a ProcessGroup, a sequence of global ranks, or None for all ranks of the job.
        max_rows_per_rank: the most *different* rows that one rank brings to a call.
        max_row_bytes: the most bytes that a row has.
        max_union_rows: the most different rows that all ranks bring together. Default: ``world * max_rows_per_rank``,
            which is always enough.
        grow: a call that is over the rows makes the context larger on all ranks and goes on, instead of raising.
            Copies of results are not affected; views (``copy=False``) of earlier calls are.
        max_programs: the most programs of one launch that waits for other ranks, and no fewer than ``2 * world_size +
            2``. Default: as many as pay, 4 per SM. With fewer than there are SMs, what runs beside them goes on
            meanwhile; and no launch is early (:mod:`tdcoll.collectives._host.launch`). The exchange of ids keeps to
            the least that a rank asks for.
        timeout_s, debug, stream: as for :class:`~tdcoll.CollectiveContext`. In debug mode the ranks also compare
            shapes, dtypes and operations on every call, and a view that is used after the next call raises.

    Raises:
        TypeError, ValueError: an argument is out of range, or this process is not in the group.
        HeapExhaustedError: the symmetric heap is too small.
        RankMismatchError: ranks pass different arguments.
    """

    def __init__(
        self,
        group: runtime.Group = None,
        *,
        max_rows_per_rank: int,
        max_row_bytes: int,
        max_union_rows: int | None = None,
        grow: bool = False,
        max_programs: int | None = None,
        timeout_s: float | None = None,
        debug: bool | None = None,
        stream: Any = None,
    ) -> None:
        rows = arguments.whole("max_rows_per_rank", max_rows_per_rank, 1)
        row_bytes = arguments.whole("max_row_bytes", max_row_bytes, 0)
        if max_union_rows is not None:
            arguments.whole("max_union_rows", max_union_rows, 1)
        if max_programs is not None:
            arguments.whole("max_programs", max_programs, 1)
        self._area: torch.Tensor | None = None
        owner = runtime.current()
        asked = owner.exchange(owner.ranks_of(group), "SparseContext: max_programs", max_programs)
        limits = [most for most in asked if most is not None]
        self.beside_others = bool(limits)
        """Whether a rank limits its programs, which need not be the same on all."""
        self.collective = CollectiveContext(
            group,
            max_bytes_per_rank=0,
            channels=EXCHANGE_CHANNELS,
            max_programs=max(2 * len(asked) + 2, min(MAX_PROGRAMS, *limits)) if limits else None,
            timeout_s=timeout_s,
            debug=debug,
            stream=stream,
        )
        """Signals and the epoch."""
        try:
            union = self.collective.world_size * rows if max_union_rows is None else max_union_rows
            self._make(group, grow, max_programs, rows, row_bytes, union)
        except Exception:
            self.collective.take_back()
            raise

    def _make(
        self, group: runtime.Group, grow: bool, max_programs: int | None, rows: int, row_bytes: int, union: int
    ) -> None:
        """The rest of making it. Collective."""
        if not self.collective.stores:  # on which the ranks have agreed
            raise ContextError(
                "SparseContext: ranks of one node cannot store to each other's memory (no peer-to-peer access between "
                "their GPUs), which the sparse all-reduce needs inside a node"
            )
        self.grow = bool(grow)
        self.process_group = group if isinstance(group, torch.distributed.ProcessGroup) else None
        self.everybody = group is None
        self.calls = 0
        """Calls so far: what a view of a result belongs to."""
        self.exchanges = 0
        """Exchanges of lists so far, which the ranks make together."""
        device = self.collective.device
        cuda = device.type == "cuda"
        self.launch = Launcher(early=self.collective.early)
        self.group = Packed(self.collective.device_group)
        """The ranks, the epoch and the signals, for kernels."""
        self.nodes = Packed(nodes_of(self.collective.topology, device))
        """Who is where, for kernels."""
        most = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count if cuda else 4
        self.most_programs = most if max_programs is None else min(most, max_programs)
        owner = self.collective.job
        words = STATUS_WORDS.value
        self.status_words = torch.zeros(words + 1, dtype=torch.int64, pin_memory=cuda)
        """What the lists of a call say, on the host; and how many rows of its own this rank brought."""
        self.status_event = torch.cuda.Event() if cuda else None
        self.remembered = torch.zeros(words + 1, dtype=torch.int64, device=device)
        """The first status that was wrong in a call of fixed size, and the number of rows of its table."""
        self.explain: Callable[[], None] = lambda: None
        """Raises what ``remembered`` says; set by such calls."""
        self.last_algorithm = ""
        self.kinds: dict[Hashable, Any] = {}
        """What calls of one kind have in common, for as long as the memory is the same."""
        self._eager: set[Hashable] = set()
        self._make_area(rows, row_bytes, union)
        owner.held[id(self)] = self

    def _make_area(self, rows: int, row_bytes: int, union: int) -> None:
        """Lists, out and stage for these capacities, and the scratch that goes with them; or an error, and nothing.

        Collective.
        """
        context = self.collective
        owner, world, pes = context.job, context.world_size, context.topology.pes
        same = {"max_rows_per_rank": rows, "max_row_bytes": row_bytes, "max_union_rows": union, "grow": self.grow}
        owner.agree(pes, "arguments of SparseContext", same)
        if max(world * rows, union) > MOST_PLACES:
            raise ValueError(
                f"max_rows_per_rank times {world} ranks and max_union_rows must be at most {MOST_PLACES}; got {rows} "
                f"and {union}"
            )
        lists, out, stage = _areas(world, rows, row_bytes, union)
        self.kinds.clear()
        area = owner.allocate((lists + out + stage,), torch.uint8, group=pes, name="sparse")
        try:
            self._use_area(area, lists, lists + out, rows, row_bytes, union)
        except Exception:  # before anybody uses it: what all ranks do last in there is to wait for each other
            owner.take_back(area)
            raise
        self._area = area

    def _use_area(self, area: torch.Tensor, out_at: int, stage_at: int, rows: int, row_bytes: int, union: int) -> None:
        """Say where in ``area`` what is, and make the scratch that goes with it. Collective."""
        context = self.collective
        owner, world, pes, device = context.job, context.world_size, context.topology.pes, context.device
        self.max_rows_per_rank, self.max_row_bytes, self.max_union_rows = rows, row_bytes, union
        self._out_at, self._stage_at = out_at, stage_at
        self.list_bytes = _list_bytes(rows)
        offset = owner.offset_of(area, "sparse")
        local = [context.topology.nodes[rank] == context.topology.node for rank in range(world)]
        bases = [
            base + offset if here and (base := owner.heap.peer_base(pe)) else 0
            for pe, here in zip(pes, local, strict=True)
        ]
        stages, outs = (
            torch.tensor([base + at if base else 0 for base in bases], dtype=torch.int64, device=device)
            for at in (stage_at, out_at)
        )
        self.memory = Packed(
            Memory(
                stages,
                outs,
                torch.empty((LISTS.value, rows), dtype=torch.int32, device=device),
                torch.zeros(LISTS.value, dtype=torch.int32, device=device),
                torch.empty(rows, dtype=torch.int32, device=device),
            )
        )
        """Where rows lie, and the work lists; for kernels."""
        self._directory: Directory | None = None
        self._index: tuple[Hashable, Packed] | None = None
        barrier(pes)  # nobody may store to the area of a rank that could not make use of it

    # ------------------------------------------------------------------ facts

    @property
    def rank(self) -> int:
        """This process's group rank."""
        return self.collective.rank

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.collective.world_size

    @property
    def topology(self) -> Topology:
        """Ranks, PEs and nodes of the group."""
        return self.collective.topology

    @property
    def device(self) -> torch.device:
        """Where the symmetric memory lies."""
        return self.collective.device

    @property
    def debug(self) -> bool:
        """Whether every call is checked on all ranks."""
        return self.collective.debug

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self.collective.closed

    @property
    def area(self) -> torch.Tensor:
        """``[nbytes]`` uint8, symmetric: lists, then out, then stage."""
        assert self._area is not None
        return self._area

    @property
    def _segment_stride(self) -> int:
        """From one list that its rows follow to the next. The same for rows of any size: ranks that pass different ones
        must find each other's headers to see it."""
        room = self._stage_at // self.world_size // 16 * 16
        return min(room, _segment_bytes(self.max_rows_per_rank, self.max_row_bytes))

    def lists(self, with_rows: bool = False) -> torch.Tensor:
        """``[world, stride]`` int64: every rank's list; ``with_rows``, lists that are followed by their rows."""
        nbytes = self._segment_stride if with_rows else self.list_bytes
        return self.area[: self.world_size * nbytes].view(torch.int64).view(self.world_size, nbytes // _WORD)

    def holds_segments(self, row_bytes: int) -> bool:
        """Return whether lists that are followed by their rows fit into lists and out."""
        return _segment_bytes(self.max_rows_per_rank, row_bytes) <= self._segment_stride

    def out(self, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """``[rows, *shape]`` of this rank's ``out``."""
        return self._view(self._out_at, (rows, *shape), dtype)

    def stage(self, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """``[rows, *shape]`` of this rank's ``stage``."""
        return self._view(self._stage_at, (rows, *shape), dtype)

    def _view(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self.area[at : at + nbytes].view(dtype).view(shape)

    def directory(self, num_rows: int) -> Directory:
        """Where ids of a table of ``num_rows`` are matched."""
        if self._directory is None:
            sizes = self.world_size, self.max_rows_per_rank, num_rows, self.max_union_rows
            self._directory = Directory(*sizes, self.device, launch=self.launch)
        self._directory.prepare(num_rows)
        return self._directory

    def index(self, num_rows: int, with_rows: bool) -> Packed:
        """The ids of all ranks, for kernels: :meth:`lists`, and the :meth:`directory` of a table of ``num_rows``."""
        directory, key = self.directory(num_rows), (num_rows, with_rows)
        if self._index is None or self._index[0] != key:
            lists = self.lists(with_rows)
            made = Index(
                lists,
                directory.entries,
                directory.union,
                directory.status,
                stride=lists.shape[1],
                capacity=self.max_rows_per_rank,
                words=directory.words,
                max_union=self.max_union_rows,
                search=tl.constexpr(directory.search),
            )
            self._index = key, Packed(made)
        return self._index[1]

    @property
    def captured(self) -> bool:
        """Whether a call was captured: then a CUDA graph may still use the memory."""
        return self.collective.captured

    @property
    def stage_address(self) -> int:
        """Of this rank's ``stage``."""
        return self.area.data_ptr() + self._stage_at

    def allow_capture(self, kind: Hashable, operation: str) -> None:
        """A call of this ``kind`` is made now: outside of a CUDA graph, or one like it has been.

        Raises:
            ContextError: what comes next compiles kernels, which a graph that is being captured cannot hold.
        """
        if kind not in self._eager:
            refuse(
                self.device,
                operation,
                "the first call of a kind on a context compiles kernels, which a CUDA graph cannot capture; make one "
                "such call, on every rank, before capturing",
            )
            self._eager.add(kind)

    def __repr__(self) -> str:
        return (
            f"<SparseContext rank {self.rank}, {self.topology.describe()}, {self.max_rows_per_rank} rows of "
            f"{self.max_row_bytes} bytes per rank, {self.max_union_rows} together"
            + (", grows" if self.grow else "")
            + (", closed>" if self.closed else ">")
        )

    # ------------------------------------------------------------------ life

    def check(self) -> None:
        """Wait for this context's stream, and raise what went wrong on the device.

        Raises:
            CollectiveTimeout: a wait expired; names rank, peer, signal and epoch.
            ContextError, RankMismatchError, ValueError: what a call of fixed size could not do; once.
        """
        self.collective.check()
        self.explain()

    def enlarge(self, rows: int, row_bytes: int, union: int) -> None:
        """Capacities of at least these, in new memory. Collective; waits for the stream; the same on all ranks.

        Raises:
            ContextError: a captured CUDA graph uses the memory.
            HeapExhaustedError, ValueError: no room, or too many rows; then the context is as it was.
        """
        owner, pes = self.collective.job, self.topology.pes
        if any(owner.exchange(pes, "SparseContext: captured", self.captured)):
            raise ContextError(
                f"SparseContext: {rows} rows of {row_bytes} bytes per rank and {union} together are over its capacity, "
                "and it cannot grow after a call was captured in a CUDA graph, which uses its memory; make it larger"
            )
        rows, row_bytes = max(rows, self.max_rows_per_rank), max(row_bytes, self.max_row_bytes)
        union = max(union, self.max_union_rows)
        old = (self.max_rows_per_rank, self.max_row_bytes, self.max_union_rows)
        owner.release(self.area)
        self._area = None
        try:
            self._make_area(rows, row_bytes, union)
        except (HeapExhaustedError, ValueError):  # on all ranks alike
            self._make_area(*old)
            raise
        except BaseException:
            self.collective.refuse("it has lost its memory in an attempt to make it larger; close() it")
            raise

    def close(self) -> None:
        """Free the symmetric memory. Collective; waits for the stream. A second call does nothing.

        After an expired wait it is local, since a peer may be gone, and the memory stays taken.
        """
        if self.closed:
            return
        owner = self.collective.job
        self.collective.close()
        area, self._area = self._area, None
        self.kinds.clear()
        if owner.closed or owner.failed:
            return
        if area is not None:
            owner.release(area)
        owner.held.pop(id(self))

    def __enter__(self) -> SparseContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.collective.__exit__(kind, error, trace)
