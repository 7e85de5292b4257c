# SPDX-License-Identifier: Apache-2.0
"""Where a kernel is, for reports."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (
    *(_PACKAGE / name for name in ("runtime", "simulator", "language", "spec")),
    Path(triton.__file__).parent,
    Path(torch.__file__).parent,
)
_GENERATED = "<string>"
"""Code that Python generates, such as the methods of dataclasses."""
_INSIDE = (*(f"{folder}{os.sep}" for folder in _FOLDERS), contextlib.__file__, _GENERATED)


@dataclass(frozen=True)
class Place:
    """A line of a file."""

    file: str
    line: int

    def note(self, *words: str) -> str:
        """Return what stands behind a line of a report: `` (from rank 3; kernels.py:45)``, with
        ``words`` first."""
        inside = self.file.startswith(f"{os.getcwd()}{os.sep}")
        where = (
            [f"{os.path.relpath(self.file) if inside else self.file}:{self.line}"]
            if self.file
            else []
        )
        found = "; ".join(filter(None, [*words, *where]))
        return f" ({found})" if found else ""


def kernel_place() -> Place:
    """Return the line of the kernel, or of its helper, that calls the device language or Triton."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return Place("", 0) if frame is None else Place(frame.f_code.co_filename, frame.f_lineno)


def place_of(error: BaseException) -> Place:
    """Return the line of the kernel, or of its helper, where an error began."""
    frames = (
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    )
    return Place(*([at for at in frames if not at[0].startswith(_INSIDE)] or [("", 0)])[-1])
