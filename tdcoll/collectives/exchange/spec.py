# SPDX-License-Identifier: Apache-2.0
"""The algorithms inside a node of all-gather and all-to-all, as their specs have them."""

from __future__ import annotations

from typing import Any

from tdcoll.calls import copies
from tdcoll.calls.launches import Planned
from tdcoll.calls.plan import (
    LL_WORD_BYTES,
    Facts,
    cut_chunks,
    cut_copies,
    cut_loop,
    cut_words,
    inbox_epoch,
    loop_blocks,
    needs_stores,
    needs_words,
    per_segment,
)
from tdcoll.calls.spec import Algorithm
from tdcoll.collectives.exchange import kernels_direct, kernels_ll, kernels_loop

_EARLY_BYTES = 2 << 20
"""Larger calls in place are slower with programmatic dependent launch (PDL). On 2 H200s one of 4 MB per rank takes 18.0
us instead of 16.9, and one of 64 MB 202 us instead of 190."""


def early(facts: Facts) -> bool:
    """Return whether launches may begin before the one ahead of them has ended."""
    return not (facts.in_place and facts.nbytes > _EARLY_BYTES)


def algorithms(same: bool) -> tuple[Algorithm, ...]:
    """Return ``ll``, ``direct``, ``loop`` and ``ce``. ``same``: a rank has one segment for all, as in an all-gather."""

    def epoch(facts: Facts) -> int:
        """Return the bytes of a segment in each epoch: the inbox's, or all of it if it lands in the result."""
        if facts.in_place:
            return facts.nbytes
        return facts.capacity if same else inbox_epoch(facts)

    def given(call: Planned, **more: Any) -> dict[str, Any]:
        return {"source_stride": 0 if same else call.stride, **more}

    return (
        Algorithm(
            "ll",
            supports=needs_words,
            cut=lambda facts, entry: cut_words(facts, entry, "ll"),
            kernel=lambda facts: kernels_ll.exchange_ll,
            blocks=per_segment,
            values=lambda call: given(call, BLOCK=call.plan.chunk // LL_WORD_BYTES),
            words=(LL_WORD_BYTES,),
        ),
        Algorithm(
            "direct",
            supports=needs_stores,
            # In place into larger chunks, because nothing is copied out.
            cut=lambda facts, entry: cut_chunks(facts, entry, "direct", large=facts.in_place),
            kernel=lambda facts: kernels_direct.exchange_direct,
            blocks=per_segment,
            values=lambda call: given(call, COUNTED=bool(call.options)),
            epoch=epoch,
            early=early,
        ),
        Algorithm(
            "loop",
            supports=needs_stores,
            cut=lambda facts, entry: cut_loop(facts, entry, facts.nbytes),
            kernel=lambda facts: kernels_loop.exchange_loop,
            blocks=loop_blocks,
            values=lambda call: given(call, SAME=same, WORDS=16 * 32 * call.plan.num_warps),  # 64 bytes for each thread
            epoch=epoch,
            early=early,
            any_blocks=True,
        ),
        Algorithm(
            "ce",
            supports=needs_stores,
            cut=cut_copies,
            kernel=copies.kernel,
            blocks=lambda facts, plan: 1,
            epoch=epoch,
            copies=lambda call: copies.exchange(call, 0 if same else call.stride),
        ),
    )
