# SPDX-License-Identifier: Apache-2.0
"""A kernel in Triton-distributed's style for GPUs only: a matmul waits for data."""

import triton_dist
import triton_dist.language as dl
from triton import language as tl


@triton_dist.jit
def multiply(a, b, out, ready, steps, WAIT: tl.constexpr, N: tl.constexpr):
    rows = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    total = tl.zeros((N, N), tl.float32)
    for i in range(steps):
        if WAIT:
            token = dl.wait(ready + i, 1, "gpu", "acquire")
            a = dl.consume_token(a, token)
        total = tl.dot(tl.load(a + i * N * N + rows), tl.load(b + i * N * N + rows), total)
    tl.store(out + rows, total)
