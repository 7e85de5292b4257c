# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of torch.distributed, on backend "tdcoll", in one job: `pytorch_cases.py
[REGEX]`.

They are methods of `DistributedTest`, which PyTorch's wheels have. A case that wants more GPUs or
ranks than there are skips itself. Rank 0 prints a JSON line for each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
import types
import unittest
from pathlib import Path

import torch
import torch.distributed as dist
from backend_job import handled, join
from harness import rank, world

from tdcoll.distributed.options import KINDS

CASES = "test_"
"""How the names of those begin that are run."""

CANNOT = "test_(barrier_timeout_global|batch_isend_irecv_(mixed_backend|op)_err|SyncBatchNorm_process_group|"
CANNOT += "monitored_barrier.*|get_backend)"
"""Names of cases that end the default group, want NCCL or torchvision, that want PyTorch's
monitored_barrier, which it refuses for every group whose backend isn't named gloo, or that want
that name."""

LAST = "test_barrier_timeout_(full_)?group"
"""Names of cases after which a job of tdcoll ends, because a wait has expired in it. One is run if
it is chosen."""


def cases() -> type:
    """Return the class of all cases."""
    # a test dependency of PyTorch's, of which nothing is used here
    if importlib.util.find_spec("expecttest") is None:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    # which cases they are
    os.environ.setdefault("BACKEND", "nccl" if torch.cuda.is_available() else "gloo")
    # Two cases leave files there, for the other ranks.
    os.environ["TEMP_DIR"] = str(
        Path(tempfile.gettempdir()) / f"pytorch_cases-{os.environ['MASTER_PORT']}"
    )
    for folder in ("test_dir", "barrier"):
        (Path(os.environ["TEMP_DIR"]) / folder).mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("INIT_METHOD", "env://")
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test

    class Cases(distributed_test.DistributedTest._DistTestBase, TestCase):
        rank = rank()
        world_size = world()

        def _barrier(self, *_args, **_kwargs) -> None:
            dist.barrier()

    return Cases


def outcome_of(case: unittest.TestCase, name: str) -> str:
    """Run a case; return "passed" or why it was skipped."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    torch.manual_seed(1)  # as its setUp does
    try:
        getattr(case, name)()
    except unittest.SkipTest as skipped:
        return f"skipped: {skipped}"
    except SystemExit as ended:
        if ended.code not in skips:
            raise
        return f"skipped: {skips[ended.code]}"
    return "passed"


def main(chosen: str = CASES) -> None:
    join()
    torch.set_num_threads(1)
    made, failed = cases(), 0
    names = [
        name for name in dir(made) if re.match(chosen, name) and not re.fullmatch(CANNOT, name)
    ]
    for name in (
        names
        if len(names) == 1
        else [name for name in sorted(names) if not re.fullmatch(LAST, name)]
    ):
        if "cuda" in name and not torch.cuda.is_available():
            continue
        began = time.perf_counter()
        try:
            outcome = outcome_of(made(name), name)
        except Exception:
            outcome, failed = f"failed: {traceback.format_exc()}", failed + 1
        if not re.fullmatch(LAST, name):
            dist.barrier()
        if rank() == 0:
            seconds = round(time.perf_counter() - began, 1)
            print(json.dumps({"case": name, "outcome": outcome, "seconds": seconds}), flush=True)
    if rank() == 0:
        print(json.dumps({"handled": {kind: handled(kind) for kind in KINDS}}), flush=True)
    if re.fullmatch(LAST, names[-1]) and len(names) == 1:
        os._exit(failed > 0)
    dist.barrier()
    shutil.rmtree(os.environ["TEMP_DIR"], ignore_errors=True)
    dist.destroy_process_group()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
