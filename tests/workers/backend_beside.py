# SPDX-License-Identifier: Apache-2.0
"""Groups of backend "tdcoll" beside another backend's default group, and who leaves the job.

`bash launch.sh tests/workers/backend_beside.py`
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed import batch_isend_irecv  # before there is a group of tdcoll's

import tdcoll
from tdcoll.distributed import Options, explain


def sums(group: dist.ProcessGroup, where: str) -> None:
    """Make calls of a group of all ranks, which tdcoll has to serve."""
    tensor = torch.full((8,), 1.0 + dist.get_rank(), device=where)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == 8 * [sum(range(1, dist.get_world_size() + 1))], tensor
    dist.barrier(group=group)
    dist.broadcast(tensor, 0, group=group)
    said = explain(group)
    assert "1 all_reduce by " + ("tdcoll" if dist.get_world_size() > 1 else "") in said, said


def ring(group: dist.ProcessGroup | None, where: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    got = torch.zeros(8, device=where)
    sent = torch.full((8,), float(rank), device=where)
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % world, group),
        dist.P2POp(dist.irecv, got, (rank - 1) % world, group),
    ]
    for work in batch_isend_irecv(operations):
        work.wait()
    assert got.tolist() == 8 * [float((rank - 1) % world)], got


def main() -> None:
    where = "cuda" if torch.cuda.is_available() else "cpu"
    if where == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if where == "cuda" else "gloo")
    assert not tdcoll.is_initialized()
    for _ in range(2):
        first, second = (
            dist.new_group(backend="tdcoll", pg_options=Options(heap_bytes="32M")) for _ in range(2)
        )
        assert tdcoll.is_initialized()
        for group in (first, second):
            sums(group, where)
            if where == "cuda" or dist.get_world_size() > 1:  # gloo sends nothing to itself
                ring(group, where)
                ring(None, where)
            dist.destroy_process_group(group)
            assert tdcoll.is_initialized() == (group is first)  # the last one leaves the job
    dist.destroy_process_group()
    dist.init_process_group("tdcoll")
    kept = dist.group.WORLD.split_group(
        list(range(dist.get_world_size())), group_name="that nobody destroys"
    )
    dist.destroy_process_group()
    assert kept is not None
    assert not tdcoll.is_initialized()
    print("done")


if __name__ == "__main__":
    main()
