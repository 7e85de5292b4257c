# SPDX-License-Identifier: Apache-2.0
"""The device language as data: one entry per function, from which lowerings, docs and tests are made.

Names and argument order of NVSHMEM's functions are those of Triton-distributed's ``libshmem_device``. The table in
``docs/language.md`` is generated from this one (``python -m tdcoll.language``); a test compares it with
Triton-distributed's sources, another with what each lowering implements.

Sources: the NVSHMEM API documentation (Remote Memory Access, Signaling Operations, Memory Ordering,
Point-To-Point Synchronization) and, for loads and stores, the PTX ISA's memory consistency model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FUNCTIONS", "LIBRARY", "LINKED", "DeviceFunction", "not_64_bits", "not_a_monitor", "not_linked", "table"]

LIBRARY = "libnvshmem_device"
"""NVSHMEM's bitcode library, as its file and Triton's ``extern_libs`` name it."""

LINKED = "linked_by_tdcoll_jit"
"""A launch option by which ``tdcoll.jit`` tells the simulator that a compiled kernel would have NVSHMEM linked in."""

Kind = Literal["ptr", "ptr64", "size", "pe", "int", "u64", "value", "constant"]


@dataclass(frozen=True)
class DeviceFunction:
    """One function of the device language.

    Attributes:
        name: as a kernel writes it.
        parameters: ``(name, kind)``: ``ptr`` an address or pointer, ``ptr64`` an address or a pointer to 64-bit
            integers, ``size`` bytes (int64), ``pe`` a PE (int32), ``int`` an int32, ``u64`` an unsigned 64-bit value,
            ``value`` of the pointee's type, ``constant`` a compile-time constant.
        defaults: default values of the last parameters.
        symbol: NVSHMEM's device function, or None where PTX or Triton itself does the work.
        returns: what it returns, or None.
        prototype: what it stands for: NVSHMEM's C prototype, or the PTX instruction.
        doc: meaning, units, who must call it, ordering.
        acquires: loads that follow it in the program see what others have written, so the compiler must not move
            them above it.
    """

    name: str
    parameters: tuple[tuple[str, Kind], ...]
    symbol: str | None
    returns: Literal["int32", "uint64", "pointer", "value"] | None
    prototype: str
    doc: str
    defaults: tuple[object, ...] = ()
    acquires: bool = False

    @property
    def signature(self) -> str:
        """``name(a, b=default)``."""
        names = [name for name, _ in self.parameters]
        first = len(names) - len(self.defaults)
        shown = names[:first] + [f"{n}={d!r}" for n, d in zip(names[first:], self.defaults, strict=True)]
        return f"{self.name}({', '.join(shown)})"


def not_64_bits(function: str, parameter: str, pointee: object) -> str:
    """The error for a pointer to ``pointee`` where ``parameter`` of ``function`` is of kind ``ptr64``."""
    return (
        f"{function}: {parameter} must point to 64-bit integers (int64 or uint64), got a pointer to {pointee}; 64 bits "
        "there take in the neighbour"
    )


def not_a_monitor(address: int) -> str:
    """The error for an ``address`` where a monitor's words are wanted."""
    return (
        "monitor must be the words of an open tdcoll.WaitMonitor of this job (monitor.words, ctx.monitor.words), got "
        f"other memory at {address:#x}"
    )


def not_linked(function: str) -> str:
    """The error for ``function``, which is NVSHMEM's, in a kernel that was launched without NVSHMEM."""
    return (
        f"{function} calls NVSHMEM: decorate the kernel that is launched with @tdcoll.jit instead of @triton.jit (its "
        "helpers may have either)"
    )


_SCOPES = {
    "": ("nvshmem_", "", "Each thread that calls makes a transfer of its own: call it from one thread."),
    "_warp": ("nvshmemx_", "_warp", "All threads of a warp call it together, with the same arguments."),
    "_block": ("nvshmemx_", "_block", "All threads of the block call it together, with the same arguments."),
}

_MEM: tuple[tuple[str, Kind], ...] = (("dest", "ptr"), ("source", "ptr"), ("bytes", "size"), ("pe", "pe"))
_MEM_SIGNAL: tuple[tuple[str, Kind], ...] = (
    *_MEM[:3],
    ("sig_addr", "ptr64"),
    ("signal", "u64"),
    ("sig_op", "int"),
    ("pe", "pe"),
)

