# SPDX-License-Identifier: Apache-2.0
"""
All-gather
==========

Every rank has a piece; afterwards every rank has all pieces, in rank order. You will learn

* how to write an all-gather as one small kernel,
* what it lacks: two slots, and an epoch that the GPU counts itself,
* how to call tdcoll's own, in one and in two dimensions, for small pieces, and without a copy,
* how the result compares with `torch.distributed`, bit by bit, and on GPUs in time as well.

Run it with

    bash launch.sh tutorials/02-all-gather.py

and, for the path that a cluster would take, with one host posing as two:

    bash launch.sh --emulate-nodes 2 tutorials/02-all-gather.py

Signals, waits and symmetric memory are those of the first tutorial.
"""

# %%
# An all-gather of your own
# -------------------------
#
# `buffer` is symmetric: `world` segments of `nbytes` bytes, of which each rank has filled its own. There is
# one program for each peer, which puts our segment to the same place over there and sets signal number `me`.
# And there is one that waits for the signals of all the others, so the launch is over when everything has
# arrived.
#
# Each program starts with another peer, and rank r's first is r + 1: otherwise all would write to rank 0
# first. The waiting program comes last. A GPU starts programs in order, and when it has no room for all of
# them, those that are waited for have to be the ones that run.

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import tdcoll
import tdcoll.language as tdl


@tdcoll.jit
def my_all_gather(buffer, signals, monitor, epoch, nbytes, BLOCK: tl.constexpr):
    me = tdl.my_pe()
    world = tdl.n_pes()
    program = tl.program_id(0)
    if program < world - 1:
        peer = (me + 1 + program) % world
        mine = buffer + tl.cast(me, tl.int64) * nbytes
        tdl.putmem_signal_block(mine, mine, nbytes, signals + me, epoch, tdl.SIGNAL_SET, peer)
    else:
        tdl.wait_signals(signals, world, me, tdl.CMP_GE, epoch, monitor, BLOCK)


# %%
# Calling it more than once
# -------------------------
#
# The k-th call is *epoch* k, and its signals are set to k: the waits of one call cannot be satisfied by the
# last.
#
# But may call 2 write into our buffer? A fast peer may be in call 2 while we still read the result of call 1.
# So there are two buffers, used in turn. Then call 3 is the first that writes where call 1 did, and a peer
# gets there only when it has heard from us in call 2, which we entered after we had read the result of call
# 1. This argument needs a signal from *every* peer in *every* call; an all-gather has it anyway, but a
# collective that has nothing to say to some peer has to signal all the same.
#
# Each of the two buffers has signals of its own, for the reason that the first tutorial gave: puts are not
# ordered among each other. With one row of signals the 2 of call 2 could arrive before the bytes of call 1,
# and 2 is "at least 1".


class MyAllGather:
    def __init__(self, numel, dtype):
        topology = tdcoll.topology()
        self.world, self.rank = topology.world_size, topology.rank
        self.slots = tdcoll.empty((2, self.world, numel), dtype)
        self.signals = tdcoll.zeros((2, self.world), torch.int64)  # on all ranks, before anybody signals
        self.monitor = tdcoll.WaitMonitor()
        self.epoch = 0

    def __call__(self, tensor):
        self.epoch += 1
        gathered = self.slots[self.epoch % 2]
        signals = self.signals[self.epoch % 2]
        gathered[self.rank] = tensor
        my_all_gather[(self.world,)](
            gathered.view(torch.uint8), signals, self.monitor.words, self.epoch, tensor.nbytes,
            BLOCK=triton.next_power_of_2(self.world),
        )  # fmt: skip
        return gathered


# %%
# What it lacks is worth having: the epoch is a number of the host's, so a CUDA graph of this call would set
# the same signals at every replay and wait for nothing. tdcoll keeps the epoch in device memory, where the
# kernels count it themselves, and captured calls are calls like any other. It cuts large pieces into chunks,
# so that more of the GPU takes part. And it takes groups, capacities and errors seriously.
#
# The data
# --------
#
# Each number says which rank made it, in which call and where in the piece. Integers, compared exactly.


# PyTorch 2.13 gave `all_gather_into_tensor` the name `all_gather_single`.
torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def make(rank, call, numel, device):
    return rank * 10_000_000 + call * 100_000 + torch.arange(numel, dtype=torch.int32, device=device)


def check(name, gathered, expected):
    """Raise unless both hold the same ``[world * numel]`` numbers."""
    wrong = (gathered.flatten() != expected.flatten()).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise AssertionError(
            f"{name}: {len(wrong)} of {expected.numel()} numbers are wrong; number {i} is "
            f"{gathered.flatten()[i]} and should be {expected.flatten()[i]}"
        )


