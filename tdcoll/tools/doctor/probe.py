# SPDX-License-Identifier: Apache-2.0
"""Look at one package, in a child: ``python -m tdcoll.tools.doctor.probe STEP``.

A step yields its findings piece by piece, each a line of JSON on stdout: if it crashes or hangs,
only later are lost.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from tdcoll.base.device_library import device_library
from tdcoll.base.environment import nvshmem_folders

_Found = Iterator[dict[str, Any]]


def _version_of(package: str) -> _Found:
    yield {"version": importlib.import_module(package).__version__}


def _torch() -> _Found:
    import torch

    yield {"version": torch.__version__, "cuda": torch.version.cuda}


def _triton() -> _Found:
    yield from _version_of("triton")
    for module in ("triton._C.libtriton", "triton.compiler"):
        importlib.import_module(module)


def _nvshmem() -> _Found:
    """Load NVSHMEM's host library as :mod:`tdcoll.job.nvshmem` does."""
    importlib.import_module("nvshmem.bindings.nvshmem")
    from cuda.pathfinder import load_nvidia_dynamic_lib

    yield {"library": load_nvidia_dynamic_lib("nvshmem_host").abs_path}


def _device_library() -> _Found:
    """Find NVSHMEM's device library for the GPUs that PyTorch sees."""
    import torch

    folders = nvshmem_folders(os.environ.get("NVSHMEM_HOME"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for major, minor in sorted({torch.cuda.get_device_capability(i) for i in range(count)}):
        yield {f"sm_{major}{minor}": str(device_library(folders, 10 * major + minor))}


def _driver() -> _Found:
    """Ask for the newest CUDA version that the driver supports, (major, minor). Touches no GPU."""
    import ctypes

    from tdcoll.base import driver

    number = ctypes.c_int()
    status = driver.driver().cuDriverGetVersion(ctypes.byref(number))
    if status:
        raise OSError(f"cuDriverGetVersion failed with CUDA error {status}")
    yield {"cuda": [number.value // 1000, number.value % 1000 // 10]}


def _gpus() -> _Found:
    """Find the GPUs that PyTorch sees, and the pairs without peer access."""
    import torch

    everyone = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    properties = [torch.cuda.get_device_properties(i) for i in everyone]
    pairs = [(i, j) for i in everyone for j in everyone if i != j]
    yield {
        "gpus": [{"name": one.name, "capability": [one.major, one.minor]} for one in properties],
        "no_peer_access": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)],
    }


STEPS = {
    "torch": _torch,
    "triton": _triton,
    "numpy": lambda: _version_of("numpy"),
    "greenlet": lambda: _version_of("greenlet"),
    "nvshmem": _nvshmem,
    "device library": _device_library,
    "driver": _driver,
    "gpus": _gpus,
}


def _main(step: str) -> None:
    stdout = os.dup(1)
    os.dup2(2, 1)  # libraries print to stdout as well

    def say(piece: dict[str, Any]) -> None:
        os.write(stdout, (json.dumps(piece) + "\n").encode())

    try:
        for piece in STEPS[step]():
            say(piece)
    except BaseException as error:
        first_line = str(error).strip().partition("\n")[0]
        missing = isinstance(error, ModuleNotFoundError) and error.name == step
        say({"error": f"{type(error).__name__}: {first_line}", "missing": missing})


if __name__ == "__main__":
    _main(sys.argv[1])
