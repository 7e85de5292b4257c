# SPDX-License-Identifier: Apache-2.0
"""Kernels of words (``tests/language/kernels_of_words.py``) compile to what the language says."""

from __future__ import annotations

import ptx_divergence
import ptx_order
import pytest
from test_compile import DRIVER_S, compiled  # noqa: F401  a fixture

pytestmark = pytest.mark.timeout(DRIVER_S + 40)


# ---------------------------------------------------------------------- words, by tests/language/kernels_of_words.py

LOCAL_WORDS = {"count_by_threads", "rounds", "move_words", "part_of_flagged"}
"""Kernels without anything of NVSHMEM's."""

ALLOWED = {
    # The compiler has copied the wait between two ifs into both branches. Each thread passes one
    # copy of its barrier, which needn't be the same one for all, since it isn't `.aligned` (PTX
    # ISA, barrier).
    "values": {ptx_divergence.DIVERGENT},
    "count_by_threads": {ptx_order.NARROW},  # words of this GPU
    "rounds": {ptx_order.NARROW},
}
"""What :mod:`ptx_order` says of kernels that are no protocols, and why that is right there."""


def test_which_kernels_of_words_are_compiled(compiled) -> None:  # noqa: F811
    words = compiled["words"]
    assert len(words) == (7 if compiled["arch"] == 90 else len(LOCAL_WORDS))
    for kernel in words:
        assert set(kernel["problems"]) <= ALLOWED.get(kernel["kernel"], set()), kernel
        assert kernel["needs"] == (kernel["kernel"] not in LOCAL_WORDS), kernel
        if not kernel["needs"]:
            assert kernel["spilled_bytes"] == 0, kernel


@pytest.mark.parametrize(
    ("kernel", "instructions"),
    [
        ("count_by_threads", {"add by the thread": 1, "swap by the thread": 1}),
        ("wait_here_and_there", {"narrow wait": 1, "wide wait": 1, "signed": 1}),
        ("ask", {"look": 2}),
        ("rounds", {"arrive": 2, "wide wait": 2}),  # unrolled
        ("move_words", {"load": 4, "store": 4}),  # 1024 words by 256 threads
    ],
)
def test_instructions(compiled, kernel: str, instructions: dict[str, int]) -> None:  # noqa: F811
    found = [one for one in compiled["words"] if one["kernel"] == kernel]
    assert found or compiled["arch"] != 90  # others have fewer of these kernels
    for one in found:
        assert {what: one[what] for what in instructions} == instructions, one


def test_a_flagged_word_is_loaded_whole_where_only_part_of_it_is_used(compiled) -> None:  # noqa: F811
    """Else the flag could be newer than the data. ptxas divides a relaxed load of 128 bits into
    those that are used."""
    assert [one["widths"] for one in compiled["words"] if one["kernel"] == "part_of_flagged"] == [
        [".128"]
    ]
