# SPDX-License-Identifier: Apache-2.0
"""SparseContext: the memory that sparse all-reduces of one group on one stream share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.errors import ContextError, HeapExhaustedError, RankMismatchError
from tdcoll.base.limits import MAX_BLOCKS
from tdcoll.calls.checks import Debug
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.kernel_launch import FlatTuple, LaunchCache
from tdcoll.calls.sizes import Area, ContextSizes, context_sizes
from tdcoll.collectives.index_match.kernels import (
    BAD_ORDER,
    BAD_RANGE,
    BAD_SIGNATURE,
    MAX_ROWS,
    STATUS_WORDS,
    UNION,
)
from tdcoll.collectives.index_match.op import MOST_PLACES, Directory
from tdcoll.collectives.sparse_all_reduce.kernels_lists import COUNTERS, LISTS, RowMemory
from tdcoll.collectives.sparse_all_reduce.policy import BLOCKS_PER_SM, EXCHANGE_CHUNKS, Capacities
from tdcoll.job.memory import barrier
from tdcoll.primitives.group import nodes_of
from tdcoll.runtime.topology import Topology


def sparse_sizes(
    topology: Topology,
    heap_bytes: int,
    max_rows_per_rank: int,
    max_row_bytes: int,
    max_union_rows: int | None = None,
) -> ContextSizes:
    """Return the sizes of a :class:`SparseContext`, with the arguments of
    :func:`tdcoll.calls.sizes.context_sizes`."""
    union = topology.world_size * max_rows_per_rank if max_union_rows is None else max_union_rows
    plain = context_sizes(topology, heap_bytes, max_bytes_per_rank=0, chunks=EXCHANGE_CHUNKS)
    return replace(
        plain, more=(_area(Capacities(topology, max_rows_per_rank, max_row_bytes, union, False)),)
    )


def _area(capacities: Capacities) -> Area:
    return Area("sparse", (sum(capacities.areas),), torch.uint8)


class SparseContext(CollectiveContext):
    """Symmetric rows, lists of ids, signals and scratch for :func:`tdcoll.sparse_all_reduce` of one
    group.

    Collective over the group to make and to close; a context manager, with the rules of
    :class:`~tdcoll.CollectiveContext` for streams, deadlines and leaving by an exception. One
    context serves tensors of any number of rows, any dtype and any row of at most
    ``max_row_bytes``. ``docs/sparse-all-reduce.md`` says how much memory it takes;
    :func:`tdcoll.memory_plan` computes what it takes of the symmetric heap.

    >>> with tdcoll.SparseContext(max_rows_per_rank=1024, max_row_bytes=256) as ctx:
    ...     ctx.check()

    Args:
        group: a ProcessGroup, a sequence of global ranks, or None for all ranks of the job.
        max_rows_per_rank: the most *different* rows that one rank brings to a call.
        max_row_bytes: the most bytes that a row has.
        max_union_rows: the most different rows of all ranks. Default: ``world *
            max_rows_per_rank``, always enough.
        grow: a call that is over the capacity makes the context larger on all ranks and goes on,
            instead of raising. Copies of results are not affected; views (``copy=False``) of
            earlier calls are.
        max_blocks: the most thread blocks of one launch that waits for other ranks, and no fewer
            than ``2 * world_size + 2``. Default: as many as pay, 4 per SM. With fewer than there
            are SMs, what runs beside them goes on meanwhile; and no launch is early
            (:mod:`tdcoll.calls.kernel_launch`). The exchange of ids keeps to the least that a rank
            asks for.
        timeout_s, debug: as for :class:`~tdcoll.CollectiveContext`. In debug mode the ranks also
            compare shapes, dtypes and operations on every call.

    Raises:
        TypeError, ValueError: an argument is out of range, or this process is not in the group.
        ContextError: ranks of one node cannot store to each other's memory.
        HeapExhaustedError: the symmetric heap is too small.
        RankMismatchError: ranks pass different arguments.
    """

    dense = False

    def __init__(
        self,
        group: runtime.Group = None,
        *,
        max_rows_per_rank: int,
        max_row_bytes: int,
        max_union_rows: int | None = None,
        grow: bool = False,
        max_blocks: int | None = None,
        timeout_s: float | None = None,
        debug: Debug | None = None,
    ) -> None:
        rows = arguments.whole("max_rows_per_rank", max_rows_per_rank, 1)
        row_bytes = arguments.whole("max_row_bytes", max_row_bytes, 0)
        for name, given in (("max_union_rows", max_union_rows), ("max_blocks", max_blocks)):
            if given is not None:
                arguments.whole(name, given, 1)
        owner = runtime.current()
        asked = owner.exchange(owner.ranks_of(group), "SparseContext: max_blocks", max_blocks)
        limits = [most for most in asked if most is not None]
        super().__init__(
            group,
            max_bytes_per_rank=0,
            chunks=EXCHANGE_CHUNKS,
            max_blocks=max(2 * len(asked) + 2, min(MAX_BLOCKS, *limits)) if limits else None,
            timeout_s=timeout_s,
            debug=debug,
        )
        self.capacity = 0  # other collectives find no room, and say so
        self._of_tables: CollectiveContext | None = None
        self.grow = bool(grow)
        try:
            if not self.stores:  # on which the ranks have agreed
                raise ContextError(
                    "SparseContext: ranks of one node cannot store to each other's memory (no peer-to-peer access "
                    "between their GPUs), which the sparse all-reduce needs inside a node"
                )
            device = self.device
            words = STATUS_WORDS.value
            cuda = device.type == "cuda"
            self.last_algorithm = ""
            self.launch = LaunchCache(allow_pdl=self.allow_pdl)
            self.group = FlatTuple(self.device_group)
            self.nodes = FlatTuple(nodes_of(self.topology, device))
            """The ranks, the epoch and the signals, for kernels; who is where."""
            most = (
                BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
                if cuda
                else 4
            )
            self.most_blocks = most if max_blocks is None else min(most, max_blocks)
            self.status_words = torch.zeros(words, dtype=torch.int64, pin_memory=cuda)
            """The status of a call, from its lists, on the host."""
            self.status_event = torch.cuda.Event() if cuda else None
            self.remembered = torch.zeros(words + 1, dtype=torch.int64, device=device)
            """The first wrong status of a call of fixed size, and 1 + the rows of its table; -1 if
            it had several."""
            self.no_indices = torch.zeros(1, dtype=torch.int64, device=device)
            self.counters = torch.zeros(COUNTERS.value + 4, dtype=torch.int32, device=device)
            """Lengths of the work lists, and progress of launches."""
            self.lists_made = torch.zeros(1, dtype=torch.int64, device=device)
            """How many lists this rank has made, as every other rank has."""
            self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}
            union = self.world_size * rows if max_union_rows is None else max_union_rows
            self._make_area(
                Capacities(self.topology, rows, row_bytes, union, self.grow, bool(limits))
            )
        except Exception:
            self.undo_creation()
            raise

    def _make_area(self, capacities: Capacities) -> None:
        """Make lists, out and stage for these capacities, and their scratch; or raise, and take
        nothing. Collective."""
        owner = self.job
        world = self.world_size
        pes = self.topology.pes
        _, rows, row_bytes, union, _, _ = capacities
        owner.agree(
            pes,
            "arguments of SparseContext",
            dict(zip(capacities._fields[1:], capacities[1:], strict=True)),
        )
        if max(world * rows, union) > MOST_PLACES:
            raise ValueError(
                f"max_rows_per_rank times {world} ranks and max_union_rows must be at most {MOST_PLACES}; got {rows} "
                f"and {union}"
            )
        lists, out, _ = capacities.areas
        self.cache.clear()
        self._loaded.clear()
        self.area = self._allocate(_area(capacities))
        """``[nbytes]`` uint8, symmetric: lists, then out, then stage."""
        try:
            self.max_rows_per_rank = rows
            self.max_row_bytes = row_bytes
            self.max_union_rows = union
            self.capacities = capacities
            self.out = self.area[lists : lists + out]
            self.stage = self.area[lists + out :]
            self.memory = FlatTuple(
                RowMemory(
                    self.stage.data_ptr(),
                    self.out.data_ptr(),
                    torch.empty((LISTS.value, rows), dtype=torch.int32, device=self.device),
                    self.counters,
                    self.lists_made,
                    torch.empty(rows, dtype=torch.int32, device=self.device),
                )
            )
            """Where rows lie, and the work lists; for kernels."""
            self.directory = Directory(world, rows, union, self.device)
            """Where ids are matched."""
            barrier(pes)  # nobody may store to the area of a rank that could not make use of it
        except Exception:  # before anybody uses it
            owner.undo_allocation(self._symmetric.pop())
            raise

    # ------------------------------------------------------------------ facts

    def lists(self, with_rows: bool) -> torch.Tensor:
        """``[world, stride]`` int64: every rank's list; ``with_rows``, lists that are followed by
        their rows.

        The stride is the same for rows of any size: ranks that pass different ones must find each
        other's headers to see it.
        """
        nbytes = self.capacities.segment_stride if with_rows else self.capacities.list_bytes
        return (
            self.area[: self.world_size * nbytes]
            .view(torch.int64)
            .view(self.world_size, nbytes // 8)
        )

    def scratch(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """``[size or more]``, for one call: the next one gets the same. A call that is captured
        gets its own."""
        if self.capturing:
            return torch.empty(size, dtype=dtype, device=self.device)
        found = self._scratch.get((name, dtype))
        if found is None or found.numel() < size:
            if found is not None and found.is_cuda:
                found.record_stream(torch.cuda.current_stream(self.device))
            found = self._scratch[name, dtype] = torch.empty(
                size + size // 4, dtype=dtype, device=self.device
            )
        return found

    def raise_if_wrong(self, operation: str, status: Sequence[int], num_rows: int | None) -> None:
        """Raise what the lists' ``status`` shows to be wrong, alike on all ranks; ``num_rows``:
        None for a list."""
        bad = status[BAD_SIGNATURE.value]
        if bad:
            raise RankMismatchError(
                f"{operation}: ranks pass different shapes, dtypes, operations or algorithms (rank {bad - 1} differs "
                f"from rank {self.rank}); TDCOLL_DEBUG=1 says which"
            )
        bad = status[BAD_RANGE.value]
        if bad:
            rows = "rows of their tensors, counted from 0"
            if num_rows is not None:
                rows = f"in 0..{num_rows - 1}, the rows of the tensor"
            raise ValueError(f"{operation}: indices of rank {bad - 1} must be {rows}")
        bad = status[BAD_ORDER.value]
        if bad:  # also set by indices of several tensors that are out of range
            raise ValueError(
                f"{operation}: indices of rank {bad - 1} are said to be coalesced, and are not ascending or not "
                "different"
            )

    def excess(
        self, operation: str, rows: int = 0, row_bytes: int = 0, union: int = 0
    ) -> ContextError | None:
        """Return the error of a call that needs these capacities, if one of them is larger than the
        context's."""
        for argument, needed, what in (
            ("max_rows_per_rank", rows, "a rank brings {} different rows,"),
            ("max_union_rows", union, "the ranks bring {} different rows together,"),
            ("max_row_bytes", row_bytes, "rows of {} bytes are"),
        ):
            capacity = getattr(self, argument)
            if needed > capacity:
                return ContextError(
                    f"{operation}: {what.format(needed)} over the context's capacity of {capacity}; make it with "
                    f"{argument}={needed} or more, or grow=True"
                )
        return None

    def _sizes(self) -> str:
        said = f"{self.max_rows_per_rank} rows of {self.max_row_bytes} bytes per rank, {self.max_union_rows} together"
        return f"{said}, grows" if self.grow else said

    def for_tables(self) -> CollectiveContext:
        """Return the context of dense all-reduces of whole tables; the first call makes it.
        Collective.

        Raises:
            HeapExhaustedError: there is no room for it; on all ranks.
        """
        if self._of_tables is None:
            self._of_tables = CollectiveContext(
                self.topology.pes,
                flagged_bytes=0,  # tables are large
                lamport_bytes=0,
                max_blocks=self.max_blocks if self.capacities.beside_others else None,
                timeout_s=self.monitor.timeout_s,
                debug=self.debug,
            )
        return self._of_tables

    # ------------------------------------------------------------------ life

    def close(self) -> None:
        if self._of_tables is not None:
            self._of_tables.close()
        super().close()

    def check(self) -> None:
        """Wait for this context's stream, and raise what went wrong on the device.

        Raises:
            CollectiveTimeout: a wait expired; names rank, peer, signal and epoch.
            ContextError, RankMismatchError, ValueError: what a call of fixed size could not do;
                once.
        """
        super().check()
        if self._of_tables is not None:
            self._of_tables.check()
        *status, num_rows_and_1 = self.remembered.tolist()
        if num_rows_and_1:
            self.remembered.zero_()
            operation = "sparse_all_reduce_padded"
            self.raise_if_wrong(
                operation, status, num_rows_and_1 - 1 if num_rows_and_1 > 0 else None
            )
            error = self.excess(operation, status[MAX_ROWS.value], union=status[UNION.value])
            if error:
                raise error

    def enlarge(self, rows: int, row_bytes: int, union: int) -> None:
        """Make room for a call that needs these capacities, and a quarter more of the rows if the
        heap has it.

        Collective; waits for the stream; the same on all ranks.

        Raises:
            ContextError: a captured CUDA graph uses the memory.
            HeapExhaustedError, ValueError: no room, or too many rows; then the context is as it
                was.
        """
        owner = self.job
        if any(owner.exchange(self.topology.pes, "SparseContext: captured", self.captured)):
            raise ContextError(
                f"SparseContext: {rows} rows of {row_bytes} bytes per rank and {union} together are over its capacity, "
                "and it cannot grow after a call was captured in a CUDA graph, which uses its memory; make it larger"
            )
        old = self.capacities
        lost = True
        failed = None
        owner.release(self._symmetric.pop())
        try:
            for made in (
                *(old.enlarged(rows, row_bytes, union, quarters) for quarters in (5, 4)),
                old,
            ):
                try:
                    self._make_area(made)
                    lost = False
                    break
                except (HeapExhaustedError, ValueError) as error:  # on all ranks alike
                    failed = error
        finally:
            if lost:
                self.refuse("it has lost its memory in an attempt to make it larger; close() it")
        if failed is not None and made is old:
            raise failed
