# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.language.extra.libshmem_device``: NVSHMEM's functions and constants."""

import tdcoll.language as _tdl
from tdcoll.spec.nvshmem import NVSHMEM_FUNCTIONS

_names = [function.name for function in NVSHMEM_FUNCTIONS]
_names += [name for name in vars(_tdl) if name.startswith("NVSHMEM_")]
globals().update({name: getattr(_tdl, name) for name in _names})
