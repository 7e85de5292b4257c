# SPDX-License-Identifier: Apache-2.0
"""Row-sparse all-reduces made of torch.distributed's collectives, to compare with.

Each takes a rank's sparse COO tensor and gives the sum over all ranks, as a coalesced COO tensor or, the dense ones, as
a dense tensor. On GPUs they run over NCCL; on the simulator over gloo, which is enough to check them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tdcoll.bench.engine import Subject
from tdcoll.bench.sparse_data import INPUTS, Rows, SparseData

__all__ = ["PEERS", "all_gather_rows", "all_reduce_dense", "all_reduce_union", "pieces", "subject_of"]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``(out, tensor)``; newer PyTorch has renamed it."""

_NOBODY = -1
"""Pads lists of row numbers."""

_GLOO_BYTES = 2 << 20
"""Most bytes of a rank's rows that gloo is measured with."""

_SPARE_BYTES = 2 << 30
"""GPU memory that is left alone beside a dense tensor."""

Match = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``(union [U], rows [n]) -> [n]``: the place of each row in the union; both ascending."""


# ---------------------------------------------------------------------- methods


def _sparse(rows: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(rows[None], values, like.shape, is_coalesced=True, check_invariants=False)


def _counts(count: int, device: torch.device) -> list[int]:
    """``count`` of every rank. Waits for the GPU."""
    counts = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    _all_gather(counts, torch.full((1,), count, dtype=torch.int64, device=device))
    return [int(number) for number in counts.tolist()]


def _padded(tensor: torch.Tensor, length: int, value: int) -> torch.Tensor:
    """``[n, ...] -> [length, ...]``"""
    if tensor.shape[0] == length:
        return tensor
    padded = tensor.new_full((length, *tensor.shape[1:]), value)
    padded[: tensor.shape[0]] = tensor
    return padded


def all_reduce_union(tensor: torch.Tensor, match: Match = torch.searchsorted) -> torch.Tensor:
    """The published method: rank 0 makes the union, and zeros that take every rank's rows are all-reduced.

    Row numbers to rank 0, padded to the longest list; duplicates out; the union's size and then the union to everybody;
    where are mine in it; own rows into ``[U, dim]`` zeros; all-reduce.
    """
    tensor = tensor.coalesce()
    rows, values = tensor.indices()[0], tensor.values()
    counts = _counts(rows.numel(), rows.device)
    own = _padded(rows, max(counts), _NOBODY)
    size = torch.zeros(1, dtype=torch.int64, device=rows.device)
    union = rows
    if dist.get_rank() == 0:
        lists = [torch.empty_like(own) for _ in counts]
        dist.gather(own, lists)
        union = torch.unique(torch.cat(lists))
        union = union[int(min(counts) < max(counts)) :]  # without the padding, which is the least of all
        size.fill_(union.numel())
    else:
        dist.gather(own)
    dist.broadcast(size, 0)
    if dist.get_rank() != 0:
        union = rows.new_empty(int(size))
    dist.broadcast(union, 0)
    total = values.new_zeros((union.numel(), *values.shape[1:]))
    total[match(union, rows)] = values
    dist.all_reduce(total)
    return _sparse(union, total, tensor)


def all_gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Everybody gets all row numbers and all rows, padded to the longest list, and adds up for itself."""
    rows, values = tensor._indices()[0], tensor._values()
    counts = _counts(rows.numel(), rows.device)
    most, world = max(counts), len(counts)
    all_rows = rows.new_empty(world * most)
    _all_gather(all_rows, _padded(rows, most, _NOBODY))
    all_values = values.new_empty((world * most, *values.shape[1:]))
    _all_gather(all_values, _padded(values, most, 0))
    union, places = torch.unique(all_rows, return_inverse=True)
    total = values.new_zeros((union.numel(), *values.shape[1:])).index_add_(0, places, all_values)
    padding = int(min(counts) < most)
    return _sparse(union[padding:], total[padding:], tensor)


