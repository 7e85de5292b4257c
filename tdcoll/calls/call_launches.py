# SPDX-License-Identifier: Apache-2.0
"""The launches of one kind of dense call, prepared: :class:`CallLaunches`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any

from tdcoll.base import arguments
from tdcoll.base.arguments import byte_text
from tdcoll.base.call_log import record_of
from tdcoll.base.ranges import ranged
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.explain import explain_call
from tdcoll.calls.launch_spec import (
    NO_OPTIONS,
    KernelOptions,
    LaunchSpec,
    epoch_step,
    refuse_capture,
)
from tdcoll.calls.plan import Facts, Plan
from tdcoll.calls.spec import Algorithm, Collective
from tdcoll.calls.steps import AtOffset, Step, StepSequence
from tdcoll.calls.tuning import Section
from tdcoll.calls.words import LAMPORT_WORD_BYTES

_log = logging.getLogger("tdcoll")


class CallLaunches:
    """The launches of one kind of call, prepared: one epoch, or all epochs of a larger call.

    A :class:`~tdcoll.calls.steps.Step` of calls that need a collective on the way.

    Attributes:
        plan: Of the first epoch.
        record: The kind of call, under the collective's name.
        lands_in_caller_buffer: Whether peers write to the caller's buffer.
        variant: All that the compiled kernels depend on, the same on all ranks.
        run: ``(stream, *addresses)``, which launches, given the handle of a stream. The addresses
            are those of source and result; or, if peers write to the caller's buffer, of the
            source, nothing and the buffer. With an epilogue, the result's address follows once
            more, and then the epilogue's tensors.
    """

    prepared = True

    def __init__(self, algorithm: Algorithm, epochs: list[LaunchSpec]) -> None:
        first = epochs[0]
        self._context = first.ctx
        self._operation = first.operation
        self.plan = first.plan
        lamport = 0
        for epoch in epochs:
            lamport += epoch.word_bytes == LAMPORT_WORD_BYTES
        self.record = record_of(
            first.operation,
            epochs=len(epochs) - lamport,
            lamport=lamport,
            even=algorithm.copies is not None,
        )
        self.lands_in_caller_buffer = first.lands_in_caller_buffer
        steps: dict[LaunchSpec, Any] = {}
        compiled: set[Any] = set()
        for epoch in epochs:
            if epoch not in steps:
                steps[epoch], variant = epoch_step(algorithm, epoch)
                compiled |= variant
        self.steps = list(steps.values())
        self.variant = (first.operation, frozenset(compiled), self.lands_in_caller_buffer)
        whole: Step = steps[first]
        if len(epochs) > 1:
            stride = first.facts.nbytes
            # An epilogue takes the same other entries of the frame in all epochs.
            moved = None if first.options.epilogue is None else 2
            parts = [AtOffset(steps[epoch], i * stride, moved) for i, epoch in enumerate(epochs)]
            whole = StepSequence(parts)
        self.run = _in_range(epochs, whole.__call__)
        # The epilogue's numbers and the alignment of its tensors may differ between ranks.
        form = (self.variant, first.options.epilogue)
        prepare_steps(first.ctx, first.operation, form, self.steps)

    def prepare(self) -> None:
        """Kernels are compiled and loaded when the launches are made."""

    def __call__(self, stream: int, *addresses: int) -> None:
        """Make the call, see :attr:`run`. The context has begun it."""
        self._context.wait_for_loads(self._operation, self.variant)
        self.run(stream, *addresses)


def _in_range(epochs: list[LaunchSpec], run: Callable[..., None]) -> Callable[..., None]:
    """Return what launches a call, in a range for profilers if they want one."""
    first = epochs[0]
    nbytes = sum(epoch.facts.nbytes for epoch in epochs)
    form = f"{first.operation}{'_' if first.facts.in_place else ''}"
    return ranged(f"tdcoll.{form}[{first.plan.algorithm}, {byte_text(nbytes)}]", run)


def prepare_steps(
    ctx: CollectiveContext, operation: str, variant: Hashable, steps: Iterable[Step]
) -> None:
    """Compile and load the kernels of a call. If it fails, the context is as it was.

    Raises:
        ContextError: There are kernels to load, and a CUDA graph is being captured.
    """
    for step in steps:
        if not step.prepared:
            if variant not in ctx.tables:
                refuse_capture(ctx, operation)
            step.prepare()
    ctx.tables[variant] = True


def sections_of(spec: Collective, ctx: CollectiveContext) -> tuple[Section, ...]:
    """Return the sections of the context's tuning table for a collective."""
    return spec.sections(ctx.tuning.sections, ctx.tuning.name)


def launches_of(
    spec: Collective,
    ctx: CollectiveContext,
    facts: Facts,
    algorithm: Any = "auto",
    options: KernelOptions = NO_OPTIONS,
) -> CallLaunches:
    """Return the launches of such calls, prepared. The context remembers them.

    Args:
        facts: See :meth:`.Facts.of`; ``nbytes`` is what the call moves of each segment.
        algorithm: A name, not checked yet; or a plan, see :meth:`.Collective.decide`.

    Raises:
        TypeError, ValueError: ``algorithm`` is not one that such a call can have.
        ContextError: The context is far too small; or a CUDA graph is being captured before any
            such call was made.
    """
    if not isinstance(algorithm, (str, Plan)):
        arguments.instance("algorithm", algorithm, (str, Plan), "a str")
    key = _key(spec, facts, algorithm, options)
    launches: CallLaunches | None = ctx.cache.get(key)
    if launches is None:
        sections = sections_of(spec, ctx)
        if ctx.rank == 0 and _log.isEnabledFor(logging.DEBUG):
            explanation = explain_call(spec, facts, algorithm, sections, ctx.tuning.name)
            _log.debug("%s", explanation.line)
        decision, _ = spec.decide_call(facts, algorithm, sections)
        launches = launches_by(spec, ctx, facts, decision.plan, options)
        ctx.cache[key] = launches
    return launches


def _key(spec: Collective, facts: Facts, algorithm: str | Plan, options: KernelOptions) -> Hashable:
    return (spec.name, facts.nbytes, facts.landing, algorithm, options)


def is_prepared(
    spec: Collective, ctx: CollectiveContext, facts: Facts, options: KernelOptions
) -> bool:
    """Return whether the context remembers the launches of such calls, by ``"auto"``."""
    return _key(spec, facts, "auto", options) in ctx.cache


def launches_by(
    spec: Collective,
    ctx: CollectiveContext,
    facts: Facts,
    plan: Plan,
    options: KernelOptions = NO_OPTIONS,
) -> CallLaunches:
    """Return the launches of calls by a plan that was made for these facts, prepared."""
    algorithm = spec.algorithm(plan.algorithm)
    epochs: list[LaunchSpec] = []
    for nbytes in spec.epochs(facts, plan.algorithm):
        part = replace(facts, nbytes=nbytes)
        if epochs and nbytes != epochs[0].facts.nbytes:  # the last one, which may be shorter
            plan = spec.choose(part, plan.algorithm, sections_of(spec, ctx))
        word_bytes = algorithm.payload(part).width if algorithm.words else 0
        epochs.append(LaunchSpec(spec.name, ctx, part, plan, options, facts.nbytes, word_bytes))
    return CallLaunches(algorithm, epochs)
