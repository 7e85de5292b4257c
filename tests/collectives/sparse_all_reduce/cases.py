# SPDX-License-Identifier: Apache-2.0
"""Sparse all-reduces as cases for `tdcoll.testing.explore`, and what their tests share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll.calls import plan as plans
from tdcoll.collectives.sparse_all_reduce import call as sparse_call
from tdcoll.collectives.sparse_all_reduce import policy as sparse_policy
from tdcoll.collectives.sparse_all_reduce.policy import choose
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World

from .reference import Rows, reduce, wrong_rows

HEAP = 1 << 19
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)
FLOATS = DTYPES[:4]
OPS = ("sum", "mean", "max", "min", "prod")
HUGE = 1 << 40
OWNER = "owner"
GATHER = "gather"
DENSE = "dense"
BOTH = pytest.mark.parametrize("algorithm", [OWNER, GATHER])
EACH = pytest.mark.parametrize("algorithm", [OWNER, GATHER, DENSE])


@contextmanager
def small_pieces() -> Iterator[None]:
    """Tiles, blocks and chunks so small that few rows need several of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_policy, "TILE_BYTES", 64)
        patch.setattr(sparse_call, "_IDS_BLOCK", 8)
        patch.setattr(sparse_call, "_PLACED_BLOCK", 4)
        patch.setattr(sparse_call, "_PLAN_BLOCK", 4)
        patch.setattr(plans, "TARGET_CHUNK_BYTES", 128)
        yield


def some_values(
    shape: Sequence[int], dtype: torch.dtype, seed: int, exact: bool = True
) -> torch.Tensor:
    """Integers of -9..9, which any order of summing gives the same result of, or, not ``exact``,
    normal floats."""
    generator = torch.Generator().manual_seed(seed)
    if exact or not dtype.is_floating_point:
        return torch.randint(-9, 10, tuple(shape), generator=generator).to(dtype)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def some_part(
    seed: int, n: int, num_rows: int, shape: Sequence[int], dtype: torch.dtype, exact: bool = True
) -> Rows:
    """``n`` rows at random places, also several times."""
    generator = torch.Generator().manual_seed(1000 + seed)
    indices = torch.randint(0, max(1, num_rows), (n,), generator=generator)
    return Rows(indices, some_values((n, *shape), dtype, seed, exact))


TABLES = ((9, (3,)), (1, ()), (40, (5, 2)), (3, (1,)))
"""Rows of tables, and shapes of their rows: of several widths, and one that a single row makes."""


