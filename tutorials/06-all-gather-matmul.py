# SPDX-License-Identifier: Apache-2.0
"""
All-gather and matmul in one kernel
===================================

Every rank has some rows and some columns of a weight. In the end every rank has the product of *all* rows with its
columns: the first half of a layer of a tensor-parallel model. You will learn

* how to count bytes and floating-point operations, and how much time one kernel can save,
* how to write that kernel: it sends its rows, and multiplies the others' rows as they arrive,
* five rules that keep it correct, and how it fails if you break one of them,
* how to see in a timeline what waits for what,
* how to make an MLP of such kernels, forward and backward, with the bits of the unfused one.

Run it with the following command, or :doc:`from an installed wheel <index>`::

    bash launch.sh tutorials/06-all-gather-matmul.py

On GPUs it also prints times, and `--plot times.png` draws them.

It builds on puts, signals, slots and epochs, which the first two tutorials explain. To leave out a rule, and to get the
timeline of a run in the simulator::

    bash launch.sh --simulate --nproc 1 tutorials/06-all-gather-matmul.py --break wait
    bash launch.sh --simulate --nproc 1 tutorials/06-all-gather-matmul.py --timeline tiles.json
"""

import argparse
from functools import partial

import helpers
import torch
import torch.distributed as dist
import triton.language as tl
from helpers import H200, say

import tdcoll
import tdcoll.language as tdl
import tdcoll.ops
from tdcoll.language import INTERPRETED

# %%
# A prediction
# ------------
#
# Each of W ranks has a shard `x` of shape `[rows, depth]` and a weight `[columns, depth]`, in bfloat16::
#
#     bytes that leave a rank              (W - 1) * rows * depth * 2
#     floating-point operations of a rank  2 * W * rows * depth * columns
#
# Each GPU sends at most 390 GB/s, or 361 to a single peer. A large matmul of cuBLAS was seen at 800 TFLOP/s on an
# H200. With the two parts in a row their times add up. In one kernel the link and the tensor cores work at the same
# time, so the longer of the two remains, if nothing has to wait. For example, two ranks with 2048 rows each, a
# depth of 8192 and 3584 columns take 93 µs on the link and 301 µs on the tensor cores. One kernel can therefore save at
# most 93 of 396 µs. There is time to hide them, because a rank's own rows need no link and take 150 µs.
#
# If there are few columns or the link is slow, the tensor cores wait. If there are few rows, the two parts in a row are
# faster, because cuBLAS cuts the depth into parts to use all of the GPU.

TFLOPS = 800.0
"""Rate of a large bfloat16 matmul on an H200, in TFLOP/s."""


def predicted_us(rows, depth, columns, world):
    """Return `{way: microseconds}` for shards of `[rows, depth]` and weights of `[columns, depth]`."""
    link = (world - 1) * rows * depth * 2 / H200.rate(world) / 1e3
    multiply = 2 * world * rows * depth * columns / TFLOPS / 1e6
    return {
        "predicted, in a row": 2 * H200.launch_us + H200.hop_us + link + multiply,
        "predicted, one kernel": H200.launch_us + H200.hop_us + max(link, multiply),
    }


# %%
# The kernel
# ----------
#
# A shard is cut into *pieces* of as many rows as a tile of the result has. The thread blocks have two roles. The first
# ones, the *senders*, put pieces to the other ranks. The others, the *workers*, multiply::
#
#     senders of rank r:   piece 0, 1, ... of the shard  --> rank r + 1, then rank r + 2, ...
#     workers of rank r:   tiles of shard r              (no wait: these rows are our own)
#                          tiles of shard r - 1          (each waits for its piece)
#                          tiles of shard r - 2, ...     (each waits for its piece)
#
# Rank r - 1 sends to rank r first, and rank r - 2 sends to it next, so rank r takes the shards in the order in which
# they arrive. While the first pieces are on their way, the workers have the tiles of the own shard to compute.
#
# A tile is a loop over the depth, from the first to the last element, in float32. The bits of a row
# depend only on the row and the weight, because no rank cuts the depth. It doesn't matter which rank sent the row, or
# when.


