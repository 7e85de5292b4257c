# SPDX-License-Identifier: Apache-2.0
"""Tuning tables: their file, what a plan makes of them, and that the ranks of a context go by the same one."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tdcoll
from tdcoll import runtime
from tdcoll.collectives._host.plan import CHUNK_ALIGNMENT, Facts, Plan, is_word_chunk
from tdcoll.collectives.all_gather.policy import POLICY
from tdcoll.errors import RankMismatchError
from tdcoll.limits import CHANNELS
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World
from tdcoll.tuning import SIMULATOR, Entry, Section, Table, agreement, shipped

M = 1 << 20
ROOT = Path(__file__).resolve().parents[3]


def section(
    *entries: Entry, architecture: str = SIMULATOR, launch: str = "eager", in_place: bool = False, source: str = "",
    ranks_per_node: int = 4, nodes: int = 1,
) -> Section:  # fmt: skip
    return Section(architecture, "all_gather", ranks_per_node, nodes, launch, in_place, entries, source)


def choose(nbytes: int, topology: Topology, algorithm: Any = "auto", sections: Any = (), **facts: Any) -> Plan:
    return POLICY.choose(Facts(nbytes, topology, **facts), algorithm, sections)


def nodes_of(*sizes: int, rank: int = 0) -> Topology:
    node_ids = [node for node, size in enumerate(sizes) for _ in range(size)]
    return Topology.of(rank, range(len(node_ids)), node_ids)


EXAMPLE = Table(
    (
        section(
            Entry(16 << 10, "ll", chunk=3072, num_warps=8), Entry((4 << 20) + 1, "1d", channels=16), Entry(None, "nccl")
        ),
        section(Entry(1 << 20, "1d", num_warps=4), launch="graph", source="somewhere"),
        section(Entry(None, "1d", chunk=1 << 20), in_place=True, architecture="sm_90"),
    )
)


# ---------------------------------------------------------------------- the file


def test_a_table_comes_back_as_it_was() -> None:
    assert Table.parse(EXAMPLE.text()) == EXAMPLE
    assert Table.parse(Table(()).text()).sections == ()
    lines = EXAMPLE.text().splitlines()
    assert '    {"up_to": "16 KB", "algorithm": "ll", "chunk": "3 KB", "num_warps": 8},' in lines
    assert '    {"up_to": 4194305, "algorithm": "1d", "channels": 16},' in lines
    assert '    {"up_to": null, "algorithm": "nccl"}' in lines


def test_tables_of_version_2_are_of_the_all_gather() -> None:
    document = json.loads(EXAMPLE.text())
    document |= {"tuning": "all_gather", "version": 2}
    for section in document["tables"]:
        del section["operation"]
    assert Table.parse(json.dumps(document)) == EXAMPLE
    document["tables"][0]["operation"] = "all_gather"
    with pytest.raises(ValueError, match=r"tables\[0\]: expected no fields but architecture, ranks_per_node"):
        Table.parse(json.dumps(document))


def changed(path: tuple[Any, ...], value: Any) -> str:
    """The example with one value replaced, or a field removed (``...``)."""
    document = json.loads(EXAMPLE.text())
    place = document
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(document)


FIRST, ENTRY = ("tables", 0), ("tables", 0, "entries", 1)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 4, "t.json: version: expected 3 or 2, which this tdcoll reads, got 4"),
        (
            ("version",),
            1,
            "version: expected 3 or 2, which this tdcoll reads (version 1 is of an older tdcoll: measure again",
        ),
        (("version",), True, "version: expected 3"),
        (("tuning",), "all_gather", 't.json: tuning: expected one of "tdcoll", got "all_gather"'),
        ((*FIRST, "operation"), "all_gahter", 'tables[0]: operation: expected one of "all_gather"'),
        ((*FIRST, "operation"), ..., "t.json: tables[0]: expected an object with operation, got"),
        (("tables",), {}, "t.json: tables: expected a list, got {}"),
        (("tables", 1), 3, "t.json: tables[1]: expected an object with architecture, operation"),
        ((*FIRST, "nodes"), ..., "t.json: tables[0]: expected an object with nodes, got"),
        ((*FIRST, "node"), 1, "t.json: tables[0]: expected no fields but architecture"),
        ((*FIRST, "nodes"), 0, "t.json: tables[0]: nodes: expected a whole number of at least 1, got 0"),
        ((*FIRST, "nodes"), True, "tables[0]: nodes: expected a whole number of at least 1, got true"),
        ((*FIRST, "launch"), "jit", 'tables[0]: launch: expected one of "graph", "eager", got "jit"'),
        ((*FIRST, "in_place"), 0, "tables[0]: in_place: expected one of false, true, got 0"),
        ((*FIRST, "architecture"), 90, "tables[0]: architecture: expected a text, got 90"),
        ((*FIRST, "source"), 1, "tables[0]: source: expected a text"),
        (
            ("tables", 1, "launch"),
            "eager",
            "t.json: tables[1]: expected another architecture, operation, ranks_per_node, nodes",
        ),
        ((*ENTRY, "algorithm"), "nccl", "entries[1]: expected no channels with algorithm 'nccl'"),
        ((*ENTRY, "up_to"), "much", 'entries[1]: up_to: expected a number of bytes, such as 65536 or "64 KB", got "mu'),
        ((*ENTRY, "up_to"), 16384, "entries[1]: up_to: expected more than the 16384 bytes of the entry before"),
        ((*ENTRY, "up_to"), None, "entries[1]: up_to: expected a number of bytes: null is for the last entry"),
        ((*ENTRY, "channels"), 513, "entries[1]: channels: expected 1 to 512, got 513"),
        ((*ENTRY, "chunk"), "8 KB", "entries[1]: expected channels or chunk, got both"),
        ((*ENTRY, "num_warps"), 3, "entries[1]: num_warps: expected one of 1, 2, 4, 8, 16, 32, got 3"),
        ((*ENTRY, "warps"), 4, "entries[1]: expected no fields but up_to, algorithm, channels, chunk, num_warps"),
    ],
)
def test_what_is_wrong_is_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Table.parse(changed(path, value), "t.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*ENTRY, "algorithm"), "3d", "algorithm: expected one of ll, direct, ring, 1d, 2d, nccl, got 3d"),
        ((*ENTRY, "algorithm"), "auto", "entry up to 4194305: algorithm: expected one of ll, direct, ring, 1d"),
        ((*FIRST, "entries", 0, "chunk"), 4096, "chunk: expected 12 times a power of two, from 3072 (a word for each"),
        ((*FIRST, "entries", 0, "chunk"), 1536, "chunk: expected 12 times a power of two, from 3072 (a word for each"),
        ((*FIRST, "entries", 0, "chunk"), 24576, "(a word for each thread) to 12288 bytes, got 24576"),
        (
            ("tables", 2, "entries", 0, "chunk"),
            130,
            "in_place true: entry up to null: chunk: expected a multi",
        ),
    ],
)
def test_the_policy_knows_what_its_entries_may_say(path: tuple[Any, ...], value: Any, message: str) -> None:
    assert POLICY.sections(EXAMPLE.sections, "t.json") == EXAMPLE.sections
    table = Table.parse(changed(path, value), "t.json")
    with pytest.raises(ValueError, match=re.escape(message)):
        POLICY.sections(table.sections, table.name)

    def host(pe: int) -> None:
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64, tuning=table_of(Entry(64, "3d")))
        with pytest.raises(ValueError, match=r"a tuning table: .*: algorithm: expected one of ll, direct"):
            tdcoll.all_gather(torch.zeros(4), ctx)

    World(4).run(host)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"t\.json: expected a tuning table in JSON: "):
        Table.parse("{", "t.json")
    with pytest.raises(ValueError, match=r"none\.json: expected the file of a tuning table: .*No such file"):
        Table.load(tmp_path / "none.json")


def test_the_digest_is_of_what_it_says() -> None:
    again = Table(tuple(reversed(EXAMPLE.sections)), "another name")
    assert again.digest == EXAMPLE.digest
    other = Table((section(Entry(1 << 20, "1d", num_warps=8), launch="graph", source="somewhere"),))
    same = Table((section(Entry(1 << 20, "1d", num_warps=8), launch="graph", source="elsewhere"),))
    assert other.digest == same.digest != EXAMPLE.digest


def test_a_section_takes_the_place_of_that_of_its_kind() -> None:
    new = section(Entry(None, "1d"), launch="graph")
    merged = EXAMPLE.with_sections([new, section(Entry(None, "1d"), ranks_per_node=2)])
    assert merged.sections[:3] == (EXAMPLE.sections[0], new, EXAMPLE.sections[2])
    assert len(merged.sections) == 4


def test_a_name_goes_before_a_compute_capability() -> None:
    by_name = section(Entry(None, "ll"), architecture="NVIDIA H200")
    by_kind = section(Entry(None, "1d"), architecture="sm_90")
    graphs = section(Entry(None, "1d"), launch="graph", architecture="sm_90")
    table = Table((by_kind, by_name, graphs))
    assert table.of(("NVIDIA H200", "sm_90")) == (by_name, graphs)
    assert table.of(("NVIDIA H100", "sm_90")) == (by_kind, graphs)
    assert table.of(("NVIDIA B200", "sm_100")) == ()


def test_the_shipped_table_says_what_was_measured() -> None:
    """What `tune` wrote for docs/results, from the smallest size on."""
    table = shipped()
    assert table.sections
    for section in table.sections:
        (measured,) = [made for made in Table.load(ROOT / section.source).sections if made.kind == section.kind]
        assert section.entries
        assert section.entries == measured.entries[: len(section.entries)]


# ---------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("nbytes", "facts", "plan"),
    [
        (64, {}, Plan("ll", 1, 3072, 8)),
        (
            64,
            {"sections": (section(Entry(None, "ll", num_warps=32)),)},
            Plan("ll", 1, 1536, 4),
        ),  # as many as have words
        (
            1 << 20,
            {"sections": (section(Entry(None, "ll", channels=1)),), "ll_bytes": 1 << 20},
            Plan("ll", 86, 12288, 8),
        ),
        (16 << 10, {}, Plan("ll", 6, 3072, 8)),
        ((16 << 10) + 1, {}, Plan("1d", 15, 1152, 8)),
        (4 << 20, {}, Plan("1d", 16, 256 << 10, 16)),
        ((4 << 20) + 2, {"hand_over": True}, Plan("nccl", 0, 0, 0)),
        ((4 << 20) + 2, {}, choose((4 << 20) + 2, nodes_of(4))),  # nobody to hand over to
        (64, {"graph": True}, Plan("1d", 1, 128, 4)),
        ((1 << 20) + 1, {"graph": True}, choose((1 << 20) + 1, nodes_of(4))),  # beyond the last entry
        (64, {"in_place": True, "ll_bytes": -1}, Plan("1d", 1, 128, 8)),
        (8 << 20, {"in_place": True, "ll_bytes": -1}, Plan("1d", 8, 1 << 20, 16)),
        (8 << 20, {"in_place": True, "ll_bytes": -1, "graph": True}, choose(8 << 20, nodes_of(4), in_place=True)),
        (64, {"ll_bytes": -1}, Plan("1d", 1, 128, 8)),  # ranks that cannot store to each other
        (64, {"algorithm": "1d"}, Plan("1d", 1, 128, 8)),  # a wish goes before the table
        (1 << 20, {"algorithm": "1d"}, Plan("1d", 16, 64 << 10, 8)),  # whose chunks it gets
        (8 << 20, {"algorithm": "1d", "hand_over": True}, choose(8 << 20, nodes_of(4))),
    ],
)
def test_what_a_table_makes_of_a_call(nbytes: int, facts: dict[str, Any], plan: Plan) -> None:
    facts = {"ll_bytes": 16 << 10, "sections": EXAMPLE.sections, **facts}
    assert choose(nbytes, nodes_of(4), **facts) == plan


def test_a_table_of_another_shape_says_nothing() -> None:
    for sizes in ((8,), (4, 4), (4, 2), (2, 2)):
        assert choose(1 << 20, nodes_of(*sizes), sections=EXAMPLE.sections) == choose(1 << 20, nodes_of(*sizes))


def test_nothing_is_handed_over_that_has_no_bytes() -> None:
    sections = (section(Entry(None, "nccl")),)
    assert choose(1, nodes_of(4), sections=sections, hand_over=True).algorithm == "nccl"
    assert choose(0, nodes_of(4), sections=sections, hand_over=True).algorithm == "1d"


@given(
    st.integers(0, 1 << 26),
    st.sampled_from(("ll", "ring", "1d", "2d")),
    st.one_of(st.none(), st.integers(1, CHANNELS)),
    st.one_of(st.none(), st.integers(7, 20)),
)
def test_chunks_of_an_entry_cover_the_bytes(nbytes: int, algorithm: str, channels: int | None, chunk: int | None):
    if chunk is not None:
        chunk = 3 << min(chunk, 12) if algorithm == "ll" else 1 << chunk
    how = {"chunk": chunk} if chunk is not None and channels is None else {"channels": channels}
    nbytes = nbytes % ((16 << 10) + 1) if algorithm == "ll" else nbytes
    plan = choose(
        nbytes, nodes_of(4), sections=(section(Entry(None, algorithm, **how)),), ll_bytes=16 << 10, stores=True
    )
    assert plan.algorithm == algorithm
    assert plan.channels * plan.chunk >= nbytes
    assert (plan.channels - 1) * plan.chunk < max(nbytes, 1)
    if algorithm == "ll":
        assert is_word_chunk(plan.chunk)
        assert plan.chunk >= 12 * 32 * plan.num_warps or plan.num_warps == 1
    else:
        assert plan.channels <= CHANNELS
        assert plan.chunk % CHUNK_ALIGNMENT == 0
    # And it is a plan that somebody may ask for.
    assert choose(nbytes, nodes_of(4), plan, ll_bytes=16 << 10, stores=True) == plan


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan("nccl", 1, 128, 4), "a Plan's algorithm must be one of ll, direct, ring, 1d, 2d; got 'nccl'"),
        (Plan("ll", 1, 4096, 4), "algorithm='ll' needs the same number of ranks on every node and"),
        (Plan("1d", 2, 100, 4), "must be a multiple of 16 bytes and cover all 1000 bytes; got 2 of 100 bytes"),
        (Plan("1d", 2, 480, 4), "cover all 1000 bytes; got 2 of 480"),
        (Plan("1d", CHANNELS + 1, 128, 4), f"channels must be 1 to {CHANNELS}, got {CHANNELS + 1}"),
    ],
)
def test_plans_that_cannot_be_launched(plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        choose(1000, nodes_of(4), plan)


# ---------------------------------------------------------------------- contexts


def table_of(*entries: Entry) -> Table:
    return Table((section(*entries),))


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
        except (ValueError, RankMismatchError) as error:
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
    def load() -> Table:
        if runtime.current().rank == 1:
            raise ValueError("t.json: no")
        return Table(())

    monkeypatch.setattr(agreement, "shipped", load)
    assert refused(lambda pe: tdcoll.CollectiveContext(max_bytes_per_rank=8)) == [
        "RankMismatchError: CollectiveContext: rank 1 cannot read its tuning table: t.json: no",
        "ValueError: t.json: no",
    ]


def test_gpus_of_several_kinds_go_by_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(Entry(2048, "1d", channels=4))
    names = {0: ("an old GPU", SIMULATOR)}
    monkeypatch.setattr(agreement, "architectures", lambda device: names.get(runtime.current().rank, (SIMULATOR,)))
    assert gathered(table) == [0] * 4
    names.clear()
    assert gathered(table) == [12] * 4


def test_graphs_are_prepared_by_the_eager_call() -> None:
    """What a graph would capture differs from what an eager call does, and is there after one."""
    table = Table((section(Entry(None, "1d", channels=2)), section(Entry(None, "1d", channels=4), launch="graph")))

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1024, tuning=table) as ctx:
            tdcoll.all_gather(torch.zeros(256), ctx)
            eager, graph = (
                ctx.known(("all_gather", 1024, "auto", None, False, False, captured)) for captured in (False, True)
            )
            assert (eager._launches[0]._grid[0], graph._launches[0]._grid[0]) == (2 * 7, 4 * 7)
        with tdcoll.CollectiveContext(max_bytes_per_rank=1024, tuning=table_of(Entry(64, "1d"))) as ctx:
            tdcoll.all_gather(torch.zeros(256), ctx)
            eager, graph = (
                ctx.known(("all_gather", 1024, "auto", None, False, False, captured)) for captured in (False, True)
            )
            assert eager is graph

    World(4).run(host)


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
        parts = owner.control.all_gather(range(owner.world_size), "fake", input.clone())
        output.copy_(torch.cat(parts))

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


def test_a_caller_may_give_a_plan() -> None:
    simulated = World(4)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1024, debug=True) as ctx:
            before = simulated.counts[pe].puts
            y = tdcoll.all_gather(torch.full((100,), pe), ctx, algorithm=Plan("1d", 8, 128, 4))
            assert y.view(4, 100)[:, 0].tolist() == [0, 1, 2, 3]
            ctx.check()
            assert simulated.counts[pe].puts - before == 8 * 3
            with pytest.raises(RankMismatchError):
                tdcoll.all_gather(torch.zeros(8), ctx, algorithm=Plan("1d", 1, 128, 4 if pe else 8))
            with pytest.raises(ValueError, match="cover all 32 bytes"):
                tdcoll.all_gather(torch.zeros(8), ctx, algorithm=Plan("1d", 1, 16, 4))

    simulated.run(host)
