# SPDX-License-Identifier: Apache-2.0
"""The pass that fuses matmuls with collectives, and layers, on one rank;
``tests/workers/operators_checks.py`` has several."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import on_ranks
from torch import nn

import tdcoll
from tdcoll import ops
from tdcoll.ops.patterns import fuse_matmuls

tdc = torch.ops.tdcoll
FUSED = (
    tdc.all_gather_matmul.default,
    tdc.matmul_reduce_scatter.default,
    tdc.matmul_all_reduce.default,
)
COLLECTIVES = (
    tdc.all_gather,
    tdc.reduce_scatter,
    tdc.all_reduce,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
)

on = functools.partial(on_ranks, heap_bytes=1 << 26)


def given(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


W1 = given(1, 64, 32)
W2 = given(2, 32, 64)


@pytest.fixture
def pytorch_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def count(graph: torch.fx.Graph, targets: tuple[Any, ...]) -> int:
    return sum(node.target in targets for node in graph.nodes)


def compiled(function: Callable[..., Any], *tensors: torch.Tensor) -> tuple[Any, int, int]:
    """Return ``(results, fused operators, collectives that are left)`` of a function that is
    compiled by the pass."""
    found = [0, 0]

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graph = ops.fuse(module).graph
        found[0] += count(graph, FUSED)
        found[1] += count(graph, COLLECTIVES)
        return module

    torch._dynamo.reset()
    with torch.no_grad():
        results = torch.compile(function, fullgraph=True, backend=backend)(
            *[tensor.clone() for tensor in tensors]
        )
    return results, found[0], found[1]


def mlp(x: torch.Tensor) -> torch.Tensor:
    """A tensor- and sequence-parallel MLP, by tdcoll's operators."""
    inner = torch.relu(nn.functional.linear(tdc.all_gather(x), W1))
    return tdc.reduce_scatter(nn.functional.linear(inner, W2))


def mlp_of_products(x: torch.Tensor) -> torch.Tensor:
    inner = torch.relu(tdc.all_gather(x) @ W1.t())
    return tdc.all_reduce(torch.matmul(inner, W2.t()))


