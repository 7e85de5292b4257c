# SPDX-License-Identifier: Apache-2.0
# Made by `python docs/device_language.py --stubs > tdcoll/language/__init__.pyi`, from tdcoll.spec.
"""Communication functions for Triton kernels: ``import tdcoll.language as tdl``."""

from typing import Any, Literal, TypeAlias

import triton.language as tl

_Number: TypeAlias = tl.tensor | tl.constexpr | int
_Pointer: TypeAlias = tl.tensor | int
_Value: TypeAlias = tl.tensor | tl.constexpr | int | float
_Scope: TypeAlias = Literal["gpu", "sys"]
_Semantic: TypeAlias = Literal["relaxed", "acquire", "release", "acq_rel"]

INTERPRETED: bool
LOWERING: str
CMP_EQ: tl.constexpr
CMP_GE: tl.constexpr
CMP_GT: tl.constexpr
CMP_LE: tl.constexpr
CMP_LT: tl.constexpr
CMP_NE: tl.constexpr
EXPIRED: tl.constexpr
MONITOR_ABORTED: tl.constexpr
MONITOR_RANK: tl.constexpr
MONITOR_RECORD: tl.constexpr
MONITOR_TIMEOUT_NS: tl.constexpr
MONITOR_WORDS: tl.constexpr
NOTICES: tl.constexpr
NOTICE_EVERY: tl.constexpr
NOTICE_SHIFT: tl.constexpr
NVSHMEM_CMP_EQ: tl.constexpr
NVSHMEM_CMP_GE: tl.constexpr
NVSHMEM_CMP_GT: tl.constexpr
NVSHMEM_CMP_LE: tl.constexpr
NVSHMEM_CMP_LT: tl.constexpr
NVSHMEM_CMP_NE: tl.constexpr
NVSHMEM_SIGNAL_ADD: tl.constexpr
NVSHMEM_SIGNAL_SET: tl.constexpr
OWN_GRID: tl.constexpr
RECORD_EPOCH: tl.constexpr
RECORD_EXPECTED: tl.constexpr
RECORD_NOTICES: tl.constexpr
RECORD_PEER: tl.constexpr
RECORD_RANK: tl.constexpr
RECORD_SEEN: tl.constexpr
RECORD_SIGNAL: tl.constexpr
RECORD_VALID: tl.constexpr
RECORD_WORDS: tl.constexpr
SIGNAL_ADD: tl.constexpr
SIGNAL_SET: tl.constexpr

def my_pe() -> tl.tensor:
    """This PE: the global rank."""

def n_pes() -> tl.tensor:
    """Number of PEs of the job."""

def remote_ptr(local_ptr: _Pointer, pe: _Number) -> tl.tensor:
    """Pointer of the same type to PE `pe`'s copy of a symmetric address, for direct loads and
    stores; a null pointer when that PE is not reachable by them. Order such stores with a release
    at system scope."""

def int_p(dest: _Pointer, value: _Number, pe: _Number) -> None:
    """Puts one 32-bit integer to the symmetric address `dest` on PE `pe`. Each thread that calls
    puts once."""

def p(dest: _Pointer, value: _Value, pe: _Number) -> None:
    """Puts `value`, of the pointee's type, to the symmetric address `dest` on PE `pe`. Ordered as
    any put. Each thread that calls does it once: call it from one thread. Pointers are to integers
    or floats of 32 or 64 bits."""

def g(source: _Pointer, pe: _Number) -> Any:
    """Returns the value at the symmetric address `source` on PE `pe`. Each thread that calls does
    it once: call it from one thread. Pointers are to integers or floats of 32 or 64 bits."""

def atomic_fetch(source: _Pointer, pe: _Number) -> Any:
    """Returns the integer at the symmetric address `source` on PE `pe`, read atomically. It isn't
    ordered after earlier puts and stores: call `fence` first. Each thread that calls does it once:
    call it from one thread. Pointers are to integers of 32 or 64 bits."""

