# SPDX-License-Identifier: Apache-2.0
"""What is said of PTX that is written by hand: each rule, with and without the protection that it
looks for."""

from __future__ import annotations

from pathlib import Path

import ptx_divergence
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
    files = [
        f'.file {i} "{PRIMITIVES}/{name}.py"'
        for i, name in enumerate(("group", "puts", "stores"), 1)
    ]
    return "\n".join([".entry kernel()", "{", *lines, "ret;", "}", "// -- End function", *files])


def jump(targets: str) -> tuple[str, ...]:
    """A store and a jump by a table."""
    return f"$L_brx_0: .branchtargets {targets};", STORE, "brx.idx %r1, $L_brx_0;"


PUT = (
    at("puts", "tdl.putmem_signal_nbi_block(landing"),
    BARRIER,
    "ld.b32 %r9, [%rd9];",
    ".loc 9 0 0",
)
PUBLISHED = at("group", "tdl.block_and(")
ELSEWHERE = at("stores", "tdl.st_release(theirs")
SAID, HEARD, LEFT = (
    at("group", f"def {name}(") for name in ("signal_done", "wait_until_done", "leaves_last")
)
RULES = ptx_order.RULES
ORDERS = {rule: meaning for rule, (_, meaning) in ptx_order.ORDERS.items()}
BY_DESCRIPTOR = "@%p1 cp.async.bulk.tensor.2d.{} [%rd1, {{%r1, %r2}}], [%r3];"
SENT = BY_DESCRIPTOR.format("global.shared::cta.bulk_group")
FETCHED = BY_DESCRIPTOR.format("shared::cluster.global.mbarrier::complete_tx::bytes")
COMPLETED, READ, FENCE = (
    "cp.async.bulk.wait_group 0;",
    "cp.async.bulk.wait_group.read 0;",
    "fence.proxy.async.global;",
)
NVSHMEM_3_7 = ".visible .const .align 4 .b8 nvshmemi_device_lib_version_d[12] = {3, 0, 0, 0, 7, 0, 0, 0, 2};\n"
NVSHMEM_3_8 = NVSHMEM_3_7.replace("7, 0, 0, 0, 2", "8")  # trailing zeros are left out
NVSHMEM_3_9 = NVSHMEM_3_7.replace("7,", "9,")


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        ((STORE, BARRIER, RELEASE), []),
        ((STORE, RELEASE), [RULES["store", "release"]]),
        (
            ("st.relaxed.sys.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};", RELEASE),
            [RULES["store", "release"]],
        ),
        ((LOAD, BARRIER, RELEASE), []),
        ((LOAD, RELEASE), [RULES["load", "release"]]),
        ((RELEASE, LOAD), []),
        ((WORDS, RELEASE), [RULES["flagged", "release"]]),
        ((WAIT, BARRIER, LOAD), []),
        ((WAIT, LOAD), [RULES["wait", "load"]]),
        ((WAIT, RELEASE), [RULES["wait", "release"]]),
        ((STORE, BARRIER, *PUT), []),
        # the barrier inside a put is NVSHMEM's, and no promise
        ((STORE, *PUT), [RULES["store", "put"]]),
        ((WAIT, *PUT), [RULES["wait", "put"]]),
        ((WORDS, *PUT), [RULES["flagged", "put"]]),
        ((*jump("$L__BB0_1, $L__BB0_1"), "$L__BB0_1:", BARRIER, "$L__BB0_2:", RELEASE), []),
        (
            (*jump("$L__BB0_1, $L__BB0_2"), "$L__BB0_1:", BARRIER, "$L__BB0_2:", RELEASE),
            [RULES["store", "release"]],
        ),
        (("atom.global.gpu.relaxed.add.u32 %r1, [%rd1], 1;",), [ptx_order.NARROW]),
        # relaxed and of this GPU, if it says nothing
        (("atom.global.add.u32 %r1, [%rd1], 1;",), [ptx_order.NARROW]),
        (("atom.global.sys.relaxed.add.u32 %r1, [%rd1], 1;",), []),
        (("st.release.gpu.global.b64 [%rd1], %rd2;",), [ptx_order.NARROW]),
        (("ld.acquire.gpu.global.b64 %rd2, [%rd1];",), [ptx_order.NARROW]),
        (("st.relaxed.gpu.global.b64 [%rd1], %rd2;",), [ptx_order.NARROW]),
        (("membar.gl;",), [ptx_order.NARROW]),
        (("fence.acq_rel.gpu;",), [ptx_order.NARROW]),
        (
            (
                "fence.acq_rel.sys;",
                "fence.proxy.async.global;",
                "atom.shared.add.u32 %r1, [%r2], 1;",
            ),
            [],
        ),
        ((PUBLISHED, "st.release.gpu.global.b64 [%rd1], %rd2;"), []),
        ((PUBLISHED, "st.release.cta.global.b64 [%rd1], %rd2;"), [ptx_order.NARROW]),
        ((ELSEWHERE, "st.release.gpu.global.b64 [%rd1], %rd2;"), [ptx_order.NARROW]),
        ((WAIT.replace(".sys", ".gpu"),), [ptx_order.RELAXED, ptx_order.NARROW]),
        ((SAID, "atom.global.gpu.release.add.u32 %r1, [%rd1], 1;"), []),
        ((SAID, "atom.global.gpu.relaxed.add.u32 %r1, [%rd1], 1;"), [ptx_order.UNORDERED]),
        ((HEARD, "ld.acquire.gpu.global.b32 %r1, [%rd1];"), []),
        ((HEARD, "barrier.cta.red.and.pred all, 0, mine;"), []),
        ((HEARD, "ld.relaxed.gpu.global.b32 %r1, [%rd1];"), [ptx_order.UNORDERED]),
        ((LEFT, "atom.global.gpu.acq_rel.add.u32 %r1, [%rd1], 1;"), []),
        ((LEFT, "atom.global.gpu.release.add.u32 %r1, [%rd1], 1;"), [ptx_order.UNORDERED]),
        (
            ("cp.async.cg.shared.global [%r1], [%rd1], 16;", BARRIER, RELEASE),
            [ptx_order.ASYNCHRONOUS],
        ),
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