def with_bias(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(tdc.all_gather(x), W1, bias=W1[:, 0])


def qkv(x: torch.Tensor) -> torch.Tensor:
    """The gathered rows are used three times, and by themselves."""
    every = tdc.all_gather(x)
    return nn.functional.linear(every, W1) + every @ W1.t() + every.sum()


def through_views(x: torch.Tensor) -> torch.Tensor:
    every = tdc.all_gather(x).view(-1, 32)
    inner = nn.functional.linear(every, W1).reshape(x.shape[0], -1, 64)
    return tdc.reduce_scatter(nn.functional.linear(inner, W2).view(-1, 32))


def functional_mlp(x: torch.Tensor) -> torch.Tensor:
    """The same as DTensor makes it."""
    group = dist.group.WORLD
    every = functional.all_gather_tensor(x, 0, group)
    inner = torch.relu(nn.functional.linear(every, W1))
    return functional.reduce_scatter_tensor(nn.functional.linear(inner, W2), "sum", 0, group)


def functional_sum(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(nn.functional.linear(x, W1), "sum", dist.group.WORLD)


@pytest.mark.parametrize(
    ("function", "fused", "left"),
    [(mlp, 2, 0), (mlp_of_products, 2, 0), (with_bias, 1, 0), (qkv, 1, 0), (through_views, 2, 0)],
)
@on(1)
def test_matmuls_are_fused(pe: int, function: Callable[..., Any], fused: int, left: int) -> None:
    x = given(5, 4, 2, 32)
    results, n_fused, n_left = compiled(function, x)
    assert (n_fused, n_left) == (fused, left)
    assert torch.equal(results, function(x))


@pytest.mark.parametrize(("function", "fused"), [(functional_mlp, 2), (functional_sum, 1)])
@on(1)
def test_functional_collectives_are_fused(
    pe: int, pytorch_group: None, function: Any, fused: int
) -> None:
    x = given(5, 4, 32)
    results, n_fused, n_left = compiled(function, x)
    assert (n_fused, n_left) == (fused, 0)
    assert torch.equal(
        results, nn.functional.linear(torch.relu(x @ W1.t()), W2) if fused == 2 else x @ W1.t()
    )


def biased_parts(x: torch.Tensor) -> torch.Tensor:
    return tdc.all_reduce(nn.functional.linear(x, W1, W1[:, 0]))


def largest(x: torch.Tensor) -> torch.Tensor:
    return tdc.all_reduce(x @ W1.t(), "max")


def product_is_used(x: torch.Tensor) -> torch.Tensor:
    product = x @ W1.t()
    return tdc.all_reduce(product) + product


def gathered_is_changed(x: torch.Tensor) -> torch.Tensor:
    every = tdc.all_gather(x)
    every.add_(1)
    return every @ W1.t()


def source_is_changed(x: torch.Tensor) -> torch.Tensor:
    every = tdc.all_gather(x)
    x.add_(1)
    return every @ W1.t()


def odd_depth(x: torch.Tensor) -> torch.Tensor:
    return tdc.all_gather(x[..., :31].contiguous()) @ W1[:, :31].t()


BETWEEN = (
    "linear(all_gather) at {}: something else is computed between the all-gather and the matmul"
)


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (biased_parts, "all_reduce(linear) at {}: its bias would be added once for each rank"),
        (largest, ""),
        (product_is_used, "all_reduce(linear) at {}: the product has another use"),
        (gathered_is_changed, BETWEEN),
        (source_is_changed, BETWEEN),
        (odd_depth, "linear(all_gather) at {}: kernels take no rows of 31 and"),
    ],
)
@on(1)
def test_what_is_not_the_same_is_not_fused(
    pe: int, function: Callable[..., Any], left: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says what was left, and why."""
    caplog.set_level(logging.INFO, "tdcoll")
    x = given(5, 4, 32)
    results, n_fused, _ = compiled(function, x)
    assert n_fused == 0
    assert torch.equal(results, function(x.clone()))
    lines = [line for line in caplog.messages if line.startswith("tdcoll.ops: ")]
    pattern = "tdcoll.ops: fused nothing; left " + re.escape(left).replace(r"\{\}", r"\w+")
    assert [bool(re.match(pattern, line)) for line in lines] == [True] * bool(left), lines


@on(1)
def test_the_log_counts_what_is_fused(pe: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tdcoll")
    compiled(mlp, given(5, 4, 32))
    (line,) = [line for line in caplog.messages if line.startswith("tdcoll.ops: ")]
    assert line == "tdcoll.ops: fused 1 x all_gather_matmul, 1 x matmul_reduce_scatter"


@on(1)
def test_graphs_behind_autograd(pe: int, pytorch_group: None) -> None:
    """DTensor's collectives are found in the graphs that Inductor gets, and those of the backward
    pass, too."""
    from functorch.compile import aot_module_simplified, make_boxed_func

    found: list[int] = []

    def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(fuse_matmuls(module.graph, functional=True))
        assert count(module.graph, COLLECTIVES) == 0, "rows are gathered once, for both matmuls"
        module.recompile()
        return make_boxed_func(module.forward)

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        return aot_module_simplified(module, inputs, fw_compiler=compiler, bw_compiler=compiler)

    torch._dynamo.reset()
    x = given(5, 4, 32).requires_grad_()
    wanted = x.detach().clone().requires_grad_()
    weights = [weight.clone().requires_grad_() for weight in (W1, W2)]

    def layer(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        every = functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        inner = torch.relu(nn.functional.linear(every, first))
        product = nn.functional.linear(inner, second)
        return functional.reduce_scatter_tensor_autograd(product, "sum", 0, dist.group.WORLD)

    made = torch.compile(layer, fullgraph=True, backend=backend)(x, *weights)
    made.square().sum().backward()
    (torch.relu(wanted @ W1.t()) @ W2.t()).square().sum().backward()
    assert torch.equal(x.grad, wanted.grad)
    assert found == [2, 2]


# ---------------------------------------------------------------------- other dimensions


@pytest.fixture
def group_of_two() -> Iterator[None]:
    """A group that only traces."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def layer_over(dimension: int) -> Callable[..., torch.Tensor]:
    """Return an MLP whose rows are shared out over a dimension of ``x``, as DTensor does it."""

    def layer(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD
        every = functional.all_gather_tensor(x, dimension, group)
        inner = torch.relu(nn.functional.linear(every, first))
        product = nn.functional.linear(inner, second)
        return functional.reduce_scatter_tensor(product, "sum", dimension, group)

    return layer


def reversed_parts(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The parts change places."""
    group = dist.group.WORLD
    low, high = functional.all_gather_tensor(x, 0, group).split(x.shape[0])
    product = nn.functional.linear(nn.functional.linear(torch.cat([high, low], 1), first), second)
    low, high = product.split(x.shape[1], 1)
    return functional.reduce_scatter_tensor(torch.cat([high, low]), "sum", 0, group)


def smaller_parts(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Parts that are not those of the ranks: their rows come from and go to others."""
    group = dist.group.WORLD
    parts = functional.all_gather_tensor(x, 0, group).split(x.shape[0] // 2)
    product = nn.functional.linear(nn.functional.linear(torch.cat(parts, 1), first), second)
    parts = product.split(x.shape[1] // 2, 1)
    return functional.reduce_scatter_tensor(torch.cat(parts), "sum", 0, group)


def unequal_parts(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    parts = nn.functional.linear(nn.functional.linear(x, first), second).split([4, 2], 1)
    moved = torch.cat([parts[0], torch.cat([parts[1], parts[1]], 1)])
    return functional.reduce_scatter_tensor(moved, "sum", 0, group)


def parts_with_other_uses(
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    """The product is needed by itself."""
    group = dist.group.WORLD
    parts = nn.functional.linear(nn.functional.linear(x, first), second).split(3, 1)
    return functional.reduce_scatter_tensor(torch.cat(parts), "sum", 0, group) + parts[1].sum()


@pytest.mark.parametrize(
    ("layer", "fused"),
    [
        (layer_over(0), 2),
        (layer_over(1), 2),
        (layer_over(2), 2),
        (reversed_parts, 0),
        (smaller_parts, 0),
        (unequal_parts, 0),
        (parts_with_other_uses, 0),
    ],
    ids=["0", "1", "2", "reversed", "smaller", "unequal", "used"],
)
def test_rows_shared_out_over_any_dimension(
    group_of_two: None, layer: Callable[..., torch.Tensor], fused: int
) -> None:
    """The graph that is traced for two ranks; ``tests/workers/dtensor_checks.py`` runs it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.ones(4, 6, 8, 32) if layer.__name__ == "layer" else torch.ones(4, 6, 32)
    graph = make_fx(layer, tracing_mode="fake")(x, W1, W2).graph
    before = count(graph, COLLECTIVES)
    assert fuse_matmuls(graph, functional=True) == fused
    graph.eliminate_dead_code()
    assert count(graph, FUSED) == fused
    assert count(graph, COLLECTIVES) == before - fused


# ---------------------------------------------------------------------- layers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](x)))
        return x


@pytest.mark.parametrize("keep_gathered", [False, True])
@on(1)
def test_a_parallel_model_is_the_model(pe: int, keep_gathered: bool) -> None:
    torch.manual_seed(1)
    whole = Model()
    parts = Model()
    parts.load_state_dict(whole.state_dict())
    plan = {"layers.*.up": "columns", "layers.*.down": "rows"}
    ops.parallelize(parts, plan, keep_gathered=keep_gathered)
    x = given(7, 4, 32)
    torch.testing.assert_close(parts(x), whole(x))
    for model in (parts, whole):
        model(x).square().sum().backward()
    for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"layers.*.middle": "rows"}, "'layers.*.middle' fits no nn.Linear"),
        ({"layers.0": "rows"}, "fits no nn.Linear"),
        ({"layers.0.up": "both"}, "plan must have values 'columns' and 'rows'; got 'both'"),
    ],
)
@on(1)
def test_plans_that_do_not_fit(pe: int, plan: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.parallelize(Model(), plan)


@on(3)
def test_sizes_that_cannot_be_shared_out(pe: int) -> None:
    with pytest.raises(ValueError, match=r"a multiple of 3; got weight of shape \[64, 32\]"):
        tdcoll.ops.parallelize(Model(), {"layers.0.up": "columns"})
