# SPDX-License-Identifier: Apache-2.0
"""Under PTX's memory model, the patterns of communication in emitted PTX have no execution with stale
data, and each of their mutants has one.

The executions of mutants are printed: ``-rP`` shows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("z3")  # of the extra test

import ptx_patterns
from memory_model import communication as model
from memory_model.axioms import Execution
from test_compile import DRIVER_S, compiled  # noqa: F401  a fixture
from test_ptx_order import BARRIER, LOAD, PUT, RELEASE, STORE, WAIT, WORDS, kernel

pytestmark = pytest.mark.timeout(DRIVER_S + 100)

Pattern = tuple[str, ...]


def emitted(kernels: dict[str, Any], role: str) -> list[Pattern]:
    """Return the weakest patterns of a role in all kernels; there is at least one."""
    found = [pattern for entry in kernels["order"] for pattern in entry["patterns"].get(role, [])]
    assert found, role
    return model.weakest(found)


def of_peers(patterns: list[Pattern]) -> list[Pattern]:
    """Return the patterns whose signals go to peers."""
    return [pattern for pattern in patterns if not model.is_for_one_gpu(pattern)]


def mutants(pattern: Pattern) -> Iterator[tuple[str, Pattern]]:
    """Yield the mutants of a pattern that differ from it."""
    for name, change in model.MUTANTS.items():
        if change(pattern) != pattern:
            yield name, change(pattern)


def assert_none(found: Execution | None, *patterns: Any) -> None:
    assert found is None, f"{patterns}\n{found}"


def assert_one(found: Execution | None, name: str, *patterns: Any) -> None:
    assert found is not None, f"no execution with stale data: {name}, {patterns}"
    print(f"{name}: {patterns}\n{found}\n")


def test_signals_come_after_their_data(compiled) -> None:  # noqa: F811
    sent = of_peers(emitted(compiled, "stores released"))
    received = emitted(compiled, "loads after a wait")
    for one in sent:
        for other in received:
            assert_none(model.signal_after_data(one, other), one, other)
        for name, mutant in mutants(one):
            assert_one(model.signal_after_data(mutant, received[0]), name, mutant)
    for other in received:
        for name, mutant in mutants(other):
            assert_one(model.signal_after_data(sent[0], mutant), name, mutant)


def test_thread_blocks_of_a_launch_meet(compiled) -> None:  # noqa: F811
    sent = [p for p in emitted(compiled, "stores released") if model.is_for_one_gpu(p)]
    received = emitted(compiled, "loads after a meeting")
    assert sent
    for one in sent:
        for other in received:
            assert_none(model.signal_after_data(one, other, one_gpu=True), one, other)
        for name, mutant in mutants(one):
            assert_one(model.signal_after_data(mutant, received[0], one_gpu=True), name, mutant)


def test_a_rank_hands_on_what_it_has_waited_for(compiled) -> None:  # noqa: F811
    sent = of_peers(emitted(compiled, "stores released"))[0]
    received = emitted(compiled, "loads after a wait")[0]
    for pattern in of_peers(emitted(compiled, "releases after a wait")):
        assert_none(model.two_shot(sent, pattern, received), pattern)
        for name, mutant in mutants(pattern):
            assert_one(model.two_shot(sent, mutant, received), name, mutant)


def test_a_slot_is_written_again_when_it_has_been_read(compiled) -> None:  # noqa: F811
    read = of_peers(emitted(compiled, "releases after loads"))
    written = emitted(compiled, "stores after a wait")
    for one in read:
        for other in written:
            assert_none(model.reused_slot(one, other), one, other)
        for name, mutant in mutants(one):
            assert_one(model.reused_slot(mutant, written[0]), name, mutant)
    for other in written:
        for name, mutant in mutants(other):
            assert_one(model.reused_slot(read[0], mutant), name, mutant)


def test_puts_send_what_was_stored_before(compiled) -> None:  # noqa: F811
    for pattern in emitted(compiled, "stores put"):
        assert_none(model.put_after_stores(pattern), pattern)
        mutant = model.without_barriers(pattern)
        assert_one(model.put_after_stores(mutant), "no barrier", mutant)


def test_words_hold_their_flag_or_announce_themselves(compiled) -> None:  # noqa: F811
    words = {
        tuple(mnemonic)
        for entry in compiled["order"]
        for mnemonic in entry["patterns"].get("words", [])
        if mnemonic
    }
    stores = sorted(mnemonic for of_kernel in words for mnemonic in of_kernel if "st" in mnemonic)
    assert {store.split(".")[-1] for store in stores} == {"b128", "b32"}
    flagged = "st.relaxed.sys.global.b128", "ld.volatile.global.b128"
    lamport = "st.relaxed.sys.global.v4.b32", "ld.relaxed.sys.global.v4.b32"
    assert {mnemonic for of_kernel in words for mnemonic in of_kernel} == {*flagged, *lamport}
    assert_none(model.flagged_word(*flagged, whole_words=True), flagged)
    assert_one(model.flagged_word(*flagged, whole_words=False), "two 64-bit words", flagged)
    assert model.lamport_word(*lamport) == [None] * 4
    for found in model.lamport_word(*lamport, cleared_before=False):
        assert_one(found, "cleared in the same launch", lamport)
    assert_one(model.one_part_polled(*lamport), "one part polled", lamport)


def test_copies_with_a_stamp(compiled) -> None:  # noqa: F811
    for pattern in emitted(compiled, "loads after a wait"):
        assert_none(model.copy_with_stamp(pattern), pattern)
        assert_one(model.copy_with_stamp(pattern, in_order=False), "no order of copies", pattern)
        for name, mutant in mutants(pattern):
            assert_one(model.copy_with_stamp(mutant), name, mutant)


def test_early_launches(compiled) -> None:  # noqa: F811
    early = [entry for entry in compiled["order"] if entry["launched_early"]]
    assert early
    for waits_first in {entry["waits_first"] for entry in early}:
        assert_none(model.early_launch(waits_first), waits_first)
    assert_one(model.early_launch(waits_first=False), "no wait first")


# ---------------------------------------------------------------------- how patterns are found

RELEASED = ["st.global", "bar.sync", "st.release.sys.global.b64"]


@pytest.mark.parametrize(
    ("lines", "role", "found"),
    [
        ((STORE, BARRIER, RELEASE), "stores released", [RELEASED]),
        ((STORE, RELEASE), "stores released", [RELEASED[::2]]),
        ((BARRIER, STORE, RELEASE, BARRIER), "stores released", [RELEASED[::2]]),
        ((RELEASE, STORE), "stores released", []),
        # a loop: behind the barrier of its next turn, and at once
        (
            ("$L__BB0_1:", RELEASE, BARRIER, STORE, "@%p1 bra $L__BB0_1;", RELEASE),
            "stores released",
            [RELEASED[::2]],
        ),
        (
            ("$L__BB0_1:", BARRIER, RELEASE, STORE, "@%p1 bra $L__BB0_1;"),
            "stores released",
            [RELEASED],
        ),
        # one path around the barrier
        (
            (STORE, "@%p1 bra $L__BB0_2;", BARRIER, "$L__BB0_2:", RELEASE),
            "stores released",
            [RELEASED, RELEASED[::2]],
        ),
        (
            (WAIT, BARRIER, LOAD),
            "loads after a wait",
            [["ld.acquire.sys.global.b64", "bar.sync", "ld.global"]],
        ),
        ((WAIT, LOAD), "loads after a wait", [["ld.acquire.sys.global.b64", "ld.global"]]),
        ((STORE, BARRIER, *PUT), "stores put", [["st.global", "bar.sync", "put"]]),
        ((STORE, *PUT), "stores put", [["st.global", "put"]]),
        (
            (WORDS, BARRIER, RELEASE),
            "releases after words",
            [["ld.volatile.global.b128", "bar.sync", "st.release.sys.global.b64"]],
        ),
        ((WORDS, "st.relaxed.sys.global.b128 [%rd1], wide;"), "words", None),
    ],
)
def test_patterns_of_ptx(lines: tuple[str, ...], role: str, found: list[list[str]] | None) -> None:
    if found is None:
        found = [["st.relaxed.sys.global.b128"], ["ld.volatile.global.b128"]]
    assert ptx_patterns.patterns(kernel(*lines)).get(role, []) == found


def test_a_pattern_with_more_barriers_isnt_the_weakest() -> None:
    weak = ("st.global", "bar.sync", "release")
    other = ("st.global", "barrier.cta.red.and.pred", "release")
    strong = ("st.global", "bar.sync", "barrier.cta.red.and.pred", "release")
    assert model.weakest([strong, weak, other]) == [weak, other]
    assert model.weakest([strong, weak, weak]) == [weak]
