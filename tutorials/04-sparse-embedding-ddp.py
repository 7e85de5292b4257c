# SPDX-License-Identifier: Apache-2.0
"""
Sparse embeddings under DistributedDataParallel
===============================================

Tutorial 03 called the sparse all-reduce itself. Code that exists does not: it has `DistributedDataParallel`, which
sends every gradient through `torch.distributed`. This tutorial trains a language model with a large table that way,
once over tdcoll with the table's gradient sparse, and once in the usual way with the same gradient dense. You will
learn

* what changes in a training script: one string, and `sparse=True` where it could not stand before,
* what is served by which side, and what happens to the dense layers,
* how much is moved, and on GPUs how long a step takes and what of the communication the backward pass hides,
* when to use the hook or the reducer instead.

Run it with

    bash launch.sh tutorials/04-sparse-embedding-ddp.py

which starts one process per GPU, or four simulated ones with a small table on a machine without GPUs. `--rows`,
`--dim`, `--batch` and more change the sizes; `--plot FILE.png` draws the losses and the bytes, `--json FILE` writes
what was found, `--trace FILE.json` what rank 0's GPU did when.
"""

# %%
# The text
# --------
#
# It is tutorial 03's, and so is the arithmetic of what is moved. The name of that file is no identifier, so it is
# imported by hand.

import argparse
import gc
import importlib.util
import json
import logging
import os
import tempfile
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tdcoll
import tdcoll.distributed
from tdcoll.bench.provenance import provenance


def load(path):
    spec = importlib.util.spec_from_file_location("sparse_tutorial", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sparse_tutorial = load(Path(__file__).with_name("03-sparse-all-reduce.py"))

# %%
# The model
# ---------
#
# It predicts the next word from the CONTEXT words before it. A few residual blocks do that, and beside them the
# model has a *memory*: a table with a row for every sequence of 2, 3 or 4 words. There are far too many of those to
# number them. So a sequence is hashed to one of the rows, and a larger table has fewer that share a row: two million
# rows are not out of place, and a step uses the few thousand that the batch looks up.
#
# The rows are added to what the blocks pass on, and *where* matters here. The backward pass runs from the output to
# the input. A table at the input gets its gradient last of all, and nothing is left behind which its all-reduce could
# hide. This one enters above the first `--before` blocks, so that their backward pass is still to come. (On GPUs
# `--before 0` shows the other case.)

CONTEXT = 4
ORDERS = (2, 3, 4)
PRIME = 2**31 - 1


def hashed(context, rows):
    """``[n, CONTEXT] -> [n, len(ORDERS)]``: rows of the memory for the last 2, 3 and 4 words."""
    found = []
    for order in ORDERS:
        number = torch.full_like(context[:, 0], order)
        for word in context[:, -order:].unbind(1):
            number = (number * 1_000_003 + word + 1) % PRIME
        found.append(number % rows)
    return torch.stack(found, dim=1)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        return x + self.inner(x)


class LanguageModel(nn.Module):
    """Scores of every word to be the next one, ``[n, CONTEXT] -> [n, vocabulary]``. The same start on every rank.

    `sparse` says what the gradient of the memory is. The words' own vectors are few and all of them are used, so
    their gradient is dense in any case.
    """

    def __init__(self, options, device, *, sparse, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(2003)
        dim = options.dim
        self.words = nn.Embedding(CONTEXT * options.vocabulary, dim)
        nn.init.normal_(self.words.weight, std=0.1)
        self.before = nn.Sequential(*[Block(dim) for _ in range(options.before)])
        nothing = torch.zeros(options.rows, dim, device=device, dtype=dtype)  # is known of any sequence yet
        self.memory = nn.Embedding.from_pretrained(nothing, freeze=False, sparse=sparse)
        self.after = nn.Sequential(*[Block(dim) for _ in range(options.after)])
        self.out = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, options.vocabulary))
        self.register_buffer("places", torch.arange(CONTEXT) * options.vocabulary, persistent=False)
        self.to(device, dtype)

    def forward(self, context):
        x = self.before(self.words(context + self.places).sum(dim=1))
        x = x + self.memory(hashed(context, self.memory.num_embeddings)).sum(dim=1)
        return self.out(self.after(x))


