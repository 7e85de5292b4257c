# SPDX-License-Identifier: Apache-2.0
"""Other libraries' dense collectives, to compare with: of NCCL, torch's symmetric memory, NVSHMEM and TensorRT-LLM.

Each baseline is made by a function of a :class:`Stock` of buffers, the device, and a function for the call of
`torch.distributed`. If the baseline cannot run, that function raises the reason. All of them are collective.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

import tdcoll
from tdcoll import runtime
from tdcoll.tools.bench.arithmetic import format_bytes
from tdcoll.tools.bench.data import Buffers
from tdcoll.tools.bench.engine import Found, Subject, nothing

__all__ = ["FCOLLECT", "PEERS", "ByTorch", "Make", "Peer", "Stock", "require_nccl", "subject_of", "tensorrt_rms_norm"]

FCOLLECT = "fcollect"


class Stock:
    """Buffers for the calls of one size; subjects may share them.

    Args:
        new: makes buffers, given ``allocate`` of :class:`~tdcoll.tools.bench.data.Buffers`.
    """

    def __init__(self, new: Callable[..., Buffers]) -> None:
        self.new = new
        self._held: list[torch.Tensor] = []

    @cached_property
    def plain(self) -> Buffers:
        """Ordinary memory."""
        return self.new()

    @cached_property
    def in_heap(self) -> Buffers:
        """tdcoll's symmetric memory. The first use is collective."""

        def allocate(nbytes: int) -> torch.Tensor:
            self._held.append(tdcoll.empty((nbytes,), torch.uint8))
            return self._held[-1]

        return self.new(allocate=allocate)

    def close(self) -> None:
        """Free the buffers in tdcoll's heap. Collective."""
        while self._held:
            tdcoll.free(self._held.pop())


ByTorch = Callable[..., Subject]
"""``(buffers, close=..., group=...)``: makes the subject of torch.distributed's call, by default on all ranks."""

_CTA_POLICY_ZERO = 2
"""``NCCL_CTA_POLICY_ZERO``."""

Make = Callable[[Stock, torch.device, ByTorch], Subject]


@dataclass(frozen=True)
class Peer:
    """A function that makes a baseline's subject, and its collective, with sums only; None if it does every one."""

    make: Make
    of: str | None = None


def subject_of(
    buffers: Buffers,
    call: Callable[[int], Any],
    close: Callable[[], object] = nothing,
    in_place: bool = False,
) -> Subject:
    """Return a subject whose calls have inputs, and mostly results, of these buffers.

    Args:
        in_place: calls take their input from their result, where it is put before every launch, untimed.
    """
    growth = buffers.growth() if in_place else 1
    times: Counter[int] = Counter()

    def before(numbers: Sequence[int]) -> None:
        buffers.advance()
        times.clear()
        times.update(numbers)
        for number in times if in_place else ():
            buffers.own(number).copy_(buffers.inputs[number])

    def errors(number: int, result: torch.Tensor) -> Found:
        grown = growth ** (times[number] - 1)
        return buffers.errors(number, result if grown == 1 else result / grown)

    return Subject(
        call,
        errors,
        inputs=buffers.sets,
        begin=buffers.fill,
        before=before,
        calls=(buffers.calls - 1, buffers.calls),
        close=close,
    )


def require_nccl(device: torch.device) -> Any:
    """Return the default group's NCCL backend.

    Raises:
        RuntimeError: there is none.
    """
    if device.type != "cuda":
        raise RuntimeError("needs GPUs")
    backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    if not dist.is_nccl_available() or not isinstance(backend, dist.ProcessGroupNCCL):
        raise RuntimeError(f"the default process group uses {type(backend).__name__} for GPUs, not NCCL")
    return backend


def _nccl(stock: Stock, device: torch.device, by_torch: ByTorch) -> Subject:
    require_nccl(device)
    return by_torch(stock.plain)


def _nccl_symmetric(stock: Stock, device: torch.device, by_torch: ByTorch, group: Any = None) -> Subject:
    """Return the call of `torch.distributed` on buffers that NCCL allocated and registered as symmetric windows."""
    backend = require_nccl(device) if group is None else group._get_backend(device)
    given = {} if group is None else {"group": group}
    dist.all_reduce(torch.zeros(1, device=device), **given)  # windows are registered with a communicator that exists
    pool = torch.cuda.MemPool(backend.mem_allocator)

    def allocate(nbytes: int) -> torch.Tensor:
        with torch.cuda.use_mem_pool(pool):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    buffers = stock.new(allocate=allocate)
    torch.cuda.synchronize()
    backend.register_mem_pool(pool, symm=True)

    def close() -> None:
        torch.cuda.synchronize()
        backend.deregister_mem_pool(pool)
        if group is not None:
            dist.destroy_process_group(group)

    return by_torch(buffers, close, **given)


