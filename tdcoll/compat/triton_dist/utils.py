# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.utils``: joining a job, symmetric tensors, barriers on streams, and small helpers."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import tdcoll
from tdcoll.compat import nodes
from tdcoll.compat.missing import attributes_of
from tdcoll.compat.triton_dist import nvshmem_core
from tdcoll.language import INTERPRETED
from tdcoll.runtime import lifecycle

if INTERPRETED:
    from tdcoll.compat.cuda import Driver as cuda
    from tdcoll.compat.cuda import Runtime as cudart
else:
    try:
        from cuda.bindings import driver as cuda  # type: ignore[no-redef]
        from cuda.bindings import runtime as cudart  # type: ignore[no-redef]
    except ImportError:  # a process that only compiles
        cuda = cudart = None  # type: ignore[assignment, misc]

__all__ = [
    "CUDA_CHECK",
    "NVSHMEM_SIGNAL_DTYPE",
    "TorchStreamWrapper",
    "barrier_async",
    "cuda",
    "cudart",
    "dist_print",
    "finalize_distributed",
    "generate_data",
    "get_bool_env",
    "get_device_max_shared_memory_size",
    "get_device_property",
    "get_int_env",
    "get_triton_dist_local_world_size",
    "get_triton_dist_world",
    "has_fullmesh_nvlink",
    "has_tma",
    "init_nvshmem_by_torch_process_group",
    "init_seed",
    "initialize_distributed",
    "is_ascend",
    "is_cuda",
    "is_fp8_dtype",
    "is_hip",
    "is_maca",
    "is_shmem_initialized",
    "launch_cooperative_grid_options",
    "nvshmem_barrier_all_on_stream",
    "nvshmem_create_tensor",
    "nvshmem_create_tensors",
    "nvshmem_free_tensor_sync",
    "requires",
    "requires_p2p_native_atomic",
    "sleep_async",
    "support_launch_cooperative_grid",
    "supports_p2p_native_atomic",
    "torch_stream_max_priority",
    "with_torch_deterministic",
]

__getattr__ = attributes_of("triton_dist.utils")

NVSHMEM_SIGNAL_DTYPE = torch.int64

_HEAP_BYTES = 2 << 30
"""Symmetric heap of each rank, if ``NVSHMEM_SYMMETRIC_SIZE`` is not set: such programs keep whole matrices there. On
the simulator it takes memory only for what is written to."""

_world: dist.ProcessGroup | None = None

# ---------------------------------------------------------------------- joining and leaving


def init_seed(seed: int = 0) -> None:
    """Seed every generator with ``3 + seed``, and choose deterministic algorithms and full precision."""
    number = 3 + seed
    torch.manual_seed(number)
    torch.cuda.manual_seed_all(number)
    np.random.seed(number % (1 << 32))  # noqa: NPY002, such programs draw from the global generator
    random.seed(number)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def initialize_distributed(seed: int | None = None, initialize_shmem: bool = True) -> dist.ProcessGroup:
    """Make the process group by torchrun's variables, and join tdcoll's job. Collective.

    Args:
        seed: for :func:`init_seed`; default: the rank.
        initialize_shmem: whether to join the job; False: make only the process group.

    Returns:
        A group of all ranks: NCCL's on GPUs, gloo's on the simulator and where ranks share GPUs.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not INTERPRETED:
        torch.cuda.set_device(nodes.device_index() % torch.cuda.device_count())
    gloo = INTERPRETED or lifecycle.may_share_gpus()
    patience = datetime.timedelta(seconds=1800)
    dist.init_process_group("gloo" if gloo else "cpu:gloo,cuda:nccl", rank=rank, world_size=world, timeout=patience)
    group = dist.new_group(list(range(world)), backend="gloo" if gloo else "nccl")
    dist.barrier(group)
    init_seed(rank if seed is None else seed)
    if initialize_shmem:
        init_nvshmem_by_torch_process_group(group)
    assert isinstance(group, dist.ProcessGroup)
    return group


def init_nvshmem_by_torch_process_group(pg: dist.ProcessGroup) -> None:
    """Join tdcoll's job. Collective.

    Raises:
        ValueError: ``pg`` is not of all ranks.
    """
    global _world
    if pg.size() != dist.get_world_size():
        raise ValueError(f"pg must be of all {dist.get_world_size()} ranks, got one of {pg.size()}")
    size = None if os.environ.get("NVSHMEM_SYMMETRIC_SIZE") else _HEAP_BYTES
    tdcoll.initialize(heap_bytes=size)
    _world = pg


def finalize_distributed() -> None:
    """Leave tdcoll's job, and destroy the process groups. Collective."""
    global _world
    tdcoll.finalize()
    _world = None
    dist.destroy_process_group()


