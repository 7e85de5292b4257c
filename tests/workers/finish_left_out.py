# SPDX-License-Identifier: Apache-2.0
"""Rank 0 ends after a backward pass without the reducer's finish(), and no other rank takes part in
what it began.

`bash launch.sh --nproc 2 tests/workers/finish_left_out.py`: the processes must end well, and rank 0
soon.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn

import tdcoll
from tdcoll.distributed import SparseGradientReducer

if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    tdcoll.initialize(timeout_s=100)
    table = nn.Embedding(16, 4, sparse=True, device=tdcoll.device())
    reducer = SparseGradientReducer(table)
    if dist.get_rank() == 0:
        table(torch.tensor([1, 2], device=tdcoll.device())).sum().backward()
    else:
        time.sleep(15)  # torchrun ends it if rank 0 is aborted
