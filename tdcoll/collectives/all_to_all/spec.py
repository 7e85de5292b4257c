# SPDX-License-Identifier: Apache-2.0
"""The spec of the all-to-all: :data:`SPEC`. Calls have no options."""

from __future__ import annotations

from functools import partial
from typing import Any

from tdcoll.calls import copies
from tdcoll.calls.launches import Planned, loop_constants, routes_beside_stores
from tdcoll.calls.plan import (
    LL_WORD_BYTES,
    cut_chunks,
    cut_copies,
    cut_loop,
    cut_words,
    half,
    inbox_epoch,
    loop_blocks,
    needs_puts,
    needs_stores,
    per_segment,
)
from tdcoll.calls.spec import WORLD, Algorithm, Collective
from tdcoll.collectives.all_to_all import kernels_puts
from tdcoll.collectives.all_to_all.policy import blocks_of_puts, default, needs_words_of_a_node
from tdcoll.collectives.exchange import kernels_direct, kernels_ll, kernels_loop

__all__ = ["SPEC"]


def _puts(call: Planned) -> dict[str, Any]:
    return {"routes": routes_beside_stores(call.ctx, "all_to_all"), "outbox": half(call.ctx.capacity)}


SPEC = Collective(
    name="all_to_all",
    segments=(WORLD, WORLD),
    algorithms=(
        Algorithm(
            "ll",
            supports=needs_words_of_a_node,
            cut=partial(cut_words, algorithm="ll"),
            kernel=lambda facts: kernels_ll.exchange_ll,
            blocks=per_segment,
            values=lambda call: {"BLOCK": call.plan.chunk // LL_WORD_BYTES},
            words=(LL_WORD_BYTES,),
        ),
        Algorithm(
            "direct",
            supports=needs_stores,
            cut=partial(cut_chunks, algorithm="direct"),
            kernel=lambda facts: kernels_direct.exchange_direct,
            blocks=per_segment,
            values=lambda call: {"COUNTED": False},
            epoch=inbox_epoch,
        ),
        Algorithm(
            "loop",
            supports=needs_stores,
            cut=lambda facts, entry: cut_loop(facts, entry, facts.nbytes),
            kernel=lambda facts: kernels_loop.exchange_loop,
            blocks=loop_blocks,
            values=partial(loop_constants, same=False),
            epoch=inbox_epoch,
            any_blocks=True,
        ),
        Algorithm(
            "ce",
            supports=needs_stores,
            cut=lambda facts, entry: cut_copies(facts, entry, facts.nbytes),
            kernel=copies.kernel,
            blocks=lambda facts, plan: 1,
            epoch=lambda facts: facts.nbytes if copies.lands_in_result(facts) else inbox_epoch(facts),
            copies=lambda call: copies.exchange(call, call.stride),
        ),
        Algorithm(
            "1d",
            supports=needs_puts,
            cut=partial(cut_chunks, algorithm="1d"),
            kernel=lambda facts: kernels_puts.all_to_all_puts,
            blocks=blocks_of_puts,
            values=_puts,
            epoch=inbox_epoch,
        ),
    ),
    default=default,
    torch="all_to_all_single",
    capacity=lambda segment, world: 2 * segment,  # half is to put from
    adjoint="all_to_all",
    handled_bytes=4 << 20,
)