def is_shmem_initialized() -> bool:
    """Return whether this process has joined."""
    return _world is not None


def get_triton_dist_world() -> dist.ProcessGroup | None:
    """Return the group that was joined with. Before that, warn and return None."""
    if _world is None:
        warnings.warn("no job has been joined yet: call initialize_distributed()", stacklevel=2)
    return _world


def get_triton_dist_local_world_size() -> int:
    """Return the number of ranks of this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


# ---------------------------------------------------------------------- symmetric memory


def nvshmem_create_tensor(shape: Sequence[int] | int, dtype: torch.dtype) -> torch.Tensor:
    """``-> [*shape]`` symmetric tensor, uninitialised. Collective: :func:`.nvshmem_core.tensor`, behind all streams."""
    torch.cuda.synchronize()
    return nvshmem_core.tensor(shape, dtype)


def nvshmem_create_tensors(
    shape: Sequence[int] | int, dtype: torch.dtype, rank: int, local_world_size: int
) -> list[torch.Tensor]:
    """``-> local_world_size x [*shape]``: a symmetric tensor and its counterparts on this node, by local rank.

    Collective. The one at ``rank % local_world_size`` is this rank's own, and the one to free.
    """
    mine = nvshmem_create_tensor(shape, dtype)
    first = rank - rank % local_world_size
    return [tdcoll.peer_tensor(mine, peer) for peer in range(first, first + local_world_size)]


def nvshmem_free_tensor_sync(tensor: torch.Tensor) -> None:
    """Give back a tensor of :func:`nvshmem_create_tensor`. Collective; waits for this rank's GPU."""
    tdcoll.free(tensor)


class TorchStreamWrapper:
    """A stream of PyTorch's in the form that NVIDIA's packages take."""

    def __init__(self, pt_stream: torch.cuda.Stream) -> None:
        self.pt_stream = pt_stream
        self.handle = pt_stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def nvshmem_barrier_all_on_stream(stream: torch.cuda.Stream | None = None) -> None:
    """Let a stream, by default the current one, wait for all ranks: :func:`tdcoll.barrier_on_stream`."""
    tdcoll.barrier_on_stream(stream)


def barrier_async(pg: dist.ProcessGroup) -> None:
    """Let the current stream wait for all ranks of ``pg``."""
    dist.all_reduce(torch.zeros(1, dtype=torch.int32, device=tdcoll.device()), group=pg)


# ---------------------------------------------------------------------- the machine


def CUDA_CHECK(err: Any) -> None:
    """Raise ``RuntimeError`` unless ``err``, a result of CUDA's driver or runtime, is success."""
    if int(err):
        raise RuntimeError(f"CUDA says {err!r}")


def is_cuda() -> bool:
    """Return True: GPUs are NVIDIA's."""
    return True


def is_hip() -> bool:
    """Return False: no GPU is AMD's."""
    return False


def is_maca() -> bool:
    """Return False: no GPU is MetaX's."""
    return False


def is_ascend() -> bool:
    """Return False: no accelerator is Ascend's."""
    return False


@functools.cache
def supports_p2p_native_atomic() -> bool:
    """Return whether atomics work on peers' memory."""
    if INTERPRETED or torch.cuda.device_count() <= 1:
        return True
    attribute = cudart.cudaDeviceP2PAttr.cudaDevP2PAttrNativeAtomicSupported  # type: ignore[attr-defined]
    failed, supported = cudart.cudaDeviceGetP2PAttribute(attribute, 0, 1)  # type: ignore[attr-defined]
    CUDA_CHECK(failed)
    return bool(supported)


