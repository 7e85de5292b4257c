# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: is one being captured, and what cannot be done then."""

from __future__ import annotations

import torch

from tdcoll.errors import ContextError

__all__ = ["capturing", "refuse"]


def capturing(device: torch.device) -> bool:
    """Return whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse(device: torch.device, operation: str, why: str) -> None:
    """Raise if a CUDA graph is being captured, which cannot hold what ``operation`` does next.

    Raises:
        ContextError: with the operation and ``why``, which says what to do instead.
    """
    if capturing(device):
        raise ContextError(f"{operation}: {why}")
