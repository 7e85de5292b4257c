# SPDX-License-Identifier: Apache-2.0
"""Contexts go by a tuning table, the same one on all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll import runtime
from tdcoll.testing import World
from tdcoll.tuning import SIMULATOR, Entry, Table, agreement

from .cases import ENTRY, changed, section, table_of


def gathered(table: Table | None, nbytes: int = 1024, n_pes: int = 4, **world: Any) -> list[float]:
    """Puts of each rank in one call with this table, and that the result is right."""
    simulated = World(n_pes, **world)

    def host(pe: int) -> float:
        with tdcoll.CollectiveContext(max_bytes_per_rank=nbytes, tuning=table) as ctx:
            x = torch.full((nbytes,), pe, dtype=torch.uint8)
            before = simulated.counts[pe].puts
            y = tdcoll.all_gather(x, ctx)
            ctx.check()
            assert y.view(n_pes, nbytes).eq(torch.arange(n_pes)[:, None]).all()
            return simulated.counts[pe].puts - before

    return simulated.run(host)


def test_a_context_goes_by_its_table() -> None:
    assert gathered(None) == [0] * 4  # the rules: LL, which has no puts
    assert gathered(table_of(Entry(2048, "1d", channels=4))) == [12] * 4
    assert gathered(table_of(Entry(2048, "1d", chunk=512))) == [6] * 4
    assert gathered(table_of(Entry(512, "1d", channels=4))) == [0] * 4
    other = Table((section(Entry(2048, "1d"), architecture="NVIDIA H200"),))
    assert gathered(other) == [0] * 4
    nodes = Table((section(Entry(2048, "1d", channels=2), ranks_per_node=2, nodes=2),))
    assert gathered(nodes, ranks_per_node=2) == [6] * 4  # two channels to three ranks, where 2D is the rule


def test_the_environment_names_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.json"
    monkeypatch.setenv("TDCOLL_TUNING", str(file))
    file.write_text(table_of(Entry(2048, "1d", channels=4)).text())
    assert gathered(None) == [12] * 4
    assert gathered(Table(())) == [0] * 4  # an argument goes before it
    file.write_text(changed((*ENTRY, "channels"), 0))
    with pytest.raises(ValueError, match=r"mine\.json: tables\[0\]\.entries\[1\]: channels: expected 1 to 512, got 0"):
        gathered(None)
    monkeypatch.setenv("TDCOLL_TUNING", "")
    assert gathered(None) == [0] * 4


def refused(make: Any) -> list[str]:
    """What each of two ranks says when they make a context."""

    def host(pe: int) -> str:
        try:
            make(pe)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "made it"

    return World(2).run(host)


def test_ranks_with_different_tables_find_out() -> None:
    tables = [Table((section(Entry(up_to, "1d")),), f"{up_to}.json") for up_to in (64, 128)]

    def make(pe: int) -> None:
        tdcoll.CollectiveContext(max_bytes_per_rank=8, tuning=tables[pe])

    for said in refused(make):
        assert said.startswith("RankMismatchError: the tuning table must be the same on all ranks; got rank 0: 64.json")


def test_a_rank_whose_table_cannot_be_read_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (ValueError, MemoryError):

        def load(kind: type[Exception] = kind) -> Table:
            if runtime.current().rank == 1:
                raise kind("t.json: no")
            return Table(())

        monkeypatch.setattr(agreement, "shipped", load)
        assert refused(lambda pe: tdcoll.CollectiveContext(max_bytes_per_rank=8)) == [
            "ValueError: CollectiveContext: rank 1 cannot read its tuning table: t.json: no",
            f"{kind.__name__}: t.json: no",
        ]


@pytest.mark.parametrize("kind", ["nested", "fifo", "folder"])
def test_a_file_that_is_no_table_is_a_value_error_on_all_ranks(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "t.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("[" * 100_000)

    def make(pe: int) -> None:
        tdcoll.CollectiveContext(max_bytes_per_rank=8, tuning=path if pe == 1 else None)

    told, found = refused(make)
    problem = f"tuning: {path}: expected "
    assert told.startswith(f"ValueError: CollectiveContext: rank 1 cannot read its tuning table: {problem}")
    assert found.startswith(f"ValueError: {problem}")


def test_gpus_of_several_kinds_go_by_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(Entry(2048, "1d", channels=4))
    names = {0: ("an old GPU", SIMULATOR)}
    monkeypatch.setattr(agreement, "architectures", lambda device: names.get(runtime.current().rank, (SIMULATOR,)))
    assert gathered(table) == [0] * 4
    names.clear()
    assert gathered(table) == [12] * 4
