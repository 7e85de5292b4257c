# SPDX-License-Identifier: Apache-2.0
"""tdcoll's all-gathers as subjects of the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from tdcoll.bench.data import Buffers
from tdcoll.collectives._host.plan import Plan
from tdcoll.collectives.all_gather import all_gather, all_gather_in_place
from tdcoll.collectives.all_gather.policy import POLICY
from tdcoll.context import CollectiveContext

__all__ = ["BACKEND", "IN_PLACE", "NAMES", "Subject", "all_gather_subject", "backend_subject", "no_close"]

IN_PLACE = "in-place"
BACKEND = "backend"
NAMES = (*POLICY.algorithms, IN_PLACE, BACKEND)


def no_close() -> None:
    """For subjects that own nothing."""


@dataclass(frozen=True)
class Subject:
    """Something to measure.

    Attributes:
        name: in the table.
        peer: whether it is not tdcoll's.
        buffers: what its calls work on.
        call: makes the call with this number, on the current stream.
        close: gives back what it owns; collective.
    """

    name: str
    peer: bool
    buffers: Buffers
    call: Callable[[int], object]
    close: Callable[[], None] = no_close


def all_gather_subject(name: str, context: CollectiveContext, buffers: Buffers, plan: Plan | None = None) -> Subject:
    """tdcoll's all-gather by its name in :data:`NAMES`; ``buffers`` are those that it needs.

    ``plan``: how its calls are made, if not as tdcoll decides here.
    """
    algorithm = plan or ("auto" if name == IN_PLACE else name)

    def call(i: int) -> None:
        all_gather(buffers.inputs[i], context, buffers.results[i], algorithm=algorithm)

    def call_in_place(i: int) -> None:
        all_gather_in_place(buffers.results[i], context, algorithm)

    return Subject(name, False, buffers, call_in_place if name == IN_PLACE else call)


def backend_subject(buffers: Buffers) -> Subject:
    """``torch.distributed.all_gather_into_tensor`` of a process group with backend ``"tdcoll"``.

    Raises:
        RuntimeError: tdcoll's kernels do not serve the group.
    """
    from tdcoll.distributed import Options, explain  # registers the backend

    options = Options(serves="all_gather", max_bytes_per_rank=max(1, buffers.inputs[0].nbytes))
    group = dist.new_group(backend="tdcoll", pg_options=options)
    if "all_gather: tdcoll" not in (explained := explain(group)):
        dist.destroy_process_group(group)
        raise RuntimeError(f"not served by tdcoll: {explained}")

    def call(i: int) -> None:
        dist.all_gather_into_tensor(buffers.results[i], buffers.inputs[i], group=group)

    return Subject(BACKEND, False, buffers, call, lambda: dist.destroy_process_group(group))