def requires_p2p_native_atomic(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``fn`` warn when it is called where atomics do not work on peers' memory."""

    @functools.wraps(fn)
    def warned(*args: Any, **kwargs: Any) -> Any:
        if not supports_p2p_native_atomic():
            warnings.warn(f"{fn.__name__} uses atomics on peers' memory, which these GPUs do not have", stacklevel=2)
        return fn(*args, **kwargs)

    return warned


def requires(condition_func: Callable[[], bool]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a decorator: the function may be called only where ``condition_func()`` holds."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not condition_func():
                raise AssertionError(f"{fn.__name__} needs {condition_func.__name__}")
            return fn(*args, **kwargs)

        return checked

    return decorate


def has_tma() -> bool:
    """Return whether the GPU has descriptors."""
    return torch.cuda.get_device_capability()[0] >= 9


def has_fullmesh_nvlink() -> bool:
    """Return True: tdcoll starts only where every GPU of a node reaches every other."""
    return True


def get_device_property(device_id: int = 0) -> Any:
    """Return the properties of a GPU."""
    return torch.cuda.get_device_properties(device_id)


def get_device_max_shared_memory_size(device_id: int) -> int:
    """Return the bytes of shared memory that a block can ask for."""
    properties = torch.cuda.get_device_properties(device_id)
    return int(getattr(properties, "shared_memory_per_block_optin", 227 << 10))


def torch_stream_max_priority() -> int:
    """Return the highest priority of a stream."""
    return int(torch.cuda.current_stream().priority_range()[1])


def support_launch_cooperative_grid() -> bool:
    """Return True: Triton launches cooperative grids."""
    return True


def launch_cooperative_grid_options() -> dict[str, bool]:
    """Return the launch options of a grid whose programs are all on the GPU at once."""
    return {"launch_cooperative_grid": True}


def sleep_async(duration_ms: float) -> None:
    """Keep the current stream busy for about ``duration_ms`` milliseconds."""
    torch.cuda._sleep(int(torch.cuda.clock_rate() * 1e3 * duration_ms))  # clock_rate() is in MHz


# ---------------------------------------------------------------------- helpers of programs


def dist_print(
    *args: Any, allowed_ranks: Iterable[int] | str = (0,), prefix: bool = False, need_sync: bool = False, **kwargs: Any
) -> None:
    """Print on some ranks, one after another; ``"all"``: on all of them. Collective with ``need_sync``."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    for allowed in range(world) if allowed_ranks == "all" else allowed_ranks:
        if need_sync:
            dist.barrier()
        if rank == allowed:
            print(*([f"[rank:{rank}]"] if prefix else []), *args, **kwargs, flush=True)


@contextlib.contextmanager
def with_torch_deterministic(mode: bool, warn_only: bool = True) -> Iterator[None]:
    """Choose deterministic algorithms, or not, inside of the block."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def is_fp8_dtype(dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` is a floating type of 8 bits."""
    return dtype.itemsize == 1 and dtype.is_floating_point


def _made(shape: Any, dtype: torch.dtype, init_args: Sequence[float], device: str = "cuda") -> torch.Tensor:
    """``-> [*shape]``: uniform in bias ± scale, where ``init_args`` are scale and bias."""
    extents = shape() if callable(shape) else shape
    extents = (extents,) if isinstance(extents, int) else tuple(one() if callable(one) else one for one in extents)
    scale, bias = init_args
    if not dtype.is_floating_point:
        return torch.randint(-int(scale), int(scale), extents, dtype=dtype, device=device) + int(bias)
    wide = torch.float16 if is_fp8_dtype(dtype) else dtype
    return ((torch.rand(extents, dtype=wide, device=device) * 2 - 1) * scale + bias).to(dtype)


def generate_data(configs: Sequence[Any]) -> Iterator[Iterator[torch.Tensor | None]]:
    """Yield rounds without end, of a tensor for each ``(shape, dtype, (scale, bias)[, device])`` of ``configs``.

    A round has None for an empty one.
    """
    while True:
        yield (_made(*config) if config else None for config in configs)


def get_bool_env(env: str, default_value: bool) -> bool:
    """Read an environment variable that is on or off."""
    return {"on": True, "1": True, "true": True, "off": False, "0": False, "false": False}.get(
        os.environ.get(env, "").lower(), default_value
    )


def get_int_env(env: str, default_value: int) -> int:
    """Read an environment variable that is a whole number."""
    try:
        return int(os.environ[env])
    except (KeyError, ValueError):
        return default_value
