# SPDX-License-Identifier: Apache-2.0
"""The index-matching benchmark, and the kernel that it compares with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tdcoll.bench import index_match as benchmark
from tdcoll.bench.kernels import match_by_equality
from tdcoll.testing import World


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rows 501", "501 different rows are more than the 500"),
        ("--lists 0", "expected a whole number of at least 1"),
        ("--methods hash", "expected some of bitmap, search, auto"),
        ("--peers cub", "expected some of unique, searchsorted, equality"),
        ("--distributions flat", "expected uniform or zipf"),
        ("--iterations 1", "expected a whole number of at least 2"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.Matching.parse(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_line() -> None:
    usual = benchmark.Matching.parse([])
    assert (usual.lists, usual.rows, usual.launches) == (8, [40], ["graph", "eager"])
    given = benchmark.Matching.parse(["--lists", "3", "--rows", "5,9", "--methods", "auto", "--peers=", "--eager"])
    assert (given.lists, given.rows, given.methods, given.peers, given.launches) == (3, [5, 9], ["auto"], [], ["eager"])


def run(arguments: str) -> list[Any]:
    options = benchmark.Matching.parse(arguments.split())
    return World(1).run(lambda _: benchmark.Matching(options).measure(lambda row: None))[0]


TASKS = [
    *(("union", method) for method in ("bitmap", "search", "auto")),
    *(("build", method) for method in ("bitmap", "search", "auto")),
    *(("match", "match_indices"), ("union", "unique"), ("match", "searchsorted"), ("match", "equality")),
]


def test_everything_is_checked() -> None:
    rows = run("--lists 3 --rows 20 --distributions zipf1")
    assert [(row.task, row.algorithm) for row in rows] == TASKS
    assert {row.check for row in rows} == {"ok"}
    assert {row.launch for row in rows} == {"simulator"}
    assert 20 <= rows[0].union_rows <= 60
    assert (rows[0].lists, rows[0].rows, rows[0].num_rows) == (3, 20, 500)


def test_comparing_all_ends_where_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_MOST_COMPARISONS", 300)
    row = run("--lists 2 --rows 20 --distributions uniform --peers equality")[-1]
    assert (row.algorithm, row.check) == ("equality", "ok")
    assert row.rows == 300 // 40
    assert row.note == "7 of 20 ids"


@pytest.mark.parametrize(
    ("name", "task", "spoilt"),
    [
        ("match_indices", "match", lambda real: lambda ids, union: real(ids, union).roll(1)),
        ("match_lists", "union", lambda real: lambda lists, *rest: real(lists.flip(0), *rest)),
    ],
)
def test_wrong_answers_are_rows_that_say_so(name: str, task: str, spoilt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, name, spoilt(getattr(benchmark, name)))
    rows = run("--lists 3 --rows 10 --distributions uniform --methods auto --peers=")
    assert [(row.task, row.check) for row in rows] == [
        (other, "WRONG" if other == task else "ok") for other in ("union", "build", "match")
    ]
    assert "places of input 0" in next(row.note for row in rows if row.check == "WRONG")


@pytest.mark.parametrize(("size", "count"), [(1, 1), (5, 40), (33, 300), (32, 256)])
def test_comparing_all_finds_what_is_there(size: int, count: int) -> None:
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(size))[:count].sort().values
    local = torch.cat([ids[torch.arange(size) % count][: size - size // 3], torch.arange(2000, 2000 + size // 3)])
    out = torch.full((size + 1,), 99)
    World(1).run(lambda _: match_by_equality[(-(-size // 8),)](local, size, ids, count, out, 8, 64))
    expected = [ids.tolist().index(i) if i in ids else -1 for i in local.tolist()]
    assert out.tolist() == [*expected, 99]
