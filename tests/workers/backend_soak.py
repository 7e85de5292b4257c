# SPDX-License-Identifier: Apache-2.0
"""Many calls of backend "tdcoll", after which a rank holds no more than before: `backend_soak.py CALLS`.

Each round makes calls of every kind, synchronous and asynchronous, with futures and callbacks, of tensors with strides,
and of the fallback backend. Rank 0 prints one JSON line.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time

os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # PyTorch keeps the traces of the last 2,000 calls of gloo

import torch
import torch.distributed as dist
from backend_job import SINGLE_SCATTER, data, handled, join, single, sparse
from harness import device, expect, rank, world

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "sparse_all_reduce", "barrier")


def held() -> dict[str, int]:
    """Return what this process holds: resident memory in KiB, open files, threads, and the store's keys."""
    gc.collect()
    dist.barrier()
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    store = dist.distributed_c10d._get_default_store()
    files, keys = len(os.listdir("/proc/self/fd")), store.num_keys()
    dist.barrier()  # nobody goes on meanwhile
    return {"KiB": resident, "files": files, "threads": threading.active_count(), "keys": keys}


def one_round() -> None:
    small, large = data(rank(), 6), torch.zeros(9, device=device(), dtype=torch.uint8)
    out, part = torch.empty(6 * world(), device=device()), torch.empty(6, device=device())
    works = [
        dist.all_reduce(small, async_op=True),
        single(out, data(rank(), 6), async_op=True),
        dist.all_reduce(large, async_op=True),  # by gloo or NCCL
        dist.all_reduce(torch.zeros(8, 2, device=device(), dtype=torch.uint8)[:, 0], async_op=True),
        dist.all_reduce(sparse(rank()), async_op=True),
    ]
    future = works[0].get_future().then(lambda done: dist.all_reduce(done.value()[0], async_op=True).wait())
    for work in works:
        work.wait()
    expect(future.wait(), "the callback")
    dist.all_reduce(torch.ones(4, 3, device=device()).t())
    SINGLE_SCATTER(part, out)
    single(out, part)
    dist.barrier()


def main(calls: int) -> None:
    join()
    torch.set_num_threads(1)
    first = sum(map(handled, KINDS))
    for _ in range(60):  # which warms up caches
        one_round()
    per_round = (sum(map(handled, KINDS)) - first) // 60
    rounds = max(1, calls // per_round)
    seen, began = [held()], time.monotonic()
    for _ in range(2):
        for _ in range(rounds // 2 + 1):
            one_round()
        seen.append(held())
    before, middle, after = seen
    for what in ("files", "threads", "keys"):
        expect(after[what] == middle[what] <= before[what] + 1, f"{what}: {seen}")
    grown = after["KiB"] - middle["KiB"]
    if rank() == 0:
        line = {"calls": 2 * (rounds // 2 + 1) * per_round, "held": seen, "seconds": round(time.monotonic() - began, 1)}
        print(json.dumps(line), flush=True)
    expect(grown < 512 + calls // 40, f"memory grows by {grown} KiB: {seen}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
