# SPDX-License-Identifier: Apache-2.0
"""The tutorials on sparse gradients: they run, their arithmetic is right, and their checks fail when they should."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import pytest
import torch
from loading import load

import tdcoll
from tdcoll import runtime
from tdcoll.testing import World

SPARSE, DDP = load("03-sparse-all-reduce"), load("04-sparse-embedding-ddp")
SMALL = ("--vocabulary", "100", "--dim", "4", "--batch", "6", "--steps", "3")
SMALL_DDP = ("--rows", "100", "--dim", "4", "--batch", "8", "--steps", "2")


# ---------------------------------------------------------------------- as a reader runs them


def test_sparse_all_reduce_runs(launch):
    done = launch("--simulate", "--nproc", "2", SPARSE.__file__, *SMALL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == [
        "2 rank(s) on 1 node(s) (2)",
        "text",
        "first batch, of a table of 200 rows of 16 bytes",
        "integers",
        "too small a context",
        "grow=True",
        "trained",
        "moved",
    ]
    assert "integers: owner, gather, dense give exactly the sum" in done.stdout
    assert "over the context's capacity of 1" in done.stdout
    steps = [line.split() for line in lines if line.startswith("  step")]
    assert [step[1] for step in steps] == ["0:", "1:", "2:"]
    assert all(step[3] == step[5] + "," for step in steps)  # the loss, and that of one process


@pytest.mark.slow
def test_ddp_runs(launch):
    done = launch("--simulate", "--nproc", "2", DDP.__file__, *SMALL_DDP)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    found = {line.split(":")[0]: line for line in lines[:5]}
    assert list(found) == ["2 rank(s) on 1 node(s) (2)", *DDP.WAYS]
    assert len({found[way].removeprefix(way) for way in DDP.WAYS}) == 1, "the losses differ"
    assert "the losses and weights equal those of dense training over gloo" in lines
    assert "  calls so far: 4 sparse_all_reduce by tdcoll" in lines
    assert "  calls so far: 1 all_reduce by gloo (more than 16777216 bytes per rank)" in lines


FAULTY = """
import sys
import torch.distributed as dist
sys.path.insert(0, {folder!r})
from loading import load

tutorial = load("04-sparse-embedding-ddp")
original = tutorial.make_model
def make_model(way, *given):
    if way != {way!r}:
        return original(way, *given)
    {fault}
    return model, reducer
