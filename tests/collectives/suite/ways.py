# SPDX-License-Identifier: Apache-2.0
"""Where the calls of a dense collective are made: by which algorithms, on which nodes, with which words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from kernel_mutants import AnyChange, Argument, Change, Mutant, dropped, missing, no_wait
from landings import make_facts

from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.plan import Facts
from tdcoll.calls.spec import Collective
from tdcoll.runtime.topology import Topology

from .calls import Calls, kinds_of

HEAP = 1 << 18
FLAGS = {"lamport_bytes": 0}
"""All words have flags."""

LOOPED = {"max_blocks": 6, "pieces": 9, "counts": (100, 90)}
"""On two ranks, thread blocks take several blocks of words, or several chunks, each."""

WRONG = r"AssertionError: rank \d+, call \d+ \(\w\): \d+ wrong elements"

Nodes = tuple[int, ...]
"""Ranks of each node."""


@dataclass(frozen=True)
class Dense:
    """What the suite has to know of a collective beyond its spec.

    Attributes:
        spec: of the collective.
        nodes: by algorithm, where it is run; the first has as few ranks as will do.
        counts: elements of a segment, which plans made by hand cut into two chunks.
        relays: by algorithm, from how many nodes on a rank may wait for what another passes on.
        grids: further cases, with the arguments of ``explore``.
        mutants: of its kernels.
    """

    spec: Collective
    nodes: Mapping[str, Sequence[Nodes]]
    counts: int
    relays: Mapping[str, int] = field(default_factory=dict)
    grids: Sequence[tuple[Calls, Mapping[str, Any]]] = ()
    mutants: Sequence[Mutant] = ()

    def __str__(self) -> str:
        return self.spec.name


def job(nodes: Nodes, **more: Any) -> dict[str, Any]:
    """Arguments of ``explore``."""
    return {"n_pes": sum(nodes), "ranks_per_node": nodes, "heap_bytes": HEAP, **more}


def topology_of(nodes: Nodes, group: Sequence[int] | None = None) -> Topology:
    """The topology of a group of ranks, as its first rank sees it."""
    ids = [node for node, size in enumerate(nodes) for _ in range(size)]
    pes = range(len(ids)) if group is None else group
    return Topology.of(0, pes, [ids[pe] for pe in pes])


@dataclass(frozen=True)
class Way:
    """An algorithm on some nodes. ``more``: further arguments of :class:`~.calls.Calls`."""

    dense: Dense
    algorithm: str
    nodes: Nodes
    more: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = " flags" * ("lamport_bytes" in self.more) + " looped" * ("max_blocks" in self.more)
        return f"{self.dense} {self.algorithm}{words} {'+'.join(map(str, self.nodes))}"

    def facts(self, nbytes: int = 0, topology: Topology | None = None, **more: Any) -> Facts:
        """Facts of a call on a usual context."""
        usual = {"stores": True, "ll_bytes": 1 << 20, "lamport_bytes": self.more.get("lamport_bytes", 1 << 20)}
        return make_facts(nbytes, topology or topology_of(self.nodes), **{**usual, **more})

    def handles(self, facts: Facts) -> bool:
        """Whether the algorithm can be had."""
        return self.dense.spec.algorithm(self.algorithm).supports(facts) is None

    def on(self, *layouts: Nodes) -> list[Way]:
        """The same on those of other nodes where it can be had."""
        return [replace(self, nodes=nodes) for nodes in layouts if self.served_kinds(topology_of(nodes))]

    def served_kinds(self, topology: Topology | None = None) -> str:
        """The kinds of calls (:class:`~.calls.Calls`) that can have the algorithm."""
        forms = {"o": {}, "i": {}, "s": {"symmetric": True}, "t": {"symmetric": True}, "p": {"in_place": True}}
        return "".join(
            kind for kind in kinds_of(self.dense.spec) if self.handles(self.facts(0, topology, **forms[kind]))
        )

    def calls(self, calls: str = "", **more: Any) -> Calls:
        """Calls of these kinds, as far as the algorithm can be had, and ``x``; by default of all kinds."""
        served = self.served_kinds()
        made = "".join(kind for kind in calls or served if kind in served + "x")
        while len(made) < len(calls):  # of another kind in their place
            made += served[len(made) % len(served)]
        return Calls(self.dense.spec, self.algorithm, made, **{"counts": (self.dense.counts,), **self.more, **more})


def ways_of(dense: Dense, every: bool = False) -> list[Way]:
    """The ways of a collective: each algorithm on its first nodes, or on ``every`` one; by words of each kind."""
    found = []
    for name, layouts in dense.nodes.items():
        how = dense.spec.algorithm(name)
        for nodes in layouts if every else layouts[:1]:
            way = Way(dense, name, nodes)
            found.append(way)
            if len(how.words) == 2:
                found.append(replace(way, more=FLAGS))
        if len(how.words) == 2 and how.payload(way.facts()).blocks == 0:
            found += [Way(dense, name, (2,), {**LOOPED, **words}) for words in ({}, FLAGS)]
        if how.any_blocks and how.copies is None:
            found.append(Way(dense, name, (2,), LOOPED))
    return found


def several(dense: Dense) -> list[tuple[str, Nodes]]:
    """Algorithms in turn, on one node and on several of two ranks."""
    found = []
    for nodes in ((3,), (2, 2)):
        names = [name for name in dense.nodes if "o" in Way(dense, name, nodes).served_kinds()]
        found.append((" ".join(names), nodes))
    return found


def all_dense() -> list[Dense]:
    """What the suite knows of all collectives."""
    return [import_module(f"collectives.suite.{name}").DENSE for name in COLLECTIVES]


def mutant(
    spec: Collective, name: str, changes: AnyChange | tuple[AnyChange, ...], expect: str = WRONG, *, algorithm: str,
    nodes: Nodes = (4,), calls: str = "oooo", world: Mapping[str, Any] | None = None, **case: Any,
) -> Mutant:  # fmt: skip
    """A :class:`~kernel_mutants.Mutant` that calls of a collective show."""
    changes = changes if isinstance(changes, tuple) else (changes,)
    name = f"{spec.name} {algorithm} {'+'.join(map(str, nodes))}: {name}"
    return Mutant(name, changes, expect, Calls(spec, algorithm, calls, **case), job(nodes, **world or {}))


def mutants_of_loops(spec: Collective) -> tuple[Mutant, ...]:
    """Of reductions whose thread blocks loop over chunks."""
    kernel = f"{spec.name}.kernels_loop.{spec.name}_loop"
    found = [
        ("the sum does not wait", no_wait(kernel, "tdl.wait_signals", "arrived"), WRONG),
        ("the second chunk has the signal of the first", Argument(kernel, "row", "sent", "0"), missing("signals")),
    ]
    if spec.scatters:  # an all-reduce hears from all twice
        found.append(("one slot", Change("group.segment", "slot(epoch)", "0"), WRONG))
    else:
        found += [
            ("sums are copied out before they are there", no_wait(kernel), WRONG),
            ("sums and parts have the same signals", Change(kernel, "chunks + summed", "summed"), missing("signals")),
        ]
    return tuple(mutant(spec, *each, algorithm="loop", nodes=(3,)) for each in found)


_LAST = "copy(stream, signal, stamp, 8)"
_DATA = """for at in range(0, moved.nbytes, chunk):
    copy(stream, moved.at + at, moved.begin + at, min(chunk, moved.nbytes - at))