def _nccl_zero_cta(stock: Stock, device: torch.device, by_torch: ByTorch) -> Subject:
    """Return the same of a group whose policy is to use copy engines where NCCL has such collectives (2.28).

    Raises:
        RuntimeError: PyTorch can't ask its NCCL for that.
    """
    require_nccl(device)
    options = dist.ProcessGroupNCCL.Options()
    name = next((name for name in ("cta_policy", "ctaPolicy") if hasattr(options.config, name)), None)
    if name is None:
        raise RuntimeError("this PyTorch's options of NCCL have no policy for thread blocks")
    setattr(options.config, name, _CTA_POLICY_ZERO)
    return _nccl_symmetric(stock, device, by_torch, dist.new_group(backend="nccl", pg_options=options))


Bind = Callable[[Any, str, Buffers], Callable[[int], torch.Tensor]]
"""``(torch's module, the group's name, buffers in symmetric memory)``: makes the call by its number."""


def _on_symmetric(bind: Bind, in_place: bool = False) -> Make:
    """Return a function that makes a baseline of torch's symmetric memory, whose calls may be in place."""

    def make(stock: Stock, device: torch.device, _: ByTorch) -> Subject:
        require_nccl(device)
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        group = dist.group.WORLD

        def allocate(nbytes: int) -> torch.Tensor:
            made: torch.Tensor = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
            symmetric.rendezvous(made, group)
            return made

        buffers = stock.new(allocate=allocate)
        call = bind(symmetric, str(group.group_name), buffers)  # type: ignore[union-attr]
        return subject_of(buffers, call, in_place=in_place)

    return make


def _operator(operator: str, arguments: Callable[[str, Buffers, int], tuple[Any, ...]]) -> Bind:
    """Bind an operator of torch's to arguments made from ``(the group's name, buffers, number)``."""

    def bind(_: Any, name: str, buffers: Buffers) -> Callable[[int], torch.Tensor]:
        function = getattr(torch.ops.symm_mem, operator)
        given = [arguments(name, buffers, i) for i in range(buffers.sets)]
        return lambda i: function(*given[i])

    return bind


_ONE_SHOT = _operator("one_shot_all_reduce_out", lambda name, b, i: (b.inputs[i], "sum", name, b.results[i]))
_TWO_SHOT = _operator("two_shot_all_reduce_", lambda name, b, i: (b.results[i], "sum", name))
"""In place, because the operator with a separate result also writes to its input, and then copies."""
_REDUCE_SCATTER = _operator("reduce_scatter_out", lambda name, b, i: (b.inputs[i], name, False, b.results[i]))


def _cat(symmetric: Any, name: str, buffers: Buffers) -> Callable[[int], torch.Tensor]:
    """Use one kernel of torch's own pieces: barrier, `torch.cat` of all ranks' symmetric inputs, barrier."""
    handles = [symmetric.rendezvous(given, dist.group.WORLD) for given in buffers.inputs]
    remote = [
        [handle.get_buffer(rank, given.shape, given.dtype) for rank in range(buffers.world)]
        for handle, given in zip(handles, buffers.inputs, strict=True)
    ]

    def call(i: int) -> torch.Tensor:
        handles[i].barrier(channel=0)
        torch.cat(remote[i], out=buffers.results[i])
        handles[i].barrier(channel=0)
        return buffers.results[i]

    return call


def _fcollect(stock: Stock, device: torch.device, _: ByTorch) -> Subject:
    """NVSHMEM's own all-gather, ``nvshmem.core.fcollect``, on the current stream.

    The binding that it calls is called here without the look-ups of its Python, between symmetric addresses, in the
    widest type that divides the size. ``NVSHMEM_FCOLLECT_ALGO`` and its thresholds are the user's.
    """
    if device.type != "cuda":
        raise RuntimeError("needs GPUs")
    import nvshmem.bindings.nvshmem as bindings

    buffers = stock.in_heap
    nbytes = buffers.inputs[0].nbytes
    width = next(width for width in (8, 4, 2, 1) if nbytes % width == 0)
    function = getattr(bindings, f"int{8 * width}_fcollect_on_stream")
    team, count = int(bindings.Team_id.TEAM_WORLD), nbytes // width
    addresses = [(r.data_ptr(), i.data_ptr()) for r, i in zip(buffers.results, buffers.inputs, strict=True)]

    def call(i: int) -> torch.Tensor:
        result, given = addresses[i]
        function(team, result, given, count, torch.cuda.current_stream().cuda_stream)
        return buffers.results[i]

    return subject_of(buffers, call)


_ROW = 8192
"""Numbers in a row of TensorRT-LLM's all-reduce, as of a model's hidden state; smaller data is one row."""

_TENSORRT_BYTES = 16 << 20
"""The most bytes of TensorRT-LLM's all-reduce. Its memory is 4 times as large for each rank."""

_NOT_FUSED = ("residual_in", "residual_out", "norm_out", "quant_out", "scale_out", "rms_gamma", "rms_eps")
"""The arguments for operations that TensorRT-LLM's all-reduce can be fused with."""


