# SPDX-License-Identifier: Apache-2.0
"""What forked children of a rank may do, and how they may end: ``forked_job.py own``, ``backend``
or ``workers``.

Each case forks a child, in which a timer ends what hangs. After each case all ranks make a call,
whose result would be wrong if the child had sent a signal.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton.language as tl
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import tdcoll
import tdcoll.language as tdl

AT_MOST_S = 60
METHODS = ("fork", "spawn", "forkserver")


@tdcoll.jit
def ask_for_the_pe(out):
    tl.store(out, tdl.my_pe())


# ---------------------------------------------------------------------- children


def refused(action: Callable[[], Any], *words: str) -> None:
    """A call in a child must raise an error that says what is wrong."""
    message = "no error"
    try:
        action()
    except tdcoll.TdcollError as error:
        message = str(error)
    missing = [word for word in words if word not in message]
    assert message != "no error"
    assert not missing, f"a call in a child gave {message!r}, which lacks {missing}"


def compute() -> None:
    """Use PyTorch, with its threads."""
    assert (torch.ones(64, 64) @ torch.ones(64, 64)).sum() == 64**3


ENDS: dict[str, tuple[Callable[[], Any], int]] = {
    "os._exit": (lambda: os._exit(3), 3),
    "sys.exit": (lambda: sys.exit(4), 4),
    "nothing": (lambda: sys.exit(), 0),
    "exception": (lambda: [][0], 1),
    "kill": (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "term": (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
}
"""Ways in which a child may end, and the status that its parent gets."""


def forked(action: Callable[[], Any], end: str = "nothing") -> None:
    """Run ``action`` in a child, which ends as told, and check the status with which it does."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(AT_MOST_S)
        faulthandler.register(signal.SIGALRM, chain=True)
        action()
        if end == "exception":
            sys.excepthook = lambda *error: None  # the output is for errors that are none of these
        ENDS[end][0]()
    _, status = os.waitpid(child, 0)
    got, wanted = os.waitstatus_to_exitcode(status), ENDS[end][1]
    assert got == wanted, f"a child that ends by {end} has status {got}, expected {wanted}"


def same_facts(rank: int) -> None:
    assert tdcoll.is_initialized()
    assert (tdcoll.rank(), tdcoll.world_size()) == (rank, 2)
    assert tdcoll.topology().world_size == 2
    assert tdcoll.device() == torch.device("cpu")


# ---------------------------------------------------------------------- own calls


def own() -> None:
    tdcoll.initialize(timeout_s=AT_MOST_S)
    rank, x, process = tdcoll.rank(), torch.ones(4), os.getpid()
    ctx = tdcoll.CollectiveContext(debug=False)
    symmetric = tdcoll.zeros(4)
    flag = tdcoll.zeros(1, torch.int64)
    peer = tdcoll.peer_tensor(flag, 1 - rank)

    def right() -> None:
        for group in ({}, {"ctx": ctx}):
            assert tdcoll.all_reduce(x * (rank + 1), **group).tolist() == [3] * 4
        tdcoll.check()
        assert flag.item() == 0

    def calls() -> None:
        same_facts(rank)
        compute()
        refused(lambda: tdcoll.all_reduce(x), f"forked from rank {rank} (process {process})")
        # as made before
        refused(lambda: tdcoll.all_reduce(x, ctx=ctx), "all_reduce: this process was forked")
        # another one
        refused(lambda: tdcoll.all_gather(x, ctx=ctx), "all_gather: this process was forked")
        refused(lambda: tdcoll.all_gather_(symmetric), "forked")
        refused(lambda: tdcoll.sparse_all_reduce_rows(torch.tensor([1]), x[:1, None], 4), "forked")
        refused(lambda: tdcoll.empty(4), "forked")
        refused(lambda: tdcoll.free(symmetric), "forked")
        refused(tdcoll.barrier, "forked")
        refused(tdcoll.barrier_on_stream, "forked")
        refused(lambda: tdcoll.write_on_stream(peer, 1), "forked")
        refused(lambda: tdcoll.copy_on_stream(symmetric, x), "forked")
        refused(tdcoll.CollectiveContext, "forked")
        refused(tdcoll.WaitMonitor, "forked")
        refused(lambda: ask_for_the_pe[(1,)](torch.zeros(1)), "tdcoll.initialize()")
        refused(tdcoll.initialize, "forked", "call tdcoll.finalize() first")
        ctx.close()

    def another_job() -> None:
        """The children of all ranks join a job of their own, and leave it."""
        tdcoll.finalize()
        refused(lambda: tdcoll.all_reduce(x), "call tdcoll.initialize() first")
        tdcoll.initialize(timeout_s=AT_MOST_S)
        assert tdcoll.all_reduce(x * (10 + rank)).tolist() == [21] * 4
        refused(lambda: tdcoll.all_reduce(x, ctx=ctx), "forked")
        forked(lambda: refused(lambda: tdcoll.all_reduce(x), "forked"))
        tdcoll.finalize()

    right()
    for action in (calls, another_job, tdcoll.finalize, lambda: forked(calls)):
        forked(action)
        right()
    for end in ENDS:
        forked(compute, end)
        right()
    ctx.close()
    tdcoll.finalize()


def beside_another_group() -> None:
    """A child can't join by the connections of a group that it was forked with."""
    dist.init_process_group("gloo")
    forked(lambda: refused(tdcoll.initialize, "forked with a default process group"))
    tdcoll.initialize(timeout_s=AT_MOST_S)
    assert tdcoll.all_reduce(torch.ones(2)).tolist() == [2, 2]
    tdcoll.finalize()
    dist.destroy_process_group()


# ---------------------------------------------------------------------- the backend


