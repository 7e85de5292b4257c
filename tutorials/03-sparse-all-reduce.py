# SPDX-License-Identifier: Apache-2.0
"""
Sparse all-reduce
=================

A step of an embedding model uses few of its rows, and the gradient of all other rows is zero. This tutorial
trains word vectors on real text, on several ranks, and moves only the rows that are there. You will learn

* what a row-sparse gradient looks like: duplicates, union, contributors,
* how `tdcoll.sparse_all_reduce` sums it, and what of that is exact,
* how much is moved, compared with an all-reduce of the whole table,
* how to size its context, and what happens when it is too small.

Run it with

    bash launch.sh tutorials/03-sparse-all-reduce.py

which starts one process per GPU, or four simulated ones with a small vocabulary on a machine without GPUs.
`--vocabulary`, `--dim`, `--batch` and `--steps` change the sizes; `--plot FILE.png` draws who has which rows.
"""

# %%
# The text
# --------
#
# Every Python brings some: the manual pages behind `help()`, about 64,000 words of English. Where a distribution
# has left them out, the sources of its standard library will do. Either way, the words are used as words in
# real text are: the r-th most frequent one about 1/r times as often as the first. That is *Zipf's law*, and it
# decides what follows, as it does for users, products and everything else that gets embedded.

import argparse
import hashlib
import importlib.util
import re
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import tdcoll


def read_text():
    """The documentation that Python carries, or else the sources of its standard library."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        sources = sorted(Path(argparse.__file__).parent.glob("*.py"))
        return "\n".join(source.read_text(encoding="utf-8", errors="ignore") for source in sources)
    return "\n".join(topics[name] for name in sorted(topics))


class Text:
    """The words of a text as numbers, the most frequent word first; those beyond the vocabulary are left out.

    `words`: the vocabulary. `ids [n]`: the text. `noise [words]`: how likely each word is as a negative example.
    """

    def __init__(self, text, vocabulary):
        found = re.findall("[a-z]+", text.lower())
        common = Counter(found).most_common(vocabulary)
        self.words = [word for word, _ in common]
        number = {word: i for i, word in enumerate(self.words)}
        self.ids = torch.tensor([number[word] for word in found if word in number])
        self.noise = torch.tensor([float(count) for _, count in common]).pow(0.75)

    def name(self, row):
        """Of a row of the table below."""
        place = "neighbour" if row >= len(self.words) else "centre"
        return f"'{self.words[row % len(self.words)]}' as {place}"


# %%
# The model
# ---------
#
# Skip-gram with negative sampling, the model of word2vec. A word w has two vectors, one for when it is in the
# centre and one for when it is a neighbour. The score of a pair is their dot product, which shall be high for
# words that stand close to each other in the text, and low for NEGATIVES words that were drawn at random.
#
# Both vectors are rows of *one* table: row w, and row V + w. So there is one gradient per step and one call that
# sums it. (That is a good idea wherever a model has several tables of the same width.)

NEGATIVES, WINDOW = 5, 2


def draw(text, step, pairs):
    """``-> [pairs, 2 + NEGATIVES]`` rows of the table: centre, neighbour, negatives. The same on every rank."""
    generator = torch.Generator().manual_seed(step)
    at = torch.randint(WINDOW, len(text.ids) - WINDOW, (pairs, 1), generator=generator)
    away = torch.randint(1, WINDOW + 1, (pairs, 1), generator=generator)
    away *= 2 * torch.randint(0, 2, (pairs, 1), generator=generator) - 1
    negatives = torch.multinomial(text.noise, pairs * NEGATIVES, replacement=True, generator=generator)
    others = torch.cat([text.ids[at + away], negatives.view(pairs, NEGATIVES)], dim=1)
    return torch.cat([text.ids[at], len(text.words) + others], dim=1)


def make_table(text, dim, device):
    """Both vectors of every word, with the same start on every rank."""
    generator = torch.Generator().manual_seed(2013)
    start = 0.1 * torch.randn(2 * len(text.words), dim, generator=generator)
    return nn.Embedding.from_pretrained(start.to(device), freeze=False, sparse=True)


# %%
# The gradient
# ------------
#
# With `sparse=True` the backward pass of an embedding returns a `torch.sparse_coo` tensor: `indices [1, n]` says
# which rows, `values [n, dim]` what to add there, and all other rows are zero without being stored. There is one
# entry *for every lookup*. A word that was looked up five times has five, with the same index; PyTorch calls that
# *uncoalesced*, and `coalesce()` sorts the entries and adds up equal ones.
#
# Each rank computes the loss of its share of the batch, divided by the number of pairs in the *whole* batch. Then
# the loss of the batch is the sum over the ranks, and so is its gradient. (If yours divides by its own share, pass
# `op="mean"`.) The scores are in fp32; adding up the losses in fp64 costs nothing and keeps the order out of it.


def gradient(table, rows, pairs):
    """Loss of ``rows [n, 2 + NEGATIVES]``, a share of a batch of so many pairs, and the table's sparse gradient."""
    vectors = table(rows)
    scores = (vectors[:, :1] * vectors[:, 1:]).sum(dim=2)
    signs = torch.ones_like(scores)
    signs[:, 0] = -1
    loss = nn.functional.softplus(signs * scores).double().sum() / pairs
    loss.backward()
    grad, table.weight.grad = table.weight.grad, None
    return loss.detach(), grad


