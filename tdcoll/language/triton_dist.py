# SPDX-License-Identifier: Apache-2.0
"""The device language compiled by Triton-distributed, where its compiler is installed.

NVSHMEM's functions are taken from its ``libshmem_device``; everything that is PTX or plain Triton
is tdcoll's own and compiles there as it does with stock Triton. The compiler is a fork that
replaces the ``triton`` package, so it is never a dependency: the wheel of version 0.0.0 on PyPI
holds Python sources only.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from tdcoll.language import nvshmem as _stock
from tdcoll.spec.functions import FUNCTIONS


def _libshmem_device() -> ModuleType:
    """Triton-distributed's device library."""
    try:
        importlib.import_module("triton._C.libtriton.distributed")
        return importlib.import_module("triton_dist.language.extra.libshmem_device")
    except ImportError as error:
        raise ImportError(
            "TDCOLL_COMPILER=triton_dist needs Triton-distributed with its compiler, and this Python has none "
            f"({error}). Build it from source (the triton-dist 0.0.0 on PyPI has no compiler), or unset "
            "TDCOLL_COMPILER to use stock Triton."
        ) from error


_library = _libshmem_device()
for _name, _function in FUNCTIONS.items():
    _source = _library if _function.symbol is not None else _stock
    globals()[_name] = getattr(_source, _name)
