# SPDX-License-Identifier: Apache-2.0
"""Which reduce-scatter to launch, and how: the rules of :data:`POLICY`, see :mod:`tdcoll.collectives._host.plan`."""

from __future__ import annotations

from tdcoll.collectives._host.plan import (
    LL_WORD_BYTES,
    Facts,
    Policy,
    Rule,
    cut_chunks,
    cut_words,
    needs_stores,
    needs_words,
)

__all__ = ["POLICY"]


def _needs_words(facts: Facts) -> str | None:
    if facts.topology.n_nodes > 1 or facts.itemsize > 4:
        return f"needs one node and elements of 2 or 4 bytes; got elements of {facts.itemsize} bytes on "
    return needs_words(facts)


def _seed(facts: Facts) -> str:
    """In one node LL for few bytes (not in the simulator, where it costs much more), else stores; puts elsewhere."""
    if not facts.simulated and _needs_words(facts) is None:
        return "ll"
    return "direct" if needs_stores(facts) is None else "1d"


POLICY = Policy(
    "reduce_scatter",
    [
        Rule("ll", _needs_words, lambda facts, entry: cut_words(facts, entry, "ll"), words=(LL_WORD_BYTES,)),
        Rule("direct", needs_stores, lambda facts, entry: cut_chunks(facts, entry, "direct")),
        Rule("1d", lambda facts: None, lambda facts, entry: cut_chunks(facts, entry, "1d")),
    ],
    _seed,
)
"""``"ll"``, ``"direct"`` and ``"1d"``."""
