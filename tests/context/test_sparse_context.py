# SPDX-License-Identifier: Apache-2.0
"""SparseContext and its calls as users see them: arguments, capacities, views, memory, and who is told of errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiers import second

import tdcoll
from tdcoll import runtime
from tdcoll.collectives.sparse_all_reduce import call as call_module
from tdcoll.collectives.sparse_all_reduce.context import symmetric_bytes
from tdcoll.runtime.heap import Arena
from tdcoll.testing import Deadlock, World

N = 3
ROWS = 40
DIM = 4


def sparse(
    ids: Sequence[int] | torch.Tensor, values: torch.Tensor, num_rows: int = ROWS, coalesced: bool = False
) -> torch.Tensor:
    """``[n], [n, ...] -> [num_rows, ...]`` COO."""
    indices = torch.as_tensor(ids, dtype=torch.int64).reshape(1, -1)
    return torch.sparse_coo_tensor(
        indices, values, (num_rows, *values.shape[1:]), is_coalesced=coalesced, check_invariants=False
    )


def ids_of(rank: int, call: int = 0, count: int = 6) -> list[int]:
    """Rows of a rank in a call: not sorted, the first one twice, most of them other ranks' as well."""
    ids = [(7 * i + rank + 3 * call) % ROWS for i in reversed(range(count))]
    return [*ids, ids[0]]


def rows_of(rank: int, ids: Sequence[int], shape: tuple[int, ...] = (DIM,), dtype: torch.dtype = torch.float32) -> Any:
    """``-> [n, *shape]``: small whole numbers, so that sums are exact in any order and any dtype."""
    elements = torch.Size(shape).numel()
    number = torch.arange(len(ids) * elements).reshape(len(ids), *shape)
    return ((number + 3 * rank) % 7 - 2).to(dtype)


def mine(rank: int, call: int = 0, count: int = 6, shape: tuple[int, ...] = (DIM,)) -> torch.Tensor:
    ids = ids_of(rank, call, count)
    return sparse(ids, rows_of(rank, ids, shape))