# %%
# The step of gradient descent touches the rows of the sum and no others. In a coalesced tensor each index occurs
# once, so no two additions meet in one place, and `index_add_` gives the same bits every time. (`torch.optim.SGD`
# takes such gradients as well: put the sum into `table.weight.grad`.)


@torch.no_grad()
def descend(table, grad, rate):
    table.weight.index_add_(0, grad.indices()[0], grad.values(), alpha=-rate)


# %%
# Who has which rows
# ------------------
#
# Three numbers describe such a gradient: the rows of each rank, without duplicates; their *union* over the ranks,
# U rows; and for each row of the union its *contributors*, the c_u ranks that have it. Frequent words have all
# ranks as contributors, rare ones mostly a single one.


def contributors(shares):
    """``-> rows [U], counts [U]``: the union of the ranks' rows, and how many ranks have each."""
    return torch.unique(torch.cat([torch.unique(share) for share in shares]), return_counts=True)


# %%
# What has to be moved
# --------------------
#
# `sparse_all_reduce` has one of the contributors of each row reduce it: the others' parts come in, c_u - 1 rows,
# and the sum goes out to all other ranks, W - 1 rows. That makes sum(c_u - 1) + U (W - 1) rows over the wire, in
# all, and no way of first reducing a row in one place and then sending it out takes less. The ids go first: each
# rank sends its own to all others, 8 bytes a row and a header of 32.
#
# A dense all-reduce of the N rows moves 2 (W - 1) / W N rows *per rank*, whatever the gradient holds: that is what
# a ring takes, and the least that any dense all-reduce does without help from the switch.


def rows_moved(counts, world):
    """Rows that an all-reduce of a union with ``counts [U]`` contributors sends, all ranks together."""
    return int((counts - 1).sum()) + len(counts) * (world - 1)


def bytes_moved(shares, row_bytes):
    """The same in bytes per rank, on average, with the ids."""
    world = len(shares)
    own = sum(len(torch.unique(share)) for share in shares)
    ids = (8 * own + 32 * world) * (world - 1)
    return (rows_moved(contributors(shares)[1], world) * row_bytes + ids) / world


def dense_bytes_moved(table_rows, row_bytes, world):
    """Bytes per rank of a ring all-reduce of the whole table."""
    return 2 * (world - 1) * table_rows * row_bytes / world


