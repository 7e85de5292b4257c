# SPDX-License-Identifier: Apache-2.0
"""bf16 and fp8 in simulated kernels, compared with PyTorch's, which rounds as GPUs do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl

from tdcoll.language.jit import jit
from tdcoll.runtime.simulator import floats
from tdcoll.testing import World

BF16, FP8 = torch.bfloat16, {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
N = 64
FUNCTION = None
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")  # numpy's, as for fp32


@jit
def unary(x, out):
    i = tl.arange(0, 64)
    tl.store(out + i, FUNCTION(tl.load(x + i)))


@jit
def binary(x, y, out):
    i = tl.arange(0, 64)
    tl.store(out + i, FUNCTION(tl.load(x + i), tl.load(y + i)))


@jit
def reduction(x, out):
    tl.store(out, FUNCTION(tl.load(x + tl.arange(0, 64))))


@jit
def product(a, b, out):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    at = 16 * i + j
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@jit
def adding(out, value):
    tl.atomic_add(out + tl.arange(0, 4) % 2, tl.load(value + tl.arange(0, 4)), mask=tl.arange(0, 4) < 3)


@jit
def smaller(a, b):
    return tl.where(a < b, a, b)


@jit
def plus(a, b):
    return a + b


@jit
def larger_with_index(a, i, b, j):
    second = b > a
    return tl.where(second, b, a), tl.where(second, j, i)


@jit
def index_of_largest(x, out):
    i = tl.arange(0, 64)
    _, at = tl.reduce((tl.load(x + i), i), 0, larger_with_index)
    tl.store(out, at)


def launch(kernel, function, *tensors):
    global FUNCTION
    FUNCTION = function
    World(1).run(lambda pe: kernel[(1,)](*tensors))


@pytest.fixture
def x():
    """Values of both signs, ties of roundings among the sums, and the special ones."""
    values = torch.randn(N, generator=torch.Generator().manual_seed(1)) * 8
    values[:8] = torch.tensor([0.0, -0.0, 1.0, -1.0, 256.0, 3.0e38, 1e-39, -2.5])
    return values.to(BF16)


@pytest.fixture
def y(x):
    values = torch.randn(N, generator=torch.Generator().manual_seed(2)) * 8
    values[:8] = torch.tensor([1.0, 2.0, 1 / 256, 2.0**-8, 1.0, 3.0e38, 1e-39, float("inf")])
    return values.to(BF16)


BINARY = {
    "+": (lambda a, b: a + b, lambda a, b: a + b),
    "-": (lambda a, b: a - b, lambda a, b: a - b),
    "*": (lambda a, b: a * b, lambda a, b: a * b),
    "/": (lambda a, b: (a / b).to(tl.bfloat16), lambda a, b: (a.float() / b.float()).to(BF16)),
    "two roundings": (lambda a, b: (a + b) * a, lambda a, b: (a + b) * a),
    "with a constant": (lambda a, b: a * 0.3 + 1, lambda a, b: a * torch.tensor(0.3, dtype=BF16) + 1),
    "maximum": (lambda a, b: tl.maximum(a, b).to(tl.bfloat16), lambda a, b: torch.maximum(a, b)),
    "minimum": (lambda a, b: tl.minimum(a, b).to(tl.bfloat16), lambda a, b: torch.minimum(a, b)),
    "fma": (
        lambda a, b: tl.fma(a, b, b),
        lambda a, b: (a.double() * b.double() + b.double()).float().to(BF16),
    ),
    "where": (lambda a, b: tl.where(a > b, a, b), lambda a, b: torch.where(a > b, a, b)),
    "a scalar's comparison for all": (
        lambda a, b: tl.where((tl.max(a, 0) > 0.5) & (a > b), a, b),
        lambda a, b: torch.where(a > b, a, b),
    ),
    "full": (lambda a, b: tl.full((64,), 1.1, tl.bfloat16) + a, lambda a, b: torch.full((64,), 1.1, dtype=BF16) + a),
}


@pytest.mark.parametrize("how", BINARY)
def test_arithmetic(how, x, y):
    ours, theirs = BINARY[how]
    out = torch.zeros(N, dtype=BF16)
    launch(binary, ours, x, y, out)
    torch.testing.assert_close(out, theirs(x, y), rtol=0, atol=0, equal_nan=True)


COMPARISONS = ["__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"]


@pytest.mark.parametrize("how", COMPARISONS)
def test_comparisons(how, x, y):
    """Zeros of both signs are equal; negative numbers are ordered; a mask is a mask."""
    y = torch.where(torch.arange(N) % 3 == 0, x, y)
    out = torch.zeros(N, dtype=torch.int32)
    launch(binary, lambda a, b: (getattr(a, how)(b) & (a == a)).to(tl.int32), x, y, out)
    assert torch.equal(out.bool(), getattr(x, how)(y))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda v: -v, lambda v: -v),
        (lambda v: tl.abs(v), lambda v: v.abs()),
        (lambda v: tl.clamp(v, -2.0, 2.0).to(tl.bfloat16), lambda v: v.clamp(-2, 2)),
        (lambda v: tl.exp(v.to(tl.float32)).to(tl.bfloat16), lambda v: v.float().exp().to(BF16)),
        (lambda v: tl.sort(v), lambda v: v.sort().values),
    ],
    ids=["-", "abs", "clamp", "exp", "sort"],
)
def test_functions(function, expected, x):
    x[5] = 1.0  # no infinite sums
    out = torch.zeros(N, dtype=BF16)
    launch(unary, function, x, out)
    torch.testing.assert_close(out, expected(x), rtol=0, atol=0)


CASTS = [torch.float64, torch.float32, torch.float16, torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool]
TRITON = dict(
    zip(CASTS, [tl.float64, tl.float32, tl.float16, tl.int8, tl.int32, tl.int64, tl.uint8, tl.int1], strict=True)
)


@pytest.mark.parametrize("kind", CASTS, ids=str)
def test_casts_of_bf16(kind):
    """To another type and from it. Halves and thirds of units show the rounding, odd numbers above 256 as well."""
    values = (torch.arange(N).double() - 20) * (1 + 2.0**-8 + 2.0**-30)
    if kind == torch.uint8:
        values = values.abs()
    narrow = values.to(BF16)
    out = torch.zeros(N, dtype=kind)
    launch(unary, lambda v: v.to(TRITON[kind]), narrow, out)
    assert torch.equal(out, narrow.to(kind))
    wide = (torch.arange(N) * 37 - 300).to(kind) if not kind.is_floating_point else (values * 37).to(kind)
    back = torch.zeros(N, dtype=BF16)
    launch(unary, lambda v: v.to(tl.bfloat16), wide, back)
    assert torch.equal(back, wide.float().to(BF16))


def test_fp32_is_rounded_to_nearest_even_and_fp64_once():
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, float("nan")], dtype=torch.float64)
    source = torch.cat([ties, ties[:1] + 2.0**-40, torch.zeros(N - 5)])
    expected = [1.0, 1 + 2.0**-6, 1 + 2.0**-7]
    for wide in (source, source.float()):
        out = torch.zeros(N, dtype=BF16)
        launch(unary, lambda v: v.to(tl.bfloat16), wide, out)
        assert out[:3].tolist() == expected
        assert out[3].isnan()
        assert out[4] == (1 + 2.0**-7 if wide.dtype == torch.float64 else 1.0)  # not rounded by way of fp32


def test_every_bf16_and_fp8_value():
    bits = np.arange(65536, dtype=np.uint16)
    theirs = torch.from_numpy(bits.view(np.int16)).view(BF16)
    ours = floats.to_float32(bits, tl.bfloat16)
    assert np.array_equal(ours, theirs.float().numpy(), equal_nan=True)
    again = floats.from_float32(ours, tl.bfloat16)
    assert np.array_equal(again[~np.isnan(ours)], bits[~np.isnan(ours)])
    wide = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    rounded = torch.from_numpy(wide).to(BF16).float().numpy()
    assert np.array_equal(
        floats.to_float32(floats.from_float32(wide, tl.bfloat16), tl.bfloat16), rounded, equal_nan=True
    )
    for kind, theirs in FP8.items():
        bits = np.arange(256, dtype=np.uint8)
        ours = floats.to_float32(bits, kind)
        assert np.array_equal(ours, torch.from_numpy(bits).view(theirs).float().numpy(), equal_nan=True)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda v: tl.sum(v).to(tl.bfloat16), lambda v: v.float().sum().to(BF16)),
        (lambda v: tl.max(v).to(tl.bfloat16), lambda v: v.max()),
        (lambda v: tl.min(v).to(tl.bfloat16), lambda v: v.min()),
        (lambda v: tl.reduce(v, 0, smaller), lambda v: v.min()),
        (lambda v: tl.reduce(v, 0, tl.standard._sum_combine), lambda v: _added_up(v)),
        (
            lambda v: tl.sum(tl.where(tl.arange(0, 64) == 63, tl.associative_scan(v, 0, plus), 0)),
            lambda v: _added_up(v),
        ),
    ],
    ids=["sum", "max", "min", "own", "bf16 sum", "bf16 scan"],
)
def test_reductions(function, expected, x):
    x = x.abs() - 3
    x[5] = 1.0
    out = torch.zeros(1, dtype=BF16)
    launch(reduction, function, x, out)
    assert out.item() == expected(x).item()


def _added_up(values):
    """With a rounding after each addition."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def test_reduction_of_a_pair(x):
    x[5] = 1.0
    out = torch.zeros(1, dtype=torch.int32)
    launch(index_of_largest, None, x, out)
    assert out.item() == x.argmax().item()


