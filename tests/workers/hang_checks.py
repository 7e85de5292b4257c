# SPDX-License-Identifier: Apache-2.0
"""A rank that is late: the others say for whom they wait."""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from harness import check, device, everyone, expect, rank, simulated, world

import tdcoll
from tdcoll.base import hang

TIMEOUT_S = 60.0  # a line comes after 10 s


@check
def a_long_wait_says_so() -> str:
    """Ranks that wait for the GPU log for whom, and answer `tdcoll hang`. The late rank comes when
    all have done so."""
    if world() == 1:
        return "one rank waits for no other"
    late, lines, answers = world() - 1, list[str](), list[str]()
    store = dist.distributed_c10d._get_default_store()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tdcoll")
    logger.addHandler(handler)

    def said() -> list[str]:
        return [line for line in lines if "all_gather, call 2 of" in line]

    def ask() -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and not (
            said() and any("call 2 of" in answer for answer in answers)
        ):
            time.sleep(0.2)
            if said():
                answers.append(str(hang.ask(hang.address(os.getpid()))["waits"]))
        store.set(f"hang_checks/{rank()}", "asked")

    try:
        with tdcoll.CollectiveContext(max_bytes_per_rank=256, timeout_s=TIMEOUT_S) as ctx:
            # gathered directly from each rank, so only the late one is missing
            x = torch.ones(16, device=device())
            tdcoll.all_gather(x, ctx=ctx)
            ctx.check()
            tdcoll.barrier()
            asking = threading.Thread(target=ask, daemon=True)
            if rank() == late:
                others = [f"hang_checks/{other}" for other in everyone() if other != late]
                store.wait(others, timedelta(seconds=TIMEOUT_S))
            else:
                asking.start()
            tdcoll.all_gather(x, ctx=ctx)
            ctx.check()
            if rank() != late:
                asking.join()
    finally:
        logger.removeHandler(handler)
    if rank() != late:
        # On busy cores a simulated kernel may leave no notices for so long that its wait is taken
        # for another one.
        expect(len(said()) == 1 or (simulated() and said()), f"logged: {lines}")
        expect(said()[0].startswith(f"rank {rank()}: "), f"logged: {lines}")
        expect(f"all_gather, call 2 of {ctx.calls.group}" in answers[-1], f"answered: {answers}")
        if tdcoll.topology().n_nodes == 1:
            expect(said()[0].endswith(f"for rank {late}"), said()[0])
    return f"logged: {lines}"