def describe(text, shares, grad):
    """The table of the first batch: what each rank has, and together. ``grad`` is this rank's own."""
    world = len(shares)
    union, counts = contributors(shares)
    lines = [f"{'rank':>8}{'lookups':>10}{'rows':>8}{'duplicates':>12}"]
    lookups, own = [share.numel() for share in shares], [len(torch.unique(share)) for share in shares]
    for rank in range(world):
        lines.append(f"{rank:8}{lookups[rank]:10}{own[rank]:8}{lookups[rank] - own[rank]:12}")
    lines.append(f"{'union':>8}{sum(lookups):10}{len(union):8}{sum(lookups) - len(union):12}")
    spread = ", ".join(f"{int((counts == c).sum())} rows have {c}" for c in range(1, world + 1))
    lines.append(f"contributors: {spread}")
    looked_up = torch.bincount(torch.cat([share.flatten() for share in shares]), minlength=len(text.words) * 2)
    top = looked_up.argsort(descending=True, stable=True)[:5].tolist()
    names = ", ".join(f"{looked_up[row]} × {text.name(row)}" for row in top)
    lines.append(f"most used: {names}")
    lines.append(f"this rank's gradient: {list(grad.shape)}, {grad._nnz()} entries, coalesced: {grad.is_coalesced()}")
    return "\n".join(lines)


# %%
# An exact check
# --------------
#
# Floating-point sums depend on their order, so a comparison of them needs a tolerance, and a tolerance may hide a
# mistake. Sums of small integers do not: below 2^24 every one of them is exact in fp32, in any order. So first the
# pattern of the real gradient, with integers for values. Whatever algorithm moves them, the result has to be what
# one process gets from all ranks' entries, number by number.
#
# "owner" is the one above. "gather" sends all rows everywhere and adds them up on arrival: more bytes, fewer
# steps, for small gradients. "dense" makes a dense tensor of it, for gradients that have nearly all rows.
# "auto", the default, chooses.


def integer_parts(shares, dim):
    """One entry for each lookup of each rank, as the gradient has, but with integers from -8 to 8."""
    generator = torch.Generator().manual_seed(7)
    shape = (shares[0].numel(), dim)
    return [torch.randint(-8, 9, shape, generator=generator).float().to(share.device) for share in shares]


def check_exact(name, result, shares, parts, shape):
    """Raise unless ``result`` is, bit by bit, the sum of all ranks' ``parts``."""
    indices = torch.cat([share.flatten() for share in shares])
    expected = torch.sparse_coo_tensor(indices[None], torch.cat(parts), shape, check_invariants=True).coalesce()
    if not result.is_coalesced() or result.shape != expected.shape:
        raise AssertionError(f"{name}: {result.shape}, coalesced: {result.is_coalesced()}; expected {expected.shape}")
    if not torch.equal(result.indices(), expected.indices()):
        raise AssertionError(f"{name}: {result._nnz()} rows, which are not the {expected._nnz()} of the union")
    wrong = (result.values() != expected.values()).nonzero()
    if len(wrong):
        i, d = wrong[0].tolist()
        raise AssertionError(
            f"{name}: {len(wrong)} of {expected.values().numel()} numbers are wrong; number {d} of row "
            f"{int(expected.indices()[0, i])} is {result.values()[i, d]:g} and should be {expected.values()[i, d]:g}"
        )


# %%
# What else could do it?
# ----------------------
#
# `torch.distributed.all_reduce` takes sparse tensors where its backend does. On CPUs gloo gathers all entries of all
# ranks everywhere. NCCL, on GPUs, refuses, and DDP with it: `nn.Embedding(sparse=True)` cannot be trained on
# several GPUs that way at all.


def ask_torch(tensor):
    """``(sum, None)`` from torch.distributed, or ``(None, message)`` if it refuses."""
    tensor = tensor.clone()
    try:
        dist.all_reduce(tensor)
    except RuntimeError as error:
        if tensor.device.type != "cuda":
            raise
        return None, str(error).splitlines()[0]
    return tensor.coalesce(), None


# %%
# Sizing the context
# ------------------
#
# A `SparseContext` has two capacities. `max_row_bytes` is the width of a row. `max_rows_per_rank` is how many
# *different* rows one rank may bring to a call. It cannot be more than the lookups that a rank makes in a step, nor
# than the rows of the table; the smaller of the two is safe, needs no measuring, and is what the training below
# uses. Where memory is short, take what you have measured and some more: real text has far fewer. (A third one,
# `max_union_rows`, bounds the union; the default is W times as many, and the rows of the table are always enough.)
#
# A call that brings more is an error, on all ranks, even on those that are below it, and says what is needed. With
# `grow=True` it makes the context larger and goes on instead, which waits for the GPU and allocates: good while you
# are finding out, less so in the middle of a training run.


