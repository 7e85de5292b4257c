# SPDX-License-Identifier: Apache-2.0
"""The device language on the simulator: signatures, argument errors, threads, node borders."""

from __future__ import annotations

import re

import protocols
import pytest
import torch
import triton
import triton.language as tl
from cases import device, gathering, on_rows, wait_once
from exploring import explore

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.language.jit import jit
from tdcoll.testing import Deadlock, World

PUT, SET = tdl.putmem_block, tdl.SIGNAL_SET


def signal(p, q, signal):
    tdl.putmem_signal_block(p, q, 8, signal, 1, SET, 1)


def add(p):
    tdl.atomic_add(p, 1, 0)


def peer():
    return runtime.current().heap.peer_base(1)


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (
            lambda r, own: device(PUT, own, r, 8, 1),
            "dest must lie in the symmetric heap.*ordinary memory",
        ),
        (lambda r, own: device(PUT, r, own, 8, 2), r"pe must be in 0\.\.1, got 2"),
        (lambda r, own: device(PUT, r, own, 8, -1), r"pe must be in 0\.\.1, got -1"),
        (lambda r, own: device(PUT, r, own, -8, 1), "bytes must be at least 0, got -8"),
        (lambda r, own: device(PUT, r, 0, 8, 1), "source must point to memory, got 0x0"),
        (
            lambda r, own: device(PUT, r, own, 1.5, 1),
            "bytes must be an integer or a pointer, got 1.5",
        ),
        (
            lambda r, own: device(PUT, r, own, 1024, 1),
            "dest must stay.*bytes 0..1024 of pe0.rows, which has 64 bytes",
        ),
        (
            lambda r, own: device(PUT, peer(), own, 8, 1),
            "dest must be a symmetric address of this PE.*address of PE 1",
        ),
        (lambda r, own: device(PUT, r, peer(), 8, 1), "source must be memory of this PE"),
        (lambda r, own: device(signal, r, own, own), "sig_addr must lie in the symmetric heap"),
        (
            lambda r, own: device(signal, r, own, r.data_ptr() + 4),
            "sig_addr must be 8-byte aligned",
        ),
        (
            lambda r, own: device(signal, r, own, r.int()),
            r"sig_addr must point to 64-bit integers .* pointer to int32",
        ),
        (
            lambda r, own: device(wait_once, r.double(), 1, own, own),
            "wait_signal: signal must point to 64-bit .* fp64",
        ),
        (
            lambda r, own: device(wait_once, own, 1, own, own),
            "signal must lie in the symmetric heap",
        ),
        (
            lambda r, own: device(wait_once, r, 1, 0, own),
            "monitor must be the words of an open .* at 0x0",
        ),
        (lambda r, own: device(wait_once, r, 1, own, own), "monitor must be the words of an open"),
        (
            lambda r, own: device(lambda p: tdl.remote_ptr(p, 1), own),
            "local_ptr must lie in the symmetric heap",
        ),
        (lambda p: tdl.ld(p, "cta"), "scope must be one of gpu, sys; got 'cta'"),
        (
            lambda p: tdl.ld(p, "sys", "release"),
            "semantic must be one of relaxed, acquire; got 'release'",
        ),
        (
            lambda p: tdl.st(p, 1, "gpu", "acquire"),
            "semantic must be one of relaxed, release; got 'acquire'",
        ),
        (lambda p: tdl.ld(7), "ld: ptr must point to 32- or 64-bit integers, got 7"),
        (lambda p: tdl.tid(3), "axis must be 0, 1 or 2, got 3"),
        (lambda p: tdl.signal_wait_until(p, 6, 1), r"cmp_ must be a CMP_\* constant, got 6"),
        (
            lambda p: tdl.wait_signals(p, 3, -1, 5, 1, p, 2),
            "BLOCK must be a power of two of at least count=3, got 2",
        ),
        (lambda p: tdl.wait_signal(p, 9, 1, p, 0, 0), r"compare must be a CMP_\* constant, got 9"),
        (
            lambda p: tdl.atom_add(p, 1),
            "every thread of the block would do it; call it in a branch on tid",
        ),
        (
            lambda p: tdl.atom_add(p + tl.arange(0, 16), 1),
            r"atom_add: ptr must be a scalar, got a block of shape .16",
        ),
        (lambda r, own: device(add, own), "dest must lie in the symmetric heap"),
        (
            lambda r, own: device(add, r.view(torch.float64)),
            "atomic_add: dest must be a pointer to integers of 32 or",
        ),
        (
            lambda r, own: device(lambda p: tdl.p(p, 1, 0), r.view(torch.int8)),
            "p: dest must be .* or 64 bits, or to fp32",
        ),
        (lambda p: tdl.copy_block(p, p, -1), "nbytes must be at least 0, got -1"),
        (
            lambda p: tdl.consume_token(1.5, 1),
            "value must be a pointer or an integer offset, got fp32",
        ),
        (
            lambda p: tdl.consume_token(p, tl.cast(1, tl.int64)),
            "token must be what wait_token returned, .* got int64",
        ),
    ],
)
def test_argument_errors_name_the_argument(launch, message):
    """Of launches, and of functions that are called in a kernel."""

    def body(rows, _):
        if launch.__code__.co_argcount == 1:
            device(launch, rows)
        launch(rows, torch.zeros(8, dtype=torch.int64))

    with pytest.raises((ValueError, TypeError, tdcoll.TdcollError), match=message) as raised:
        on_rows(body)
    assert any(note.startswith("raised by pe0 ") for note in raised.value.__notes__)


