# SPDX-License-Identifier: Apache-2.0
"""Results of sparse all-reduces against the reference: bit by bit where arithmetic is exact, and on all ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import second

import tdcoll
from tdcoll.primitives.reduce import TORCH_OPERATIONS
from tdcoll.testing import World

from .cases import small_pieces as small
from .cases import some_part, some_values
from .reference import Rows, bits, reduce, wrong_rows

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)
FLOATS = DTYPES[:4]
OPS = ("sum", "mean", "max", "min", "prod")
HUGE = 1 << 40
quick = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)

# ---------------------------------------------------------------------- one call


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


def call(part: Rows, num_rows: int, ctx: tdcoll.SparseContext | None, how: Options = Options()) -> Rows:
    """One call in one of the forms, and whether it has the shape that it should."""
    shape = tuple(part.values.shape[1:])
    if how.form == "coo":
        tensor = torch.sparse_coo_tensor(
            part.indices.unsqueeze(0), part.values, (num_rows, *shape), is_coalesced=how.coalesced
        )
        made = tdcoll.sparse_all_reduce(tensor, ctx, how.op, algorithm=how.algorithm, copy=how.copy)
        assert made.layout == torch.sparse_coo
        assert made.is_coalesced()
        assert made.shape == tensor.shape
        return Rows(made.indices()[0], made.values())
    common: dict[str, Any] = {"coalesced": how.coalesced, "algorithm": how.algorithm}
    if how.form == "pair":
        return Rows(*tdcoll.sparse_all_reduce_rows(*part, num_rows, ctx, how.op, copy=how.copy, **common))
    assert ctx is not None
    padded = tdcoll.sparse_all_reduce_padded(*part, num_rows, ctx, how.op, **common)
    ctx.check()
    size = int(padded.count)
    assert padded.indices.shape == (ctx.max_union_rows,)
    assert padded.values.shape == (ctx.max_union_rows, *shape)
    assert not padded.indices[size:].any()
    assert not padded.values[size:].any()
    return Rows(padded.indices[:size].clone(), padded.values[:size].clone())


def context(parts: Sequence[Rows], spare: int = 0, **more: Any) -> tdcoll.SparseContext:
    """One that has room for these parts."""
    most = max(1, *(part.indices.unique().numel() for part in parts))
    row_bytes = parts[0].values.shape[1:].numel() * parts[0].values.dtype.itemsize
    return tdcoll.SparseContext(max_rows_per_rank=most + spare, max_row_bytes=row_bytes, **more)


def outcomes(
    parts: Sequence[Rows], num_rows: int, how: Options = Options(), *, layout: Sequence[int] | None = None, **world: Any
) -> list[Outcome]:
    """What every rank gets."""

    def host(pe: int) -> Outcome:
        with context(parts, how.spare) as ctx:
            got = call(parts[pe], num_rows, ctx, how)
            rows = Rows(got.indices.clone(), got.values.clone())
            ctx.check()
            return Outcome(rows, how.algorithm if how.form == "padded" else ctx.last_algorithm, ctx.topology.nodes)

    return World(len(parts), ranks_per_node=layout, **world).run(host)


def check(got: Outcome, parts: Sequence[Rows], op: str) -> None:
    """Raise AssertionError unless it has the bits of the reference.

    In bf16 only where results are exact: the interpreter cuts numbers to 16 bits where GPUs round them.
    """
    wanted = reduce(parts, op, got.nodes if got.algorithm == "owner" else None)
    assert torch.equal(got.rows.indices, wanted.indices)
    assert (got.rows.values.dtype, got.rows.values.shape) == (wanted.values.dtype, wanted.values.shape)
    if wanted.values.dtype == torch.bfloat16 and op in ("mean", "prod"):
        torch.testing.assert_close(got.rows.values, wanted.values, rtol=2**-5, atol=2**-8, equal_nan=True)
    else:
        assert wrong_rows(got.rows.values, wanted.values) == 0, f"{got.rows.values} should be {wanted.values}"


def check_all(parts: Sequence[Rows], num_rows: int, how: Options = Options(), **world: Any) -> list[Outcome]:
    """Run, and compare what every rank gets with the reference and with what rank 0 got."""
    all_got = outcomes(parts, num_rows, how, **world)
    check(all_got[0], parts, how.op)
    for got in all_got[1:]:
        assert torch.equal(got.rows.indices, all_got[0].rows.indices)
        assert wrong_rows(got.rows.values, all_got[0].rows.values) == 0
    return all_got


# ---------------------------------------------------------------------- any case


SPACES = {  # rows of the table, and an index for a random number in (0, 1]
    "one row": (1, lambda u: 0),
    "tiny": (5, lambda u: int(4.99 * u)),
    "medium": (100, lambda u: int(99.9 * u)),
    "most rows": (33, lambda u: int(32.9 * u)),
    "skewed": (1000, lambda u: int(999 * u**5)),
    "zipf": (5000, lambda u: min(4999, int(1 / u) - 1)),
    "huge": (HUGE, lambda u: int((HUGE - 1) * u)),
    "huge and shared": (HUGE, lambda u: int(9.9 * u) * (HUGE // 10) + HUGE // 10 - 1),
}


@st.composite
def cases(draw: st.DrawFn, layouts: list[list[int]], most: int) -> tuple[list[int], int, list[Rows], Options, int]:
    """``(layout, num_rows, parts, options, seed)``."""
    layout = draw(st.sampled_from(layouts))
    num_rows, place = SPACES[draw(st.sampled_from(sorted(SPACES)))]
    dtype = draw(st.sampled_from(DTYPES))
    how = Options(
        op=draw(st.sampled_from(OPS if dtype in FLOATS else [op for op in OPS if op != "mean"])),
        algorithm=draw(st.sampled_from(["owner", "owner", "gather", "auto"])),
        copy=draw(st.booleans()),
        coalesced=draw(st.booleans()),
        form=draw(st.sampled_from(["coo", "pair", "padded"])),
        spare=draw(st.sampled_from([0, 1, 7])),
    )
    if how.form == "padded" and how.algorithm == "auto":
        how = replace(how, algorithm="gather")
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 5), (40,), (0,), (4,)]))
    counts = draw(st.lists(st.just(0) | st.integers(0, most), min_size=sum(layout), max_size=sum(layout)))
    seed = draw(st.integers(0, 1 << 16))
    dice = random.Random(seed)
    parts = []
    for rank, n in enumerate(counts):
        indices = torch.tensor([place(1 - dice.random()) for _ in range(n)], dtype=torch.int64)
        if how.coalesced:
            indices = indices.unique()
        values = some_values((indices.numel(), *shape), dtype, seed + rank)
        if dtype == torch.bfloat16 or how.op == "prod":  # so small that everything fits, save for products of many
            values = values.clamp(-2, 2)
        parts.append(Rows(indices, values))
    return layout, num_rows, parts, how, seed


ONE_NODE = [[1], [2], [3], [4], [5], [8]]
SEVERAL = [[1, 1], [2, 1], [2, 2], [1, 3], [1, 1, 1], [2, 2, 1], [1, 1, 1, 1], [3, 1, 2], [2, 2, 2, 2]]


@pytest.mark.parametrize(
    ("layouts", "most", "examples"),
    [
        pytest.param(ONE_NODE, 9, 8, id="one node"),
        pytest.param(SEVERAL, 6, 8, id="several nodes"),
        second(ONE_NODE, 30, 24, id="one node, more"),
        second(SEVERAL, 6, 24, id="several nodes, more"),
    ],
)
def test_any_case(layouts: list[list[int]], most: int, examples: int) -> None:
    tried = 0

    @settings(quick, max_examples=examples)
    @given(case=cases(layouts, most), small_pieces=st.booleans(), weak=st.booleans())
    def any_case(case: Any, small_pieces: bool, weak: bool) -> None:
        nonlocal tried
        tried += 1
        layout, num_rows, parts, how, seed = case
        with small() if small_pieces else nullcontext():
            check_all(parts, num_rows, how, layout=layout, seed=seed if weak else None, weak=weak)

    any_case()
    assert tried >= examples


# ---------------------------------------------------------------------- floats

BOTH = pytest.mark.parametrize("algorithm", ["owner", "gather"])
LAYOUTS = pytest.mark.parametrize("layout", [[3], [2, 1], [1, 1, 1]], ids=str)


@LAYOUTS
@pytest.mark.parametrize(
    "dtype", [torch.float16, *map(second, (torch.bfloat16, torch.float32, torch.float64))], ids=str
)
def test_floats_have_the_same_bits_on_all_ranks_and_in_all_schedules(dtype: torch.dtype, layout: list[int]) -> None:
    """And they are near the sum in float64: one rounding for repeated rows, one per node, one at the end."""
    parts = [some_part(rank, 14, 5, (3,), dtype, exact=False) for rank in range(3)]
    truth = reduce(parts, exact=True).values
    size = reduce([Rows(part.indices, part.values.abs()) for part in parts], exact=True).values
    first: torch.Tensor | None = None
    with small():
        for seed in (None, 3, 4):
            for got in outcomes(parts, 5, layout=layout, seed=seed, weak=seed is not None):
                first = got.rows.values if first is None else first
                assert torch.equal(bits(got.rows.values), bits(first))
    assert first is not None
    error = (first.double() - truth).abs()
    assert (error <= (3 + len(layout)) * torch.finfo(dtype).eps * size).all()
    assert dtype == torch.float64 or error.max() > 0, "nothing was rounded, so the test sees no order"


@BOTH
@LAYOUTS
@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
@pytest.mark.parametrize("dtype", [torch.float16, second(torch.float32)], ids=str)
def test_floats_have_the_bits_of_the_documented_order(
    dtype: torch.dtype, op: str, layout: list[int], algorithm: str
) -> None:
    """In rank order with one rounding, or in every node's order with a rounding each."""
    parts = [Rows(torch.arange(9), some_values((9, 3), dtype, rank, exact=False)) for rank in range(3)]
    check_all(parts, 9, Options(op, algorithm, coalesced=True), layout=layout)


