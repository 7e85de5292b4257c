# SPDX-License-Identifier: Apache-2.0
"""The tutorials on sparse gradients: they run, their arithmetic is right, and their checks fail
when they should."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from loading import changed, load

import tdcoll
from tdcoll import runtime
from tdcoll.testing import World

SPARSE, DDP = load("03-sparse-all-reduce"), load("04-sparse-embedding-ddp")
SMALL = ("--vocabulary", "100", "--dim", "4", "--batch", "6", "--steps", "3")
SMALL_DDP = ("--rows", "100", "--dim", "4", "--batch", "8", "--steps", "2")


# ---------------------------------------------------------------------- as a reader runs them


@pytest.mark.slow
def test_sparse_all_reduce_runs(launch):
    done = launch("--simulate", "--nproc", "2", SPARSE.__file__, *SMALL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    told = [
        "2 rank(s) on 1 node(s)",
        "text",
        "first batch, of a table of 200 rows of 16 bytes",
        "integers",
    ]
    told += ["too small a context", "grow=True", "trained", "moved"]
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == told
    steps = [line.split() for line in lines if line.startswith("  step")]
    assert [step[1] for step in steps] == ["0:", "1:", "2:"]
    assert all(step[3] == step[5] + "," for step in steps)  # the loss, and that of one process


@pytest.mark.slow
def test_ddp_runs(launch):
    done = launch("--simulate", "--nproc", "2", DDP.__file__, *SMALL_DDP)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:5]] == ["2 rank(s) on 1 node(s)", *DDP.WAYS]
    assert len({line.split(":")[1] for line in lines[1:5]}) == 1, "the losses differ"
    assert "  calls so far: 6 sparse_all_reduce by tdcoll" in lines
    assert "  calls so far: 1 all_reduce by gloo (more than 16777216 bytes per rank)" in lines


@pytest.mark.slow
def test_ddp_without_tdcoll_is_caught(launch, tmp_path):
    change = "make = tutorial.make_model\n"
    change += (
        "tutorial.make_model = lambda way, *given: make(way.replace('backend', 'dense'), *given)"
    )
    done = launch(
        "--simulate",
        "--nproc",
        "2",
        changed(tmp_path, "04-sparse-embedding-ddp", change, *SMALL_DDP),
    )
    assert done.returncode != 0
    assert "expected 6 sparse all-reduces by tdcoll" in done.stderr


# ---------------------------------------------------------------------- arithmetic


def test_bytes_moved_are_counted_by_hand():
    table = SPARSE.make_table(20, 12, "cpu")  # rows of 48 bytes
    shares = [torch.tensor(rows) for rows in ([7, 3, 7], [3, 3, 5], [3, 5, 9])]
    assert SPARSE.contributors(shares).tolist() == [3, 2, 1, 1]  # of rows 3, 5, 7, 9
    # two come in for row 3 and one for row 5; the sums of four rows go to two others
    rows = 2 + 1 + 4 * 2
    numbers = (2 + 2 + 3) * 2  # of each rank's rows, to two others
    assert SPARSE.bytes_moved(shares, table) == (
        (48 * rows + 8 * numbers) / 3,
        2 * 2 * (20 * 48 / 3),
    )
    assert SPARSE.bytes_moved(shares[:1], table) == (0, 0)


# ---------------------------------------------------------------------- checks that can fail


def test_exact_check_fails_on_wrong_results():
    shares = [torch.tensor([4, 1, 4]), torch.tensor([2, 1, 1])]
    parts = SPARSE.integers(shares, 2)
    assert all(torch.equal(part, part.round()) and part.abs().max() <= 8 for part in parts)
    right = torch.zeros(6, 2)
    for share, part in zip(shares, parts, strict=True):
        right.index_add_(0, share, part)
    rows = torch.tensor([[1, 2, 4]])
    off = right.clone()
    off[2, 0] += 1
    for indices, values, coalesced, complaint in (
        (rows, right, True, None),
        (rows, off, True, "1 of 6 numbers are wrong"),
        (rows[:, :2], right, True, "expected the 3 rows of the union"),
        (rows + 1, right, True, "expected the 3 rows of the union"),
        (rows, right, False, "expected the 3 rows of the union"),
    ):
        result = torch.sparse_coo_tensor(
            indices, values[indices[0]], (6, 2), is_coalesced=coalesced, check_invariants=True
        )
        with (
            pytest.raises(AssertionError, match=f"case: {complaint}")
            if complaint
            else nullcontext()
        ):
            SPARSE.check_exact("case", result, shares, parts)


def train(n_pes: int, arguments: tuple[str, ...] = SMALL) -> list[torch.Tensor]:
    """Tutorial 03's training on the simulator, in this process: the table of each rank."""
    options = SPARSE.parse(list(arguments))
    words, ids = SPARSE.number_words(SPARSE.read_text(), options.vocabulary)

    def host(pe):
        capacity = options.batch * (2 + SPARSE.NEGATIVES)
        with tdcoll.SparseContext(max_rows_per_rank=capacity, max_row_bytes=4 * options.dim) as ctx:
            return SPARSE.train(ids, len(words), options, ctx).weight.detach()

    return World(n_pes).run(host)


