# SPDX-License-Identifier: Apache-2.0
"""The kernels compile for Hopper and Blackwell on a machine that has neither, and say the right
things in PTX."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiers import slow_tier

from tdcoll.spec.functions import FUNCTIONS

HERE = Path(__file__).parent
DRIVER_S = 1700
"""It takes two minutes of one core, with registers five, and many times as long on a machine that
is busy."""

# the first test runs the driver, the others wait for it
pytestmark = pytest.mark.timeout(DRIVER_S + 40)


def compiled_for(
    arch: int, tmp_path_factory: pytest.TempPathFactory, registers: bool = False
) -> dict[str, Any]:
    """What the drivers print; they run once for an architecture, whichever of pytest's workers come
    here. ``registers``: also of kernels that link NVSHMEM, whose assembly takes minutes."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    file = (
        tmp_path_factory.getbasetemp().parent
        / f"compiled-{run}-{arch}{'-registers' * registers}.json"
    )
    with file.open("a+") as shared:
        fcntl.flock(shared, fcntl.LOCK_EX)
        shared.seek(0)
        if text := shared.read():
            return json.loads(text)
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        more = ["--registers"] if registers else []
        drivers = [
            ["compile_kernels.py", part, str(arch), *more] for part in ("collectives", "others")
        ]
        drivers.append(["pipelined_loops.py", *["--few"] * (arch == 90)])
        drivers.append(["compiling_matmuls.py", str(arch)])
        if registers:
            drivers.append(["compiling_epilogues.py", str(arch), *more])
        jobs = [  # at once: pytest's other worker most likely waits for them, too
            subprocess.Popen(
                [sys.executable, str(HERE / script), *part],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
            )
            for script, *part in drivers
        ]  # fmt: skip
        made: dict[str, Any] = {"arch": arch, "registers": registers, "order": []}
        try:
            for job in jobs:
                text, errors = job.communicate(timeout=DRIVER_S)
                assert job.returncode == 0, errors or text
                part = json.loads(text)
                made |= part | {"order": made["order"] + part.get("order", [])}
        finally:
            for job in jobs:
                job.kill()
                job.wait()
        shared.write(json.dumps(made))
        return made


@pytest.fixture(
    scope="module",
    params=[(90, False), slow_tier((90, True)), slow_tier((100, True))],
    ids=lambda given: f"sm_{given[0]}{'-registers' * given[1]}",
)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What comes out for one architecture."""
    arch, registers = request.param
    return compiled_for(arch, tmp_path_factory, registers)


@pytest.fixture(
    scope="module",
    params=[slow_tier((90, True)), slow_tier((100, True))],
    ids=lambda given: f"sm_{given[0]}-registers",
)
def assembled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What comes out for one architecture, with kernels that link NVSHMEM assembled, and with
    epilogues."""
    return compiled_for(request.param[0], tmp_path_factory, registers=True)


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return compiled_for(90, tmp_path_factory)


COLLECTIVES = (
    "all_gather",
    "ll",
    "direct",
    "exchange",
    "all_to_all",
    "reduce_scatter",
    "all_reduce",
    "fused",
)
COLLECTIVES += ("sparse", "copies", "broadcast")
PUTS = {
    *("all_gather_1d", "all_gather_2d", "all_to_all_puts", "reduce_scatter_puts"),
    *(
        "all_reduce_puts",
        "broadcast_puts",
        "all_reduce_nodes",
        "reduce_nodes",
        "reduce_nodes_of_single",
        "forward",
        "meet_nodes",
    ),
}
"""Kernels that put. All others need no NVSHMEM, those of one node."""

STORES = {
    *(
        "exchange_ll",
        "exchange_direct",
        "all_gather_ring",
        "norm_rows_one_shot",
        "norm_rows_two_shot",
    ),
    *("reduce_scatter_direct", "reduce_scatter_words", "reduce"),
    *("all_reduce_one_shot", "all_reduce_two_shot", "all_reduce_direct"),
    *(
        "broadcast_ll",
        "broadcast_direct",
        "broadcast_loop",
        "exchange_loop",
        "reduce_scatter_loop",
        "all_reduce_loop",
        "enter",
        "wait_arrivals",
        "check_peers_alive",
        "sum_copies",
    ),
}
"""Kernels that store to peers' memory, and wait."""

LOCAL = {"norm_rows", "pack", "prepare", "join", "merge", "pad"}


ONLY_FOR_90 = {"forward", "meet_nodes", "reduce_nodes_of_single", "pad"}
"""Kernels that are compiled for sm_90 only."""


def kernels_of(compiled: Any, *groups: str) -> list[dict[str, Any]]:
    return [kernel for group in groups for kernel in compiled[group]]


