# SPDX-License-Identifier: Apache-2.0
"""Index matching, host side: the directory that fused kernels search, and :func:`match_indices`."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from tdcoll.base import arguments
from tdcoll.base.capture import capturing, refuse
from tdcoll.calls.kernel_launch import FlatTuple
from tdcoll.collectives.index_match import kernels
from tdcoll.collectives.index_match.policy import bitmap_words, searches
from tdcoll.language import INTERPRETED

_MAX_BLOCKS = 4096
"""Thread blocks of a launch over lists: several waves of a GPU. With more ids than that, they take
several blocks."""

MOST_PLACES = (1 << 31) - (1 << 21)
"""Places are 32 bits: in entries, and in what ``find`` returns. Loops over them count one step
further."""

CLEAR_BLOCK = 4096
_BLOCK = 512
_TOTALS_BLOCK = 1024


class Directory:
    """Answers, on the device, where an id is in each of W sorted lists and in their union.

    Scratch in ordinary device memory, built again for each call and searched by the device
    functions ``find`` and ``find_in_union``. :mod:`~tdcoll.collectives.index_match.kernels`
    describes the two kinds and the layout of lists.

    Args:
        world: W, number of lists.
        capacity: most ids of a list.
        max_union: room for ids of the union. Neither this nor W times the capacity is over
            :data:`MOST_PLACES`.

    Attributes:
        search, entries, words: as in :class:`~.kernels.Index`, for the rows of :meth:`prepare`.
        clearers, builders: programs of ``kernels.clear`` and ``kernels.build`` for these rows.
        union: int64 ``[max_union]``: the first min(U, max_union) ids of the union, ascending; the
            rest is unspecified.
        status: int64 ``[STATUS_WORDS]``; the same bits on all ranks that have the same lists. Where
            ``BAD_RANGE`` or ``BAD_ORDER`` is set, what the directory says means nothing, but places
            are below ``capacity`` or ``max_union``, and the first min(U, max_union) words of
            ``union`` are rows, or 0.
    """

    def __init__(self, world: int, capacity: int, max_union: int, device: torch.device) -> None:
        self.world = world
        self.capacity = capacity
        self.max_union = max_union
        self.device = device
        self.union = torch.empty(max_union, dtype=torch.int64, device=device)
        self.status = torch.zeros(kernels.STATUS_WORDS.value, dtype=torch.int64, device=device)
        self._progress = torch.zeros(kernels.PHASES.value, dtype=torch.int32, device=device)
        self._scratch: dict[str, torch.Tensor] = {}
        self._in_graphs: list[torch.Tensor] = []
        self._captured = False
        self.num_rows = -1

    def prepare(self, num_rows: int) -> None:
        """Say what the next builds' ids are below: sets ``search``, ``entries`` and ``words``.

        Allocates if no ``num_rows`` before needed as much. Memory that a captured CUDA graph uses
        is kept.

        Raises:
            ContextError: it would have to allocate while a CUDA graph is being captured.
        """
        if num_rows == self.num_rows:
            return
        self.search = searches(num_rows, self.world)
        # as long as there is no memory
        self.num_rows = -1
        self.words = 0
        self.entries = self.status
        self._key: Any = None
        if self.search:
            self._leaders = self._memory(
                "leaders", self.world * (self.capacity + 1), torch.int32, num_rows
            )
            cleared = self.max_union
            per_list = self.capacity // _BLOCK + 1
            totals = self.world * per_list
        else:
            self.words = bitmap_words(num_rows)
            rows = self.world + 1
            self.entries = self._memory("entries", rows * self.words, torch.int64, num_rows).view(
                rows, self.words
            )
            cleared = self.world * self.words
            totals = -(-self.words // _BLOCK)
            per_list = -(-self.capacity // _BLOCK)
        self._totals = self._memory("totals", totals, torch.int32, num_rows)
        per_list = min(per_list, max(1, _MAX_BLOCKS // self.world))
        self._grid = per_list, per_list * self.world if self.search else totals
        self.clearers = -(-cleared // CLEAR_BLOCK)
        self.builders = per_list * self.world + 2 * self._grid[1]
        self.num_rows = num_rows

    def _memory(self, name: str, size: int, dtype: torch.dtype, num_rows: int) -> torch.Tensor:
        """``[size]`` of the scratch ``name``, which is made anew where it is too small for
        ``num_rows``."""
        if name not in self._scratch or self._scratch[name].numel() < size:
            refuse(
                self.device,
                "index matching",
                f"{num_rows} rows need more memory, which cannot be allocated while a CUDA graph is captured; make one "
                "call with this number of rows before",
            )
            old = self._scratch.pop(name, None)
            if old is not None:
                if self._captured:
                    self._in_graphs.append(old)
                elif self.device.type == "cuda":
                    old.record_stream(torch.cuda.current_stream(self.device))
                del old  # before the new one is made
            self._scratch[name] = torch.empty(size, dtype=dtype, device=self.device)
        return self._scratch[name][:size]

    def index(self, lists: torch.Tensor) -> FlatTuple:
        """Return the directory of ``lists`` as kernels see it, which ``kernels.clear`` and
        ``kernels.build`` make valid.

        Args:
            lists: int64 ``[W, stride]``, stride at least ``HEADER + capacity``, laid out as
                ``kernels.py`` says.
        """
        if capturing(self.device):
            self._captured = True
        key = lists.data_ptr(), lists.stride(0)
        if self._key != key:
            leaders = self._leaders if self.search else self._totals
            tensors = (
                lists,
                self.entries,
                self.union,
                self.status,
                leaders,
                self._totals,
                self._progress,
            )
            sizes = (
                self.num_rows,
                lists.stride(0),
                self.capacity,
                self.words,
                self.world,
                self.max_union,
            )
            constants = map(tl.constexpr, (self.search, _BLOCK, _TOTALS_BLOCK))
            self._key = key
            self._packed = FlatTuple(kernels.Index(*tensors, *sizes, *self._grid, *constants))
        return self._packed


def match_indices(local: torch.Tensor, global_: torch.Tensor) -> torch.Tensor:
    """``[n], [m] -> [n]``: where each of the ``local`` ids is in ``global_``; -1 where it is not.

    No synchronisation. Sparse all-reduces do this, also called *invert index*, with the ids of one
    rank and of all.

    >>> tdcoll.match_indices(torch.tensor([5, 2, 9]), torch.tensor([2, 5, 7]))
    tensor([ 1,  0, -1])

    Args:
        local: int64, ids in any order; ascending is fastest, since neighbours then share what they
            load.
        global_: int64, ascending and unique. If it is not, the answer means nothing.

    Returns:
        int64 ``[n]``.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """
    wanted = "cpu" if INTERPRETED else "cuda"
    for name, tensor in (("local", local), ("global_", global_)):
        arguments.tensor(name, tensor)
        if tensor.dtype != torch.int64 or tensor.layout != torch.strided:
            raise TypeError(
                f"{name} must be a strided int64 tensor, got {tensor.dtype}, {tensor.layout}"
            )
        if tensor.dim() != 1:
            raise ValueError(f"{name} must have 1 dimension, got shape {list(tensor.shape)}")
        if tensor.device.type != wanted:
            raise ValueError(f"{name} must be a {wanted} tensor; got one on {tensor.device}")
    if local.device != global_.device:
        raise ValueError(
            f"local and global_ must be on one device; got {local.device} and {global_.device}"
        )
    if not global_.numel():
        return torch.full_like(local, -1)
    at = torch.searchsorted(global_.contiguous(), local.contiguous()).clamp_(
        max=global_.numel() - 1
    )
    return at.where(global_[at] == local, -1)
