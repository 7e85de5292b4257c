# SPDX-License-Identifier: Apache-2.0
"""Other libraries' all-reduces and reduce-scatters, to compare with: torch's operators, and what flashinfer ships.

flashinfer (https://github.com/flashinfer-ai/flashinfer) is optional. It ships TensorRT-LLM's all-reduce and vLLM's, and
compiles them when they are first used, unless it finds them built. The peers call its public functions.

What a peer shares with other ranks is made once and lives as long as the process: memory that is given back while other
processes have it mapped must not be used again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tdcoll import runtime
from tdcoll.bench.arithmetic import format_bytes
from tdcoll.bench.data import Buffers
from tdcoll.bench.engine import Found, Subject
from tdcoll.bench.peers import MakeBuffers, require_nccl, subject_of, symmetric_buffers, symmetric_memory

__all__ = ["FLASHINFER", "in_place", "tensorrt_rms_norm", "torch_one_shot", "torch_reduce_scatter", "torch_two_shot"]

_ROW = 8192
"""Numbers in a row of TensorRT-LLM's all-reduce, as of a model's hidden state; smaller data is one row."""

_TENSORRT_BYTES = 16 << 20
"""TensorRT-LLM's all-reduce takes at most so much. Its memory is 4 times as large for each rank."""

_VLLM_BYTES = 8 << 20
"""vLLM's takes no more unless it is told to."""

_VLLM_BLOCKS = 36
"""The most that vLLM's takes, and what vLLM calls it with."""


_NOT_FUSED = ("residual_in", "residual_out", "norm_out", "quant_out", "scale_out", "rms_gamma", "rms_eps")
"""What TensorRT-LLM's all-reduce can be fused with."""


def in_place(subject: Subject, growth: int = 1) -> Subject:
    """A subject whose calls reduce its results, which are the inputs before every launch. That is not timed.

    Args:
        growth: by what a further call on the same result multiplies it, exactly.
    """
    buffers: Buffers = subject.data
    times: Counter[int] = Counter()

    def before(numbers: Sequence[int]) -> None:
        buffers.advance()
        times.clear()
        times.update(numbers)
        for number in times:
            buffers.results[number].copy_(buffers.inputs[number])

    def errors(number: int, result: torch.Tensor) -> Found:
        grown = growth ** (times[number] - 1)
        return buffers.errors(number, result if grown == 1 else result / grown)

    return dataclasses.replace(subject, before=before, errors=errors)


# ---------------------------------------------------------------------- torch's symmetric memory


def _group_name() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


def torch_one_shot(make_buffers: MakeBuffers, device: torch.device, _: object = None) -> Subject:
    """``torch.ops.symm_mem.one_shot_all_reduce_out``, from symmetric inputs."""
    buffers = symmetric_buffers(symmetric_memory(device), make_buffers, device)
    name, reduce = _group_name(), torch.ops.symm_mem.one_shot_all_reduce_out

    def call(i: int) -> torch.Tensor:
        reduce(buffers.inputs[i], "sum", name, buffers.results[i])
        return buffers.results[i]

    return subject_of(buffers, call)


def torch_two_shot(make_buffers: MakeBuffers, device: torch.device, _: object = None) -> Subject:
    """``torch.ops.symm_mem.two_shot_all_reduce_``, in place on symmetric results.

    The operator with another result writes to its input as well, and then copies.
    """
    symmetric = symmetric_memory(device)
    buffers = copy.copy(make_buffers(None))  # others have the same, with other results
    buffers.results = [symmetric.empty(one.shape, dtype=one.dtype, device=device) for one in buffers.results]
    for result in buffers.results:
        symmetric.rendezvous(result, dist.group.WORLD)
    name, reduce = _group_name(), torch.ops.symm_mem.two_shot_all_reduce_

    def call(i: int) -> torch.Tensor:
        reduce(buffers.results[i], "sum", name)
        return buffers.results[i]

    return subject_of(buffers, call)


