# SPDX-License-Identifier: Apache-2.0
"""Several tensors in one call: bit for bit what calls of their own give."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from ranks import on_ranks
from tiers import parameters, slow_tier

import tdcoll
from tdcoll.collectives.sparse_all_reduce import kernels_tables

from .calls import DIM, ROWS, N, everywhere, make, refused_everywhere, sparse
from .cases import DENSE, DTYPES, GATHER, OPS, OWNER, small_pieces, some_part

SHAPES = [(), (1,), (3,), (4,), (8,), (16,), (2, 3), (5, 1, 2), (0,)]


class Table(NamedTuple):
    """The table of one tensor; the same on all ranks.

    Attributes:
        shape: of a row.
    """

    num_rows: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ListCall:
    """A call of several tensors.

    Attributes:
        grow: the context is too small for the call, and may grow.
        seed: of the rows.
    """

    tables: Sequence[Table]
    op: str
    algorithm: str
    copy: bool
    grow: bool
    seed: int

    def context(self) -> tdcoll.SparseContext:
        if self.grow:
            return make(max_rows_per_rank=8, max_row_bytes=8, grow=True)
        return make(max_rows_per_rank=64, max_row_bytes=128)

    def tensors(self, rank: int) -> list[torch.Tensor]:
        """Those of a rank: random rows, some of them many times, none at all, or coalesced."""
        chosen = random.Random(1000 * self.seed + rank)
        made = []
        for number, (num_rows, shape, dtype) in enumerate(self.tables):
            n = 0 if num_rows == 0 else chosen.choice((0, 1, 3, 8, 140))
            seed = 100 * self.seed + 10 * number + rank
            ids, values = some_part(seed, n, num_rows, shape, dtype, exact=False)
            if n == 140:
                ids = ids % 2  # more often than one program sums
            tensor = sparse(ids % max(1, num_rows), values, num_rows)
            coalesces = chosen.random() < 0.3 and dtype != torch.bfloat16
            made.append(tensor.coalesce() if coalesces else tensor)
        return made


def list_call(seed: int) -> ListCall:
    """Any call."""
    chosen = random.Random(seed)
    dtypes = chosen.sample(DTYPES, chosen.choice((1, 1, 2)))
    sizes = (0, 1, 2, 31, 32, 33, 100, 1000)
    tables = [
        Table(chosen.choice(sizes), chosen.choice(SHAPES), chosen.choice(dtypes))
        for _ in range(chosen.randint(2, 5))
    ]
    op = chosen.choice(OPS)
    if not all(table.dtype.is_floating_point for table in tables):
        op = chosen.choice(("sum", "max", "min"))
    grow = chosen.random() < 0.3
    copy = chosen.random() < 0.5
    algorithm = chosen.choice((OWNER, GATHER, DENSE))
    return ListCall(tables, op, algorithm, copy, grow, seed)


def padded_call(seed: int) -> ListCall:
    """Any call that has a padded form: it isn't dense, and its context doesn't grow."""
    call = list_call(seed)
    if call.algorithm == DENSE:
        call = replace(call, algorithm=(OWNER, GATHER)[seed // 2 % 2])
    return replace(call, grow=False)


SEEDS = range(16)
CALLS = [list_call(seed) for seed in SEEDS]
assert {call.algorithm for call in CALLS} == {OWNER, GATHER, DENSE}
assert 0 < sum(call.grow for call in CALLS) < len(CALLS)
PADDED = [padded_call(seed) for seed in SEEDS]
assert {call.algorithm for call in PADDED} == {OWNER, GATHER}


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Both have the same rows; values may be NaN."""
    return (
        (got.shape, got.dtype, got.is_coalesced())
        == (wanted.shape, wanted.dtype, wanted.is_coalesced())
        and torch.equal(got.indices(), wanted.indices())
        and torch.equal(
            got.values().contiguous().view(torch.uint8),
            wanted.values().contiguous().view(torch.uint8),
        )
    )


def each_call(calls: Sequence[ListCall]) -> pytest.MarkDecorator:
    """Parametrize ``call``: one in the first tier, and the others in the second."""
    sets = [parameters(call, slow=call.seed > 0, id=str(call.seed)) for call in calls]
    return pytest.mark.parametrize("call", sets)


each_layout = pytest.mark.parametrize("layout", [[3], [2, 1], slow_tier([1, 1, 1])], ids=str)