_PUT = (
    "Copies `bytes` bytes from `source` to the symmetric address `dest` on PE `pe`. `source` may be any memory of "
    "this GPU when the PE is reachable over NVLink or PCIe, and must be symmetric otherwise. "
)
_GET = "Copies `bytes` bytes from the symmetric address `source` on PE `pe` to `dest`. "
_BLOCKING_PUT = (
    "Returns when `source` may be written again; delivery is not ordered with anything later without `fence`, "
    "`quiet` or a signal of its own. "
)
_NBI_PUT = "Returns at once: `source` must stay as it is until `quiet`, or until the receiver confirms. "
_BLOCKING_GET = "Returns when the bytes are in `dest`. "
_NBI_GET = "Returns at once: the bytes are in `dest` after `quiet`. "
_SIGNAL = (
    "Then updates the 64-bit signal at the symmetric address `sig_addr` on that PE by `sig_op` (SIGNAL_SET or "
    "SIGNAL_ADD) with `signal`: whoever sees the signal also sees these bytes, but not those of other puts. "
)


def _transfers() -> list[DeviceFunction]:
    made = []
    for base, parameters, what, blocking, nbi in (
        ("putmem", _MEM, _PUT, _BLOCKING_PUT, _NBI_PUT),
        ("putmem_signal", _MEM_SIGNAL, _PUT + _SIGNAL, _BLOCKING_PUT, _NBI_PUT),
        ("getmem", _MEM, _GET, _BLOCKING_GET, _NBI_GET),
    ):
        for mode, completion in (("", blocking), ("_nbi", nbi)):
            for scope, (prefix, suffix, who) in _SCOPES.items():
                symbol = f"{prefix}{base}{mode}{suffix}"
                extra = ", uint64_t *sig_addr, uint64_t signal, int sig_op" if "signal" in base else ""
                made.append(
                    DeviceFunction(
                        f"{base}{mode}{scope}",
                        parameters,
                        symbol,
                        None,
                        f"void {symbol}(void *dest, const void *source, size_t bytes{extra}, int pe)",
                        what + completion + who,
                        acquires=base == "getmem" and not mode,
                    )
                )
    return made


def _barriers() -> list[DeviceFunction]:
    made = []
    for base, what in (
        ("barrier_all", "Completes what this PE has issued (as `quiet`), then waits for every PE of the job. "),
        ("sync_all", "Waits for every PE of the job; does not complete puts (use `barrier_all` for that). "),
    ):
        for scope, (prefix, suffix, who) in _SCOPES.items():
            symbol = f"{prefix}{base}{suffix}"
            who = who.replace("makes a transfer of its own: call it", "takes part: call it")
            rule = "One program per PE may be in it at a time. Unbounded: prefer signals with bounded waits."
            doc = f"{what}{who} {rule}"
            made.append(DeviceFunction(f"{base}{scope}", (), symbol, None, f"void {symbol}()", doc, acquires=True))
    return made


