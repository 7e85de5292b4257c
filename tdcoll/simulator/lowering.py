# SPDX-License-Identifier: Apache-2.0
"""The device language under Triton's interpreter: each function works on the simulated machine.

Arguments are as the interpreter passes them: tensors of one element, constexprs, ints. Every
function takes the ``_semantic`` that Triton passes to its own, and has no use for it. Meanings are
in :data:`tdcoll.spec.functions.FUNCTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from tdcoll.simulator import transfers, waits
from tdcoll.simulator.bounds import Address
from tdcoll.simulator.branches import thread_index
from tdcoll.simulator.builder import numpy_dtype
from tdcoll.simulator.lowering_arguments import (
    blocks,
    checked_operation,
    device,
    int32,
    multiplicity,
    number_of,
    require_nvshmem,
    scalar,
)
from tdcoll.simulator.lowering_waits import *  # noqa: F403
from tdcoll.simulator.machine import BARRIERS, Machine
from tdcoll.simulator.pointers import pointers
from tdcoll.spec import constants as c
from tdcoll.spec.checks import (
    axis_letter,
    choice,
    comparison,
    integer_pointee,
    require_scalar,
    word_type,
)
from tdcoll.spec.functions import FUNCTIONS

# ---------------------------------------------------------------------- PEs and addresses


@device
def my_pe(running):
    return int32(running.program.pe)


@device
def n_pes(running):
    return int32(running.memory.n_pes)


@blocks
def remote_ptr(running, local_ptr, pe):
    address = number_of("remote_ptr", "local_ptr", local_ptr)
    running.check_symmetric(address, 0, "local_ptr")
    remote = running.on(pe, address) if running.accessible(pe) else 0
    handle = triton_interpreter.TensorHandle(np.array([remote], np.uint64), local_ptr.handle.dtype)
    handle.origin = local_ptr.handle.origin
    return tl.tensor(handle, local_ptr.type)


# ---------------------------------------------------------------------- puts, gets, signals


@device
def int_p(running, dest, value, pe):
    running.check_symmetric(dest, 4, "dest", pe)
    transfers.put(running, dest, (value & 0xFFFF_FFFF).to_bytes(4, "little"), 4, pe, nbi=True)


def _put(
    running: Machine, dest: int, source: int, nbytes: int, pe: int, *, nbi: bool, scope: str
) -> None:
    running.check_symmetric(dest, nbytes, "dest", pe)
    running.check_local(source, nbytes, "source", pe)
    transfers.put(running, dest, source, nbytes, pe, nbi=nbi)


def _put_signal(
    running: Machine, dest: int, source: int, nbytes: int, sig_addr: int, signal: int, sig_op: int, pe: int,
    *, nbi: bool, scope: str,
) -> None:  # fmt: skip
    running.check_symmetric(dest, nbytes, "dest", pe)
    running.check_local(source, nbytes, "source", pe)
    running.check_signal(sig_addr, "sig_addr", pe)
    if checked_operation(sig_op) == c.SIGNAL_ADD.value:
        signal *= multiplicity(running, scope)
    transfers.put(running, dest, source, nbytes, pe, nbi=nbi, signal=(sig_addr, signal, sig_op))


def _get(
    running: Machine, dest: int, source: int, nbytes: int, pe: int, *, nbi: bool, scope: str
) -> None:
    running.check_symmetric(source, nbytes, "source", pe)
    running.check_local(dest, nbytes, "dest", pe)
    transfers.get(running, dest, source, nbytes, pe, nbi=nbi)


for _base, _transfer in (("putmem", _put), ("putmem_signal", _put_signal), ("getmem", _get)):
    for _mode in ("", "_nbi"):
        for _scope in ("", "_warp", "_block"):
            _name = f"{_base}{_mode}{_scope}"
            globals()[_name] = device(partial(_transfer, nbi=bool(_mode), scope=_scope), _name)


@device
def signal_op(running, sig_addr, signal, sig_op, pe):
    running.check_signal(sig_addr, "sig_addr", pe)
    if checked_operation(sig_op) == c.SIGNAL_ADD.value:
        signal *= multiplicity(running, "")
    transfers.signal(running, sig_addr, signal, sig_op, pe)


@device
def signal_block(running, sig_addr, signal, sig_op, pe):
    require_nvshmem(running, "signal_block")
    running.check_signal(sig_addr, "sig_addr", pe)
    operation = checked_operation(sig_op)
    syncthreads()
    transfers.release(running)  # the one thread's fence, which also waits for the block's stores
    transfers.fence(running)
    transfers.signal(running, sig_addr, signal, operation, pe)


@device
def signal_wait_until(running, sig_addr, cmp_, cmp_val):
    running.check_signal(sig_addr, "sig_addr")
    comparison(cmp_, "cmp_")
    seen, _ = waits.signals(running, [sig_addr], cmp_, cmp_val)
    return scalar(seen[0], np.uint64, tl.uint64)


# ---------------------------------------------------------------------- words of other PEs


def _typed(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function ``name`` of words, whose type is that of the first argument's pointee.
    ``operation`` is given the machine, the address, the type, the PE and the values."""
    spec = FUNCTIONS[name]
    first = spec.parameters[0][0]

    def call(running: Machine, pointer: Any, *rest: Any) -> Any:
        *given, pe = rest
        pointee = word_type(spec, pointer)
        of = numpy_dtype(pointee)
        values = [_as(of, name, spec.parameters[1 + i][0], value) for i, value in enumerate(given)]
        address = Address(number_of(name, first, pointer))
        address.origin = pointer.handle.origin
        if address % of.itemsize:
            raise ValueError(
                f"{name}: {first} must be a multiple of {of.itemsize}, got {address:#x}"
            )
        running.check_symmetric(address, of.itemsize, first, pe)
        found = operation(running, address, of, pe, *values)
        return scalar(found, of, pointee) if spec.returns else None

    return blocks(call, name)


