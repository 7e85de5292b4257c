# SPDX-License-Identifier: Apache-2.0
"""Many calls of backend "tdcoll", after which a rank holds no more than before:
`PYTHONMALLOC=malloc bash launch.sh tests/workers/backend_soak.py CALLS [leak]`, with `leak` 3 KB
more in each round.

Each round makes calls of every kind, synchronous and asynchronous, with futures and callbacks, of
tensors with strides, and of the fallback backend. Caches grow now and then, whereas a leak grows in
every window of calls. Memory is what glibc's malloc (from 2.33) has given away and not got back,
Python's objects included; resident memory would also grow by fragmentation. Memory that is mapped
past malloc, such as the simulated heap, isn't counted. Rank 0 prints one JSON line.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from itertools import pairwise

os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # PyTorch keeps the traces of the last 2,000 calls of gloo

import torch
import torch.distributed as dist
from backend_job import SINGLE_SCATTER, data, handled, join, single, sparse
from harness import device, expect, rank, world

from tdcoll.simulator.bounds import Bounds

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "sparse_all_reduce", "barrier")
WINDOWS = 4


class MallInfo2(ctypes.Structure):
    """man 3 mallinfo2: ``hblkhd``, bytes of mapped blocks, is field 4; ``uordblks``, of the others,
    is field 7."""

    _fields_ = tuple((f"field{index}", ctypes.c_size_t) for index in range(10))


def held() -> dict[str, int]:
    """Return what this process holds: allocated memory in KiB, open files, threads, and the store's
    keys."""
    gc.collect()
    for thing in gc.get_objects():
        if isinstance(thing, Bounds):
            thing._storages._look_again()  # it holds up to a thousand dead storages
    dist.barrier()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo2
    info = mallinfo2()
    store = dist.distributed_c10d._get_default_store()
    files, keys = len(os.listdir("/proc/self/fd")), store.num_keys()
    dist.barrier()  # nobody goes on meanwhile
    allocated = (info.field4 + info.field7) // 1024
    return {"KiB": allocated, "files": files, "threads": threading.active_count(), "keys": keys}


def one_round() -> None:
    small, large = data(rank(), 6), torch.zeros(9, device=device(), dtype=torch.uint8)
    out, part = torch.empty(6 * world(), device=device()), torch.empty(6, device=device())
    works = [dist.all_reduce(small, async_op=True)]
    future = (
        works[0]
        .get_future()
        .then(lambda done: dist.all_reduce(done.value()[0], async_op=True).wait())
    )
    works += [
        single(out, data(rank(), 6), async_op=True),
        dist.all_reduce(large, async_op=True),  # by gloo or NCCL
        dist.all_reduce(torch.zeros(8, 2, device=device(), dtype=torch.uint8)[:, 0], async_op=True),
        dist.all_reduce(sparse(rank()), async_op=True),
    ]
    for work in works:
        work.wait()
    expect(future.wait(), "the callback")
    dist.all_reduce(torch.ones(4, 3, device=device()).t())
    SINGLE_SCATTER(part, out)
    single(out, part)
    dist.barrier()


def main(calls: int, leaks: bool) -> None:
    expect(os.environ.get("PYTHONMALLOC") == "malloc", "PYTHONMALLOC must be malloc")
    leaked: list[bytes] = []
    join()
    torch.set_num_threads(1)
    first = sum(map(handled, KINDS))
    for _ in range(60):  # which warms up caches
        one_round()
    per_round = (sum(map(handled, KINDS)) - first) // 60
    rounds = calls // per_round // WINDOWS + 1
    seen, began = [held()], time.monotonic()
    for _ in range(WINDOWS):
        for _ in range(rounds):
            one_round()
            leaked += [bytes(bytearray(3000))] * leaks
        seen.append(held())
    if rank() == 0:
        made, seconds = WINDOWS * rounds * per_round, round(time.monotonic() - began, 1)
        print(json.dumps({"calls": made, "held": seen, "seconds": seconds}), flush=True)
    for what in ("files", "threads", "keys"):
        counts = [one[what] for one in seen]
        expect(len(set(counts[1:])) == 1 and counts[1] <= counts[0] + 1, f"{what}: {seen}")
    grown = min(after["KiB"] - before["KiB"] for before, after in pairwise(seen))
    made = rounds * per_round
    expect(grown < made // 8, f"memory grows by at least {grown} KiB in every {made} calls: {seen}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), "leak" in sys.argv)
