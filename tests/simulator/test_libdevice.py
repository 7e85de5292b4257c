# SPDX-License-Identifier: Apache-2.0
"""Functions of CUDA's ``libdevice`` in simulated kernels: right, or an error that names them; never None."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cudas
from triton.language.extra.libdevice import tanh as imported_by_name

import tdcoll
from tdcoll.language.jit import jit
from tdcoll.runtime.simulator import libdevice as table
from tdcoll.testing import World

X = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.1, 3.75, 1e-30, 100.0, -100.0, math.inf, -math.inf, math.nan, 7.0]
Y = [2.0, 3.0, -1.5, 0.5, 0.0, 1.0, 2.0, -0.0, math.inf, 1e10, 0.5, -3.0, math.nan, 1.0, 2.0, 1 / 3]


def launch(kernel, *arguments, **options):
    World(1).run(lambda pe: kernel[(1,)](*arguments, **options))


@jit
def one(out, x, FUNCTION: tl.constexpr):
    i = tl.arange(0, 16)
    tl.store(out + i, FUNCTION(tl.load(x + i)))


@jit
def two(out, x, y, FUNCTION: tl.constexpr):
    i = tl.arange(0, 16)
    tl.store(out + i, FUNCTION(tl.load(x + i), tl.load(y + i)))


ONE = """
abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor isinf isnan lgamma log log10
log1p log2 nearbyint rsqrt signbit sin sinh sqrt tan tanh trunc
"""
TWO = {"pow": torch.pow, "fmod": torch.fmod, "atan2": torch.atan2, "copysign": torch.copysign, "hypot": torch.hypot}
TWO |= {"div_rn": torch.div, "mul_rn": torch.mul, "add_rn": torch.add, "sub_rn": torch.sub}


def test_functions_of_one_number():
    def run(pe):
        for name in ONE.split():
            for dtype in (torch.float32, torch.float64):
                x = torch.tensor(X, dtype=dtype)
                wanted = torch.round(x) if name == "nearbyint" else getattr(torch, name)(x)
                for module in (libdevice, cudas) if name in ("exp", "isnan") else (libdevice,):
                    out = torch.full_like(x, 99)
                    one[(1,)](out, x, FUNCTION=getattr(module, name))
                    torch.testing.assert_close(out, wanted.to(dtype), equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")

    World(1).run(run)


def test_functions_of_two_numbers():
    def run(pe):
        for name, torchs in TWO.items():
            for dtype in (torch.float32, torch.float64):
                x, y = (torch.tensor(values, dtype=dtype) for values in (X, Y))
                out = torch.full_like(x, 99)
                two[(1,)](out, x, y, FUNCTION=getattr(libdevice, name))
                torch.testing.assert_close(out, torchs(x, y), equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")

    World(1).run(run)


@jit
def others(out, number, x, half):
    tl.store(out, imported_by_name(number))
    tl.store(out + 1, libdevice.pow(number, 3))  # the power is an integer
    tl.store(out + 2, libdevice.fma(number, number, -6.25))
    tl.store(out + 3, libdevice.round(number))
    tl.store(out + 4, libdevice.fast_expf(number))
    tl.store(out + 5, tl.sum(libdevice.exp10(tl.load(x + tl.arange(0, 2))), 0))
    if libdevice.isnan(number) or libdevice.finitef(number):
        tl.store(out + 6, 1.0)


def test_scalars_integers_and_names_of_their_own():
    out = torch.zeros(7)
    launch(others, out, 2.5, torch.tensor([1.0, 2.0]), torch.ones(1).half())
    wanted = [math.tanh(2.5), 15.625, 0.0, 3.0, math.exp(2.5), 110.0, 1.0]
    torch.testing.assert_close(out, torch.tensor(wanted))


def test_a_fused_multiply_and_add_is_rounded_once():
    """1 - (1 + 2^-12) (1 - 2^-12) is 2^-24, and 0 if the product is rounded by itself."""
    out = torch.zeros(1)
    launch(fused, out, 1 + 2**-12, 1 - 2**-12)
    assert out.item() == -(2.0**-24)


@jit
def fused(out, x, y):
    tl.store(out, libdevice.fma(x, y, -1.0))


@pytest.mark.parametrize("name", ["cyl_bessel_i0", "sinpi", "normcdf", "add_rz", "float_as_int", "fma", "fast_tanhf"])
def test_what_is_not_there_says_so(name):
    kernel, given = (triple, torch.zeros(16, dtype=torch.float64)) if name == "fma" else (one, torch.zeros(16))
    kernel = two if name == "add_rz" else kernel
    inputs = (given, given) if kernel is two else (given,)
    with pytest.raises(tdcoll.TdcollError, match=f"{name}.*(that the simulator has: .*exp,|isn't CUDA's)"):
        launch(kernel, torch.zeros_like(given), *inputs, FUNCTION=getattr(libdevice, name))


@jit
def triple(out, x, FUNCTION: tl.constexpr):
    i = tl.arange(0, 16)
    tl.store(out + i, FUNCTION(tl.load(x + i), tl.load(x + i), tl.load(x + i)))


def test_types_that_the_library_does_not_have():
    """The compiler refuses them as well."""
    with pytest.raises(TypeError, match=r"libdevice\.exp takes no \(fp16\): cast first"):
        launch(one, torch.zeros(16).half(), torch.zeros(16).half(), FUNCTION=libdevice.exp)


def test_every_function_is_one_of_the_library():
    source = inspect.getsource(cudas)
    for name in table._FUNCTIONS:
        symbols = name, f"{name}f", f"{name}d", f"f{name}", f"fast_{name}f"
        assert any(f'"__nv_{symbol}"' in source for symbol in symbols), name


def test_triton_has_its_own_again_afterwards():
    launch(one, torch.zeros(16), torch.zeros(16), FUNCTION=libdevice.exp)
    assert libdevice.exp(1.0) is None
    with pytest.raises(ValueError, match="Did you forget to add @triton"):
        cudas.exp(1.0)
