# SPDX-License-Identifier: Apache-2.0
"""
All-gather
==========

Every rank has a piece, and in the end every rank has all pieces, in rank order. You will learn

* how to write an all-gather as one small kernel that a CUDA graph can replay,
* four rules that keep it correct, and how it fails if you break one of them,
* how to call tdcoll's own all-gather, for small pieces, over several nodes, and without a copy,
* how far your kernel is from the lower bound and from NCCL.

Run it with the following command, or :doc:`from an installed wheel <index>`::

    bash launch.sh tutorials/02-all-gather.py

On GPUs it also prints times, and `--plot times.png` draws them. To take the path of a cluster, let one host pose as
two::

    bash launch.sh --emulate-nodes 2 tutorials/02-all-gather.py

The first tutorial explains signals, waits and symmetric memory. To leave out a rule, as there::

    bash launch.sh --simulate --nproc 1 tutorials/02-all-gather.py --break two-slots
"""

# %%
# An all-gather of your own
# -------------------------
#
# `buffer` is symmetric and has `world` segments of `nbytes` bytes. Each rank has filled its own. The launch has one
# block per peer, which puts our segment to the same place in that peer's buffer and sets signal number `me` there.
# One more block waits until all the others have signalled, so that the launch is over when everything has arrived.
#
# Rank r begins with peer r + 1. If every rank began with rank 0 instead, they would all write to the same GPU first.
#
# The signals are set to the number of the call, its *epoch*. The GPU counts it: each block has a word in `epochs`,
# adds 1 to it in every launch, and needs no other block for that. If the host passed the number instead, a CUDA graph
# of this call would set the same numbers in every replay, and its waits would be over before they began.

import argparse
from functools import partial

import helpers
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from helpers import say

import tdcoll
import tdcoll.language as tdl


@tdcoll.jit
def my_all_gather(
    buffer, signals, epochs, monitor, nbytes, WIDTH: tl.constexpr, COUNTED: tl.constexpr, WAITS_LAST: tl.constexpr
):  # fmt: skip
    me = tdl.my_pe()
    world = tdl.n_pes()
    block = tl.program_id(0)
    epoch = tl.load(epochs + block) + 1
    tdl.syncthreads()  # all threads have read the word
    if COUNTED:
        tl.store(epochs + block, epoch)
    turn = block if WAITS_LAST else world - 1 - block
    if turn < world - 1:
        peer = (me + 1 + turn) % world
        mine = buffer + tl.cast(me, tl.int64) * nbytes
        tdl.putmem_signal_block(mine, mine, nbytes, signals + me, epoch, tdl.SIGNAL_SET, peer)
    else:
        tdl.wait_signals(signals, world, me, tdl.CMP_GE, epoch, monitor, WIDTH)


# %%
# Calling it more than once
# -------------------------
#
# May a peer write into our buffer for call 2? It may be quick and be in call 2 while we still read the result of call
# 1. We therefore have two buffers and use them in turn. A *slot* is one of several equal buffers in which a rank
# receives messages. Time runs downwards::
#
#     rank 0, which is quick                         rank 1, which is slow
#     ----------------------                         ---------------------
#     call 1: put  ------------ slot 1 ----------->  call 1: put, wait, return
#             wait for rank 1, return                read slot 1
#     call 2: put  ------------ slot 0 ----------->  still read slot 1
#             wait for rank 1 ...                    still read slot 1
#                  <----------- slot 0 ------------  call 2: put, wait, return
#             ... return                             read slot 0
#     call 3: put  ------------ slot 1 ----------->  slot 1 is not read any more
#
# Call 3 is the first to write where call 1 did. A peer gets there only after it has heard from us in call 2, and we
# entered call 2 after we had read the result of call 1. The argument needs a signal from *every* peer in *every* call.
# An all-gather has that anyway, but a collective has to signal a peer even if it has no data for it.
#
# The simulator has drawn such calls:
#
# .. image:: /figures/two-slots.svg
#    :alt: Three calls: a slot is written again after its reader's next message
#
# These are the rules, with their names for `--break`:
#
# 1. **two-slots: calls use two slots in turn.** With one, a quick peer overwrites the result that we still read.
# 2. **own-signals: each slot has signals of its own.** Puts are not ordered, as the first tutorial said. With one row
#    of signals, the 2 of call 2 could arrive before the bytes of call 1, and 2 is "at least 1".
# 3. **epoch: the number in the signals grows.** Otherwise the signals of an earlier call satisfy the waits of this one.
# 4. **waiter-last: the block that waits is the last one.** A GPU starts blocks in order. If it has no capacity for all
#    of them, those that start must not wait for those that don't, so the blocks that send come first.


