# SPDX-License-Identifier: Apache-2.0
"""Index matching, host side: the directory that fused kernels search, and operations of their own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tdcoll import arguments
from tdcoll.capture import capturing, refuse
from tdcoll.collectives._host.launch import Launcher
from tdcoll.collectives.index_match import kernels
from tdcoll.collectives.index_match.policy import METHODS, bitmap_words, choose_method, entries_bytes
from tdcoll.language import INTERPRETED

__all__ = ["Directory", "IndexMatch", "match_indices", "match_lists"]

_HEADER = kernels.HEADER.value
_MAX_PROGRAMS = 4096
"""Programs of a launch over lists: several waves of a GPU. With more ids than that, programs take several blocks."""

MOST_PLACES = (1 << 31) - (1 << 21)
"""Places are 32 bits: in entries, and in what ``find`` returns. Loops over them count one step further."""

_CLEAR_BLOCK, _MARK_BLOCK, _WORDS_BLOCK, _SEARCH_BLOCK, _TOTALS_BLOCK, _EMIT_BLOCK = 4096, 1024, 512, 512, 1024, 256


_of_this_thread = threading.local()


def _launcher(device: int | None) -> Launcher:
    """Return what this thread launches this package's kernels with on one GPU."""
    launchers: dict[int | None, Launcher] = _of_this_thread.__dict__.setdefault("launchers", {})
    return launchers.setdefault(device, Launcher(early=True))


