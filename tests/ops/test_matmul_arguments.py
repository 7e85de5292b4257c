# SPDX-License-Identifier: Apache-2.0
"""Operators of matmuls: bias, fp8 with scales, and a result of another dtype, on one rank.
``tests/workers/operators_checks.py`` has several."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ranks import on_ranks

import tdcoll.ops

tdc = torch.ops.tdcoll
NAMES = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
EACH = pytest.mark.parametrize("name", NAMES)
FP8 = torch.float8_e4m3fn
ROWS, DEPTH, COLUMNS = 4, 16, 32

on = functools.partial(on_ranks, heap_bytes=1 << 24)


def given(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=numbers).to(dtype)


def operator(name: str, *tensors: Any, **named: Any) -> torch.Tensor:
    """Call an operator, and return its result alone."""
    made = getattr(tdc, name)(*tensors, **named)
    return made[0] if name == "all_gather_matmul" else made


def scaled_operands() -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Operands of fp8, bias and scales."""
    x = given(1, ROWS, DEPTH).to(FP8)
    weight = given(2, COLUMNS, DEPTH).to(FP8)
    more = {
        "x_scale": torch.exp2(given(3, ROWS)),
        "weight_scale": torch.exp2(given(4, COLUMNS)),
        "bias": given(5, COLUMNS, dtype=torch.float16),
        "out_dtype": torch.float16,
    }
    return x, weight, more


@EACH
@on(1)
def test_scales_bias_and_dtype_reach_the_call(pe: int, name: str) -> None:
    x, weight, more = scaled_operands()
    product = x.float() @ weight.float().t()
    wanted = product * more["x_scale"][:, None] * more["weight_scale"] + more["bias"].float()
    made = operator(name, x, weight, **more)
    assert made.dtype is torch.float16
    torch.testing.assert_close(made, wanted.half(), atol=0.0, rtol=1e-3)
    assert torch.equal(made, getattr(tdcoll.fused, name)(x, weight, **more))
    more |= {"out_dtype": None, "bias": None}
    assert operator(name, x, weight, **more).dtype is torch.bfloat16


@EACH
@on(1)
def test_compiled_models_keep_them(pe: int, name: str) -> None:
    """Tensors without memory have the result's dtype, too."""
    x, weight, more = scaled_operands()
    bias = more.pop("bias")
    without_memory = operator(name, x.to("meta"), weight.to("meta"), out_dtype=torch.float32)
    assert without_memory.dtype is torch.float32
    assert operator(name, x.to("meta"), weight.to("meta")).dtype is torch.bfloat16

    def model(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return operator(name, x, weight, bias, **more) * 2

    torch._dynamo.reset()
    made = torch.compile(model, fullgraph=True, backend="aot_eager")(x, weight, bias)
    assert torch.equal(made, model(x, weight, bias))
    assert made.dtype is torch.float16


@EACH
@on(1)
def test_gradients_of_a_result_of_another_dtype(pe: int, name: str) -> None:
    """They have the dtypes of the tensors."""
    pull = given(4, ROWS, COLUMNS)

    def gradients(dtype: torch.dtype, whole: bool) -> list[torch.Tensor]:
        x = given(1, ROWS, DEPTH, dtype=dtype).requires_grad_()
        weight = given(2, COLUMNS, DEPTH, dtype=dtype).requires_grad_()
        bias = given(3, COLUMNS).requires_grad_()
        if whole:
            made = x @ weight.t() + bias
        else:
            made = operator(name, x, weight, bias, out_dtype=torch.float32)
        assert made.dtype is torch.float32
        (made * pull).sum().backward()
        return [x.grad, weight.grad, bias.grad]  # type: ignore[list-item]

    got = gradients(torch.bfloat16, whole=False)
    assert [grad.dtype for grad in got] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for mine, wanted in zip(got, gradients(torch.float32, whole=True), strict=True):
        torch.testing.assert_close(mine.float(), wanted, atol=0.0, rtol=2**-7)


@EACH
@on(1)
def test_operands_of_fp8_have_no_derivative(pe: int, name: str) -> None:
    for place in ("x", "weight", "x_scale", "weight_scale"):
        x, weight, more = scaled_operands()
        tensors = {"x": x, "weight": weight, **more}
        tensors[place] = tensors[place].requires_grad_()
        with pytest.raises(ValueError, match=f"^{place} must not require grad with operands of"):
            operator(name, **tensors)


@EACH
@on(1)
def test_the_bias_of_fp8_operands_has_one(pe: int, name: str) -> None:
    x, weight, more = scaled_operands()
    bias = more["bias"].requires_grad_()
    operator(name, x, weight, **more).sum().backward()
    assert torch.equal(bias.grad, torch.full((COLUMNS,), float(ROWS), dtype=torch.float16))