def torch_reduce_scatter(make_buffers: MakeBuffers, device: torch.device, _: object = None) -> Subject:
    """``torch.ops.symm_mem.reduce_scatter_out``, from symmetric inputs."""
    buffers = symmetric_buffers(symmetric_memory(device), make_buffers, device)
    name, reduce = _group_name(), torch.ops.symm_mem.reduce_scatter_out

    def call(i: int) -> torch.Tensor:
        reduce(buffers.inputs[i], name, False, buffers.results[i])
        return buffers.results[i]

    return subject_of(buffers, call)


# ---------------------------------------------------------------------- flashinfer


def _together(what: str, action: Callable[[], Any]) -> list[Any]:
    """Return what the action gives on every rank. Raises on all of them if it does on one. Collective."""
    owner = runtime.current()
    value = problem = None
    try:
        value = action()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    found = owner.control.all_gather(range(owner.world_size), what, (value, problem))
    for rank, (_, theirs) in enumerate(found):
        if theirs is not None:
            raise RuntimeError(f"{what}: {problem or f'rank {rank}: {theirs}'}")
    return [value for value, _ in found]


def _flashinfer(device: torch.device, worlds: Sequence[int], load: Callable[[Any], object]) -> Any:
    """``flashinfer.comm``. Collective.

    Args:
        worlds: numbers of ranks that the kernels are for.
        load: makes it load the kernels.

    Raises:
        RuntimeError: there is no flashinfer, it has no such kernels, or they cannot reach all ranks.
    """
    require_nccl(device)
    topology = runtime.current().topology()
    if topology.n_nodes > 1 or topology.world_size not in worlds:
        raise RuntimeError(f"is for {', '.join(map(str, worlds))} ranks of one node, not {topology.describe()}")

    def find() -> None:
        import flashinfer.comm

        load(flashinfer.comm)

    _together("needs flashinfer", find)  # else some ranks would wait for one that has no flashinfer
    import flashinfer.comm

    return flashinfer.comm


def _fitting(buffers: Buffers, most: int) -> None:
    """Raise unless the data are of a size and of a type that flashinfer's kernels take."""
    given = buffers.inputs[0]
    if given.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"takes float16, bfloat16 and float32, not {given.dtype}")
    if given.nbytes > most or given.nbytes % 16:
        raise ValueError(f"takes multiples of 16 bytes, and at most {format_bytes(most)}")


def _load_tensorrt(device: torch.device) -> Any:
    """Return ``flashinfer.comm``, with TensorRT-LLM's kernels loaded. Collective."""
    return _flashinfer(device, (2, 4, 8), lambda comm: comm.trtllm_ar.get_trtllm_comm_module())


@functools.cache
def _tensorrt_memory(fp32: bool) -> torch.Tensor:
    """Addresses of what the ranks share: parts, flags, and three slots of words that announce themselves. Collective.

    Args:
        fp32: the words are of float32, which announces itself otherwise than the shorter types.
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


def _tensorrt_fusion(comm: Any, like: torch.Tensor, one_shot: bool) -> Callable[..., None]:
    """Return the launch of TensorRT-LLM's all-reduce of rows as in ``like``. Collective.

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
            use_oneshot=one_shot,
            **{**dict.fromkeys((*_NOT_FUSED, "scale_factor", "layout_code")), **given},
        )

    return launch


def _tensorrt(shots: int) -> Callable[..., Subject]:
    """Return what makes the subject of TensorRT-LLM's all-reduce with one crossing or with two."""

    def make(make_buffers: MakeBuffers, device: torch.device, _: object = None) -> Subject:
        comm = _load_tensorrt(device)
        buffers = make_buffers(None)
        _fitting(buffers, _TENSORRT_BYTES)
        row = min(buffers.inputs[0].numel(), _ROW)
        rows, rest = divmod(buffers.inputs[0].numel(), row)
        if rest:
            raise ValueError(f"takes rows of {_ROW} numbers")
        if shots == 2 and rows <= runtime.current().world_size:
            raise ValueError(f"takes more rows of {_ROW} numbers than there are ranks")
        given, results = ([one.view(rows, row) for one in every] for every in (buffers.inputs, buffers.results))
        launch, pattern = _tensorrt_fusion(comm, given[0], shots == 1), comm.AllReduceFusionPattern.kAllReduce

        def call(i: int) -> torch.Tensor:
            launch(allreduce_in=given[i], allreduce_out=results[i], pattern_code=pattern)
            return buffers.results[i]

        return subject_of(buffers, call)

    return make