def atomic_set(dest: _Pointer, value: _Value, pe: _Number) -> None:
    """Sets the integer at the symmetric address `dest` on PE `pe` atomically. It isn't ordered
    after earlier puts and stores: call `fence` first. Each thread that calls does it once: call it
    from one thread. Pointers are to integers of 32 or 64 bits."""

def atomic_add(dest: _Pointer, value: _Value, pe: _Number) -> None:
    """Adds `value` to the integer at the symmetric address `dest` on PE `pe`. It isn't ordered
    after earlier puts and stores: call `fence` first. Each thread that calls does it once: call it
    from one thread. Pointers are to integers of 32 or 64 bits."""

def atomic_fetch_add(dest: _Pointer, value: _Value, pe: _Number) -> Any:
    """Adds `value` to the integer at the symmetric address `dest` on PE `pe`; returns what was
    there before. It isn't ordered after earlier puts and stores: call `fence` first. Each thread
    that calls does it once: call it from one thread. Pointers are to integers of 32 or 64 bits."""

def atomic_swap(dest: _Pointer, value: _Value, pe: _Number) -> Any:
    """Writes `value` to the integer at the symmetric address `dest` on PE `pe`; returns what was
    there before. It isn't ordered after earlier puts and stores: call `fence` first. Each thread
    that calls does it once: call it from one thread. Pointers are to integers of 32 or 64 bits."""

def atomic_compare_swap(dest: _Pointer, cond: _Value, value: _Value, pe: _Number) -> Any:
    """Writes `value` to the symmetric address `dest` on PE `pe` if `cond` is there; returns what
    was there before. It isn't ordered after earlier puts and stores: call `fence` first. Each
    thread that calls does it once: call it from one thread. Pointers are to integers of 32 or 64
    bits."""

def putmem(dest: _Pointer, source: _Pointer, bytes: _Number, pe: _Number) -> None:
    """Copies `bytes` bytes from `source` to the symmetric address `dest` on PE `pe`. `source` may
    be any memory of this GPU when the PE is reachable over NVLink or PCIe, and must be symmetric
    otherwise. Returns when `source` may be written again; delivery is not ordered with anything
    later without `fence`, `quiet` or a signal of its own. Each thread that calls makes a transfer
    of its own: call it from one thread."""

def putmem_warp(dest: _Pointer, source: _Pointer, bytes: _Number, pe: _Number) -> None:
    """Copies `bytes` bytes from `source` to the symmetric address `dest` on PE `pe`. `source` may
    be any memory of this GPU when the PE is reachable over NVLink or PCIe, and must be symmetric
    otherwise. Returns when `source` may be written again; delivery is not ordered with anything
    later without `fence`, `quiet` or a signal of its own. All threads of a warp call it together,
    with the same arguments."""

def putmem_block(dest: _Pointer, source: _Pointer, bytes: _Number, pe: _Number) -> None:
    """Copies `bytes` bytes from `source` to the symmetric address `dest` on PE `pe`. `source` may
    be any memory of this GPU when the PE is reachable over NVLink or PCIe, and must be symmetric
    otherwise. Returns when `source` may be written again; delivery is not ordered with anything
    later without `fence`, `quiet` or a signal of its own. All threads of the block call it
    together, with the same arguments."""

def putmem_nbi(dest: _Pointer, source: _Pointer, bytes: _Number, pe: _Number) -> None:
    """Copies `bytes` bytes from `source` to the symmetric address `dest` on PE `pe`. `source` may
    be any memory of this GPU when the PE is reachable over NVLink or PCIe, and must be symmetric
    otherwise. Returns at once: `source` must stay as it is until `quiet`, or until the receiver
    confirms. Each thread that calls makes a transfer of its own: call it from one thread."""

def putmem_nbi_warp(dest: _Pointer, source: _Pointer, bytes: _Number, pe: _Number) -> None:
    """Copies `bytes` bytes from `source` to the symmetric address `dest` on PE `pe`. `source` may
    be any memory of this GPU when the PE is reachable over NVLink or PCIe, and must be symmetric
    otherwise. Returns at once: `source` must stay as it is until `quiet`, or until the receiver
    confirms. All threads of a warp call it together, with the same arguments."""

