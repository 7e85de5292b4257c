# SPDX-License-Identifier: Apache-2.0
"""Faults of a rank, or of the process that serves the store, in jobs of three ranks on the
simulator.

    TRITON_INTERPRET=1 python tests/job/fault_job.py [--seed 0] [--cases 20 | --all] [--parallel 7]

A case is a phase of a job's life, a fault in it, the victim, and who serves the store: rank 0 or,
as torchrun's agent does, another process. Each survivor writes down what it was told and when. One
JSON line is printed for each case. The ranks are forked, since importing PyTorch takes longer than
most cases.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tdcoll
import tdcoll.distributed
from tdcoll.job import lifecycle

RANKS = 3
TIMEOUT_S = 2.0
MOST_S = 3 * TIMEOUT_S
START_S = 0.3
HEAP_BYTES = 8 << 20
STORE = "store"

PHASES = ("rendezvous", "initialize", "group", "context", "exchange", "call", "finalize")
FAULTS = ("raise", "exit", "kill", "stop")

fork = get_context("fork")


class Case(NamedTuple):
    """``victim``: a rank, or ``STORE``, which is then served ``outside`` of the ranks."""

    phase: str
    fault: str
    victim: int | str
    store: str


def cases() -> list[Case]:
    of_ranks = itertools.product(PHASES, FAULTS, range(RANKS), ("inside", "outside"))
    of_stores = itertools.product(PHASES, ("kill", "stop"), (STORE,), ("outside",))
    return [Case(*each) for each in (*of_ranks, *of_stores)]


def plant(case: Case, port_file: Path) -> None:
    """Let the fault happen to the victim: this process, or the store's."""
    if case.victim == STORE:
        os.kill(
            int(port_file.read_text().split()[1]),
            signal.SIGKILL if case.fault == "kill" else signal.SIGSTOP,
        )
    elif case.fault == "raise":
        raise ZeroDivisionError("planted")
    elif case.fault == "exit":
        sys.exit(3)
    else:
        os.kill(os.getpid(), signal.SIGKILL if case.fault == "kill" else signal.SIGSTOP)


def life(rank: int, case: Case, phase: Callable[[str], None]) -> None:
    """Live until the fault; ``phase`` is told of each phase before it begins."""
    phase("rendezvous")
    if case.phase == "group":
        options = tdcoll.distributed.Options(heap_bytes=HEAP_BYTES)
        dist.init_process_group("tdcoll", timeout=timedelta(seconds=TIMEOUT_S), pg_options=options)
        phase("group")
        dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=TIMEOUT_S))
        return
    install = lifecycle._install

    def begin(*given: Any) -> None:  # the ranks have met, and exchange their settings next
        phase("initialize")
        install(*given)

    lifecycle._install = begin
    tdcoll.initialize(heap_bytes=HEAP_BYTES, timeout_s=TIMEOUT_S)
    phase("context")
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64)
    phase("exchange")
    tdcoll.barrier()
    data = torch.arange(4) + 10 * rank
    for call in range(3):
        if call == 1:
            phase("call")
        tdcoll.all_gather(data, ctx=ctx)
        ctx.check()
    phase("finalize")


def run_rank(rank: int, case: Case, folder: Path) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT), 2)
    while not (folder / "store").exists():
        time.sleep(0.005)
    port = (folder / "store").read_text().split()[0]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    if case.store == "outside":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def phase(name: str) -> None:
        if name == case.phase and rank == (0 if case.victim == STORE else case.victim):
            (folder / "fault").write_text(str(time.time()))
            plant(case, folder / "store")

    told = []
    for step in (lambda: life(rank, case, phase), tdcoll.finalize, tdcoll.finalize):
        try:
            step()
        except ZeroDivisionError:
            raise
        except Exception as error:
            told.append([type(error).__name__, str(error)])
    verdict = {"told": told, "ended": time.time()}
    (folder / f"{rank}.part").write_text(json.dumps(verdict))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    sys.stderr.flush()
    os._exit(0)


def serve(case: Case, folder: Path) -> None:
    """Say where the store is, and serve it if no rank does."""
    if case.store == "inside":
        import socket

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            words = f"{listener.getsockname()[1]} 0"
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        words = f"{store.port} {os.getpid()}"
    (folder / "part").write_text(words)
    (folder / "part").rename(folder / "store")
    if case.store == "outside":
        time.sleep(1000)


def attempt(case: Case) -> dict[str, Any]:
    """Run a case, and return what became of it: when the fault came, and what each survivor was
    told."""
    with tempfile.TemporaryDirectory(prefix="tdcoll-faults-") as name:
        folder = Path(name)
        processes = [
            fork.Process(target=run_rank, args=(rank, case, folder)) for rank in range(RANKS)
        ]
        processes.append(fork.Process(target=serve, args=(case, folder)))
        for process in processes:
            process.start()
        deadline = time.monotonic() + 3 * MOST_S  # far more time than survivors may take
        found: dict[str, Any] = {"case": list(case), "fault": None, "survivors": {}}
        try:
            for rank, process in enumerate(processes[:RANKS]):
                if rank != case.victim:
                    process.join(max(0.0, deadline - time.monotonic()))
                    file, log = folder / f"{rank}.json", folder / f"{rank}.log"
                    text = (
                        file.read_text()
                        if file.exists()
                        else json.dumps({"no end": log.read_text(errors="replace")[-2000:]})
                    )
                    found["survivors"][rank] = json.loads(text)
        finally:
            for process in processes:
                process.kill()
                process.join()
        if (fault := folder / "fault").exists():
            found["fault"] = float(fault.read_text())
        return found


def run(case: Case, start_s: float) -> dict[str, Any]:
    """Run a case ``start_s`` from now, and once more if the start met a deadline on a busy
    machine."""
    time.sleep(start_s)
    found = attempt(case)
    return attempt(case) if found["fault"] is None else found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--parallel", type=int, default=7)
    given = parser.parse_args()
    every = cases()
    chosen = every if given.all else random.Random(given.seed).sample(every, given.cases)
    starts = [START_S * number * (number < given.parallel) for number in range(len(chosen))]
    with ProcessPoolExecutor(given.parallel, fork) as pool:
        for verdict in pool.map(run, chosen, starts):
            print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
