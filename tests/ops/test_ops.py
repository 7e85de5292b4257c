# SPDX-License-Identifier: Apache-2.0
"""Compiled models, on one rank. ``tests/workers/operators_checks.py`` has what takes several:
the simulator's ranks in one process must not change inside of PyTorch's dispatcher."""

from __future__ import annotations

import functools

import pytest
import torch
from ranks import on_ranks
from torch import nn

import tdcoll
from tdcoll import ops

tdc = torch.ops.tdcoll
EPS = 1e-6

on = functools.partial(on_ranks, heap_bytes=1 << 24)


def given(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Block(nn.Module):
    """A layer of a tensor-parallel model: two all-reduces, each followed by a residual and a norm."""

    def __init__(self, pe: int) -> None:
        super().__init__()
        self.fused = False
        self.first, self.second = (nn.Linear(64, 64, bias=False) for _ in "ab")
        self.norms = nn.ModuleList(nn.RMSNorm(64, eps=EPS) for _ in "ab")
        for i, layer in enumerate((self.first, self.second)):
            layer.weight.data.copy_(given(pe + 10 * i, 64, 64) / 8)
        for norm_ in self.norms:
            norm_.weight.data.copy_(given(3, 64))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer, norm in ((self.first, self.norms[0]), (self.second, self.norms[1])):
            if self.fused:
                x, residual = tdc.all_reduce_rms_norm(layer(x), residual, norm.weight, EPS)
            else:
                residual = tdc.all_reduce(layer(x)) + residual
                x = norm(residual)
        return x, residual


@pytest.mark.parametrize("fused", [False, True])
@on(1)
def test_a_compiled_model_is_one_graph(pe: int, fused: bool) -> None:
    model, x, residual = Block(pe), given(1, 3, 64), given(2, 3, 64)
    with torch.no_grad():
        wanted = model(x, residual)
        model.fused = fused
        torch._dynamo.reset()
        whole = torch.compile(model, fullgraph=True, backend="aot_eager")(x, residual)
    for got, want in zip(whole, wanted, strict=True):
        torch.testing.assert_close(got, want, **({} if fused else {"rtol": 0, "atol": 0}))


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
