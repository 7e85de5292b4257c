# SPDX-License-Identifier: Apache-2.0
"""Models that PyTorch's ``parallelize_module`` shares out, compiled with the pass that fuses
matmuls with collectives, on every rank of a job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from harness import check, device, expect, rank, world
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tdcoll import ops

HIDDEN, INNER = 32, 64
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
SEQUENCE = {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}
"""Fused calls of a forward and a backward pass of one MLP."""


class Block(nn.Module):
    """A norm and an MLP, which know nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def blocks() -> tuple[Block, Block]:
    """Return a model twice."""
    torch.manual_seed(1)
    first, second = Block().to(device()), Block().to(device())
    second.load_state_dict(first.state_dict())
    return first, second


class Calls:
    """Counts the calls of collectives and of fused operators that graphs make."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def count(self, graph: fx.Graph) -> None:
        """Count those of a graph."""
        for node in graph.nodes:
            name = getattr(node.target, "_opname", "")
            if name in (*COLLECTIVES, "matmul_all_reduce", *SEQUENCE):
                self.found[name] += 1

    def backend(self, module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        """Compile a graph without Inductor."""
        from functorch.compile import aot_module_simplified, make_boxed_func

        def compiler(inner: fx.GraphModule, inputs: Any) -> Any:
            ops.fuse_matmuls(inner.graph, functional=True)
            self.count(inner.graph)
            inner.recompile()
            return make_boxed_func(inner.forward)

        return aot_module_simplified(
            ops.fuse(module), inputs, fw_compiler=compiler, bw_compiler=compiler
        )

    def inductor(self, module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        """Compile a graph as users do, and look at the graphs that Inductor gets."""

        def fuse_and_count(graph: fx.Graph) -> None:
            ops._fuse_behind_autograd(graph)
            self.count(graph)

        return ops.fusing(module, inputs, options={"post_grad_custom_pre_pass": fuse_and_count})


def compare(plan: dict[str, Any], dimension: int | None, wanted: dict[str, int]) -> None:
    """Compare a model that is shared out and compiled with the whole one: results and gradients.

    Args:
        dimension: Of the activations that is shared out; None: each rank has all of them.
        wanted: How often each collective and fused operator is called.
    """
    mesh = init_device_mesh(device().type, (world(),))
    shape = (2 * world(), HIDDEN) if dimension == 0 else (4, 2 * world(), HIDDEN)
    whole_x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device())

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if dimension is None else tensor.chunk(world(), dimension)[rank()]

    for name in ("backend", "inductor"):
        model, whole = blocks()
        parallelize_module(model, mesh, plan)
        calls = Calls()
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=getattr(calls, name))
        x = part(whole_x).clone(memory_format=torch.contiguous_format).requires_grad_()
        y = compiled(x)
        local = y.to_local() if isinstance(y, DTensor) else y
        local.square().sum().backward()
        want_x = whole_x.clone().requires_grad_()
        want = whole(want_x)
        want.square().sum().backward()
        found = {key: count for key, count in calls.found.items() if count}
        expect(found == wanted, f"{name}: {found} instead of {wanted}")
        torch.testing.assert_close(local, part(want), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(x.grad, part(want_x.grad), atol=1e-3, rtol=1e-3)
        shards = {"up": 0, "down": 1}
        for layer, dim in shards.items():
            got = getattr(model, layer).weight.grad.to_local()
            full = getattr(whole, layer).weight.grad
            torch.testing.assert_close(got, full.chunk(world(), dim)[rank()], atol=1e-3, rtol=1e-3)


@check
def sequence_parallel_over_any_dimension() -> None:
    """The first dimension, and the second one, which PyTorch's style takes by default: nothing is
    gathered or scattered but by fused operators, in both passes."""
    for dimension in (0, 1):
        plan = {
            "norm": SequenceParallel(sequence_dim=dimension),
            "up": ColwiseParallel(input_layouts=Shard(dimension)),
            "down": RowwiseParallel(output_layouts=Shard(dimension)),
        }
        compare(plan, dimension, SEQUENCE)


@check
def tensor_parallel() -> None:
    """Activations that every rank has: a fused sum in the forward and in the backward pass."""
    plan = {
        "up": ColwiseParallel(input_layouts=Replicate()),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    compare(plan, None, {"matmul_all_reduce": 2})