tutorial.make_model = make_model
tutorial.main({arguments!r})
"""
LOST = "model.module.users.weight.register_hook(lambda gradient: gradient * (dist.get_rank() != 0))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "fault", "complaint"),
    [
        ("backend", f"model, reducer = original(way, *given); {LOST}", "backend: (losses|users.weight) differ"),
        ("hook", f"model, reducer = original(way, *given); {LOST}", "hook: (losses|users.weight) differ"),
        ("backend", 'model, reducer = original("dense", *given)', "expected 4 sparse all-reduces by tdcoll"),
    ],
    ids=["backend loses rows", "hook loses rows", "tdcoll is not called"],
)
def test_ddp_that_reduces_wrongly_is_caught(launch, tmp_path, way, fault, complaint):
    script = tmp_path / "faulty.py"
    names = {"folder": str(Path(__file__).parent), "way": way, "fault": fault, "arguments": list(SMALL_DDP)}
    script.write_text(FAULTY.format(**names))
    done = launch("--simulate", "--nproc", "2", str(script))
    assert done.returncode != 0
    with pytest.raises(AssertionError, match=complaint):
        raise AssertionError(done.stderr)


# ---------------------------------------------------------------------- text, batches, arithmetic


def test_words_are_numbered_by_frequency(monkeypatch):
    words, ids = SPARSE.number_words("To be, or not to be: that is THE question. Be!", 3)
    assert words == ["be", "to", "or"]
    assert ids.tolist() == [1, 0, 2, 1, 0, 0]
    assert SPARSE.number_words(SPARSE.read_text(), 9)[0][0] == "the"
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)  # a Python without its manual
    words, ids = SPARSE.number_words(SPARSE.read_text(), 1000)
    assert (len(words), len(ids) > 30_000) == (1000, True)


def test_batches_hold_neighbours():
    words, ids = SPARSE.number_words(SPARSE.read_text(), 100)
    batch = SPARSE.draw(ids, len(words), 5, 400)
    assert torch.equal(batch, SPARSE.draw(ids, len(words), 5, 400))
    assert not torch.equal(batch, SPARSE.draw(ids, len(words), 6, 400))
    assert batch.shape == (400, 2 + SPARSE.NEGATIVES)
    assert batch[:, 0].max() < len(words) <= batch[:, 1:].min()
    assert batch.max() < 2 * len(words)
    text = ids.tolist()
    near = {(text[i], text[i + away]) for i in range(2, len(text) - 2) for away in (-2, -1, 1, 2)}
    assert {(centre, neighbour - 100) for centre, neighbour in batch[:, :2].tolist()} <= near
    assert not {(centre, other - 100) for centre, other in batch[:, [0, 2]].tolist()} <= near


@pytest.mark.parametrize("world", [1, 2, 5])
def test_bytes_moved_are_what_messages_count(world):
    table = SPARSE.make_table(20, 12, "cpu")  # rows of 48 bytes
    for seed in range(10):
        generator = random.Random(seed)
        shares = [torch.tensor([int(20 * generator.random() ** 2) for _ in range(12)]) for _ in range(world)]
        holders: dict[int, set[int]] = {}
        for rank, share in enumerate(shares):
            for row in share.tolist():
                holders.setdefault(row, set()).add(rank)
        assert SPARSE.contributors(shares).tolist() == [len(holders[row]) for row in sorted(holders)]
        messages = [(rank, min(having)) for having in holders.values() for rank in having if rank != min(having)]
        messages += [(min(having), rank) for having in holders.values() for rank in range(world) if rank != min(having)]
        numbers = sum(len(set(share.tolist())) * (world - 1) for share in shares)
        sparse, dense = SPARSE.bytes_moved(shares, table)
        assert sparse == pytest.approx((48 * len(messages) + 8 * numbers) / world)
        assert dense == 2 * (world - 1) * (20 * 48 / world)  # reduce-scatter and all-gather, a part in each step


def test_models_differ_in_the_layout_of_gradients_alone():
    users, items, clicks = DDP.draw(50, 0, 40, "cpu")
    assert torch.equal(DDP.draw(50, 0, 40, "cpu")[0], users)
    assert users.min() >= 0
    assert max(users.max(), items.max()) < 50
    gradients = []
    for sparse in (True, False):
        model = DDP.ClickModel(50, 4, "cpu", sparse=sparse)
        torch.nn.functional.binary_cross_entropy_with_logits(model(users, items), clicks).backward()
        assert (model.items.weight.grad.layout == model.users.weight.grad.layout == torch.sparse_coo) == sparse
        gradients.append([parameter.grad.to_dense() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


# ---------------------------------------------------------------------- checks that can fail


def test_exact_check_fails_on_wrong_results():
    shares = [torch.tensor([4, 1, 4]), torch.tensor([2, 1, 1])]
    parts = SPARSE.integers(shares, 2)
    assert all(torch.equal(part, part.round()) and part.abs().max() <= 8 for part in parts)
    right = torch.zeros(6, 2)
    for share, part in zip(shares, parts, strict=True):
        right.index_add_(0, share, part)
    rows = torch.tensor([[1, 2, 4]])

    def check(indices, values, coalesced=True):
        result = torch.sparse_coo_tensor(indices, values, (6, 2), is_coalesced=coalesced, check_invariants=True)
        SPARSE.check_exact("case", result, shares, parts)

    check(rows, right[rows[0]])
    wrong = right[rows[0]].clone()
    wrong[1, 0] += 1
    with pytest.raises(AssertionError, match="case: 1 of 6 numbers are wrong"):
        check(rows, wrong)
    for indices, coalesced in ((rows[:, :2], True), (rows + 1, True), (rows, False)):
        with pytest.raises(AssertionError, match="case: expected the 3 rows of the union"):
            check(indices, right[indices[0]], coalesced)


def train(n_pes: int, arguments: tuple[str, ...] = SMALL) -> list[torch.Tensor]:
    """Tutorial 03's training on the simulator, in this process: the table of each rank."""
    options = SPARSE.parse(list(arguments))
    words, ids = SPARSE.number_words(SPARSE.read_text(), options.vocabulary)

    def host(pe):
        capacity = options.batch * (2 + SPARSE.NEGATIVES)
        with tdcoll.SparseContext(max_rows_per_rank=capacity, max_row_bytes=4 * options.dim) as ctx:
            return SPARSE.train(ids, len(words), options, ctx).weight.detach()

    return World(n_pes).run(host)


