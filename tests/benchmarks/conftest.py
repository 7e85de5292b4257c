# SPDX-License-Identifier: Apache-2.0
"""The fixtures of :mod:`measuring`."""

from measuring import clock, measured, on_gpus, rows_of

__all__ = ["clock", "measured", "on_gpus", "rows_of"]
