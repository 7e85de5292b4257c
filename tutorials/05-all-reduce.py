# SPDX-License-Identifier: Apache-2.0
"""
All-reduce, and what comes after it
===================================

Every rank has a vector; afterwards every rank has the sum of all. You will learn

* to predict what an all-reduce takes, from crossings and bytes,
* how to write one in one stage and in two,
* why the order of a sum matters, and who fixes it,
* what is saved by doing in the same kernel what a model does next,
* how a tensor-parallel model decodes with it.

Run it with

    bash launch.sh tutorials/05-all-reduce.py

Puts, signals, slots and epochs are those of the second tutorial.
"""

import os
import statistics

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import nn

import tdcoll
import tdcoll.language as tdl

# %%
# What does it take?
# ------------------
#
# Two things take time: that something crosses from GPU to GPU at all, and the bytes. On H200s a launch takes 0.8 us,
# a crossing about 0.9, and 340 GB/s leave a GPU. With n bytes on W ranks,
#
# * in one stage every rank sends everything to all others:   1 crossing,  (W - 1) n bytes;
# * in two, each rank sums a part and sends its sum to all:   2 crossings, 2 (W - 1) / W n bytes.
#
# So few bytes go in one stage and many in two. For two ranks the bytes are the same.

LAUNCH_US, CROSSING_US, BYTES_PER_US = 0.8, 0.9, 340e3


def predicted_us(nbytes, world, stages):
    sent = (world - 1) * nbytes if stages == 1 else 2 * (world - 1) / world * nbytes
    return LAUNCH_US + stages * CROSSING_US + sent / BYTES_PER_US


# %%
# One stage
# ---------
#
# The all-gather of the second tutorial, and a sum. Row r of `inbox` is for rank r to fill. Each rank adds the rows in
# the order of ranks: fp32 sums depend on their order, and so all ranks have the same bits.


