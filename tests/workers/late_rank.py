# SPDX-License-Identifier: Apache-2.0
"""A call for which rank 1 doesn't come, with a timeout that was set late: `late_rank.py KIND HOW`.

``HOW``: "group" (set_timeout), "pytorch" (PyTorch's _set_pg_timeout), "call" (the call's own), each
with an "-async" behind it or without; and "new" for a first call, which waits on the host. Rank 0
prints after how many seconds which error came.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tdcoll.distributed import Options

LATE_S = 1.5


def call_of(kind: str, group: Any, timeout: timedelta | None, asynchronous: bool) -> Any:
    """Make a call of a kind; the first call of a kind makes contexts."""
    n = dist.get_world_size()
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )

    def options(of: Any) -> Any:
        opts = of()
        opts.asyncOp = asynchronous
        if timeout is not None:
            opts.timeout = timeout
        return opts

    small, whole = torch.ones(4, device=device), torch.ones(4 * n, device=device)
    if kind in ("all_reduce", "fallback"):
        return group.allreduce([small], options(c10d.AllreduceOptions))
    if kind == "all_gather":
        return group.all_gather_single(whole, small, options(c10d.AllgatherOptions))
    if kind == "list":
        return group.allgather([list(whole.view(n, 4))], [small], options(c10d.AllgatherOptions))
    if kind == "reduce_scatter":
        return group.reduce_scatter_single(small, whole, options(c10d.ReduceScatterOptions))
    if kind == "all_to_all":
        return group.all_to_all_single(whole, whole.clone(), [], [], options(c10d.AllToAllOptions))
    if kind == "sparse":
        rows = torch.sparse_coo_tensor(
            [[0]], [[1.0]], (2, 1), device=device, check_invariants=False
        )
        return group.allreduce([rows], options(c10d.AllreduceOptions))
    assert kind == "barrier"
    return group.barrier(options(c10d.BarrierOptions))


def main(kind: str, how: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    limits = Options(max_bytes_per_rank=0 if kind == "fallback" else None)
    dist.init_process_group("tdcoll", timeout=timedelta(seconds=60), pg_options=limits)
    group: Any = dist.group.WORLD
    way, _, asynchronous = how.partition("-")
    if way != "new":
        call_of(kind, group, None, False).wait()
        dist.barrier()
    late, own = timedelta(seconds=LATE_S), None
    if way in ("group", "new"):
        group.set_timeout(late)
    elif way == "pytorch":
        c10d._set_pg_timeout(late, group)
    else:
        own = late
    store: Any = c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["the other rank has waited"], timedelta(seconds=60))
        os._exit(0)
    began = time.monotonic()
    try:
        work = call_of(kind, group, own, bool(asynchronous))
        work.wait()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            call_of(kind, group, None, False)
        error = "none"
    except Exception as raised:
        error = type(raised).__name__
    print(json.dumps({"error": error, "seconds": round(time.monotonic() - began, 2)}), flush=True)
    store.set("the other rank has waited", "yes")
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