def try_small_context(grad, row_bytes, say):
    """A context for one row refuses the gradient; one that may grow takes it, which is returned."""
    with tdcoll.SparseContext(max_rows_per_rank=1, max_row_bytes=row_bytes) as small:
        try:
            tdcoll.sparse_all_reduce(grad, small)
        except tdcoll.ContextError as error:
            message = str(error)
        else:
            raise AssertionError("a context for one row per rank took a gradient with more")
        say(f"too small a context: ContextError: {message}")
    with tdcoll.SparseContext(max_rows_per_rank=1, max_row_bytes=row_bytes, grow=True) as growing:
        result = tdcoll.sparse_all_reduce(grad, growing)
        growing.check()
        say(f"grow=True: grown from 1 to {growing.max_rows_per_rank} rows per rank")
    return result


# %%
# The same on all ranks?
# ----------------------
#
# Each row is summed in one place, in the order of the ranks, and the result is sent to everybody. So all ranks
# make the same step, and their tables stay the same to the last bit, for ever; nothing has to be broadcast now
# and then. A hash of the bytes says so: 32 bytes of each rank, all-gathered.


def digest(tensor):
    """SHA-256 of a tensor's bytes, ``[4]`` int64."""
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return torch.frombuffer(bytearray(hashlib.sha256(data).digest()), dtype=torch.int64).to(tensor.device)


def check_same_everywhere(name, tensor, words):
    """Raise unless all ranks have the same bits in ``tensor``. ``words`` is a context for an all-gather of 32 bytes."""
    digests = tdcoll.all_gather(digest(tensor), words).view(words.world_size, 4)
    differ = (digests != digests[0]).any(dim=1).nonzero().flatten().tolist()
    if differ:
        raise AssertionError(f"{name}: rank(s) {differ} have other bits than rank 0")


# %%
# The same as on one process?
# ---------------------------
#
# Every rank also trains a second table, alone, on the whole batch. The two agree up to rounding, because they add
# the same numbers in another order. How much is that? The sum of a gradient can be had in fp64 as well, where
# rounding is negligible, and the difference is what fp32 has lost. Then the update is rounded to a number of
# the table's size, an error of up to EPS times that. `rounding` is the largest of both over the table.
#
# The errors of different steps have nothing to do with each other, so they add up as the steps of a random walk:
# by the root of the sum of their squares. We allow 4 times that. The 4 is room for there being two tables, for
# unlucky steps, and for errors that later steps enlarge. Beside it the training prints what a mistake would do: the
# least that a step has changed any row by, which is what would be missing if that row had been lost.
#
# The losses are means of numbers that carry a few roundings each, and a mean has no more than its terms.

EPS = torch.finfo(torch.float32).eps
LOSS_TOLERANCE = 16 * EPS


def rounding(table, grad, rate):
    """About how far rounding puts an entry of the table off in the step with this gradient, at most."""
    lost = (grad.coalesce().values() - grad.double().coalesce().values()).abs().max()
    return float(rate * lost + EPS * table.weight.detach().abs().max())


class Alone:
    """The same training on one process. ``allowed``: how far a table may be off after these steps.

    ``least``: the least that a step has changed the largest entry of a row by.
    """

    def __init__(self, table, rate):
        self.table, self.rate = table, rate
        self.squares, self.least = 0.0, float("inf")

    def step(self, batch):
        """The loss of the batch, of which it makes one step."""
        loss, grad = gradient(self.table, batch, len(batch))
        self.squares += rounding(self.table, grad, self.rate) ** 2
        grad = grad.coalesce()
        self.least = min(self.least, self.rate * float(grad.values().abs().amax(dim=1).min()))
        descend(self.table, grad, self.rate)
        return float(loss)

    @property
    def allowed(self):
        return 4 * self.squares**0.5


