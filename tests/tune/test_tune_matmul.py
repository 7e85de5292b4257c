# SPDX-License-Identifier: Apache-2.0
"""Tuning of matmuls that communicate: what is tried, what is taken, and the table that comes
out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tdcoll import fused
from tdcoll.calls.tuning import Entry, Section, Table
from tdcoll.fused.matmul.policy import (
    COMPOSED,
    COPIED,
    FUSED,
    GATHER,
    ONE_SHOT,
    REDUCE,
    SCATTER,
    TWO_SHOT,
)
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World
from tdcoll.tools.measure.results import Row
from tdcoll.tools.tune import command
from tdcoll.tools.tune.matmul import MatmulCandidate, MatmulTuner, TuneMatmul


def tuner(name: str, world: int = 4) -> MatmulTuner:
    return MatmulTuner(name, Topology.of(0, range(world), [0] * world), 4096, 4096, (132, True))


CUBLAS = MatmulCandidate(COMPOSED)
DEFAULT = MatmulCandidate(FUSED)
WIDE = MatmulCandidate(FUSED, (128, 256, 64), 3, 8, pushers=16)
NARROW = MatmulCandidate(FUSED, (128, 128, 64), 4, 4, pushers=16)


# ---------------------------------------------------------------------- candidates


def test_what_is_tried() -> None:
    found = tuner(GATHER).candidates(4096)
    assert [found[0].name, found[-1].name] == ["fused", "composed"]
    # one of the tiles is the default's
    counts = Counter(one.algorithm for one in found)
    assert counts == {FUSED: 1 + 5 * 3 - 1, COPIED: 1 + 5 - 1, COMPOSED: 1}
    assert {one.pushers for one in found if one.algorithm == COPIED} == {None}
    assert "fused 128x128x64 4 stages 8 warps 32 pushers" in [one.name for one in found]
    lags = {one.lag for one in tuner(SCATTER).candidates(4096)}
    assert lags == {None, 1, 2}
    assert {one.algorithm for one in tuner(REDUCE).candidates(64)} == {ONE_SHOT, TWO_SHOT, COMPOSED}
    for name, rows in ((GATHER, 4096), (SCATTER, 4096), (REDUCE, 64)):
        plans = [tuner(name).plan(one, rows) for one in tuner(name).candidates(rows)]
        assert len(set(plans)) == len(plans)


@pytest.mark.parametrize(
    ("name", "rows", "world"),
    [(GATHER, 30, 4), (SCATTER, 30, 4), (REDUCE, 512, 4), (GATHER, 90, 9)],
)
def test_without_a_choice_nothing_is_tried(name: str, rows: int, world: int) -> None:
    """Shares are unequal, a sum has too many rows for one kernel, or there are too many ranks."""
    assert tuner(name, world).candidates(rows) == []


def row(rows: int, candidate: MatmulCandidate, us: float | None, check: str = "ok") -> Row:
    facts = {"operation": GATHER, "rows": rows, "candidate": asdict(candidate)}
    return Row(
        algorithm=candidate.name,
        peer=False,
        launch="graph",
        check=check,
        ranks=4,
        nodes=1,
        median_us=us,
        facts=facts,
    )


def test_the_fastest_is_taken_and_noise_changes_nothing() -> None:
    """Within the margin the choice for fewer rows stays, and then the default's own."""
    rows = [
        *(row(512, WIDE, 50.0), row(512, NARROW, 40.0), row(512, CUBLAS, 60.0)),
        *(row(128, CUBLAS, 20.2), row(128, NARROW, 20.0)),  # the default is cuBLAS
        *(row(1024, WIDE, 79.0), row(1024, NARROW, 80.0), row(1024, DEFAULT, 79.5)),
        *(row(2048, WIDE, 150.0), row(2048, NARROW, 170.0), row(2048, DEFAULT, 153.0)),
        *(row(4096, WIDE, 1.0, check="WRONG"), row(4096, DEFAULT, 300.0)),
        row(8192, WIDE, None, check="not run"),
    ]
    made = tuner(GATHER).section(rows, "NVIDIA Test", "a test")
    assert made is not None
    entries = (CUBLAS.entry(128), NARROW.entry(1024), DEFAULT.entry(4096))
    assert made == Section("NVIDIA Test", GATHER, 4, 1, False, entries, "a test")
    assert Table.parse(Table((made,)).text()).sections == (made,)
    assert tuner(GATHER).section(rows[-1:], "NVIDIA Test", "a test") is None


