# SPDX-License-Identifier: Apache-2.0
"""The environment variables that tdcoll, launch.sh and setenv.sh read or set: one table of them.

``python -m tdcoll.environment`` prints the table for ``docs/environment.md``. This module imports only the standard
library, because the doctor, which uses the same table, also runs if PyTorch is missing.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tdcoll import arguments
from tdcoll.output import unless_the_reader_goes

__all__ = [
    "DEFAULT_HEAP_BYTES",
    "DEFAULT_SIMULATED_HEAP_BYTES",
    "INTERNAL",
    "KNOWN",
    "PUBLIC",
    "VARIABLES",
    "Variable",
    "heap_bytes",
    "table",
    "unknown",
    "warn_of_unknown",
]

_log = logging.getLogger("tdcoll")

DEFAULT_HEAP_BYTES = 384 << 20
"""Symmetric heap of each rank on GPUs. NVSHMEM allocates GPU memory in pieces of 512 MiB; this size fits into the first
piece beside NVSHMEM's own data. It holds a ``SparseContext`` of 20,000 rows of 2 KiB on 8 ranks (353 MiB), or the
backend's all-gathers of 4 MiB per rank on 12."""

DEFAULT_SIMULATED_HEAP_BYTES = 64 << 20
"""Symmetric heap of each rank in the simulator: a sparse file, which takes memory only for what is written to."""


@dataclass(frozen=True)
class Variable:
    """An environment variable.

    Attributes:
        name: of the variable.
        default: what holds if it isn't set, in words.
        meaning: what its value does.
        set_by: who sets it: "you", "launch.sh" for launch.sh and setenv.sh (a value of yours wins), "internal" for what
            they, :mod:`tdcoll.torchrun` and tests tell each other.
    """

    name: str
    default: str
    meaning: str
    set_by: Literal["you", "launch.sh", "internal"] = "you"


VARIABLES = (
    Variable(
        "TDCOLL_TIMEOUT_S",
        "30. Under the backend: used if the group has no `timeout` of its own; 30 minutes if neither is set.",
        "Deadline of waits, in seconds (`launch.sh --timeout`, `initialize(timeout_s=...)`).",
    ),
    Variable(
        "TDCOLL_DEBUG",
        "`first` on the simulator, otherwise 0",
        "1: check on every call that the ranks [agree on its arguments](errors.md#ranks-that-pass-different-sizes) "
        "(`CollectiveContext(debug=True)`). `first`: on the first call of each kind. 0: never.",
    ),
    Variable(
        "TDCOLL_HEAP",
        "`auto`",
        "Transport of the symmetric heap: `nvshmem`, `torch` (one host only), or `auto`: NVSHMEM if nvshmem4py is "
        "installed, else PyTorch (`initialize(heap=...)`).",
    ),
    Variable(
        "NVSHMEM_SYMMETRIC_SIZE",
        "384M; 64M on the simulator, where only written pages take memory",
        "Bytes of symmetric heap per rank (`512M`, `4G`), taken when the job starts (`initialize(heap_bytes=...)`). "
        "`tdcoll.heap_info()` shows how much is used.",
    ),
    Variable(
        "TDCOLL_TUNING",
        "the table that tdcoll ships",
        "File of a tuning table, the same on all hosts (`CollectiveContext(tuning=...)`).",
    ),
    Variable(
        "TDCOLL_BACKEND_HANDLES",
        "`all`",
        "Calls that the backend handles with tdcoll's kernels (`Options(handles=...)`).",
    ),
    Variable(
        "TDCOLL_PDL",
        "1",
        "0: no kernel is launched before the one ahead of it on the stream ends (`CollectiveContext(early=False)`).",
    ),
    Variable(
        "TDCOLL_NVTX",
        "0",
        "1: each call is an NVTX range on the host, named by its algorithm and size, for [nsys](profiling.md#nsys).",
    ),
    Variable("TDCOLL_COMPILER", "`triton`", "`triton_dist`: compile with an installed Triton-distributed."),
    Variable(
        "TDCOLL_EMULATE_NODES",
        "1",
        "Logical nodes per host (`launch.sh --emulate-nodes`, `initialize(emulate_nodes=...)`).",
    ),
    Variable(
        "TDCOLL_SHARE_GPUS",
        "0",
        "1: ranks may share GPUs, for tests of correctness (`launch.sh --share-gpus`, `initialize(share_gpus=...)`).",
    ),
    Variable("CUDA_VISIBLE_DEVICES", "all GPUs", "The GPUs to use. If it is empty, jobs run on the simulator."),
    Variable(
        "TRITON_INTERPRET", "1 without a GPU", "1: use the simulator, even with GPUs. 0: never use it.", "launch.sh"
    ),
    Variable(
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME",
        "`lo` on one host, otherwise the interface of the default route",
        "Interface over which NVSHMEM's processes find each other. Check it first if the start hangs.",
        "launch.sh",
    ),
    Variable(
        "NVSHMEM_REMOTE_TRANSPORT",
        "`none` on one host, otherwise NVSHMEM's default",
        "Transport between hosts. `none` saves the search for network cards.",
        "launch.sh",
    ),
    Variable(
        "NVSHMEM_DISABLE_NVLS",
        "1",
        "1: no NVLink multicast, which tdcoll doesn't use and some hosts can't set up.",
        "launch.sh",
    ),
    Variable(
        "NVSHMEM_DISABLE_NCCL",
        "1, set by `initialize`",
        "1: NVSHMEM makes no NCCL communicator of its own, which would cost 0.4 s of the start and 1.6 GiB of each GPU "
        "(2 H200s). Use 0 if you call NVSHMEM's host collectives yourself and want NCCL for them.",
    ),
    Variable("NVSHMEM_HOME", "the wheel's", "Folder of another NVSHMEM than the one in NVIDIA's wheel."),
    Variable("TDCOLL_NNODES", "1", "Hosts of the job, before `source setenv.sh`, if you call torchrun yourself."),
    Variable("TDCOLL_TRACEBACK", "0", "1: show torchrun's report of failed processes as well."),
    Variable(
        "TDCOLL_COMMIT",
        "the checkout's",
        "Commit that benchmarks write into their files if there is no git repository.",
    ),
    Variable(
        "PYTHON", "the active Python", "Python that `launch.sh` and `setenv.sh` try first, and make `.venv` with."
    ),
    Variable("TDCOLL_PIP_ARGS", "none", "More arguments for pip when `setenv.sh` makes `.venv`."),
    Variable("TDCOLL_REQUIRES", "none", "More modules that the Python must have, such as `pytest ruff`."),
    Variable("TDCOLL_PYTHON", "", "The Python that `setenv.sh` chose.", "internal"),
    Variable(
        "TDCOLL_SETENV", "", "The defaults that `setenv.sh` exported, so that it can replace them later.", "internal"
    ),
    Variable(
        "TDCOLL_LAST_WORDS", "", "Path by which ranks tell `tdcoll.torchrun` about their last errors.", "internal"
    ),
    Variable("TDCOLL_OFFLINE", "0", "1: skip the test that downloads a package.", "internal"),
)
"""The one list of environment variables. The table of ``docs/environment.md`` is made from it."""

