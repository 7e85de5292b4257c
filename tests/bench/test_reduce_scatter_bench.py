# SPDX-License-Identifier: Apache-2.0
"""The reduce-scatter benchmark: its data, its checks and counts on the simulator, measuring with a made-up clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tdcoll import runtime
from tdcoll.bench import reduce_scatter as benchmark
from tdcoll.bench.data import Reduced
from tdcoll.bench.reduce_scatter import ReduceScatter
from tdcoll.bench.rows import load, save
from tdcoll.collectives.reduce_scatter.reference import reduce_scatter_reference

WORLD, CALLS, COUNT = 4, 3, 250
NODES = [0] * WORLD


# ---------------------------------------------------------------------- its data


def reduced(dtype: torch.dtype, rounds: int, op: str = "sum") -> list[Reduced]:
    """Buffers of all ranks after a correct reduce-scatter."""
    nbytes, device = COUNT * dtype.itemsize, torch.device("cpu")
    ranks = [Reduced(nbytes, WORLD, rank, CALLS, dtype, device, op=op, nodes=NODES) for rank in range(WORLD)]
    for buffers in ranks:
        buffers.fill(7)
        for _ in range(rounds):
            buffers.advance()
    for call in range(CALLS):
        parts = reduce_scatter_reference([buffers.inputs[call] for buffers in ranks], NODES, op)
        for buffers, part in zip(ranks, parts, strict=True):
            buffers.results[call].copy_(part)
    return ranks


@pytest.mark.parametrize(
    ("dtype", "op"), [*((dtype, "sum") for dtype in ReduceScatter.dtypes.values()), (torch.bfloat16, "mean")]
)
def test_correct_sums_are_correct_and_exact(dtype: torch.dtype, op: str) -> None:
    for rounds in (0, 5, 700):  # rounds begin again where numbers would be too large
        ranks = reduced(dtype, rounds, op)
        for buffers in ranks:
            assert [buffers.errors(call, buffers.results[call]) for call in range(CALLS)] == [(0, "")] * CALLS
        wide = [buffers.inputs[1].double() for buffers in ranks]
        exact = reduce_scatter_reference(wide, NODES, op)
        assert all(torch.equal(b.results[1].double(), part) for b, part in zip(ranks, exact, strict=True))


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize(
    "mistake", ["an earlier round", "another call", "another rank's part", "an earlier element", "a part left out"]
)
def test_data_from_elsewhere_is_wrong(mistake: str, op: str) -> None:
    """Not in every word: numbers of few bits meet. Of 250 more than a third differ, and a launch has many."""
    ranks, before = reduced(torch.bfloat16, 1, op), reduced(torch.bfloat16, 0, op)
    buffers = ranks[2]
    others = [other.inputs[1] for other in (*ranks[:2], ranks[3])]
    lacking = [buffers.inputs[1].new_zeros(others[0].shape), *others]
    found = {
        "an earlier round": before[2].results[1],
        "another call": buffers.results[0],
        "another rank's part": ranks[3].results[1],
        "an earlier element": buffers.results[1].roll(1),
        "a part left out": reduce_scatter_reference(lacking, NODES, op)[2],
    }[mistake]
    count, where = buffers.errors(1, found)
    if (mistake, op) == ("a part left out", "max"):
        assert 25 < count <= COUNT  # the greatest of four is the first rank's in a quarter of the cases, or less
    else:
        assert COUNT / 3 < count <= COUNT
    assert where.startswith(f"rank 2: {count} wrong word(s), first: call 1, element ")


def test_one_wrong_element_is_found_and_named() -> None:
    buffers = reduced(torch.float32, 2)[1]
    buffers.results[2][17] += 1
    count, where = buffers.errors(2, buffers.results[2])
    assert count == 1
    assert where.startswith("rank 1: 1 wrong word(s), first: call 2, element 17: expected ")


def test_sums_over_too_many_ranks_are_refused() -> None:
    def make(world: int, op: str) -> Reduced:
        return Reduced(4, world, 0, 2, torch.bfloat16, torch.device("cpu"), op=op, nodes=[0] * world)

    make(64, "sum")
    make(65, "max")
    with pytest.raises(ValueError, match="bfloat16 has no exact sums of different numbers over 65 ranks"):
        make(65, "sum")


# ---------------------------------------------------------------------- the command line


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = ReduceScatter.parse(["-b", "512", "-e", "2K", "--dtype", "bfloat16", "--op", "max"])
    assert (options.sizes, options.dtype, options.op) == ([512, 2048], torch.bfloat16, "max")
    assert (options.peers, options.algorithms, options.launches) == (["nccl"], None, ["graph"])
    for arguments, message in (
        ("--algorithms ring", "expected some of auto, ll, direct, pull, 1d, symmetric, backend; got ring"),
        ("--dtype uint8", "invalid choice"),
        ("--op prod", "invalid choice"),
        ("--op mean --dtype int32", "--op: a mean is of floating-point numbers; got --dtype torch.int32"),
    ):
        with pytest.raises(SystemExit) as ended:
            ReduceScatter.parse(arguments.split())
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ReduceScatter.parse(["--help"])
    assert "bytes of the part that each rank gets" in " ".join(capsys.readouterr().out.split())


# ---------------------------------------------------------------------- on the simulator


def test_checks_and_counts_over_two_nodes(rows_of: Callable[..., list[Any]]) -> None:
    rows = rows_of(ReduceScatter, "-b 1K -e 4K --dtype bfloat16 --algorithms auto,1d,direct", 4, ranks_per_node=2)
    assert [(row.algorithm, row.check) for row in rows] == [
        *(("auto", "ok"), ("1d", "ok"), ("direct", "not run"), ("nccl", "not run"))
    ] * 2
    assert "needs one node whose ranks can store" in rows[2].note
    assert rows[3].note == "needs GPUs"
    for row in rows[:2]:
        assert row.counts["inter_node_bytes"] == [2 * 1024] * 4  # a part to each rank of the other node
        assert (row.operation, row.dtype, row.op, row.median_us) == ("reduce_scatter", "bfloat16", "sum", None)


def test_every_algorithm_on_one_node(rows_of: Callable[..., list[Any]]) -> None:
    """A mean of three, too, which peers round in other places."""
    rows = rows_of(ReduceScatter, "-b 252 -e 252 --algorithms auto,ll,direct,1d,symmetric --op mean", 3)
    assert [row.check for row in rows] == ["ok"] * 5 + ["not run"]
    assert rows[-1].note == "rounds a mean over 3 ranks more than once: it cannot be checked to the bit"


@pytest.mark.parametrize("mistake", ["an element", "the call before"])
def test_wrong_results_are_rows_that_say_so(
    mistake: str, monkeypatch: pytest.MonkeyPatch, rows_of: Callable[..., list[Any]]
) -> None:
    real = benchmark.reduce_scatter
    kept: dict[int, torch.Tensor] = {}

    def careless(tensor: torch.Tensor, ctx: Any, out: torch.Tensor, *rest: Any) -> torch.Tensor:
        real(tensor, ctx, out, *rest)
        if ctx.rank == 1 and mistake == "an element":
            out[-1] += 1
        elif mistake == "the call before":
            new = out.clone()
            out.copy_(kept.get(ctx.rank, new))
            kept[ctx.rank] = new
        return out

    monkeypatch.setattr(benchmark, "reduce_scatter", careless)
    (row,) = rows_of(ReduceScatter, "-b 64 -e 64 --algorithms direct --peers=", 2)
    assert row.check == "WRONG"
    if mistake == "an element":
        assert row.note.startswith("rank 1: 1 wrong word(s), first: call 0, element 15: expected ")
    else:
        assert "first: call 1, element " in row.note


# ---------------------------------------------------------------------- measuring, with a made-up clock


def test_the_measuring_path(
    clock: Any, on_gpus: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Consecutive calls take different inputs; rank 1 is the slowest, and the skew says by how much."""
    real = benchmark.reduce_scatter
    given: list[int] = []

    def timed(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        clock.passes(5.0 + runtime.current().rank)
        if runtime.current().rank == 0:
            given.append(tensor.data_ptr())
        return real(tensor, *rest)

    monkeypatch.setattr(benchmark, "reduce_scatter", timed)
    arguments = ["-b", "64", "-e", "64", "--algorithms", "direct", "--both", "--iterations", "4", "--warmup", "1"]
    options = ReduceScatter.parse(arguments)
    shown: list[Any] = []
    rows = on_gpus(lambda pe: ReduceScatter(options).measure(shown.append if pe == 0 else lambda row: None), 2)[0]
    assert shown == rows
    assert [(row.label, row.launch, row.check) for row in rows] == [
        *(("tdcoll direct", launch, "ok") for launch in ("graph", "eager")),
        *(("nccl", launch, "not run") for launch in ("graph", "eager")),
    ]
    for row in rows:
        if row.check == "ok":
            assert (row.median_us, row.min_us, row.skew_us) == pytest.approx((6.0, 6.0, 1.0))
            assert (row.calls, row.iterations) == ((2, 3), 4)
            assert row.busbw_gbps == 64 / row.median_us / 1e3
    assert len(set(given)) == 3
    assert all(one != following for one, following in itertools.pairwise(given))
    head = {"benchmark": "reduce_scatter", "command": "x", "started": "2031-02-03", "provenance": {}}
    save(tmp_path / "r.json", head, rows)
    assert load(tmp_path / "r.json")[1] == rows