_FUNCTIONS = [
    DeviceFunction("my_pe", (), "nvshmem_my_pe", "int32", "int nvshmem_my_pe()", "This PE: the global rank."),
    DeviceFunction("n_pes", (), "nvshmem_n_pes", "int32", "int nvshmem_n_pes()", "Number of PEs of the job."),
    DeviceFunction(
        "remote_ptr",
        (("local_ptr", "ptr"), ("pe", "pe")),
        "nvshmem_ptr",
        "pointer",
        "void *nvshmem_ptr(const void *local_ptr, int pe)",
        "Pointer of the same type to PE `pe`'s copy of a symmetric address, for direct loads and stores; a null "
        "pointer when that PE is not reachable by them. Order such stores with a release at system scope.",
    ),
    DeviceFunction(
        "int_p",
        (("dest", "ptr"), ("value", "int"), ("pe", "pe")),
        "nvshmem_int_p",
        None,
        "void nvshmem_int_p(int *dest, int value, int pe)",
        "Puts one 32-bit integer to the symmetric address `dest` on PE `pe`. Each thread that calls puts once.",
    ),
    *_transfers(),
    DeviceFunction(
        "signal_op",
        (("sig_addr", "ptr64"), ("signal", "u64"), ("sig_op", "int"), ("pe", "pe")),
        "nvshmemx_signal_op",
        None,
        "void nvshmemx_signal_op(uint64_t *sig_addr, uint64_t signal, int sig_op, int pe)",
        "Updates the 64-bit signal at the symmetric address `sig_addr` on PE `pe` (SIGNAL_SET or SIGNAL_ADD). Not "
        "ordered after earlier puts and stores: `fence` first, or use `signal_block`. Every thread that calls updates "
        "once, so SIGNAL_ADD wants one thread.",
    ),
    DeviceFunction(
        "signal_wait_until",
        (("sig_addr", "ptr64"), ("cmp_", "int"), ("cmp_val", "u64")),
        "nvshmem_signal_wait_until",
        "uint64",
        "uint64_t nvshmem_signal_wait_until(uint64_t *sig_addr, int cmp, uint64_t cmp_val)",
        "Waits until this PE's signal compares true (CMP_*), and returns its value. Whoever returns sees what was "
        "put before the signal. Has no deadline: a peer that dies leaves the GPU hanging. `wait_signal` is the "
        "bounded form.",
        acquires=True,
    ),
    DeviceFunction(
        "fence",
        (),
        "nvshmem_fence",
        None,
        "void nvshmem_fence()",
        "Puts and signals that this PE has issued before arrive, at each PE, before those that it issues afterwards. "
        "Those of other threads, too, if they are synchronised with the calling one (`syncthreads`). Orders stores of "
        "the calling thread through `remote_ptr` alike. Says nothing about different PEs, and does not wait.",
    ),
    DeviceFunction(
        "quiet",
        (),
        "nvshmem_quiet",
        None,
        "void nvshmem_quiet()",
        "Waits until all puts, signals and nbi transfers that this PE has issued are complete at their destination; "
        "those of other threads under the condition that `fence` has.",
        acquires=True,
    ),
    *_barriers(),
    DeviceFunction(
        "tid",
        (("axis", "constant"),),
        None,
        "int32",
        "threadIdx (PTX %tid)",
        "Index of the thread in its block along `axis` (0, 1, 2). For kernels written for threads; tdcoll's own "
        "speak in blocks. Triton makes a scalar `tl.store` in the first thread only, whatever branch it stands in: "
        "inside `if tid(0) == 3` use puts.",
    ),
    DeviceFunction(
        "ntid",
        (("axis", "constant"),),
        None,
        "int32",
        "blockDim (PTX %ntid)",
        "Threads of a block along `axis` (0, 1, 2).",
    ),
    DeviceFunction(
        "syncthreads",
        (),
        None,
        None,
        "__syncthreads() (PTX bar.sync)",
        "Barrier of the block's threads; orders their memory accesses among each other.",
        acquires=True,
    ),
    DeviceFunction(
        "ld",
        (("ptr", "ptr"), ("scope", "constant"), ("semantic", "constant")),
        None,
        "value",
        "ld.{relaxed,acquire}.{gpu,sys}",
        "Loads the integer(s) at `ptr` with the memory order `semantic` (relaxed or acquire) at `scope` (gpu or sys). "
        "What another GPU writes wants sys.",
        ("gpu", "relaxed"),
    ),
    DeviceFunction(
        "ld_acquire",
        (("ptr", "ptr"), ("scope", "constant")),
        None,
        "value",
        "ld.acquire.{gpu,sys}",
        "`ld` with acquire order: what was written before the matching release is seen after it.",
        ("gpu",),
        acquires=True,
    ),
    DeviceFunction(
        "st",
        (("ptr", "ptr"), ("val", "value"), ("scope", "constant"), ("semantic", "constant")),
        None,
        None,
        "st.{relaxed,release}.{gpu,sys}",
        "Stores the integer(s) `val` at `ptr` with the memory order `semantic` (relaxed or release) at `scope` (gpu "
        "or sys). A release orders the calling thread's earlier writes; put `syncthreads()` before it when other "
        "threads of the block wrote the data.",
        ("gpu", "relaxed"),
    ),
    DeviceFunction(
        "st_release",
        (("ptr", "ptr"), ("val", "value"), ("scope", "constant")),
        None,
        None,
        "st.release.{gpu,sys}",
        "`st` with release order.",
        ("gpu",),
    ),
    DeviceFunction(
        "wait_signal",
        (
            ("signal", "ptr64"),
            ("compare", "constant"),
            ("value", "u64"),
            ("monitor", "ptr64"),
            ("peer", "int"),
            ("index", "int"),
        ),
        None,
        "int32",
        "bounded nvshmem_signal_wait_until",
        "The whole block waits until this PE's 64-bit signal `compare`s true with `value`: 1. Or until the deadline "
        "of `monitor` (see `tdcoll.WaitMonitor`) expires or another wait's has: 0, and the host's next check raises "
        "CollectiveTimeout naming `peer` and `index`. Acquires at system scope and ends with a block barrier; the "
        "answer is the same in all threads. Test it and leave the kernel on 0.",
        acquires=True,
    ),
    DeviceFunction(
        "wait_token",
        (
            ("signal", "ptr64"),
            ("compare", "constant"),
            ("value", "u64"),
            ("monitor", "ptr64"),
            ("peer", "int"),
            ("index", "int"),
        ),
        None,
        "int32",
        "bounded nvshmem_signal_wait_until in a pipelined loop",
        "`wait_signal` for loops that Triton is to pipeline; a plain wait forbids that. Returns its 1 or 0, as a "
        "token: loads by pointers or descriptor offsets from `consume_token` stay behind the wait, others may move "
        "above it. The wait moves with them, up to `num_stages` - 1 iterations ahead: a loop must not itself cause "
        "what it so waits for. After a 0 the loads read what is there: test the token before the result is used.",
    ),
    DeviceFunction(
        "consume_token",
        (("value", "value"), ("token", "int")),
        None,
        "value",
        "an addition of 0 that the compiler cannot see through",
        "`value` unchanged: a pointer, a block of pointers, or an integer offset of a descriptor's load. What is "
        "loaded there is loaded after the `wait_token` that returned `token`.",
    ),
    DeviceFunction(
        "wait_signals",
        (
            ("signals", "ptr64"),
            ("count", "int"),
            ("skip", "int"),
            ("compare", "constant"),
            ("value", "u64"),
            ("monitor", "ptr64"),
            ("BLOCK", "constant"),
        ),
        None,
        "int32",
        "bounded nvshmem_signal_wait_until_all",
        "As `wait_signal`, for `signals[0:count]` except index `skip` (-1: none), all at once. `BLOCK` is a power of "
        "two of at least `count`. The index of a missing signal is reported as the peer.",
        acquires=True,
    ),
    DeviceFunction(
        "wait_flagged",
        (("words", "ptr"), ("flag", "int"), ("mask", "value"), ("monitor", "ptr64"), ("peer", "int")),
        None,
        "value",
        "bounded polling of 128-bit words {3 x 32 bits of data, 32 bits of flag}",
        "Waits until every 128-bit word at the block of addresses `words`, where `mask` is true, has "
        "the flag (its last 32 bits) `flag`, an int32; returns the blocks of first, second and third 32 bits, and a "
        "block of 1, or of 0 where a deadline has expired before the flag came, as for `wait_signal`. Each thread "
        "waits for its own words only. Another flag means other data, so this waits for equality: the protocol must "
        "not let a word be written again before it is read.",
        acquires=True,
    ),
    DeviceFunction(
        "store_flagged",
        (
            ("words", "ptr"),
            ("first", "value"),
            ("second", "value"),
            ("third", "value"),
            ("flag", "int"),
            ("mask", "value"),
        ),
        None,
        None,
        "st.relaxed.sys of 128-bit words {3 x 32 bits of data, 32 bits of flag}",
        "Stores the blocks of int32 `first`, `second` and `third`, element by element beside the int32 `flag` in one "
        "128-bit word, at the block of addresses `words` (multiples of 16), where `mask` is true; usually through a "
        "peer's pointer. A word arrives whole, so data and flag need no order, no fence and no signal: the LL protocol "
        "of NCCL, with 128-bit words instead of 64-bit ones.",
    ),
    DeviceFunction(
        "wait_words",
        (
            ("words", "ptr"),
            ("absent", "int"),
            ("mask", "value"),
            ("monitor", "ptr64"),
            ("peer", "int"),
            ("call", "u64"),
        ),
        None,
        "value",
        "bounded polling of 128-bit words {4 x 32 bits of data}",
        "Waits until none of the four 32-bit parts of every 128-bit word at the block of addresses `words`, where "
        "`mask` is true, is the int32 `absent`; returns the blocks of first, second, third and fourth parts, and a "
        "block of 1, or of 0 where a deadline has expired before all four were there, as for `wait_signal`. Each "
        "thread waits for its own words only. The parts of a word may arrive one by one. `call` is for the report: its "
        "epoch; what it expected is 4, and what it saw the number of parts that were there.",
        acquires=True,
    ),
    DeviceFunction(
        "wait_words_of_all",
        (
            ("words", "ptr"),
            ("stride", "int"),
            ("count", "constant"),
            ("skip", "int"),
            ("absent", "int"),
            ("mask", "value"),
            ("monitor", "ptr64"),
            ("call", "u64"),
        ),
        None,
        "value",
        "bounded polling of 128-bit words {4 x 32 bits of data}",
        "As `wait_words`, for the words of `count` ranks at once, `stride` bytes apart, the first of them at `words`; "
        "except those of rank `skip`. `count` is a constant, at least 2. Returns the four blocks of parts for each "
        "rank, rank by rank (of `skip` anything), and the block of 1 or 0. The first rank of which something is "
        "missing is reported as the peer.",
        acquires=True,
    ),
    DeviceFunction(
        "load_words",
        (("words", "ptr"), ("mask", "value")),
        None,
        "value",
        "ld.global of 128-bit words {4 x 32 bits of data}",
        "Returns the blocks of first, second, third and fourth int32 of the 128-bit words at the block of addresses "
        "`words` (multiples of 16), zeros where `mask` is false. An ordinary load: it waits for nobody.",
    ),
    DeviceFunction(
        "store_words",
        (
            ("words", "ptr"),
            ("first", "value"),
            ("second", "value"),
            ("third", "value"),
            ("fourth", "value"),
            ("mask", "value"),
        ),
        None,
        None,
        "st.relaxed.sys of 128-bit words {4 x 32 bits of data}",
        "Stores the blocks of int32 `first` to `fourth`, element by element, as 128-bit words at the block of "
        "addresses `words` (multiples of 16), where `mask` is true. Each part of 32 bits arrives whole, and nothing "
        "orders one after another.",
    ),
    DeviceFunction(
        "block_and",
        (("flag", "int"),),
        None,
        "int32",
        "__syncthreads_and() (PTX barrier.red.and)",
        "Barrier of the block's threads; 1 in all of them if `flag` is not 0 in all of them, else 0. Makes a value "
        "that threads may have read differently fit to branch on.",
        acquires=True,
    ),
    DeviceFunction(
        "signal_block",
        (("sig_addr", "ptr64"), ("signal", "u64"), ("sig_op", "int"), ("pe", "pe")),
        None,
        None,
        "signal_op by the block",
        "`signal_op`, once for the whole block: a block barrier, then one thread fences and updates. What the block "
        "has read, stored, and sent to `pe` before comes before the signal.",
    ),
    DeviceFunction(
        "copy_block",
        (("dst", "ptr"), ("src", "ptr"), ("nbytes", "size")),
        None,
        None,
        "memcpy by the block",
        "The block copies `nbytes` bytes between addresses that it can load and store, any alignment (fastest when "
        "all three are multiples of 16). No ordering: put `syncthreads()`, and a release, before telling anybody.",
    ),
]

FUNCTIONS: dict[str, DeviceFunction] = {function.name: function for function in _FUNCTIONS}
"""Every function of the device language by name."""


def table() -> str:
    """``docs/language.md``'s table: each function's signature beside what it stands for."""
    lines = ["| in a kernel | stands for | meaning |", "|---|---|---|"]
    for function in FUNCTIONS.values():
        cells = (f"`{function.signature}`", f"`{function.prototype}`", function.doc)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
