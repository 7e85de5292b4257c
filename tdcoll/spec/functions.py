# SPDX-License-Identifier: Apache-2.0
"""The device language as data: one entry per function, from which lowerings, docs and tests are
made.

Names and argument order of NVSHMEM's functions (:mod:`tdcoll.spec.nvshmem`) are those of
Triton-distributed's ``libshmem_device``, if it has them. ``docs/device_language.py`` makes tables
and stubs of this one. Tests compare it with Triton-distributed's sources, and with each lowering.

Source, for loads, stores and atomics: the PTX ISA's memory consistency model.
"""

from __future__ import annotations

from tdcoll.spec.entry import (
    LIBRARY,
    LINKED,
    DeviceFunction,
    declared,
    no_puts,
    not_a_monitor,
    not_linked,
)
from tdcoll.spec.nvshmem import NVSHMEM_FUNCTIONS

__all__ = [
    "FUNCTIONS",
    "LIBRARY",
    "LINKED",
    "DeviceFunction",
    "no_puts",
    "not_a_monitor",
    "not_linked",
]

_FUNCTIONS = [
    *NVSHMEM_FUNCTIONS,
    declared(
        "tid(axis: constant) -> int32",
        "threadIdx (PTX %tid)",
        "Index of the thread in its block along `axis` (0, 1, 2). For kernels written for threads; tdcoll's own speak "
        "in blocks. Triton makes a scalar `tl.store` in the first thread only, whatever branch it stands in: inside "
        "`if tid(0) == 3` use puts.",
    ),
    declared(
        "ntid(axis: constant) -> int32",
        "blockDim (PTX %ntid)",
        "Threads of a block along `axis` (0, 1, 2).",
    ),
    declared(
        "syncthreads()",
        "__syncthreads() (PTX bar.sync)",
        "Barrier of the block's threads; orders their memory accesses among each other.",
        acquires=True,
    ),
    declared(
        "ld(ptr: ptr, scope: constant = 'gpu', semantic: constant = 'relaxed') -> value",
        "ld.{relaxed,acquire}.{gpu,sys}",
        "Loads the integer(s) at `ptr` with the memory order `semantic` (relaxed or acquire) at `scope` (gpu or sys). "
        "Use sys for memory that another GPU writes.",
    ),
    declared(
        "ld_acquire(ptr: ptr, scope: constant = 'gpu') -> value",
        "ld.acquire.{gpu,sys}",
        "`ld` with acquire order: what was written before the matching release is seen after it.",
        acquires=True,
    ),
    declared(
        "st(ptr: ptr, val: value, scope: constant = 'gpu', semantic: constant = 'relaxed')",
        "st.{relaxed,release}.{gpu,sys}",
        "Stores the integer(s) `val` at `ptr` with the memory order `semantic` (relaxed or release) at `scope` (gpu "
        "or sys). A release orders the calling thread's earlier writes; put `syncthreads()` before it when other "
        "threads of the block wrote the data.",
    ),
    declared(
        "st_release(ptr: ptr, val: value, scope: constant = 'gpu')",
        "st.release.{gpu,sys}",
        "`st` with release order.",
    ),
    declared(
        "atom_add(ptr: ptr, val: value, scope: constant = 'gpu', semantic: constant = 'relaxed') -> value",
        "atom.{relaxed,acquire,release,acq_rel}.{gpu,sys}.add",
        "Adds `val` to the integer of 32 or 64 bits at the scalar `ptr`, of this GPU or through `remote_ptr`; returns "
        "what was there before. Each thread that calls adds once (`tl.atomic_add` adds once for the block).",
        acquires=True,
    ),
    declared(
        "atom_cas(ptr: ptr, cmp: value, val: value, scope: constant = 'gpu', semantic: constant = 'relaxed') -> value",
        "atom.{relaxed,acquire,release,acq_rel}.{gpu,sys}.cas",
        "Writes `val` to the integer of 32 or 64 bits at the scalar `ptr`, of this GPU or through `remote_ptr`, if "
        "`cmp` is there; returns what was there before. Each thread that calls does so (`tl.atomic_cas` does once for "
        "the block).",
        acquires=True,
    ),
    declared(
        "wait_signal(signal: ptr64, compare: constant, value: u64, monitor: ptr64, peer: int = -1, index: int = -1) -> "
        "int32",
        "bounded nvshmem_signal_wait_until",
        "The whole block waits until this PE's 64-bit signal `compare`s true with `value`: 1. Or until the deadline "
        "of `monitor` (see `tdcoll.WaitMonitor`) expires or another wait's has: 0, and the host's next check raises "
        "CollectiveTimeout naming `peer` and `index` (-1: not known). Acquires at system scope and ends with a block "
        "barrier; the answer is the same in all threads. Test it and leave the kernel on 0.",
        acquires=True,
    ),
    declared(
        "wait_token(signal: ptr64, compare: constant, value: u64, monitor: ptr64, peer: int = -1, index: int = -1) -> "
        "int32",
        "bounded nvshmem_signal_wait_until in a pipelined loop",
        "`wait_signal` for loops that Triton is to pipeline; a plain wait forbids that. Returns its 1 or 0, as a "
        "token: loads by pointers or descriptor offsets from `consume_token` stay behind the wait, others may move "
        "above it. The wait moves with them, up to `num_stages` - 1 iterations ahead: a loop must not itself cause "
        "what it so waits for. After a 0 the loads read what is there: test the token before the result is used.",
    ),
    declared(
        "consume_token(value: value, token: value) -> value",
        "an addition of 0 that the compiler cannot see through",
        "`value` unchanged: a pointer, a block of pointers, or an integer offset of a descriptor's load. "
        "Loads from there come after the `wait_token` that returned `token`.",
    ),
    declared(
        "wait_signals(signals: ptr64, count: int, skip: int, compare: constant, value: u64, monitor: ptr64, BLOCK: "
        "constant, peer: int = -1, index: int = 0, stride: int = 1) -> int32",
        "bounded nvshmem_uint64_wait_until_all",
        "Waits as `wait_signal` does, for `signals[i * stride]` of all i in `[0, count)` except `skip` (-1: none), all "
        "at once. `BLOCK` is a power of two of at least `count`. For a missing signal i, `index` + i is reported as "
        "its index, and `peer` as the peer, or i if that is -1.",
        acquires=True,
    ),
    declared(
        "wait_word(word: ptr, compare: constant, value: value, monitor: ptr64, peer: int = -1, index: int = -1) -> "
        "int32",
        "bounded nvshmem_TYPE_wait_until",
        "Waits as `wait_signal` does, for an integer of 32 or 64 bits in any memory that loads reach: symmetric, a "
        "peer's through `remote_ptr`, or this GPU's own. Compares as integers of the pointee's type, signed or not.",
        acquires=True,
    ),
    declared(
        "test_signal(signal: ptr64, compare: constant, value: u64) -> int32",
        "nvshmem_uint64_test",
        "Returns 1 if this PE's 64-bit signal `compare`s true with `value` now, for all threads of the block, else 0. "
        "It waits for the block's threads only. After a 1 what was put before the signal is seen.",
        acquires=True,
    ),
    declared(
        "grid_barrier(counter: ptr64, monitor: ptr64) -> int32",
        "bounded cooperative_groups::this_grid().sync()",
        "Waits for all thread blocks of the launch, and returns 1; or 0 when a deadline expires, as for `wait_signal`, "
        "with this rank as the peer. Stores of each before it are seen by all after it. `counter` is an int64 of this "
        "GPU's memory, 0 at first, and never set back: launches that follow one another, and replays of a CUDA graph, "
        "may share it, whatever their grids. All thread blocks must be on the GPU at once: launch with "
        "`launch_cooperative_grid=True`.",
        acquires=True,
    ),
    declared(
        "wait_flagged(words: ptr, flag: int, mask: value, monitor: ptr64, peer: int = -1) -> value",
        "bounded polling of 128-bit words {3 x 32 bits of data, 32 bits of flag}",
        "Waits until every 128-bit word at the block of addresses `words`, where `mask` is true, has the flag (its "
        "last 32 bits) `flag`, an int32; returns the blocks of first, second and third 32 bits, and a block of 1, or "
        "of 0 where a deadline has expired before the flag came, as for `wait_signal`. Each thread waits for its own "
        "words only. Another flag means other data, so this waits for equality: the protocol must not let a word be "
        "written again before it is read.",
        acquires=True,
    ),
    declared(
        "store_flagged(words: ptr, first: value, second: value, third: value, flag: int, mask: value)",
        "st.relaxed.sys of 128-bit words {3 x 32 bits of data, 32 bits of flag}",
        "Stores the blocks of int32 `first`, `second` and `third`, element by element beside the int32 `flag` in one "
        "128-bit word, at the block of addresses `words` (multiples of 16), where `mask` is true; usually through a "
        "peer's pointer. A word arrives whole, so data and flag need no order, no fence and no signal: the LL "
        "protocol of NCCL, with 128-bit words instead of 64-bit ones.",
    ),
    declared(
        "wait_words(words: ptr, absent: int, mask: value, monitor: ptr64, peer: int, call: u64) -> value",
        "bounded polling of 128-bit words {4 x 32 bits of data}",
        "Waits until none of the four 32-bit parts of every 128-bit word at the block of addresses `words`, where "
        "`mask` is true, is the int32 `absent`; returns the blocks of first, second, third and fourth parts, and a "
        "block of 1, or of 0 where a deadline has expired before all four were there, as for `wait_signal`. Each "
        "thread waits for its own words only. The parts of a word may arrive one by one. `call` is for the report: "
        "its epoch; what it expected is 4, and what it saw the number of parts that were there.",
        acquires=True,
    ),
    declared(
        "wait_words_of_all(words: ptr, stride: int, count: constant, skip: int, absent: int, mask: value, monitor: "
        "ptr64, call: u64) -> value",
        "bounded polling of 128-bit words {4 x 32 bits of data}",
        "As `wait_words`, for the words of `count` ranks at once, `stride` bytes apart, the first of them at `words`; "
        "except those of rank `skip`. `count` is a constant, at least 2. Returns the four blocks of parts for each "
        "rank, rank by rank (of `skip` anything), and the block of 1 or 0. The first rank of which something is "
        "missing is reported as the peer.",
        acquires=True,
    ),
    declared(
        "load_words(words: ptr, mask: value) -> value",
        "ld.global of 128-bit words {4 x 32 bits of data}",
        "Returns the blocks of first, second, third and fourth int32 of the 128-bit words at the block of addresses "
        "`words` (multiples of 16), zeros where `mask` is false. An ordinary load, which doesn't wait.",
    ),
    declared(
        "store_words(words: ptr, first: value, second: value, third: value, fourth: value, mask: value)",
        "st.relaxed.sys of 128-bit words {4 x 32 bits of data}",
        "Stores the blocks of int32 `first` to `fourth`, element by element, as 128-bit words at the block of "
        "addresses `words` (multiples of 16), where `mask` is true. Each part of 32 bits arrives whole, and nothing "
        "orders one after another.",
    ),
    declared(
        "wait_descriptor_stores()",
        "cp.async.bulk.wait_group 0",
        "Waits until the block's earlier stores through tensor descriptors are complete. They are asynchronous: "
        "neither `syncthreads()` nor a release orders them before that. Triton itself only waits until their source "
        "may be reused. Put `syncthreads()`, and a release, between this and telling anybody.",
    ),
    declared(
        "block_and(flag: int) -> int32",
        "__syncthreads_and() (PTX barrier.red.and)",
        "Barrier of the block's threads; 1 in all of them if `flag` is not 0 in all of them, else 0. Makes a value "
        "that threads may have read differently fit to branch on.",
        acquires=True,
    ),
    declared(
        "signal_block(sig_addr: ptr64, signal: u64, sig_op: int, pe: pe)",
        "signal_op by the block",
        "`signal_op`, once for the whole block: a block barrier, then one thread fences and updates. The block's "
        "earlier loads, stores and puts to `pe` come before the signal.",
    ),
    declared(
        "copy_block(dst: ptr, src: ptr, nbytes: size)",
        "memcpy by the block",
        "The block copies `nbytes` bytes between addresses that it can load and store, any alignment (fastest when "
        "all three are multiples of 16). No ordering: put `syncthreads()`, and a release, before telling anybody.",
    ),
]

FUNCTIONS: dict[str, DeviceFunction] = {function.name: function for function in _FUNCTIONS}
"""Every function of the device language by name."""
