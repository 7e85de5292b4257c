# SPDX-License-Identifier: Apache-2.0
"""
Sparse embeddings under DistributedDataParallel
===============================================

Tutorial 03 called the sparse all-reduce itself. Most training code uses `DistributedDataParallel`, which sends every
gradient through `torch.distributed`. This tutorial trains a model with large embedding tables that way: with sparse
gradients in three ways, and with dense gradients as usual. You will learn

* what changes in a training script: one string, and `sparse=True` for the tables,
* which calls tdcoll handles, which ones fall back to NCCL or gloo, and how to find out,
* when to use the hook or the reducer instead of the backend,
* how to check that all of them train the same model.

Run it with the following command, or :doc:`from an installed wheel <index>`::

    bash launch.sh tutorials/04-sparse-embedding-ddp.py

which starts one process per GPU, or four simulated ones with small tables on a machine without GPUs.
"""

# %%
# The model
# ---------
#
# The model predicts whether a user clicks on an item. It looks up a row for each of the two and for the item's shop,
# and a small network scores them. The first two tables are large, and a batch uses few of their rows; the third is
# smaller and narrower. Everything else is dense.

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tdcoll
import tdcoll.distributed
from tdcoll.language import INTERPRETED

SHOPS = 100


class ClickModel(nn.Module):
    """Scores of pairs, `[n], [n] -> [n]`. Starts with the same weights on every rank."""

    def __init__(self, rows, dim, device, *, sparse):
        super().__init__()
        torch.manual_seed(2003)
        self.users = nn.Embedding(rows, dim, sparse=sparse)
        self.items = nn.Embedding(rows, dim, sparse=sparse)
        self.shops = nn.Embedding(SHOPS, dim // 2, sparse=sparse)
        self.score = nn.Sequential(
            nn.Linear(2 * dim + dim // 2, 4 * dim), nn.GELU(), nn.Linear(4 * dim, 1)
        )
        self.to(device)

    def forward(self, users, items):
        rows = self.users(users), self.items(items), self.shops(items % SHOPS)
        return self.score(torch.cat(rows, dim=1)).flatten()


def draw(rows, step, count, device):
    """Return users, items and clicks `[count]` of one step; the same on every rank. Few users and items are popular."""
    generator = torch.Generator().manual_seed(step)
    users, items = (rows * torch.rand(2, count, generator=generator) ** 4).long().to(device)
    return users, items, (items % 2).float()


# %%
# The training loop
# -----------------
#
# This loop could be in any script. The only line that knows of tdcoll is the one for a reducer, which comes last in
# this tutorial. The optimizer is SGD, for which sparse and dense gradients mean the same. They don't for Adam, where
# `torch.optim.SparseAdam` leaves the moments of unused rows alone and `Adam` lets them decay.


def train(model, batches, rate, reducer=None):
    """Train on this rank's share of the batches; return the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for batch in batches:
        users, items, clicks = (part.chunk(world)[rank] for part in batch)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(users, items), clicks)
        loss.backward()
        if reducer is not None:
            reducer.finish()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


# %%
# Four ways to make the gradients equal
# -------------------------------------
#
# **The backend** is the least to write. The script says::
#
#     dist.init_process_group("tdcoll")           # was "nccl"
#     model = DistributedDataParallel(model)      # as before, now with nn.Embedding(..., sparse=True)
#
# and DDP's all-reduces of sparse gradients run in tdcoll's kernels. With "nccl" the first step would fail, because NCCL
# has no all-reduce for sparse tensors.
#
# **Dense** is the usual way around that: `sparse=False` and a gradient as large as the table, mostly zeros, that is
# written, all-reduced and read in every step. We need it for comparison. A process has one default group and any number
# of others with other backends, so we give this model a group of NCCL's, or of gloo's on CPUs.
#
# **The hook** is for process groups that have to stay NCCL's, because a framework makes them, for example. DDP then
# hands each bucket of gradients to the hook. Sparse ones go to tdcoll, dense ones through the group as before.
#
# **The reducer** handles the tables by itself and leaves the rest to DDP, if there is any. DDP requires every sparse
# table to be used on every rank in every step, also with the hook. The reducer doesn't.
#
# The backend gets the gradient of one table at a time from DDP, and makes a call for each. The hook and the reducer
# have all of them before the optimizer's step, and reduce them by one call, as `tdcoll.sparse_all_reduce` does with a
# list of tensors of any widths. The host then launches the kernels of one call and waits once, however many tables
# there are. Prefer them for models with many tables.
#
# With the hook or the reducer, call `tdcoll.initialize()` after `init_process_group("nccl")`. Here the backend has
# joined the job already.


def make_model(way, rows, dim, device, group):
    """Return the model of one of `WAYS`, wrapped in DDP, and its reducer or None."""
    model, reducer = ClickModel(rows, dim, device, sparse=way != "dense"), None
    if way == "reducer":
        reducer = tdcoll.distributed.SparseGradientReducer(
            model, group
        )  # before DDP, which then ignores the tables
    model = DistributedDataParallel(model, process_group=None if way == "backend" else group)
    if way == "hook":
        model.register_comm_hook(group, tdcoll.distributed.sparse_hook)
    return model, reducer


WAYS = ("dense", "backend", "hook", "reducer")

# %%
# Checking the models
# -------------------
#
# DDP averages the gradients of the ranks, and every rank's loss is the mean over its share, so all four ways compute
# the gradient of the whole batch. They may add in different orders. The losses and weights must therefore agree up to
# the rounding of fp32, which is the tolerance of `torch.testing.assert_close`.
#
# The ranks of one run must agree in every bit, because each started from the same weights, and a difference would
# never be corrected.


def gather(tensor):
    """Return the tensors of all ranks."""
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor)
    return pieces


def check_same(way, model, losses, dense_model, dense_losses):
    """Raise unless a run has trained what the dense run has, and the same bits on every rank."""

    def differ(what):
        return lambda message: f"{way}: {what} differ from those of dense training: {message}"

    torch.testing.assert_close(losses, dense_losses, msg=differ("losses"))
    for name, weight in model.named_parameters():
        expected = dense_model.get_parameter(name)
        torch.testing.assert_close(weight, expected, msg=differ(name))
        if not all(torch.equal(theirs, weight) for theirs in gather(weight.detach())):
            raise AssertionError(f"{way}: the ranks have different bits in {name}")


# %%
# Handled and fallen back
# -----------------------
#
# `tdcoll.distributed.explain(group)` tells you in words; without an argument it is about the default group. Look at it
# first if a job is slower than expected. It lists
#
# * the kinds of calls that tdcoll handles, up to which size, and the memory that they have taken. If tdcoll can't run
#   here, for example because NVSHMEM is missing, the reason stands in their place: the job goes on without tdcoll.
# * the fallback backend, NCCL for tensors on GPUs and gloo for tensors on CPUs, which gets everything else: other
#   kinds, larger calls, and other dtypes.
# * the number of calls so far. Over the backend, DDP makes one sparse all-reduce per table and step, which is checked
#   below. The gradients of the dense layers come in buckets, each a dense all-reduce.
#
# The logger "tdcoll" has a line at level INFO for the first call of each kind, and at DEBUG the algorithm that was
# chosen for each size. docs/distributed.md has the rest: gradient accumulation, GradScaler, clipping, timeouts, limits.
# `bash launch.sh -m tdcoll bench sparse_all_reduce` measures the calls on your machine.

SIMULATED = {"rows": 2000, "dim": 8, "batch": 32, "steps": 6}
ON_GPUS = {"rows": 200_000, "dim": 64, "batch": 1024, "steps": 20}


def main(arguments=None):
    parser = argparse.ArgumentParser()
    for name, size in (SIMULATED if INTERPRETED else ON_GPUS).items():
        parser.add_argument(
            f"--{name}", type=int, default=size, metavar="N", help=f"default: {size}"
        )
    parser.add_argument("--rate", type=float, default=2.0, help="of learning")
    options = parser.parse_args(arguments)

    if not INTERPRETED:  # the simulator has no GPUs
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("tdcoll")
    world, device = dist.get_world_size(), tdcoll.device()
    usual = "gloo" if INTERPRETED else "nccl"
    group = dist.new_group(backend=usual)

    def say(text):
        dist.barrier()  # one that failed is not here
        if dist.get_rank() == 0:
            print(text, flush=True)

    say(tdcoll.topology().describe())
    batches = [
        draw(options.rows, step, world * options.batch, device) for step in range(options.steps)
    ]
    runs = {}
    for way in WAYS:
        model, reducer = make_model(way, options.rows, options.dim, device, group)
        losses = train(model, batches, options.rate, reducer)
        runs[way] = model.module, torch.stack(gather(losses)).mean(dim=0)
        if way == "backend":
            dist.all_reduce(
                torch.zeros(5 << 20, device=device)
            )  # 20 MB, as the gradient of a large layer: falls back
            explained = tdcoll.distributed.explain()
        check_same(way, *runs[way], *runs["dense"])
        if reducer is not None:
            reducer.close()
        listed = " ".join(f"{loss:.4f}" for loss in runs[way][1].tolist()[:6])
        say(f"{way}: losses {listed} ..., the same bits on all ranks")
    say(f"the losses and weights equal those of dense training over {usual}")
    say(explained)
    if f" {3 * options.steps} sparse_all_reduce by tdcoll" not in explained:
        raise AssertionError(
            f"expected {3 * options.steps} sparse all-reduces by tdcoll: three tables in every step"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
