# SPDX-License-Identifier: Apache-2.0
"""The short ways through Triton's language end where the long ones do."""

from __future__ import annotations

import inspect
import itertools
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from tdcoll.simulator import shortcuts
from tdcoll.testing import World

TYPES = (tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.bfloat16, tl.float32, tl.float64)
SHAPES = ((), (4,), (4, 1))
PAIRS = (((), ()), ((), (4,)), ((4,), ()), ((4,), (4,)), ((4,), (4, 1)))
NUMBERS = (0, 5, 32, -7, 2**31, 2**63, True, 0.5, -0.0, tl.constexpr(3), tl.constexpr(70))
NAMES = "add sub mul floordiv mod and_ or_ xor lshift rshift lt le gt ge eq ne"
OPERATORS = [getattr(operator, name) for name in NAMES.split()]


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
    assert [int(size) for size in result.shape] == [int(size) for size in shape]
    kinds = str(result.type), str(result.dtype), str(result.handle.dtype), data.dtype.str
    return *kinds, int(result.numel), data.shape, data.tobytes()


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``compare(function, cases)``: in a kernel, for each case of operands, with and without short ways."""

    def compare(function: Any, cases: Iterator[tuple[Any, ...]] | list[tuple[Any, ...]]) -> None:
        compared = []

        def host(pe: int) -> None:
            for operands in cases:
                short = outcome(function, *operands)
                with monkeypatch.context() as patch:
                    for owner, name, _ in shortcuts.shortcuts(check_overflow=False):
                        patch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))
                    assert short == outcome(function, *operands), operands
                compared.append(operands)

        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            World(1).run(host)
        assert len(compared) > 50

    return compare


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("compute", OPERATORS, ids=NAMES.split())
def test_operators(compute: Any, dtype: Any, compare: Any) -> None:
    def operands() -> Iterator[tuple[Any, Any]]:
        some = (3, 200, 0, 9) if dtype in (tl.uint32, tl.uint64, tl.int1) else (3, -200, 0, 9)
        for shape in SHAPES[:2]:
            tensor = block(some, dtype, shape)
            yield from ((tensor, number) for number in NUMBERS)
            yield from ((number, tensor) for number in NUMBERS if not isinstance(number, tl.constexpr))
        for shape, size in PAIRS:
            yield from ((block(some, dtype, shape), block((2, 7, 1, 31), other, size)) for other in TYPES)

    compare(compute, operands())


def test_an_operator_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above compares the long way with itself."""

    def refuse(*operands: Any) -> None:
        raise AssertionError("the long way")

    def host(pe: int) -> None:
        monkeypatch.setattr(type(triton_interpreter.interpreter_semantic), "binary_op_type_checking_impl", refuse)
        one, four, wide = block(3, tl.int32, ()), block((1, 2, 3, 4), tl.int32, (4,)), block(5, tl.int64, ())
        for lhs, rhs in itertools.product((one, four, wide), (one, four, wide, 5, tl.constexpr(5))):
            for compute in OPERATORS:
                compute(lhs, rhs)
        with pytest.raises(AssertionError, match="the long way"):
            block(3, tl.int8, ()) + 1

    World(1).run(host)


def test_pointers_and_casts(compare: Any) -> None:
    others = [*NUMBERS, *(block((2, 7, 1, 31), other, size) for other in TYPES for size in SHAPES)]
    address = tl.pointer_type(tl.int32)
    pointers = [block((4096, 8192, 64, 1 << 40), address, shape) for shape in SHAPES]
    compare(operator.add, list(itertools.product(pointers, others)))
    values = [block((3, 200, 0, 9), source, shape) for source in TYPES for shape in SHAPES]
    compare(lambda value, target: value.to(target), list(itertools.product(values, TYPES)))
