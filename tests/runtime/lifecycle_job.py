# SPDX-License-Identifier: Apache-2.0
"""What a program of one process does with initialize() and finalize(): each function is a step of its life.

`python lifecycle_job.py [STEP...]` runs them one after the other in one process, and prints what each raised as JSON.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import tdcoll
from tdcoll import runtime

STEPS: dict[str, Callable[[], None]] = {}


def step(function: Callable[[], None]) -> Callable[[], None]:
    STEPS[function.__name__] = function
    return function


def gather_and_compare() -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        data = torch.arange(16, dtype=torch.int32)
        assert torch.equal(tdcoll.all_gather(data, ctx), data)
        ctx.check()
    out = torch.zeros(16, dtype=torch.int32)
    tdcoll.all_gather_into_tensor(out, data)
    assert torch.equal(out, data)


@step
def without_a_launcher() -> None:
    assert not tdcoll.is_initialized()
    tdcoll.initialize()
    assert tdcoll.is_initialized()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert tdcoll.heap_info().total == 64 << 20
    assert runtime.current().timeout_s == 30.0
    assert tdcoll.topology().describe() == "1 rank(s) on 1 node(s) (1)"
    gather_and_compare()
    tdcoll.finalize()
    assert not tdcoll.is_initialized()
    assert not dist.is_initialized(), "the process group was tdcoll's own"
    tdcoll.finalize()


@step
def the_size_of_the_heap_is_logged() -> None:
    log, said = logging.getLogger("tdcoll"), io.StringIO()
    log.addHandler(handler := logging.StreamHandler(said))
    log.setLevel(logging.INFO)
    tdcoll.initialize(heap_bytes=3 << 19)
    tdcoll.finalize()
    log.removeHandler(handler)
    text = "symmetric heap: 1.5 MiB on each of 1 ranks, by the simulator; NVSHMEM_SYMMETRIC_SIZE or initialize(heap_b"
    assert said.getvalue().startswith(text)


@step
def environment_variables_are_defaults() -> None:
    os.environ |= {"NVSHMEM_SYMMETRIC_SIZE": "2M", "TDCOLL_TIMEOUT_S": "2.5", "TDCOLL_EMULATE_NODES": "1"}
    tdcoll.initialize()
    assert tdcoll.heap_info().total == 2 << 20
    assert runtime.current().timeout_s == 2.5
    tdcoll.finalize()
    tdcoll.initialize(heap_bytes=4096, timeout_s=3)
    assert (tdcoll.heap_info().total, runtime.current().timeout_s) == (4096, 3.0)
    tdcoll.finalize()
    for name in ("NVSHMEM_SYMMETRIC_SIZE", "TDCOLL_TIMEOUT_S", "TDCOLL_EMULATE_NODES"):
        os.environ[name] = ""  # as good as not set
    tdcoll.initialize()
    assert (tdcoll.heap_info().total, runtime.current().timeout_s) == (64 << 20, 30.0)
    tdcoll.finalize()


@step
def second_call_asks_for_the_same() -> None:
    tdcoll.initialize(heap_bytes=8 << 20, timeout_s=7)
    job = runtime.current()
    tdcoll.initialize()
    tdcoll.initialize(heap_bytes=8 << 20)
    tdcoll.initialize(timeout_s=7.0, emulate_nodes=1, share_gpus=False)
    assert runtime.current() is job
    assert tdcoll.WaitMonitor().timeout_s == 7.0
    tdcoll.free(tdcoll.empty(8 << 20, torch.uint8))
    gather_and_compare()
    tdcoll.finalize()


@step
def second_call_with_other_settings() -> None:
    tdcoll.initialize(heap_bytes=8 << 20, timeout_s=7)
    for asked, text in (
        ({"heap_bytes": 1 << 21}, "heap_bytes=8388608; got 2097152"),
        ({"timeout_s": 8}, r"timeout_s=7\.0; got 8"),
        ({"heap_bytes": 8 << 20, "emulate_nodes": 2}, "emulate_nodes=1; got 2"),
        ({"share_gpus": True}, "share_gpus=False; got True"),
    ):
        with pytest.raises(tdcoll.AlreadyInitializedError, match=text + r"\. Call tdcoll\.finalize"):
            tdcoll.initialize(**asked)
    gather_and_compare()
    tdcoll.finalize()


@step
def a_job_knows_its_heap() -> None:
    with pytest.raises(tdcoll.TdcollError, match="emulate_nodes=2 needs puts, which heap='torch' does not have"):
        tdcoll.initialize(heap="torch", emulate_nodes=2)
    tdcoll.initialize(heap="torch")
    tdcoll.initialize()
    tdcoll.initialize(heap="auto")
    with pytest.raises(tdcoll.AlreadyInitializedError, match="heap=torch; got nvshmem"):
        tdcoll.initialize(heap="nvshmem")
    tdcoll.finalize()


@step
def refused_settings_leave_nothing_behind() -> None:
    with pytest.raises(ValueError, match=r"emulate_nodes must be between 1 and the 1 rank\(s\) of this host, got 2"):
        tdcoll.initialize(emulate_nodes=2)
    with pytest.raises(tdcoll.HeapExhaustedError, match="NVSHMEM_SYMMETRIC_SIZE"):
        tdcoll.initialize(heap_bytes=1 << 60)
    assert not tdcoll.is_initialized()
    assert not dist.is_initialized()
    tdcoll.initialize()
    tdcoll.finalize()


@step
def finalize_closes_contexts_of_the_drop_in_call() -> None:
    tdcoll.initialize()
    tdcoll.all_gather_into_tensor(torch.zeros(4), torch.ones(4))
    (pool,) = runtime.current().contexts.values()
    context = pool.context
    tdcoll.finalize()
    assert context.closed


@step
def failed_job_is_only_forgotten() -> None:
    tdcoll.initialize()
    job = runtime.current()
    job.failed = True
    tdcoll.finalize()
    assert not tdcoll.is_initialized()
    assert dist.is_initialized(), "nothing collective may be tried: a peer may be gone"
    dist.destroy_process_group()
    job.heap.close()


@step
def nodes_are_named_by_the_launcher() -> None:
    for variable in ("SLURM_NODEID", "GROUP_RANK"):  # the later one wins
        os.environ[variable] = "3"
        tdcoll.initialize()
        assert runtime.current().node_ids == ((f"{variable}=3", 0),)
        tdcoll.finalize()
    del os.environ["SLURM_NODEID"], os.environ["GROUP_RANK"]


@step
def beside_the_users_process_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tdcoll.initialize()
    gather_and_compare()
    group = dist.new_group([0])
    assert tdcoll.topology(group).pes == (0,)
    tdcoll.finalize()
    assert dist.is_initialized(), "the process group is the user's"
    assert dist.get_world_size() == 1
    tdcoll.initialize()
    gather_and_compare()
    tdcoll.finalize()
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.destroy_process_group()


@step
def other_ranks_without_finalize() -> None:
    tdcoll.initialize()
    dist.get_rank, original = (lambda: 1), dist.get_rank
    try:
        with pytest.raises(tdcoll.AlreadyInitializedError, match=r"rank 0 of 1, but torch\.distributed is now rank 1"):
            tdcoll.initialize()
    finally:
        dist.get_rank = original
    tdcoll.finalize()


def main() -> None:
    outcome = {}
    for name in sys.argv[1:] or STEPS:
        try:
            STEPS[name]()
            outcome[name] = ""
        except BaseException:
            outcome[name] = traceback.format_exc()
            tdcoll.finalize()  # or every step after it fails too
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
