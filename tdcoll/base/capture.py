# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: whether one is being captured, and the error if an operation cannot be captured."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from tdcoll.base.errors import ContextError


def capturing(device: torch.device) -> bool:
    """Return whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def capture_of(stream: int) -> int:
    """Return the id of the capture that a stream, given by its handle, takes part in; 0 if it isn't captured.

    CUDA Driver API, ``cuStreamGetCaptureInfo``. CUDA's default stream can't be captured.
    """
    if not stream:
        return 0
    status, ident = ctypes.c_int(), ctypes.c_uint64()
    given = ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(ident), None, None, None
    failed = _driver().cuStreamGetCaptureInfo_v2(*given)
    if failed:
        raise RuntimeError(f"cuStreamGetCaptureInfo failed: {failed}")
    return ident.value if status.value == 1 else 0  # CU_STREAM_CAPTURE_STATUS_ACTIVE


def refuse(device: torch.device, operation: str, why: str) -> None:
    """Raise if a CUDA graph is being captured, because it cannot hold the next step of ``operation``."""
    if capturing(device):
        raise ContextError(f"{operation}: {why}")