def test_other_nodes_are_reached_by_puts_from_symmetric_memory_only():
    def store(pe):
        return lambda rows, _: device(lambda p: tl.store(tdl.remote_ptr(p, pe), 5), rows)

    with pytest.raises(ValueError, match=r"pe0 call\(0,0,0\) would store to a null pointer"):
        on_rows(store(1), ranks_per_node=1)
    with pytest.raises(
        ValueError, match="source must lie in the symmetric heap when PE 1 is on another node"
    ):
        on_rows(lambda rows, _: device(PUT, rows, torch.zeros(8), 8, 1), ranks_per_node=1)
    on_rows(lambda rows, _: device(PUT, rows, rows[4:], 8, 1), ranks_per_node=1)
    on_rows(store(0), ranks_per_node=1)


@pytest.mark.parametrize("form", ["if", "name"])
def test_kernels_written_for_threads(form):
    def launch(buffer, signals, nbytes, call, monitor, n):
        protocols.gather_by_threads[(n,)](buffer, signals, nbytes, call, n, form, 0, num_warps=1)

    explore(gathering(launch), n_pes=4, seeds=5)


def test_what_every_thread_adds_is_added_by_every_thread():
    def body(signals, _):
        device(lambda p: tdl.signal_op(p, 1, tdl.SIGNAL_ADD, 0), signals, grid=(2,), num_warps=2)
        protocols.add_by_one_thread[(2,)](signals[1:], num_warps=2)
        return signals[:2].tolist()

    assert on_rows(body) == [128, 2]


def test_signals_are_unsigned():
    """Word 0 is 2**64 - 1."""

    def unsigned(signals, monitor, out):
        tl.store(out, tdl.signal_wait_until(signals, tdl.CMP_GT, 5).to(tl.int64, bitcast=True))
        tl.store(out + 1, tdl.wait_signals(signals, 1, -1, tdl.CMP_EQ, -1, monitor, 1))

    def body(signals, _):
        signals[0], out = -1, torch.zeros(2, dtype=torch.int64)
        device(unsigned, signals, tdcoll.WaitMonitor().words, out)
        return out.tolist()

    assert on_rows(body) == [-1, 1]


def test_a_program_sees_its_own_stores_to_a_peer():
    def store_and_read_back(pointer, out):
        remote = tdl.remote_ptr(pointer, 1)
        tdl.st(remote, 5, "sys")
        tdl.st(remote + 1, 6, "sys")
        tl.store(out, tl.load(remote))
        tl.store(out + 1, tdl.ld(remote + 1, "sys"))

    for seed in range(20):
        out = torch.zeros(2, dtype=torch.int64)
        on_rows(
            lambda rows, _, out=out: device(store_and_read_back, rows, out), seed=seed, weak=True
        )
        assert out.tolist() == [5, 6]


