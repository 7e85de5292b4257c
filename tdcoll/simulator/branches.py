# SPDX-License-Identifier: Apache-2.0
"""Functions that rewritten kernels (:mod:`.rewrite`) call: the truth of tensors, and branches on
the thread index.

Python's ``and``, ``or`` and ``not`` ask for the truth of a tensor; compiled Triton computes with
it, and so do these: every tensor is evaluated, and only compile-time values cut an expression
short.

A test on the thread index cannot branch, because a program is one thread of control. Instead the
body of ``if tid(0) < n: ... else: ...`` runs once for each thread that the test selects, and
``tid(0)`` in it is that thread's index.

If the value of a name differs from thread to thread, for example ``t = tid(0) // 32``, the name has
a block of all values, of a shape that no other block has. Each thread that runs gets its own value.
A branch assigns no names.

Not possible: ``tid``, or a name that depends on it, anywhere else; and races between threads of one
block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from tdcoll.base.errors import TdcollError
from tdcoll.simulator.machine import machine
from tdcoll.simulator.tasks import Task

_ALL = -2
"""``Task.lane`` when an expression is evaluated for all threads at once."""

_EACH = (1, 1, 1, 1)
"""A block of the values of n threads has the shape ``[n, 1, 1, 1, 1]``."""


def thread_index(task: Task, axis: int) -> Any:
    """Return ``tid(axis)`` of the thread that ``task`` runs as."""
    if axis == 0 and task.lane is None:
        raise one_value("tid()")
    if axis == 0 and task.lane == _ALL:
        return _tensor(np.arange(task.threads, dtype=np.int32), tl.int32)
    return _tensor(np.array([task.lane if axis == 0 else 0], np.int32), tl.int32)


def one_value(what: str) -> TdcollError:
    """Return the error for a value that has to be the same for all threads, if it isn't."""
    return TdcollError(
        f"{what} is different in each thread, and the simulator runs a program as one: use it in the test of an `if` "
        "or inside of it"
    )


def of_threads(value: Any) -> bool:
    """Return whether ``value`` has a scalar or a block for each thread."""
    data = getattr(value.handle, "data", None) if isinstance(value, tl.tensor) else None
    return data is not None and data.ndim == 1 + len(_EACH) and data.shape[1] == 1


def differs(value: Any) -> bool:
    """Return whether ``value`` has a scalar for each thread."""
    return of_threads(value) and value.handle.data.shape[1:] == _EACH


def _tensor(data: Any, kind: Any, origin: Any = None) -> Any:
    """Return a scalar, or the values of all threads."""
    handle = triton_interpreter.TensorHandle(
        data if data.size == 1 else data.reshape(-1, *_EACH), kind
    )
    handle.origin = origin
    return tl.tensor(
        handle, kind if data.size == 1 else tl.block_type(kind, list(handle.data.shape))
    )


def _read(name: str, value: Any) -> Any:
    """Return the value of a name that may differ from thread to thread: that of the thread that
    runs."""
    lane = machine().program.lane
    if lane is None and of_threads(value):
        raise one_value(name)
    if lane in (None, _ALL) or not differs(value):
        return value
    return _tensor(value.handle.data[lane].reshape(1), value.type.scalar, value.handle.origin)


def _assigned(evaluate: Callable[[], Any]) -> Any:
    """Return the value of an expression: of all threads, outside of branches on the thread
    index."""
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


def _split(test: Callable[[], Any]) -> Callable[[bool], Iterator[None]]:
    """Return a function that runs, one after another, the threads for which the test is what it is
    given."""
    task = machine().program
    held = _assigned(test)
    if task.lane is None and differs(held):
        holds: dict[int | None, bool] = dict(
            enumerate(held.handle.data.reshape(-1).astype(bool).tolist())
        )
    else:
        holds = {task.lane: _truth(held)}

    def threads(wanted: bool) -> Iterator[None]:
        outer = task.lane
        try:
            for lane in [lane for lane, one in holds.items() if one is wanted]:
                task.lane = lane
                yield
        finally:
            task.lane = outer

    return threads


def _truth(value: Any) -> bool:
    """Return the truth for ``if`` and ``while``: of a tensor of one value only."""
    if isinstance(value, tl.tensor) and value.handle.data.size != 1:
        raise ValueError(
            f"a block of shape {list(value.handle.data.shape)} is neither true nor false: `if` and `while` take "
            "scalars; use a mask, tl.where, or a reduction such as tl.max"
        )
    return bool(value)


def _logical(sign: str, ends: bool, *values: Callable[[], Any]) -> Any:
    """Evaluate ``and`` and ``or``: a compile-time value that is ``ends`` decides; tensors are all
    combined."""
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
    if len(tensors) > 1:
        for operand in tensors:
            _require_truth(operand, sign)
    combined = tensors.pop()
    while tensors:
        combined = getattr(tensors.pop(), f"logical_{sign}")(combined)
    return combined


def _not(value: Any) -> Any:
    if not isinstance(value, tl.tensor):
        return not value
    _require_truth(value, "not")
    return value.__not__()


def _require_truth(operand: Any, sign: str) -> None:
    """Raise ``TypeError`` unless ``operand`` is boolean, or a pointer, which is true if it isn't
    null."""
    kind = operand.type.scalar
    if not (kind.is_int1() or kind.is_ptr()):
        raise TypeError(
            f"`{sign}` of {kind}: Triton has it for booleans and pointers only; compare first, such as `x != 0`"
        )


FUNCTIONS: dict[str, Any] = {
    "and": partial(_logical, "and", False),
    "or": partial(_logical, "or", True),
    "not": _not,
    "truth": _truth,
    # of an `assert`
    "every": lambda value: bool(value.handle.data.all() if isinstance(value, tl.tensor) else value),
    "read": _read,
    "assigned": _assigned,
    "split": _split,
}
"""By name."""
