# SPDX-License-Identifier: Apache-2.0
"""Where a kernel is, for reports."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton

__all__ = ["kernel_place"]

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (*(_PACKAGE / name for name in ("runtime", "simulator", "language", "spec")), Path(triton.__file__).parent)
_INSIDE = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)


def kernel_place() -> Callable[..., str]:
    """Look for the line of the kernel, or of its helper, that calls the device language or Triton.

    Returns:
        A function that gives what stands behind a line of a report: `` (from rank 3; kernels.py:45)``, with its
        arguments first.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    file, line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)

    def note(*words: str) -> str:
        inside = file.startswith(f"{os.getcwd()}{os.sep}")
        where = [f"{os.path.relpath(file) if inside else file}:{line}"] if file else []
        found = "; ".join(filter(None, [*words, *where]))
        return f" ({found})" if found else ""

    return note
