# SPDX-License-Identifier: Apache-2.0
"""The device language under Triton's interpreter: each function works on the simulated machine.

Arguments are what the interpreter hands over: tensors of one element, constexprs, ints. Every function takes
the ``_semantic`` that Triton passes to its own, and has no use for it. Meanings are in
:data:`tdcoll.spec.functions.FUNCTIONS`.

Functions that every *thread* calls for itself act once per thread on a GPU. Here a program is one thread of
control, so outside of ``if tid(0) == ...`` a put acts once; only ``SIGNAL_ADD``, where the difference shows,
adds once for each thread (or warp) that would have called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from tdcoll.runtime.simulator.current import machine
from tdcoll.runtime.simulator.extents import Address
from tdcoll.runtime.simulator.lanes import thread_index
from tdcoll.runtime.simulator.machine import Machine
from tdcoll.runtime.simulator.monitor import Monitor
from tdcoll.spec import constants as c
from tdcoll.spec.functions import FUNCTIONS, not_64_bits, not_linked

_THREADS_PER_WARP = 32
_MASK64 = 0xFFFF_FFFF_FFFF_FFFF


# ---------------------------------------------------------------------- arguments and results


def _number(function: str, parameter: str, value: Any) -> int:
    """A scalar argument as a Python int."""
    if isinstance(value, tl.constexpr):
        value = value.value
    if isinstance(value, tl.tensor):
        data = value.handle.data
        if data.size != 1 or value.type.is_block():
            raise ValueError(f"{function}: {parameter} must be a scalar, got a block of shape {list(data.shape)}")
        value = data.reshape(-1)[0].item()
    if not isinstance(value, int):
        hint = "; pass its words" if hasattr(value, "words") else ""  # of a WaitMonitor
        raise TypeError(f"{function}: {parameter} must be an integer or a pointer, got {value!r}{hint}")
    return int(value)


def _address64(function: str, parameter: str, value: Any) -> int:
    """An address, or a pointer to 64-bit integers, as a Python int."""
    if isinstance(value, tl.tensor) and value.dtype.is_ptr():
        pointee = value.dtype.element_ty
        if not pointee.is_int() or pointee.primitive_bitwidth != 64:
            raise ValueError(not_64_bits(function, parameter, pointee))
    return _number(function, parameter, value)


def _require_nvshmem(running: Machine, function: str) -> None:
    """Refuse what would not be linked on a GPU."""
    if not running.program.linked:
        raise ValueError(not_linked(function))


def _scalar(value: int, numpy_type: Any, triton_type: Any) -> Any:
    return tl.tensor(triton_interpreter.TensorHandle(np.array([value], numpy_type), triton_type), triton_type)


def _int32(value: int) -> Any:
    return _scalar(value, np.int32, tl.int32)


def _device(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of the language of ``implementation(machine, *numbers)``."""
    return _named(implementation.__name__, implementation)


def _named(name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    spec = FUNCTIONS[name]
    names = [parameter for parameter, _ in spec.parameters]
    kinds = [kind for _, kind in spec.parameters]
    signature = inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names])

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        running = machine()
        if spec.symbol is not None:
            _require_nvshmem(running, name)
        if kwargs or len(args) != len(names):
            args = signature.bind(*args, **kwargs).args
        numbers = []
        for parameter, kind, value in zip(names, kinds, args, strict=True):
            number = (_address64 if kind == "ptr64" else _number)(name, parameter, value)
            if kind == "u64":
                number &= _MASK64
            elif kind in ("ptr", "ptr64") and isinstance(value, tl.tensor):
                number = Address(number)
                number.origin = value.handle.origin
            numbers.append(running.check_pe(number) if kind == "pe" else number)
        return implementation(running, *numbers)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = spec.doc
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _multiplicity(running: Machine, scope: str) -> int:
    """How many times a GPU makes a call that the program makes once: per thread, per warp or per block."""
    program = running.program
    if program.lane is not None or scope == "_block":
        return 1
    return program.threads if scope == "" else program.threads // _THREADS_PER_WARP