@triton.jit
def of_triton(out, word, monitor, HOW: tl.constexpr):
    """Launched as it is: NVSHMEM would be missing on a GPU."""
    if HOW == "my_pe":
        tl.store(out, tdl.my_pe())
    elif HOW == "remote_ptr":
        tl.store(tdl.remote_ptr(word, 0), 1)
    elif HOW == "signal_block":
        tdl.signal_block(word, 1, tdl.SIGNAL_SET, 0)
    elif HOW == "a helper":
        _put(word)
    else:  # needs none
        tdl.syncthreads()
        tdl.wait_signal(word, tdl.CMP_GE, 0, monitor, 0, 0)
        tdl.st(word, 7, "sys")
        tl.store(out, tdl.ld(word, "sys").to(tl.int32))


@jit
def calls_of_triton(out, word, monitor, HOW: tl.constexpr):
    of_triton(out, word, monitor, HOW)


@jit
def _put(word):
    tdl.putmem_block(word, word, 8, 0)


@pytest.mark.parametrize("how", ["my_pe", "remote_ptr", "signal_block", "a helper", "no NVSHMEM"])
def test_kernel_of_triton_jit_is_refused_where_it_calls_nvshmem(how):
    def launch(kernel):
        out = torch.full((1,), -1, dtype=torch.int32)
        on_rows(lambda word, _: kernel[(1,)](out, word, tdcoll.WaitMonitor().words, how))
        return out.item()

    function = {"a helper": "putmem_block"}.get(how, how)
    if how == "no NVSHMEM":
        assert launch(of_triton) == 7
    else:
        with pytest.raises(
            ValueError, match=f"^{function} calls NVSHMEM: decorate the kernel .* with @tdcoll.jit"
        ):
            launch(of_triton)
    launch(calls_of_triton)  # a helper may have either


def test_wait_by_token_waits_and_ends():
    def wait_by_token(signal, value, monitor, data, result):
        token = tdl.wait_token(signal, tdl.CMP_GE, value, monitor, 7, 9)
        tl.store(result, tdl.consume_token(tl.load(tdl.consume_token(data, token)), token))
        tl.store(result + 1, token.to(tl.int64))

    def body(rows, _):
        result, monitor = torch.zeros(2, dtype=torch.int64), tdcoll.WaitMonitor(timeout_s=0.5)
        rows[:2] = torch.tensor([5, 77])
        for value, came in ((5, 1), (6, 0)):
            monitor.check()
            device(wait_by_token, rows, value, monitor.words, rows[1:], result)
            assert result.tolist() == [77, came]  # what is there
        with pytest.raises(tdcoll.CollectiveTimeout) as raised:
            monitor.check()
        return raised.value

    error = on_rows(body, on_timeout="expire")
    assert (error.peer, error.signal, error.expected, error.seen) == (7, 9, 6, 5)


def test_monitor_of_another_job_or_freed_is_refused():
    words = []
    on_rows(lambda rows, _: words.append(tdcoll.WaitMonitor().words))
    with pytest.raises(
        ValueError, match=r"monitor must be the words of an open tdcoll\.WaitMonitor of this job"
    ):
        on_rows(lambda rows, _: device(wait_once, rows, 0, words[0], words[0]))


# ---------------------------------------------------------------------- reports


@jit
def wait_for_debts(signal, monitor):
    tdl.signal_block(signal, -5, tdl.SIGNAL_SET, 1 - tdl.my_pe())
    tdl.wait_signal(signal, tdl.CMP_EQ, -7, monitor, 1 - tdl.my_pe(), 0)


def test_memory_that_is_no_monitor_is_reported_at_the_kernels_line():
    def host(pe):
        signal = tdcoll.zeros(1, torch.int64, name="debt")
        wait_for_debts[(1,)](signal, torch.zeros(16, dtype=torch.int64))

    with pytest.raises(ValueError, match="monitor must be the words of an open") as raised:
        World(2).run(host)
    (note,) = [note for note in raised.value.__notes__ if "wait_for_debts" in note]
    assert re.search(r"\(\S*test_language\.py:\d+\)$", note), note


def test_signals_are_reported_with_their_sign():
    def host(pe):
        signal = tdcoll.zeros(1, torch.int64, name="debt")
        wait_for_debts[(1,)](signal, tdcoll.WaitMonitor())

    with pytest.raises(Deadlock, match=r"waits for pe0\.debt\[0\] == -7, is -5 \("):
        World(2).run(host)


def test_interpreted_kernels_say_why_they_cannot_be_compiled():
    with pytest.raises(AttributeError, match="TRITON_INTERPRET=1 was set when its module"):
        _ = wait_for_debts.cache_key
