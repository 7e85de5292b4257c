# SPDX-License-Identifier: Apache-2.0
"""What is true in a kernel: blocks, scalars and pointers in conditions."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from cases import launch, zeros

from tdcoll.language.jit import jit


@jit
def blocks(out, m, n):
    i = tl.arange(0, 8)
    tl.store(out + i, 1, mask=(i < m) and (i < n))
    tl.store(out + 8 + i, 1, mask=(i < m) or (i >= n))
    tl.store(out + 16 + i, 1, mask=not (i < m))
    inside = (i > 0) and (i < n) and (not (i > 1) or (m == 7) or i > 2)
    tl.store(out + 24 + i, 1, mask=inside)


def test_blocks_are_combined_element_by_element():
    out = zeros(4, 8)
    launch(blocks, out, 2, 6)
    assert ["".join(map(str, row)) for row in out.tolist()] == [
        "11000000",
        "11000011",
        "00111111",
        "01011100",
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
    out = zeros(8)
    launch(scalars, out, x, y, flag, None)
    assert out.tolist() == expected


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


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("there", [True, False])
def test_a_pointer_is_true_if_it_is_not_null(there, n):
    """`truth_of_pointers` of stores_and_waits_checks.py shows the same on GPUs, and `tests/compile`
    compiles it."""
    out = zeros(8)
    launch(pointers, out, zeros(4 * there), n)
    assert out.tolist() == [there and n != 3, there or n == 3, not there, 0, 0, there, 0, 0]


@jit
def guarded(out, pointer):
    if pointer.to(tl.int64) != 0 and tl.load(pointer) > 0:
        tl.store(out, 1)


@jit
def asserted(n):
    assert tl.arange(0, 8) < n


@jit
def chained(out, n):
    i = tl.arange(0, 8)
    tl.store(out + i, 1, mask=1 <= i < n)


def test_both_sides_are_evaluated_and_every_value_is_asserted():
    """Compiled Triton loads from the null pointer; so does the simulator, and says so."""
    out = zeros(1)
    launch(guarded, out, torch.ones(1, dtype=torch.int32))
    assert out.item() == 1
    with pytest.raises(ValueError, match="would load from a null pointer"):
        launch(guarded, out, zeros(0))
    launch(asserted, 8)
    with pytest.raises(AssertionError):
        launch(asserted, 4)


@pytest.mark.skipif(
    not hasattr(interpreter.ASTTransformer, "visit_Compare"), reason="Triton has them from 3.9 on"
)
def test_chained_comparisons():
    out = zeros(8)
    launch(chained, out, 4)
    assert out.tolist() == [0, 1, 1, 1, 0, 0, 0, 0]
