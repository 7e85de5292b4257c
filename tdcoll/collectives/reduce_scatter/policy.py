# SPDX-License-Identifier: Apache-2.0
"""Which reduce-scatter to launch, and how: the rules of :data:`POLICY`, see :mod:`tdcoll.collectives._host.plan`."""

from __future__ import annotations

from tdcoll.collectives._host.plan import (
    LAMPORT_WORD_BYTES,
    LL_WORD_BYTES,
    Facts,
    Plan,
    Policy,
    Rule,
    cut_chunks,
    cut_reduced_words,
    needs_puts,
    needs_reduced_words,
    needs_stores,
    reduced_words,
)
from tdcoll.tuning import Entry

__all__ = ["POLICY"]


def _cut_words(facts: Facts, entry: Entry) -> Plan:
    return cut_reduced_words(facts, entry, "ll", reduced_words(facts))


def _needs_symmetric(facts: Facts) -> str | None:
    return needs_stores(facts) if facts.symmetric else "needs symmetric=True; got a tensor of any memory on "


def _seed(facts: Facts) -> str:
    """Return the name of the algorithm.

    - In one node words where the context has room (not in the simulator, where they cost much more), else loads from
      symmetric memory, else stores.
    - Puts elsewhere.
    """
    if not facts.simulated and needs_reduced_words(facts) is None:
        return "ll"
    if _needs_symmetric(facts) is None:
        return "pull"
    return "direct" if needs_stores(facts) is None else "1d"


POLICY = Policy(
    "reduce_scatter",
    [
        Rule("ll", needs_reduced_words, _cut_words, (LAMPORT_WORD_BYTES, LL_WORD_BYTES), reduced_words),
        Rule("direct", needs_stores, lambda facts, entry: cut_chunks(facts, entry, "direct")),
        Rule("pull", _needs_symmetric, lambda facts, entry: cut_chunks(facts, entry, "pull")),
        Rule("1d", needs_puts, lambda facts, entry: cut_chunks(facts, entry, "1d")),
    ],
    _seed,
)
"""``"ll"``, ``"direct"``, ``"pull"`` and ``"1d"``."""