def on_all_ranks(call: ListCall, layout: list[int], host: Callable[[int], None]) -> None:
    """Run, in small pieces for every other call."""
    with small_pieces() if call.seed % 2 else nullcontext():
        everywhere(host, sum(layout), ranks_per_node=layout, heap_bytes=1 << 21)


@each_call(CALLS)
@each_layout
def test_lists_are_calls_of_their_own(layout: list[int], call: ListCall) -> None:
    def host(pe: int) -> None:
        tensors = call.tensors(pe)
        with call.context() as ctx:
            options = {"ctx": ctx, "algorithm": call.algorithm}
            got = tdcoll.sparse_all_reduce(tensors, call.op, copy=call.copy, **options)
            got = [result.clone() for result in got]
            for result, tensor in zip(got, tensors, strict=True):
                alone = tdcoll.sparse_all_reduce(tensor, call.op, **options)
                assert same_bits(result, alone), (result, alone)

    on_all_ranks(call, layout, host)


@each_call(PADDED)
@each_layout
def test_padded_lists_have_the_rows_of_lists(layout: list[int], call: ListCall) -> None:
    def host(pe: int) -> None:
        tensors = call.tensors(pe)
        with call.context() as ctx:
            options = {"ctx": ctx, "algorithm": call.algorithm}
            wanted = tdcoll.sparse_all_reduce(tensors, call.op, copy=call.copy, **options)
            wanted = [result.clone() for result in wanted]
            padded = tdcoll.sparse_all_reduce_padded(
                [tensor._indices()[0] for tensor in tensors],
                [tensor._values() for tensor in tensors],
                [table.num_rows for table in call.tables],
                call.op,
                **options,
            )
            ctx.check()
            for fixed, result in zip(padded, wanted, strict=True):
                n = int(fixed.count)
                rows = sparse(fixed.indices[:n], fixed.values[:n], len(result), True)
                assert fixed.values.shape == (ctx.max_union_rows, *result.shape[1:])
                assert same_bits(rows, result)
                assert not fixed.indices[n:].any()
                assert not fixed.values[n:].any()

    on_all_ranks(call, layout, host)


def test_more_tensors_than_a_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_tables, "MOST_GIVEN", 3)

    def host(pe: int) -> None:
        given = [
            sparse([pe, pe, i % 3], torch.full((3, 1 + i % 2), 1.0 + i), 3 + i) for i in range(8)
        ]
        with make(max_rows_per_rank=32) as ctx:
            got = tdcoll.sparse_all_reduce(given, ctx=ctx)
            for one, tensor in zip(got, given, strict=True):
                assert same_bits(one, tdcoll.sparse_all_reduce(tensor, ctx=ctx))

    everywhere(host)


@on_ranks(N)
def test_lists_of_none_one_and_empty_tensors(pe: int) -> None:
    none = sparse([], torch.ones(0, DIM))
    one = sparse([pe], torch.ones(1, DIM))
    for options in ({}, {"ctx": make()}):
        assert tdcoll.sparse_all_reduce([], **options) == []
        (got,) = tdcoll.sparse_all_reduce((one,), **options)
        assert same_bits(got, tdcoll.sparse_all_reduce(one, **options))
        got = tdcoll.sparse_all_reduce([none, one if pe else none, none], **options)
        assert [len(each.values()) for each in got] == [0, 2, 0]
        assert [each.shape for each in got] == [(ROWS, DIM)] * 3
    options["ctx"].close()


@pytest.mark.parametrize("ids", [[ROWS], [-1], [0, ROWS], [1 << 40], [3, 3, -7]], ids=str)
@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("algorithm", ["owner", "gather"])
@on_ranks(N)
def test_an_index_beyond_its_table_is_not_a_row_of_the_next(
    pe: int, ids: list[int], coalesced: bool, algorithm: str
) -> None:
    good = sparse([1, 5], torch.ones(2, DIM), coalesced=True)
    bad = sparse(ids, torch.ones(len(ids), DIM), coalesced=coalesced) if pe == 1 else good
    text = "^sparse_all_reduce: indices of rank 1 must be rows of their tensors"
    given = [good, bad, good]
    with make() as ctx:

        def call() -> Any:
            return tdcoll.sparse_all_reduce(given, ctx=ctx, algorithm=algorithm)

        refused_everywhere(ctx, ValueError, text, call, algorithm)
        padded = tdcoll.sparse_all_reduce_padded(
            [each._indices()[0] for each in given], [each._values() for each in given], [ROWS] * 3, ctx=ctx,
            coalesced=coalesced, algorithm=algorithm,
        )  # fmt: skip
        assert [int(each.count) for each in padded] == [0, 0, 0]
        with pytest.raises(ValueError, match=text.replace("reduce:", "reduce_padded:")):
            ctx.check()
        got = tdcoll.sparse_all_reduce([good, good], ctx=ctx, algorithm=algorithm)
        assert all(torch.equal(each.values(), torch.full((2, DIM), 3.0)) for each in got)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("coalesced", [False, True])
