# SPDX-License-Identifier: Apache-2.0
"""One rank is killed in the middle of a run; the others must end with CollectiveTimeout naming it.

`bash launch.sh --timeout 3 --monitor-interval 60 tests/workers/killed_rank.py [VICTIM]`
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

import tdcoll

CALLS_BEFORE = 10


def main() -> None:
    tdcoll.initialize()
    victim = int(sys.argv[1]) if len(sys.argv) > 1 else dist.get_world_size() - 1
    device = tdcoll.runtime.current().device
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=4096)
    data = torch.full((1024,), dist.get_rank(), dtype=torch.int32, device=device)
    for call in range(1000):
        if call == CALLS_BEFORE and dist.get_rank() == victim:
            if device.type == "cuda":
                torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)
        tdcoll.all_gather(data, ctx=ctx)
        ctx.check()


if __name__ == "__main__":
    main()