@tdcoll.jit
def one_stage(inbox, out, signals, monitor, epoch, count, BLOCK: tl.constexpr, WAITED: tl.constexpr):
    me = tdl.my_pe()
    world = tdl.n_pes()
    program = tl.program_id(0)
    if program < world - 1:
        peer = (me + 1 + program) % world
        mine = inbox + me * count
        tdl.putmem_signal_block(mine, mine, 4 * count, signals + me, epoch, tdl.SIGNAL_SET, peer)
    elif tdl.wait_signals(signals, world, me, tdl.CMP_GE, epoch, monitor, WAITED) != 0:
        for begin in tl.range(0, count, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            total = tl.zeros([BLOCK], tl.float32)
            for rank in tl.range(0, world):
                total += tl.load(inbox + rank * count + at, mask=at < count, other=0)
            tl.store(out + at, total, mask=at < count)


# %%
# Two stages
# ----------
#
# Part p of everybody's vector goes to rank p, which adds them up and puts the sum to everybody. The sums have rows and
# signals of their own: a peer that is ahead sends its sum while we still read what it sent first.


@tdcoll.jit
def two_stages(
    source, inbox, sums, signals, monitor, epoch, part, BLOCK: tl.constexpr, WAITED: tl.constexpr
):  # fmt: skip
    me = tdl.my_pe()
    world = tdl.n_pes()
    program = tl.program_id(0)
    if program < world - 1:
        peer = (me + 1 + program) % world
        landing = inbox + me * part
        tdl.putmem_signal_block(landing, source + peer * part, 4 * part, signals + me, epoch, tdl.SIGNAL_SET, peer)
    elif tdl.wait_signals(signals, world, me, tdl.CMP_GE, epoch, monitor, WAITED) != 0:
        for begin in tl.range(0, part, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            total = tl.zeros([BLOCK], tl.float32)
            for rank in tl.range(0, world):
                theirs = inbox + rank * part
                if rank == me:
                    theirs = source + me * part
                total += tl.load(theirs + at, mask=at < part, other=0)
            tl.store(sums + me * part + at, total, mask=at < part)
        tdl.syncthreads()  # all threads have stored before any of the sum leaves
        mine = sums + me * part
        for step in tl.range(1, world):
            peer = (me + step) % world
            tdl.putmem_signal_block(mine, mine, 4 * part, signals + world + me, epoch, tdl.SIGNAL_SET, peer)
        tdl.wait_signals(signals + world, world, me, tdl.CMP_GE, epoch, monitor, WAITED)


class MyAllReduce:
    """Both forms, with a pair of all buffers: call k uses slot k mod 2, as in the second tutorial."""

    def __init__(self, count):
        self.world = tdcoll.topology().world_size
        self.part = -(-count // self.world)
        room = self.world * self.part
        self.slots = [
            (tdcoll.zeros((self.world, room), torch.float32), tdcoll.zeros((2 * self.world,), torch.int64))
            for _ in range(2)
        ]
        self.given = [tdcoll.zeros((room,), torch.float32) for _ in range(2)]
        self.sums = [tdcoll.zeros((room,), torch.float32) for _ in range(2)]
        self.monitor, self.epoch = tdcoll.WaitMonitor(rank=tdcoll.topology().rank), 0
        tdcoll.barrier()

    def __call__(self, vector, stages):
        self.epoch += 1
        rank, slot, count = tdcoll.topology().rank, self.epoch % 2, vector.numel()
        inbox, signals = self.slots[slot]
        constants = {"BLOCK": 1024, "WAITED": triton.next_power_of_2(self.world)}
        if stages == 1:
            room = inbox.shape[1]
            out = torch.empty(room, device=vector.device)
            inbox[rank, :count].copy_(vector)
            one_stage[(self.world,)](inbox, out, signals, self.monitor.words, self.epoch, room, **constants)
            return out[:count]
        given, sums = self.given[slot], self.sums[slot]
        given[:count].copy_(vector)
        two_stages[(self.world,)](given, inbox, sums, signals, self.monitor.words, self.epoch, self.part, **constants)
        return sums[:count].clone()


# %%
# A model
# -------
#
# A layer of a tensor-parallel transformer ends twice with the same three steps: the ranks' partial results are
# all-reduced, the residual is added, and the sum is normalized for what comes next. For a token or a few that is where
# the time goes: three kernels, of a few microseconds each, for some kilobytes. One kernel does it all.
#
# The block here has no attention, to stay short; what matters is how its halves end. Each rank has a share of the
# matrices, and every rank draws the same token.


class Block(nn.Module):
    def __init__(self, hidden, rank, world, seed, device):
        super().__init__()
        wide = 2 * hidden // world

        def matrix(*shape, key):
            made = torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + key))
            return nn.Parameter((made / shape[0] ** 0.5).to(device), requires_grad=False)

        self.up, self.down = (matrix(hidden, wide, key=rank + 1), matrix(wide, hidden, key=rank + 20))
        self.again, self.back = (matrix(hidden, wide, key=rank + 40), matrix(wide, hidden, key=rank + 60))
        self.norms = nn.ParameterList(
            nn.Parameter(torch.ones(hidden, device=device), requires_grad=False) for _ in "ab"
        )

    def forward(self, x, residual, reduce_and_norm):
        x, residual = reduce_and_norm(torch.relu(x @ self.up) @ self.down, residual, self.norms[0])
        return reduce_and_norm(torch.tanh(x @ self.again) @ self.back, residual, self.norms[1])


def unfused(all_reduce):
    """Return the end of a block as three kernels: an all-reduce in place, an addition, a norm."""

    def reduce_and_norm(x, residual, weight):
        all_reduce(x)
        residual = x + residual
        return nn.functional.rms_norm(residual, residual.shape[-1:], weight, 1e-6), residual

    return reduce_and_norm


def torchs_one_shot(count, device):
    """Return PyTorch's all-reduce for `count` numbers, in place: they are copied to where the other ranks read them."""
    import torch.distributed._symmetric_memory as symmetric_memory

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # some hosts say they have it, and fail
    group, shared = dist.group.WORLD.group_name, symmetric_memory.empty(count, device=device)
    symmetric_memory.rendezvous(shared, group)
    reduce = torch.ops.symm_mem.one_shot_all_reduce_copy_out
    return lambda x: reduce(shared.view_as(x), x, "sum", group, x)


def fused(ctx):
    """Return the end of a block as one kernel."""
    return lambda x, residual, weight: tdcoll.fused.all_reduce_rms_norm(x, residual, weight, ctx, 1e-6)


class Decoder:
    """Makes one token at a time, each the likeliest after the last; on GPUs a token is a CUDA graph."""

    def __init__(self, blocks, embedding, reduce_and_norm):
        self.blocks, self.embedding, self.end = blocks, embedding, reduce_and_norm
        self.token = torch.zeros(1, dtype=torch.int64, device=embedding.device)
        self.graph = None
        if embedding.is_cuda:
            self.step()  # what a graph cannot capture is made now
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()

    def step(self):
        residual = self.embedding[self.token]
        x = residual
        for block in self.blocks:
            x, residual = block(x, residual, self.end)
        self.token.copy_((x @ self.embedding.t()).argmax(-1))

    def decode(self, first, count):
        self.token.fill_(first)
        tokens = []
        for _ in range(count):
            self.step() if self.graph is None else self.graph.replay()
            tokens.append(self.token.clone())
        return torch.cat(tokens).tolist()

    def us_per_token(self, count):
        times = []
        for _ in range(5):
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
            begin.record()
            for _ in range(count):
                self.graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / count)
        return statistics.median(times)


# %%
# The story
# ---------


def make(rank, call, count, device):
    made = torch.randn(count, generator=torch.Generator().manual_seed(1000 * call + rank))
    return made.to(device)


def reference(call, count, device):
    """Return the sum in the order of ranks."""
    total = torch.zeros(count, device=device)
    for rank in range(tdcoll.topology().world_size):
        total = total + make(rank, call, count, device)
    return total


