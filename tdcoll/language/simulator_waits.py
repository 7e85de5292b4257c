# SPDX-License-Identifier: Apache-2.0
"""The device language under Triton's interpreter: waits that end, and words of 128 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from tdcoll.language.simulator_arguments import (
    MASK64,
    address64,
    checked_compare,
    device,
    int32,
    integer_pointee,
    number_of,
)
from tdcoll.runtime.simulator import transfers, waits
from tdcoll.runtime.simulator.builder import numpy_dtype
from tdcoll.runtime.simulator.current import machine, pointers
from tdcoll.runtime.simulator.extents import origin_of
from tdcoll.runtime.simulator.memory import read_word
from tdcoll.runtime.simulator.waits import Monitor
from tdcoll.spec import constants as c
from tdcoll.spec.functions import FUNCTIONS

__all__ = [
    "consume_token",
    "grid_barrier",
    "load_words",
    "store_flagged",
    "store_words",
    "test_signal",
    "wait_flagged",
    "wait_signal",
    "wait_signals",
    "wait_token",
    "wait_until_any",
    "wait_word",
    "wait_words",
    "wait_words_of_all",
]


@device
def wait_signal(running, signal, compare, value, monitor, peer, index):
    running.check_signal(signal, "signal")
    checked_compare("compare", compare)
    _, came = waits.signals(running, [signal], compare, value, threads=[(peer, index)], monitor=Monitor(monitor))
    return int32(came.all())


@device
def wait_token(running, signal, compare, value, monitor, peer, index):
    return wait_signal(signal, compare, value, monitor, peer, index)


def consume_token(value: Any, token: Any, _semantic: Any = None) -> Any:
    machine()
    if isinstance(value, tl.core.tensor_descriptor_base):
        raise ValueError(
            "consume_token: value must be a pointer or an offset, got a descriptor: give an offset of its load"
        )
    semantic = triton_interpreter.interpreter_semantic
    value, token = semantic.to_tensor(value), semantic.to_tensor(token)
    if not (value.dtype.is_ptr() or value.dtype.is_int()):
        raise ValueError(f"consume_token: value must be a pointer or an integer offset, got {value.type}")
    if token.type != tl.int32:
        raise ValueError(f"consume_token: token must be what wait_token returned, an int32; got {token.type}")
    return value


def _wait_for_some(
    function: str, signals: int, count: int, skip: int, compare: int, value: int, monitor: int, block: int, **how: bool
) -> tuple[list[int], Any]:
    """Wait for signals of an array; return the indices of those that are waited for, and which of them came."""
    running = machine()
    if count > block or block & (block - 1) or block < 1:
        raise ValueError(f"{function}: BLOCK must be a power of two of at least count={count}, got {block}")
    running.check_signal(signals, "signals")
    running.check_symmetric(signals, 8 * max(count, 0), "signals")
    checked_compare("compare", compare)
    indices = [index for index in range(count) if index != skip]
    threads, places = [(index, index) for index in indices], [signals + 8 * index for index in indices]
    _, came = waits.signals(running, places, compare, value, threads=threads, monitor=Monitor(monitor), **how)
    return indices, came


@device
def wait_signals(running, signals, count, skip, compare, value, monitor, BLOCK):
    _, came = _wait_for_some("wait_signals", signals, count, skip, compare, value, monitor, BLOCK)
    return int32(came.all())


@device
def wait_until_any(running, signals, count, skip, compare, value, monitor, BLOCK):
    indices, came = _wait_for_some("wait_until_any", signals, count, skip, compare, value, monitor, BLOCK, one=True)
    return int32(indices[came.argmax()] if came.any() else -1)


def wait_word(word: Any, compare: Any, value: Any, monitor: Any, peer: Any, index: Any, _semantic: Any = None) -> Any:
    running, pointee = machine(), integer_pointee("wait_word", word)
    if word.type.is_block():
        raise ValueError(f"wait_word: word must be a scalar, got a block of shape {list(word.handle.data.shape)}")
    kind = numpy_dtype(pointee)
    wanted = int(np.array(number_of("wait_word", "value", value)).astype(kind))
    address = int(word.handle.data.reshape(-1)[0])
    pointers().check_bytes(address, kind.itemsize, word.handle.origin, "load from")
    thread = number_of("wait_word", "peer", peer), number_of("wait_word", "index", index)
    held = Monitor(address64("wait_word", "monitor", monitor))
    number = checked_compare("compare", number_of("wait_word", "compare", compare))
    _, came = waits.word(running, address, kind, number, wanted, threads=[thread], monitor=held)
    return int32(bool(came[0]))


@device
def test_signal(running, signal, compare, value):
    running.check_signal(signal, "signal")
    return int32(waits.holds(running, signal, checked_compare("compare", compare), value))


@device
def grid_barrier(running, counter, monitor):
    held, kind = Monitor(monitor), np.dtype(np.int64)
    pointers().check_bytes(counter, 8, origin_of(counter), "store to")
    x, y, z = running.program.grid_dim
    share = (1 << 32) - (x * y * z - 1) if running.program.grid_idx == (0, 0, 0) else 1
    transfers.release(running, system=False)
    before = pointers().change_word(running.program.pe, counter, kind, lambda old: old + share)
    thread, wanted = (read_word(monitor + 8 * c.MONITOR_RANK.value), 0), ((int(before) >> 32) + 1) << 32
    _, came = waits.word(running, counter, kind, c.CMP_GE.value, wanted, threads=[thread], monitor=held)
    return int32(came.all())


def _words(words: Any, mask: Any) -> tuple[Any, Any]:
    """Return the flat uint64 addresses of 128-bit words, and which of them count."""
    addresses = words.handle.data.reshape(-1).astype(np.uint64)
    return addresses, np.broadcast_to(mask.handle.data, words.handle.data.shape).reshape(-1).astype(bool)


def _wait_for_words(
    function: str, words: Any, mask: Any, monitor: Any, senders: Sequence[tuple[int, int]], n_parts: int,
    wait: Callable[..., Any], *wanted: int,
) -> Any:  # fmt: skip
    """Wait for words of several senders; return blocks of their parts, and then 1 where they came in time.

    Each of ``senders`` is a rank and how many bytes after ``words`` its words lie. Of the four parts of a word the
    first ``n_parts`` are returned. ``wait`` takes the machine, addresses and what is ``wanted``.
    """
    addresses, active = _words(words, mask)
    places, pending, running = np.flatnonzero(active), [], machine()
    for _, offset in senders:
        theirs = addresses + np.uint64(offset)
        pointers().check_words(theirs, active, words.handle.origin, "load from")
        pending.append(theirs[places])
        for address in pending[-1][[0, -1]].tolist() if places.size else ():
            running.check_symmetric(address, 16, "words")
    held = Monitor(address64(function, "monitor", monitor))
    threads = [(rank, place) for rank, _ in senders for place in places.tolist()]
    seen, arrived = wait(running, np.concatenate(pending), *wanted, threads=threads, monitor=held)
    blocks = np.zeros((len(senders) * n_parts + 1, addresses.size), np.uint32)
    seen = seen.reshape(len(senders), places.size, 4)[:, :, :n_parts]
    blocks[:-1, places] = seen.transpose(0, 2, 1).reshape(len(senders) * n_parts, places.size)
    blocks[-1] = 1
    blocks[-1, places] = arrived.reshape(len(senders), places.size).all(axis=0)
    shaped = blocks.view(np.int32).reshape(len(blocks), *words.handle.data.shape)
    kind = tl.block_type(tl.int32, words.shape)
    return tuple(tl.tensor(triton_interpreter.TensorHandle(block, tl.int32), kind) for block in shaped)


def _store_words(words: Any, parts: Sequence[Any], mask: Any, *, whole: bool) -> None:
    """Store 128-bit words of four parts."""
    addresses, active = _words(words, mask)
    pointers().check_words(addresses, active, words.handle.origin, "store to")
    columns = [np.broadcast_to(part, words.handle.data.shape).reshape(-1) for part in parts]
    values = np.ascontiguousarray(np.stack(columns, axis=1)).astype(np.int32).view(np.uint32)
    pointers().store_words(addresses, values, active, whole=whole)


def wait_flagged(words: Any, flag: Any, mask: Any, monitor: Any, peer: Any, _semantic: Any = None) -> Any:
    wanted, senders = number_of("wait_flagged", "flag", flag), [(number_of("wait_flagged", "peer", peer), 0)]
    return _wait_for_words("wait_flagged", words, mask, monitor, senders, 3, waits.flagged, wanted & 0xFFFF_FFFF)


def store_flagged(words: Any, first: Any, second: Any, third: Any, flag: Any, mask: Any, _semantic: Any = None) -> None:
    last = np.array(number_of("store_flagged", "flag", flag) & 0xFFFF_FFFF, np.uint32)
    _store_words(words, [*(part.handle.data for part in (first, second, third)), last], mask, whole=True)


def _wait_for_data(
    function: str, words: Any, senders: Sequence[tuple[int, int]], absent: Any, mask: Any, monitor: Any, call: Any
) -> Any:
    missing, number = number_of(function, "absent", absent) & 0xFFFF_FFFF, number_of(function, "call", call) & MASK64
    return _wait_for_words(function, words, mask, monitor, senders, 4, waits.words, missing, number)


def wait_words(words: Any, absent: Any, mask: Any, monitor: Any, peer: Any, call: Any, _semantic: Any = None) -> Any:
    senders = [(number_of("wait_words", "peer", peer), 0)]
    return _wait_for_data("wait_words", words, senders, absent, mask, monitor, call)


def wait_words_of_all(
    words: Any, stride: Any, count: Any, skip: Any, absent: Any, mask: Any, monitor: Any, call: Any,
    _semantic: Any = None,
) -> Any:  # fmt: skip
    name = "wait_words_of_all"
    step, own, ranks = number_of(name, "stride", stride), number_of(name, "skip", skip), number_of(name, "count", count)
    if ranks < 2:
        raise ValueError(f"{name}: count must be a constant of at least 2, got {ranks}")
    polled = [rank if rank != own else (rank + 1) % ranks for rank in range(ranks)]
    return _wait_for_data(name, words, [(rank, rank * step) for rank in polled], absent, mask, monitor, call)


def load_words(words: Any, mask: Any, _semantic: Any = None) -> Any:
    parts = words.to(tl.pointer_type(tl.int32))
    return tuple(tl.load(parts + part, mask=mask, other=0) for part in range(4))


def store_words(words: Any, first: Any, second: Any, third: Any, fourth: Any, mask: Any, _semantic: Any = None) -> None:
    _store_words(words, [part.handle.data for part in (first, second, third, fourth)], mask, whole=False)


for _name in (
    "consume_token",
    "wait_word",
    "wait_flagged",
    "store_flagged",
    "wait_words",
    "wait_words_of_all",
    "load_words",
    "store_words",
):
    globals()[_name].__doc__ = FUNCTIONS[_name].doc
