# SPDX-License-Identifier: Apache-2.0
"""tdcoll's version, and those of PyTorch, Triton and NVSHMEM that it works with.
``docs/versions.md`` says why and what was tried.

This module imports only the standard library, because launch.sh and the doctor use it before they
know what is installed.
"""

from __future__ import annotations

import re

TDCOLL = "0.1.0"
"""tdcoll's own version, as ``tdcoll.__version__`` and pyproject.toml have it: importing the package
imports no module, and lower layers don't import the package."""

OLDEST_TORCH = (2, 10)
"""Oldest PyTorch: the first one that brings Triton 3.6."""

OLDEST_TRITON = (3, 6)
"""Oldest Triton: the first one with programmatic dependent launch and the form of launch that
tdcoll prepares."""

TRITON_BELOW = (4, 0)
"""First Triton that is refused, because a new major version changes the compiler's internals that
tdcoll uses."""

TESTED_TORCH = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")
"""PyTorch of the rows of ``tests/versions/matrix.py``."""

TESTED_TRITON = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
"""Triton of the same rows."""

TESTED_NVSHMEM = ("3.4.5", "3.6.5", "3.7.2", "3.8.0")
"""NVSHMEM with which kernels are compiled in each row."""

INSTALLED_ON_GPUS = ('torch==2.11.*; python_version < "3.15"', 'torch; python_version >= "3.15"')
"""What ``launch.sh`` installs on a machine with GPUs and without a Python that has PyTorch: the one
with which tdcoll's tests and benchmarks have run on GPUs. It brings Triton 3.6 and NVSHMEM 3.4.5.
Where a Python is too new for it, the newest."""


def version_of(text: object) -> tuple[int, int]:
    """``"3.7.1+cpu"`` -> (3, 7); (0, 0) if there is no such number."""
    match = re.match(r"(\d+)(?:\.(\d+))?", str(text))
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)


def text_of(version: tuple[int, int]) -> str:
    """(3, 6) -> ``"3.6"``, and (4, 0) -> ``"4"``."""
    major, minor = version
    return f"{major}.{minor}" if minor else str(major)
