# SPDX-License-Identifier: Apache-2.0
"""The device language under Triton's interpreter: waits that end, and words of 128 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from tdcoll.language.checks import comparison, consumed, integer_pointee, require_scalar
from tdcoll.language.simulator_arguments import blocks, device, int32, number_of
from tdcoll.runtime.simulator.builder import numpy_dtype
from tdcoll.runtime.simulator.extents import origin_of
from tdcoll.runtime.simulator.machine import Machine
from tdcoll.runtime.simulator.memory import read_word
from tdcoll.runtime.simulator.monitor import Monitor
from tdcoll.spec import constants as c

__all__ = ["consume_token", "grid_barrier", "load_words", "store_flagged", "store_words", "test_signal"]
__all__ += ["wait_flagged", "wait_signal", "wait_signals", "wait_token", "wait_until_any", "wait_word", "wait_words"]
__all__ += ["wait_words_of_all"]


@device
def wait_signal(running, signal, compare, value, monitor, peer, index):
    running.check_signal(signal, "signal")
    comparison(compare)
    return int32(running.waits.all([(signal, peer, index)], compare, value, Monitor(monitor)))


@device
def wait_token(running, signal, compare, value, monitor, peer, index):
    return wait_signal(signal, compare, value, monitor, peer, index)


@blocks
def consume_token(running, value, token):
    value, _ = consumed(value, token, triton_interpreter.interpreter_semantic)
    return value


def _check_signals(running: Machine, function: str, signals: int, count: int, compare: int, block: int) -> None:
    if count > block or block & (block - 1) or block < 1:
        raise ValueError(f"{function}: BLOCK must be a power of two of at least count={count}, got {block}")
    running.check_signal(signals, "signals")
    running.check_symmetric(signals, 8 * max(count, 0), "signals")
    comparison(compare)


@device
def wait_signals(running, signals, count, skip, compare, value, monitor, BLOCK):
    _check_signals(running, "wait_signals", signals, count, compare, BLOCK)
    wanted = [(signals + 8 * index, index, index) for index in range(count) if index != skip]
    return int32(running.waits.all(wanted, compare, value, Monitor(monitor)))


@blocks
def wait_word(running, word, compare, value, monitor, peer, index):
    pointee = integer_pointee("wait_word", word)
    require_scalar("wait_word", "word", word)
    kind = numpy_dtype(pointee)
    wanted = int(np.array(number_of("wait_word", "value", value)).astype(kind))
    address = int(word.handle.data.reshape(-1)[0])
    running.pointers.check_bytes(address, kind.itemsize, word.handle.origin, "load from")
    number = number_of("wait_word", "compare", compare)
    comparison(number)
    return int32(running.waits.word(address, kind, number, wanted, (peer, index), Monitor(monitor)))


@device
def wait_until_any(running, signals, count, skip, compare, value, monitor, BLOCK):
    _check_signals(running, "wait_until_any", signals, count, compare, BLOCK)
    wanted = [(signals + 8 * index, index) for index in range(count) if index != skip]
    return int32(running.waits.any(wanted, compare, value, Monitor(monitor)))


@device
def test_signal(running, signal, compare, value):
    running.check_signal(signal, "signal")
    comparison(compare)
    return int32(running.waits.holds(signal, compare, value))


@device
def grid_barrier(running, counter, monitor):
    held = Monitor(monitor)
    running.pointers.check_bytes(counter, 8, origin_of(counter), "store to")
    x, y, z = running.program.grid_dim
    share = (1 << 32) - (x * y * z - 1) if running.program.grid_idx == (0, 0, 0) else 1
    running.release(system=False)
    before = running.pointers.change_word(running.program.pe, counter, np.dtype(np.int64), lambda old: old + share)
    thread = read_word(monitor + 8 * c.MONITOR_RANK.value), 0
    wanted = ((int(before) >> 32) + 1) << 32
    return int32(running.waits.word(counter, np.dtype(np.int64), c.CMP_GE.value, wanted, thread, held))


def _words(words: Any, mask: Any) -> tuple[Any, Any]:
    """Return the flat uint64 addresses of 128-bit words, and which of them count."""
    active = np.broadcast_to(mask.handle.data, words.handle.data.shape).reshape(-1).astype(bool)
    return words.handle.data.reshape(-1).astype(np.uint64), active


def _wait_for_words(
    running: Machine, words: Any, mask: Any, monitor: int, senders: Sequence[tuple[int, int]], n_parts: int,
    wait: Callable[..., Any], *given: int,
) -> Any:  # fmt: skip
    """Wait for words of several senders; return blocks of their parts, and then 1 where they came in time.

    Each of ``senders`` is a rank and how many bytes after ``words`` its words lie. Of the four parts of a word the
    first ``n_parts`` are returned. ``wait`` takes addresses, threads, ``given`` and a monitor.
    """
    addresses, active = _words(words, mask)
    places, pending = np.flatnonzero(active), []
    for _, offset in senders:
        theirs = addresses + np.uint64(offset)
        running.pointers.check(theirs, active, 16, words.handle.origin, "load from")
        pending.append(theirs[places])
        for address in pending[-1][[0, -1]].tolist() if places.size else ():
            running.check_flagged(address)
    threads = [(rank, place) for rank, _ in senders for place in places.tolist()]
    seen, arrived = wait(np.concatenate(pending), threads, *given, Monitor(monitor))
    blocks = np.zeros((len(senders) * n_parts + 1, addresses.size), np.uint32)
    seen = seen.view(np.uint32).reshape(len(senders), places.size, 4)[:, :, :n_parts]
    blocks[:-1, places] = seen.transpose(0, 2, 1).reshape(len(senders) * n_parts, places.size)
    blocks[-1] = 1
    blocks[-1, places] = arrived.reshape(len(senders), places.size).all(axis=0)
    shaped = blocks.view(np.int32).reshape(len(blocks), *words.handle.data.shape)
    kind = tl.block_type(tl.int32, words.shape)
    return tuple(tl.tensor(triton_interpreter.TensorHandle(block, tl.int32), kind) for block in shaped)


@blocks
def wait_flagged(running, words, flag, mask, monitor, peer):
    wait = running.waits.flagged
    return _wait_for_words(running, words, mask, monitor, [(peer, 0)], 3, wait, flag & 0xFFFF_FFFF)


@blocks
def wait_words(running, words, absent, mask, monitor, peer, call):
    wait = running.waits.words
    return _wait_for_words(running, words, mask, monitor, [(peer, 0)], 4, wait, absent & 0xFFFF_FFFF, call)


@blocks
def wait_words_of_all(running, words, stride, count, skip, absent, mask, monitor, call):
    ranks = number_of("wait_words_of_all", "count", count)
    if ranks < 2:
        raise ValueError(f"wait_words_of_all: count must be a constant of at least 2, got {ranks}")
    polled = [rank if rank != skip else (rank + 1) % ranks for rank in range(ranks)]
    senders, wait = [(rank, rank * stride) for rank in polled], running.waits.words
    return _wait_for_words(running, words, mask, monitor, senders, 4, wait, absent & 0xFFFF_FFFF, call)


@blocks
def load_words(running, words, mask):
    parts = words.to(tl.pointer_type(tl.int32))
    return tuple(tl.load(parts + part, mask=mask, other=0) for part in range(4))


def _store(running: Machine, words: Any, parts: Sequence[Any], mask: Any, store: Callable[..., None]) -> None:
    """Let ``store`` take addresses, ``[n, 4]`` uint32 parts of words, and which of them count."""
    addresses, active = _words(words, mask)
    running.pointers.check(addresses, active, 16, words.handle.origin, "store to")
    columns = [np.broadcast_to(part, words.handle.data.shape).reshape(-1) for part in parts]
    store(addresses, np.ascontiguousarray(np.stack(columns, axis=1)).astype(np.int32).view(np.uint32), active)


@blocks
def store_flagged(running, words, first, second, third, flag, mask):
    parts = [*(part.handle.data for part in (first, second, third)), np.int64(flag)]
    _store(running, words, parts, mask, running.pointers.store_flagged)


@blocks
def store_words(running, words, first, second, third, fourth, mask):
    parts = [part.handle.data for part in (first, second, third, fourth)]
    _store(running, words, parts, mask, running.pointers.store_words)