def _checked_operation(operation: int) -> int:
    if operation not in (c.SIGNAL_SET.value, c.SIGNAL_ADD.value):
        raise ValueError(f"sig_op must be SIGNAL_SET or SIGNAL_ADD, got {operation}")
    return operation


def _checked_compare(parameter: str, compare: int) -> int:
    if compare not in range(6):
        raise ValueError(f"{parameter} must be a CMP_* constant, got {compare}")
    return compare


# ---------------------------------------------------------------------- PEs and addresses


@_device
def my_pe(running):
    return _int32(running.program.pe)


@_device
def n_pes(running):
    return _int32(running.n_pes)


def remote_ptr(local_ptr: Any, pe: Any, _semantic: Any = None) -> Any:
    running = machine()
    _require_nvshmem(running, "remote_ptr")
    target = running.check_pe(_number("remote_ptr", "pe", pe))
    address = _number("remote_ptr", "local_ptr", local_ptr)
    running.check_symmetric(address, 0, "local_ptr")
    remote = running.on(target, address) if running.reachable(target) else 0
    handle = triton_interpreter.TensorHandle(np.array([remote], np.uint64), local_ptr.handle.dtype)
    handle.origin = local_ptr.handle.origin
    return tl.tensor(handle, local_ptr.type)


remote_ptr.__doc__ = FUNCTIONS["remote_ptr"].doc


# ---------------------------------------------------------------------- puts, gets, signals


@_device
def int_p(running, dest, value, pe):
    running.put_word32(running.check_symmetric(dest, 4, "dest", pe), value, pe)


def _put(nbi: bool) -> Callable[..., None]:
    def put(running: Machine, dest: int, source: int, nbytes: int, pe: int) -> None:
        running.check_symmetric(dest, nbytes, "dest", pe)
        if nbytes:
            running.check_local(source, nbytes, "source", pe)
        running.put(dest, source, nbytes, pe, nbi=nbi)

    return put


def _put_signal(nbi: bool, scope: str) -> Callable[..., None]:
    def put_signal(
        running: Machine,
        dest: int,
        source: int,
        nbytes: int,
        sig_addr: int,
        signal: int,
        sig_op: int,
        pe: int,
    ) -> None:
        running.check_symmetric(dest, nbytes, "dest", pe)
        if nbytes:
            running.check_local(source, nbytes, "source", pe)
        running.check_signal(sig_addr, "sig_addr", pe)
        if _checked_operation(sig_op) == c.SIGNAL_ADD.value:
            signal *= _multiplicity(running, scope)
        running.put(dest, source, nbytes, pe, nbi=nbi, signal=(sig_addr, signal, sig_op))

    return put_signal


def _get(nbi: bool) -> Callable[..., None]:
    def get(running: Machine, dest: int, source: int, nbytes: int, pe: int) -> None:
        running.check_symmetric(source, nbytes, "source", pe)
        if nbytes:
            running.check_local(dest, nbytes, "dest", pe)
        running.get(dest, source, nbytes, pe, nbi=nbi)

    return get


putmem = _named("putmem", _put(nbi=False))
putmem_warp = _named("putmem_warp", _put(nbi=False))
putmem_block = _named("putmem_block", _put(nbi=False))
putmem_nbi = _named("putmem_nbi", _put(nbi=True))
putmem_nbi_warp = _named("putmem_nbi_warp", _put(nbi=True))
putmem_nbi_block = _named("putmem_nbi_block", _put(nbi=True))
putmem_signal = _named("putmem_signal", _put_signal(False, ""))
putmem_signal_warp = _named("putmem_signal_warp", _put_signal(False, "_warp"))
putmem_signal_block = _named("putmem_signal_block", _put_signal(False, "_block"))
putmem_signal_nbi = _named("putmem_signal_nbi", _put_signal(True, ""))
putmem_signal_nbi_warp = _named("putmem_signal_nbi_warp", _put_signal(True, "_warp"))
putmem_signal_nbi_block = _named("putmem_signal_nbi_block", _put_signal(True, "_block"))
getmem = _named("getmem", _get(nbi=False))
getmem_warp = _named("getmem_warp", _get(nbi=False))
getmem_block = _named("getmem_block", _get(nbi=False))
getmem_nbi = _named("getmem_nbi", _get(nbi=True))
getmem_nbi_warp = _named("getmem_nbi_warp", _get(nbi=True))
getmem_nbi_block = _named("getmem_nbi_block", _get(nbi=True))