def test_which_kernels_need_nvshmem_and_wait(compiled) -> None:
    kernels, every = kernels_of(compiled, *COLLECTIVES), PUTS | STORES | LOCAL
    assert {k["kernel"] for k in kernels} == (
        every if compiled["arch"] == 90 else every - ONLY_FOR_90
    )
    for kernel in kernels:
        name, links = kernel["kernel"], kernel.get("links", bool(kernel.get("calls")))
        assert kernel["needs"] == links == (name in PUTS), kernel
        assert "nvshmem_signal_wait_until" not in kernel.get("calls", ()), "an unbounded wait"
        assert (kernel.get("globaltimer", 0) > 0) == (name not in LOCAL), kernel


def test_casts_move_16_bytes_at_once(assembled) -> None:
    """Where the addresses allow it. They communicate with no rank."""
    assert len(assembled["casts"]) >= 4
    for one in assembled["casts"]:
        assert one["wide_loads"] > 0, one
        assert one["wide_stores"] > 0, one
        assert one["globaltimer"] == one["release_sys"] == 0, one
        assert one.get("spilled_bytes", 0) == 0, one


def test_plain_numbers_of_an_epilogue_share_a_kernel(assembled) -> None:
    """By themselves a 1, what 16 divides, and large numbers have one of their own."""
    assert assembled["number_forms"] == {"as they are": 4, "plain": 1}


def test_epilogues(assembled) -> None:
    """Every reduction compiles with an epilogue. It has the waits and signals that it has without
    one, because the compiler repeats waits whose results it needs twice, and the epilogue is in its
    code, once for each element."""
    pairs = assembled["epilogues"]
    names = {with_epilogue["kernel"] for with_epilogue, _ in pairs}
    reductions = {k["kernel"] for k in kernels_of(assembled, "reduce_scatter", "all_reduce")}
    assert names == {*reductions, "sum_copies"}
    for with_epilogue, without in pairs:
        for counted in ("globaltimer", "acquire_sys", "release_sys", "sent", "needs", "links"):
            assert with_epilogue[counted] == without[counted], (with_epilogue, counted)
        assert with_epilogue["products"] > without["products"], with_epilogue
        assert with_epilogue.get("registers", 0) <= 255


SPILLED_AROUND_NVSHMEM = {90: 512, 100: 800}
"""Bytes that a kernel which puts may spill, by architecture. From 3.6 on, NVSHMEM's functions hold
its transports, and need more registers than the kernels: addresses are spilled around their calls,
once per put or chunk, and loaded again before each transport."""

LOADED_BESIDE_ROWS = 4
"""How many of these loads may stand in code that moves or sums rows. It stores none."""


def spills_of(kernel: dict[str, Any]) -> int:
    """How many bytes a kernel may spill: around a call of NVSHMEM, once per program, or for a row
    where noted."""
    name, warps = kernel["kernel"], kernel.get("warps", 8)
    if kernel["needs"]:
        return SPILLED_AROUND_NVSHMEM[kernel["arch"]]
    if kernel.get("search"):
        return 64
    if name == "exchange_loop":
        return 32  # addresses, once per chunk
    if name in ("reduce", "reduce_scatter_words"):
        return 32  # once per program
    # With 8 ranks, threads of 16 warps that have 2 words each need a few registers more than there
    # are.
    most = {("norm_rows_one_shot", 16): 16, ("norm_rows_two_shot", 16): 104}
    return most.get((name, warps), 0) if kernel.get("world") == 8 else 0


def test_registers_and_spills(compiled) -> None:
    """Two thread blocks of 8 warps fit on a multiprocessor, which the limits of contexts that share
    a GPU rely on: 64 K registers for 2 times 256 threads. Only fused calls have thread blocks of 16
    warps, one to a multiprocessor."""
    kernels = kernels_of(compiled, *COLLECTIVES, "signals")
    assert {k["warps"] for k in compiled["fused"]} >= {4, 8, 16}
    assembled = [kernel for kernel in kernels if "registers" in kernel]
    assert len(assembled) > 50
    assert {k["kernel"] for k in kernels if k not in assembled} == (
        set() if compiled["registers"] else {*PUTS, "ping_pong"}
    )
    for kernel in assembled:
        assert kernel["registers"] <= 128, kernel
        if kernel not in compiled["all_reduce"] or kernel["announced"]:
            assert kernel["spilled_bytes"] <= spills_of(kernel), kernel
        # which costs no time on 2 H200s
        if (kernel["kernel"], kernel.get("world")) == ("all_reduce_loop", 2):
            assert kernel["spilled_bytes"] <= 256, kernel
        elif kernel["kernel"] in PUTS:
            assert kernel["spilled_bytes"] <= SPILLED_AROUND_NVSHMEM[kernel["arch"]], kernel
            assert len(kernel.get("hot_spills", [])) <= LOADED_BESIDE_ROWS, kernel
            assert not any("STL" in line for line in kernel.get("hot_spills", [])), kernel
        elif kernel in compiled["all_reduce"]:
            assert kernel["hot_spills"] == [], kernel


