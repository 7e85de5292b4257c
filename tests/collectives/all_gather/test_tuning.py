# SPDX-License-Identifier: Apache-2.0
"""Contexts go by a tuning table, the same one on all ranks, which may hand calls over to torch.distributed."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
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


# ---------------------------------------------------------------------- handing over


@pytest.fixture
def process_group(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A process group that works in a World; the bytes of its calls, of all ranks."""
    calls: list[int] = []
    group = SimpleNamespace(name=lambda: "fake")

    def all_gather_into_tensor(output: torch.Tensor, input: torch.Tensor, group: Any) -> None:
        assert output.dtype == input.dtype == torch.uint8
        calls.append(input.nbytes)
        owner = runtime.current()
        parts = owner.control.all_gather(range(owner.world_size), "fake", input.tolist())
        output.copy_(torch.tensor(parts, dtype=torch.uint8).flatten())

    monkeypatch.setattr(agreement, "_process_group", lambda group_, everybody, device: group)
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", all_gather_into_tensor)
    return calls


def test_calls_are_handed_over(process_group: list[int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tdcoll")
    table = Table((section(Entry(32, "1d"), Entry(None, "nccl")), section(Entry(None, "nccl"), in_place=True)))

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1024, tuning=table) as ctx:
            for call in range(3):
                x = (pe * 1000 + call + torch.arange(32)).to(torch.int16)
                for part in (x, x[:8].clone(), x[0].clone()):  # handed over, not handed over, no dimension
                    y = tdcoll.all_gather(part, ctx)
                    for rank, found in enumerate(y.view(4, -1)):
                        assert torch.equal(found, part.reshape(-1) + (rank - pe) * 1000)
            buffer = tdcoll.zeros((4, 6), torch.float64)
            buffer[pe] = pe
            tdcoll.all_gather_in_place(buffer, ctx)
            assert buffer[:, 0].tolist() == [0, 1, 2, 3]
            tdcoll.all_gather(x, ctx, algorithm="1d")
            assert tdcoll.all_gather(torch.zeros(0), ctx).shape == (0,)
            ctx.check()
            tdcoll.free(buffer)

    World(4).run(host)
    assert sorted(process_group) == [48] * 4 + [64] * 12
    said = [record.getMessage() for record in caplog.records]
    where = "on 4 rank(s) on 1 node(s) (4)"
    assert said == [f"all_gather: the tuning table leaves 64 bytes per rank {where} to torch.distributed (fake)"]


def test_one_rank_without_a_process_group_is_enough(process_group: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(name=lambda: "fake")
    monkeypatch.setattr(
        agreement, "_process_group", lambda given, everybody, device: group if runtime.current().rank else None
    )
    assert gathered(table_of(Entry(None, "nccl"))) == [0] * 4
    assert process_group == []


def test_which_process_group() -> None:
    cpu = torch.device("cpu")
    assert agreement._process_group(None, True, cpu) is None  # there is none
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        world = torch.distributed.group.WORLD
        assert agreement._process_group(None, True, cpu) is world
        assert agreement._process_group(world, False, cpu) is world
        assert agreement._process_group([0], True, cpu) is world
        assert agreement._process_group([0], False, cpu) is None  # ranks without a group of their own
        assert agreement._process_group(None, True, torch.device("cuda")) is None  # gloo waits for the GPU
    finally:
        torch.distributed.destroy_process_group()
