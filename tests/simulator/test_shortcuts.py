# SPDX-License-Identifier: Apache-2.0
"""The short ways through Triton's language end where the long ones do."""

from __future__ import annotations

import inspect
import itertools
import operator
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from tdcoll.runtime.simulator import shortcuts
from tdcoll.testing import World

TYPES = (tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.bfloat16, tl.float32, tl.float64)
SHAPES = ((), (4,), (4, 1))
NUMBERS = (0, 5, 32, -7, 2**31, 2**63, True, 0.5, -0.0, tl.constexpr(3), tl.constexpr(70))
OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def block(values: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """A tensor; a scalar for the shape ``()``."""
    data = np.resize(np.array(values), shape or (1,)).astype(triton_interpreter._get_np_dtype(dtype))
    kind = tl.block_type(dtype, list(shape)) if shape else dtype
    return tl.tensor(triton_interpreter.TensorHandle(data, dtype), kind)


def outcome(function: Any, *operands: Any) -> tuple[Any, ...]:
    """What comes of it, in a form that compares: type, bits and what the handle says; or the error."""
    try:
        result = function(*operands)
    except Exception as error:
        return type(error), str(error)
    data, shape = result.handle.data, getattr(result.type, "shape", ())
    assert [int(extent) for extent in result.shape] == [int(extent) for extent in shape]
    kinds = str(result.type), str(result.dtype), str(result.handle.dtype), data.dtype.str
    return *kinds, int(result.numel), data.shape, data.tobytes()


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch):
    """``long_way(function, *operands)``: its outcome without short ways."""

    def compute(function: Any, *operands: Any) -> tuple[Any, ...]:
        with monkeypatch.context() as patch:
            for owner, name, _ in shortcuts.shortcuts(check_overflow=False):
                patch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))
            return outcome(function, *operands)

    return compute


def in_kernel(body: Any) -> None:
    """Run ``body`` where Triton's language is as in kernels."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        World(1).run(lambda pe: body())


def operands(dtype: Any) -> Iterator[tuple[Any, Any]]:
    """A tensor of ``dtype`` and another operand, both ways around."""
    some = (3, 200, 0, 9) if dtype in (tl.uint32, tl.uint64, tl.int1) else (3, -200, 0, 9)
    for shape in SHAPES:
        for number in NUMBERS:
            yield block(some, dtype, shape), number
            if not isinstance(number, tl.constexpr):
                yield number, block(some, dtype, shape)
        for other, shape_of_other in itertools.product(TYPES, SHAPES):
            yield block(some, dtype, shape), block((2, 7, 1, 31), other, shape_of_other)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sign", OPERATORS)
def test_operators(sign: str, dtype: Any, long_way) -> None:
    compared = []

    def body() -> None:
        for lhs, rhs in operands(dtype):
            short = outcome(OPERATORS[sign], lhs, rhs)
            assert short == long_way(OPERATORS[sign], lhs, rhs), f"{lhs} {sign} {rhs}"
            compared.append(short)

    in_kernel(body)
    assert len(compared) > 100


def test_an_operator_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above compares the long way with itself."""

    def refuse(*operands: Any) -> None:
        raise AssertionError("the long way")

    def body() -> None:
        monkeypatch.setattr(type(triton_interpreter.interpreter_semantic), "binary_op_type_checking_impl", refuse)
        one, four, wide = block(3, tl.int32, ()), block((1, 2, 3, 4), tl.int32, (4,)), block(5, tl.int64, ())
        for lhs, rhs in itertools.product((one, four, wide), (one, four, wide, 5, tl.constexpr(5))):
            for compute in OPERATORS.values():
                compute(lhs, rhs)
        with pytest.raises(AssertionError, match="the long way"):
            block(3, tl.int8, ()) + 1

    in_kernel(body)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pointers(shape: tuple[int, ...], long_way) -> None:
    compared = []

    def body() -> None:
        pointer = block((4096, 8192, 64, 1 << 40), tl.pointer_type(tl.int32), shape)
        others = [*NUMBERS, *(block((2, 7, 1, 31), other, size) for other in TYPES for size in SHAPES)]
        for other in others:
            assert outcome(operator.add, pointer, other) == long_way(operator.add, pointer, other), str(other)
            compared.append(other)

    in_kernel(body)
    assert compared


def test_casts(long_way) -> None:
    compared = []

    def body() -> None:
        for source, target, shape in itertools.product(TYPES, TYPES, SHAPES):
            value = block((3, 200, 0, 9), source, shape)
            short = outcome(lambda tensor, target=target: tensor.to(target), value)
            assert short == long_way(lambda tensor, target=target: tensor.to(target), value), f"{source} to {target}"
            compared.append(short)

    in_kernel(body)
    assert len(compared) == len(TYPES) ** 2 * len(SHAPES)


def test_everything_is_put_back() -> None:
    kept = [(owner, name, owner.__dict__[name]) for owner, name, _ in shortcuts.shortcuts(check_overflow=False)]
    World(1).run(lambda pe: None)
    assert kept
    for owner, name, function in kept:
        assert owner.__dict__[name] is function, name