ODD = (float("nan"), float("inf"), float("-inf"), -0.0, 1.5)


@BOTH
@pytest.mark.parametrize("layout", [[2], [1, 1]], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float16, *map(second, (torch.float32, torch.float64))], ids=str)
def test_numbers_that_are_none(dtype: torch.dtype, op: str, layout: list[int], algorithm: str) -> None:
    """Every pair of NaN, infinities, -0 and 1.5; and each of them where one rank alone has the row."""
    pairs = [(a, b) for a in ODD for b in ODD]
    ids = torch.arange(len(pairs))
    alone = torch.arange(100, 100 + len(ODD))
    mine = Rows(torch.cat((ids, alone)), torch.tensor([*(a for a, _ in pairs), *ODD]).view(-1, 1))
    theirs = Rows(torch.cat((ids, alone + 50)), torch.tensor([*(b for _, b in pairs), *ODD]).view(-1, 1))
    parts = [Rows(part.indices, part.values.to(dtype)) for part in (mine, theirs)]
    check_all(parts, 200, Options(op, algorithm, coalesced=True), layout=layout)


@BOTH
@pytest.mark.parametrize("layout", [[3], [2, 1]], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float16, second(torch.float32)], ids=str)
def test_no_result_is_a_negative_zero(dtype: torch.dtype, op: str, layout: list[int], algorithm: str) -> None:
    """Of a row that one rank has once, or several times, of zeros of both signs, of what is rounded to zero."""
    ids = [[0, 1, 1, 2, 3, 3, 5], [2, 3, 4, 5], [2, 5, 6]]
    zeros = [[-0.0] * 7, [0.0, -0.0, -0.0, -0.0], [-0.0] * 3]
    zeros[2][2] = -6e-8 if op in ("mean", "prod") else -0.0  # a third of it is no number in fp16
    ids[1].append(6)
    zeros[1].append(6e-8 if op == "prod" else -0.0)
    parts = [Rows(torch.tensor(i), torch.tensor(z).to(dtype)) for i, z in zip(ids, zeros, strict=True)]
    if dtype == torch.float32:
        parts = [Rows(part.indices, part.values.where(part.values == 0, 0)) for part in parts]
    for got in check_all(parts, 9, Options(op, algorithm), layout=layout):
        assert got.rows.values.numel() == 7
        assert not got.rows.values.any()
        assert not got.rows.values.signbit().any()


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *map(second, (torch.float32, torch.int32))], ids=str)
@pytest.mark.parametrize(("times", "value"), [(2, 3), (100, 3), (128, 3), (129, 4), (300, 1)])
def test_a_row_that_is_many_times_there(times: int, value: int, dtype: torch.dtype, algorithm: str) -> None:
    """Sums that fit into every dtype, while a sum of ones in bf16 stops growing at 256."""
    first = Rows(torch.tensor([7, *[4] * times, 9]), torch.full((times + 2, 2), value).to(dtype))
    second = Rows(torch.tensor([4, 4]), torch.full((2, 2), value).to(dtype))
    got = check_all([first, second], 10, Options(algorithm=algorithm))
    assert got[0].rows.values[0].tolist() == [value * (times + 2)] * 2


