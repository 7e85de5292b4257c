# SPDX-License-Identifier: Apache-2.0
"""The workloads of tdcoll's dense collectives, for `tdcoll tune` and for the benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

import tdcoll
from tdcoll.base.limits import lamport_bytes
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.plan import Plan
from tdcoll.tools.measure.buffers import Buffers, SharedBuffers, buffer_bytes, buffer_workload
from tdcoll.tools.measure.collectives import DenseCall
from tdcoll.tools.measure.engine import JobRanks, Workload, launch_calls

IN_PLACE = "in-place"
"""The name of calls in place, where ``--algorithms`` takes one and in rows."""

Algorithm = str | Plan
"""Values that tdcoll's functions accept for ``algorithm``."""


def dense_heap_bytes(
    call: DenseCall,
    sizes: Sequence[int],
    world: int,
    *,
    buffers_in_heap: bool,
) -> int:
    """Return the bytes of symmetric heap that :func:`dense_calls` needs.

    Args:
        sizes: the sizes, of which one at a time is measured.
        buffers_in_heap: whether workloads have inputs and results in symmetric memory.
    """
    room = max(call.context_bytes(size, world) + 16 for size in sizes)
    slots = 2 * world * room
    lamport = 3 * world * min(room, lamport_bytes(world, 1))
    need = slots + lamport + (8 << 20)
    if buffers_in_heap:
        need += max(buffer_bytes(call, size, world, _sets(size, world)) for size in sizes)
    return need


def _sets(nbytes: int, world: int) -> int:
    """Return the number of inputs and of results: one for each call of a launch."""
    return launch_calls(nbytes * world)[1]


class DenseCalls:
    """tdcoll's calls of a dense collective with segments of one size.

    Attributes:
        context: the context of all calls; a call is one epoch there.
        buffers: inputs and results, which workloads share.
    """

    def __init__(
        self,
        call: DenseCall,
        op: str | None,
        context: CollectiveContext,
        buffers: SharedBuffers,
    ) -> None:
        self.call = call
        self.context = context
        self.buffers = buffers
        # The functions take the reduction between their tensors and the algorithm.
        self._reduction = () if op is None else (op,)

    def workload(
        self,
        algorithm: Algorithm,
        *,
        in_place: bool = False,
        symmetric: bool = False,
    ) -> Workload:
        """Return the workload of calls by an algorithm.

        Args:
            symmetric: whether inputs and results are in symmetric memory, and calls have
                ``symmetric=True``.
        """
        options: dict[str, Any] = {"ctx": self.context, "algorithm": algorithm}
        if symmetric:
            options["symmetric"] = True
        reduction = self._reduction
        in_heap = symmetric or (in_place and self.call.spec.in_place)
        buffers = self.buffers.in_heap if in_heap else self.buffers.plain
        inputs = buffers.inputs
        results = buffers.results
        function = getattr(tdcoll, self.call.in_place_name or "" if in_place else self.call.name)

        def call(i: int) -> torch.Tensor:
            tensor: torch.Tensor = function(inputs[i], *reduction, out=results[i], **options)
            return tensor

        def call_in_place(i: int) -> torch.Tensor:
            tensor: torch.Tensor = function(results[i], *reduction, **options)
            return tensor

        if in_place:
            return buffer_workload(buffers, call_in_place, in_place=True)
        return buffer_workload(buffers, call)


@contextlib.contextmanager
def dense_calls(
    ranks: JobRanks, call: DenseCall, nbytes: int, dtype: torch.dtype, op: str | None
) -> Iterator[DenseCalls]:
    """Make the context and the buffers of calls with segments of ``nbytes``. Collective.

    Args:
        op: the reduction; None if the collective doesn't reduce.
    """
    topology = ranks.topology
    world = topology.world_size
    new = partial(
        Buffers,
        call,
        nbytes,
        topology.nodes,
        topology.rank,
        dtype,
        ranks.device,
        sets=_sets(nbytes, world),
        op=op,
    )
    with CollectiveContext(max_bytes_per_rank=call.context_bytes(nbytes, world)) as context:
        buffers = SharedBuffers(new)
        yield DenseCalls(call, op, context, buffers)
        buffers.close()


def dense_facts(call: DenseCall, nbytes: int, dtype: torch.dtype, op: str | None) -> dict[str, Any]:
    """Return the facts of all rows of one size."""
    return {
        "bytes_per_rank": nbytes,
        "operation": call.name,
        "dtype": str(dtype).removeprefix("torch."),
        "op": op,
    }
