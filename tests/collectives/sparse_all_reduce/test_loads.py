# SPDX-License-Identifier: Apache-2.0
"""Contexts that are in flight together: all ranks have loaded a kernel when the first of them
launches it.

The simulator loads nothing, so a stand-in does it here, as CUDA: while no launch of the rank is
running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ranks import on_streams
from tiers import slow_tier

import tdcoll
from tdcoll import runtime
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.kernel_launch import KernelLaunch
from tdcoll.collectives.sparse_all_reduce import policy
from tdcoll.testing import World

from .calls import make, rows_of, same, sparse, total

DIM = 4
ROWS = 1200


class Loading:
    """Kernels have to be loaded, on each rank, while no launch of the rank is running.

    Attributes:
        late: kernels that a rank launched when it could not know that all ranks had loaded them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running: Counter[int] = Counter()
        self.loaded: set[tuple[int, int]] = set()
        self.agreed: set[tuple[int, int]] = set()
        self.kept: list[KernelLaunch] = []  # so that ids stay apart
        self.late: set[str] = set()
        self.world: World

        def launching(real: Any) -> Any:
            def launch(this: KernelLaunch, *given: Any) -> None:
                rank = runtime.current().rank
                if (rank, id(this)) not in self.agreed:
                    self.late.add(this._kernel.__name__)
                self.running[rank] += 1
                real(this, *given)
                self.running[rank] -= 1

            return launch

        def prepare(this: KernelLaunch) -> None:
            rank = runtime.current().rank
            if this.prepared:
                return
            for _ in range(2000):
                if not self.running[rank]:
                    self.loaded.add((rank, id(this)))
                    self.kept.append(this)
                    return
                self.world.pause(1)
            raise TimeoutError(
                f"rank {rank} can't load {this._kernel.__name__}: a kernel that runs does not end"
            )

        real_wait = CollectiveContext.wait_for_loads

        def wait(ctx: CollectiveContext, *given: Any) -> None:
            rank, so_far = runtime.current().rank, set(self.loaded)
            real_wait(ctx, *given)
            self.agreed |= {each for each in so_far if each[0] == rank}

        for name in ("__call__", "with_arguments"):
            monkeypatch.setattr(KernelLaunch, name, launching(getattr(KernelLaunch, name)))
        monkeypatch.setattr(KernelLaunch, "prepare", prepare)
        is_loaded = property(lambda this: (runtime.current().rank, id(this)) in self.loaded)
        monkeypatch.setattr(KernelLaunch, "prepared", is_loaded)
        monkeypatch.setattr(CollectiveContext, "loads_together", True)
        monkeypatch.setattr(CollectiveContext, "wait_for_loads", wait)


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Loading:
    return Loading(monkeypatch)


def values_at(n: int, elements: int) -> torch.Tensor:
    """``[n, DIM]`` ones that begin so many elements behind an aligned address."""
    return torch.ones(n * DIM + elements)[elements:].view(n, DIM)


def sparse_of(n: int, pe: int, elements: int = 0) -> torch.Tensor:
    return sparse(torch.arange(n) + pe, values_at(n, elements), ROWS)


Call = Callable[..., Any]
"""``(ctx, pe, **options)``: makes a call on a rank."""


def pair(n: int, elements: int = 0, coalesced: bool = False) -> Call:
    """A call of one tensor of so many rows."""
    return lambda ctx, pe, **options: tdcoll.sparse_all_reduce_rows(
        torch.arange(n) + pe, values_at(n, elements), ROWS, ctx=ctx, coalesced=coalesced, **options
    )


def several(n: int, *elements: int) -> Call:
    """A call of several tensors."""
    return lambda ctx, pe, **options: tdcoll.sparse_all_reduce(
        [sparse_of(n, pe, at) for at in elements], ctx=ctx, **options
    )


def fixed(n: int, elements: int = 0) -> Call:
    """A call whose result has a fixed size."""
    return lambda ctx, pe, **options: tdcoll.sparse_all_reduce_padded(
        torch.arange(n) + pe, values_at(n, elements), ROWS, ctx=ctx, **options
    )