def total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of COO tensors by PyTorch, coalesced."""
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    return whole.coalesce()


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (
        got.shape == wanted.shape
        and got.is_coalesced()
        and torch.equal(got.indices(), wanted.indices())
        and torch.equal(got.values(), wanted.values())
    )


def reduce_and_compare(ctx: tdcoll.SparseContext, call: int = 0, count: int = 6, **options: Any) -> None:
    got = tdcoll.sparse_all_reduce(mine(ctx.rank, call, count), ctx, **options)
    assert same(got, total([mine(rank, call, count) for rank in range(ctx.world_size)]))


def make(**options: Any) -> tdcoll.SparseContext:
    return tdcoll.SparseContext(**({"max_rows_per_rank": 16, "max_row_bytes": 64} | options))


def everywhere(host: Callable[[int], Any], n_pes: int = N, **options: Any) -> list[Any]:
    return World(n_pes, **options).run(host)


# ---------------------------------------------------------------------- life


@pytest.mark.parametrize("algorithm", ["owner", "gather"])
def test_fewer_programs_do_the_same_work(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[int] = set()
    workers = call_module.Call.workers

    def noting(self: Any, tasks: int) -> int:
        launched.add(workers(self, tasks))
        return workers(self, tasks)

    monkeypatch.setattr(call_module.Call, "workers", noting)

    def host(pe: int) -> None:
        with make(max_programs=1 + pe) as ctx:  # it need not be the same on all ranks
            for call in range(3):
                reduce_and_compare(ctx, call, algorithm=algorithm)

    everywhere(host, 2)
    assert launched <= {1, 2}


def test_facts() -> None:
    def host(pe: int) -> None:
        with make(max_union_rows=40) as ctx:
            assert (ctx.rank, ctx.world_size) == (pe, 4)
            assert (ctx.max_rows_per_rank, ctx.max_row_bytes, ctx.max_union_rows) == (16, 64, 40)
            assert ctx.topology == tdcoll.topology()
            assert ctx.device == tdcoll.device()
            assert (ctx.grow, ctx.debug, ctx.closed) == (False, False, False)
            assert repr(ctx) == (
                f"<SparseContext rank {pe}, 4 rank(s) on 2 node(s) (2 + 2), 16 rows of 64 bytes per rank, 40 together>"
            )
            reduce_and_compare(ctx)
        assert ctx.closed
        assert repr(ctx).endswith("closed>")
        with make(grow=True) as ctx:
            assert ctx.max_union_rows == 4 * 16
            assert repr(ctx).endswith("64 together, grows>")

    everywhere(host, 4, ranks_per_node=2)


@pytest.mark.parametrize(
    ("world", "rows", "row_bytes", "union"),
    [(4, 256, 512, None), (4, 1000, 2048, None), (4, 1000, 2048, 1500), (1, 1, 0, None), (3, 7, 2, 9), (6, 100, 6, 1)],
)
def test_symmetric_memory(world: int, rows: int, row_bytes: int, union: int | None) -> None:
    """Little beyond the rows themselves; no more than is said; all of it is given back."""

    def host(pe: int) -> None:
        before = tdcoll.heap_info()
        ctx = tdcoll.SparseContext(max_rows_per_rank=rows, max_row_bytes=row_bytes, max_union_rows=union)
        used = tdcoll.heap_info().used - before.used
        assert used <= symmetric_bytes(world, rows, row_bytes, union)
        known = (ctx.area, *ctx.collective._symmetric)
        assert used == sum(Arena.padded(tensor.nbytes) for tensor in known)
        if row_bytes >= 512:
            assert used <= 1.05 * (rows + ctx.max_union_rows) * row_bytes
        ctx.close()
        ctx.close()
        assert tdcoll.heap_info() == before

    everywhere(host, world, heap_bytes=16 << 20)


@pytest.mark.parametrize("row_bytes", [512, 2048])
def test_no_call_takes_more_symmetric_memory(row_bytes: int) -> None:
    def host(pe: int) -> None:
        with make(max_row_bytes=row_bytes) as ctx:
            used = tdcoll.heap_info()
            for algorithm in ("auto", "owner", "gather"):
                reduce_and_compare(ctx, algorithm=algorithm)
                reduce_and_compare(ctx, 1, algorithm=algorithm, copy=False)
                tdcoll.sparse_all_reduce_padded(
                    torch.tensor(ids_of(pe)), rows_of(pe, ids_of(pe)), ROWS, ctx, algorithm=algorithm
                )
            assert tdcoll.heap_info() == used

    everywhere(host, 2)


def test_close_is_collective() -> None:
    def host(pe: int) -> None:
        ctx = make()
        if pe != 1:
            ctx.close()

    with pytest.raises(Deadlock, match=r"pe0 host waits in 'free: offset of the tensor' for rank\(s\) \[1\]"):
        everywhere(host)


def test_use_after_close() -> None:
    def host(pe: int) -> None:
        ctx = make()
        reduce_and_compare(ctx)
        ctx.close()
        ids = torch.tensor([1])
        calls: dict[str, Callable[[], Any]] = {
            "sparse_all_reduce": lambda: tdcoll.sparse_all_reduce(mine(pe), ctx),
            "sparse_all_reduce_rows": lambda: tdcoll.sparse_all_reduce_rows(ids, torch.ones(1, 4), ROWS, ctx),
            "sparse_all_reduce_padded": lambda: tdcoll.sparse_all_reduce_padded(ids, torch.ones(1, 4), ROWS, ctx),
        }
        for name, call in calls.items():
            with pytest.raises(tdcoll.ContextError, match=f"{name}: the context is closed"):
                call()

    everywhere(host)


def test_error_in_the_body_does_not_wait_for_the_others() -> None:
    """Only rank 1 leaves by an exception. Closing is collective: it would wait for ranks that never close."""

    def host(pe: int) -> None:
        ctx = make()
        reduce_and_compare(ctx)
        if pe == 1:
            with pytest.raises(KeyError, match="mine"), ctx:
                raise KeyError("mine")
            with pytest.raises(tdcoll.ContextError, match="left by an exception"):
                tdcoll.sparse_all_reduce(mine(pe), ctx)
        assert not ctx.closed
        ctx.close()
        assert ctx.closed
        assert tdcoll.heap_info().used == 0

    everywhere(host)


def test_contexts_outlive_their_variables() -> None:
    """A kernel or a graph may still use the memory of a context that nobody refers to."""

    def host(pe: int) -> None:
        held = runtime.current().held
        ctx = make()
        assert ctx in held.values()
        ctx.close()
        assert not held

    everywhere(host, 2)


def test_a_context_of_an_ended_job_is_refused() -> None:
    def host(pe: int) -> None:
        ctx = make()
        runtime.current().closed = True
        with pytest.raises(tdcoll.NotInitializedError, match="has ended"):
            tdcoll.sparse_all_reduce(mine(pe), ctx)
        ctx.close()

    everywhere(host, 2)


def test_several_contexts_groups_and_shapes() -> None:
    def host(pe: int) -> None:
        everybody = [make(), make(max_union_rows=30)]
        pair = [3, 1]
        of_two = make(group=pair) if pe in pair else None
        for call in range(2):
            reduce_and_compare(everybody[call % 2], call)
            if of_two is not None:
                assert of_two.rank == pair.index(pe)
                reduce_and_compare(of_two, call)
        for shape in ((), (3, 5), (0,)):
            got = tdcoll.sparse_all_reduce(mine(pe, 0, 4, shape), everybody[1])
            wanted = total([mine(rank, 0, 4, shape) for rank in range(4)])
            assert same(got, wanted)
        for ctx in (everybody[1], of_two, everybody[0]):
            if ctx is not None:
                ctx.close()
        assert tdcoll.heap_info().used == 0

    everywhere(host, 4, ranks_per_node=2)


# ---------------------------------------------------------------------- arguments of a context


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"max_rows_per_rank": 0}, ValueError, "max_rows_per_rank must be at least 1, got 0"),
        ({"max_rows_per_rank": -4}, ValueError, "max_rows_per_rank must be at least 1, got -4"),
        ({"max_rows_per_rank": 2.0}, TypeError, r"max_rows_per_rank must be an int, got 2\.0"),
        ({"max_rows_per_rank": True}, TypeError, "max_rows_per_rank must be an int, got True"),
        ({"max_rows_per_rank": None}, TypeError, "max_rows_per_rank must be an int, got None"),
        ({"max_row_bytes": -1}, ValueError, "max_row_bytes must be at least 0, got -1"),
        ({"max_row_bytes": "4K"}, TypeError, "max_row_bytes must be an int, got '4K'"),
        ({"max_union_rows": 0}, ValueError, "max_union_rows must be at least 1, got 0"),
        ({"max_programs": 0}, ValueError, "max_programs must be at least 1, got 0"),
        ({"max_programs": 2.0}, TypeError, "max_programs"),
        ({"max_union_rows": 1.5}, TypeError, r"max_union_rows must be an int, got 1\.5"),
        ({"timeout_s": -1.0}, ValueError, "timeout_s"),
        ({"group": "all"}, TypeError, "group must be a ProcessGroup"),
        ({"group": [0, 0]}, ValueError, "distinct"),
    ],
)
def test_capacities_that_are_none(wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    def host(pe: int) -> None:
        before = tdcoll.heap_info()
        with pytest.raises(error, match=text):
            make(**wrong)
        assert tdcoll.heap_info() == before
        assert not runtime.current().held

    everywhere(host, 1)


def test_capacities_are_compared_and_a_context_that_does_not_fit_takes_nothing() -> None:
    def host(pe: int) -> None:
        before = tdcoll.heap_info()
        for name in ("max_rows_per_rank", "max_row_bytes", "max_union_rows"):
            with pytest.raises(tdcoll.RankMismatchError, match=rf"must be the same.*{name} \(.*rank 2: "):
                make(**{name: 64 + pe})
        with pytest.raises(tdcoll.RankMismatchError, match=r"differ in grow \(rank 0: False, rank 1: True, rank 2"):
            make(grow=pe == 1)
        with pytest.raises(tdcoll.HeapExhaustedError, match="NVSHMEM_SYMMETRIC_SIZE"):
            make(max_row_bytes=before.total // 16)
        assert tdcoll.heap_info() == before
        assert not runtime.current().held
        with make() as ctx:
            reduce_and_compare(ctx)

    everywhere(host)


# ---------------------------------------------------------------------- arguments of a call


def _coo2(rows: int = ROWS) -> torch.Tensor:
    """COO of two sparse dimensions."""
    return torch.sparse_coo_tensor(torch.tensor([[1], [2]]), torch.ones(1), (rows, 4), check_invariants=False)


def _csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


TENSORS: list[tuple[str, Any, type[Exception], str]] = [
    ("a list", [1, 2], TypeError, r"^tensor must be a torch\.Tensor, got list$"),
    ("None", None, TypeError, r"^tensor must be a torch\.Tensor, got NoneType$"),
    ("dense", torch.ones(3, 4), ValueError, r"^tensor must have the layout torch\.sparse_coo, got torch\.strided$"),
    ("csr", _csr(), ValueError, r"^tensor must have the layout torch\.sparse_coo, .*sparse_csr$"),
    (
        "two sparse dimensions",
        _coo2(),
        ValueError,
        r"^tensor must have one sparse dimension.*got 2 of shape \[40, 4\]$",
    ),
    (
        "int8",
        sparse([1], torch.ones(1, 4).char()),
        TypeError,
        r"^tensor must have one of the dtypes .*float32.* got torch\.int8$",
    ),
    (
        "bool",
        sparse([1], torch.ones(1, 4).bool()),
        TypeError,
        r"^tensor must have one of the dtypes .* got torch\.bool$",
    ),
    ("complex", sparse([1], torch.ones(1, 4).cfloat()), TypeError, r"got torch\.complex64$"),
    (
        "meta",
        sparse([1], torch.ones(1, 4)).to("meta"),
        ValueError,
        r"^tensor must be on cpu, where the context is; got meta$",
    ),
]


@pytest.mark.parametrize(("tensor", "error", "text"), [case[1:] for case in TENSORS], ids=[case[0] for case in TENSORS])
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("own", [True, False], ids=["", "ctx=None"])
def test_tensors_that_are_refused(tensor: Any, error: type[Exception], text: str, debug: bool, own: bool) -> None:
    def host(pe: int) -> None:
        with make(debug=debug) as ctx:
            with pytest.raises(error, match=text):
                tdcoll.sparse_all_reduce(tensor, ctx if own else None)
            reduce_and_compare(ctx)

    everywhere(host, 1)


IDS, PART = torch.tensor([3, 1]), torch.ones(2, DIM)
PAIRS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("indices a list", {"indices": [1, 2]}, TypeError, r"^indices must be a torch\.Tensor, got list$"),
    ("values None", {"values": None}, TypeError, r"^values must be a torch\.Tensor, got NoneType$"),
    (
        "indices int32",
        {"indices": IDS.int()},
        ValueError,
        r"^indices must be int64 .*got torch\.int32 of shape \[2\] on cpu$",
    ),
    ("indices float", {"indices": IDS.float()}, ValueError, r"^indices must be int64 .*got torch\.float32"),
    ("indices [1, n]", {"indices": IDS[None]}, ValueError, r"^indices must be int64 of one dimension.*got.* \[1, 2\]"),
    ("indices of no dimension", {"indices": IDS[0]}, ValueError, r"^indices must be int64 of one dimension.*\[\]"),
    ("indices sparse", {"indices": IDS.to_sparse()}, ValueError, r"^indices must be a dense tensor, got .*sparse_coo$"),
    (
        "indices elsewhere",
        {"indices": IDS.to("meta")},
        ValueError,
        r"^indices must be int64 .* on cpu; got .* on meta$",
    ),
    ("values sparse", {"values": PART.to_sparse()}, ValueError, r"^values must be a dense tensor, got .*sparse_coo$"),
    (
        "too few values",
        {"values": PART[:1]},
        ValueError,
        r"^values must have a row for each of the 2 indices; got shape \[1, 4\]$",
    ),
    (
        "values of no dimension",
        {"values": PART[0, 0]},
        ValueError,
        r"^values must have a row for each of the 2 indices; got shape \[\]$",
    ),
    ("values int16", {"values": PART.short()}, TypeError, r"^values must have one of the dtypes .* got torch\.int16$"),
    (
        "values elsewhere",
        {"values": PART.to("meta")},
        ValueError,
        r"^values must be on cpu, where the context is; got meta$",
    ),
    ("num_rows a float", {"num_rows": 40.0}, TypeError, r"^num_rows must be an int, got 40\.0$"),
    ("num_rows a tensor", {"num_rows": torch.tensor(40)}, TypeError, r"^num_rows must be an int, got tensor\(40\)$"),
    ("num_rows None", {"num_rows": None}, TypeError, r"^num_rows must be an int, got None$"),
    ("num_rows negative", {"num_rows": -1}, ValueError, r"^num_rows must be at least 0, got -1$"),
    (
        "num_rows too large",
        {"num_rows": 1 << 63},
        ValueError,
        r"^num_rows must be .*2\*\*62.* got 9223372036854775808$",
    ),
    ("op unknown", {"op": "avg"}, ValueError, r"^op must be one of sum, mean, max, min, prod; got 'avg'$"),
    ("op of torch", {"op": torch.distributed.ReduceOp.SUM}, ValueError, r"^op must be one of sum, .*; got "),
    (
        "mean of ints",
        {"op": "mean", "values": PART.int()},
        ValueError,
        r"^op='mean' needs values of a floating-point dtype, got torch\.int32$",
    ),
    (
        "algorithm unknown",
        {"algorithm": "ring"},
        ValueError,
        r"^algorithm must be one of auto, owner, gather, dense; got 'ring'$",
    ),
]


@pytest.mark.parametrize(("wrong", "error", "text"), [case[1:] for case in PAIRS], ids=[case[0] for case in PAIRS])
@pytest.mark.parametrize("debug", [False, True])
def test_pairs_that_are_refused(wrong: dict[str, Any], error: type[Exception], text: str, debug: bool) -> None:
    given: dict[str, Any] = {"indices": IDS, "values": PART, "num_rows": ROWS} | wrong

    def host(pe: int) -> None:
        with make(debug=debug) as ctx:
            for call in (tdcoll.sparse_all_reduce_rows, tdcoll.sparse_all_reduce_padded):
                with pytest.raises(error, match=text):
                    call(ctx=ctx, **given)
            reduce_and_compare(ctx)

    everywhere(host, 1)


def test_contexts_that_are_refused() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as other:
            wanted = r"^ctx must be a tdcoll\.SparseContext or None, got CollectiveContext$"
            with pytest.raises(TypeError, match=wanted):
                tdcoll.sparse_all_reduce(mine(pe), other)
            with pytest.raises(TypeError, match=wanted):
                tdcoll.sparse_all_reduce_rows(IDS, PART, ROWS, other)
            for wrong in (other, None):
                name = type(wrong).__name__
                with pytest.raises(TypeError, match=rf"^ctx must be a tdcoll\.SparseContext, got {name}$"):
                    tdcoll.sparse_all_reduce_padded(IDS, PART, ROWS, wrong)
        with make(max_union_rows=12) as ctx:
            with pytest.raises(ValueError, match=r"^algorithm='gather' needs room .* \(16\)$"):
                tdcoll.sparse_all_reduce(mine(pe, shape=(16,)), ctx, algorithm="gather")
            with pytest.raises(ValueError, match=r"^algorithm='dense' needs a torch\.distributed process group"):
                tdcoll.sparse_all_reduce(mine(pe), ctx, algorithm="dense")
            with pytest.raises(ValueError, match=r"^algorithm must be 'owner', 'gather' or 'auto'.*got 'dense'$"):
                tdcoll.sparse_all_reduce_padded(IDS, PART, ROWS, ctx, algorithm="dense")
            tdcoll.sparse_all_reduce(mine(pe), ctx)

    everywhere(host, 2)


def test_values_are_taken_as_they_are_meant() -> None:
    """Lazy negation, strides, gradients, other orders of memory."""

    def host(pe: int) -> None:
        with make() as ctx:
            base = torch.arange(24.0).reshape(6, 4)
            ids = torch.tensor([9, 2, 7, 30, 1, 0])
            for given in (
                torch._neg_view(base),
                torch.complex(base, base).conj().imag,
                base.t().contiguous().t(),
                base[:, ::2],
                base[::1, 1:3],
                base[:1].expand(6, 4),
                base.clone().requires_grad_(),
            ):
                found, got = tdcoll.sparse_all_reduce_rows(ids, given, ROWS, ctx)
                wanted = sparse(ids, given.detach().resolve_neg() * 2).coalesce()
                assert torch.equal(found, wanted.indices()[0])
                assert torch.equal(got, wanted.values())
                assert not got.requires_grad
                got = tdcoll.sparse_all_reduce(sparse(ids, given), ctx)
                assert torch.equal(got.values(), wanted.values())
            wide = torch.stack((ids, ids), 1)[:, 0]
            assert not wide.is_contiguous()
            assert torch.equal(
                tdcoll.sparse_all_reduce_rows(wide, base, ROWS, ctx)[1], sparse(ids, 2 * base).coalesce().values()
            )

    everywhere(host, 2)


def test_tables_of_nothing() -> None:
    def host(pe: int) -> None:
        none = torch.empty(0, dtype=torch.int64)
        with make(debug=True) as ctx:
            for num_rows in (0, 1, ROWS, 1 << 40):
                for algorithm in ("owner", "gather"):
                    for shape in ((4,), (), (0,)):
                        ids, rows = tdcoll.sparse_all_reduce_rows(
                            none, torch.empty(0, *shape), num_rows, ctx, algorithm=algorithm, copy=False
                        )
                        assert (ids.shape, rows.shape, ids.dtype) == ((0,), (0, *shape), torch.int64)
            # rows on one rank only
            part = sparse([4, 2], PART) if pe == 1 else sparse([], torch.empty(0, DIM))
            for algorithm in ("owner", "gather"):
                assert same(
                    tdcoll.sparse_all_reduce(part, ctx, algorithm=algorithm), sparse([2, 4], PART, coalesced=True)
                )

    everywhere(host)


# ---------------------------------------------------------------------- capacities


SENTINEL = 77


def moved(ctx: tdcoll.SparseContext) -> torch.Tensor:
    """The context's symmetric memory behind the lists: rows that go out, rows that come in."""
    return ctx.area[ctx.world_size * ctx.list_bytes :]


