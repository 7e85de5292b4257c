# SPDX-License-Identifier: Apache-2.0
"""The tutorial on the sparse all-reduce: it runs, its arithmetic is right, and its checks fail when they should."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from changes import load_changed

import tdcoll
from tdcoll.testing import World

SPARSE = Path(__file__).resolve().parents[2] / "tutorials" / "03-sparse-all-reduce.py"
SMALL = ("--vocabulary", "100", "--dim", "4", "--batch", "6", "--steps", "3")


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory):
    return load_changed(SPARSE, tmp_path_factory.mktemp("tutorial"))


@pytest.fixture(scope="module")
def text(tutorial):
    return tutorial.Text(tutorial.read_text(), 100)


# ---------------------------------------------------------------------- as a reader runs it


def test_runs(launch):
    done = launch("--simulate", "--nproc", "2", str(SPARSE), *SMALL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == [
        "2 rank(s) on 1 node(s) (2)",
        "text",
        "first batch, of a table of 200 rows of 16 bytes",
        "contributors",
        "most used",
        "this rank's gradient",
        "integers",
        "torch.distributed",
        "too small a context",
        "grow=True",
        "moved",
        "losses",
        "tables",
        "all ranks",
    ]
    assert "integers: owner, gather, dense give exactly the sum" in done.stdout
    assert "over the context's capacity of 1" in done.stdout
    steps = [line.split() for line in lines if line.startswith(" ") and line.split()[0] in "012" and "." in line]
    assert [step[0] for step in steps] == ["0", "1", "2"]
    assert all(step[1] == step[2] for step in steps)  # the loss, and that of one process
    assert all(float(step[5]) < float(step[6]) for step in steps)  # moved, and dense


@pytest.mark.gpu
def test_runs_on_gpus(launch):
    done = launch(str(SPARSE), timeout=280)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


# ---------------------------------------------------------------------- the text


@pytest.mark.parametrize("module", ["topics", "no_such_module"], ids=["topics", "sources"])
def test_text_is_zipfian(tmp_path, module):
    tutorial = load_changed(SPARSE, tmp_path, ("import topics", f"import {module} as topics"))
    text = tutorial.Text(tutorial.read_text(), 1000)
    assert len(text.ids) > 30_000
    counts = torch.bincount(text.ids, minlength=1000).double()
    assert len(counts) == 1000
    assert all(more >= less for more, less in pairwise(counts.tolist()))  # numbered by frequency
    slope = math.log(counts[999] / counts[9]) / math.log(1000 / 10)
    assert -1.3 < slope < -0.7
    if module == "topics":
        assert text.words[0] == "the"


def test_words_of_a_text(tutorial):
    text = tutorial.Text("To be, or not to be: that is THE question. Be!", 3)
    assert text.words == ["be", "to", "or"]
    assert text.ids.tolist() == [1, 0, 2, 1, 0, 0]
    assert text.noise.tolist() == pytest.approx([3**0.75, 2**0.75, 1])
    assert [text.name(row) for row in (0, 3)] == ["'be' as centre", "'be' as neighbour"]


def test_batches_hold_neighbours(tutorial, text):
    batch = tutorial.draw(text, 5, 400)
    assert torch.equal(batch, tutorial.draw(text, 5, 400))
    assert not torch.equal(batch, tutorial.draw(text, 6, 400))
    assert batch.shape == (400, 2 + tutorial.NEGATIVES)
    assert batch[:, 0].max() < len(text.words) <= batch[:, 1:].min()
    assert batch.max() < 2 * len(text.words)
    ids = text.ids.tolist()
    near = {(ids[i], ids[i + away]) for i in range(2, len(ids) - 2) for away in (-2, -1, 1, 2)}
    pairs = [(centre, neighbour - len(text.words)) for centre, neighbour in batch[:, :2].tolist()]
    assert set(pairs) <= near
    negatives = {(centre, other - len(text.words)) for centre, *others in batch[:, [0, 2]].tolist() for other in others}
    assert not negatives <= near


# ---------------------------------------------------------------------- arithmetic


def random_shares(world, seed):
    generator = random.Random(seed)
    return [torch.tensor([int(20 * generator.random() ** 2) for _ in range(12)]) for _ in range(world)]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_rows_moved_is_what_messages_count(tutorial, world):
    for seed in range(10):
        shares = random_shares(world, seed)
        holders: dict[int, set[int]] = {}
        for rank, share in enumerate(shares):
            for row in share.tolist():
                holders.setdefault(row, set()).add(rank)
        messages = [(rank, min(having)) for having in holders.values() for rank in having if rank != min(having)]
        messages += [(min(having), rank) for having in holders.values() for rank in range(world) if rank != min(having)]
        rows, counts = tutorial.contributors(shares)
        assert rows.tolist() == sorted(holders)
        assert counts.tolist() == [len(holders[row]) for row in sorted(holders)]
        assert tutorial.rows_moved(counts, world) == len(messages)
        ids = sum(8 * (4 + len(set(share.tolist()))) * (world - 1) for share in shares)
        assert tutorial.bytes_moved(shares, 48) == pytest.approx((48 * len(messages) + ids) / world)


def test_dense_bytes_are_a_rings(tutorial):
    # A ring of 4: reduce-scatter and all-gather, 3 steps each, in which every rank sends a quarter.
    assert tutorial.dense_bytes_moved(1000, 64, 4) == (3 + 3) * 64_000 / 4
    assert tutorial.dense_bytes_moved(1000, 64, 1) == 0


def test_gradient_is_the_sum_over_the_shares(tutorial, text):
    table = tutorial.make_table(text, 8, torch.device("cpu")).double()
    batch = tutorial.draw(text, 0, 60)
    loss, grad = tutorial.gradient(table, batch, 60)
    parts = [tutorial.gradient(table, share, 60) for share in batch.chunk(4)]
    assert grad.layout == torch.sparse_coo
    assert grad._nnz() == batch.numel()
    torch.testing.assert_close(sum(part for part, _ in parts), loss, rtol=1e-14, atol=0)
    torch.testing.assert_close(sum(part.to_dense() for _, part in parts), grad.to_dense(), rtol=0, atol=1e-16)
    # And it is the gradient: the dense one, of the loss written another way.
    weight = table.weight.detach().clone().requires_grad_()
    vectors = weight[batch]
    scores = torch.einsum("pd,pkd->pk", vectors[:, 0], vectors[:, 1:])
    right = torch.cat([scores[:, :1].sigmoid(), 1 - scores[:, 1:].sigmoid()], dim=1)
    (-right.log().sum() / 60).backward()
    torch.testing.assert_close(grad.to_dense(), weight.grad, rtol=1e-12, atol=1e-16)


def test_training_learns(tutorial):
    text = tutorial.Text(tutorial.read_text(), tutorial.SIMULATED["vocabulary"])
    alone = tutorial.Alone(tutorial.make_table(text, tutorial.SIMULATED["dim"], torch.device("cpu")), 30.0)
    pairs = 4 * tutorial.SIMULATED["batch"]
    losses = [alone.step(tutorial.draw(text, step, pairs)) for step in range(30)]
    assert losses[0] == pytest.approx((1 + tutorial.NEGATIVES) * math.log(2), rel=0.01)  # nothing learnt: all scores 0
    assert losses[tutorial.SIMULATED["steps"] - 1] < 0.98 * losses[0]
    assert sum(losses[-5:]) / 5 < 0.85 * losses[0]
    assert 0 < alone.allowed < alone.least  # a lost row would show


def test_descending_in_another_order_stays_within_what_rounding_allows(tutorial, text):
    """And it is not allowed much more: a table that is off by one row of one step is refused."""
    device = torch.device("cpu")
    table, alone = tutorial.make_table(text, 8, device), tutorial.Alone(tutorial.make_table(text, 8, device), 30.0)
    for step in range(8):
        batch = tutorial.draw(text, step, 64)
        alone.step(batch)
        _, grad = tutorial.gradient(table, batch.flip(0), 64)
        tutorial.descend(table, grad.coalesce(), 30.0)
    assert 0 < tutorial.check_tables(table, alone) < alone.allowed
    with torch.no_grad():
        table.weight[17, 3] += 0.99 * alone.least
    with pytest.raises(AssertionError, match="the table differs by"):
        tutorial.check_tables(table, alone)


def test_plot(tutorial, text, tmp_path):
    pytest.importorskip("matplotlib")
    tutorial.plot(tmp_path / "batch.png", text, tutorial.draw(text, 0, 40).chunk(4))
    assert (tmp_path / "batch.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------- checks that can fail


def test_exact_check_fails_on_wrong_results(tutorial):
    shares = [torch.tensor([4, 1, 4]), torch.tensor([2, 1, 1])]
    parts = tutorial.integer_parts(shares, 2)
    assert all(torch.equal(part, part.round()) and part.abs().max() <= 8 for part in parts)
    right = torch.zeros(6, 2)
    for share, part in zip(shares, parts, strict=True):
        right.index_add_(0, share, part)
    rows = torch.tensor([[1, 2, 4]])

    def check(indices, values):
        result = torch.sparse_coo_tensor(indices, values, (6, 2), is_coalesced=True, check_invariants=True)
        tutorial.check_exact("case", result, shares, parts, (6, 2))

    check(rows, right[rows[0]])
    wrong = right[rows[0]].clone()
    wrong[1, 0] += 1
    with pytest.raises(AssertionError, match=r"case: 1 of 6 numbers are wrong; number 0 of row 2 is"):
        check(rows, wrong)
    with pytest.raises(AssertionError, match="case: 2 rows, which are not the 3 of the union"):
        check(rows[:, :2], right[rows[0, :2]])
    loose = torch.sparse_coo_tensor(rows, right[rows[0]], (6, 2), check_invariants=True)
    with pytest.raises(AssertionError, match="coalesced: False"):
        tutorial.check_exact("case", loose, shares, parts, (6, 2))


def train(tutorial: ModuleType, n_pes: int) -> list[torch.Tensor]:
    """The tutorial's training on the simulator, in this process: the table of each rank."""
    options = tutorial.parse(list(SMALL))
    text = tutorial.Text(tutorial.read_text(), options.vocabulary)
    world = World(n_pes)

    def host(pe):
        capacity = options.batch * (2 + tutorial.NEGATIVES)
        words = tdcoll.CollectiveContext(max_bytes_per_rank=32)
        ctx = tdcoll.SparseContext(max_rows_per_rank=capacity, max_row_bytes=4 * options.dim)
        return tutorial.train(text, options, ctx, words, lambda line: None).weight.detach()

    return world.run(host)


