# SPDX-License-Identifier: Apache-2.0
"""CUDA's driver, by ctypes: the one place that opens ``libcuda``."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


@functools.cache
def driver() -> Any:
    """Return the driver's library. Its functions release the GIL."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def launching_driver() -> Any:
    """Return the driver's library with functions that keep the GIL, for launches: a launch takes
    less time than releasing the GIL and getting it back."""
    return ctypes.PyDLL("libcuda.so.1")


def error_name(status: int) -> str:
    """Return the name of a driver's status, such as ``CUDA_ERROR_INVALID_VALUE``."""
    name = ctypes.c_char_p()
    driver().cuGetErrorName(status, ctypes.byref(name))
    return (name.value or b"?").decode()


def check(function: str, status: int) -> None:
    """Raise ``RuntimeError`` if the driver's function has returned an error."""
    if status:
        raise RuntimeError(f"{function} failed with {error_name(status)} ({status})")