def refused_everywhere(ctx: tdcoll.SparseContext, error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """All ranks raise the same, and no row has been stored anywhere."""
    moved(ctx).fill_(SENTINEL)
    tdcoll.barrier()
    with pytest.raises(error, match=text) as raised:
        call()
    tdcoll.barrier()
    assert bool((moved(ctx) == SENTINEL).all()), "rows were moved"
    messages = runtime.current().exchange(range(ctx.world_size), "messages", str(raised.value))
    assert len(set(messages)) == 1, messages


@pytest.mark.parametrize(
    ("algorithm", "ranks_per_node", "debug"),
    [("owner", None, False), ("auto", 2, True), ("owner", 2, False)],
)
def test_more_rows_than_fit_is_an_error_on_all_ranks(algorithm: str, ranks_per_node: int | None, debug: bool) -> None:
    """Only rank 1 brings too many. Nothing moves, and the context goes on."""

    def host(pe: int) -> None:
        ids = list(range(9 if pe == 1 else 3)) * 2  # rows that are there twice count once
        part = sparse(ids, rows_of(pe, ids))
        text = (
            r"^sparse_all_reduce: a rank brings 9 different rows, .* capacity of 8; .*max_rows_per_rank=9 or more.*grow"
        )
        with make(max_rows_per_rank=8, max_row_bytes=8 << 10, debug=debug) as ctx:
            for call in range(2):
                refused_everywhere(
                    ctx, tdcoll.ContextError, text, lambda: tdcoll.sparse_all_reduce(part, ctx, algorithm=algorithm)
                )
                reduce_and_compare(ctx, call, algorithm=algorithm)

    everywhere(host, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize("algorithm", ["owner", "gather"])
def test_a_larger_union_than_fits_is_an_error_on_all_ranks(algorithm: str) -> None:
    def host(pe: int) -> None:
        ids = [10 * pe + i for i in range(4)]
        text = r"^sparse_all_reduce_rows: the ranks bring 12 different rows together, .* 11; .*max_union_rows=12 or"
        # Rows that are small in memory for larger ones leave gather its room.
        with make(max_rows_per_rank=4, max_row_bytes=256, max_union_rows=11) as ctx:
            values = rows_of(pe, ids)

            def call() -> Any:
                return tdcoll.sparse_all_reduce_rows(torch.tensor(ids), values, ROWS, ctx, algorithm=algorithm)

            if algorithm == "owner":
                refused_everywhere(ctx, tdcoll.ContextError, text, call)
            else:  # gather's rows do travel with the ids
                with pytest.raises(tdcoll.ContextError, match=text):
                    call()
            got = tdcoll.sparse_all_reduce(sparse(ids[:3], values[:3]), ctx, algorithm=algorithm)
            wanted = total([sparse([10 * r + i for i in range(3)], rows_of(r, ids)[:3]) for r in range(N)])
            assert same(got, wanted)

    everywhere(host)


def test_rows_that_are_too_long() -> None:
    def host(pe: int) -> None:
        text = r"rows of 20 bytes are over the context's capacity of 16; make it with max_row_bytes=20 or more"
        with make(max_row_bytes=16) as ctx:
            for row in ((5,), (5, 1)):
                part = mine(pe, shape=row)
                call = lambda: tdcoll.sparse_all_reduce(part, ctx, algorithm="owner")  # noqa: B023, E731
                refused_everywhere(ctx, tdcoll.ContextError, text, call)
                for algorithm in ("auto", "gather"):
                    with pytest.raises(tdcoll.ContextError, match=text):
                        tdcoll.sparse_all_reduce(part, ctx, algorithm=algorithm)
                with pytest.raises(tdcoll.ContextError, match=text):
                    tdcoll.sparse_all_reduce_padded(part._indices()[0], part._values(), ROWS, ctx)
            reduce_and_compare(ctx)

    everywhere(host, 2)


def test_exactly_full() -> None:
    def host(pe: int) -> None:
        with make(max_rows_per_rank=6, max_row_bytes=16, max_union_rows=12) as ctx:
            used = tdcoll.heap_info()
            for algorithm in ("owner", "auto"):
                ids = [20 * pe + i for i in range(6)]
                got = tdcoll.sparse_all_reduce(sparse(ids, rows_of(pe, ids)), ctx, algorithm=algorithm)
                assert same(got, total([sparse([20 * r + i for i in range(6)], rows_of(r, ids)) for r in range(2)]))
            assert tdcoll.heap_info() == used

    everywhere(host, 2)


@pytest.mark.parametrize("algorithm", ["auto", "owner", "gather"])
def test_growing(algorithm: str) -> None:
    """On all ranks, several times, by rows of one rank, by the union, by the row; results made before stay."""

    def host(pe: int) -> None:
        before = tdcoll.heap_info()
        with make(max_rows_per_rank=2, max_row_bytes=4, max_union_rows=2, grow=True) as ctx:
            kept: list[tuple[torch.Tensor, torch.Tensor]] = []
            seen = {(2, 4, 2)}
            for call, (counts, width) in enumerate(
                (((1, 1, 1), 1), ((2, 2, 2), 1), ((2, 9, 1), 1), ((2, 1, 3), 6), ((12, 3, 30), 6), ((1, 1, 1), 2))
            ):
                parts = [mine(rank, call, counts[rank], (width,)) for rank in range(N)]
                got = tdcoll.sparse_all_reduce(parts[pe], ctx, algorithm=algorithm)
                kept.append((got, total(parts)))
                seen.add((ctx.max_rows_per_rank, ctx.max_row_bytes, ctx.max_union_rows))
                assert ctx.max_rows_per_rank >= max(counts)
                assert ctx.max_row_bytes >= 4 * width
                assert ctx.max_union_rows >= kept[-1][1]._nnz()
                assert all(same(result, wanted) for result, wanted in kept)
            assert len(seen) >= 4, seen
            facts = (ctx.max_rows_per_rank, ctx.max_row_bytes, ctx.max_union_rows)
            assert len(set(runtime.current().exchange(range(N), "facts", facts))) == 1
            used = tdcoll.heap_info().used - before.used
            assert used <= symmetric_bytes(N, *facts), "what was outgrown is given back"
        assert tdcoll.heap_info() == before

    everywhere(host)


def test_growing_on_several_nodes_in_debug_mode() -> None:
    def host(pe: int) -> None:
        with make(max_rows_per_rank=1, max_row_bytes=4, grow=True, debug=True) as ctx:
            view = tdcoll.sparse_all_reduce(mine(pe, 0, 1, (1,)), ctx, algorithm="owner", copy=False)
            for call in range(3):
                reduce_and_compare(ctx, call, 4 + 3 * call, algorithm="owner")
            with pytest.raises(tdcoll.ContextError, match="copy=False was used after the next call"):
                view.to_dense()

    everywhere(host, 4, ranks_per_node=2)


def test_growing_beyond_the_heap_leaves_the_context_as_it_was() -> None:
    def host(pe: int) -> None:
        with make(max_rows_per_rank=8, grow=True) as ctx:
            reduce_and_compare(ctx)
            before, facts = tdcoll.heap_info(), (ctx.max_rows_per_rank, ctx.max_row_bytes, ctx.max_union_rows)
            many = list(range(3000 if pe == 1 else 3))
            long = mine(pe, 0, 2, (1 << 16,))
            for part in (sparse(many, rows_of(pe, many), 5000), long):
                with pytest.raises(tdcoll.HeapExhaustedError, match="NVSHMEM_SYMMETRIC_SIZE"):
                    tdcoll.sparse_all_reduce(part, ctx)
                assert tdcoll.heap_info() == before
                assert facts == (ctx.max_rows_per_rank, ctx.max_row_bytes, ctx.max_union_rows)
                reduce_and_compare(ctx)
            reduce_and_compare(ctx, 1, 12)  # it still grows as far as it can

    everywhere(host, 2, heap_bytes=256 << 10)


def test_memory_that_a_graph_uses_does_not_move() -> None:
    def host(pe: int) -> None:
        with make(grow=True) as ctx:
            ctx.collective.captured = True  # as a call under capture would leave it
            area = ctx.area.data_ptr()
            for part in (mine(pe, 0, 20), mine(pe, 0, 3, (30,))):
                with pytest.raises(tdcoll.ContextError, match=r"cannot grow after a call was captured.*make it larger"):
                    tdcoll.sparse_all_reduce(part, ctx)
            reduce_and_compare(ctx)
            assert ctx.area.data_ptr() == area

    everywhere(host, 2)


# ---------------------------------------------------------------------- what only the lists of all ranks show


BAD_LISTS = [
    ("too large", [3, ROWS], False, "must be in 0..39"),
    ("far too large", [3, 1 << 62], False, "must be in 0..39"),
    ("negative", [-1, 3], False, "must be in 0..39"),
    ("very negative", [-(1 << 62), 3], False, "must be in 0..39"),
    ("too large, coalesced", [3, ROWS], True, "must be in 0..39"),
    ("negative, coalesced", [-1, 3], True, "must be in 0..39"),
    ("unsorted", [9, 3], True, "said to be coalesced, and are not ascending or not different"),
    ("repeated", [3, 3], True, "said to be coalesced, and are not ascending or not different"),
]


@pytest.mark.parametrize(
    ("ids", "coalesced", "text"), [case[1:] for case in BAD_LISTS], ids=[case[0] for case in BAD_LISTS]
)
@pytest.mark.parametrize("algorithm", ["owner", "gather"])
@pytest.mark.parametrize("ranks_per_node", [None, second(2)])
def test_indices_that_are_wrong_on_one_rank(
    ids: list[int], coalesced: bool, text: str, algorithm: str, ranks_per_node: int | None
) -> None:
    def host(pe: int) -> None:
        given = torch.tensor(ids if pe == 1 else [4, 5])

        with make() as ctx:
            call = lambda: tdcoll.sparse_all_reduce_rows(  # noqa: E731
                given, PART, ROWS, ctx, coalesced=coalesced, algorithm=algorithm
            )
            wanted = f"^sparse_all_reduce_rows: indices of rank 1 .*{text}"
            if algorithm == "owner":
                refused_everywhere(ctx, ValueError, wanted, call)
            else:
                with pytest.raises(ValueError, match=wanted):
                    call()
            reduce_and_compare(ctx, algorithm=algorithm)

    everywhere(host, ranks_per_node=ranks_per_node)


DIFFERENT: list[tuple[str, dict[str, Any]]] = [
    ("num_rows", {"num_rows": ROWS + 1}),
    ("num_rows by much", {"num_rows": 1 << 40}),
    ("dtype of the same size", {"values": PART.int()}),
    ("row shape of the same size", {"values": PART.reshape(2, 2, 2)}),
    ("row shape", {"values": PART[:, :3]}),
    ("row shape, over the capacity", {"values": torch.ones(len(PART), 1000)}),
    ("row shape, of nothing", {"values": PART[:, :0]}),
    ("op", {"op": "max"}),
]


@pytest.mark.parametrize("wrong", [case[1] for case in DIFFERENT], ids=[case[0] for case in DIFFERENT])
@pytest.mark.parametrize("odd", [0, second(2)])
@pytest.mark.parametrize(
    ("algorithm", "debug"), [("auto", False), ("owner", False), second("gather", False), ("auto", True)]
)
def test_ranks_that_disagree(wrong: dict[str, Any], odd: int, algorithm: str, debug: bool) -> None:
    """Without debug mode, too, all ranks are told, and the context goes on; with it, they are told what."""
    given: dict[str, Any] = {"indices": IDS, "values": PART, "num_rows": ROWS, "op": "sum", "algorithm": algorithm}

    def host(pe: int) -> None:
        with make(debug=debug) as ctx:
            text = (
                "sparse_all_reduce_rows arguments must be the same on all ranks"
                if debug
                else "^sparse_all_reduce_rows: ranks pass different shapes, dtypes, operations or algorithms"
            )
            for _ in range(2):
                with pytest.raises(tdcoll.RankMismatchError, match=text):
                    tdcoll.sparse_all_reduce_rows(ctx=ctx, **(given | (wrong if pe == odd else {})))
                reduce_and_compare(ctx, algorithm=algorithm)

    everywhere(host)


@pytest.mark.parametrize("warm", [(), ("owner", "gather", "owner", "gather")])
def test_ranks_that_take_different_ways_get_no_result(warm: tuple[str, ...]) -> None:
    """They may wait until the deadline, but none takes the lists of an earlier call for those of this one."""

    def host(pe: int) -> None:
        ctx = make(timeout_s=2)
        for algorithm in warm:
            reduce_and_compare(ctx, algorithm=algorithm)
        with pytest.raises((tdcoll.RankMismatchError, tdcoll.CollectiveTimeout)):
            tdcoll.sparse_all_reduce(mine(pe), ctx, algorithm="gather" if pe == 1 else "owner")

    everywhere(host, on_timeout="expire")


@pytest.mark.parametrize("grow", [False, True])
def test_longer_rows_on_one_rank_are_a_mismatch_and_not_a_reason_to_grow(grow: bool) -> None:
    def host(pe: int) -> None:
        with make(grow=grow) as ctx:
            before = tdcoll.heap_info()
            wide = torch.ones(len(IDS), 1000 if pe == 1 else DIM)
            for algorithm in ("owner", "auto"):
                with pytest.raises(tdcoll.RankMismatchError, match="ranks pass different shapes"):
                    tdcoll.sparse_all_reduce_rows(IDS, wide, ROWS, ctx, algorithm=algorithm)
                reduce_and_compare(ctx)
            assert tdcoll.heap_info() == before

    everywhere(host)


def test_auto_and_owner_are_different_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may turn out to be dense, with the process group, when the other waits for its rows."""
    monkeypatch.setattr(call_module, "_process_group", lambda ctx: "some group")

    def host(pe: int) -> None:
        ids = torch.arange(64)
        ctx = make(max_rows_per_rank=2048, max_row_bytes=64)
        with pytest.raises(tdcoll.RankMismatchError, match="ranks pass different"):
            tdcoll.sparse_all_reduce_rows(ids, torch.ones(64, 16), 64, ctx, algorithm="owner" if pe else "auto")
        ctx.close()

    everywhere(host, 4, ranks_per_node=1)


@pytest.mark.parametrize("debug", [False, True])
def test_results_of_a_context_are_not_its_input(debug: bool) -> None:
    def host(pe: int) -> None:
        with make(max_rows_per_rank=16, max_row_bytes=16 << 10, debug=debug) as ctx:
            for padded in (False, True):
                ids, rows = tdcoll.sparse_all_reduce_rows(IDS, PART, ROWS, ctx, algorithm="owner", copy=False)
                again = tdcoll.sparse_all_reduce_padded if padded else tdcoll.sparse_all_reduce_rows
                with pytest.raises(ValueError, match=r"must not lie in the memory of the context.*clone"):
                    again(ids, rows, ROWS, ctx)
                ids, rows = tdcoll.sparse_all_reduce_rows(IDS, PART, ROWS, ctx, algorithm="owner", copy=False)
                tdcoll.sparse_all_reduce_rows(ids, rows.clone(), ROWS, ctx)

    everywhere(host)


def test_growing_takes_what_is_needed_where_the_heap_has_no_room_for_more() -> None:
    def host(pe: int) -> None:
        many = list(range(800))
        rows = rows_of(pe, many, (1,))
        for grow in (False, True):
            with make(max_rows_per_rank=8 if grow else 800, max_row_bytes=4, grow=grow) as ctx:
                tdcoll.sparse_all_reduce(sparse(many, rows, 800), ctx)
                assert ctx.max_rows_per_rank == 800

    everywhere(host, 2, heap_bytes=28 << 10)


def test_without_a_context_repeated_rows_count_once() -> None:
    def host(pe: int) -> None:
        ids = list(range(10)) * 400
        got = tdcoll.sparse_all_reduce(sparse(ids, torch.ones(len(ids), 8), 1 << 30))
        assert got.values().tolist() == [[800.0] * 8] * 10

    everywhere(host, 2, heap_bytes=320 << 10)


def test_rows_are_spread_whatever_the_pattern_of_their_ids() -> None:
    """Ids that are composed of two numbers have the same low bits."""

    def host(pe: int) -> None:
        n = 64
        with make(max_rows_per_rank=n, max_row_bytes=16, max_union_rows=n) as ctx:
            for shift in (0, 7, 19, 31, 40):
                ids = torch.arange(n) << shift
                tdcoll.sparse_all_reduce_rows(ids, torch.ones(n, 4), 1 << 50, ctx, coalesced=True, algorithm="owner")
                mine = int(ctx.memory.whole.counters[1])  # rows that others have as well, and that this rank reduced
                assert n // 4 - 12 <= mine <= n // 4 + 12, (shift, mine)

    everywhere(host, 4)


@pytest.mark.parametrize("turns", [10, 40, 80])
def test_padded_has_no_rows_once_a_wait_has_expired(turns: int) -> None:
    """Neither those of the call before, nor some of them."""
    counts: list[tuple[bool, int]] = []
    world = World(3, seed=1, weak=True, on_timeout="expire")

    def host(pe: int) -> None:
        ctx = make(timeout_s=2)
        ids = torch.arange(8)
        tdcoll.sparse_all_reduce_padded(ids, torch.ones(8, 4), 8, ctx, algorithm="owner")
        if pe == 2:
            world.kill(pe, after_turns=turns)
        got = tdcoll.sparse_all_reduce_padded(ids, torch.full((8, 4), 10.0), 8, ctx, algorithm="owner")
        right = bool((got.values[:8] == 30).all())
        counts.append((ctx.collective.monitor.expired, int(got.count) if not right else -1))

    world.run(host)
    assert any(expired for expired, _ in counts)
    assert all(count <= 0 for _, count in counts), counts


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda ctx: tdcoll.sparse_all_reduce_rows(IDS.int(), PART, ROWS, ctx), ValueError, "indices must be int64"),
        (lambda ctx: tdcoll.sparse_all_reduce_rows(IDS, PART.short(), ROWS, ctx), TypeError, "values must have one of"),
        (lambda ctx: tdcoll.sparse_all_reduce_rows(IDS, PART, ROWS, ctx, "avg"), ValueError, "op must be one of"),
    ],
    ids=["indices", "values", "op"],
)
def test_debug_tells_all_ranks_what_is_wrong_on_one(call: Any, kind: type[Exception], text: str) -> None:
    def host(pe: int) -> None:
        with make(debug=True) as ctx:
            if pe == 1:
                with pytest.raises(kind, match=text):
                    call(ctx)
            else:
                with pytest.raises(tdcoll.RankMismatchError, match=f"rank 1 cannot make this call: .*{text}"):
                    tdcoll.sparse_all_reduce_rows(IDS, PART, ROWS, ctx)
            reduce_and_compare(ctx)

    everywhere(host)


def test_debug_compares_tensors_algorithms_and_contexts() -> None:
    def host(pe: int) -> None:
        first, second = make(debug=True), make(debug=True)
        odd = pe == 1
        text = "sparse_all_reduce arguments must be the same on all ranks"
        wide = {"shape": (3 if odd else DIM,)}
        for part, options, field in (
            (mine(pe, **wide), {}, "shape"),
            (sparse(ids_of(pe), rows_of(pe, ids_of(pe)), ROWS + odd), {}, "shape"),
            (sparse(ids_of(pe), rows_of(pe, ids_of(pe), dtype=torch.int32 if odd else torch.float32)), {}, "dtype"),
            (mine(pe), {"op": "max" if odd else "min"}, "op"),
            (mine(pe), {"algorithm": "gather" if odd else "owner"}, "algorithm"),
        ):
            with pytest.raises(tdcoll.RankMismatchError, match=rf"{text}; they differ in {field} \(rank 0: "):
                tdcoll.sparse_all_reduce(part, first, **options)
        reduce_and_compare(first)
        with pytest.raises(tdcoll.RankMismatchError, match=text):
            tdcoll.sparse_all_reduce(mine(pe), first if pe == 0 else second)

    everywhere(host)


# ---------------------------------------------------------------------- views


def in_symmetric_memory(tensor: torch.Tensor) -> bool:
    heap = runtime.current().heap
    return heap.base <= tensor.data_ptr() < heap.base + heap.nbytes


@pytest.mark.parametrize("debug", [False, True])
def test_copies_and_views(debug: bool) -> None:
    """copy=False is symmetric memory where rows are put, and the next call overwrites it; a copy stays."""

    def host(pe: int) -> None:
        with make(debug=debug) as ctx:
            wanted = [total([mine(rank, call) for rank in range(N)]) for call in range(3)]
            copy = tdcoll.sparse_all_reduce(mine(pe), ctx, algorithm="owner")
            assert not in_symmetric_memory(copy.values())
            view = tdcoll.sparse_all_reduce(mine(pe, 1), ctx, algorithm="owner", copy=False)
            assert in_symmetric_memory(view._values())
            assert same(view, wanted[1])
            assert same(copy, wanted[0])
            assert (type(view) is torch.Tensor) is not debug
            gathered = tdcoll.sparse_all_reduce(mine(pe, 2), ctx, algorithm="gather", copy=False)
            assert not in_symmetric_memory(gathered.values())
            assert type(gathered) is torch.Tensor
            reduce_and_compare(ctx, algorithm="owner")
            assert same(gathered, wanted[2])
            if not debug:
                assert not torch.equal(view.values(), wanted[1].values()), "another call's rows by now"

    everywhere(host)


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "values()": lambda t: t.values(),
    "indices()": lambda t: t.indices(),
    "coalesce()": lambda t: t.coalesce(),
    "to_dense()": lambda t: t.to_dense(),
    "dense.add_": lambda t: torch.zeros(ROWS, DIM).add_(t),
    "dense + ": lambda t: torch.zeros(ROWS, DIM) + t,
    "t + t": lambda t: t + t,
    "t * 2": lambda t: t * 2,
    "sparse.sum": lambda t: torch.sparse.sum(t),
    "clone()": lambda t: t.clone(),
    "detach()": lambda t: t.detach(),
    "to(float64)": lambda t: t.to(torch.float64),
    "copy_": lambda t: torch.empty(ROWS, DIM).to_sparse(1).copy_(t),
}

DENSE_USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "t[0]": lambda t: t[0],
    "view": lambda t: t.view(-1),
    "tolist()": lambda t: t.tolist(),
    "sum": lambda t: t.sum(),
    "t + 1": lambda t: t + 1,
    "add_": lambda t: t.add_(0),
    "copy_": lambda t: torch.empty(t.shape).copy_(t),
    "cat": lambda t: torch.cat([torch.ones(1, DIM), t]),
    "index_add_": lambda t: torch.zeros(t.shape).index_add_(0, torch.arange(len(t)), t),
    "out=": lambda t: torch.add(t, 1, out=torch.empty(t.shape)),
    "numpy()": lambda t: t.numpy(),
    "clone()": lambda t: t.clone(),
    "detach()": lambda t: t.detach(),
    "split": lambda t: t.split(1),
}


def ordinary(result: Any) -> bool:
    """Whether a result has nothing to do with symmetric memory, or else is lent as well."""
    if isinstance(result, (tuple, list)):
        return all(ordinary(part) for part in result)
    if not isinstance(result, torch.Tensor) or type(result) is not torch.Tensor:
        return True
    values = result._values() if result.layout == torch.sparse_coo else result
    return not in_symmetric_memory(values)


LATE = "a result of copy=False was used after {}, when its memory was no longer its own"


@pytest.mark.parametrize("ended", ["the next call on its context was made", "its context was closed"])
def test_a_sparse_view_is_refused_when_it_is_stale(ended: str) -> None:
    def host(pe: int) -> None:
        ctx = make(debug=True)
        wanted = total([mine(rank) for rank in range(2)])
        view = tdcoll.sparse_all_reduce(mine(pe), ctx, algorithm="owner", copy=False)
        assert same(view, wanted)
        for name, use in USES.items():
            got, right = use(view), use(wanted)
            assert ordinary(got), name
            got, right = (t.to_dense() if t.layout == torch.sparse_coo else t for t in (got, right))
            assert torch.equal(got, right), name
        kept = [view.detach(), view.values(), view.values()[1:], view.values().view(-1)[3:]]
        other = view.to_dense()
        assert isinstance(view, torch.Tensor)
        assert "values" in repr(view)
        if "closed" in ended:
            ctx.close()
        else:
            reduce_and_compare(ctx, 1)
        for name, use in USES.items():
            with pytest.raises(tdcoll.ContextError, match=rf"^sparse_all_reduce: {LATE.format(ended)}"):
                pytest.fail(f"{name} gave {use(view)}")
        for tensor in kept:
            with pytest.raises(tdcoll.ContextError, match=LATE.format(ended)):
                tensor.sum()
        assert torch.equal(other, wanted.to_dense()), "an ordinary tensor stays what it is"
        assert ended in repr(view)
        ctx.close()

    everywhere(host, 2)


@pytest.mark.parametrize("ended", ["the next call on its context was made", "its context was closed"])
def test_a_view_of_rows_is_refused_when_it_is_stale(ended: str) -> None:
    def host(pe: int) -> None:
        ctx = make(debug=True)
        wanted = total([mine(rank) for rank in range(2)])
        part = mine(pe)
        ids, view = tdcoll.sparse_all_reduce_rows(
            part._indices()[0], part._values(), ROWS, ctx, algorithm="owner", copy=False
        )
        assert in_symmetric_memory(view)
        assert type(ids) is torch.Tensor
        for name, use in DENSE_USES.items():
            got, right = use(view), use(wanted.values())
            assert ordinary(got), name
            assert str(torch.as_tensor(got[1] if name == "split" else got)) == str(
                torch.as_tensor(right[1] if name == "split" else right)
            ), name
        first, flat = view[0], view.view(-1)[1:][1:]
        summed = view + 0
        if "closed" in ended:
            ctx.close()
        else:
            reduce_and_compare(ctx, 1)
        for name, use in DENSE_USES.items():
            with pytest.raises(tdcoll.ContextError, match=rf"^sparse_all_reduce_rows: {LATE.format(ended)}"):
                pytest.fail(f"{name} gave {use(view)}")
        for tensor in (first, flat):
            with pytest.raises(tdcoll.ContextError, match=LATE.format(ended)):
                tensor.tolist()
        assert torch.equal(summed, wanted.values())
        assert torch.equal(ids, wanted.indices()[0])
        ctx.close()

    everywhere(host, 2)


def test_a_view_changes_the_symmetric_rows_and_nothing_else() -> None:
    def host(pe: int) -> None:
        with make(debug=True) as ctx:
            view = tdcoll.sparse_all_reduce(mine(pe), ctx, algorithm="owner", copy=False)
            values = view.values().mul_(3)
            assert torch.equal(view.values(), 3 * total([mine(rank) for rank in range(2)]).values())
            other = tdcoll.zeros(tuple(values.shape))
            got = other.add_(values)  # symmetric memory too, but the caller's
            root = values[2:].as_strided((4,), (1,), values.storage_offset())  # before where the part begins
            reduce_and_compare(ctx, 1)
            assert int(got.abs().sum()) > 0
            with pytest.raises(tdcoll.ContextError, match="used after the next call"):
                root.sum()
            tdcoll.free(other)

    everywhere(host, 2)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "options"), [("SGD", {}), ("SGD", {"foreach": True}), ("SparseAdam", {}), ("Adagrad", {})]
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_view_as_a_gradient(optimizer: str, options: dict[str, Any], debug: bool) -> None:
    """It serves an optimizer while it is fresh, and is refused after."""

    def host(pe: int) -> None:
        with make(debug=debug) as ctx:
            weight = torch.nn.Parameter(torch.ones(ROWS, DIM))
            twin = torch.nn.Parameter(torch.ones(ROWS, DIM))
            ours, theirs = (getattr(torch.optim, optimizer)([p], lr=0.5, **options) for p in (weight, twin))
            for call in range(2):
                weight.grad = tdcoll.sparse_all_reduce(mine(pe, call), ctx, algorithm="owner", copy=False)
                twin.grad = total([mine(rank, call) for rank in range(2)])
                ours.step()
                theirs.step()
                assert torch.equal(weight.detach(), twin.detach())
            before = weight.detach().clone()
            reduce_and_compare(ctx, 5)
            if debug:
                with pytest.raises(tdcoll.ContextError, match="used after the next call"):
                    ours.step()
                assert torch.equal(weight.detach(), before)

    everywhere(host, 2)


# ---------------------------------------------------------------------- tdcoll's own context


def test_without_a_context() -> None:
    """Made at the first call, grows, serves rows of other sizes, and is one of tdcoll's own contexts."""

    def host(pe: int) -> None:
        contexts = runtime.current().contexts
        assert not contexts
        counts = ((3, 3), (5, 2), (300, 1), (1, 400), (2, 2))
        kept = []
        for call, pair in enumerate(counts):
            for shape in ((2,), (), (64,)) if call < 2 else ((2,),):
                parts = [
                    sparse(ids := [(3 * i + call) % 1000 for i in range(n)], rows_of(rank, ids, shape), 1000)
                    for rank, n in enumerate(pair)
                ]
                kept.append((tdcoll.sparse_all_reduce(parts[pe]), total(parts)))
                found, rows = tdcoll.sparse_all_reduce_rows(parts[pe]._indices()[0], parts[pe]._values(), 1000)
                assert torch.equal(found, kept[-1][1].indices()[0])
                assert torch.equal(rows, kept[-1][1].values())
            assert all(same(got, wanted) for got, wanted in kept)
            assert len(contexts) == 1
        (ctx,) = contexts.values()
        assert ctx.max_rows_per_rank >= 400
        assert ctx.max_row_bytes >= 256
        assert ctx.grow
        ctx.close()
        assert tdcoll.heap_info().used == 0

    everywhere(host, 2)


def test_without_a_context_and_rows_on_one_rank_only() -> None:
    def host(pe: int) -> None:
        part = sparse([4, 2], PART) if pe == 1 else sparse([], torch.empty(0, DIM))
        assert same(tdcoll.sparse_all_reduce(part), sparse([2, 4], PART, coalesced=True))
        with pytest.raises(ValueError, match=r"must be in 0\.\.39"):
            tdcoll.sparse_all_reduce(sparse([ROWS], PART[:1]) if pe else part)
        with pytest.raises(TypeError, match=r"tensor must be a torch\.Tensor"):
            tdcoll.sparse_all_reduce([1])  # type: ignore[arg-type]
        assert same(tdcoll.sparse_all_reduce(part), sparse([2, 4], PART, coalesced=True))

    everywhere(host)


def test_before_a_job() -> None:
    for call in (
        lambda: tdcoll.sparse_all_reduce(mine(0)),
        lambda: tdcoll.sparse_all_reduce_rows(IDS, PART, ROWS),
        make,
    ):
        with pytest.raises(tdcoll.NotInitializedError, match=r"tdcoll\.initialize"):
            call()


# ---------------------------------------------------------------------- results of fixed size


@pytest.mark.parametrize("algorithm", ["owner", "gather", "auto"])
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("ranks_per_node", [None, second(2)])
def test_padded(algorithm: str, debug: bool, ranks_per_node: int | None) -> None:
    def host(pe: int) -> None:
        with make(debug=debug) as ctx:
            for call, count in enumerate((4, 1, 6)):
                part = mine(pe, call, count)
                wanted = total([mine(rank, call, count) for rank in range(N)])
                padded = tdcoll.sparse_all_reduce_padded(
                    part._indices()[0], part._values(), ROWS, ctx, algorithm=algorithm
                )
                union = wanted._nnz()
                assert isinstance(padded, tdcoll.PaddedRows)
                assert (padded.indices.shape, padded.indices.dtype) == ((48,), torch.int64)
                assert (padded.values.shape, padded.values.dtype) == ((48, DIM), torch.float32)
                assert (padded.count.shape, padded.count.dtype, padded.count.tolist()) == ((1,), torch.int64, [union])
                assert padded.count.device == ctx.device
                assert torch.equal(padded.indices[:union], wanted.indices()[0])
                assert torch.equal(padded.values[:union], wanted.values())
                assert not padded.indices[union:].any()
                assert not padded.values[union:].any()
                dense = torch.zeros(ROWS, DIM).index_add_(0, padded.indices, padded.values)
                assert torch.equal(dense, wanted.to_dense()), "padding adds nothing"
                ids, rows = tdcoll.sparse_all_reduce_rows(
                    part._indices()[0], part._values(), ROWS, ctx, algorithm=algorithm
                )
                assert torch.equal(ids, wanted.indices()[0])
                assert torch.equal(rows, wanted.values())
                if debug and algorithm == "owner":
                    with pytest.raises(tdcoll.ContextError, match=r"^sparse_all_reduce_padded: a result of copy=False"):
                        padded.values.sum()
                ctx.check()

    everywhere(host, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"indices": torch.tensor([ROWS, 1])}, ValueError, "indices of rank 1 must be in 0..39"),
        (
            {"indices": torch.tensor([2, 1]), "coalesced": True},
            ValueError,
            "indices of rank 1 are said to be coalesced",
        ),
        ({"op": "max"}, tdcoll.RankMismatchError, "ranks pass different"),
        (
            {"indices": torch.arange(9), "values": torch.ones(9, DIM)},
            tdcoll.ContextError,
            "9 different rows.*max_rows_per_rank=9",
        ),
        (
            {"indices": torch.arange(8) + 8, "values": torch.ones(8, DIM)},
            tdcoll.ContextError,
            "10 different rows together.*max_union_rows=10",
        ),
    ],
    ids=["range", "order", "op", "rows", "union"],
)
@pytest.mark.parametrize("algorithm", ["owner", "gather"])
def test_padded_remembers_what_was_wrong(
    wrong: dict[str, Any], error: type[Exception], text: str, algorithm: str
) -> None:
    """0 rows on every rank, the first error from check(), once; calls before it, between and after count as usual."""
    given: dict[str, Any] = {"indices": torch.tensor([1, 3]), "values": PART, "algorithm": algorithm}

    def host(pe: int) -> None:
        with make(max_rows_per_rank=8, max_union_rows=9, max_row_bytes=256, grow=True) as ctx:

            def call(**more: Any) -> tdcoll.PaddedRows:
                return tdcoll.sparse_all_reduce_padded(num_rows=ROWS, ctx=ctx, **(given | more))

            assert call().count.tolist() == [2]
            bad = call(**(wrong if pe == 1 else {}))
            assert bad.count.tolist() == [0]
            assert not bad.indices.any()
            assert not bad.values.any()
            later = call(indices=torch.tensor([ROWS + 5, 0]))  # not the first any more
            assert later.count.tolist() == [0]
            good = call()
            assert good.count.tolist() == [2]
            assert torch.equal(good.values[:2], N * PART)
            with pytest.raises(error, match=f"^sparse_all_reduce_padded: .*{text}"):
                ctx.check()
            ctx.check()
            assert call().count.tolist() == [2]
            ctx.check()
            call(indices=torch.tensor([-1, 0]))
            with pytest.raises(ValueError, match=r"must be in 0\.\.39"):
                ctx.check()
            assert ctx.max_union_rows == 9, "it does not grow here"

    everywhere(host)