def backend() -> None:
    dist.init_process_group("tdcoll")
    rank, x = dist.get_rank(), torch.ones(4)
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    model(x).sum().backward()
    other = dist.new_group([0, 1])

    def right() -> None:
        for group in (None, other):
            y = x * (rank + 1)
            dist.all_reduce(y, group=group)
            assert y.tolist() == [3] * 4
        received = torch.zeros(4)
        dist.broadcast(received if rank else x, 0)
        assert rank == 0 or received.tolist() == [1] * 4

    def calls() -> None:
        same_facts(rank)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
        compute()
        parts = [torch.zeros(4) for _ in range(2)]
        words = (
            f"forked from rank {rank} of process group 0",
            "docs/distributed.md#forked-children",
        )
        for call in (
            lambda: dist.all_reduce(x),
            lambda: dist.all_reduce(x, async_op=True),
            lambda: dist.all_reduce(x.bool()),  # falls back
            lambda: dist.all_reduce(torch.ones(4).to_sparse()),
            lambda: dist.all_gather_into_tensor(torch.zeros(8), x),
            lambda: dist.all_gather(parts, x),
            lambda: dist.reduce_scatter_tensor(torch.zeros(2), x),
            lambda: dist.all_to_all_single(torch.zeros(4), x),
            lambda: dist.broadcast(x, 0),
            lambda: dist.reduce(x, 0),
            lambda: dist.gather(x, parts if rank == 0 else None),
            lambda: dist.scatter(x, parts if rank == 0 else None),
            lambda: dist.send(x, 1 - rank),
            lambda: dist.recv(x, 1 - rank),
            lambda: dist.barrier(),
            lambda: dist.all_gather_object([None, None], 1),
            lambda: torch.distributed._functional_collectives.all_reduce(
                x, "sum", dist.group.WORLD
            ).clone(),
        ):
            refused(call, *words)
        refused(
            lambda: dist.all_reduce(x, group=other), f"forked from rank {rank} of process group 1"
        )
        refused(lambda: model(x).sum().backward(), *words)
        refused(lambda: tdcoll.all_reduce(x), "forked")
        refused(lambda: dist.new_group(), "forked")

    def another_group(kind: str) -> None:
        """The children of all ranks make a group of their own, in place of the inherited one."""
        store = dist.FileStore(f"{folders[0]}/{kind}", 2)
        dist.destroy_process_group()
        dist.init_process_group(kind, store=store, rank=rank, world_size=2)
        y = x * (rank + 10)
        dist.all_reduce(y)
        assert y.tolist() == [21] * 4
        dist.destroy_process_group()

    def outstanding() -> None:
        """A child doesn't wait for a call that only the parent's thread can make."""
        y = x * (rank + 1)
        if rank == 0:
            work = dist.all_reduce(y, async_op=True)
            forked(lambda: refused(work.wait, "forked while the call was outstanding"))
        dist.barrier(other)
        if rank == 1:
            work = dist.all_reduce(y, async_op=True)
        work.wait()
        assert y.tolist() == [3] * 4

    right()
    for action in (
        calls,
        dist.destroy_process_group,
        lambda: dist.destroy_process_group(other),
        lambda: forked(calls),
    ):
        forked(action)
        right()
    for kind in ("gloo", "tdcoll"):
        forked(lambda kind=kind: another_group(kind))
        right()
    outstanding()
    for end in ENDS:
        forked(compute, end)
        right()
    if rank == 0:
        shutil.rmtree(folders[0])
    dist.destroy_process_group()


# ---------------------------------------------------------------------- workers


class Rows(Dataset[Any]):
    """What a worker can say of the job, and whether it can make a call."""

    def __init__(self, rank: int, forked: bool) -> None:
        self.rank, self.forked = rank, forked

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> torch.Tensor:
        assert tdcoll.is_initialized() == self.forked
        if self.forked:
            same_facts(self.rank)
            refused(lambda: dist.all_reduce(torch.ones(2)), "forked")
        refused(lambda: tdcoll.all_reduce(torch.ones(2)))
        return torch.full((2,), float(place))


def in_worker(forked: bool, end: str) -> None:
    """The whole of a process that ``multiprocessing`` starts."""
    compute()
    assert tdcoll.is_initialized() == forked
    refused(tdcoll.barrier, "forked" if forked else "call tdcoll.initialize() first")
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    ENDS[end][0]()


def workers(methods: Sequence[str] = METHODS) -> None:
    dist.init_process_group("tdcoll")
    rank = dist.get_rank()
    for method in methods:
        rows = Rows(rank, method == "fork")
        loader = DataLoader(
            rows,
            batch_size=2,
            num_workers=2,
            multiprocessing_context=method,
            persistent_workers=True,
        )
        for epoch in range(2):
            for step, batch in enumerate(loader):
                dist.all_reduce(batch)
                assert batch[:, 0].tolist() == [4.0 * step, 4.0 * step + 2], (method, epoch, batch)
        context = multiprocessing.get_context(method)
        started = [
            (end, context.Process(target=in_worker, args=(method == "fork", end))) for end in ENDS
        ]
        for end, process in started:
            process.start()
            process.join(AT_MOST_S)
            assert process.exitcode == ENDS[end][1], f"{method}: {end} gave {process.exitcode}"
            y = torch.ones(2) * (rank + 1)
            dist.all_reduce(y)
            assert y.tolist() == [3, 3]
        del loader
    dist.destroy_process_group()


if __name__ == "__main__":
    begin = time.monotonic()
    what = sys.argv[1]
    {"own": own, "beside": beside_another_group, "backend": backend, "workers": workers}[what]()
    print(f"{what}: done in {time.monotonic() - begin:.0f} s", flush=True)
