# SPDX-License-Identifier: Apache-2.0
"""8-bit floating-point numbers (e4m3fn, e5m2) to and from fp32, by arithmetic on their bits.

Triton's conversions are not used, because GPUs before sm_89 have none of e4m3fn, and the
interpreter's differ from GPUs' in NaN, infinities and rounding. The same source is compiled and
interpreted, so the bits are the same.

:func:`encode` rounds to nearest, ties to even, as ``tensor.to(dtype)`` of PyTorch does from fp32.
If a value is too large, it becomes the largest number of e4m3fn, which is 448 (infinities too), and
infinity of e5m2. (PyTorch before 2.12 makes it NaN in e4m3fn.) NaN stays NaN. Subnormal numbers are
kept.
"""

import triton.language as tl

from tdcoll.language.jit import jit


@jit
def decode(codes, DTYPE: tl.constexpr):
    """Return the numbers of 8-bit ``codes``, integers of any type, in fp32; exact."""
    # Their exponents and fractions are also those of fp16, whose exponent begins at the same bit or
    # one above.
    wide = codes.to(tl.int32)
    if DTYPE == tl.float8e5:
        value = (wide << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = wide & 0x7F
        half = (((wide & 0x80) << 8) | (low << 7)).to(tl.int16)
        # the bias of fp16 is larger by 8
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where(low == 0x7F, float("nan"), value)
    return value


@jit
def encode(values, DTYPE: tl.constexpr):
    """Return the 8-bit codes, uint8, of numbers in fp32, rounded once."""
    e5m2: tl.constexpr = DTYPE == tl.float8e5
    fraction: tl.constexpr = 2 if e5m2 else 3  # bits
    bias: tl.constexpr = 15 if e5m2 else 7
    most: tl.constexpr = 0x7C if e5m2 else 0x7E  # infinity, or the largest number
    cut: tl.constexpr = 23 - fraction
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    finite = tl.minimum(magnitude, 0x7F800000)
    # A carry out of the fraction goes to the exponent, as it should.
    normal = ((finite + ((1 << (cut - 1)) - 1) + ((finite >> cut) & 1)) >> cut) - (
        (127 - bias) << fraction
    )
    # Added to a number whose last bit is worth the least subnormal number, fp32 rounds to multiples
    # of that.
    anchor: tl.constexpr = (127 + 24 - bias - fraction) << 23
    sum = finite.to(tl.float32, bitcast=True) + tl.full(finite.shape, anchor, tl.int32).to(
        tl.float32, bitcast=True
    )
    subnormal = sum.to(tl.int32, bitcast=True) - anchor
    code = tl.minimum(tl.where(finite < ((128 - bias) << 23), subnormal, normal), most)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
