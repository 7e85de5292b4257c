# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job join and leave it again and again, each at its own pace, on GPUs or on the
simulator.

    bash launch.sh --nproc 4 tests/job/rejoin_job.py [--rounds 50] [LIFE...]     # torchrun's store serves the job
    python tests/job/rejoin_job.py --spawn 4 [--rounds 50] [LIFE...]             # rank 0's process serves the store

The second wants the environment of `source setenv.sh`, or TRITON_INTERPRET=1. Each LIFE is one kind
of joining and leaving, lived for so many rounds; without any, all of them are. The first rank
prints a JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import tdcoll
import tdcoll.distributed
from tdcoll.language import INTERPRETED

HEAP_BYTES = 32 << 20
TIMEOUT_S = 3
INNER = "gloo" if INTERPRETED else "cpu:gloo,cuda:nccl"

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def device() -> torch.device:
    return torch.device("cpu") if INTERPRETED else torch.device("cuda", torch.cuda.current_device())


def dawdle() -> None:
    """No two ranks leave and join at the same moment, and none is always the first."""
    time.sleep(random.choice((0.0, 0.0, 0.01, 0.05)))


def data(owner: int, number: int) -> torch.Tensor:
    return torch.full((5,), 100.0 * number + owner, device=device())


def gathered(out: torch.Tensor, ranks: list[int], number: int) -> None:
    wanted = torch.cat([data(owner, number) for owner in ranks])
    assert torch.equal(out, wanted), f"rank {RANK}, round {number}: {out} instead of {wanted}"


def expect(kind: type[BaseException], action: Callable[[], Any], *words: str) -> None:
    try:
        action()
    except kind as error:
        if all(word in str(error) for word in words):
            return
        raise
    raise AssertionError(f"{kind.__name__} was not raised")


def live_in_own_calls(number: int) -> None:
    """Between initialize() and finalize(): stores and puts, whose kernels were loaded in the first
    round."""
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        for algorithm in ("auto", "1d"):
            gathered(
                tdcoll.all_gather(data(RANK, number), ctx=ctx, algorithm=algorithm),
                list(range(WORLD)),
                number,
            )
        ctx.check()
    out = torch.empty(5 * WORLD, device=device())
    # by a context that finalize() closes
    tdcoll.distributed.all_gather_into_tensor(out, data(RANK, number))
    gathered(out, list(range(WORLD)), number)


def live_in_the_group(number: int) -> None:
    """Between init_process_group("tdcoll") and destroy_process_group()."""

    def gather(group: Any, ranks: list[int]) -> None:
        out = [torch.empty(5, device=device()) for _ in ranks]
        dist.all_gather(out, data(RANK, number), group=group)
        gathered(torch.cat(out), ranks, number)
        total = data(RANK, number)
        dist.all_reduce(total, group=group)
        assert torch.equal(total, sum(data(owner, number) for owner in ranks)), (
            f"rank {RANK}, round {number}"
        )

    gather(None, list(range(WORLD)))
    ends, rest = [0, WORLD - 1], list(range(1, WORLD))
    for ranks in (ends, rest):  # the name of a round's group is that of another round's as well
        group = dist.new_group(ranks if number % 2 else ranks[::-1])
        if RANK in ranks:
            gather(group, ranks)
            if number % 3 == 0:
                dist.destroy_process_group(group)


# ---------------------------------------------------------------------- lives


def own(number: int) -> None:
    tdcoll.initialize(heap_bytes=HEAP_BYTES)
    live_in_own_calls(number)
    dawdle()
    tdcoll.finalize()
    assert not tdcoll.is_initialized()
    assert not dist.is_initialized()


def backend(number: int) -> None:
    dist.init_process_group("tdcoll", pg_options=tdcoll.distributed.Options(heap_bytes=HEAP_BYTES))
    assert tdcoll.is_initialized(), tdcoll.distributed.explain()
    live_in_the_group(number)
    dawdle()
    # which holds the store; other ranks are on their way back to it when rank 0 lets go
    group = dist.group.WORLD
    dist.destroy_process_group()
    assert not tdcoll.is_initialized()
    if RANK == 0:
        time.sleep(0.05)
    del group