def check_tables(table, alone):
    """Raise if the table differs from the one trained alone by more than rounding; the largest difference."""
    difference = float((table.weight - alone.table.weight).detach().abs().max())
    if not difference <= alone.allowed:
        raise AssertionError(
            f"the table differs by {difference:.2g} from one trained on one process, and rounding explains "
            f"{alone.allowed:.2g}"
        )
    return difference


# %%
# The training
# ------------
#
# Two lines are all that distributing it takes: the share, and the sum. `copy=False` returns the values where the
# ranks have put them, in the context's symmetric memory, instead of a copy; they are valid until the next call on
# the context, which overwrites them. Here the step is over by then: `descend` is on the same stream, before it.
#
# The algorithm is named so that what is printed as moved is what was moved. Leave it away in your own code.


def train(text, options, ctx, words, say):
    """Train on all ranks and, for comparison, alone. Raises if they differ; the table."""
    world, rank = ctx.world_size, ctx.rank
    table = make_table(text, options.dim, ctx.device)
    alone = Alone(make_table(text, options.dim, ctx.device), options.rate)
    row_bytes = table.weight[0].nbytes
    dense = dense_bytes_moved(len(table.weight), row_bytes, world)
    total_moved, off = 0.0, 0.0
    say(f"{'step':>8}{'loss':>10}{'alone':>10}{'rows/rank':>11}{'union':>8}{'KB moved':>10}{'dense':>10}")
    for step in range(options.steps):
        batch = draw(text, step, world * options.batch).to(ctx.device)
        shares = batch.chunk(world)

        loss, grad = gradient(table, shares[rank], len(batch))
        grad = tdcoll.sparse_all_reduce(grad, ctx, algorithm="owner", copy=False)
        descend(table, grad, options.rate)

        loss = float(tdcoll.all_gather(loss, words).sum())
        expected = alone.step(batch)
        off = max(off, abs(loss / expected - 1))
        if not off <= LOSS_TOLERANCE:
            raise AssertionError(f"step {step}: the loss is {loss!r}, and {expected!r} on one process")

        rows = sum(len(torch.unique(share)) for share in shares) / world
        union = len(contributors(shares)[0])
        moved = bytes_moved(shares, row_bytes)
        total_moved += moved
        say(f"{step:8}{loss:10.5f}{expected:10.5f}{rows:11.0f}{union:8}{moved / 1e3:10.1f}{dense / 1e3:10.1f}")
    ctx.check()
    words.check()
    mean = total_moved / options.steps
    times = f", {dense / mean:.1f} times as much" if mean else ""
    say(f"moved: {mean / 1e3:.1f} KB per rank and step on average; dense it would be {dense / 1e3:.1f}{times}")
    difference = check_tables(table, alone)
    say(f"losses: equal one process's within {off:.1g} of them, {LOSS_TOLERANCE:.1g} allowed")
    say(
        f"tables: equal one process's within {difference:.1g}, {alone.allowed:.1g} allowed (a row lost in some "
        f"step would be off by at least {alone.least:.1g})"
    )
    check_same_everywhere("the tables", table.weight, words)
    say(f"all ranks: the same bits in their tables of {list(table.weight.shape)}")
    return table


# %%
# A picture
# ---------
#
# `--plot FILE.png` draws the first batch: on the left how many rows each rank has and how many there are together;
# on the right all rows of the union from the most used to the least, how often each was looked up, and how many
# ranks have it. Both axes are logarithmic, and Zipf's law is a straight line on them.


def plot(path, text, shares):
    """Rows per rank and union; lookups and contributors of each row, by rank of frequency."""
    from matplotlib.figure import Figure

    shares = [share.cpu() for share in shares]
    rows, counts = contributors(shares)
    lookups = torch.bincount(torch.cat([share.flatten() for share in shares]), minlength=2 * len(text.words))[rows]
    order = lookups.argsort(descending=True, stable=True)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 2])
    own = [len(torch.unique(share)) for share in shares]
    left.bar([*map(str, range(len(shares))), "union"], [*own, len(rows)], color=["C0"] * len(shares) + ["C1"])
    left.set(xlabel="rank", ylabel="rows", title=f"rows of a table of {2 * len(text.words)}")
    place = range(1, len(rows) + 1)
    right.plot(place, lookups[order], color="C0", label="lookups, all ranks")
    right.plot(place, counts[order], ".", color="C1", markersize=4, label="ranks that have it")
    right.set_xscale("log")
    right.set_yscale("log", base=2)
    right.xaxis.set_major_formatter("{x:g}")
    right.yaxis.set_major_formatter("{x:g}")
    right.set(xlabel="rows of the union, from the most used to the least", title="who has which rows")
    right.legend()
    figure.savefig(path, dpi=120)


