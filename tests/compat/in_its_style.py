# SPDX-License-Identifier: Apache-2.0
"""A program as people write them for Triton-distributed: only its modules, torch and triton. Checks
its own results.

Run by ``launch.sh -m tdcoll.compat``, on GPUs or on the simulator, with any number of ranks and
nodes of one size.
"""

from __future__ import annotations

import os
import time

import nvshmem.core
import torch
import triton.language as tl
import triton_dist
import triton_dist.language as dl
from triton_dist.kernels.common_ops import set_signal, wait_eq
from triton_dist.kernels.nvidia.allgather_gemm import create_ag_gemm_context
from triton_dist.kernels.nvidia.common_ops import (
    BarrierAllContext,
    barrier_all_intra_node_atomic_cas_block,
    barrier_all_on_stream,
)
from triton_dist.kernels.nvidia.reduce_scatter import (
    create_reduce_scater_2d_ctx,
    reduce_scatter_2d_op,
)
from triton_dist.language.extra import libshmem_device
from triton_dist.language.extra.cuda.language_extra import ld_acquire
from triton_dist.language.extra.language_extra import (
    __syncthreads,
    atomic_add,
    atomic_cas,
    ld,
    st,
    tid,
)
from triton_dist.profiler_utils import perf_func
from triton_dist.utils import (
    CUDA_CHECK,
    NVSHMEM_SIGNAL_DTYPE,
    cuda,
    cudart,
    dist_print,
    finalize_distributed,
    generate_data,
    initialize_distributed,
    nvshmem_barrier_all_on_stream,
    nvshmem_create_tensor,
    nvshmem_create_tensors,
    nvshmem_free_tensor_sync,
    requires_p2p_native_atomic,
)


@triton_dist.jit
def pass_on(source, inbox, signal, out, turn, N: tl.constexpr, SCOPE: tl.constexpr):
    """Every rank gives its block to its successor in the node, which waits for it."""
    me = dl.rank()
    index = tl.arange(0, N)
    token = dl.wait(signal + 1, 1, "gpu", "acquire", waitValue=turn - 1)
    source = dl.consume_token(source, token)
    peer = tl.load(out + N).to(tl.int32)
    tl.store(dl.symm_at(inbox, peer) + index, tl.load(source + index) + me)
    __syncthreads()
    dl.notify(signal, peer, signal=turn, comm_scope=SCOPE)
    token = dl.wait(signal, 1, "sys", "acquire", waitValue=turn)
    inbox = dl.consume_token(inbox, token)
    tl.store(out + index, tl.load(inbox + index))
    __syncthreads()
    dl.notify(signal + 1, me, signal=1, sig_op="add", comm_scope="gpu")


@triton_dist.jit(do_not_specialize=["turn"])
def gather(buffer, signal, nbytes, turn, WORLD: tl.constexpr):
    me = dl.rank()
    peer = tl.program_id(0)
    if peer == me:
        if tid(0) < WORLD and tid(0) != me:
            libshmem_device.signal_wait_until(signal + tid(0), libshmem_device.NVSHMEM_CMP_EQ, turn)
        __syncthreads()
    else:
        mine = tl.cast(buffer, tl.pointer_type(tl.int8)) + me * nbytes
        libshmem_device.putmem_signal_block(
            mine, mine, nbytes, signal + me, turn, libshmem_device.NVSHMEM_SIGNAL_SET, peer
        )


@triton_dist.jit
def by_threads(words, floats, peers, N: tl.constexpr):
    if tid(0) < N:
        atomic_add(words, 1, "sys", "release")
        atomic_cas(words + 1 + tid(0), 0, tid(0) + 5, "gpu", "relaxed")
    __syncthreads()
    if tid(0) == 0:
        st(floats, ld(floats + 1) * 2, "sys", "relaxed")
        st(words + 1 + N, ld_acquire(words), "gpu", "release")


@triton_dist.jit
def multiply(a, b, out, ready, steps, WAIT: tl.constexpr, N: tl.constexpr):
    """Compiled only, by tests/compile: a matmul that waits for data."""
    rows = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    total = tl.zeros((N, N), tl.float32)
    for i in range(steps):
        if WAIT:
            token = dl.wait(ready + i, 1, "gpu", "acquire")
            a = dl.consume_token(a, token)
        total = tl.dot(tl.load(a + i * N * N + rows), tl.load(b + i * N * N + rows), total)
    tl.store(out + rows, total)


