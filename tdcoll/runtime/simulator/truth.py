# SPDX-License-Identifier: Apache-2.0
"""The truth of tensors in rewritten kernels (:mod:`.rewrite`), as in compiled Triton.

Every tensor of ``and``, ``or`` and ``not`` is evaluated, and only compile-time values cut an expression short.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import triton.language as tl

__all__ = ["FUNCTIONS", "truth"]


def truth(value: Any) -> bool:
    """Return the truth that ``if`` and ``while`` ask for: of a tensor of one value only."""
    if isinstance(value, tl.tensor) and value.handle.data.size != 1:
        raise ValueError(
            f"a block of shape {list(value.handle.data.shape)} is neither true nor false: `if` and `while` take "
            "scalars; use a mask, tl.where, or a reduction such as tl.max"
        )
    return bool(value)


def _every(value: Any) -> bool:
    """Return the truth that ``assert`` asks for: of a block, that of every value."""
    return bool(value.handle.data.all()) if isinstance(value, tl.tensor) else bool(value)


def _logical(sign: str, ends: bool, *values: Callable[[], Any]) -> Any:
    """``and`` and ``or``: a compile-time value that is ``ends`` decides; tensors are all evaluated and combined."""
    tensors, last = [], None
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
    """Raise ``TypeError`` unless ``operand`` is boolean, or a pointer, which is true if it isn't null."""
    kind = operand.type.scalar
    if not (kind.is_int1() or kind.is_ptr()):
        raise TypeError(
            f"`{sign}` of {kind}: Triton has it for booleans and pointers only; compare first, such as `x != 0`"
        )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "and": partial(_logical, "and", False),
    "or": partial(_logical, "or", True),
    "not": _not,
    "truth": truth,
    "every": _every,
}
"""What rewritten kernels call, by name."""
