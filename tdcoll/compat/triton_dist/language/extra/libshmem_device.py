# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.language.extra.libshmem_device``: NVSHMEM's functions and constants."""

import triton.language as tl

import tdcoll.language as _tdl
from tdcoll.compat.missing import attributes_of
from tdcoll.spec.constants import __all__ as _constants
from tdcoll.spec.nvshmem import NVSHMEM_FUNCTIONS

_names = [function.name for function in NVSHMEM_FUNCTIONS]
__all__ = [*_names, *(name for name in _constants if name.startswith("NVSHMEM_"))]
__all__ += ["NVSHMEMX_TEAM_NODE", "NVSHMEM_TEAM_SHARED", "NVSHMEM_TEAM_WORLD"]

for _name in __all__:
    if hasattr(_tdl, _name):
        globals()[_name] = getattr(_tdl, _name)

NVSHMEM_TEAM_WORLD = tl.constexpr(0)
NVSHMEM_TEAM_SHARED = tl.constexpr(1)
NVSHMEMX_TEAM_NODE = tl.constexpr(2)

__getattr__ = attributes_of("triton_dist.language.extra.libshmem_device")