def test_dot(x, y):
    """Products are exact, sums are in fp32."""
    a, b = torch.randint(-64, 64, (2, 16, 16), generator=torch.Generator().manual_seed(3)).to(BF16) / 8
    out = torch.zeros(16, 16)
    launch(product, None, a, b, out)
    assert torch.equal(out, a.float() @ b.float())


@pytest.mark.parametrize("kind", FP8.values(), ids=str)
def test_dot_of_fp8(kind):
    a, b = (torch.randint(-8, 8, (2, 16, 16), generator=torch.Generator().manual_seed(3)) / 4).to(kind)
    out = torch.zeros(16, 16)
    launch(product, None, a, b, out)
    assert torch.equal(out, a.float() @ b.float())


def test_atomic_addition():
    """Lanes that hit the same element add one after another; those that are masked off do not."""
    out, value = torch.tensor([256.0, 1.0]).to(BF16), torch.tensor([1.0, 0.25, 1.0, 99.0]).to(BF16)
    launch(adding, None, out, value)
    assert out.tolist() == [256.0, 1.25]  # 257 is no bf16, and a tie


@pytest.mark.parametrize("kind", FP8, ids=str)
def test_fp8_is_converted_and_nothing_else(kind):
    """Rounded to nearest even and saturated, as NVIDIA's instructions do; Triton does not compile arithmetic on it."""
    values = torch.linspace(-20, 20, N)
    values[:6] = torch.tensor([1e9, -1e9, 17.0, 19.0, 1.0625, 1.1875])
    out = torch.zeros(N, dtype=FP8[kind])
    for wide in (values, values.half(), values.to(BF16)):
        launch(unary, lambda v: v.to(kind), wide, out)
        limit = torch.finfo(FP8[kind]).max
        assert torch.equal(out.float(), wide.float().clamp(-limit, limit).to(FP8[kind]).float())
        back = torch.zeros_like(wide)
        launch(unary, lambda v: v, out, back)
        assert torch.equal(back.float(), out.float())
    with pytest.raises(TypeError, match=f"Triton has no arithmetic on {kind}: cast to a wider type first"):
        launch(binary, lambda a, b: a + b, out, out, out)
    with pytest.raises(ValueError, match=r"fp_downcast_rounding='rtz' to .* is not simulated"):
        launch(unary, lambda v: v.to(tl.bfloat16, fp_downcast_rounding="rtz"), values, torch.zeros(N, dtype=BF16))
