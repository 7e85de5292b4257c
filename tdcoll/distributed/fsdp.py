# SPDX-License-Identifier: Apache-2.0
"""FSDP2 (``torch.distributed.fsdp.fully_shard``) with its collectives in symmetric memory.

FSDP2's buffers are ordinary memory, from which a collective takes multiprocessors, even through
backend ``tdcoll``. :func:`use` gives a model buffers in the symmetric heap and collectives by copy
engines, which leave the multiprocessors to the matmuls beside them::

    from tdcoll.distributed import fsdp

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp.use(model)

:mod:`tdcoll.distributed.fsdp_calls` has the protocol of the buffers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.errors import HeapExhaustedError
from tdcoll.base.torch_fsdp import ParameterGroup, results_at_a_time
from tdcoll.calls.budget import Budget, least_blocks
from tdcoll.calls.checks import compare
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.implicit import on
from tdcoll.calls.plan import Facts, Landing
from tdcoll.calls.sharded import (
    GATHER,
    SCATTER,
    CallPolicy,
    context_arguments,
    padded,
    scattered_inbox,
)
from tdcoll.calls.spec import Collective
from tdcoll.collectives.all_gather.spec import SPEC as ALL_GATHER
from tdcoll.collectives.reduce_scatter.spec import SPEC as REDUCE_SCATTER
from tdcoll.distributed.fsdp_calls import AllGather, Channels, ReduceScatter, Ring, Scatter
from tdcoll.distributed.fsdp_plan import FsdpPlan, GroupPlan, check_model, plan, plan_of
from tdcoll.runtime import Runtime

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FsdpCommunication", "FsdpPlan", "GroupPlan", "plan", "use"]

_log = logging.getLogger("tdcoll")


def use(
    model: nn.Module,
    *,
    buffers: int | None = None,
    all_gather: str = "auto",
    reduce_scatter: str = "auto",
) -> FsdpCommunication:
    """Make the all-gathers and reduce-scatters of an FSDP2 model in symmetric memory from now on.

    Collective over the ranks of the model's meshes, after ``fully_shard`` and between steps. It
    works with any backend of the meshes' groups, and needs ``tdcoll.initialize()`` or backend
    ``tdcoll``. The all-reduces of a 2D mesh (HSDP) go on through their group.

    Sums have the bits of :func:`tdcoll.reduce_scatter`, as those of backend ``tdcoll``. If
    ``set_gradient_divide_factor`` has FSDP2 multiply gradients before it adds them, tdcoll
    multiplies the sum instead, in fp32.

    >>> fsdp.use(model)  # doctest: +SKIP

    Args:
        model: One to which ``fully_shard`` was applied, or whose modules it was applied to;
            compiled or not.
        buffers: How many gathered results FSDP2 may hold at a time, at least 2. Default: as many
            as one module prefetches, as it is set now, and one more. Gathers for which no buffer is
            free go through the group.
        all_gather: An algorithm of :func:`tdcoll.all_gather_`. ``"auto"``: copy engines for large
            ones.
        reduce_scatter: An algorithm of :func:`tdcoll.reduce_scatter`. ``"auto"``: copy engines and
            one sum for large ones.

    Returns:
        The communication of the model. Close it if the model is to go on with FSDP2's own
        collectives.

    Raises:
        TypeError, ValueError: An argument is not as described, or a module has collectives that
            are not FSDP2's own: ``use`` was called before, or ``set_custom_all_gather``.
        NotInitializedError: Before ``tdcoll.initialize()``.
        RankMismatchError: Ranks of a mesh differ in modules, sizes or arguments.
        HeapExhaustedError: The symmetric heap is too small; the message names the size to pass.
            Raised on all ranks of the mesh.
        ContextError: Other contexts have left too few thread blocks.
    """
    groups = check_model(model)
    job = runtime.current()
    if buffers is None:
        buffers = results_at_a_time(model)
    problem = _problem(groups, job.device, buffers, all_gather, reduce_scatter)
    given: dict[str, Any] = {
        "buffers": buffers,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
    }
    whole = plan_of(groups, buffers if problem is None else 2)
    channels = Channels()
    for part in whole.groups:
        facts = given | _facts_of(groups, channels, part.ranks)
        compare(job, part.ranks, "tdcoll.distributed.fsdp.use", facts, problem)
    if problem is not None:  # every mesh has one rank
        raise problem
    return FsdpCommunication(job, groups, whole, channels, all_gather, reduce_scatter)


def _problem(
    groups: Sequence[ParameterGroup],
    device: torch.device,
    buffers: Any,
    all_gather: Any,
    reduce_scatter: Any,
) -> Exception | None:
    """Return what is wrong on this rank, which the other ranks are told; None if nothing is."""
    try:
        arguments.whole("buffers", buffers, 2)
        for name, value, spec in (
            ("all_gather", all_gather, ALL_GATHER),
            ("reduce_scatter", reduce_scatter, REDUCE_SCATTER),
        ):
            if value not in ("auto", *spec.names):
                known = ", ".join(spec.names)
                raise ValueError(f"{name} must be one of auto, {known}; got {value!r}")
        for group in groups:
            if group.device != device:
                raise ValueError(
                    f"model must be sharded on {device}, where tdcoll's symmetric memory is; got "
                    f"module {group.name!r} on {group.device}"
                )
            _check_collectives(group)
    except (TypeError, ValueError) as error:
        return error
    return None


def _check_collectives(group: ParameterGroup) -> None:
    if group.has_own_collectives:
        return
    gather, scatter = group.collectives
    if isinstance(gather, AllGather):
        raise ValueError(
            f"model must not use tdcoll.distributed.fsdp already; got module {group.name!r}, which "
            "does. Close what the first call returned, or leave the second one out"
        )
    raise ValueError(
        f"model must have FSDP2's own collectives; got module {group.name!r} with "
        f"{type(gather).__name__} and {type(scatter).__name__}. Leave out set_custom_all_gather, "
        "set_custom_reduce_scatter and other settings of its communication"
    )


def _check_algorithm(name: str, wanted: str, spec: Collective, facts: Facts) -> None:
    """Raise on all ranks unless an algorithm supports the largest call."""
    if wanted == "auto":
        return
    problem = spec.algorithm(wanted).supports(facts)
    if problem is not None:
        raise ValueError(f"{name}={wanted!r} {problem}{facts.topology.describe()}. Use 'auto'")


def _facts_of(
    groups: Sequence[ParameterGroup], channels: Channels, ranks: tuple[int, ...]
) -> dict[str, str]:
    """Return what the ranks of a mesh must agree on, by module."""
    facts: dict[str, str] = {}
    for number, group in enumerate(groups):
        members = [channels.ranks_of(gathers) for gathers in group.gather_groups]
        if ranks in members:
            sizes = " and ".join(str(len(each)) for each in members)
            facts[f"module {number} ({group.name})"] = (
                f"gathers {group.gathered_bytes} bytes over {sizes} ranks and scatters "
                f"{group.scattered_bytes}"
            )
    return {"modules": str(len(facts)), **facts}


class FsdpCommunication:
    """The symmetric memory and the contexts of a model that :func:`use` was called for.

    It lives as long as the job, or until :meth:`close`. A context manager, which closes unless it
    is left by an exception.

    Attributes:
        plan: Its share of the symmetric heap.
    """

    def __init__(
        self,
        job: Runtime,
        groups: Sequence[ParameterGroup],
        plan: FsdpPlan,
        channels: Channels,
        all_gather: str,
        reduce_scatter: str,
    ) -> None:
        self.plan = plan
        self._job = job
        self._groups = groups
        self._channels = channels
        self._contexts: list[CollectiveContext] = []
        self._buffers: list[torch.Tensor] = []
        self._budgets: list[Budget] = []
        self._closed = False
        try:
            for number, part in enumerate(plan.groups):
                self._check_room(plan.groups[number:], part.ranks)
                self._make(part, all_gather, reduce_scatter)
        except Exception:
            self._undo()
            raise
        self._defaults = [group.collectives for group in groups]
        for group in groups:
            group.collectives = AllGather(channels, group), ReduceScatter(channels)
        if plan.groups and job.rank == plan.groups[0].ranks[0]:
            _log.info("%s", plan)

    def _check_room(self, parts: Sequence[GroupPlan], ranks: tuple[int, ...]) -> None:
        """Raise on all ranks unless each has room for what it is going to allocate. Collective."""
        info = self._job.arena.info
        needed = sum(part.heap_bytes for part in parts)
        answers = self._job.exchange(
            ranks, "symmetric memory of FSDP2", (needed, info.free, info.total)
        )
        if all(theirs <= free for theirs, free, _ in answers):
            return
        largest, free, total = max(answers, key=lambda answer: answer[0] - answer[1])
        enough = -(-(total - free + largest) >> 20)
        raise HeapExhaustedError(
            f"the symmetric heap has no room for FSDP2: {largest} bytes asked, {free} of {total} "
            f"bytes free on the fullest rank. Pass initialize(heap_bytes='{enough}M'), under the "
            f"backend Options(heap_bytes='{enough}M'), or set NVSHMEM_SYMMETRIC_SIZE={enough}M.\n"
            f"{self.plan}"
        )

    def _make(self, part: GroupPlan, all_gather: str, reduce_scatter: str) -> None:
        """Make contexts and buffers of one set of ranks. Collective."""
        ranks = part.ranks
        shape = (part.buffers, padded(part.gathered_bytes))
        nbytes = part.gathered_bytes // len(ranks)
        gathers = self._context("all_gather", ranks, GATHER, nbytes)
        facts = Facts.of(gathers, nbytes, landing=Landing.CALLER_BUFFER)
        _check_algorithm("all_gather", all_gather, ALL_GATHER, facts)
        buffers = self._job.allocate(
            shape, torch.uint8, group=ranks, name="gathered parameters of FSDP2"
        )
        self._buffers.append(buffers)
        self._channels.rings[ranks] = Ring(gathers, buffers, all_gather)
        if part.scattered_bytes:
            nbytes = scattered_inbox(part.scattered_bytes, part.nodes)
            scatters = self._context("reduce_scatter", ranks, SCATTER, nbytes)
            facts = Facts.of(scatters, part.scattered_bytes)
            _check_algorithm("reduce_scatter", reduce_scatter, REDUCE_SCATTER, facts)
            self._channels.scatters[ranks] = Scatter(scatters, reduce_scatter)

    def _context(
        self, name: str, ranks: tuple[int, ...], policy: CallPolicy, nbytes: int
    ) -> CollectiveContext:
        budget = Budget(self._job, ranks, policy.blocks or least_blocks(len(ranks)))
        budget.take(f"{name} of FSDP2")
        self._budgets.append(budget)
        with on(self._job.device):
            made = CollectiveContext(
                ranks,
                max_blocks=budget.blocks,
                _call={"operation": f"{name} of FSDP2"},
                **context_arguments(policy, nbytes),
            )
        self._contexts.append(made)
        return made

    def _undo(self) -> None:
        """Give back what was made, on this rank alone: no call has been made."""
        for context in self._contexts:
            context.undo_creation()
        for buffers in self._buffers:
            self._job.undo_allocation(buffers)
        self._give_blocks_back()

    def _give_blocks_back(self) -> None:
        for budget in self._budgets:
            budget.give_back()
        self._budgets.clear()

    # ------------------------------------------------------------------ queries

    @property
    def calls(self) -> dict[str, int]:
        """The number of all-gathers and of reduce-scatters that were made in symmetric memory."""
        return {
            "all_gather": sum(ring.calls for ring in self._channels.rings.values()),
            "reduce_scatter": sum(scatter.calls for scatter in self._channels.scatters.values()),
        }

    def check(self) -> None:
        """Wait for the last calls, and raise if a wait in one of their kernels has expired.

        Raises:
            CollectiveTimeout: Naming rank, peer and signal.
        """
        for context in self._contexts:
            context.check()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<{type(self).__name__} of {len(self._groups)} modules, {self.calls}, {state}>"

    # ------------------------------------------------------------------ life

    def close(self) -> None:
        """Give FSDP2 its own collectives back, and free the symmetric memory. Collective, between
        steps; waits for the GPU. A second call does nothing.

        Raises:
            CollectiveTimeout: A wait has expired, which hasn't been reported yet.
        """
        if self._closed:
            return
        self._closed = True
        for group, collectives in zip(self._groups, self._defaults, strict=True):
            group.collectives = collectives
        job = self._job
        try:
            with contextlib.ExitStack() as contexts:  # closes all, also if one raises
                for context in reversed(self._contexts):
                    contexts.callback(context.close)
            if not (job.closed or job.failed):
                for buffers in self._buffers:
                    job.release(buffers)
        finally:
            self._buffers.clear()
            self._give_blocks_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