def test_tables_of_functions_that_are_called_are_others() -> None:
    """Each function counts its own from 0, and their labels are not the kernel's."""
    text = kernel(*jump("$L__BB0_1, $L__BB0_1"), "$L__BB0_1:", RELEASE)
    called = (
        ".func called()\n{\n$L_brx_0: .branchtargets $L__BB1_7, $L__BB1_8;\n}\n// -- End function\n"
    )
    assert ptx_order.problems(text) == [RULES["store", "release"]]
    assert ptx_order.problems(text + "\n" + called) == [RULES["store", "release"]]
    assert ptx_order.problems(NVSHMEM_3_7 + text + "\n" + called) == [RULES["store", "release"]]


THREAD = "mov.u32 %r1, %tid.x;\nsetp.eq.s32 %p1, %r1, 0;"
PROGRAM = "mov.u32 %r1, %ctaid.x;\nsetp.eq.s32 %p1, %r1, 0;"
AGREE = "// begin inline asm\nbarrier.cta.red.and.pred all, 0, mine; selp.u32 %r2, 1, 0, all;\n// end inline asm"
POLLED = WAIT.replace("@again", "mov.b32 %r1, 1;\n@again") + "\nsetp.eq.s32 %p1, %r1, 0;"
INSIDE = ("@%p1 bra $L__BB0_1;", BARRIER, "$L__BB0_1:")
AFTER = ("@%p1 bra $L__BB0_1;", STORE, "$L__BB0_1:", BARRIER)
CHOICE = (
    "mov.b32 %r3, 0;",
    "@%p1 bra $L__BB0_1;",
    "mov.b32 %r3, 1;",
    "$L__BB0_1:",
    "setp.eq.s32 %p1, %r3, 0;",
)


