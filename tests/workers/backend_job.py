# SPDX-License-Identifier: Apache-2.0
"""What checks of backend "tdcoll" share: joining a job, data, calls by any PyTorch's names, and who
handled them."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from harness import device, everyone, expect

from tdcoll.distributed import Options

SINGLE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def join(blocks: int = 64, timeout_s: float = 60) -> None:
    """Begin a job with backend "tdcoll". ``blocks``: thread blocks of the default group's
    launches; ``timeout_s``: its deadline."""
    warnings.simplefilter("ignore")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(
        "tdcoll", timeout=timedelta(seconds=timeout_s), pg_options=Options(blocks=blocks)
    )


def finish(work: dist.Work | None, by_future: bool = False) -> None:
    """Wait for a call, unless it was synchronous."""
    if work is not None:
        (work.get_future() if by_future else work).wait()


def handled(kind: str, group=None) -> int:
    """Calls of a kind that tdcoll's kernels have handled."""
    group = group or dist.group.WORLD
    return sum(
        count
        for (k, backend, _), count in group.dispatcher.counts.items()
        if (k, backend) == (kind, "tdcoll")
    )


def by_fallback(kind: str, group=None) -> dict[str, int]:
    """Calls of a kind that the fallback backend has handled, by reason."""
    counts = (group or dist.group.WORLD).dispatcher.counts
    return {
        why: count
        for (k, backend, why), count in counts.items()
        if k == kind and backend != "tdcoll"
    }


def data(owner: int, count: int, dtype: torch.dtype = torch.float32, call: int = 0) -> torch.Tensor:
    """``[count]`` of small integers in which owner, position and call show; on this rank's
    device."""
    numbers = (torch.arange(count, device=device()) * 3 + owner * 7 + call) % (
        2 if dtype is torch.bool else 13
    )
    return numbers.to(dtype)


def sums(count: int, call: int = 0) -> torch.Tensor:
    """The sum of ``data`` over all ranks."""
    return sum(data(r, count, call=call) for r in everyone())


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []


def same(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Fail unless two tensors have the same bytes.

    The stream is waited for first, and the message is made on the CPU. A copy to pageable memory
    that waits for a kernel holds a lock of the driver, and printing a CUDA tensor launches kernels
    that CUDA loads only when no kernel is running: either would hold up the calls of other threads,
    for which that kernel waits.
    """
    if got.is_cuda:
        torch.cuda.current_stream(got.device).synchronize()
    got, wanted = got.cpu(), wanted.cpu()
    equal = got.shape == wanted.shape and got.dtype == wanted.dtype and raw(got) == raw(wanted)
    expect(equal, "" if equal else f"{what}: {got}")


def single(out: torch.Tensor, tensor: torch.Tensor, **more):
    """torch.distributed's all-gather into one tensor, under the name that this PyTorch has for
    it."""
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(
        out, tensor, **more
    )


def sparse(owner: int, dtype: torch.dtype = torch.float32, rows: int = 20) -> torch.Tensor:
    """``[rows, 3]``, not coalesced: rows of all ranks, of one, and one twice."""
    indices = torch.tensor([[0, owner + 2, 0, rows - 1 - owner]], device=device())
    return torch.sparse_coo_tensor(
        indices, data(owner, 12, dtype).view(4, 3), (rows, 3), check_invariants=False
    )


def dense_sum(**more) -> torch.Tensor:
    return sum(sparse(r, **more).to_dense() for r in everyone())
