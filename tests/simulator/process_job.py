# SPDX-License-Identifier: Apache-2.0
"""What each of the two processes of test_process.py runs: ``process_job.py RANK FOLDER``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import cases
import kernels
import protocols
import torch
import torch.distributed as dist
import triton.language as tl

import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.errors import CollectiveTimeout, RankMismatchError, TdcollError
from tdcoll.monitor import WaitMonitor
from tdcoll.runtime.control import StoreControlPlane
from tdcoll.runtime.simulator.process import ProcessHeap
from tdcoll.testing import record

WORLD = 2


def expect(error: type[Exception], match: str, call) -> None:
    try:
        call()
    except error as raised:
        if match in str(raised):
            return
        raise AssertionError(f"expected {match!r} in {raised}") from raised
    raise AssertionError(f"expected {error.__name__}")


def all_gathers(job: runtime.Runtime, calls: int) -> None:
    monitor = WaitMonitor()
    buffers = job.allocate((2, WORLD, 33), torch.uint8, name="buffer")
    signals = job.allocate((2, WORLD), torch.int64, name="signals")
    for call in range(1, calls + 1):
        buffer = buffers[call % 2]
        buffer[job.rank] = cases.segment(job.rank, call, 33)
        protocols.gather[(WORLD,)](buffer, signals[call % 2], 33, call, monitor.words, WORLD, "put_signal", 5)
        monitor.check()
        cases.check(buffer, call)


def additions(job: runtime.Runtime) -> None:
    """Both processes add to the same word: nothing may be lost."""
    word = job.allocate((1,), torch.int64, name="word")
    for _ in range(50):
        kernels.add_to_0[(4,)](word)
        kernels.barrier[(1,)]("barrier_all")
        kernels.barrier[(1,)]("sync_all")
    if job.rank == 0:
        assert word.item() == 50 * 4 * (1 + 1) * WORLD, word


def polling_loops(job: runtime.Runtime) -> None:
    buffer = job.allocate((WORLD, 8), torch.uint8, name="buffer")
    signals = job.allocate((WORLD,), torch.int64, name="signals")
    for call in range(1, 10):
        protocols.gather_spinning[(WORLD,)](buffer, signals, 8, call, WORLD, 0)


def deadlines(job: runtime.Runtime) -> None:
    signals = job.allocate((4,), torch.int64, name="signals")
    result = torch.full((1,), -1, dtype=torch.int32)
    monitor = WaitMonitor(timeout_s=0.05)
    kernels.wait_once[(2,)](signals[2:], 1, monitor.words, result)
    assert result.item() == 0
    expect(CollectiveTimeout, "for peer 7: signal 9 had to reach 1 in epoch 1 and is 0", monitor.check)
    rank = job.rank
    expect(
        CollectiveTimeout,
        f"rank {rank} waited 1 s in pe{rank} wait_for_ever(0,0,0), which waits for pe{rank}.signals[1] >= 1, is 0.",
        lambda: kernels.wait_for_ever[(1,)](signals[1:]),
    )
    expect(CollectiveTimeout, "spins on", lambda: kernels.spin_for_ever[(1,)](signals))
    expect(ValueError, "sig_op must be", lambda: kernels.fails[(2,)](signals, rank))


def bytes_beyond_a_tensor(job: runtime.Runtime) -> None:
    words, after = (job.allocate((1,), torch.int64, name=name) for name in ("words", "after"))
    after.fill_(5)
    job.control.all_gather(range(WORLD), "written", None)
    kernels.CALL = lambda p: tl.store(tdl.remote_ptr(p, 1 - job.rank) + 64, 9)
    beyond = f"pe{job.rank} call(0,0,0) would store to bytes 512..520 of pe{1 - job.rank}.words, which has 8 bytes"
    expect(ValueError, beyond, lambda: kernels.call[(1,)](words))
    kernels.CALL = lambda p: tl.store(p + 1, 9)
    own = torch.zeros(1, dtype=torch.int64)
    expect(ValueError, "bytes 8..16 of `pointer`, which has 8 bytes", lambda: kernels.call[(1,)](own))
    expect(ValueError, "of pe", lambda: kernels.put[(1,)](words, own, 16, 1 - job.rank))
    kernels.put[(1,)](words.data_ptr(), own.data_ptr(), 8, 1 - job.rank)
    expect(ValueError, "a tensor at 0x", lambda: kernels.put[(1,)](after, own.data_ptr() + 4, 8, 1 - job.rank))
    job.control.all_gather(range(WORLD), "tried", None)
    assert after.item() == 5
    job.release(words)
    expect(ValueError, "where no symmetric tensor lives", lambda: kernels.call[(1,)](words))


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    control = StoreControlPlane(store, rank, 20)

    def heap(nbytes: int) -> ProcessHeap:
        return ProcessHeap(pe=rank, n_pes=WORLD, nbytes=nbytes, control=control, timeout_s=1)

    expect(RankMismatchError, "the size of the symmetric heap", lambda: heap(1000 + rank))
    shared = heap(1 << 20)
    job = runtime.Runtime(
        rank=rank,
        world_size=WORLD,
        heap=shared,
        control=control,
        node_ids=(0,) * WORLD,
        simulated=True,
        timeout_s=20,
    )
    runtime.install(job)
    all_gathers(job, 20)
    with record(folder / "trace.json"):
        all_gathers(job, 2)
    additions(job)
    polling_loops(job)
    bytes_beyond_a_tensor(job)
    deadlines(job)
    shared.close()
    shared.close()
    expect(TdcollError, "needs a simulated machine", lambda: kernels.tdl.my_pe())
    runtime.install(None)
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
