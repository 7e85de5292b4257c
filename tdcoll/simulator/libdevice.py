# SPDX-License-Identifier: Apache-2.0
"""CUDA's ``libdevice`` in simulated kernels: the functions that PyTorch computes as well.

``triton.language.extra.libdevice`` holds empty functions, which the compiler replaces by those of
``triton.language.extra.cuda.libdevice``. The interpreter doesn't, and takes ``None`` for their results. Here they are
replaced too. The functions choose a symbol of the library by the types of their arguments, as they do when they are
compiled, and :func:`computed` looks it up in a table. A symbol that isn't there is an error.

A result is exact to the last bit or two, because fp32 is computed in fp64 and rounded; the GPU's may be a few off.
``fast_*`` are computed like the functions that they approximate.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.runtime.interpreter as triton_interpreter
from triton.language.extra import libdevice as stubs
from triton.language.extra.cuda import libdevice as cudas

from tdcoll.base.errors import TdcollError


def _half_away_from_zero(x: torch.Tensor) -> torch.Tensor:
    whole = torch.trunc(x)
    return torch.where((x - whole).abs() >= 0.5, whole + torch.sign(x), whole)


_PYTORCHS = (
    "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor fmod hypot "
    "isfinite isinf isnan lgamma log log10 log1p log2 pow rsqrt signbit sin sinh sqrt tan tanh trunc"
)
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in _PYTORCHS.split()},
    **{f"{name}_rn": getattr(torch, name) for name in ("add", "div", "mul", "sqrt", "sub")},
    "cbrt": lambda x: torch.from_numpy(np.cbrt(x.numpy())),
    "exp10": lambda x: torch.pow(10.0, x),
    "fabs": torch.abs,
    "fdivide": torch.div,
    "finite": torch.isfinite,
    "fmaf": lambda x, y, z: x * y + z,  # the product of two fp32 is exact in fp64; fp64 would be rounded twice
    **dict.fromkeys(("nearbyint", "rint"), torch.round),
    "powi": torch.pow,
    "round": _half_away_from_zero,
}
"""By name, usually without the type that symbols end or begin with, for example ``expf``, ``isnand``, ``fadd_rn``."""


def computed(symbol: str, operands: list[Any], kind: Any) -> Any:
    """Return a handle: the function ``symbol`` of the library, of handles, as numbers of ``kind``."""
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    untyped = name[1:] if name.endswith("_rn") else name[:-1] if name[-1] in "df" else name
    function = _FUNCTIONS.get(name) or _FUNCTIONS.get(untyped)
    if function is None:
        raise TdcollError(
            f"the simulator doesn't have the library function {symbol}. Write it with functions of triton.language, or "
            f"with those of libdevice that the simulator has: {', '.join(sorted(_FUNCTIONS))}"
        )
    result = function(*(torch.from_numpy(operand.data.astype(np.float64)) for operand in operands)).numpy()
    with np.errstate(all="ignore"):
        return triton_interpreter.TensorHandle(result.astype(triton_interpreter._get_np_dtype(kind)), kind)


def _called(name: str, function: Callable[..., Any] | None, *args: Any, **named: Any) -> Any:
    """Call ``function``, CUDA's of this name, as Triton's compiler would."""
    if function is None:
        raise TdcollError(f"libdevice.{name} isn't CUDA's: Triton doesn't compile it for GPUs of NVIDIA either")
    return function(*args, **named, _semantic=triton_interpreter.interpreter_semantic)


def _stub(*args: Any, _do: Callable[..., Any], **named: Any) -> Any:
    return _do(*args, **named)


@functools.cache
def replacements() -> list[tuple[Any, str, Any]]:
    """Return what to replace while a machine is installed: function, attribute and value.

    The functions get other code, because programs import them by name, too (``from triton.language.extra.libdevice
    import tanh``).
    """
    found: list[tuple[Any, str, Any]] = []
    for name, stub in vars(stubs).items():
        if isinstance(stub, types.FunctionType):
            function = getattr(getattr(cudas, name, None), "__wrapped__", None)
            found.append((stub, "__code__", _stub.__code__))
            found.append((stub, "__kwdefaults__", {"_do": functools.partial(_called, name, function)}))
    return found
