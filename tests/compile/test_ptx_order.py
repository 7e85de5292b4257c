# SPDX-License-Identifier: Apache-2.0
"""What is said of PTX that is written by hand: each rule, with and without the protection that it looks for."""

from __future__ import annotations

from pathlib import Path

import ptx_order
import pytest

PRIMITIVES = Path(__file__).resolve().parents[2] / "tdcoll" / "primitives"
STORE, LOAD, BARRIER = "st.global.b32 [%rd1], %r1;", "ld.global.b32 %r1, [%rd1];", "bar.sync 0;"
RELEASE = "{ st.release.sys.global.b64 [%rd2], %rd3; }"
WAIT = "// begin inline asm\nPOLL:\nld.acquire.sys.global.b64 word, [%rd4];\n@again bra POLL;\n// end inline asm"
WORDS = WAIT.replace("acquire.sys.global.b64 word", "volatile.global.b128 wide")


def at(module: str, text: str) -> str:
    """The mark of what comes from the line of a module of primitives that holds ``text``."""
    lines = (PRIMITIVES / f"{module}.py").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if text in line)
    return f".loc {['group', 'puts', 'stores'].index(module) + 1} {number} 0"


def kernel(*lines: str) -> str:
    files = [f'.file {i} "{PRIMITIVES}/{name}.py"' for i, name in enumerate(("group", "puts", "stores"), 1)]
    return "\n".join([".entry kernel()", "{", *lines, "ret;", "}", "// -- End function", *files])


def jump(targets: str) -> tuple[str, ...]:
    """A store and a jump by a table."""
    return f"$L_brx_0: .branchtargets {targets};", STORE, "brx.idx %r1, $L_brx_0;"


PUT = (at("puts", "tdl.putmem_signal_nbi_block(landing"), BARRIER, "ld.b32 %r9, [%rd9];", ".loc 9 0 0")
PUBLISHED = at("group", "tdl.block_and(")
ELSEWHERE = at("stores", "tdl.st_release(theirs")
RULES = ptx_order.RULES
ORDERS = {rule: meaning for rule, (_, meaning) in ptx_order.ORDERS.items()}
BY_DESCRIPTOR = "@%p1 cp.async.bulk.tensor.2d.{} [%rd1, {{%r1, %r2}}], [%r3];"
SENT = BY_DESCRIPTOR.format("global.shared::cta.bulk_group")
FETCHED = BY_DESCRIPTOR.format("shared::cluster.global.mbarrier::complete_tx::bytes")
COMPLETED, READ, FENCE = "cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;", "fence.proxy.async.global;"


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        ((STORE, BARRIER, RELEASE), []),
        ((STORE, RELEASE), [RULES["store", "release"]]),
        (("st.relaxed.sys.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};", RELEASE), [RULES["store", "release"]]),
        ((LOAD, BARRIER, RELEASE), []),
        ((LOAD, RELEASE), [RULES["load", "release"]]),
        ((RELEASE, LOAD), []),
        ((WORDS, RELEASE), [RULES["flagged", "release"]]),
        ((WAIT, BARRIER, LOAD), []),
        ((WAIT, LOAD), [RULES["wait", "load"]]),
        ((WAIT, RELEASE), [RULES["wait", "release"]]),
        ((STORE, BARRIER, *PUT), []),
        ((STORE, *PUT), [RULES["store", "put"]]),  # the barrier inside a put is NVSHMEM's, and no promise
        ((WAIT, *PUT), [RULES["wait", "put"]]),
        ((WORDS, *PUT), [RULES["flagged", "put"]]),
        ((*jump("$L__BB0_1, $L__BB0_1"), "$L__BB0_1:", BARRIER, "$L__BB0_2:", RELEASE), []),
        ((*jump("$L__BB0_1, $L__BB0_2"), "$L__BB0_1:", BARRIER, "$L__BB0_2:", RELEASE), [RULES["store", "release"]]),
        (("atom.global.gpu.relaxed.add.u32 %r1, [%rd1], 1;",), [ptx_order.NARROW]),
        (("atom.global.add.u32 %r1, [%rd1], 1;",), [ptx_order.NARROW]),  # relaxed and of this GPU, if it says nothing
        (("atom.global.sys.relaxed.add.u32 %r1, [%rd1], 1;",), []),
        (("st.release.gpu.global.b64 [%rd1], %rd2;",), [ptx_order.NARROW]),
        (("ld.acquire.gpu.global.b64 %rd2, [%rd1];",), [ptx_order.NARROW]),
        (("st.relaxed.gpu.global.b64 [%rd1], %rd2;",), [ptx_order.NARROW]),
        (("membar.gl;",), [ptx_order.NARROW]),
        (("fence.acq_rel.gpu;",), [ptx_order.NARROW]),
        (("fence.acq_rel.sys;", "fence.proxy.async.global;", "atom.shared.add.u32 %r1, [%r2], 1;"), []),
        ((PUBLISHED, "st.release.gpu.global.b64 [%rd1], %rd2;"), []),
        ((PUBLISHED, "st.release.cta.global.b64 [%rd1], %rd2;"), [ptx_order.NARROW]),
        ((ELSEWHERE, "st.release.gpu.global.b64 [%rd1], %rd2;"), [ptx_order.NARROW]),
        ((WAIT.replace(".sys", ".gpu"),), [ptx_order.RELAXED, ptx_order.NARROW]),
        (("cp.async.cg.shared.global [%r1], [%rd1], 16;", BARRIER, RELEASE), [ptx_order.ASYNCHRONOUS]),
        ((SENT, "cp.async.bulk.commit_group;", COMPLETED, BARRIER, RELEASE), []),
        ((SENT, BARRIER, RELEASE), [ORDERS["descriptor store", "release"]]),
        ((SENT, READ, BARRIER, RELEASE), [ORDERS["descriptor store", "release"]]),
        ((SENT, COMPLETED, RELEASE), [RULES["completion", "release"]]),
        ((RELEASE, SENT), []),
        ((WAIT, BARRIER, FENCE, FETCHED), []),
        ((WAIT, BARRIER, FETCHED), [ORDERS["wait", "descriptor load"]]),
        ((WAIT, FENCE, FETCHED), [RULES["wait", "descriptor load"]]),
        ((FETCHED, BARRIER, RELEASE), []),
    ],
)
def test_order_is_seen(lines: tuple[str, ...], problems: list[str]) -> None:
    assert ptx_order.problems(kernel(*lines)) == problems