def putmem_nbi_block(dest: _Pointer, source: _Pointer, bytes: _Number, pe: _Number) -> None:
    """Copies `bytes` bytes from `source` to the symmetric address `dest` on PE `pe`. `source` may
    be any memory of this GPU when the PE is reachable over NVLink or PCIe, and must be symmetric
    otherwise. Returns at once: `source` must stay as it is until `quiet`, or until the receiver
    confirms. All threads of the block call it together, with the same arguments."""

def putmem_signal(
    dest: _Pointer,
    source: _Pointer,
    bytes: _Number,
    sig_addr: _Pointer,
    signal: _Number,
    sig_op: _Number,
    pe: _Number,
) -> None:
    """Copies `bytes` bytes from `source` to the symmetric address `dest` on PE `pe`, then updates a
    signal there. `source` may be any memory of this GPU when the PE is reachable over NVLink or
    PCIe, and must be symmetric otherwise. The signal is the 64-bit word at the symmetric address
    `sig_addr` on that PE, which `sig_op` (SIGNAL_SET or SIGNAL_ADD) updates with `signal`. A reader
    that sees the signal also sees these bytes, but not those of other puts. Returns when `source`
    may be written again; delivery is not ordered with anything later without `fence`, `quiet` or a
    signal of its own. Each thread that calls makes a transfer of its own: call it from one
    thread."""

def putmem_signal_warp(
    dest: _Pointer,
    source: _Pointer,
    bytes: _Number,
    sig_addr: _Pointer,
    signal: _Number,
    sig_op: _Number,
    pe: _Number,
) -> None:
    """Copies `bytes` bytes from `source` to the symmetric address `dest` on PE `pe`, then updates a
    signal there. `source` may be any memory of this GPU when the PE is reachable over NVLink or
    PCIe, and must be symmetric otherwise. The signal is the 64-bit word at the symmetric address
    `sig_addr` on that PE, which `sig_op` (SIGNAL_SET or SIGNAL_ADD) updates with `signal`. A reader
    that sees the signal also sees these bytes, but not those of other puts. Returns when `source`
    may be written again; delivery is not ordered with anything later without `fence`, `quiet` or a
    signal of its own. All threads of a warp call it together, with the same arguments."""

def putmem_signal_block(
    dest: _Pointer,
    source: _Pointer,
    bytes: _Number,
    sig_addr: _Pointer,
    signal: _Number,
    sig_op: _Number,
    pe: _Number,
) -> None:
    """Copies `bytes` bytes from `source` to the symmetric address `dest` on PE `pe`, then updates a
    signal there. `source` may be any memory of this GPU when the PE is reachable over NVLink or
    PCIe, and must be symmetric otherwise. The signal is the 64-bit word at the symmetric address
    `sig_addr` on that PE, which `sig_op` (SIGNAL_SET or SIGNAL_ADD) updates with `signal`. A reader
    that sees the signal also sees these bytes, but not those of other puts. Returns when `source`
    may be written again; delivery is not ordered with anything later without `fence`, `quiet` or a
    signal of its own. All threads of the block call it together, with the same arguments."""

def putmem_signal_nbi(
    dest: _Pointer,
    source: _Pointer,
    bytes: _Number,
    sig_addr: _Pointer,
    signal: _Number,
    sig_op: _Number,
    pe: _Number,
) -> None:
    """Copies `bytes` bytes from `source` to the symmetric address `dest` on PE `pe`, then updates a
    signal there. `source` may be any memory of this GPU when the PE is reachable over NVLink or
    PCIe, and must be symmetric otherwise. The signal is the 64-bit word at the symmetric address
    `sig_addr` on that PE, which `sig_op` (SIGNAL_SET or SIGNAL_ADD) updates with `signal`. A reader
    that sees the signal also sees these bytes, but not those of other puts. Returns at once:
    `source` must stay as it is until `quiet`, or until the receiver confirms. Each thread that
    calls makes a transfer of its own: call it from one thread."""

