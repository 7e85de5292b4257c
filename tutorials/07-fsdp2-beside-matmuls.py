# SPDX-License-Identifier: Apache-2.0
"""
FSDP2 beside matmuls
====================

FSDP2 shards a model's parameters over the ranks. It gathers a layer's parameters shortly before the layer needs them,
and reduces gradients when the layer's backward pass is over, both while the matmuls of other layers run. You will learn

* how to count what a step sends and computes, and how much of its communication matmuls can hide,
* how to write FSDP2's collectives yourself, here to count bytes and to write down their order,
* how to move them to symmetric memory by one line, with the same losses to the bit,
* how to see where the time of a step goes: compute, and communication that is exposed.

Run it with the following command, or :doc:`from an installed wheel <index>`::

    bash launch.sh tutorials/07-fsdp2-beside-matmuls.py

On GPUs it also prints times, and `--plot step.png` draws them.
"""

import argparse
import os
import time
from functools import partial

import helpers
import torch
import torch.distributed as dist
from helpers import H200
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tdcoll
import tdcoll.distributed
from tdcoll.distributed import fsdp
from tdcoll.language import INTERPRETED

# %%
# A prediction
# ------------
#
# Each of W ranks has 1 / W of the parameters, and all tokens of its own batch. In the forward pass it gathers every
# layer once. FSDP2 then drops the gathered parameters, so the backward pass gathers them again, and reduces the
# gradients. With P parameters of s bytes::
#
#     bytes that leave a rank              3 * (W - 1) / W * P * s
#     floating-point operations of a rank  6 * P * tokens
#
# The bytes don't depend on the number of tokens, and the operations do. With 2 ranks and bfloat16, a parameter takes 3
# bytes, which are 8.3 ps at the 361 GB/s of two H200s, and 6 operations per token, which are 7.5 fs at 800 TFLOP/s.
# From 1100 tokens on, matmuls take longer than communication, and can hide all of it except the first all-gather and
# the last reduce-scatter.
#
# That holds if communication takes nothing away from the matmuls. A collective that copies with multiprocessors does:
# each multiprocessor that copies is one that doesn't multiply. Copy engines are other hardware, and take only some
# memory bandwidth.

TFLOPS = 800.0
"""Rate of a large bfloat16 matmul on an H200, in TFLOP/s."""


def sent_bytes(weights, world):
    """Return `(by all-gathers, by reduce-scatters)`: the bytes that leave a rank in a step.

    FSDP2 cuts each weight by its rows, after it has rounded their number up.
    """
    once = 0
    for weight in weights:
        rows = -(-weight.shape[0] // world)
        once += (world - 1) * rows * weight[0].nbytes
    return 2 * once, once


def predicted_ms(weights, tokens, world):
    """Return `(communication, compute)` of a step on H200s, in milliseconds."""
    link = sum(sent_bytes(weights, world)) / H200.rate(world) / 1e6
    operations = 6 * tokens * sum(weight.numel() for weight in weights)
    return link, operations / TFLOPS / 1e9


# %%
# The model
# ---------
#
# Each layer is sharded by itself. `fully_shard(model)` at the end makes the whole model the root, which has no
# parameters of its own here.


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def make_model(options, mesh=None):
    """Return the model, sharded over a mesh if one is given. It is the same on all ranks, and in every call."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    model = Model(options.width, options.layers).to(tdcoll.device(), dtype)
    if mesh is not None:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def make_step(model, options):
    """Return a function that makes a step on this rank's batch, and returns the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(2 + dist.get_rank())
    batch = torch.randn(options.tokens, options.width)
    batch = batch.to(tdcoll.device(), next(model.parameters()).dtype)

    def step():
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# %%
# FSDP2's collectives
# -------------------
#
# FSDP2 lets you replace its all-gather and its reduce-scatter by objects with two methods. `allocate` returns memory,
# and a call communicates. These two do what FSDP2 does, and count.
#
# FSDP2 copies this rank's shard to its place in the memory before it calls the all-gather, so the input lies in the
# output. The reduce-scatter is given two tensors, and its output becomes the gradient.


class Counted:
    """A collective of FSDP2 that counts the bytes that leave this rank, and writes down its calls."""

    def __init__(self, letter, number, collective, order):
        self.label = f"{letter}{number}"
        self.collective = collective
        self.order = order
        self.nbytes = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, **more):
        more.pop("async_op", None)
        self.order.append(self.label)
        segment = min(output_tensor.nbytes, input_tensor.nbytes)
        self.nbytes += (group.size() - 1) * segment
        self.collective(output_tensor, input_tensor, group=group, **more)