def test_padded_of_nothing() -> None:
    def host(pe: int) -> None:
        with make(max_union_rows=5) as ctx:
            none = torch.empty(0, dtype=torch.int64)
            for num_rows in (0, ROWS, 1 << 40):
                for shape in ((DIM,), (), (0,)):
                    got = tdcoll.sparse_all_reduce_padded(none, torch.empty(0, *shape), num_rows, ctx)
                    assert got.values.shape == (5, *shape)
                    assert not got.values.any()
                    assert got.count.tolist() == [0]
            ctx.check()

    everywhere(host, 2)


# ---------------------------------------------------------------------- a peer that is gone


@pytest.mark.parametrize("algorithm", ["owner", "gather"])
@pytest.mark.parametrize("padded", [False, True])
def test_failed_context_refuses_every_call_and_closes_alone(algorithm: str, padded: bool) -> None:
    world = World(3, seed=4, weak=True, on_timeout="expire")

    def host(pe: int) -> tdcoll.CollectiveTimeout:
        ctx = make(timeout_s=5)
        for call in range(2):
            reduce_and_compare(ctx, call, algorithm=algorithm)
        ctx.check()
        tdcoll.barrier()  # the others are done with these calls, too
        if pe == 1:
            world.kill(1)

        def call_it() -> None:
            part = mine(pe)
            if padded:
                tdcoll.sparse_all_reduce_padded(part._indices()[0], part._values(), ROWS, ctx, algorithm=algorithm)
                ctx.check()
            else:
                tdcoll.sparse_all_reduce(part, ctx, algorithm=algorithm)

        with pytest.raises(tdcoll.CollectiveTimeout) as raised:
            call_it()
        with pytest.raises(tdcoll.CollectiveTimeout) as again:
            call_it()
        assert str(again.value) == str(raised.value)
        used = tdcoll.heap_info().used
        ctx.close()  # without the others
        assert ctx.closed
        assert tdcoll.heap_info().used == used, "a message may still come: the memory stays taken"
        with pytest.raises(tdcoll.ContextError, match="closed"):
            call_it()
        return raised.value

    first, dead, last = world.run(host)
    assert dead is None
    for rank, error in ((0, first), (2, last)):
        assert error is not None
        assert (error.rank, error.peer, error.timeout_s) == (rank, 1, 5.0)


def test_a_peer_that_stays_away_is_named() -> None:
    """Also in the middle of a group whose ranks are not the PEs."""

    def host(pe: int) -> None:
        if pe == 0:
            return
        ctx = make(group=[3, 1, 2], timeout_s=2)
        reduce_and_compare(ctx)
        if pe == 1:
            return
        with pytest.raises(tdcoll.CollectiveTimeout, match="waited 2 s for peer 1"):
            tdcoll.sparse_all_reduce(mine(ctx.rank), ctx)

    everywhere(host, 4, on_timeout="expire")