def over_lanes(*address: str) -> tuple[str, ...]:
    """A sum over the lanes of each warp of words at ``address``, and a branch on it."""
    return (
        "mov.u32 %r1, %tid.x;",
        "shl.b32 %r4, %r1, 2;",
        *address,
        "ld.shared.b32 %r6, [%r5];",
        "redux.sync.add.s32 %r7, %r6, %r9;",
        "setp.eq.s32 %p1, %r7, 0;",
    )


def exchanged(mask: int, *bits: int, sums: str = "add.s32") -> tuple[str, ...]:
    """A sum that lanes make by exchanges with those that differ in one of ``bits``, of words whose
    address has the bits ``mask`` of the thread's number, and a branch on it."""
    lines = ["mov.u32 %r1, %tid.x;", f"and.b32 %r10, %r1, {mask};", "ld.shared.b32 %r11, [%r10];"]
    for place, bit in enumerate(bits):
        part, partner, both = (f"%r{11 + 2 * place + i}" for i in range(3))
        lines.append(f"shfl.sync.bfly.b32 {partner}, {part}, {bit}, 31, -1;")
        lines.append(f"{sums} {both}, {part}, {partner};")
    return (*lines, f"setp.eq.s32 %p1, %r{11 + 2 * len(bits)}, 0;")


@pytest.mark.parametrize(
    ("lines", "seen"),
    [
        ((*exchanged(7, 4, 2, 1), *INSIDE), False),
        ((*exchanged(31, 16, 8, 4, 2, 1), *INSIDE), False),
        ((*exchanged(7, 4, 2), *INSIDE), True),
        ((*exchanged(7, 4, 4, 1), *INSIDE), True),
        ((*exchanged(63, 16, 8, 4, 2, 1), *INSIDE), True),
        ((*exchanged(7, 4, 2, 1, sums="sub.s32"), *INSIDE), True),
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
        ((*over_lanes("and.b32 %r5, %r4, 28;"), *INSIDE), False),
        ((*over_lanes("and.b32 %r5, %r1, 31;"), *INSIDE), False),
        ((*over_lanes("mov.u32 %r5, %laneid;"), *INSIDE), False),
        ((*over_lanes("and.b32 %r5, %r4, 252;"), *INSIDE), True),
        ((*over_lanes("and.b32 %r5, %r1, 63;"), *INSIDE), True),
        ((*over_lanes("mov.u32 %r5, %r1;"), *INSIDE), True),
        ((*over_lanes("and.b32 %r5, %r4, 28;", "add.s32 %r5, %r5, %r1;"), *INSIDE), True),
    ],
)
def test_barriers_that_some_threads_do_not_reach_are_seen(
    lines: tuple[str, ...], seen: bool
) -> None:
    text = kernel(*"\n".join(lines).splitlines())
    assert ptx_divergence.divergence(text) == ([ptx_divergence.DIVERGENT] if seen else [])


# ---------------------------------------------------------------------- NVSHMEM's asynchronous copies

POLICY = "ld.const.b32 %r5, [nvshmemi_device_state_d+776];"
COPY = "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], %r2;"
OFF = (
    POLICY,
    "setp.eq.b32 %p2, %r5, 0;",
    "@%p2 bra $L__BB0_1;",
    COPY,
    "$L__BB0_1:",
    BARRIER,
    RELEASE,
)
ON = (
    *(POLICY, "setp.ne.b32 %p2, %r5, 0;", "@%p2 bra $L__BB0_1;", BARRIER, RELEASE, "ret;"),
    *("$L__BB0_1:", COPY, BARRIER, RELEASE),
)
INVERTED = (POLICY, "setp.ne.b32 %p1, %r5, 0;", "not.pred %p2, %p1;", *OFF[2:])
SHARED = (  # a register that has the policy, or 1 on a path that is left out with it
    *(
        POLICY,
        "@%p3 bra $L__BB0_4;",
        "setp.eq.b32 %p2, %r5, 0;",
        "@%p2 bra $L__BB0_4;",
        "mov.b32 %r5, 1;",
    ),
    *(
        "$L__BB0_4:",
        "setp.eq.b32 %p4, %r5, 0;",
        "@%p4 bra $L__BB0_1;",
        COPY,
        "$L__BB0_1:",
        BARRIER,
        RELEASE,
    ),
)
NOT_TAKEN = (POLICY, "setp.ne.b32 %p2, %r5, 0;", "@!%p2 bra $L__BB0_1;", *OFF[3:])


