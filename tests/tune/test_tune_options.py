# SPDX-License-Identifier: Apache-2.0
"""The command line of tune."""

from __future__ import annotations

from pathlib import Path

import pytest

from tdcoll.base.limits import COLLECTIVES
from tdcoll.tools.tune.command import Tune

WRONG = [
    ("", "the following arguments are required: -o"),
    ("-o no/such/folder/t.json", "there is no directory no/such/folder"),
    (f"-o {__file__}", "expected a tuning table in JSON"),
    ("-o t.json --chunks 4,513", "expected a whole number from 1 to 512, got '513'"),
    ("-o t.json --warps 3", "expected one of 1, 2, 4, 8, 16, 32, got '3'"),
    ("-o t.json --algorithms auto", "expected some of ll, direct, loop, ce, ring, 1d, 2d"),
    ("-o t.json --operation scatter", "all_to_all, broadcast; got scatter"),
    ("-o t.json --chunks ,", "expected at least 1 value, got ','"),
    ("-o t.json -b 0", "-b must be a positive number of bytes"),
    ("-o t.json -b 1", "-b must be a multiple of the dtype's 2 bytes"),
    ("-o t.json -b 2K -e 1K", "-b must be at most -e"),
    ("-o t.json -f 1", "-f must be a whole number of at least 2"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_a_wrong_command_line_ends_with_status_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        Tune.parse(arguments.split())
    error = capsys.readouterr().err
    assert error.startswith("usage: ")
    assert message in error


def test_values(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    options = Tune.parse(["-b", "1K", "-e", "5000", "-f", "2", "-o", str(file), "--warps", "4,8,4"])
    assert options.sizes == [1024, 2048, 4096]
    assert options.output == file
    assert options.warps == [4, 8]
    assert options.chunks == [1, 4, 16, 64, 256]
    assert options.operation == list(COLLECTIVES)
    assert (options.in_place, options.json, options.iterations) == (False, None, 40)


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(("arguments", "status"), [(["-b", "x", "-o", "t"], 2), (["--help"], 0)])
def test_rank_0_speaks_for_all(
    rank: str,
    arguments: list[str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After an error the others wait until it has, since the first rank that ends ends all."""
    waits: list[float] = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(SystemExit) as ended:
        Tune.parse(arguments)
    assert ended.value.code == status
    printed = capsys.readouterr()
    assert bool(printed.out + printed.err) == (rank == "0")
    assert bool(waits) == (rank != "0" and status == 2)