@_device
def signal_op(running, sig_addr, signal, sig_op, pe):
    running.check_signal(sig_addr, "sig_addr", pe)
    if _checked_operation(sig_op) == c.SIGNAL_ADD.value:
        signal *= _multiplicity(running, "")
    running.signal(sig_addr, signal, sig_op, pe)


@_device
def signal_block(running, sig_addr, signal, sig_op, pe):
    _require_nvshmem(running, "signal_block")
    running.check_signal(sig_addr, "sig_addr", pe)
    operation = _checked_operation(sig_op)
    syncthreads()
    running.release()  # the one thread's fence, which also waits for the block's stores
    running.fence()
    running.signal(sig_addr, signal, operation, pe)


@_device
def signal_wait_until(running, sig_addr, cmp_, cmp_val):
    running.check_signal(sig_addr, "sig_addr")
    seen = running.waits.until(sig_addr, _checked_compare("cmp_", cmp_), cmp_val)
    return _scalar(seen, np.uint64, tl.uint64)


# ---------------------------------------------------------------------- order


@_device
def fence(running):
    running.fence()


@_device
def quiet(running):
    running.quiet()


def _barrier(name: str) -> Callable[[Machine], None]:
    return lambda running: running.barrier(name)


barrier_all = _named("barrier_all", _barrier("barrier_all"))
barrier_all_warp = _named("barrier_all_warp", _barrier("barrier_all"))
barrier_all_block = _named("barrier_all_block", _barrier("barrier_all"))
sync_all = _named("sync_all", _barrier("sync_all"))
sync_all_warp = _named("sync_all_warp", _barrier("sync_all"))
sync_all_block = _named("sync_all_block", _barrier("sync_all"))


# ---------------------------------------------------------------------- threads


def _checked_axis(axis: int) -> int:
    if axis not in (0, 1, 2):
        raise ValueError(f"axis must be 0, 1 or 2, got {axis!r}")
    return axis


@_device
def tid(running, axis):
    return thread_index(running.program, _checked_axis(axis))


@_device
def ntid(running, axis):
    return _int32(running.program.threads if _checked_axis(axis) == 0 else 1)


@_device
def syncthreads(running):
    if running.program.lane is not None:
        raise ValueError("syncthreads() inside a branch on tid(): threads that do not take it would wait for ever")


# ---------------------------------------------------------------------- loads and stores with an order


def _choice(parameter: str, value: Any, allowed: tuple[str, ...]) -> str:
    chosen = value.value if isinstance(value, tl.constexpr) else value
    if chosen not in allowed:
        raise ValueError(f"{parameter} must be one of {', '.join(allowed)}; got {chosen!r}")
    return chosen


def _integer_pointee(function: str, ptr: Any) -> Any:
    scalar = ptr.dtype if isinstance(ptr, tl.tensor) else None
    pointee = scalar.element_ty if scalar is not None and scalar.is_ptr() else None
    if pointee is None or not pointee.is_int() or pointee.primitive_bitwidth not in (32, 64):
        raise ValueError(f"{function}: ptr must point to 32- or 64-bit integers, got {scalar or ptr!r}")
    return pointee


def ld(ptr: Any, scope: Any = "gpu", semantic: Any = "relaxed", _semantic: Any = None) -> Any:
    machine()
    _choice("scope", scope, ("gpu", "sys"))
    _choice("semantic", semantic, ("relaxed", "acquire"))
    _integer_pointee("ld", ptr)
    return tl.load(ptr, volatile=True, _semantic=triton_interpreter.interpreter_semantic)


