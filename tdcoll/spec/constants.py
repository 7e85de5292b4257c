# SPDX-License-Identifier: Apache-2.0
"""Constants of the device language, with NVSHMEM's values, usable inside and outside kernels.

Each exists under NVSHMEM's full name, as Triton-distributed's ``libshmem_device`` spells it, and
without the prefix. Values: ``nvshmemi_cmp_type`` and ``nvshmemi_amo_t`` in NVSHMEM's device
headers.
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

# A rank that gives up tells its peers this plus the epoch, which is more than any epoch. See
# tdcoll.primitives.stores.
EXPIRED = tl.constexpr(1 << 62)

# The peer of a wait in a barrier of the grid: the other thread blocks of the launch, in its record
# and notices.
OWN_GRID = tl.constexpr(-2)

# A *monitor* is what bounded waits share with the host: int64 words in device memory. See
# tdcoll.calls.monitor.
MONITOR_ABORTED = tl.constexpr(0)  # 1 once a wait has expired: later waits return at once
MONITOR_TIMEOUT_NS = tl.constexpr(1)  # deadline of a wait, nanoseconds
MONITOR_RECORD = tl.constexpr(2)  # address of the record, in memory that the host can read
MONITOR_RANK = tl.constexpr(3)  # group rank, copied into the record
MONITOR_WORDS = tl.constexpr(4)

# The record of the first wait that expired: int64 words in pinned host memory.
RECORD_VALID = tl.constexpr(0)  # written last
RECORD_RANK = tl.constexpr(1)
RECORD_PEER = tl.constexpr(2)
RECORD_SIGNAL = tl.constexpr(3)
RECORD_EPOCH = tl.constexpr(4)
RECORD_EXPECTED = tl.constexpr(5)
RECORD_SEEN = tl.constexpr(6)
RECORD_NOTICES = tl.constexpr(8)  # the notices follow the record
RECORD_WORDS = tl.constexpr(72)

# A notice of a wait that goes on: two int64 words, of which the second is written first. The low
# half of the first says how long the wait has lasted, in units of 2 ** NOTICE_SHIFT ns, and the
# high half names the peer. The second has the epoch. There are NOTICES places for waits that name
# an epoch, and as many behind them for those that name a Lamport call. Thread blocks, or threads,
# whose numbers are equal modulo NOTICES share a place.
NOTICES = tl.constexpr(16)
NOTICE_SHIFT = tl.constexpr(21)
# units: a wait leaves notices in one unit of so many, and not in the first
NOTICE_EVERY = tl.constexpr(64)

__all__ = [name for name in dir() if name.isupper()]
