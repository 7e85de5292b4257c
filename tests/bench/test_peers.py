# SPDX-License-Identifier: Apache-2.0
"""Peers where there are no GPUs: why they cannot run. tests/gpu shows that all of them are right on GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tdcoll import runtime
from tdcoll.tools.bench import dense, peers
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


@pytest.mark.parametrize("given", ["nccl,fcollect", "nccl"])
@pytest.mark.parametrize("wanted", ["", "1"])
def test_nvshmem_keeps_its_nccl_for_fcollect(given: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When NVSHMEM starts, which is in ``case.run``; the variables of that moment are in the file."""
    monkeypatch.setenv("NVSHMEM_DISABLE_NCCL", wanted)
    seen: list[str] = []
    monkeypatch.setattr(dense, "INTERPRETED", False)
    monkeypatch.setattr(dense.case, "run", lambda *_: seen.append(os.environ["NVSHMEM_DISABLE_NCCL"]) or 0)
    assert dense.main("all_gather", ["-b", "1K", "-e", "1K", "--peers", given]) == 0
    assert seen == [wanted or ("0" if "fcollect" in given else "")]


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``flashinfer.comm`` whose kernels are there. tests/gpu compares what they compute, where they are installed."""
    comm = SimpleNamespace(trtllm_ar=SimpleNamespace(get_trtllm_comm_module=lambda: None))
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(comm=comm))
    monkeypatch.setitem(sys.modules, "flashinfer.comm", comm)
    monkeypatch.setattr(peers, "require_nccl", lambda device: None)
    return comm


OURS_NOT = "--algorithms= --peers trtllm-one-shot"


@pytest.mark.parametrize(
    ("options", "ranks", "note"),
    [
        ("-b 64 -e 64 --dtype int32", 2, "takes float16, bfloat16 and float32, not torch.int32"),
        ("-b 24 -e 24", 2, "takes multiples of 16 bytes, and at most 16 MB"),
        ("-b 32M -e 32M --buffers 1", 2, "takes multiples of 16 bytes, and at most 16 MB"),
        ("-b 48K -e 48K --dtype float32", 2, "takes rows of 8192 numbers"),
        ("-b 64 -e 64", 3, "is for 2, 4 or 8 ranks of one node, not 3 rank(s) on 1 node(s) (3)"),
    ],
)
def test_what_tensorrts_does_not_take(options: str, ranks: int, note: str, flashinfer: Any, measured: Any) -> None:
    (row,) = measured(REDUCE, f"{options} {OURS_NOT}", ranks)
    assert (row.check, row.note) == ("not run", note)


def test_where_one_rank_has_no_flashinfer_none_goes_on(flashinfer: Any, measured: Any, monkeypatch: Any) -> None:
    def load() -> None:
        if runtime.current().rank == 1:
            raise OSError("no kernels")

    monkeypatch.setattr(flashinfer.trtllm_ar, "get_trtllm_comm_module", load)
    (row,) = measured(REDUCE, f"-b 64 -e 64 {OURS_NOT}")
    assert (row.check, row.note) == ("not run", "needs flashinfer: rank 1: OSError: no kernels")
