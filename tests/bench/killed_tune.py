# SPDX-License-Identifier: Apache-2.0
"""`tune` with made-up times on two ranks, as a process that is killed when it comes to a size:
`killed_tune.py SIZE OPTIONS...`"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from tdcoll.bench import all_gather, tune
from tdcoll.bench.arithmetic import Summary
from tdcoll.bench.rows import Row
from tdcoll.testing import World

US = {"ll": 3.0, "direct": 5.0, "1d": 7.0, "nccl": 9.0}


def made_up(before: Callable[[int], None]) -> Callable[..., list[Row]]:
    """For ``measure_size``: LL is the fastest up to 4 KB, direct stores above. First it calls ``before``."""

    def measure_size(job: Any, nbytes: int, storage: object, line_up: object, straggler: object) -> list[Row]:
        if job.owner.rank == 0:
            before(nbytes)
        rows = []
        for candidate in tune._candidates(job.tuned, nbytes, job.topology, nbytes):
            job.known[candidate.name] = candidate
            us = US[candidate.algorithm] * (3 if candidate.algorithm == "ll" and nbytes > 4096 else 1)
            us *= 1 if candidate.channels is candidate.chunk is None else 1.5
            kind: dict[str, Any] = {"algorithm": candidate.name, "peer": candidate.algorithm == "nccl", "check": "ok"}
            row = Row(ranks=2, nodes=1, bytes_per_rank=nbytes, launch="graph", **kind)
            rows.append(row.timed(Summary(us, us, us)))
        return rows

    return measure_size


def run(arguments: list[str]) -> list[Row]:
    """``tune`` with these options, on two ranks."""
    options = tune.parse(arguments)

    def host(pe: int) -> list[Row]:
        return tune.measure(options, arguments, lambda row: None)

    return World(2).run(host)[0]


if __name__ == "__main__":

    def die(nbytes: int) -> None:
        if nbytes == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)

    all_gather.measure_size = made_up(die)
    run(sys.argv[2:])
