# SPDX-License-Identifier: Apache-2.0
"""Where the calls of a dense collective are made: by which algorithms, on which nodes, with which
words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from kernel_mutants import AnyChange, Argument, Change, Mutant, dropped, missing, no_wait
from landings import make_facts

from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.plan import Facts
from tdcoll.calls.spec import Collective
from tdcoll.runtime.topology import Topology

from .calls import Calls
from .kinds import OTHER, OUT_OF_PLACE, Kind, Kinds, kinds_of

HEAP = 1 << 18
FLAGGED = {"lamport_bytes": 0}
"""Arguments of :class:`~.calls.Calls`: all words have flags."""

LOOPED: dict[str, Any] = {"max_blocks": 6, "pieces": 9, "counts": (100, 90)}
"""Arguments of :class:`~.calls.Calls`: on two ranks, thread blocks take several blocks of words, or
several chunks, each."""

WRONG = r"AssertionError: rank \d+, call \d+ \([\w ]+\): \d+ wrong elements"

Nodes = tuple[int, ...]
"""Ranks of each node."""


@dataclass(frozen=True)
class Grid:
    """A case beyond those that follow from a collective's spec.

    Attributes:
        world: arguments of ``explore``.
    """

    calls: Calls
    world: Mapping[str, Any]


@dataclass(frozen=True)
class Dense:
    """What the suite has to know of a collective beyond its spec.

    Attributes:
        spec: of the collective.
        nodes: by algorithm, where it is run; the first has as few ranks as will do.
        counts: elements of a segment, which plans made by hand cut into two chunks.
        relays: by algorithm, from how many nodes on a rank may wait for what another passes on.
        grids: further cases.
        mutants: of its kernels.
    """

    spec: Collective
    nodes: Mapping[str, Sequence[Nodes]]
    counts: int
    relays: Mapping[str, int] = field(default_factory=dict)
    grids: Sequence[Grid] = ()
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
class AlgorithmCase:
    """An algorithm on some nodes.

    Attributes:
        flagged: all words have flags, for want of room for Lamport words.
        looped: the context has few thread blocks, each of which takes several pieces.
    """

    dense: Dense
    algorithm: str
    nodes: Nodes
    flagged: bool = False
    looped: bool = False

    def __str__(self) -> str:
        words = [str(self.dense), self.algorithm]
        if self.flagged:
            words.append("flags")
        if self.looped:
            words.append("looped")
        return " ".join([*words, "+".join(map(str, self.nodes))])

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of :class:`~.calls.Calls`."""
        options: dict[str, Any] = {"counts": (self.dense.counts,)}
        if self.looped:
            options |= LOOPED
        if self.flagged:
            options |= FLAGGED
        return options

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of a segment, in turn: as usual, none, and a third of them."""
        usual: tuple[int, ...] = self.options["counts"]
        return (*usual, 0, max(1, usual[0] // 3))[:3]

    def facts(self, nbytes: int = 0, topology: Topology | None = None, **more: Any) -> Facts:
        """Facts of a call on a usual context."""
        room = 1 << 20
        usual = {"stores": True, "ll_bytes": room, "lamport_bytes": 0 if self.flagged else room}
        return make_facts(nbytes, topology or topology_of(self.nodes), **{**usual, **more})

    def supports(self, facts: Facts) -> bool:
        """Whether the algorithm supports such a call."""
        return self.dense.spec.algorithm(self.algorithm).supports(facts) is None

    def on(self, *layouts: Nodes) -> list[AlgorithmCase]:
        """The same on those of other nodes that the algorithm supports."""
        return [replace(self, nodes=nodes) for nodes in layouts if self.kinds(topology_of(nodes))]

    def kinds(self, topology: Topology | None = None) -> Kinds:
        """The kinds of calls that the algorithm supports."""

        def supported(kind: Kind) -> bool:
            return self.supports(self.facts(0, topology, **kind.form))

        return tuple(filter(supported, kinds_of(self.dense.spec)))

    def calls(self, kinds: Sequence[Kind], **more: Any) -> Calls:
        """Calls of these kinds, which the algorithm must support."""
        unsupported = set(kinds) - {*self.kinds(), OTHER}
        assert not unsupported, f"{self} has no calls {', '.join(map(str, unsupported))}"
        return Calls(self.dense.spec, (self.algorithm,), tuple(kinds), **{**self.options, **more})


def cases_of(dense: Dense, every: bool = False) -> list[AlgorithmCase]:
    """The cases of a collective: each algorithm on its first nodes, or on ``every`` one; with words
    of each sort, and with few thread blocks if it loops."""
    found = []
    for name, layouts in dense.nodes.items():
        algorithm = dense.spec.algorithm(name)
        usual = AlgorithmCase(dense, name, layouts[0])
        few_blocks = AlgorithmCase(dense, name, (2,), looped=True)
        has_lamport_words = len(algorithm.words) == 2
        for nodes in layouts if every else layouts[:1]:
            case = replace(usual, nodes=nodes)
            found.append(case)
            if has_lamport_words:
                found.append(replace(case, flagged=True))
        if has_lamport_words and algorithm.payload(usual.facts()).blocks == 0:
            found.append(few_blocks)
            found.append(replace(few_blocks, flagged=True))
        if algorithm.works_with_any_grid and algorithm.copies is None:
            found.append(few_blocks)
    return found


def several(dense: Dense, nodes: Nodes) -> tuple[str, ...]:
    """The algorithms that these nodes support, to be taken in turn."""
    cases = [AlgorithmCase(dense, name, nodes) for name in dense.nodes]
    return tuple(case.algorithm for case in cases if OUT_OF_PLACE in case.kinds())


def all_dense() -> list[Dense]:
    """What the suite knows of all collectives."""
    return [import_module(f"collectives.suite.{name}").DENSE for name in COLLECTIVES]


def mutant(
    spec: Collective,
    name: str,
    changes: AnyChange | tuple[AnyChange, ...],
    expect: str = WRONG,
    *,
    algorithm: str,
    nodes: Nodes = (4,),
    kinds: Kinds = 4 * (OUT_OF_PLACE,),
    world: Mapping[str, Any] | None = None,
    **case: Any,
) -> Mutant:
    """A :class:`~kernel_mutants.Mutant` that calls of a collective show."""
    if not isinstance(changes, tuple):
        changes = (changes,)
    name = f"{spec.name} {algorithm} {'+'.join(map(str, nodes))}: {name}"
    calls = Calls(spec, (algorithm,), kinds, **case)
    return Mutant(name, changes, expect, calls, job(nodes, **world or {}))


def mutants_of_loops(spec: Collective) -> tuple[Mutant, ...]:
    """Of reductions whose thread blocks loop over chunks."""
    kernel = f"{spec.name}.kernels_loop.{spec.name}_loop"
    found = [
        ("the sum does not wait", no_wait(kernel, "tdl.wait_signals", "arrived"), WRONG),
        (
            "the second chunk has the signal of the first",
            Argument(kernel, "row", "sent", "0"),
            missing("signals"),
        ),
    ]
    if spec.scatters:  # an all-reduce hears from all twice
        found.append(("one slot", Change("group.segment", "slot(epoch)", "0"), WRONG))
    else:
        found += [
            ("sums are copied out before they are there", no_wait(kernel), WRONG),
            (
                "sums and parts have the same signals",
                Change(kernel, "chunks + summed", "summed"),
                missing("signals"),
            ),
        ]
    return tuple(mutant(spec, *each, algorithm="loop", nodes=(3,)) for each in found)


_RESULT = "primitives.epilogue.result_of"
_MADE = "made.to(total.dtype)"
_CALLED = "epilogue[0]({value}, rows, place - rows * width, inside, epilogue[2])"


def mutants_of_epilogues(spec: Collective) -> tuple[Mutant, ...]:
    """Of epilogues, by words, and by chunks with several tiles and chunks."""
    by_words = "ll" if spec.scatters else "one_shot"
    tiles = "sums._reduce_tiles" if spec.scatters else "all_reduce.kernels_direct._sum_tiles"
    rows: dict[str, Any] = {"counts": (45,), "columns": 9}
    halves: dict[str, Any] = {**rows, "dtype": torch.bfloat16}
    twice = Change(_RESULT, _MADE, _CALLED.format(value="made") + ".to(total.dtype)")
    before_the_mean = (
        Argument(_RESULT, "epilogue[0]", "total", "sum"),
        Change(_RESULT, _MADE, "finish(made.to(total.dtype), world, OP)"),
    )
    rounded_first = Argument(_RESULT, "epilogue[0]", "total", "total.to(DTYPE).to(total.dtype)")
    some_outside = Change("words._reduced", "nbytes // (4 // in_part)", "nbytes // 4 * in_part")
    first_chunk = Argument(tiles, "result_of", "out + offset", "out")
    found = []
    for algorithm in (by_words, "direct", "1d"):
        nodes = (2, 1) if algorithm == "1d" else (3,)
        how: dict[str, Any] = {"algorithm": algorithm, "nodes": nodes}
        named = [
            ("an epilogue is applied twice", twice, rows),
            ("a mean is divided behind its epilogue", before_the_mean, {**rows, "ops": ("mean",)}),
            ("a sum is rounded before its epilogue", rounded_first, halves),
            (
                "an epilogue is left out",
                Change(_RESULT, "epilogue[0] is None", "True"),
                rows,
            ),
            (
                "an epilogue makes -0.0",
                Change(_RESULT, "PROD", "0"),
                {"counts": (42,), "columns": 7, "specials": True},
            ),
        ]
        if algorithm == by_words:
            named.append(("elements behind the last whole word are outside", some_outside, halves))
        else:
            named.append(("all chunks have the place of the first", first_chunk, rows))
        found += [mutant(spec, name, change, **how, **more) for name, change, more in named]
    return tuple(found)


_STAMP = "engines.queue_stamp(side_stream.handle, peer, self._number)"
_DATA = "engines.queue(side_stream.handle, begin, landing, hop.copies[peer], self._chunk)"


def mutants_of_copies(spec: Collective) -> tuple[Mutant, ...]:
    """Of the protocol of copy engines, shown by calls of any collective."""
    enter = "primitives.copies.enter"
    hear = "primitives.copies.wait_arrivals"
    queue = "calls.copies.HopStep._queue"
    found = [
        ("a rank is written to before it has entered", no_wait(enter, "tdl.wait_signals"), WRONG),
        (
            "nobody says that it has entered",
            dropped(enter, "stores.release_to_all"),
            missing("ready"),
        ),
        ("nobody waits for the stamps", Argument(hear, "tdl.wait_signals", "stamp", "0"), WRONG),
        (
            "odd epochs",
            Change("group.begin_even_epoch", "epoch += epoch % 2", "pass"),
            missing("signals"),
        ),
    ]
    if not spec.reduces:  # whose specs name the function that is changed
        found += [
            (
                "the stamp before the data",
                Change(queue, f"{_DATA}\n{_STAMP}", f"{_STAMP}\n{_DATA}"),
                WRONG,
            ),
            ("no stamp", Change(queue, _STAMP, "pass"), missing("signals")),
        ]
    if spec.segments == (1, 1):
        found.append(("one stamp for both hops", Argument(hear, "row", "hop", "0"), WRONG))
    how: dict[str, Any] = {"kinds": 4 * (OUT_OF_PLACE,)}
    if not (spec.scatters or spec.gathers):
        # An all-reduce alone hears from all twice. An all-gather before it in an even epoch has the
        # same slot.
        how["kinds"] = (
            OTHER, OTHER, OUT_OF_PLACE, OTHER, OTHER, OUT_OF_PLACE, OUT_OF_PLACE,
        )  # fmt: skip
        how["others"] = ("all_gather",)
    return tuple(mutant(spec, *each, algorithm="ce", nodes=(3,), **how) for each in found)
