# SPDX-License-Identifier: Apache-2.0
"""``triton_dist``: ``jit``, and the modules ``language``, ``utils``, ``profiler_utils`` and
``kernels``."""

from tdcoll.language.jit import jit

__all__ = ["jit"]
