# SPDX-License-Identifier: Apache-2.0
"""Options of a process group of backend ``tdcoll``: the kinds and sizes of calls that tdcoll's
kernels handle."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tdcoll.base import arguments
from tdcoll.base.limits import COLLECTIVES, MAX_BLOCKS

KINDS = (*COLLECTIVES, "sparse_all_reduce", "barrier")
"""The kinds of call that tdcoll's kernels can handle."""

HANDLES = "TDCOLL_BACKEND_HANDLES"
"""Environment variable: default of :attr:`Options.handles`."""

BLOCKS = 40
"""Default of :attr:`Options.blocks`, of 8 warps: with so many, 2 H200s take at most 0.86 of NCCL's
time through the backend, up to 16 MB, and with 32 at most 0.92. A call occupies a third of an
H200's multiprocessors at most."""


def _kinds(text: str, source: str) -> tuple[str, ...]:
    """Parse ``"all"``, ``"none"`` or names with commas between them, as kinds in the order of
    :data:`KINDS`."""
    names = [name.strip() for name in text.lower().split(",") if name.strip()]
    if names == ["all"]:
        return KINDS
    if names == ["none"]:
        return ()
    unknown = [name for name in names if name not in KINDS]
    if not names or unknown:
        what = f"; unknown: {', '.join(unknown)}" if names else ""
        raise ValueError(
            f"{source} must be 'all', 'none' or some of {', '.join(KINDS)} with commas; got {text!r}{what}"
        )
    return tuple(kind for kind in KINDS if kind in names)


@dataclass(frozen=True)
class Options:
    """``pg_options`` of ``init_process_group("tdcoll")`` and ``new_group``, equal on all ranks of
    the group.

    >>> options = tdcoll.distributed.Options(handles="all_reduce,all_gather")
    >>> torch.distributed.init_process_group("tdcoll", pg_options=options)

    Attributes:
        handles: the calls that tdcoll's kernels handle: ``"all"``, ``"none"``, or some of
            :data:`KINDS` with commas between them; the rest falls back. None becomes
            ``TDCOLL_BACKEND_HANDLES`` as it is now, else ``"all"``.
        max_bytes_per_rank: the largest segment that tdcoll handles, in bytes: a rank's input of an
            all-gather or an all-reduce, and its result of a reduce-scatter. If None, the limit in
            each collective's spec.
        blocks: the most thread blocks of one launch. A dense call occupies so many when it waits
            for other ranks, and a sparse one beside it as many again; the rest of the GPU stays
            free for compute. At least ``2 * ranks + 2`` are taken.
        heap_bytes: symmetric heap of each rank, bytes or a text such as ``"2G"``, for the group
            that joins the job. If tdcoll is initialised already, a group uses the existing heap.
            None: as for :func:`tdcoll.initialize`.
        nccl: ``ProcessGroupNCCL.Options`` of the fallback backend for CUDA tensors, whichever of
            PyTorch's implementations of NCCL it is.

    Raises:
        TypeError, ValueError: a value is not as described.
    """

    handles: str | None = None
    max_bytes_per_rank: int | None = None
    blocks: int = BLOCKS
    heap_bytes: int | str | None = None
    nccl: Any = None

    def __post_init__(self) -> None:
        if self.handles is None:
            object.__setattr__(self, "handles", os.environ.get(HANDLES) or "all")
            _kinds(str(self.handles), HANDLES)
        else:
            arguments.instance("handles", self.handles, str, "a str or None")
            _kinds(self.handles, "handles")
        if self.max_bytes_per_rank is not None:
            arguments.whole("max_bytes_per_rank", self.max_bytes_per_rank, 0)
        arguments.whole("blocks", self.blocks, 1, MAX_BLOCKS)
        if self.heap_bytes is not None:
            object.__setattr__(
                self, "heap_bytes", arguments.byte_count("heap_bytes", self.heap_bytes)
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that tdcoll handles, in the order of :data:`KINDS`."""
        return _kinds(str(self.handles), "handles")

    @classmethod
    def of(cls, pg_options: Any) -> Options:
        """Convert ``pg_options``: None, :class:`Options`, or options of NCCL, which go to the
        fallback backend."""
        if pg_options is None:
            return cls()
        if isinstance(pg_options, cls):
            return pg_options
        if type(pg_options).__module__.startswith("torch"):
            return cls(nccl=pg_options)
        raise TypeError(
            "pg_options must be tdcoll.distributed.Options or ProcessGroupNCCL.Options, got "
            f"{type(pg_options).__name__}"
        )
