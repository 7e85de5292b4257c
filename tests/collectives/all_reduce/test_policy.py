# SPDX-License-Identifier: Apache-2.0
"""Which all-reduce is launched, and how: what is chosen, what can be had, epochs and tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdcoll.collectives._host.plan import MOST_EPOCHS, Facts, Plan
from tdcoll.collectives.all_reduce.policy import part_bytes
from tdcoll.collectives.all_reduce.spec import SPEC
from tdcoll.limits import lamport_bytes
from tdcoll.runtime.topology import Topology
from tdcoll.tuning import SIMULATOR, Entry, Section, Table

K, M, G = 1 << 10, 1 << 20, 1 << 30
USUAL = {"stores": True, "lamport_bytes": 512 * K, "ll_bytes": 340 * K}
FLAGS = {**USUAL, "lamport_bytes": 0}
LARGE = {**USUAL, "lamport_bytes": 16 * M}


def nodes_of(*sizes: int) -> Topology:
    ids = [node for node, size in enumerate(sizes) for _ in range(size)]
    return Topology.of(0, range(len(ids)), ids)


def choose(nbytes: int, nodes: tuple[int, ...], algorithm: Any = "auto", sections: Any = (), **facts: Any) -> Plan:
    facts = {"itemsize": 4, **facts}
    return replace(SPEC.choose(Facts(nbytes, nodes_of(*nodes), **facts), algorithm, sections), blocks=0)


@pytest.mark.parametrize(
    ("nbytes", "nodes", "facts", "algorithm", "chunk"),
    [
        (0, (4,), USUAL, "one_shot", 64 * 16),
        (1, (4,), USUAL, "one_shot", 64 * 16),
        (0, (4,), FLAGS, "one_shot", 64 * 12),
        (64 * K, (4,), FLAGS, "one_shot", 64 * 12),
        (128 * K, (4,), USUAL, "one_shot", 64 * 16),
        (640 * K // 3, (4,), USUAL, "one_shot", 128 * 16),
        (640 * K // 3 + 1, (4,), USUAL, "two_shot", 64 * 16),
        (60 * K, (8,), USUAL, "one_shot", 64 * 16),
        (61 * K, (8,), USUAL, "two_shot", 64 * 16),
        (1536 * K, (2,), LARGE, "one_shot", 512 * 16),
        (1536 * K + 1, (2,), LARGE, "two_shot", 512 * 16),
        (16 * M, (2,), LARGE, "two_shot", 512 * 16),
        # Several epochs, of at least 4 MB each:
        (16 * M + 1, (2,), LARGE, "two_shot", 512 * 16),
        (G, (2,), LARGE, "two_shot", 512 * 16),
        (16 * M, (3,), {**LARGE, "lamport_bytes": 32 * M // 3}, "two_shot", 512 * 16),  # 16 bytes over the room
        (64 * M, (8,), {**LARGE, "lamport_bytes": 4 * M}, "two_shot", 512 * 16),
        (8 * M, (4,), {**LARGE, "lamport_bytes": 2 * M}, "two_shot", 512 * 16),
        (8 * M - 32, (4,), {**LARGE, "lamport_bytes": 2 * M}, "direct", 16 * K),
        (16 * M + 1, (2,), {**LARGE, "symmetric": True}, "direct", 32 * K + 128),
        (16 * M + 1, (2,), {**LARGE, "lamport_bytes": 0}, "direct", 32 * K + 128),
        (16 * M + 1, (2,), {**LARGE, "simulated": True}, "direct", 32 * K + 128),
        (16 * M + 1, (2,), {**LARGE, "stores": False}, "1d", 509 * 128),
        (M, (4,), USUAL, "two_shot", 128 * 16),
        (M + 1, (4,), USUAL, "direct", 121 * 128),  # both halves are over the room
        (G, (8,), USUAL, "direct", 512 * K),
        (64, (4,), {**USUAL, "itemsize": 8}, "direct", 128),
        (64, (4,), {**USUAL, "simulated": True}, "direct", 128),
        (64, (4,), {}, "1d", 128),  # ranks that cannot store to each other's memory
        (64, (2, 2), USUAL, "2d", 128),
        (64, (2, 1), USUAL, "1d", 128),
        (64, (1, 1), USUAL, "1d", 128),
        (64, (2, 2), {**USUAL, "stores": False}, "1d", 128),
        (64, (1,), USUAL, "one_shot", 64 * 16),
    ],
)
def test_what_is_taken_where_nothing_was_measured(
    nbytes: int, nodes: tuple[int, ...], facts: dict[str, Any], algorithm: str, chunk: int
) -> None:
    plan = choose(nbytes, nodes, **facts)
    assert (plan.algorithm, plan.chunk) == (algorithm, chunk)
    small = choose(nbytes, nodes, max_programs=100, **facts)
    assert "shot" in small.algorithm or small.channels * (2 * sum(nodes) + 1) < 100


@given(
    nbytes=st.one_of(st.integers(0, 4096), st.integers(0, 4 * M)),
    world=st.integers(1, 16),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    lamport=st.sampled_from([0, 1, 100, 128 * K, 2 * M]),
    flagged=st.sampled_from([0, 100, 128 * K]),
    channels=st.sampled_from([2, 3, 512]),
)
def test_plans_cover_the_data_and_fit(
    nbytes: int, world: int, itemsize: int, lamport: int, flagged: int, channels: int
) -> None:
    """Whatever the policy makes can be launched, in its first epoch: its own check takes it."""
    facts = Facts(
        nbytes, nodes_of(world), flagged, stores=True, lamport_bytes=lamport, itemsize=itemsize, channels=channels
    )
    tried = 0
    for name in SPEC.names:
        if SPEC.algorithm(name).supports(facts) is None:
            plan, tried = SPEC.choose(facts, name), tried + 1
            assert SPEC.choose(facts, plan) == plan
            if name in ("one_shot", "two_shot"):
                epoch = SPEC.algorithm(name).epoch(facts)
                assert epoch == nbytes or name == "two_shot"
                width = 16 if plan.chunk % 16 == 0 and plan.chunk // 16 & (plan.chunk // 16 - 1) == 0 else 12
                words = max(1, -(-epoch // width))
                sent = words if name == "one_shot" else 2 * -(-words // world)
                room = -(-lamport // 16) if width == 16 else max(1, -(-flagged // 12))
                assert sent <= room
                assert (plan.channels - 1) * plan.chunk < width * (words if name == "one_shot" else -(-words // world))
            else:
                part = part_bytes(nbytes, world)
                assert part % 16 == 0
                assert nbytes <= world * part < nbytes + 16 * world + 16 * (nbytes == 0)
                assert 2 * plan.channels <= channels
    assert tried >= 2
    assert SPEC.choose(facts).algorithm in SPEC.names


@pytest.mark.parametrize(
    ("algorithm", "facts", "message"),
    [
        ("ring", {}, "algorithm must be one of auto, one_shot, two_shot, direct, 1d, 2d; got 'ring'"),
        (
            "one_shot",
            {**USUAL, "itemsize": 8},
            "'one_shot' needs elements of at most 4 bytes; got elements of 8 bytes on",
        ),
        (
            "two_shot",
            {},
            "algorithm='two_shot' needs one node whose ranks can store to each other's memory; got 4 rank",
        ),
        (
            "one_shot",
            {"stores": True, "ll_bytes": 12},
            "needs fewer bytes, or a context with more lamport_bytes or fla",
        ),
        *(
            (
                "two_shot",
                {"stores": True, "lamport_bytes": n},
                "two_shot' needs fewer bytes, or a context with more",
            )
            for n in (0, 16)  # none, and a word for one of the two halves
        ),
        ("direct", {}, "algorithm='direct' needs one node whose ranks can store"),
        (
            "direct",
            {"stores": True, "channels": 1},
            "algorithm='direct' needs a context with at least 2 channels; got 1",
        ),
        ("1d", {"channels": 1}, "algorithm='1d' needs a context with at least 2 channels; got 1 on 4 rank"),
        (Plan("direct", 1, 128, 3), USUAL, "a Plan's num_warps must be one of 1, 2, 4, 8, 16, 32; got 3"),
        (Plan("direct", 1, 24, 1), USUAL, "chunks must be a multiple of 16 bytes and cover all 32 bytes; got 1 of 24"),
        (Plan("direct", 3, 16, 1), {**USUAL, "channels": 5}, "a Plan's channels must be 1 to 2, got 3"),
        (Plan("one_shot", 1, 96, 1), USUAL, "must be 16 times a power of two, at most 16384, bytes and cover all 112"),
        (Plan("one_shot", 1, 128, 1), FLAGS, "must be 12 times a power of two, at most 12288, bytes and cover all 108"),
        (Plan("one_shot", 3, 64, 1), USUAL, "a Plan's channels must be 1 to 2, got 3"),
        (Plan("two_shot", 2, 32, 1), USUAL, "a Plan's channels must be 1 to 1, got 2"),
    ],
)
def test_what_cannot_be_had(algorithm: Any, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(100, (4,), algorithm, **facts)


def test_auto_never_says_to_use_auto() -> None:
    """A context of one channel has no signal for sums."""
    assert choose(100, (4,), **USUAL, channels=1, simulated=True).algorithm == "one_shot"
    assert choose(M, (4,), **USUAL, channels=1, simulated=True).algorithm == "two_shot"
    for nodes in ((4,), (2, 2)):
        with pytest.raises(ValueError, match=r"^all_reduce needs a context with at least 2 channels; got 1 on [^.]*$"):
            choose(G, nodes, **FLAGS, channels=1)


def test_words_are_for_less_than_half_of_what_32_bits_count() -> None:
    huge = {**USUAL, "lamport_bytes": 4 * G, "ll_bytes": 4 * G}
    assert choose(G - 1, (2,), "two_shot", **huge).algorithm == "two_shot"
    for nbytes, several in ((G, [G // 2] * 2), (3 * G, [3 * G // 4] * 4)):
        assert epochs(Facts(nbytes, nodes_of(2), **huge)) == several
        for name, facts in (("one_shot", huge), ("two_shot", {**huge, "lamport_bytes": 0})):
            with pytest.raises(ValueError, match=f"algorithm='{name}' needs less than {G} bytes"):
                choose(nbytes, (2,), name, **facts)


def epochs(facts: Facts) -> list[int]:
    """Bytes of each epoch of a two-shot."""
    each = SPEC.algorithm("two_shot").epoch(facts)
    return [min(each, facts.nbytes - begin) for begin in range(0, facts.nbytes, each)]


@given(
    nbytes=st.one_of(st.integers(1, 4096), st.integers(1, 64 * M)),
    world=st.integers(1, 16),
    lamport=st.sampled_from([16, 32, 33, 100, 4 * K, 2 * M]),
    flagged=st.sampled_from([-1, 0, 100, 4 * K]),
)
def test_two_shot_is_as_few_equal_epochs_as_can_be(nbytes: int, world: int, lamport: int, flagged: int) -> None:
    facts = Facts(nbytes, nodes_of(world), flagged, stores=True, lamport_bytes=lamport, itemsize=1)
    room = -(-lamport // 16) // 2 * world * 16
    if SPEC.algorithm("two_shot").supports(facts) is not None:
        assert nbytes > MOST_EPOCHS * room
        return
    first, *others = epochs(facts)
    if not others:  # by either kind of words
        return
    assert len(others) == -(-nbytes // room) - 1 < MOST_EPOCHS
    assert first % 16 == 0
    assert others[:-1] == [first] * (len(others) - 1)
    assert first - 16 * len(others) - 16 < others[-1] <= first <= room
    for each in (first, others[-1]):
        part = Facts(each, facts.topology, flagged, stores=True, lamport_bytes=lamport, itemsize=1)
        assert epochs(part) == [each]
    assert SPEC.choose(facts, "two_shot") == SPEC.choose(
        Facts(first, facts.topology, flagged, stores=True, lamport_bytes=lamport, itemsize=1), "two_shot"
    )


def test_entries_of_a_table() -> None:
    def plan(entry: Entry, nbytes: int = 100 * K, **facts: Any) -> Plan:
        table = Table((Section(SIMULATOR, "all_reduce", 4, 1, False, (entry,)),))
        sections = SPEC.sections(Table.parse(table.text()).sections, "t.json")
        return choose(nbytes, (4,), sections=sections, **{**USUAL, **facts})

    assert plan(Entry(None, "two_shot", chunk=64 * 16, num_warps=2)) == Plan("two_shot", 25, 64 * 16, 2)
    assert plan(Entry(None, "one_shot", chunk=256 * 12, num_warps=8)) == Plan("one_shot", 50, 128 * 16, 4)  # at most
    assert plan(Entry(None, "one_shot", chunk=256 * 12), lamport_bytes=0) == Plan("one_shot", 34, 256 * 12, 8)
    assert plan(Entry(None, "direct", channels=5)) == Plan("direct", 5, 40 * 128, 8)
    assert plan(Entry(None, "two_shot"), nbytes=M + 1).algorithm == "two_shot"  # in two epochs
    assert plan(Entry(None, "two_shot"), nbytes=G + 1).algorithm == "direct"  # which cannot be had
    for entry, message in (
        (Entry(None, "ll"), "algorithm: expected one of one_shot, two_shot, direct, 1d, 2d, got ll"),
        (Entry(None, "one_shot", chunk=640), "expected 16 times a power of two, from 512 .* or 12 times .* got 640"),
        (Entry(None, "direct", chunk=100), "chunk: expected a multiple of 128 bytes, got 100"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(entry)


def test_room_for_words_by_default() -> None:
    assert [lamport_bytes(world, 1) * world for world in (1, 2, 4, 8)] == [32 * M] * 4
    assert lamport_bytes(8, 2) == 0
