# SPDX-License-Identifier: Apache-2.0
"""Checks that every rank of a job runs, on GPUs or in the simulator; ``checks_job.py`` starts them.

A check is a function decorated with :func:`check`. It may be collective; if it fails on one rank
the script says so and ends the job, rather than leave the others in a collective. Rank 0 prints one
JSON line per check.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

import tdcoll
from tdcoll import runtime
from tdcoll.job import lifecycle
from tdcoll.language import INTERPRETED

A, B = TypeVar("A"), TypeVar("B")

CHECKS: dict[str, Callable[[], object]] = {}
GPU_ONLY: set[str] = set()


def check(function: Callable[[], object] | None = None, *, gpu_only: bool = False):
    """Register a check under the function's name; ``gpu_only`` skips it in the simulator, and says
    so."""

    def register(f):
        CHECKS[f.__name__] = f
        if gpu_only:
            GPU_ONLY.add(f.__name__)
        return f

    return register if function is None else register(function)


def simulated() -> bool:
    return INTERPRETED


def puts() -> bool:
    """Return whether the heap has NVSHMEM's puts; PyTorch's (``TDCOLL_HEAP=torch``) does not."""
    return runtime.current().heap.puts


def shared() -> bool:
    """Whether ranks share GPUs (`launch.sh --share-gpus`), which take turns at them."""
    return lifecycle.may_share_gpus()


def patience_s() -> float:
    """How long a rank waits for one that never comes: long enough for one that only takes its turn
    at the GPU."""
    crowded = shared() or (
        not INTERPRETED and int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
    )
    return 5.0 if crowded else 1.5


def scaled(gpu: int, simulator: int, shared_gpus: int | None = None) -> int:
    """A repetition count: the simulator is thousands of times slower, and so are GPUs that ranks
    share."""
    if shared_gpus is not None and shared():
        return shared_gpus
    return simulator if INTERPRETED else gpu


def device() -> torch.device:
    return runtime.current().device


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def everyone() -> range:
    """Return all ranks of the job."""
    return range(world())


def neighbour() -> int:
    """Return the next rank, and the first after the last."""
    return (rank() + 1) % world()


HELD: list[torch.Tensor] = []
"""Symmetric memory of the check that runs."""


def symmetric(shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in symmetric memory, which is given back when the check has ended."""
    HELD.append(tdcoll.zeros(shape, dtype))
    return HELD[-1]


def expect(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def expect_raises(
    kind: type[BaseException], action: Callable[[], object], *fragments: str
) -> BaseException:
    """``action`` must raise ``kind`` with all ``fragments`` in its message."""
    try:
        action()
    except kind as error:
        missing = [fragment for fragment in fragments if fragment not in str(error)]
        expect(not missing, f"{error!r} does not mention {missing}")
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def covering(first: Sequence[A], second: Sequence[B], turn: int = 0) -> list[tuple[A, B]]:
    """Return the fewest pairs in which each of ``first`` and each of ``second`` stands at least
    once.

    A kernel takes seconds to compile; the simulator's tests have all pairs. Another ``turn`` makes
    other pairs.
    """
    pairs = range(max(len(first), len(second)))
    return [(first[i % len(first)], second[(i + turn) % len(second)]) for i in pairs]


def run(argv: list[str] | None = None, **initialize: object) -> None:
    """Run the checks named on the command line, or all; exit with 1 if one fails."""
    names = (sys.argv[1:] if argv is None else argv) or list(CHECKS)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        sys.exit(f"unknown check(s) {unknown}; there are {list(CHECKS)}")
    torch.set_num_threads(1)
    tdcoll.initialize(**initialize)
    for name in names:
        begin = time.perf_counter()
        if INTERPRETED and name in GPU_ONLY:
            verdict: dict[str, object] = {"check": name, "skipped": "needs GPUs"}
        else:
            try:
                note = CHECKS[name]()
                if device().type == "cuda":
                    torch.cuda.synchronize()
                while HELD:
                    tdcoll.free(HELD.pop())
            except BaseException:
                print(
                    f"rank {rank()}: {name} failed\n{traceback.format_exc()}",
                    file=sys.stderr,
                    flush=True,
                )
                print(json.dumps({"check": name, "ok": False, "rank": rank()}), flush=True)
                os._exit(1)
            # all ranks have come so far
            runtime.current().control.all_gather(everyone(), "check verdict", name)
            verdict = {"check": name, "ok": True, "seconds": round(time.perf_counter() - begin, 2)}
            if note is not None:
                verdict["note"] = note
        if rank() == 0:
            print(json.dumps(verdict), flush=True)
    tdcoll.finalize()
