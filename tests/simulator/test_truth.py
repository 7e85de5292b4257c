# SPDX-License-Identifier: Apache-2.0
"""`and`, `or`, `not`, `if` and comparisons of tensors mean in a simulated kernel what the compiler makes of them."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

import tdcoll
from tdcoll.language.jit import jit
from tdcoll.testing import World


def launch(kernel, *arguments, **options):
    World(1).run(lambda pe: kernel[(1,)](*arguments, **options))


@jit
def blocks(out, m, n):
    i = tl.arange(0, 8)
    tl.store(out + i, 1, mask=(i < m) and (i < n))
    tl.store(out + 8 + i, 1, mask=(i < m) or (i >= n))
    tl.store(out + 16 + i, 1, mask=not (i < m))
    inside = (i > 0) and (i < n) and (not (i > 1) or (m == 7) or i > 2)
    tl.store(out + 24 + i, 1, mask=inside)


def test_blocks_are_combined_element_by_element():
    out = torch.zeros(4, 8, dtype=torch.int32)
    launch(blocks, out, 2, 6)
    assert out.tolist() == [
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 1],
        [0, 0, 1, 1, 1, 1, 1, 1],
        [0, 1, 0, 1, 1, 1, 0, 0],
    ]


@jit
def scalars(out, x, y, FLAG: tl.constexpr, NOTHING: tl.constexpr):
    if x > 1 and y > 1:
        tl.store(out, 1)
    if x > 1 or y > 1:
        tl.store(out + 1, 1)
    if not (x > 1):
        tl.store(out + 2, 1)
    if FLAG and x > 1:
        tl.store(out + 3, 1)
    if not FLAG or x > 1:
        tl.store(out + 4, 1)
    if NOTHING is not None and tl.load(NOTHING) > 0:  # a compile-time value cuts it short
        tl.store(out + 5, 1)
    z = 3 if x > 1 and FLAG else 4
    tl.store(out + 6, z)
    n = 0
    while n < x and n < 5:
        n += 1
    tl.store(out + 7, n)


@pytest.mark.parametrize(
    ("x", "y", "flag", "expected"),
    [
        (2, 2, True, [1, 1, 0, 1, 1, 0, 3, 2]),
        (2, 0, False, [0, 1, 0, 0, 1, 0, 4, 2]),
        (0, 2, True, [0, 1, 1, 0, 0, 0, 4, 0]),
        (9, 0, True, [0, 1, 0, 1, 1, 0, 3, 5]),
    ],
)
def test_scalars(x, y, flag, expected):
    out = torch.zeros(8, dtype=torch.int32)
    launch(scalars, out, x, y, flag, None)
    assert out.tolist() == expected


@jit
def guarded(out, pointer):
    if pointer.to(tl.int64) != 0 and tl.load(pointer) > 0:
        tl.store(out, 1)


def test_both_sides_are_evaluated():
    """Compiled Triton loads from the null pointer; so does the simulator, and says so."""
    out = torch.zeros(1, dtype=torch.int32)
    launch(guarded, out, torch.ones(1, dtype=torch.int32))
    assert out.item() == 1
    with pytest.raises(ValueError, match="would load from a null pointer"):
        launch(guarded, out, torch.zeros(0, dtype=torch.int32))


@jit
def and_of_int32(out, x):
    if x and tl.load(out) == 0:
        tl.store(out, 1)


@jit
def not_of_int32(out, x):
    if not x:
        tl.store(out, 1)


@pytest.mark.parametrize(("kernel", "sign"), [(and_of_int32, "and"), (not_of_int32, "not")])
def test_integers_are_no_truth_values(kernel, sign):
    """The compiler refuses these."""
    with pytest.raises(TypeError, match=f"`{sign}` of int32: Triton has it for booleans and pointers only"):
        launch(kernel, torch.zeros(1, dtype=torch.int32), 3)


@jit
def pointers(out, p, n):
    if p and n != 3:
        tl.store(out, 1)
    if n == 3 or p:
        tl.store(out + 1, 1)
    if not p:
        tl.store(out + 2, 1)
    i = tl.arange(0, 4)
    some = tl.where(i < 2, p, p - p.to(tl.int64) // 4)  # the others are null
    tl.store(out + 4 + i, 1, mask=some and i > 0)


@pytest.mark.parametrize(
    ("there", "n", "expected"),
    [
        (True, 2, [1, 1, 0, 0, 0, 1, 0, 0]),
        (True, 3, [0, 1, 0, 0, 0, 1, 0, 0]),
        (False, 2, [0, 0, 1, 0, 0, 0, 0, 0]),
        (False, 3, [0, 1, 1, 0, 0, 0, 0, 0]),
    ],
)
def test_a_pointer_is_true_if_it_is_not_null(there, n, expected):
    """`truth_of_pointers` of stores_and_waits_checks.py shows the same on GPUs, and `tests/compile` compiles it."""
    out = torch.zeros(8, dtype=torch.int32)
    launch(pointers, out, torch.zeros(4 * there, dtype=torch.int32), n)
    assert out.tolist() == expected


@jit
def branch(out):
    if tl.arange(0, 8) < 4:
        tl.store(out, 1)


@jit
def loop(out):
    while tl.load(out + tl.arange(0, 8)) < 4:
        tl.store(out + tl.arange(0, 8), 5)


@jit
def conditional(out):
    tl.store(out, 1 if tl.arange(0, 8) < 4 else 2)


@pytest.mark.parametrize("kernel", [branch, loop, conditional])
def test_a_block_is_neither_true_nor_false(kernel):
    with pytest.raises(ValueError, match=r"a block of shape \[8\] is neither true nor false"):
        launch(kernel, torch.zeros(8, dtype=torch.int32))


@jit
def asserted(n):
    assert tl.arange(0, 8) < n


def test_assert_asks_for_every_value():
    launch(asserted, 8)
    with pytest.raises(AssertionError):
        launch(asserted, 4)


@jit
def chained(out, n):
    i = tl.arange(0, 8)
    tl.store(out + i, 1, mask=1 <= i < n)


def test_chained_comparisons():
    """The compiler has them from 3.9 on."""
    out = torch.zeros(8, dtype=torch.int32)
    if hasattr(interpreter.ASTTransformer, "visit_Compare"):
        launch(chained, out, 4)
        assert out.tolist() == [0, 1, 1, 1, 0, 0, 0, 0]
    else:
        with pytest.raises(tdcoll.TdcollError, match=r"chained, line 3 .*no chained comparisons before 3\.9"):
            launch(chained, out, 4)
