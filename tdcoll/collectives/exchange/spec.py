# SPDX-License-Identifier: Apache-2.0
"""The algorithms inside a node of all-gather and all-to-all, as their specs have them."""

from __future__ import annotations

from tdcoll.calls import copies
from tdcoll.calls.algorithms import by_ll, by_loop, loop_words
from tdcoll.calls.launch_spec import LaunchSpec
from tdcoll.calls.plan import (
    Facts,
    cut_chunks,
    cut_copies,
    inbox_epoch,
    needs_stores,
    per_segment,
)
from tdcoll.calls.spec import Algorithm
from tdcoll.collectives.exchange import kernels_direct, kernels_ll, kernels_loop

_EARLY_BYTES = 2 << 20
"""Larger calls in place are slower with programmatic dependent launch (PDL). On 2 H200s one of 4 MB
per rank takes 18.0 us instead of 16.9, and one of 64 MB 202 us instead of 190."""


def allow_pdl(facts: Facts) -> bool:
    """Return whether launches may begin before the one ahead of them has ended."""
    return not (facts.in_place and facts.nbytes > _EARLY_BYTES)


def algorithms(one_segment: bool) -> tuple[Algorithm, ...]:
    """Return ``ll``, ``direct``, ``loop`` and ``ce``.

    Args:
        one_segment: A rank sends the same segment to all, as in an all-gather. Otherwise it has a
            segment for each rank.
    """

    def epoch(facts: Facts) -> int:
        """Return the bytes of a segment in each epoch: all of it if it lands in the buffer."""
        if facts.in_place:
            return facts.nbytes
        return facts.capacity if one_segment else inbox_epoch(facts)

    def source_stride(spec: LaunchSpec) -> int:
        return 0 if one_segment else spec.segment_stride

    return (
        by_ll(
            lambda facts: kernels_ll.exchange_ll,
            lambda spec: {"source_stride": source_stride(spec)},
        ),
        Algorithm(
            "direct",
            supports=needs_stores,
            # In place into larger chunks, because nothing is copied out.
            cut=lambda facts, entry: cut_chunks(facts, entry, "direct", large=facts.in_place),
            kernel=lambda facts: kernels_direct.exchange_direct,
            blocks=per_segment,
            values=lambda spec: {
                "source_stride": source_stride(spec),
                "COUNTED": spec.options.device_counted,
            },
            epoch=epoch,
            allow_pdl=allow_pdl,
        ),
        by_loop(
            lambda facts: kernels_loop.exchange_loop,
            lambda spec: {
                "source_stride": source_stride(spec),
                "ONE_SEGMENT": one_segment,
                "WORDS": loop_words(spec),
            },
            epoch,
            allow_pdl=allow_pdl,
        ),
        Algorithm(
            "ce",
            supports=needs_stores,
            cut=cut_copies,
            kernel=copies.kernel,
            blocks=lambda facts, plan: 1,
            epoch=epoch,
            copies=lambda spec: copies.exchange(spec, source_stride(spec)),
        ),
    )
