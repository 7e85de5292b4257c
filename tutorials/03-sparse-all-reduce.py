# SPDX-License-Identifier: Apache-2.0
"""
Sparse all-reduce
=================

A training step of an embedding model uses few rows of its table, and the gradient of all other rows is zero. This
tutorial trains word vectors on real text, on several ranks, and moves only the rows that are there. You will learn

* what a row-sparse gradient looks like: duplicates, union, contributors,
* how `tdcoll.sparse_all_reduce` sums it, and how to check that exactly,
* how to size its context, and what happens if it is too small,
* how many bytes it moves, compared with an all-reduce of the whole table.

Run it with the following command, or :doc:`from an installed wheel <index>`::

    bash launch.sh tutorials/03-sparse-all-reduce.py

which starts one process per GPU, or four simulated ones with a small vocabulary on a machine without GPUs. The command
`bash launch.sh -m tdcoll bench sparse_all_reduce` measures times.
"""

# %%
# The text
# --------
#
# Every Python comes with some: the manual pages behind `help()`, or the sources of its standard library. As in any
# text, the r-th most frequent word occurs about 1/r times as often as the first (*Zipf's law*). All ranks therefore
# use the frequent rows, and a rare row of a batch is mostly used by a single rank.

import argparse
import re
from collections import Counter
from pathlib import Path

import torch
from helpers import say
from torch import nn

import tdcoll
from tdcoll.language import INTERPRETED


def read_text():
    try:
        from pydoc_data.topics import topics
    except ImportError:
        sources = sorted(Path(argparse.__file__).parent.glob("*.py"))
        return "\n".join(source.read_text(encoding="utf-8", errors="ignore") for source in sources)
    return "\n".join(topics[name] for name in sorted(topics))


def number_words(text, vocabulary):
    """Return the most frequent words of `text`, at most `vocabulary`, and the text as their numbers `[n]`."""
    found = re.findall("[a-z]+", text.lower())
    words = [word for word, _ in Counter(found).most_common(vocabulary)]
    number = {word: i for i, word in enumerate(words)}
    return words, torch.tensor([number[word] for word in found if word in number])


# %%
# The model
# ---------
#
# The model is that of word2vec. Each word has two vectors, one for when it is in the centre and one for when it is a
# neighbour. The score of a pair is the dot product of the two. Training makes it high for words that stand close to
# each other in the text, and low for NEGATIVES words that are drawn at random.
#
# Both vectors are rows of *one* table: row w, and row V + w, where V is the number of words. One call per step then
# sums all gradients, which is a good idea wherever a model has several tables of the same width.

NEGATIVES, WINDOW, RATE = 5, 2, 10.0


def draw(ids, vocabulary, step, pairs):
    """Return `[pairs, 2 + NEGATIVES]` rows of the table: centre, neighbour, negatives; equal on every rank."""
    generator = torch.Generator().manual_seed(step)
    at = torch.randint(WINDOW, len(ids) - WINDOW, (pairs, 1), generator=generator)
    away = torch.randint(1, WINDOW + 1, (pairs, 1), generator=generator)
    away *= 2 * torch.randint(0, 2, (pairs, 1), generator=generator) - 1
    anywhere = torch.randint(0, len(ids), (pairs, NEGATIVES), generator=generator)
    return torch.cat([ids[at], vocabulary + ids[at + away], vocabulary + ids[anywhere]], dim=1)


def make_table(rows, dim, device):
    start = 0.1 * torch.randn(
        rows, dim, generator=torch.Generator().manual_seed(2013)
    )  # the same on every rank
    return nn.Embedding.from_pretrained(start.to(device), freeze=False, sparse=True)


# %%
# The gradient
# ------------
#
# With `sparse=True`, the backward pass of an embedding returns a `torch.sparse_coo` tensor: `indices [1, n]` says
# which rows have entries, and `values [n, dim]` what to add there. There is one entry *per lookup*. A word that was
# looked up five times has five entries with the same index; PyTorch calls such a tensor *uncoalesced*, and
# `coalesce()` sorts the entries and adds up those of the same row.
#
# Each rank computes the loss of its share of the batch, divided by the number of pairs in the *whole* batch. The sum
# over the ranks is then the loss of the batch, and the sum of their gradients is its gradient. If your loss is a mean
# over the rank's own share, pass `op="mean"` to the all-reduce.


def gradient(table, rows, pairs):
    """Return the loss of `rows [n, 2 + NEGATIVES]`, a share of a batch of `pairs`, and the table's sparse gradient."""
    vectors = table(rows)
    scores = (vectors[:, :1] * vectors[:, 1:]).sum(dim=2)
    signs = torch.ones_like(scores)
    signs[:, 0] = -1
    loss = nn.functional.softplus(signs * scores).double().sum() / pairs
    loss.backward()
    grad, table.weight.grad = table.weight.grad, None
    return loss.detach().float(), grad