@pytest.mark.parametrize("n_pes", [1, 3])
def test_training_is_the_same_as_on_one_process(tutorial, n_pes):
    tables = train(tutorial, n_pes)
    assert all(torch.equal(table, tables[0]) for table in tables)


SUM = 'tdcoll.sparse_all_reduce(grad, ctx, algorithm="owner", copy=False)'


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param((SUM, "grad.coalesce()"), "the loss is", id="own gradient only"),
        pytest.param((SUM, SUM.replace("copy", 'op="mean", copy')), "the loss is", id="mean of the sums"),
        pytest.param((SUM, SUM.replace("grad,", "grad * (rank != 0),")), "the loss is", id="one rank's is lost"),
    ],
)
def test_training_that_sums_wrongly_is_caught(tmp_path, change, complaint):
    with pytest.raises(AssertionError, match=complaint):
        train(load_changed(SPARSE, tmp_path, change), 2)


def test_ranks_that_differ_in_one_bit_are_caught(tutorial):
    def differing(bit):
        def host(pe):
            tensor = torch.ones(100, 3)
            tensor.view(torch.int32)[70, 1] ^= bit if pe == 2 else 0
            words = tdcoll.CollectiveContext(max_bytes_per_rank=32)
            tutorial.check_same_everywhere("ones", tensor, words)

        return host

    World(3).run(differing(0))
    with pytest.raises(AssertionError, match=r"ones: rank\(s\) \[2\] have other bits than rank 0"):
        World(3).run(differing(1))


def test_context_that_takes_too_many_rows_is_caught(tutorial):
    def host(pe):
        rows = torch.full((1, 3), pe)  # one row, three times
        grad = torch.sparse_coo_tensor(rows, torch.ones(3, 4), (9, 4), check_invariants=True)
        tutorial.try_small_context(grad, 16, lambda line: None)

    with pytest.raises(AssertionError, match="took a gradient with more"):
        World(2).run(host)


@pytest.mark.parametrize(("option", "value"), [("--steps", "0"), ("--dim", "x"), ("--batch", "-1")])
def test_options_are_checked(tutorial, capsys, option, value):
    with pytest.raises(SystemExit):
        tutorial.parse([option, value])
    assert f"{option}: expected a whole number from 1, got '{value}'" in capsys.readouterr().err
