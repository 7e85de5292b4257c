# SPDX-License-Identifier: Apache-2.0
"""The kernels compile for Hopper and Blackwell on a machine that has neither, and say the right things in PTX."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import ptx_divergence
import ptx_order
import pytest

from tdcoll.spec.functions import FUNCTIONS

DRIVER = Path(__file__).with_name("compile_kernels.py")
DRIVER_S = 560
"""It takes a minute of one core, and several on a machine that is busy."""

pytestmark = pytest.mark.timeout(DRIVER_S + 40)  # the first test runs the driver, the others wait for it


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    """What the driver prints; it runs once, whichever of pytest's workers come here."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    file = tmp_path_factory.getbasetemp().parent / f"compiled-{run}.json"
    with file.open("a+") as shared:
        fcntl.flock(shared, fcntl.LOCK_EX)
        shared.seek(0)
        if text := shared.read():
            return json.loads(text)
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        jobs = [  # at once: pytest's other worker most likely waits for them, too
            subprocess.Popen(
                [sys.executable, str(DRIVER), part],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
            )
            for part in ("collectives", "others")
        ]  # fmt: skip
        made: dict[str, list[dict[str, object]]] = {"order": []}
        try:
            for job in jobs:
                text, errors = job.communicate(timeout=DRIVER_S)
                assert job.returncode == 0, errors
                part = json.loads(text)
                made |= part | {"order": made["order"] + part["order"]}
        finally:
            for job in jobs:
                job.kill()
                job.wait()
        shared.write(json.dumps(made))
        return made


def test_all_gather_compiles_for_both_architectures(compiled) -> None:
    kernels = compiled["all_gather"]
    assert {(k["kernel"], k["arch"], k["in_place"]) for k in kernels} == {
        (name, arch, in_place)
        for name in ("all_gather_1d", "all_gather_2d")
        for arch, in_place in ((90, False), (90, True), (100, False))
    }
    assert all(k["cubin_bytes"] > 0 for k in kernels)


def test_all_gather_calls_nvshmem_and_has_bounded_waits(compiled) -> None:
    for kernel in compiled["all_gather"]:
        calls = kernel["nvshmem"]
        assert ("nvshmemx_putmem_signal_block" in calls) != kernel["stores"], kernel
        assert "nvshmemx_putmem_signal_nbi_block" in calls, kernel
        assert "nvshmem_signal_wait_until" not in calls, "an unbounded wait"
        assert kernel["globaltimer"] >= 1, kernel
        assert kernel["acquire_sys"] >= kernel["globaltimer"], kernel


def test_all_gather_spills_next_to_nothing(compiled) -> None:
    kernels = compiled["all_gather"] + compiled["ll"] + compiled["direct"]
    spilled = {(k["kernel"], k["in_place"], k["stores"]): k["spilled_bytes"] for k in kernels if k["spilled_bytes"]}
    # Around a call of NVSHMEM, once per program.
    assert set(spilled) <= {("all_gather_2d", True, True)}
    assert all(nbytes <= 56 for nbytes in spilled.values()), spilled
    assert all(k["registers"] <= 128 for k in kernels)


def test_ll_needs_nvshmem_between_nodes_only_and_has_bounded_waits(compiled) -> None:
    found = sorted((k["kernel"], k["arch"], k["block"]) for k in compiled["ll"])
    one_node, over_nodes = "exchange_ll", "all_gather_ll_2d"
    assert found == [
        *((over_nodes, 90, 128), (over_nodes, 100, 128)),
        *((one_node, 90, 128), (one_node, 90, 1024), (one_node, 100, 128)),
    ]
    for kernel in compiled["ll"]:
        assert kernel["needs"] == (kernel["kernel"] == "all_gather_ll_2d"), kernel
        assert kernel["globaltimer"] >= 1, kernel
        assert kernel["spilled_bytes"] == 0, kernel


def test_direct_stores_need_no_nvshmem_and_are_wide(compiled) -> None:
    assert {(k["kernel"], k["arch"], k["in_place"]) for k in compiled["direct"]} == {
        (name, arch, in_place)
        for name in ("exchange_direct", "all_gather_ring")
        for arch in (90, 100)
        for in_place in (False, True)
    }
    for kernel in compiled["direct"]:
        assert not kernel["needs"], kernel
        assert kernel["globaltimer"] >= 1, kernel
        assert kernel["release_sys"] >= 1, kernel
        assert kernel["wide_stores"] >= 1, kernel


