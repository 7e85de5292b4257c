# SPDX-License-Identifier: Apache-2.0
"""Limits that policies, contexts and kernels share; plain numbers."""

__all__ = ["CHANNELS", "MAX_PROGRAMS"]

CHANNELS = 512
"""Most chunks that one rank's data is cut into, if a context is not made for fewer; each has its own signal."""

MAX_PROGRAMS = 1 << 20
"""Programs of one launch on a context, at most: each adds its share, at least 1, of so many to the control word."""