# PyTorch 2.13 gave these functions other names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def note_backward(order, label, layer, inputs, output):
    """Write down when the gradient of a layer's output is there, at which its backward pass begins."""
    output.register_hook(lambda grad: order.append(label))


def count_step(model, step):
    """Make a step with counted collectives; return `(gathered, scattered)` bytes and the order of calls."""
    order = []
    gathers = []
    scatters = []
    for number, layer in enumerate(model.layers):
        gathers.append(Counted("g", number, all_gather, order))
        scatters.append(Counted("s", number, reduce_scatter, order))
        layer.set_custom_all_gather(gathers[-1])
        layer.set_custom_reduce_scatter(scatters[-1])
        layer.register_forward_pre_hook(lambda *_, n=number: order.append(f"F{n}"))
        layer.register_forward_hook(partial(note_backward, order, f"B{number}"))
    step()
    sums = [sum(one.nbytes for one in group) for group in (gathers, scatters)]
    return sums, order


# %%
# With three layers, the program prints this order::
#
#     g0 F0 g1 F1 g2 F2    B2 g2 g1 s2    B1 g0 s1    B0 s0
#
# `g1` stands behind `F0`, but the host only queues both. They are on different streams, so the gather of layer 1 runs
# beside the matmuls of layer 0. In the backward pass FSDP2 asks for the next layer's parameters (`g1`) before it
# reduces the gradients of this one (`s2`), because the next matmuls wait for the parameters. A gather and a reduction
# are then in flight at the same time. tdcoll has a context for each, because calls of one context come one after the
# other.

# %%
# Symmetric memory
# ----------------
#
# One line moves both to tdcoll. `fsdp.plan(model)` says before how much of the symmetric heap that takes: two buffers
# for gathered layers, because FSDP2 copies parameters out of one while it gathers into the other, and an inbox for
# gradients. The all-gathers take the two buffers in turn, so every rank knows where the others' shards lie, and its
# copy engines pull them from there.
#
# tdcoll sums gradients in rank order in fp32, as backend "tdcoll" does. Losses are therefore equal to the bit.


def train(mesh, options, symmetric):
    """Train a model; return the losses of this rank, and the calls that were made in symmetric memory."""
    model = make_model(options, mesh)
    communication = fsdp.use(model) if symmetric else None
    step = make_step(model, options)
    losses = torch.stack([step() for _ in range(options.steps)])
    if communication is None:
        return losses, {}
    communication.check()
    calls = communication.calls
    communication.close()
    return losses, calls


def check_equal(name, got, wanted):
    """Raise unless losses are equal to the bit."""
    if not torch.equal(got, wanted):
        differ = (got - wanted).abs().max().item()
        raise AssertionError(
            f"{name}: losses differ by {differ}: {got.tolist()}, {wanted.tolist()}"
        )


# %%
# Where the time goes
# -------------------
#
# A step's time has two parts: the time of the model without communication, on parameters that every rank has as a
# whole, and the rest, which is *exposed* communication. Communication that matmuls hide is in neither. The time in
# which the collectives would run by themselves is about that of `predicted_ms`.
#
# With NCCL, the exposed part contains what NCCL's copies cost the matmuls beside them. On 2 H200s, 8 layers of width
# 4096 took 102 ms a step over NCCL with 8192 tokens, and 87 without communication; with 2048 tokens 39 and 21.


def step_ms(step, repetitions=10):
    """Return the milliseconds of a step on the slowest rank: the median."""
    times = []
    for _ in range(3 + repetitions):
        torch.cuda.synchronize()
        tdcoll.barrier()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    slowest = torch.tensor(times[3:], device=tdcoll.device())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.median().item()


def time_steps(meshes, options):
    """Return `{way: milliseconds}` of a step."""
    found = {"compute alone": step_ms(make_step(make_model(options), options))}
    for way, mesh in meshes.items():
        found[way] = step_ms(make_step(make_model(options, mesh), options))
    model = make_model(options, meshes["backend"])
    with fsdp.use(model) as communication:
        found["symmetric"] = step_ms(make_step(model, options))
        communication.check()
    return found


