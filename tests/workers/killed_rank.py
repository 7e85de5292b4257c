# SPDX-License-Identifier: Apache-2.0
"""One rank is killed in the middle of a run; the others must end naming it.

`bash launch.sh --timeout 3 --monitor-interval 60 tests/workers/killed_rank.py
{calls,dense,inner,sparse} [VICTIM]`

`calls`: all-gathers of tdcoll's own; all others: DDP training over backend "tdcoll". `dense`: the
model has no sparse table. `inner`: it has none either, and the fallback backend's all-reduce fails.
`sparse`: it dies when its dense gradients are on their way, and the others wait for its rows.
Survivors print their errors on standard error.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import tdcoll
from tdcoll.distributed import BackendTimeout, Options

CALLS_BEFORE, STEPS_BEFORE = 10, 2
TIMEOUT_S = 3


def die() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    os.kill(os.getpid(), signal.SIGKILL)


def calls(victim: int) -> None:
    tdcoll.initialize()
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=4096)
    data = torch.full((1024,), dist.get_rank(), dtype=torch.int32, device=tdcoll.device())
    for call in range(1000):
        if call == CALLS_BEFORE and dist.get_rank() == victim:
            die()
        tdcoll.all_gather(data, ctx=ctx)
        ctx.check()


def training(when: str, victim: int) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    options = Options(handles="all_gather,barrier" if when == "inner" else "all")
    dist.init_process_group("tdcoll", timeout=timedelta(seconds=TIMEOUT_S), pg_options=options)
    rank = dist.get_rank()
    table, dense = nn.Embedding(50, 8, sparse=when == "sparse"), nn.Linear(8, 4)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(table, dense).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1000):
        dying = step == STEPS_BEFORE and rank == victim
        optimizer.zero_grad()
        began = time.monotonic()
        try:
            loss = model(torch.arange(10, device=device) * (rank + 1) % 50).sum()
            if dying and when != "sparse":
                die()
            if dying and when == "sparse":
                table.weight.register_hook(lambda gradient: (time.sleep(0.5), die(), gradient)[2])
            loss.backward()
        except RuntimeError as error:
            say(f"rank {rank} after {time.monotonic() - began:.0f} s: {error}")
            # and a call of tdcoll's own kernels says so as well, in the exception that is
            # documented
            try:
                (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(
                    torch.empty(dist.get_world_size(), device=device), torch.ones(1, device=device)
                )
                dist.barrier()
            except (dist.DistBackendError, tdcoll.TdcollError) as error:
                kind = (
                    "BackendTimeout" if isinstance(error, BackendTimeout) else type(error).__name__
                )
                say(f"rank {rank} then: {kind}: {error}")
            raise
        optimizer.step()


def say(text: str) -> None:
    """On a line of its own: ``print`` writes a text and its end apart, and ranks share the standard
    error."""
    sys.stderr.write(text.replace("\n", " ") + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    what, who = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    calls(who) if what == "calls" else training(what, who)