def _flashinfer(device: torch.device) -> Any:
    """Return ``flashinfer.comm`` with TensorRT-LLM's kernels loaded, which may compile them. Collective.

    Raises:
        RuntimeError: some rank has no flashinfer (https://github.com/flashinfer-ai/flashinfer), or the kernels cannot
            reach all ranks.
    """
    require_nccl(device)
    owner = runtime.current()
    topology, problem = owner.topology(), None
    if topology.n_nodes > 1 or topology.world_size not in (2, 4, 8):
        raise RuntimeError(f"is for 2, 4 or 8 ranks of one node, not {topology.describe()}")
    try:
        import flashinfer.comm

        flashinfer.comm.trtllm_ar.get_trtllm_comm_module()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    for rank, other in enumerate(owner.control.all_gather(range(owner.world_size), "flashinfer", problem)):
        if other is not None:  # the others would wait for it
            raise RuntimeError(f"needs flashinfer: rank {rank}: {other}")
    return flashinfer.comm


@functools.cache
def _tensorrt_memory(fp32: bool) -> torch.Tensor:
    """Return the addresses of the shared memory: parts, flags, and three slots of Lamport words. Collective.

    It is made once and lives as long as the process, because memory that is freed while other processes have it mapped
    must not be used again.

    Args:
        fp32: the words are of float32, which has another sentinel than the shorter types.
    """
    import flashinfer.comm as comm

    owner = runtime.current()
    rows = _TENSORRT_BYTES // (2 * _ROW)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the addresses
        _, addresses = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            owner.rank, owner.world_size, rows, _ROW, use_fp32_lamport=fp32, group=dist.group.WORLD
        )
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    made: torch.Tensor = addresses
    return made


def _tensorrt(comm: Any, like: torch.Tensor) -> Callable[..., None]:
    """Return the launch of TensorRT-LLM's one-shot all-reduce of rows as in ``like``. Collective.

    It is a dependent launch of the kernel before it. It takes the tensors and ``pattern_code`` by name.
    """
    owner, (rows, row) = runtime.current(), like.shape
    addresses = _tensorrt_memory(like.dtype == torch.float32)

    def launch(**given: Any) -> None:
        comm.trtllm_allreduce_fusion(
            world_size=owner.world_size,
            world_rank=owner.rank,
            token_num=rows,
            hidden_dim=row,
            workspace_ptrs=addresses,
            launch_with_pdl=True,
            trigger_completion_at_end=True,
            fp32_acc=True,
            use_oneshot=True,
            **{**dict.fromkeys((*_NOT_FUSED, "scale_factor", "layout_code")), **given},
        )

    return launch


def _tensorrt_all_reduce(stock: Stock, device: torch.device, _: ByTorch) -> Subject:
    comm, buffers = _flashinfer(device), stock.plain
    like = buffers.inputs[0]
    if like.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"takes float16, bfloat16 and float32, not {like.dtype}")
    if like.nbytes > _TENSORRT_BYTES or like.nbytes % 16:
        raise ValueError(f"takes multiples of 16 bytes, and at most {format_bytes(_TENSORRT_BYTES)}")
    row = min(like.numel(), _ROW)
    if like.numel() % row:
        raise ValueError(f"takes rows of {_ROW} numbers")
    given, results = ([one.view(-1, row) for one in every] for every in (buffers.inputs, buffers.results))
    launch, pattern = _tensorrt(comm, given[0]), comm.AllReduceFusionPattern.kAllReduce

    def call(i: int) -> torch.Tensor:
        launch(allreduce_in=given[i], allreduce_out=results[i], pattern_code=pattern)
        return buffers.results[i]

    return subject_of(buffers, call)


def tensorrt_rms_norm(
    x: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return TensorRT-LLM's all-reduce fused with residual and RMSNorm, as a call by its number. Collective.

    Raises:
        RuntimeError, ValueError: the reason, if it cannot run.
    """
    comm = _flashinfer(residual.device)
    if residual.shape[1] > _ROW or residual.nbytes > _TENSORRT_BYTES:
        raise ValueError(f"takes rows of at most {_ROW} numbers, {format_bytes(_TENSORRT_BYTES)} in all")
    launch, pattern = _tensorrt(comm, residual), comm.AllReduceFusionPattern.kARResidualRMSNorm
    made = [(torch.empty_like(residual), torch.empty_like(residual)) for _ in x]
    fused = {"residual_in": residual, "rms_gamma": weight, "rms_eps": eps, "pattern_code": pattern}

    def call(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, new = made[i]
        launch(allreduce_in=x[i], allreduce_out=None, residual_out=new, norm_out=out, **fused)
        return out, new

    return call


PEERS = {
    "nccl": Peer(_nccl),
    "nccl-symmetric": Peer(_nccl_symmetric),
    "nccl-zero-cta": Peer(_nccl_zero_cta),
    "torch-symm-cat": Peer(_on_symmetric(_cat), "all_gather"),
    FCOLLECT: Peer(_fcollect, "all_gather"),
    "torch-one-shot": Peer(_on_symmetric(_ONE_SHOT), "all_reduce"),
    "torch-two-shot": Peer(_on_symmetric(_TWO_SHOT, in_place=True), "all_reduce"),
    "trtllm-one-shot": Peer(_tensorrt_all_reduce, "all_reduce"),
    "torch-reduce-scatter": Peer(_on_symmetric(_REDUCE_SCATTER), "reduce_scatter"),
}
"""By name."""