class Reduces:
    """Makes calls on every rank, in small pieces, each with other rows; compares them at once and
    at the end.

    Args:
        algorithms: of the calls, in order.
        rows: how many each rank brings in the first call; they go around from call to call, and
            from table to table.
        num_rows: of the table.
        shape, dtype: as for ``sparse_all_reduce_rows``.
        exact: values are small integers; else any floats.
        group: ranks that take part; None for all.
        coalesced: no rank has an index twice, and it says so.
        tables: calls have a tensor for each of these, in place of one of ``num_rows`` and
            ``shape``.
    """

    def __init__(
        self,
        algorithms: Sequence[str] = 3 * (OWNER,),
        rows: Sequence[int] = (4, 0, 6, 1),
        num_rows: int = 9,
        *,
        shape: Sequence[int] = (3,),
        dtype: torch.dtype = torch.float32,
        exact: bool = True,
        group: Sequence[int] | None = None,
        coalesced: bool = False,
        tables: Sequence[tuple[int, tuple[int, ...]]] | None = None,
    ) -> None:
        self.algorithms = tuple(algorithms)
        self.rows = tuple(rows)
        self.several = tables is not None
        self.dtype = dtype
        self.exact = exact
        self.group = group
        self.coalesced = coalesced
        self.tables = tables or ((num_rows, tuple(shape)),)
        self._wanted: dict[object, Rows] = {}

    def __call__(self, world: World) -> None:
        with small_pieces():
            world.run(self.host)

    def part(self, rank: int, call: int, table: int) -> Rows:
        """The rows of a table that ``rank`` brings to ``call``."""
        num_rows, shape = self.tables[table]
        n = self.rows[(rank + call + table) % len(self.rows)]
        made = some_part(101 * table + 17 * call + rank, n, num_rows, shape, self.dtype, self.exact)
        if not self.coalesced:
            return made
        indices = made.indices.unique()
        return Rows(indices, made.values[: indices.numel()])

    def wanted(self, topology: Topology, call: int, table: int) -> Rows:
        """The rows of a table that every rank has to get in ``call``."""
        nodes = topology.nodes if self.algorithms[call] == OWNER else None
        key = (topology.world_size, nodes, call, table)
        if key not in self._wanted:
            parts = [self.part(rank, call, table) for rank in range(topology.world_size)]
            self._wanted[key] = reduce(parts, nodes=nodes)
        return self._wanted[key]

    def check(self, topology: Topology, rank: int, call: int, every: Sequence[Rows]) -> None:
        """Raise AssertionError unless ``every`` table has the bits of the reference."""
        where = f"rank {rank}, call {call} ({self.algorithms[call]})"
        for table, got in enumerate(every):
            wanted = self.wanted(topology, call, table)
            assert torch.equal(got.indices, wanted.indices), (
                f"{where}: {got.indices} are wrong indices, table {table}"
            )
            wrong = wrong_rows(got.values, wanted.values)
            assert wrong == 0, (
                f"{where}: {wrong} wrong rows of {len(wanted.indices)}, table {table}"
            )

    def call(self, ctx: tdcoll.SparseContext, call: int, **options: Any) -> list[Rows]:
        """Make a call, and return its result for each table."""
        parts = [self.part(ctx.rank, call, table) for table in range(len(self.tables))]
        options |= {"ctx": ctx, "algorithm": self.algorithms[call]}
        if not self.several:
            ((num_rows, _),) = self.tables
            options["coalesced"] = self.coalesced
            return [Rows(*tdcoll.sparse_all_reduce_rows(*parts[0], num_rows, **options))]
        given = [
            torch.sparse_coo_tensor(part.indices.unsqueeze(0), part.values, (num_rows, *shape))
            for part, (num_rows, shape) in zip(parts, self.tables, strict=True)
        ]
        return [
            Rows(one.indices()[0], one.values())
            for one in tdcoll.sparse_all_reduce(given, **options)
        ]

    def host(self, pe: int) -> None:
        if self.group is not None and pe not in self.group:
            return
        most = max(1, *self.rows) * len(self.tables)
        row_bytes = max(torch.Size(shape).numel() for _, shape in self.tables) * self.dtype.itemsize
        with tdcoll.SparseContext(
            self.group, max_rows_per_rank=most, max_row_bytes=row_bytes
        ) as ctx:
            kept = []
            for call in range(len(self.algorithms)):
                copy = call % 2 == 0
                got = self.call(ctx, call, copy=copy)
                self.check(ctx.topology, ctx.rank, call, got)
                if copy:
                    kept.append((call, got))
            ctx.check()
            for call, got in kept:
                self.check(ctx.topology, ctx.rank, call, got)
        assert tdcoll.heap_info().used == 0