def putmem_signal_nbi_warp(
    dest: _Pointer,
    source: _Pointer,
    bytes: _Number,
    sig_addr: _Pointer,
    signal: _Number,
    sig_op: _Number,
    pe: _Number,
) -> None:
    """Copies `bytes` bytes from `source` to the symmetric address `dest` on PE `pe`, then updates a
    signal there. `source` may be any memory of this GPU when the PE is reachable over NVLink or
    PCIe, and must be symmetric otherwise. The signal is the 64-bit word at the symmetric address
    `sig_addr` on that PE, which `sig_op` (SIGNAL_SET or SIGNAL_ADD) updates with `signal`. A reader
    that sees the signal also sees these bytes, but not those of other puts. Returns at once:
    `source` must stay as it is until `quiet`, or until the receiver confirms. All threads of a warp
    call it together, with the same arguments."""

def putmem_signal_nbi_block(
    dest: _Pointer,
    source: _Pointer,
    bytes: _Number,
    sig_addr: _Pointer,
    signal: _Number,
    sig_op: _Number,
    pe: _Number,
) -> None:
    """Copies `bytes` bytes from `source` to the symmetric address `dest` on PE `pe`, then updates a
    signal there. `source` may be any memory of this GPU when the PE is reachable over NVLink or
    PCIe, and must be symmetric otherwise. The signal is the 64-bit word at the symmetric address
    `sig_addr` on that PE, which `sig_op` (SIGNAL_SET or SIGNAL_ADD) updates with `signal`. A reader
    that sees the signal also sees these bytes, but not those of other puts. Returns at once:
    `source` must stay as it is until `quiet`, or until the receiver confirms. All threads of the
    block call it together, with the same arguments."""

def getmem(dest: _Pointer, source: _Pointer, bytes: _Number, pe: _Number) -> None:
    """Copies `bytes` bytes from the symmetric address `source` on PE `pe` to `dest`. Returns when
    the bytes are in `dest`. Each thread that calls makes a transfer of its own: call it from one
    thread."""

def getmem_warp(dest: _Pointer, source: _Pointer, bytes: _Number, pe: _Number) -> None:
    """Copies `bytes` bytes from the symmetric address `source` on PE `pe` to `dest`. Returns when
    the bytes are in `dest`. All threads of a warp call it together, with the same arguments."""

def getmem_block(dest: _Pointer, source: _Pointer, bytes: _Number, pe: _Number) -> None:
    """Copies `bytes` bytes from the symmetric address `source` on PE `pe` to `dest`. Returns when
    the bytes are in `dest`. All threads of the block call it together, with the same arguments."""

def getmem_nbi(dest: _Pointer, source: _Pointer, bytes: _Number, pe: _Number) -> None:
    """Copies `bytes` bytes from the symmetric address `source` on PE `pe` to `dest`. Returns at
    once: the bytes are in `dest` after `quiet`. Each thread that calls makes a transfer of its own:
    call it from one thread."""

def getmem_nbi_warp(dest: _Pointer, source: _Pointer, bytes: _Number, pe: _Number) -> None:
    """Copies `bytes` bytes from the symmetric address `source` on PE `pe` to `dest`. Returns at
    once: the bytes are in `dest` after `quiet`. All threads of a warp call it together, with the
    same arguments."""

def getmem_nbi_block(dest: _Pointer, source: _Pointer, bytes: _Number, pe: _Number) -> None:
    """Copies `bytes` bytes from the symmetric address `source` on PE `pe` to `dest`. Returns at
    once: the bytes are in `dest` after `quiet`. All threads of the block call it together, with the
    same arguments."""

def signal_op(sig_addr: _Pointer, signal: _Number, sig_op: _Number, pe: _Number) -> None:
    """Updates the 64-bit signal at the symmetric address `sig_addr` on PE `pe` (SIGNAL_SET or
    SIGNAL_ADD). Not ordered after earlier puts and stores: `fence` first, or use `signal_block`.
    Every thread that calls updates once, so SIGNAL_ADD wants one thread."""

