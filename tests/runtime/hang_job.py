# SPDX-License-Identifier: Apache-2.0
"""A job of two ranks that hangs until the test lets it go on: `hang_job.py FOLDER`. See
test_hang.py.

In each phase, one rank does not come before a file of the phase's name. Ranks that begin it write
`RANK.PHASE`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import tdcoll
from tdcoll.runtime import watch

TIMEOUT_S = 60.0
FIRST_S, SECOND_S = 1.0, 2.5

RANK = int(os.environ.get("RANK", "0"))
FOLDER = Path(sys.argv[-1])


def late(phase: str, rank: int) -> None:
    """Begin a phase, for which ``rank`` is late."""
    (FOLDER / f"{RANK}.{phase}").touch()
    if rank == RANK:
        deadline = time.monotonic() + TIMEOUT_S
        while not (FOLDER / phase).exists():
            assert time.monotonic() < deadline, f"the test did not end phase {phase}"
            time.sleep(0.02)


def watching() -> bool:
    return any(thread.name == "tdcoll-watch" for thread in threading.enumerate())


def in_a_child() -> None:
    """A forked child watches nothing, and a signal that it gets is not taken for one that its
    parent gets."""
    child = os.fork()
    if child == 0:
        alone = watch._current is None and not watching()
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(0 if alone else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main() -> None:
    watch._FIRST_S, watch._SECOND_S = FIRST_S, SECOND_S
    if RANK == 1:
        signal.signal(signal.SIGUSR1, lambda *_: print("own handler", flush=True))
    x = torch.ones(8)

    late("join", 1)
    tdcoll.initialize(timeout_s=TIMEOUT_S)
    for _ in range(3):
        tdcoll.all_reduce(x)
    if RANK == 0:
        in_a_child()
    late("make", 1)
    with tdcoll.CollectiveContext(max_bytes_per_rank=1024) as ctx:
        tdcoll.all_gather(x, ctx=ctx)
        tdcoll.all_reduce(x, ctx=ctx)
        late("call", 1)
        tdcoll.all_reduce(x, ctx=ctx)
        # The waits of these two are short, and no line is about them.
        tdcoll.all_reduce(x, ctx=ctx)
        tdcoll.all_gather(x, ctx=ctx)
        tdcoll.finalize()
    assert not watching(), "the thread has outlived the job"

    tdcoll.initialize(timeout_s=TIMEOUT_S)
    tdcoll.all_gather(x)
    assert watching(), "nobody looks at the second job"
    (FOLDER / f"{RANK}.stopped").touch()
    if RANK == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    tdcoll.all_gather(x)
    tdcoll.finalize()
    print("done", flush=True)


if __name__ == "__main__":
    main()