def _as(kind: Any, function: str, parameter: str, value: Any) -> Any:
    """Return a scalar argument as a number of the type ``kind``."""
    if isinstance(value, tl.tensor):
        require_scalar(function, parameter, value)
        value = value.handle.data.reshape(-1)[0]
    return np.array(getattr(value, "value", value)).astype(kind)[()]


def _p(running: Machine, address: int, kind: Any, pe: int, value: Any) -> None:
    transfers.put(running, address, value.tobytes(), value.nbytes, pe, nbi=True)


def _g(running: Machine, address: int, kind: Any, pe: int) -> Any:
    word = np.zeros(1, kind)
    transfers.get(running, word.ctypes.data, address, kind.itemsize, pe, nbi=False)
    return word[0]


def _atomic(change: Callable[..., Any], fetches: bool = True) -> Callable[..., Any]:
    """Return an operation that makes ``change(old, *values)`` of a word and returns ``old``."""

    def operation(running: Machine, address: int, kind: Any, pe: int, *values: Any) -> Any:
        return transfers.atomic(
            running, address, kind, pe, lambda old: change(old, *values), fetches=fetches
        )

    return operation


def _sum(old: Any, value: Any) -> Any:
    return (old.reshape(1) + value)[0]  # of arrays: they wrap as a GPU does, without a warning


p = _typed("p", _p)
g = _typed("g", _g)
atomic_fetch = _typed("atomic_fetch", _atomic(lambda old: old))
atomic_set = _typed("atomic_set", _atomic(lambda old, value: value, fetches=False))
atomic_fetch_add = _typed("atomic_fetch_add", _atomic(_sum))
atomic_swap = _typed("atomic_swap", _atomic(lambda old, value: value))
atomic_compare_swap = _typed(
    "atomic_compare_swap", _atomic(lambda old, cond, value: value if old == cond else old)
)