def draw(text, step, count):
    """``-> context [count, CONTEXT], target [count]``: places in the text. The same on every rank."""
    generator = torch.Generator().manual_seed(step)
    at = torch.randint(CONTEXT, len(text.ids), (count,), generator=generator)
    return text.ids[at[:, None] + torch.arange(-CONTEXT, 0)], text.ids[at]


# %%
# A step
# ------
#
# This is the loop of any training script; there is nothing of tdcoll in it, and it is the same code for all runs
# below. The optimiser is plain gradient descent, for which a sparse and a dense gradient mean the same. (They do not
# for Adam: `torch.optim.SparseAdam` leaves the moments of unused rows alone, `Adam` lets them decay. The curves would
# differ for that reason alone.) A row of the memory is used by few examples of a batch, whose loss is a mean: so it
# gets a larger rate.


def make_optimizer(model, options):
    others = [parameter for name, parameter in model.named_parameters() if not name.startswith("memory.")]
    memory = {"params": [model.memory.weight], "lr": options.rate * options.memory_rate}
    return torch.optim.SGD([{"params": others}, memory], lr=options.rate)


def train_step(model, optimizer, context, target):
    """One step of gradient descent; the loss before it."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(context), target, reduction="none").double().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(model, optimizer, batches):
    """The losses, ``[steps]`` fp64."""
    return torch.stack([train_step(model, optimizer, context, target) for context, target in batches])


# %%
# One string
# ----------
#
# What a script with a sparse table has to change:
#
#     import tdcoll.distributed
#     dist.init_process_group("tdcoll")              # was "nccl"
#     model = DistributedDataParallel(model)         # as it was, with nn.Embedding(..., sparse=True)
#
# With "nccl" the third line fails at the first step, because NCCL has no all-reduce of sparse tensors. So there the
# table's gradient is dense: as large as the table, nearly all zeros, written, all-reduced and read in every step.
#
# The comparison needs both. A process has one *default* process group, made by `init_process_group`, and as many
# others as it likes, each with a backend of its own. So tdcoll is the default, and the other run gets a group that is
# NCCL's (gloo's on CPUs) and nothing else: PyTorch's own, not the fallback backend that tdcoll hands calls over to.
# The two train one after the other, so that neither disturbs the other.
#
# `gradient_as_bucket_view` spares DDP a copy of the dense gradients, 4 GB for the large table. The dense run shall be
# as fast as it can be.


def distribute(model, group):
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


# %%
# Who serves what
# ---------------
#
# `tdcoll.distributed.explain(group)` says it in words, without an argument of the default group. Below it is printed
# after the first run, and means:
#
# * `all_gather`, `all_reduce`, `reduce_scatter`, `sparse_all_reduce`, `barrier`: tdcoll's kernels, with the memory that
#   they have reserved; or, where they cannot run, the fallback backend and why. (Look there if a job is
#   slower than expected: a missing NVSHMEM does not end it.)
# * everything else goes to the fallback backend, NCCL for tensors on GPUs and gloo for those on CPUs. So do calls
#   that are larger than a kind's limit. DDP puts the gradients of the dense layers into buckets and all-reduces those:
#   tdcoll serves a bucket up to the limit of `all_reduce`, and hands a larger one over.
# * how often each was called so far: one sparse all-reduce per step, which is checked.
#
# The logger "tdcoll" has a line at level INFO for the first call of each kind.


# %%
# The same losses?
# ----------------
#
# DDP averages the gradients over the ranks. Every rank's loss is the mean of its share, all shares are equally large,
# so that is the gradient of the mean over the whole batch: what *one* process would compute with all of it. Both runs
# have to give its losses, up to rounding, because they add the same numbers in another order.
#
# How much is rounding? One process trains on the whole batch twice, in fp32 and in fp64, where rounding is
# negligible. The difference is what fp32 has cost, everything included: sums, updates, and what later steps have made
# of earlier errors. A distributed run makes as many roundings, in another order, so it is allowed ROOM times that:
# for the largest of the errors of all steps, and for the largest of all entries of the weights. ROOM is for luck
# (the largest of many errors hardly varies by more), and a loss may be off by a few roundings of its own besides.
# The yardstick does not come from the runs that it measures, so a run that is wrong cannot widen it.

EPS = torch.finfo(torch.float32).eps
LOSS_TOLERANCE = 4 * EPS
ROOM = 4


def differences(model, exact):
    """Of the weights, ``(memory, all others)``, each the largest of all entries; NaN if there is one."""
    of = {"memory": [], "others": []}
    for (name, mine), right in zip(model.named_parameters(), exact.parameters(), strict=True):
        part = of["memory" if name.startswith("memory.") else "others"]
        for a, b in zip(mine.detach().split(1 << 16), right.detach().split(1 << 16), strict=True):
            part.append((a.double() - b).abs().max())  # in pieces: no copy of the whole table in fp64
    return tuple(float(torch.stack(part).max()) for part in of.values())


class Yardstick:
    """What one process gets: `losses` of the fp64 run, and how far off them and its weights fp32 may be."""

    def __init__(self, options, device, batches):
        self.exact = LanguageModel(options, device, sparse=True, dtype=torch.float64)
        exact = train(self.exact, make_optimizer(self.exact, options), batches)
        alone = LanguageModel(options, device, sparse=True)
        rounded = train(alone, make_optimizer(alone, options), batches)
        self.losses = exact.tolist()
        self.loss_allowed = ROOM * float((rounded / exact - 1).abs().max()) + LOSS_TOLERANCE
        self.weights_allowed = [ROOM * difference for difference in differences(alone, self.exact)]

    def check(self, name, losses, model):
        """Raise unless a run agrees; how far off it is: of the losses (relative), of memory and other weights."""
        off = [abs(loss / exact - 1) for loss, exact in zip(losses, self.losses, strict=True)]
        for step, difference in enumerate(off):
            if not difference <= self.loss_allowed:  # NaN is not
                raise AssertionError(
                    f"{name}: in step {step} the loss is {losses[step]!r}, and {self.losses[step]!r} on one process; "
                    f"that is off by {difference:.2g}, and rounding explains {self.loss_allowed:.2g}"
                )
        weights = differences(model, self.exact)
        for part, difference, allowed in zip(("memory", "others"), weights, self.weights_allowed, strict=True):
            if not difference <= allowed:
                raise AssertionError(
                    f"{name}: weights ({part}) differ by {difference:.2g} from those of one process, and rounding "
                    f"explains {allowed:.2g}"
                )
        return max(off), *weights


# %%
# The same on all ranks?
# ----------------------
#
# DDP makes the weights equal once, in the beginning, and relies on equal gradients from then on. The memory began
# with zeros, so the rows that are not zero are the ones that were trained; a hash of their numbers and bits is 32
# bytes per rank. (The all-gather of the hashes is another call that the backend serves.)


def gather(tensor):
    """``[...] -> [world, ...]``."""
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor)
    return torch.stack(pieces)


def check_same_everywhere(name, memory):
    """Raise unless all ranks have the same bits in the memory; the number of rows that were trained."""
    memory = memory.detach()
    trained = memory.any(dim=1).nonzero()[:, 0]
    bits = torch.cat([trained, memory[trained].view(torch.int32).flatten()])
    digests = gather(sparse_tutorial.digest(bits))
    differ = (digests != digests[0]).any(dim=1).nonzero().flatten().tolist()
    if differ:
        raise AssertionError(f"{name}: rank(s) {differ} have other bits than rank 0 in the memory")
    return len(trained)


# %%
# What was moved
# --------------
#
# Computed, as in tutorial 03: from the rows that each rank has, and for the dense gradient what a ring all-reduce
# takes. DDP cannot name the algorithm of the sparse all-reduce, so tdcoll chooses, and says so in its log. Up to
# 64 KiB per rank it is "gather": everybody sends its rows to everybody. For all that is larger it is "owner".
#
# The dense layers' gradients are as many bytes in both runs, in DDP's buckets.


def table_bytes_moved(algorithm, shares, row_bytes):
    """Bytes per rank of one sparse all-reduce, on average; ``shares[r]`` are the rows that rank r looks up."""
    if algorithm == "owner":
        return sparse_tutorial.bytes_moved(shares, row_bytes)
    if algorithm != "gather":
        raise AssertionError(f"the sparse all-reduce took another algorithm than owner or gather: {algorithm}")
    world = len(shares)
    own = sum(len(torch.unique(share)) for share in shares)
    return (own * (row_bytes + 8) + 32 * world) * (world - 1) / world


def dense_layers_bytes(model):
    return sum(weight.nbytes for name, weight in model.named_parameters() if not name.startswith("memory."))


class Log(logging.Handler):
    """What tdcoll says, on rank 0."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logger = logging.getLogger("tdcoll")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())

    def algorithm(self):
        """Of the last sparse all-reduce."""
        return [line.split("algorithm ")[1].split()[0] for line in self.lines if ": algorithm " in line][-1]


