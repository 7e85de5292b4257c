# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: whether one is being captured, and the error if an operation cannot be captured."""

from __future__ import annotations

import ctypes

import torch

from tdcoll.base import driver
from tdcoll.base.errors import ContextError

_CAPTURE_IS_ACTIVE = 1
"""``CU_STREAM_CAPTURE_STATUS_ACTIVE``."""


def capturing(device: torch.device) -> bool:
    """Return whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def capture_of(stream: int) -> int:
    """Return the id of the capture that a stream, given by its handle, takes part in; 0 if it isn't
    captured.

    CUDA Driver API, ``cuStreamGetCaptureInfo``. CUDA's default stream can't be captured.
    """
    if not stream:
        return 0
    capture_status = ctypes.c_int()
    identity = ctypes.c_uint64()
    status = driver.driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream),
        ctypes.byref(capture_status),
        ctypes.byref(identity),
        None,
        None,
        None,
    )
    driver.check("cuStreamGetCaptureInfo", status)
    return identity.value if capture_status.value == _CAPTURE_IS_ACTIVE else 0


def refuse(device: torch.device, operation: str, why: str) -> None:
    """Raise if a CUDA graph is being captured, because it cannot hold the next step of
    ``operation``."""
    if capturing(device):
        raise ContextError(f"{operation}: {why}")