class MyAllGather:
    def __init__(self, numel, dtype, slots=2, rows=2, counted=True, waits_last=True):
        topology = tdcoll.topology()
        self.world, self.rank = topology.world_size, topology.rank
        self.slots = tdcoll.empty((slots, self.world, numel), dtype, name="slots")
        self.signals = tdcoll.zeros(
            (rows, self.world), torch.int64, name="signals"
        )  # before anybody signals
        self.epochs = torch.zeros((rows, self.world), dtype=torch.int64, device=tdcoll.device())
        self.constants = {
            "WIDTH": triton.next_power_of_2(self.world),
            "COUNTED": counted,
            "WAITS_LAST": waits_last,
        }
        self.monitor = tdcoll.WaitMonitor()
        self.calls = 0

    def __call__(self, tensor):
        self.calls += 1
        gathered = self.slots[self.calls % len(self.slots)]
        row = self.calls % len(self.signals)
        gathered[self.rank] = tensor
        my_all_gather[(self.world,)](
            gathered.view(torch.uint8), self.signals[row], self.epochs[row], self.monitor, tensor.nbytes,
            **self.constants,
        )  # fmt: skip
        return gathered


RULES = {
    "two-slots": ("calls use two slots in turn", {"slots": 1}),
    "own-signals": ("each slot has signals of its own", {"rows": 1}),
    "epoch": ("the number in the signals grows with every call", {"counted": False}),
    "waiter-last": ("the block that waits is the last one", {"waits_last": False}),
}

# %%
# The host chooses the slot, so a CUDA graph should hold an even number of these calls: the next replay then begins with
# the other slot. tdcoll's kernels choose the slot themselves, and a graph may hold any number. They also cut large
# pieces into chunks so that more of the GPU takes part, and they support groups and report misuse.
#
# The data
# --------
#
# Each number says which rank made it, in which call, and where it stands in the piece. They are integers, compared
# exactly.


# PyTorch 2.13 gave `all_gather_into_tensor` the name `all_gather_single`.
torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def make(rank, call, numel, device):
    return (
        rank * 10_000_000 + call * 100_000 + torch.arange(numel, dtype=torch.int32, device=device)
    )


def check(name, gathered, expected):
    """Raise unless both hold the same `[world * numel]` numbers."""
    wrong = (gathered.flatten() != expected.flatten()).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise AssertionError(
            f"{name}: {len(wrong)} of {expected.numel()} numbers are wrong; number {i} is "
            f"{gathered.flatten()[i]} and should be {expected.flatten()[i]}"
        )


def reference(tensor):
    """Return the result of torch.distributed: of NCCL on GPUs, of gloo on CPUs."""
    gathered = torch.empty(
        dist.get_world_size() * tensor.numel(), dtype=tensor.dtype, device=tensor.device
    )
    torch_all_gather(gathered, tensor)
    return gathered


def case(changes=()):
    """Return a case for `tdcoll.testing.explore`: six calls on every PE, each checked before the next."""

    def in_world(world):
        def host(pe):
            gather = MyAllGather(20, torch.int32, **dict(changes))
            for call in range(6):
                result = gather(make(pe, call, 20, "cpu"))
                world.pause()  # peers may go on meanwhile
                check(
                    "my_all_gather",
                    result,
                    torch.cat([make(rank, call, 20, "cpu") for rank in range(world.n_pes)]),
                )
            gather.monitor.check()

        world.run(host)

    return in_world


# %%
# How long does a call take?
# --------------------------
#
# Launched one by one from Python, calls of these sizes would take the time of the launch. We capture them in CUDA
# graphs instead. Every all-gather takes at least a launch and one hop from GPU to GPU, and at least the time in which
# (W - 1) n bytes leave a GPU. The longer of the two is the *lower bound*, here for H200s. Your kernel is above it for
# two reasons. A put with a signal takes three hops (the data, their acknowledgement, the signal), and one block per
# peer can't fill the link.


