# SPDX-License-Identifier: Apache-2.0
"""The device language on the simulator: signatures, argument errors, threads, node borders."""

from __future__ import annotations

import inspect

import kernels
import protocols
import pytest
import torch
import triton.language as tl
from cases import gathering

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.language import simulator
from tdcoll.spec.functions import FUNCTIONS
from tdcoll.testing import World, explore


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_its_signature(name):
    function = getattr(simulator, name)
    parameters = [p for p in inspect.signature(function).parameters if p != "_semantic"]
    assert parameters == [parameter for parameter, _ in FUNCTIONS[name].parameters]
    assert function.__doc__ == FUNCTIONS[name].doc
    assert getattr(tdl, name) is function


def _run(body, n_pes=2, **options):
    """``body(rows)`` on PE 0; rows: int64 ``[8]``, symmetric."""

    def host(pe):
        rows = runtime.current().allocate((8,), torch.int64, name="rows")
        return body(rows) if pe == 0 else None

    return World(n_pes, **options).run(host)[0]


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (lambda rows, own: kernels.put[(1,)](own, rows, 8, 1), "dest must lie in the symmetric heap.*ordinary memory"),
        (lambda rows, own: kernels.put[(1,)](rows, own, 8, 2), r"pe must be in 0\.\.1, got 2"),
        (lambda rows, own: kernels.put[(1,)](rows, own, 8, -1), r"pe must be in 0\.\.1, got -1"),
        (lambda rows, own: kernels.put[(1,)](rows, own, -8, 1), "bytes must be at least 0, got -8"),
        (lambda rows, own: kernels.put[(1,)](rows, 0, 8, 1), "source must point to memory, got 0x0"),
        (lambda rows, own: kernels.put[(1,)](rows, own, 1.5, 1), "bytes must be an integer or a pointer, got 1.5"),
        (
            lambda rows, own: kernels.put_signal[(1,)](rows, own, 8, own, 1),
            "sig_addr must lie in the symmetric heap",
        ),
        (
            lambda rows, own: kernels.put_signal[(1,)](rows, own, 8, rows.data_ptr() + 4, 1),
            "sig_addr must be 8-byte aligned",
        ),
        (
            lambda rows, own: kernels.put_signal[(1,)](rows, own, 8, rows.view(torch.int32), 1),
            r"putmem_signal_block: sig_addr must point to 64-bit integers \(int64 or uint64\), got a pointer to int32",
        ),
        (
            lambda rows, own: kernels.wait_once[(1,)](rows.view(torch.float64), 1, own, own),
            "wait_signal: signal must point to 64-bit integers .* got a pointer to fp64",
        ),
        (
            lambda rows, own: kernels.put[(1,)](runtime.current().heap.peer_base(1), own, 8, 1),
            "dest must be a symmetric address of this PE.*an address of PE 1",
        ),
        (
            lambda rows, own: kernels.put[(1,)](rows, runtime.current().heap.peer_base(1), 8, 1),
            "source must be memory of this PE",
        ),
        (lambda rows, own: kernels.store_to[(1,)](own, 1), "local_ptr must lie in the symmetric heap"),
        (
            lambda rows, own: kernels.wait_once[(1,)](own, 1, own, own),
            "signal must lie in the symmetric heap",
        ),
        (lambda rows, own: kernels.wait_once[(1,)](rows, 1, 0, own), "monitor must be the words of an open .* at 0x0"),
        (lambda rows, own: kernels.wait_once[(1,)](rows, 1, own, own), "monitor must be the words of an open"),
        (lambda rows, own: kernels.tid_as_value[(1,)](own), "tid.. is different in each thread"),
    ],
)
def test_argument_errors_name_the_argument(launch, message):
    with pytest.raises((ValueError, TypeError, tdcoll.TdcollError), match=message) as raised:
        _run(lambda rows: launch(rows, torch.zeros(8, dtype=torch.int64)))
    assert any(note.startswith("raised by pe0 ") for note in raised.value.__notes__)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: tdl.ld(p, "cta"), "scope must be one of gpu, sys; got 'cta'"),
        (lambda p: tdl.ld(p, "sys", "release"), "semantic must be one of relaxed, acquire; got 'release'"),
        (lambda p: tdl.st(p, 1, "gpu", "acquire"), "semantic must be one of relaxed, release; got 'acquire'"),
        (lambda p: tdl.ld(7), "ld: ptr must point to 32- or 64-bit integers, got 7"),
        (lambda p: tdl.tid(3), "axis must be 0, 1 or 2, got 3"),
        (lambda p: tdl.signal_wait_until(p, 6, 1), r"cmp_ must be a CMP_\* constant, got 6"),
        (lambda p: tdl.wait_signals(p, 3, -1, 5, 1, p, 2), "BLOCK must be a power of two of at least count=3, got 2"),
        (lambda p: tdl.wait_signal(p, 9, 1, p, 0, 0), r"compare must be a CMP_\* constant, got 9"),
        (lambda p: tdl.copy_block(p, p, -1), "nbytes must be at least 0, got -1"),
    ],
)
def test_constants_are_checked(call, message):
    kernels.CALL = call
    with pytest.raises(ValueError, match=message):
        _run(lambda rows: kernels.call[(1,)](rows))


