# SPDX-License-Identifier: Apache-2.0
"""The device language under Triton's interpreter: waits that end, and words of 128 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from tdcoll.simulator import transfers, waits
from tdcoll.simulator.bounds import origin_of
from tdcoll.simulator.builder import numpy_dtype
from tdcoll.simulator.lowering_arguments import blocks, device, int32, number_of
from tdcoll.simulator.machine import Machine
from tdcoll.simulator.pointers import pointers
from tdcoll.simulator.waits import Monitor
from tdcoll.spec import constants as c
from tdcoll.spec.checks import comparison, consumed, integer_pointee, require_scalar

__all__ = [
    "consume_token",
    "grid_barrier",
    "load_words",
    "store_flagged",
    "store_words",
    "test_signal",
]
__all__ += ["wait_flagged", "wait_signal", "wait_signals", "wait_token", "wait_word", "wait_words"]
__all__ += ["wait_words_of_all"]


@device
def wait_signal(running, signal, compare, value, monitor, peer, index):
    running.check_signal(signal, "signal")
    comparison(compare)
    _, came = waits.signals(
        running, [signal], compare, value, threads=[(peer, index)], monitor=Monitor(monitor)
    )
    return int32(came.all())


@device
def wait_token(running, signal, compare, value, monitor, peer, index):
    return wait_signal(signal, compare, value, monitor, peer, index)


@blocks
def consume_token(running, value, token):
    value, _ = consumed(value, token, triton_interpreter.interpreter_semantic)
    return value


@device
def wait_signals(
    running, signals, count, skip, compare, value, monitor, BLOCK, peer, index, stride
):
    if count > BLOCK or BLOCK & (BLOCK - 1) or BLOCK < 1:
        raise ValueError(
            f"wait_signals: BLOCK must be a power of two of at least count={count}, got {BLOCK}"
        )
    if stride < 1:
        raise ValueError(f"wait_signals: stride must be at least 1, got {stride}")
    running.check_signal(signals, "signals")
    running.check_symmetric(signals, 8 * (stride * (count - 1) + 1) if count > 0 else 0, "signals")
    comparison(compare)
    numbers = [number for number in range(count) if number != skip]
    threads = [(number if peer < 0 else peer, index + number) for number in numbers]
    places = [signals + 8 * stride * number for number in numbers]
    _, came = waits.signals(
        running, places, compare, value, threads=threads, monitor=Monitor(monitor)
    )
    return int32(came.all())


@blocks
def wait_word(running, word, compare, value, monitor, peer, index):
    pointee = integer_pointee("wait_word", word)
    require_scalar("wait_word", "word", word)
    kind = numpy_dtype(pointee)
    wanted = int(np.array(number_of("wait_word", "value", value)).astype(kind))
    address = int(word.handle.data.reshape(-1)[0])
    pointers().check_bytes(address, kind.itemsize, word.handle.origin, "load from")
    number = number_of("wait_word", "compare", compare)
    comparison(number)
    held = Monitor(monitor)
    _, came = waits.word(
        running, address, kind, number, wanted, threads=[(peer, index)], monitor=held
    )
    return int32(bool(came[0]))


@device
def test_signal(running, signal, compare, value):
    running.check_signal(signal, "signal")
    comparison(compare)
    return int32(waits.holds(running, signal, compare, value))


@device
def grid_barrier(running, counter, monitor):
    held = Monitor(monitor)
    kind = np.dtype(np.int64)
    pointers().check_bytes(counter, 8, origin_of(counter), "store to")
    x, y, z = running.program.grid_dim
    if running.races is not None:
        running.races.barrier()
    share = (1 << 32) - (x * y * z - 1) if running.program.grid_idx == (0, 0, 0) else 1
    transfers.release(running, system=False)
    before = pointers().change_word(running.program.pe, counter, kind, lambda old: old + share)
    if running.races is not None:
        places = np.array([counter], np.uint64)
        running.races.change(places, 8, origin_of(counter), "acq_rel", system=False)
    thread = (c.OWN_GRID.value, -1)
    wanted = ((int(before) >> 32) + 1) << 32
    _, came = waits.word(
        running, counter, kind, c.CMP_GE.value, wanted, threads=[thread], monitor=held
    )
    return int32(came.all())


def _words(words: Any, mask: Any) -> tuple[Any, Any]:
    """Return the flat uint64 addresses of 128-bit words, and which of them count."""
    active = np.broadcast_to(mask.handle.data, words.handle.data.shape).reshape(-1).astype(bool)
    return words.handle.data.reshape(-1).astype(np.uint64), active


def _wait_for_words(
    running: Machine, words: Any, mask: Any, monitor: int, senders: Sequence[tuple[int, int]], n_parts: int,
    wait: Callable[..., Any], *wanted: int,
) -> Any:  # fmt: skip
    """Wait for words of several senders; return blocks of their parts, and then 1 where they came
    in time.

    Each of ``senders`` is a rank and how many bytes after ``words`` its words lie. The first
    ``n_parts`` of the four parts of a word are returned. ``wait`` takes the machine, addresses and
    what is ``wanted``.
    """
    addresses, active = _words(words, mask)
    places = np.flatnonzero(active)
    pending = []
    for _, offset in senders:
        theirs = addresses + np.uint64(offset)
        pointers().check_words(theirs, active, words.handle.origin, "load from")
        pending.append(theirs[places])
        for address in pending[-1][[0, -1]].tolist() if places.size else ():
            running.check_symmetric(address, 16, "words")
    threads = [(rank, place) for rank, _ in senders for place in places.tolist()]
    held = Monitor(monitor)
    seen, arrived = wait(running, np.concatenate(pending), *wanted, threads=threads, monitor=held)
    blocks = np.zeros((len(senders) * n_parts + 1, addresses.size), np.uint32)
    seen = seen.reshape(len(senders), places.size, 4)[:, :, :n_parts]
    blocks[:-1, places] = seen.transpose(0, 2, 1).reshape(len(senders) * n_parts, places.size)
    blocks[-1] = 1
    blocks[-1, places] = arrived.reshape(len(senders), places.size).all(axis=0)
    shaped = blocks.view(np.int32).reshape(len(blocks), *words.handle.data.shape)
    kind = tl.block_type(tl.int32, words.shape)
    return tuple(
        tl.tensor(triton_interpreter.TensorHandle(block, tl.int32), kind) for block in shaped
    )


@blocks
def wait_flagged(running, words, flag, mask, monitor, peer):
    return _wait_for_words(
        running, words, mask, monitor, [(peer, 0)], 3, waits.flagged, flag & 0xFFFF_FFFF
    )


@blocks
def wait_words(running, words, absent, mask, monitor, peer, call):
    return _wait_for_words(
        running, words, mask, monitor, [(peer, 0)], 4, waits.words, absent & 0xFFFF_FFFF, call
    )


@blocks
def wait_words_of_all(running, words, stride, count, skip, absent, mask, monitor, call):
    ranks = number_of("wait_words_of_all", "count", count)
    if ranks < 2:
        raise ValueError(f"wait_words_of_all: count must be a constant of at least 2, got {ranks}")
    polled = [rank if rank != skip else (rank + 1) % ranks for rank in range(ranks)]
    senders = [(rank, rank * stride) for rank in polled]
    return _wait_for_words(
        running, words, mask, monitor, senders, 4, waits.words, absent & 0xFFFF_FFFF, call
    )


@blocks
def load_words(running, words, mask):
    parts = words.to(tl.pointer_type(tl.int32))
    return tuple(tl.load(parts + part, mask=mask, other=0) for part in range(4))


def _store(words: Any, parts: Sequence[Any], mask: Any, *, whole: bool) -> None:
    """Store 128-bit words of four parts."""
    addresses, active = _words(words, mask)
    pointers().check_words(addresses, active, words.handle.origin, "store to")
    columns = [np.broadcast_to(part, words.handle.data.shape).reshape(-1) for part in parts]
    values = np.ascontiguousarray(np.stack(columns, axis=1)).astype(np.int32).view(np.uint32)
    pointers().store_words(addresses, values, active, whole=whole)


@blocks
def store_flagged(running, words, first, second, third, flag, mask):
    parts = [*(part.handle.data for part in (first, second, third)), np.int64(flag)]
    _store(words, parts, mask, whole=True)


@blocks
def store_words(running, words, first, second, third, fourth, mask):
    parts = [part.handle.data for part in (first, second, third, fourth)]
    _store(words, parts, mask, whole=False)
