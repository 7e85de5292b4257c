# SPDX-License-Identifier: Apache-2.0
"""Words of other PEs, waits for words and barriers of a grid, compiled: the instructions, their order, no spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ptx_divergence import DIVERGENT
from ptx_order import NARROW, RULES

DRIVER = Path(__file__).with_name("compile_words.py")
LOCAL = {"count_by_threads", "rounds", "move_words", "part_of_flagged"}
"""Kernels without anything of NVSHMEM's."""

ALLOWED = {
    # The compiler has copied the wait between two ifs into both branches. Each thread passes one copy of its barrier,
    # which needn't be the same one for all, since it isn't `.aligned` (PTX ISA, barrier).
    "values": {DIVERGENT},
    "count_by_threads": {NARROW},  # words of this GPU
    "rounds": {NARROW},
    "any_of": {RULES["store", "put"]},  # by the same thread
}
"""What :mod:`ptx_order` says of kernels that are no protocols, and why that is right there."""


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(DRIVER)], capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["kernels"]


def test_what_is_compiled(compiled: list[dict[str, Any]]) -> None:
    assert {kernel["arch"] for kernel in compiled} == {90, 100}
    assert len(compiled) == 14
    for kernel in compiled:
        assert set(kernel["problems"]) <= ALLOWED.get(kernel["kernel"], set()), kernel
        assert kernel["needs"] == (kernel["kernel"] not in LOCAL), kernel
        if not kernel["needs"]:
            assert kernel["spilled_bytes"] == 0, kernel


@pytest.mark.parametrize(
    ("kernel", "instructions"),
    [
        ("count_by_threads", {"add by the thread": 1, "swap by the thread": 1}),
        ("wait_here_and_there", {"narrow wait": 1, "wide wait": 1, "signed": 1}),
        ("any_of", {"look": 1, "lowest": 4}),  # indices below 8, and 8 for none
        ("ask", {"look": 2}),
        ("rounds", {"arrive": 2, "wide wait": 2}),  # unrolled
        ("move_words", {"load": 4, "store": 4}),  # 1024 words by 256 threads
    ],
)
def test_instructions(compiled: list[dict[str, Any]], kernel: str, instructions: dict[str, int]) -> None:
    for one in compiled:
        if one["kernel"] == kernel:
            assert {what: one[what] for what in instructions} == instructions, one


def test_a_flagged_word_is_loaded_whole_where_only_part_of_it_is_used(compiled: list[dict[str, Any]]) -> None:
    """Else the flag could be newer than the data. ptxas divides a relaxed load of 128 bits into those that are used."""
    loads = {one["arch"]: one["widths"] for one in compiled if one["kernel"] == "part_of_flagged"}
    assert loads == {90: [".128"], 100: [".128"]}
