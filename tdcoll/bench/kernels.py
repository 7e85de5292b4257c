# SPDX-License-Identifier: Apache-2.0
"""Matching row numbers by comparing each with each, as published methods do: only something to compare with."""

import triton.language as tl

from tdcoll.language.jit import jit

__all__ = ["match_by_equality"]


@jit(do_not_specialize=["size", "count"])
def match_by_equality(
    local, size: tl.int64, ids, count: tl.int64, out, OWN: tl.constexpr, OTHERS: tl.constexpr
):  # fmt: skip
    """``out[i]`` = place of ``local[i]`` in the ``count`` ``ids``, or -1.

    A program compares ``OWN`` of the ``size`` local ids with all others, ``OTHERS`` at a time: O(size * count), where a
    search takes O(size * log count).
    """
    i = tl.program_id(0).to(tl.int64) * OWN + tl.arange(0, OWN)
    own = tl.load(local + i, mask=i < size, other=-1)
    found = tl.full((OWN,), -1, tl.int64)
    for start in tl.range(0, count, OTHERS):
        j = start + tl.arange(0, OTHERS)
        others = tl.load(ids + j, mask=j < count, other=-2)
        equal = (own[:, None] == others[None, :]).to(tl.int32)
        place = start + tl.argmax(equal, axis=1)
        found = tl.where(tl.max(equal, axis=1) > 0, place.to(tl.int64), found)
    tl.store(out + i, found, mask=i < size)