def tensorrt_rms_norm(
    x: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    one_shot: bool,
    device: torch.device,
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return TensorRT-LLM's all-reduce fused with residual and RMSNorm, as a call by its number. Collective.

    Raises:
        RuntimeError, ValueError: what keeps it from running.
    """
    comm = _load_tensorrt(device)
    if residual.shape[1] > _ROW or residual.nbytes > _TENSORRT_BYTES:
        raise ValueError(f"takes rows of at most {_ROW} numbers, {format_bytes(_TENSORRT_BYTES)} in all")
    if not one_shot and residual.shape[0] <= runtime.current().world_size:
        raise ValueError("takes more rows than there are ranks")
    launch, pattern = _tensorrt_fusion(comm, residual, one_shot), comm.AllReduceFusionPattern.kARResidualRMSNorm
    made = [(torch.empty_like(residual), torch.empty_like(residual)) for _ in x]

    def call(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, new = made[i]
        launch(
            allreduce_in=x[i], allreduce_out=None, pattern_code=pattern, residual_in=residual, residual_out=new,
            norm_out=out, rms_gamma=weight, rms_eps=eps,
        )  # fmt: skip
        return out, new

    return call


@functools.cache
def _vllm_memory() -> tuple[list[int], list[int]]:
    """Addresses, on every rank, of its signals with room for sums, and of what eager calls copy their input to.
    Collective."""
    import flashinfer.comm as comm

    signals = comm.create_shared_buffer(comm.vllm_meta_size() + _VLLM_BYTES, dist.group.WORLD)
    return signals, comm.create_shared_buffer(_VLLM_BYTES, dist.group.WORLD)


def _vllm(make_buffers: MakeBuffers, device: torch.device, _: object = None) -> Subject:
    """vLLM's custom all-reduce, as vLLM calls it: eager calls copy their input to memory that the ranks share, and the
    inputs of a graph are made known to the other ranks when it has been captured."""
    comm = _flashinfer(device, (2, 4, 6, 8), lambda comm: comm.vllm_meta_size())
    owner, buffers = runtime.current(), make_buffers(None)
    _fitting(buffers, _VLLM_BYTES)
    signals, copies = _vllm_memory()
    own = copies[owner.rank]
    held = [torch.empty(8 << 20, dtype=torch.uint8, device=device)]  # where it keeps addresses of inputs
    kernel = comm.vllm_init_custom_ar(signals, held[0], owner.rank, True)
    comm.vllm_register_buffer(kernel, copies)

    def call(i: int) -> torch.Tensor:
        copied = (0, 0) if torch.cuda.is_current_stream_capturing() else (own, _VLLM_BYTES)
        comm.vllm_all_reduce(kernel, buffers.inputs[i], buffers.results[i], *copied, _VLLM_BLOCKS)
        return buffers.results[i]

    def captured() -> None:
        found = _together("vLLM's graph buffers", lambda: comm.vllm_get_graph_buffer_ipc_meta(kernel))
        comm.vllm_register_graph_buffers(kernel, [handles for handles, _ in found], [offsets for _, offsets in found])

    def close() -> None:
        torch.cuda.synchronize()
        owner.control.all_gather(range(owner.world_size), "vLLM's all-reduce is over", None)
        comm.vllm_dispose(kernel)
        held.clear()

    return dataclasses.replace(subject_of(buffers, call, close), captured=captured)


FLASHINFER: dict[str, Callable[..., Subject]] = {
    "trtllm-one-shot": _tensorrt(1),
    "trtllm-two-shot": _tensorrt(2),
    "vllm": _vllm,
}
"""All-reduces that flashinfer ships, by name. Sums only."""