KINDS: dict[str, Sequence[Call]] = {
    "pair": (pair(3), pair(3, 1), pair(3, 2, True), pair(150, 3), pair(0)),
    "many": (pair(3), pair(1100), pair(1100, 1)),
    "several": (several(3, 0, 0), several(3, 1, 0), several(150, 0, 3), several(3, 2, 2)),
    "fixed": (pair(3), fixed(3), fixed(3, 1), fixed(150, 2)),
}
"""Calls of one kind, and a pair before those of fixed size."""


SECOND = (
    ("pair", "owner"),
    ("several", "gather"),
    ("fixed", "gather"),
    ("several", "dense"),
    ("many", "owner"),
)


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("pair", "gather"),
        ("several", "owner"),
        ("fixed", "owner"),
        ("pair", "dense"),
        *(slow_tier(*each) for each in SECOND),
    ],
)
def test_the_first_call_loads_what_later_calls_of_its_kind_need(
    kind: str, algorithm: str, loading: Loading
) -> None:
    """They may have any number of rows, in any order, at any address."""
    loads: list[int] = []

    def host(pe: int) -> None:
        with make(max_rows_per_rank=2300, max_row_bytes=16, max_blocks=8) as ctx:
            for call in KINDS[kind]:
                call(ctx, pe, algorithm=algorithm)
                tdcoll.barrier()
                loads.append(len(loading.loaded))
                tdcoll.barrier()

    loading.world = World(2, heap_bytes=1 << 22)
    loading.world.run(host)
    first = 4 if kind == "fixed" else 2
    assert len(set(loads[first - 1 :])) == 1, f"kernels were loaded by later calls: {loads}"
    assert loading.late == set()


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.int32)], ids=str)
def test_a_context_that_grows_loads_before_it_goes_on(
    dtypes: Sequence[torch.dtype], loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes another algorithm then, also for the second dtype of the call whose first one has
    made it grow."""
    monkeypatch.setattr(policy, "GATHER_BYTES", 512)

    def host(pe: int) -> None:
        with make(max_rows_per_rank=8, max_row_bytes=16, max_blocks=8, grow=True) as ctx:
            for n, algorithm in ((5, "gather"), (60, "owner"), (60, "owner")):
                parts = [
                    sparse(range(n), rows_of(pe, range(n), dtype=dtype), 99) for dtype in dtypes
                ]
                got = tdcoll.sparse_all_reduce(parts, ctx=ctx)
                assert ctx.last_algorithm == algorithm
                for one, dtype in zip(got, dtypes, strict=True):
                    assert same(
                        one,
                        total(
                            [
                                sparse(range(n), rows_of(r, range(n), dtype=dtype), 99)
                                for r in range(2)
                            ]
                        ),
                    )

    loading.world = World(2, heap_bytes=1 << 20)
    loading.world.run(host)
    assert loading.late == set()


# ---------------------------------------------------------------------- two groups


def on_two_streams(loading: Loading, calls: Sequence[Call], **options: Any) -> None:
    """Each rank makes these calls on two contexts, on a stream each, and begins with another one of
    the two."""
    loading.world = world = World(2, heap_bytes=1 << 22, backend="thread", on_timeout="expire")

    def host(pe: int) -> None:
        owner = runtime.current()
        made = [make(max_row_bytes=16, max_blocks=8, **options) for _ in range(2)]

        def stream(number: int) -> Callable[[], None]:
            def run() -> None:
                with owner.with_control_plane(owner.control.part(f"stream {number}")):
                    for call in calls:
                        world.pause(300 * (number ^ pe))
                        call(made[number], pe)
                made[number].check()

            return run

        on_streams(world, stream(0), stream(1))

    world.run(host)


def grows(ctx: tdcoll.SparseContext, pe: int) -> None:
    ids = range(60)
    tdcoll.sparse_all_reduce(sparse(ids, rows_of(pe, ids), 99), ctx=ctx)


CROSSWISE: dict[str, tuple[Sequence[Call], dict[str, Any]]] = {
    "another alignment": ((fixed(3), fixed(3, 1)), {"max_rows_per_rank": 8}),
    "growth": ((pair(3), grows), {"max_rows_per_rank": 8, "grow": True}),
}


@pytest.mark.parametrize("what", CROSSWISE)
def test_two_contexts_do_not_wait_for_each_other(
    what: str, loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "GATHER_BYTES", 512)
    calls, options = CROSSWISE[what]
    on_two_streams(loading, calls, **options)
    assert loading.late == set()
