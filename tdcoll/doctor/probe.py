# SPDX-License-Identifier: Apache-2.0
"""Run in a child, as a file: ``python probe.py STEP...`` imports what may crash and prints a line of JSON per step.

Each step comes twice: its name before it begins, so that the parent knows where a child died, and then what it found.
It imports nothing of tdcoll, whose own imports fail where one of its requirements does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from typing import Any

__all__ = ["MARK", "STEPS"]

MARK = "tdcoll-probe "
"""Begins the lines that are meant; the libraries print what they like."""


def numpy() -> dict[str, Any]:
    import numpy

    return {"version": numpy.__version__}


def greenlet() -> dict[str, Any]:
    import greenlet

    return {"version": greenlet.__version__}


def torch() -> dict[str, Any]:
    import torch

    return {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}


def triton() -> dict[str, Any]:
    import triton

    found: dict[str, Any] = {"version": getattr(triton, "__version__", None), "compiler": "", "distributed": False}
    try:
        importlib.import_module("triton._C.libtriton")
        importlib.import_module("triton.compiler")
    except Exception as error:
        return {**found, "compiler": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(ImportError):
        importlib.import_module("triton._C.libtriton.distributed")
        found["distributed"] = True
    return found


def nvshmem() -> dict[str, Any]:
    """The bindings, and NVSHMEM's host library, loaded as :mod:`tdcoll.runtime.nvshmem` does."""
    for module in ("nvshmem", "nvshmem.bindings.nvshmem"):
        importlib.import_module(module)
    from cuda.pathfinder import load_nvidia_dynamic_lib

    loaded = load_nvidia_dynamic_lib("nvshmem_host")
    return {"library": str(getattr(loaded, "abs_path", "") or "")}


def driver() -> dict[str, Any]:
    """The newest CUDA that the driver knows, as (major, minor). Starts nothing on a GPU."""
    import ctypes

    number = ctypes.c_int()
    if status := ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
        return {"error": f"cuDriverGetVersion failed with CUDA error {status}"}
    return {"cuda": [number.value // 1000, number.value % 1000 // 10]}


def gpus() -> dict[str, Any]:
    """Return what PyTorch sees, and who can reach whose memory."""
    import torch

    if not torch.cuda.is_available():
        return {"available": False, "gpus": [], "no_peer_access": []}
    count = torch.cuda.device_count()
    found = []
    for i in range(count):
        properties = torch.cuda.get_device_properties(i)
        found.append(
            {
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "total_bytes": properties.total_memory,
                "uuid": str(getattr(properties, "uuid", "")),
            }
        )
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    missing = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    return {"available": True, "gpus": found, "no_peer_access": missing}


def memory() -> dict[str, Any]:
    """Free memory of each GPU, where nvidia-smi does not say; makes a CUDA context on each."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"free_bytes": [torch.cuda.mem_get_info(i)[0] for i in range(count)]}


STEPS = {step.__name__: step for step in (numpy, greenlet, torch, triton, nvshmem, driver, gpus, memory)}
"""The steps in the order in which they are best taken: what touches GPUs comes last."""


def _say(what: object) -> None:
    os.write(1, (MARK + json.dumps(what) + "\n").encode())


def _found(step: str) -> dict[str, Any]:
    try:
        return STEPS[step]()
    except ModuleNotFoundError as error:
        if error.name == step:
            return {"missing": True, "error": str(error)}
        return {"error": f"{type(error).__name__}: {error}"}
    except BaseException as error:
        text = str(error).strip().splitlines()
        return {"error": f"{type(error).__name__}: {text[0] if text else ''}"}


if __name__ == "__main__":
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    for name in sys.argv[1:]:
        _say(name)
        _say({name: _found(name)})