_OWN = [variable for variable in VARIABLES if variable.name.startswith("TDCOLL_")]

INTERNAL = frozenset(variable.name for variable in _OWN if variable.set_by == "internal")
"""Variables of tdcoll that launch.sh, setenv.sh and :mod:`tdcoll.torchrun` set for each other, or that tests read."""

PUBLIC = frozenset(variable.name for variable in _OWN) - INTERNAL
"""Variables of tdcoll that you may set."""

KNOWN = PUBLIC | INTERNAL


def table() -> str:
    """Return the table of ``docs/environment.md``."""
    lines = ["| variable | default | meaning | set by |", "|---|---|---|---|"]
    for one in VARIABLES:
        by = "you" if one.set_by == "you" else "`launch.sh`, or you" if one.set_by == "launch.sh" else one.set_by
        lines.append(f"| `{one.name}` | {one.default} | {one.meaning} | {by} |")
    return "\n".join(lines)


def heap_bytes(simulated: bool, variables: Mapping[str, str] = os.environ) -> int:
    """Bytes of each rank's symmetric heap unless a call says otherwise: ``NVSHMEM_SYMMETRIC_SIZE``, else the default.

    Raises:
        ValueError: the variable is set and is no number of bytes.
    """
    if text := variables.get("NVSHMEM_SYMMETRIC_SIZE"):
        return arguments.parse_bytes(text, "NVSHMEM_SYMMETRIC_SIZE")
    return DEFAULT_SIMULATED_HEAP_BYTES if simulated else DEFAULT_HEAP_BYTES


def unknown(names: Iterable[str]) -> dict[str, str | None]:
    """Return the names that look like tdcoll's variables and are not; for each the one that may be meant, or None."""
    ends = sorted(name.removeprefix("TDCOLL_") for name in KNOWN)
    found: dict[str, str | None] = {}
    for name in sorted(name for name in names if name.startswith("TDCOLL_") and name not in KNOWN):
        near = difflib.get_close_matches(name.removeprefix("TDCOLL_"), ends, n=1)
        found[name] = f"TDCOLL_{near[0]}" if near else None
    return found


@functools.cache
def warn_of_unknown() -> None:
    """Log a warning for each variable that looks like tdcoll's and is not. Once per process, on one rank per host."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for name, meant in unknown(os.environ).items():
        advice = f"did you mean {meant}?" if meant else "docs/environment.md lists those that exist"
        _log.warning("the environment variable %s is none of tdcoll's and has no effect: %s", name, advice)


def _main() -> int:
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(unless_the_reader_goes(_main))