def ld_acquire(ptr: Any, scope: Any = "gpu", _semantic: Any = None) -> Any:
    return ld(ptr, scope, "acquire")


def st(ptr: Any, val: Any, scope: Any = "gpu", semantic: Any = "relaxed", _semantic: Any = None) -> None:
    running = machine()
    system = _choice("scope", scope, ("gpu", "sys")) == "sys"
    release = _choice("semantic", semantic, ("relaxed", "release")) == "release"
    _integer_pointee("st", ptr)
    if release:
        running.release(system=system)
    tl.store(ptr, val, _semantic=triton_interpreter.interpreter_semantic)


def st_release(ptr: Any, val: Any, scope: Any = "gpu", _semantic: Any = None) -> None:
    st(ptr, val, scope, "release")


for _function in (ld, ld_acquire, st, st_release):
    _function.__doc__ = FUNCTIONS[_function.__name__].doc


# ---------------------------------------------------------------------- bounded waits and copies


@_device
def wait_signal(running, signal, compare, value, monitor, peer, index):
    running.check_signal(signal, "signal")
    _checked_compare("compare", compare)
    return _int32(running.waits.all([(signal, peer, index)], compare, value, Monitor(monitor)))


@_device
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


consume_token.__doc__ = FUNCTIONS["consume_token"].doc


@_device
def wait_signals(running, signals, count, skip, compare, value, monitor, BLOCK):
    if count > BLOCK or BLOCK & (BLOCK - 1) or BLOCK < 1:
        raise ValueError(f"wait_signals: BLOCK must be a power of two of at least count={count}, got {BLOCK}")
    running.check_signal(signals, "signals")
    running.check_symmetric(signals, 8 * max(count, 0), "signals")
    _checked_compare("compare", compare)
    wanted = [(signals + 8 * index, index, index) for index in range(count) if index != skip]
    return _int32(running.waits.all(wanted, compare, value, Monitor(monitor)))


def _words(words: Any, mask: Any, what: str | None = None) -> tuple[Any, Any]:
    """Addresses of 128-bit words, uint64 and flat, and which of them count; checked if ``what`` says what for."""
    addresses = words.handle.data.reshape(-1).astype(np.uint64)
    active = np.broadcast_to(mask.handle.data, words.handle.data.shape).reshape(-1).astype(bool)
    if what is not None:
        machine().pointers.check(addresses, active, 16, words.handle.origin, what)
    return addresses, active


def _wait_for_words(
    function: str, words: Any, mask: Any, monitor: Any, senders: Sequence[tuple[int, int]], n_parts: int,
    wait: Callable[..., Any], *given: int,
) -> Any:  # fmt: skip
    """For each of ``senders``, a rank and how many bytes after ``words`` its words lie, the first ``n_parts`` of the
    four parts of each word; then 1 where they came in time. ``wait`` takes addresses, threads, ``given``, a monitor."""
    addresses, active = _words(words, mask)
    places, pending, running = np.flatnonzero(active), [], machine()
    for _, offset in senders:
        theirs = addresses + np.uint64(offset)
        running.pointers.check(theirs, active, 16, words.handle.origin, "load from")
        pending.append(theirs[places])
        for address in pending[-1][[0, -1]].tolist() if places.size else ():
            running.check_flagged(address)
    held = Monitor(_address64(function, "monitor", monitor))
    threads = [(rank, place) for rank, _ in senders for place in places.tolist()]
    seen, arrived = wait(np.concatenate(pending), threads, *given, held)
    blocks = np.zeros((len(senders) * n_parts + 1, addresses.size), np.uint32)
    seen = seen.view(np.uint32).reshape(len(senders), places.size, 4)[:, :, :n_parts]
    blocks[:-1, places] = seen.transpose(0, 2, 1).reshape(len(senders) * n_parts, places.size)
    blocks[-1] = 1
    blocks[-1, places] = arrived.reshape(len(senders), places.size).all(axis=0)
    shaped = blocks.view(np.int32).reshape(len(blocks), *words.handle.data.shape)
    kind = tl.block_type(tl.int32, words.shape)
    return tuple(tl.tensor(triton_interpreter.TensorHandle(block, tl.int32), kind) for block in shaped)


