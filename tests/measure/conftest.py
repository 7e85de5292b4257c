# SPDX-License-Identifier: Apache-2.0
"""The fixtures of :mod:`measuring`."""

from measuring import clock, on_gpus

__all__ = ["clock", "on_gpus"]