def reference(tensor):
    """What torch.distributed makes of it: NCCL on GPUs, gloo on CPUs."""
    gathered = torch.empty(dist.get_world_size() * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    torch_all_gather(gathered, tensor)
    return gathered


# %%
# How long does a call take?
# --------------------------
#
# Only on GPUs is that a question; the simulator's times say something about Python.
#
# At these sizes the launch from Python would be most of it. So `graph_time_us` captures calls in CUDA graphs
# and times the replays. A rank that is late makes the others wait, so one rank's clock is not the answer: of
# each replay the slowest rank counts, and then the median over the replays.


def latencies(nbytes, ctx, algorithms):
    """Microseconds per call of each algorithm, of the in-place form and of NCCL; checked after timing.

    None for LL where the piece is too large for it.
    """
    from tdcoll.bench.timing import graph_time_us

    tensor = make(ctx.rank, 0, nbytes // 4, ctx.device)
    out = torch.empty(ctx.world_size * tensor.numel(), dtype=tensor.dtype, device=ctx.device)
    expected = reference(tensor)
    times = []
    for name in algorithms:
        if name == "ll" and nbytes > ctx.ll_bytes:
            times.append(None)
            continue
        out.zero_()
        times.append(graph_time_us(lambda name=name: tdcoll.all_gather(tensor, ctx, out, algorithm=name)))
        check(f"timed {name}", out, expected)
    buffer = tdcoll.empty(out.shape, out.dtype)
    buffer.chunk(ctx.world_size)[ctx.rank].copy_(tensor)
    times.append(graph_time_us(lambda: tdcoll.all_gather_in_place(buffer, ctx)))
    check("timed in place", buffer, expected)
    tdcoll.free(buffer)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # on the default stream NCCL's graphs were seen to take twice as long
        times.append(graph_time_us(lambda: torch_all_gather(out, tensor)))
    return times


def compare_latencies(ctx, algorithms, say):
    """Print them for some sizes."""
    names = [*algorithms, "in place", "NCCL"]
    say(f"microseconds per call:\n{'bytes per rank':>16}" + "".join(f"{name:>10}" for name in names))
    for nbytes in (1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20):
        times = latencies(nbytes, ctx, algorithms)
        say(f"{nbytes:16}" + "".join(f"{'-':>10}" if us is None else f"{us:10.1f}" for us in times))
    ctx.check()


# %%
# The story
# ---------


def main():
    tdcoll.initialize()
    topology = tdcoll.topology()
    rank, world = topology.rank, topology.world_size

    def say(text):
        tdcoll.barrier()  # so that it is true of all ranks: one that failed is not here
        if rank == 0:
            print(text, flush=True)

    say(f"{topology.describe()}")

    # Our own: several calls in a row, with nothing but its signals between them.
    numel, calls = 1000, 6
    mine = MyAllGather(numel, torch.int32)
    device = tdcoll.device()
    results = [mine(make(rank, call, numel, device)).clone() for call in range(calls)]
    mine.monitor.check()  # waits for the stream
    for call, result in enumerate(results):
        check("my_all_gather", result, reference(make(rank, call, numel, device)))
    say(f"my_all_gather: {calls} calls of {numel * 4} bytes per rank equal torch.distributed's")

    # The library's. A *context* owns the two slots, the signals and the epoch; its capacity is the most that
    # one rank contributes. It is bound to the CUDA stream that is current when it is made: the order of calls
    # on one stream is a part of the argument above. Use on another stream is an error; make one context per
    # stream.
    #
    # "1d": everybody puts to everybody, as above. "2d": between nodes a piece goes only to the rank with the
    # same place on each other node (its *rail*), which forwards it inside its node. So it crosses between two
    # nodes once, and not once per rank. "auto", the default, takes 2D for large pieces where there are several
    # nodes with several ranks each. On one node everybody gives to everybody in both; give launch.sh
    # `--emulate-nodes 2` to see the difference.
    #
    # "ll": for small pieces (up to 1 MiB that a rank sends to all others of its node; less over several nodes),
    # where "auto" takes it. Between nodes it puts along the rails as 2D does; what it saves, it saves inside a
    # node. A put with a signal crosses the wire three times: the data, their acknowledgement (the signal must not
    # overtake them), the signal. Here every 128-bit word, which arrives whole, holds 96 bits of data and 32 bits
    # of the epoch, stored straight into the peer's memory. So it says itself that it has arrived, and one
    # crossing is enough. It is a third more bytes, which is why large pieces do not go that way.
    sizes = (0, 1, 1000, 20_000)
    algorithms = ["1d"]
    if topology.ranks_per_node is None:
        say("2d: left out, it needs the same number of ranks on every node")
    else:
        algorithms.append("2d")
    with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 20) as ctx:
        small = [size for size in sizes if 4 * size <= ctx.ll_bytes]
        if small:
            algorithms.insert(0, "ll")
        for algorithm in algorithms:
            chosen = small if algorithm == "ll" else sizes
            for call, size in enumerate(chosen):
                tensor = make(rank, call, size, device)
                gathered = tdcoll.all_gather(tensor, ctx, algorithm=algorithm)
                ctx.check()  # waits for the stream; raises CollectiveTimeout if a peer did not answer
                check(f"all_gather {algorithm}", gathered, reference(tensor))
            told = ", ".join(str(4 * size) for size in chosen)
            say(f"all_gather {algorithm}: {told} bytes per rank equal torch.distributed's")

        # In a slot the result would have to be copied out. With `all_gather_in_place` you bring the buffer:
        # symmetric, and each rank has filled its own segment. There is only one of it, so the ranks first
        # tell each other that they have entered the call; that costs one more crossing, and pays for large
        # pieces.
        buffer = tdcoll.empty(world * numel, torch.int32)
        for call in range(3):
            tensor = make(rank, call, numel, device)
            buffer.chunk(world)[rank].copy_(tensor)
            tdcoll.all_gather_in_place(buffer, ctx)
            ctx.check()
            check("all_gather_in_place", buffer, reference(tensor))
        say("all_gather_in_place: 3 calls on one buffer equal torch.distributed's")

        # And for code that has `torch.distributed.all_gather_into_tensor` today: same arguments, tdcoll keeps
        # the context. (`async_op=True` returns a `Work`; the call is in the current stream's order all the same.)
        tensor = make(rank, 9, numel, device)
        out = torch.empty(world * numel, dtype=torch.int32, device=device)
        tdcoll.all_gather_into_tensor(out, tensor)
        check("all_gather_into_tensor", out, reference(tensor))
        say("all_gather_into_tensor: equals torch.distributed's")

        if device.type == "cuda":
            compare_latencies(ctx, algorithms, say)
        else:
            say("latency: not measured, the simulator's times mean nothing")

    tdcoll.finalize()


if __name__ == "__main__":
    main()