# %%
# The result of the all-reduce is coalesced, so the step of gradient descent adds to each row once. (`torch.optim.SGD`
# accepts such gradients too: put the result into `table.weight.grad`.)


@torch.no_grad()
def descend(table, grad):
    table.weight.index_add_(0, grad.indices()[0], grad.values(), alpha=-RATE)


# %%
# Contributors of rows, and traffic
# ---------------------------------
#
# The *union* is the set of rows that any rank has, U of them. The *contributors* of row u are the c_u ranks that have
# it. The algorithm "owner" lets one contributor of each row reduce it: c_u - 1 rows come in, and the sum goes out to
# the W - 1 other ranks. Before that, every rank sends the numbers of its rows to all others, 8 bytes each. A ring
# all-reduce of the whole table moves 2 (W - 1) / W times its N rows per rank, however few of them are used.


def contributors(shares):
    """Return the number of contributors of each row of the union, `[U]`."""
    return torch.unique(torch.cat([torch.unique(share) for share in shares]), return_counts=True)[1]


def bytes_moved(shares, table):
    """Return the bytes per rank, on average, of the sparse all-reduce and of a dense one."""
    world, row_bytes, counts = len(shares), table.weight[0].nbytes, contributors(shares)
    rows = int((counts - 1).sum()) + len(counts) * (world - 1)
    numbers = int(counts.sum()) * (world - 1)
    return (rows * row_bytes + 8 * numbers) / world, 2 * (world - 1) / world * len(
        table.weight
    ) * row_bytes


def describe(shares):
    for rank, share in enumerate(shares):
        rows = len(torch.unique(share))
        say(
            f"  rank {rank}: {share.numel()} lookups of {rows} rows, {share.numel() - rows} duplicates"
        )
    counts = contributors(shares)
    spread = ", ".join(f"{int((counts == c).sum())} have {c}" for c in range(1, len(shares) + 1))
    say(f"  union: {len(counts)} rows; contributors: {spread}")


# %%
# An exact check
# --------------
#
# Floating-point sums need a tolerance, and a tolerance can hide a mistake. Sums of small integers are exact in any
# order, so we give integers to the entries of a real gradient. The result has to be what one process gets from the
# entries of all ranks, whatever algorithm moves them. "owner" is the one above. "gather" sends all rows everywhere and
# adds them up there, and "dense" all-reduces a dense tensor. The default, "auto", chooses one.


def integers(shares, dim):
    """Return `[lookups, dim]` integers from -8 to 8 for each rank."""
    generator = torch.Generator().manual_seed(7)
    parts = [torch.randint(-8, 9, (share.numel(), dim), generator=generator) for share in shares]
    return [part.float().to(share.device) for part, share in zip(parts, shares, strict=True)]


def check_exact(name, result, shares, parts):
    """Raise unless `result` is the coalesced sum of the `parts` of all ranks."""
    indices = torch.cat([share.flatten() for share in shares])
    expected = torch.sparse_coo_tensor(
        indices[None], torch.cat(parts), result.shape, check_invariants=True
    ).coalesce()
    if not result.is_coalesced() or not torch.equal(result.indices(), expected.indices()):
        raise AssertionError(
            f"{name}: expected the {expected._nnz()} rows of the union in order, got {result._nnz()}"
        )
    wrong = int((result.values() != expected.values()).sum())
    if wrong:
        raise AssertionError(f"{name}: {wrong} of {expected.values().numel()} numbers are wrong")


# %%
# Sizing the context
# ------------------
#
# You size a `SparseContext` by `max_row_bytes`, the width of a row, and `max_rows_per_rank`, the number of
# *different* rows that one rank may bring to a call. The number of its lookups, or of the table's rows if that is
# less, is always enough, as is the default of `max_union_rows`. If a rank brings more, all ranks raise `ContextError`
# with the number that is needed. With `grow=True` the call enlarges the context, which waits for the GPU and allocates.


def try_small_contexts(grad, row_bytes):
    """Return the sum by a context that had to grow; one that may not has to refuse."""
    with tdcoll.SparseContext(max_rows_per_rank=1, max_row_bytes=row_bytes) as small:
        try:
            tdcoll.sparse_all_reduce(grad, ctx=small)
        except tdcoll.ContextError as error:
            say(f"too small a context: ContextError: {error}")
        else:
            raise AssertionError("a context for one row per rank took a gradient with more")
    with tdcoll.SparseContext(max_rows_per_rank=1, max_row_bytes=row_bytes, grow=True) as growing:
        result = tdcoll.sparse_all_reduce(grad, ctx=growing)
        growing.check()
        say(f"grow=True: grown from 1 to {growing.max_rows_per_rank} rows per rank")
    return result


