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

from tdcoll.bench.choosing import Candidate
from tdcoll.bench.rows import Row
from tdcoll.bench.tune import Tune
from tdcoll.testing import World

US = {"ll": 3.0, "direct": 5.0, "1d": 7.0}


def made_up(before: Callable[[str, int], None]) -> Callable[..., list[Row]]:
    """For ``Tune.measure_size``: LL is the fastest up to 4 KB, direct stores above. First it calls ``before``."""

    def measure_size(bench: Tune, size: Any, *_: object) -> list[Row]:
        operation, _, nbytes = size
        if bench.owner.rank == 0:
            before(operation.name, nbytes)
        rows = []
        with bench.wanted(size) as (every, _):
            for one in every:
                candidate = Candidate(**one.facts["candidate"])
                us = US[candidate.algorithm] * (3 if candidate.algorithm == "ll" and nbytes > 4096 else 1)
                us *= 1 if candidate.channels is candidate.chunk is None else 1.5
                kind: dict[str, Any] = {"algorithm": one.name, "peer": False, "launch": "graph", "check": "ok"}
                rows.append(Row(ranks=2, nodes=1, median_us=us, facts={**bench.facts(size), **one.facts}, **kind))
        return rows

    return measure_size


def run(arguments: list[str]) -> list[Row]:
    """``tune`` with these options, on two ranks."""
    options = Tune.parse(arguments)
    return World(2).run(lambda pe: Tune(options).measure(lambda rows: None))[0]


if __name__ == "__main__":

    def die(operation: str, nbytes: int) -> None:
        if nbytes == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)

    Tune.measure_size = made_up(die)  # type: ignore[method-assign]
    run(sys.argv[2:])