def signal_wait_until(sig_addr: _Pointer, cmp_: _Number, cmp_val: _Number) -> tl.tensor:
    """Waits until this PE's signal compares true (CMP_*), and returns its value. The caller then
    sees the bytes that were put before the signal. Has no deadline: a peer that dies leaves the GPU
    hanging. `wait_signal` is the bounded form."""

def fence() -> None:
    """Puts and signals that this PE has issued before arrive, at each PE, before those that it
    issues afterwards. This includes other threads' if they are synchronised with the calling one
    (`syncthreads`). Orders stores of the calling thread through `remote_ptr` alike. Says nothing
    about different PEs, and does not wait."""

def quiet() -> None:
    """Waits until all puts, signals and nbi transfers that this PE has issued are complete at their
    destination; those of other threads under the condition that `fence` has."""

def barrier_all() -> None:
    """Completes what this PE has issued (as `quiet`), then waits for every PE of the job. Each
    thread that calls takes part: call it from one thread. One program per PE may be in it at a
    time. Unbounded: prefer signals with bounded waits."""

def barrier_all_warp() -> None:
    """Completes what this PE has issued (as `quiet`), then waits for every PE of the job. All
    threads of a warp call it together, with the same arguments. One program per PE may be in it at
    a time. Unbounded: prefer signals with bounded waits."""

def barrier_all_block() -> None:
    """Completes what this PE has issued (as `quiet`), then waits for every PE of the job. All
    threads of the block call it together, with the same arguments. One program per PE may be in it
    at a time. Unbounded: prefer signals with bounded waits."""

def sync_all() -> None:
    """Waits for every PE of the job; does not complete puts (use `barrier_all` for that). Each
    thread that calls takes part: call it from one thread. One program per PE may be in it at a
    time. Unbounded: prefer signals with bounded waits."""

def sync_all_warp() -> None:
    """Waits for every PE of the job; does not complete puts (use `barrier_all` for that). All
    threads of a warp call it together, with the same arguments. One program per PE may be in it at
    a time. Unbounded: prefer signals with bounded waits."""

def sync_all_block() -> None:
    """Waits for every PE of the job; does not complete puts (use `barrier_all` for that). All
    threads of the block call it together, with the same arguments. One program per PE may be in it
    at a time. Unbounded: prefer signals with bounded waits."""

def tid(axis: tl.constexpr | int) -> tl.tensor:
    """Index of the thread in its block along `axis` (0, 1, 2). For kernels written for threads;
    tdcoll's own speak in blocks. Triton makes a scalar `tl.store` in the first thread only,
    whatever branch it stands in: inside `if tid(0) == 3` use puts."""

def ntid(axis: tl.constexpr | int) -> tl.tensor:
    """Threads of a block along `axis` (0, 1, 2)."""

def syncthreads() -> None:
    """Barrier of the block's threads; orders their memory accesses among each other."""

def ld(ptr: _Pointer, scope: _Scope = "gpu", semantic: _Semantic = "relaxed") -> Any:
    """Loads the integer(s) at `ptr` with the memory order `semantic` (relaxed or acquire) at
    `scope` (gpu or sys). Use sys for memory that another GPU writes."""

def ld_acquire(ptr: _Pointer, scope: _Scope = "gpu") -> Any:
    """`ld` with acquire order: what was written before the matching release is seen after it."""

def st(ptr: _Pointer, val: _Value, scope: _Scope = "gpu", semantic: _Semantic = "relaxed") -> None:
    """Stores the integer(s) `val` at `ptr` with the memory order `semantic` (relaxed or release) at
    `scope` (gpu or sys). A release orders the calling thread's earlier writes; put `syncthreads()`
    before it when other threads of the block wrote the data."""

def st_release(ptr: _Pointer, val: _Value, scope: _Scope = "gpu") -> None:
    """`st` with release order."""