def _parts(words: Any, parts: Sequence[Any]) -> Any:
    """``[n, len(parts)]`` uint32: parts of 128-bit words."""
    shape = words.handle.data.shape
    columns = [np.broadcast_to(part.handle.data, shape).reshape(-1) for part in parts]
    return np.ascontiguousarray(np.stack(columns, axis=1)).astype(np.int32).view(np.uint32)


def wait_flagged(words: Any, flag: Any, mask: Any, monitor: Any, peer: Any, _semantic: Any = None) -> Any:
    wanted, senders = _number("wait_flagged", "flag", flag), [(_number("wait_flagged", "peer", peer), 0)]
    wait = machine().waits.flagged
    return _wait_for_words("wait_flagged", words, mask, monitor, senders, 3, wait, wanted & 0xFFFF_FFFF)


def store_flagged(words: Any, first: Any, second: Any, third: Any, flag: Any, mask: Any, _semantic: Any = None) -> None:
    addresses, active = _words(words, mask, "store to")
    last = np.full(addresses.size, _number("store_flagged", "flag", flag) & 0xFFFF_FFFF, np.uint32)
    parts = np.column_stack([_parts(words, (first, second, third)), last])
    machine().pointers.store_flagged(addresses, parts, active)


def _wait_for_data(
    function: str, words: Any, senders: Sequence[tuple[int, int]], absent: Any, mask: Any, monitor: Any, call: Any
) -> Any:
    missing, number = _number(function, "absent", absent) & 0xFFFF_FFFF, _number(function, "call", call) & _MASK64
    return _wait_for_words(function, words, mask, monitor, senders, 4, machine().waits.words, missing, number)


def wait_words(words: Any, absent: Any, mask: Any, monitor: Any, peer: Any, call: Any, _semantic: Any = None) -> Any:
    senders = [(_number("wait_words", "peer", peer), 0)]
    return _wait_for_data("wait_words", words, senders, absent, mask, monitor, call)


def wait_words_of_all(
    words: Any, stride: Any, count: Any, skip: Any, absent: Any, mask: Any, monitor: Any, call: Any,
    _semantic: Any = None,
) -> Any:  # fmt: skip
    name = "wait_words_of_all"
    step, own, ranks = _number(name, "stride", stride), _number(name, "skip", skip), _number(name, "count", count)
    if ranks < 2:
        raise ValueError(f"{name}: count must be a constant of at least 2, got {ranks}")
    polled = [rank if rank != own else (rank + 1) % ranks for rank in range(ranks)]
    return _wait_for_data(name, words, [(rank, rank * step) for rank in polled], absent, mask, monitor, call)


def load_words(words: Any, mask: Any, _semantic: Any = None) -> Any:
    parts = words.to(tl.pointer_type(tl.int32))
    return tuple(tl.load(parts + part, mask=mask, other=0) for part in range(4))


def store_words(words: Any, first: Any, second: Any, third: Any, fourth: Any, mask: Any, _semantic: Any = None) -> None:
    addresses, active = _words(words, mask, "store to")
    machine().pointers.store_words(addresses, _parts(words, (first, second, third, fourth)), active)


for _name in ("wait_flagged", "store_flagged", "wait_words", "wait_words_of_all", "load_words", "store_words"):
    globals()[_name].__doc__ = FUNCTIONS[_name].doc


@_device
def block_and(running, flag):
    syncthreads()
    return _int32(flag != 0)


@_device
def copy_block(running, dst, src, nbytes):
    running.pointers.copy(dst, src, nbytes)
