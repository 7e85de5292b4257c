# SPDX-License-Identifier: Apache-2.0
"""Sparse all-reduces as cases for `tdcoll.testing.explore`, and what their tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

import tdcoll
from tdcoll.collectives._host import plan as plans
from tdcoll.collectives.sparse_all_reduce import call as sparse_call
from tdcoll.collectives.sparse_all_reduce import policy as sparse_policy
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World

from .reference import Rows, reduce, wrong_rows

HEAP = 1 << 19


@contextmanager
def small_pieces() -> Iterator[None]:
    """Tiles, blocks and chunks so small that few rows need several of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_policy, "TILE_BYTES", 64)
        patch.setattr(sparse_call, "_IDS_BLOCK", 8)
        patch.setattr(sparse_call, "_PLAN_BLOCK", 4)
        patch.setattr(plans, "TARGET_CHUNK_BYTES", 128)
        yield


def some_values(shape: Sequence[int], dtype: torch.dtype, seed: int, exact: bool = True) -> torch.Tensor:
    """Integers of -9..9, which any order of summing gives the same result of, or, not ``exact``, normal floats."""
    generator = torch.Generator().manual_seed(seed)
    if exact or not dtype.is_floating_point:
        return torch.randint(-9, 10, tuple(shape), generator=generator).to(dtype)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def some_part(seed: int, n: int, num_rows: int, shape: Sequence[int], dtype: torch.dtype, exact: bool = True) -> Rows:
    """``n`` rows at random places, also several times."""
    generator = torch.Generator().manual_seed(1000 + seed)
    indices = torch.randint(0, max(1, num_rows), (n,), generator=generator)
    return Rows(indices, some_values((n, *shape), dtype, seed, exact))


class Reduces:
    """Runs ``calls`` on every rank, each with other rows, and compares with the reference, at once and at the end.

    Args:
        algorithms: of the calls, in order: ``o`` owner, ``g`` gather.
        rows: how many each rank brings in the first call; they go around from call to call.
        num_rows: of the table.
        op, shape, dtype: as for ``sparse_all_reduce_rows``.
        exact: values are small integers; else any floats.
        group: ranks that take part; None for all.
        coalesced: no rank has an index twice, and it says so.
        max_rows_per_rank: of the context. Default: what is needed.
        data: ``data(rank, call)`` gives the rows, in place of random ones.
    """

    def __init__(
        self,
        algorithms: str = "ooo",
        rows: Sequence[int] = (4, 0, 6, 1),
        num_rows: int = 9,
        *,
        op: str = "sum",
        shape: Sequence[int] = (3,),
        dtype: torch.dtype = torch.float32,
        exact: bool = True,
        group: Sequence[int] | None = None,
        coalesced: bool = False,
        max_rows_per_rank: int | None = None,
        data: Callable[[int, int], Rows] | None = None,
    ) -> None:
        self.algorithms, self.rows, self.num_rows = algorithms, tuple(rows), num_rows
        self.op, self.shape, self.dtype, self.exact = op, tuple(shape), dtype, exact
        self.group, self.coalesced, self.data = group, coalesced, data
        self.capacity = max(1, *rows) if max_rows_per_rank is None else max_rows_per_rank
        self._wanted: dict[object, Rows] = {}

    def __call__(self, world: World) -> None:
        world.run(self.host)

    def part(self, rank: int, call: int) -> Rows:
        """What ``rank`` brings to ``call``."""
        if self.data is not None:
            return self.data(rank, call)
        n = self.rows[(rank + call) % len(self.rows)]
        made = some_part(17 * call + rank, n, self.num_rows, self.shape, self.dtype, self.exact)
        if not self.coalesced:
            return made
        indices = made.indices.unique()
        return Rows(indices, made.values[: indices.numel()])

    def wanted(self, topology: Topology, call: int) -> Rows:
        """What every rank has to get in ``call``."""
        nodes = topology.nodes if self.algorithms[call] == "o" else None
        key = (topology.world_size, nodes, call)
        if key not in self._wanted:
            parts = [self.part(rank, call) for rank in range(topology.world_size)]
            self._wanted[key] = reduce(parts, self.op, nodes)
        return self._wanted[key]

    def check(self, topology: Topology, rank: int, call: int, got: Rows) -> None:
        """Raise AssertionError unless ``got`` has the bits of the reference."""
        wanted, where = self.wanted(topology, call), f"rank {rank}, call {call} ({self.algorithms[call]})"
        assert torch.equal(got.indices, wanted.indices), f"{where}: {got.indices} are wrong indices"
        wrong = wrong_rows(got.values, wanted.values)
        assert wrong == 0, f"{where}: {wrong} wrong rows of {len(wanted.indices)}"

    def host(self, pe: int) -> None:
        if self.group is not None and pe not in self.group:
            return
        row_bytes = torch.Size(self.shape).numel() * self.dtype.itemsize
        with tdcoll.SparseContext(self.group, max_rows_per_rank=self.capacity, max_row_bytes=row_bytes) as ctx:
            kept = []
            for call, letter in enumerate(self.algorithms):
                copy = call % 2 == 0
                got = Rows(
                    *tdcoll.sparse_all_reduce_rows(
                        *self.part(ctx.rank, call),
                        self.num_rows,
                        ctx,
                        self.op,
                        coalesced=self.coalesced,
                        algorithm={"o": "owner", "g": "gather"}[letter],
                        copy=copy,
                    )
                )
                self.check(ctx.topology, ctx.rank, call, got)
                if copy:
                    kept.append((call, got))
            ctx.check()
            for call, got in kept:
                self.check(ctx.topology, ctx.rank, call, got)
        assert tdcoll.heap_info().used == 0
