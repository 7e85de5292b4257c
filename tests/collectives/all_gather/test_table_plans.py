# SPDX-License-Identifier: Apache-2.0
"""Plans that a tuning table makes of calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdcoll.collectives._host.plan import CHUNK_ALIGNMENT, Plan, is_word_chunk
from tdcoll.limits import CHANNELS
from tdcoll.tuning import Entry

from .cases import EXAMPLE, choose, nodes_of, section


@pytest.mark.parametrize(
    ("nbytes", "facts", "plan"),
    [
        (64, {}, Plan("ll", 1, 3072, 8)),
        (
            64,
            {"sections": (section(Entry(None, "ll", num_warps=32)),)},
            Plan("ll", 1, 1536, 4),
        ),  # as many as have words
        (
            1 << 20,
            {"sections": (section(Entry(None, "ll", channels=1)),), "ll_bytes": 1 << 20},
            Plan("ll", 86, 12288, 8),
        ),
        (16 << 10, {}, Plan("ll", 6, 3072, 8)),
        ((16 << 10) + 1, {}, Plan("1d", 15, 1152, 8)),
        (4 << 20, {}, Plan("1d", 16, 256 << 10, 16)),
        ((4 << 20) + 2, {}, choose((4 << 20) + 2, nodes_of(4))),  # by stores, which these ranks have not
        ((4 << 20) + 2, {"stores": True}, Plan("direct", 65, 64640, 8)),
        (64, {"in_place": True, "ll_bytes": -1}, Plan("1d", 1, 128, 4)),
        (8 << 20, {"in_place": True, "ll_bytes": -1}, choose(8 << 20, nodes_of(4), in_place=True)),  # beyond the last
        (64, {"ll_bytes": -1}, Plan("1d", 1, 128, 8)),  # ranks that cannot store to each other
        (64, {"algorithm": "1d"}, Plan("1d", 1, 128, 8)),  # a wish goes before the table
        (1 << 20, {"algorithm": "1d"}, Plan("1d", 16, 64 << 10, 8)),  # whose chunks it gets
    ],
)
def test_what_a_table_makes_of_a_call(nbytes: int, facts: dict[str, Any], plan: Plan) -> None:
    facts = {"ll_bytes": 16 << 10, "sections": EXAMPLE.sections[:2], **facts}
    assert choose(nbytes, nodes_of(4), **facts) == plan


def test_a_table_of_another_shape_says_nothing() -> None:
    for sizes in ((8,), (4, 4), (4, 2), (2, 2)):
        assert choose(1 << 20, nodes_of(*sizes), sections=EXAMPLE.sections) == choose(1 << 20, nodes_of(*sizes))


@given(
    st.integers(0, 1 << 26),
    st.sampled_from(("ll", "ring", "1d", "2d")),
    st.one_of(st.none(), st.integers(1, CHANNELS)),
    st.one_of(st.none(), st.integers(7, 20)),
)
def test_chunks_of_an_entry_cover_the_bytes(nbytes: int, algorithm: str, channels: int | None, chunk: int | None):
    if chunk is not None:
        chunk = 3 << min(chunk, 12) if algorithm == "ll" else 1 << chunk
    how = {"chunk": chunk} if chunk is not None and channels is None else {"channels": channels}
    nbytes = nbytes % ((16 << 10) + 1) if algorithm == "ll" else nbytes
    plan = choose(
        nbytes, nodes_of(4), sections=(section(Entry(None, algorithm, **how)),), ll_bytes=16 << 10, stores=True
    )
    assert plan.algorithm == algorithm
    assert plan.channels * plan.chunk >= nbytes
    assert (plan.channels - 1) * plan.chunk < max(nbytes, 1)
    if algorithm == "ll":
        assert is_word_chunk(plan.chunk)
        assert plan.chunk >= 12 * 32 * plan.num_warps or plan.num_warps == 1
    else:
        assert plan.channels <= CHANNELS
        assert plan.chunk % CHUNK_ALIGNMENT == 0
    # And it is a plan that somebody may ask for.
    assert choose(nbytes, nodes_of(4), plan, ll_bytes=16 << 10, stores=True) == plan
