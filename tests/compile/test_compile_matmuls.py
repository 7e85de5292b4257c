# SPDX-License-Identifier: Apache-2.0
"""The matmuls that communicate compile to what their protocols assume, and keep the tensor cores
busy."""

from __future__ import annotations

from typing import Any

import pytest
from test_compile import DRIVER_S, compiled  # noqa: F401  a fixture

pytestmark = pytest.mark.timeout(DRIVER_S + 40)

WAITS = {
    "all_gather_matmul": 2,  # of tiles and of keepers
    "matmul_reduce_scatter": 1,
}


def of(compiled: dict[str, Any], name: str) -> list[dict[str, Any]]:  # noqa: F811
    found = [one for one in compiled["matmuls"] if one["kernel"] == name]
    assert found
    return found


def test_order_is_that_of_the_protocols(compiled) -> None:  # noqa: F811
    """Barriers before releases, the proxy fence before loads through descriptors, completed stores
    before signals."""
    assert {one["kernel"] for one in compiled["matmuls"]} == {
        "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce",
    }  # fmt: skip
    assert [one for one in compiled["matmuls"] if one["problems"]] == []


def test_tensor_cores_multiply(compiled) -> None:  # noqa: F811
    """Those of Hopper and Blackwell, but for tiles of 16 rows and for fp32 that is not rounded."""
    for one in compiled["matmuls"]:
        rows = int(one["cut"].partition("rows=")[2].partition(",")[0])
        if one["DTYPE"] == "fp32" and one["PRECISION"] == "ieee":
            assert one["tensor_core"] == one["older_tensor_core"] == 0, one
        elif rows < 64:
            assert one["older_tensor_core"] > 0, one
        else:
            assert (one["tensor_core"] > 0, one["older_tensor_core"]) == (True, 0), one


def test_registers_and_memory_suffice(compiled) -> None:  # noqa: F811
    """Accumulators take half of the registers of a thread. Sums spill a few once for each own
    tile."""
    for one in compiled["matmuls"]:
        limit = 64 if one["kernel"] == "matmul_reduce_scatter" or one["arch"] != 90 else 0
        assert one["spilled_bytes"] <= limit, one
        assert one["shared"] <= 227 * 1024, one


# Blackwell's tensor cores are asynchronous, and have a step of their own ahead of the loop
TILE = {
    90: ["load", "for", "multiply", "load"],
    100: ["load", "multiply", "load", "for", "multiply", "load"],
}


def test_loads_of_a_tile_are_pipelined_and_stay_behind_its_wait(compiled) -> None:  # noqa: F811
    """Ahead of the loop over the depth, and in it behind the step before."""
    for one in compiled["matmuls"]:
        if one["PRECISION"] == "ieee" and one["DTYPE"] == "fp32":
            continue  # without tensor cores, nothing is pipelined
        order = one["order"]
        begin = order.index("load")
        before = "wait" if one["kernel"] == "all_gather_matmul" else "for"
        assert order[begin - 1] == before, one
        wanted = TILE[one["arch"]]
        assert order[begin : begin + len(wanted)] == wanted, one


def test_a_signal_is_deferred_until_its_store_is_complete(compiled) -> None:  # noqa: F811
    """Behind the next tile's loop: the store of a tile is begun last, and what completes it stands
    before that."""
    for one in of(compiled, "matmul_reduce_scatter"):
        behind = one["order"][1 + len(TILE[one["arch"]]) :]
        assert behind[:3] == ["completed", "store", "wait"], one
        assert behind[-1] == "completed", one
        assert one["completions"] == one["releases"] == 2, one
        assert one["descriptor_stores"] == one["world"] - 1, one


def test_each_wait_is_compiled_once(compiled) -> None:  # noqa: F811
    for name, waits in WAITS.items():
        for one in of(compiled, name):
            symmetric = name == "all_gather_matmul" and one["releases"] == 2
            assert one["waits"] == waits + symmetric + (one.get("COPIED") == "True"), one
    for one in of(compiled, "matmul_all_reduce"):
        words = 64 * 64 // 8 // (128 * 2)  # of a thread, for the largest block
        assert one["waits"] <= 2 * max(words, 1) * (1 + (one["TWO_SHOT"] == "True")), one


def test_results_are_stored_by_16_bytes_where_they_are_aligned(compiled) -> None:  # noqa: F811
    for one in compiled["matmuls"]:
        if one["kernel"] != "matmul_all_reduce":
            aligned = one["ALIGNED"] == "True"
            assert (one["narrow_stores"] == 0) == aligned, one
            assert one["wide_stores"] >= 8, one


def test_all_ranks_and_shapes_share_a_kernel(compiled) -> None:  # noqa: F811
    assert set(compiled["matmul_forms"].values()) == {1}