def draw(found, predicted, plot):
    """Draw compute and exposed communication of each way."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    ways = list(found)
    alone = found["compute alone"]
    axes.barh(ways, [alone] * len(ways), label="compute alone")
    exposed = [max(0.0, ms - alone) for ms in found.values()]
    axes.barh(ways, exposed, left=alone, label="exposed communication")
    axes.axvline(sum(predicted), color="black", linestyle=":", label="predicted, nothing hidden")
    axes.set(xlabel="ms per step (lower is better)")
    axes.legend()
    figure.savefig(plot, dpi=120)


# %%
# The whole program
# -----------------

SIMULATED = {"width": 16, "layers": 3, "tokens": 8, "steps": 4}
ON_GPUS = {"width": 2048, "layers": 6, "tokens": 4096, "steps": 10}


def main(arguments=None):
    parser = argparse.ArgumentParser()
    for name, size in (SIMULATED if INTERPRETED else ON_GPUS).items():
        parser.add_argument(
            f"--{name}", type=int, default=size, metavar="N", help=f"default: {size}"
        )
    parser.add_argument(
        "--plot", metavar="FILE.png", help="on GPUs: draw the times (needs matplotlib)"
    )
    options = parser.parse_args(arguments)

    if not INTERPRETED:  # the simulator has no GPUs
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    heap = tdcoll.distributed.Options(heap_bytes=None if INTERPRETED else "1G")
    dist.init_process_group("tdcoll", pg_options=heap)
    world, device = dist.get_world_size(), tdcoll.device()
    say = helpers.say
    say(tdcoll.topology().describe())

    why = helpers.untimed()
    groups = {"backend": dist.group.WORLD}
    if INTERPRETED:
        groups["gloo"] = dist.new_group(backend="gloo")
    elif why is None:  # NCCL refuses ranks that share a GPU
        groups["NCCL"] = dist.new_group(backend="nccl")
    meshes = {way: DeviceMesh.from_group(group, device.type) for way, group in groups.items()}

    model = make_model(options, meshes["backend"])
    weights = list(make_model(options).parameters())
    plan = fsdp.plan(model)
    say(f"plan: {plan.heap_bytes} bytes of the symmetric heap, before anything is allocated")
    counted, order = count_step(model, make_step(model, options))
    wanted = list(sent_bytes(weights, world))
    if counted != wanted:
        raise AssertionError(f"expected {wanted} bytes to leave this rank, and counted {counted}")
    say(
        f"bytes: {counted[0]} by all-gathers and {counted[1]} by reduce-scatters leave a rank in a step"
    )
    say(f"order: {' '.join(order)}")

    losses = {way: train(mesh, options, False)[0] for way, mesh in meshes.items()}
    losses["symmetric"], calls = train(meshes["backend"], options, True)
    if calls != {
        "all_gather": 2 * options.layers * options.steps,
        "reduce_scatter": options.layers * options.steps,
    }:
        raise AssertionError(f"expected all calls in symmetric memory, and counted {calls}")
    check_equal("symmetric and backend", losses["symmetric"], losses["backend"])
    for way, other in losses.items():
        if world == 2:  # the sum of two numbers has no order
            check_equal(f"symmetric and {way}", losses["symmetric"], other)
        torch.testing.assert_close(losses["symmetric"], other, rtol=1e-2, atol=1e-4)
    equal = ", ".join(way for way in losses if torch.equal(losses[way], losses["symmetric"]))
    say(f"losses: equal to the bit by {equal}")

    if why:
        say(f"time: not measured, because {why}")
    else:
        found = time_steps(meshes, options)
        alone = found["compute alone"]
        predicted = predicted_ms(weights, options.tokens, world)
        say("predicted: {:.2f} ms of communication, {:.2f} of compute".format(*predicted))
        for way, ms in found.items():
            say(
                f"{way}: {ms:.2f} ms per step, of which {max(0.0, ms - alone):.2f} are exposed communication"
            )
        if options.plot and dist.get_rank() == 0:
            draw(found, predicted, options.plot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
