# SPDX-License-Identifier: Apache-2.0
"""PyTorch's internals: this PyTorch has them, nothing else uses them, and a PyTorch without them is warned of."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from tdcoll.base import torch_internals

ROOT = Path(__file__).resolve().parents[2]


def test_this_pytorch_has_them() -> None:
    assert set() == torch_internals._CHANGED


def test_nothing_else_replaces_or_resets_what_is_pytorchs() -> None:
    """Nor looks for objects among all that there are, but for the simulator's reports."""
    found = re.compile(r"__code__ =|group_count|get_objects|set_code_exec_strategy|_ddp_params_and_buffers_to_ignore")
    sources = [path for path in (ROOT / "tdcoll").rglob("*.py") if "simulator" not in path.parts]
    users = {path.name for path in sources if found.search(path.read_text(encoding="utf-8"))}
    assert users == {"torch_internals.py"}


CHANGED = """
import logging, sys, torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
torch.set_num_threads(1)
lines = []
class Remember(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("tdcoll").addHandler(Remember())

class Count:
    n = 0
    def __get__(self, world, of=None):
        return Count.n if world else self
    def __set__(self, world, n):
        Count.n = n

def other(ops, more=None):
    return []

type(c10d._world).group_count = Count()
c10d.batch_isend_irecv = other
del torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
import torch._dynamo  # which has taken what it needs
del torch._C._dynamo.eval_frame._FrameExecStrategy

from tdcoll.base import torch_internals
assert len(torch_internals._CHANGED) == 4, torch_internals._CHANGED
import tdcoll.distributed
dist.init_process_group("tdcoll", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (3, 2))
dist.all_reduce(tensor, async_op=True).wait()
assert tensor.to_dense().tolist() == [[0, 0], [2, 2], [0, 0]]
table = torch.nn.Embedding(4, 2, sparse=True)
for _ in range(2):
    torch_internals.batch_messages_of(tdcoll.distributed.TdcollProcessGroup)
    torch_internals.name_groups_anew()
    torch_internals.tell_ddp_to_ignore(table, ["weight"])
    assert torch_internals.never_compiled(lambda: 7)() == 7
assert c10d.batch_isend_irecv is other and Count.n == 1
dist.destroy_process_group()
said = sorted(line.split(" has changed (")[1].split(")")[0] for line in lines if "has changed" in line)
assert said == ["_batches", "_ddp_ignores", "_group_names", "_skipping"], lines
"""


def test_a_pytorch_that_has_changed_is_warned_of_once() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHANGED], env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("batches", [True, False])
def test_messages_are_one_batch_where_the_backend_has_batches(batches: bool, monkeypatch) -> None:
    """PyTorch looks at a group's very type. The checks of groups in tests/workers have messages that arrive."""
    asked: list[str] = []

    class Group:
        def _get_backend(self, device: torch.device) -> Any:
            return SimpleNamespace(supports_coalescing=batches)

        def __getattr__(self, name: str) -> Any:
            return lambda *given: asked.append(name) or f"work of {name}"

    function: Any = inspect.unwrap(dist.batch_isend_irecv)
    before = function.__code__, function.__globals__.get("_tdcoll_batch")
    group: Any = Group()
    monkeypatch.setitem(c10d._world.pg_group_ranks, group, {rank: rank for rank in range(8)})
    messages = [dist.P2POp(call, torch.ones(1), group=group, group_peer=3) for call in (dist.isend, dist.irecv)]
    try:
        for _ in range(2):  # also where it has been done before
            torch_internals.batch_messages_of.__wrapped__(Group)
        works = dist.batch_isend_irecv(messages)
    finally:
        function.__code__, function.__globals__["_tdcoll_batch"] = before
    if batches:
        assert (asked, works) == (["_start_coalescing", "send", "recv", "_end_coalescing"], ["work of _end_coalescing"])
    else:
        assert (asked, works) == (["send", "recv"], ["work of send", "work of recv"])


def test_wrappers_are_found_without_a_walk(monkeypatch) -> None:
    """Those that were made since the watch began, those in the module, and none whose making has failed."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module, fails: bool = False) -> None:
            super().__init__()
            self.module = module
            if not fails:
                self.reducer = "made"

    monkeypatch.setattr(torch_internals, "DDP", Wrapper)
    model = nn.Linear(1, 1)
    early = Wrapper(nn.Linear(1, 1))
    torch_internals._ddp.discard(early)
    torch_internals.watch_ddp()
    late, failed = Wrapper(model), Wrapper(model, fails=True)
    assert torch_internals.living_ddp(model) == [late]
    assert set(torch_internals.living_ddp(nn.Sequential(early))) == {early, late}
    del late
    assert torch_internals.living_ddp(model) == []
    assert failed in torch_internals._ddp
