# SPDX-License-Identifier: Apache-2.0
"""
All-reduce, and the kernels after it
====================================

Every rank has a vector, and in the end every rank has the sum of all vectors. You will learn

* how to predict the time of an all-reduce from hops and bytes,
* how to write one in one step and in two, with four rules that you can break,
* why the order of a sum matters, and who decides it,
* how much it saves to fuse the all-reduce with the addition and the norm that follow it in a model,
* how a tensor-parallel model decodes with it.

Run it with the following command, or :doc:`from an installed wheel <index>`::

    bash launch.sh tutorials/05-all-reduce.py

On GPUs it also prints times, and `--plot times.png` draws them.

It builds on puts, signals, slots and epochs, which the first two tutorials explain. To leave out a rule::

    bash launch.sh --simulate --nproc 1 tutorials/05-all-reduce.py --break rank-order
"""

import argparse
from functools import partial

import helpers
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from helpers import H200, say
from torch import nn

import tdcoll
import tdcoll.language as tdl

# %%
# A prediction
# ------------
#
# Two things take time: the hop from GPU to GPU, and the bytes. On H200s the launch of a kernel takes 0.8 µs, a hop
# about 1, and at most 390 GB/s leave a GPU. With n bytes on each of W ranks there are two ways to go::
#
#     one-shot:    every rank  ---- its vector ---->  all others    and all ranks add up all of it
#                  1 hop, (W - 1) n bytes from each rank
#
#     two-shot:    every rank  ---- part p -------->  rank p        and rank p adds up part p
#                  rank p      ---- its sum ------->  all others
#                  2 hops, 2 (W - 1) / W n bytes from each rank
#
# One-shot is therefore faster for small vectors and two-shot for large ones. With two ranks the bytes are the same, and
# by this count one-shot always wins. No all-reduce sends fewer bytes than two-shot or takes fewer hops than one-shot,
# unless the switch does the adding. The lower bound follows from that, as in the second tutorial.


def predicted_us(nbytes, world, steps):
    sent = (world - 1) * nbytes if steps == 1 else 2 * (world - 1) / world * nbytes
    return H200.launch_us + steps * H200.hop_us + sent / H200.gbps / 1e3


# %%
# One-shot
# ---------
#
# This is the all-gather of the second tutorial, followed by a sum. Row r of `inbox` is for rank r to fill. The rules:
#
# 1. **two-slots: calls use two slots in turn**, for the reason that the second tutorial gives.
# 2. **wait: a rank adds up only after all others have signalled.**
# 3. **rank-order: all ranks add in the order of ranks.** The last bits of a floating-point sum depend on its order. If
#    each rank began with its own row, the copies of a model that the ranks train would drift apart.


@tdcoll.jit
def add_up(source, inbox, sums, count, me, world, BLOCK: tl.constexpr, RANK_ORDER: tl.constexpr):
    for begin in tl.range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.range(0, world):
            rank = i if RANK_ORDER else (me + i) % world
            row = inbox + rank * count
            if rank == me:
                row = source
            total += tl.load(row + at, mask=at < count, other=0)
        tl.store(sums + at, total, mask=at < count)


@tdcoll.jit
def next_epoch(epochs):
    word = epochs + tl.program_id(0)
    epoch = tl.load(word) + 1
    tdl.syncthreads()  # all threads have read the word
    tl.store(word, epoch)
    return epoch