def test_bytes_beyond_the_heap():
    with pytest.raises(ValueError, match=r"dest must stay.*bytes 0..1024 of pe0\.rows, which has 64 bytes"):
        _run(lambda rows: kernels.put[(1,)](rows, torch.zeros(1024), 1024, 1), heap_bytes=512)


def test_other_nodes_are_reached_by_puts_from_symmetric_memory_only():
    nodes = {"ranks_per_node": 1}
    with pytest.raises(ValueError, match=r"pe0 store_to\(0,0,0\) would store to a null pointer"):
        _run(lambda rows: kernels.store_to[(1,)](rows, 1), **nodes)
    with pytest.raises(ValueError, match="source must lie in the symmetric heap when PE 1 is on another node"):
        _run(lambda rows: kernels.put[(1,)](rows, torch.zeros(8), 8, 1), **nodes)
    _run(lambda rows: kernels.put[(1,)](rows, rows[4:], 8, 1), **nodes)
    _run(lambda rows: kernels.store_to[(1,)](rows, 0), **nodes)


@pytest.mark.parametrize("form", ["if", "name", "for"])
def test_kernels_written_for_threads(form):
    def launch(buffer, signals, nbytes, call, monitor, n):
        protocols.gather_by_threads[(n,)](buffer, signals, nbytes, call, n, form, num_warps=1)

    explore(gathering(launch), n_pes=4, seeds=10)


def test_else_and_not_of_a_test_on_threads():
    out = torch.zeros(3, dtype=torch.int32)
    _run(lambda rows: kernels.else_of_threads[(1,)](out, num_warps=2))
    assert out.tolist() == [3, 61, 3]


def test_what_every_thread_adds_is_added_by_every_thread():
    def body(signals):
        kernels.count_by_every_thread[(2,)](signals, num_warps=2)
        kernels.count_by_one_thread[(2,)](signals[1:], num_warps=2)
        return signals[:2].tolist()

    assert _run(body) == [128, 2]


def test_signals_are_unsigned():
    def body(signals):
        signals[0] = -1
        out = torch.zeros(2, dtype=torch.int64)
        kernels.unsigned[(1,)](signals, tdcoll.WaitMonitor().words, out)
        return out.tolist()

    assert _run(body) == [-1, 1]


def test_a_program_sees_its_own_stores_to_a_peer():
    for seed in range(20):

        def body(rows):
            out = torch.zeros(2, dtype=torch.int64)
            kernels.store_and_read_back[(1,)](rows, out, 1)
            return out.tolist()

        assert _run(body, seed=seed, weak=True) == [5, 6]


@pytest.mark.parametrize("how", ["my_pe", "remote_ptr", "signal_block", "a helper", "no NVSHMEM"])
def test_kernel_of_triton_jit_is_refused_where_it_calls_nvshmem(how):
    def launch(kernel):
        def body(word):
            out = torch.full((1,), -1, dtype=torch.int32)
            kernel[(1,)](out, word, tdcoll.WaitMonitor().words, how)
            return int(out)

        return body

    function = {"a helper": "putmem_block"}.get(how, how)
    if how == "no NVSHMEM":
        assert _run(launch(kernels.of_triton)) == 7
    else:
        with pytest.raises(ValueError, match=f"^{function} calls NVSHMEM: decorate the kernel .* with @tdcoll.jit"):
            _run(launch(kernels.of_triton))
    _run(launch(kernels.calls_of_triton))  # a helper may have either


def test_wait_by_token_waits_and_ends():
    def body(rows):
        result = torch.zeros(2, dtype=torch.int64)
        rows[:2] = torch.tensor([5, 77])
        monitor = tdcoll.WaitMonitor(timeout_s=0.5)
        kernels.wait_by_token[(1,)](rows, 5, monitor.words, rows[1:], result)
        assert result.tolist() == [77, 1]
        monitor.check()
        kernels.wait_by_token[(1,)](rows, 6, monitor.words, rows[1:], result)
        assert result.tolist() == [77, 0]  # what is there
        with pytest.raises(tdcoll.CollectiveTimeout) as raised:
            monitor.check()
        return raised.value

    error = _run(body, on_timeout="expire")
    assert (error.peer, error.signal, error.expected, error.seen) == (7, 9, 6, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: tdl.consume_token(1.5, 1), "value must be a pointer or an integer offset, got fp32"),
        (lambda p: tdl.consume_token(p, tl.cast(1, tl.int64)), "token must be what wait_token returned, .* got int64"),
    ],
)
def test_arguments_of_consume_token(call, message):
    kernels.CALL = call
    with pytest.raises(ValueError, match=message):
        _run(lambda rows: kernels.call[(1,)](rows))


def test_monitor_of_another_job_or_freed_is_refused():
    words = []
    _run(lambda rows: words.append(tdcoll.WaitMonitor().words))
    with pytest.raises(ValueError, match=r"monitor must be the words of an open tdcoll\.WaitMonitor of this job"):
        _run(lambda rows: kernels.wait_once[(1,)](rows, 0, words[0], words[0]))
