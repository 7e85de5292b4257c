# SPDX-License-Identifier: Apache-2.0
"""A repeated call stays in few files: whoever looks for its time, or for its fault, reads no more than these."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll import fused
from tdcoll.testing import World

PACKAGE = Path(tdcoll.__file__).parent
MOST = 5


def files_entered(call: Callable[[], Any]) -> list[str]:
    """Return the package's files that ``call`` enters down to the launch, which the simulator would take further."""
    found: list[str] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            name = path.relative_to(PACKAGE).as_posix()
            if name not in found and "simulator" not in name:  # which counts the bytes of tensors
                found.append(name)
            if name.endswith("_host/launch.py"):
                sys.settrace(None)
        return None

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    assert any(name.endswith("launch.py") for name in found), found
    return found


CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "all_gather": lambda ctx, x: tdcoll.all_gather(x, ctx=ctx),
    "all_gather_": lambda ctx, x: tdcoll.all_gather_(x, ctx=ctx),
    "all_reduce": lambda ctx, x: tdcoll.all_reduce(x, ctx=ctx),
    "all_reduce_": lambda ctx, x: tdcoll.all_reduce_(x, ctx=ctx),
    "all_reduce, symmetric": lambda ctx, x: tdcoll.all_reduce(torch.ones_like(x), ctx=ctx, out=x, symmetric=True),
    "norm": lambda ctx, x: fused.all_reduce_rms_norm(x, x, x[0], ctx=ctx),
}


@pytest.mark.parametrize("name", CALLS)
def test_repeated_calls_enter_few_files(name: str) -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1024) as ctx:
            x = tdcoll.zeros((2, 8))
            for _ in range(2):
                CALLS[name](ctx, x)
            assert len(found := files_entered(lambda: CALLS[name](ctx, x))) <= MOST, found

    World(1, backend="thread").run(host)
