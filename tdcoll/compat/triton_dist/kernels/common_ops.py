# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.kernels.common_ops``: waits for words and writes of words, in the order of a stream."""

from tdcoll.compat.triton_dist.kernels.nvidia.common_ops import _set_signal_cuda as set_signal
from tdcoll.compat.triton_dist.kernels.nvidia.common_ops import _wait_eq_cuda as wait_eq
from tdcoll.compat.triton_dist.language.extra import language_extra as _extra

__all__ = ["globaltimer", "globaltimer_lo", "pack_b32_v2", "set_signal", "smid", "wait_eq"]

globaltimer, globaltimer_lo = _extra.globaltimer, _extra.globaltimer_lo
pack_b32_v2, smid = _extra.pack_b32_v2, _extra.smid
