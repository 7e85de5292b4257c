# SPDX-License-Identifier: Apache-2.0
"""Peers where there are no GPUs: why they cannot run. tests/gpu shows that all of them are right on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tdcoll import runtime
from tdcoll.tools.bench.data import Buffers
from tdcoll.tools.bench.dense import case_of
from tdcoll.tools.bench.peers import PEERS, Stock
from tdcoll.tools.bench.specs import SPECS

CPU = torch.device("cpu")
REDUCE, SCATTER = map(case_of, ("all_reduce", "reduce_scatter"))


def stock_of(nbytes: int, world: int) -> Stock:
    """What the benchmark of the all-gather gives to a peer."""

    def new(**how: Any) -> Buffers:
        what = SPECS["all_gather"], nbytes, [0] * world, runtime.current().rank, torch.uint8, CPU
        return Buffers(*what, sets=2, **how)

    return Stock(new)


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if peer.of == "all_gather"])
def test_without_gpus_they_say_why(name: str) -> None:
    with pytest.raises(RuntimeError, match="needs GPUs"):
        PEERS[name].make(stock_of(8, 1), CPU, lambda buffers: None)


@pytest.mark.parametrize("kind", [REDUCE, SCATTER])
def test_peers_that_only_add_say_so(kind: Any, measured: Callable[..., list[Any]]) -> None:
    names = [name for name, peer in PEERS.items() if peer.of == kind.benchmark]
    rows = measured(kind, f"-b 64 -e 64 --op max --algorithms= --peers {','.join(names)}")
    assert [(row.check, row.note) for row in rows] == [("not run", "has sums only, and --op is max")] * len(names)