def test_many_rows_that_are_many_times_there() -> None:
    """Their rows are summed in pieces of 128, which hold the end of one and the beginning of the next."""
    ids = torch.cat([torch.full((n,), id) for id, n in enumerate((150, 3, 200, 131, 1, 128, 260))])
    shuffled = ids[torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(0))]
    parts = [Rows(shuffled, some_values((ids.numel(), 2), torch.float32, 5)), some_part(1, 9, 7, (2,), torch.float32)]
    for algorithm in ("owner", "gather"):
        check_all(parts, 7, Options(algorithm=algorithm))


OTHERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.complex64, torch.complex128, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [*DTYPES, *OTHERS], ids=str)
def test_every_dtype_and_operation_is_computed_or_refused(dtype: torch.dtype) -> None:
    """In its own dtype, or by an error on all ranks; the context goes on."""
    parts = [Rows(torch.tensor([1, 2 + rank]), torch.full((2, 2), 2 * rank + 2).to(dtype)) for rank in range(2)]

    def host(pe: int) -> int:
        computed = 0
        with tdcoll.SparseContext(max_rows_per_rank=2, max_row_bytes=32) as ctx:
            for op in (*OPS, "avg", "premul_sum"):
                error: type[Exception] | None = None
                text = rf"^values must have one of the dtypes .*; got {dtype}$"
                if dtype in OTHERS:
                    error = TypeError
                elif op not in OPS:
                    error, text = ValueError, rf"^op must be one of {', '.join(OPS)}; got '{op}'$"
                elif op == "mean" and dtype not in FLOATS:
                    error, text = ValueError, rf"^op must be one of sum, max, min, prod for {dtype}; got 'mean'$"
                if error is not None:
                    with pytest.raises(error, match=text):
                        tdcoll.sparse_all_reduce_rows(*parts[pe], 4, ctx, op)
                    continue
                got, wanted = Rows(*tdcoll.sparse_all_reduce_rows(*parts[pe], 4, ctx, op)), reduce(parts, op)
                assert torch.equal(got.indices, wanted.indices)
                assert wrong_rows(got.values, wanted.values) == 0
                computed += 1
        return computed

    wanted = 0 if dtype in OTHERS else len(OPS) - (dtype not in FLOATS)
    assert World(2).run(host) == [wanted, wanted]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