def test_training_learns():
    tables = train(2, ())
    assert all(torch.equal(table, tables[0]) for table in tables)
    words, ids = SPARSE.number_words(SPARSE.read_text(), SPARSE.SIMULATED["vocabulary"])
    batch = SPARSE.draw(ids, len(words), 0, 200)
    table = SPARSE.make_table(*tables[0].shape, "cpu")
    before, _ = SPARSE.gradient(table, batch, len(batch))
    table.weight.data.copy_(tables[0])
    after, _ = SPARSE.gradient(table, batch, len(batch))
    # nothing learnt: all scores are 0
    assert before == pytest.approx((1 + SPARSE.NEGATIVES) * math.log(2), rel=0.02)
    assert after < 0.99 * before


@pytest.mark.parametrize(
    "wrong",
    [
        lambda grad, ctx, summed: grad.coalesce(),
        lambda grad, ctx, summed: summed(grad, "mean", ctx=ctx),
        lambda grad, ctx, summed: summed(grad * (ctx.rank != 0), ctx=ctx),
    ],
    ids=["own gradient only", "mean of the sums", "one rank's is lost"],
)
def test_training_that_sums_wrongly_is_caught(wrong, monkeypatch):
    summed = tdcoll.sparse_all_reduce
    monkeypatch.setattr(
        tdcoll, "sparse_all_reduce", lambda grad, ctx, **_: wrong(grad, ctx, summed)
    )
    with pytest.raises(AssertionError, match="not close"):
        train(2, (*SMALL[:-1], "1"))  # one step, after which only the tables can tell


def test_ranks_that_differ_in_the_last_bits_are_caught(monkeypatch):
    descend = SPARSE.descend

    def differ(table, grad):
        descend(table, grad)
        table.weight.data.view(torch.int32)[3, 1] += runtime.current().rank

    monkeypatch.setattr(SPARSE, "descend", differ)
    with pytest.raises(AssertionError, match="the ranks' tables differ"):
        train(2)


def test_context_that_takes_too_many_rows_is_caught():
    def host(pe):
        rows = torch.full((1, 3), pe)  # one row, three times
        grad = torch.sparse_coo_tensor(rows, torch.ones(3, 4), (9, 4), check_invariants=True)
        SPARSE.try_small_contexts(grad, 16)

    with pytest.raises(AssertionError, match="took a gradient with more"):
        World(2).run(host)


@pytest.mark.parametrize("more", [1e-3, float("nan")])
@pytest.mark.parametrize("name", ["losses", "items.weight", "score.0.bias"])
def test_ddp_runs_that_differ_are_caught(more, name, monkeypatch):
    monkeypatch.setattr(DDP, "gather", lambda own: [own, own])
    model, dense = (DDP.ClickModel(20, 4, "cpu", sparse=sparse) for sparse in (True, False))
    losses = torch.ones(8)
    DDP.check_same("case", model, losses, dense, torch.ones(8))
    monkeypatch.setattr(DDP, "gather", lambda own: [own, own + 1e-7])
    with pytest.raises(
        AssertionError, match=r"case: the ranks have different bits in users\.weight"
    ):
        DDP.check_same("case", model, losses, dense, torch.ones(8))
    (losses if name == "losses" else model.get_parameter(name).data).view(-1)[7] += more
    monkeypatch.setattr(DDP, "gather", lambda own: [own, own])
    with pytest.raises(
        AssertionError, match=rf"case: {name} differ from those of dense training: .*not close"
    ):
        DDP.check_same("case", model, losses, dense, torch.ones(8))
