# SPDX-License-Identifier: Apache-2.0
"""Every public function has an example in its docstring, and each runs: on two simulated ranks, or
as a job of one.

So do the examples in docs/simulator.md; and the figures of the protocols show what the simulator
does today.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import re
import runpy
import sys
import xml.etree.ElementTree as xml
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from processes import python

import tdcoll
import tdcoll.calls.streams
import tdcoll.distributed
import tdcoll.fused
import tdcoll.language as tdl
from tdcoll.testing import World

WITHOUT = {
    "Explanation",
    "MemoryPlan",
    "PaddedRows",
    "Table",
    "Topology",
    "begin_epoch",
    "TdcollProcessGroup",
}
"""What calls return or take, and what only kernels call: docs/kernels.md has examples of them."""

JOBS = {f"tdcoll.{name}" for name in ("initialize", "finalize", "is_initialized", "jit")}
JOBS |= {
    f"tdcoll.distributed.{name}"
    for name in ("explain", "Options", "SparseGradientReducer", "sparse_hook")
}
"""Examples that join a job themselves, or define a kernel, which needs a file."""


def public() -> dict[str, Any]:
    found = {}
    for module in (tdcoll, tdcoll.distributed, tdcoll.fused):
        for name in module.__all__:
            thing = getattr(module, name)
            error = isinstance(thing, type) and issubclass(thing, Exception)
            if callable(thing) and not error and name not in WITHOUT:
                found[f"{module.__name__}.{name}"] = thing
    return found


PUBLIC = public()


def examples(name: str) -> list[doctest.Example]:
    found = doctest.DocTestParser().get_examples(inspect.getdoc(PUBLIC[name]) or "")
    assert found, f"{name} has no example"
    return found


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in JOBS])
def test_on_two_ranks(name: str) -> None:
    """Rank 1 compares the output: of a statement that is an expression, its ``repr``."""

    def host(pe: int) -> None:
        x = torch.ones(4)
        known: dict[str, Any] = {
            "torch": torch,
            "tdcoll": tdcoll,
            "tl": tl,
            "tdl": tdl,
            "x": x,
            "whole": torch.ones(4),
        }
        known |= {"gathered": torch.empty(8), "received": torch.empty(4), "mine": torch.empty(2)}
        for example in examples(name):
            # whose numbers are not the simulator's
            if not example.want or "H200s" in example.source:
                exec(example.source, known)
            else:
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    value = eval(example.source, known)
                got = printed.getvalue() + ("" if value is None else f"{value!r}\n")
                same = doctest.OutputChecker().check_output(
                    example.want, got, doctest.NORMALIZE_WHITESPACE
                )
                assert same or pe == 0, f"{example.source.strip()} gives {got.strip()}"

    World(2).run(host)


@pytest.mark.parametrize("name", sorted(JOBS))
def test_as_a_job(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import torch, tdcoll, tdcoll.distributed\nimport triton.language as tl, tdcoll.language as tdl\n"
    for example in examples(name):
        source = example.source.strip()
        code += (
            f"assert repr({source}) == {example.want.strip()!r}\n"
            if example.want
            else f"{source}\n"
        )
    (file := tmp_path / "example.py").write_text(code)
    for variable, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
    ):
        monkeypatch.setenv(variable, value)
    try:
        runpy.run_path(str(file))
    finally:
        tdcoll.finalize()
        if dist.is_initialized():
            dist.destroy_process_group()


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
EXAMPLE, ALL_SCHEDULES, STREAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


def test_example_of_the_page(tmp_path, capsys):
    file = tmp_path / "ring_example.py"  # a file, because Triton reads the source of kernels
    file.write_text(f"{EXAMPLE}\n{ALL_SCHEDULES}", encoding="utf-8")
    found = runpy.run_path(str(file))
    found["test_ring"]()
    found["test_ring_needs_its_fence"]()
    found["test_ring_in_all_schedules"]()
    printed = capsys.readouterr().out
    assert re.search(
        r"seed \d+, weak, .*AssertionError: call \d: \[.*\] should be \[\d\] \[raised by", printed
    )
    (shown,) = re.findall(r"^seed 0, .*(should be \[\d\] \[raised by pe\d host\])", PAGE, re.M)
    assert shown in printed
    assert re.search(r"replay\(case, \d+, n_pes=4, races=False\), with trace=", printed)


def test_streams_of_the_page():
    world = World(2, seed=2, weak=True)

    def host(pe):
        names = {name: torch.full((8,), 7 + pe) for name in ("data", "one")}
        names |= {name: tdcoll.zeros(8, torch.int64) for name in ("inbox", "stamp")}
        exec(STREAMS, {**vars(tdcoll.calls.streams), **names, "world": world, "peer": 1 - pe})
        tdcoll.barrier()
        assert names["inbox"].tolist() == names["stamp"].tolist() == [8 - pe] * 8

    world.run(host)


ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs/figures"
sys.path.insert(0, str(ROOT / "docs"))
sequences = importlib.import_module("sequences")


@pytest.mark.parametrize("name", sequences.PROTOCOLS)
def test_figures_are_current(name: str) -> None:
    protocol = sequences.PROTOCOLS[name]
    found = sequences.events(protocol)
    drawn = xml.parse(FIGURES / f"{name}.svg").findtext(
        ".//{http://purl.org/dc/elements/1.1/}description"
    )
    assert drawn is not None
    assert drawn.splitlines() == sequences.summary(found), "run python docs/figures.py"
    assert sequences.overwritten(protocol, found) == []
    if protocol.reason:
        earlier, message, later = sequences.reason(protocol, found)
        assert (
            sequences.held(protocol, found, earlier)[2]
            <= message.begin
            < message.end
            <= later.begin
        )


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
    done = python(str(ROOT / "docs/figures.py"), str(tmp_path), timeout=200)
    assert done.returncode == 0, done.stderr
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.svg")}
    assert made == {
        path.relative_to(ROOT)
        for path in (*FIGURES.glob("*.svg"), *ROOT.glob("docs/results/**/*.svg"))
    }
    training = (tmp_path / "docs/results/tutorials/ddp-2xH200.svg").read_text(encoding="utf-8")
    assert training.count("(lower is better)") == 3
