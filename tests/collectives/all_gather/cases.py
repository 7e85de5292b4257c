# SPDX-License-Identifier: Apache-2.0
"""All-gathers as cases for `tdcoll.testing.explore`, and the tuning table that tests of tables share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import tdcoll
from tdcoll.collectives._host.plan import Facts, Plan
from tdcoll.collectives.all_gather.spec import SPEC
from tdcoll.primitives.group import EPOCH_SHIFT
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World
from tdcoll.tuning import SIMULATOR, Entry, Section, Table

NBYTES = 200
"""Bytes per rank: with 128-byte chunks, two channels, the second one short and no multiple of 16."""


def pattern(owner: int, call: int, nbytes: int) -> torch.Tensor:
    index = torch.arange(nbytes)
    return ((index * 7 + owner * 41 + call * 89) % 251).to(torch.uint8)


class Gathers:
    """Runs ``calls`` on every rank: ``o`` out of place, ``i`` in place, ``z`` of no bytes.

    Results are read late. The data name their origin.

    Args:
        algorithm: of the calls, or a plan; or several, for the calls in turn.
        calls: kinds of calls, in order.
        nbytes: bytes per rank.
        group: ranks that take part; None for all.
        first_epoch: of the first call.
    """

    def __init__(
        self,
        algorithm: str | Plan | Sequence[str],
        calls: str = "oioo",
        nbytes: int = NBYTES,
        group: Sequence[int] | None = None,
        first_epoch: int = 1,
    ) -> None:
        self.algorithms = [algorithm] if isinstance(algorithm, (str, Plan)) else list(algorithm)
        self.calls, self.nbytes, self.group, self.first_epoch = calls, nbytes, group, first_epoch

    def __call__(self, world: World) -> None:
        world.run(self.host)

    def host(self, pe: int) -> None:
        if self.group is not None and pe not in self.group:
            return
        nbytes = self.nbytes
        with tdcoll.CollectiveContext(self.group, max_bytes_per_rank=nbytes) as ctx:
            ctx.control.fill_((self.first_epoch - 1) << EPOCH_SHIFT.value)
            world = ctx.world_size
            buffer = tdcoll.empty(world * nbytes, torch.uint8, group=self.group)
            mine = slice(ctx.rank * nbytes, (ctx.rank + 1) * nbytes)
            for call, kind in enumerate(self.calls):
                algorithm = self.algorithms[call % len(self.algorithms)]
                if kind == "z":
                    tdcoll.all_gather(buffer[:0], ctx, algorithm=algorithm)
                    continue
                data = pattern(ctx.topology.pes[ctx.rank], call, nbytes)
                if kind == "i":
                    buffer[mine] = data
                    got = tdcoll.all_gather_in_place(buffer, ctx, algorithm)
                else:
                    got = tdcoll.all_gather(data, ctx, algorithm=algorithm)
                wanted = torch.cat([pattern(p, call, nbytes) for p in ctx.topology.pes])
                wrong = int((got != wanted).sum())
                assert wrong == 0, f"rank {ctx.rank}, call {call} ({kind}): {wrong} wrong bytes"
            ctx.check()
            tdcoll.free(buffer)
        assert tdcoll.heap_info().used == 0


def section(
    *entries: Entry, architecture: str = SIMULATOR, in_place: bool = False, source: str = "", ranks_per_node: int = 4,
    nodes: int = 1,
) -> Section:  # fmt: skip
    """A section of a table: for calls out of place on one node of four ranks, unless it says otherwise."""
    return Section(architecture, "all_gather", ranks_per_node, nodes, in_place, entries, source)


def choose(nbytes: int, topology: Topology, algorithm: Any = "auto", sections: Any = (), **facts: Any) -> Plan:
    """The plan for ``nbytes`` per rank, without its thread blocks, which differ between ranks of uneven nodes."""
    return replace(SPEC.choose(Facts(nbytes, topology, **facts), algorithm, sections), blocks=0)


def nodes_of(*sizes: int, rank: int = 0) -> Topology:
    """Topology of nodes with so many ranks each."""
    node_ids = [node for node, size in enumerate(sizes) for _ in range(size)]
    return Topology.of(rank, range(len(node_ids)), node_ids)


def table_of(*entries: Entry) -> Table:
    return Table((section(*entries),))


EXAMPLE = Table(
    (
        section(
            Entry(16 << 10, "ll", chunk=3072, num_warps=8),
            Entry((4 << 20) + 1, "1d", channels=16),
            Entry(None, "direct"),
        ),
        section(Entry(1 << 20, "1d", num_warps=4), in_place=True, source="somewhere"),
        section(Entry(None, "1d", chunk=1 << 20), in_place=True, architecture="sm_90"),
    )
)


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