@tdcoll.jit
def multiply(
    x, weight, out, row, column, depth, columns, arrived, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Compute the tile of `[M, N]` elements at `(row, column)`, and store it if its rows have `arrived`."""
    rows = (row + tl.arange(0, M)).to(tl.int64)
    width = (column + tl.arange(0, N)).to(tl.int64)
    sums = tl.zeros((M, N), tl.float32)
    for step in tl.range(0, depth, K):
        at = step + tl.arange(0, K)
        left = tl.load(x + rows[:, None] * depth + at[None, :])
        right = tl.load(weight + width[None, :] * depth + at[:, None])
        sums = tl.dot(left, right, sums)
    tl.store(
        out + rows[:, None] * columns + width[None, :], sums.to(tl.bfloat16), mask=arrived != 0
    )


@tdcoll.jit
def send(
    source, inbox, signals, epoch, rows, depth, first, senders, M: tl.constexpr, SIGNAL_LAST: tl.constexpr
):  # fmt: skip
    """Put the pieces `first`, `first + senders`, ... of all that this rank has to send."""
    me = tdl.my_pe()
    world = tdl.n_pes()
    pieces = rows // M
    shard = inbox + tl.cast(me, tl.int64) * rows * depth
    for item in tl.range(first, (world - 1) * pieces, senders):
        peer = (me + 1 + item // pieces) % world
        piece = item % pieces
        begin = tl.cast(piece, tl.int64) * M * depth
        signal = signals + me * pieces + piece
        if SIGNAL_LAST:
            tdl.putmem_signal_block(
                shard + begin, source + begin, 2 * M * depth, signal, epoch, tdl.SIGNAL_SET, peer
            )
        else:
            tdl.signal_block(signal, epoch, tdl.SIGNAL_SET, peer)
            tdl.putmem_block(shard + begin, source + begin, 2 * M * depth, peer)


@tdcoll.jit
def my_all_gather_matmul(
    source, weight, out, inbox, signals, epochs, monitor, rows, depth, columns, senders,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    WAITS: tl.constexpr, PER_PIECE: tl.constexpr, SIGNAL_LAST: tl.constexpr, SENDERS_FIRST: tl.constexpr,
):  # fmt: skip
    me = tdl.my_pe()
    world = tdl.n_pes()
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    epoch = tl.load(epochs + block) + 1
    tdl.syncthreads()  # all threads have read the word
    tl.store(epochs + block, epoch)
    role = block if SENDERS_FIRST else (block + senders) % blocks
    if role < senders:
        send(source, inbox, signals, epoch, rows, depth, role, senders, M, SIGNAL_LAST)
    else:
        pieces = rows // M
        tiles = pieces * (columns // N)
        for item in tl.range(role - senders, world * tiles, blocks - senders):
            rank = (me + world - item // tiles) % world
            piece = item % tiles // (columns // N)
            column = item % tiles % (columns // N) * N
            shard = tl.cast(rank, tl.int64) * rows * depth
            x = inbox + shard
            arrived = tl.cast(1, tl.int32)
            if rank == me:
                x = source
            else:
                signal = signals + rank * pieces + piece * PER_PIECE
                arrived = tdl.wait_signal(signal, tdl.CMP_GE, epoch * WAITS, monitor, rank, piece)
            result = out + tl.cast(rank, tl.int64) * rows * columns
            multiply(x, weight, result, piece * M, column, depth, columns, arrived, M, N, K)


# %%
# These are the rules, with their names for `--break`:
#
# 1. **two-slots: calls use two slots in turn.** The second tutorial gives the reason: a quick peer may send the rows of
#    the next call while we still multiply those of this one.
# 2. **wait: a tile is computed only after its rows have arrived.**
# 3. **piece-signals: each piece has a signal of its own.** With one signal for each shard, the first piece would vouch
#    for all.
# 4. **signal-last: a signal follows its data.** `putmem_signal_block` orders the two. A signal that is sent by itself
#    may arrive before the data.
# 5. **senders-first: senders are the first thread blocks.** A GPU starts thread blocks in order, and workers wait for
#    the senders of others. If the GPUs had no capacity for all thread blocks and workers came first, all ranks would
#    wait for senders that never start.
#
# The kernel needs no barrier between ranks. Every call waits for the pieces of all other ranks, so a rank that begins
# call 3 knows that all others have read the rows of call 1, as in the second tutorial.


class MyAllGatherMatmul:
    """The kernel, with two slots of everything that peers write to.

    Args:
        tile: rows and columns of a tile, and the depth of a step, of which the sizes must be multiples.
        blocks, senders: thread blocks in all, and those that send.
    """

    def __init__(
        self, rows, depth, columns, tile, blocks, senders, slots=2, waits=1, per_piece=1, signal_last=True,
        senders_first=True,
    ):  # fmt: skip
        world = tdcoll.topology().world_size
        self.sizes = (rows, depth, columns, senders)
        self.blocks = blocks
        self.inbox = tdcoll.empty((slots, world * rows, depth), torch.bfloat16, name="inbox")
        self.signals = tdcoll.zeros((2, world, rows // tile[0]), torch.int64, name="signals")
        self.epochs = torch.zeros((2, blocks), dtype=torch.int64, device=tdcoll.device())
        self.constants = dict(zip("MNK", tile, strict=True))
        self.constants |= {"WAITS": waits, "PER_PIECE": per_piece, "SIGNAL_LAST": signal_last}
        self.constants |= {"SENDERS_FIRST": senders_first, **launch_options()}
        self.monitor = tdcoll.WaitMonitor()
        self.calls = 0

    def __call__(self, source, weight):
        """`[rows, depth], [columns, depth] -> [world * rows, columns]`. `source` is symmetric, because it is put."""
        self.calls += 1
        out = source.new_empty(len(self.inbox[0]), len(weight))
        inbox = self.inbox[self.calls % len(self.inbox)]
        row = self.calls % 2
        my_all_gather_matmul[(self.blocks,)](
            source, weight, out, inbox, self.signals[row], self.epochs[row], self.monitor.words, *self.sizes,
            **self.constants,
        )  # fmt: skip
        return out


def launch_options():
    """Return the options of a launch, which mean nothing to the simulator."""
    if tdcoll.device().type != "cuda":
        return {}
    return {"num_warps": 8, "num_stages": 3}


RULES = {
    "two-slots": ("calls use two slots in turn", {"slots": 1}),
    "wait": ("a tile is computed only after its rows have arrived", {"waits": 0}),
    "piece-signals": ("each piece has a signal of its own", {"per_piece": 0}),
    "signal-last": ("a signal follows its data", {"signal_last": False}),
    "senders-first": ("senders are the first thread blocks", {"senders_first": False}),
}

# %%
# The unfused one
# ---------------
#
# To compare, an all-gather is followed by a kernel that computes the same tiles and waits for nothing. Both have to
# give the same bits.


@tdcoll.jit
def my_matmul(x, weight, out, rows, depth, columns, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # fmt: skip
    tiles = rows // M * (columns // N)
    for item in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = item // (columns // N) * M
        column = item % (columns // N) * N
        multiply(x, weight, out, row, column, depth, columns, 1, M, N, K)


def unfused(every, weight, tile, blocks):
    """`[rows, depth], [columns, depth] -> [rows, columns]`, where `every` has the rows of all ranks."""
    out = every.new_empty(len(every), len(weight))
    constants = dict(zip("MNK", tile, strict=True)) | launch_options()
    my_matmul[(blocks,)](every, weight, out, *every.shape, len(weight), **constants)
    return out


# PyTorch 2.13 gave `all_gather_into_tensor` the name `all_gather_single`.
torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def make(seed, *shape, device="cpu"):
    """Return random numbers in bfloat16, the same wherever they are made."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(torch.bfloat16).to(device)


def shard_of(rank, call, rows, depth, device):
    return make(1000 * call + rank, rows, depth, device=device)


def check(name, got, wanted):
    """Raise unless both have the same bits."""
    wrong = int((got != wanted).sum())
    if got.shape != wanted.shape or wrong:
        raise AssertionError(f"{name}: {wrong} of {wanted.numel()} numbers are wrong")


def check_close(name, got, wanted):
    """Raise unless the difference is small: sums in another order have other last bits."""
    error = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
    if not error < 0.01:
        raise AssertionError(f"{name}: the error is {error:.3f} of the result")


def run_mine(sizes, tile, blocks, senders, calls, world, rank, device, **changes):
    """Make some calls in a row, and compare them with the unfused one."""
    rows, depth, columns = sizes
    mine = MyAllGatherMatmul(*sizes, tile, blocks, senders, **changes)
    weight = make(77 + rank, columns, depth, device=device)
    sources = tdcoll.empty((calls, rows, depth), torch.bfloat16, name="sources")
    for call in range(calls):
        sources[call].copy_(shard_of(rank, call, rows, depth, device))
    results = [mine(sources[call], weight) for call in range(calls)]
    mine.monitor.check()  # waits for the stream
    for call, result in enumerate(results):
        every = torch.cat([shard_of(peer, call, rows, depth, device) for peer in range(world)])
        check(f"call {call}", result, unfused(every, weight, tile, blocks))


def case(changes=()):
    """Return a case for `tdcoll.testing.explore`."""
    return lambda world: world.run(
        lambda pe: run_mine(
            (32, 16, 16), (16, 16, 16), 3, 1, 3, world.n_pes, pe, "cpu", **dict(changes)
        )
    )


# %%
# The timeline
# ------------
#
# With `--timeline tiles.json` the simulator runs the kernel on three ranks and writes a timeline for
# https://ui.perfetto.dev: each rank with its thread blocks, their waits, and the pieces on their way. The sender of
# each rank is thread block 0. The first tiles of the workers have no wait, the later ones have one, and a wait ends
# when its signal is there. It shows the order of events, but no times, because its unit is a step of the simulator.
#
# The simulator has drawn three calls on two ranks, of two pieces each:
#
# .. image:: /figures/all-gather-matmul.svg
#    :alt: Three calls: both ranks send pieces, multiply their own rows, and then wait for the other's pieces

# %%
# An MLP
# ------
#
# In a tensor- and sequence-parallel MLP each rank has a part of the rows of the activations between the layers, and
# inside the MLP a part of the columns. Its first half is an all-gather + matmul, its second half a matmul +
# reduce-scatter, and *the backward pass of one is the other*::
#
#     forward:   inner = all_gather(x) @ up.T           y = reduce_scatter(relu(inner) @ down.T)
#     backward:  of_x = reduce_scatter(of_inner @ up)   of_active = all_gather(of_y) @ down
#
# The gradients of the weights need the gathered matrices, which `gathered=True` returns beside the product.


def mlp(x, up, down, of_y, **how):
    """Return `y` and the gradients of `x`, `up` and `down`.

    Args:
        x, of_y: this rank's rows and the gradient of its result, `[rows, hidden]`.
        up, down: `[inner / world, hidden]` and `[hidden, inner / world]`.
        how: arguments of tdcoll's functions.
    """
    inner, every_x = tdcoll.fused.all_gather_matmul(x, up, gathered=True, **how)
    active = torch.relu(inner)
    y = tdcoll.fused.matmul_reduce_scatter(active, down, **how)

    of_active, every_of_y = tdcoll.fused.all_gather_matmul(
        of_y, down, depth_first=True, gathered=True, **how
    )
    of_inner = of_active * (inner > 0)
    of_x = tdcoll.fused.matmul_reduce_scatter(of_inner, up, depth_first=True, **how)
    return y, of_x, of_inner.t() @ every_x, every_of_y.t() @ active


# %%
# You needn't write the backward pass. `tdcoll.ops` has operators with derivatives, which `torch.compile` traces, too.


def mlp_by_operators(x, up, down, of_y):
    """Return what `mlp` returns, by operators and autograd."""
    x, up, down = (tensor.clone().requires_grad_() for tensor in (x, up, down))
    inner, _ = torch.ops.tdcoll.all_gather_matmul(x, up, keep_gathered=True)
    y = torch.ops.tdcoll.matmul_reduce_scatter(torch.relu(inner), down)
    y.backward(of_y)
    return y.detach(), x.grad, up.grad, down.grad


def run_mlp(rows, hidden, wide, rank, world, device, one_node):
    """Make a step of an MLP by fused kernels, by parts in a row and by operators; return the ways."""
    x = make(10 + rank, rows, hidden, device=device)
    of_y = make(20 + rank, rows, hidden, device=device)
    up = make(30 + rank, wide // world, hidden, device=device) / hidden**0.5
    down = make(40 + rank, hidden, wide // world, device=device) / wide**0.5
    ways = {
        "parts in a row": partial(mlp, algorithm="composed", batch_invariant=True),
        "operators": mlp_by_operators,
    }
    if one_node and world > 1:
        ways["fused"] = partial(mlp, algorithm="fused")
    made = {name: way(x, up, down, of_y) for name, way in ways.items()}
    tdcoll.check()
    wanted = made["parts in a row"]
    for number, name in enumerate(("y", "gradient of x", "gradient of up", "gradient of down")):
        if "fused" in made:
            check(f"MLP: {name}", made["fused"][number], wanted[number])
        # The operators may take cuBLAS, which may cut the depth: other bits.
        check_close(f"MLP by operators: {name}", made["operators"][number], wanted[number])
    return list(ways)


# %%
# Times
# -----
#
# As in the other tutorials, calls are captured in CUDA graphs, an even number of them because of the two slots. Your
# kernel loads its operands through pointers, tile after tile. tdcoll's loads them by TMA descriptors, stores to its
# peers instead of using puts, and has other tiles for other numbers of rows.
#
# On 2 H200s, tdcoll's kernel took 349 µs for the 4096 rows of the prediction, cuBLAS alone 296, and NCCL and then
# cuBLAS 459 (`docs/results/matmul-2xH200/bench.json`).


def time_calls(rank, world, device, plot):
    tile = (128, 128, 64)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    rows_us = {}
    for total, depth, columns in ((1024, 8192, 3584), (2048, 4096, 1792), (4096, 8192, 3584)):
        rows = max(1, total // world // tile[0]) * tile[0]
        nbytes = 2 * rows * depth
        # On the default stream, NCCL's graphs were seen to take twice as long.
        with (
            torch.cuda.stream(torch.cuda.Stream()),
            tdcoll.CollectiveContext(max_bytes_per_rank=nbytes + 4 * rows) as ctx,
        ):
            weight = make(77 + rank, columns, depth, device=device)
            source = tdcoll.empty((rows, depth), torch.bfloat16)
            source.copy_(shard_of(rank, 0, rows, depth, device))
            every = torch.empty(world * rows, depth, dtype=torch.bfloat16, device=device)
            mine = MyAllGatherMatmul(rows, depth, columns, tile, multiprocessors, senders=16)

            def in_a_row(gather, every=every, weight=weight):
                gather()
                return every @ weight.t()

            calls = {
                "mine": partial(mine, source, weight),
                "tdcoll": partial(tdcoll.fused.all_gather_matmul, source, weight, ctx=ctx),
                "tdcoll, cuBLAS": partial(
                    in_a_row, partial(tdcoll.all_gather, source, ctx=ctx, out=every)
                ),
                "NCCL, cuBLAS": partial(in_a_row, partial(torch_all_gather, every, source)),
                "cuBLAS alone": partial(torch.matmul, every, weight.t()),
            }
            rows_us[nbytes] = helpers.times_us((world - 1) * nbytes, calls)
            rows_us[nbytes] |= predicted_us(rows, depth, columns, world)
            wanted = unfused(every, weight, tile, multiprocessors)
            check("mine, after it was timed", calls["mine"](), wanted)
            check_close("tdcoll, after it was timed", calls["tdcoll"](), wanted)
            mine.monitor.check()
            ctx.check()
    helpers.show_times("all-gather + matmul", rows_us, plot)


# %%
# The whole program
# -----------------


def write_timeline(path):
    """Run the kernel in the simulator and write its timeline."""
    from tdcoll.testing import replay

    replay(case(), 1, trace=path, n_pes=3)
    print(f"the timeline of 3 calls on 3 ranks is in {path}, for https://ui.perfetto.dev")


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--plot", metavar="FILE.png", help="on GPUs: draw the times (needs matplotlib)"
    )
    parser.add_argument(
        "--timeline", metavar="FILE.json", help="in the simulator: write a timeline, and do no more"
    )
    options = helpers.parse(parser, arguments, RULES, case, n_pes=3, resident=1)
    if options.timeline:
        helpers.need_simulator(parser, "--timeline")
        write_timeline(options.timeline)
        return

    # The largest matrices that are timed take more than the default heap.
    tdcoll.initialize(heap_bytes=None if INTERPRETED else "1G")
    topology, device = tdcoll.topology(), tdcoll.device()
    rank, world = topology.rank, topology.world_size
    on_gpus = device.type == "cuda"
    say(topology.describe())

    if on_gpus:
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        run_mine((512, 1024, 1792), (128, 128, 64), multiprocessors, 16, 6, world, rank, device)
    else:
        run_mine((64, 64, 32), (32, 32, 32), 6, 2, 6, world, rank, device)
    say("my all-gather + matmul: 6 calls have the bits of an all-gather and a matmul in a row")

    rows, hidden, wide = (1024, 2048, 8192) if on_gpus else (32, 64, 128 * world)
    ways = run_mlp(rows, hidden, wide, rank, world, device, topology.n_nodes == 1)
    say(f"MLP: forward and backward by {', '.join(ways)}")

    if why := helpers.untimed():
        say(f"time: not measured, because {why}")
    else:
        time_calls(rank, world, device, options.plot)
    tdcoll.finalize()


if __name__ == "__main__":
    main()