def test_kernels_are_compiled_once_for_all_ranks(hopper) -> None:
    forms = hopper["forms"] | hopper["fused_forms"]
    assert {name for name in forms if "reduce" in name} == {
        k["kernel"] for k in kernels_of(hopper, *COLLECTIVES[5:7])
    }
    assert len(forms) == 13
    assert set(forms.values()) == {1}


def test_gathers_say_the_right_things(compiled) -> None:
    for kernel in kernels_of(compiled, "all_gather"):
        inside = "nvshmemx_putmem_signal_block" in kernel["calls"]  # puts, where 2D stores
        assert inside == (kernel["kernel"] == "all_gather_1d"), kernel
        assert kernel["acquire_sys"] >= kernel["globaltimer"], kernel
    for kernel in kernels_of(compiled, "all_gather", "all_to_all"):
        assert "nvshmemx_putmem_signal_nbi_block" in kernel["calls"], kernel
    for kernel in compiled["direct"]:
        assert min(kernel["release_sys"], kernel["wide_stores"]) >= 1, kernel


def test_index_matching_says_the_right_things(compiled) -> None:
    built = [k for k in compiled["sparse"] if k["kernel"] in ("prepare", "merge")]
    for kernel in built:
        assert (kernel["or64"] > 0) == (not kernel["search"]), kernel
        assert kernel["search"] or kernel["popcounts"] > 0, kernel
        assert {"num_rows", "signature"} <= set(kernel["of_64_bits"]), kernel


def test_sparse_all_reduce_signals_by_stores_in_one_node_and_moves_wide_rows(compiled) -> None:
    kernels = compiled["sparse"]
    signal = {k["kernel"] for k in kernels if k["release_sys"] and k["kernel"] not in PUTS}
    assert signal == {"reduce"}
    aligned = [k for k in kernels if k["aligned"] and k["kernel"] in ("reduce", "prepare")]
    # A thread block of "prepare" takes one row at a time: a short one has one element for each
    # thread.
    aligned = [k for k in aligned if k["kernel"] == "reduce" or k["wide"] >= 512]
    assert {k["kernel"] for k in aligned} == {"reduce", "prepare"}
    assert len(aligned) >= 5
    for kernel in aligned:
        assert min(kernel["wide_loads"], kernel["wide_stores"]) > 0, kernel


def test_reductions_fuse_nothing_and_move_16_bytes_at_a_time(compiled) -> None:
    """A product that is fused with the addition of 0 which was to make +0.0 of -0.0 stays -0.0.
    That of fp8 is with the power of two by which numbers are decoded: exact."""
    kernels = kernels_of(compiled, "reduce_scatter", "all_reduce")
    assert [k for k in kernels if k["fused"] and k["dtype"] != "fp8e4nv"] == []
    direct = [
        k for k in kernels if k["kernel"] == "reduce_scatter_direct" and k["dtype"] != "fp8e4nv"
    ]
    assert direct
    # A load for each of 8 ranks and a store, besides the 4 of each that copy_block has.
    assert {(k["wide_loads"], k["wide_stores"]) for k in direct} == {(12, 5)}


def test_a_maximum_propagates_nan(compiled) -> None:
    """Which the simulator's does in any case."""
    maxima = [maximum for k in compiled["reduce_scatter"] for maximum in k["maxima"]]
    assert maxima or compiled["arch"] != 90
    assert [maximum for maximum in maxima if ".NaN." not in maximum] == []
    merges = [k for k in compiled["sparse"] if k["kernel"] == "merge"]
    assert merges
    assert all(merge["nan_max"] > 0 for merge in merges)


def test_words_are_moved_by_128_bits_and_waited_for_once(compiled) -> None:
    """One load of an aligned source, or one for each part of it; one wait for the words of all
    ranks that announce themselves, or one for each rank whose words have flags. The compiler
    repeats none in another layout."""
    words = [
        k
        for k in compiled["all_reduce"]
        if k["kernel"] in ("all_reduce_one_shot", "all_reduce_two_shot")
    ]
    assert {(k["kernel"], k["announced"]) for k in words} == {
        (f"all_reduce_{shots}_shot", announced)
        for shots in ("one", "two")
        for announced in {compiled["arch"] != 90, True}
    }
    for kernel in words:
        world, two = kernel["world"], kernel["kernel"] == "all_reduce_two_shot"
        waits = (
            (2 if two else 1)
            * (1 if kernel["announced"] else world)
            * (2 if kernel["looped"] else 1)
        )
        assert kernel["globaltimer"] == waits, kernel
        if kernel["announced"]:
            assert kernel["loads"] == (world if two else 1) * (2 if kernel["looped"] else 1), kernel
            assert kernel["sent"] >= (2 * (world - 1) + world if two else world), kernel
    for kernel in (k for k in compiled["reduce_scatter"] if k["kernel"] == "reduce_scatter_words"):
        assert kernel["globaltimer"] == (1 if kernel["announced"] else 8), kernel


