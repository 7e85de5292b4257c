# SPDX-License-Identifier: Apache-2.0
"""Index matching, host side: the directory that fused kernels search, and operations of their own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton.language as tl

from tdcoll.base import arguments
from tdcoll.base.capture import capturing, refuse
from tdcoll.calls.launch import Launcher, Packed
from tdcoll.collectives.index_match import kernels
from tdcoll.collectives.index_match.policy import METHODS, bitmap_words, choose_method
from tdcoll.language import INTERPRETED

__all__ = ["Directory", "IndexMatch", "match_indices", "match_lists"]

_HEADER = kernels.HEADER.value
_MAX_BLOCKS = 4096
"""Thread blocks of a launch over lists: several waves of a GPU. With more ids than that, they take several blocks."""

MOST_PLACES = (1 << 31) - (1 << 21)
"""Places are 32 bits: in entries, and in what ``find`` returns. Loops over them count one step further."""

CLEAR_BLOCK, _MARK_BLOCK, _WORDS_BLOCK, _SEARCH_BLOCK, _TOTALS_BLOCK = 4096, 1024, 512, 512, 1024

_NO_ID = torch.iinfo(torch.int64).max
"""Comes after all ids."""


_of_this_thread = threading.local()


def _launcher(device: int | None) -> Launcher:
    """Return what this thread launches this package's kernels with on one GPU."""
    launchers: dict[int | None, Launcher] = _of_this_thread.__dict__.setdefault("launchers", {})
    return launchers.setdefault(device, Launcher(early=True))


