# SPDX-License-Identifier: Apache-2.0
"""Order that protocols rely on is in the compiled kernels: barriers and scopes, what comes before the
wait of an early launch, loads behind waits."""

from __future__ import annotations

import ptx_order
import pytest
from test_compile import DRIVER_S, ONLY_FOR_90, PUTS, compiled  # noqa: F401  a fixture

from tdcoll.spec.functions import FUNCTIONS

pytestmark = pytest.mark.timeout(DRIVER_S + 40)


def test_order_that_protocols_rely_on_is_in_the_ptx(compiled) -> None:  # noqa: F811
    """The simulator cannot see it: block barriers before releases, puts and epochs, waits that
    acquire, and scopes."""
    kernels = compiled["order"]
    assert len(kernels) > 50
    assert [k for k in kernels if k["problems"]] == []
    # GPU scope is where it is meant to be, and nowhere else.
    sites = {site for kernel in kernels for site in kernel["of_this_gpu"]}
    assert (
        sites <= ptx_order.OF_THIS_GPU if compiled["arch"] != 90 else sites == ptx_order.OF_THIS_GPU
    )
    of = {
        name: [k for k in kernels if k["kernel"] == name]
        for name in ("exchange_direct", "all_gather_ring", "reduce")
    }
    for kernel in of["exchange_direct"] + of["all_gather_ring"]:
        assert (
            min(kernel[kind] for kind in ("store", "release", "barrier", "control", "add", "wait"))
            > 0
        ), kernel
    assert all(kernel["control"] and kernel["add"] and kernel["wait"] for kernel in of["reduce"])


def test_kernels_that_are_launched_early_wait_before_anything_else_and_no_others_are(
    compiled,  # noqa: F811
) -> None:
    """All but those that put: whatever a launch does comes after the launch before it."""
    kernels = [k for k in compiled["order"] if str(k["module"]).startswith("tdcoll.collectives.")]
    early = {k["kernel"] for k in kernels if k["launched_early"]}
    others = {k["kernel"] for k in kernels if not k["launched_early"]}
    assert early.isdisjoint(others)
    assert others == PUTS - {"reduce_nodes_of_single"} - (
        ONLY_FOR_90 if compiled["arch"] != 90 else set()
    )
    assert len(early) > 15
    for kernel in kernels:
        assert kernel["waits_first"] is (True if kernel["launched_early"] else None), kernel


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("{wait}\nld.global.b32 %r1, [%rd1];", True),
        ("ld.param.b64 %rd1, [p];\n{wait}\nst.global.b32 [%rd1], %r1;", True),
        ("ld.global.b32 %r1, [%rd1];\n{wait}", False),
        (
            "// begin inline asm\nst.relaxed.sys.global.b128 [%rd1], wide;\n// end inline asm\n{wait}",
            False,
        ),
        ("@%p1 bra $L__BB0_2;\n{wait}\n$L__BB0_2:\nret;", False),
        ("griddepcontrol.launch_dependents; griddepcontrol.wait;", False),
        ("ld.global.b32 %r1, [%rd1];", None),
    ],
)
def test_what_comes_before_the_wait_is_seen_in_ptx(body: str, verdict: bool | None) -> None:
    asm = "// begin inline asm\ngriddepcontrol.wait; griddepcontrol.launch_dependents;\n// end inline asm"
    assert (
        ptx_order.early(f".entry kernel()\n{{\n{body.format(wait=asm)}\n}}\n// -- End function")
        is verdict
    )


def test_loads_stay_behind_their_waits(compiled) -> None:  # noqa: F811
    report = compiled["loops"]
    assert report["problems"] == []
    checked = {tuple(what) for what in report["checked"]}
    assert {
        (wait, form, arch, num_stages)
        for wait in ("plain", "token")
        for arch in ((90,) if compiled["arch"] == 90 else (80, 90))
        for num_stages in ((3,) if compiled["arch"] == 90 else (1, 2, 3, 4))
        for form in ("load", "descriptor", "stream")
        if form != "stream" or num_stages > 1
    } <= checked
    assert {(name,) for name, function in FUNCTIONS.items() if function.acquires} <= checked


def test_loops_without_the_protection_are_found(compiled) -> None:  # noqa: F811
    assert len(compiled["loops"]["controls"]) == (6 if compiled["arch"] == 90 else 12)
    for name, problem in compiled["loops"]["controls"].items():
        assert problem is not None, name
        assert problem.startswith("TTGIR has ['async', 'for'"), (
            "a load ahead of the loop, before any wait"
        )