def _add(running: Machine, address: int, kind: Any, pe: int, value: Any) -> None:
    total = np.array([value]) * kind.type(multiplicity(running, ""))
    transfers.atomic(running, address, kind, pe, lambda old: _sum(old, total[0]), fetches=False)


atomic_add = _typed("atomic_add", _add)


# ---------------------------------------------------------------------- order


@device
def fence(running):
    transfers.fence(running)


@device
def quiet(running):
    transfers.quiet(running)


for _base in BARRIERS:
    for _scope in ("", "_warp", "_block"):
        globals()[_base + _scope] = device(partial(transfers.barrier, name=_base), _base + _scope)


# ---------------------------------------------------------------------- threads


@device
def tid(running, axis):
    axis_letter(axis)
    return thread_index(running.program, axis)


@device
def ntid(running, axis):
    return int32(running.program.threads if axis_letter(axis) == "x" else 1)


@device
def syncthreads(running):
    if running.program.lane is not None:
        raise ValueError(
            "syncthreads() inside a branch on tid(): threads that do not take it would wait for ever"
        )
    if running.races is not None:
        running.races.barrier()


# ---------------------------------------------------------------------- loads and stores with an order


@blocks
def ld(running, ptr, scope, semantic):
    choice("scope", scope, ("gpu", "sys"))
    choice("semantic", semantic, ("relaxed", "acquire"))
    integer_pointee("ld", ptr)
    value = tl.load(ptr, volatile=True, _semantic=triton_interpreter.interpreter_semantic)
    if running.races is not None and getattr(semantic, "value", semantic) == "acquire":
        addresses = ptr.handle.data.reshape(-1)
        system = getattr(scope, "value", scope) == "sys"
        running.races.acquire(addresses, value.dtype.primitive_bitwidth // 8, system=system)
    return value


@blocks
def ld_acquire(running, ptr, scope):
    return ld(ptr, scope, "acquire")


@blocks
def st(running, ptr, val, scope, semantic):
    system = choice("scope", scope, ("gpu", "sys")) == "sys"
    release = choice("semantic", semantic, ("relaxed", "release")) == "release"
    integer_pointee("st", ptr)
    if release:
        transfers.release(running, system=system)
    with pointers().in_order("release" if release else "relaxed", system=system):
        tl.store(ptr, val, _semantic=triton_interpreter.interpreter_semantic)


@blocks
def st_release(running, ptr, val, scope):
    st(ptr, val, scope, "release")


@device
def wait_descriptor_stores(running):
    transfers.complete_descriptor_stores(running)


def _atom(running: Machine, name: str, ptr: Any, scope: Any, semantic: Any, *values: Any) -> Any:
    """Make Triton's own atomic, which acts once for the block, for one thread."""
    order = choice("semantic", semantic, ("relaxed", "acquire", "release", "acq_rel"))
    kind = integer_pointee(name, ptr)
    require_scalar(name, "ptr", ptr)
    if running.program.lane is None:
        raise ValueError(
            f"{name}: every thread of the block would do it; call it in a branch on tid(), or tl.atomic_*, which "
            "acts once for the block"
        )
    interpreter = triton_interpreter.interpreter_semantic
    given = [tl.cast(value, kind, _semantic=interpreter) for value in values]
    atomic = getattr(tl, name.replace("atom", "atomic"))
    return atomic(
        ptr, *given, sem=order, scope=choice("scope", scope, ("gpu", "sys")), _semantic=interpreter
    )


@blocks
def atom_add(running, ptr, val, scope, semantic):
    return _atom(running, "atom_add", ptr, scope, semantic, val)


@blocks
def atom_cas(running, ptr, cmp, val, scope, semantic):
    return _atom(running, "atom_cas", ptr, scope, semantic, cmp, val)


# ---------------------------------------------------------------------- by the block


@device
def block_and(running, flag):
    syncthreads()
    return int32(flag != 0)


@device
def copy_block(running, dst, src, nbytes):
    pointers().copy(dst, src, nbytes)
