# SPDX-License-Identifier: Apache-2.0
"""Kernels written for threads: what rewritten kernels (:mod:`.rewrite`) call where the thread index decides.

A program is one thread of control here, so a test on the thread index cannot branch. Instead the body runs once for
each thread that the test selects, one after another, and ``tid(0)`` in it is that thread's index:

- ``if tid(0) < n: ... else: ...``, also nested;
- ``for i in range(tid(0), n, ntid(0))`` and ``while``: every thread runs its loop;
- ``t = tid(0) // 32`` gives a name a value in each thread (:class:`PerThread`), and so does every assignment in such a
  branch or loop. Tests, ranges and bodies of such branches read them.

Not possible: ``tid``, or a name that depends on it, anywhere else, since a program has one value there; and races
between threads of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from tdcoll.errors import TdcollError
from tdcoll.runtime.simulator import rewrite
from tdcoll.runtime.simulator.extents import joined

__all__ = ["kernel_globals", "thread_index"]

_VECTOR = -2
"""``Task.lane`` while an expression is evaluated for all threads at once."""

_ONE_VALUE = (
    "is different in each thread, and the simulator runs a program as one: use it in the test of an `if`, in the range "
    "of a `for`, or inside of them"
)


def thread_index(task: Any, axis: int) -> Any:
    """``tid(axis)`` of the thread that ``task`` runs as."""
    if axis != 0:
        return _int32(np.zeros(1, np.int32))
    if task.lane == _VECTOR:
        return _int32(np.arange(task.threads, dtype=np.int32))
    if task.lane is None:
        raise TdcollError(f"tid() {_ONE_VALUE}")
    return _int32(np.array([task.lane], np.int32))


def _int32(data: np.ndarray[Any, Any]) -> Any:
    return _tensor(triton_interpreter.TensorHandle(data, tl.int32), tl.int32)


def _tensor(handle: Any, scalar: Any) -> Any:
    size = handle.data.size
    return tl.tensor(handle, scalar if size == 1 else tl.block_type(scalar, [size]))


def _is_block(value: Any) -> bool:
    return isinstance(value, tl.tensor) and value.type.is_block()


class _Unset:
    """What a name is before anything was assigned to it."""


_UNSET = _Unset()


class PerThread:
    """A value in each thread: ``own[thread]``, or ``vector[thread]`` if there is a block with all, or ``base``."""

    def __init__(self, base: Any = _UNSET, vector: Any = None) -> None:
        self.base, self.vector = base, vector
        self.own: dict[int, Any] = {}

    def of(self, name: str, thread: int) -> Any:
        """The value in one thread."""
        if thread in self.own:
            return self.own[thread]
        if self.vector is not None:
            handle = self.vector.handle
            part = triton_interpreter.TensorHandle(handle.data[thread : thread + 1], handle.dtype)
            part.origin = handle.origin
            return _tensor(part, self.vector.type.scalar)
        if self.base is _UNSET:
            raise TdcollError(f"{name} has no value in thread {thread}")
        return self.base

    def of_all(self, name: str, threads: int) -> Any:
        """A block with the values in all threads."""
        if self.vector is not None and not self.own:
            return self.vector
        values = [self.of(name, thread) for thread in range(threads)]
        for value in values:
            if not isinstance(value, tl.tensor) or _is_block(value) or value.type != values[0].type:
                raise TdcollError(f"{name} must be a scalar of the same type in all threads where a test reads it")
        handle = triton_interpreter.TensorHandle(
            np.concatenate([value.handle.data.reshape(-1) for value in values]), values[0].handle.dtype
        )
        for value in values:
            handle.origin = joined(handle.origin, value.handle.origin)
        return _tensor(handle, values[0].type)


def _as_tensor(value: Any) -> Any:
    return triton_interpreter.interpreter_semantic.to_tensor(value, False)


class _Lanes:
    """The functions, for the task that runs on the machine that ``machine`` gives."""

    def __init__(self, machine: Callable[[], Any]) -> None:
        self._machine = machine

    def read(self, name: str, value: Any) -> Any:
        """The value of a name that may differ from thread to thread."""
        if value is _UNSET:
            raise TdcollError(f"{name} is read before it has a value")
        if not isinstance(value, PerThread):
            return value
        task = self._machine().program
        if task.lane is None:
            raise TdcollError(f"{name} {_ONE_VALUE}")
        return value.of_all(name, task.threads) if task.lane == _VECTOR else value.of(name, task.lane)

    def assign(self, several: bool, old: Any, value: Callable[[], Any], *dependence: Any) -> Any:
        """Return what a name, or ``several``, are bound to from now on; ``old``: what they were bound to."""
        task = self._machine().program
        if task.lane is None or task.lane == _VECTOR:
            new = self._evaluated(task, value, *dependence)
            return self._taken_apart(len(old), new) if several else new
        new = value()
        if not several:
            return self._in_thread(old, task.lane, new)
        return tuple(self._in_thread(one, task.lane, part) for one, part in zip(old, new, strict=True))

    @staticmethod
    def _in_thread(old: Any, thread: int, value: Any) -> PerThread:
        made = old if isinstance(old, PerThread) else PerThread(base=old)
        made.own[thread] = _as_tensor(value)
        return made

    @staticmethod
    def _taken_apart(count: int, value: Any) -> Any:
        """The parts of a tuple, in each thread."""
        if not isinstance(value, PerThread):
            return value
        parts = tuple(PerThread() for _ in range(count))
        for thread, values in value.own.items():
            for part, one in zip(parts, values, strict=True):
                part.own[thread] = _as_tensor(one)
        return parts

    def _evaluated(
        self,
        task: Any,
        value: Callable[[], Any],
        calls_tid: bool,
        threaded: Callable[[], tuple[Any, ...]],
        others: Callable[[], tuple[Any, ...]] | None,
    ) -> Any:
        """The value of an expression, which is the same for all threads or a :class:`PerThread`.

        Args:
            value: evaluates it.
            calls_tid: whether ``tid`` stands in it.
            threaded: gives the values of its names that may differ from thread to thread.
            others: gives the values of its other names; None if it must be evaluated thread by thread.
        """
        if task.lane == _VECTOR or not _differs(calls_tid, threaded):
            return _as_tensor(value())
        try:
            if others is not None and not any(_is_block(other) for other in (*threaded(), *others())):
                task.lane = _VECTOR
                made = _as_tensor(value())
                return PerThread(vector=made) if _is_block(made) else made
            each = PerThread()
            for thread in range(task.threads):
                task.lane = thread
                each.own[thread] = _as_tensor(value())
            return each
        finally:
            task.lane = None

    def split(self, test: Callable[[], Any], *dependence: Any) -> _Split:
        """For which threads a test holds."""
        task = self._machine().program
        if task.lane is not None:  # one thread: an ordinary branch
            return _Split(task, [task.lane] if _truth(test()) else [], [task.lane])
        held = self._evaluated(task, test, *dependence)
        if not isinstance(held, PerThread):
            return _Split(task, [None] if _truth(held) else [], [None])
        everyone = range(task.threads)
        if held.vector is not None:
            truth = np.broadcast_to(held.vector.handle.data.reshape(-1), (task.threads,))
            return _Split(task, np.flatnonzero(truth).tolist(), everyone)
        return _Split(task, [thread for thread in everyone if _truth(held.own[thread])], everyone)

    def all(self, calls_tid: bool, threaded: Callable[[], tuple[Any, ...]]) -> Iterator[int | None]:
        """The threads that run a loop: all, one after another; or the one that runs already."""
        task = self._machine().program
        if task.lane is None and _differs(calls_tid, threaded):
            return _each(task, range(task.threads))
        return iter([task.lane])


def _differs(calls_tid: bool, threaded: Callable[[], tuple[Any, ...]]) -> bool:
    return calls_tid or any(isinstance(value, PerThread) for value in threaded())


class _Split:
    """The threads of a branch and those of its ``else``; None stands for the program as a whole."""

    def __init__(self, task: Any, held: list[Any], everyone: Any) -> None:
        self._task, self._held = task, held
        chosen = set(held)
        self._others = [thread for thread in everyone if thread not in chosen]

    def where_true(self) -> Iterator[int | None]:
        """The threads for which the test holds, each while it runs."""
        return _each(self._task, self._held)

    def where_false(self) -> Iterator[int | None]:
        """The other threads, each while it runs."""
        return _each(self._task, self._others)


def _each(task: Any, lanes: Any) -> Iterator[int | None]:
    outer = task.lane
    try:
        for lane in lanes:
            task.lane = lane
            yield lane
    finally:
        task.lane = outer


# ---------------------------------------------------------------------- truth


def _truth(value: Any) -> bool:
    """Return the truth that ``if`` and ``while`` ask for: of a tensor of one value only, as in compiled Triton."""
    if isinstance(value, tl.tensor) and value.handle.data.size != 1:
        raise ValueError(
            f"a block of shape {list(value.handle.data.shape)} is neither true nor false: `if` and `while` take "
            "scalars; use a mask, tl.where, or a reduction such as tl.max"
        )
    return bool(value)


def _every(value: Any) -> bool:
    """Return the truth that ``assert`` asks for: of a block, that of every value."""
    return bool(value.handle.data.all()) if isinstance(value, tl.tensor) else bool(value)


def _logical(values: tuple[Callable[[], Any], ...], sign: str, method: str, ends: bool) -> Any:
    """``and`` and ``or`` as Triton has them: a compile-time value that is ``ends`` decides; tensors are all evaluated
    and combined."""
    tensors = []
    last = None
    for evaluate in values:
        last = evaluate()
        if isinstance(last, tl.tensor):
            tensors.append(last)
        elif bool(last) is ends:
            return last
    if not tensors:
        return last
    while len(tensors) > 1:
        other, one = tensors.pop(), tensors.pop()
        for operand in (one, other):
            _require_truth(operand, sign)
        tensors.append(getattr(one, method)(other))
    return tensors[0]


def _and(*values: Callable[[], Any]) -> Any:
    return _logical(values, "and", "logical_and", False)


def _or(*values: Callable[[], Any]) -> Any:
    return _logical(values, "or", "logical_or", True)


def _not(value: Any) -> Any:
    if not isinstance(value, tl.tensor):
        return not value
    _require_truth(value, "not")
    return value.__not__()


def _require_truth(operand: Any, sign: str) -> None:
    """Raise ``TypeError`` unless ``operand`` is boolean, or a pointer, which is true if it isn't null."""
    kind = operand.type.scalar
    if not (kind.is_int1() or kind.is_ptr()):
        raise TypeError(
            f"`{sign}` of {kind}: Triton has it for booleans and pointers only; compare first, such as `x != 0`"
        )


def kernel_globals(machine: Callable[[], Any]) -> dict[str, Any]:
    """Return what rewritten kernels refer to, by name; ``machine`` gives the machine."""
    lanes = _Lanes(machine)
    return {
        rewrite.AND: _and,
        rewrite.OR: _or,
        rewrite.NOT: _not,
        rewrite.TRUTH: _truth,
        rewrite.EVERY: _every,
        rewrite.READ: lanes.read,
        rewrite.ASSIGN: lanes.assign,
        rewrite.SPLIT: lanes.split,
        rewrite.ALL: lanes.all,
        rewrite.UNSET: _UNSET,
    }
