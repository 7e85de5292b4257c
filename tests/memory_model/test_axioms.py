# SPDX-License-Identifier: Apache-2.0
"""The axioms give the published outcomes of well-known litmus tests.

Sources: those of :mod:`axioms`. Message passing, store buffering, load buffering, CoRR and atomics
are examples of the PTX ISA or of the paper; the paper says that PTX isn't multi-copy atomic (IRIW),
and that causality is transitive (ISA2, WRC).

Each axiom matters to a test here, except two. Base causality order contains program order, so SC per
location matters only where atomicity is missing, and the other way round; and the axiom of Fence-SC
order changes no outcome here.
"""

from __future__ import annotations

import pytest

pytest.importorskip("z3")  # of the extra test

from memory_model.axioms import Thread
from memory_model.programs import Named, program

A = Thread("A", "block 0", "GPU 0")
A2 = Thread("A2", "block 0", "GPU 0")  # another thread of A's block
B = Thread("B", "block 1", "GPU 0")  # another block of A's GPU
C = Thread("C", "block 2", "GPU 1")
D = Thread("D", "block 3", "GPU 1")
D2 = Thread("D2", "block 3", "GPU 1")

STALE = {"r0": 1, "r1": 0}


def passing(release: str, acquire: str, writer: Thread = A, reader: Thread = C) -> Named:
    """Message passing, with these lines for the flag."""
    return program(
        {
            writer: ["st.global.b32 [x], 1", *release.split("; ")],
            reader: [*acquire.split("; "), "r1 = ld.global.b32 [x]"],
        }
    )


RELEASE = "st.release.sys.global.b32 [flag], 1"
ACQUIRE = "r0 = ld.acquire.sys.global.b32 [flag]"


@pytest.mark.parametrize(
    ("release", "acquire", "forbidden"),
    [
        (RELEASE, ACQUIRE, True),
        ("st.relaxed.sys.global.b32 [flag], 1", ACQUIRE, False),
        (RELEASE, "r0 = ld.relaxed.sys.global.b32 [flag]", False),
        ("st.release.gpu.global.b32 [flag], 1", ACQUIRE, False),
        (RELEASE, "r0 = ld.acquire.gpu.global.b32 [flag]", False),
        ("fence.acq_rel.sys; st.relaxed.sys.global.b32 [flag], 1", ACQUIRE, True),
        ("fence.acq_rel.gpu; st.relaxed.sys.global.b32 [flag], 1", ACQUIRE, False),
        ("st.relaxed.sys.global.b32 [flag], 1; fence.acq_rel.sys", ACQUIRE, False),
        (RELEASE, "r0 = ld.relaxed.sys.global.b32 [flag]; fence.acq_rel.sys", True),
        (RELEASE, "r0 = ld.global.b32 [flag]; fence.acq_rel.sys", False),
        ("st.release.sys.global.b32 [flag], 2; st.relaxed.sys.global.b32 [flag], 1", ACQUIRE, True),
        ("r9 = atom.release.sys.global.add.u32 [flag], 1", ACQUIRE, True),
        ("red.relaxed.sys.global.add.u32 [flag], 1", ACQUIRE, False),
        ("membar.sys; st.volatile.global.b32 [flag], 1", ACQUIRE, True),
        (RELEASE, "r0 = atom.relaxed.sys.global.add.u32 [flag], 0; fence.acq_rel.sys", True),
        (RELEASE, "r0 = red.relaxed.sys.global.add.u32 [flag], 0; fence.acq_rel.sys", False),
    ],
)
def test_message_passing(release: str, acquire: str, forbidden: bool) -> None:
    found = passing(release, acquire).shows(STALE)
    assert (found is None) == forbidden, str(found)


def test_gpu_scope_is_enough_on_one_gpu_and_cta_scope_in_one_block() -> None:
    gpu = RELEASE.replace("sys", "gpu"), ACQUIRE.replace("sys", "gpu")
    cta = RELEASE.replace("sys", "cta"), ACQUIRE.replace("sys", "cta")
    assert passing(*gpu, A, B).shows(STALE) is None
    assert passing(*gpu, A, C).shows(STALE) is not None
    assert passing(*cta, A, A2).shows(STALE) is None
    assert passing(*cta, A, B).shows(STALE) is not None


