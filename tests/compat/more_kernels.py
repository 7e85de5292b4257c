# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton-distributed's style for GPUs only: threads exchange registers; a matmul waits for data."""

import triton_dist
import triton_dist.language as dl
from triton import language as tl
from triton_dist.language.extra.cuda.language_extra import (
    __ballot_sync,
    __shfl_down_sync_i32,
    __shfl_sync_i32,
    __shfl_up_sync_i32,
    atomic_add_per_warp,
    laneid,
    load_v4_u32,
    pack_b32_v2,
    st_v4_b32,
    tid,
)
from triton_dist.language.extra.language_extra import num_warps, threads_per_warp


@triton_dist.jit
def extras(words, counter, out):
    me = tid(0)
    value = __shfl_sync_i32(0xFFFFFFFF, me, 0) + __shfl_up_sync_i32(0xFFFFFFFF, me, 1)
    value += (
        __shfl_down_sync_i32(0xFFFFFFFF, me, 1)
        + __ballot_sync(0xFFFFFFFF, me)
        + laneid()
        + num_warps() * threads_per_warp()
    )
    first, second, third, fourth = load_v4_u32(words + 4 * me)
    st_v4_b32(out + 4 * me, first, second, third, fourth, "sys", "relaxed")
    atomic_add_per_warp(counter, value, "gpu", "release")
    tl.store(out, pack_b32_v2(first, second).to(tl.int32))


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