"""


def mutants_of_copies(spec: Collective) -> tuple[Mutant, ...]:
    """Of the protocol of copy engines, shown by calls of any collective."""
    found = [
        ("a rank is written to before it has entered", no_wait("primitives.copies.enter", "tdl.wait_signals"), WRONG),
        (
            "nobody says that it has entered", dropped("primitives.copies.enter", "stores.release_to_all"),
            missing("ready"),
        ),
        ("nobody waits for the stamps", no_wait("primitives.copies.hear", "tdl.wait_signals"), WRONG),
        ("odd epochs", Change("group.begin_even_epoch", "epoch += epoch % 2", "pass"), missing("signals")),
    ]  # fmt: skip
    if not spec.reduces:  # whose specs name the function that is changed
        found += [
            ("the stamp before the data", Change("calls.copies._queue", _DATA + _LAST, _LAST + "\n" + _DATA), WRONG),
            ("no stamp", Change("calls.copies._queue", _LAST, "pass"), missing("signals")),
        ]
    if spec.segments == (1, 1):
        found.append(("one stamp for both hops", Argument("primitives.copies.hear", "row", "hop", "0"), WRONG))
    # An all-reduce alone hears from all twice. An all-gather before it in an even epoch has the same slot.
    how = {"calls": "oooo"} if spec.scatters or spec.gathers else {"calls": "xxoxxoo", "others": ("all_gather",)}
    return tuple(mutant(spec, *each, algorithm="ce", nodes=(3,), **how) for each in found)