def atom_add(
    ptr: _Pointer, val: _Value, scope: _Scope = "gpu", semantic: _Semantic = "relaxed"
) -> Any:
    """Adds `val` to the integer of 32 or 64 bits at the scalar `ptr`, of this GPU or through
    `remote_ptr`; returns what was there before. Each thread that calls adds once (`tl.atomic_add`
    adds once for the block)."""

def atom_cas(
    ptr: _Pointer, cmp: _Value, val: _Value, scope: _Scope = "gpu", semantic: _Semantic = "relaxed"
) -> Any:
    """Writes `val` to the integer of 32 or 64 bits at the scalar `ptr`, of this GPU or through
    `remote_ptr`, if `cmp` is there; returns what was there before. Each thread that calls does so
    (`tl.atomic_cas` does once for the block)."""

def wait_signal(
    signal: _Pointer,
    compare: tl.constexpr | int,
    value: _Number,
    monitor: _Pointer,
    peer: _Number = -1,
    index: _Number = -1,
) -> tl.tensor:
    """The whole block waits until this PE's 64-bit signal `compare`s true with `value`: 1. Or until
    the deadline of `monitor` (see `tdcoll.WaitMonitor`) expires or another wait's has: 0, and the
    host's next check raises CollectiveTimeout naming `peer` and `index` (-1: not known). Acquires
    at system scope and ends with a block barrier; the answer is the same in all threads. Test it
    and leave the kernel on 0."""

def wait_token(
    signal: _Pointer,
    compare: tl.constexpr | int,
    value: _Number,
    monitor: _Pointer,
    peer: _Number = -1,
    index: _Number = -1,
) -> tl.tensor:
    """`wait_signal` for loops that Triton is to pipeline; a plain wait forbids that. Returns its 1
    or 0, as a token: loads by pointers or descriptor offsets from `consume_token` stay behind the
    wait, others may move above it. The wait moves with them, up to `num_stages` - 1 iterations
    ahead: a loop must not itself cause what it so waits for. After a 0 the loads read what is
    there: test the token before the result is used."""

def consume_token(value: _Value, token: _Value) -> Any:
    """`value` unchanged: a pointer, a block of pointers, or an integer offset of a descriptor's
    load. Loads from there come after the `wait_token` that returned `token`."""

def wait_signals(
    signals: _Pointer,
    count: _Number,
    skip: _Number,
    compare: tl.constexpr | int,
    value: _Number,
    monitor: _Pointer,
    BLOCK: tl.constexpr | int,
    peer: _Number = -1,
    index: _Number = 0,
    stride: _Number = 1,
) -> tl.tensor:
    """Waits as `wait_signal` does, for `signals[i * stride]` of all i in `[0, count)` except `skip`
    (-1: none), all at once. `BLOCK` is a power of two of at least `count`. For a missing signal i,
    `index` + i is reported as its index, and `peer` as the peer, or i if that is -1."""

def wait_word(
    word: _Pointer,
    compare: tl.constexpr | int,
    value: _Value,
    monitor: _Pointer,
    peer: _Number = -1,
    index: _Number = -1,
) -> tl.tensor:
    """Waits as `wait_signal` does, for an integer of 32 or 64 bits in any memory that loads reach:
    symmetric, a peer's through `remote_ptr`, or this GPU's own. Compares as integers of the
    pointee's type, signed or not."""

def test_signal(signal: _Pointer, compare: tl.constexpr | int, value: _Number) -> tl.tensor:
    """Returns 1 if this PE's 64-bit signal `compare`s true with `value` now, for all threads of the
    block, else 0. It waits for the block's threads only. After a 1 what was put before the signal
    is seen."""

def grid_barrier(counter: _Pointer, monitor: _Pointer) -> tl.tensor:
    """Waits for all thread blocks of the launch, and returns 1; or 0 when a deadline expires, as
    for `wait_signal`, with this rank as the peer. Stores of each before it are seen by all after
    it. `counter` is an int64 of this GPU's memory, 0 at first, and never set back: launches that
    follow one another, and replays of a CUDA graph, may share it, whatever their grids. All thread
    blocks must be on the GPU at once: launch with `launch_cooperative_grid=True`."""

