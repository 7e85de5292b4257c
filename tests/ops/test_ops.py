# SPDX-License-Identifier: Apache-2.0
"""Compiled models and the pass that fuses, on one rank. ``tests/workers/operators_checks.py`` has
what takes several: the simulator's ranks in one process must not change inside of PyTorch's
dispatcher."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn

import tdcoll
from tdcoll import ops

tdc = torch.ops.tdcoll


on = functools.partial(on_ranks, heap_bytes=1 << 24)


def given(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Block(nn.Module):
    """A layer of a tensor-parallel model: two all-reduces, each followed by a residual and a
    norm."""

    def __init__(self, pe: int, norm: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(64, 64, bias=False) for _ in "ab")
        self.norms = nn.ModuleList(norm(64) for _ in "ab")
        for i, layer in enumerate((self.first, self.second)):
            layer.weight.data.copy_(given(pe + 10 * i, 64, 64) / 8)
        for norm_ in self.norms:
            norm_.weight.data.copy_(given(3, 64))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = tdc.all_reduce(self.first(x)) + residual
        x = self.norms[0](residual)
        residual = residual + tdc.all_reduce(torch.relu(self.second(x)))
        return self.norms[1](residual), residual


def count(graph: torch.fx.Graph, target: Any) -> int:
    return sum(node.target in (target, getattr(target, "default", None)) for node in graph.nodes)


@on(1)
def test_a_compiled_model_is_one_graph_and_is_fused(pe: int) -> None:
    model, x, residual = Block(pe), given(1, 3, 64), given(2, 3, 64)
    with torch.no_grad():
        wanted = model(x, residual)
        torch._dynamo.reset()
        whole = torch.compile(model, fullgraph=True, backend="aot_eager")(x, residual)
    made, _, n = fused(model, x, residual)
    for got, want in zip(whole, wanted, strict=True):
        assert torch.equal(got, want)
    torch.testing.assert_close(made, wanted)
    assert n == 2


class Reused(Block):
    """The sum of the ranks is wanted by itself, too."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
        total = tdc.all_reduce(self.first(x))
        return self.norms[0](total + residual), total


class Scaled(Block):
    """Not an addition of the sum as it is, nor of tensors of one shape, nor a sum."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
        total = tdc.all_reduce(self.first(x))
        scaled = self.norms[0](torch.add(residual, total, alpha=2))
        wide = self.norms[0](tdc.all_reduce(x) + residual[:1])
        return scaled, wide, self.norms[0](tdc.all_reduce(x, "max") + residual)


def fused(function: Any, *tensors: torch.Tensor) -> tuple[Any, list[torch.Tensor], int]:
    """``(results, tensors after the call, fused operators)`` of a function that is compiled by the
    pass."""
    seen: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graph = ops.fuse(module).graph
        seen.append(count(graph, tdc.all_reduce_rms_norm))
        assert seen[-1] == 0 or count(graph, tdc.all_reduce) == 0
        return module

    torch._dynamo.reset()
    given = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        results = torch.compile(function, fullgraph=True, backend=backend)(*given)
    return results, given, sum(seen)


@pytest.mark.parametrize("kind", [Reused, Scaled])
@on(1)
def test_what_is_not_the_same_is_not_fused(pe: int, kind: type[Block]) -> None:
    assert fused(kind(pe), given(1, 3, 64), given(2, 3, 64))[2] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@on(1)
def test_a_norm_without_eps_has_that_of_pytorch(pe: int, dtype: torch.dtype) -> None:
    """Of numbers whose squares are about as large as it."""
    norm = nn.RMSNorm(64, dtype=dtype)

    def layer(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return norm(tdc.all_reduce(x) + residual)

    x, residual = (given(seed, 3, 64, dtype=dtype) * 2**-11 for seed in (1, 2))
    got, _, n = fused(layer, x, residual)
    assert n == 1
    with torch.no_grad():
        torch.testing.assert_close(got, layer(x, residual))


WEIGHT = given(3, 64)


def norm(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(x, (64,), WEIGHT, 1e-6)


def onto_the_residual(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    residual += tdc.all_reduce(x)
    return norm(residual)


def onto_the_sum(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    total = tdc.all_reduce(x)
    total += residual
    return norm(total)


def changed_after_the_sum(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    total = tdc.all_reduce(x)
    x[0] = 0
    return norm(total + residual)


def changed_after_the_addition(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    new = tdc.all_reduce(x) + residual
    new.add_(1)
    return norm(new)


@pytest.mark.parametrize(
    ("layer", "wanted", "said"),
    [
        (onto_the_sum, 1, "fused 1 x all_reduce_rms_norm"),
        (onto_the_residual, 0, ": the addition writes over the residual"),
        (changed_after_the_sum, 0, ": something else is computed between the all-reduce and"),
        (changed_after_the_addition, 0, ": something else is computed between the all-reduce and"),
    ],
)
@on(1)
def test_writes_in_place_are_kept(
    pe: int, layer: Any, wanted: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says why nothing was fused."""
    caplog.set_level(logging.INFO, "tdcoll")
    tensors = given(1, 3, 64), given(2, 3, 64)
    results, after, n = fused(layer, *tensors)
    assert n == wanted
    torch.testing.assert_close(results, layer(*tensors))
    for got, want in zip(after, tensors, strict=True):
        assert torch.equal(got, want)
    (line,) = [line for line in caplog.messages if line.startswith("tdcoll.ops: ")]
    assert said in line


@on(1)
def test_a_derivative_of_one_row(pe: int) -> None:
    ours, theirs = ([given(seed, 64).requires_grad_() for seed in (1, 2, 3)] for _ in "ab")
    x, residual, weight = theirs
    nn.functional.rms_norm(x + residual, (64,), weight, 1e-6).square().sum().backward()
    tdc.all_reduce_rms_norm(*ours)[0].square().sum().backward()
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.grad, want.grad)


@on(2)
def test_names_of_groups(pe: int) -> None:
    assert ops.group_name() == ""
    assert ops.group_name([1, 0]) == "1,0,"
    assert ops.group_name([pe]) == f"{pe},"
    with pytest.raises(TypeError, match="group"):
        ops.group_name(3)


def test_the_module_is_imported_by_its_name() -> None:
    assert tdcoll.ops is ops