# %%
# The training
# ------------
#
# Distributing the training takes two lines: the share, and the sum. `copy=False` returns the values as a view of the
# context's symmetric memory, which the next call on the context overwrites. Here the step is over by then. We name the
# algorithm so that the bytes which are printed are those that were moved; leave it out in your own code.
#
# Every rank also trains a second table, alone, on the whole batch. The two agree up to the rounding of fp32, because
# they add the same numbers in another order. The tables of different ranks have the same *bits*, and keep them, because
# each row is summed in one place and all ranks get that sum.


def train(ids, vocabulary, options, ctx):
    """Train on all ranks and, for comparison, alone; raise if the two differ. Return the table."""
    world, rank, moved = ctx.world_size, ctx.rank, []
    table, alone = (make_table(2 * vocabulary, options.dim, ctx.device) for _ in range(2))
    with tdcoll.CollectiveContext(max_bytes_per_rank=table.weight.nbytes) as gathers:
        for step in range(options.steps):
            batch = draw(ids, vocabulary, step, world * options.batch).to(ctx.device)
            shares = batch.chunk(world)
            loss, grad = gradient(table, shares[rank], len(batch))
            descend(table, tdcoll.sparse_all_reduce(grad, ctx=ctx, algorithm="owner", copy=False))

            loss = tdcoll.all_gather(loss, ctx=gathers).sum()
            expected, grad = gradient(alone, batch, len(batch))
            descend(alone, grad.coalesce())
            torch.testing.assert_close(loss, expected)
            moved.append(bytes_moved(shares, table))
            say(f"  step {step}: loss {loss:.5f}, alone {expected:.5f}")
        ctx.check()
        torch.testing.assert_close(table.weight, alone.weight)
        gathered = tdcoll.all_gather(table.weight.detach().flatten(), ctx=gathers).view(
            world, *table.weight.shape
        )
        gathers.check()
    if not all(torch.equal(theirs, table.weight) for theirs in gathered):
        raise AssertionError("the ranks' tables differ")
    sparse, dense = (sum(part) / len(moved) / 1024 for part in zip(*moved, strict=True))
    say("trained: as on one process up to rounding, and the tables of all ranks have the same bits")
    say(
        f"moved: {sparse:.1f} KB per rank and step; an all-reduce of the dense table moves {dense:.1f} KB"
    )
    return table


# %%
# The whole program
# -----------------

SIMULATED = {"vocabulary": 500, "dim": 16, "batch": 24, "steps": 8}
ON_GPUS = {"vocabulary": 4000, "dim": 128, "batch": 512, "steps": 30}


def parse(arguments=None):
    parser = argparse.ArgumentParser()
    for name, size in (SIMULATED if INTERPRETED else ON_GPUS).items():
        parser.add_argument(
            f"--{name}", type=int, default=size, metavar="N", help=f"default: {size}"
        )
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    tdcoll.initialize()
    topology, device = tdcoll.topology(), tdcoll.device()
    rank, world = topology.rank, topology.world_size
    say(topology.describe())
    words, ids = number_words(read_text(), options.vocabulary)
    say(f"text: {len(ids)} words, {len(words)} different ones, most often: {' '.join(words[:8])}")

    # The first batch. `shares[r]` is what rank r looks up.
    table = make_table(2 * len(words), options.dim, device)
    row_bytes = table.weight[0].nbytes
    shares = draw(ids, len(words), 0, world * options.batch).to(device).chunk(world)
    _, grad = gradient(table, shares[rank], world * options.batch)
    say(f"first batch, of a table of {len(table.weight)} rows of {row_bytes} bytes:")
    describe(shares)
    say(
        f"  this rank's gradient: {list(grad.shape)}, {grad._nnz()} entries, coalesced: {grad.is_coalesced()}"
    )

    parts = integers(shares, options.dim)
    mine = torch.sparse_coo_tensor(grad._indices(), parts[rank], grad.shape, check_invariants=True)
    with tdcoll.SparseContext(max_rows_per_rank=shares[0].numel(), max_row_bytes=row_bytes) as ctx:
        for algorithm in ("owner", "gather", "dense"):
            result = tdcoll.sparse_all_reduce(mine, ctx=ctx, algorithm=algorithm)
            ctx.check()  # waits for the stream; raises CollectiveTimeout if a peer did not answer
            check_exact(algorithm, result, shares, parts)
        say(
            f"integers: owner, gather, dense give exactly the sum of all entries, {result._nnz()} rows"
        )
        check_exact("grow=True", try_small_contexts(mine, row_bytes), shares, parts)
        train(ids, len(words), options, ctx)
    tdcoll.finalize()


if __name__ == "__main__":
    main()