def all_reduce_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Into a dense ``[num_rows, dim]`` tensor, which is all-reduced and stays dense."""
    dense = tensor.to_dense()
    dist.all_reduce(dense)
    return dense


def pieces(num_rows: int, row_bytes: int, room: int) -> tuple[int, int]:
    """``(number, rows of each)``: the fewest equal pieces of a dense tensor that fit into ``room`` bytes.

    Raises:
        ValueError: not even one row fits.
    """
    if room < row_bytes:
        raise ValueError(f"{room} bytes are free, and one row has {row_bytes}")
    number = -(-num_rows // min(num_rows, room // row_bytes))
    return number, -(-num_rows // number)


# ---------------------------------------------------------------------- as subjects


def subject_of(data: SparseData, call: Callable[[int], object], /, **named: Any) -> Subject:
    """A subject whose calls take the inputs of ``data`` in turn, each in its next round."""

    def before(numbers: Sequence[int]) -> None:
        for number in dict.fromkeys(numbers):
            data.advance(number)

    usual = {"errors": data.errors_of, "before": before, "inputs": INPUTS, "alone": True}
    return Subject(call, **{**usual, **named})


def _plain(method: Callable[[torch.Tensor], torch.Tensor], data: SparseData) -> Subject:
    return subject_of(data, lambda number: method(data.tensors[number]))


def _published_match(data: SparseData) -> Subject:
    """The published method with tdcoll's search in place of torch's."""
    from tdcoll.collectives.index_match import match_indices

    return _plain(partial(all_reduce_union, match=lambda union, rows: match_indices(rows, union)), data)


def _dense_bytes(data: SparseData) -> int:
    return data.rows.vocabulary.num_rows * data.dim * data.rows.dtype.itemsize


def _room(device: torch.device) -> int:
    """Bytes for a dense tensor; the same question on every rank, which may have different answers."""
    if device.type != "cuda":
        return 1 << 30
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return max(0, int(torch.cuda.mem_get_info()[0]) - _SPARE_BYTES)


def _dense(data: SparseData) -> Subject:
    """To a dense tensor, and all-reduce that."""
    need, room = _dense_bytes(data), _room(data.rows.vocabulary.device)
    if need > room:
        raise RuntimeError(
            f"the dense tensor has {need / 1e9:.1f} GB, and {room / 1e9:.1f} GB are free; the peer dense-all-reduce "
            "takes it in pieces"
        )
    return dataclasses.replace(_plain(all_reduce_dense, data), most_iterations=4)


def _dense_all_reduce(data: SparseData) -> Subject:
    """The all-reduce of a dense tensor alone, in pieces if it does not fit: one buffer stands for all of them."""
    device, num_rows = data.rows.vocabulary.device, data.rows.vocabulary.num_rows
    row_bytes = data.dim * data.rows.dtype.itemsize
    room = torch.tensor([_room(device)], dtype=torch.int64, device=device)
    dist.all_reduce(room, op=dist.ReduceOp.MIN)
    number, rows = pieces(num_rows, row_bytes, int(room))
    buffers: list[torch.Tensor] = []
    world = dist.get_world_size()

    def before(_: object) -> None:
        if not buffers:
            buffers.append(torch.empty((rows, data.dim), dtype=data.rows.dtype, device=device))
        buffers[0].fill_(1)

    def call(_: int) -> torch.Tensor:
        for _ in range(number):
            dist.all_reduce(buffers[0])
        return buffers.pop()

    def errors(_: int, result: torch.Tensor) -> tuple[int, str]:
        # Ones, multiplied by the number of ranks as often as there are pieces; may be rounded.
        least, greatest = (float(x) / world**number for x in torch.aminmax(result))
        fine = abs(least - 1) < 0.5 / world and abs(greatest - 1) < 0.5 / world
        return (
            (0, "") if fine else (1, f"rank {data.rank}: sums of ones are {least} to {greatest} of what they should be")
        )

    cut = f" in {number} pieces of {rows * row_bytes / 1e9:.1f} GB" if number > 1 else ""
    note = f"only the all-reduce of {_dense_bytes(data) / 1e9:.1f} GB{cut}"
    return subject_of(data, call, errors=errors, before=before, most_iterations=4, notes=[note])


def _gloo(data: SparseData) -> Subject:
    """gloo's own all-reduce of sparse tensors, on CPUs, with as many rows as take a bearable time."""
    whole = data.rows
    count = max(1, min(whole.rows, _GLOO_BYTES // (data.dim * whole.dtype.itemsize)))
    note = "on CPUs"
    if count < whole.rows:
        less = Rows(whole.vocabulary, count, whole.duplicates, whole.world, whole.dtype, whole.inputs)
        data = SparseData(less, data.dim, data.rank)
        note += f", {count} of {whole.rows} rows per rank"
    taken: dict[int, torch.Tensor] = {}

    def before(numbers: Sequence[int]) -> None:
        for number in numbers:
            data.advance(number)
            taken[number] = data.tensors[number].cpu().clone()  # the result replaces it

    def call(number: int) -> torch.Tensor:
        tensor = taken.pop(number)
        dist.all_reduce(tensor)
        return tensor.coalesce()

    return subject_of(data, call, before=before, data=data, most_iterations=4, notes=[note])


PEERS: dict[str, Callable[[SparseData], Subject]] = {
    "published": partial(_plain, all_reduce_union),
    "published-match": _published_match,
    "allgather": partial(_plain, all_gather_rows),
    "gloo": _gloo,
    "dense": _dense,
    "dense-all-reduce": _dense_all_reduce,
}
"""Makes each peer's subject; raises what keeps it from running. Collective."""
