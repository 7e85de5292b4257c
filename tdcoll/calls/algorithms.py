# SPDX-License-Identifier: Apache-2.0
"""Algorithms that several collectives have: what they support, and how they cut segments.

``kernel`` is a function here as well, so that a kernel is looked up when a call is prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tdcoll.calls.launch_spec import LaunchSpec
from tdcoll.calls.plan import (
    Facts,
    Plan,
    cut_chunks,
    cut_loop,
    loop_blocks,
    needs_puts,
    needs_stores,
    per_segment,
)
from tdcoll.calls.spec import Algorithm
from tdcoll.calls.words import LL_WORD_BYTES, cut_words, needs_words

_Kernel = Callable[[Facts], Any]
_Values = Callable[[LaunchSpec], dict[str, Any]]
_Epoch = Callable[[Facts], int]


def by_ll(kernel: _Kernel, values: _Values | None = None) -> Algorithm:
    """Return ``ll``, which moves segments in LL words.

    Args:
        values: Arguments of the kernel beside ``BLOCK``, the words of a thread block.
    """
    return Algorithm(
        "ll",
        supports=needs_words,
        cut=partial(cut_words, algorithm="ll"),
        kernel=kernel,
        blocks=per_segment,
        values=partial(_ll_values, others=values),
        words=(LL_WORD_BYTES,),
    )


def _ll_values(spec: LaunchSpec, others: _Values | None) -> dict[str, Any]:
    values: dict[str, Any] = {"BLOCK": spec.plan.chunk // LL_WORD_BYTES}
    if others is not None:
        values |= others(spec)
    return values


def by_loop(kernel: _Kernel, values: _Values, epoch: _Epoch, **more: Any) -> Algorithm:
    """Return ``loop``, for which any number of thread blocks does.

    Args:
        more: Other fields of the algorithm.
    """
    return Algorithm(
        "loop",
        supports=needs_stores,
        cut=lambda facts, entry: cut_loop(facts, entry, facts.nbytes),
        kernel=kernel,
        blocks=loop_blocks,
        values=values,
        epoch=epoch,
        works_with_any_grid=True,
        **more,
    )


def loop_words(spec: LaunchSpec) -> int:
    """Return the words of 4 bytes that a thread block of ``loop`` moves at once: 64 bytes for each
    thread."""
    return 16 * 32 * spec.plan.num_warps


def by_puts(
    kernel: _Kernel, blocks: Callable[[Facts, Plan], int], values: _Values, epoch: _Epoch
) -> Algorithm:
    """Return ``1d``, which puts each rank's chunks to all others, if the heap has puts."""
    return Algorithm(
        "1d",
        supports=needs_puts,
        cut=partial(cut_chunks, algorithm="1d"),
        kernel=kernel,
        blocks=blocks,
        values=values,
        epoch=epoch,
    )