def test_calls_by_copy_engines_tell_who_has_given_up(compiled) -> None:
    """Releases: that a rank has entered, that it has given up (to itself as well), that its sum is
    there, and the record of each wait."""
    found = {(k["kernel"], k["globaltimer"], k["release_sys"]) for k in compiled["copies"]}
    waits = {
        ("enter", 1, 7 + 7 + 1 + 1),
        ("check_peers_alive", 1, 1),
        ("wait_arrivals", 1, 1),
        ("sum_copies", 1, 1),
    }
    waits |= {("wait_arrivals", 2, 7 + 1 + 2), ("sum_copies", 2, 7 + 2)}  # of pulls
    assert found == waits
    for kernel in compiled["copies"]:
        assert (kernel["wide_loads"] >= 8) == (kernel["kernel"] == "sum_copies"), kernel


def test_fused_kernels_wait_once_for_each_word_of_a_thread_and_contract_nothing_but_squares(
    compiled,
) -> None:
    """Words of all ranks at once, in two steps those of a row's owner, and measures; the compiler
    repeats no wait. Where it may choose what to contract, kernels of different shapes would have
    different bits."""
    kernels = compiled["fused"]
    assert {k["hidden"] for k in kernels} >= {4096, 8192}
    assert {k["pieces"] > 1 for k in kernels if k["kernel"] != "norm_rows"} == {False, True}
    for kernel in kernels:
        words, several = kernel["words"], kernel["pieces"] > 1
        waits = {
            "norm_rows": 0,
            "norm_rows_one_shot": words + several,
            "norm_rows_two_shot": 2 * words + 2,
        }
        assert kernel["globaltimer"] == waits[kernel["kernel"]], kernel
        if kernel["arch"] == 90:  # Blackwell squares two at a time
            assert kernel["fused"] == 3 * 2 * words, kernel


def test_kernels_of_the_signal_benchmark(compiled) -> None:
    assert len(compiled["signals"]) == 2
    for kernel in compiled["signals"]:
        assert kernel["links"] != kernel["direct"], kernel
        assert min(kernel["release_sys"], kernel["globaltimer"]) >= 1, kernel


def test_every_device_function_compiles(hopper) -> None:
    kernels = {k["kernel"] for k in hopper["language"]}
    assert {
        "put",
        "get",
        "put_signal",
        "signals_to_all",
        "store_through_pointer",
        "never",
    } <= kernels
    assert len(FUNCTIONS) > 40


def test_profilers_show_whose_kernels_they_are(compiled) -> None:
    names = {(one["module"].split(".")[0], one["kernel"], one["name"]) for one in compiled["order"]}
    ours = {name for package, _, name in names if package == "tdcoll"}
    assert {"tdcoll_all_reduce_one_shot", "tdcoll_exchange_ll", "tdcoll_norm_rows_two_shot"} <= ours
    assert [
        n for n in names if n[2] != (f"tdcoll_{n[1].lstrip('_')}" if n[0] == "tdcoll" else n[1])
    ] == []


def test_only_kernels_that_need_nvshmem_link_it(hopper) -> None:
    for kernel in hopper["language"]:
        assert kernel["links"] == kernel["needs"], kernel
    assert {k["kernel"] for k in hopper["language"] if not k["needs"]} == {
        "copies",
        "never",
        "truth_of_pointers",
    }


@pytest.mark.slow
def test_the_part_of_nvshmem_that_kernels_link_makes_the_same_kernels(tmp_path_factory) -> None:
    ptx = compiled_for(100, tmp_path_factory)["library"]
    assert ptx["part"] == ptx["whole"]
    assert ptx["whole"].count("nvshmemi_device_state") > 0


def test_kernels_in_the_style_of_triton_distributed(hopper) -> None:
    made = hopper["compat"]
    waits = {"wait": 2, "warp": 2, "proxy": 2, "release": 1, "add": 0}
    assert waits.items() <= made["pass_on"].items()
    assert made["by_threads"]["add"] == 1
    # In a loop with a matmul, no copy to shared memory is begun before its wait.
    assert (made["pipelined, wait: True"], made["pipelined, wait: False"]) == (False, True)


def test_kernels_of_tutorials(hopper) -> None:
    assert hopper["tutorials"] == [
        "queue",
        "my_all_gather",
        "one_shot",
        "two_shot",
        "my_all_gather_matmul",
        "my_matmul",
    ]