# %%
# Time
# ----
#
# Only on GPUs: what the simulator takes says nothing about them. An event before every step and one behind the last;
# the median of what lies between them, without the first steps, and of the slowest rank. Batches are on the GPU
# before. DDP's steps wait for each other, so ranks hardly differ.


def step_times(model, optimizer, batches, warm_up):
    """Milliseconds of each step but the first ``warm_up`` ones."""
    dist.barrier()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    for event, (context, target) in zip(events[:-1], batches, strict=True):
        event.record()
        train_step(model, optimizer, context, target)
    events[-1].record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in pairwise(events)]
    return times[warm_up:]


def slowest_median(times):
    """Of the times of each rank."""
    return max(median(of_rank) for of_rank in times)


# %%
# How much is hidden?
# -------------------
#
# While the backward pass goes on, DDP has asked for the table's sum already. tdcoll makes it on a stream of its own,
# and a step only becomes longer by what is not done when the backward pass is. PyTorch's profiler writes down which
# kernel ran when, on which stream.
#
# The stream of the sparse all-reduce is the one on which its kernels are; all that runs there belongs to it (it also
# sorts and copies), including the time for which a kernel waits for other ranks. It starts when the gradient is
# there, and the optimiser waits for it, so what computes at the same time can only be the rest of the backward pass.
# NCCL's kernels are not computation. The share of the one time that lies within the other is what is hidden.

