# SPDX-License-Identifier: Apache-2.0
"""Forked children of ranks: jobs of ``workers/forked_job.py``, and what one process shows."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from checks import WORKERS
from processes import python
from tiers import slow_tier

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize("what", ["own", *map(slow_tier, ("backend", "beside", "workers"))])
def test_children_get_errors_and_leave_the_rank_alone(launch: Launch, what: str) -> None:
    done = launch("--simulate", "--nproc", "2", str(WORKERS / "forked_job.py"), what, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{what}: done") == 2
    assert "terminate called" not in done.stderr


DESTROYED = """
import os, sys
import torch.distributed as dist
import tdcoll
store = dist.TCPStore("localhost", 0, 1, True)
dist.init_process_group("gloo" if sys.argv[1] == "gloo" else "tdcoll", store=store, rank=0, world_size=1)
if sys.argv[1] == "gloo":
    tdcoll.initialize()
del store
child = os.fork()
if child == 0:
    import gc, signal
    signal.alarm(30)
    dist.destroy_process_group()
    tdcoll.finalize()
    gc.collect()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
dist.destroy_process_group()
sys.exit(status)
"""


@pytest.mark.parametrize("backend", ["tdcoll", "gloo"])
def test_a_child_may_destroy_what_it_was_forked_with(backend: str) -> None:
    """The store that the process serves has a thread, which the child lacks."""
    done = python("-c", DESTROYED, backend)
    assert done.returncode == 0, done.stderr