@pytest.mark.parametrize("n_pes", [1, 3])
def test_training_is_the_same_as_on_one_process(n_pes, capsys):
    tables = train(n_pes)
    assert all(torch.equal(table, tables[0]) for table in tables)
    assert "trained: as on one process" in capsys.readouterr().out


def test_training_learns():
    (trained,) = train(1, ())
    words, ids = SPARSE.number_words(SPARSE.read_text(), SPARSE.SIMULATED["vocabulary"])
    batch = SPARSE.draw(ids, len(words), 0, 200)
    table = SPARSE.make_table(*trained.shape, "cpu")
    before, _ = SPARSE.gradient(table, batch, len(batch))
    table.weight.data.copy_(trained)
    after, _ = SPARSE.gradient(table, batch, len(batch))
    assert before == pytest.approx((1 + SPARSE.NEGATIVES) * math.log(2), rel=0.02)  # nothing learnt: all scores are 0
    assert after < 0.99 * before


@pytest.mark.parametrize(
    "wrong",
    [
        lambda grad, ctx, summed: grad.coalesce(),
        lambda grad, ctx, summed: summed(grad, ctx, op="mean"),
        lambda grad, ctx, summed: summed(grad * (ctx.rank != 0), ctx),
    ],
    ids=["own gradient only", "mean of the sums", "one rank's is lost"],
)
def test_training_that_sums_wrongly_is_caught(wrong, monkeypatch):
    summed = tdcoll.sparse_all_reduce
    monkeypatch.setattr(tdcoll, "sparse_all_reduce", lambda grad, ctx, **_: wrong(grad, ctx, summed))
    with pytest.raises(AssertionError, match="not close"):
        train(2)


def test_ranks_that_differ_in_one_bit_are_caught(monkeypatch):
    descend = SPARSE.descend

    def differ(table, grad, rate):
        descend(table, grad, rate)
        if runtime.current().rank == 1:
            table.weight.data.view(torch.int32)[3, 1] ^= 1

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
def test_runs_that_differ_are_caught(more, name, monkeypatch):
    monkeypatch.setattr(DDP, "gather", lambda own: [own, own])
    model, dense = (DDP.ClickModel(20, 4, "cpu", sparse=sparse) for sparse in (True, False))
    losses = torch.ones(8)
    DDP.check_same("case", model, losses, dense, torch.ones(8))
    (losses if name == "losses" else model.get_parameter(name).data).view(-1)[7] += more
    with pytest.raises(AssertionError, match=rf"case: {name} differ from those of dense training: .*not close"):
        DDP.check_same("case", model, losses, dense, torch.ones(8))


def test_ddp_ranks_that_differ_in_one_bit_are_caught(monkeypatch):
    model, dense = (DDP.ClickModel(20, 4, "cpu", sparse=sparse) for sparse in (True, False))

    def gather(own):
        other = own.clone()
        if own.shape == (20, 4):
            other.view(torch.int32)[3, 1] ^= 1
        return [own, other]

    monkeypatch.setattr(DDP, "gather", gather)
    with pytest.raises(AssertionError, match=r"case: the ranks have different bits in users\.weight"):
        DDP.check_same("case", model, torch.ones(2), dense, torch.ones(2))
