# SPDX-License-Identifier: Apache-2.0
"""A rank that is late: the others say for whom they wait."""

from __future__ import annotations

import logging
import os
import threading
import time

import torch
from harness import check, device, expect, rank, run, world

import tdcoll
from tdcoll import hang


@check
def a_long_wait_says_so() -> str:
    """Ranks that wait log for whom, and answer `tdcoll hang` while their main threads wait for the GPU."""
    if world() == 1:
        return "one rank waits for no other"
    late, lines, answers = world() - 1, list[str](), list[dict[str, object]]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tdcoll")
    logger.addHandler(handler)
    try:
        with tdcoll.CollectiveContext(max_bytes_per_rank=256, timeout_s=15) as ctx:
            x = torch.ones(16, device=device())
            tdcoll.all_reduce(x, ctx=ctx)
            ctx.check()
            tdcoll.barrier()
            if rank() == late:
                time.sleep(8)
            else:
                asking = threading.Timer(6, lambda: answers.append(hang.ask(hang.address(os.getpid()))))
                asking.start()
            tdcoll.all_reduce(x, ctx=ctx)
            ctx.check()
            if rank() != late:
                asking.join()
    finally:
        logger.removeHandler(handler)
    if rank() != late:
        said = [line for line in lines if "all_reduce, call 2 of" in line]
        expect(len(said) == 1 and said[0].startswith(f"rank {rank()}: "), f"logged: {lines}")
        expect(f"all_reduce, call 2 of group {ctx.group_name}" in str(answers[0]["waits"]), f"answered: {answers}")
        if tdcoll.topology().n_nodes == 1:
            expect(said[0].endswith(f"for rank {late}"), said[0])
    return f"logged: {lines}"


if __name__ == "__main__":
    run()
