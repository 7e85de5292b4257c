# SPDX-License-Identifier: Apache-2.0
"""Projections: the formulas for counts against the simulator, and times against numbers computed by hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import second

from tdcoll.bench import projection, report, rows
from tdcoll.bench.all_gather import AllGather
from tdcoll.bench.dense import plan_of
from tdcoll.bench.projection import Cluster, Counts, cluster, project_all_gather, project_sparse
from tdcoll.bench.sparse_all_reduce import SparseAllReduce
from tdcoll.bench.sparse_data import Vocabulary
from tdcoll.collectives.all_gather.policy import POLICY
from tdcoll.testing import World

COUNTED = ("puts", "put_bytes", "signals", "inter_node_puts", "inter_node_bytes")


# ---------------------------------------------------------------------- the option


def test_the_option() -> None:
    assert cluster("nodes=4,ranks=32,latency_us=5,GBps=48") == Cluster(4, 32, 5.0, 48.0)
    full = cluster("GBps=48.5,nodes=4,ranks=32,latency_us=0,intra_latency_us=1.5,intra_GBps=300,put_us=.2")
    assert full == Cluster(4, 32, 0.0, 48.5, 1.5, 300.0, 0.2)
    assert (full.per_node, full.topology.members[1]) == (8, tuple(range(8, 16)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes=4,ranks=32,latency_us=5", "expected also GBps=.."),
        ("nodes=4,ranks=30,latency_us=5,GBps=48", "must be a multiple of the 4 nodes; got 30"),
        ("nodes=0,ranks=30,latency_us=5,GBps=48", "nodes must be a whole number of at least 1, got '0'"),
        ("nodes=4,ranks=32,latency_us=-5,GBps=48", "latency_us must be a number, got '-5'"),
        ("nodes=4,ranks=32,latency_us=5,GBps=0", "GBps must be a number above 0, got '0'"),
        ("nodes=4,nodes=4", "each once; got 'nodes=4'"),
        ("speed=4", "each once; got 'speed=4'"),
        ("nodes", "each once; got 'nodes'"),
    ],
)
def test_what_is_wrong_with_it_is_said(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        cluster(text)
    assert message in str(refused.value)


def test_gpus_have_no_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tdcoll.bench.options.INTERPRETED", False)
    with pytest.raises(SystemExit):
        AllGather.parse(["--project", "nodes=4,ranks=32,latency_us=5,GBps=48"])
    assert "--project needs the counts of the simulator" in capsys.readouterr().err


# ---------------------------------------------------------------------- counts


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 1), second(4, 2), (3, 3), second(6, 2)])
def test_counts_of_all_gathers_are_the_simulators(ranks: int, nodes: int) -> None:
    algorithms = "ll,1d,2d,in-place" + ",ring" * (nodes == 1)
    sizes = ["-b", "1K", "-e", "16K" if (ranks, nodes) == (4, 2) else "1K", "-f", "16"]
    options = AllGather.parse([*sizes, "--algorithms", algorithms, "--peers="])
    world = World(ranks, ranks_per_node=ranks // nodes)
    found = world.run(lambda _: AllGather(options).measure(lambda row: None))[0]
    on = Cluster(nodes, ranks, 1.0, 1.0)
    for row in found:
        in_place = row.algorithm == "in-place"
        plan = plan_of(POLICY, row.algorithm, row.bytes_per_rank, on.topology)
        counts = projection.all_gather_counts(plan, row.bytes_per_rank, on.topology, in_place)
        assert {name: [getattr(counts, name)] * ranks for name in COUNTED} == {
            name: row.counts[name] for name in COUNTED
        }, row


@pytest.mark.parametrize(("ranks", "nodes"), [(3, 1), (4, 2)])
def test_counts_of_sparse_all_reduces_are_the_simulators(ranks: int, nodes: int) -> None:
    """Means of the ranks: which rank has more of the work is a matter of the hash."""
    arguments = "--rows 6 --dims 4 --num-rows 20 --distributions zipf1 --algorithms owner,gather --peers= --copy yes"
    options = SparseAllReduce.parse([*arguments.split(), "--eager", "--duplicates", "drawn"])
    world = World(ranks, ranks_per_node=ranks // nodes, heap_bytes=SparseAllReduce.heap_bytes(options, ranks))
    found = world.run(lambda _: SparseAllReduce(options).measure(lambda row: None))[0]
    assert len(found) == 2
    vocabulary = Vocabulary("zipf1", 20, torch.device("cpu"))
    for row in found:
        # The simulator makes four calls, with three inputs in turn.
        inputs = [[vocabulary.rows(6, row.duplicates, rank, i) for rank in range(ranks)] for i in (0, 1, 2, 0)]
        (made,) = project_sparse("", [row.algorithm], inputs, 16, 6, {}, Cluster(nodes, ranks, 1.0, 1.0))
        for name in COUNTED:
            assert getattr(made.counts, name) == pytest.approx(sum(row.counts[name]) / ranks), (row, name)


# ---------------------------------------------------------------------- times, by hand


def times(nbytes: int, names: list[str], on: Cluster) -> dict[str, float]:
    return {made.algorithm: made.time_us for made in project_all_gather(nbytes, names, {}, on)}


def test_a_large_all_gather_over_nodes() -> None:
    """4 nodes of 8 ranks, 1 MB each. 1D puts 24 segments to other nodes, 2D 3, and forwards."""
    on = Cluster(4, 32, latency_us=5.0, gbps=50.0, intra_latency_us=2.0, intra_gbps=300.0)
    found = times(1 << 20, ["1d", "2d", "in-place"], on)
    m = (1 << 20) / 1e3  # of a GB/s: µs
    assert found["1d"] == pytest.approx(5 + 24 * m / 50)  # 508 µs
    # Inside: 4 * 7 segments, 99.9 µs; between: 3 segments and, of 32 chunks, 3 * 7 last ones to forward: 71.9 µs.
    assert found["2d"] == pytest.approx(2 + 28 * m / 300)
    assert found["in-place (2d)"] == pytest.approx(5 + 2 + 28 * m / 300)
    slower = Cluster(4, 32, latency_us=5.0, gbps=25.0, intra_latency_us=2.0, intra_gbps=300.0)
    assert times(1 << 20, ["2d"], slower)["2d"] == pytest.approx(5 + 3 * m / 25 + 2 + 21 * m / 32 / 300)


def test_a_small_all_gather_over_nodes_is_latency() -> None:
    """1D crosses once; 2D crosses, and then inside. A cost per put turns that around."""
    on = Cluster(4, 32, latency_us=5.0, gbps=50.0, intra_latency_us=2.0, intra_gbps=300.0)
    found = times(1000, ["1d", "2d"], on)
    assert found["1d"] == pytest.approx(5 + 24 / 50)
    assert found["2d"] == pytest.approx(5 + 3 / 50 + 2 + 21 / 300)
    assert times(1000, ["ll"], on)["ll"] == pytest.approx(5 + 3 / 50 + 1 + 4 / 3 * 21 / 300)
    costly = Cluster(4, 32, latency_us=5.0, gbps=50.0, intra_latency_us=2.0, intra_gbps=300.0, put_us=0.5)
    found = times(1000, ["1d", "2d"], costly)
    assert found["1d"] == pytest.approx(5 + 24 / 50 + 24 * 0.5)
    assert found["2d"] == pytest.approx(5 + 3 / 50 + 2 + 21 / 300 + 3 * 0.5)


def test_one_node() -> None:
    on = Cluster(1, 8, latency_us=5.0, gbps=50.0, intra_latency_us=2.0, intra_gbps=300.0)
    assert times(3000, ["ll", "1d", "in-place", "auto"], on) == {
        "ll": pytest.approx(1 + 4 / 3 * 21 / 300),
        "1d": pytest.approx(2 + 21 / 300),
        "in-place (ll)": pytest.approx(1 + 4 / 3 * 21 / 300),
        "auto (ll)": pytest.approx(1 + 4 / 3 * 21 / 300),
    }
    m = (1 << 20) / 1e3
    assert times(1 << 20, ["in-place"], on) == {"in-place (direct)": pytest.approx(2 + 2 + 7 * m / 300)}
    assert "ll" not in times(1 << 20, ["ll", "1d"], on)
    m = (1 << 20) / 1e3
    assert times(1 << 20, ["ring"], on)["ring"] == pytest.approx(2 + 7 * m / 300)  # 3.5 µs a step, more than a latency
    assert times(3000, ["ring"], on)["ring"] == pytest.approx(2 + 3 / 300 + 6 * (2 + 3 / 300))
    assert "ring" not in times(3000, ["ring"], Cluster(2, 8, latency_us=5.0, gbps=50.0))


def test_a_rank_on_each_node_and_a_rank_alone() -> None:
    found = times(1000, ["1d", "2d"], Cluster(4, 4, latency_us=5.0, gbps=50.0))
    assert found == {"1d": pytest.approx(5 + 3 / 50), "2d": pytest.approx(5 + 3 / 50)}
    assert times(1000, ["1d"], Cluster(1, 1, latency_us=5.0, gbps=50.0)) == {"1d": 0.0}


def test_counts_of_the_simulator_are_taken_where_they_are() -> None:
    on = Cluster(2, 4, latency_us=5.0, gbps=50.0, intra_latency_us=2.0, intra_gbps=300.0)
    counted = {"1d": Counts(3, 53000.0, 3, 2, 50000.0, "counted")}
    one, two = project_all_gather(1000, ["1d"], counted, on)
    assert (one.counts.how, one.time_us) == ("counted", pytest.approx(5 + 50 / 50))
    assert (two.algorithm, two.counts.how) == ("2d", "formula")


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def test_sparse_rows_over_nodes() -> None:
    """Rows 1 and 2 are on both nodes, row 3 on one rank, row 4 on both ranks of one node."""
    indices = [ids(1, 2), ids(1, 3), ids(1, 4), ids(2, 4)]
    on = Cluster(2, 4, latency_us=5.0, gbps=50.0, intra_latency_us=2.0, intra_gbps=300.0)
    counts = projection.sparse_counts("owner", indices, 1000, 2, on.topology)
    # Nodes that have a row, less one, and the other node: 2 + 2 + 1 + 1.
    assert counts.crossings == 6 / 4
    # Read by a mate: row 1 on node 0, row 4 on node 1; stored to the mate: four rows on two nodes.
    assert counts.inside == (2 + 8) / 4
    assert counts.used == 8 * (4 + 2)
    exchange = 5 + 5 + 0.048 / 50 + 2 + 0.048 / 300  # in place, 2D, one chunk, one mate
    (made,) = project_sparse("", ["owner"], [indices], 1000, 2, {}, on)
    assert made.time_us == pytest.approx(exchange + 4 * 5 + 1.5 / 50 + 2.5 / 300)
    (gathered,) = project_sparse("", ["gather"], [indices], 1000, 2, {}, on)
    assert gathered.time_us == pytest.approx(5 + 5 + 2.048 / 50 + 2 + 2.048 / 300)


def test_sparse_rows_on_one_node() -> None:
    indices = [ids(1, 2), ids(1, 3), ids(1, 4), ids(2, 4)]
    on = Cluster(1, 4, latency_us=5.0, gbps=50.0, intra_latency_us=2.0, intra_gbps=300.0)
    (made,) = project_sparse("", ["owner", "auto"], [indices], 1000, 2, {}, on)
    # (8 - 4) read, 4 * 3 stored, of four ranks; three segments of lists.
    assert made.time_us == pytest.approx(2 + 2 + 0.144 / 300 + 2 * 2 + (4 + 12) / 4 / 300)


# ---------------------------------------------------------------------- as a command


def test_the_table_says_what_it_is() -> None:
    on = Cluster(4, 32, latency_us=5.0, gbps=50.0)
    text = projection.lines(project_all_gather(1 << 20, ["1d"], {}, on), on)
    assert text[0].startswith("PROJECTION, not a measurement (alpha-beta model, ")
    assert "32 ranks on 4 node(s); between nodes 5 µs and 50 GB/s per rank, inside 2 µs and 340 GB/s" in text[0]
    assert text[4] == ("| 1 MB per rank | 1d | formula | 992 | 32,505,856 | 992 | 768 | 25,165,824 | 508 | 1.00 × 1d |")
    assert text[5].startswith("| 1 MB per rank | 2d | formula | 96 | 3,145,728 | 96 | 96 | 3,145,728 | 88.4 | 5.7")


def test_a_projection_of_counted_rows(tmp_path: Path) -> None:
    """Taken from the rows, and kept with them."""
    counts = {name: [value, value] for name, value in zip(COUNTED, (1.0, 1024.0, 1.0, 1.0, 1024.0), strict=True)}
    common: dict[str, Any] = {"ranks": 2, "nodes": 2, "peer": False, "launch": "simulator", "check": "ok"}
    made = [rows.Row(bytes_per_rank=1024, algorithm="1d", counts=counts, **common)]
    text = projection.of_all_gathers(Cluster(2, 2, 5.0, 50.0), made)
    assert text[4] == "| 1 KB per rank | 1d | counted | 1 | 1,024 | 1 | 1 | 1,024 | 5.02 | 1.00 × 1d |"
    facts = {"tdcoll": "0.1.0", "environment": {}}
    head = {"benchmark": "all_gather", "command": "x", "started": "2031-02-03", "provenance": facts, "projection": text}
    rows.save(tmp_path / "a.json", head, made)
    shown = report.markdown(*rows.load(tmp_path / "a.json"))
    assert "\n".join(text) in shown


def test_a_projection_of_sparse_rows() -> None:
    row: Any = rows.SparseRow(
        ranks=2, nodes=1, algorithm="owner", peer=False, launch="simulator", check="ok", rows=12, dim=4, num_rows=500,
        dtype="float32", distribution="uniform",
    )  # fmt: skip
    text = projection.of_sparse(Cluster(2, 16, 5.0, 50.0), [row])
    assert len(text) == 5
    assert text[-1].startswith("| uniform, 12 × 4 | owner | formula | ")