@tdcoll.jit
def one_shot(
    source, inbox, sums, signals, epochs, monitor, count,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, WAITS: tl.constexpr, RANK_ORDER: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    me = tdl.my_pe()
    world = tdl.n_pes()
    block = tl.program_id(0)
    epoch = next_epoch(epochs)
    if block < world - 1:
        peer = (me + 1 + block) % world
        tdl.putmem_signal_block(
            inbox + me * count, source, 4 * count, signals + me, epoch, tdl.SIGNAL_SET, peer
        )
    elif tdl.wait_signals(signals, world, me, tdl.CMP_GE, epoch * WAITS, monitor, WIDTH) != 0:
        add_up(source, inbox, sums, count, me, world, BLOCK, RANK_ORDER)


# %%
# Two-shot
# ----------
#
# Part p of every vector goes to rank p, which adds the parts up and puts the sum to all others. There is one more rule:
#
# 4. **own-signals: the second step has signals of its own**, because a quick peer sends its sum while we still wait
#    for the parts of others.


@tdcoll.jit
def two_shot(
    source, inbox, sums, signals, epochs, monitor, part,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, WAITS: tl.constexpr, RANK_ORDER: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    me = tdl.my_pe()
    world = tdl.n_pes()
    block = tl.program_id(0)
    epoch = next_epoch(epochs)
    summed = signals + world * (ROWS - 1)
    mine = sums + me * part
    if block < world - 1:
        peer = (me + 1 + block) % world
        theirs = source + peer * part
        tdl.putmem_signal_block(
            inbox + me * part, theirs, 4 * part, signals + me, epoch, tdl.SIGNAL_SET, peer
        )
    elif tdl.wait_signals(signals, world, me, tdl.CMP_GE, epoch * WAITS, monitor, WIDTH) != 0:
        add_up(source + me * part, inbox, mine, part, me, world, BLOCK, RANK_ORDER)
        tdl.syncthreads()  # all threads have stored before any of the sum leaves
        for step in tl.range(1, world):
            peer = (me + step) % world
            tdl.putmem_signal_block(mine, mine, 4 * part, summed + me, epoch, tdl.SIGNAL_SET, peer)
        tdl.wait_signals(summed, world, me, tdl.CMP_GE, epoch, monitor, WIDTH)


class MyAllReduce:
    """Both forms, with two slots of everything that peers write to, as in the second tutorial."""

    def __init__(self, count, slots=2, waits=1, rank_order=True, rows=2):
        self.world = tdcoll.topology().world_size
        self.part = -(-count // self.world)
        padded = self.world * self.part
        self.given = tdcoll.zeros((slots, padded), torch.float32, name="given")
        self.inbox = tdcoll.zeros((slots, self.world, padded), torch.float32, name="inbox")
        self.sums = tdcoll.zeros((slots, padded), torch.float32, name="sums")
        self.signals = tdcoll.zeros((2, 2, self.world), torch.int64, name="signals")
        self.epochs = torch.zeros((2, self.world), dtype=torch.int64, device=tdcoll.device())
        self.constants = {"BLOCK": 1024, "WIDTH": triton.next_power_of_2(self.world)}
        self.constants |= {"WAITS": waits, "RANK_ORDER": rank_order, "ROWS": rows}
        self.monitor, self.calls = tdcoll.WaitMonitor(), 0

    def __call__(self, vector, steps):
        """Return the sum, in memory that the next call but one overwrites."""
        self.calls += 1
        slot, row, count = self.calls % len(self.given), self.calls % 2, vector.numel()
        given, sums = self.given[slot], self.sums[slot]
        given[:count].copy_(vector)
        kernel, size = (one_shot, len(given)) if steps == 1 else (two_shot, self.part)
        kernel[(self.world,)](
            given, self.inbox[slot], sums, self.signals[row], self.epochs[row], self.monitor.words, size,
            **self.constants,
        )  # fmt: skip
        return sums[:count]


RULES = {
    "two-slots": ("calls use two slots in turn", {"slots": 1}),
    "wait": ("a rank adds up only after all others have signalled", {"waits": 0}),
    "rank-order": ("all ranks add in the order of ranks", {"rank_order": False}),
    "own-signals": ("the second step has signals of its own", {"rows": 1}),
}


def make(rank, call, count, device):
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * call + rank)).to(
        device
    )


def reference(call, count, world, device):
    """Return the sum in the order of ranks."""
    total = torch.zeros(count, device=device)
    for rank in range(world):
        total = total + make(rank, call, count, device)
    return total


def check(name, got, wanted):
    """Raise unless both have the same bits."""
    wrong = int((got != wanted).sum())
    if got.shape != wanted.shape or wrong:
        raise AssertionError(f"{name}: {wrong} of {wanted.numel()} numbers are wrong")


def run_mine(count, calls, world, rank, device, **changes):
    """Make some calls of either form in a row, and check them."""
    mine = MyAllReduce(count, **changes)
    for steps in (1, 2):
        results = [mine(make(rank, call, count, device), steps).clone() for call in range(calls)]
        mine.monitor.check()  # waits for the stream
        for call, result in enumerate(results):
            check(f"{steps} step(s), call {call}", result, reference(call, count, world, device))


def case(changes=()):
    """Return a case for `tdcoll.testing.explore`."""
    return lambda world: world.run(
        lambda pe: run_mine(70, 4, world.n_pes, pe, "cpu", **dict(changes))
    )


# %%
# A model
# -------
#
# In a tensor-parallel transformer, attention and MLP both end with the same three steps: an all-reduce of the ranks'
# partial results, the addition of the residual, and a norm. When the model decodes a token or a few, each step is a
# kernel of a few microseconds for some kilobytes, and most of that is launches and hops.
# `tdcoll.fused.all_reduce_rms_norm` is one kernel for all three.
#
# To stay short, the blocks below are MLPs. Each rank holds a share of the matrices, and all ranks draw the same token.


def make_block(hidden, rank, world, seed, device):
    """Return this rank's share of an MLP, as a function `[tokens, hidden] -> [tokens, hidden]`."""
    generator, wide = torch.Generator().manual_seed(100 * seed + rank), 2 * hidden // world
    up = (torch.randn(hidden, wide, generator=generator) / hidden**0.5).to(device)
    down = (torch.randn(wide, hidden, generator=generator) / wide**0.5).to(device)
    return lambda x: torch.relu(x @ up) @ down


def unfused(all_reduce):
    """Return the three steps as three kernels; `all_reduce` works in place."""

    def reduce_and_norm(x, residual, weight):
        all_reduce(x)
        residual = x + residual
        return nn.functional.rms_norm(residual, residual.shape[-1:], weight, 1e-6), residual

    return reduce_and_norm


class Decoder:
    """Makes one token at a time, each the likeliest after the last."""

    def __init__(self, blocks, embedding, reduce_and_norm):
        self.blocks, self.embedding, self.reduce_and_norm = blocks, embedding, reduce_and_norm
        self.token = torch.zeros(1, dtype=torch.int64, device=embedding.device)
        self.weight = torch.ones(embedding.shape[1], device=embedding.device)

    def step(self):
        x = residual = self.embedding[self.token]
        for block in self.blocks:
            x, residual = self.reduce_and_norm(block(x), residual, self.weight)
        self.token.copy_((x @ self.embedding.t()).argmax(-1))
        return self.token

    def decode(self, first, count):
        self.token.fill_(first)
        return torch.cat([self.step().clone() for _ in range(count)]).tolist()


def decoders(ctx, blocks, embedding):
    """Return a decoder for each way to make the three steps."""
    ways = {
        "torch.distributed": unfused(dist.all_reduce),
        "tdcoll": unfused(lambda x: tdcoll.all_reduce_(x, ctx=ctx)),
        "tdcoll, fused": lambda x, residual, weight: tdcoll.fused.all_reduce_rms_norm(
            x, residual, weight, ctx=ctx, eps=1e-6
        ),
    }
    return {name: Decoder(blocks, embedding, way) for name, way in ways.items()}


# %%
# Times
# -----
#
# As in the second tutorial, calls are captured in CUDA graphs, an even number of them because of the two slots. Your
# kernels are above the prediction: a put with a signal takes three hops instead of one, and a single block adds up.


def time_calls(rank, world, blocks, embedding, plot):
    rows, device = {}, embedding.device
    # On the default stream, NCCL's graphs were seen to take twice as long.
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        tdcoll.CollectiveContext(max_bytes_per_rank=4 << 20) as ctx,
    ):
        for nbytes in (8 << 10, 64 << 10, 256 << 10, 1 << 20):
            x = make(rank, 0, nbytes // 4, device)
            mine, out = MyAllReduce(len(x)), x.clone()
            calls = {"one-shot": partial(mine, x, 1), "two-shot": partial(mine, x, 2)}
            calls |= {
                "tdcoll": partial(tdcoll.all_reduce, x, ctx=ctx),
                "NCCL": partial(dist.all_reduce, out),
            }
            rows[nbytes] = helpers.times_us(2 * (world - 1) / world * nbytes, calls)
            rows[nbytes] |= {f"predicted, {n}": predicted_us(nbytes, world, n) for n in (1, 2)}
            wanted = reference(0, len(x), world, device)
            for name in ("one-shot", "two-shot"):
                check(f"{name} after it was timed", calls[name](), wanted)
            torch.testing.assert_close(
                calls["tdcoll"](), wanted
            )  # over several nodes it has another fixed order
            mine.monitor.check()
            ctx.check()
        steps = {name: decoder.step for name, decoder in decoders(ctx, blocks, embedding).items()}
        tokens = helpers.times_us(0, steps)
    helpers.show_times("all-reduce", rows, plot)
    listed = ", ".join(f"{tokens[name]:.1f} µs by {name}" for name in steps)
    say(f"a token of {len(blocks)} blocks, lower is better: {listed}")


# %%
# The whole program
# -----------------


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--plot", metavar="FILE.png", help="on GPUs: draw the times (needs matplotlib)"
    )
    options = helpers.parse(parser, arguments, RULES, case, n_pes=3)

    tdcoll.initialize()
    topology, device = tdcoll.topology(), tdcoll.device()
    rank, world = topology.rank, topology.world_size
    on_gpus = device.type == "cuda"
    say(topology.describe())

    run_mine(1000, 6, world, rank, device)
    say(
        "my all-reduce: 6 one-shot and 6 two-shot calls have the bits of a sum in the order of ranks"
    )

    # tdcoll's all-reduce has both forms, and sends small vectors without signals: a word has arrived when it is no
    # longer the pattern that the inbox was cleared with (the Lamport protocol). Both forms give the same bits, and so
    # does a row of any batch.
    hidden, rows = (4096, 8) if on_gpus else (128, 5)
    lamport_bytes = (4 << 20) if on_gpus else 1 << 14
    with tdcoll.CollectiveContext(max_bytes_per_rank=4 << 20, lamport_bytes=lamport_bytes) as ctx:
        x = make(rank, 1, rows * hidden, device).view(rows, hidden)
        residual = make(9, 2, rows * hidden, device).view(rows, hidden)
        weight = make(9, 3, hidden, device)
        total = tdcoll.all_reduce(x, ctx=ctx)
        out, new = tdcoll.fused.all_reduce_rms_norm(x, residual, weight, ctx=ctx)
        alone = tdcoll.fused.all_reduce_rms_norm(
            x[2:3].clone(), residual[2:3].clone(), weight, ctx=ctx
        )
        ctx.check()
        check("the new residual", new, total + residual)
        torch.testing.assert_close(
            out, nn.functional.rms_norm(new, (hidden,), weight, 1e-6), atol=1e-4, rtol=1e-4
        )
        check("a row alone, normalized", alone[0], out[2:3])
        check("a row alone, the new residual", alone[1], new[2:3])
        say(
            "all_reduce_rms_norm: an all-reduce, an addition and a norm; a row alone has the same bits"
        )

        width, layers, length, words = (4096, 8, 64, 1000) if on_gpus else (64, 3, 6, 50)
        blocks = [make_block(width, rank, world, seed, device) for seed in range(layers)]
        embedding = make(0, 7, words * width, device).view(words, width)
        tokens = {
            name: decoder.decode(1, length)
            for name, decoder in decoders(ctx, blocks, embedding).items()
        }
        ctx.check()
        for name, theirs in tokens.items():
            if theirs != tokens["tdcoll, fused"]:
                raise AssertionError(
                    f"decoding: {theirs} by {name}, and {tokens['tdcoll, fused']} by the fused kernel"
                )
        say(f"decoding: {length} tokens are equal, by {', '.join(tokens)}")

    if why := helpers.untimed():
        say(f"time: not measured, because {why}")
    else:
        time_calls(rank, world, blocks, embedding, options.plot)
    tdcoll.finalize()


if __name__ == "__main__":
    main()
