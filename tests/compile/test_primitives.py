# SPDX-License-Identifier: Apache-2.0
"""What kernels share, compiled: no spills, no NVSHMEM inside a node, one compilation for all ranks, wide words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).with_name("compile_primitives.py")
WORLD = 4


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(DRIVER)], capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_kernels_inside_a_node_compile_without_spills_or_nvshmem(compiled: dict[str, Any]) -> None:
    assert len(compiled["kernels"]) == 1
    for kernel in compiled["kernels"]:
        assert (kernel["problems"], kernel["spilled_bytes"], kernel["needs"]) == ([], 0, False), kernel


def test_one_compilation_serves_all_ranks(compiled: dict[str, Any]) -> None:
    """Rank 0 and rank 1 among them, whose numbers Triton specialises on by itself."""
    for name, hashes in compiled["ranks"].items():
        assert (len(hashes), len(set(hashes))) == (3, 1), name
        assert compiled["variants"][name] == 1, name


def test_words_move_in_one_access(compiled: dict[str, Any]) -> None:
    """One store for each word to each peer, one for each word that is cleared, one load for each word in each round."""
    kernel = next(k for k in compiled["kernels"] if k["kernel"] == "all_reduce_of_words")
    assert kernel["word_stores"] == (WORLD - 1) + WORLD
    assert kernel["word_loads"] == WORLD