def test_two_programs_of_8_warps_fit_on_a_multiprocessor(compiled) -> None:
    """The limits of contexts that share a GPU rely on it: 64 K registers for 2 times 256 threads. Only fused calls have
    thread blocks of 16 warps, and one of these has a multiprocessor to itself."""
    names = ("all_gather", "ll", "direct", "sparse", "reduce_scatter", "all_reduce", "exchange", "fused")
    kernels = [kernel for name in names for kernel in compiled[name]]
    assert len(kernels) > 70
    assert {k.get("warps", 8) for k in compiled["fused"]} >= {4, 8, 16}
    for kernel in kernels:
        warps = kernel.get("warps", 8)
        registers = 32 * warps * (-(-kernel["registers"] // 8) * 8)  # a warp gets them by 256
        assert registers <= 65536 // (2 if warps <= 8 else 1), kernel


def test_index_matching_compiles_without_spills_or_nvshmem(compiled) -> None:
    kernels = compiled["index_match"]
    assert {k["arch"] for k in kernels} == {90, 100}
    assert {"mark", "number", "find_leaders", "place_leaders"} <= {k["kernel"] for k in kernels}
    assert [k for k in kernels if k["spilled_bytes"] or k["needs"]] == []
    assert all(k["registers"] <= 96 for k in kernels)


def test_index_matching_says_the_right_things(compiled) -> None:
    for kernel in compiled["index_match"]:
        name, wide = kernel["kernel"], set(kernel["wide"])
        assert (kernel["or64"] > 0) == (name == "mark"), kernel
        assert name != "number" or kernel["popcounts"] > 0, kernel
        assert name not in ("mark", "find_leaders") or {"num_rows", "signature"} <= wide, kernel


def test_sparse_all_reduce_compiles_without_spills(compiled) -> None:
    kernels = compiled["sparse"]
    assert {k["arch"] for k in kernels if k["kernel"] == "reduce"} == {90, 100}
    # A few bytes of a search around the call that sends a signal, once per program; and some words for each row of this
    # one, which ptxas gives fewer registers than it may have.
    most = {"reduce_nodes_of_single": {90: 64}}
    for kernel in kernels:
        allowed = 64 if kernel["search"] else most.get(kernel["kernel"], {}).get(kernel["arch"], 0)
        assert kernel["spilled_bytes"] <= allowed, kernel
    assert all(k["registers"] <= 128 for k in kernels)


def test_sparse_all_reduce_signals_by_stores_in_one_node_and_by_nvshmem_between_nodes(compiled) -> None:
    stores, puts = {"reduce", "meet"}, {"reduce_nodes", "reduce_nodes_of_single", "forward", "meet_nodes"}
    kernels = compiled["sparse"]
    assert {k["kernel"] for k in kernels if k["globaltimer"]} == stores | puts
    assert {k["kernel"] for k in kernels if k["needs"]} == puts
    assert {k["kernel"] for k in kernels if k["calls"]} == puts
    assert {k["kernel"] for k in kernels if k["release_sys"] and k["kernel"] not in puts} == stores


def test_one_node_sparse_all_reduce_has_no_nvshmem(compiled) -> None:
    """All that it launches: its own kernels, and the exchange of lists."""
    one_node = [k for k in compiled["sparse"] if k["kernel"] not in ("reduce_nodes", "reduce_nodes_of_single")]
    one_node = [k for k in one_node if k["kernel"] not in ("forward", "meet_nodes")]
    assert {"write_list", "copy_list", "plan", "combine", "reduce", "meet", "merge"} <= {k["kernel"] for k in one_node}
    assert [k for k in one_node if k["calls"] or k["needs"]] == []
    (exchange,) = compiled["exchange"]
    assert exchange["counted"]
    assert exchange["calls"] == []
    assert not exchange["needs"]


def test_rows_move_in_wide_loads_and_stores(compiled) -> None:
    kernels = [k for k in compiled["sparse"] if k["aligned"] and k["kernel"] in ("reduce", "combine")]
    assert len(kernels) >= 4
    for kernel in kernels:
        assert kernel["wide_loads"] > 0, kernel
        assert kernel["wide_stores"] > 0, kernel


def test_all_to_all_between_nodes_compiles_without_spills_and_never_waits_without_bounds(compiled) -> None:
    assert [kernel["arch"] for kernel in compiled["all_to_all"]] == [90, 100]
    for kernel in compiled["all_to_all"]:
        assert kernel["needs"], kernel
        assert "nvshmemx_putmem_signal_nbi_block" in kernel["calls"], kernel
        assert "nvshmem_signal_wait_until" not in kernel["calls"], kernel
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["registers"] <= 128, kernel


def test_reduce_scatter_compiles_without_spills_and_needs_nvshmem_for_puts_only(compiled) -> None:
    kernels = compiled["reduce_scatter"]
    assert {(k["kernel"], k["arch"]) for k in kernels} == {
        (f"reduce_scatter_{name}", arch) for name in ("direct", "pull", "puts", "words") for arch in (90, 100)
    }
    for kernel in kernels:
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["registers"] <= 128, kernel
        assert kernel["globaltimer"] >= 1, kernel
        assert kernel["needs"] == kernel["links"] == (kernel["kernel"] == "reduce_scatter_puts"), kernel


def test_reduce_scatter_moves_16_bytes_at_a_time_and_fuses_nothing(compiled) -> None:
    """A product that is fused with the addition of 0 which was to make +0.0 of -0.0 stays -0.0."""
    direct = [k for k in compiled["reduce_scatter"] if k["kernel"] == "reduce_scatter_direct"]
    assert direct
    # A load for each of 8 ranks and a store, besides the 4 of each that copy_block has.
    for kernel in (k for k in direct if k["dtype"] != "fp8e4nv"):
        assert (kernel["wide_loads"], kernel["wide_stores"]) == (12, 5), kernel
    # That of fp8 is with the power of two by which numbers are decoded: exact.
    assert [k for k in compiled["reduce_scatter"] if k["fused"] and k["dtype"] != "fp8e4nv"] == []


def test_who_loads_from_peers_looks_whether_one_has_given_up(compiled) -> None:
    """Three waits: that peers have entered, that they have read, and that none has given up. Releases: three to every
    peer (entered, read, given up), the last of them also to this rank, and one for the record of each wait."""
    for kernel in (k for k in compiled["reduce_scatter"] if k["kernel"] == "reduce_scatter_pull"):
        assert kernel["globaltimer"] == 3, kernel
        assert kernel["release_sys"] == 3 * (kernel["world"] - 1) + 1 + 3, kernel


def test_a_maximum_propagates_nan(compiled) -> None:
    """Which the simulator's does in any case."""
    maxima = [maximum for k in compiled["reduce_scatter"] for maximum in k["maxima"]]
    assert maxima
    assert [maximum for maximum in maxima if ".NaN." not in maximum] == []


def test_reduce_scatter_is_compiled_once_for_all_ranks(compiled) -> None:
    forms = compiled["reduce_scatter_forms"]
    assert forms == {f"reduce_scatter_{name}": 1 for name in ("direct", "pull", "puts", "words")}


def test_all_reduce_compiles_for_all_ranks_at_once_and_needs_nvshmem_for_puts_only(compiled) -> None:
    kernels, over_nodes = compiled["all_reduce"], ("all_reduce_puts", "all_reduce_nodes")
    assert {(k["kernel"], k["arch"]) for k in kernels} == {
        (f"all_reduce_{name}", arch)
        for name in ("one_shot", "two_shot", "direct", "puts", "nodes")
        for arch in (90, 100)
    }
    assert set(compiled["all_reduce_forms"].values()) == {1}
    for kernel in kernels:
        assert kernel["registers"] <= 128, kernel
        assert kernel["globaltimer"] >= 1, kernel
        assert kernel["needs"] == kernel["links"] == (kernel["kernel"] in over_nodes), kernel
    # Around a call of NVSHMEM, once per program.
    assert [k for k in kernels if k["hot_spills"] and k["kernel"] not in over_nodes] == []
    assert [k for k in kernels if k["fused"] and k["dtype"] != "fp8e4nv"] == []  # where products are exact


def test_words_are_moved_by_128_bits_and_waited_for_once(compiled) -> None:
    """One load of an aligned source, or one for each part of it; one wait for the words of all ranks that announce
    themselves, or one for each rank whose words have flags. The compiler repeats none in another layout."""
    words = [k for k in compiled["all_reduce"] if k["kernel"] in ("all_reduce_one_shot", "all_reduce_two_shot")]
    assert {(k["kernel"], k["announced"]) for k in words} == {
        (f"all_reduce_{shots}_shot", announced) for shots in ("one", "two") for announced in (False, True)
    }
    for kernel in words:
        world, two = kernel["world"], kernel["kernel"] == "all_reduce_two_shot"
        waits = (2 if two else 1) * (1 if kernel["announced"] else world) * (2 if kernel["looped"] else 1)
        assert kernel["globaltimer"] == waits, kernel
        if kernel["announced"]:
            assert kernel["loads"] == (world if two else 1) * (2 if kernel["looped"] else 1), kernel
            assert kernel["sent"] >= (2 * (world - 1) + world if two else world), kernel
            assert kernel["spilled_bytes"] == 0, kernel
    scattered = {k["announced"]: k for k in compiled["reduce_scatter"] if k["kernel"] == "reduce_scatter_words"}
    assert (scattered[True]["globaltimer"], scattered[False]["globaltimer"]) == (1, 8)


def test_fused_kernels_compile_without_spills_for_all_ranks_at_once(compiled) -> None:
    kernels = compiled["fused"]
    assert {(k["kernel"], k["arch"]) for k in kernels} == {
        (f"norm_rows{name}", arch) for name in ("", "_one_shot", "_two_stage") for arch in (90, 100)
    }
    assert {(k["hidden"], k["arch"]) for k in kernels} >= {(h, arch) for h in (4096, 8192) for arch in (90, 100)}
    assert {k["pieces"] > 1 for k in kernels if k["kernel"] != "norm_rows"} == {False, True}
    assert set(compiled["fused_forms"].values()) == {1}
    assert [k for k in kernels if k["needs"] or k["registers"] > 128] == []
    # With 8 ranks, threads of 16 warps that have 2 words each need a few registers more than there are.
    allowed = {("norm_rows_one_shot", 16): 16, ("norm_rows_two_stage", 16): 104}
    for kernel in kernels:
        most = allowed.get((kernel["kernel"], kernel["warps"]), 0) if kernel["world"] == 8 else 0
        assert kernel["spilled_bytes"] <= most, kernel


def test_fused_kernels_wait_once_for_each_word_of_a_thread(compiled) -> None:
    """Those of all ranks at once, in two stages those of a row's owner, and measures; the compiler repeats no wait."""
    for kernel in compiled["fused"]:
        words, several = kernel["words"], kernel["pieces"] > 1
        wanted = {
            "norm_rows": 0,
            "norm_rows_one_shot": words + several,
            "norm_rows_two_stage": 2 * words + 2,
        }[kernel["kernel"]]
        assert kernel["waits"] == wanted, kernel


def test_fused_kernels_contract_nothing_but_squares(compiled) -> None:
    """Where the compiler may choose, kernels of different shapes would have different bits."""
    kernels = [k for k in compiled["fused"] if k["arch"] == 90]  # Blackwell squares two at a time
    assert kernels
    for kernel in kernels:
        assert kernel["contracted"] == 3 * 2 * kernel["words"], kernel


def test_the_maximum_propagates_nan(compiled) -> None:
    """Which the interpreter's does whatever it is asked for."""
    (merge,) = [k for k in compiled["sparse"] if k["kernel"] == "merge" and k["arch"] == 90]
    assert merge["nan_max"] > 0


def test_kernels_of_the_signal_benchmark(compiled) -> None:
    kernels = compiled["signals"]
    assert len(kernels) == 4
    for kernel in kernels:
        assert kernel["links"] != kernel["direct"], kernel
        assert kernel["releases"] >= 1, kernel
        assert kernel["globaltimer"] >= 1, kernel
        assert kernel["spilled_bytes"] == 0, kernel


def test_order_that_protocols_rely_on_is_in_the_ptx(compiled) -> None:
    """The simulator cannot see it: block barriers before releases, puts and epochs, waits that acquire, and scopes."""
    kernels = compiled["order"]
    assert len(kernels) > 60
    assert [k for k in kernels if k["problems"]] == []
    # GPU scope is where it is meant to be, and nowhere else.
    assert {site for kernel in kernels for site in kernel["of_this_gpu"]} == ptx_order.OF_THIS_GPU
    of = {
        name: [k for k in kernels if k["kernel"] == name] for name in ("exchange_direct", "all_gather_ring", "reduce")
    }
    for kernel in of["exchange_direct"] + of["all_gather_ring"]:
        assert min(kernel[kind] for kind in ("store", "release", "barrier", "control", "add", "wait")) > 0, kernel
    assert all(kernel["control"] and kernel["add"] and kernel["wait"] for kernel in of["reduce"])


def test_order_that_is_missing_is_seen_in_the_ptx(compiled) -> None:
    rules, narrow, relaxed = ptx_order.RULES, ptx_order.NARROW, ptx_order.RELAXED
    unreleased, late = [rules["store", "release"], rules["load", "release"]], rules["wait", "load"]
    assert compiled["mutants"] == {
        "released without a barrier": unreleased,
        "released to this GPU only": [narrow],
        "epoch read without a barrier": [rules["control", "add"]],
        "read, and released without a barrier": unreleased,
        "put without a barrier": [rules["store", "put"]],
        "relaxed wait": [relaxed],
        "wait for this GPU only": [relaxed, narrow],
        "wait without a barrier": [late],
        "wait without a barrier, before others": [late, ptx_divergence.DIVERGENT],
    }


def test_every_device_function_compiles(compiled) -> None:
    kernels = {k["kernel"] for k in compiled["language"]}
    assert {"put", "get", "put_signal", "signals_to_all", "store_through_pointer", "never"} <= kernels
    assert len(FUNCTIONS) > 40


def test_profilers_show_whose_kernels_they_are(compiled) -> None:
    names = {(one["module"].split(".")[0], one["kernel"], one["name"]) for one in compiled["order"]}
    ours = {name for package, _, name in names if package == "tdcoll"}
    assert {"tdcoll_all_reduce_one_shot", "tdcoll_exchange_ll", "tdcoll_norm_rows_two_stage"} <= ours
    assert [n for n in names if n[2] != (f"tdcoll_{n[1].lstrip('_')}" if n[0] == "tdcoll" else n[1])] == []


def test_only_kernels_that_need_nvshmem_link_it(compiled) -> None:
    for kernel in compiled["language"]:
        assert kernel["links"] == kernel["needs"], kernel
    assert {k["kernel"] for k in compiled["language"] if not k["needs"]} == {"copies", "never", "truth_of_pointers"}


def test_kernels_that_are_launched_early_wait_before_anything_else_and_no_others_are(compiled) -> None:
    """All but those that put: whatever a launch does comes after the launch before it."""
    kernels = [k for k in compiled["order"] if str(k["module"]).startswith("tdcoll.collectives.")]
    early = {k["kernel"] for k in kernels if k["launched_early"]}
    others = {k["kernel"] for k in kernels if not k["launched_early"]}
    assert early.isdisjoint(others)
    assert others == {
        *("all_gather_1d", "all_gather_2d", "all_gather_ll_2d", "reduce_scatter_puts", "all_reduce_puts"),
        *("all_reduce_nodes", "all_to_all_puts", "reduce_nodes", "forward", "meet_nodes"),
    }
    assert len(early) > 25
    for kernel in kernels:
        assert kernel["waits_first"] is (True if kernel["launched_early"] else None), kernel


def test_a_wait_for_the_launch_before_comes_first_or_is_refused(compiled) -> None:
    said = compiled["refusals"]
    assert set(said) == {"waits_late", "waits_elsewhere"}
    for name, text in said.items():
        assert text == f"{name} calls in_stream_order(), which must be a kernel's first statement"


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("{wait}\nld.global.b32 %r1, [%rd1];", True),
        ("ld.param.b64 %rd1, [p];\n{wait}\nst.global.b32 [%rd1], %r1;", True),
        ("ld.global.b32 %r1, [%rd1];\n{wait}", False),
        ("// begin inline asm\nst.relaxed.sys.global.b128 [%rd1], wide;\n// end inline asm\n{wait}", False),
        ("@%p1 bra $L__BB0_2;\n{wait}\n$L__BB0_2:\nret;", False),
        ("griddepcontrol.launch_dependents; griddepcontrol.wait;", False),
        ("ld.global.b32 %r1, [%rd1];", None),
    ],
)
def test_what_comes_before_the_wait_is_seen_in_ptx(body: str, verdict: bool | None) -> None:
    asm = "// begin inline asm\ngriddepcontrol.wait; griddepcontrol.launch_dependents;\n// end inline asm"
    assert ptx_order.early(f".entry kernel()\n{{\n{body.format(wait=asm)}\n}}\n// -- End function") is verdict


def test_the_part_of_nvshmem_that_kernels_link_makes_the_same_kernels(compiled) -> None:
    ptx = compiled["library"]
    assert ptx["part"] == ptx["whole"]
    assert ptx["whole"].count("nvshmemi_device_state") > 0
