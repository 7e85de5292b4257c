# SPDX-License-Identifier: Apache-2.0
"""Numbers of 8 bits, encoded and decoded by kernels, here and in jobs on GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tdcoll.language.jit import jit
from tdcoll.primitives import fp8
from tdcoll.primitives.reduce import triton_dtype


@jit
def decode_all(codes, out, DTYPE: tl.constexpr):
    """``[256] uint8 -> [256] fp32``."""
    at = tl.arange(0, 256)
    tl.store(out + at, fp8.decode(tl.load(codes + at), DTYPE))


@jit
def encode_all(values, out, count, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """``[count] fp32 -> [count] uint8``, by one program for each BLOCK numbers."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, fp8.encode(tl.load(values + at, mask=at < count), DTYPE), mask=at < count)


def decoded(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[256] uint8 -> [256] fp32``."""
    out = torch.empty(256, device=codes.device)
    decode_all[(1,)](codes, out, triton_dtype(dtype))
    return out


def encoded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[n] fp32 -> [n] uint8``."""
    out, block = (
        torch.empty(len(values), dtype=torch.uint8, device=values.device),
        4096 if values.is_cuda else 1 << 18,
    )
    encode_all[(triton.cdiv(len(values), block),)](
        values, out, len(values), triton_dtype(dtype), block
    )
    return out


def roundings(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``(fp32, codes)``: numbers of every exponent and both signs, every number halfway between two
    of ``dtype`` and its neighbours, and what PyTorch makes of them; clamped, because before 2.12 it
    makes no numbers of infinities."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    known = torch.arange(256).to(torch.uint8).view(dtype).double()
    known = known[known.isfinite()].sort().values
    halfway = ((known[1:] + known[:-1]) / 2).float().view(torch.int32).to(torch.int64)
    bits = torch.cat(
        [upper, upper + 1, upper + 0x8000, upper + 0xFFFF, halfway - 1, halfway, halfway + 1]
    )
    values = bits.to(torch.int32).view(torch.float32)
    limit = torch.finfo(dtype).max if dtype == torch.float8_e4m3fn else float("inf")
    return values, values.clamp(-limit, limit).to(dtype).view(torch.uint8)