SPARSE_KERNELS = {"count_first", "write_list", "copy_list", "plan", "reduce", "reduce_nodes"}
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


def merged(spans):
    """Spans of time ``(begin, end)`` as spans that do not overlap, ascending."""
    result = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result


def hidden_us(events):
    """``(hidden, total)`` microseconds of the sparse all-reduce, from the events of a profiler's trace.

    Raises:
        AssertionError: there is no sparse all-reduce in it.
    """
    device = [event for event in events if event.get("cat") in ON_DEVICE]
    streams = {event["args"]["stream"] for event in device if event["name"] in SPARSE_KERNELS}
    if not streams:
        raise AssertionError("the trace has no kernels of the sparse all-reduce")

    def spans(chosen):
        return merged((event["ts"], event["ts"] + event["dur"]) for event in chosen)

    sums = spans(event for event in device if event["args"]["stream"] in streams)
    backward = spans(
        event
        for event in device
        if event["cat"] == "kernel" and event["args"]["stream"] not in streams and not event["name"].startswith("nccl")
    )
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in sums for c, d in backward)
    return both, sum(end - begin for begin, end in sums)


def trace_steps(model, optimizer, batches, path):
    """Trace the steps but the first two, which warm the profiler up; write it to ``path``; the trace's events."""
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=2, active=len(batches) - 2, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for context, target in batches:
            train_step(model, optimizer, context, target)
            torch.cuda.synchronize()
            dist.barrier()  # every step from a common start: waiting for a late rank is not communication
            profiler.step()
    return json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]


# %%
# The hook and the reducer
# ------------------------
#
# Sometimes the process group has to stay NCCL's: a framework makes it, or its options matter. Then DDP can be told
# how to reduce a bucket:
#
#     tdcoll.initialize()                                            # after init_process_group("nccl")
#     model = DistributedDataParallel(model)
#     model.register_comm_hook(None, tdcoll.distributed.sparse_hook)
#
# Sparse buckets go over tdcoll and dense ones as without it. It is the third run below, on the dense run's group.
#
# DDP itself wants every sparse table to be used on every rank in every step, hook or not. Where that does not hold, or
# where DDP is not used at all, take the reducer, which handles the tables alone and leaves the rest to DDP:
#
#     reducer = tdcoll.distributed.SparseGradientReducer(model)      # before DDP
#     model = DistributedDataParallel(model)
#     ...
#     loss.backward()
#     reducer.finish()
#     optimizer.step()
#
# Otherwise the backend is the least to write. docs/distributed.md has the rest: accumulation, GradScaler, limits.
#
# The runs
# --------


