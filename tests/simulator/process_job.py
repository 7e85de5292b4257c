# SPDX-License-Identifier: Apache-2.0
"""What each of the two processes of test_process.py runs: ``process_job.py RANK FOLDER``."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from cases import add_to_0, device, gather, spinning, wait_once

import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.base.errors import CollectiveTimeout, RankMismatchError, TdcollError
from tdcoll.calls.monitor import WaitMonitor
from tdcoll.runtime.control import StoreControlPlane
from tdcoll.simulator.process import ProcessHeap

WORLD = 2


class Here:
    """A world of which this process is one rank."""

    n_pes = WORLD

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def run(self, host) -> None:
        host(self.rank)

    def pause(self) -> None: ...


def expect(error: type[Exception], match: str, call) -> None:
    with pytest.raises(error, match=re.escape(match)):
        call()


def additions(job: runtime.Runtime) -> None:
    """Both processes add to the same word: nothing may be lost."""
    word = job.allocate((1,), torch.int64, name="word")
    for _ in range(50):
        device(add_to_0, word, grid=(4,))
        device(tdl.barrier_all_block)
        device(tdl.sync_all_block)
    assert job.rank or word.item() == 50 * 4 * (1 + 1) * WORLD, word


def spin_for_ever(signal):
    while tl.load(signal, volatile=True) == 0:
        pass


def deadlines(job: runtime.Runtime) -> None:
    signals, rank = job.allocate((4,), torch.int64, name="signals"), job.rank
    result, monitor = torch.full((1,), -1, dtype=torch.int32), WaitMonitor(timeout_s=0.05)
    device(wait_once, signals[2:], 1, monitor.words, result, grid=(2,))
    assert result.item() == 0
    expect(CollectiveTimeout, "for peer 7: signal 9 had to reach 1 and is 0", monitor.check)
    expect(
        CollectiveTimeout,
        f"rank {rank} waited 1 s in pe{rank} call(0,0,0), which waits for pe{rank}.signals[1] >= 1, is 0 (",
        lambda: device(lambda signal: tdl.signal_wait_until(signal, tdl.CMP_GE, 1), signals[1:]),
    )
    expect(CollectiveTimeout, "spins on", lambda: device(spin_for_ever, signals))
    expect(ValueError, "sig_op must be", lambda: device(lambda p: tdl.signal_block(p, 1, 77, 0), signals))


def bytes_beyond_a_tensor(job: runtime.Runtime) -> None:
    words, after = (job.allocate((1,), torch.int64, name=name) for name in ("words", "after"))
    after.fill_(5)
    job.control.all_gather(range(WORLD), "written", None)
    own, other, put = torch.zeros(1, dtype=torch.int64), 1 - job.rank, tdl.putmem_block

    def store(pointer):
        tl.store(tdl.remote_ptr(pointer, other) + 64, 9)

    beyond = f"pe{job.rank} call(0,0,0) would store to bytes 512..520 of pe{other}.words, which has 8 bytes"
    expect(ValueError, beyond, lambda: device(store, words))
    beyond = "bytes 8..16 of `arguments[0]`, which has 8 bytes"
    expect(ValueError, beyond, lambda: device(lambda p: tl.store(p + 1, 9), own))
    expect(ValueError, "of pe", lambda: device(put, words, own, 16, other))
    device(put, words.data_ptr(), own.data_ptr(), 8, other)
    expect(ValueError, "a tensor at 0x", lambda: device(put, after, own.data_ptr() + 4, 8, other))
    job.control.all_gather(range(WORLD), "tried", None)
    assert after.item() == 5
    job.release(words)
    expect(ValueError, "where no symmetric tensor lives", lambda: device(lambda p: tl.store(p, 9), words))


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    control = StoreControlPlane(dist.FileStore(str(folder / "store"), WORLD), rank, 20)

    def heap(nbytes: int) -> ProcessHeap:
        return ProcessHeap(pe=rank, n_pes=WORLD, nbytes=nbytes, control=control, timeout_s=1)

    expect(RankMismatchError, "the size of the symmetric heap", lambda: heap(1000 + rank))
    shared = heap(1 << 20)
    assert "/memfd:tdcoll-heap" in Path("/proc/self/maps").read_text(), "a file that no folder has"
    given = {"rank": rank, "world_size": WORLD, "node_ids": (0,) * WORLD, "simulated": True, "timeout_s": 20}
    job = runtime.Runtime(heap=shared, control=control, **given)
    runtime.install(job)
    gather(calls=20)(Here(rank))
    additions(job)
    spinning(0)(Here(rank))
    bytes_beyond_a_tensor(job)
    deadlines(job)
    shared.close()
    shared.close()
    expect(TdcollError, "needs a simulated machine", tdl.my_pe)
    runtime.install(None)
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