def test_integers_wrap_and_reach_their_limits(dtype: torch.dtype, op: str) -> None:
    limits = torch.iinfo(dtype)
    values = torch.tensor([[limits.max, limits.min], [limits.min, limits.max]], dtype=dtype)
    more = torch.tensor([[1, -1], [limits.min, limits.max]], dtype=dtype)
    for algorithm in ("owner", "gather"):
        check_all([Rows(torch.arange(2), values), Rows(torch.arange(2), more)], 2, Options(op, algorithm))


# ---------------------------------------------------------------------- where rows are


@BOTH
@pytest.mark.parametrize("layout", [[8], [3, 2], [1, 1, 1, 1]], ids=str)
def test_one_row_that_everybody_has(layout: list[int], algorithm: str) -> None:
    parts = [Rows(torch.tensor([6]), some_values((1, 3), torch.float32, rank)) for rank in range(sum(layout))]
    check_all(parts, 7, Options(algorithm=algorithm), layout=layout)


@BOTH
@pytest.mark.parametrize("num_rows", [1, 31, 32, 33, 63, 65])
def test_every_row_of_tables_of_any_size(num_rows: int, algorithm: str) -> None:
    first = Rows(torch.arange(num_rows), some_values((num_rows, 2), torch.float32, 1))
    second = Rows(torch.tensor([num_rows - 1]), some_values((1, 2), torch.float32, 2))
    check_all([first, second], num_rows, Options(algorithm=algorithm, coalesced=True))


