# SPDX-License-Identifier: Apache-2.0
"""Kernels written for threads: what rewritten kernels (:mod:`.rewrite`) call where the thread index decides.

A program is one thread of control here, so a test on the thread index cannot branch. Instead the body runs once for
each thread that the test selects, one after another, and ``tid(0)`` in it is that thread's index:

- ``if tid(0) < n: ... else: ...``, also nested;
- ``for i in range(tid(0), n, ntid(0))`` and ``while``: every thread runs its loop.

A name whose value differs from thread to thread, as of ``t = tid(0) // 32``, has a block of all values, of a shape that
no other block has. Each thread that runs gets its own in such names, and what it leaves in them is put together again.

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
from tdcoll.runtime.simulator.current import machine
from tdcoll.runtime.simulator.extents import joined
from tdcoll.runtime.simulator.tasks import Task
from tdcoll.runtime.simulator.truth import truth

__all__ = ["FUNCTIONS", "differs", "of_threads", "one_value", "thread_index"]

_ALL = -2
"""``Task.lane`` while an expression is evaluated for all threads at once."""

_EACH = (1, 1, 1, 1)
"""A block of the values of n threads has the shape ``[n, 1, 1, 1, 1]``."""


class _Unset:
    """What a name is that has no value, or none that can be put together."""


_UNSET = _Unset()


def thread_index(task: Task, axis: int) -> Any:
    """``tid(axis)`` of the thread that ``task`` runs as."""
    if axis == 0 and task.lane is None:
        raise one_value("tid()")
    if axis == 0 and task.lane == _ALL:
        return _tensor(np.arange(task.threads, dtype=np.int32), tl.int32)
    return _tensor(np.array([task.lane if axis == 0 else 0], np.int32), tl.int32)


def one_value(what: str) -> TdcollError:
    """The error for something that has to be the same for all threads, and isn't."""
    return TdcollError(
        f"{what} is different in each thread, and the simulator runs a program as one: use it in the test of an `if`, "
        "in the range of a `for`, or inside of them"
    )


def of_threads(value: Any) -> bool:
    """Return whether ``value`` has a scalar or a block for each thread."""
    data = getattr(value.handle, "data", None) if isinstance(value, tl.tensor) else None
    return data is not None and data.ndim == 1 + len(_EACH) and data.shape[1] == 1


def differs(value: Any) -> bool:
    """Return whether ``value`` has a scalar for each thread."""
    return of_threads(value) and value.handle.data.shape[1:] == _EACH


def _tensor(data: Any, kind: Any, origin: Any = None) -> Any:
    """A scalar, or the values of all threads."""
    handle = triton_interpreter.TensorHandle(data if data.size == 1 else data.reshape(-1, *_EACH), kind)
    handle.origin = origin
    return tl.tensor(handle, kind if data.size == 1 else tl.block_type(kind, list(handle.data.shape)))


def _own(value: Any, lane: int | None) -> Any:
    """What ``value`` is in one thread; in the program as a whole, for None."""
    if lane is None or not differs(value):
        return value
    return _tensor(value.handle.data[lane].reshape(1), value.type.scalar, value.handle.origin)


def _read(name: str, value: Any) -> Any:
    """The value of a name that may differ from thread to thread."""
    if value is _UNSET:
        raise TdcollError(f"{name} has no value here, or not a scalar of one type in every thread")
    if differs(value) and machine().program.lane is None:
        raise one_value(name)
    return value


def _assigned(evaluate: Callable[[], Any]) -> Any:
    """The value of an expression: of all threads, outside of branches and loops on the thread index."""
    task = machine().program
    if task.lane is not None:
        return evaluate()
    task.lane = _ALL
    try:
        value = evaluate()
    finally:
        task.lane = None
    if of_threads(value) and not differs(value):
        raise one_value("a block")
    return value


def _split(test: Callable[[], Any], values: tuple[Any, ...]) -> _Split:
    """For which threads a test holds. ``values``: those of the names that the branches read and assign."""
    task, held = machine().program, _assigned(test)
    if task.lane is None and differs(held):
        return _Split(task, dict(enumerate(held.handle.data.reshape(-1).astype(bool).tolist())), values)
    return _Split(task, {task.lane: truth(held)}, values)


def _split_all(calls_tid: bool, deciding: tuple[Any, ...], values: tuple[Any, ...]) -> _Split:
    """The threads that run a loop: all, if it calls ``tid`` or names that decide it differ, or the one that runs."""
    task = machine().program
    each = task.lane is None and (calls_tid or any(map(differs, deciding)))
    return _Split(task, dict.fromkeys(range(task.threads) if each else [task.lane], True), values)


class _Split:
    """Threads that run one after another, for each whether a test holds; None is the program as a whole."""

    def __init__(self, task: Task, holds: dict[int | None, bool], values: tuple[Any, ...]) -> None:
        self._task, self._holds, self._values = task, holds, values
        self._given: dict[int | None, tuple[Any, ...]] = {}
        self._left: dict[int | None, tuple[Any, ...]] = {}

    def threads(self, wanted: bool) -> Iterator[tuple[Any, ...]]:
        """The values of the names in each thread for which the test is ``wanted``, while that thread runs."""
        outer = self._task.lane
        try:
            for lane in [lane for lane, holds in self._holds.items() if holds is wanted]:
                self._task.lane = lane
                self._given[lane] = tuple(_own(value, lane) for value in self._values)
                yield self._given[lane]
        finally:
            self._task.lane = outer

    def keep(self, *values: Any) -> None:
        """What the running thread leaves in the names."""
        self._left[self._task.lane] = values

    def together(self) -> tuple[Any, ...]:
        """What is in the names now."""
        if len(self._holds) == 1:
            return next(iter(self._left.values()), self._values)
        return tuple(map(self._joined, range(len(self._values))))

    def _joined(self, place: int) -> Any:
        """What all threads have left in the name at ``place``: as before, if none of them has assigned it."""
        before = self._values[place]
        if all(left[place] is self._given[lane][place] for lane, left in self._left.items()):
            return before
        values = [self._left[lane][place] if lane in self._left else _own(before, lane) for lane in self._holds]
        if not all(isinstance(one, tl.tensor) and one.type == values[0].type for one in values):
            return _UNSET
        if values[0].type.is_block():
            return _UNSET  # a thread may have one while it runs
        origin = values[0].handle.origin
        for one in values:
            origin = joined(origin, one.handle.origin)
        return _tensor(np.concatenate([one.handle.data.reshape(1) for one in values]), values[0].type, origin)


FUNCTIONS: dict[str, Any] = {
    "read": _read,
    "assigned": _assigned,
    "split": _split,
    "split_all": _split_all,
    "unset": _UNSET,
}
"""What rewritten kernels call, by name."""