# ---------------------------------------------------------------------- the command


def test_the_simulator_checks_and_writes_nothing(
    rows_of: Callable[..., list[Any]], tmp_path: Path
) -> None:
    arguments = f"--rows 16 --depth 32 --columns 32 -o {tmp_path / 't.json'}"
    found = rows_of(TuneMatmul, arguments, 2, heap_bytes=1 << 26)
    assert {one.check for one in found} == {"ok"}
    names = {(one.facts["operation"], one.algorithm.split()[0]) for one in found}
    assert names == {
        *((GATHER, FUSED), (GATHER, COMPOSED), (SCATTER, FUSED), (SCATTER, COMPOSED)),
        *((REDUCE, ONE_SHOT), (REDUCE, COMPOSED)),
    }
    assert list(tmp_path.iterdir()) == []


def test_wrong_results_are_found(
    rows_of: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fused.matmul_reduce_scatter

    def careless(x: torch.Tensor, weight: torch.Tensor, **named: Any) -> torch.Tensor:
        made = real(x, weight, **named)
        return made if named["algorithm"].algorithm == COMPOSED else made + 1

    monkeypatch.setattr(fused, "matmul_reduce_scatter", careless)
    arguments = f"--operation {SCATTER} --rows 16 --depth 32 --columns 32 -o {tmp_path / 't.json'}"
    found = rows_of(TuneMatmul, arguments, 2, heap_bytes=1 << 26)
    right = {one.algorithm for one in found if one.check == "ok"}
    assert right == {COMPOSED}


def made_up_us(candidate: MatmulCandidate, rows: int) -> float:
    """Return a time: cuBLAS' is the shortest up to 64 rows, then that of one of the tiles."""
    if candidate.algorithm == COMPOSED:
        return 20.0 if rows <= 64 else 90.0
    return 30.0 if candidate.tile == (128, 256, 64) else 40.0


def test_the_table_is_written_after_every_size(
    tmp_path: Path, on_gpus: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.json"
    before = Section("NVIDIA Other", "all_gather", 2, 1, False, (Entry(None, "ll"),))
    file.write_text(Table((before,)).text())
    written: list[dict[str, list[tuple[int | None, str]]]] = []

    def entries() -> dict[str, list[tuple[int | None, str]]]:
        return {
            section.operation: [(one.up_to, one.algorithm) for one in section.entries]
            for section in Table.load(file).sections
        }

    def measure_size(bench: TuneMatmul, size: Any, *_: object) -> list[Row]:
        if bench.ranks.owner.rank == 0:
            written.append(entries())
        rows = []
        with bench.variants(size) as (variants, _):
            for variant in variants:
                found = bench._row(size, variant, "graph", None)
                found.median_us = made_up_us(
                    MatmulCandidate(**variant.facts["candidate"]), size.rows
                )
                rows.append(found)
        return rows

    monkeypatch.setattr(TuneMatmul, "measure_size", measure_size)
    arguments = f"--operation {GATHER},{SCATTER} --rows 128,16 --depth 32 --columns 32 -o {file}"
    options = TuneMatmul.parse(arguments.split())
    on_gpus(lambda pe: TuneMatmul(options).measure(lambda rows: None), 2)
    written.append(entries())
    other = {"all_gather": [(None, "ll")]}
    gather = {GATHER: [(16, COMPOSED), (128, FUSED)]}
    assert written == [
        other,
        other | {GATHER: [(16, COMPOSED)]},
        other | gather,
        other | gather | {SCATTER: [(16, COMPOSED)]},
        other | gather | {SCATTER: [(16, COMPOSED), (128, FUSED)]},
    ]
    (section,) = [one for one in Table.load(file).sections if one.operation == GATHER]
    assert section.entries[1].tile == (128, 256, 64)
    assert "-m tdcoll tune matmul --operation" in section.source


def test_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="matmuls are tuned on one node"):
        World(2, ranks_per_node=1).run(lambda pe: TuneMatmul(TuneMatmul.parse(["-o", "t.json"])))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "the following arguments are required: -o"),
        (f"-o {__file__}", "expected a tuning table in JSON"),
        ("-o t.json --operation all_gather", "expected some of all_gather_matmul, "),
        ("-o t.json --rows 0", "expected a whole number of at least 1, got '0'"),
        ("-o t.json --depth 12", "--depth must be a multiple of 8, got 12"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["matmul", *arguments.split()])
    error = capsys.readouterr().err
    assert error.startswith("usage: ")
    assert message in error