def check(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(got.cpu(), wanted.cpu()), (
        f"{name}: got {got.flatten()[:8]}, wanted {wanted.flatten()[:8]}"
    )
    dist_print(f"{name}: right", need_sync=True)


@requires_p2p_native_atomic
def main() -> None:
    group = initialize_distributed()
    rank, world = group.rank(), group.size()
    local_world, local = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    assert (local, torch.distributed.get_rank()) == (rank % local_world, rank)
    first = rank - local
    stream = torch.cuda.current_stream()
    before = first + (local - 1) % local_world

    inbox, signal = (
        nvshmem_create_tensor((64,), torch.int64),
        nvshmem_create_tensor((2,), NVSHMEM_SIGNAL_DTYPE),
    )
    signal.fill_(0)
    nvshmem_barrier_all_on_stream(stream)
    for turn in (1, 2, 3):
        source = torch.arange(64, device="cuda") * turn
        out = torch.full((65,), first + (local + 1) % local_world, device="cuda")
        pass_on[(1,)](
            source, inbox, signal, out, turn, 64, "intra_node" if turn < 3 else "inter_node"
        )
        check(f"pass on, turn {turn}", out[:64], torch.arange(64) * turn + before)
        nvshmem_barrier_all_on_stream(stream)

    gathered = nvshmem_create_tensor((world, 32), torch.int32)
    # one for each rank, as allocated
    arrived = [nvshmem_create_tensor((1,), NVSHMEM_SIGNAL_DTYPE) for _ in range(2)]
    for turn in (11, 12):
        gathered[rank] = torch.arange(32, device="cuda", dtype=torch.int32) + 100 * rank + turn
        nvshmem_barrier_all_on_stream()
        gather[(world,)](gathered, arrived[turn % 2], gathered[0].nbytes, turn, world)
        nvshmem_barrier_all_on_stream()
        check(
            "gather",
            gathered,
            torch.arange(32, dtype=torch.int32) + 100 * torch.arange(world)[:, None].int() + turn,
        )

    words, floats = (
        torch.zeros(16, dtype=torch.int32, device="cuda"),
        torch.full((2,), 1.5, device="cuda"),
    )
    by_threads[(1,)](words, floats, words, 4)
    check("by threads", words[:6], torch.tensor([4, 5, 6, 7, 8, 4], dtype=torch.int32))
    check("a float", floats, torch.tensor([3.0, 1.5]))

    column = torch.full((4096,), rank, dtype=torch.int32, device="cuda")
    if rank == 0:
        time.sleep(0.3)
    group.broadcast(column, 0)  # not waited for
    torch.cuda.synchronize()
    check("a broadcast", column, torch.zeros(4096, dtype=torch.int32))

    peers = nvshmem_create_tensors((8,), torch.float32, rank, local_world)
    flags = nvshmem_create_tensors((local_world,), torch.int64, rank, local_world)
    flags[local].fill_(0)
    barrier, meeting = BarrierAllContext(True), nvshmem_create_tensor((local_world,), torch.int32)
    meeting.fill_(0)
    nvshmem_barrier_all_on_stream()
    for turn in (1, 2, 3):
        mine = torch.full((8,), float(10 * rank + turn), device="cuda")
        (failed,) = cudart.cudaMemcpyAsync(
            peers[(local + 1) % local_world].data_ptr(),
            *(
                mine.data_ptr(),
                mine.nbytes,
                cudart.cudaMemcpyKind.cudaMemcpyDefault,
                stream.cuda_stream,
            ),
        )
        CUDA_CHECK(failed)
        set_signal(flags[(local + 1) % local_world][local].data_ptr(), turn, stream, True)
        wait_eq(flags[local][(local - 1) % local_world], turn, stream)
        check(f"copies, turn {turn}", peers[local], torch.full((8,), float(10 * before + turn)))
        barrier_all_on_stream(barrier, stream)
        barrier_all_intra_node_atomic_cas_block[(1,)](local, rank, local_world, meeting)
    word = torch.zeros(1, dtype=torch.int32, device="cuda")
    default = cuda.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
    CUDA_CHECK(cuda.cuStreamWriteValue32(stream.cuda_stream, word.data_ptr(), 7, default)[0])
    check("a word", word, torch.tensor([7], dtype=torch.int32))

    part, weights = torch.ones(4, 16, dtype=torch.float16), torch.ones(16, 8, dtype=torch.float16)
    context = create_ag_gemm_context(
        part, weights, rank, world, max_M=4 * world, BLOCK_M=64, stages=3
    )
    assert context.symm_workspace.shape == (4 * world, 16)
    assert context.symm_barrier.dtype == (torch.int64 if world > local_world else torch.int32)
    context.finalize()

    scatter = create_reduce_scater_2d_ctx(8 * world, 32, rank, world, local_world, torch.bfloat16)
    for rows in (8 * world, 2 * world):
        shards = [
            torch.full((rows, 32), float(one + 1)) + torch.arange(rows)[:, None] % 4
            for one in range(world)
        ]
        scatter.scatter_signal_buf.fill_(1)
        summed = reduce_scatter_2d_op(shards[rank].bfloat16().to("cuda"), scatter)
        part = slice(rank * rows // world, (rank + 1) * rows // world)
        check(f"reduce-scatter of {rows} rows", summed.float(), sum(shards)[part])
    scatter.finalize()

    (made,) = next(generate_data([((3, 4), torch.float32, (0.5, 2.0))]))
    assert made.shape == (3, 4)
    assert bool(((made >= 1.5) & (made <= 2.5)).all())
    _, milliseconds = perf_func(lambda: word.add_(1), iters=3, warmup_iters=1)
    assert milliseconds >= 0
    assert word.item() == 11
    barrier.finalize()
    for tensor in (inbox, signal, gathered, *arrived, peers[local], flags[local], meeting):
        nvshmem_free_tensor_sync(tensor)
    assert nvshmem.core.my_pe() == rank
    dist_print("all right", need_sync=True)
    finalize_distributed()


if __name__ == "__main__":
    main()
