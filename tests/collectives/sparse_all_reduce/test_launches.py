# SPDX-License-Identifier: Apache-2.0
"""How many launches and PyTorch operations a call makes, and how often its host waits for the
device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import on_ranks
from tiers import slow_tier
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import tdcoll
from tdcoll import runtime
from tdcoll.calls.kernel_launch import KernelLaunch
from tdcoll.collectives.sparse_all_reduce.call import SparseCall

from .calls import DIM, make, sparse

Seen = dict[int, list[str]]
OWNER = ["pack", "exchange_direct", "prepare", "reduce"]
GATHER = ["pack", "exchange_direct", "merge"]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """What each rank has launched, and ``"wait"`` where its host waited for the device."""
    found: Seen = defaultdict(list)

    def note(name: str) -> None:
        found[runtime.current().rank].append(name)

    def launching(real: Any) -> Any:
        def launch(self: KernelLaunch, *arguments: Any) -> Any:
            note(self._kernel.__name__)
            with _disable_current_modes():  # the simulator's operations are none of the host's
                return real(self, *arguments)

        return launch

    def waiting(real: Any, name: str) -> Any:
        def wait(self: Any, *arguments: Any, **options: Any) -> Any:
            note(name)
            return real(self, *arguments, **options)

        return wait

    for name in ("__call__", "with_arguments"):
        monkeypatch.setattr(KernelLaunch, name, launching(getattr(KernelLaunch, name)))
    monkeypatch.setattr(SparseCall, "status", waiting(SparseCall.status, "wait"))
    for name in ("item", "tolist", "nonzero", "cpu", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, waiting(getattr(torch.Tensor, name), name))
    return found


def _gradient(pe: int, table: int, coalesced: bool) -> torch.Tensor:
    count = 5 if coalesced or table else 150
    ids = torch.arange(count) % 5 + pe
    return sparse(ids, torch.ones(len(ids), 1 + table % DIM), 40 + table, coalesced)


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize(("algorithm", "wanted"), [("owner", OWNER), ("gather", GATHER)])
@pytest.mark.parametrize("tables", [1, 4])
@on_ranks(2, heap_bytes=1 << 21)
def test_a_call_of_any_number_of_tables(
    pe: int, seen: Seen, tables: int, algorithm: str, wanted: list[str], coalesced: bool
) -> None:
    given = [_gradient(pe, table, coalesced) for table in range(tables)]
    with make(max_rows_per_rank=8 * tables, max_row_bytes=16) as ctx:
        seen[pe].clear()
        tdcoll.sparse_all_reduce(given, ctx=ctx, algorithm=algorithm)
        made = list(seen[pe])
    launches = [name for name in made if name not in ("wait", "tolist")]
    assert launches == (["join"] if tables > 1 else []) + wanted
    assert made.count("wait") == 1
    assert made.count("tolist") == 1, "the status, once it is on the host"
    assert made[-2:] == ["wait", "tolist"], "everything is launched before the host waits"


@on_ranks(2)
def test_a_padded_call_waits_for_nothing(pe: int, seen: Seen) -> None:
    given = [_gradient(pe, table, False) for table in range(2)]
    parts = [each._indices()[0] for each in given], [each._values() for each in given]
    with make(max_rows_per_rank=12) as ctx:
        seen[pe].clear()
        tdcoll.sparse_all_reduce_padded(
            *parts, [len(each) for each in given], ctx=ctx, algorithm="owner"
        )
        made = list(seen[pe])
        ctx.check()
    assert made == ["join", *OWNER, "pad"]


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations; each takes the host 5 to 10 us beside a GPU."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("coalesced", [False, slow_tier(True)])
@on_ranks(2, heap_bytes=1 << 21)
def test_operations_of_pytorch(pe: int, seen: Seen, coalesced: bool) -> None:
    """A table takes the two that give its indices and values, the question whether it is coalesced,
    and the one that makes its result (the first two count twice); a call, and each shape of rows, a
    few."""
    counts = {}
    with make(max_rows_per_rank=256, max_row_bytes=16) as ctx:
        for tables, shapes in ((1, 1), (2, 1), (24, 1), (24, 4)):
            given = [
                sparse([pe, 3, 5], torch.ones(3, 1 + i % shapes), 9 + i, coalesced)
                for i in range(tables)
            ]
            for _ in range(2):
                with Operations() as operations:
                    tdcoll.sparse_all_reduce(given, ctx=ctx, algorithm="owner")
            counts[tables, shapes] = operations.count
    assert counts[1, 1] <= 12
    assert counts[24, 1] - counts[2, 1] <= 6 * 22
    assert counts[2, 1] <= 10 + 6 * 2
    assert counts[24, 4] - counts[24, 1] <= 4 * 3