class Run:
    """One way to train: its losses, and on GPUs its times. ``group`` is None for the default group, which is tdcoll."""

    def __init__(self, name, options, device, *, sparse, group=None, hook=None):
        self.name, self.sparse = name, sparse
        model = LanguageModel(options, device, sparse=sparse)
        self.optimizer = make_optimizer(model, options)
        self.model = distribute(model, group)
        if hook is not None:
            self.model.register_comm_hook(group, hook)
        self.times = []

    def train(self, shares, yardstick):
        """Train and compare; ``(losses, how far off)``. Raises if it differs from one process."""
        own = train(self.model, self.optimizer, shares)
        self.losses = gather(own).mean(dim=0).tolist()
        self.off = yardstick.check(self.name, self.losses, self.model.module)
        self.trained = check_same_everywhere(self.name, self.model.module.memory.weight)

    def measure(self, shares, warm_up):
        """Times of every rank, ``[world][steps]`` milliseconds."""
        own = step_times(self.model, self.optimizer, shares, warm_up)
        self.times = gather(torch.tensor(own, dtype=torch.float64, device=shares[0][0].device)).tolist()

    def close(self):
        """Give the weights' memory back, so that the next run has it."""
        del self.model, self.optimizer
        gc.collect()  # DDP and its hooks refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def hidden_shares(run, shares, path):
    """``[world][2]``: of each rank what is hidden and the total, microseconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = path if path and dist.get_rank() == 0 else Path(folder) / "trace.json"
        own = torch.tensor(hidden_us(trace_steps(run.model, run.optimizer, shares, wanted)), dtype=torch.float64)
    return (gather(own.to(shares[0][0].device)) / (len(shares) - 2)).tolist()


# %%
# A picture
# ---------


def plot(path, losses, moved, times):
    """Losses of each run; bytes per rank and step of the table's gradient; times where there are any."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * (3 if times else 2), 4.5), layout="constrained")
    left, middle, *right = figure.subplots(1, 3 if times else 2)
    styles = ["-", "--", "-.", ":"]
    for (name, curve), style, width in zip(losses.items(), styles, (6, 4, 2.5, 1.5), strict=True):
        left.plot(curve, style, linewidth=width, alpha=0.7, label=name)
    left.set(xlabel="step", ylabel="loss", title="the same losses")
    left.legend()
    middle.bar(list(moved), [nbytes / 1e6 for nbytes in moved.values()], color=["C1", "C2"])
    middle.set(ylabel="MB per rank and step", title="moved for the table's gradient", yscale="log")
    for axes in right:
        axes.bar(list(times), list(times.values()), color=["C1", "C2", "C3"])
        axes.set(ylabel="ms per step", title="median, slowest rank")
    figure.savefig(path, dpi=120)


# %%
# The story
# ---------

SIMULATED = {
    "vocabulary": 200,
    "rows": 20_000,
    "dim": 64,
    "batch": 32,
    "before": 1,
    "after": 1,
    "steps": 12,
    "rate": 0.3,
    "memory_rate": 100.0,
}
ON_GPUS = {
    "vocabulary": 4000,
    "rows": 2_000_000,
    "dim": 512,
    "batch": 2048,
    "before": 4,
    "after": 1,
    "steps": 20,
    "rate": 0.05,
    "memory_rate": 1000.0,
}
WARM_UP, MEASURED, TRACED = 10, 30, 8
"""Steps: before the measured ones, measured, and in the trace."""