@on_ranks(2)
def test_joined_ids_have_32_bits_as_long_as_all_rows_fit(
    pe: int, coalesced: bool, more: int
) -> None:
    sizes, ids = [(1 << 31) - 9 + more, 9], [[0, (1 << 31) - 10 + more], [pe, 8]]
    given = [
        sparse(own, torch.ones(2, DIM), size, coalesced)
        for own, size in zip(ids, sizes, strict=True)
    ]
    with make() as ctx:
        got = tdcoll.sparse_all_reduce(given, ctx=ctx)
        joined = {dtype for name, dtype in ctx._scratch if name == "ids"}
    assert joined == {torch.int64 if more else torch.int32}
    assert [one.indices()[0].tolist() for one in got] == [ids[0], [0, 1, 8]]
    assert got[1].values()[:, 0].tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("debug", [False, True])
def test_ranks_with_other_lists(debug: bool) -> None:
    """Shapes, numbers of tensors, their order, dtypes."""
    first, second_, half = (
        sparse([1], torch.ones(1, *shape), rows) for rows, shape in ((5, (2,)), (7, (2,)), (5, ()))
    )
    lists = [
        [second_, first],
        [first],
        [first, second_, half],
        [first, half],
        [first, second_.to(torch.float64)],
    ]

    def host(pe: int) -> None:
        with make(debug=debug) as ctx:
            for other in lists:
                with pytest.raises(tdcoll.RankMismatchError):
                    tdcoll.sparse_all_reduce(
                        other if pe == 1 else [first, second_], ctx=ctx, algorithm="owner"
                    )
                assert len(tdcoll.sparse_all_reduce([first, second_], ctx=ctx)) == 2

    everywhere(host)


@on_ranks(1)
def test_arguments_are_named(pe: int) -> None:
    good = sparse([1], torch.ones(1, DIM))
    ids, rows = torch.tensor([1]), torch.ones(1, DIM)
    with make() as ctx:
        for wrong, error, text in (
            (
                [good, torch.ones(2)],
                ValueError,
                r"^tensor\[1\] must have the layout torch.sparse_coo",
            ),
            ([good, good, 3], TypeError, r"^tensor\[2\] must be a torch.Tensor, got 3$"),
            (
                [sparse([1], torch.ones(1, 2).bool())],
                TypeError,
                r"^tensor\[0\] must have one of the dtypes",
            ),
        ):
            with pytest.raises(error, match=text):
                tdcoll.sparse_all_reduce(wrong, ctx=ctx)
        for changed, error, text in (
            ({"indices": [ids]}, ValueError, "^indices must be a list of 2 like values"),
            ({"num_rows": 9}, ValueError, "^num_rows must be a list of 2 like values, got 9"),
            ({"num_rows": [9, -1]}, ValueError, r"^num_rows\[1\] must be"),
            ({"indices": [ids, ids.int()]}, ValueError, r"^indices\[1\] must be int64"),
            ({"values": [rows, rows[:0]]}, ValueError, r"^values\[1\] must have a row for each"),
        ):
            given: dict[str, Any] = {
                "indices": [ids, ids],
                "values": [rows, rows],
                "num_rows": [9, 9],
            } | changed
            with pytest.raises(error, match=text):
                tdcoll.sparse_all_reduce_padded(**given, ctx=ctx)
        assert len(tdcoll.sparse_all_reduce([good], ctx=ctx)) == 1


@on_ranks(2)
def test_capacities_are_those_of_all_tensors_together(pe: int) -> None:
    given = [sparse([1, 2, 3], torch.ones(3, DIM)) for _ in range(3)]
    with make(max_rows_per_rank=8) as ctx:
        refused_everywhere(
            ctx,
            tdcoll.ContextError,
            "a rank brings 9 different rows",
            lambda: tdcoll.sparse_all_reduce(given, ctx=ctx, algorithm="owner"),
        )
        assert len(tdcoll.sparse_all_reduce(given[:2], ctx=ctx)) == 2