def changed(lines: tuple[str, ...], given: str, other: str) -> tuple[str, ...]:
    assert any(given in line for line in lines)
    return tuple(line.replace(given, other) for line in lines)


@pytest.mark.parametrize("version", [NVSHMEM_3_7, NVSHMEM_3_8])
@pytest.mark.parametrize("lines", [OFF, ON, INVERTED, NOT_TAKEN, SHARED])
def test_copies_behind_nvshmems_policy_are_not_reached(
    version: str, lines: tuple[str, ...]
) -> None:
    assert ptx_order.problems(version + kernel(*lines)) == []


@pytest.mark.parametrize(
    ("version", "lines"),
    [
        (NVSHMEM_3_7, (COPY, *OFF)),
        (NVSHMEM_3_7, (*OFF[:4], "$L__BB0_1:", COPY, BARRIER, RELEASE)),
        (NVSHMEM_3_7, changed(OFF, "+776", "+772")),  # another word of the state
        (NVSHMEM_3_7, changed(OFF, "setp.eq", "setp.ne")),
        (NVSHMEM_3_7, changed(OFF, "@%p2", "@!%p2")),
        # the predicate may be another
        (NVSHMEM_3_7, (*OFF[:2], "setp.eq.b32 %p2, %r6, 0;", *OFF[2:])),
        (NVSHMEM_3_7, (OFF[0], "mov.b32 %r5, %r6;", *OFF[1:])),
        (NVSHMEM_3_7, (OFF[0], "mov.b32 %r5, 1;", *OFF[1:])),
        (NVSHMEM_3_7, (OFF[0], "add.s32 %r5, %r5, %r6;", *OFF[1:])),
        # on some path
        (NVSHMEM_3_7, (OFF[0], "@%p7 bra $L__BB0_5;", "mov.b32 %r5, 2;", "$L__BB0_5:", *OFF[1:])),
        (NVSHMEM_3_9, OFF),  # nobody has looked where its policy is
        ("", OFF),
    ],
)
def test_other_copies_are_reported(version: str, lines: tuple[str, ...]) -> None:
    assert ptx_order.problems(version + kernel(*lines)) == [ptx_order.ASYNCHRONOUS]


def test_barriers_around_copies_that_are_not_reached() -> None:
    lines = (*OFF[:3], THREAD, *(line.replace("_1", "_9") for line in INSIDE), COPY, *OFF[4:])
    assert ptx_divergence.divergence(NVSHMEM_3_7 + kernel(*lines)) == []
    assert ptx_divergence.divergence(NVSHMEM_3_9 + kernel(*lines)) == [ptx_divergence.DIVERGENT]


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        ((PUT[0], "ld.relaxed.gpu.b32 %r7, [%rd5];"), []),
        ((PUT[0], "ld.relaxed.gpu.global.L1::no_allocate.b64 %rd7, [%rd5];"), []),
        ((PUT[0], "ld.relaxed.gpu.global.b64 %rd7, [%rd5];"), [ptx_order.NARROW]),
        ((PUT[0], "st.relaxed.gpu.b32 [%rd5], %r7;"), [ptx_order.NARROW]),
        (("ld.relaxed.gpu.b32 %r7, [%rd5];",), [ptx_order.NARROW]),
    ],
)
def test_loads_of_nvshmems_own_words_of_this_gpu(
    lines: tuple[str, ...], problems: list[str]
) -> None:
    assert ptx_order.problems(kernel(*lines)) == problems