@BOTH
@pytest.mark.parametrize("form", ["coo", "pair", "padded"])
@pytest.mark.parametrize("layout", [[2], [1, 1], [1]], ids=str)
def test_a_table_of_no_rows(layout: list[int], form: str, algorithm: str) -> None:
    nothing = Rows(torch.empty(0, dtype=torch.int64), torch.empty(0, 3))
    got = check_all([nothing] * sum(layout), 0, Options(algorithm=algorithm, form=form), layout=layout)
    assert got[0].rows.values.shape == (0, 3)


@BOTH
@pytest.mark.parametrize("op", OPS)
def test_one_rank_sums_its_repeated_rows(op: str, algorithm: str) -> None:
    parts = [some_part(4, 20, 7, (3,), torch.float32)]
    for form in ("coo", "pair", "padded"):
        check_all(parts, 7, Options(op, algorithm, form=form))


@BOTH
def test_more_rows_than_a_block_handles(algorithm: str) -> None:
    """With the tiles and blocks of real use."""
    parts = [some_part(rank, 1300 - 500 * rank, 1500, (3,), torch.float32) for rank in range(2)]
    check_all(parts, 1500, Options(algorithm=algorithm))


def test_rows_wider_than_a_tile() -> None:
    parts = [some_part(rank, 5, 6, (2500,), torch.float32) for rank in range(3)]
    for algorithm in ("owner", "gather"):
        check_all(parts, 6, Options(algorithm=algorithm))
    check_all(parts, 6, layout=[2, 1])


def test_values_that_are_not_contiguous() -> None:
    wide = [some_part(rank, 6, 8, (10,), torch.float32) for rank in range(2)]
    views = [Rows(part.indices, part.values[:, 1::3]) for part in wide]
    for algorithm in ("owner", "gather"):
        check_all(views, 8, Options(algorithm=algorithm))


# ---------------------------------------------------------------------- several calls

SERIES = [  # rows of the table, shape, dtype, operation, algorithm, copy
    (50, (3,), torch.float32, "sum", "owner", True),
    (HUGE, (5,), torch.float16, "max", "gather", True),
    (7, (), torch.int64, "prod", "owner", False),
    (1000, (2, 2), torch.float32, "mean", "owner", True),
    (7, (1,), torch.float64, "min", "auto", True),
    (50, (0,), torch.float32, "sum", "owner", True),
    (HUGE, (3,), torch.int32, "sum", "owner", True),
    (33, (8,), torch.bfloat16, "sum", "gather", False),
    (50, (3,), torch.float32, "sum", "owner", False),
]


@pytest.mark.parametrize("layout", [[3], [2, 1]], ids=str)
def test_different_calls_on_one_context(layout: list[int]) -> None:
    """Results stay as they are, whatever is called after, unless they are said to be views."""
    series = [
        (
            [some_part(9 * i + rank, (5, 0, 3)[(rank + i) % 3], min(n, 12), shape, dtype) for rank in range(3)],
            n,
            options,
        )
        for i, (n, shape, dtype, *options) in enumerate(SERIES)
    ]

    def host(pe: int) -> list[list[Outcome]]:
        found, kept = [], []
        with tdcoll.SparseContext(max_rows_per_rank=5, max_row_bytes=16) as ctx:
            for parts, num_rows, (op, algorithm, copy) in series:
                got = call(parts[pe], num_rows, ctx, Options(op, algorithm, copy))
                now = Outcome(Rows(*map(torch.clone, got)), ctx.last_algorithm, ctx.topology.nodes)
                found.append(now)
                kept.append(replace(now, rows=got) if copy else now)
            ctx.check()
        return [found, kept]

    for lists in World(3, ranks_per_node=layout, seed=1, weak=True).run(host):
        for found in lists:
            for got, (parts, _, (op, _, _)) in zip(found, series, strict=True):
                check(got, parts, op)