def parse(arguments=None):
    def whole(least):
        def read(text):
            if not text.isdigit() or int(text) < least:
                raise argparse.ArgumentTypeError(f"expected a whole number from {least}, got {text!r}")
            return int(text)

        return read

    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=whole(1), metavar="N", help="words, at most as many as the text has")
    parser.add_argument("--rows", type=whole(1), metavar="N", help="of the memory")
    parser.add_argument("--dim", type=whole(1), metavar="N", help="numbers in a vector")
    parser.add_argument("--batch", type=whole(1), metavar="N", help="examples per rank and step")
    parser.add_argument("--before", type=whole(0), metavar="N", help="blocks below the memory")
    parser.add_argument("--after", type=whole(0), metavar="N", help="blocks above the memory")
    parser.add_argument("--steps", type=whole(1), metavar="N", help="that are compared")
    parser.add_argument("--rate", type=float, metavar="X", help="of learning")
    parser.add_argument("--memory-rate", type=float, metavar="N", help="of the memory, times --rate")
    parser.add_argument("--plot", metavar="FILE.png", help="draw losses and bytes (needs matplotlib)")
    parser.add_argument("--json", metavar="FILE", help="write what was found")
    parser.add_argument("--trace", metavar="FILE.json", help="on GPUs: write rank 0's trace (chrome://tracing)")
    options = parser.parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib is not installed")
    return options


def command_line(sizes, world, local, simulated):
    """What starts this job again, with its sizes."""
    words = ["bash launch.sh", f"--nproc {local}"]
    words += ["--simulate"] if simulated else []
    words += [f"--nnodes {world // local}"] if local < world else []
    words += ["tutorials/04-sparse-embedding-ddp.py"]
    return " ".join(words + [f"--{name.replace('_', '-')} {value}" for name, value in sizes.items()])


def save(path, options, found):
    """Write ``found`` and what it was found with, as JSON. Collective."""
    facts = provenance()
    if dist.get_rank() == 0:
        world, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        sizes = {name: getattr(options, name) for name in SIMULATED}
        head = {
            "tutorial": "04-sparse-embedding-ddp",
            "command": command_line(sizes, world, local, facts["simulated"]),
            "started": found["started"],
            "provenance": facts,
            "sizes": {"world": world, **sizes},
        }
        Path(path).write_text(json.dumps({**head, **found}, indent=1) + "\n", encoding="utf-8")


