# SPDX-License-Identifier: Apache-2.0
"""Whether a CUDA graph is being captured on the current stream, and the refusal of what it cannot hold."""

from __future__ import annotations

import torch

from tdcoll.errors import ContextError

__all__ = ["capturing", "refuse"]


def capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on the current stream; never where ``device`` is no GPU."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse(device: torch.device, operation: str, why: str) -> None:
    """Raise if a CUDA graph is being captured on the current stream.

    Raises:
        ContextError: ``operation: why``.
    """
    if capturing(device):
        raise ContextError(f"{operation}: {why}")
