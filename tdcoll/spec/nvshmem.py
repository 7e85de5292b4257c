# SPDX-License-Identifier: Apache-2.0
"""NVSHMEM's functions in the device language: transfers, signals, atomics, order, barriers.

Source: the NVSHMEM API documentation.
"""

from __future__ import annotations

import re

from tdcoll.spec.entry import DeviceFunction, declared

_SCOPES = {
    "": (
        "nvshmem_",
        "",
        "Each thread that calls makes a transfer of its own: call it from one thread.",
    ),
    "_warp": (
        "nvshmemx_",
        "_warp",
        "All threads of a warp call it together, with the same arguments.",
    ),
    "_block": (
        "nvshmemx_",
        "_block",
        "All threads of the block call it together, with the same arguments.",
    ),
}

_PUT = (
    "Copies `bytes` bytes from `source` to the symmetric address `dest` on PE `pe`. `source` may be any memory of "
    "this GPU when the PE is reachable over NVLink or PCIe, and must be symmetric otherwise. "
)
_PUT_SIGNAL = _PUT.replace("PE `pe`. ", "PE `pe`, then updates a signal there. ")
_GET = "Copies `bytes` bytes from the symmetric address `source` on PE `pe` to `dest`. "
_BLOCKING_PUT = (
    "Returns when `source` may be written again; delivery is not ordered with anything later without `fence`, "
    "`quiet` or a signal of its own. "
)
_NBI_PUT = (
    "Returns at once: `source` must stay as it is until `quiet`, or until the receiver confirms. "
)
_BLOCKING_GET = "Returns when the bytes are in `dest`. "
_NBI_GET = "Returns at once: the bytes are in `dest` after `quiet`. "
_SIGNAL = (
    "The signal is the 64-bit word at the symmetric address `sig_addr` on that PE, which `sig_op` (SIGNAL_SET or "
    "SIGNAL_ADD) updates with `signal`. A reader that sees the signal also sees these bytes, but not those of other "
    "puts. "
)


def _transfers() -> list[DeviceFunction]:
    made = []
    for base, what, blocking, nbi in (
        ("putmem", _PUT, _BLOCKING_PUT, _NBI_PUT),
        ("putmem_signal", _PUT_SIGNAL + _SIGNAL, _BLOCKING_PUT, _NBI_PUT),
        ("getmem", _GET, _BLOCKING_GET, _NBI_GET),
    ):
        signal = ""
        in_c = ""
        if base == "putmem_signal":
            signal = "sig_addr: ptr64, signal: u64, sig_op: int, "
            in_c = "uint64_t *sig_addr, uint64_t signal, int sig_op, "
        for mode, completion in (("", blocking), ("_nbi", nbi)):
            for scope, (prefix, suffix, who) in _SCOPES.items():
                symbol = f"{prefix}{base}{mode}{suffix}"
                made.append(
                    declared(
                        f"{base}{mode}{scope}(dest: ptr, source: ptr, bytes: size, {signal}pe: pe)",
                        f"void {symbol}(void *dest, const void *source, size_t bytes, {in_c}int pe)",
                        what + completion + who,
                        acquires=base == "getmem" and not mode,
                    )
                )
    return made


def _barriers() -> list[DeviceFunction]:
    made = []
    for base, what in (
        (
            "barrier_all",
            "Completes what this PE has issued (as `quiet`), then waits for every PE of the job. ",
        ),
        (
            "sync_all",
            "Waits for every PE of the job; does not complete puts (use `barrier_all` for that). ",
        ),
    ):
        for scope, (prefix, suffix, who) in _SCOPES.items():
            who = who.replace("makes a transfer of its own: call it", "takes part: call it")
            rule = "One program per PE may be in it at a time. Unbounded: prefer signals with bounded waits."
            doc = f"{what}{who} {rule}"
            made.append(
                declared(f"{base}{scope}()", f"void {prefix}{base}{suffix}()", doc, acquires=True)
            )
    return made


