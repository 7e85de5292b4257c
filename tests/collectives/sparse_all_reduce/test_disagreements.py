# SPDX-License-Identifier: Apache-2.0
"""What only the lists of all ranks show: wrong indices, and ranks that disagree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from tiers import slow_tier

import tdcoll
from tdcoll.testing import World

from .calls import (
    DIM,
    IDS,
    PART,
    ROWS,
    N,
    everywhere,
    ids_of,
    make,
    mine,
    reduce_and_compare,
    refused_everywhere,
    rows_of,
    sparse,
)

BAD_LISTS = [
    ([3, ROWS], False, "must be in 0..39"),
    ([3, 1 << 62], False, "must be in 0..39"),
    ([-1, 3], False, "must be in 0..39"),
    ([-(1 << 62), 3], False, "must be in 0..39"),
    ([3, ROWS], True, "must be in 0..39"),
    ([-1, 3], True, "must be in 0..39"),
    ([9, 3], True, "said to be coalesced, and are not ascending or not different"),
    ([3, 3], True, "said to be coalesced, and are not ascending or not different"),
]


@pytest.mark.parametrize(("ids", "coalesced", "text"), BAD_LISTS)
@pytest.mark.parametrize("algorithm", ["owner", "gather"])
@pytest.mark.parametrize("ranks_per_node", [None, slow_tier(2)])
def test_indices_that_are_wrong_on_one_rank(
    ids: list[int], coalesced: bool, text: str, algorithm: str, ranks_per_node: int | None
) -> None:
    def host(pe: int) -> None:
        given = torch.tensor(ids if pe == 1 else [4, 5])

        with make() as ctx:
            call = lambda: tdcoll.sparse_all_reduce_rows(  # noqa: E731
                given, PART, ROWS, ctx=ctx, coalesced=coalesced, algorithm=algorithm
            )
            wanted = f"^sparse_all_reduce_rows: indices of rank 1 .*{text}"
            refused_everywhere(ctx, ValueError, wanted, call, algorithm)
            reduce_and_compare(ctx, algorithm=algorithm)

    everywhere(host, ranks_per_node=ranks_per_node)


DIFFERENT: dict[str, dict[str, Any]] = {
    "num_rows": {"num_rows": ROWS + 1},
    "num_rows by much": {"num_rows": 1 << 40},
    "dtype of the same size": {"values": PART.int()},
    "row shape of the same size": {"values": PART.reshape(2, 2, 2)},
    "row shape": {"values": PART[:, :3]},
    "row shape, over the capacity": {"values": torch.ones(len(PART), 1000)},
    "row shape, of nothing": {"values": PART[:, :0]},
    "op": {"op": "max"},
}


@pytest.mark.parametrize("wrong", DIFFERENT.values(), ids=DIFFERENT)
@pytest.mark.parametrize("odd", [0, slow_tier(2)])
@pytest.mark.parametrize(
    ("algorithm", "debug"),
    [("auto", False), ("owner", False), slow_tier("gather", False), ("auto", True)],
)
def test_ranks_that_disagree(wrong: dict[str, Any], odd: int, algorithm: str, debug: bool) -> None:
    """Without debug mode, too, all ranks are told, and the context goes on; with it, they are told
    what."""
    given: dict[str, Any] = {
        "indices": IDS,
        "values": PART,
        "num_rows": ROWS,
        "op": "sum",
        "algorithm": algorithm,
    }

    def host(pe: int) -> None:
        with make(debug=debug, grow=algorithm == "auto") as ctx:
            before = tdcoll.heap_info()
            text = (
                "sparse_all_reduce_rows arguments must be the same on all ranks"
                if debug
                else "^sparse_all_reduce_rows: ranks pass different shapes, dtypes, operations or algorithms"
            )
            for _ in range(2):
                with pytest.raises(tdcoll.RankMismatchError, match=text):
                    tdcoll.sparse_all_reduce_rows(ctx=ctx, **(given | (wrong if pe == odd else {})))
                reduce_and_compare(ctx, algorithm=algorithm)
            assert tdcoll.heap_info() == before, "a mismatch is no reason to grow"

    everywhere(host)


@pytest.mark.parametrize("warm", [(), ("owner", "gather", "owner", "gather")])
@on_ranks(N, on_timeout="expire")
def test_ranks_that_take_different_ways_get_no_result(pe: int, warm: tuple[str, ...]) -> None:
    """They may wait until the deadline, but none takes the lists of an earlier call for those of
    this one."""
    ctx = make(timeout_s=2)
    for algorithm in warm:
        reduce_and_compare(ctx, algorithm=algorithm)
    with pytest.raises((tdcoll.RankMismatchError, tdcoll.CollectiveTimeout)):
        tdcoll.sparse_all_reduce(mine(pe), ctx=ctx, algorithm="gather" if pe == 1 else "owner")


@on_ranks(4, ranks_per_node=1)
def test_auto_and_owner_are_different_calls(pe: int) -> None:
    """Though "auto" may take "owner"."""
    ids = torch.arange(64)
    ctx = make(max_rows_per_rank=2048, max_row_bytes=64)
    with pytest.raises(tdcoll.RankMismatchError, match="ranks pass different"):
        tdcoll.sparse_all_reduce_rows(
            ids, torch.ones(64, 16), 64, ctx=ctx, algorithm="owner" if pe else "auto"
        )
    ctx.close()


@pytest.mark.parametrize("debug", [False, True])
@on_ranks(N)
def test_results_of_a_context_are_not_its_input(pe: int, debug: bool) -> None:
    with make(max_rows_per_rank=16, max_row_bytes=16 << 10, debug=debug) as ctx:
        for padded in (False, True):
            ids, rows = tdcoll.sparse_all_reduce_rows(
                IDS, PART, ROWS, ctx=ctx, algorithm="owner", copy=False
            )
            again = tdcoll.sparse_all_reduce_padded if padded else tdcoll.sparse_all_reduce_rows
            with pytest.raises(
                ValueError, match=r"must not lie in the memory of the context.*clone"
            ):
                again(ids, rows, ROWS, ctx=ctx)
            ids, rows = tdcoll.sparse_all_reduce_rows(
                IDS, PART, ROWS, ctx=ctx, algorithm="owner", copy=False
            )
            tdcoll.sparse_all_reduce_rows(ids, rows.clone(), ROWS, ctx=ctx)


@pytest.mark.slow
@on_ranks(2, heap_bytes=28 << 10)
def test_growing_takes_what_is_needed_where_the_heap_has_no_room_for_more(pe: int) -> None:
    many = list(range(800))
    rows = rows_of(pe, many, (1,))
    for grow in (False, True):
        with make(max_rows_per_rank=8 if grow else 800, max_row_bytes=4, grow=grow) as ctx:
            tdcoll.sparse_all_reduce(sparse(many, rows, 800), ctx=ctx)
            assert ctx.max_rows_per_rank == 800


@on_ranks(2, heap_bytes=320 << 10)
def test_without_a_context_repeated_rows_count_once(pe: int) -> None:
    ids = list(range(10)) * 400
    got = tdcoll.sparse_all_reduce(sparse(ids, torch.ones(len(ids), 8), 1 << 30))
    assert got.values().tolist() == [[800.0] * 8] * 10


@on_ranks(4)
def test_rows_are_spread_whatever_the_pattern_of_their_ids(pe: int) -> None:
    """Ids that are composed of two numbers have the same low bits."""
    n = 64
    with make(max_rows_per_rank=n, max_row_bytes=16, max_union_rows=n) as ctx:
        for shift in (0, 7, 19, 31, 40):
            ids = torch.arange(n) << shift
            tdcoll.sparse_all_reduce_rows(
                ids, torch.ones(n, 4), 1 << 50, ctx=ctx, coalesced=True, algorithm="owner"
            )
            # rows that others have as well, and that this rank reduced
            mine = int(ctx.memory.whole.counters[1])
            assert n // 4 - 12 <= mine <= n // 4 + 12, (shift, mine)


@pytest.mark.parametrize("turns", [10, 40, 80])
def test_padded_has_no_rows_once_a_wait_has_expired(turns: int) -> None:
    """Neither those of the call before, nor some of them."""
    counts: list[tuple[bool, int]] = []
    world = World(3, seed=1, weak=True, on_timeout="expire")

    def host(pe: int) -> None:
        ctx = make(timeout_s=2)
        ids = torch.arange(8)
        tdcoll.sparse_all_reduce_padded(ids, torch.ones(8, 4), 8, ctx=ctx, algorithm="owner")
        if pe == 2:
            world.kill(pe, after_turns=turns)
        got = tdcoll.sparse_all_reduce_padded(
            ids, torch.full((8, 4), 10.0), 8, ctx=ctx, algorithm="owner"
        )
        right = bool((got.values[:8] == 30).all())
        counts.append((ctx.monitor.expired, int(got.count) if not right else -1))

    world.run(host)
    assert any(expired for expired, _ in counts)
    assert all(count <= 0 for _, count in counts), counts


@on_ranks(N)
def test_debug_tells_all_ranks_what_is_wrong_on_one(pe: int) -> None:
    with make(debug=True) as ctx:
        told = (
            "^indices must be int64"
            if pe == 1
            else "rank 1 cannot make this call: .*indices must be int64"
        )
        with pytest.raises(ValueError if pe == 1 else tdcoll.RankMismatchError, match=told):
            tdcoll.sparse_all_reduce_rows(IDS.int() if pe == 1 else IDS, PART, ROWS, ctx=ctx)
        reduce_and_compare(ctx)


@on_ranks(N)
def test_debug_compares_tensors_algorithms_and_contexts(pe: int) -> None:
    first, second = make(debug=True), make(debug=True)
    odd = pe == 1
    text = "sparse_all_reduce arguments must be the same on all ranks"
    wide = {"shape": (3 if odd else DIM,)}
    for part, options, field in (
        (mine(pe, **wide), {}, "shape"),
        (sparse(ids_of(pe), rows_of(pe, ids_of(pe)), ROWS + odd), {}, "shape"),
        (
            sparse(
                ids_of(pe), rows_of(pe, ids_of(pe), dtype=torch.int32 if odd else torch.float32)
            ),
            {},
            "dtype",
        ),
        (mine(pe), {"op": "max" if odd else "min"}, "op"),
        (mine(pe), {"algorithm": "gather" if odd else "owner"}, "algorithm"),
    ):
        with pytest.raises(
            tdcoll.RankMismatchError, match=rf"{text}; they differ in {field} \(rank 0: "
        ):
            tdcoll.sparse_all_reduce(part, ctx=first, **options)
    reduce_and_compare(first)
    with pytest.raises(tdcoll.RankMismatchError, match=text):
        tdcoll.sparse_all_reduce(mine(pe), ctx=first if pe == 0 else second)


# ---------------------------------------------------------------------- results of fixed size


def _more(first: int, count: int) -> dict[str, torch.Tensor]:
    return {"indices": torch.arange(count) + first, "values": torch.ones(count, DIM)}


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "range": (
        {"indices": torch.tensor([ROWS, 1])},
        ValueError,
        "indices of rank 1 must be in 0..39",
    ),
    "order": (
        {"indices": torch.tensor([2, 1]), "coalesced": True},
        ValueError,
        "rank 1 are said to be coalesced",
    ),
    "op": ({"op": "max"}, tdcoll.RankMismatchError, "ranks pass different"),
    "rows": (_more(0, 9), tdcoll.ContextError, "9 different rows.*max_rows_per_rank=9"),
    "union": (_more(8, 8), tdcoll.ContextError, "10 different rows together.*max_union_rows=10"),
}


@pytest.mark.parametrize(("wrong", "error", "text"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("algorithm", ["owner", "gather"])
def test_padded_remembers_what_was_wrong(
    wrong: dict[str, Any], error: type[Exception], text: str, algorithm: str
) -> None:
    """0 rows on every rank, the first error from check(), once; calls before it, between and after
    count as usual."""
    given: dict[str, Any] = {
        "indices": torch.tensor([1, 3]),
        "values": PART,
        "algorithm": algorithm,
    }

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