def _blocks(size: int, block: int) -> int:
    return max(1, -(-size // block))


class Directory:
    """Answers, on the device, where an id is in each of W sorted lists and in their union.

    Scratch in ordinary device memory, built again for each call and searched by the device functions ``find`` and
    ``find_in_union``. :mod:`~tdcoll.collectives.index_match.kernels` describes the two kinds and the layout of lists.

    Args:
        world: W, number of lists.
        capacity: most ids of a list.
        num_rows: ids are in [0, num_rows). :meth:`prepare` changes it.
        max_union: room for ids of the union.
        device: where.
        method: ``"bitmap"``, ``"search"``, or ``"auto"``: see :func:`~.policy.choose_method`.
        launch: launches the kernels; None: what the thread that makes the directory, and no other, launches with.

    Attributes:
        search, entries, words: as in :class:`~.kernels.Index`, for this ``num_rows``.
        union: int64 ``[max_union]``: the first min(U, max_union) ids of the union, ascending; the rest is unspecified.
        status: int64 ``[STATUS_WORDS]``; the same bits on all ranks that have the same lists. Where ``BAD_RANGE`` or
            ``BAD_ORDER`` is set, what the directory says means nothing, but places are below ``capacity`` or
            ``max_union``, and the first min(U, max_union) words of ``union`` are rows, or 0.

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
        self._progress = torch.zeros(kernels.PHASES.value, dtype=torch.int32, device=self.device)
        self._scratch: dict[str, torch.Tensor] = {}
        self._in_graphs: list[torch.Tensor] = []
        self._captured = False
        self._launch = launch or _launcher(self.device.index)
        self.num_rows = -1
        self.prepare(num_rows)

    def prepare(self, num_rows: int) -> None:
        """Say what the next builds' ids are below: sets ``search``, ``entries`` and ``words``.

        Allocates if no ``num_rows`` before needed as much. Memory that a captured CUDA graph uses is kept.

        Raises:
            ContextError: it would have to allocate while a CUDA graph is being captured.
        """
        if not isinstance(num_rows, int) or not 0 <= num_rows < 1 << 62:
            raise ValueError(f"num_rows must be an integer in [0, 2**62), got {num_rows!r}")
        if num_rows == self.num_rows:
            return
        self.search = (choose_method(num_rows, self.world) if self.method == "auto" else self.method) == "search"
        self.num_rows, self.words, self.entries = -1, 0, self.status  # as long as there is no memory
        self._key: Any = None
        if self.search:
            self._leaders = self._memory("leaders", self.world * (self.capacity + 1), torch.int32, num_rows)
            totals = self.world * (self.capacity // _SEARCH_BLOCK + 1)
        else:
            self.words, rows = bitmap_words(num_rows), self.world + 1
            self.entries = self._memory("entries", rows * self.words, torch.int64, num_rows).view(rows, self.words)
            totals = _blocks(self.words, _WORDS_BLOCK)
        self._totals = self._memory("totals", totals, torch.int32, num_rows)
        self.num_rows = num_rows

    def _memory(self, name: str, size: int, dtype: torch.dtype, num_rows: int) -> torch.Tensor:
        """``[size]`` of the scratch ``name``, which is made anew where it is too small for ``num_rows``."""
        if name not in self._scratch or self._scratch[name].numel() < size:
            refuse(
                self.device,
                "index matching",
                f"{num_rows} rows need more memory, which cannot be allocated while a CUDA graph is captured; make one "
                "call with this number of rows before",
            )
            if (old := self._scratch.pop(name, None)) is not None:
                if self._captured:
                    self._in_graphs.append(old)
                elif self.device.type == "cuda":
                    old.record_stream(torch.cuda.current_stream(self.device))
                del old  # before the new one is made
            self._scratch[name] = torch.empty(size, dtype=dtype, device=self.device)
        return self._scratch[name][:size]

    def index(self, lists: torch.Tensor) -> Packed:
        """Return the directory of ``lists`` as kernels see it. :meth:`build` makes it valid.

        Args:
            lists: int64 ``[W, stride]``, stride at least ``HEADER + capacity``, laid out as ``kernels.py`` says.

        Raises:
            ValueError: ``lists`` is not as described.
        """
        key = lists.data_ptr(), lists.dtype, lists.shape, lists.stride()
        if self._key != key:
            if (
                lists.dtype != torch.int64
                or lists.dim() != 2
                or lists.shape[0] != self.world
                or lists.shape[1] < _HEADER + self.capacity
                or lists.stride(1) != 1
                or lists.device.type != self.device.type
            ):
                raise ValueError(
                    f"lists must be int64 [{self.world}, {_HEADER + self.capacity} or more] on {self.device}, "
                    f"contiguous within a list; got {lists.dtype} {list(lists.shape)} on {lists.device}, strides "
                    f"{lists.stride()}"
                )
            tensors = lists, self.entries, self.union, self.status
            sizes = lists.stride(0), self.capacity, self.words, self.world, self.max_union
            self._key, self._packed = key, Packed(kernels.Index(*tensors, *sizes, tl.constexpr(self.search)))
        return self._packed

    @property
    def to_clear(self) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
        """``(target, size, status, progress)`` of ``kernels.wipe``, for a launch of the caller's."""
        # Of a search, the union: unsorted lists leave holes in it, and what is there must be a row.
        target, size = (self.union, self.max_union) if self.search else (self.entries, self.world * self.words)
        return target, size, self.status, self._progress

    def build(
        self,
        lists: torch.Tensor,
        signature: int,
        firsts: Any = None,
        places: Any = None,
        *,
        cleared: bool = False,
    ) -> None:
        """Make the directory of ``lists``: two launches on the current stream; no synchronisation.

        CUDA-graph safe after one eager call with as many rows.

        Args:
            lists: as for :meth:`index`.
            signature: what word ``LIST_SIGNATURE`` of each header must be.
            firsts: int64 ``[count]``, ids. None: ``places`` is left alone.
            places: int64 ``[STATUS_WORDS + count]``: becomes the status, and how many ids of the union are below each
                of ``firsts``.
            cleared: a launch since the last build has cleared what :attr:`to_clear` says; one launch is enough then.
        """
        index, totals, search = self.index(lists), self._totals, self.search
        if capturing(self.device):
            self._captured = True
        run: Any = partial(self._launch, variant=(search, lists.data_ptr() % 16))
        if not cleared:
            blocks = _blocks(self.to_clear[1], CLEAR_BLOCK)
            run(kernels.clear, blocks, self.to_clear, (CLEAR_BLOCK,), num_warps=8)
        block = _SEARCH_BLOCK if search else _WORDS_BLOCK
        blocks = self.capacity // block + 1 if search else _blocks(self.words, block)
        per_list = blocks if search else _blocks(self.capacity, _MARK_BLOCK)
        per_list = min(per_list, max(1, _MAX_BLOCKS // self.world))
        over_lists = per_list * self.world
        count = 0 if firsts is None else firsts.numel()
        grid = over_lists + 2 * (over_lists if search else blocks) + (count > 0)
        given = (
            index,
            self._leaders if search else totals,
            totals,
            self._progress,
            *((self.status, self.status) if firsts is None else (firsts, places)),
        )
        sizes = per_list, blocks, count, self.num_rows, signature
        constants = _MARK_BLOCK, block, _TOTALS_BLOCK, 1 << max(0, count - 1).bit_length() if count else 0
        run(kernels.build, grid, (*given, *sizes), constants)


# ---------------------------------------------------------------------- operations of their own


def _check_ids(name: str, tensor: torch.Tensor, dims: int = 1) -> None:
    arguments.tensor(name, tensor)
    if tensor.dtype != torch.int64 or tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a strided int64 tensor, got {tensor.dtype}, {tensor.layout}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimension(s), got shape {list(tensor.shape)}")
    wanted = "cpu" if INTERPRETED else "cuda"
    if tensor.device.type != wanted:
        how = "TRITON_INTERPRET=1 is set: kernels run on" if INTERPRETED else "kernels run on"
        raise ValueError(f"{name} must be a {wanted} tensor ({how} {wanted}); got one on {tensor.device}")


def _places(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``[..., n], [..., m] -> [..., n]``: where ``x`` is in ``ids``, which ascend; -1 where it is not, or is no id."""
    at = torch.searchsorted(ids, x).clamp_(max=ids.shape[-1] - 1)
    return at.where((ids.gather(-1, at) == x) & (x != _NO_ID), -1)


def match_indices(local: torch.Tensor, global_: torch.Tensor) -> torch.Tensor:
    """``[n], [m] -> [n]``: where each of the ``local`` ids is in ``global_``; -1 where it is not.

    No synchronisation. This is what sparse all-reduces do with the ids of one rank and those of all of them, under
    names such as *invert index*.

    >>> tdcoll.match_indices(torch.tensor([5, 2, 9]), torch.tensor([2, 5, 7]))
    tensor([ 1,  0, -1])

    Args:
        local: int64, ids in any order; ascending is fastest, since neighbours then share what they load.
        global_: int64, ascending and unique. If it is not, the answer means nothing.

    Returns:
        int64 ``[n]``.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """
    _check_ids("local", local)
    _check_ids("global_", global_)
    if local.device != global_.device:
        raise ValueError(f"local and global_ must be on one device; got {local.device} and {global_.device}")
    if not global_.numel():
        return torch.full_like(local, -1)
    return _places(local.contiguous(), global_.contiguous())


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
    lists: Sequence[torch.Tensor] | torch.Tensor, num_rows: int, method: str = "auto", max_union: int | None = None
) -> IndexMatch:
    """W lists ``[n_q]`` (or one ``[W, n]``) of ids -> their union, and where everything is in everything else.

    Launches on the current stream; no synchronisation, no round trip to the host.

    >>> lists = [torch.tensor([1, 4]), torch.tensor([4, 6])]
    >>> tdcoll.match_lists(lists, num_rows=8).check()

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
    rows = list(lists)
    if not rows:
        raise ValueError("lists must have at least one list")
    for q, row in enumerate(rows):
        _check_ids(f"lists[{q}]", row)
        if row.device != rows[0].device:
            raise ValueError(f"lists must be on one device; got {rows[0].device} and {row.device}")
    counts, device = [row.numel() for row in rows], rows[0].device
    if max_union is None:
        max_union = max(1, min(sum(counts), num_rows))
    packed = torch.full((len(rows), _HEADER + max(1, *counts)), _NO_ID, device=device)
    for target, row, count in zip(packed, rows, counts, strict=True):
        target[:_HEADER] = 0  # also the signature
        target[kernels.LIST_COUNT.value] = count
        target[_HEADER : _HEADER + count] = row
    with torch.cuda.device_of(packed):
        directory = Directory(len(rows), max(1, *counts), num_rows, max_union, device, method)
        directory.build(packed, 0)
    size = directory.status[kernels.UNION.value : kernels.UNION.value + 1]
    beyond = torch.arange(max_union, device=device) >= size
    union = directory.union.masked_fill_(beyond, _NO_ID).expand(len(rows), -1).contiguous()
    ids = packed[:, _HEADER:].contiguous()
    found = _places(ids, union)[:, : max(counts)], _places(union, ids).T
    positions, contributors = (places.to(torch.int32).contiguous() for places in found)
    return IndexMatch(union[0].masked_fill_(beyond, -1), size, positions, contributors, directory.status)