_VALUES = {
    "p(dest: ptr, value: value, pe: pe)": (
        "Puts `value`, of the pointee's type, to the symmetric address `dest` on PE `pe`. Ordered as any put. "
    ),
    "g(source: ptr, pe: pe) -> value": "Returns the value at the symmetric address `source` on PE `pe`. ",
    "atomic_fetch(source: ptr, pe: pe) -> value": (
        "Returns the integer at the symmetric address `source` on PE `pe`, read atomically. "
    ),
    "atomic_set(dest: ptr, value: value, pe: pe)": (
        "Sets the integer at the symmetric address `dest` on PE `pe` atomically. "
    ),
    "atomic_add(dest: ptr, value: value, pe: pe)": (
        "Adds `value` to the integer at the symmetric address `dest` on PE `pe`. "
    ),
    "atomic_fetch_add(dest: ptr, value: value, pe: pe) -> value": (
        "Adds `value` to the integer at the symmetric address `dest` on PE `pe`; returns what was there before. "
    ),
    "atomic_swap(dest: ptr, value: value, pe: pe) -> value": (
        "Writes `value` to the integer at the symmetric address `dest` on PE `pe`; returns what was there before. "
    ),
    "atomic_compare_swap(dest: ptr, cond: value, value: value, pe: pe) -> value": (
        "Writes `value` to the symmetric address `dest` on PE `pe` if `cond` is there; returns what was there before. "
    ),
}

_IN_C = {"ptr": "TYPE *", "value": "TYPE ", "pe": "int "}


def _values() -> list[DeviceFunction]:
    made = []
    for declaration, what in _VALUES.items():
        name, given = re.split(r"[()]", declaration)[:2]
        in_c = ", ".join(
            _IN_C[kind] + one
            for one, kind in (argument.split(": ") for argument in given.split(", "))
        )
        returned = "TYPE" if "->" in declaration else "void"
        atomic = name.startswith("atomic")
        order = (
            "It isn't ordered after earlier puts and stores: call `fence` first. " if atomic else ""
        )
        once = "Each thread that calls does it once: call it from one thread. "
        pointees = "integers" if atomic else "integers or floats"
        made.append(
            declared(
                declaration,
                f"{returned} nvshmem_TYPE_{name}({in_c.replace('TYPE *source', 'const TYPE *source')})",
                f"{what}{order}{once}Pointers are to {pointees} of 32 or 64 bits.",
                acquires=returned == "TYPE",
                types=("int", "uint", "long", "ulong", *(() if atomic else ("float", "double"))),
            )
        )
    return made


NVSHMEM_FUNCTIONS = [
    declared("my_pe() -> int32", "int nvshmem_my_pe()", "This PE: the global rank."),
    declared("n_pes() -> int32", "int nvshmem_n_pes()", "Number of PEs of the job."),
    declared(
        "remote_ptr(local_ptr: ptr, pe: pe) -> pointer",
        "void *nvshmem_ptr(const void *local_ptr, int pe)",
        "Pointer of the same type to PE `pe`'s copy of a symmetric address, for direct loads and stores; a null "
        "pointer when that PE is not reachable by them. Order such stores with a release at system scope.",
    ),
    declared(
        "int_p(dest: ptr, value: int, pe: pe)",
        "void nvshmem_int_p(int *dest, int value, int pe)",
        "Puts one 32-bit integer to the symmetric address `dest` on PE `pe`. Each thread that calls puts once.",
    ),
    *_values(),
    *_transfers(),
    declared(
        "signal_op(sig_addr: ptr64, signal: u64, sig_op: int, pe: pe)",
        "void nvshmemx_signal_op(uint64_t *sig_addr, uint64_t signal, int sig_op, int pe)",
        "Updates the 64-bit signal at the symmetric address `sig_addr` on PE `pe` (SIGNAL_SET or SIGNAL_ADD). Not "
        "ordered after earlier puts and stores: `fence` first, or use `signal_block`. Every thread that calls updates "
        "once, so SIGNAL_ADD wants one thread.",
    ),
    declared(
        "signal_wait_until(sig_addr: ptr64, cmp_: int, cmp_val: u64) -> uint64",
        "uint64_t nvshmem_signal_wait_until(uint64_t *sig_addr, int cmp, uint64_t cmp_val)",
        "Waits until this PE's signal compares true (CMP_*), and returns its value. The caller "
        "then sees the bytes that were put before the signal. Has no deadline: a peer that dies leaves the GPU "
        "hanging. `wait_signal` is the bounded form.",
        acquires=True,
    ),
    declared(
        "fence()",
        "void nvshmem_fence()",
        "Puts and signals that this PE has issued before arrive, at each PE, before those that it issues afterwards. "
        "This includes other threads' if they are synchronised with the calling one (`syncthreads`). Orders stores of "
        "the calling thread through `remote_ptr` alike. Says nothing about different PEs, and does not wait.",
    ),
    declared(
        "quiet()",
        "void nvshmem_quiet()",
        "Waits until all puts, signals and nbi transfers that this PE has issued are complete at their destination; "
        "those of other threads under the condition that `fence` has.",
        acquires=True,
    ),
    *_barriers(),
]
"""NVSHMEM's functions, in the order of the table."""
