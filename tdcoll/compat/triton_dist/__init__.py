# SPDX-License-Identifier: Apache-2.0
"""``triton_dist``: ``jit``, and the modules ``language``, ``utils``, ``profiler_utils`` and ``kernels``."""

from tdcoll.compat.missing import attributes_of
from tdcoll.language.jit import jit

__all__ = ["jit"]

__getattr__ = attributes_of("triton_dist")
