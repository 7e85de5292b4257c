# SPDX-License-Identifier: Apache-2.0
"""The environment variables of tdcoll, launch.sh and setenv.sh, which ``docs/environment.md``
explains.

This module imports only the standard library, because the doctor, which uses it, also runs if
PyTorch is missing.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from tdcoll.base import arguments

_log = logging.getLogger("tdcoll")

DEFAULT_HEAP_BYTES = 384 << 20
"""Symmetric heap of each rank on GPUs. NVSHMEM allocates GPU memory in pieces of 512 MiB; this size
fits into the first piece beside NVSHMEM's own data. It holds a ``SparseContext`` of 20,000 rows of
2 KiB on 8 ranks (353 MiB), or the backend's all-gathers of 4 MiB per rank on 12."""

DEFAULT_SIMULATED_HEAP_BYTES = 64 << 20
"""Symmetric heap of each rank in the simulator: a sparse file, which takes memory only for what is
written to."""

INTERNAL = frozenset({"TDCOLL_LAST_WORDS", "TDCOLL_PYTHON", "TDCOLL_SETENV"})
"""Variables of tdcoll that launch.sh, setenv.sh and :mod:`tdcoll.tools.torchrun` set for each
other."""

KNOWN = INTERNAL | {
    *(
        "TDCOLL_BACKEND_HANDLES",
        "TDCOLL_COMMIT",
        "TDCOLL_COMPILER",
        "TDCOLL_DEBUG",
        "TDCOLL_EMULATE_NODES",
    ),
    *(
        "TDCOLL_HEAP",
        "TDCOLL_NNODES",
        "TDCOLL_NVTX",
        "TDCOLL_PDL",
        "TDCOLL_PIP_ARGS",
        "TDCOLL_REQUIRES",
    ),
    *("TDCOLL_SHARE_GPUS", "TDCOLL_TIMEOUT_S", "TDCOLL_TRACEBACK", "TDCOLL_TUNING"),
}
"""All variables of tdcoll."""


def heap_bytes(simulated: bool, variables: Mapping[str, str] = os.environ) -> int:
    """Return the bytes of a symmetric heap by default: ``NVSHMEM_SYMMETRIC_SIZE``, or else tdcoll's
    own default."""
    text = variables.get("NVSHMEM_SYMMETRIC_SIZE")
    if text:
        return arguments.parse_bytes(text, "NVSHMEM_SYMMETRIC_SIZE")
    return DEFAULT_SIMULATED_HEAP_BYTES if simulated else DEFAULT_HEAP_BYTES


def nvshmem_folders(home: str | None) -> list[Path]:
    """Return the folders to search for NVSHMEM's libraries: that of ``NVSHMEM_HOME``, and NVIDIA's
    wheels'."""
    places = [Path(home) / "lib"] if home else []
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("nvidia")
        if spec:
            places += [
                Path(folder) / "nvshmem" / "lib" for folder in spec.submodule_search_locations or []
            ]
    return places


def unknown(names: Iterable[str]) -> dict[str, str | None]:
    """Return the names that look like tdcoll's variables and are not; for each the one that may be
    meant, or None."""
    ends = sorted(name.removeprefix("TDCOLL_") for name in KNOWN)
    found: dict[str, str | None] = {}
    for name in sorted(name for name in names if name.startswith("TDCOLL_") and name not in KNOWN):
        near = difflib.get_close_matches(name.removeprefix("TDCOLL_"), ends, n=1)
        found[name] = f"TDCOLL_{near[0]}" if near else None
    return found


@functools.cache
def warn_of_unknown() -> None:
    """Log a warning for each variable that looks like tdcoll's and is not. Once per process, on one
    rank per host."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for name, meant in unknown(os.environ).items():
        advice = f"did you mean {meant}?" if meant else "docs/environment.md lists those that exist"
        _log.warning(
            "the environment variable %s is none of tdcoll's and has no effect: %s", name, advice
        )