def test_an_execution_is_printed_with_what_reads_take() -> None:
    found = passing("st.relaxed.sys.global.b32 [flag], 1", ACQUIRE).shows(STALE)
    assert str(found).splitlines() == [
        "A (block block 0, GPU GPU 0)",
        "    st.global.b32 [x], 1",
        "    st.relaxed.sys.global.b32 [flag], 1",
        "C (block block 2, GPU GPU 1)",
        "    r0 = ld.acquire.sys.global.b32 [flag]",
        "        reads 1 from st.relaxed.sys.global.b32 [flag], 1 of A",
        "    r1 = ld.global.b32 [x]",
        "        reads 0 from initially 0 [x]",
    ]


def test_a_barrier_passes_on_what_one_thread_has_released() -> None:
    """The form of tdcoll's stores with a signal; without either barrier it fails."""
    for writers, readers in ((True, True), (False, True), (True, False)):
        made = program(
            {
                A: ["st.global.b32 [x], 1", "bar.sync 0"],
                A2: ["bar.sync 0"] * writers + [RELEASE],
                D: [ACQUIRE] + ["barrier.cta.red.and.pred"] * readers,
                D2: ["barrier.cta.red.and.pred", "r1 = ld.global.b32 [x]"],
            }
        )
        assert (made.shows(STALE) is None) == (writers and readers)


@pytest.mark.parametrize(
    ("fence", "forbidden"),
    [
        ("fence.sc.sys", True),
        ("fence.sc.gpu", False),
        ("fence.acq_rel.sys", False),
    ],
)
def test_store_buffering(fence: str, forbidden: bool) -> None:
    made = program(
        {
            A: ["st.relaxed.sys.global.b32 [x], 1", fence, "r0 = ld.relaxed.sys.global.b32 [y]"],
            C: ["st.relaxed.sys.global.b32 [y], 1", fence, "r1 = ld.relaxed.sys.global.b32 [x]"],
        }
    )
    assert (made.shows({"r0": 0, "r1": 0}) is None) == forbidden


def test_store_buffering_by_releases_and_acquires_is_allowed() -> None:
    made = program(
        {
            A: ["st.release.sys.global.b32 [x], 1", "r0 = ld.acquire.sys.global.b32 [y]"],
            C: ["st.release.sys.global.b32 [y], 1", "r1 = ld.acquire.sys.global.b32 [x]"],
        }
    )
    assert made.shows({"r0": 0, "r1": 0}) is not None


@pytest.mark.parametrize("dependent", [False, True])
def test_load_buffering(dependent: bool) -> None:
    lines = {
        A: ["r0 = ld.relaxed.sys.global.b32 [x]", "st.relaxed.sys.global.b32 [y], 1"],
        C: ["r1 = ld.relaxed.sys.global.b32 [y]", "st.relaxed.sys.global.b32 [x], 1"],
    }
    depends = [("r0", lines[A][1]), ("r1", lines[C][1])] if dependent else []
    made = program(lines, depends=depends)
    assert (made.shows({"r0": 1, "r1": 1}) is None) == dependent


def test_load_buffering_by_releases_and_acquires_is_forbidden() -> None:
    made = program(
        {
            A: ["r0 = ld.acquire.sys.global.b32 [x]", "st.release.sys.global.b32 [y], 1"],
            C: ["r1 = ld.acquire.sys.global.b32 [y]", "st.release.sys.global.b32 [x], 1"],
        }
    )
    assert made.shows({"r0": 1, "r1": 1}) is None


@pytest.mark.parametrize(
    ("between", "forbidden"), [((), False), (("fence.sc.sys",), True)], ids=["acquire", "fence.sc"]
)
def test_independent_reads_of_independent_writes(between: tuple[str, ...], forbidden: bool) -> None:
    made = program(
        {
            A: ["st.relaxed.sys.global.b32 [x], 1"],
            B: ["st.relaxed.sys.global.b32 [y], 1"],
            C: [
                "r0 = ld.acquire.sys.global.b32 [x]",
                *between,
                "r1 = ld.acquire.sys.global.b32 [y]",
            ],
            D: [
                "r2 = ld.acquire.sys.global.b32 [y]",
                *between,
                "r3 = ld.acquire.sys.global.b32 [x]",
            ],
        }
    )
    assert (made.shows({"r0": 1, "r1": 0, "r2": 1, "r3": 0}) is None) == forbidden