def main():
    options = parse()
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    log = Log()
    if os.environ.get("TRITON_INTERPRET") != "1":  # the simulator has no GPUs
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("tdcoll")
    rank, world, device = dist.get_rank(), dist.get_world_size(), tdcoll.device()
    on_gpus = device.type == "cuda"
    for name, size in (ON_GPUS if on_gpus else SIMULATED).items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    usual = "nccl" if on_gpus else "gloo"
    usual_group = dist.new_group(backend=usual)

    def say(text):
        dist.barrier()  # so that it is true of all ranks: one that failed is not here
        if rank == 0:
            print(text, flush=True)

    say(tdcoll.topology().describe())
    text = sparse_tutorial.Text(sparse_tutorial.read_text(), options.vocabulary)
    options.vocabulary = len(text.words)
    say(f"text: {len(text.ids)} words, {len(text.words)} different ones")

    def batches(first, steps):
        return [[part.to(device) for part in draw(text, first + i, world * options.batch)] for i in range(steps)]

    def shares(whole):
        return [[part.chunk(world)[rank] for part in batch] for batch in whole]

    checked = batches(0, options.steps)
    row_bytes = 4 * options.dim
    yardstick = Yardstick(options, device, checked)
    say(
        f"model: memory of {options.rows} rows of {row_bytes} bytes, {options.rows * row_bytes / 1e6:.1f} MB; dense "
        f"layers {dense_layers_bytes(yardstick.exact) / 2e6:.1f} MB"
    )

    runs, hidden = {}, None
    for name, choices in {
        "tdcoll, sparse": {"sparse": True},
        f"{usual}, dense": {"sparse": False, "group": usual_group},
        f"{usual} with sparse_hook": {"sparse": True, "group": usual_group, "hook": tdcoll.distributed.sparse_hook},
    }.items():
        run = runs[name] = Run(name, options, device, **choices)
        run.train(shares(checked), yardstick)
        if on_gpus:
            run.measure(shares(batches(options.steps, WARM_UP + MEASURED)), WARM_UP)
        if len(runs) == 1:
            explained, logged = tdcoll.distributed.explain(), list(log.lines)
            if on_gpus:
                hidden = hidden_shares(run, shares(batches(0, TRACED + 2)), options.trace)
        run.close()
    ours, theirs, _ = runs.values()

    # What explain says is text for people; rank 0's is printed. The log has a line for each kind of call.
    say(explained)
    if rank == 0:
        print("\n".join(f"log: {line}" for line in logged if "sparse_all_reduce" in line), flush=True)
    steps = options.steps + (WARM_UP + MEASURED if on_gpus else 0)
    if f" {steps} sparse_all_reduce by tdcoll" not in explained:
        raise AssertionError(f"tdcoll has not served the {steps} sparse all-reduces of {steps} steps")

    say(f"{'step':>8}{'one process':>16}" + "".join(f"{name:>26}" for name in runs))
    for step, exact in enumerate(yardstick.losses):
        say(f"{step:8}{exact:16.9f}" + "".join(f"{run.losses[step]:26.9f}" for run in runs.values()))
    for name, run in runs.items():
        off, memory, others = run.off
        say(
            f"{name}: losses within {off:.1g} of one process's, {yardstick.loss_allowed:.1g} allowed; memory within "
            f"{memory:.1g} ({yardstick.weights_allowed[0]:.1g}), other weights within {others:.1g} "
            f"({yardstick.weights_allowed[1]:.1g})"
        )
    apart = max(abs(a / b - 1) for a, b in zip(ours.losses, theirs.losses, strict=True))
    say(f"losses: of the two backends within {apart:.1g} of each other")
    say(f"all ranks: the same bits in their memories, of which {ours.trained} rows are trained")

    # Rank 0 has the log, and prints.
    found = {"started": started}
    if rank == 0:
        algorithm = log.algorithm()
        looked_up = [hashed(context, options.rows).chunk(world) for context, _ in checked]
        sparse = sum(table_bytes_moved(algorithm, of_step, row_bytes) for of_step in looked_up) / options.steps
        dense = sparse_tutorial.dense_bytes_moved(options.rows, row_bytes, world)
        layers = sparse_tutorial.dense_bytes_moved(1, dense_layers_bytes(yardstick.exact) // 2, world)
        times = f", {dense / sparse:.1f} times as much" if sparse else ""
        print(
            f"moved: {sparse / 1e3:.1f} KB per rank and step for the table, by '{algorithm}'; dense it is "
            f"{dense / 1e3:.1f}{times}; {layers / 1e3:.1f} KB for the dense layers in either case",
            flush=True,
        )
        found["losses"] = {"one process, fp64": yardstick.losses, **{name: run.losses for name, run in runs.items()}}
        found["allowed"] = {
            "losses": yardstick.loss_allowed,
            "memory": yardstick.weights_allowed[0],
            "other weights": yardstick.weights_allowed[1],
        }
        found["off"] = {
            name: dict(zip(("losses", "memory", "other weights"), run.off, strict=True)) for name, run in runs.items()
        }
        found["bytes_per_rank_and_step"] = {
            "algorithm": algorithm,
            "table, sparse": sparse,
            "table, dense": dense,
            "dense layers": layers,
        }
    medians = {name: slowest_median(run.times) for name, run in runs.items() if run.times}
    if medians:
        found["step_ms"] = {name: {"median_slowest": medians[name], "ranks": run.times} for name, run in runs.items()}
        of_each = ", ".join(f"{value:.2f} ms with {name}" for name, value in medians.items())
        ratio = medians[theirs.name] / medians[ours.name]
        say(f"step: {of_each}; {ours.name} is {ratio:.2f} times as fast as {theirs.name}")
    if hidden is not None:
        parts = [part / total for part, total in hidden]
        found["hidden"] = {
            "share": parts,
            "hidden_us_per_step": [part for part, _ in hidden],
            "communication_us_per_step": [total for _, total in hidden],
        }
        say(
            f"hidden: {min(parts):.0%} of the sparse all-reduce on the rank with the least, {median(parts):.0%} in "
            f"the median, of {max(total for _, total in hidden) / 1e3:.2f} ms per step"
        )
    if options.plot:
        if rank == 0:
            moved = {ours.name: sparse, theirs.name: dense}
            plot(options.plot, found["losses"], moved, medians)
        say(f"plot: {options.plot}")
    if options.json:
        save(options.json, options, found)
        say(f"json: {options.json}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
