# SPDX-License-Identifier: Apache-2.0
"""Steps of a call: what the host queues on a stream, one after the other.

A step is called with the handle of the stream, which is the current one, and the *frame* of the
call (:class:`~tdcoll.calls.operation.Bound`): addresses, and tensors for steps of the host; or one
dictionary of tensors by name, in which steps leave results for each other (:class:`NamedStep`). A
:class:`~tdcoll.calls.kernel_launch.KernelLaunch` is a step, and most calls have no other. So is a
collective within a call (:class:`~tdcoll.calls.call_launches.CallLaunches`). Copies by
copy engines (:mod:`tdcoll.calls.copies`) fork from the stream where they stand in a sequence, so
the step before them may be their producer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol


class Step(Protocol):
    """One thing that a call does on its stream."""

    @property
    def prepared(self) -> bool:
        """True once the step's kernels are compiled and loaded."""

    def prepare(self) -> None:
        """Compile and load the step's kernels."""

    def __call__(self, stream: int, *frame: Any) -> None:
        """Queue the step on the stream of this handle, which is the current one."""


class StepSequence:
    """Steps that follow each other, each with the same frame."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = tuple(steps)

    @property
    def prepared(self) -> bool:
        return all(step.prepared for step in self._steps)

    def prepare(self) -> None:
        for step in self._steps:
            step.prepare()

    def __call__(self, stream: int, *frame: Any) -> None:
        for step in self._steps:
            step(stream, *frame)


class AtOffset:
    """A step whose addresses lie behind those of the frame: one epoch of a larger call.

    Args:
        offset: Bytes that are added to each address.
        n_addresses: The first entries of the frame, which are moved; None: all.
    """

    def __init__(self, step: Step, offset: int, n_addresses: int | None = None) -> None:
        self._step = step
        self._offset = offset
        self._n_addresses = n_addresses

    @property
    def prepared(self) -> bool:
        return self._step.prepared

    def prepare(self) -> None:
        self._step.prepare()

    def __call__(self, stream: int, *frame: Any) -> None:
        moved = [address + self._offset for address in frame[: self._n_addresses]]
        self._step(stream, *moved, *frame[len(moved) :])


class WithPlaces:
    """A step that takes the entries of the frame at these places, in this order."""

    def __init__(self, step: Step, places: Sequence[int]) -> None:
        self._step = step
        self._places = tuple(places)

    @property
    def prepared(self) -> bool:
        return self._step.prepared

    def prepare(self) -> None:
        self._step.prepare()

    def __call__(self, stream: int, *frame: Any) -> None:
        self._step(stream, *[frame[place] for place in self._places])


class NamedStep:
    """A step of a call whose frame is one dictionary of tensors by name.

    Args:
        step: Takes the addresses of these tensors; 0 for a tensor that is None.
        names: The tensors, in the step's order.
        as_tensors: Names of tensors that the step takes as they are.
    """

    def __init__(self, step: Step, names: Sequence[str], as_tensors: Collection[str] = ()) -> None:
        self._step = step
        self._names = tuple(names)
        self._tensor_places = [i for i, name in enumerate(names) if name in as_tensors]

    @property
    def prepared(self) -> bool:
        return self._step.prepared

    def prepare(self) -> None:
        self._step.prepare()

    def __call__(self, stream: int, frame: Mapping[str, Any]) -> None:
        arguments: list[Any] = []
        for name in self._names:
            tensor = frame[name]
            arguments.append(0 if tensor is None else tensor.data_ptr())
        for place in self._tensor_places:
            arguments[place] = frame[self._names[place]]
        self._step(stream, *arguments)


class HostStep:
    """A function of PyTorch's, which queues its work on the current stream, such as a
    copy.

    Args:
        function: Takes the frame.
    """

    prepared = True

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def prepare(self) -> None:
        """PyTorch loads its own kernels."""

    def __call__(self, stream: int, *frame: Any) -> None:
        self._function(*frame)