@pytest.mark.parametrize(("strength", "forbidden"), [("relaxed.sys", True), ("weak", False)])
def test_coherent_reads(strength: str, forbidden: bool) -> None:
    made = program(
        {
            A: [f"st.{strength}.global.b32 [x], 1"],
            C: [f"r0 = ld.{strength}.global.b32 [x]", f"r1 = ld.{strength}.global.b32 [x]"],
        }
    )
    assert (made.shows(STALE) is None) == forbidden


def test_a_thread_reads_its_own_writes_in_order() -> None:
    made = program({A: ["st.global.b32 [x], 1", "st.global.b32 [x], 2", "r0 = ld.global.b32 [x]"]})
    assert made.shows({"r0": 2}) is not None
    assert made.shows({"r0": 1}) is None
    assert made.shows({"r0": 0}) is None
    late = program({A: ["r0 = ld.global.b32 [x]", "st.global.b32 [x], 1"]})
    assert late.shows({"r0": 1}) is None


@pytest.mark.parametrize("second", ["release", "relaxed"])
def test_releases_hand_on_what_was_acquired(second: str) -> None:
    """ISA2: the third thread has heard of the first one only from the second."""
    made = program(
        {
            A: ["st.global.b32 [x], 1", RELEASE],
            B: [
                "r2 = ld.acquire.sys.global.b32 [flag]",
                f"st.{second}.sys.global.b32 [next], 1",
            ],
            C: ["r0 = ld.acquire.sys.global.b32 [next]", "r1 = ld.global.b32 [x]"],
        }
    )
    forbidden = made.shows({"r2": 1, "r0": 1, "r1": 0}) is None
    assert forbidden == (second == "release")


@pytest.mark.parametrize("second", ["release", "relaxed"])
def test_a_later_write_hides_an_earlier_one(second: str) -> None:
    """Coherence of weak writes that causality orders."""
    made = program(
        {
            A: ["st.global.b32 [x], 1", RELEASE],
            B: [
                "r2 = ld.acquire.sys.global.b32 [flag]",
                "st.global.b32 [x], 2",
                f"st.{second}.sys.global.b32 [next], 1",
            ],
            C: ["r0 = ld.acquire.sys.global.b32 [next]", "r1 = ld.global.b32 [x]"],
        }
    )
    assert made.shows({"r2": 1, "r0": 1, "r1": 2}) is not None
    forbidden = made.shows({"r2": 1, "r0": 1, "r1": 1}) is None
    assert forbidden == (second == "release")


@pytest.mark.parametrize(("scope", "forbidden"), [("sys", True), ("cta", False)])
def test_atomics(scope: str, forbidden: bool) -> None:
    made = program(
        {
            A: [f"r0 = atom.relaxed.{scope}.global.add.u32 [x], 1"],
            B: [f"r1 = atom.relaxed.{scope}.global.add.u32 [x], 1"],
        }
    )
    assert (made.shows({"r0": 0, "r1": 0}) is None) == forbidden


def test_observation_goes_through_atomics() -> None:
    """A release is seen by who reads what an atomic of a third thread has made of it."""
    made = program(
        {
            A: ["st.global.b32 [x], 1", "st.release.sys.global.b32 [flag], 1"],
            B: ["r2 = atom.relaxed.sys.global.add.u32 [flag], 2"],
            C: ["r0 = ld.acquire.sys.global.b32 [flag]", "r1 = ld.global.b32 [x]"],
        }
    )
    assert made.shows({"r2": 1, "r0": 2, "r1": 0}) is None
    assert made.shows({"r2": 0, "r0": 2, "r1": 0}) is not None


def test_words_of_128_bits_are_whole_only_if_that_is_assumed() -> None:
    lines = {
        A: ["st.relaxed.sys.global.b128 [word], 1"],
        C: ["r0 = ld.volatile.global.b128 [word]"],
    }
    torn = {"r0.1": 1, "r0.0": 0}
    assert program(lines).shows(torn) is not None
    assert program(lines, whole_words=True).shows(torn) is None


def test_a_value_that_nothing_writes_is_a_wrong_question() -> None:
    with pytest.raises(ValueError, match=r"ld.global.b32 \[x\]: no write of 3 to x"):
        passing(RELEASE, ACQUIRE).shows({"r1": 3})
