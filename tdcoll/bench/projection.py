# SPDX-License-Identifier: Apache-2.0
"""From counts to the time that a cluster would take: a projection, not a measurement.

The model is alpha-beta (Hockney's: a message of n bytes takes alpha + n / beta), taken along the longest chain of
messages that wait for each other. Inside a node alpha is ``intra_latency_us`` and beta ``intra_GBps``, between nodes
``latency_us`` and ``GBps``; rates are those of one rank in one direction, and all ranks send at once. Messages that do
not wait for each other share their link and nothing else, and the links inside and between nodes work at the same
time. ``put_us`` is what each put to another node costs its rank besides (0 if not given). For the counts of the rank
that has the most of them::

    between = latency + put_us * inter-node puts + inter-node bytes / GBps
    inside  = intra_latency + the other bytes / intra_GBps

    1D          max(between, inside)
    2D          max(between + intra_latency + last / intra_GBps, inside)
                last: what a rank forwards of the chunks that come last, one from each other node
    LL          intra_latency / 2 + 4/3 * (ranks - 1) * bytes / intra_GBps  (stores, each with a flag: they are not
                puts, and not waited for before a signal; on H200s they take half the time);
                over nodes: between + intra_latency / 2 + 4/3 * what came from other nodes, to each mate / intra_GBps
    direct      intra_latency + (ranks - 1) * bytes / intra_GBps        (stores and signals)
    ring        intra_latency + bytes / intra_GBps
                    + (ranks - 2) * max(bytes / intra_GBps, intra_latency + chunk / intra_GBps)
                (likewise; a step takes its bytes, or, if these are few, what the first chunk of the one before took.
                The rate is that of any stores: that one successor may be faster than all ranks is left out)
    in place    one crossing (latency, or intra_latency in a single node) more: the peers say that they are there;
                not for LL, which lands in memory of its own

    sparse, gather   an all-gather in place of lists with their rows
    sparse, owner    an all-gather in place of lists; then one latency for each further launch, in which every rank
                     hears from every other (2 on one node, nodes + 2 on several), put_us * row puts, and the bytes of
                     rows between nodes / GBps and inside / intra_GBps, one after the other

What it leaves out: launches, local copies and sums, congestion, and everything that the host does. So it compares
algorithms; as a time it is a lower bound of its assumptions.

Counts come from the simulator if the cluster has the shape of the simulated job. Else they are computed by the
formulas here, which tests compare with the simulator's counts; those of sparse rows from the row numbers of as many
ranks, and as the mean of the ranks, since a hash spreads the work.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tdcoll.bench.arithmetic import format_bytes, ratio
from tdcoll.bench.dense import IN_PLACE, plan_of
from tdcoll.bench.rows import Row, SparseRow
from tdcoll.bench.sparse_data import INPUTS, Vocabulary
from tdcoll.collectives._host.plan import Facts, Plan
from tdcoll.collectives.all_gather.policy import POLICY, put_chunks
from tdcoll.collectives.index_match.kernels import HEADER
from tdcoll.collectives.sparse_all_reduce.policy import EXCHANGE_CHANNELS
from tdcoll.limits import CHANNELS
from tdcoll.runtime.topology import Topology

__all__ = [
    *("Cluster", "Counts", "Projected", "all_gather_counts", "all_gather_us", "cluster", "lines", "of_all_gathers"),
    *("of_sparse", "project_all_gather", "project_sparse", "sparse_counts", "sparse_us"),
]

_FLAGGED = 4 / 3
"""Bytes that LL stores for each byte of data."""


@dataclass(frozen=True)
class Cluster:
    """What a projection assumes.

    Attributes:
        nodes, ranks: of the cluster; as many ranks on every node.
        latency_us, gbps: between nodes; ``intra_latency_us``, ``intra_gbps``: inside a node.
        put_us: of a rank's time for each put to another node.
    """

    nodes: int
    ranks: int
    latency_us: float
    gbps: float
    intra_latency_us: float = 2.0
    intra_gbps: float = 340.0
    put_us: float = 0.0

    @property
    def topology(self) -> Topology:
        """Of all ranks, seen from rank 0."""
        return Topology.of(0, range(self.ranks), [rank * self.nodes // self.ranks for rank in range(self.ranks)])

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return self.ranks // self.nodes

    def describe(self) -> str:
        """The assumptions in a line."""
        put = f", {self.put_us:g} µs for each put between nodes" if self.put_us else ""
        return (
            f"{self.ranks} ranks on {self.nodes} node(s); between nodes {self.latency_us:g} µs and {self.gbps:g} GB/s "
            f"per rank, inside {self.intra_latency_us:g} µs and {self.intra_gbps:g} GB/s{put}"
        )


_FIELDS = ("nodes", "ranks", "latency_us", "GBps", "intra_latency_us", "intra_GBps", "put_us")


def cluster(text: str) -> Cluster:
    """A type for argparse: ``"nodes=4,ranks=32,latency_us=5,GBps=48"``, and the others of a cluster if wanted."""
    given: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if name not in _FIELDS or not equals or name in given:
            raise argparse.ArgumentTypeError(
                f"expected {', '.join(f'{f}=..' for f in _FIELDS)}, each once; got {part!r}"
            )
        given[name] = value
    if missing := [name for name in _FIELDS[:4] if name not in given]:
        raise argparse.ArgumentTypeError(f"expected also {', '.join(f'{name}=..' for name in missing)}")
    numbers: dict[str, float] = {}
    for name, value in given.items():
        whole = name in ("nodes", "ranks")
        zero = name.endswith("_us")
        pattern = r"[1-9]\d*" if whole else r"\d+(\.\d+)?|\.\d+"
        if not re.fullmatch(pattern, value) or not (float(value) > 0 or zero):
            what = "a whole number of at least 1" if whole else "a number" if zero else "a number above 0"
            raise argparse.ArgumentTypeError(f"{name} must be {what}, got {value!r}")
        numbers[name] = float(value)
    nodes, ranks = int(numbers.pop("nodes")), int(numbers.pop("ranks"))
    if ranks % nodes:
        raise argparse.ArgumentTypeError(
            f"ranks, of all nodes together, must be a multiple of the {nodes} nodes; got {ranks}"
        )
    return Cluster(nodes, ranks, **{name.replace("GBps", "gbps"): value for name, value in numbers.items()})


@dataclass(frozen=True)
class Counts:
    """Of one call, of the rank with the most (formulas for sparse rows: the mean); as the simulator counts them.

    ``how`` is ``"counted"`` or ``"formula"``.
    """

    puts: float
    put_bytes: float
    signals: float
    inter_node_puts: float
    inter_node_bytes: float
    how: str = "formula"

    @classmethod
    def counted(cls, counts: Mapping[str, Sequence[float]]) -> Counts:
        """From a row's counts of each rank."""
        names = ("puts", "put_bytes", "signals", "inter_node_puts", "inter_node_bytes")
        return cls(**{name: max(counts[name]) for name in names}, how="counted")