@dataclass(frozen=True)
class Options:
    """How a call is made.

    Attributes:
        form: ``"coo"``, ``"pair"`` or ``"padded"``.
        spare: how many more rows than needed the context has room for.
    """

    op: str = "sum"
    algorithm: str = "owner"
    copy: bool = True
    coalesced: bool = False
    form: str = "pair"
    spare: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a rank got, by which algorithm, and the nodes of all ranks."""

    rows: Rows
    algorithm: str
    nodes: tuple[int, ...]


def call(
    part: Rows, num_rows: int, ctx: tdcoll.SparseContext | None, how: Options = Options()
) -> Rows:
    """Make a call in one of the forms, and check its shape."""
    shape = tuple(part.values.shape[1:])
    if how.form == "coo":
        tensor = torch.sparse_coo_tensor(
            part.indices.unsqueeze(0), part.values, (num_rows, *shape), is_coalesced=how.coalesced
        )
        made = tdcoll.sparse_all_reduce(
            tensor, ctx=ctx, op=how.op, algorithm=how.algorithm, copy=how.copy
        )
        assert made.layout == torch.sparse_coo
        assert made.is_coalesced()
        assert made.shape == tensor.shape
        return Rows(made.indices()[0], made.values())
    common: dict[str, Any] = {"coalesced": how.coalesced, "algorithm": how.algorithm}
    if how.form == "pair":
        return Rows(
            *tdcoll.sparse_all_reduce_rows(
                *part, num_rows, how.op, ctx=ctx, copy=how.copy, **common
            )
        )
    assert ctx is not None
    padded = tdcoll.sparse_all_reduce_padded(*part, num_rows, how.op, ctx=ctx, **common)
    ctx.check()
    size = int(padded.count)
    assert isinstance(padded, tdcoll.PaddedRows)
    assert (padded.indices.shape, padded.indices.dtype) == ((ctx.max_union_rows,), torch.int64)
    assert (padded.values.shape, padded.values.dtype) == (
        (ctx.max_union_rows, *shape),
        part.values.dtype,
    )
    assert (padded.count.shape, padded.count.dtype, padded.count.device) == (
        (1,),
        torch.int64,
        ctx.device,
    )
    assert not padded.indices[size:].any()
    assert not padded.values[size:].any()
    return Rows(padded.indices[:size].clone(), padded.values[:size].clone())


def context(parts: Sequence[Rows], spare: int = 0, **more: Any) -> tdcoll.SparseContext:
    """Make a context that has room for these parts."""
    most = max(1, *(part.indices.unique().numel() for part in parts))
    row_bytes = parts[0].values.shape[1:].numel() * parts[0].values.dtype.itemsize
    return tdcoll.SparseContext(max_rows_per_rank=most + spare, max_row_bytes=row_bytes, **more)


def outcomes(
    parts: Sequence[Rows],
    num_rows: int,
    how: Options = Options(),
    *,
    layout: Sequence[int] | None = None,
    **world: Any,
) -> list[Outcome]:
    """Return what every rank gets."""

    def host(pe: int) -> Outcome:
        with context(parts, how.spare) as ctx:
            got = call(parts[pe], num_rows, ctx, how)
            rows = Rows(got.indices.clone(), got.values.clone())
            ctx.check()
            padded = how.form == "padded"
            taken = (
                choose(how.algorithm, ctx.capacities, ctx.max_row_bytes)
                if padded
                else ctx.last_algorithm
            )
            return Outcome(rows, taken, ctx.topology.nodes)

    return World(len(parts), ranks_per_node=layout, **world).run(host)


def check(got: Outcome, parts: Sequence[Rows], op: str) -> None:
    """Raise AssertionError unless it has the bits of the reference."""
    nodes = None if got.algorithm == "gather" else got.nodes
    wanted = reduce(parts, op, nodes, dense=got.algorithm == "dense")
    assert torch.equal(got.rows.indices, wanted.indices)
    assert (got.rows.values.dtype, got.rows.values.shape) == (
        wanted.values.dtype,
        wanted.values.shape,
    )
    assert wrong_rows(got.rows.values, wanted.values) == 0, (
        f"{got.rows.values} should be {wanted.values}"
    )


def check_all(
    parts: Sequence[Rows], num_rows: int, how: Options = Options(), **world: Any
) -> list[Outcome]:
    """Run, and compare what every rank gets with the reference and with what rank 0 got."""
    all_got = outcomes(parts, num_rows, how, **world)
    check(all_got[0], parts, how.op)
    for got in all_got[1:]:
        assert torch.equal(got.rows.indices, all_got[0].rows.indices)
        assert wrong_rows(got.rows.values, all_got[0].rows.values) == 0
    return all_got
