# SPDX-License-Identifier: Apache-2.0
"""The fixtures of :mod:`measuring`."""

from measuring import on_gpus, rows_of

__all__ = ["on_gpus", "rows_of"]
