# SPDX-License-Identifier: Apache-2.0
"""The figures of the protocols show what the simulator does today, and that no slot is overwritten."""

from __future__ import annotations

import importlib
import subprocess
import sys
import xml.etree.ElementTree as xml
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs/figures"
sys.path.insert(0, str(ROOT / "docs"))
sequences = importlib.import_module("sequences")


@pytest.mark.parametrize("name", sequences.PROTOCOLS)
def test_figures_are_current(name: str) -> None:
    protocol = sequences.PROTOCOLS[name]
    found = sequences.events(protocol)
    drawn = xml.parse(FIGURES / f"{name}.svg").findtext(".//{http://purl.org/dc/elements/1.1/}description")
    assert drawn is not None
    assert drawn.splitlines() == sequences.summary(found), "run python docs/figures.py"
    assert sequences.overwritten(protocol, found) == []
    if protocol.reason:
        earlier, message, later = sequences.reason(protocol, found)
        assert sequences.held(protocol, found, earlier)[2] <= message.begin < message.end <= later.begin


def test_every_figure_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert {path.stem for path in FIGURES.glob("*.svg")} == set(sequences.PROTOCOLS)
    assert [name for name in sequences.PROTOCOLS if f"](figures/{name}.svg)" not in text] == []
    assert [path.name for path in FIGURES.glob("*") if path.stat().st_size >= 150_000] == []


def test_an_overwritten_slot_is_found() -> None:
    """With one slot, rank 0 sends call 2 to the slot that rank 1 still reads."""
    protocol = sequences.PROTOCOLS["two-slots"]
    found = sequences.events(protocol, partial(protocol.case, slots=1))
    assert "data 2: rank 0 -> rank 1, slot 0" in map(str, sequences.overwritten(protocol, found))


@pytest.mark.slow
def test_the_command_draws_all_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(ROOT / "docs/figures.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.svg")}
    assert made == {path.relative_to(ROOT) for path in (*FIGURES.glob("*.svg"), *ROOT.glob("docs/results/**/*.svg"))}
    training = (tmp_path / "docs/results/tutorials/ddp-2xH200.svg").read_text(encoding="utf-8")
    assert training.count("(lower is better)") == 3
