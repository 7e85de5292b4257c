# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of torch.distributed, on backend "tdcoll", in one job: `pytorch_cases.py [REGEX]`.

They are methods of `DistributedTest`, which PyTorch's wheels have. A case that wants more GPUs or ranks than there are
skips itself. Rank 0 prints a JSON line for each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import tempfile
import time
import traceback
import types
import unittest

import torch
import torch.distributed as dist
from backend_job import handled, join
from harness import rank, world

from tdcoll.distributed.options import KINDS

CASES = "test_(all_gather|all_reduce|all_to_all|broadcast|gather|scatter|reduce|send_recv|isend|batch_isend|"
CASES += "barrier|DistributedDataParallelCPU|DistributedDataParallel_requires_grad)"
"""How the names of those begin that are run. Others end the job's group, or take long."""

CANNOT = "test_(barrier_timeout.*|all_to_all(_full_group|_group)?(_complex)?|batch_isend_irecv_.*_err)"
"""Names of cases that end the job's group, want a GPU, or fail on gloo as well."""


def cases() -> type:
    """Return the class of all cases."""
    if importlib.util.find_spec("expecttest") is None:  # a test dependency of PyTorch's, of which nothing is used here
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    os.environ.setdefault("BACKEND", "nccl" if torch.cuda.is_available() else "gloo")  # which cases they are
    os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
    os.environ.setdefault("INIT_METHOD", "env://")
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test

    class Cases(distributed_test.DistributedTest._DistTestBase, TestCase):
        rank = rank()
        world_size = world()

        def _barrier(self, *_args, **_kwargs) -> None:
            dist.barrier()

        def call_dist_op(self, _title, is_async, op, *args, secondary_op_call=None, **named) -> None:
            """Without the profiler."""
            for name in ("expect_event", "profile_cuda", "tensor_shapes"):
                named.pop(name, None)
            works = [op(*args, **named), *([secondary_op_call()] if secondary_op_call else [])]
            for work in works if is_async else ():
                work.wait()

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
    for name in sorted(name for name in dir(made) if re.match(chosen, name) and not re.fullmatch(CANNOT, name)):
        if "cuda" in name and not torch.cuda.is_available():
            continue
        began = time.perf_counter()
        try:
            outcome = outcome_of(made(name), name)
        except Exception:
            outcome, failed = f"failed: {traceback.format_exc()}", failed + 1
        dist.barrier()
        if rank() == 0:
            seconds = round(time.perf_counter() - began, 1)
            print(json.dumps({"case": name, "outcome": outcome, "seconds": seconds}), flush=True)
    if rank() == 0:
        print(json.dumps({"handled": {kind: handled(kind) for kind in KINDS}}), flush=True)
    dist.destroy_process_group()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