def refused(number: int) -> None:
    """A join that all ranks refuse, or one alone, and that is tried again."""
    odd = number % WORLD == RANK
    if WORLD > 1:
        expect(
            tdcoll.RankMismatchError,
            lambda: tdcoll.initialize(heap_bytes=2 * HEAP_BYTES if odd else HEAP_BYTES),
            "must be the same on all ranks",
        )
    if odd:
        expect(ValueError, lambda: tdcoll.initialize(timeout_s=0), "timeout_s")
        expect(
            TypeError, lambda: dist.init_process_group("tdcoll", pg_options="wrong"), "pg_options"
        )
    dawdle()
    (own if number % 2 else backend)(number)


_users_store: Any = None


def beside(number: int) -> None:
    """A group of the user's, made in every round under another prefix of a store of the user's, and
    kept meanwhile."""
    global _users_store
    if _users_store is None:
        _users_store, _, _ = next(dist.rendezvous("env://"))
    dist.init_process_group(
        INNER, store=dist.PrefixStore(f"user{number}", _users_store), rank=RANK, world_size=WORLD
    )
    for again in (0, 1):
        if again and WORLD > 1:
            if number % WORLD == RANK:  # before all others, and not for long enough
                expect(
                    tdcoll.CollectiveTimeout,
                    lambda: tdcoll.initialize(heap_bytes=HEAP_BYTES, timeout_s=0.05),
                    "in 'initialize' for rank(s) [",
                    " timeout ",
                )
                _users_store.set(f"expired{number}", "")
            else:
                _users_store.wait([f"expired{number}"])
        tdcoll.initialize(heap_bytes=HEAP_BYTES)
        live_in_own_calls(2 * number + again)
        dawdle()
        tdcoll.finalize()
        assert dist.is_initialized()
    value = torch.ones(1, device=device())
    dist.all_reduce(value)
    assert value.item() == WORLD
    dist.destroy_process_group()


def expired(number: int) -> None:
    """A wait expires, on the host or in a kernel, and all ranks are still there: they leave and
    join again. The last life on GPUs, because NVSHMEM is not stopped by ranks that do not leave
    together."""
    if WORLD == 1:
        return
    options = tdcoll.distributed.Options(heap_bytes=HEAP_BYTES)
    dist.init_process_group("tdcoll", timeout=timedelta(seconds=TIMEOUT_S), pg_options=options)
    late = number % WORLD
    if number % 2:
        live_in_the_group(number)
        dist.barrier()
    if late == RANK:
        time.sleep(TIMEOUT_S + 1)
    else:
        expect(dist.DistBackendError, dist.barrier, " timeout ", f"{late}")
    dist.destroy_process_group()
    backend(number)


LIVES = {life.__name__: life for life in (own, backend, refused, beside, expired)}


# ---------------------------------------------------------------------- processes


def main(names: list[str], rounds: int) -> None:
    torch.set_num_threads(1)
    random.seed(RANK)
    if not INTERPRETED:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", RANK)) % torch.cuda.device_count())
    for name in names:
        begin = time.perf_counter()
        for number in range(rounds):
            LIVES[name](number)
            dawdle()
        if RANK == 0:
            seconds = round(time.perf_counter() - begin, 2)
            print(
                json.dumps({"life": name, "ranks": WORLD, "rounds": rounds, "seconds": seconds}),
                flush=True,
            )


def spawn(ranks: int, arguments: list[str]) -> int:
    """Run this script once for each rank, without a launcher. The exit status; the first failure
    ends all."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    launcher = {
        name
        for name in os.environ
        if name.startswith(("TORCHELASTIC_", "GROUP_", "LOCAL_", "ROLE_"))
    }
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env=environment | {"RANK": str(r), "LOCAL_RANK": str(r)},
        )
        for r in range(ranks)
    ]
    try:
        while None in (statuses := [process.poll() for process in processes]) and not any(statuses):
            time.sleep(0.05)
        return next(filter(None, statuses), 0)
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lives", nargs="*", metavar="LIFE", help=f"of {', '.join(LIVES)}")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--spawn", type=int, metavar="RANKS")
    given = parser.parse_args()
    if unknown := set(given.lives) - set(LIVES):
        parser.error(f"LIFE must be of {', '.join(LIVES)}; got {', '.join(sorted(unknown))}")
    if given.spawn:
        sys.exit(spawn(given.spawn, ["--rounds", str(given.rounds), *given.lives]))
    main(given.lives or list(LIVES), given.rounds)