def _blocks(size: int, block: int) -> int:
    return max(1, -(-size // block))


class Directory:
    """Answers, on the device, where an id is in each of W sorted lists and in their union.

    Scratch in ordinary device memory, built again for each call and searched by the device functions
    :func:`~tdcoll.collectives.index_match.kernels.find` and ``find_in_union``. See the module docstring of
    :mod:`~tdcoll.collectives.index_match.kernels` for the two kinds, the layout of lists, and what a build costs.

    Args:
        world: W, number of lists.
        capacity: most ids of a list.
        num_rows: ids are in [0, num_rows). May be another one at every :meth:`build`.
        max_union: room for ids of the union.
        device: where.
        method: ``"bitmap"``, ``"search"``, or ``"auto"``: by ``num_rows``, see
            :func:`~tdcoll.collectives.index_match.policy.choose_method`.
        launch: launches the kernels; None: what the thread that makes the directory, and no other, launches with.

    Attributes:
        search: whether it is of the kind ``"search"`` (for this ``num_rows``).
        union: int64 ``[max_union]``: the first min(U, max_union) ids of the union, ascending; the rest is unspecified.
        status: int64 ``[STATUS_WORDS]``; the words are named in ``kernels.py``. The same bits on all ranks that have
            the same lists. Where ``BAD_RANGE`` or ``BAD_ORDER`` is set, what the directory says means nothing, but
            places are below ``capacity`` or ``max_union``, and the first min(U, max_union) words of ``union`` are rows,
            or 0.
        entries: int64 ``[W + 1, words]`` of a bitmap; of a search something that is not read.
        words: words of one row of ``entries``.

    Raises:
        ValueError, TypeError: an argument is out of range; W * capacity or max_union is more than :data:`MOST_PLACES`.
    """

    def __init__(
        self,
        world: int,
        capacity: int,
        num_rows: int,
        max_union: int,
        device: torch.device | str,
        method: str = "auto",
        launch: Launcher | None = None,
    ) -> None:
        for name, value in (("world", world), ("capacity", capacity), ("max_union", max_union)):
            arguments.whole(name, value, 1)
        if world * capacity > MOST_PLACES or max_union > MOST_PLACES:
            raise ValueError(
                f"world * capacity and max_union must be at most {MOST_PLACES}; got {world} * {capacity} and "
                f"{max_union}"
            )
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
        self.world, self.capacity, self.max_union, self.method = world, capacity, max_union, method
        self.device = torch.empty(0, device=device).device  # with its index
        self.union = torch.empty(max_union, dtype=torch.int64, device=self.device)
        self.status = torch.zeros(kernels.STATUS_WORDS.value, dtype=torch.int64, device=self.device)
        self._buffer = self.status  # stands for entries where there are none
        self._totals = torch.empty(0, dtype=torch.int32, device=self.device)
        self._leaders: torch.Tensor | None = None
        self._in_graphs: list[torch.Tensor] = []
        self._captured = False
        self._launch = launch or _launcher(self.device.index)
        self.num_rows = -1
        self.prepare(num_rows)

    def prepare(self, num_rows: int) -> None:
        """Say what the next builds' ids are below: sets ``search``, ``words`` and ``entries``.

        Allocates if no ``num_rows`` before needed as much. Memory that a captured CUDA graph uses is kept.

        Raises:
            ContextError: it would have to allocate while a CUDA graph is being captured.
        """
        if not isinstance(num_rows, int) or not 0 <= num_rows < 1 << 62:
            raise ValueError(f"num_rows must be an integer in [0, 2**62), got {num_rows!r}")
        if num_rows == self.num_rows:
            return
        method = choose_method(num_rows, self.world, self.capacity) if self.method == "auto" else self.method
        search = method == "search"
        if search:
            if self._leaders is None:
                self._refuse_capture(num_rows)
                shape = (self.world, self.capacity + 1)
                self._leaders = torch.empty(shape, dtype=torch.int32, device=self.device)
            self._need_totals(self.world * (self.capacity // _SEARCH_BLOCK + 1), num_rows)
            words, entries = 0, self.status
        else:
            words = bitmap_words(num_rows)
            size = entries_bytes(num_rows, self.world) // 8
            if self._buffer.numel() < size or self._buffer is self.status:
                self._refuse_capture(num_rows)
                old = None if self._buffer is self.status else self._buffer
                self._buffer = self.status
                self._retire(old)
                del old  # before the new one is made
                self._buffer = torch.empty(size, dtype=torch.int64, device=self.device)
            self._need_totals(_blocks(words, _WORDS_BLOCK), num_rows)
            entries = self._buffer[:size].view(self.world + 1, words)
        self.num_rows, self.search, self.words, self.entries = num_rows, search, words, entries

    def _need_totals(self, size: int, num_rows: int) -> None:
        if self._totals.numel() < size:
            self._refuse_capture(num_rows)
            self._retire(self._totals)
            self._totals = torch.empty(size, dtype=torch.int32, device=self.device)

    def _retire(self, tensor: torch.Tensor | None) -> None:
        """Let a tensor go, unless a CUDA graph may still use it."""
        if tensor is None:
            return
        if self._captured:
            self._in_graphs.append(tensor)
        elif self.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def _refuse_capture(self, num_rows: int) -> None:
        refuse(
            self.device,
            "index matching",
            f"{num_rows} rows need more memory, which cannot be allocated while a CUDA graph is captured; make one "
            "call with this number of rows before",
        )

    def build(self, lists: torch.Tensor, signature: int, num_rows: int | None = None) -> None:
        """Make the directory of ``lists``: four launches on the current stream; no synchronisation.

        CUDA-graph safe after one eager call with as many rows.

        Args:
            lists: int64 ``[W, stride]``, stride at least ``HEADER + capacity``, laid out as ``kernels.py`` says.
            signature: what word ``LIST_SIGNATURE`` of each header must be.
            num_rows: as for :meth:`prepare`; None: as before.

        Raises:
            ContextError: see :meth:`prepare`.
            ValueError: ``lists`` is not as described.
        """
        if num_rows is not None:
            self.prepare(num_rows)
        if (
            lists.dtype != torch.int64
            or lists.dim() != 2
            or lists.shape[0] != self.world
            or lists.shape[1] < _HEADER + self.capacity
            or lists.stride(1) != 1
            or lists.device.type != self.device.type
        ):
            raise ValueError(
                f"lists must be int64 [{self.world}, {_HEADER + self.capacity} or more] on {self.device}, contiguous "
                f"within a list; got {lists.dtype} {list(lists.shape)} on {lists.device}, strides {lists.stride()}"
            )
        if capturing(self.device):
            self._captured = True
        world, capacity, words, status = self.world, self.capacity, self.words, self.status
        stride, totals, union = lists.stride(0), self._totals, self.union
        # Of a search, the union: unsorted lists leave holes in it, and what is there must be a row.
        target, size = (union, self.max_union) if self.search else (self.entries, world * words)
        run, ids, checks = self._launch, (lists, stride, capacity), (self.num_rows, signature, status)
        cleared = (target, size, status)
        run(kernels.clear, _blocks(size, _CLEAR_BLOCK), cleared, (_CLEAR_BLOCK,), num_warps=8)
        if self.search:
            leaders = self._leaders
            blocks = capacity // _SEARCH_BLOCK + 1
            grid, sizes = self._grid(blocks), (_SEARCH_BLOCK, _TOTALS_BLOCK)
            run(kernels.find_leaders, grid, (*ids, leaders, totals, blocks, *checks), sizes[:1])
            run(kernels.number_leaders, grid, (*ids, leaders, totals, blocks, status), sizes)
            run(kernels.place_leaders, grid, (*ids, leaders, world, union, self.max_union), sizes[:1])
        else:
            bits, sizes = (self.entries, words, world, totals), (_WORDS_BLOCK, _TOTALS_BLOCK)
            grid = self._grid(_blocks(capacity, _MARK_BLOCK))
            run(kernels.mark, grid, (*ids, self.entries, words, *checks), (_MARK_BLOCK,))
            blocks = _blocks(words, _WORDS_BLOCK)
            run(kernels.unite, blocks, bits, sizes[:1])
            run(kernels.number, blocks, (*bits, union, self.max_union, status), sizes)

    def _grid(self, blocks: int) -> tuple[int, int]:
        return min(blocks, max(1, _MAX_PROGRAMS // self.world)), self.world


# ---------------------------------------------------------------------- operations of their own


def _check_device(name: str, tensor: torch.Tensor) -> None:
    wanted = "cpu" if INTERPRETED else "cuda"
    if tensor.device.type != wanted:
        how = "TRITON_INTERPRET=1 is set: kernels run on" if INTERPRETED else "kernels run on"
        raise ValueError(f"{name} must be a {wanted} tensor ({how} {wanted}); got one on {tensor.device}")


def _check_ids(name: str, tensor: torch.Tensor, dims: int = 1) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype != torch.int64 or tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a strided int64 tensor, got {tensor.dtype}, {tensor.layout}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimension(s), got shape {list(tensor.shape)}")
    _check_device(name, tensor)


def _check_order(name: str, ids: torch.Tensor, strictly: bool) -> None:
    """Raise unless ``ids`` ascend. Synchronises."""
    wrong = ids[1:] <= ids[:-1] if strictly else ids[1:] < ids[:-1]
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0]) + 1
        how = "sorted and unique" if strictly else "sorted"
        raise ValueError(f"{name} must be {how}; {name}[{i}] = {int(ids[i])} comes after {int(ids[i - 1])}")


def match_indices(local: torch.Tensor, global_: torch.Tensor, *, check: bool = False) -> torch.Tensor:
    """``[n], [m] -> [n]``: where each of the ``local`` ids is in ``global_``; -1 where it is not.

    One launch on the current stream, no synchronisation. This is what sparse all-reduces do with the ids of one rank
    and those of all of them, under names such as *invert index*.

    Args:
        local: int64, ids in any order; ascending is fastest, since neighbours then share what they load.
        global_: int64, ascending and unique. If it is not, the answer means nothing.
        check: look whether both ascend, which synchronises.

    Returns:
        int64 ``[n]``.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """
    _check_ids("local", local)
    _check_ids("global_", global_)
    if local.device != global_.device:
        raise ValueError(f"local and global_ must be on one device; got {local.device} and {global_.device}")
    if global_.numel() >= MOST_PLACES:
        raise ValueError(f"global_ must have fewer than 2**31 ids, got {global_.numel()}")
    if check:
        _check_order("local", local, strictly=False)
        _check_order("global_", global_, strictly=True)
    local, global_ = local.contiguous(), global_.contiguous()
    out = torch.empty_like(local)
    if local.numel():
        programs = min(_MAX_PROGRAMS, _blocks(local.numel(), _EMIT_BLOCK))
        with torch.cuda.device_of(local):
            arguments = (local, local.numel(), global_, global_.numel(), out)
            alignment = local.data_ptr() % 16, global_.data_ptr() % 16
            _launcher(local.device.index)(
                kernels.invert_indices, programs, arguments, (_EMIT_BLOCK,), variant=alignment
            )
    return out


@dataclass(frozen=True)
class IndexMatch:
    """How W lists of ids and their union correspond. All on the device.

    Attributes:
        union: int64 ``[max_union]``: the ids that any list holds, ascending; -1 after the last.
        size: int64 ``[1]``: how many there are, which may be more than ``max_union``.
        positions: int32 ``[W, n_max]``: where each id of each list is in ``union``; -1 after a list's last id, and for
            ids that did not fit.
        contributors: int32 ``[max_union, W]``: where each id of ``union`` is in each list; -1 where it is not.
        status: int64 ``[STATUS_WORDS]``: see ``kernels.py``.
    """

    union: torch.Tensor
    size: torch.Tensor
    positions: torch.Tensor
    contributors: torch.Tensor
    status: torch.Tensor

    def check(self) -> IndexMatch:
        """Raise ValueError if a list was not as it should be, or the union did not fit. Synchronises."""
        words = self.status.tolist()
        if bad := words[kernels.BAD_RANGE.value]:
            raise ValueError(f"list {bad - 1} has an id that is negative or not less than num_rows")
        if bad := words[kernels.BAD_ORDER.value]:
            raise ValueError(f"list {bad - 1} is not sorted and unique")
        if words[kernels.UNION.value] > self.union.numel():
            raise ValueError(f"the union has {words[kernels.UNION.value]} ids, max_union is {self.union.numel()}")
        return self


def match_lists(
    lists: Sequence[torch.Tensor] | torch.Tensor,
    num_rows: int,
    method: str = "auto",
    max_union: int | None = None,
) -> IndexMatch:
    """W lists ``[n_q]`` (or one ``[W, n]``) of ids -> their union, and where everything is in everything else.

    Launches on the current stream; no synchronisation, no round trip to the host.

    Args:
        lists: int64 tensors on one device, each ascending and unique; may be empty.
        num_rows: ids are in [0, num_rows).
        method: ``"bitmap"``, ``"search"`` or ``"auto"``; the result is the same.
        max_union: room in the result. Default: for all, that is the smaller of all ids together and ``num_rows``.

    Returns:
        An :class:`IndexMatch`. Call its ``check()`` to have lists that are not as described reported.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """
    if isinstance(lists, torch.Tensor):
        _check_ids("lists", lists, dims=2)
        rows = list(lists.unbind(0))
    else:
        rows = list(lists)
        for q, row in enumerate(rows):
            _check_ids(f"lists[{q}]", row)
            if row.device != rows[0].device:
                raise ValueError(f"lists must be on one device; got {rows[0].device} and {row.device}")
    if not rows:
        raise ValueError("lists must have at least one list")
    world, width, device = len(rows), max(row.numel() for row in rows), rows[0].device
    capacity = max(1, width)
    if max_union is None:
        max_union = max(1, min(sum(row.numel() for row in rows), num_rows))
    packed = torch.empty(world, _HEADER + capacity, dtype=torch.int64, device=device)
    with torch.cuda.device_of(packed):
        launch = _launcher(device.index)
        for target, row in zip(packed.unbind(0), rows, strict=True):
            programs = _blocks(row.numel(), _EMIT_BLOCK)
            launch(kernels.pack_list, programs, (target, row.contiguous(), row.numel(), 0), (_EMIT_BLOCK,))
        directory = Directory(world, capacity, num_rows, max_union, device, method)
        directory.build(packed, 0)
        positions = torch.empty(world, width, dtype=torch.int32, device=device)
        contributors = torch.empty(max_union, world, dtype=torch.int32, device=device)
        programs = min(_blocks(max(width, max_union), _EMIT_BLOCK), max(1, _MAX_PROGRAMS // (world + 1)))
        found = (directory.entries, directory.words, world, directory.union, max_union, directory.status)
        arguments = (packed, packed.stride(0), capacity, *found, positions, width, contributors)
        launch(kernels.emit_match, (programs, world + 1), arguments, (_EMIT_BLOCK, directory.search))
    size = directory.status[kernels.UNION.value : kernels.UNION.value + 1]
    return IndexMatch(directory.union, size, positions, contributors, directory.status)
