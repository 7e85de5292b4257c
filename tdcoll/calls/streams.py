# SPDX-License-Identifier: Apache-2.0
"""Operations that the host queues on a stream: a barrier of all ranks, waits, writes of words,
copies between ranks.

All of it is asynchronous on a GPU, in the order of the stream, and may be captured into a CUDA
graph. On the simulator each is done before it returns, unless the host has entered a stream that
``World.stream`` made.
"""

from __future__ import annotations

from typing import Any

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.language import CMP_EQ, CMP_GE, barrier_all_block
from tdcoll.language.jit import jit

_WORDS = {torch.int32: 32, torch.uint32: 32, torch.int64: 64, torch.uint64: 64}


def peer_tensor(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """``-> [*tensor.shape]``: return ``rank``'s copy of the symmetric ``tensor``. Local.

    The result is that memory itself: PyTorch's operators, copies and kernels on this GPU read and
    write it over NVLink or PCIe. Use signals and barriers to order them. The result is valid as
    long as the symmetric tensor.

    >>> signals = tdcoll.zeros(2, torch.int64)
    >>> of_peer = tdcoll.peer_tensor(signals, 1 - tdcoll.rank())

    Args:
        tensor: one that :func:`tdcoll.empty` made, or a view of it, of any strides.
        rank: global rank, on this node; this rank's own gives ``tensor``.

    Raises:
        TypeError: an argument is not as described.
        NotSymmetricError: ``tensor`` is not symmetric.
        ValueError: there is no such rank, it did not allocate the tensor, or it is out of reach of
            loads and stores.
    """
    owner = runtime.current()
    arguments.tensor("tensor", tensor)
    arguments.whole("rank", rank, 0)
    if rank >= owner.world_size:
        raise ValueError(
            f"rank must be below {owner.world_size}, the number of ranks of the job; got {rank}"
        )
    if rank == owner.rank or tensor.nbytes == 0:
        return tensor
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    nbytes = tensor.itemsize * (1 + sum((size - 1) * stride for size, stride in steps))
    offset = owner.offset_of(tensor, "tensor")
    owners = owner.arena.owners_around(offset, nbytes)
    if owners is None or rank not in owners:
        raise ValueError(
            f"rank must be one of {list(owners or ())}, which made the tensor together; got {rank}"
        )
    if owner.node_ids[rank] != owner.node_ids[owner.rank] or owner.heap.peer_base(rank) == 0:
        raise ValueError(
            f"rank must be one that loads and stores reach, on this node; got {rank}, on another"
        )
    raw = owner.heap.peer_view(rank, offset, nbytes)
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


@jit
def _barrier():
    barrier_all_block()


def barrier_on_stream(stream: torch.cuda.Stream | None = None) -> None:
    """Let a stream wait until every rank of the job has come here on its stream. Collective over
    the job.

    When it ends, all earlier messages on the ranks' streams have arrived, copies included. Two
    streams of a rank may not be in it together. It is NVSHMEM's barrier, which has no deadline on a
    GPU; on the simulator, if a rank does not come, the others raise
    :class:`~tdcoll.CollectiveTimeout`.

    >>> tdcoll.barrier_on_stream()

    Args:
        stream: the current one if None. Ignored on the simulator.

    Raises:
        NotInitializedError: before :func:`tdcoll.initialize`.
        TdcollError: the job's heap is PyTorch's symmetric memory, which has no such barrier.
    """
    owner = runtime.current()
    if owner.device.type != "cuda":
        _barrier[(1,)]()
        return
    with torch.cuda.stream(
        stream if stream is not None else torch.cuda.current_stream(owner.device)
    ):
        _barrier[(1,)](num_warps=1)


def wait_on_stream(
    word: torch.Tensor, compare: Any, value: int, stream: torch.cuda.Stream | None = None
) -> None:
    """Let a stream wait until ``word`` compares true with ``value``. No program of a kernel is
    needed for it.

    Later work sees data that was written before the word, if it was released at system scope. On a
    GPU there is no deadline. On the simulator the host waits for that of :func:`tdcoll.initialize`.

    >>> arrived = tdcoll.zeros(1, torch.int64)
    >>> tdcoll.write_on_stream(tdcoll.peer_tensor(arrived, 1 - tdcoll.rank()), 1)
    >>> tdcoll.wait_on_stream(arrived, tdl.CMP_GE, 1)

    Args:
        word: ``[]`` or ``[1]`` of int32 or int64, signed or not, on this GPU: a word of a symmetric
            tensor, or any.
        compare: ``tdl.CMP_EQ`` or ``tdl.CMP_GE``. The driver compares ``>=`` by the sign of the
            difference.
        value: not negative.
        stream: default: the current one.

    Raises:
        TypeError, ValueError: an argument is not as described.
        CollectiveTimeout: on the simulator, when the word has not come.
        TdcollError: the driver refuses.
    """
    owner, bits = _owner_and_bits(word, value)
    if compare not in (CMP_EQ, CMP_GE):
        raise ValueError(f"compare must be tdl.CMP_EQ or tdl.CMP_GE, got {compare!r}")
    owner.heap.stream_wait(
        _handle(owner, stream), word.data_ptr(), bits, compare == CMP_GE, value, owner.timeout_s
    )


def write_on_stream(
    word: torch.Tensor, value: int, stream: torch.cuda.Stream | None = None
) -> None:
    """Let a stream write ``value`` to ``word``, after all work queued before: a signal for a rank
    that waits for it.

    >>> flag = tdcoll.zeros(1, torch.int64)
    >>> tdcoll.write_on_stream(flag, 7)

    Args:
        word: ``[]`` or ``[1]`` of int32 or int64, signed or not: of this GPU, or of
            :func:`peer_tensor`.
        value: not negative.
        stream: default: the current one.

    Raises:
        TypeError, ValueError: an argument is not as described.
        TdcollError: the driver refuses.
    """
    owner, bits = _owner_and_bits(word, value)
    owner.heap.stream_write(_handle(owner, stream), word.data_ptr(), bits, value)


def copy_on_stream(
    dest: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream | None = None
) -> None:
    """Let a stream copy ``source`` to ``dest`` by a copy engine, which takes no multiprocessors
    from kernels.

    >>> inbox = tdcoll.zeros(4)
    >>> tdcoll.copy_on_stream(tdcoll.peer_tensor(inbox, 1 - tdcoll.rank()), torch.ones(4))

    Args:
        dest, source: contiguous, of as many bytes, on this GPU or of :func:`peer_tensor`.
        stream: default: the current one.

    Raises:
        TypeError, ValueError: an argument is not as described.
        TdcollError: the driver refuses.
    """
    owner = runtime.current()
    for name, tensor in (("dest", dest), ("source", source)):
        arguments.tensor(name, tensor)
        if tensor.device != owner.device or not tensor.is_contiguous():
            layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
            raise ValueError(
                f"{name} must be contiguous and on {owner.device}, got one {layout} on {tensor.device}"
            )
    if dest.nbytes != source.nbytes:
        raise ValueError(f"dest must have the {source.nbytes} bytes of source, got {dest.nbytes}")
    if dest.nbytes:
        owner.heap.stream_copy(
            _handle(owner, stream), dest.data_ptr(), source.data_ptr(), dest.nbytes
        )


def _owner_and_bits(word: torch.Tensor, value: int) -> tuple[runtime.Runtime, int]:
    """Return the job, and the bits of a word that ``value`` fits into."""
    owner = runtime.current()
    arguments.tensor("word", word)
    bits = _WORDS.get(word.dtype)
    if bits is None or word.numel() != 1 or word.device != owner.device:
        raise ValueError(
            f"word must be one integer of 32 or 64 bits on {owner.device}, got {list(word.shape)} of {word.dtype} on "
            f"{word.device}"
        )
    arguments.whole("value", value, 0)
    if value >> bits:
        raise ValueError(f"value must fit into {bits} bits, got {value}")
    return owner, bits


def _handle(owner: runtime.Runtime, stream: torch.cuda.Stream | None) -> int:
    if owner.device.type != "cuda":
        return 0
    return int(
        (stream if stream is not None else torch.cuda.current_stream(owner.device)).cuda_stream
    )
