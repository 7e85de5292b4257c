# SPDX-License-Identifier: Apache-2.0
"""Prepared calls of several steps that leave tensors for each other: :class:`PreparedSteps`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch

from tdcoll.base.arguments import byte_text
from tdcoll.base.call_log import CallRecord, record_of
from tdcoll.base.ranges import ranged
from tdcoll.calls.call_launches import launches_of, prepare_steps
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.kernel_launch import KernelLaunch
from tdcoll.calls.launch_spec import NO_OPTIONS, KernelOptions
from tdcoll.calls.operation import PreparedCall
from tdcoll.calls.plan import Facts
from tdcoll.calls.spec import Collective
from tdcoll.calls.steps import HostStep, NamedStep, Step

Frame = dict[str, Any]
"""The tensors of a call by name: those of the request, results, and what steps leave for each
other. If the call doesn't have a tensor, it is None."""


class PreparedSteps(PreparedCall):
    """Steps on one :data:`Frame`. Subclasses add them, and :meth:`complete` the call.

    If a call has no steps, it launches nothing.
    """

    complex = False

    def __init__(self, ctx: CollectiveContext, name: str) -> None:
        self.variant = None
        self.record = record_of(name, 0)
        self.launch = self._launch
        self._ctx = ctx
        self._name = name
        self._temporaries: list[tuple[str, Callable[[], torch.Tensor]]] = []
        self._steps: list[Step] = []
        self._records: list[CallRecord] = []

    def add_temporary(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Add a tensor that each call makes: a result, or what a step leaves for a later one."""
        # Separate arguments, because PyTorch takes longer to parse a tuple; if there is none, an
        # empty tuple.
        sizes: Sequence[Any] = shape or [()]
        make = functools.partial(torch.empty, *sizes, dtype=dtype, device=self._ctx.device)
        self._temporaries.append((name, make))

    def add_host_step(self, function: Callable[[Frame], None]) -> None:
        """Add work of PyTorch's on the current stream."""
        self._steps.append(HostStep(function))

    def add_collective(
        self,
        collective: Collective,
        facts: Facts,
        source: str,
        out: str,
        options: KernelOptions = NO_OPTIONS,
    ) -> None:
        """Add a collective from one tensor of the frame to another."""
        calls = launches_of(collective, self._ctx, facts, options=options)
        self._records.append(calls.record)
        self._steps.append(NamedStep(calls, (source, out)))

    def add_step(self, step: Step, record: CallRecord | None = None) -> None:
        """Add a step.

        Args:
            record: The step's epochs, if it communicates.
        """
        self._steps.append(step)
        if record is not None:
            self._records.append(record)

    def add_kernel(
        self,
        kernel: Any,
        blocks: int,
        arguments: Mapping[str, Any],
        parameters: Mapping[str, str],
        record: CallRecord | None = None,
        **options: Any,
    ) -> None:
        """Add the launch of a kernel; see :meth:`kernel_step` and :meth:`add_step`."""
        self.add_step(self.kernel_step(kernel, blocks, arguments, parameters, **options), record)

    def kernel_step(
        self,
        kernel: Any,
        blocks: int,
        arguments: Mapping[str, Any],
        parameters: Mapping[str, str],
        as_tensors: Collection[str] = (),
        **options: Any,
    ) -> Step:
        """Return the launch of a kernel.

        Args:
            arguments: Of all calls, by parameter.
            parameters: The parameters that each call brings, and the names of their tensors.
            as_tensors: Names of tensors that the launch takes as they are, not by address.
            options: See :class:`~tdcoll.calls.kernel_launch.KernelLaunch`; by default the launch
                may begin early if the context's launches may.
        """
        options = {"allow_pdl": self._ctx.allow_pdl, **options}
        launch = KernelLaunch(kernel, blocks, arguments, tuple(parameters), **options)
        return NamedStep(launch, tuple(parameters.values()), as_tensors)

    def complete(
        self, algorithm: str, nbytes: int, variant: Hashable, local: tuple[Hashable, ...] = ()
    ) -> None:
        """Compile and load the kernels of the steps.

        Args:
            variant: See :class:`~tdcoll.calls.operation.PreparedCall`.
            local: Facts that decide the compiled code as well, and may differ between ranks.
        """
        self.variant = variant
        key = (variant, *local) if local else variant
        prepare_steps(self._ctx, self._name, key, self._steps)
        self.record = _joined(self._name, self._records)
        text = f"tdcoll.{self._name}[{algorithm}, {byte_text(nbytes)}]"
        launch: Callable[..., None] = self._launch
        if len(self._steps) == 1:
            launch = self._steps[0].__call__
        self.launch = ranged(text, launch)

    def make_temporaries(self, frame: Frame) -> None:
        """Make the temporaries of one call."""
        for name, make in self._temporaries:
            frame[name] = make()

    def _launch(self, stream: int, frame: Frame) -> None:
        for step in self._steps:
            step(stream, frame)


def _joined(name: str, records: list[CallRecord]) -> CallRecord | str:
    """Return the record of a call that is made of others; its name if their epochs are of two
    kinds."""
    kinds = {record.even for record in records if record.epochs}
    if len(kinds) > 1:
        return name
    epochs = sum(record.epochs for record in records)
    lamport = sum(record.lamport for record in records)
    return record_of(name, epochs=epochs, lamport=lamport, even=True in kinds)
