# SPDX-License-Identifier: Apache-2.0
"""Constants of the device language, with NVSHMEM's values, usable inside and outside kernels.

Each exists under NVSHMEM's full name, as Triton-distributed's ``libshmem_device`` spells it, and without the
prefix. Values: ``nvshmemi_cmp_type`` and ``nvshmemi_amo_t`` in NVSHMEM's device headers.
"""

import triton.language as tl

CMP_EQ = NVSHMEM_CMP_EQ = tl.constexpr(0)
CMP_NE = NVSHMEM_CMP_NE = tl.constexpr(1)
CMP_GT = NVSHMEM_CMP_GT = tl.constexpr(2)
CMP_LE = NVSHMEM_CMP_LE = tl.constexpr(3)
CMP_LT = NVSHMEM_CMP_LT = tl.constexpr(4)
CMP_GE = NVSHMEM_CMP_GE = tl.constexpr(5)

SIGNAL_SET = NVSHMEM_SIGNAL_SET = tl.constexpr(9)
SIGNAL_ADD = NVSHMEM_SIGNAL_ADD = tl.constexpr(10)

# What a rank that gives up tells its peers: this, plus the epoch. More than any epoch. See tdcoll.primitives.stores.
GAVE_UP = tl.constexpr(1 << 62)

# A *monitor* is what bounded waits share with the host: int64 words in device memory. See tdcoll.monitor.
MONITOR_ABORTED = tl.constexpr(0)  # 1 once a wait has expired: later waits return at once
MONITOR_TIMEOUT_NS = tl.constexpr(1)  # deadline of a wait, nanoseconds
MONITOR_RECORD = tl.constexpr(2)  # address of the record, in memory that the host can read
MONITOR_RANK = tl.constexpr(3)  # group rank, copied into the record
MONITOR_NOTICE_NS = tl.constexpr(4)  # waits that last longer leave notices
MONITOR_NOTICED = tl.constexpr(5)  # address of words that say when each place got its last notice, nanoseconds
MONITOR_PLACES = tl.constexpr(6)  # places for notices, minus 1: peer p has place p modulo their number
MONITOR_WORDS = tl.constexpr(7)

NOTICES = tl.constexpr(16)  # places for notices; a power of two

# The record of the first wait that expired: int64 words in pinned host memory.
RECORD_VALID = tl.constexpr(0)  # written last
RECORD_RANK = tl.constexpr(1)
RECORD_PEER = tl.constexpr(2)
RECORD_SIGNAL = tl.constexpr(3)
RECORD_EPOCH = tl.constexpr(4)
RECORD_EXPECTED = tl.constexpr(5)
RECORD_SEEN = tl.constexpr(6)
RECORD_NOTICES = tl.constexpr(8)  # the notices follow it: int64 words of waits that have lasted for a while
RECORD_WORDS = tl.constexpr(136)

NOTICE_INTERVAL_NS = tl.constexpr(100_000_000)  # a place gets no more than one notice in this time

# A notice. Peer and signal are the low halves of their words.
NOTICE_STAMP = tl.constexpr(0)  # when it was left, by the clock of the waits; written last
NOTICE_BEGAN = tl.constexpr(1)  # when the wait began, by the same clock
NOTICE_PEER = tl.constexpr(2)
NOTICE_SIGNAL = tl.constexpr(3)
NOTICE_EPOCH = tl.constexpr(4)
NOTICE_LAMPORT = tl.constexpr(5)  # 1 if the epoch is the number of a Lamport call
NOTICE_WORDS = tl.constexpr(8)

__all__ = [name for name in dir() if name.isupper()]
