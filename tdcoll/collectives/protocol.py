# SPDX-License-Identifier: Apache-2.0
"""Device-side pieces that every collective on a context uses."""

import triton.language as tl

from tdcoll.language.jit import jit

__all__ = ["EPOCH_SHIFT", "begin_epoch", "chunk_bytes"]

EPOCH_SHIFT = tl.constexpr(20)
"""The control word holds the epoch above this bit and the number of programs that have begun below it."""


@jit
def begin_epoch(control):
    """The epoch of this call, counted from 1. Every program of the launch calls it exactly once.

    ``control`` points to the context's control word. The last program to begin resets the count and raises the
    epoch: every program has its answer by then, and the next launch on the stream starts after this one ends.
    """
    programs = (tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)).to(tl.int64)
    one = tl.cast(1, tl.int64)
    word = tl.atomic_add(control, one, sem="relaxed", scope="gpu")
    if (word & ((one << EPOCH_SHIFT) - 1)) == programs - 1:
        tl.atomic_add(control, (one << EPOCH_SHIFT) - programs, sem="relaxed", scope="gpu")
    return (word >> EPOCH_SHIFT) + 1


@jit
def chunk_bytes(nbytes, chunk, channel):
    """Bytes of chunk ``channel`` when ``nbytes`` are cut into pieces of ``chunk``: 0 past the end."""
    left = tl.maximum(tl.cast(nbytes, tl.int64) - tl.cast(channel, tl.int64) * chunk, 0)
    return tl.minimum(left, tl.cast(chunk, tl.int64))
