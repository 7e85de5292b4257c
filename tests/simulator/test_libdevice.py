# SPDX-License-Identifier: Apache-2.0
"""Functions of CUDA's ``libdevice`` in simulated kernels: right, or an error that names them; never None."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import triton.language as tl
from cases import elementwise
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cudas
from triton.language.extra.libdevice import tanh as imported_by_name

import tdcoll
from tdcoll.language.jit import jit
from tdcoll.simulator import libdevice as table
from tdcoll.testing import World

X = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.1, 3.75, 1e-30, 100.0, -100.0, math.inf, -math.inf, math.nan, 7.0]
Y = [2.0, 3.0, -1.5, 0.5, 0.0, 1.0, 2.0, -0.0, math.inf, 1e10, 0.5, -3.0, math.nan, 1.0, 2.0, 1 / 3]


ONE = """
abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor isinf isnan lgamma log log10
log1p log2 nearbyint rsqrt signbit sin sinh sqrt tan tanh trunc
"""
TWO = {name: getattr(torch, name) for name in ("pow", "fmod", "atan2", "copysign", "hypot")}
TWO |= {f"{name}_rn": getattr(torch, name) for name in ("div", "mul", "add", "sub")}


def test_functions_of_one_and_two_numbers():
    torchs = {name: getattr(torch, {"nearbyint": "round"}.get(name, name)) for name in ONE.split()}

    def run(pe):
        for name, function in {**torchs, **TWO}.items():
            for dtype in (torch.float32, torch.float64):
                inputs = [torch.tensor(values, dtype=dtype) for values in (X, Y)[: 1 + (name in TWO)]]
                out = elementwise(getattr(libdevice, name), torch.full_like(inputs[0], 99), *inputs)
                wanted = function(*inputs).to(dtype)
                torch.testing.assert_close(out, wanted, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")

    World(1).run(run)


@jit
def others(out, number, x):
    tl.store(out, imported_by_name(number))
    tl.store(out + 1, libdevice.pow(number, 3))  # the power is an integer
    tl.store(out + 2, libdevice.fma(number, number, -6.25))
    tl.store(out + 3, libdevice.round(number))
    tl.store(out + 4, libdevice.fast_expf(number))
    tl.store(out + 5, tl.sum(libdevice.exp10(tl.load(x + tl.arange(0, 2))), 0))
    if libdevice.isnan(number) or libdevice.finitef(number):
        tl.store(out + 6, 1.0)
    # 1 - (1 + 2^-12) (1 - 2^-12), which is 0 if the product is rounded by itself
    tl.store(out + 7, libdevice.fma(tl.cast(1 + 2**-12, tl.float32), tl.cast(1 - 2**-12, tl.float32), -1.0))


def test_scalars_integers_and_names_of_their_own():
    out = torch.zeros(8)
    World(1).run(lambda pe: others[(1,)](out, 2.5, torch.tensor([1.0, 2.0])))
    wanted = [math.tanh(2.5), 15.625, 0.0, 3.0, math.exp(2.5), 110.0, 1.0]
    torch.testing.assert_close(out[:7], torch.tensor(wanted))
    assert out[7] == -(2.0**-24)


@pytest.mark.parametrize("name", ["cyl_bessel_i0", "sinpi", "normcdf", "add_rz", "float_as_int", "fma", "fast_tanhf"])
def test_what_is_not_there_says_so(name):
    given = torch.zeros(16, dtype=torch.float64 if name == "fma" else torch.float32)
    inputs = [given] * {"fma": 3, "add_rz": 2}.get(name, 1)
    with pytest.raises(tdcoll.TdcollError, match=f"{name}.*(that the simulator has: .*exp,|isn't CUDA's)"):
        World(1).run(lambda pe: elementwise(getattr(libdevice, name), torch.zeros_like(given), *inputs))


def test_every_function_is_one_of_the_library():
    source = inspect.getsource(cudas)
    for name in table._FUNCTIONS:
        symbols = name, f"{name}f", f"{name}d", f"f{name}", f"fast_{name}f"
        assert any(f'"__nv_{symbol}"' in source for symbol in symbols), name


def test_triton_has_its_own_again_afterwards():
    World(1).run(lambda pe: elementwise(libdevice.exp, torch.zeros(16), torch.zeros(16)))
    assert libdevice.exp(1.0) is None
