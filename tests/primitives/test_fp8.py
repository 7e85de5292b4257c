# SPDX-License-Identifier: Apache-2.0
"""Every 8-bit number, and every place where rounding to one changes, against PyTorch."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

import tdcoll
from tdcoll.primitives.reduce import triton_dtype

from .cases import decoded, encoded, roundings

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_is_decoded_as_pytorch_does(dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8)
    got, wanted = decoded(codes, dtype), codes.view(dtype).float()
    assert torch.equal(got.isnan(), wanted.isnan())
    number = ~wanted.isnan()
    assert torch.equal(got[number].view(torch.int32), wanted[number].view(torch.int32))
    assert torch.equal(encoded(got, dtype)[number], codes[number])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_rounded_as_pytorch_does(dtype: torch.dtype) -> None:
    values, wanted = roundings(dtype)
    got, nan = encoded(values, dtype), values.isnan()
    assert len(values) > 100_000
    assert torch.equal(got[~nan], wanted[~nan])
    assert nan.any()
    assert (got[nan] & 0x7F == 0x7F).all()


def test_a_kind_for_every_dtype() -> None:
    assert triton_dtype(torch.float8_e5m2) == tl.float8e5
    assert triton_dtype(torch.bfloat16) == tl.bfloat16
    assert tdcoll.primitives.reduce.accumulator(torch.uint8) == tl.int32