def check(name, got, wanted):
    wrong = int((got != wanted).sum())
    if got.shape != wanted.shape or wrong:
        raise AssertionError(f"{name}: {wrong} of {wanted.numel()} numbers are wrong")


def graph_us(call, calls=20):
    """Return the microseconds of a call on the slowest rank, from replays of a CUDA graph of `calls`."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(9):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    slowest = torch.tensor([statistics.median(times)], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def compare_times(ctx, rank, world, device, say):
    say(f"{'bytes':>10}{'one stage: predicted':>22}{'measured':>10}{'two: predicted':>16}{'measured':>10}")
    for nbytes in (8 << 10, 64 << 10, 256 << 10, 1 << 20):
        x = make(rank, 0, nbytes // 4, device)
        line = f"{nbytes:10}"
        for stages, algorithm, width in ((1, "one_shot", 22), (2, "two_shot", 16)):
            us = graph_us(lambda x=x, algorithm=algorithm: tdcoll.all_reduce(x, ctx, algorithm=algorithm))
            line += f"{predicted_us(nbytes, world, stages):{width}.1f}{us:10.1f}"
        say(line)


def main():
    tdcoll.initialize()
    topology, device = tdcoll.topology(), tdcoll.device()
    rank, world = topology.rank, topology.world_size

    def say(text):
        tdcoll.barrier()  # so that it is true of all ranks: one that failed is not here
        if rank == 0:
            print(text, flush=True)

    say(topology.describe())
    count, calls = 1000, 6
    mine = MyAllReduce(count)
    for stages in (1, 2):
        results = [mine(make(rank, call, count, device), stages) for call in range(calls)]
        mine.monitor.check()  # waits for the stream
        for call, result in enumerate(results):
            check(f"{stages} stage(s)", result, reference(call, count, device))
        say(f"my all-reduce in {stages} stage(s): {calls} calls, in the order of ranks to the last bit")

    # The library's all-reduce has both forms, and sends without signals: a word has arrived when it is no longer the
    # pattern that the inbox was cleared with. Either form has the same bits, and so has a row in every batch.
    hidden, rows = (4096, 8) if device.type == "cuda" else (128, 5)
    with tdcoll.CollectiveContext(
        max_bytes_per_rank=4 << 20, lamport_bytes=(4 << 20) if device.type == "cuda" else 1 << 14
    ) as ctx:
        x, residual = (
            make(rank, 1, rows * hidden, device).view(rows, hidden),
            make(9, 2, rows * hidden, device).view(rows, hidden),
        )
        weight = make(9, 3, hidden, device)
        total = tdcoll.all_reduce(x, ctx)
        out, new = tdcoll.fused.all_reduce_rms_norm(x, residual, weight, ctx)
        alone = tdcoll.fused.all_reduce_rms_norm(x[2:3].clone(), residual[2:3].clone(), weight, ctx)
        ctx.check()
        check("the new residual", new, total + residual)
        torch.testing.assert_close(out, nn.functional.rms_norm(new, (hidden,), weight, 1e-6), atol=1e-4, rtol=1e-4)
        check("a row alone, normalized", alone[0], out[2:3])
        check("a row alone, the new residual", alone[1], new[2:3])
        say("all_reduce_rms_norm: an all-reduce, an addition and a norm; a row alone has the same bits")

        # Decoding, by torch.distributed and three kernels, and by one.
        width, layers, length, words = (4096, 4, 64, 1000) if device.type == "cuda" else (64, 2, 6, 50)
        blocks = [Block(width, rank, world, seed, device) for seed in range(layers)]
        embedding = make(0, 7, words * width, device).view(words, width)
        if device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device))  # makes NCCL's communicator
        decoders = {
            "torch.distributed": Decoder(blocks, embedding, unfused(dist.all_reduce)),
            "tdcoll, fused": Decoder(blocks, embedding, fused(ctx)),
        }
        if device.type == "cuda" and topology.n_nodes == 1 and world <= torch.cuda.device_count():
            one_shot = unfused(torchs_one_shot(width, device))
            decoders["PyTorch's one-shot"] = Decoder(blocks, embedding, one_shot)
        tokens = {name: decoder.decode(1, length) for name, decoder in decoders.items()}
        ctx.check()
        for name, theirs in tokens.items():
            if theirs != tokens["tdcoll, fused"]:
                raise AssertionError(f"decoding: {theirs} by {name}, and {tokens['tdcoll, fused']} by tdcoll")
        say(f"decoding: {length} tokens are equal")

        if device.type == "cuda":
            compare_times(ctx, rank, world, device, say)
            chain = fused(ctx)
            say(f"fused all-reduce of {rows} rows: {graph_us(lambda: chain(x, residual, weight)):.1f} us")
            found = ", ".join(f"{decoder.us_per_token(length):.1f} us by {name}" for name, decoder in decoders.items())
            say(f"a token of {layers} layers: {found}")
        else:
            say("time: not measured, the simulator's times mean nothing")
        for decoder in decoders.values():
            decoder.graph = None  # before what it has captured is gone

    tdcoll.finalize()


if __name__ == "__main__":
    main()
