# SPDX-License-Identifier: Apache-2.0
"""The agreement of the ranks of a new group, which also joins the job if it hasn't been joined.

The result is the same on all ranks, because an obstacle on one of them is an obstacle for the
group.
"""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import tdcoll
from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.errors import TdcollError
from tdcoll.calls.implicit import on
from tdcoll.distributed.options import Options
from tdcoll.job import lifecycle
from tdcoll.job.settings import heap_of
from tdcoll.language import INTERPRETED
from tdcoll.language.jit import bitcode_path
from tdcoll.runtime.control import StoreControlPlane, require_equal


def device_of_this_rank() -> torch.device:
    """Return the GPU for the symmetric heap: the current one if the script has chosen it, else the
    launcher's."""
    current = torch.cuda.current_device()
    local = arguments.decimal(os.environ.get("LOCAL_RANK", ""))
    if current == 0 and local is not None:
        index = lifecycle.device_index(local, lifecycle.may_share_gpus())
        current = index if index < torch.cuda.device_count() else current
    return torch.device("cuda", current)


def _obstacle(size: int) -> str | None:
    """Return why this rank cannot run tdcoll's kernels in a group of so many ranks, or None."""
    if runtime.current_or_none() is not None:
        return None
    if dist.is_initialized() and size < dist.get_world_size():
        return "tdcoll was not initialised when this group of some of the ranks was made (tdcoll.initialize())"
    if INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "no GPU, and not the simulator (TRITON_INTERPRET=1 when the process starts)"
    if heap_of() == "torch":
        return None
    try:
        bitcode_path()
        importlib.import_module("nvshmem.bindings.nvshmem")
    except (ImportError, FileNotFoundError) as error:
        return f"NVSHMEM is not installed ({error})"
    return None


class Agreement:
    """The agreement that the ranks of a group made when they created it. Collective.

    Attributes:
        kinds: handled by tdcoll's kernels.
        reason: why that is not all that was requested; None if it is.
        job: that the ranks have joined; None if tdcoll handles nothing.
        timeout_s: deadline of waits in kernels, seconds; None for the job's.
        agreed_name: of the group on its first rank, because other ranks may have counted otherwise.
        token: of the group, and of no other.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: tuple[int, ...],
        options: Options,
        timeout: timedelta,
        name: str,
        default: bool,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.options = options
        self.name = name
        self.default = default
        self.kinds = options.kinds
        of_job = timeout == dist.distributed_c10d.default_pg_timeout and os.environ.get(
            "TDCOLL_TIMEOUT_S"
        )
        self.timeout_s = None if of_job else min(timeout.total_seconds(), arguments.MOST_SECONDS)
        self.reason: str | None = None
        store = dist.PrefixStore("tdcoll/", store)
        self._everyone = range(len(ranks))
        self._control = StoreControlPlane(store, rank, timeout.total_seconds())
        configured = {
            "handles": options.kinds,
            "max_bytes_per_rank": options.max_bytes_per_rank,
            "blocks": options.blocks,
            "heap_bytes": options.heap_bytes,
            "timeout": self.timeout_s,
            "share_gpus": lifecycle.may_share_gpus(),
        }
        obstacle = _obstacle(len(ranks)) if self.kinds else "configured to handle nothing"
        mine = configured, obstacle, name, uuid.uuid4().hex
        gathered = self._control.all_gather(self._everyone, "backend tdcoll", mine)
        given, obstacles, names, tokens = zip(*gathered, strict=True)
        require_equal(given, self._everyone, "the options of backend tdcoll")
        self.agreed_name = f"group {names[0]}"
        self.token = tokens[0]
        self._handle_nothing(obstacles)
        if self.kinds and runtime.current_or_none() is None:  # then these are all ranks
            self._join(store)
        self.job = runtime.current_or_none() if self.kinds else None

    def _handle_nothing(self, obstacles: Sequence[str | None]) -> None:
        """If there is any obstacle, handle nothing and log it; the same on all ranks."""
        found = {rank: obstacle for rank, obstacle in enumerate(obstacles) if obstacle is not None}
        if found:
            rank, obstacle = next(iter(found.items()))
            everywhere = len(set(found.values())) == 1 and len(found) == len(obstacles)
            self.kinds = ()
            self.reason = obstacle if everywhere else f"rank {rank}: {obstacle}"

    def _join(self, store: Any) -> None:
        """Initialise tdcoll for a group of all ranks. Collective."""
        obstacle: str | None = None
        heap_bytes = self.options.heap_bytes
        timeout_s = self.timeout_s
        try:
            with on(torch.device("cpu") if INTERPRETED else device_of_this_rank()):
                lifecycle.join(
                    store, self.rank, len(self.ranks), heap_bytes=heap_bytes, timeout_s=timeout_s
                )
            runtime.current().of_backend = True
        except TdcollError as error:
            obstacle = str(error)
        self._handle_nothing(self._control.all_gather(self._everyone, "joined", obstacle))
        if obstacle is None and not self.kinds:  # some have joined and others could not
            runtime.current().failed = True
            tdcoll.finalize()  # forgets the job, and doesn't wait
