# SPDX-License-Identifier: Apache-2.0
"""FSDP2 in symmetric memory, where something goes wrong on rank 1 in the third of five steps; the
other ranks must end with an error that names it.

`bash launch.sh --nproc 2 tests/workers/fsdp_faults.py KIND`

`skip`: it leaves the step out. `memory`: it has no memory in the backward pass. `exception`: its
backward pass raises. `interrupt`: it gets a signal while it waits in a collective. Each rank prints
its error as one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
from backend_job import join
from fsdp_checks import batch, build, loss_of
from harness import rank

from tdcoll.distributed import fsdp

VICTIM = 1
STEPS = 5
FAULTY = 2
TIMEOUT_S = 3


def fail(kind: str) -> None:
    if kind == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory, on purpose")
    raise ValueError("on purpose")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt("on purpose")


def main(kind: str) -> None:
    model = build()
    communication = fsdp.use(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x = batch(step)
        if step == FAULTY and rank() == VICTIM:
            if kind == "skip":
                continue
            if kind == "interrupt":
                signal.signal(signal.SIGALRM, interrupt)
                signal.setitimer(signal.ITIMER_REAL, 0.5)
            else:
                x.requires_grad_().register_hook(lambda _: fail(kind))
        if step == FAULTY and rank() != VICTIM and kind == "interrupt":
            time.sleep(1.5)
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        communication.check()


if __name__ == "__main__":
    join(blocks=16, timeout_s=TIMEOUT_S)
    try:
        main(sys.argv[1])
        error = "none"
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    print(json.dumps({"rank": rank(), "error": error}), flush=True)
    # The others' waits have to expire while this rank is alive, as in a program that cleans up.
    time.sleep(2 * TIMEOUT_S)
    os._exit(0)
