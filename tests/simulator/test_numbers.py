# SPDX-License-Identifier: Apache-2.0
"""bf16 and fp8 in simulated kernels, compared with PyTorch, which rounds as GPUs do; no functions
of CUDA's library."""

from __future__ import annotations

import operator
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton.language as tl
from cases import device, elementwise
from triton.language.extra import libdevice
from triton.language.extra.libdevice import tanh as imported_by_name

import tdcoll
from tdcoll.language.jit import jit
from tdcoll.simulator import floats
from tdcoll.testing import World

BF16, FP8 = torch.bfloat16, {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
N = 64
# numpy's, as for fp32
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")


def computed(function, out, *inputs):
    World(1).run(lambda pe: elementwise(function, out, *inputs))
    return out


def reduced(function, out, x):
    """``out[0] = function(x)`` of a block of 64."""
    World(1).run(
        lambda pe: device(
            lambda out, x: tl.store(out, function(tl.load(x + tl.arange(0, 64)))), out, x
        )
    )
    return out.item()


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


@pytest.fixture
def x():
    """Values of both signs, ties of roundings among the sums, and the special ones."""
    values = torch.randn(N, generator=torch.Generator().manual_seed(1)) * 8
    values[:8] = torch.tensor([0.0, -0.0, 1.0, -1.0, 256.0, 3.0e38, 1e-39, -2.5])
    return values.to(BF16)


@pytest.fixture
def y():
    values = torch.randn(N, generator=torch.Generator().manual_seed(2)) * 8
    values[:8] = torch.tensor([1.0, 2.0, 1 / 256, 2.0**-8, 1.0, 3.0e38, 1e-39, float("inf")])
    return values.to(BF16)


def narrow(values):
    return values.to(tl.bfloat16)


FUNCTIONS = {
    "neg": (operator.neg, operator.neg),
    "abs": (lambda v: tl.abs(v), torch.abs),
    "clamp": (lambda v: narrow(tl.clamp(v, -2.0, 2.0)), lambda v: v.clamp(-2, 2)),
    "exp": (lambda v: narrow(tl.exp(v.to(tl.float32))), lambda v: v.float().exp().to(BF16)),
    "sort": (lambda v: tl.sort(v), lambda v: v.sort().values),
    **{name: (getattr(operator, name),) * 2 for name in ("add", "sub", "mul")},
    "two roundings": (lambda a, b: (a + b) * a,) * 2,
    "/": (lambda a, b: narrow(a / b), lambda a, b: (a.float() / b.float()).to(BF16)),
    "with a constant": (
        lambda a, b: a * 0.3 + 1,
        lambda a, b: a * torch.tensor(0.3, dtype=BF16) + 1,
    ),
    "maximum": (lambda a, b: narrow(tl.maximum(a, b)), torch.maximum),
    "minimum": (lambda a, b: narrow(tl.minimum(a, b)), torch.minimum),
    "fma": (
        lambda a, b: tl.fma(a, b, b),
        lambda a, b: (a.double() * b.double() + b.double()).float().to(BF16),
    ),
    "where": (lambda a, b: tl.where(a > b, a, b), lambda a, b: torch.where(a > b, a, b)),
    "for all": (
        lambda a, b: tl.where((tl.max(a, 0) > 0.5) & (a > b), a, b),
        lambda a, b: torch.where(a > b, a, b),
    ),
    "full": (
        lambda a, b: tl.full((64,), 1.1, tl.bfloat16) + a,
        lambda a, b: torch.full((64,), 1.1, dtype=BF16) + a,
    ),
}


@pytest.mark.parametrize("how", FUNCTIONS)
def test_arithmetic(how, x, y):
    ours, theirs = FUNCTIONS[how]
    inputs = (x,) if how in ("neg", "abs", "clamp", "exp", "sort") else (x, y)
    out = computed(ours, torch.zeros(N, dtype=BF16), *inputs)
    torch.testing.assert_close(out, theirs(*inputs), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("how", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_comparisons(how, x, y):
    """Zeros of both signs are equal; negative numbers are ordered; a mask is a mask."""
    y, compare = torch.where(torch.arange(N) % 3 == 0, x, y), getattr(operator, how)
    out = computed(
        lambda a, b: (compare(a, b) & (a == a)).to(tl.int32),
        torch.zeros(N, dtype=torch.int32),
        x,
        y,
    )
    assert torch.equal(out.bool(), compare(x, y))


@pytest.mark.parametrize(
    "name", ["float64", "float32", "float16", "int8", "int32", "int64", "uint8", "bool"]
)
def test_casts_of_bf16(name):
    """To another type and from it. Halves and thirds of units show the rounding, odd numbers above
    256 as well."""
    kind, tritons = getattr(torch, name), getattr(tl, "int1" if name == "bool" else name)
    values = (torch.arange(N).double() - 20) * (1 + 2.0**-8 + 2.0**-30)
    if kind == torch.uint8:
        values = values.abs()
    source = values.to(BF16)
    out = computed(lambda v: v.to(tritons), torch.zeros(N, dtype=kind), source)
    assert torch.equal(out, source.to(kind))
    wide = (
        (torch.arange(N) * 37 - 300).to(kind)
        if not kind.is_floating_point
        else (values * 37).to(kind)
    )
    back = computed(narrow, torch.zeros(N, dtype=BF16), wide)
    assert torch.equal(back, wide.float().to(BF16))


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_a_fused_sum_is_the_nearest_number(kind):
    """Also where the product nearly cancels, and where fp64 rounds the sum to a tie."""
    chosen = np.random.default_rng(0)
    x = chosen.standard_normal(2000).astype(kind)
    y = chosen.standard_normal(2000).astype(kind)
    z = chosen.standard_normal(2000).astype(kind)
    z[:500] = (-x * y)[:500]
    z[500:1000] = (z * kind(2.0**-12))[500:1000]
    x[1000], y[1000] = kind(1) + np.finfo(kind).eps, kind(1)  # a tie but for the last addend
    x[1001:1003], y[1001:1003] = kind(1), kind(1) + np.finfo(kind).eps
    z[1000:1003] = np.finfo(kind).eps / 2, np.finfo(kind).eps / 2, 2.0**-24
    got = floats.fused_multiply_add(x, y, z)
    assert got.dtype == kind
    for a, b, c, made in zip(x, y, z, got, strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        distance = abs(Fraction(float(made)) - exact)
        for neighbour in (np.nextafter(made, kind(np.inf)), np.nextafter(made, kind(-np.inf))):
            assert distance <= abs(Fraction(float(neighbour)) - exact)


def test_a_kernel_fuses_as_gpus_do():
    x = torch.linspace(1, 2, 64)
    y = torch.linspace(-3, -1, 64)
    out = computed(lambda a, b: tl.fma(a, a, b), torch.zeros(64), x, y)
    wanted = floats.fused_multiply_add(x.numpy(), x.numpy(), y.numpy())
    assert torch.equal(out, torch.from_numpy(wanted))
    assert not torch.equal(out, x * x + y)


def test_fp32_is_rounded_to_nearest_even_and_fp64_once():
    ties = torch.tensor(
        [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, float("nan")], dtype=torch.float64
    )
    source = torch.cat([ties, ties[:1] + 2.0**-40, torch.zeros(N - 5)])
    for wide in (source, source.float()):
        out = computed(narrow, torch.zeros(N, dtype=BF16), wide)
        assert out[:3].tolist() == [1.0, 1 + 2.0**-6, 1 + 2.0**-7]
        assert out[3].isnan()
        # not rounded by way of fp32
        assert out[4] == (1 + 2.0**-7 if wide.dtype == torch.float64 else 1.0)


def test_every_bf16_and_fp8_value():
    for kind, theirs, type_ in (
        (tl.bfloat16, BF16, np.uint16),
        *((k, t, np.uint8) for k, t in FP8.items()),
    ):
        bits = np.arange(np.iinfo(type_).max + 1, dtype=type_)
        ours = floats.to_float32(bits, kind)
        assert np.array_equal(
            ours, torch.from_numpy(bits).view(theirs).float().numpy(), equal_nan=True
        )
        again = floats.from_float32(ours, kind)
        assert np.array_equal(again[np.isfinite(ours)], bits[np.isfinite(ours)])
    wide = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    rounded = floats.to_float32(floats.from_float32(wide, tl.bfloat16), tl.bfloat16)
    assert np.array_equal(rounded, torch.from_numpy(wide).to(BF16).float().numpy(), equal_nan=True)


def added_up(values):
    """With a rounding after each addition."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda v: narrow(tl.sum(v)), lambda v: v.float().sum().to(BF16)),
        (lambda v: narrow(tl.max(v)), torch.max),
        (lambda v: narrow(tl.min(v)), torch.min),
        (lambda v: tl.reduce(v, 0, smaller), torch.min),
        (lambda v: tl.reduce(v, 0, tl.standard._sum_combine), added_up),
        (
            lambda v: tl.sum(tl.where(tl.arange(0, 64) == 63, tl.associative_scan(v, 0, plus), 0)),
            added_up,
        ),
    ],
    ids=["sum", "max", "min", "own", "bf16 sum", "bf16 scan"],
)
def test_reductions(function, expected, x):
    x = x.abs() - 3
    x[5] = 1.0
    assert reduced(function, torch.zeros(1, dtype=BF16), x) == expected(x).item()


def test_reduction_of_a_pair(x):
    x[5] = 1.0
    found = reduced(
        lambda v: tl.reduce((v, tl.arange(0, 64)), 0, larger_with_index)[1], torch.zeros(1).int(), x
    )
    assert found == x.argmax().item()


@pytest.mark.parametrize("kind", [BF16, *FP8.values()], ids=str)
def test_dot(kind):
    """Products are exact, sums are in fp32."""
    most = 64 if kind == BF16 else 8
    a, b = (
        torch.randint(-most, most, (2, 16, 16), generator=torch.Generator().manual_seed(3)) / 8
    ).to(kind)
    out = torch.zeros(16, 16)

    def product(a, b, out):
        at = 16 * tl.arange(0, 16)[:, None] + tl.arange(0, 16)[None, :]
        tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))

    World(1).run(lambda pe: device(product, a, b, out))
    assert torch.equal(out, a.float() @ b.float())


def test_atomic_addition():
    """Lanes that hit the same element add one after another; those that are masked off do not."""
    out, value = torch.tensor([256.0, 1.0]).to(BF16), torch.tensor([1.0, 0.25, 1.0, 99.0]).to(BF16)

    def adding(out, value):
        i = tl.arange(0, 4)
        tl.atomic_add(out + i % 2, tl.load(value + i), mask=i < 3)

    World(1).run(lambda pe: device(adding, out, value))
    assert out.tolist() == [256.0, 1.25]  # 257 is no bf16, and a tie


@pytest.mark.parametrize("kind", FP8, ids=str)
def test_fp8_is_converted_and_nothing_else(kind):
    """Rounded to nearest even and saturated, as NVIDIA's instructions do; Triton does not compile
    arithmetic on it."""
    values = torch.linspace(-20, 20, N)
    values[:6] = torch.tensor([1e9, -1e9, 17.0, 19.0, 1.0625, 1.1875])
    out = torch.zeros(N, dtype=FP8[kind])
    for wide in (values, values.half(), values.to(BF16)):
        computed(lambda v: v.to(kind), out, wide)
        limit = torch.finfo(FP8[kind]).max
        assert torch.equal(out.float(), wide.float().clamp(-limit, limit).to(FP8[kind]).float())
        assert torch.equal(computed(lambda v: v, torch.zeros_like(wide), out).float(), out.float())
    with pytest.raises(
        TypeError, match=f"Triton has no arithmetic on {kind}: cast to a wider type first"
    ):
        computed(operator.add, out, out, out)
    with pytest.raises(ValueError, match=r"fp_downcast_rounding='rtz' to .* is not simulated"):
        computed(
            lambda v: v.to(tl.bfloat16, fp_downcast_rounding="rtz"),
            torch.zeros(N, dtype=BF16),
            values,
        )


@pytest.mark.parametrize("function", [libdevice.exp, imported_by_name])
def test_functions_of_the_library_are_refused_and_triton_has_its_own_again_afterwards(function):
    with pytest.raises(
        tdcoll.TdcollError, match=rf"libdevice\.{function.__name__}: the simulator has no functions"
    ):
        World(1).run(lambda pe: elementwise(function, torch.zeros(16), torch.zeros(16)))
    assert function(1.0) is None