THREAD = "mov.u32 %r1, %tid.x;\nsetp.eq.s32 %p1, %r1, 0;"
PROGRAM = "mov.u32 %r1, %ctaid.x;\nsetp.eq.s32 %p1, %r1, 0;"
AGREE = "// begin inline asm\nbarrier.cta.red.and.pred all, 0, mine; selp.u32 %r2, 1, 0, all;\n// end inline asm"
POLLED = WAIT.replace("@again", "mov.b32 %r1, 1;\n@again") + "\nsetp.eq.s32 %p1, %r1, 0;"
INSIDE = ("@%p1 bra $L__BB0_1;", BARRIER, "$L__BB0_1:")
AFTER = ("@%p1 bra $L__BB0_1;", STORE, "$L__BB0_1:", BARRIER)
CHOICE = ("mov.b32 %r3, 0;", "@%p1 bra $L__BB0_1;", "mov.b32 %r3, 1;", "$L__BB0_1:", "setp.eq.s32 %p1, %r3, 0;")


@pytest.mark.parametrize(
    ("lines", "seen"),
    [
        ((THREAD, *INSIDE), True),
        ((THREAD, *AFTER), False),
        ((PROGRAM, *INSIDE), False),
        ((THREAD, "@%p1 bra $L__BB0_1;", "ret;", "$L__BB0_1:", BARRIER), True),
        ((POLLED, *INSIDE), True),
        ((POLLED, AGREE, "setp.eq.s32 %p1, %r2, 0;", *INSIDE), False),
        (("ld.acquire.sys.global.b32 %r1, [%rd1];\nsetp.eq.s32 %p1, %r1, 0;", *INSIDE), True),
        ((THREAD, "ld.global.b32 %r2, [%r1];", "setp.eq.s32 %p1, %r2, 0;", *INSIDE), True),
        ((THREAD, "mov.b32 %r1, 0;", "setp.eq.s32 %p1, %r1, 0;", *INSIDE), False),
        ((THREAD, *CHOICE, *(line.replace("_1", "_2") for line in INSIDE)), True),
        ((PROGRAM, *CHOICE, *(line.replace("_1", "_2") for line in INSIDE)), False),
        ((THREAD, "$L__BB0_1:", BARRIER, "@%p1 bra $L__BB0_1;"), True),
    ],
)
def test_barriers_that_some_threads_do_not_reach_are_seen(lines: tuple[str, ...], seen: bool) -> None:
    text = kernel(*"\n".join(lines).splitlines())
    assert ptx_order.divergence(text) == ([ptx_order.DIVERGENT] if seen else [])