# ---------------------------------------------------------------------- all-gather


def all_gather_counts(plan: Plan, nbytes: float, topology: Topology, in_place: bool) -> Counts:
    """Of each rank, in a group with as many ranks on every node. ``nbytes`` per rank."""
    nodes, world = topology.n_nodes, topology.world_size
    per_node = world // nodes
    if plan.algorithm in ("ll", "direct", "ring"):
        puts = (nodes - 1) * put_chunks(int(nbytes), plan, CHANNELS).channels if nodes > 1 else 0
        sent = (nodes - 1) * nbytes
        return Counts(puts, sent, puts, puts, sent)
    if plan.algorithm == "1d":
        segments, between, told = world - 1, world - per_node, world - 1
    else:  # to the rail; to the mates go stores
        segments, between, told = nodes - 1, nodes - 1, per_node - 1 + nodes - 1
    puts = plan.channels * segments
    # A put with a signal counts as both.
    signals = puts + (told if in_place else 0)
    return Counts(puts, segments * nbytes, signals, plan.channels * between, between * nbytes)


def all_gather_us(counts: Counts, plan: Plan, nbytes: float, on: Cluster, in_place: bool) -> float:
    """Projected µs of a call; see the module's docstring."""
    if on.ranks == 1:
        return 0.0
    entering = 0.0
    if in_place and plan.algorithm != "ll":
        entering = on.latency_us if on.nodes > 1 else on.intra_latency_us
    if plan.algorithm in ("ll", "direct") and on.nodes == 1:
        sent, latency = (on.ranks - 1) * nbytes, on.intra_latency_us
        if plan.algorithm == "ll":
            sent, latency = _FLAGGED * sent, latency / 2
        return entering + latency + sent / on.intra_gbps / 1e3
    if plan.algorithm == "ring":
        whole, first = nbytes / on.intra_gbps / 1e3, min(plan.chunk, nbytes) / on.intra_gbps / 1e3
        return entering + on.intra_latency_us + whole + (on.ranks - 2) * max(whole, on.intra_latency_us + first)
    inside_bytes = counts.put_bytes - counts.inter_node_bytes
    if plan.algorithm == "2d":  # to the mates, by stores: its own segment, and those of its rail
        inside_bytes = on.nodes * (on.per_node - 1) * nbytes
    inside = on.intra_latency_us + inside_bytes / on.intra_gbps / 1e3 if on.per_node > 1 else 0.0
    if on.nodes == 1:
        return entering + inside
    between = on.latency_us + on.put_us * counts.inter_node_puts + counts.inter_node_bytes / on.gbps / 1e3
    if plan.algorithm == "ll" and on.per_node > 1:
        passed_on = _FLAGGED * (on.nodes - 1) * (on.per_node - 1) * nbytes
        between += on.intra_latency_us / 2 + passed_on / on.intra_gbps / 1e3
    if plan.algorithm == "2d" and on.per_node > 1:
        last = (on.nodes - 1) * (on.per_node - 1) * nbytes / plan.channels
        between += on.intra_latency_us + last / on.intra_gbps / 1e3
    return entering + max(between, inside)


