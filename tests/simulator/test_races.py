# SPDX-License-Identifier: Apache-2.0
"""Races are named in the fair schedule, without luck, and kernels without a fault have none."""

from __future__ import annotations

import json
import linecache
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import protocols
import pytest
import racing
import torch
from cases import Case, around, case, gather, handed_over, put_and_told, segment
from test_negative_controls import CAUGHT, CLEAN

import tdcoll
from tdcoll.simulator import clocks
from tdcoll.testing import DataRace, World, replay


def race_in(wanted: Case, n_pes: int = 2, **options: Any) -> DataRace | None:
    """The race that a case has in the fair schedule."""
    try:
        wanted(World(n_pes, weak=True, races=True, **options))
    except DataRace as race:
        return race
    return None


def lines(race: DataRace) -> set[str]:
    """The lines of the source that a report names."""
    found = [re.search(r"\((\S+?):(\d+)\)", access) for access in race.accesses]
    assert all(found), race
    return {linecache.getline(at[1], int(at[2])).strip() for at in found if at}


def broadcasts(ack: bool) -> Case:
    @case
    def run(pe: int, n: int) -> None:
        monitor = tdcoll.WaitMonitor()
        buffer = tdcoll.zeros((2, 16), torch.uint8, name="buffer")
        arrived = tdcoll.zeros(2, torch.int64, name="arrived")
        taken = tdcoll.zeros(n, torch.int64, name="taken")
        tdcoll.barrier()
        for call in range(1, 5):
            slot = call % 2
            if pe == 0:
                buffer[slot] = segment(0, call, 16)
            protocols.broadcast[(1,)](
                buffer[slot], arrived[slot:], taken, 16, call, monitor.words, n, ack
            )
            assert buffer[slot].max() >= 0  # read by all

    return run


def announced(fault: str) -> Case:
    @case
    def run(pe: int, n: int) -> None:
        words = tdcoll.zeros((2, 8), torch.int64, name="words")
        told = tdcoll.zeros(1, torch.int64, name="told")
        monitor = tdcoll.WaitMonitor()
        tdcoll.barrier()
        for call in range(1, 5):
            racing.announce[(1,)](words, told, monitor.words, call, fault)

    return run


STORE = "tl.store(tdl.remote_ptr(box, 1) + index, index)"
LOAD = "tl.store(out + index, tl.load(box + index))"
PUT = "tdl.putmem_nbi_block(box, source, 256, 1)"
FILL = "tl.store(source + index, index)"

FAULTS = [
    (handed_over, "no barrier", {STORE, LOAD}, clocks.NO_BARRIER),
    (handed_over, "gpu release", {STORE, LOAD}, clocks.NARROW),
    (handed_over, "gpu acquire", {STORE, LOAD}, clocks.NARROW),
    (handed_over, "relaxed store", {STORE, LOAD}, clocks.NO_RELEASE),
    (handed_over, "relaxed load", {STORE, LOAD}, clocks.NO_ACQUIRE),
    (handed_over, "one thread waits", {STORE, LOAD}, clocks.LANE),
    (handed_over, "no wait", {STORE, LOAD}, "a signal, released behind the first"),
    (put_and_told, "no fence", {PUT, LOAD}, clocks.NO_RELEASE),
    (put_and_told, "put of what is being stored", {FILL, PUT}, "syncthreads()"),
    (put_and_told, "source written early", {FILL, PUT}, "quiet() before the source"),
]


@pytest.mark.parametrize(
    ("made", "fault", "named", "remedy"),
    FAULTS,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_is_named_with_both_lines(
    made: Callable[[str], Case], fault: str, named: set[str], remedy: str
) -> None:
    race = race_in(made(fault))
    assert race is not None
    assert lines(race) == named, race
    assert any(remedy in one for one in race.remedies), race
    assert re.fullmatch(r"pe\d\.(box|source)\[0:32\]", race.bytes), race
    assert race_in(made("none")) is None


def test_a_ring_of_one_slot_is_a_race() -> None:
    race = race_in(around(slots=1), 3)
    assert race is not None
    assert re.fullmatch(r"pe\d\.inbox\[0:32\]", race.bytes)
    assert any("putmem_signal_block" in line for line in lines(race)), race
    assert race_in(around(slots=2), 3) is None


def test_a_broadcast_without_acknowledgement_is_a_race() -> None:
    race = race_in(broadcasts(ack=False), 4)
    assert race is not None
    assert re.fullmatch(r"pe[123]\.buffer\[\d+:\d+\]", race.bytes)
    assert (
        "tdl.putmem_signal_block(buffer, buffer, nbytes, arrived, call, tdl.SIGNAL_SET, peer)"
        in lines(race)
    )
    assert race_in(broadcasts(ack=True), 4) is None


def test_words_that_announce_themselves_need_a_second_slot() -> None:
    race = race_in(announced("one slot"))
    assert race is not None
    assert race.bytes.startswith("pe1.words")
    assert any("wait_flagged" in line for line in lines(race)), race
    assert race_in(announced("none")) is None


def test_the_timeline_shows_who_loads_what(tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    replay(handed_over("none"), 0, n_pes=2, trace=path)
    events = json.loads(path.read_text())["traceEvents"]
    loads = [event for event in events if event["name"].startswith("load ")]
    assert [event["name"] for event in loads] == ["load pe1.box[0:32]"]
    assert loads[0]["pid"] == 1
    assert re.fullmatch(r"\S*racing\.py:\d+", loads[0]["args"]["at"])


@pytest.mark.parametrize("steps", CLEAN, ids=str)
def test_right_kernels_have_no_race(steps: Any) -> None:
    assert race_in(gather(steps), 4) is None


@pytest.mark.parametrize("steps", [s for s in CAUGHT if s.order != "signal first"], ids=str)
def test_data_that_no_signal_orders_is_a_race(steps: Any) -> None:
    race = race_in(gather(steps), 4)
    assert race is not None
    assert "pe" in race.bytes
    assert ".buffer[" in race.bytes
