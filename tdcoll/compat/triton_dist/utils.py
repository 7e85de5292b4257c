# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.utils``: joining a job, symmetric tensors, barriers on streams, and small
helpers."""

from __future__ import annotations

import datetime
import functools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import tdcoll
from tdcoll.calls.streams import barrier_on_stream as nvshmem_barrier_all_on_stream
from tdcoll.compat import stand_ins
from tdcoll.compat.triton_dist import nvshmem
from tdcoll.job import lifecycle
from tdcoll.language import INTERPRETED

if INTERPRETED:
    from tdcoll.compat.stand_ins import cuda, cudart
else:
    try:
        from cuda.bindings import driver as cuda  # type: ignore[no-redef]
        from cuda.bindings import runtime as cudart  # type: ignore[no-redef]
    except ImportError:  # a process that only compiles
        cuda = cudart = None  # type: ignore[assignment]

__all__ = [
    "CUDA_CHECK",
    "NVSHMEM_SIGNAL_DTYPE",
    "cuda",
    "cudart",
    "dist_print",
    "finalize_distributed",
]
__all__ += [
    "generate_data",
    "initialize_distributed",
    "nvshmem_barrier_all_on_stream",
    "nvshmem_create_tensor",
]
__all__ += [
    "nvshmem_create_tensors",
    "nvshmem_free_tensor_sync",
    "requires_p2p_native_atomic",
    "sleep_async",
]
__all__ += ["supports_p2p_native_atomic"]

NVSHMEM_SIGNAL_DTYPE = torch.int64

_HEAP_BYTES = 2 << 30
"""Symmetric heap of each rank if ``NVSHMEM_SYMMETRIC_SIZE`` is not set, because such programs keep
whole matrices there. On the simulator it takes memory only when it is written to."""

# ---------------------------------------------------------------------- joining and leaving


def initialize_distributed(
    seed: int | None = None, initialize_shmem: bool = True
) -> dist.ProcessGroup:
    """Make the process group by torchrun's variables, and join tdcoll's job. Collective.

    Every generator is seeded, and deterministic algorithms of full precision are chosen.

    Args:
        seed: generators get ``3 + seed``; default: the rank.
        initialize_shmem: whether to join the job; if False, make only the process group.

    Returns:
        A group of all ranks: NCCL's on GPUs, gloo's on the simulator and if ranks share GPUs.
    """
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if not INTERPRETED:
        torch.cuda.set_device(stand_ins.device_index() % torch.cuda.device_count())
    gloo = INTERPRETED or lifecycle.may_share_gpus()
    patience = datetime.timedelta(seconds=1800)
    dist.init_process_group(
        "gloo" if gloo else "cpu:gloo,cuda:nccl", rank=rank, world_size=world, timeout=patience
    )
    group = dist.new_group(list(range(world)), backend="gloo" if gloo else "nccl")
    dist.barrier(group)
    _seed(3 + (rank if seed is None else seed))
    if initialize_shmem:
        tdcoll.initialize(
            heap_bytes=None if os.environ.get("NVSHMEM_SYMMETRIC_SIZE") else _HEAP_BYTES
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _seed(number: int) -> None:
    torch.manual_seed(number)
    torch.cuda.manual_seed_all(number)
    np.random.seed(number % (1 << 32))  # noqa: NPY002, such programs draw from the global generator
    random.seed(number)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def finalize_distributed() -> None:
    """Leave tdcoll's job, and destroy the process groups. Collective."""
    tdcoll.finalize()
    dist.destroy_process_group()


# ---------------------------------------------------------------------- symmetric memory


def nvshmem_create_tensor(shape: Sequence[int] | int, dtype: torch.dtype) -> torch.Tensor:
    """``-> [*shape]`` symmetric tensor, uninitialised. Collective: :func:`.nvshmem.tensor`, behind
    all streams."""
    torch.cuda.synchronize()
    return nvshmem.tensor(shape, dtype)


def nvshmem_create_tensors(
    shape: Sequence[int] | int, dtype: torch.dtype, rank: int, local_world_size: int
) -> list[torch.Tensor]:
    """``-> local_world_size x [*shape]``: a symmetric tensor and its counterparts on this node, by
    local rank.

    Collective. The one at ``rank % local_world_size`` is this rank's own, and the one to free.
    """
    mine = nvshmem_create_tensor(shape, dtype)
    first = rank - rank % local_world_size
    return [tdcoll.peer_tensor(mine, peer) for peer in range(first, first + local_world_size)]


def nvshmem_free_tensor_sync(tensor: torch.Tensor) -> None:
    """Give back a tensor of :func:`nvshmem_create_tensor`. Collective; waits for this rank's
    GPU."""
    tdcoll.free(tensor)


# ---------------------------------------------------------------------- the machine


def CUDA_CHECK(err: Any) -> None:
    """Raise ``RuntimeError`` unless ``err``, a result of CUDA's driver or runtime, is success."""
    if int(err):
        raise RuntimeError(f"CUDA says {err!r}")


@functools.cache
def supports_p2p_native_atomic() -> bool:
    """Return whether atomics work on peers' memory."""
    if INTERPRETED or torch.cuda.device_count() <= 1:
        return True
    attribute = cudart.cudaDeviceP2PAttr.cudaDevP2PAttrNativeAtomicSupported
    failed, supported = cudart.cudaDeviceGetP2PAttribute(attribute, 0, 1)
    CUDA_CHECK(failed)
    return bool(supported)


def requires_p2p_native_atomic(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn``, which is right only if :func:`supports_p2p_native_atomic`."""
    return fn


def sleep_async(duration_ms: float) -> None:
    """Keep the current stream busy for about ``duration_ms`` milliseconds."""
    torch.cuda._sleep(int(torch.cuda.clock_rate() * 1e3 * duration_ms))  # clock_rate() is in MHz


# ---------------------------------------------------------------------- helpers of programs


def dist_print(
    *args: Any,
    allowed_ranks: Iterable[int] | str = (0,),
    prefix: bool = False,
    need_sync: bool = False,
    **kwargs: Any,
) -> None:
    """Print on some ranks, one after another; ``"all"``: on all of them. Collective with
    ``need_sync``."""
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    for allowed in range(world) if allowed_ranks == "all" else allowed_ranks:
        if need_sync:
            dist.barrier()
        if rank == allowed:
            print(*([f"[rank:{rank}]"] if prefix else []), *args, **kwargs, flush=True)


def _made(
    shape: Any, dtype: torch.dtype, init_args: Sequence[float], device: str = "cuda"
) -> torch.Tensor:
    """``-> [*shape]``: uniform in bias ± scale, where ``init_args`` are scale and bias."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    scale, bias = init_args
    if not dtype.is_floating_point:
        return torch.randint(-int(scale), int(scale), sizes, dtype=dtype, device=device) + int(bias)
    wide = torch.float16 if dtype.itemsize == 1 else dtype
    return ((torch.rand(sizes, dtype=wide, device=device) * 2 - 1) * scale + bias).to(dtype)


def generate_data(configs: Sequence[Any]) -> Iterator[Iterator[torch.Tensor | None]]:
    """Yield rounds without end, of a tensor for each ``(shape, dtype, (scale, bias)[, device])`` of
    ``configs``.

    A round has None for an empty one.
    """
    while True:
        yield (_made(*config) if config else None for config in configs)