def wait_flagged(
    words: _Pointer, flag: _Number, mask: _Value, monitor: _Pointer, peer: _Number = -1
) -> Any:
    """Waits until every 128-bit word at the block of addresses `words`, where `mask` is true, has
    the flag (its last 32 bits) `flag`, an int32; returns the blocks of first, second and third 32
    bits, and a block of 1, or of 0 where a deadline has expired before the flag came, as for
    `wait_signal`. Each thread waits for its own words only. Another flag means other data, so this
    waits for equality: the protocol must not let a word be written again before it is read."""

def store_flagged(
    words: _Pointer, first: _Value, second: _Value, third: _Value, flag: _Number, mask: _Value
) -> None:
    """Stores the blocks of int32 `first`, `second` and `third`, element by element beside the int32
    `flag` in one 128-bit word, at the block of addresses `words` (multiples of 16), where `mask` is
    true; usually through a peer's pointer. A word arrives whole, so data and flag need no order, no
    fence and no signal: the LL protocol of NCCL, with 128-bit words instead of 64-bit ones."""

def wait_words(
    words: _Pointer, absent: _Number, mask: _Value, monitor: _Pointer, peer: _Number, call: _Number
) -> Any:
    """Waits until none of the four 32-bit parts of every 128-bit word at the block of addresses
    `words`, where `mask` is true, is the int32 `absent`; returns the blocks of first, second, third
    and fourth parts, and a block of 1, or of 0 where a deadline has expired before all four were
    there, as for `wait_signal`. Each thread waits for its own words only. The parts of a word may
    arrive one by one. `call` is for the report: its epoch; what it expected is 4, and what it saw
    the number of parts that were there."""

def wait_words_of_all(
    words: _Pointer,
    stride: _Number,
    count: tl.constexpr | int,
    skip: _Number,
    absent: _Number,
    mask: _Value,
    monitor: _Pointer,
    call: _Number,
) -> Any:
    """As `wait_words`, for the words of `count` ranks at once, `stride` bytes apart, the first of
    them at `words`; except those of rank `skip`. `count` is a constant, at least 2. Returns the
    four blocks of parts for each rank, rank by rank (of `skip` anything), and the block of 1 or 0.
    The first rank of which something is missing is reported as the peer."""

def load_words(words: _Pointer, mask: _Value) -> Any:
    """Returns the blocks of first, second, third and fourth int32 of the 128-bit words at the block
    of addresses `words` (multiples of 16), zeros where `mask` is false. An ordinary load, which
    doesn't wait."""

def store_words(
    words: _Pointer, first: _Value, second: _Value, third: _Value, fourth: _Value, mask: _Value
) -> None:
    """Stores the blocks of int32 `first` to `fourth`, element by element, as 128-bit words at the
    block of addresses `words` (multiples of 16), where `mask` is true. Each part of 32 bits arrives
    whole, and nothing orders one after another."""

def wait_descriptor_stores() -> None:
    """Waits until the block's earlier stores through tensor descriptors are complete. They are
    asynchronous: neither `syncthreads()` nor a release orders them before that. Triton itself only
    waits until their source may be reused. Put `syncthreads()`, and a release, between this and
    telling anybody."""

def block_and(flag: _Number) -> tl.tensor:
    """Barrier of the block's threads; 1 in all of them if `flag` is not 0 in all of them, else 0.
    Makes a value that threads may have read differently fit to branch on."""

def signal_block(sig_addr: _Pointer, signal: _Number, sig_op: _Number, pe: _Number) -> None:
    """`signal_op`, once for the whole block: a block barrier, then one thread fences and updates.
    The block's earlier loads, stores and puts to `pe` come before the signal."""

def copy_block(dst: _Pointer, src: _Pointer, nbytes: _Number) -> None:
    """The block copies `nbytes` bytes between addresses that it can load and store, any alignment
    (fastest when all three are multiples of 16). No ordering: put `syncthreads()`, and a release,
    before telling anybody."""