def test_two_contexts_in_turns() -> None:
    small_parts = [some_part(rank, 4, 6, (2,), torch.float32) for rank in range(3)]
    large_parts = [some_part(7 + rank, 12, HUGE, (5,), torch.int64) for rank in range(3)]

    def host(pe: int) -> list[tuple[Outcome, Outcome]]:
        found = []
        with context(small_parts) as first, context(large_parts, spare=3) as second:
            for _ in range(3):
                view = call(small_parts[pe], 6, first, Options(copy=False))
                other = call(large_parts[pe], HUGE, second, Options("max"))
                nodes = first.topology.nodes
                found.append((Outcome(Rows(*map(torch.clone, view)), "owner", nodes), Outcome(other, "owner", nodes)))
        return found

    for found in World(3, seed=2, weak=True).run(host):
        for one, other in found:
            check(one, small_parts, "sum")
            check(other, large_parts, "max")


@pytest.mark.parametrize("layout", [[5], [2, 3]], ids=str)
def test_two_groups_at_the_same_time(layout: list[int]) -> None:
    groups = [[4, 1], [0, 3, 2]]
    parts = [some_part(rank, 3 + rank, 9, (2,), torch.float32) for rank in range(5)]

    def host(pe: int) -> Outcome:
        group = next(group for group in groups if pe in group)
        with tdcoll.SparseContext(group, max_rows_per_rank=9, max_row_bytes=8) as ctx:
            for _ in range(2):
                got = call(parts[pe], 9, ctx)
            return Outcome(got, "owner", ctx.topology.nodes)

    found = World(5, ranks_per_node=layout, seed=3, weak=True).run(host)
    for group in groups:
        for pe in group:
            check(found[pe], [parts[member] for member in group], "sum")


def test_the_context_of_the_library_grows() -> None:
    """A first call that fits, one with more rows and one with larger rows."""
    calls = [(20, (2,)), (400, (2,)), (3, (9,))]
    series = [[some_part(5 * n + rank, n, HUGE, shape, torch.float32) for rank in range(2)] for n, shape in calls]

    def host(pe: int) -> list[Outcome]:
        found = []
        for parts in series:
            got = call(parts[pe], HUGE, None, Options(algorithm="owner", form="coo"))
            found.append(Outcome(Rows(got.indices, got.values), "owner", (0, 0)))
        return found

    for found in World(2, seed=4, weak=True).run(host):
        for got, parts in zip(found, series, strict=True):
            check(got, parts, "sum")


def test_operations_of_torch_are_the_named_ones() -> None:
    def host(pe: int) -> None:
        rows = torch.tensor([0, 2 + pe]), torch.tensor([[2.0], [3.0 + pe]])
        with tdcoll.SparseContext(max_rows_per_rank=4, max_row_bytes=16, debug=True) as ctx:
            for op, name in TORCH_OPERATIONS.items():
                ours: Any = op if pe else name
                for got in (
                    tdcoll.sparse_all_reduce_rows(*rows, 5, ctx, ours)[1],
                    tdcoll.sparse_all_reduce_rows(*rows, 5, ctx, ours, algorithm="gather")[1],
                    tdcoll.sparse_all_reduce_padded(*rows, 5, ctx, ours).values,
                ):
                    first = {"sum": 4.0, "mean": 2.0, "prod": 4.0}.get(name, 2.0)
                    others = [1.5, 2.0] if name == "mean" else [3.0, 4.0]
                    assert got.flatten()[:3].tolist() == [first, *others]

    World(2).run(host)
