# SPDX-License-Identifier: Apache-2.0
"""NVSHMEM's device library, which kernels link: the file of an installation that serves a GPU's
architecture.

Up to 3.6, NVSHMEM has one file, ``libnvshmem_device.bc``. From 3.7 on it has one for each of some
architectures, ``libnvshmem_device_sm_90.bc`` for example. A GPU can run the code of every older
architecture, so it gets the newest file that is not newer than the GPU.

This module imports only the standard library, because the doctor, which uses it, also runs if
PyTorch is missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

LIBRARY = "libnvshmem_device"
"""The name of NVSHMEM's bitcode library in its files, and in Triton's ``extern_libs``."""

_OF_ARCHITECTURE = re.compile(rf"{LIBRARY}_sm_(\d+)\.bc")
_INSTALL = (
    "Install tdcoll[cu12] or tdcoll[cu13], which bring nvidia-nvshmem, or without a GPU tdcoll[compile]; or set "
    "NVSHMEM_HOME"
)


def device_libraries(folder: Path) -> dict[int, Path]:
    """Return the device libraries in ``folder`` by the oldest architecture that each serves; 0: all
    of them."""
    found = {}
    for path in folder.glob(f"{LIBRARY}*.bc"):
        match = _OF_ARCHITECTURE.fullmatch(path.name)
        if path.name == f"{LIBRARY}.bc":
            found[0] = path
        elif match:
            found[int(match[1])] = path
    return found


def device_library(folders: Sequence[Path], arch: int) -> Path:
    """Return the device library for GPUs of architecture ``arch`` (90 for sm_90).

    The first of ``folders`` that has any device library decides, because a job also takes NVSHMEM's
    host library from the first folder, and both must be of one version.

    Raises:
        FileNotFoundError: no folder has a device library, or none that serves ``arch``.
    """
    for folder in folders:
        libraries = device_libraries(folder)
        served = [oldest for oldest in libraries if oldest <= arch]
        if served:
            return libraries[max(served)]
        if libraries:
            names = ", ".join(libraries[oldest].name for oldest in sorted(libraries))
            raise FileNotFoundError(
                f"NVSHMEM's device library in {folder} has no file for sm_{arch} or an older "
                f"architecture, only {names}. Install another version of NVSHMEM, or set "
                "NVSHMEM_HOME to one"
            )
    places = (
        ", ".join(map(str, folders))
        or "no folder, because neither NVSHMEM_HOME nor NVIDIA's wheel is there"
    )
    raise FileNotFoundError(
        f"NVSHMEM's device library for sm_{arch} ({LIBRARY}_sm_*.bc, or {LIBRARY}.bc before NVSHMEM 3.7) was not found "
        f"in {places}. {_INSTALL}"
    )