# ---------------------------------------------------------------------- sparse rows


@dataclass(frozen=True)
class _Rows:
    """What ranks bring, of one input.

    Attributes:
        held: distinct rows of all ranks, each rank's counted.
        union: of all ranks; ``per_node``: of each node's ranks, added up.
    """

    held: int
    union: int
    per_node: int


def _rows_of(indices: Sequence[torch.Tensor], topology: Topology) -> _Rows:
    held = sum(torch.unique(part).numel() for part in indices)
    union = torch.unique(torch.cat(list(indices))).numel()
    of_nodes = (torch.cat([indices[rank] for rank in ranks]) for ranks in topology.members)
    return _Rows(held, union, sum(torch.unique(part).numel() for part in of_nodes))


@dataclass(frozen=True)
class SparseCounts:
    """Means of the ranks, of one call.

    Attributes:
        exchange: of the all-gather of lists; ``plan``, ``used``: how it is made, and of how many bytes.
        crossings: rows put to another node.
        inside: rows that are read from, or stored to, another rank of the node.
    """

    exchange: Counts
    plan: Plan
    used: float
    crossings: float
    inside: float


def sparse_counts(
    algorithm: str, indices: Sequence[torch.Tensor], row_bytes: int, capacity_rows: int, topology: Topology
) -> SparseCounts:
    """Of ``"owner"`` or ``"gather"``, for the row numbers ``indices[rank]``.

    A row that c of W ranks have, on m of N nodes, k ranks each, crosses between nodes m - 1 + N - 1 times. Inside it is
    read c - m times and stored N (k - 1) times; on one node that is the c - 1 + W - 1 of
    :func:`~tdcoll.bench.arithmetic.moved_rows`.

    Args:
        row_bytes: of a row.
        capacity_rows: of the context, which decides how the exchange is cut.
    """
    found = _rows_of(indices, topology)
    world, nodes = topology.world_size, topology.n_nodes

    def list_bytes(rows: float, with_rows: bool) -> float:
        nbytes = 8 * (HEADER.value + rows)
        return -(-nbytes // 16) * 16 + rows * row_bytes if with_rows else nbytes

    gather = algorithm == "gather"
    used = sum(list_bytes(torch.unique(part).numel(), gather) for part in indices) / world
    room = -(-int(list_bytes(capacity_rows, gather)) // 16) * 16
    plan = POLICY.choose(Facts(room, topology, stores=nodes == 1, in_place=True, channels=EXCHANGE_CHANNELS))
    exchange = all_gather_counts(plan, used, topology, True)
    if gather:
        return SparseCounts(exchange, plan, used, 0.0, 0.0)
    crossings = found.per_node - found.union + found.union * (nodes - 1)
    inside = found.held - found.per_node + found.union * (world - nodes)
    return SparseCounts(exchange, plan, used, crossings / world, inside / world)


def sparse_us(counts: SparseCounts, algorithm: str, row_bytes: int, on: Cluster) -> float:
    """Projected µs of a call; see the module's docstring."""
    time = all_gather_us(counts.exchange, counts.plan, counts.used, on, True)
    if algorithm == "gather" or on.ranks == 1:
        return time
    if on.nodes == 1:
        return time + 2 * on.intra_latency_us + counts.inside * row_bytes / on.intra_gbps / 1e3
    time += (on.nodes + 2) * on.latency_us + on.put_us * counts.crossings
    return time + counts.crossings * row_bytes / on.gbps / 1e3 + counts.inside * row_bytes / on.intra_gbps / 1e3


# ---------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Projected:
    """One line: a size, an algorithm, its counts, and the time that follows."""

    size: str
    algorithm: str
    counts: Counts
    time_us: float


def project_all_gather(
    nbytes: int, names: Sequence[str], counted: Mapping[str, Counts], on: Cluster
) -> list[Projected]:
    """The lines of one size; on several nodes always with 1D and 2D.

    Args:
        names: what is asked for; what the cluster cannot do is left out.
        counted: counts of a simulated job of the cluster's shape, by name; empty if it has another.
    """
    wanted = [*names, *(name for name in ("1d", "2d") if on.nodes > 1 and name not in names)]
    made = []
    for name in wanted:
        try:
            plan = plan_of(POLICY, name, nbytes, on.topology)
        except ValueError:
            continue
        in_place = name == IN_PLACE
        counts = counted.get(name) or all_gather_counts(plan, nbytes, on.topology, in_place)
        shown = name if name == plan.algorithm else f"{name} ({plan.algorithm})"
        time = all_gather_us(counts, plan, nbytes, on, in_place)
        made.append(Projected(f"{format_bytes(nbytes)} per rank", shown, counts, time))
    return made


def project_sparse(
    size: str,
    names: Sequence[str],
    inputs: Sequence[Sequence[torch.Tensor]],
    row_bytes: int,
    capacity_rows: int,
    counted: Mapping[str, Counts],
    on: Cluster,
) -> list[Projected]:
    """The lines of one size: means over ``inputs[i][rank]``.

    Args:
        names: ``"owner"`` and ``"gather"``; others are left out.
        counted: as for :func:`project_all_gather`; which rows move inside a node is by the formula in any case.
    """
    made = []
    for name in names:
        if name not in ("owner", "gather"):
            continue
        found = [sparse_counts(name, indices, row_bytes, capacity_rows, on.topology) for indices in inputs]
        exchange = _mean([part.exchange for part in found])
        crossings = sum(part.crossings for part in found) / len(found)
        counts = counted.get(name)
        if counts is None:
            counts = Counts(
                puts=exchange.puts + crossings,
                put_bytes=exchange.put_bytes + crossings * row_bytes,
                signals=exchange.signals + _signals(name, on),
                inter_node_puts=exchange.inter_node_puts + crossings,
                inter_node_bytes=exchange.inter_node_bytes + crossings * row_bytes,
            )
        else:
            crossings = counts.inter_node_puts - exchange.inter_node_puts
            found = [dataclasses.replace(part, crossings=crossings) for part in found]
        time = sum(sparse_us(part, name, row_bytes, on) for part in found) / len(found)
        made.append(Projected(size, name, counts, time))
    return made


def _mean(parts: Sequence[Counts]) -> Counts:
    names = ("puts", "put_bytes", "signals", "inter_node_puts", "inter_node_bytes")
    return Counts(**{name: sum(getattr(part, name) for part in parts) / len(parts) for name in names})


def _signals(name: str, on: Cluster) -> int:
    """Signals by NVSHMEM after the exchange: one to every other rank in each launch; in one node they are stores."""
    return 0 if name == "gather" or on.nodes == 1 else (on.nodes + 2) * (on.ranks - 1)


_HEADINGS = ("size", "algorithm", "counts", "puts", "put bytes", "signals", "inter-node puts", "inter-node bytes")


def lines(projected: Sequence[Projected], on: Cluster) -> list[str]:
    """A Markdown table, with what was assumed; the last column compares with the first algorithm of each size."""
    first: dict[str, Projected] = {}
    table = []
    for item in projected:
        base = first.setdefault(item.size, item)
        faster = ratio(base.time_us, item.time_us)
        counts = item.counts
        numbers = (counts.puts, counts.put_bytes, counts.signals, counts.inter_node_puts, counts.inter_node_bytes)
        texts = [item.size, item.algorithm, counts.how, *(f"{value:,.10g}" for value in numbers)]
        table.append([*texts, f"{item.time_us:.3g}", "-" if faster is None else f"{faster:.2f} × {base.algorithm}"])
    headings = [*_HEADINGS, "projected µs", "speed"]
    return [
        f"PROJECTION, not a measurement (alpha-beta model, see tdcoll/bench/projection.py): {on.describe()}. Counts "
        "are per call and rank; launches, local work and congestion are left out.",
        "",
        *("| " + " | ".join(texts) + " |" for texts in (headings, ["---:"] * len(headings), *table)),
    ]


def of_all_gathers(on: Cluster, rows: Sequence[Row]) -> list[str]:
    """Project the counted rows to a cluster."""
    projected: list[Projected] = []
    for nbytes in dict.fromkeys(row.bytes_per_rank for row in rows):
        mine = [row for row in rows if row.bytes_per_rank == nbytes and not row.peer]
        same = [row for row in mine if (row.ranks, row.nodes) == (on.ranks, on.nodes) and row.counts]
        counted = {row.algorithm: Counts.counted(row.counts) for row in same if row.counts}
        projected += project_all_gather(nbytes, [row.algorithm for row in mine], counted, on)
    return lines(projected, on)


def of_sparse(on: Cluster, rows: Sequence[SparseRow]) -> list[str]:
    """Return what the counted rows would take on a cluster, whose ranks have row numbers of the same kind."""
    projected: list[Projected] = []
    for distribution, duplicates, count, dim in dict.fromkeys(row.size for row in rows):
        mine = [row for row in rows if row.size == (distribution, duplicates, count, dim) and not row.peer]
        if not mine:
            continue
        vocabulary = Vocabulary(distribution, mine[0].num_rows, torch.device("cpu"))
        inputs = [
            [vocabulary.rows(count, duplicates, rank, number) for rank in range(on.ranks)] for number in range(INPUTS)
        ]
        same = [row for row in mine if (row.ranks, row.nodes) == (on.ranks, on.nodes) and row.form == "coo"]
        counted = {row.algorithm: Counts.counted(row.counts) for row in same if row.counts}
        algorithms = list(dict.fromkeys(row.algorithm for row in mine))
        repeated = f", repeated {duplicates}" if duplicates != "0" else ""
        size = f"{distribution}{repeated}, {count:,} × {dim}"
        row_bytes = dim * getattr(torch, mine[0].dtype).itemsize
        projected += project_sparse(size, algorithms, inputs, row_bytes, count, counted, on)
    return lines(projected, on)