# %%
# The story
# ---------

SIMULATED = {"vocabulary": 500, "dim": 16, "batch": 24, "steps": 8}
ON_GPUS = {"vocabulary": 4000, "dim": 128, "batch": 512, "steps": 30}


def parse(arguments=None):
    def positive(text):
        if not text.isdigit() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
        return int(text)

    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=positive, metavar="N", help="words, at most as many as the text has")
    parser.add_argument("--dim", type=positive, metavar="N", help="numbers in a vector")
    parser.add_argument("--batch", type=positive, metavar="N", help="pairs of words per rank and step")
    parser.add_argument("--steps", type=positive, metavar="N")
    parser.add_argument("--rate", type=float, default=30.0, help="of learning; the loss is a mean over the batch")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the first batch (needs matplotlib)")
    options = parser.parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib is not installed")
    return options


def main():
    options = parse()
    tdcoll.initialize()
    topology, device = tdcoll.topology(), tdcoll.device()
    rank, world = topology.rank, topology.world_size
    for name, size in (ON_GPUS if device.type == "cuda" else SIMULATED).items():
        if getattr(options, name) is None:
            setattr(options, name, size)

    def say(text):
        tdcoll.barrier()  # so that it is true of all ranks: one that failed is not here
        if rank == 0:
            print(text, flush=True)

    say(topology.describe())
    words = tdcoll.CollectiveContext(max_bytes_per_rank=32)
    text = Text(read_text(), options.vocabulary)
    batch = draw(text, 0, world * options.batch)
    check_same_everywhere("the text", text.ids.to(device), words)
    check_same_everywhere("the first batch", batch.to(device), words)
    common = " ".join(text.words[:8])
    say(f"text: {len(text.ids)} words, {len(text.words)} different ones, most often: {common}")

    # The first batch. `shares[r]` is what rank r looks up.
    table = make_table(text, options.dim, device)
    row_bytes = table.weight[0].nbytes
    shares = batch.to(device).chunk(world)
    _, grad = gradient(table, shares[rank], len(batch))
    say(f"first batch, of a table of {len(table.weight)} rows of {row_bytes} bytes:\n{describe(text, shares, grad)}")
    if options.plot:
        if rank == 0:
            plot(options.plot, text, shares)
        say(f"plot: {options.plot}")

    # Integers in place of the values.
    parts = integer_parts(shares, options.dim)
    mine = torch.sparse_coo_tensor(grad._indices(), parts[rank], grad.shape, check_invariants=True)
    capacity = min(shares[0].numel(), len(table.weight))
    with tdcoll.SparseContext(max_rows_per_rank=capacity, max_row_bytes=row_bytes) as ctx:
        algorithms = ("owner", "gather", "dense")
        for algorithm in algorithms:
            result = tdcoll.sparse_all_reduce(mine, ctx, algorithm=algorithm)
            ctx.check()  # waits for the stream; raises CollectiveTimeout if a peer did not answer
            check_exact(algorithm, result, shares, parts, grad.shape)
        say(f"integers: {', '.join(algorithms)} give exactly the sum of all entries, {result._nnz()} rows")
        result, refusal = ask_torch(mine)
        if refusal is None:
            check_exact("torch.distributed", result, shares, parts, grad.shape)
            say(f"torch.distributed: {dist.get_backend()} gives the same")
        else:
            say(f"torch.distributed refuses: {refusal}")
        check_exact("grow=True", try_small_context(mine, row_bytes, say), shares, parts, grad.shape)
        train(text, options, ctx, words, say)
    words.close()
    tdcoll.finalize()


if __name__ == "__main__":
    main()