def time_calls(rank, world, plot):
    rows = {}
    # On the default stream, NCCL's graphs were seen to take twice as long.
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        tdcoll.CollectiveContext(max_bytes_per_rank=1 << 20) as ctx,
    ):
        for nbytes in (1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20):
            tensor = make(rank, 0, nbytes // 4, ctx.device)
            out = torch.empty(world * len(tensor), dtype=tensor.dtype, device=ctx.device)
            buffer = tdcoll.empty(out.shape, out.dtype)
            buffer.chunk(world)[rank].copy_(tensor)
            mine = MyAllGather(len(tensor), tensor.dtype)
            calls = {
                "my_all_gather": partial(mine, tensor),
                "tdcoll": partial(tdcoll.all_gather, tensor, ctx=ctx, out=out),
                "tdcoll in place": partial(tdcoll.all_gather_, buffer, ctx=ctx),
                "NCCL": partial(torch_all_gather, out, tensor),
            }
            rows[nbytes] = helpers.times_us((world - 1) * nbytes, calls)
            for name in ("my_all_gather", "tdcoll", "tdcoll in place"):
                check(f"{name} after it was timed", calls[name](), reference(tensor))
            mine.monitor.check()
            ctx.check()
    helpers.show_times("all-gather", rows, plot)


# %%
# The whole program
# -----------------


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--plot", metavar="FILE.png", help="on GPUs: draw the times (needs matplotlib)"
    )
    options = helpers.parse(parser, arguments, RULES, case, n_pes=4, resident=1)

    tdcoll.initialize()
    topology, device = tdcoll.topology(), tdcoll.device()
    rank, world = topology.rank, topology.world_size
    say(topology.describe())

    # Your own: several calls in a row, with only their signals between them.
    numel, calls = 1000, 6
    mine = MyAllGather(numel, torch.int32)
    results = [mine(make(rank, call, numel, device)).clone() for call in range(calls)]
    mine.monitor.check()  # waits for the stream
    for call, result in enumerate(results):
        check("my_all_gather", result, reference(make(rank, call, numel, device)))
    say(f"my_all_gather: {calls} calls of {numel * 4} bytes per rank equal torch.distributed's")

    # tdcoll's. A *context* owns the two slots, the signals and the epoch. `max_bytes_per_rank` is the most that one
    # rank sends to another in one epoch; a larger call takes several. The argument for two slots needs calls in order,
    # so a call on another stream waits there for the last one. The algorithms:
    #
    # - "1d": every rank puts to every other, as above.
    # - "2d": on several nodes, a piece goes only to the rank with the same place on each other node (along its *rail*),
    #   which forwards it inside its node. It crosses between two nodes once instead of once per rank.
    # - "ll": for small pieces inside a node. Every 128-bit word, which arrives whole, has 96 bits of data and 32 of the
    #   epoch, and is stored directly into the peer's memory. The word itself says that it has arrived, so one hop is
    #   enough where a put with a signal takes three. It sends a third more, which doesn't pay for large pieces.
    #
    # "auto", the default, chooses among these and more.
    sizes = (0, 1, 1000, 20_000)
    algorithms = ["1d"]
    if topology.n_nodes > 1 and topology.ranks_per_node:
        algorithms.append("2d")
    else:
        say("2d: left out, it needs several nodes of the same number of ranks")
    with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 20) as ctx:
        small = [size for size in sizes if 4 * size <= ctx.ll_bytes]
        if small:
            algorithms.insert(0, "ll")
        for algorithm in algorithms:
            chosen = small if algorithm == "ll" else sizes
            for call, size in enumerate(chosen):
                tensor = make(rank, call, size, device)
                gathered = tdcoll.all_gather(tensor, ctx=ctx, algorithm=algorithm)
                ctx.check()  # waits for the stream; raises CollectiveTimeout if a peer did not answer
                check(f"all_gather {algorithm}", gathered, reference(tensor))
            listed = ", ".join(str(4 * size) for size in chosen)
            say(f"all_gather {algorithm}: {listed} bytes per rank equal torch.distributed's")

        # From a slot, the result has to be copied out. With `all_gather_` you bring the buffer instead: it is
        # symmetric, and each rank has filled its own segment. Since there is only one buffer, the ranks first tell
        # each other that they have entered the call. That is one more hop, and pays for large pieces.
        buffer = tdcoll.empty(world * numel, torch.int32)
        for call in range(3):
            tensor = make(rank, call, numel, device)
            buffer.chunk(world)[rank].copy_(tensor)
            tdcoll.all_gather_(buffer, ctx=ctx)
            ctx.check()
            check("all_gather_", buffer, reference(tensor))
        say("all_gather_: 3 calls on one buffer equal torch.distributed's")

    # For code that calls `torch.distributed.all_gather_into_tensor` today: the same arguments, and tdcoll keeps the
    # context. (`async_op=True` returns a `Work`, but the call is made in the order of the current stream.)
    tensor = make(rank, 9, numel, device)
    out = torch.empty(world * numel, dtype=torch.int32, device=device)
    tdcoll.distributed.all_gather_into_tensor(out, tensor)
    check("all_gather_into_tensor", out, reference(tensor))
    say("all_gather_into_tensor: equals torch.distributed's")

    if why := helpers.untimed():
        say(f"time: not measured, because {why}")
    else:
        time_calls(rank, world, options.plot)
    tdcoll.finalize()


if __name__ == "__main__":
    main()
